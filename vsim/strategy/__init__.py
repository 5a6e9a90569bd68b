"""The strategies: how the nodes of a cluster train and what they tell each other."""

from vsim.optim import OptimSpec
from vsim.strategy.base import CommunicateOptimizeStrategy, CommunicationModule, Strategy
from vsim.strategy.diloco import DiLoCoCommunicator, DiLoCoStrategy
from vsim.strategy.fedavg import AveragingCommunicator, FedAvgStrategy
from vsim.strategy.reduce import GradientAverage, SimpleReduceStrategy

__all__ = [
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
