"""A run beside others is the run alone, to the bit: whichever others train, leave, fail or resume with it."""

from __future__ import annotations

import itertools
import random
import re
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import forked_processes
import numpy as np
import pytest
import torch
from cut_runs import assert_same_comparison, assert_same_model, assert_same_record, sweep_to
from errors import refused, unnamed, warned
from reference_cluster import TASKS, images, small_cnn, small_gpt, small_mlp, tokens, vectors
from test_model_state import Average
from test_second_gradient import Sam
from test_strategies_common import TABLE, examples, model
from torch import Tensor, nn
from torch.utils.data import Dataset

import vsim
from vsim.checkpoint.folder import checkpoint_path
from vsim.cluster import Cluster
from vsim.cluster.optim import ELEMENTWISE
from vsim.cluster.randomness import isolated
from vsim.core.group import Group
from vsim.data import digits
from vsim.engine import Executor, VmapExecutor
from vsim.engine.proof import Proof
from vsim.models import MLP
from vsim.runs import parts
from vsim.runs.acts.halve import Halve
from vsim.runs.fit import Orders, prepare, steps
from vsim.runs.interrupt import Interrupt
from vsim.runs.tracked import TrackedRun
from vsim.strategy import (
    Algorithm,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    GPAStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
)

Strategies = Mapping[str, Strategy]
CPU = torch.device("cpu")
OPTIONS: dict[str, Any] = {"max_steps": 6, "val_interval": 2, "progress": False, "deterministic": True, "batch_size": 8}


def alone(strategy: Strategy, start: nn.Module, data: Any, val: Any, **options: Any) -> vsim.Trainer:
    trainer = vsim.Trainer(start, data, val, loss_fn=options.pop("loss_fn", None))
    trainer.model_after = trainer.fit(strategy=strategy, **{**OPTIONS, **options})  # type: ignore[attr-defined]
    return trainer


def assert_is_its_own_fit(run: vsim.ComparedRun, own: vsim.Trainer) -> None:
    """Losses of every node, measurements, events and the final model, to the bit."""
    assert_same_record(run.history, own.history)
    assert_same_model(run.model, own.model_after)  # type: ignore[attr-defined]


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        yield


def compare(strategies: Strategies, data: Any = None, start: Any = None, **options: Any) -> vsim.Comparison:
    data, start = vectors() if data is None else data, small_mlp() if start is None else start
    return vsim.compare(start, data, data, strategies=strategies, **{**OPTIONS, "num_nodes": 2, **options})


def groups_of(strategies: Sequence[Strategy], data: Any = None, **options: Any) -> list[Group[TrackedRun]]:
    """Runs that are set up together, for a look inside."""
    trainer = vsim.Trainer(small_mlp(), data or vectors())
    options = {**OPTIONS, "val_interval": None, "num_nodes": 2, **options}
    specs = [trainer.spec(f"run {i}", strategy=s, **options) for i, s in enumerate(strategies)]
    with isolated(0, CPU):
        return prepare([TrackedRun.of(spec) for spec in specs], CPU)


# Strategies, data and models that would spread what they do -----------------------------------------------------------


class Jittered(Dataset[Any]):
    """Draws from the global generators, as augmentation does; cannot be read after `limit` examples."""

    def __init__(self, limit: float = np.inf) -> None:
        self.inner, self.fetched, self.limit = vectors(), 0, limit

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        if self.fetched > self.limit:
            raise OSError("unreadable")
        self.fetched += 1
        x, y = self.inner[i]
        return x + 0.1 * torch.randn(12) + float(np.random.rand()), y  # noqa: NPY002


class Documents(Dataset[Any]):
    """Texts of several lengths, which a batch of one need not pad."""

    def __len__(self) -> int:
        return 12

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return torch.ones(3 + i % 4), torch.tensor(float(i))


class Slope(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(()))

    def forward(self, batch: Any) -> Tensor:
        return 1e-3 * (batch[0].sum(1) * self.slope - batch[1]).square().mean()


