"""A long run is priced by the steps after which it repeats: what follows is what every step gives, one by one."""

from __future__ import annotations

import copy
import itertools
import random
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import test_strategies_common as common
import torch
from torch import Tensor
from torch.optim.lr_scheduler import StepLR

from vsim import Compute, Ledger, Network, price, timeline
from vsim.algorithms.selectors import IndexSelector
from vsim.cluster import Cluster
from vsim.cluster.randomness import SHARED, generator
from vsim.cluster.replicas import Replicas
from vsim.cluster.stacked import StackedCollectives
from vsim.core import algorithm as algorithms
from vsim.network import clock as clocks
from vsim.network.clock import Clock
from vsim.network.timeline import seconds_on
from vsim.price import _sent, steps_within
from vsim.strategy import (
    Algorithm,
    CommunicateOptimizeStrategy,
    DeMoStrategy,
    DESLOCStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    FedAvgStrategy,
    GossipStrategy,
    HierarchicalStrategy,
    NoLoCoStrategy,
    QFedAvgStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    StreamingDiLoCoStrategy,
    WeightSyncStrategy,
)
from vsim.strategy.when import QSR, PostLocal

pytestmark = pytest.mark.filterwarnings("ignore:(DCT|Tile|RandomBasis)TopK:UserWarning")
MODEL = common.model().to("meta")
ROWS = [row for row in common.TABLE if not row.cls.is_asynchronous]


def every_step(strategy: Algorithm, num_nodes: int, steps: int) -> Ledger:
    """The ledger of a dry run that takes every step."""
    ledger = Ledger(num_nodes)
    ledger.steps = steps
    replicas = Replicas.of(MODEL, num_nodes, torch.device("meta"))
    draws = generator(42, SHARED)
    cluster = Cluster(replicas, StackedCollectives(ledger), draws, torch.ones(num_nodes), steps)
    own = copy.deepcopy(strategy)
    own.begin(cluster)
    with torch.no_grad():
        for step in range(1, steps + 1):
            ledger.position.begin(step)
            algorithms.take_step(own)
    return ledger


def wire_after_each_step(ledger: Ledger) -> np.ndarray:
    again, sent = Ledger(ledger.num_nodes), np.zeros(ledger.steps + 1)
    for event in ledger:
        again.record(event)
        sent[event.step] = again.wire_bytes
    return np.maximum.accumulate(sent)


