"""Who takes part: cohorts, failures and joins, stragglers. Each against a run that knows nothing of them."""

from __future__ import annotations

import copy
import errno
import itertools
import math
import os
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import torch
from cut_runs import assert_same_comparison
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cluster import Noisy, shard_batches, small_mlp, vectors
from reference_cluster import own_examples as dataset
from test_strategies_common import TABLE, Row
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.data import Subset, TensorDataset

import vsim
from vsim import (
    Availability,
    ByLabel,
    Compute,
    DayNight,
    Deadline,
    Dropout,
    DropSlowest,
    OverCommit,
    Sample,
    Schedule,
    Trace,
)
from vsim.cluster import Cluster
from vsim.cluster.participation import Participation
from vsim.cluster.plan import Round
from vsim.core.group import Group
from vsim.engine import VmapExecutor
from vsim.models import MLP
from vsim.runs.acts import attend, place
from vsim.strategy import (
    AloneStrategy,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    FedBNStrategy,
    FedOptStrategy,
    FedPerStrategy,
    NoLoCoStrategy,
    OptimSpec,
    ScaffoldStrategy,
    SimpleReduceStrategy,
    SPARTAStrategy,
    Strategy,
    clip,
    mean,
)

OPTIONS: dict[str, Any] = {"num_nodes": 2, "max_steps": 12, "batch_size": 4, "progress": False, "val_interval": None}
FEDAVG, FREE = FedAvgStrategy(H=2, lr=0.1), vsim.Network(float("inf"))
pytestmark = pytest.mark.filterwarnings("ignore:(DCT|RandomBasis)TopK")


def trained(strategy: Strategy, model: nn.Module | None = None, **options: Any) -> tuple[Tensor, vsim.Trainer]:
    trainer = vsim.Trainer(model or Noisy(), options.pop("data", dataset), loss_fn=options.pop("loss_fn", None))
    after = trainer.fit(strategy=strategy, **{**OPTIONS, **options})
    return torch.cat([t.flatten().double() for t in after.state_dict().values()]), trainer


def compared(strategies: dict[str, Strategy], model: nn.Module | None = None, **options: Any) -> vsim.Comparison:
    data = options.pop("data", dataset)
    return vsim.compare(model or Noisy(), data, strategies=strategies, **{**OPTIONS, **options})


def plain() -> MLP:
    return MLP(6, (5,), 3, seed=0)


def uneven(*sizes: int) -> Any:
    """Data of nodes with so many examples each."""
    return lambda rank, num_nodes, train: Subset(dataset(rank, num_nodes, train), range(sizes[rank]))


# Plans ----------------------------------------------------------------------------------------------------------------

PLANS: list[Participation] = [
    Dropout(0.5),
    Dropout(0.9, rounds=3),
    Schedule({0: [1, 2], 3: [0, 1, 2, 3], 9: [3]}),
    Trace([(2, 0, "fail"), (4, 3, "join"), (5, 0, "join"), (5, 1, "leave")]),
    Sample(4, of=9, rounds=2),
    DayNight(5, zones=2),
    Availability([[0.1, 0.9, 0.5, 0.0], [1.0, 0.2, 0.0, 0.3]], rounds=2),
    Sample(4, of=9, available=DayNight(4, night=0.0)),
]


@settings(max_examples=60)
@given(participation=st.sampled_from(PLANS), order=st.lists(st.integers(1, 40), min_size=1, max_size=8))
def test_a_plan_counts_what_every_node_has_done(participation: Participation, order: list[int]) -> None:
    plan = participation.plan(Round(4, 7, 1, None))
    for step in order:  # in any order
        now = plan.segment(step)
        assert now.first <= step <= now.last
        assert now.nodes
        done, times, before = np.zeros(plan.population, int), np.zeros(plan.population, int), ()
        at = 1
        while at < now.first:
            segment = plan.segment(at)
            done[list(segment.nodes)] += segment.last - segment.first + 1
            times[[n for n in segment.nodes if plan.renews or n not in before]] += 1
            at, before = segment.last + 1, segment.nodes
        assert at == now.first
        assert plan.clock(step).tolist() == done.tolist()
        assert plan.times(step).tolist() == times.tolist()
        assert plan.missed(step) == [now.first - 1 - done[node] for node in now.nodes]


def test_cohorts_and_dropout_are_drawn_from_the_seed() -> None:
    def drawn(participation: Participation, seed: int) -> list[tuple[int, ...]]:
        plan = participation.plan(Round(4, seed, 5, None))
        return [plan.segment(step).nodes for step in range(1, 400, 5)]

    for participation in (Sample(4, of=50), Dropout(0.4)):
        assert drawn(participation, 1) == drawn(participation, 1) != drawn(participation, 2)
    assert all(len(set(cohort)) == 4 and max(cohort) < 50 for cohort in drawn(Sample(4, of=50), 1))
    share = np.mean([len(nodes) for nodes in drawn(Dropout(0.4), 1)]) / 4
    assert abs(share - 0.6) < 0.1
    assert drawn(Sample(4, of=4), 3) == [(0, 1, 2, 3)] * 80


def counted(participation: Participation, num_nodes: int, days: int, rounds: int, seed: int = 0) -> np.ndarray:
    """(rounds, K): the share of days on which each node took part in each round."""
    plan = participation.plan(Round(num_nodes, seed, 1, None))
    there = np.zeros((days * rounds, plan.population))
    for step, own in enumerate(there, 1):
        own[list(plan.segment(step).nodes)] = 1
    return there.reshape(days, rounds, -1).mean(0)


def test_nodes_come_by_day_and_go_at_night() -> None:
    """Half past noon, evening, … of a day of eight rounds, by hand; the second zone is half a day apart."""
    found = counted(DayNight(8, day=0.9, night=0.1, zones=2), 6, 300, 8).reshape(8, 2, 3).mean(2)  # of a zone
    day = np.array([0.9, 0.5 + 0.4 * math.sqrt(0.5), 0.5, 0.5 - 0.4 * math.sqrt(0.5)])
    expected = np.concatenate([day, 1 - day])
    np.testing.assert_allclose(found, np.stack([expected, np.roll(expected, 4)], 1), atol=0.06)


