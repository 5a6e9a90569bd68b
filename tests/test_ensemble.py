"""Runs of an ensemble: each is bitwise equal to the run alone, whichever others train, leave or resume with it."""

from __future__ import annotations

import itertools
import random
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from resumed import sweep_to
from separate import TASKS, Task, small_mlp, vectors
from test_strategies_common import TABLE, examples, model
from torch import Tensor, nn
from torch.utils.data import Dataset

import vsim
from vsim.cluster.optim import ELEMENTWISE
from vsim.cluster.randomness import isolated
from vsim.data import digits
from vsim.engine import Executor
from vsim.models import MLP
from vsim.records.history import COLUMNS, OF_THE_MACHINE, History
from vsim.records.progress import Recorder
from vsim.strategy import (
    AveragingCommunicator,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
)
from vsim.strategy.communicate import all_reduce
from vsim.training import entries, setup
from vsim.training.loop import Ensemble
from vsim.training.setup import prepare

CPU = torch.device("cpu")
MEASURED = [c for c in COLUMNS if c not in OF_THE_MACHINE]
OPTIONS: dict[str, Any] = {"max_steps": 6, "val_interval": 2, "progress": False, "deterministic": True, "batch_size": 8}


def small() -> MLP:
    """For digits."""
    return MLP(hidden=(32,), seed=0)


def alone(strategy: Strategy, start: nn.Module, data: Any, val: Any, **options: Any) -> vsim.Trainer:
    trainer = vsim.Trainer(start, data, val, loss_fn=options.pop("loss_fn", None))
    trainer.model_after = trainer.fit(strategy=strategy, **{**OPTIONS, **options})  # type: ignore[attr-defined]
    return trainer


def assert_is_its_own_fit(run: vsim.ComparedRun, own: vsim.Trainer) -> None:
    """Losses of every node, measurements, events and the final model, to the bit."""
    np.testing.assert_array_equal(run.history.node_losses, own.history.node_losses)
    for column in MEASURED:
        np.testing.assert_array_equal(run.history[column], own.history[column], column)
    assert list(run.ledger) == list(own.ledger)
    assert run.model is not None
    theirs = own.model_after.state_dict()  # type: ignore[attr-defined]
    assert all(torch.equal(value, theirs[name]) for name, value in run.model.state_dict().items())


def run_of(strategies: Sequence[Strategy], start: nn.Module, data: Any, **options: Any) -> Ensemble:
    """Runs that are set up together, for a look inside."""
    trainer = vsim.Trainer(start, data)
    specs = [trainer.spec(f"run {i}", strategy=s, **{**OPTIONS, **options}) for i, s in enumerate(strategies)]
    histories = [History(c.label, c.num_nodes) for c in specs]
    with isolated(0, CPU):
        return prepare(specs, [Recorder(h) for h in histories], histories, CPU)


# Bitwise its own fit --------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")
@pytest.mark.parametrize(
    ("num_nodes", "seeds"),
    [(2, [7]), *(pytest.param(k, [1, 2], marks=pytest.mark.slow) for k in (1, 2, 5))],
)
def test_every_strategy_is_bitwise_its_own_fit(num_nodes: int, seeds: list[int]) -> None:
    rows = [row for row in TABLE if row.takes(num_nodes)]
    strategies = {row.name: row.make() for row in rows}
    data, val = examples(), examples(16, seed=9)
    result = vsim.compare(model(), data, val, strategies=strategies, num_nodes=num_nodes, seeds=seeds, **OPTIONS)
    assert list(result) == list(strategies)
    for row, seed in itertools.product(rows, range(len(seeds))):
        own = alone(row.make(), model(), data, val, num_nodes=num_nodes, seed=seeds[seed])
        assert_is_its_own_fit(result.runs(row.name)[seed], own)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_models_with_dropout_and_buffers_are_their_own_fit(task: Task, deterministic: bool) -> None:
    strategies = {
        "diloco": DiLoCoStrategy(H=2, inner_optim=OptimSpec("sgd", lr=0.1, momentum=0.9)),
        "sparta": SPARTAStrategy(p_sparta=0.3, lr=1e-2, max_norm=0.5),
        "fedavg": FedAvgStrategy(H=3, lr=1e-2, lr_scheduler="cosine", warmup_steps=2),
        "allreduce": SimpleReduceStrategy(lr=1e-2),
    }
    options: dict[str, Any] = {"num_nodes": 3, "deterministic": deterministic}
    data, val = task.data(), task.data()
    result = vsim.compare(task.model(), data, val, strategies=strategies, seeds=[4, 5], **{**OPTIONS, **options})
    for name, seed in itertools.product(strategies, (0, 1)):
        own = alone(strategies[name], task.model(), data, val, seed=(4, 5)[seed], **options)
        run = result.runs(name)[seed]
        if deterministic:
            assert_is_its_own_fit(run, own)
        np.testing.assert_allclose(run.history.node_losses, own.history.node_losses, rtol=1e-4)


