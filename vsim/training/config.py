"""The checked arguments of a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from vsim.checkpoint.start import Saving, Start
from vsim.data.batches import Data
from vsim.engine.objective import LossFunction
from vsim.strategy.base import Strategy


@dataclass(frozen=True)
class RunConfig:
    """One member of a run, for any backend: the arguments of `Trainer` and `fit`, checked. See there.

    Attributes:
        label: its name in messages and progress.
        executor: the name of one of EXECUTORS.
        after_step: called as f(member) in every process when a step is done, before the step is reported.
        memory_share: the share of the device's memory for this process, by which the minibatch size is chosen.
        start: the checkpoint that the member resumes or forks from. saving: where it is saved.
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
    val_size: int
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
    after_step: Callable[[Any], None] | None = None
    memory_share: float | None = None
    start: Start | None = None
    saving: Saving | None = None