@given(p=st.lists(st.floats(0, 1), min_size=2, max_size=12).filter(any), seed=st.integers(0, 2**32))
@settings(max_examples=15)
def test_at_least_one_node_is_there_and_sure_ones_always(p: list[float], seed: int) -> None:
    found = counted(Availability(p), len(p), 60, 1, seed)[0]
    assert found.sum() >= 1 - 1e-9
    for own, share in zip(p, found, strict=True):
        assert (own < 1 or share == 1) and abs(share - own) < (0.4 if sum(p) > 1 else 1.01)
    by_day, at_night = counted(Availability(np.outer([1.0, 0.0], np.ones(len(p)))), len(p), 5, 2, seed)
    assert by_day.tolist() == [1] * len(p) and at_night.sum() == pytest.approx(1)  # the one that is closest


def test_classes_take_turns() -> None:
    """A client of one class, of two equal ones, of three to one, and one with no examples; a turn lasts two rounds."""
    found = counted(ByLabel(torch.tensor([[5, 0], [4, 4], [1, 3], [0, 0]]), turn=2, otherwise=0.2), 4, 500, 4)
    expected = [[1, 1, 0.2 + 0.8 / 3, 0.2]] * 2 + [[0.2, 1, 1, 0.2]] * 2
    np.testing.assert_allclose(found, expected, atol=0.07)
    assert (found[:2, 0] == 1).all() and (found[:, 1] == 1).all() and (found[2:, 2] == 1).all()


def test_cohorts_are_drawn_from_the_clients_that_are_there() -> None:
    """Of eight clients five, all sure: each is in 3/5 of the cohorts of three. With two, the cohort is of two."""
    found = counted(Sample(3, of=8, available=Availability([0, 1, 1, 0, 1, 1, 1, 0])), 3, 800, 1)[0]
    np.testing.assert_allclose(found, [0, 0.6, 0.6, 0, 0.6, 0.6, 0.6, 0], atol=0.05)
    assert found.sum() == pytest.approx(3)
    assert counted(Sample(3, of=4, available=Availability([0, 1, 1, 0])), 3, 9, 1)[0].tolist() == [0, 1, 1, 0]
    everyone, all_sure = (counted(Sample(3, of=8, available=p), 3, 50, 1) for p in (None, Availability([1.0] * 8)))
    assert everyone.tolist() == all_sure.tolist()  # the draws of the cohort are the same


def test_who_was_there_is_drawn() -> None:
    def drawn(num_nodes: int, plan: Participation | None, **options: Any) -> Any:
        return trained(FEDAVG, num_nodes=num_nodes, participation=plan, **options)[1].history.plot_attendance()

    ax = drawn(3, Schedule({0: [0, 1, 2], 2: [1], 10: [0, 2]}))
    (image,), (stairs,) = ax.images, ax.child_axes[0].patches
    assert image.get_array().tolist() == [[1, 0, 1], [1, 1, 0], [1, 0, 1]]
    assert stairs.get_data().values.tolist() == [3, 1, 2] and stairs.get_data().edges.tolist() == [0, 2, 10, 12]
    assert ax.get_ylabel() == "node" and ax.get_legend() is None
    ax = drawn(4, DropSlowest(0.25), compute=Compute(1, speeds=[1, 1, 1, 0.5]))
    assert ax.images[0].get_array()[3].tolist() == [2] * 6 and ax.get_legend() is not None
    assert drawn(2, Sample(2, of=5)).get_ylabel() == "client"
    with refused(ValueError, "participation="):
        drawn(2, None)


def test_a_trace_is_read_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.csv"
    path.write_text("step,node,event\n3,1,fail\n5,2,join\n6,1,join\n")
    plan = Trace(path).plan(Round(3, 0, 1, None))
    assert [plan.segment(step).nodes for step in range(1, 8)] == [(0, 1)] * 3 + [(0,)] * 2 + [(0, 2)] + [(0, 1, 2)]


def planned(participation: Participation, num_nodes: int = 1, interval: int = 1, *examples: Any) -> Any:
    return participation.plan(Round(num_nodes, 0, interval, None, *examples))


def resting(strategy: Strategy) -> None:
    trained(strategy, participation=Sample(3, of=3, epochs=1, rounds=3), num_nodes=3, data=uneven(4, 12, 8))


class KeepsARow(SimpleReduceStrategy):
    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        self.first = cluster.weights[0]


@pytest.mark.parametrize(
    ("make", "error", "said"),
    [
        (lambda: Sample(5, of=4), ValueError, "5 … population of 4"),
        (lambda: Sample(5, of=10**12), ValueError, "of=1,000,000,000,000 … 64,000 GB"),
        (lambda: Sample(4, of=4, store="x"), ValueError, "store"),
        (lambda: Sample(1, of=4, store=3), TypeError, "store … path … 3"),
        (lambda: Sample(1, of=4, available=0.5), TypeError, "available … 0.5"),
        (lambda: Sample(1, of=4, available=Dropout(0.5, rounds=2)), TypeError, "rounds=2 … available"),
        (lambda: planned(Sample(4, of=9), 3), ValueError, "num_nodes … 4"),
        (lambda: planned(Sample(4, of=9, rounds=7), 4, 5), ValueError, "multiple of the 5 steps"),
        (lambda: planned(Sample(1, of=2, epochs=1e30), 1, 5, np.ones(2)), ValueError, "round has 5"),
        (lambda: planned(Sample(1, of=3, available=Availability([1, 0]))), ValueError, "2 … has 3"),
        (lambda: Dropout(1.0), ValueError, "p … >= 0 and < 1"),
        (lambda: DayNight(1), ValueError, "period … >= 2 … 1"),
        (lambda: DayNight(8, day=0.5, night=0.6), ValueError, "night … >= 0 and <= 0.5 … 0.6"),
        (lambda: Availability([0.5, 1.5]), ValueError, "p … >= 0 and <= 1 … [0.5, 1.5]"),
        (lambda: planned(Availability([0.5, 1]), 3), ValueError, "2 nodes … has 3"),
        (lambda: ByLabel([1, 2]), ValueError, "counts … 2 dimensions … [1, 2]"),
        (lambda: Schedule({3: []}), ValueError, "at least one"),
        (lambda: planned(Schedule({3: [4]}), 4), ValueError, "0 … 3 … [4]"),
        (lambda: Schedule({0: 3}), TypeError, "Schedule … step 0 … nodes … list … 3"),
        (lambda: Trace([(1, 0, "crash")]), ValueError, "crash"),
        (lambda: Trace([(1, 0)]), ValueError, "(step, node, event) … (1, 0)"),  # type: ignore[list-item]
        (lambda: Trace(None), TypeError, "(step, node, event) … None"),
        (lambda: planned(Trace([(1, 0, "fail"), (2, 0, "leave")]), 2), ValueError, "cannot leave"),
        (lambda: planned(Trace([(1, 0, "fail")])), ValueError, "no node … step 1"),
        (lambda: Deadline(3.0, quorum=0.5), TypeError, "quorum"),
        (lambda: Deadline("soon"), ValueError, "adaptive … soon"),
        (lambda: trained(FEDAVG, participation=Deadline(3.0)), TypeError, "Deadline … compute"),
        (lambda: trained(FEDAVG, participation=Dropout(0.5), compute=1.0), TypeError, "compute"),
        (lambda: trained(FEDAVG, participation=OverCommit(), compute=1.0), TypeError, "OverCommit … Sample"),
        (lambda: resting(SimpleReduceStrategy()), TypeError, "gradients … step 2 … epochs="),
        (lambda: resting(Strategy([SimpleReduceStrategy()])), TypeError, "gradients … step 2 … epochs="),
        (lambda: trained(DeMoStrategy(), participation=Sample(2, of=4)), TypeError, "Compress.residual"),
        (lambda: trained(KeepsARow(), participation=Schedule({0: [0]})), vsim.CheckpointError, "KeepsARow.first"),
    ],
)  # fmt: skip
def test_refused(make: Any, error: type[Exception], said: str) -> None:
    with refused(error, said):
        make()