class DrawsInForward(nn.Module):
    """Takes its noise from a generator that nodes do not have."""

    def __init__(self, draw: Callable[[], float] = lambda: np.random.rand()) -> None:  # noqa: NPY002
        super().__init__()
        self.inner, self.draw = small_mlp(), draw

    def forward(self, batch: Any) -> Tensor:
        return self.inner(batch) * (1 + 0.1 * float(self.draw()))


class Noisy(torch.optim.Optimizer):
    """Draws from the process's generator, as Langevin dynamics does."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                p.add_(p.grad, alpha=-group["lr"]).add_(torch.randn_like(p), alpha=1e-3)


class DrawsInSetup(FedAvgStrategy):
    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        self.factor = random.random()

    def advance(self) -> None:
        super().advance()
        self.cluster.weights.mul_(1 + 0.01 * self.factor)


class Shakes(vsim.Callback):
    """Draws after the steps from `first` on."""

    def __init__(self, first: int = 1) -> None:
        self.first, self.heard = first, []

    def on_step(self, run: Any) -> None:
        self.heard.append(run.done)
        if run.done >= self.first:
            run.cluster.weights.add_(torch.randn_like(run.cluster.weights), alpha=1e-3)


class Resets(FedAvgStrategy):
    """Resets its optimizer's state on the way, and has its optimizer call something after every step."""

    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        self.optim.register_step_post_hook(lambda *_: self.cluster.weights.mul_(0.99))  # type: ignore[union-attr]

    def advance(self) -> None:
        super().advance()
        if self.cluster.completed == 2:
            self.optim.state.clear()  # type: ignore[union-attr]
        if self.cluster.completed == 4:
            for state in self.optim.state.values():  # type: ignore[union-attr]
                state["step"].zero_()


class Breaks(FedAvgStrategy):
    """Makes the weights infinite after a step, on one node."""

    def __init__(self, at: int) -> None:
        super().__init__(H=2)
        self.at = at

    def communicate(self, cluster: Any) -> None:
        super().communicate(cluster)
        if cluster.step == self.at:
            cluster.weights[1].fill_(float("inf"))


def broken(at: int, lr: float = 1e-2) -> Strategy:
    return CommunicateOptimizeStrategy([Breaks(at)], lr=lr)


class Fails(Algorithm):
    """Cannot be measured at step 4: its global weights are no such, or its numbers cannot be read."""

    def __init__(self, weights: Callable[[Tensor], Any] | None) -> None:
        self.weights = weights

    def global_weights(self, cluster: Any) -> Any:
        return self.weights(cluster.weights) if cluster.step == 4 and self.weights is not None else None

    def measured(self, cluster: Any) -> dict[str, float]:
        if cluster.step == 4:
            raise ValueError("nothing to read")
        return {"own": float(cluster.step)}


UNFIT: dict[str, Callable[[Tensor], Any] | None] = {
    "stacked": lambda rows: rows,
    "of another dtype": lambda rows: rows[0].double(),
    "a list": lambda rows: rows[0].tolist()[:1],
    "unreadable": None,
}
FAILING: Strategies = {name: CommunicateOptimizeStrategy([Fails(own)], lr=1e-2) for name, own in UNFIT.items()}
PLAIN: Strategies = {"fedavg": FedAvgStrategy(H=2, lr=1e-2), "sparta": SPARTAStrategy(p_sparta=0.3, lr=1e-2)}
NOISY: Strategies = {f"noisy {h}": FedAvgStrategy(H=h, inner_optim=OptimSpec(Noisy, lr=1e-2)) for h in (2, 3)}
SEVERAL: Strategies = {
    "diloco": DiLoCoStrategy(H=2, inner_optim=OptimSpec("sgd", lr=0.1, momentum=0.9)),
    "sparta": SPARTAStrategy(p_sparta=0.3, lr=1e-2, max_norm=0.5),
    "fedavg": FedAvgStrategy(H=3, lr=1e-2, lr_scheduler="cosine", warmup_steps=2),
    "allreduce": SimpleReduceStrategy(lr=1e-2),
}
MUON = {
    "muon": OptimSpec("muon", lr=0.02, rest=OptimSpec("adamw", lr=3e-3)),
    "adamw": OptimSpec("adamw", lr=3e-3),
    "muon again": OptimSpec("muon", lr=0.02, rest=OptimSpec("adamw", lr=3e-3)),
}


