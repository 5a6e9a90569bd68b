"""Under the name that EXO Gym has it: FedAvg, which lives in `vsim.strategy.fedavg`."""

from vsim.strategy.fedavg import AveragingCommunicator, FedAvgStrategy

__all__ = ["AveragingCommunicator", "FedAvgStrategy"]
