"""Two options that are each right: both have their effect, or an error or a warning says why not."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import inspect
import io
import itertools
import math
import random
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from reference_cluster import vectors
from standing_ranks import Ranks
from torch import Tensor
from torch.nn.utils import parameters_to_vector
from torch.utils.data import Dataset, default_collate

import vsim
from vsim import Attack, Schedule, Trainer
from vsim.engine.memory import fitting_minibatch
from vsim.models import MLP
from vsim.strategy import AloneStrategy, AsyncDiLoCoStrategy, DiLoCoStrategy, SimpleReduceStrategy

# of torch itself, while compiling
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")

BASE: dict[str, Any] = {"strategy": SimpleReduceStrategy(lr=0.1), "num_nodes": 2, "batch_size": 4, "progress": False}
PROCESSES = {"backend": "process", "device": None}


class Outcome(NamedTuple):
    """What a run left behind.

    Attributes:
        without: returns the outcome of the same call without one of its options.
        heard: what objects and functions of the user were called with, by name. files: the checkpoints. shown: what
            was printed.
        options: the options of the call. processes: those of its processes.
    """

    trainer: Trainer
    weights: Tensor
    without: Callable[[], Outcome]
    heard: list[tuple[str, Any]]
    files: list[Path]
    shown: str
    options: Mapping[str, Any]
    processes: list[Any]

    @property
    def history(self) -> vsim.History:
        return self.trainer.history

    @property
    def steps(self) -> list[Any]:
        """The steps that this call took."""
        return self.named("taken")

    @property
    def first(self) -> Any:
        """The nodes' losses of the first step."""
        return self.history.node_losses[0]

    def last(self, column: str) -> float:
        return float(self.history[column][-1])

    def due(self, interval: int) -> list[Any]:
        """The steps whose rows are logged: the last, and those at which the divergence is measured, too."""
        measured = dict(zip(self.history["step"], np.isfinite(self.history["divergence"]), strict=True))
        return [s for s in self.steps if s % interval == 0 or s == self.steps[-1] or measured[s]]

    def named(self, name: str) -> list[Any]:
        return [value for own, value in self.heard if own == name]


HEARD: list[tuple[str, Any]] = []  # of the call that runs


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class Log:
    def __init__(self, name: str = "logger", **given: Any) -> None:
        self.name = name
        HEARD.append((f"{name} made", given))

    def start(self, config: Mapping[str, Any]) -> None:
        HEARD.append((f"{self.name} starts", dict(config)))

    def log_train(self, row: Any) -> None:
        HEARD.append((self.name, row["step"]))

    def log_validation(self, row: Any) -> None:
        pass

    def finish(self, failure: Any) -> None:
        pass


def heard(name: str) -> Callable[..., Any]:
    def hook(step: Any, loss: Any) -> None:
        HEARD.append((name, step))

    return hook


class Steps(vsim.Callback):
    here = True  # and not in processes

    def __init__(self, name: str) -> None:
        self.name = name

    def on_step(self, run: Any) -> None:
        HEARD.append((self.name, run.row["step"]))


def of_client(rank: int, num_nodes: int, train: bool) -> Dataset[Any]:
    return vectors(16, seed=rank)


def doubled(samples: Any) -> Any:
    x, y = default_collate(samples)
    return 2 * x, y


