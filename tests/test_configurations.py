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
from separate import images, small_cnn, small_gpt, small_mlp, tokens, vectors
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingLR, ExponentialLR, LambdaLR, StepLR
from torch.utils.data import Subset

import vsim
from vsim import Trainer
from vsim.records.history import COLUMNS, OF_THE_MACHINE
from vsim.strategy import (
    FP4,
    QSGD,
    STRATEGIES,
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    DiLoCoCommunicator,
    GradientAverage,
    OptimSpec,
    PartitionedIndexSelector,
    PowerSGD,
    RandomIndexSelector,
    RandomK,
    ScaledSign,
    ShuffledSequentialIndexSelector,
    SignVote,
    SparseCommunicator,
    StatisticalQuantizer,
    Strategy,
    TileTopK,
    TopK,
    UniformQuantizer,
    compress,
    mean,
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
    torch_state = torch.get_rng_state()
    torch.manual_seed(5)
    model = nn.Linear(12, 5)
    torch.set_rng_state(torch_state)
    return model


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


def given_at_times(
    draw: Callable[..., Any], where: dict[str, Any], name: str, *of: Any, bad: tuple[Any, ...] = ()
) -> None:
    """Put an argument into `where`, in one of three draws."""
    if draw(st.integers(0, 2)) == 2:
        where[name] = seldom(draw, st.sampled_from(of), *bad)


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


@st.composite
def strategies(draw: Callable[..., Any]) -> tuple[Callable[..., Strategy], dict[str, Any]]:
    """A class and its arguments."""
    lockstep = [name for name, (cls, _) in STRATEGIES.items() if not cls.is_asynchronous]
    name = draw(st.sampled_from([*lockstep, "modules"]))
    cls: Callable[..., Strategy] = STRATEGIES[name][0] if name in STRATEGIES else Strategy
    own: dict[str, Any] = {}
    if name in STRATEGIES and "H" in {*STRATEGIES[name][1], *inspect.signature(cls).parameters}:
        own["H"] = seldom(draw, SMALL, 0, -1, 1.5, "2", None)
    if name == "fedavg":
        given_at_times(draw, own, "island_size", 1, 2, 3, bad=(0, 9, "all"))
    if name in ("fedavg", "diloco", "streaming", "fedopt", "fedper", "fedprox"):
        given_at_times(draw, own, "average", "mean", mean("examples"), "median", bad=("size",))
    if name in ("diloco", "sparta_diloco", "streaming", "eager"):
        given_at_times(draw, own, "outer_lr", 0.1, 0.7, 1.0, bad=(-1.0, "1", math.nan))
        given_at_times(draw, own, "outer_optim", "sgd", "adam", OptimSpec("sgd", momentum=0.5), bad=("muon", 3))
        if isinstance(own.get("outer_optim"), OptimSpec):
            own.setdefault("outer_lr", 0.5)
    if name == "streaming":
        given_at_times(draw, own, "fragments", 1, 2, None, bad=(0, 99, [["absent"]], "all"))
        given_at_times(draw, own, "pattern", "strided", "sequential", bad=("random",))
        given_at_times(draw, own, "delay", 0, 1, 2, bad=(-1, 99))
        given_at_times(draw, own, "mixing", 0, 0.5, 1.0, bad=(1.5,))
        given_at_times(draw, own, "outer_step", "due", "send", bad=("late",))
    if name == "eager":
        given_at_times(draw, own, "eager", True, False, bad=("no",))
    if name == "fedopt":
        given_at_times(draw, own, "outer_optim", "adam", "yogi", "adagrad", "sgd", bad=("muon", 3))
        given_at_times(draw, own, "outer_lr", 0.01, 1.0, bad=(0, "1"))
    if name == "fedper":
        given_at_times(draw, own, "personal", "*.bias", ["*.0.*", "*.bias"], bad=("absent", 3))
    if name == "fedprox":
        given_at_times(draw, own, "mu", 0, 0.1, bad=(-1,))
    if name == "scaffold":
        given_at_times(draw, own, "outer_lr", 0.5, 2.0, bad=(0,))
    if name == "noloco":
        given_at_times(draw, own, "alpha", 0, 0.5, bad=(2,))
        given_at_times(draw, own, "gamma", 0, 0.7, None, bad=(-1,))
    if name == "gossip":
        given_at_times(draw, own, "topology", "ring", "one_peer_exponential", bad=("star", [(0, 0)]))
    if name == "slowmo":
        given_at_times(draw, own, "beta", 0, 0.5, bad=(2,))
    if name == "desloc":
        given_at_times(draw, own, "H_m", 1, 2, 5, bad=(0,))
    if name == "gpa":
        given_at_times(draw, own, "mu_x", 0, 0.5, bad=(1,))
        given_at_times(draw, own, "mu_y", 0, 1.0, bad=(2,))
    if name in ("diloco", "streaming") and draw(st.booleans()):
        own["average"] = compress(draw(st.sampled_from(COMPRESSORS))())
    if name in ("sparta", "sparta_diloco"):
        if draw(st.booleans()):
            own["p_sparta"] = seldom(draw, SHARES, 0, -0.1, 1.1, math.nan, "half")
        elif draw(st.booleans()):
            own["index_selector"] = draw(st.sampled_from(SELECTORS))(draw(SHARES))
        given_at_times(draw, own, "sparta_interval", 1, 2, 3, bad=(0,))
        given_at_times(draw, own, "async_delay", 0, 1, 4, bad=(-1,))
        given_at_times(draw, own, "quantization_bits", 1, 4, 16, bad=(0, 17))
        given_at_times(draw, own, "mask", "seed", "broadcast", bad=("none",))
        given_at_times(draw, own, "compression_method", "random", "topk", bad=("top",))
    if name == "sparseloco":
        given_at_times(draw, own, "topk", 1, 8, 99, bad=(0,))
        given_at_times(draw, own, "chunk", 1, 7, 64, bad=(0,))
        given_at_times(draw, own, "quantization_bits", 1, 2, 8, None, bad=(0, 9))
        given_at_times(draw, own, "error_feedback", 0, 0.5, 1, bad=(1.1, "all"))
        given_at_times(draw, own, "outer_lr", 0.1, 1.0, bad=(-1.0, 0))
    if name == "demo":
        given_at_times(draw, own, "compression_topk", 1, 8, 99, bad=(0,))
        given_at_times(draw, own, "compression_chunk", 1, 7, 64, bad=(0,))
        given_at_times(draw, own, "compression_decay", 0.0, 0.5, 1.0, bad=(2.0,))
        given_at_times(draw, own, "weight_decay", 0.0, 0.1, bad=(-1.0,))
        given_at_times(draw, own, "index_bytes", "int64", "packed", bad=("int8",))
    if name == "modules":
        modules: list[Callable[[], Any]] = [
            GradientAverage,
            lambda: AveragingCommunicator(every=draw(SMALL)),
            lambda: DiLoCoCommunicator(draw(SMALL)),
            lambda: SparseCommunicator(draw(st.sampled_from(SELECTORS))(draw(SHARES))),
            lambda: GradientAverage(compress(draw(st.sampled_from(COMPRESSORS))())),
        ]
        chosen = draw(st.lists(st.sampled_from(modules), max_size=3))
        own["communication_modules"] = [make() for make in chosen]
        cls = CommunicateOptimizeStrategy
    if name not in ("demo", "scaffold"):
        optimizers = ["sgd", "adam", "adamw", "rmsprop", "adagrad", "adadelta", "nadam", "adafactor"]
        spec = OptimSpec("sgd", momentum=0.9, nesterov=True, weight_decay=1e-3)
        given_at_times(
            draw, own, draw(st.sampled_from(["optim_spec", "inner_optim"])), *optimizers, spec, bad=("adamv",)
        )
    given_at_times(draw, own, "lr", 0.0, 1e-3, 1e-2, bad=(-1.0, "0.1", math.nan, math.inf, 1e30))
    given_at_times(draw, own, "max_norm", 0.1, 1, bad=(0, -1, math.inf))
    schedule = draw(st.integers(0, 5))
    if schedule == 1:
        given_at_times(draw, own, "warmup_steps", 0, 2, 50, bad=(-1, 0.5))
        given_at_times(draw, own, "cosine_anneal", True, False, bad=("yes",))
        given_at_times(draw, own, "lr_scheduler", "cosine", "lambda_cosine", bad=("cos",))
    elif schedule == 2:
        classes: list[tuple[Any, dict[str, Any]]] = [
            (StepLR, {"step_size": 2}),
            (ExponentialLR, {"gamma": 0.9}),
            (CosineAnnealingLR, {"T_max": 3}),
            (LambdaLR, {"lr_lambda": lambda step: 1 / (1 + step)}),
        ]
        wrong = ((StepLR, {"step_size": 0}), (StepLR, {}), (CosineAnnealingLR, {"T_max": 0}), (StepLR, {"size": 1}))
        own["lr_scheduler"], own["lr_scheduler_kwargs"] = seldom(draw, st.sampled_from(classes), *wrong)
    return cls, own


@st.composite
def configurations(draw: Callable[..., Any]) -> Configuration:
    """A configuration, most of them without an error."""
    model, data, loss_fn = draw(
        st.sampled_from(
            [
                (small_mlp, vectors, None),
                (linear, vectors, F.cross_entropy),
                (small_cnn, images, None),
                (small_gpt, tokens, None),
            ]
        )
    )
    num_nodes = draw(st.integers(1, 5))
    form = draw(st.sampled_from(["shared", "shared", "own", "subset"]))
    count = draw(st.integers(max(2, num_nodes), 29)) if draw(st.integers(0, 30)) else draw(st.integers(1, 4))
    lengths = [count]
    if form == "own":
        lengths = draw(st.lists(st.integers(2, 9), min_size=num_nodes, max_size=num_nodes))
    loads = draw(st.integers(0, 3)) == 3

    def made() -> Any:
        if form == "own":
            return lambda rank, k, train: (Pairs if loads else (lambda d: d))(
                data(lengths[rank % len(lengths)], seed=rank)
            )
        whole = data(count + 3)
        chosen = Subset(whole, range(3, count + 3)) if form == "subset" else data(count)
        return Pairs(chosen) if loads else chosen

    options: dict[str, Any] = {"num_nodes": seldom(draw, st.just(num_nodes), 0, 2.0, "2")}
    options["batch_size"] = seldom(draw, st.sampled_from([2, 3, 4, 6, 16]), 0, None, 2.5)
    given_at_times(draw, options, "num_epochs", 1, 2, bad=(0,))
    if draw(st.integers(0, 3)) or "num_epochs" not in options:
        options["max_steps"] = seldom(draw, st.integers(1, 7), 0, 1.0)
    pieces = draw(st.integers(0, 5))
    if pieces == 1:
        options["minibatch_size"] = seldom(draw, st.sampled_from([1, 2]), 5, 0)
    elif pieces == 2:
        options["gradient_accumulation"] = seldom(draw, st.sampled_from([1, 2]), 5, 0)
    val = None
    if draw(st.booleans()):
        val = lambda: data(11, seed=7)  # noqa: E731
        given_at_times(draw, options, "val_size", 1, 5, 64, bad=(0,))
        given_at_times(draw, options, "val_interval", 1, 2, None, bad=(0,))
    given_at_times(draw, options, "shuffle", True, False, bad=("no", None))
    given_at_times(draw, options, "seed", 0, 1, 2**40, 2**63 - 1, np.int64(3), bad=(-1, 2**64, 0.5))
    given_at_times(draw, options, "executor", "vmap", "loop", "auto", bad=("map",))
    given_at_times(draw, options, "chunk_size", 1, 2, 9, bad=(0,))
    given_at_times(draw, options, "deterministic", True, False, bad=("yes",))
    given_at_times(draw, options, "autocast", True, False, False, bad=("bfloat16",))
    given_at_times(draw, options, "correlation_interval", 1, 3, bad=(0,))
    if draw(st.integers(0, 4)) == 4:
        options["dataloader_kwargs"] = seldom(
            draw,
            st.sampled_from([{}, {"drop_last": True}, {"num_workers": 0}]),
            {"num_workers": -1},
            {"workers": 1},
            [1],
        )
    if draw(st.integers(0, 5)) == 5:
        options["run_name"] = seldom(draw, st.sampled_from(["run", "a/b"]), "", "../up", 3)
        given_at_times(draw, options, "log_interval", 1, 3, bad=(0,))
    cut = None
    if draw(st.integers(0, 3)) == 3 and options.get("max_steps", 1) not in (0, 1, 1.0):
        cut = draw(st.integers(1, options.get("max_steps", 3) - 1))
        given_at_times(draw, options, "checkpoint_interval", 1, 2, bad=(0,))
    cls, arguments = draw(strategies())
    return Configuration(model, made, val, loss_fn, cls, arguments, options, cut, lengths)


class Outcome:
    """What a run has led to: a trainer that has trained, or an error."""

    def __init__(self, configuration: Configuration, folder: Path) -> None:
        self.error: Exception | None = None
        self.warnings: list[str] = []
        self.cut_at = None
        c = configuration
        try:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                self._train(c, folder)
        except (TypeError, ValueError, FloatingPointError) as error:
            self.error = error
        self.warnings = [str(w.message).replace(str(folder), "…") for w in caught]

    def _train(self, c: Configuration, folder: Path) -> None:
        strategy = c.strategy(**c.arguments)
        self.trainer = Trainer(c.model(), c.data(), None if c.val is None else c.val(), loss_fn=c.loss_fn)
        options = {**c.options, "strategy": strategy, "progress": False}
        if "run_name" in options:
            from vsim.logger import CSVLogger

            options["logger"] = CSVLogger(folder / "logs")
        if c.cut is not None:
            saving = {"save_dir": folder / "checkpoints"}
            first = {name: value for name, value in options.items() if name != "num_epochs"}
            self.trainer.fit(**{**first, **saving, "max_steps": c.cut})
            options |= {**saving, "resume": True}
        self.model = self.trainer.fit(**options)


def expected_steps(c: Configuration) -> int:
    if "max_steps" in c.options:
        return int(c.options["max_steps"])
    shard = max(c.lengths) if len(c.lengths) > 1 or callable(c.data()) else -(-c.lengths[0] // c.options["num_nodes"])
    drops = (c.options.get("dataloader_kwargs") or {}).get("drop_last", False)
    batches = shard // c.options["batch_size"] if drops else -(-shard // c.options["batch_size"])
    return int(batches * c.options.get("num_epochs", 1))


def random_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), random.getstate(), str(np.random.get_state())]  # noqa: NPY002


