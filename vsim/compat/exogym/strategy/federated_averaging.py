"""EXO Gym's federated averaging."""

from vsim import strategy
from vsim.compat.exogym.spellings import translated

FedAvgStrategy = translated(strategy.FedAvgStrategy, ["inner_optim", "island_size", "H"])
AveragingCommunicator = translated(strategy.FedAvgStrategy, ["island_size", "H"])
