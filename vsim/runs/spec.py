"""The options of a run in one list, each checked once before anything is set up."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import nn

from vsim.arguments import (
    a_function,
    encodable,
    given,
    is_factory,
    one_of,
    real_number,
    reject_unknown,
    true_or_false,
    whole_number,
)
from vsim.checkpoint.files import Checkpoint
from vsim.checkpoint.folder import Saving
from vsim.cluster.participation import Participation
from vsim.core.algorithm import Algorithm
from vsim.core.attack import Attack
from vsim.core.fields import arguments_of
from vsim.data.batches import Data, DatasetFactory, loader_options
from vsim.data.flipped import FlippedLabels
from vsim.engine import EXECUTORS
from vsim.engine.machine import pick_device
from vsim.engine.objective import Accuracy, LossFunction
from vsim.history.history import COLUMNS
from vsim.history.loggers import Logger, run_loggers
from vsim.history.progress import Hook
from vsim.network import Compute, Network

Metric = Callable[[nn.Module, Any], Any]  # (model in evaluation mode, batch of validation examples) → number

EVENTS = ("on_start", "on_step", "on_sync", "on_evaluation", "on_end", "on_exit")  # the methods of `vsim.Callback`
_COUNTS = ("num_nodes", "batch_size", "log_interval")
_COUNTS_OR_NONE = (
    *("num_epochs", "max_steps", "val_size", "val_interval", "checkpoint_interval", "correlation_interval"),
    *("chunk_size", "threads_per_process", "client_val_steps"),
)
_VAL_INTERVAL = 100  # the default
_FLAGS = ("shuffle", "val_nodes", "autocast", "deterministic", "compile")


@dataclass(frozen=True, eq=False)
class RunSpec:
    """The options of a run. `Trainer.fit` documents the keyword arguments.

    To add an option, add a field to this class and a line to the docstring of `fit`. The signatures of `fit`, `compare`
    and `sweep` are made from this class. If the option changes results, a resume must notice another value: see
    `vsim.history.describe`. Tests list options, too, and say where one is missing.

    Args:
        model, train_dataset, val_dataset, loss_fn: see `Trainer`.
        label: the run's name in messages and progress.
        start: the checkpoint that the run resumes or forks from. saving: where the run is saved.

    Raises:
        TypeError, ValueError: an option is out of range, contradicts another, or would have no effect.
    """

    model: nn.Module
    train_dataset: Data
    val_dataset: Data | None = None
    loss_fn: LossFunction | None = None
    label: str = ""
    start: Checkpoint | None = None
    saving: Saving | None = None
    _: KW_ONLY
    strategy: Algorithm
    num_nodes: int
    num_epochs: int | None = None  # None: 1, unless max_steps ends the run
    max_steps: int | None = None
    batch_size: int = 16
    minibatch_size: int | None = None
    gradient_accumulation: int | None = None
    shuffle: bool = True
    val_size: int | None = None
    val_interval: int | None = _VAL_INTERVAL
    val_nodes: bool = True
    client_val_dataset: DatasetFactory | None = None
    client_val_steps: int | None = None
    test_dataset: Data | None = None
    seed: int = 42
    participation: Participation | None = None
    attack: Attack | None = None
    device: str | torch.device | None = None
    autocast: bool = False
    executor: str = "auto"
    deterministic: bool = False
    compile: bool = False
    chunk_size: int | None = None
    backend: str = "stacked"
    num_processes: int | str | None = None
    devices: Sequence[str | torch.device] | None = None
    threads_per_process: int | None = None
    timeout_seconds: float | None = None
    compute: Compute | float | str | None = None
    network: Network | str | float | None = None
    checkpoint_interval: int | None = None
    save_dir: str | Path | None = None
    resume: bool | str | Path | Checkpoint | None = False
    correlation_interval: int | None = None
    dataloader_kwargs: Mapping[str, Any] | None = None
    max_memory_usage: float | None = None
    logger: Logger | Sequence[Logger] | None = None
    log_interval: int = 1
    run_name: str | None = None
    wandb_project: str | None = None
    log_x_axis: str = "step"
    progress: bool | str = True
    callbacks: Sequence[Any] = ()  # `vsim.Callback` objects, or functions f(run)
    metrics: Mapping[str, Metric] | None = None
    accuracy: Accuracy | bool | None = None
    train_loss_hook: Hook | None = None
    eval_loss_hook: Hook | None = None

    def __post_init__(self) -> None:
        """Check the options, and replace them by their checked values. A second check changes nothing."""
        if not isinstance(self.strategy, Algorithm):
            raise TypeError(f"strategy must be a vsim Strategy object, got {self.strategy!r}")
        if not hasattr(self.strategy, "optim_spec"):
            raise TypeError(
                f"{type(self.strategy).__name__}.__init__() must call super().__init__(…), with the options of every "
                "strategy"
            )
        if self.attack is not None or self.strategy.attack is not None:
            self._take_attack()
        one_of("backend", self.backend, ("stacked", "process"))
        for name in _COUNTS:
            self._set(name, whole_number(name, getattr(self, name)))
        for name in _COUNTS_OR_NONE:
            value = getattr(self, name)
            least = 0 if name == "max_steps" else 1  # no step: the untouched model is measured
            self._set(name, None if value is None else whole_number(name, value, at_least=least))
        for name in _FLAGS:
            self._set(name, true_or_false(name, getattr(self, name)))
        if self.num_epochs is not None and self.max_steps is not None:
            raise TypeError(two_lengths(self.num_epochs, f"max_steps={self.max_steps}"))
        self._set("seed", whole_number("seed", self.seed, at_least=0, at_most=2**63 - 1))
        if not isinstance(self.participation, Participation | None):
            raise TypeError(
                f"participation must be a Sample, Dropout, Schedule or the like, got {self.participation!r}"
            )
        if not isinstance(self.progress, bool | str) or self.progress not in (True, False, "plot", "table"):
            raise ValueError(f"progress must be True, False, 'plot' or 'table', got {self.progress!r:.100}")
        self._check_callbacks()
        self._check_data()
        self._check_computing()
        self._check_backend()
        self._check_clock()
        if self.participation is not None and self.participation.changes_nothing(self.num_nodes):
            self._set("participation", None)
        attack, plan = self.strategy.attack, self.participation
        if attack is not None and plan is not None:
            attackers = attack.attackers(self.population)
            if plan.eligible(self.num_nodes).isdisjoint(attackers):
                raise ValueError(
                    f"attack={attack} has no effect: with participation={plan}, none of its nodes {list(attackers)} "
                    "ever takes part"
                )
        if self.log_interval != 1 and not self.loggers:
            raise ValueError("log_interval has no effect without a logger, run_name or wandb_project")

    def _set(self, name: str, value: Any) -> None:
        object.__setattr__(self, name, value)

    def _take_attack(self) -> None:
        """Rebuild the strategy with the attack, and flip the labels of attackers' training data."""
        strategy = self.strategy
        if self.attack is not None:
            if strategy.attack is not None:
                raise TypeError(f"attack={self.attack} and the strategy's own {strategy.attack}: give one of them")
            self._set("strategy", type(strategy)(**arguments_of(strategy), attack=self.attack))
            self._set("attack", None)
        flips = self.strategy.attack
        if flips is not None and flips.kind == "label_flip" and not isinstance(self.train_dataset, FlippedLabels):
            assert flips.classes is not None
            self._set("train_dataset", FlippedLabels(self.train_dataset, flips.attackers, flips.classes))

    def _check_callbacks(self) -> None:
        for name in ("train_loss_hook", "eval_loss_hook"):
            if getattr(self, name) is not None:
                a_function(name, getattr(self, name), "step, loss")
        if not isinstance(self.callbacks, Sequence | None) or isinstance(self.callbacks, str | bytes):
            raise TypeError(f"callbacks must be a list of callbacks, got {given(self.callbacks)}")
        self._set("callbacks", list(self.callbacks or ()))
        for one in self.callbacks:
            if isinstance(one, type) or not (callable(one) or any(hasattr(one, event) for event in EVENTS)):
                raise TypeError(f"callbacks must be vsim.Callback objects, or functions f(run), got {one!r:.100}")
            if not any(hasattr(one, event) for event in EVENTS):
                a_function("callbacks", one, "run")
        if not isinstance(self.metrics, Mapping | None):
            raise TypeError(f"metrics must be a dict of name → function of (model, batch), got {self.metrics!r}")
        self._set("metrics", dict(self.metrics or {}))
        for column, metric in self.metrics.items():  # type: ignore[union-attr]
            if not isinstance(column, str) or not column or column in COLUMNS:
                raise ValueError(f"metrics: {column!r} cannot name a new column of the history")
            encodable("metrics: a name", column)
            a_function(f"metrics[{column!r}]", metric, "model, batch")
        for name in ("eval_loss_hook", "metrics"):
            if getattr(self, name) and self.val_dataset is None:
                raise ValueError(f"{name} has no effect without a val_dataset")
        if self.val_size is not None and self.val_dataset is self.client_val_dataset is None:
            raise ValueError(f"val_size={self.val_size} has no effect without a val_dataset or client_val_dataset")
        if self.val_interval not in (None, _VAL_INTERVAL) and self.val_dataset is None:
            raise ValueError(f"val_interval={self.val_interval} has no effect without a val_dataset")
        if not self.val_nodes and self.val_dataset is None:
            raise ValueError("val_nodes=False has no effect without a val_dataset")
        if self.correlation_interval is not None and self.num_nodes == 1:
            raise ValueError(f"correlation_interval={self.correlation_interval} has no effect with num_nodes=1")
        if self.accuracy is None:
            return
        if self.accuracy is not False:
            a_function("accuracy", self.accuracy, "outputs, targets")
        if self.val_dataset is self.client_val_dataset is self.test_dataset is None:
            raise ValueError("accuracy has no effect without a val_dataset, client_val_dataset or test_dataset")

    def _check_data(self) -> None:
        if self.client_val_dataset is not None and not is_factory(self.client_val_dataset):
            raise TypeError(
                "client_val_dataset must be a function f(rank, num_nodes, train_dataset) that returns the data of one "
                f"client, or a Partition; got {type(self.client_val_dataset).__name__}. Data that all clients share "
                "are a val_dataset"
            )
        if self.client_val_dataset is not None:
            a_function("client_val_dataset", self.client_val_dataset, "rank, num_nodes, train_dataset")
        if self.client_val_steps is not None:
            if self.client_val_dataset is None:
                raise ValueError("client_val_steps has no effect without a client_val_dataset")
            if not is_factory(self.train_dataset):
                raise ValueError(
                    "client_val_steps are on each client's own training data: give train_dataset as a Partition or a "
                    "function f(rank, num_nodes, train_dataset)"
                )
        if not isinstance(self.dataloader_kwargs, Mapping | None):
            raise TypeError(
                f"dataloader_kwargs must be a dict of arguments of DataLoader, got {self.dataloader_kwargs!r}"
            )
        self._set("dataloader_kwargs", dict(self.dataloader_kwargs or {}))
        loader_options(self.dataloader_kwargs)
        if self.max_memory_usage is not None:
            real_number("max_memory_usage", self.max_memory_usage, above=0, at_most=1)
            by_hand = [n for n in ("minibatch_size", "gradient_accumulation") if getattr(self, n) is not None]
            if by_hand:
                raise TypeError(f"max_memory_usage chooses the minibatch; leave out {' and '.join(by_hand)}")
        self._set("minibatch_size", _minibatch_size(self.batch_size, self.minibatch_size, self.gradient_accumulation))
        self._set("gradient_accumulation", None)

    def _check_computing(self) -> None:
        one_of("executor", self.executor, EXECUTORS)
        inexact = {"autocast=True": self.autocast, "compile=True": self.compile}
        if self.deterministic and any(inexact.values()):
            given = next(name for name, chosen in inexact.items() if chosen)
            raise ValueError(f"deterministic=True is bitwise equal to eager float32, which {given} is not")
        by_nodes = [n for n in ("executor", "chunk_size") if getattr(self, n) not in ("auto", "loop", None)]
        if self.deterministic and by_nodes and pick_device(next(iter(self.devices or ()), self.device)).type == "cpu":
            raise ValueError(
                f"{by_nodes[0]}={getattr(self, by_nodes[0])!r} has no effect with deterministic=True, which computes "
                "one node at a time on the CPU"
            )
        if self.executor == "loop" and (self.compile or self.chunk_size is not None):
            given = f"compile={self.compile!r}" if self.compile else f"chunk_size={self.chunk_size}"
            raise ValueError(f"{given} has no effect with executor='loop', which is eager and takes one node at a time")

    def _check_backend(self) -> None:
        of_processes = ("num_processes", "devices", "threads_per_process", "timeout_seconds")
        if self.backend == "stacked":
            idle = [name for name in of_processes if getattr(self, name) is not None]
            if idle:
                raise ValueError(f"{', '.join(idle)} has no effect with backend='stacked'")
        elif self.num_processes is not None:
            if not isinstance(self.num_processes, str):
                number = whole_number("num_processes", self.num_processes, at_most=self.num_nodes)
                self._set("num_processes", number)
            elif self.num_processes != "auto":
                raise ValueError(f"num_processes must be a whole number or 'auto', got {self.num_processes!r}")
        elif self.executor != "auto" or self.chunk_size is not None:
            given = f"executor={self.executor!r}" if self.chunk_size is None else f"chunk_size={self.chunk_size}"
            raise ValueError(
                f"{given} has no effect with backend='process', which runs eager PyTorch; with num_processes= each "
                "process holds several nodes, and computes them by an executor"
            )
        if self.device is not None and self.devices is not None:
            raise TypeError("device and devices say the same thing; give one of them")
        if self.timeout_seconds is not None:
            self._set("timeout_seconds", real_number("timeout_seconds", self.timeout_seconds, above=0))

    def _check_clock(self) -> None:
        """Check the options of a virtual clock; only asynchronous strategies and stragglers use one."""
        name, given = type(self.strategy).__name__, [n for n in ("compute", "network") if getattr(self, n) is not None]
        if self.participation is not None and self.strategy.is_asynchronous:
            raise TypeError(f"{name} is asynchronous: participation= is for strategies that train in lockstep")
        if self.participation is not None and self.participation.needs_compute:
            if self.compute is None:
                raise TypeError(f"{self.participation} goes by compute seconds: give fit(…, compute=Compute(0.8, …))")
            if self.network is not None:
                raise TypeError("network has no effect with stragglers, who are late by the seconds that they compute")
            self._set("compute", Compute.of(self.compute))
            self.compute.steps(self.population)  # type: ignore[union-attr]
            return
        if self.strategy.needs_compute and self.compute is not None and self.network is None:
            self._set("compute", Compute.of(self.compute))
            self.compute.steps(self.num_nodes)  # type: ignore[union-attr]
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
        compute, network = Compute.of(self.compute), Network(math.inf)
        network = network if self.network is None else Network.of(self.network)
        if compute.layers > 1:
            raise ValueError(f"compute: layers has no effect with {name}, whose nodes send at the end of a phase")
        compute.steps(self.num_nodes)
        network.check(self.num_nodes)
        self._set("compute", compute)
        self._set("network", network)

    @property
    def loggers(self) -> list[Logger]:
        """The loggers that the options ask for."""
        return run_loggers(self.logger, self.run_name, self.wandb_project, self.log_x_axis)

    @property
    def population(self) -> int:
        """The number of nodes or clients that may take part."""
        return self.num_nodes if self.participation is None else self.participation.population(self.num_nodes)

    @property
    def first_step(self) -> int:
        """The step whose participating nodes get rows in the setup.

        A resumed run is set up with the nodes of its checkpoint, even if other nodes take part in the next step.
        """
        resumes = self.steps_before > 0 and self.start is not None and not self.start.forks
        return self.steps_before + (not resumes)

    @property
    def steps_before(self) -> int:
        """The number of completed steps that the run starts from."""
        return 0 if self.start is None else self.start.step