def check(configuration: Configuration) -> Outcome:
    """Run a configuration, twice if it trains, and see that everything is as it should be."""
    c = configuration
    before = random_states()
    with tempfile.TemporaryDirectory() as folder:
        outcome = Outcome(copy.deepcopy(c), Path(folder))
    assert random_states() == before
    if outcome.error is not None:
        names = [*c.options, *c.arguments, "p_sparta", "sparsification_rate", "optimizer", "outer optimizer", *SUBJECTS]
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
    with tempfile.TemporaryDirectory() as folder:
        again = Outcome(copy.deepcopy(c), Path(folder))
    assert random_states() == before
    assert again.error is None and again.warnings == outcome.warnings
    assert_same(outcome.trainer, again.trainer)
    if c.cut is not None:  # a run that was cut in two is the run that was not
        whole = copy.deepcopy(c)
        whole.cut = None
        whole.options.pop("checkpoint_interval", None)
        with tempfile.TemporaryDirectory() as folder:
            # The first part has ended with a validation.
            steps_measured = [step for step in range(steps + 1) if step != c.cut]
            assert_same(Outcome(whole, Path(folder)).trainer, outcome.trainer, steps_measured)
    return outcome


def assert_same(ours: Trainer, theirs: Trainer, measured: slice | list[int] = slice(None)) -> None:
    """Everything is equal to the bit; `measured` are the steps whose measurements both should have."""
    assert ours.strategy is not None and theirs.strategy is not None
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