@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")
def test_without_deterministic_a_member_is_its_own_fit_up_to_rounding() -> None:
    train, _ = digits()
    strategies = {
        "DiLoCo": DiLoCoStrategy(H=5, lr=1e-3),
        "AllReduce": SimpleReduceStrategy(lr=1e-3, max_norm=1.0),
        "SPARTA": SPARTAStrategy(lr=2e-3),
        "AllReduce, faster": SimpleReduceStrategy(lr=2e-3),
        "DeMo": DeMoStrategy(lr=1e-4),
        "alone": Strategy(lr=1e-3),
    }
    options = {"num_nodes": 4, "max_steps": 20, "deterministic": False, "batch_size": 16}
    result = vsim.compare(small(), train, strategies=strategies, **{**OPTIONS, **options})
    for name, strategy in strategies.items():
        own = alone(strategy, small(), train, None, **options)
        np.testing.assert_allclose(result[name].history.node_losses, own.history.node_losses, rtol=1e-4)


def test_seeds_with_models_of_their_own_are_bitwise_their_own_fit() -> None:
    def made(seed: int) -> nn.Module:
        return MLP(12, (16,), 5, dropout=0.2, seed=seed)

    options: dict[str, Any] = {"num_nodes": 2, "loss_fn": nn.functional.cross_entropy}
    strategies = {"a": FedAvgStrategy(H=2, lr=1e-2), "b": FedAvgStrategy(H=2, lr=2e-2)}
    result = vsim.compare(made, vectors(), vectors(), strategies=strategies, seeds=[1, 2, 3], **{**OPTIONS, **options})
    for name, (i, seed) in itertools.product(strategies, enumerate((1, 2, 3))):
        own = alone(strategies[name], made(seed), vectors(), vectors(), seed=seed, **options)
        assert_is_its_own_fit(result.runs(name)[i], own)


def test_a_sweep_over_nodes_and_batch_sizes_is_bitwise_its_fits() -> None:
    settings = {"H": [2, 3], "num_nodes": [1, 2, 5], "batch_size": [4, 8], "lr": 1e-2}
    options = {name: value for name, value in OPTIONS.items() if name != "batch_size"}
    data = vectors()
    result = vsim.sweep(small_mlp(), data, data, strategy=FedAvgStrategy, settings=settings, **options)
    assert len(result) == 12
    for name, own in result.settings.items():
        fit = alone(
            FedAvgStrategy(H=own["H"], lr=1e-2),
            small_mlp(),
            data,
            data,
            num_nodes=own["num_nodes"],
            batch_size=own["batch_size"],
        )
        assert_is_its_own_fit(result[name], fit)


class Jittered(Dataset[Any]):
    """Draws from the global generators, as augmentation does."""

    def __init__(self) -> None:
        self.inner = vectors()
        self.fetched = 0

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        self.fetched += 1
        x, y = self.inner[i]
        return x + 0.1 * torch.randn(12) + float(np.random.rand()), y  # noqa: NPY002


class DrawsGlobally(Strategy):
    """A user's own, with noise from the process's generator."""

    def step(self) -> None:
        for p in self.model.parameters():
            p.grad.add_(0.01 * torch.randn(p.shape[1:]))
            all_reduce(p.grad, "mean")
        super().step()