# Nodes that come and go -----------------------------------------------------------------------------------------------

STRATEGIES = {
    "AllReduce": SimpleReduceStrategy(lr=1e-2),
    "DiLoCo": DiLoCoStrategy(H=3, lr=1e-2),
    "SPARTA": SPARTAStrategy(p_sparta=0.3, lr=1e-2),
    "FedAvg, islands": FedAvgStrategy(H=2, island_size=2, lr=1e-2),
    "DeMo": DeMoStrategy(lr=1e-3, compression_chunk=4, compression_topk=4),
}


def assert_same_results(ours: vsim.Comparison, theirs: vsim.Comparison) -> None:
    """All but the attendance."""
    for name, run in ours.items():
        run.ledger.attendance[:] = theirs[name].ledger.attendance
    assert_same_comparison(ours, theirs)


def test_a_node_that_never_takes_part_does_not_exist() -> None:
    three = compared(STRATEGIES, num_nodes=3)
    for name, run in compared(STRATEGIES, num_nodes=4, participation=Schedule({0: [0, 1, 2]})).items():
        expected, losses = three[name], run.history.node_losses
        same = all(map(torch.equal, run.model.state_dict().values(), expected.model.state_dict().values()))
        assert same, f"{name}, a row of TABLE of clients, differs between a round of all clients and no rounds"
        assert np.array_equal(losses[:, :3], expected.history.node_losses) and np.isnan(losses[:, 3]).all()
        assert run.ledger.payload_bytes == expected.ledger.payload_bytes
        assert run.ledger.node_payload_bytes[3] == 0


@pytest.mark.parametrize("gone", [Schedule({4: [0, 1]}), Trace([(4, 2, "leave")])])
def test_nodes_that_would_leave_after_the_end_are_warned_of(gone: Participation) -> None:
    with pytest.warns(UserWarning, match=f"{type(gone).__name__}.*after step 4.*after 4"):
        trained(FEDAVG, num_nodes=3, participation=gone, max_steps=4)
    trained(FEDAVG, num_nodes=3, participation=gone, max_steps=5)  # a warning would be an error
    trained(FEDAVG, num_nodes=3, participation=Schedule({0: [0, 1, 2]}), max_steps=4)


def test_those_who_join_are_copies_of_a_peer() -> None:
    """AllReduce by hand: AdamW with the mean gradient of the participating nodes, each with its own next batch."""
    attendance = [(0, 1)] * 3 + [(1,)] * 2 + [(0, 1, 2)] * 3
    plan = Schedule({0: [0, 1], 3: [1], 5: [0, 1, 2]})
    found, trainer = trained(SimpleReduceStrategy(lr=1e-2), plain(), num_nodes=3, max_steps=8, participation=plan)
    own = plain()
    optimizer = torch.optim.AdamW(own.parameters(), lr=1e-2)
    batches = [shard_batches(dataset(node, 3, True), 1, 0, 4, True, 42) for node in range(3)]
    for nodes in attendance:
        optimizer.zero_grad()
        for node in nodes:
            (own(next(batches[node])) / len(nodes)).backward()
        optimizer.step()
    expected = torch.cat([t.flatten().double() for t in own.state_dict().values()])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)
    # Weights and two moments, once at step 6, from node 1 by way of node 0 to node 2.
    joins = [(event.step, event.groups, event.payload_bytes) for event in trainer.ledger if event.label == "join"]
    assert joins == [(6, ((1, 0, 2),), 3 * 4 * (6 * 5 + 5 + 5 * 3 + 3))]


class Linear(nn.Module):
    """Its gradient is its input."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(()))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return (batch[0] * self.w).mean()


def test_who_joins_copies_the_first_that_stays() -> None:
    """Gradients are 1, 0 and 3. Node 1 comes as node 0 goes, after two steps: it begins at 2's −6, and stays there."""
    options: dict[str, Any] = {"num_nodes": 3, "max_steps": 3, "participation": Schedule({0: [0, 2], 2: [1, 2]})}
    options["data"] = lambda rank, num_nodes, train: TensorDataset(torch.full((8,), [1.0, 0.0, 3.0][rank]))
    _, trainer = trained(Strategy(inner_optim="sgd", lr=1.0), Linear(), **options)
    assert trainer.strategy is not None and trainer.strategy.cluster.weights.flatten().tolist() == [-6, -9]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*SimpleReduce")