def test_every_configuration_trains_or_says_what_is_wrong() -> None:
    trained: list[bool] = []

    @settings(max_examples=50, **STABLE)
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
@settings(max_examples=150, **STABLE)
@given(attendances())
def test_who_takes_part_is_the_same_in_a_run_that_was_cut_in_two_and_node_by_node(c: Configuration) -> None:
    with tempfile.TemporaryDirectory() as folder:
        cut = Outcome(copy.deepcopy(c), Path(folder))
    if cut.error is not None:
        return
    whole = dataclasses.replace(c, cut=None, options={**c.options})
    whole.options.pop("checkpoint_interval", None)
    with tempfile.TemporaryDirectory() as folder:
        ours = Outcome(copy.deepcopy(whole), Path(folder)).trainer
    assert_same(ours, cut.trainer, [step for step in range(len(ours.history)) if step != c.cut])
    assert ours.ledger.attendance == cut.trainer.ledger.attendance
    np.testing.assert_array_equal(ours.history.client_losses, cut.trainer.history.client_losses)
    if c.options.get("autocast"):
        return
    exact = {name: value for name, value in whole.options.items() if name != "chunk_size"}
    found = []
    for executor in ("auto", "loop"):
        one = dataclasses.replace(whole, options={**exact, "deterministic": True, "executor": executor})
        with tempfile.TemporaryDirectory() as folder:
            found.append(Outcome(copy.deepcopy(one), Path(folder)).trainer)
    assert_same(*found)