def test_what_is_drawn_globally_is_each_runs_own() -> None:
    strategies: dict[str, Strategy] = {
        "own": DrawsGlobally(lr=1e-2),
        "fedavg": FedAvgStrategy(H=2, lr=1e-2),
        "again": DrawsGlobally(lr=2e-2),
    }
    torch.manual_seed(11)
    expected = torch.rand(3)
    torch.manual_seed(11)
    with pytest.warns(UserWarning, match="own, seed 1: its strategy or a callback draws"):
        result = vsim.compare(
            small_mlp(), Jittered(), Jittered(), strategies=strategies, num_nodes=2, seeds=[1, 2], **OPTIONS
        )
    assert torch.equal(torch.rand(3), expected)  # the process's own state is as it was
    for name, (i, seed) in itertools.product(strategies, enumerate((1, 2))):
        own = alone(strategies[name], small_mlp(), Jittered(), Jittered(), num_nodes=2, seed=seed)
        assert_is_its_own_fit(result.runs(name)[i], own)


# Computed together ----------------------------------------------------------------------------------------------------


def test_what_is_alike_is_one_group_and_equal_nodes_keep_their_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = [DiLoCoStrategy(H=2), SimpleReduceStrategy(), FedAvgStrategy(), SPARTAStrategy(), Strategy(lr=1e-2)]
    strategies.insert(1, SimpleReduceStrategy())
    run = run_of(strategies, small_mlp(), vectors(), num_nodes=3, deterministic=False)
    (stack,) = run.stacks  # a small model: equal nodes are computed with the others
    kept = [run.cluster.replicas for run in run.runs]
    assert [(len(r.weights), len(r.grads), r.num_held) for r in kept] == [(3, 3, 3), *[(1, 1, 3)] * 2, *[(3, 3, 3)] * 3]
    assert len(stack.executor.replicas.weights) == 18
    monkeypatch.setattr(setup, "_SMALL", 100)
    run = run_of(strategies, small_mlp(), vectors(), num_nodes=3, deterministic=False)
    assert sorted(len(stack.runs) for stack in run.stacks) == [1, 1, 4]
    (exact,) = run_of(strategies, small_mlp(), vectors(), num_nodes=3).stacks  # a row per node
    assert len(exact.executor.replicas.weights) == 18


def test_runs_of_one_data_order_are_fetched_once() -> None:
    data = Jittered()
    run = run_of([Strategy(lr=r) for r in (1e-3, 1e-2, 1e-1)], small_mlp(), data, num_nodes=2)
    before = data.fetched
    next(run.stacks[0].batches)
    assert data.fetched - before == 2 * OPTIONS["batch_size"]


def test_equal_models_are_validated_once(monkeypatch: pytest.MonkeyPatch) -> None:
    measured: list[int] = []
    evaluate = Executor.evaluate

    def counted(self: Executor, weights: Tensor, *others: Any) -> Any:
        measured.append(len(weights))
        return evaluate(self, weights, *others)

    monkeypatch.setattr(Executor, "evaluate", counted)
    strategies = {"FedAvg": FedAvgStrategy(H=2), "alone": Strategy()}
    train, val = digits()
    options = {**OPTIONS, "val_interval": 1, "max_steps": 2}
    result = vsim.compare(
        MLP(hidden=(8,), seed=0), train, val, strategies=strategies, num_nodes=3, val_size=8, **options
    )
    # At first all are equal; then each node is equal to itself in the other run, as are the means; then one has synced.
    assert measured == [1, 3 + 1, 1 + 3 + 1]
    fedavg, apart = (result[name].history for name in strategies)
    for column in MEASURED:
        if column.endswith("_bytes"):
            continue
        np.testing.assert_array_equal(fedavg[column][:2], apart[column][:2], column)