def never_right(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.zeros(len(targets), dtype=torch.bool)


def seven(model: Any, batch: Any) -> float:
    return 7.0


def other_losses(o: Outcome) -> bool:
    return not np.array_equal(o.first, o.without().first)


def other_weights(o: Outcome) -> bool:
    return not torch.equal(o.weights, o.without().weights)


def is_away(o: Outcome) -> bool:
    return len(o.history.node_losses) < 2 or bool(np.isnan(o.history.node_losses[-1, 1]))


class Option(NamedTuple):
    """A value of an option, how its effect is seen, and other options that it needs."""

    value: Any
    acts: Callable[[Outcome], bool]
    needs: Mapping[str, Any] = {}


def in_processes(value: Any, acts: Callable[[Outcome], bool]) -> Option:
    return Option(value, acts, PROCESSES)


# A value that is not the default, for every option of `fit`.
OPTIONS: dict[str, Option] = {
    "strategy": Option(DiLoCoStrategy(H=1, lr=0.1), lambda o: {e.moment for e in o.history.ledger} == {"weights"}),
    "num_nodes": Option(3, lambda o: o.history.node_losses.shape[1] == 3),
    "num_epochs": Option(2, lambda o: o.last("step") > o.without().last("step")),
    "max_steps": Option(3, lambda o: o.last("step") == 3),
    "batch_size": Option(8, lambda o: o.history["examples"][1] / np.isfinite(o.first).sum() == 8),
    "minibatch_size": Option(2, lambda o: o.history.minibatch_size == 2),
    "gradient_accumulation": Option(2, lambda o: o.history.minibatch_size == o.options["batch_size"] / 2),
    "shuffle": Option(False, other_losses),
    "val_size": Option(3, lambda o: o.last("val_examples") == 3),
    "val_interval": Option(1, lambda o: bool(np.isfinite(o.history["global_loss"]).all())),
    "val_nodes": Option(False, lambda o: bool(np.isnan(o.history.column("local_loss")).all())),
    "client_val_dataset": Option(of_client, lambda o: len(o.history.client_val_losses) >= 2),
    "client_val_steps": Option(
        2,
        lambda o: not np.array_equal(o.history.client_val_losses, o.without().history.client_val_losses),
        {"client_val_dataset": of_client, "train_dataset": of_client},
    ),
    "test_dataset": Option(vectors(5, seed=3), lambda o: math.isfinite(o.last("test_loss"))),
    "seed": Option(7, other_losses),
    "participation": Option(Schedule({1: [0], 9: [0, 1]}), is_away),
    "attack": Option(Attack("sign_flip", nodes=[1]), other_weights),
    "device": Option("cpu", lambda o: o.history.config["device"] == "cpu"),
    "autocast": Option(True, other_weights),
    "executor": Option("loop", lambda o: o.history.computed == "loop"),
    "deterministic": Option(True, lambda o: "deterministic" in o.history.computed or o.options["executor"] == "loop"),
    "compile": Option(True, lambda o: o.history.computed.startswith("compiled")),
    "chunk_size": Option(1, lambda o: "one at a time" in o.history.computed),
    "backend": Option("process", lambda o: bool(o.processes)),
    "num_processes": in_processes(2, lambda o: o.processes[-1].num_processes == 2),
    "devices": in_processes(["cpu"], lambda o: list(o.processes[-1].devices) == [torch.device("cpu")]),
    "threads_per_process": in_processes(3, lambda o: o.processes[-1].threads == 3),
    "timeout_seconds": in_processes(99.0, lambda o: o.processes[-1].timeout_seconds == 99),
    "compute": Option(1.0, lambda o: o.last("clock_seconds") >= 2, {"strategy": AsyncDiLoCoStrategy(H=1, lr=0.1)}),
    "network": Option(
        "1 kbit/s, 5 s",
        lambda o: o.last("clock_seconds") > o.without().last("clock_seconds"),
        {"strategy": AsyncDiLoCoStrategy(H=1, lr=0.1), "compute": 1.0},
    ),
    "checkpoint_interval": Option(1, lambda o: len(o.files) == 2, {"save_dir": "saved"}),
    "save_dir": Option("saved", lambda o: bool(o.files)),
    "resume": Option(True, lambda o: min(o.steps) > 1, {"save_dir": "saved"}),
    "correlation_interval": Option(1, lambda o: bool(np.isfinite(o.history["divergence"]).any())),
    "dataloader_kwargs": Option({"collate_fn": doubled}, other_losses),
    "max_memory_usage": Option(
        0.9, lambda o: bool(o.named("probed") or o.processes)
    ),  # processes have probes of their own
    "logger": Option(Log(), lambda o: bool(o.named("logger"))),
    "log_interval": Option(2, lambda o: o.named("logger") == o.due(2), {"logger": Log()}),
    "run_name": Option(
        "mine",
        lambda o: (
            Path("logs/mine").is_dir()
            or {own["run_name"] for name, own in o.heard if name.endswith(" starts")} == {"mine"}
        ),
    ),
    "wandb_project": Option("project", lambda o: bool(o.named("wandb"))),
    "log_x_axis": Option(
        "examples", lambda o: o.named("wandb starts")[0]["log_x_axis"] == "examples", {"wandb_project": "project"}
    ),
    "progress": Option(True, lambda o: bool(o.shown)),
    "callbacks": Option([Steps("callback")], lambda o: o.named("callback") == o.steps),
    "metrics": Option({"seven": seven}, lambda o: o.last("seven") == 7),
    "accuracy": Option(never_right, lambda o: o.last("global_accuracy") == 0),
    "train_loss_hook": Option(heard("train"), lambda o: o.named("train") == o.steps),
    "eval_loss_hook": Option(heard("eval"), lambda o: len(o.named("eval")) >= 1),
}


def names_of(function: Any) -> set[str]:
    return {p.name for p in inspect.signature(function).parameters.values() if p.kind is p.KEYWORD_ONLY}


def test_every_option_has_a_value() -> None:
    options = names_of(Trainer.fit)
    assert set(OPTIONS) == options, f"tests/test_pairs.py, OPTIONS: a value of {options - {*OPTIONS}}, and how it acts"


class Runs:
    """Makes runs, and keeps the outcome of those that were made before."""

    def __init__(self, ranks_of: Callable[[int], Ranks], patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.ranks_of, self.patch, self.folder = ranks_of, patch, folder
        self.known: dict[frozenset[str], Outcome | Exception] = {}
        self.processes: list[Any] = []
        patch.setattr("vsim.trainer.train_in_processes", self.train)
        patch.setattr("vsim.runs.acts.feed.fitting_minibatch", self.probe)
        patch.setattr("vsim.history.loggers.run_log.WandbLogger", lambda project, **own: Log("wandb", **own))

    def train(self, spec: Any, options: Any, report: Any) -> Any:
        self.processes.append(options)
        return self.ranks_of(options.num_processes).train(spec, dataclasses.replace(options, threads=1), report)

    def probe(self, *given: Any) -> int:
        HEARD.append(("probed", given))
        return fitting_minibatch(*given)

    def of(self, *names: str, needs: Mapping[str, Any], key: frozenset[str]) -> Outcome:
        """The outcome of a call with these options."""
        if key not in self.known:
            try:
                self.known[key] = self.make(names, needs)
            except (TypeError, ValueError, UserWarning) as error:
                self.known[key] = error
        found = self.known[key]
        if isinstance(found, Exception):
            raise found
        return found

    def make(self, names: tuple[str, ...], needs: Mapping[str, Any]) -> Outcome:
        folder = Path(tempfile.mkdtemp(dir=self.folder))
        self.patch.chdir(folder)
        options = {**BASE, **needs, **{name: OPTIONS[name].value for name in names}}
        data = options.pop("train_dataset", None) or vectors(32)
        options["callbacks"] = [*options.get("callbacks", ()), Steps("taken")]
        trainer = Trainer(MLP(12, (4,), 5, seed=1), data, vectors(8, seed=5))
        if options.get("resume"):
            trainer.fit(**{**options, "resume": False, "run_name": None, "num_epochs": None, "max_steps": 1})
        HEARD.clear()
        self.processes.clear()
        with contextlib.redirect_stderr(Terminal()) as printed, contextlib.redirect_stdout(printed):
            model = trainer.fit(**options)
        weights = parameters_to_vector(model.parameters()).detach()
        files = sorted(folder.glob("saved/step-*"))
        return Outcome(
            trainer,
            weights,
            lambda: pytest.fail("it is set by the pair"),
            [*HEARD],
            files,
            printed.getvalue(),
            {"executor": "auto", **options},
            [*self.processes],
        )

    def problem(self, *names: str) -> str | None:
        """Why one of the options is ignored in silence in the call with all of them; None: none is."""
        needs = {key: value for name in names for key, value in OPTIONS[name].needs.items()}
        try:
            outcome = self.of(*names, needs=needs, key=frozenset(names))
        except (TypeError, ValueError, UserWarning) as error:  # warnings are errors in tests
            is_named = any(name in str(error) for name in {*names, *needs})
            return None if is_named else f"{' and '.join(names)}: the error names neither: {error}"
        for name in names:
            others = [other for other in names if other != name]
            key = frozenset([*others, *([f"without {name}"] if OPTIONS[name].needs else [])])
            here = outcome._replace(without=lambda: self.of(*others, needs=needs, key=key))  # noqa: B023
            if not OPTIONS[name].acts(here):
                return f"{name} has no effect with {' and '.join(others)}"
        return None


@pytest.fixture
def runs(ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Runs:
    return Runs(ranks_of, monkeypatch, tmp_path)


# Pairs of which the first has no effect, and what `fit` says about it.
_BITS = "On the CPU, a process for every node computes in this way without it"
DOCUMENTED = {
    ("seed", "shuffle"): "without any (shuffle=False, no dropout) it changes nothing",
    ("deterministic", "backend"): _BITS,
    ("deterministic", "devices"): _BITS,
    ("deterministic", "threads_per_process"): _BITS,
    ("deterministic", "timeout_seconds"): _BITS,
}
assert Trainer.fit.__doc__ is not None
assert all(text in " ".join(Trainer.fit.__doc__.split()) for text in DOCUMENTED.values())

SLOW = "compile"  # takes seconds, so that it meets only a few others, drawn by seed


@pytest.mark.slow
def test_each_option_acts_alone(runs: Runs) -> None:
    for name in OPTIONS:
        assert runs.problem(name) is None and not isinstance(runs.known[frozenset([name])], Exception), name


@pytest.mark.slow
def test_of_two_options_none_is_ignored_in_silence(runs: Runs) -> None:
    rest = [name for name in OPTIONS if name != SLOW]
    pairs = [*itertools.combinations(rest, 2), *((SLOW, other) for other in random.Random(1).sample(rest, 3))]
    found = {problem for pair in pairs if (problem := runs.problem(*pair))}
    assert found == {f"{name} has no effect with {other}" for name, other in DOCUMENTED}


# Options that `compare` has and `fit` has not, by themselves and with each other -------------------------------------


class OfComparison(NamedTuple):
    """A value, how its effect is seen, and other options that it needs."""

    value: Any
    acts: Callable[[vsim.Comparison], bool]
    needs: Mapping[str, Any] = {}


def compared(**options: Any) -> vsim.Comparison:
    strategies = {"a": SimpleReduceStrategy(lr=0.1)}
    own: dict[str, Any] = {**BASE, "strategies": strategies, "callbacks": [Steps("step")], **options}
    HEARD.clear()
    del own["strategy"]
    return vsim.compare(MLP(12, (4,), 5, seed=1), vectors(32), vectors(8, seed=5), **own)


@functools.cache
def trained_before() -> vsim.Comparison:
    return compared(max_steps=3)


def half(outputs: Tensor, targets: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(outputs, targets) / 2


def both_first(c: vsim.Comparison) -> list[float]:
    return [float(run.history.node_losses[0, 0]) for run in c.runs("a") if run.seed == 42]


def one_after_another(c: vsim.Comparison) -> bool:
    steps = [value for name, value in HEARD if name == "step"]
    return all(one != other for one, other in itertools.pairwise(steps))


def of_four_megabytes(c: vsim.Comparison) -> bool:
    return bool(c["a"].history.last("payload_bytes") == 4e6 * c["a"].history.last("step"))


class Pool(ThreadPoolExecutor):
    """Counts the tasks of the last comparison."""

    tasks = 0

    def submit(self, *args: Any, **kwargs: Any) -> Any:
        self.tasks += 1
        return super().submit(*args, **kwargs)

    def has_worked(self, _: vsim.Comparison) -> bool:
        worked, self.tasks = self.tasks > 0, 0
        return worked


POOL = Pool(1)
OF_COMPARE: dict[str, OfComparison] = {
    "strategies": OfComparison(
        {"a": SimpleReduceStrategy(lr=0.1), "b": AloneStrategy(lr=0.2)}, lambda c: set(c) == {"a", "b"}
    ),
    "loss_fn": OfComparison(half, lambda c: all(loss < 1 for loss in both_first(c))),
    "seeds": OfComparison([3, 4], lambda c: {3, 4} <= {run.seed for run in c.runs("a")}),
    "together": OfComparison(False, one_after_another, {"seeds": [3, 4]}),
    "budget": OfComparison({"examples": 16}, lambda c: all(run.history.last("examples") == 16 for run in c.all_runs)),
    "at": OfComparison(1e6, of_four_megabytes, {"budget": {"wire": 1e8}}),
    "tune": OfComparison({"lr": [0.05, 0.1, 0.2]}, lambda c: "a" in c.tuned),
    "strategy_defaults": OfComparison({"max_norm": 0.5}, lambda c: c["a"].strategy.max_norm == 0.5),
    "pool": OfComparison(POOL, POOL.has_worked),
    "extend": OfComparison(trained_before, lambda c: 42 in {run.seed for run in c.runs("a")}, {"max_steps": 3}),
}


def test_every_option_of_compare_has_a_value() -> None:
    assert set(OF_COMPARE) == names_of(vsim.compare) - names_of(Trainer.fit)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.* that was tried:UserWarning")
def test_of_two_options_of_a_comparison_none_is_ignored_in_silence() -> None:
    refused, ignored = set(), set()
    for names in itertools.chain(itertools.combinations(OF_COMPARE, 1), itertools.combinations(OF_COMPARE, 2)):
        needs = {key: value for name in names for key, value in OF_COMPARE[name].needs.items()}
        given = {name: OF_COMPARE[name].value for name in names}
        if "extend" in given:
            given["extend"] = trained_before()
        try:
            found = compared(**{**needs, **given})
        except (TypeError, ValueError, UserWarning) as error:
            assert any(name in str(error) for name in {*names, *needs}), error  # noqa: PT017
            refused.add(names)
            continue
        ignored |= {(name, names) for name in names if not OF_COMPARE[name].acts(found)}
    assert not ignored
    assert not any(len(names) == 1 for names in refused)
