"""The strategies: how the nodes of a cluster train and what they tell each other."""

from typing import Any

from vsim.optim import OptimSpec
from vsim.strategy.base import CommunicateOptimizeStrategy, CommunicationModule, Strategy
from vsim.strategy.diloco import DiLoCoCommunicator, DiLoCoStrategy
from vsim.strategy.fedavg import AveragingCommunicator, FedAvgStrategy
from vsim.strategy.reduce import GradientAverage, SimpleReduceStrategy

# Short name → class and the arguments that the command line gives it where the user does not.
STRATEGIES: dict[str, tuple[type[Strategy], dict[str, Any]]] = {
    "allreduce": (SimpleReduceStrategy, {}),
    "fedavg": (FedAvgStrategy, {"H": 10}),
    "diloco": (DiLoCoStrategy, {"H": 10}),
}

__all__ = [
    "STRATEGIES",
    "AveragingCommunicator",
    "CommunicateOptimizeStrategy",
    "CommunicationModule",
    "DiLoCoCommunicator",
    "DiLoCoStrategy",
    "FedAvgStrategy",
    "GradientAverage",
    "OptimSpec",
    "SimpleReduceStrategy",
    "Strategy",
]