def assert_same_ledger(ours: Ledger, every: Ledger) -> None:
    assert len(ours) == len(every) and list(ours) == list(every)
    assert not len(every) or (ours[-1], ours[len(every) // 2]) == (every[-1], every[len(every) // 2])
    assert ours[1:-1:3] == every[1:-1:3] and ours.last_due == every.last_due and ours.steps == every.steps
    for name in ("payload_bytes", "wire_bytes", "total_wire_bytes", "server_wire_bytes", "node_wire_bytes"):
        np.testing.assert_allclose(getattr(ours, name), getattr(every, name), rtol=1e-12, err_msg=name)
    assert ours.by_label() == pytest.approx(every.by_label(), rel=1e-12)
    np.testing.assert_allclose(_sent(ours), wire_after_each_step(every), rtol=1e-12)


def assert_same_times(ours: Ledger, every: Ledger, network: Network, compute: Compute) -> None:
    mine, its = timeline(ours, network, compute), timeline(every, network, compute)
    close = {"rtol": 1e-9, "atol": 1e-9 * its.seconds[-1] / its.ledger.steps}
    for name in ("seconds", "compute_seconds", "stalls"):
        np.testing.assert_allclose(getattr(mine, name), getattr(its, name), **close, err_msg=name)


def settings(seed: int) -> Iterator[tuple[Algorithm, int, int, Network, Compute]]:
    """Random settings: strategy, with its H or another or a warm-up, number of nodes, steps, network, compute."""
    draw = random.Random(seed)
    while True:
        row, K = draw.choice(ROWS), draw.choice([1, 2, 3, 4, 5, 8])
        H = draw.choice([None, *range(1, 8), PostLocal(draw.randint(1, 20), then=draw.randint(1, 7)), QSR(0.02)])
        try:
            strategy = row.make(**({"H": H} if H is not None and row.schedules else {}))
        except (TypeError, ValueError):  # which does not go with this H
            continue
        if not row.takes(K):
            continue
        steps = draw.choice([1, 2, 5, 17, draw.randint(18, 60)])
        if draw.random() < 0.5:
            way = draw.choice([None, "ring", "tree", "server", "halving-doubling"])
            network = Network(draw.choice([1e4, 1e5, 1e6, 1e9]), draw.choice([0, 0.01, 0.5]), collective=way)
        else:
            bits = [[draw.choice([1e4, 1e5, 1e6]) for _ in range(K)] for _ in range(K)]
            network = Network.between(bandwidth=bits, latency=[[draw.choice([0, 0.01])] * K for _ in range(K)])
        speeds = draw.choice([None, [draw.choice([1, 1.5, 0.3]) for _ in range(K)]])
        compute = Compute(draw.choice([0.01, 0.3, 2.0]), layers=draw.choice([None, 4]), speeds=speeds)
        yield strategy, K, steps, network, compute


@pytest.mark.parametrize(
    ("seed", "count"), [(0, 25), *(pytest.param(seed, 200, marks=pytest.mark.slow) for seed in range(1, 5))]
)
def test_prices_are_those_of_every_step(seed: int, count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clocks, "MOST_TAKEN", 0)
    repeated = 0
    for strategy, K, steps, network, compute in itertools.islice(settings(seed), count):
        try:
            every = every_step(strategy, K, steps)
        except (TypeError, ValueError, RuntimeError, NotImplementedError) as error:
            with pytest.raises((TypeError, ValueError), match=None if isinstance(error, RuntimeError) else ""):
                strategy.dry_run(MODEL, K, steps)
            continue
        ours = strategy.dry_run(MODEL, K, steps)
        assert_same_ledger(ours, every)
        assert_same_times(ours, every, network, compute)
        repeated += bool(ours.repeats)
    assert repeated > count / 3


LONG: dict[str, Algorithm] = {
    "DiLoCo": DiLoCoStrategy(H=500),
    "a long interval": FedAvgStrategy(H=30_000),
    "DeMo": DeMoStrategy(),
    "SPARTA": SPARTAStrategy(p_sparta=0.01, async_delay=3),
    "two intervals": SPARTADiLoCoStrategy(H=100, sparta_interval=7),
    "modules": CommunicateOptimizeStrategy([SPARTAStrategy(p_sparta=0.01), DiLoCoStrategy(H=50)]),
    "streaming": StreamingDiLoCoStrategy(H=100, fragments=2, delay=5),
    "eager": EagerDiLoCoStrategy(H=50),
    "graphs": GossipStrategy(topology="one_peer_exponential"),
    "three intervals": DESLOCStrategy(H=256),
    "levels": HierarchicalStrategy({4: 1, 8: 100}),
    "a warm-up": FedAvgStrategy(H=PostLocal(50_000, then=20)),
}

AS_BEFORE = ("DiLoCo", "DeMo", "SPARTA", "streaming", "eager", "graphs", "levels")


@pytest.mark.parametrize("name", LONG)
def test_a_million_steps_take_few(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In their code, in the clock, and in the bytes after each step; at the end they are those of fewer steps."""
    taken, timed, take, time = 0, 0, algorithms.take_step, Clock._steps

    def counted(*args: Any) -> None:
        nonlocal taken
        taken += 1
        take(*args)

    def clocked(clock: Clock, done: int, until: int, known: Any) -> int:
        nonlocal timed
        timed += len([step for step in known if done < step <= until])
        return time(clock, done, until, known)

    monkeypatch.setattr(algorithms, "take_step", counted)
    monkeypatch.setattr(Clock, "_steps", clocked)
    options: dict[str, Any] = {"model": MODEL, "num_nodes": 8}
    on: dict[str, Any] = {"network": Network("100 Mbit/s", "10 ms"), "compute": Compute(0.3)}
    line = price(LONG[name], max_steps=10**6, **options, **on)
    assert line.ledger.steps == 10**6 and taken < 5000 and timed < 10_000
    if name in AS_BEFORE:
        at, later = 800_000, 1500  # steps; a multiple of the period
        for own in (_sent(line.ledger), line.seconds):
            assert own[at + later] - own[at] == pytest.approx(own[at] - own[at - later], rel=1e-9)


def test_a_budget_of_a_million_steps() -> None:
    options: dict[str, Any] = {
        "model": MODEL,
        "num_nodes": 8,
        "network": Network("100 Mbit/s"),
        "compute": Compute(0.3),
    }
    line = price(DeMoStrategy(), max_steps=654_321, **options)
    for budget in ({"time": float(line.seconds[-1])}, {"wire": line.ledger.wire_bytes}):
        assert steps_within(budget, DeMoStrategy(), examples=np.asarray, **options) == 654_321


def test_many_steps_on_many_networks() -> None:
    line = price(DiLoCoStrategy(H=30), parameters=1e9, num_nodes=4, max_steps=24_796, network=1e9, compute=1.0)
    every = Ledger(4)
    for event in line.ledger:
        every.record(event)
    every.steps = 24_796
    networks = np.array([1e7, 1e8, 1e9]), np.array([0.0, 0.1, 0.5])
    found = (seconds_on(one, *networks, {}, Compute(1.0), [100, 24_796]) for one in (line.ledger, every))
    np.testing.assert_allclose(*found, rtol=1e-9)


class Unlike(IndexSelector):
    """A share of the entries, and in every seventh round all of them."""

    def select(self, cluster: Cluster, round: int) -> Tensor:
        size = cluster.replicas.num_parameters
        return torch.arange(size if round % 7 == 6 else 5, device=cluster.weights.device)


class AllInTheSeventh(Unlike):
    """Says after how many rounds it repeats."""

    @property
    def rounds_repeat(self) -> int:
        return 7


class Sometimes(FedAvgStrategy):
    """Skips a sync at every step that its author likes."""

    skipped: ClassVar[int] = 97

    def sync(self, cluster: Cluster) -> None:
        if cluster.step % self.skipped:
            super().sync(cluster)


class Declared(FedAvgStrategy):
    """Says that it repeats, so that it must."""

    calls: ClassVar[int] = 0

    def rounds_repeat(self, num_nodes: int) -> int | None:
        return 2

    def sync(self, cluster: Cluster) -> None:
        type(self).calls += 1
        if cluster.step // self.H % 2:  # type: ignore[operator]
            super().sync(cluster)


class Its(Declared):
    """Inherits what another class says of itself, which need not hold for this one."""


@pytest.mark.parametrize(
    ("strategy", "repeats"),
    [
        (Sometimes(H=2), False),
        (Declared(H=3), True),
        (Its(H=3), False),
        (SPARTAStrategy(index_selector=Unlike(0.1)), False),
        (SPARTAStrategy(index_selector=AllInTheSeventh(0.1)), True),
        (CommunicateOptimizeStrategy([Sometimes(H=2), DiLoCoStrategy(H=4)]), False),
        (NoLoCoStrategy(H=2), False),
        (FedAvgStrategy(H=2, island_size=2), False),
        (FedAvgStrategy(H=2, island_size=4), True),
        (FedAvgStrategy(H=QSR(0.01)), False),
        (QFedAvgStrategy(H=2, lr=0.1), True),
        (QFedAvgStrategy(H=2, lr=0.1, lr_scheduler=StepLR, lr_scheduler_kwargs={"step_size": 3}), False),
    ],
    ids=lambda one: type(one).__name__,
)
def test_what_may_vary_takes_every_step(strategy: Algorithm, repeats: bool) -> None:
    ours = strategy.dry_run(MODEL, 4, 200)
    assert bool(ours.repeats) is repeats
    assert_same_ledger(ours, every_step(strategy, 4, 200))


def test_a_ledger_with_copies_is_written_and_continued() -> None:
    ours = WeightSyncStrategy(changed_share=0.1, staleness=2).dry_run(MODEL, 1, 50)
    every = every_step(WeightSyncStrategy(changed_share=0.1, staleness=2), 1, 50)
    assert ours.repeats and ours.as_plain() == every.as_plain()
    assert ours.to_pandas().equals(every.to_pandas())
    for ledger in (ours, every):
        ledger.record(ledger[-1]._replace(step=51, due=60))
        ledger.steps = 51
    assert_same_ledger(ours, every)
    other = Ledger(1)
    other.continue_from(ours)
    other.record(other[0])
    assert len(other) == len(ours) + 1 == len(every) + 1


def test_a_long_price_shows_its_progress(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from vsim.core import repeating

    monkeypatch.setattr(repeating, "_SILENT_SECONDS", 0)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True, raising=False)
    NoLoCoStrategy(H=2).dry_run(MODEL, 4, 30)
    assert "pricing NoLoCoStrategy" in capsys.readouterr().err