@pytest.mark.slow
@settings(max_examples=15, **STABLE)
@given(configurations(), st.lists(strategies(), min_size=1, max_size=3), st.booleans(), st.data())
def test_a_member_of_any_comparison_is_its_own_run(
    c: Configuration, others: list[tuple[Callable[..., Strategy], dict[str, Any]]], resumes: bool, data: st.DataObject
) -> None:
    """With other strategies and seeds, nodes that rest, and after a resume."""
    own = ("batch_size", "minibatch_size", "gradient_accumulation", "shuffle", "val_size", "val_interval")
    options = {name: value for name, value in c.options.items() if name in own}
    options |= {"num_nodes": c.options["num_nodes"], "deterministic": True, "progress": False, "loss_fn": c.loss_fn}
    options |= {"max_steps": data.draw(st.integers(2, 6))}
    if data.draw(st.booleans()):
        options["participation"] = vsim.Dropout(0.4)
    made = {str(i): (cls, own) for i, (cls, own) in enumerate([(c.strategy, c.arguments), *others])}
    data_and_val = c.data(), None if c.val is None else c.val()

    def compared(**more: Any) -> vsim.Comparison:
        members = {name: cls(**copy.deepcopy(own)) for name, (cls, own) in made.items()}
        return vsim.compare(c.model(), *data_and_val, strategies=members, seeds=[0, 7], **{**options, **more})

    with warnings.catch_warnings(), tempfile.TemporaryDirectory() as folder:
        warnings.simplefilter("ignore")
        try:
            if resumes:
                compared(max_steps=1, save_dir=folder)
            result = compared(**({"save_dir": folder, "resume": True} if resumes else {}))
        except (TypeError, ValueError, FloatingPointError):
            return  # of one member, before anything is trained
        for name, (cls, arguments) in made.items():
            for seed, run in zip([0, 7], result.runs(name), strict=True):
                trainer = Trainer(c.model(), *data_and_val, loss_fn=c.loss_fn)
                alone = {n: value for n, value in options.items() if n != "loss_fn"}
                try:
                    trainer.fit(strategy=cls(**copy.deepcopy(arguments)), seed=seed, **alone)
                except FloatingPointError:
                    assert run.error is not None
                    continue
                assert run.error is None
                np.testing.assert_array_equal(run.history.node_losses, trainer.history.node_losses)
                measured = [step for step in range(len(trainer.history)) if not (resumes and step == 1)]
                for column in (column for column in COLUMNS if column not in OF_THE_MACHINE):
                    ours, theirs = run.history[column][measured], trainer.history[column][measured]
                    np.testing.assert_array_equal(ours, theirs, err_msg=column)
                assert list(run.ledger) == list(trainer.ledger)
