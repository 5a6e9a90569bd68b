"""The multi-process backend: one process a node over torch.distributed, in ordinary eager PyTorch."""

from vsim.distributed.collectives import CollectiveFailure
from vsim.distributed.launch import NodeFailure, train_in_processes
from vsim.distributed.node import ProcessOptions, default_threads, join, local_ranks, under_torchrun

__all__ = [
    "CollectiveFailure",
    "NodeFailure",
    "ProcessOptions",
    "default_threads",
    "join",
    "local_ranks",
    "train_in_processes",
    "under_torchrun",
]
