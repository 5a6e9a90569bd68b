"""Runs that train together: in groups that fit into memory, saved and resumed as one, the best of them to the end."""

from vsim.race.race import Race, saving_in
from vsim.race.runner import Runner

__all__ = ["Race", "Runner", "saving_in"]
