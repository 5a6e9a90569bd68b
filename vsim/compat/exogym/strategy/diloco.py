"""EXO Gym's DiLoCo."""

from vsim import strategy
from vsim.compat.exogym.spellings import translated

DiLoCoStrategy = translated(strategy.DiLoCoStrategy, ["inner_optim", "outer_optim", "H"])
DiLoCoCommunicator = translated(strategy.DiLoCoStrategy, ["H", "outer_optim"])
