"""Under the name that EXO Gym has them: communication modules, which live in `vsim.strategy.base`."""

from vsim.strategy.base import CommunicateOptimizeStrategy, CommunicationModule

__all__ = ["CommunicateOptimizeStrategy", "CommunicationModule"]
