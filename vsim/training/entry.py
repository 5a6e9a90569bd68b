"""A run of a comparison: its options and its outcome."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vsim.cluster.replicas import Replicas, Views
from vsim.core.run import Diverged
from vsim.records.history import History
from vsim.training.callbacks import savable
from vsim.training.spec import RunSpec


@dataclass(eq=False)
class Entry:
    """One run of a comparison: its options and its outcome.

    Attributes:
        name: the name of the run's strategy or setting, the same for all seeds.
        spec: the run's options.
        history: the run's record. model: the mean of the nodes' final models, once the run is complete.
        error: the error that ended the run. stopped_at: the step after which `Entries.keep` stopped the run.
        finished_at: the step after which a callback ended the run early.
    """

    name: str
    spec: RunSpec
    history: History = field(init=False)
    model: nn.Module | None = None
    error: Exception | None = None
    stopped_at: int | None = None
    finished_at: int | None = None

    def __post_init__(self) -> None:
        self.history = History(self.spec.label, self.spec.num_nodes, self.spec.population)

    @property
    def has_begun(self) -> bool:
        """Whether the history has a row."""
        return len(self.history) > 0

    @property
    def has_outcome(self) -> bool:
        """Whether the run is complete, has failed, or was stopped by `keep`; an interrupted run has no outcome."""
        return any(one is not None for one in (self.model, self.error, self.stopped_at))

    @property
    def diverged_at(self) -> int | None:
        """The first step with a loss or weights that are not finite."""
        if not isinstance(self.error, Diverged):
            return None
        at = re.search(r"step (\d+)", str(self.error))
        return int(at[1]) if at else len(self.history)

    @property
    def folder(self) -> Path | None:
        """The folder of the run's checkpoints; None if the run is not saved."""
        return None if self.spec.saving is None else self.spec.saving.folder


@dataclass
class Outcome:
    """A message from the first process about the start or end of a run; steps are sent as `StepReport`.

    Attributes:
        error, stopped_at, finished_at: see `Entry`.
        record: at the start of a resumed run, its history as plain values, and the history's last step.
        weights (P,), buffers: the mean model of a complete run. callbacks: the states of its callbacks.
    """

    error: Exception | None = None
    stopped_at: int | None = None
    finished_at: int | None = None
    record: tuple[dict[str, Any], int] | None = None
    weights: Tensor | None = None
    buffers: Views = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, callbacks: Sequence[Any]) -> Outcome:
        """Return the outcome of a complete run with this mean model."""
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad]).cpu()
        buffers = {name: b.cpu() for name, b in model.named_buffers()}
        states = {name: one.state_dict() for name, one in savable(callbacks).items()}
        return cls(weights=weights, buffers=buffers, callbacks=states)

    def model(self, like: nn.Module) -> nn.Module:
        """Return the mean model, as a copy of the model that was trained."""
        assert self.weights is not None
        return Replicas.of(like, 1, torch.device("cpu")).as_module(self.weights, self.buffers, like=like)


def end_of(run: Entry | Outcome) -> tuple[Exception | None, int | None, int | None]:
    return run.error, run.stopped_at, run.finished_at
