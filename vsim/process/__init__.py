"""The multi-process backend: one process a node over torch.distributed, in ordinary eager PyTorch.

The loop, strategies, history and ledger are the simulator's. Three parts differ: the executor is a module's own forward
and `loss.backward()`, batches come from DistributedSampler and DataLoader, collectives from torch.distributed.

Definitions in the caller's main module are shipped by value; definitions in imported modules must be importable. On
one machine the processes talk over the loopback interface: gloo, or nccl where each node has a GPU of its own. On
several the same script runs under torchrun, a rank for every node; see docs/torchrun.md.
docs/exactness.md says what is promised of both backends together, and what is only bounded.
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
