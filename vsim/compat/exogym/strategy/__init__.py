"""EXO Gym's strategies, communication modules and selectors."""

from vsim.compat.exogym.strategy.communicate_optimize_strategy import CommunicateOptimizeStrategy, CommunicationModule
from vsim.compat.exogym.strategy.demo import DeMoStrategy
from vsim.compat.exogym.strategy.diloco import DiLoCoCommunicator, DiLoCoStrategy
from vsim.compat.exogym.strategy.federated_averaging import AveragingCommunicator, FedAvgStrategy
from vsim.compat.exogym.strategy.optim import OptimSpec, ensure_optim_spec
from vsim.compat.exogym.strategy.sparta import (
    IndexSelector,
    PartitionedIndexSelector,
    RandomIndexSelector,
    ShuffledSequentialIndexSelector,
    SparseCommunicator,
    SPARTAStrategy,
)
from vsim.compat.exogym.strategy.sparta_diloco import SPARTADiLoCoStrategy
from vsim.compat.exogym.strategy.strategy import SimpleReduceStrategy, Strategy

__all__ = [
    "AveragingCommunicator",
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "DeMoStrategy",
    "DiLoCoCommunicator",
    "DiLoCoStrategy",
    "FedAvgStrategy",
    "IndexSelector",
    "OptimSpec",
    "PartitionedIndexSelector",
    "RandomIndexSelector",
    "SPARTADiLoCoStrategy",
    "SPARTAStrategy",
    "ShuffledSequentialIndexSelector",
    "SimpleReduceStrategy",
    "SparseCommunicator",
    "Strategy",
    "ensure_optim_spec",
]