def two_lengths(num_epochs: int, other: str) -> str:
    """Return the message of an error about two arguments that end a run."""
    return f"num_epochs={num_epochs} and {other} both end the run; give one of them"


def _minibatch_size(batch_size: int, minibatch_size: int | None, pieces: int | None) -> int | None:
    """Return the examples per piece over which gradients are accumulated; None for a single piece."""
    if minibatch_size is not None and pieces is not None:
        raise TypeError("minibatch_size and gradient_accumulation say the same thing; give one of them")
    name, value = ("gradient_accumulation", pieces) if minibatch_size is None else ("minibatch_size", minibatch_size)
    if value is None:
        return None
    value = whole_number(name, value, at_most=batch_size)
    if batch_size % value:
        divisors = [d for d in range(1, min(batch_size, 10_000) + 1) if batch_size % d == 0]
        raise ValueError(
            f"batch_size {batch_size} cannot be divided by {name} {value}; {name} may be one of {divisors}"
        )
    size = value if minibatch_size is not None else batch_size // value
    return None if size == batch_size else size


# Signatures ----------------------------------------------------------------------------------------------------------

Options = ParamSpec("Options")
Function = TypeVar("Function", bound=Callable[..., Any])
Result = TypeVar("Result")


def takes_options(*but: str, of: Callable[..., Any] = RunSpec) -> Callable[[Function], Function]:
    """Replace `**options` in a function's signature by the keyword arguments of `of`.

    An unknown keyword raises a TypeError that names the nearest valid keyword. `torch.no_grad` and
    `torch.inference_mode` of the caller are switched off within the function, so that it can train.

    Args:
        but: arguments of `of` that the function does not take.
    """

    def decorate(function: Function) -> Function:
        given = inspect.signature(function)
        own = [p for p in given.parameters.values() if p.kind is not p.VAR_KEYWORD]
        known = {*but, *(p.name for p in own)}
        passed_on = inspect.signature(of).parameters.values()
        parameters = [*own, *(p for p in passed_on if p.kind is p.KEYWORD_ONLY and p.name not in known)]
        valid = [p.name for p in parameters if p.kind is not p.POSITIONAL_ONLY and p.name != "self"]
        required = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
        where = f"{function.__qualname__}()"

        @functools.wraps(function)
        def taking(*args: Any, **options: Any) -> Any:
            reject_unknown(options, valid, where)
            if missing := [name for name in required if name not in options]:
                raise TypeError(f"{where} needs {' and '.join(missing)}")
            with torch.inference_mode(False), torch.enable_grad():
                return function(*args, **options)

        taking.__signature__ = given.replace(parameters=parameters)  # type: ignore[attr-defined]
        taking.__annotations__ = {p.name: p.annotation for p in parameters} | {"return": given.return_annotation}
        return taking  # type: ignore[return-value]

    return decorate


def option_defaults() -> dict[str, Any]:
    """Return option → default, for options with a default."""
    parameters = inspect.signature(RunSpec).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY and p.default is not p.empty}


def typed_by(
    spec: Callable[
        Concatenate[nn.Module, Data, Data | None, LossFunction | None, str, Checkpoint | None, Saving | None, Options],
        RunSpec,
    ],
) -> Callable[[Callable[..., Result]], Callable[Concatenate[Any, Options], Result]]:
    """Type a method as taking the keyword arguments of `spec`, for type checkers and editors."""
    return lambda method: method