def test_optimizers_with_equal_settings_are_stepped_in_one_call() -> None:
    strategies = [FedAvgStrategy(H=h, lr=rate) for h in (1, 2, 3) for rate in (1e-3, 1e-2)]
    run = run_of(strategies, small_mlp(), vectors(), num_nodes=2)
    calls: list[int] = []
    kept = torch.optim.AdamW.step

    def step(self: torch.optim.AdamW, closure: Any = None) -> Any:
        calls.append(sum(len(p) for p in self.param_groups[0]["params"]))
        return kept(self, closure)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.optim.AdamW, "step", step)
        assert list(itertools.islice(run.steps(), 2)) == [1, 2]
    assert calls == [6, 6, 6, 6]  # two rates of 3 × 2 rows each, in two steps


def test_a_rate_that_is_changed_by_hand_is_its_runs_own() -> None:
    def run(change: bool) -> Ensemble:
        made = run_of([FedAvgStrategy(H=2, lr=1e-2), FedAvgStrategy(H=3, lr=1e-2)], small_mlp(), vectors(), num_nodes=2)
        for step in made.steps():
            if step == 3 and change:
                made.runs[1].strategy.optim.param_groups[0]["lr"] = 0.1
        return made

    plain, changed = run(False), run(True)
    assert torch.equal(plain.runs[0].cluster.weights, changed.runs[0].cluster.weights)
    assert not torch.equal(plain.runs[1].cluster.weights, changed.runs[1].cluster.weights)


# Runs that leave ---------------------------------------------------------------------------------------------------


class Breaks(AveragingCommunicator):
    """Makes the weights infinite after a step, on one node."""

    def __init__(self, at: int) -> None:
        super().__init__(every=2)
        self.at = at

    def communicate(self, cluster: Any) -> None:
        super().communicate(cluster)
        if cluster.step == self.at:
            cluster.weights[1].fill_(float("inf"))


def broken(at: int, lr: float) -> Strategy:
    return CommunicateOptimizeStrategy([Breaks(at)], lr=lr)


@pytest.mark.parametrize("deterministic", [True, False])
def test_a_member_that_diverges_leaves_and_changes_no_other(deterministic: bool) -> None:
    good: dict[str, Strategy] = {f"good {i}": FedAvgStrategy(H=2, lr=10.0**-i) for i in (2, 3, 4)}
    bad: dict[str, Strategy] = {f"bad {at}": broken(at, 1e-2) for at in (1, 3, 4)}
    order = {name: {**good, **bad}[name] for name in ("bad 1", "good 2", "bad 3", "good 3", "bad 4", "good 4")}
    options = {**OPTIONS, "num_nodes": 2, "deterministic": deterministic}
    with pytest.warns(UserWarning, match="bad") as warned:
        result = vsim.compare(small_mlp(), vectors(), vectors(), strategies=order, **options)
    assert len(warned) == 3
    for at in (1, 3, 4):
        run = result[f"bad {at}"]
        assert run.diverged_at == at + 1 and run.model is None and len(run.history) == at + 1
        assert f"non-finite loss at step {at + 1} on nodes [1]" in run.failure or deterministic is None
        assert f"diverged at step {at + 1}" in result.table()
    for name, strategy in good.items():
        own = alone(strategy, small_mlp(), vectors(), vectors(), num_nodes=2, deterministic=deterministic)
        if deterministic:
            assert_is_its_own_fit(result[name], own)
        np.testing.assert_allclose(result[name].history.node_losses, own.history.node_losses, rtol=1e-5)


@pytest.mark.parametrize("cls", sorted(ELEMENTWISE, key=lambda cls: cls.__name__))
def test_optimizers_that_are_stepped_together_go_on_when_one_leaves_or_all_are_resumed(
    cls: type[torch.optim.Optimizer], tmp_path: Path
) -> None:
    strategies: dict[str, Strategy] = {"bad": broken(2, 1e-2), "good": FedAvgStrategy(H=2, inner_optim=cls, lr=1e-2)}
    options = {**OPTIONS, "num_nodes": 2, "seeds": [1, 2]}
    owns = [alone(strategies["good"], small_mlp(), vectors(), vectors(), num_nodes=2, seed=seed) for seed in (1, 2)]
    for saving, resumed in (
        ({}, {}),
        ({"max_steps": 4, "save_dir": tmp_path}, {"save_dir": tmp_path, "resume": True}),
    ):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            if saving:
                vsim.compare(small_mlp(), vectors(), vectors(), strategies=strategies, **{**options, **saving})
            result = vsim.compare(small_mlp(), vectors(), vectors(), strategies=strategies, **options, **resumed)
        for run, own in zip(result.runs("good"), owns, strict=True):
            assert_is_its_own_fit(run, own)


