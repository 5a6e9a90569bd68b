"""The message about the start or end of a run that trains in other processes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from vsim.cluster.replicas import Replicas, Views
from vsim.runs.callbacks import savable
from vsim.runs.clients import ClientModels


@dataclass
class Outcome:
    """A message from the first process about the start or end of a run; steps are sent as `StepReport`.

    Attributes:
        error, stopped_at, finished_at: see `TrackedRun`.
        record: at the start of a resumed run, its history as plain values, and the history's last step.
        weights (P,), buffers: the mean model of a complete run. callbacks: the states of its callbacks.
        client_models: see `TrackedRun`.
    """

    error: Exception | None = None
    stopped_at: int | None = None
    finished_at: int | None = None
    record: tuple[dict[str, Any], int] | None = None
    weights: Tensor | None = None
    buffers: Views = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)
    client_models: ClientModels | None = None

    @classmethod
    def of(cls, model: nn.Module, callbacks: Sequence[Any], client_models: ClientModels | None) -> Outcome:
        """Return the outcome of a complete run with this mean model."""
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad]).cpu()
        buffers = {name: b.cpu() for name, b in model.named_buffers()}
        states = {name: one.state_dict() for name, one in savable(callbacks).items()}
        return cls(weights=weights, buffers=buffers, callbacks=states, client_models=client_models)

    def model(self, like: nn.Module) -> nn.Module:
        """Return the mean model, as a copy of the model that was trained."""
        assert self.weights is not None
        return Replicas.of(like, 1, torch.device("cpu")).as_module(self.weights, self.buffers, like=like)
