"""Whole configurations, drawn at random: each trains, or says which argument is wrong. Nothing else happens."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import random
import re
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from reference_cluster import images, small_cnn, small_gpt, small_mlp, tokens, vectors
from test_strategies_common import Instead, own_arguments, refused_by, taken_by
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, StepLR
from torch.utils.data import Subset

import vsim
from vsim import Trainer
from vsim.history.history import COLUMNS, OF_THE_MACHINE
from vsim.logger import CSVLogger
from vsim.strategy import (
    FP4,
    QSGD,
    STRATEGIES,
    CommunicateOptimizeStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    PartitionedIndexSelector,
    PowerSGD,
    RandomIndexSelector,
    RandomK,
    ScaledSign,
    ShuffledSequentialIndexSelector,
    SignVote,
    SimpleReduceStrategy,
    SPARTAStrategy,
    StatisticalQuantizer,
    Strategy,
    TileTopK,
    TopK,
    UniformQuantizer,
    compress,
)

# Beginnings of errors that are not about one argument, but about what several of them together have led to.
SUBJECTS = (
    "non-finite loss at step",
    "non-finite weights after step",
    "non-finite mean of the nodes' weights",
    "the training dataset has",
    "drop_last leaves no batch",
    "the model has no hidden matrix",
    "schedule",  # a checkpoint of a run with another one
)


@dataclass
class Configuration:
    """A run: the model and its data, how the strategy is made, and the arguments of `fit`.

    Attributes:
        cut: the step at which the run is saved, and from which it resumes.
    """

    model: Callable[[], nn.Module]
    data: Callable[[], Any]
    val: Callable[[], Any] | None
    loss_fn: Any
    strategy: Callable[..., Strategy]
    arguments: dict[str, Any]
    options: dict[str, Any]
    cut: int | None = None
    lengths: list[int] = field(default_factory=list)

    def __repr__(self) -> str:
        name = getattr(self.strategy, "__name__", "?")
        return f"{self.model.__name__} on {self.lengths}, {name}({self.arguments}), fit({self.options}), cut={self.cut}"


def linear() -> nn.Module:
    with torch.random.fork_rng():
        torch.manual_seed(5)
        return nn.Linear(12, 5)


class Pairs:
    """A dataset that is no TensorDataset."""

    def __init__(self, data: Any) -> None:
        self.data = data

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, index: int) -> Any:
        return self.data[index]


def seldom(draw: Callable[..., Any], good: st.SearchStrategy[Any], *bad: Any) -> Any:
    """Draw from `good`, or with a probability of 1 / 60 one of the `bad` values."""
    if bad and draw(st.integers(0, 59)) == 59:
        return draw(st.sampled_from(bad))
    return draw(good)


Values = tuple[list[Any], list[Any]]  # that are taken, and that are refused


def among(**values: Values) -> dict[str, Values]:
    return values


def given_at_times(draw: Callable[..., Any], where: dict[str, Any], values: dict[str, Values]) -> None:
    """Put arguments into `where`, each in one of three draws."""
    for name, (good, bad) in values.items():
        if draw(st.integers(0, 2)) == 2:
            where[name] = seldom(draw, st.sampled_from(good), *bad)


SMALL = st.integers(1, 4)
SHARES = st.sampled_from([0.02, 0.25, 0.5, 1.0])
SELECTORS = [RandomIndexSelector, ShuffledSequentialIndexSelector, PartitionedIndexSelector]
COMPRESSORS: list[Callable[[], Any]] = [
    lambda: TopK(0.1),
    lambda: RandomK(0.3),
    SignVote,
    ScaledSign,
    QSGD,
    lambda: UniformQuantizer(4, 32),
    lambda: PowerSGD(1),
    FP4,
    lambda: StatisticalQuantizer(2, 32),
    lambda: UniformQuantizer(4, 32, two_stage=True),
    lambda: TileTopK(4, 8, quantizer=StatisticalQuantizer(4)),
]
OUTER_SGD = OptimSpec("sgd", lr=0.5, momentum=0.5)
# Arguments that are drawn together with others below, of which some contradict each other.
TOGETHER = {"H", "p_sparta", "index_selector"}


def one_of_its_own(name: str, value: Any) -> Any:
    return value[name] if isinstance(value, Instead) else value


# Of each strategy, the arguments that are its own, as its rows have them.
OWN: dict[str, dict[str, Values]] = {
    short: {
        name: (taken_by(cls)[name], [one_of_its_own(name, value) for value in refused_by(cls).get(name, ())])
        for name in own_arguments(cls)
        if name not in TOGETHER and name in taken_by(cls)
    }
    for short, (cls, _) in STRATEGIES.items()
    if not cls.is_asynchronous
}
NESTEROV = OptimSpec("sgd", momentum=0.9, nesterov=True, weight_decay=1e-3)
OPTIMIZERS = ["sgd", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "nadam", "adafactor", NESTEROV]
EVERY = among(lr=([0.0, 1e-3, 1e-2], [-1.0, "0.1", math.nan, math.inf, 1e30]), max_norm=([0.1, 1], [0, -1, math.inf]))
NAMED = among(
    warmup_steps=([0, 2, 50], [-1, 0.5]),
    cosine_anneal=([True, False], ["yes"]),
    lr_scheduler=(["cosine", "lambda_cosine"], ["cos"]),
)
CLASSES: list[tuple[Any, dict[str, Any]]] = [
    (StepLR, {"step_size": 2}),
    (ExponentialLR, {"gamma": 0.9}),
    (CosineAnnealingLR, {"T_max": 3}),
    (LambdaLR, {"lr_lambda": lambda step: 1 / (1 + step)}),
]
NO_CLASSES = ((StepLR, {"step_size": 0}), (StepLR, {}), (CosineAnnealingLR, {"T_max": 0}), (StepLR, {"size": 1}))


@st.composite
def strategies(draw: Callable[..., Any]) -> tuple[Callable[..., Strategy], dict[str, Any]]:
    """A class and its arguments."""
    lockstep = [name for name, (cls, _) in STRATEGIES.items() if not cls.is_asynchronous]
    name = draw(st.sampled_from([*lockstep, "modules"]))
    cls: Callable[..., Strategy] = STRATEGIES[name][0] if name in STRATEGIES else CommunicateOptimizeStrategy
    own: dict[str, Any] = {}
    if name in STRATEGIES and "H" in {*STRATEGIES[name][1], *inspect.signature(cls).parameters}:
        own["H"] = seldom(draw, SMALL, 0, -1, 1.5, "2", None)
    given_at_times(draw, own, OWN.get(name, {}))
    if name in ("diloco", "streaming", "eager") and "outer_lr" not in own and draw(st.booleans()):
        own["outer_optim"] = OUTER_SGD
    if name in ("diloco", "streaming") and draw(st.booleans()):
        own["average"] = compress(draw(st.sampled_from(COMPRESSORS))())
    if name in ("sparta", "sparta_diloco"):
        if draw(st.booleans()):
            own["p_sparta"] = seldom(draw, SHARES, 0, -0.1, 1.1, math.nan, "half")
        elif draw(st.booleans()):
            own["index_selector"] = draw(st.sampled_from(SELECTORS))(draw(SHARES))
    if name == "modules":
        modules: list[Callable[[], Any]] = [
            SimpleReduceStrategy,
            lambda: FedAvgStrategy(H=draw(SMALL)),
            lambda: DiLoCoStrategy(H=draw(SMALL)),
            lambda: SPARTAStrategy(index_selector=draw(st.sampled_from(SELECTORS))(draw(SHARES))),
            lambda: SimpleReduceStrategy(average=compress(draw(st.sampled_from(COMPRESSORS))())),
        ]
        own["communication_modules"] = [make() for make in draw(st.lists(st.sampled_from(modules), max_size=3))]
    if name not in ("demo", "scaffold"):
        given_at_times(draw, own, {"inner_optim": (OPTIMIZERS, ["adamv"])})
    given_at_times(draw, own, EVERY)
    schedule = draw(st.integers(0, 5))
    if schedule == 1:
        given_at_times(draw, own, NAMED)
    elif schedule == 2:
        own["lr_scheduler"], own["lr_scheduler_kwargs"] = seldom(draw, st.sampled_from(CLASSES), *NO_CLASSES)
    return cls, own


OF_FIT = among(
    shuffle=([True, False], ["no", None]),
    seed=([0, 1, 2**40, 2**63 - 1, np.int64(3)], [-1, 2**64, 0.5]),
    executor=(["vmap", "loop", "auto"], ["map"]),
    chunk_size=([1, 2, 9], [0]),
    deterministic=([True, False], ["yes"]),
    autocast=([True, False, False], ["bfloat16"]),
    correlation_interval=([1, 3], [0]),
)
OF_LOADERS = [{}, {"drop_last": True}, {"num_workers": 0}]
PROBLEMS = [
    (small_mlp, vectors, None),
    (linear, vectors, F.cross_entropy),
    (small_cnn, images, None),
    (small_gpt, tokens, None),
]


@st.composite
def configurations(draw: Callable[..., Any]) -> Configuration:
    """A configuration, most of them without an error."""
    model, data, loss_fn = draw(st.sampled_from(PROBLEMS))
    num_nodes = draw(st.integers(1, 5))
    form = draw(st.sampled_from(["shared", "shared", "own", "subset"]))
    count = draw(st.integers(max(2, num_nodes), 29)) if draw(st.integers(0, 30)) else draw(st.integers(1, 4))
    lengths = [count]
    if form == "own":
        lengths = draw(st.lists(st.integers(2, 9), min_size=num_nodes, max_size=num_nodes))
    loaded = Pairs if draw(st.integers(0, 3)) == 3 else lambda whole: whole

    def made() -> Any:
        if form == "own":
            return lambda rank, k, train: loaded(data(lengths[rank % len(lengths)], seed=rank))
        return loaded(Subset(data(count + 3), range(3, count + 3)) if form == "subset" else data(count))

    options: dict[str, Any] = {"num_nodes": seldom(draw, st.just(num_nodes), 0, 2.0, "2")}
    options["batch_size"] = seldom(draw, st.sampled_from([2, 3, 4, 6, 16]), 0, None, 2.5)
    given_at_times(draw, options, among(num_epochs=([1, 2], [0])))
    if "num_epochs" not in options:
        options["max_steps"] = seldom(draw, st.integers(1, 7), 0, 1.0)
    pieces = draw(st.integers(0, 5))
    if pieces in (1, 2):
        name = "minibatch_size" if pieces == 1 else "gradient_accumulation"
        options[name] = seldom(draw, st.sampled_from([1, 2]), 5, 0)
    val = None
    if draw(st.booleans()):
        val = lambda: data(11, seed=7)  # noqa: E731
        given_at_times(draw, options, among(val_size=([1, 5, 64], [0]), val_interval=([1, 2, None], [0])))
    given_at_times(draw, options, OF_FIT)
    if options.get("deterministic") is True and draw(st.integers(0, 7)):  # else most would contradict each other
        options = {name: value for name, value in options.items() if name not in ("executor", "chunk_size")}
    if options["num_nodes"] == 1:
        options.pop("correlation_interval", None)
    if draw(st.integers(0, 4)) == 4:
        wrong = {"num_workers": -1}, {"workers": 1}, [1]
        options["dataloader_kwargs"] = seldom(draw, st.sampled_from(OF_LOADERS), *wrong)
    if draw(st.integers(0, 5)) == 5:
        options["run_name"] = seldom(draw, st.sampled_from(["run", "a/b"]), "", "../up", 3)
        given_at_times(draw, options, among(log_interval=([1, 3], [0])))
    cut = None
    if draw(st.integers(0, 3)) == 3 and options.get("max_steps", 1) not in (0, 1, 1.0):
        cut = draw(st.integers(1, options.get("max_steps", 3) - 1))
        given_at_times(draw, options, among(checkpoint_interval=([1, 2], [0])))
    cls, arguments = draw(strategies())
    return Configuration(model, made, val, loss_fn, cls, arguments, options, cut, lengths)


class Outcome:
    """What a run has led to: a trainer that has trained, or an error."""

    def __init__(self, configuration: Configuration) -> None:
        self.error: Exception | None = None
        with warnings.catch_warnings(record=True) as caught, tempfile.TemporaryDirectory() as folder:
            warnings.simplefilter("always")
            try:
                self._train(copy.deepcopy(configuration), Path(folder))
            except (TypeError, ValueError, FloatingPointError) as error:
                self.error = error
        self.warnings = [str(w.message).replace(str(folder), "…") for w in caught]

    def _train(self, c: Configuration, folder: Path) -> None:
        strategy = c.strategy(**c.arguments)
        self.trainer = Trainer(c.model(), c.data(), None if c.val is None else c.val(), loss_fn=c.loss_fn)
        options = {**c.options, "strategy": strategy, "progress": False}
        if "run_name" in options:
            options["logger"] = CSVLogger(folder / "logs")
        if c.cut is not None:
            saving = {"save_dir": folder / "checkpoints"}
            first = {name: value for name, value in options.items() if name != "num_epochs"}  # max_steps ends the run
            self.trainer.fit(**{**first, **saving, "max_steps": c.cut})
            options |= {**saving, "resume": True}
        self.model = self.trainer.fit(**options)


def whole(c: Configuration, **options: Any) -> Configuration:
    """The same run, which is not cut."""
    kept = {name: value for name, value in c.options.items() if name != "checkpoint_interval"}
    return dataclasses.replace(c, cut=None, options={**kept, **options})


def expected_steps(c: Configuration) -> int:
    if "max_steps" in c.options:
        return int(c.options["max_steps"])
    shard = max(c.lengths) if len(c.lengths) > 1 or callable(c.data()) else -(-c.lengths[0] // c.options["num_nodes"])
    drops = (c.options.get("dataloader_kwargs") or {}).get("drop_last", False)
    batches = shard // c.options["batch_size"] if drops else -(-shard // c.options["batch_size"])
    return int(batches * c.options.get("num_epochs", 1))


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]  # noqa: NPY002


def check(c: Configuration) -> Outcome:
    """Run a configuration, twice if it trains, and see that everything is as it should be."""
    before = random_states()
    outcome = Outcome(c)
    assert random_states() == before
    if outcome.error is not None:
        names = [*c.options, *c.arguments, "p_sparta", "optimizer", "outer optimizer", *SUBJECTS]
        assert any(re.search(rf"\b{re.escape(name)}\b", str(outcome.error)) for name in names), repr(outcome.error)
        return outcome
    trainer, num_nodes = outcome.trainer, c.options["num_nodes"]
    history, steps = trainer.history, expected_steps(c)
    assert history["step"].tolist() == list(range(steps + 1))
    assert history.node_losses.shape == (steps, num_nodes) and np.isfinite(history.node_losses).all()
    for column in ("payload_bytes", "wire_bytes", "examples", "seconds"):
        assert (np.diff(history[column]) >= 0).all() and history[column][0] == 0, column
    assert history["payload_bytes"][-1] == trainer.ledger.payload_bytes
    assert num_nodes > 1 or history["wire_bytes"][-1] == 0
    assert all(p.isfinite().all() for p in outcome.model.parameters())
    if c.val is not None:
        assert not np.isnan(history["global_loss"][[0, -1]]).any()
    again = Outcome(c)
    assert random_states() == before
    assert again.error is None and again.warnings == outcome.warnings
    assert_same(trainer, again.trainer)
    if c.cut is not None:  # a run that was cut in two is the run that was not
        assert_same(Outcome(whole(c)).trainer, trainer, besides=c.cut)
    return outcome


def assert_same(ours: Trainer, theirs: Trainer, besides: int | None = None) -> None:
    """Everything is equal to the bit; `besides` is a step with which one of them has ended, and validated."""
    measured = [step for step in range(len(ours.history)) if step != besides]
    for column in COLUMNS:
        if column not in OF_THE_MACHINE:
            own, other = ours.history[column][measured], theirs.history[column][measured]
            np.testing.assert_array_equal(own, other, err_msg=column)
    np.testing.assert_array_equal(ours.history.node_losses, theirs.history.node_losses)
    assert list(ours.ledger) == list(theirs.ledger)
    assert torch.equal(ours.strategy.cluster.weights, theirs.strategy.cluster.weights)


STABLE: dict[str, Any] = {
    "deadline": None,
    "derandomize": True,
    "database": None,
    "suppress_health_check": list(HealthCheck),
    "phases": (Phase.explicit, Phase.reuse, Phase.generate, Phase.target),  # what is found is read, not shrunk
}


@pytest.mark.parametrize("examples", [15, pytest.param(50, marks=pytest.mark.slow)])
def test_every_configuration_trains_or_says_what_is_wrong(examples: int) -> None:
    trained: list[bool] = []

    @settings(max_examples=examples, **STABLE)
    @given(configurations())
    def checked(configuration: Configuration) -> None:
        trained.append(check(configuration).error is None)

    checked()
    assert sum(trained) > len(trained) / 3 and not all(trained)  # both are common


@st.composite
def attendances(draw: Callable[..., Any]) -> Configuration:
    """A configuration in which some nodes, or clients of a population, take part at a time, each with its own data."""
    c = draw(configurations().filter(lambda c: type(c.options["num_nodes"]) is int and c.options["num_nodes"] > 0))
    nodes = c.options["num_nodes"]
    everyone = draw(st.integers(nodes, 7))
    rule = draw(st.sampled_from([None, vsim.Deadline(6.0), vsim.DropSlowest(0.4), vsim.OverCommit(1.5)]))
    kind = draw(st.sampled_from(["sample", "sample", "dropout", "schedule", "stragglers"]))
    if kind == "sample":
        epochs, rounds = draw(st.sampled_from([None, 0.5, 1, 2])), draw(st.sampled_from([None, None, 2, 4, 12]))
        plan: Any = vsim.Sample(nodes, of=everyone, rounds=rounds, epochs=epochs, stragglers=rule)
    elif kind == "dropout":
        plan = vsim.Dropout(draw(st.sampled_from([0.2, 0.5, 0.9])))
    elif kind == "schedule":
        there = st.lists(st.integers(0, nodes - 1), min_size=1, unique=True)
        plan = vsim.Schedule(draw(st.dictionaries(st.integers(0, 8), there, max_size=4)))
    else:
        plan = rule if rule is not None else vsim.Deadline(2.0)
    everyone = everyone if kind == "sample" else nodes
    own = {"participation": plan, "max_steps": draw(st.integers(2, 10))}
    if kind == "stragglers" or (kind == "sample" and rule is not None):
        own["compute"] = vsim.Compute(
            draw(st.lists(st.sampled_from([1.0, 2.0, 5.0]), min_size=everyone, max_size=everyone))
        )
    lengths = draw(st.lists(st.integers(1, 9), min_size=everyone, max_size=everyone))
    data = {small_cnn: images, small_gpt: tokens}.get(c.model, vectors)
    options = {name: value for name, value in c.options.items() if name != "num_epochs"} | own
    cut = draw(st.integers(1, own["max_steps"] - 1))
    made = lambda: lambda rank, k, train: data(lengths[rank], seed=rank)  # noqa: E731
    return dataclasses.replace(c, data=made, options=options, cut=cut, lengths=lengths)


@pytest.mark.slow
@settings(max_examples=100, **STABLE)
@given(attendances())
def test_who_takes_part_is_the_same_in_a_run_that_was_cut_in_two_and_node_by_node(c: Configuration) -> None:
    cut = Outcome(c)
    if cut.error is not None:
        return
    ours = Outcome(whole(c)).trainer
    assert_same(ours, cut.trainer, besides=c.cut)
    assert ours.ledger.attendance == cut.trainer.ledger.attendance
    np.testing.assert_array_equal(ours.history.client_losses, cut.trainer.history.client_losses)
    if not c.options.get("autocast"):
        exact = whole(c, deterministic=True, chunk_size=None)
        assert_same(*(Outcome(whole(exact, executor=executor)).trainer for executor in ("auto", "loop")))