@dataclass
class Beside:
    """Strategies that are compared with their fits; others beside them, which come first; data, models, options."""

    strategies: Strategies
    others: Strategies = field(default_factory=dict)
    data: Callable[[], Any] = vectors
    make: Callable[[], nn.Module] = small_mlp
    options: dict[str, Any] = field(default_factory=dict)

    def check(self, seeds: Sequence[int] = (1, 2)) -> vsim.Comparison:
        together = {**self.others, **self.strategies}
        result = compare(together, self.data(), self.make(), seeds=list(seeds), **self.options)
        for name, (i, seed) in itertools.product(self.strategies, enumerate(seeds)):
            options = {"num_nodes": 2, "seed": seed, **self.options}
            options.pop("together", None)
            own = alone(self.strategies[name], self.make(), self.data(), self.data(), **options)
            assert_is_its_own_fit(result.runs(name)[i], own)
        return result


LOOP: dict[str, Any] = {"executor": "loop", "deterministic": False}
BESIDE = {
    **{task.name: Beside(SEVERAL, {}, task.data, task.model, {"num_nodes": 3}) for task in TASKS},
    "others leave": Beside(PLAIN, {"bad": broken(2)}, Jittered),
    "apart": Beside({**PLAIN, **NOISY}, {"bad": broken(2)}, Jittered, options={"together": False}),
    "others fail": Beside(PLAIN, FAILING),
    "own optimizers": Beside({"own": Resets(H=2, lr=1e-2), "too": Resets(H=3, lr=1e-2), **PLAIN}, {"bad": broken(2)}),
    "any length": Beside(
        {"alone": Strategy(lr=1e-2)}, {}, Documents, Slope, {"num_nodes": 1, "batch_size": 1, "val_size": 1}
    ),
    "two optimizers": Beside(
        {name: FedAvgStrategy(H=2, inner_optim=spec) for name, spec in MUON.items()}, {}, tokens, small_gpt
    ),
    "a model with state": Beside(PLAIN, {}, vectors, Average, LOOP),
    "second gradients": Beside(
        {"one": Sam(lr=0.1, inner_optim="sgd"), "two": Sam(lr=1e-2, inner_optim="sgd"), **PLAIN}
    ),
}


@pytest.mark.parametrize("case", [pytest.param(c, marks=pytest.mark.slow if c == "gpt" else []) for c in BESIDE])
def test_a_run_beside_others_is_its_own_fit(case: str) -> None:
    with quietly():
        result = BESIDE[case].check()
    for name in FAILING if case == "others fail" else ():
        assert re.search("nothing to read|must be shared weights, torch.float32", result[name].failure), name


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:(DCT|RandomBasis)TopK:UserWarning")
@pytest.mark.parametrize(
    ("num_nodes", "seeds"),
    [(2, [7]), (1, [7]), (5, [1, 2])],
)
def test_every_strategy_is_bitwise_its_own_fit(num_nodes: int, seeds: list[int]) -> None:
    strategies = {row.name: row.make() for row in TABLE if row.takes(num_nodes)}
    Beside(strategies, {}, examples, model, {"num_nodes": num_nodes}).check(seeds)


@pytest.mark.filterwarnings("ignore:(DCT|RandomBasis)TopK:UserWarning")
def test_without_deterministic_a_run_is_its_own_fit_up_to_rounding() -> None:
    strategies = {**SEVERAL, "demo": DeMoStrategy(lr=1e-4), "alone": Strategy(lr=1e-3)}
    for task in TASKS[1:]:
        options = {"num_nodes": 4, "deterministic": False, "val_interval": None}
        result = compare(strategies, task.data(), task.model(), **options)
        for name, strategy in strategies.items():
            own = alone(strategy, task.model(), task.data(), None, **options)
            np.testing.assert_allclose(result[name].history.node_losses, own.history.node_losses, rtol=1e-3)