@pytest.mark.parametrize("deterministic", [False, True])
def test_every_strategy_sees_the_present_rows_only(deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of absent nodes may hold anything: filled with NaN, they change nothing."""
    schedule = Schedule({0: [1, 2, 3], 2: [0, 2], 3: [0, 1, 2, 3], 5: [2], 6: [1, 2, 3]})
    strategies = {row.name: row.make() for row in TABLE}
    options: dict[str, Any] = {
        "num_nodes": 4,
        "max_steps": 8,
        "deterministic": deterministic,
        "participation": schedule,
    }

    def spoiling(group: Group[Any], *given: Any) -> None:
        arrange(group, *given)
        for run in group.runs:
            made = [t for t in tree_leaves(list(run.presence.made.values())) if isinstance(t, Tensor)]
            for rows in (t[len(run.rows) :] for t in made if t.is_floating_point()):
                rows.fill_(math.nan)
        present = sum(len(run.rows) for run in group.runs)
        for rows in (group.whole.weights, group.whole.grads, *group.whole.buffers.values()):
            rows[present:] = math.nan
        spoiled.append(len(group.whole.weights) - present)

    expected = compared(strategies, MLP(6, (64, 16), 3, seed=0), **options)
    arrange, spoiled = attend.arrange, list[int]()
    for module in (attend, place):
        monkeypatch.setattr(module, "arrange", spoiling)
    for name, run in compared(strategies, MLP(6, (64, 16), 3, seed=0), **options).items():
        assert run.ended and run.model is not None, (name, run.failure)
        assert all(t.isfinite().all() for t in run.model.state_dict().values()), name
        np.testing.assert_array_equal(run.history.node_losses, expected[name].history.node_losses, err_msg=name)
        assert list(run.ledger) == list(expected[name].ledger), name
    assert max(spoiled) > 0


def test_runs_resume_where_nodes_come_and_go(tmp_path: Path) -> None:
    own: dict[str, Any] = {"num_nodes": 4, "participation": Schedule({0: [0, 2, 3], 5: [0, 3], 8: [0, 1, 2, 3]})}
    whole = compared(STRATEGIES, **own)
    for stop in (5, 7):
        own["save_dir"] = tmp_path / str(stop)
        compared(STRATEGIES, max_steps=stop, **own)
        assert_same_comparison(compared(STRATEGIES, resume=True, **own), whole)
    with refused(vsim.CheckpointError, "participation"):
        compared(STRATEGIES, resume=True, **{**own, "participation": Schedule({0: [0, 2, 3], 5: [0, 1]})})


def test_a_run_that_resumes_validates_in_the_same_calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if fewer nodes are present then: kernels may round a call of other shapes differently."""
    sizes, vmapped = list[int](), VmapExecutor._vmapped

    def noted(
        self: VmapExecutor, model: Any, of_node: Any, lowering: Any, size: int, *parts: Any, batch_of_all: bool = False
    ) -> Any:
        sizes.extend([size] if batch_of_all else [])
        return vmapped(self, model, of_node, lowering, size, *parts, batch_of_all=batch_of_all)

    monkeypatch.setattr(VmapExecutor, "_vmapped", noted)
    options: dict[str, Any] = {"num_nodes": 4, "val_interval": 1, "progress": False, "strategy": FedAvgStrategy(H=9)}
    found = []
    for plan in (Schedule({0: range(4), 3: [1, 2]}), Schedule({0: [0], 3: range(4), 5: [1, 2]})):
        options |= {"participation": plan, "save_dir": tmp_path / str(len(found))}
        trainer = vsim.Trainer(small_mlp(), vectors(), vectors())
        trainer.fit(**options, max_steps=6)
        first, sizes[:] = [*sizes], []
        trainer.fit(**options, max_steps=8, resume=True)
        found.append((first, [*sizes]))
        sizes.clear()
        trainer.fit(**options | {"save_dir": None}, max_steps=8)
        assert [*found[-1][0], *found[-1][1]] == sizes
        sizes.clear()
    # One model before the first step; then the present nodes and the global model, at most four in a call.
    assert found[0] == ([1, *3 * [4, 1], 3, 3, 3], [3, 3])


@pytest.mark.parametrize("plan", [Sample(3, of=5), Schedule({0: [0, 1], 7: [1, 2]})], ids=repr)
def test_members_are_their_own_fits(plan: Participation) -> None:
    """FedOpt's AdamW counts its steps, and begins anew at those at which its run syncs."""
    strategies = {cls.__name__: cls(H=3, lr=1e-2) for cls in (DiLoCoStrategy, FedAvgStrategy)}
    if isinstance(plan, Schedule):
        strategies |= {f"FedOpt, {H}": FedOptStrategy(H=H, lr=1e-2) for H in (2, 3)}
    options: dict[str, Any] = {"num_nodes": 3, "participation": plan, "deterministic": True}
    for name, run in compared(strategies, seeds=[2], **options).items():
        _, own = trained(strategies[name], seed=2, **options)
        np.testing.assert_array_equal(run.history.node_losses, own.history.node_losses, name)
        assert list(run.history.ledger) == list(own.ledger)


EVERY = {name: entry for name, entry in vsim.strategy.STRATEGIES.items() if not entry[0].is_asynchronous}


@pytest.mark.filterwarnings("ignore:.*because its tiles are small")
def test_as_many_other_nodes_as_the_model_has_tensors() -> None:
    """A shape alone does not say whether a tensor has a row for each node."""
    strategies = {name: cls(**{"H": 2} if "H" in names else {}) for name, (cls, names) in EVERY.items()}
    plan = Schedule({0: range(4), 3: range(1, 5)})  # at whose first batch those of the others are smaller
    options: dict[str, Any] = {"num_nodes": 5, "max_steps": 4, "participation": plan, "data": vectors(29)}
    for name, run in compared(strategies, small_mlp(), **options).items():
        joined = [(event.step, event.groups) for event in run.ledger if event.label == "join"]
        assert joined == [(4, ((1, 4),))] and np.isfinite(run.history["train_loss"][1:]).all(), name


# Cohorts --------------------------------------------------------------------------------------------------------------

SGD: dict[str, Any] = {"H": 3, "lr": 0.1, "inner_optim": "sgd"}


def of_clients(row: Row) -> Strategy:
    given = {name: value for name, value in SGD.items() if name != "inner_optim" or not row.refuses}
    return row.make(**given)


FEDERATED = {
    **{row.name: of_clients(row) for row in TABLE if row.is_of_clients},
    "FedAdam, momentum": FedOptStrategy(H=3, lr=0.1, inner_optim=OptimSpec("sgd", momentum=0.9)),
    "clipped": FedAvgStrategy(**SGD, average=mean("examples") | clip(0.1)),
}


@pytest.mark.parametrize("deterministic", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_a_cohort_of_all_is_all(deterministic: bool) -> None:
    """Of a model without BatchNorm, whose statistics a round averages, and of SGD, which keeps nothing."""
    options: dict[str, Any] = {"num_nodes": 5, "deterministic": deterministic}
    everyone = compared(FEDERATED, plain(), **options)
    for name, run in compared(FEDERATED, plain(), participation=Sample(5, of=5), **options).items():
        expected = everyone[name]
        same = all(map(torch.equal, run.model.state_dict().values(), expected.model.state_dict().values()))
        assert same, f"{name}, a row of TABLE of clients, differs between a round of all clients and no rounds"
        np.testing.assert_array_equal(run.history.node_losses, expected.history.node_losses, name)


NOTHING: list[Participation] = [
    Dropout(0.0),
    Dropout(1e-300),
    Schedule({}),
    Schedule({35: [0, 1, 2]}),
    Trace([(35, 3, "fail")]),
    Sample(4, of=4),
    Deadline(1e9),
]


def test_a_plan_in_which_nothing_happens_is_no_plan() -> None:
    """Over three epochs, whose last batches are smaller: 30 examples of 4 nodes are batches of 4 and 4."""
    options: dict[str, Any] = {"num_nodes": 4, "data": vectors(30), "max_steps": None, "num_epochs": 3, "batch_size": 3}
    strategies, model = dict(itertools.islice(STRATEGIES.items(), 3)), MLP(12, (5,), 5, seed=0)
    strategies["NoLoCo"] = NoLoCoStrategy(H=2, lr=1e-2)  # draws new pairs when the nodes change
    without = {name: one for name, one in strategies.items() if name != "NoLoCo"}
    expected = {len(own): compared(own, model, **options) for own in (strategies, without)}
    assert expected[4]["DiLoCo"].history["examples"].tolist() == [0, 12, 24, 32, 44, 56, 64, 76, 88, 96]
    for plan in NOTHING:
        clock = {"compute": 1.0} if isinstance(plan, Deadline) else {}
        own = without if isinstance(plan, Sample) else strategies
        assert_same_results(compared(own, model, participation=plan, **clock, **options), expected[len(own)])


@pytest.mark.slow
@pytest.mark.parametrize("stop", [7, 6])  # within a round, and at its end
def test_cohorts_resume(stop: int, tmp_path: Path) -> None:
    whole = compared(FEDERATED, participation=Sample(2, of=7))
    own: dict[str, Any] = {"participation": Sample(2, of=7), "save_dir": tmp_path}
    compared(FEDERATED, max_steps=stop, **own)
    assert_same_comparison(compared(FEDERATED, resume=True, **own), whole)


def fedavg_by_hand(model: nn.Module, data: Any, rounds: list[tuple[Any, Any]], drop_last: bool = False) -> Tensor:
    """The mean of the clients' models after rounds of (clients, steps of each), each with its own data and place."""
    population = 1 + max(max(clients) for clients, _ in rounds)
    batches = [shard_batches(data(k, population, True), 1, 0, 4, True, 42, drop_last) for k in range(population)]
    own = copy.deepcopy(model).train()
    for clients, steps in rounds:
        moved = []
        for client, number in zip(clients, steps, strict=True):
            local = copy.deepcopy(own)
            optimizer = torch.optim.SGD(local.parameters(), lr=0.1, momentum=0.5, weight_decay=0.1)
            for batch in itertools.islice(batches[client], number):
                optimizer.zero_grad()
                local(batch).backward()
                optimizer.step()
            moved.append(local.state_dict())
        own.load_state_dict({name: torch.stack([m[name].double() for m in moved]).mean(0) for name in moved[0]})
    return torch.cat([t.flatten() for name, t in own.state_dict().items() if "num_batches" not in name]).double()


def by_vsim(H: int, model: nn.Module, **options: Any) -> tuple[Tensor, vsim.Trainer]:
    spec = OptimSpec("sgd", lr=0.1, momentum=0.5, weight_decay=0.1)
    found, trainer = trained(FedAvgStrategy(H=H, inner_optim=spec), model, **{"num_nodes": 3, **options})
    return found[["num_batches" not in name for name, t in model.state_dict().items() for _ in t.flatten()]], trainer


@pytest.mark.parametrize(("executor", "drop_last"), [("vmap", True), ("loop", False)])
def test_nodes_of_unequal_size_train_as_each_alone(executor: str, drop_last: bool) -> None:
    """Nodes with 6, 12 and 8 examples have batches of 4 and 2, three of 4, and two of 4; no example is repeated."""
    options: dict[str, Any] = {"data": uneven(6, 12, 8), "max_steps": 7, "executor": executor}
    found, trainer = by_vsim(100, Noisy(dropout=0.0), dataloader_kwargs={"drop_last": drop_last}, **options)
    expected = fedavg_by_hand(Noisy(dropout=0.0), uneven(6, 12, 8), [(range(3), [7] * 3)], drop_last)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    small = 0 if drop_last else 3 * 2  # node 0's every second batch has two examples
    assert trainer.history["examples"][-1] == 7 * 3 * 4 - small


def test_cohorts_by_hand() -> None:
    found, trainer = by_vsim(3, plain(), num_nodes=2, participation=Sample(2, of=5))
    cohorts = [segment.nodes for segment in trainer.ledger.attendance]
    assert len(cohorts) == 4 and len(set(cohorts)) > 1
    expected = fedavg_by_hand(plain(), dataset, [(cohort, [3, 3]) for cohort in cohorts])
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_local_epochs() -> None:
    """Clients of 4, 7 and 16 examples take 2, 4 and 8 steps for two epochs of batches of four, and rest. Twice."""
    data, steps, model = uneven(4, 7, 16), (2, 4, 8), Noisy(dropout=0.0)
    found, trainer = by_vsim(8, model, data=data, max_steps=16, participation=Sample(3, of=3, epochs=2))
    expected = fedavg_by_hand(model, data, [(range(3), steps)] * 2)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    there = ~np.isnan(trainer.history.node_losses[:8])
    assert there.T.tolist() == [[step < own for step in range(8)] for own in steps]
    assert trainer.history["examples"].tolist()[:9] == [0, 12, 23, 31, 38, 42, 46, 50, 54]
    timeline = vsim.timeline(trainer, FREE, Compute([4.0, 2.0, 1.0]))
    assert timeline.seconds[8::8].tolist() == [8, 16]  # two steps of 4 s, four of 2 s, or eight of 1 s
    with refused(ValueError, "8 steps … round has 4"):
        trained(FedAvgStrategy(H=4), num_nodes=3, data=data, participation=Sample(3, of=3, epochs=2), max_steps=8)
    # When all clients have done their epochs there is no loss. 16 examples are four steps of four; a round has six.
    _, trainer = trained(FedAvgStrategy(H=6), participation=Sample(3, of=5, epochs=1), num_nodes=3, max_steps=8)
    assert np.flatnonzero(np.isnan(trainer.history["train_loss"])).tolist() == [0, 5, 6]


class Counting(CommunicateOptimizeStrategy):
    """Every client counts its own steps."""

    def __init__(self) -> None:
        super().__init__([DiLoCoStrategy(H=2)], lr=1e-2)

    def begin(self, cluster: Any) -> None:
        super().begin(cluster)
        self.keep_client(count=torch.full((cluster.replicas.num_held, 2), 5.0))

    def after_optimizer(self) -> None:
        super().after_optimizer()
        self.count += 1


def stored(store: Path | None, **options: Any) -> vsim.Trainer:
    """Two of six clients, who count."""
    return trained(Counting(), **{"num_nodes": 2, "participation": Sample(2, of=6, store=store), **options})[1]


@pytest.mark.parametrize("on_disk", [False, True])
def test_what_belongs_to_clients_stays_with_them(tmp_path: Path, on_disk: bool) -> None:
    store = tmp_path / "clients" if on_disk else None
    trainer = stored(store)
    stored(store, max_steps=7, save_dir=tmp_path)
    for one in (trainer, stored(store, resume=True, save_dir=tmp_path)):
        assert isinstance(one.strategy, Counting)
        steps = np.zeros(6)
        for segment in one.ledger.attendance:
            steps[list(segment.nodes)] += 2
        last = one.ledger.attendance[-1].nodes
        assert one.strategy.count[:, 0].tolist() == [5 + steps[client] for client in last]
    assert not on_disk or (tmp_path / "clients" / "0.bin").stat().st_size == 6 * 2 * 4


@pytest.mark.parametrize("together", [True, False])
def test_a_comparison_keeps_the_clients_of_its_runs_apart(tmp_path: Path, together: bool) -> None:
    strategies: dict[str, Strategy] = {
        name: ScaffoldStrategy(H=2, lr=lr) for name, lr in (("slow", 0.1), ("fast", 0.3))
    }
    on_disk, kept = (
        compared(strategies, participation=Sample(2, of=6, store=store), together=together)
        for store in (tmp_path, None)
    )
    for name in strategies:
        assert np.array_equal(on_disk[name].history.node_losses, kept[name].history.node_losses)


def test_a_store_belongs_to_one_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = tmp_path / "clients"
    with refused(ValueError, "clients … another run"):
        stored(store, train_loss_hook=lambda step, loss: stored(store) if step == 2 else None)
    first = stored(store, max_steps=4)  # the lock is gone with the run
    stored(store, max_steps=4)
    with refused(ValueError, "clients … another run"):
        first.fit(strategy=Counting(), resume=True, participation=Sample(2, of=6, store=store), **OPTIONS)

    def full(*_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with refused(OSError, "GB … 6 clients"):
        stored(store)


def test_a_file_that_is_no_store_is_an_error(tmp_path: Path) -> None:
    """Cut short while in use, where access to what the file lacks would kill the process; a link, a pipe, a file."""
    store = tmp_path / "clients"
    with refused(OSError, "0.bin … from 48 to 5 bytes"):
        stored(store, callbacks=[lambda run: os.truncate(store / "0.bin", 5) if run.done == 3 else None])
    for make, said in ((lambda path: path.symlink_to(tmp_path / "elsewhere"), "link"), (os.mkfifo, "pipe")):
        (store / "0.bin").unlink()
        make(store / "0.bin")
        with refused(OSError, f"0.bin … {said}"):
            stored(store)
    assert not (tmp_path / "elsewhere").exists()
    (tmp_path / "file").touch()
    with refused(OSError, "store … cannot be made"):
        stored(tmp_path / "file")


def test_losses_of_clients() -> None:
    _, cohorts = trained(FedAvgStrategy(H=3, lr=1e-2), participation=Sample(2, of=5))
    losses, rounds = cohorts.history.client_losses, cohorts.ledger.attendance
    assert losses.shape == (4, 5)
    for own, segment, first in zip(losses, rounds, range(0, 12, 3), strict=True):
        assert np.flatnonzero(~np.isnan(own)).tolist() == list(segment.nodes)
        of_nodes = cohorts.history.node_losses[first : first + 3].mean(0)
        assert np.allclose(own[list(segment.nodes)], of_nodes)
    _, failing = trained(FedAvgStrategy(H=3, lr=1e-2), num_nodes=3, participation=Schedule({0: [0, 2], 5: [1, 2]}))
    assert np.isnan(failing.history.client_losses).tolist() == [[False, True, False], [True, False, False]]
    rule, compute = Sample(3, of=3, stragglers=DropSlowest(0.4)), Compute([1.0, 5.0, 1.0])
    _, late = trained(FedAvgStrategy(H=3, lr=1e-2), num_nodes=3, participation=rule, compute=compute)
    assert np.isnan(late.history.client_losses).tolist() == [[False, True, False]] * 4


@pytest.mark.parametrize(
    ("plan", "forked_at"), [(Dropout(0.4, rounds=3), 7), (Sample(3, of=5), 6), (Sample(3, of=5), 7)], ids=str
)
def test_the_record_of_a_fork(plan: Participation, forked_at: int, tmp_path: Path) -> None:
    """It begins with the segment that the fork's first step is in, whole or not."""
    trained(FEDAVG, num_nodes=3, max_steps=forked_at, save_dir=tmp_path)
    start = vsim.load_checkpoint(tmp_path).fork()
    strategy = FedAvgStrategy(H=3, inner_optim="adafactor", lr=1e-2)  # an optimizer for each node
    _, forked = trained(strategy, num_nodes=3, participation=plan, resume=start)
    segments = forked.ledger.attendance
    assert [segment.first for segment in segments] == [7, 10]
    assert (~np.isnan(forked.history.node_losses[0])).sum() == len(segments[0].nodes)
    for own, segment in zip(forked.history.client_losses, segments, strict=True):
        assert np.flatnonzero(~np.isnan(own)).tolist() == list(segment.nodes)
    first = [event for event in forked.ledger if event.step == forked_at + 1 and event.moment == "start"]
    assert [event.label for event in first] == (["pull"] if isinstance(plan, Sample) else [])


def test_clients_who_were_never_drawn_are_those_of_the_fork(tmp_path: Path) -> None:
    """Their personal layers are the fork's, also when it resumes or its cohorts change in size."""
    trained(FedAvgStrategy(H=3, inner_optim="sgd", lr=1.0), max_steps=6, save_dir=tmp_path / "start")
    personal, rule = FedPerStrategy(H=2, inner_optim="sgd", lr=0.1), Sample(2, of=7)

    def forked(**options: Any) -> Tensor:
        start = vsim.load_checkpoint(tmp_path / "start").fork()
        return trained(personal, participation=rule, **{"resume": start, **options})[0]

    forked(max_steps=8, save_dir=tmp_path / "own")
    assert torch.equal(forked(resume=True, save_dir=tmp_path / "own"), forked())


def test_buffers_are_of_the_whole_cohort_before() -> None:
    """BatchNorm's statistics of a cohort are averaged before the next one, of another size, takes its rows."""
    compute, rule = Compute([1.0, 1.0, 1.0, 9.0, 9.0, 1.0]), Sample(3, of=6, stragglers=Deadline(3.0))
    still, options = FedAvgStrategy(inner_optim="sgd", lr=1e-30), {"participation": rule, "compute": compute}
    found, trainer = trained(still, num_nodes=3, batch_size=16, **options)
    assert len({len(segment.nodes) for segment in trainer.ledger.attendance}) > 1
    first, expected = Noisy().layers[0], torch.zeros(8)
    for segment in trainer.ledger.attendance:
        of_clients = [first(dataset(client, 6, True).tensors[0]).mean(0).detach() for client in segment.nodes]
        expected = 0.9 * expected + 0.1 * torch.stack(of_clients).mean(0)
    torch.testing.assert_close(found[72:80], expected.double())


def test_a_client_that_was_never_drawn_takes_no_memory() -> None:
    # 20,000 clients with variates of 19,210 numbers are 1.5 GB.
    data = TensorDataset(torch.zeros(20_000, 64), torch.zeros(20_000, dtype=torch.int64))
    taken = [psutil.Process().memory_info().rss]
    hook = {"train_loss_hook": lambda step, loss: taken.append(psutil.Process().memory_info().rss)}
    options: dict[str, Any] = {"data": data, "participation": Sample(2, of=20_000), "batch_size": 1, **hook}
    trained(ScaffoldStrategy(H=2, lr=0.1), MLP(hidden=(256,), seed=0), **options)
    assert max(taken) - taken[0] < 2e8


# Time -----------------------------------------------------------------------------------------------------------------


def test_absent_nodes_do_not_compute() -> None:
    _, trainer = trained(FEDAVG, participation=Schedule({4: [0], 8: [0, 1]}))
    timeline = vsim.timeline(trainer, FREE, Compute([1.0, 3.0]))
    # Syncs wait for node 1, with 3 s a step, but in steps 5 to 8; then it begins where node 0 is.
    assert timeline.seconds.tolist() == [0, 3, 6, 9, 12, 13, 14, 15, 16, 19, 22, 25, 28]
    assert timeline.compute_seconds.tolist() == [2] * 4 + [1] * 4 + [2] * 4


@pytest.mark.parametrize(
    ("rule", "there", "seconds"),
    [
        (Deadline(5.0), (0, 1), 5.0),
        (Deadline(6.0), (0, 1, 2), 6.0),
        (Deadline(0.5), (0,), 2.0),
        (DropSlowest(0.4), (0, 1), 4.0),
        # The median is 2 s a step, the median absolute deviation 1 s; the first round waits for all.
        (Deadline("adaptive", k=0), (0, 1), 4.0),
        (Deadline("adaptive", k=0.9), (0, 1), 5.8),
        (Deadline("adaptive"), (0, 1, 2), 6.0),
        (Deadline("adaptive", k=0, quorum=0.7), (0, 1, 2), 6.0),
    ],
)
def test_stragglers(rule: Deadline | DropSlowest, there: tuple[int, ...], seconds: float) -> None:
    """1, 2 and 3 s a step, two steps a round."""
    options: dict[str, Any] = {"num_nodes": 3, "max_steps": 6}
    compute, first = Compute([1.0, 2.0, 3.0]), 6.0 if "adaptive" in repr(rule) else seconds
    found, trainer = trained(FEDAVG, participation=rule, compute=compute, **options)
    timeline = vsim.timeline(trainer, FREE, compute)
    assert timeline.seconds[2::2].tolist() == pytest.approx([first, first + seconds, first + 2 * seconds])
    assert trainer.ledger.attendance[-1].nodes == there
    own = Schedule({0: range(3) if first != seconds else there, 2: there})
    assert torch.equal(found, trained(FEDAVG, participation=own, **options)[0])
    if rule == Deadline("adaptive", k=0):  # it remembers nothing of another run
        assert torch.equal(trained(FEDAVG, participation=rule, compute=compute, **options)[0], found)


def test_an_adaptive_deadline_compares_rounds_by_the_step_and_forgets() -> None:
    def late(speed: Any, rule: Deadline, syncs: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
        def seconds(first: int, last: int, local: Any) -> Any:
            return np.array([1.0, 1.1, 0.9, 1.2]) * (speed if first > 4 else 1.0) * (last - first + 1)

        return [segment.late for segment in itertools.islice(rule._segments(Round(4, 0, 2, seconds, syncs=syncs)), 5)]

    fourth_slow = np.array([1.0, 1.0, 1.0, 5.0])
    assert late(fourth_slow, Deadline("adaptive")) == [(), (), (3,), (3,), (3,)]
    assert late(fourth_slow, Deadline("adaptive"), (4, 6, 16, 18, 40)) == [(), (3,), (3,), (3,), (3,)]
    # All turn slow: half of them are waited for, until the rounds before are forgotten.
    assert late(5.0, Deadline("adaptive", window=1)) == [(), (), (1, 3), (), ()]


def test_over_commitment_takes_the_first_to_arrive() -> None:
    compute = Compute(1.0, speeds=np.linspace(1, 3, 12), jitter=0.3)
    rule = Sample(4, of=12, stragglers=OverCommit(1.5))
    _, trainer = trained(FEDAVG, num_nodes=4, participation=rule, compute=compute)
    _, all_waited_for = trained(FEDAVG, num_nodes=4, participation=Sample(4, of=12))
    seconds = compute.totals(12)
    for segment in trainer.ledger.attendance:
        own = seconds(segment.first, segment.last)
        assert (len(segment.nodes), len(segment.late)) == (4, 2)
        assert own[list(segment.nodes)].max() <= own[list(segment.late)].min()
    times = [vsim.timeline(one, FREE, compute).seconds[-1] for one in (trainer, all_waited_for)]
    assert times[0] < 0.9 * times[1]
    pulls = [event for event in trainer.ledger if event.label == "pull"]
    for pull, segment in zip(pulls, trainer.ledger.attendance, strict=True):  # of late clients, too
        assert pull.groups == (tuple(sorted(segment.nodes + segment.late)),)
    with refused(ValueError, "stragglers … compute"):
        vsim.timeline(trainer, FREE, 1.0)


def test_clients_with_few_examples_arrive_early() -> None:
    """One epoch of 4, 8 and 16 examples is 1, 2 and 4 steps: 2, 6 and 4 s."""
    compute, rule = Compute([2.0, 3.0, 1.0]), Sample(3, of=3, epochs=1, stragglers=Deadline(5.0))
    options: dict[str, Any] = {"num_nodes": 3, "data": uneven(4, 8, 16), "participation": rule, "compute": compute}
    _, trainer = trained(FedAvgStrategy(H=4), **options)
    assert {(*segment.nodes, *segment.steps) for segment in trainer.ledger.attendance} == {(0, 2, 1, 4)}
    assert vsim.timeline(trainer, FREE, compute).seconds[4::4].tolist() == [5.0, 10.0, 15.0]


def test_products_are_rounded_as_they_are_meant() -> None:
    """1.1 · 50 is 55.000000000000007 to a computer, 0.29 · 100 is 28.999999999999996, and 3 · 0.1 above 0.3."""
    seconds = Compute(0.1).totals(100)
    given = Round(100, 0, 3, seconds)
    assert next(DropSlowest(0.29)._segments(given)).nodes == tuple(range(71))
    assert next(Deadline(0.3)._segments(given)).late == ()
    given = Round(50, 0, 60, seconds, np.full(100, 50.0))
    segment = Sample(50, of=100, epochs=1.1, stragglers=OverCommit(1.1)).plan(given).segment(1)
    assert (len(segment.nodes), len(segment.late), set(segment.steps)) == (50, 5, {55})


# What a server has to be sent -----------------------------------------------------------------------------------------

LINEAR_BYTES = 4 * (3 * 2 + 2)
NORMED = nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2))


def sent(strategy: Strategy, model: nn.Module, **options: Any) -> dict[str, list[tuple[int, int]]]:
    """Label → the steps and payloads of what is sent."""
    data = TensorDataset(torch.randn(64, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(64, 2))
    found: dict[str, list[tuple[int, int]]] = {}
    for event in trained(strategy, model, data=data, loss_fn=nn.functional.mse_loss, **options)[1].ledger:
        found.setdefault(event.label, []).append((event.step, event.payload_bytes))
    return found


# A strategy of rounds of two steps, and whether clients push their weights at the end of a round.
SERVED: list[tuple[Strategy, bool]] = [
    (FedAvgStrategy(H=2, lr=0.1), False),
    (FedPerStrategy(H=2, lr=0.1, personal="bias"), False),
    (DiLoCoStrategy(H=2, lr=0.1), False),
    (ScaffoldStrategy(H=2, lr=0.1), False),
    (SPARTAStrategy(p_sparta=0.5, sparta_interval=2, lr=0.1), True),
    (FedAvgStrategy(H=2, lr=0.1, island_size=2), True),
    (Strategy(lr=0.1), True),
    (AloneStrategy(lr=0.1), True),
]


@pytest.mark.parametrize(("strategy", "pushes"), SERVED, ids=str)
def test_a_server_is_sent_what_the_next_cohort_begins_with(strategy: Strategy, pushes: bool) -> None:
    plan = Sample(4, of=8, rounds=2)
    found = sent(strategy, nn.Linear(3, 2), num_nodes=4, participation=plan, max_steps=6)
    # No cohort begins with the last one's result.
    assert found.get("round") == ([(2, LINEAR_BYTES), (4, LINEAR_BYTES)] if pushes else None)
    shared = LINEAR_BYTES - (8 if isinstance(strategy, FedPerStrategy) else 0)
    assert found["pull"] == [(1, shared), (3, shared), (5, shared)]


def test_running_statistics_are_sent_with_the_weights() -> None:
    weights, norms, statistics = LINEAR_BYTES + 16, 16, 16  # mean and variance; the count of batches is no float
    options: dict[str, Any] = {"participation": Sample(2, of=4), "max_steps": 4}
    found = sent(FEDAVG, NORMED, **options)
    assert found["round"] == [(2, statistics)]
    assert found["pull"] == [(1, weights + statistics), (3, weights + statistics)]
    found = sent(FedBNStrategy(H=2, lr=0.1), NORMED, **options)
    assert "round" not in found and found["pull"] == [(1, weights - norms), (3, weights - norms)]


def test_statistics_stay_with_their_client_under_fedbn() -> None:
    kept: dict[int, Tensor] = {}
    met = []

    def compare_with_last_time(run: Any) -> None:
        rows = run.cluster.replicas.buffers["1.num_batches_tracked"]
        means = run.cluster.replicas.buffers["1.running_mean"]
        for row, client in enumerate(run.cluster.active):
            before = kept.get(client, torch.zeros(3))
            assert rows[row] == before[0] + 1  # as many batches as this client has had itself
            met.append(before[0] > 0)
            kept[client] = torch.stack([rows[row].float(), *means[row]])

    sent(FedBNStrategy(H=2, lr=0.1), NORMED, callbacks=[compare_with_last_time], participation=Sample(2, of=4))
    assert any(met)


class Finite(nn.Module):
    """Has a loss that is not finite from step n + 1 on, where n is the first number of an example."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, batch: Any) -> Tensor:
        (x,) = batch
        found = self.weight * x[:, 1].mean() + torch.where(self.steps >= x[0, 0], math.nan, 0.0)
        if self.training:
            self.steps += 1
        return found


def test_the_loss_of_a_client_that_rests_does_not_count() -> None:
    """The row of a resting client is computed beside the others, and put back; its loss is nobody's."""

    def of(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        steps = rank + 1
        return TensorDataset(torch.tensor([[float(steps), 1.0]]).expand(2 * steps, 2).clone())

    trainer = vsim.Trainer(Finite(), of)
    options: dict[str, Any] = {"num_nodes": 2, "batch_size": 2, "max_steps": 2, "progress": False}
    trainer.fit(strategy=FedAvgStrategy(H=2, lr=0.1), participation=Sample(2, of=2, epochs=1), **options)
    losses = trainer.history.node_losses
    assert np.isnan(losses[1]).tolist() == [True, False] and np.isfinite(losses[0]).all()