def test_a_sweep_of_sixty_with_five_that_diverge() -> None:
    settings = {"H": [1, 2, 3, 4], "lr": [1e-3, 2e-3, 3e-3, 4e-3, 1e9], "max_norm": [1.0, 2.0, 3.0]}
    options = {**OPTIONS, "num_nodes": 2, "deterministic": False, "max_steps": 8, "val_interval": 8}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        result = vsim.sweep(small_mlp(), vectors(), vectors(), strategy=FedAvgStrategy, settings=settings, **options)
    diverged = {name for name in result if result[name].diverged_at is not None}
    assert len(result) == 60 and diverged <= {name for name, own in result.settings.items() if own["lr"] == 1e9}
    assert all(result[name].ended for name in set(result) - diverged)
    assert result.settings[result.best()]["lr"] < 1


def test_one_that_is_refused_is_named_and_nothing_trains() -> None:
    heard: list[int] = []
    strategies = {"fine": Strategy(), "islands": FedAvgStrategy(island_size=5)}
    with pytest.raises(ValueError, match=r"^islands: island_size must be a whole number from 1 to 2, got 5"):
        vsim.compare(
            small_mlp(),
            vectors(),
            strategies=strategies,
            num_nodes=2,
            train_loss_hook=lambda s, _: heard.append(s),
            **OPTIONS,
        )
    assert heard == []


# Halving --------------------------------------------------------------------------------------------------------------

# Decades apart, so that the first rung tells which is best; a closer race is decided by who starts fastest.
GRID: dict[str, Any] = {"lr": [1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2, 0.3, 1.0, 3.0], "H": 5}


def swept(**options: Any) -> vsim.Sweep:
    train, val = digits()
    defaults = {"num_nodes": 2, "max_steps": 45, "progress": False, "val_interval": 15}
    return vsim.sweep(small(), train, val, strategy=FedAvgStrategy, settings=GRID, **{**defaults, **options})


def test_halving_keeps_the_winner_and_its_bits() -> None:
    full, halved = swept(deterministic=True, seeds=[1, 2]), swept(deterministic=True, seeds=[1, 2], halving=3)
    assert halved.best() == full.best()
    ends = [{run.stopped_at for run in halved.runs(name)} for name in halved]
    assert sorted(str(end) for end in ends) == ["{15}"] * 2 + ["{5}"] * 6 + ["{None}"]
    for ours, theirs in zip(halved.runs(full.best()), full.runs(full.best()), strict=True):
        np.testing.assert_array_equal(ours.history.node_losses, theirs.history.node_losses)
        assert list(ours.ledger) == list(theirs.ledger) and ours.model is not None
    for name in halved:  # stopped runs are equal to the beginning of the full ones
        run = halved[name]
        np.testing.assert_array_equal(run.history.node_losses, full[name].history.node_losses[: len(run.history) - 1])


def test_rows_of_those_that_left_are_gone() -> None:
    run = run_of([FedAvgStrategy(H=h, lr=1e-2) for h in (1, 2, 3, 4)], small_mlp(), vectors(), num_nodes=2)
    own = run_of([FedAvgStrategy(H=3, lr=1e-2)], small_mlp(), vectors(), num_nodes=2)
    run.stopping = lambda run: [m for m in run.runs if m.spec.label != "run 2"] if run.runs[2].done == 3 else []
    list(run.steps())
    list(own.steps())
    assert [len(stack.executor.replicas.weights) for stack in run.stacks] == [2]
    assert torch.equal(run.runs[2].cluster.weights, own.runs[0].cluster.weights)
    assert [m.done for m in run.runs] == [3, 3, 6, 3]


