"""EXO Gym's SPARTA, and its selectors of entries."""

from vsim import strategy
from vsim.compat.exogym.spellings import SPELLINGS, translated
from vsim.strategy import (
    IndexSelector,
    PartitionedIndexSelector,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
)

__all__ = [
    "IndexSelector",
    "PartitionedIndexSelector",
    "RandomIndexSelector",
    "SPARTAStrategy",
    "ShuffledSequentialIndexSelector",
    "SparseCommunicator",
]

SPARTAStrategy = translated(strategy.SPARTAStrategy, ["inner_optim", "p_sparta", "sparta_interval"])
SparseCommunicator = translated(strategy.SPARTAStrategy, ["index_selector"], {**SPELLINGS, "every": "sparta_interval"})