def test_seeds_with_models_of_their_own_and_several_counts_are_their_own_fits() -> None:
    def made(seed: int) -> nn.Module:
        return MLP(12, (16,), 5, dropout=0.2, seed=seed)

    result = compare(PLAIN, start=made, seeds=[1, 2, 3], loss_fn=nn.functional.cross_entropy)
    for name, (i, seed) in itertools.product(PLAIN, enumerate((1, 2, 3))):
        options = {"num_nodes": 2, "seed": seed, "loss_fn": nn.functional.cross_entropy}
        assert_is_its_own_fit(result.runs(name)[i], alone(PLAIN[name], made(seed), vectors(), vectors(), **options))
    settings = {"H": [2, 3], "num_nodes": [1, 5], "batch_size": [4, 8], "lr": 1e-2}
    kept = {name: value for name, value in OPTIONS.items() if name != "batch_size"}
    swept = vsim.sweep(small_mlp(), vectors(), vectors(), strategy=FedAvgStrategy, settings=settings, **kept)
    assert len(swept) == 8
    for name, own in swept.settings.items():
        counts = {key: own[key] for key in ("num_nodes", "batch_size")}
        fit = alone(FedAvgStrategy(H=own["H"], lr=1e-2), small_mlp(), vectors(), vectors(), **counts)
        assert_is_its_own_fit(swept[name], fit)


@pytest.mark.slow
def test_optimizers_of_every_class_go_on_when_a_run_leaves_or_all_are_resumed(tmp_path: Path) -> None:
    good = {cls.__name__: FedAvgStrategy(H=2, inner_optim=cls, lr=1e-2) for cls in ELEMENTWISE}
    beside = Beside(good, {"bad": broken(2)})
    with quietly():
        whole = beside.check()
        compare({**beside.others, **good}, seeds=[1, 2], max_steps=4, save_dir=tmp_path)
        assert_same_comparison(compare({**beside.others, **good}, seeds=[1, 2], save_dir=tmp_path, resume=True), whole)


# Random numbers -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("who", ["the model", "own, seed 1: its", "the setup", "or a callback"])
def test_runs_that_draw_globally_are_refused_together_and_train_apart(who: str) -> None:
    own: Strategies = {"own": DrawsInSetup(H=2, lr=1e-2)} if who == "the setup" else {}
    own = {"own": NOISY["noisy 2"]} if "own" in who else own
    beside = Beside({**own, **PLAIN}, options={"callbacks": [Shakes()]} if "callback" in who else {})
    if who == "the model":
        beside.make, beside.options = DrawsInForward, LOOP
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    with quietly(), refused(ValueError, who, "global random generators", "together=False", "cluster.generator"):
        beside.check()
    beside.options = {**beside.options, "together": False}
    with quietly():
        beside.check()
    assert torch.equal(torch.rand(3), expected)  # the process's own state is as it was


def test_draws_that_begin_later_are_told_at_the_end_and_those_of_halving_refused() -> None:
    with warned("not in its first steps"):
        compare(PLAIN, callbacks=[Shakes(4)])
    settings = {"H": [1, 2, 3, 4], "lr": 1e-2}
    options = {**OPTIONS, "val_interval": None, "num_nodes": 2, "max_steps": 20, "halving": 2, "callbacks": [Shakes()]}
    with refused(ValueError, "callback", "(torch", "cluster.generator") as told:
        vsim.sweep(small_mlp(), vectors(), strategy=FedAvgStrategy, settings=settings, **options)
    assert "together" not in str(told.value).replace("train together", "")  # halving needs runs that train together


@pytest.mark.parametrize("executor", ["auto", "loop"])
@pytest.mark.parametrize(("draw", "name"), [((random.random,), "random"), ((), "numpy.random")])
def test_a_deterministic_model_must_not_draw_globally(draw: Any, name: str, executor: str) -> None:
    with quietly(), refused(ValueError, "deterministic=True", f"from {name}", "forward"):
        alone(Strategy(), DrawsInForward(*draw), vectors(), vectors(), executor=executor, num_nodes=2)
    with quietly(), refused(ValueError, "the model", f"({name})", "torch's functions"):
        compare(PLAIN, start=DrawsInForward(*draw), val_interval=None, executor=executor)


# Computed together ----------------------------------------------------------------------------------------------------


