"""The arguments of `fit`, checked: each in one place, before anything is set up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch

from vsim.arguments import a_function, one_of, real_number, true_or_false, whole_number
from vsim.checkpoint.files import Checkpoint
from vsim.checkpoint.folder import Saving
from vsim.cluster.participation import Deadline, Participation, Sample
from vsim.data.batches import loader_options
from vsim.engine import COMPILE, EXECUTORS
from vsim.network import Compute, Network
from vsim.records.history import COLUMNS
from vsim.records.loggers import Logger, run_loggers
from vsim.records.report import Hook
from vsim.strategy.base import Strategy
from vsim.training.callbacks import Callback, LossHooks, Originals, checked
from vsim.training.run import Run
from vsim.training.spec import Metric, RunSpec

_WHOLE = ("num_nodes", "batch_size", "num_epochs", "log_interval")
_AT_LEAST_ONE_OR_NONE = (
    *("max_steps", "val_size", "val_interval", "checkpoint_interval", "correlation_interval"),
    *("chunk_size", "threads_per_process"),
)
_TRUE_OR_FALSE = ("shuffle", "autocast", "deterministic")


@dataclass
class FitOptions:
    """The arguments of `Trainer.fit`; see there.

    Raises:
        TypeError, ValueError: one is out of range, contradicts another, or would have no effect.
    """

    strategy: Strategy
    num_nodes: int
    num_epochs: int
    max_steps: int | None
    batch_size: int
    minibatch_size: int | None
    gradient_accumulation: int | None
    shuffle: bool
    val_size: int | None
    val_interval: int | None
    seed: int
    participation: Participation | None
    device: str | torch.device | None
    autocast: bool
    executor: str
    deterministic: bool
    compile: bool | str
    chunk_size: int | None
    backend: str
    devices: Sequence[str | torch.device] | None
    threads_per_process: int | None
    timeout_seconds: float | None
    compute: Compute | float | str | None
    network: Network | str | float | None
    checkpoint_interval: int | None
    save_dir: str | Path | None
    resume: bool | str | Path | Checkpoint | None
    correlation_interval: int | None
    dataloader_kwargs: Mapping[str, Any] | None
    max_memory_usage: float | None
    logger: Logger | Sequence[Logger] | None
    log_interval: int
    run_name: str | None
    wandb_project: str | None
    log_x_axis: str
    progress: bool | str
    callbacks: Sequence[Callback | Callable[[Run], Any]] | None
    metrics: Mapping[str, Metric] | None
    train_loss_hook: Hook | None
    eval_loss_hook: Hook | None

    def __post_init__(self) -> None:
        # As given, for logs. Whole numbers of other libraries become Python's below, for files and processes.
        self.given = {field.name: getattr(self, field.name) for field in fields(self)}
        if not isinstance(self.strategy, Strategy):
            raise TypeError(f"strategy must be a vsim Strategy object, got {self.strategy!r}")
        if not hasattr(self.strategy, "communication_modules"):
            raise TypeError(f"{type(self.strategy).__name__}.__init__() must call super().__init__()")
        for name in _WHOLE:
            setattr(self, name, whole_number(name, getattr(self, name)))
        self.seed = whole_number("seed", self.seed, at_least=0, at_most=2**63 - 1)
        if not isinstance(self.participation, Participation | None):
            raise TypeError(
                f"participation must be a Sample, Dropout, Schedule or the like, got {self.participation!r}"
            )
        for name in _AT_LEAST_ONE_OR_NONE:
            value = getattr(self, name)
            setattr(self, name, None if value is None else whole_number(name, value))
        for name in _TRUE_OR_FALSE:
            setattr(self, name, true_or_false(name, getattr(self, name)))
        self._check_callbacks()
        if self.progress not in (True, False, "plot"):
            raise ValueError(f"progress must be True, False or 'plot', got {self.progress!r}")
        self._check_data()
        self._check_computing()
        self._check_backend()
        self._check_clock()
        self.loggers = run_loggers(self.logger, self.run_name, self.wandb_project, self.log_x_axis)
        if self.log_interval != 1 and not self.loggers:
            raise ValueError("log_interval has no effect without a logger, run_name or wandb_project")

    def _check_callbacks(self) -> None:
        hooks = self.train_loss_hook, self.eval_loss_hook
        for name, hook in zip(("train_loss_hook", "eval_loss_hook"), hooks, strict=True):
            a_function(name, hook, "step, loss")
        self.callbacks = [*checked(self.callbacks), *([LossHooks(*hooks)] if any(hooks) else [])]
        if not isinstance(self.metrics, Mapping | None):
            raise TypeError(f"metrics must be a dict of name → function of (model, batch), got {self.metrics!r}")
        self.metrics = dict(self.metrics or {})
        for column, metric in self.metrics.items():
            if not isinstance(column, str) or not column or column in COLUMNS:
                raise ValueError(f"metrics: {column!r} cannot name a new column of the history")
            a_function(f"metrics[{column!r}]", metric, "model, batch")

    def _check_data(self) -> None:
        if self.dataloader_kwargs is not None and not isinstance(self.dataloader_kwargs, Mapping):
            raise TypeError(
                f"dataloader_kwargs must be a dict of arguments of DataLoader, got {self.dataloader_kwargs!r}"
            )
        loader_options(self.dataloader_kwargs)
        if self.max_memory_usage is not None:
            real_number("max_memory_usage", self.max_memory_usage, above=0, at_most=1)
            by_hand = [n for n in ("minibatch_size", "gradient_accumulation") if getattr(self, n) is not None]
            if by_hand:
                raise TypeError(f"max_memory_usage chooses the minibatch; leave out {' and '.join(by_hand)}")
        self.minibatch_size = _minibatch_size(self.batch_size, self.minibatch_size, self.gradient_accumulation)

    def _check_computing(self) -> None:
        one_of("executor", self.executor, EXECUTORS)
        if not isinstance(self.compile, bool | str) or self.compile not in COMPILE:
            raise ValueError(f"compile must be True, False, 'trace' or 'auto', got {self.compile!r}")
        inexact = {"autocast=True": self.autocast, "compile=True": self.compile is True}
        if self.deterministic and any(inexact.values()):
            given = next(name for name, chosen in inexact.items() if chosen)
            raise ValueError(f"deterministic=True is bitwise equal to eager float32, which {given} is not")
        if self.executor == "vmap" and self.compile == "auto":
            allowed = "give True, False or 'trace' with 'vmap'"
            raise ValueError(f"compile='auto' is a choice that executor='auto' makes; {allowed}")
        if self.executor == "loop" and (self.compile or self.chunk_size is not None):
            given = f"compile={self.compile!r}" if self.compile else f"chunk_size={self.chunk_size}"
            raise ValueError(f"{given} has no effect with executor='loop', which is eager and takes one node at a time")

    def _check_backend(self) -> None:
        one_of("backend", self.backend, ("stacked", "process"))
        changing = isinstance(self.participation, Sample) and isinstance(self.participation.stragglers, Deadline)
        if changing and self.backend == "process":
            raise ValueError(f"{self.participation}: cohorts of changing size are simulated only, not in processes")
        of_processes = ("devices", "threads_per_process", "timeout_seconds")
        if self.backend == "stacked":
            idle = [name for name in of_processes if getattr(self, name) is not None]
            if idle:
                raise ValueError(f"{', '.join(idle)} has no effect with backend='stacked'")
        elif self.executor != "auto" or self.chunk_size is not None or self.compile in ("trace", "auto"):
            given = f"executor={self.executor!r}" if self.executor != "auto" else f"compile={self.compile!r}"
            given = given if self.chunk_size is None else f"chunk_size={self.chunk_size}"
            raise ValueError(f"{given} has no effect with backend='process', which runs eager PyTorch")
        elif self.device is not None and self.devices is not None:
            raise TypeError("device and devices say the same thing; give one of them")
        if self.timeout_seconds is not None:
            self.timeout_seconds = real_number("timeout_seconds", self.timeout_seconds, above=0)

    def _check_clock(self) -> None:
        """Check what a virtual clock needs, and that there is one: here it is decided which runs have it."""
        name, given = type(self.strategy).__name__, [n for n in ("compute", "network") if getattr(self, n) is not None]
        if self.participation is not None and self.strategy.is_asynchronous:
            raise TypeError(f"{name} is asynchronous: participation= is for strategies that train in lockstep")
        if self.participation is not None and self.participation.needs_compute:
            if self.compute is None:
                raise TypeError(f"{self.participation} goes by compute seconds: give fit(…, compute=Compute(0.8, …))")
            if self.network is not None:
                raise TypeError("network has no effect with stragglers, who are late by the seconds that they compute")
            self.compute = Compute.of(self.compute)
            self.compute.steps(self.participation.population(self.num_nodes))
            return
        if not self.strategy.is_asynchronous:
            if given:
                raise TypeError(
                    f"{' and '.join(given)} {'have' if len(given) > 1 else 'has'} no effect with {name}, which trains "
                    "in lockstep; price the history with history.time(network, compute)"
                )
            return
        if self.compute is None:
            raise TypeError(
                f"{name} is asynchronous: what its nodes do depends on how long they compute. Give fit(…, "
                "compute=Compute(0.8, speeds=[1, 1, 1, 4])), and network= if messages take time"
            )
        if self.backend != "stacked":
            raise ValueError(f"{name}: asynchronous strategies are simulated only, got backend={self.backend!r}")
        self.compute = Compute.of(self.compute)
        self.network = Network(math.inf) if self.network is None else Network.of(self.network)
        if self.compute.layers > 1:
            raise ValueError(f"compute: layers has no effect with {name}, whose nodes send at the end of a phase")
        self.compute.steps(self.num_nodes)
        self.network.check(self.num_nodes)

    def spec(self, label: str, start: Checkpoint | None, saving: Saving | None, **of_trainer: Any) -> RunSpec:
        """Return the configuration of the run, for which the trainer adds model, data, loss and hook."""
        own = {field.name for field in fields(RunSpec)}
        arguments = {name: value for name, value in vars(self).items() if name in own}
        arguments["dataloader_kwargs"] = dict(self.dataloader_kwargs or {})
        if self.callbacks:
            originals = Originals(of_trainer["model"], of_trainer["loss_fn"])
            arguments["callbacks"] = [*checked(self.callbacks), originals]
        return RunSpec(
            **{**arguments, **of_trainer},
            label=label,
            memory_share=self.max_memory_usage,
            start=start,
            saving=saving,
        )


def _minibatch_size(batch_size: int, minibatch_size: int | None, pieces: int | None) -> int | None:
    """Return the size of the pieces that gradients are accumulated over, None for one piece."""
    if minibatch_size is not None and pieces is not None:
        raise TypeError("minibatch_size and gradient_accumulation say the same thing; give one of them")
    name, value = ("gradient_accumulation", pieces) if minibatch_size is None else ("minibatch_size", minibatch_size)
    if value is None:
        return None
    value = whole_number(name, value, at_most=batch_size)
    if batch_size % value:
        divisors = [d for d in range(1, batch_size + 1) if batch_size % d == 0]
        raise ValueError(
            f"batch_size {batch_size} cannot be divided by {name} {value}; {name} may be one of {divisors}"
        )
    size = value if minibatch_size is not None else batch_size // value
    return None if size == batch_size else size