def test_halving_needs_to_know_how_long_and_all_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="halving needs max_steps"):
        swept(max_steps=None, halving=3)
    with pytest.raises(ValueError, match="halving must be a whole number >= 2, got 1"):
        swept(halving=1)
    monkeypatch.setattr(entries, "available_bytes", lambda *_: 5e5)
    with pytest.raises(ValueError, match="halving compares all runs at every rung"):
        swept(halving=3)


# Memory ---------------------------------------------------------------------------------------------------------------


def test_runs_are_taken_in_groups_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    strategies = {f"H={h}": FedAvgStrategy(H=h, lr=1e-2) for h in (1, 2, 3, 4, 5)}
    options = {**OPTIONS, "num_nodes": 2}
    together = vsim.compare(small_mlp(), vectors(), vectors(), strategies=strategies, **options)
    (spec,) = (m.spec for m in run_of([FedAvgStrategy(H=1)], small_mlp(), vectors(), num_nodes=2).runs)
    monkeypatch.setattr(
        entries, "available_bytes", lambda *_: 2.1 * entries.matrix_bytes(spec) / entries._SHARE_OF_MATRICES
    )
    with pytest.warns(UserWarning, match="trained in groups that fit into memory: 2, 2, 1 runs"):
        in_groups = vsim.compare(small_mlp(), vectors(), vectors(), strategies=strategies, **options)
    one_by_one = vsim.compare(small_mlp(), vectors(), vectors(), strategies=strategies, together=False, **options)
    for name in strategies:
        for other in (in_groups, one_by_one):
            np.testing.assert_array_equal(other[name].history.node_losses, together[name].history.node_losses)


# Saved and resumed as one ---------------------------------------------------------------------------------------------


class Killed(BaseException):
    """The process ends here: nothing is caught, nothing is saved any more."""


def killed_at(step: int) -> Callable[[int, float], None]:
    def hook(now: int, loss: float) -> None:
        if now == step:
            raise Killed

    return hook


def assert_same(result: vsim.Comparison, expected: vsim.Comparison) -> None:
    assert list(result) == list(expected)
    for name in expected:
        for ours, theirs in zip(result.runs(name), expected.runs(name), strict=True):
            assert (ours.stopped_at, ours.diverged_at) == (theirs.stopped_at, theirs.diverged_at)
            for column in MEASURED:
                np.testing.assert_array_equal(ours.history[column], theirs.history[column], column)
            np.testing.assert_array_equal(ours.history.node_losses, theirs.history.node_losses)
            assert list(ours.ledger) == list(theirs.ledger)
            if theirs.model is not None:
                assert ours.model is not None
                pairs = zip(ours.model.state_dict().values(), theirs.model.state_dict().values(), strict=True)
                assert all(torch.equal(*pair) for pair in pairs)


def test_a_comparison_that_is_killed_resumes_to_the_bit(tmp_path: Path) -> None:
    strategies: Mapping[str, Strategy] = {
        "diloco": DiLoCoStrategy(H=3, lr=1e-2),
        "bad": broken(3, 1e-2),  # so that its loss tells before it is saved
        "sparta": SPARTAStrategy(p_sparta=0.2, lr=1e-2),
        "allreduce": SimpleReduceStrategy(lr=1e-2),
    }
    options = {**OPTIONS, "num_nodes": 2, "max_steps": 9, "deterministic": False, "seeds": [1, 2]}

    def compare(**more: Any) -> vsim.Comparison:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            return vsim.compare(small_mlp(0.2), vectors(), vectors(), strategies=strategies, **options, **more)

    expected = compare()
    for at in (1, 5, 8):
        folder = tmp_path / str(at)
        saved: dict[str, Any] = {"save_dir": folder, "checkpoint_interval": 2}
        with pytest.raises(Killed):
            compare(**saved, train_loss_hook=killed_at(at))
        with pytest.raises(vsim.CheckpointError, match="holds the checkpoints of a comparison"):
            compare(**saved)
        assert_same(compare(**saved, resume=True), expected)
        assert_same(compare(**saved, resume=True), expected)  # one that has ended is there at once
        assert vsim.load_checkpoint(next(folder.glob("diloco*1"))).step == 9


