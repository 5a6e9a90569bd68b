"""The multi-process backend: one process a node over torch.distributed, in ordinary eager PyTorch."""

from vsim.distributed.launch import NodeFailure, ProcessOptions, train_in_processes
from vsim.distributed.node import join, under_torchrun

__all__ = ["NodeFailure", "ProcessOptions", "join", "train_in_processes", "under_torchrun"]