def test_what_is_alike_is_one_group() -> None:
    strategies = [DiLoCoStrategy(H=2), SimpleReduceStrategy(), SimpleReduceStrategy(), FedAvgStrategy()]
    strategies += [SPARTAStrategy(), Strategy(lr=1e-2)]
    (group,) = groups_of(strategies, num_nodes=3, deterministic=False)
    kept = [run.cluster.replicas for run in group.runs]
    assert [(len(r.weights), len(r.grads)) for r in kept] == 6 * [(3, 3)]
    assert len(group.executor.replicas.weights) == 18
    (group,) = groups_of([Strategy(lr=r) for r in (1e-3, 1e-2, 1e-1)], data := Jittered())
    before = data.fetched
    next(group.batches)  # of one order of the data: fetched once
    assert data.fetched - before == 2 * OPTIONS["batch_size"]


def test_equal_models_are_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    evaluate = Executor.evaluate

    def counted(self: Executor, weights: Tensor, *others: Any) -> Any:
        measured.append(len(weights))
        return evaluate(self, weights, *others)

    monkeypatch.setattr(Executor, "evaluate", counted)
    options = {**OPTIONS, "val_interval": 1, "max_steps": 2, "num_nodes": 3, "val_size": 8}
    strategies = {"FedAvg": FedAvgStrategy(H=2), "alone": Strategy()}
    vsim.compare(MLP(hidden=(8,), seed=0), *digits(), strategies=strategies, **options)
    # At first all are equal; then each node is equal to itself in the other run, as are the means; then one has synced.
    assert measured == [1, 3 + 1, 1 + 3 + 1]


def test_a_rate_that_is_changed_by_hand_is_its_runs_own() -> None:
    def run(change: bool) -> Group[TrackedRun]:
        (group,) = groups_of([FedAvgStrategy(H=2, lr=1e-2), FedAvgStrategy(H=3, lr=1e-2)])
        for moment in steps([group]):
            if moment.number == 3 and change:
                group.runs[1].strategy.optim.param_groups[0]["lr"] = 0.1
        return group

    (ours, other), (theirs, plain) = ([one.cluster.weights for one in run(change).runs] for change in (True, False))
    assert torch.equal(ours, theirs) and not torch.equal(other, plain)


# Runs that leave ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_run_that_diverges_leaves_and_changes_no_other(deterministic: bool) -> None:
    good: dict[str, Strategy] = {f"good {i}": FedAvgStrategy(H=2, lr=10.0**-i) for i in (2, 3, 4)}
    bad: dict[str, Strategy] = {f"bad {at}": broken(at) for at in (1, 3, 4)}
    order = {name: {**good, **bad}[name] for name in ("bad 1", "good 2", "bad 3", "good 3", "bad 4", "good 4")}
    with warned("bad") as issued:
        result = compare(order, deterministic=deterministic)
    assert len(issued) == 3
    for at in (1, 3, 4):
        run = result[f"bad {at}"]
        assert run.diverged_at == at + 1 and run.model is None and len(run.history) == at + 1
        assert not unnamed(run.failure, f"non-finite loss at step {at + 1}", [1])
        assert f"diverged at step {at + 1}" in result.table()
    for name, strategy in good.items():
        own = alone(strategy, small_mlp(), vectors(), vectors(), num_nodes=2, deterministic=deterministic)
        if deterministic:
            assert_is_its_own_fit(result[name], own)
        np.testing.assert_allclose(result[name].history.node_losses, own.history.node_losses, rtol=1e-5)


def test_rows_of_those_that_left_are_gone() -> None:
    (run,) = groups_of([FedAvgStrategy(H=h, lr=1e-2) for h in (1, 2, 3, 4)])
    (own,) = groups_of([FedAvgStrategy(H=3, lr=1e-2)])
    run.runs[2].name = "kept"
    halve = Halve(run.runs, [3], lambda step, scores: ["kept"])
    list(steps([run], Orders(Interrupt(), halve=halve)))
    list(steps([own]))
    assert len(run.executor.replicas.weights) == 2
    # Calls of eight rows and of two; a hundredth of one of Adam's steps.
    torch.testing.assert_close(run.runs[2].cluster.weights, own.runs[0].cluster.weights, rtol=0, atol=1e-4)
    assert [m.done for m in run.runs] == [3, 3, 6, 3]