def test_a_sweep_with_halving_resumes_to_the_bit(tmp_path: Path) -> None:
    expected = swept(halving=3)
    for at in (3, 5, 6, 20):  # before, at and after the first rung, and after the second
        saved = {"save_dir": tmp_path / str(at), "checkpoint_interval": 5, "halving": 3}
        with pytest.raises(Killed):
            swept(**saved, train_loss_hook=killed_at(at))
        assert_same(swept(**saved, resume=True), expected)


def test_another_comparison_does_not_resume(tmp_path: Path) -> None:
    options = {**OPTIONS, "num_nodes": 2, "save_dir": tmp_path / "race"}
    with pytest.raises(vsim.CheckpointError, match="there is no comparison to resume in the folder"):
        vsim.compare(small_mlp(), vectors(), strategies={"a": Strategy()}, resume=True, **options)
    vsim.compare(small_mlp(), vectors(), strategies={"a": Strategy()}, **options)
    with pytest.raises(vsim.CheckpointError, match="is another: its runs were"):
        vsim.compare(small_mlp(), vectors(), strategies={"b": Strategy()}, resume=True, **options)
    with pytest.raises(vsim.CheckpointError, match="the checkpoint at step 6 is of another run: .*lr"):  # noqa: RUF043
        vsim.compare(small_mlp(), vectors(), strategies={"a": Strategy(lr=0.5)}, resume=True, **options)
    with pytest.raises(ValueError, match="resume=True needs save_dir"):
        vsim.compare(small_mlp(), vectors(), strategies={"a": Strategy()}, num_nodes=2, resume=True)


# One after the other --------------------------------------------------------------------------------------------------


class Raises(Strategy):
    def step(self) -> None:
        raise RuntimeError("never")


def test_one_after_the_other_loses_nothing_either() -> None:
    options = {**OPTIONS, "num_nodes": 2, "together": False}
    strategies = {"good": Strategy(), "bad": broken(2, 1e-2), "raises": Raises(), "also good": FedAvgStrategy()}
    with pytest.warns(UserWarning, match="bad: non-finite loss|raises: never"):
        result = vsim.compare(small_mlp(), vectors(), vectors(), strategies=strategies, **options)
    assert result["bad"].diverged_at == 3 and result["raises"].failure == "RuntimeError: never"
    assert result["good"].model is not None and result["also good"].model is not None
    heard: list[int] = []
    refused = {"fine": Strategy(), "islands": FedAvgStrategy(island_size=5)}
    hook = {"train_loss_hook": lambda step, _: heard.append(step)}
    with pytest.raises(ValueError, match="island_size must be a whole number from 1 to 2, got 5"):
        vsim.compare(small_mlp(), vectors(), strategies=refused, **options, **hook)
    assert heard == []


@pytest.mark.slow
def test_a_sweep_that_is_killed_twenty_times_ends_as_if_it_had_not_been(tmp_path: Path) -> None:
    expected_file, result_file, folder = tmp_path / "expected.json", tmp_path / "result.json", tmp_path / "race"
    assert forked.ended(forked.started(sweep_to, expected_file, None)) == 0
    draw = random.Random(0)
    kills = 0
    while kills < 20:
        run = forked.started(sweep_to, result_file, folder)
        while not (folder / "race.json").exists() and run.is_alive():
            time.sleep(0.01)  # until it has begun
        time.sleep(draw.uniform(0.0, 4.0))
        run.kill()
        code = forked.ended(run)
        assert code in (0, -signal.SIGKILL)
        if code == 0:  # it got to its end
            shutil.rmtree(folder)
            continue
        kills += 1
    assert forked.ended(forked.started(sweep_to, result_file, folder)) == 0
    result, expected = map(vsim.Sweep.from_json, (result_file, expected_file))
    assert_same(result, expected)
