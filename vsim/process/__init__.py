"""The multi-process backend: one process a node over torch.distributed, in ordinary eager PyTorch.

The loop, strategies, history and ledger are the simulator's. Three parts differ: the executor is a module's own forward
and `loss.backward()`, batches come from DistributedSampler and DataLoader, collectives from torch.distributed.

On one machine, `fit(backend="process")` starts a process for every node, from a script, a notebook or a REPL.
Definitions of the main module are shipped by value; those of imported modules must be importable by name from sys.path.
The processes meet in a file and talk over the loopback interface: gloo, or nccl where each node has a GPU of its own.
Hooks, progress and warnings reach the caller; prints of a model go to the standard output of the caller's process, from
every node.

On several machines the same script runs under torchrun, a rank for every node. On two machines with four nodes each,
with num_nodes=8, and with the address of the first:

    torchrun --nnodes 2 --nproc_per_node 4 --node_rank 0 --master_addr 10.0.0.1 --master_port 29500 script.py
    torchrun --nnodes 2 --nproc_per_node 4 --node_rank 1 --master_addr 10.0.0.1 --master_port 29500 script.py

Hooks then run on every rank, the progress bar on rank 0, and every rank gets model, history and ledger. gloo takes the
network interface that GLOO_SOCKET_IFNAME names, or the one of the host's name.

What is promised. With `deterministic=True`, on CPU, in float32 and at equal numbers of threads (`threads_per_process`
= torch.get_num_threads() of the simulator's process), the two backends are bitwise equal: in weights, buffers and
losses of every node at every step, in all columns of the history but `seconds`, in the final model and in the ledger.
The promise holds for every strategy, built-in or a user's own, that

  - works on rows elementwise, or node by node (see `vsim.strategy.compression.by_node`), or through collectives,
  - and draws random numbers from `cluster.generator`, alike on all nodes, or from streams derived per node;

and for every model and dataset whose randomness is the model's own (dropout). A dataset's draws from the global
generators are not covered: in the simulator all nodes' examples come from one stream, here from one stream per process.

What is bounded. Without the flag both take their fastest path (vmap and eager, the process group's own reduction), and
the bytes are the same where they do not depend on values. For strategies that average (AllReduce, FedAvg, DiLoCo,
SPARTA and their compositions) losses and weights differ by less than 1e-5 after 30 steps of SGD, or of AdamW with
eps=1e-3, on the test suite's MLP, CNN and GPT; 1.5e-6 was measured. With AdamW's default eps of 1e-8 that holds for
the losses; a gradient that is nothing but rounding, such as a bias's before BatchNorm, moves its weight by whole steps
there. Strategies that decide by a value (DeMo, signs, top-k, rounding to a few bits) or orthogonalize (PowerSGD) may
decide otherwise where rounding differs; for them there is no bound.
"""

from vsim.process.collectives import CollectiveFailure
from vsim.process.launch import NodeFailure, train_in_processes
from vsim.process.node import ProcessOptions, default_threads, join, local_ranks, under_torchrun

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