def test_the_rows_of_one_that_diverged_prove_nothing_about_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The last batch of an epoch is of another shape, and proved again, by rows that are finite; with BatchNorm."""
    prove, nodes = VmapExecutor.prove, []

    def noted(*given: Any) -> Proof:
        proof = prove(*given)
        nodes.append(proof.nodes)
        return proof

    monkeypatch.setattr(VmapExecutor, "prove", noted)
    strategies = {"stays": FedAvgStrategy(H=2, lr=1e-2), "bad": broken(1)}
    with quietly():  # 15 examples a node are 8 and 7; node 1 of the second run has no weights then
        result = compare(strategies, images(), small_cnn(), deterministic=False)
    assert nodes == [[0, 3], [0, 2]] and result["stays"].ended


class RunningScale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))

    def forward(self, outputs: Tensor, y: Tensor) -> Tensor:
        loss = nn.functional.cross_entropy(outputs, y)
        self.scale.mul_(0.9).add_(0.1 * float(loss.detach()))
        return loss / self.scale


def test_a_loss_that_all_nodes_would_change_is_refused() -> None:
    options = {"start": MLP(12, (16,), 5, seed=0), "loss_fn": RunningScale(), "executor": "loop", "num_nodes": 1}
    with refused(ValueError, "loss_fn.scale", "forward", "buffer"):
        compare(PLAIN, **options)
    assert compare({"alone": Strategy()}, **options)["alone"].ended


# Errors ---------------------------------------------------------------------------------------------------------------


class Raises(FedAvgStrategy):
    def gradients(self) -> None:
        raise RuntimeError("at once")


@pytest.mark.parametrize("together", [True, False])
def test_what_is_refused_is_refused_before_any_trains(together: bool) -> None:
    heard: list[int] = []
    options: dict[str, Any] = {"together": together, "train_loss_hook": lambda step, _: heard.append(step)}
    with refused(ValueError, "islands", "island_size", "from 1 to 2", 5):
        compare({**PLAIN, "islands": FedAvgStrategy(island_size=5)}, **options)
    assert heard == []


def test_one_that_fails_takes_nothing_from_the_others() -> None:
    with refused(RuntimeError, "at once"):
        compare({**PLAIN, "raises": Raises(H=2)})
    with quietly():
        result = compare({**PLAIN, "bad": broken(2), "raises": Raises(H=2), "last": Strategy()}, together=False)
    assert result["bad"].diverged_at == 3 and result["raises"].failure == "RuntimeError: at once"
    assert all(result[name].model is not None for name in (*PLAIN, "last"))


def test_what_was_done_is_kept_when_the_data_fail() -> None:
    with quietly():
        result = compare(PLAIN, Jittered(limit=80))
    (failure,) = {run.failure for run in result.values()}
    assert re.fullmatch(r"OSError: the batches of step \d+: example \d+ .*, of node \d: unreadable", failure)
    assert all(len(run.history) > 1 for run in result.values())


# Halving --------------------------------------------------------------------------------------------------------------

# Decades apart, so that the first rung tells which is best; a closer race is decided by who starts fastest.
GRID: dict[str, Any] = {"lr": [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2, 0.3, 1.0, 3.0], "H": 5}


def swept(**options: Any) -> vsim.Sweep:
    defaults = {"num_nodes": 2, "max_steps": 45, "progress": False, "val_interval": 15}
    start = MLP(hidden=(16,), seed=0)
    return vsim.sweep(start, *digits(), strategy=FedAvgStrategy, settings=GRID, **{**defaults, **options})


@pytest.mark.slow
def test_halving_keeps_the_winner_and_its_bits() -> None:
    full, halved = (swept(deterministic=True, seeds=[1, 2], halving=halving) for halving in (None, 3))
    assert halved.best() == full.best()
    ends = [{run.stopped_at for run in halved.runs(name)} for name in halved]
    assert sorted(str(end) for end in ends) == ["{15}"] * 2 + ["{5}"] * 6 + ["{None}"]
    for name in halved:  # stopped runs are equal to the beginning of the full ones
        for ours, theirs in zip(halved.runs(name), full.runs(name), strict=True):
            losses = theirs.history.node_losses[: len(ours.history) - 1]
            np.testing.assert_array_equal(ours.history.node_losses, losses)
            assert (ours.model is not None) == (name == full.best())


def test_halving_needs_to_know_how_long_and_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with refused(ValueError, "halving", "max_steps"):
        swept(max_steps=None, halving=3)
    with refused(ValueError, "halving", "from 2 to 10", 1):
        swept(halving=1)
    monkeypatch.setattr(parts, "available_bytes", lambda *_: 5e5)
    with refused(ValueError, "halving … compare all runs"):
        swept(halving=3)


def test_runs_are_taken_in_groups_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = {f"H={h}": FedAvgStrategy(H=h, lr=1e-2) for h in (1, 2, 3, 4, 5)}
    together = compare(strategies)
    spec = groups_of([FedAvgStrategy(H=1)])[0].runs[0].spec
    room = 2.1 * parts.matrix_bytes(spec) / parts.SHARE_OF_MATRICES
    monkeypatch.setattr(parts, "available_bytes", lambda *_: room)
    with warned("parts that fit into memory", "2, 2, 1 runs"):
        assert_same_comparison(compare(strategies), together)
    assert_same_comparison(compare(strategies, together=False), together)


# Saved and resumed as one ---------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here: nothing is caught, nothing is saved any more."""


