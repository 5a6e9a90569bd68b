"""Train a range of the nodes in each process, so that a run's matrix is spread over the processes.

Each process computes its rows as the simulator does, by the executor that the user chose. Only the collectives differ:
they first reduce the process's rows, and then reduce between the processes.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from vsim.cluster.collectives import Collectives
from vsim.cluster.ledger import Ledger
from vsim.cluster.randomness import isolated
from vsim.data.batches import BatchSource
from vsim.engine import Executor
from vsim.history.history import History
from vsim.history.progress import Recorder
from vsim.process.distributed import ProcessCollectives, completing
from vsim.training.fit import Orders, fit, prepare
from vsim.training.interrupt import Interrupt
from vsim.training.race import Messages, Processes, Race
from vsim.training.setup import batches_of
from vsim.training.spec import RunSpec
from vsim.training.tracked import TrackedRun


class Ranks(Processes):
    """The ranks of the default process group, each of which holds a range of every run's nodes."""

    def __init__(self) -> None:
        self.tags = itertools.count(1)

    @property
    def is_first(self) -> bool:
        return dist.get_rank() == 0

    def connect(self, ledger: Ledger, spec: RunSpec) -> ProcessCollectives:
        return ProcessCollectives(ledger, spec.deterministic, spec.num_nodes, self.tags)

    def agreed(self, value: Any) -> Any:
        message = [value]
        with completing("agreeing with the first process"):
            dist.broadcast_object_list(message, 0)
        return message[0]


def run_ranges(
    content: RunSpec | Race, device: torch.device, send: Messages, interrupt: Interrupt | None = None
) -> None:
    """Train this process's nodes of a run, or of the runs of a comparison, as a rank of the default process group.

    Args:
        send: called with a list of (number of a run, its `StepReport` or `Outcome`), the same in all processes.
    """
    if isinstance(content, RunSpec):
        run_one(content, device, send, interrupt)
        return
    interrupt = interrupt or content.interrupt
    own = replace(content, device=device, processes=Ranks(), send=send, progress=False, interrupt=interrupt)
    own.train_here()


def run_one(
    spec: RunSpec,
    device: torch.device,
    send: Messages,
    interrupt: Interrupt | None = None,
    batches: Callable[[RunSpec, Collectives], BatchSource] = batches_of,
    executor: Callable[..., Executor] | None = None,
) -> None:
    """Train this process's nodes of a run, as a rank of the default process group; see `build`."""
    history = History(type(spec.strategy).__name__, spec.num_nodes, spec.population)
    if spec.start is not None:
        spec.start.fill(history)
    run = TrackedRun(spec, recorder=Recorder(history))
    run.recorder.has_warned = True  # the caller's recorder warns
    with isolated(spec.seed, device):
        given = {"connect": Ranks().connect, "batches": batches, "executor": executor}
        interrupt = interrupt or Interrupt()
        orders = Orders(interrupt, send=lambda messages: send([(0, message) for _, message in messages]))
        fit(prepare([run], device, interrupt, **given), orders)
