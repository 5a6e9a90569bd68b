"""EXO Gym's collectives, in place on the stacked tensors of a step."""

from vsim.strategy.communicate import all_gather, all_reduce, broadcast

__all__ = ["all_gather", "all_reduce", "broadcast"]