def killed_at(step: int) -> Callable[[int, float], None]:
    def hook(now: int, loss: float) -> None:
        if now == step:
            raise Killed

    return hook


@pytest.mark.parametrize(
    ("at", "together"),
    [(1, True), (5, False), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((5, True), (1, False)))],
)
def test_a_comparison_that_is_killed_resumes_to_the_bit(at: int, together: bool, tmp_path: Path) -> None:
    # One is bad after three steps, so that its loss tells before it is saved.
    strategies: Strategies = {"diloco": DiLoCoStrategy(H=3, lr=1e-2), "bad": broken(3), **PLAIN}
    strategies |= {} if together else NOISY
    saved: dict[str, Any] = {"save_dir": tmp_path / "race", "checkpoint_interval": 2}

    def trained(**more: Any) -> vsim.Comparison:
        with quietly():
            return compare(strategies, Jittered(), small_mlp(0.2), max_steps=9, together=together, **more)

    expected = trained(save_dir=tmp_path / "whole", checkpoint_interval=2)
    with pytest.raises(Killed):
        trained(**saved, train_loss_hook=killed_at(at))
    with refused(vsim.CheckpointError, "holds the checkpoints of a comparison"):
        trained(**saved)
    assert_same_comparison(trained(**saved, resume=True), expected)
    assert_same_comparison(trained(**saved, resume=True), expected)  # one that has ended is there at once
    for name in (
        "sparta",
        "diloco" if together else "noisy 3",
    ):  # a run that did not fetch its own data still continues alone
        trainer = vsim.Trainer(small_mlp(0.2), Jittered(), Jittered())
        options = {**OPTIONS, "num_nodes": 2, "max_steps": 12, "strategy": strategies[name]}
        trainer.fit(resume=vsim.load_checkpoint(tmp_path / "race" / name.replace(" ", "_")), **options)
        own = alone(strategies[name], small_mlp(0.2), Jittered(), Jittered(), num_nodes=2, max_steps=12)
        assert trainer.history.node_losses.tolist() == own.history.node_losses.tolist()


@pytest.mark.slow
@pytest.mark.parametrize("behind", [["allreduce", "gpa"], ["with_sgd"], ["diloco"]], ids=str)
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_allreduce_next_to_runs_that_are_behind_resumes_to_the_bit(
    task: Any, behind: list[str], tmp_path: Path
) -> None:
    """It has its rows, whether it trains alone or with others; threads may divide the calls' rows differently."""
    sgd = OptimSpec("sgd", lr=0.1, momentum=0.9)
    strategies: Strategies = {
        "allreduce": SimpleReduceStrategy(lr=1e-2),
        "with sgd": SimpleReduceStrategy(inner_optim=sgd),
        "gpa": GPAStrategy(lr=1e-2),
        "diloco": DiLoCoStrategy(H=3, lr=1e-2),
    }
    options: dict[str, Any] = {"max_steps": 12, "deterministic": False, "val_interval": 4, "checkpoint_interval": 3}
    threads, folder = torch.get_num_threads(), tmp_path / "race"
    trained = partial(compare, strategies, task.data(), task.model(), num_nodes=5, **options)
    try:
        torch.set_num_threads(1)
        expected = trained(save_dir=tmp_path / "whole")
        with pytest.raises(Killed):
            trained(save_dir=folder, train_loss_hook=killed_at(10))
        for name in behind:
            checkpoint_path(folder / name, 9).unlink()
        assert_same_comparison(trained(save_dir=folder, resume=True), expected)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.slow
