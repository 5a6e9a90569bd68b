"""The multi-process backend: one process per node over torch.distributed, in ordinary eager PyTorch.

The loop, strategies, history and ledger are the simulator's. Three parts differ: the executor runs a module's own
forward and `loss.backward()`, batches come from DistributedSampler and DataLoader, and collectives from
torch.distributed.

Definitions in the caller's main module are shipped by value; definitions in other modules must be importable. On one
machine, the processes communicate over the loopback interface, by nccl if each node has its own GPU, else by gloo. On
several machines, the same script runs under torchrun with a rank for every node; see docs/torchrun.md.
docs/exactness.md says where both backends agree bitwise, and where differences are only bounded.
"""

from vsim.process.collectives import CollectiveFailure
from vsim.process.launch import ForkServerFailure, NodeFailure, train_in_processes
from vsim.process.node import ProcessOptions, default_threads, join, local_ranks, under_torchrun

__all__ = [
    "CollectiveFailure",
    "ForkServerFailure",
    "NodeFailure",
    "ProcessOptions",
    "default_threads",
    "join",
    "local_ranks",
    "train_in_processes",
    "under_torchrun",
]
