"""The multi-process backend over torch.distributed.

By default, each process trains one node in ordinary eager PyTorch, as a reference for the simulator. It uses the
simulator's training loop, strategies, history and ledger. Three parts differ: the executor runs the module's forward
and `loss.backward()`, batches come from DistributedSampler and DataLoader, and collectives use torch.distributed. With
`num_processes`, each process computes a range of the nodes as the simulator does, so that a run may be larger than a
device or machine; then only the collectives differ.

Definitions in the caller's main module are pickled by value; definitions in other modules must be importable. On one
machine, the processes communicate over the loopback interface, by nccl if each has its own GPU, else by gloo. On
several machines, the same script runs under torchrun; see docs/torchrun.md and docs/scaling.md. docs/exactness.md lists
where both backends agree bitwise, and where differences are only bounded.
"""

from vsim.processes.distributed import CollectiveFailure
from vsim.processes.launch import ForkServerFailure, NodeFailure, train_in_processes
from vsim.processes.node import run_node
from vsim.processes.options import ProcessOptions, default_threads
from vsim.processes.ranges import Ranks, run_ranges
from vsim.processes.world import (
    first_device,
    from_first_rank,
    joined_group,
    number_of_processes,
    options_of,
    under_torchrun,
    world_rank,
)

__all__ = [
    "CollectiveFailure",
    "ForkServerFailure",
    "NodeFailure",
    "ProcessOptions",
    "Ranks",
    "default_threads",
    "first_device",
    "from_first_rank",
    "joined_group",
    "number_of_processes",
    "options_of",
    "run_node",
    "run_ranges",
    "train_in_processes",
    "under_torchrun",
    "world_rank",
]