def test_a_sweep_with_halving_resumes_to_the_bit(tmp_path: Path) -> None:
    expected = swept(halving=3)
    for at in (5, 20):  # at the first rung, and after the second
        saved = {"save_dir": tmp_path / str(at), "checkpoint_interval": 5, "halving": 3}
        with pytest.raises(Killed):
            swept(**saved, train_loss_hook=killed_at(at))
        assert_same_comparison(swept(**saved, resume=True), expected)


def test_runs_of_different_lengths_resume_where_each_was(tmp_path: Path) -> None:
    heard: list[int] = []

    def of_lengths(hook: Any = None, **options: Any) -> vsim.Sweep:
        settings = {"H": 2, "lr": 1e-2, "num_nodes": [1, 2, 4]}  # 8, 4 and 2 steps
        options |= {**OPTIONS, "max_steps": None, "num_epochs": 2, "train_loss_hook": hook, "val_interval": 3}
        return vsim.sweep(small_mlp(), vectors(), vectors(), strategy=FedAvgStrategy, settings=settings, **options)

    expected, saved = of_lengths(), {"save_dir": tmp_path / "race", "checkpoint_interval": 1}
    with pytest.raises(Killed):
        of_lengths(killed_at(7), **saved)
    for _ in range(2):
        assert_same_comparison(of_lengths(lambda step, _: heard.append(step), resume=True, **saved), expected)
        assert heard == [7, 8]


class Holds(FedAvgStrategy):
    """Keeps what cannot be saved."""

    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        self.keep_shared(items=iter([1, 2]))


def test_another_comparison_does_not_resume(tmp_path: Path) -> None:
    saved = {"save_dir": tmp_path / "race"}
    with refused(vsim.CheckpointError, "no comparison to resume"):
        compare({"a": Strategy()}, resume=True, **saved)
    compare({"a": Strategy()}, **saved)
    with refused(vsim.CheckpointError, "its runs were", "'a'", "'b'"):
        compare({"b": Strategy()}, resume=True, **saved)
    with refused(vsim.CheckpointError, "step 6", "another run", "lr"):
        compare({"a": Strategy(lr=0.5)}, resume=True, **saved)
    with refused(ValueError, "resume=True", "save_dir"):
        compare({"a": Strategy()}, resume=True)
    with refused(vsim.CheckpointError, "own: Holds.items"):
        compare({**PLAIN, "own": Holds(H=2)}, save_dir=tmp_path / "other")


@pytest.mark.slow
def test_a_sweep_that_is_killed_three_times_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    expected_file, result_file, folder = tmp_path / "expected.json", tmp_path / "result.json", tmp_path / "race"
    assert forked_processes.ended(forked_processes.started(sweep_to, expected_file, None)) == 0
    draw, kills = random.Random(0), 0
    while kills < 3:
        run = forked_processes.started(sweep_to, result_file, folder)
        while not (folder / "race.json").exists() and run.is_alive():
            time.sleep(0.01)  # until it has begun
        time.sleep(draw.uniform(0.0, 3.0))
        run.kill()
        code = forked_processes.ended(run)
        assert code in (0, -signal.SIGKILL)
        if code == 0:  # it reached its end
            shutil.rmtree(folder)
            continue
        kills += 1
    assert forked_processes.ended(forked_processes.started(sweep_to, result_file, folder)) == 0
    assert_same_comparison(*map(vsim.Sweep.from_json, (result_file, expected_file)))
