"""The checked arguments of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from vsim.checkpoint.files import Checkpoint
from vsim.checkpoint.folder import Saving
from vsim.cluster.participation import Participation
from vsim.data.batches import Data
from vsim.engine.objective import LossFunction
from vsim.network import Compute, Network
from vsim.strategy.base import Strategy

Metric = Callable[[nn.Module, Any], Any]  # of the model in evaluation mode and a batch of validation examples: a number


@dataclass(frozen=True)
class RunSpec:
    """One run of a run, for any backend: the arguments of `Trainer` and `fit`, checked. See there.

    Attributes:
        label: its name in messages and progress.
        executor: the name of one of EXECUTORS.
        callbacks: see `vsim.training.callbacks`. metrics: name of a column → f(model, batch) → number.
        participation: who takes part in which steps; None: all nodes in all.
        compute, network: the virtual clock of an asynchronous strategy, or of stragglers; None: the run has none.
        memory_share: the share of the device's memory for this process, by which the minibatch size is chosen.
        start: the checkpoint that the run resumes or forks from. saving: where it is saved.
    """

    model: nn.Module
    train_dataset: Data
    val_dataset: Data | None
    loss_fn: LossFunction | None
    strategy: Strategy
    num_nodes: int
    num_epochs: int
    max_steps: int | None
    batch_size: int
    minibatch_size: int | None
    shuffle: bool
    val_size: int | None
    val_interval: int | None
    seed: int
    autocast: bool
    deterministic: bool
    compile: bool | str
    chunk_size: int | None
    correlation_interval: int | None
    dataloader_kwargs: Mapping[str, Any]
    executor: str = "auto"
    label: str = ""
    callbacks: Sequence[Any] = ()
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    participation: Participation | None = None
    compute: Compute | None = None
    network: Network | None = None
    memory_share: float | None = None
    start: Checkpoint | None = None
    saving: Saving | None = None

    @property
    def population(self) -> int:
        """The nodes, or clients, that may take part."""
        return self.num_nodes if self.participation is None else self.participation.population(self.num_nodes)

    @property
    def first_step(self) -> int:
        """The step with whose nodes the run is set up.

        What resumes has those that it was saved with, also where others are to take part next.
        """
        done = 0 if self.start is None else self.start.step
        resumes = done > 0 and self.start is not None and not self.start.forks
        return done + (not resumes)
