"""Asynchronous runs: hand-made schedules, the same run one worker at a time, and what they become in lockstep."""

from __future__ import annotations

import functools
import inspect
import math
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from hypothesis import example, given, settings
from hypothesis import strategies as st
from test_strategies_common import COMMON, P, examples, model, uneven
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
from vsim import History, Trainer, load_checkpoint
from vsim.data import digits
from vsim.models import MLP
from vsim.network import Compute, Network
from vsim.network.event_clock import ARRIVAL, RETURN, STEP, TIMER, VirtualClock
from vsim.runs.workers import Workers
from vsim.strategy import (
    STRATEGIES,
    AsyncDiLoCoStrategy,
    AsynchronousStrategy,
    DecoupledDiLoCoStrategy,
    DelayedNesterovStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    OptimSpec,
    Strategy,
    mean,
    rda,
)

SPEEDS = Compute(0.8, speeds=[1, 2, 1, 4], jitter=0.3)
NETWORK = Network("1 Mbit/s", "20 ms")
PLAIN = OptimSpec("sgd", lr=1.0)
# A constructor, and for each argument others under which the run must change.
TABLE: dict[str, tuple[Callable[..., Strategy], dict[str, Any], dict[str, dict[str, Any]]]] = {
    "async DiLoCo": (
        AsyncDiLoCoStrategy,
        {"H": 2},
        {
            **{"H": {"H": 3}, "outer_optim": {"outer_optim": PLAIN}, "outer_lr": {"outer_lr": 0.3}},
            **{"staleness": {"staleness": "none"}, "buffer": {"buffer": 2}, "patience": {"patience": 2}},
            "average": {"buffer": 3, "average": "median"},
        },
    ),
    "delayed Nesterov": (
        DelayedNesterovStrategy,
        {"H": 4},
        {
            **{"H": {"H": 3}, "buffer": {"buffer": 2}, "c": {"c": 0.2}, "outer_lr": {"outer_lr": 0.3}},
            **{"momentum": {"momentum": 0.3}, "dylu": {"dylu": True}},
        },
    ),
    "decoupled": (
        DecoupledDiLoCoStrategy,
        {"H": 4},
        {
            **{"H": {"H": 3}, "fragments": {"fragments": 1}, "delay": {"delay": 3}, "quorum": {"quorum": 2}},
            **{"grace": {"grace": 0.0}, "outer_optim": {"outer_optim": PLAIN}, "outer_lr": {"outer_lr": 0.3}},
            **{"average": {"average": "mean"}, "pattern": {"pattern": "sequential", "fragments": [["layers"]]}},
        },
    ),
}
every_row = pytest.mark.parametrize("row", TABLE)


def run(strategy: Strategy, num_nodes: int = 4, **options: Any) -> Trainer:
    trainer = Trainer(options.pop("model", None) or model(), options.pop("data", uneven), options.pop("val", None))
    defaults = {"max_steps": 12, "batch_size": 8, "progress": False, "compute": SPEEDS, "network": NETWORK}
    trainer.fit(strategy=strategy, num_nodes=num_nodes, **{**defaults, **options})
    return trainer


def made(row: str, **more: Any) -> Strategy:
    cls, arguments, _ = TABLE[row]
    return cls(**{**arguments, "lr": 1e-2, **more})


def ran(trainer: Trainer) -> AsynchronousStrategy:
    assert isinstance(trainer.strategy, AsynchronousStrategy)
    return trainer.strategy


def outcome(trainer: Trainer) -> tuple[Any, ...]:
    """All that must be bitwise equal."""
    strategy, history = ran(trainer), trainer.history
    weights = strategy.cluster.weights.numpy().tobytes(), strategy.model_weights().numpy().tobytes()
    columns = ("examples", "train_loss", "global_loss", "payload_bytes", "clock_seconds")
    rows = [[*map(repr, history[name])] for name in columns]
    return *weights, rows, history.node_losses.tobytes(), list(history.ledger), history.ledger.seconds


@functools.cache
def of_row(row: str) -> tuple[Any, ...]:
    return outcome(run(made(row)))


class Constant(nn.Module):
    """A model of some weights w whose loss is x·w, so that its gradient is x whatever w is."""

    def __init__(self, size: int = 1) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(size, dtype=torch.float64))

    def forward(self, batch: Any) -> Tensor:
        return (batch[0] * self.w).sum(1).mean()


def directions(*gradients: Sequence[float]) -> Callable[..., TensorDataset]:
    """Data under which the gradient of node k is always the k-th."""
    return lambda rank, num_nodes, train: TensorDataset(torch.tensor([gradients[rank]] * 8, dtype=torch.float64))


# In lockstep ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_nodes", "network"), [(1, NETWORK), (3, None), (4, NETWORK)])
def test_infinite_patience_is_diloco(num_nodes: int, network: Network | None) -> None:
    options: dict[str, Any] = {"lr": 1e-2, "warmup_steps": 5, "max_norm": 0.5, "H": 3}
    same: dict[str, Any] = {"deterministic": True, "val": examples(), "val_interval": 2}
    lockstep = run(DiLoCoStrategy(**options), num_nodes, compute=None, network=None, **same)
    patient = AsyncDiLoCoStrategy(patience=math.inf, **options)
    trainer = run(patient, num_nodes, compute=0.5, network=network, **same)
    torch.testing.assert_close(ran(trainer).cluster.weights, lockstep.strategy.cluster.weights)  # type: ignore[union-attr]
    ours, theirs = trainer.history, lockstep.history
    np.testing.assert_allclose(ours.node_losses, theirs.node_losses, rtol=1e-6)
    for column in ("step", "examples", "train_loss", "lr", "global_loss", "local_loss", "average_loss"):
        np.testing.assert_allclose(ours[column], theirs[column], rtol=1e-6, err_msg=column)
    # At other speeds the order of the local steps is another one, and a worker still has the same ones.
    uneven_speeds = Compute(1, speeds=range(1, num_nodes + 1), jitter=0.5)
    options.pop("warmup_steps")  # the rate of a local step is that of the run's step that it falls in
    lockstep = run(DiLoCoStrategy(**options), num_nodes, compute=None, network=None, deterministic=True)
    patient = AsyncDiLoCoStrategy(patience=num_nodes, **options)
    trainer = run(patient, num_nodes, compute=uneven_speeds, network=None, deterministic=True)
    torch.testing.assert_close(ran(trainer).cluster.weights, lockstep.strategy.cluster.weights)  # type: ignore[union-attr]


def test_one_node_is_diloco_whatever_the_server_waits_for() -> None:
    lockstep = run(DiLoCoStrategy(H=3, lr=1e-2), 1, compute=None, network=None, deterministic=True)
    assert lockstep.strategy is not None
    for strategy in (AsyncDiLoCoStrategy(H=3, lr=1e-2), DelayedNesterovStrategy(H=3, lr=1e-2)):
        trainer = run(strategy, 1, compute=1, deterministic=True)
        torch.testing.assert_close(ran(trainer).cluster.weights, lockstep.strategy.cluster.weights)


# By hand --------------------------------------------------------------------------------------------------------------


def test_delayed_nesterov_by_hand() -> None:
    # K = N = 2, c = 1/2, β = 1/2, ε = 1; every g is 1, so that each arrival moves φ by g/N = 1/2 and its momentum:
    #   1: c β m = 0                      φ = −1/2
    #   2: m = 1,   (1 − 1 + ½) β m = ¼   φ = −1/2 − 3/4 = −5/4
    #   3: c β m = ¼                      φ = −2
    #   4: m = 3/2, ½ β m = 3/8           φ = −2 − 7/8 = −23/8
    strategy = DelayedNesterovStrategy(H=1, c=0.5, momentum=0.5, outer_lr=1.0, inner_optim=PLAIN)
    trainer = run(strategy, 2, model=Constant(), data=directions([1.0], [1.0]), compute=1, network=None, max_steps=2)
    assert ran(trainer).outer_weights.item() == -23 / 8


class Noting(AsyncDiLoCoStrategy):
    """Notes who came, and how stale."""

    def begin(self, cluster: Any) -> None:
        super().begin(cluster)
        self.keep_shared(noted=[])

    def receive(self, node: int, weights: Tensor, staleness: int) -> Sequence[int]:
        self.noted.append((node, staleness))
        return super().receive(node, weights, staleness)


def test_staleness_and_its_weights_in_a_schedule_by_hand() -> None:
    # Node 0 takes 3 s a step, node 1 one. Arrivals, and φ's version at each and as it was taken:
    #   t = 1, 2: node 1, taken at once before.  t = 3: node 0, taken at 0, is 2; node 1, taken at 2, is 3.
    #   t = 4, 5: node 1, fresh.                 t = 6: node 0, taken at 3 (its own step), is 6; node 1, taken at 6, 7.
    strategy = Noting(H=1, inner_optim=PLAIN, outer_optim=PLAIN)
    options: dict[str, Any] = {"model": Constant(), "data": directions([1.0], [1.0]), "network": None, "max_steps": 4}
    trainer = run(strategy, 2, compute=Compute([3, 1]), **options)
    noted = trainer.strategy.noted  # type: ignore[union-attr]
    assert noted == [(1, 0), (1, 0), (0, 2), (1, 1), (1, 0), (1, 0), (0, 3), (1, 1)]
    assert ran(trainer).outer_weights.item() == pytest.approx(-sum(1 / math.sqrt(1 + s) for _, s in noted))
    # A step of the run is two local steps: those at 1 and 2; both at 3; 4 and 5; both at 6.
    assert trainer.history["clock_seconds"][1:].tolist() == [2, 3, 5, 6]
    # Node 0 has no loss before its first step; what it began with was 0.
    assert np.isnan(trainer.history.node_losses[0, 0]) and trainer.history.node_losses[1, 0] == 0


def test_a_buffer_does_not_wait_and_patience_does() -> None:
    # Node 1 is three times as fast. With a buffer of 2 it continues; with patience it waits for node 0 each time.
    options: dict[str, Any] = {"model": Constant(), "data": directions([1.0], [1.0]), "network": None, "max_steps": 4}
    for own, steps, clock in (({"buffer": 2}, [2, 6], 6), ({"patience": 2}, [4, 4], 12)):
        strategy = Noting(H=1, inner_optim=PLAIN, outer_optim=PLAIN, **own)  # type: ignore[arg-type]
        trainer = run(strategy, 2, compute=Compute([3, 1]), **options)
        assert ran(trainer).clock.steps == steps
        assert trainer.history.last("clock_seconds") == clock
        assert ran(trainer).version == 4
    assert {s for _, s in trainer.strategy.noted} == {0}  # type: ignore[union-attr]


def test_messages_queue_on_the_servers_line() -> None:
    # A message takes 1 s of its node's line and of the server's. Both workers compute 3 s: pushes arrive at 4 and 5,
    # the answers at 6 and 7, in step 1. Then steps end at 9 and 10, pushes arrive at 10 and 11, answers at 12 and 13.
    strategy = AsyncDiLoCoStrategy(H=1, patience=2, inner_optim=PLAIN)
    network, compute = Network(64.0), Compute(3)
    options: dict[str, Any] = {"model": Constant(), "data": directions([1.0], [1.0]), "max_steps": 2}
    trainer = run(strategy, 2, network=network, compute=compute, **options)
    time = trainer.history.time(network, compute)
    assert time.seconds.tolist() == [0, 7, 13]
    # At 7 the first worker has computed 1 s of its second step; at 13, 1 s of its next.
    assert time.compute_seconds.tolist() == [3.5, 3] and time.stalls.tolist() == [3.5, 3]


def test_a_slow_workers_line_does_not_hold_the_servers() -> None:
    # Worker 1 sends twice, 10 s each, 10 ms of them on the server's line, for which worker 2's 10 ms have to wait once.
    slow = [[8e3 if 1 not in (i, j) else 8.0 for j in range(3)] for i in range(3)]
    for to_server in (True, False):
        clock = VirtualClock(3, Network.between(slow), Compute(1))
        for node in (1, 1, 2):
            clock.send(node, 10.0, to_server)
        came = [(clock.next()[1], clock.now) for _ in range(3)]
        assert came == [(2, 0.02), (1, 10.0), (1, 20.0)]


@pytest.mark.parametrize("speeds", [[1, 1, 1, 10], [1, 2, 3, 4]])
def test_the_unit_of_time_is_without_effect(speeds: list[float]) -> None:
    def order(unit: float) -> list[tuple[int, int]]:
        clock, done = VirtualClock(4, Network(math.inf), Compute(unit, speeds=speeds)), []
        for node in range(4):
            clock.step(node)
        for _ in range(500):
            done.append(clock.next()[:2])
            clock.step(done[-1][1])
        return done

    assert all(order(unit) == order(60) for unit in (0.1, 0.8, 1, 7))  # 60 divides without rounding


def test_the_clock_orders_what_happens_at_once_by_kind_and_node() -> None:
    clock = VirtualClock(2, Network(math.inf), Compute(1))
    clock.step(1)
    clock.step(0)
    clock.wait(1.0)
    clock.now = 1.0
    clock.send(1, 8.0, to_server=False)
    clock.send(0, 8.0, to_server=True)
    clock.now = 0.0
    events = [clock.next()[:2] for _ in range(5)]
    assert events == [(STEP, 0), (STEP, 1), (ARRIVAL, 0), (TIMER, 0), (RETURN, 1)]


def test_a_quorum_merges_lengths_and_directions() -> None:
    # Learners move (2, 0) and (0, 2): by RDA that is (√2, √2), and their mean (1, 1).
    options: dict[str, Any] = {"model": Constant(2), "data": directions([2.0, 0.0], [0.0, 2.0]), "max_steps": 1}
    for average, expected in ((rda("tokens"), -math.sqrt(2)), ("mean", -1.0)):
        strategy = DecoupledDiLoCoStrategy(
            H=1, fragments=1, delay=0, quorum=2, average=average, outer_optim=PLAIN, inner_optim=PLAIN
        )
        trainer = run(strategy, 2, compute=1, network=None, **options)
        assert ran(trainer).outer_weights.tolist() == pytest.approx([expected] * 2)


@pytest.mark.parametrize(("H", "expected"), [(1, [-1, -2, -3, -4, -5, -6]), (2, [0, -2, -2, -4, -4, -6])])
def test_without_a_delay_a_learner_waits_for_the_syncer(H: int, expected: list[int]) -> None:
    # One learner with the gradient 1 and all rates 1: the outer weights after steps 1 … 6, as in the authors' code.
    options: dict[str, Any] = {"model": Constant(1), "data": directions([1.0]), "compute": 1, "network": None}
    strategy = DecoupledDiLoCoStrategy(H=H, fragments=1, delay=0, grace=0.0, outer_optim=PLAIN, inner_optim=PLAIN)
    found = [float(ran(run(strategy, 1, max_steps=steps, **options)).outer_weights) for steps in range(1, 7)]
    assert found == expected


def test_the_grace_of_a_syncer() -> None:
    # Learners send after 4 s and 5 s, and want an answer two steps later, at 6 s and 7.5 s; the third takes forever.
    # With γ = 3/4 the syncer waits from 4 s until 5.5 s, and merges both: −4. With γ = 1/4 it merges the first at 4.5 s
    # and the second at 5.625 s, each by itself: −8. Nine local steps are done at 5 s, the next is at 6 s.
    for grace, expected in ((0.25, -8), (0.75, -4)):
        strategy = DecoupledDiLoCoStrategy(
            H=4, fragments=1, delay=2, grace=grace, average=mean("tokens"), outer_optim=PLAIN, inner_optim=PLAIN
        )
        options: dict[str, Any] = {"model": Constant(), "data": directions(*[[1.0]] * 3), "max_steps": 3}
        trainer = run(strategy, 3, compute=Compute([1, 1.25, 100]), network=None, **options)
        assert [(e.collective, e.groups) for e in trainer.ledger] == (
            [(what, ((node,),)) for what, node in (("push", 0), ("pull", 0), ("push", 1), ("pull", 1))]
            if expected == -8
            else [(what, ((node,),)) for what in ("push", "pull") for node in (0, 1)]
        )
        assert ran(trainer).outer_weights.item() == expected


def test_a_grace_that_nobody_needs_takes_no_time() -> None:
    # Learners send at 2 s and 2.4 s; from the first on the syncer would wait until 2.75 s, but both have come.
    strategy = DecoupledDiLoCoStrategy(H=2, fragments=1, delay=1, grace=0.75, inner_optim=PLAIN)
    options: dict[str, Any] = {"model": Constant(), "data": directions([1.0], [1.0]), "max_steps": 2}
    trainer = run(strategy, 2, compute=Compute([1, 1.2]), network=None, **options)
    assert len(trainer.ledger) == 4 and trainer.history.last("clock_seconds") == 2.4


# One worker at a time -------------------------------------------------------------------------------------------------


class Drawing(nn.Module):
    """A model with random numbers, buffers, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        stream = torch.Generator().manual_seed(0)
        self.layers = nn.Sequential(nn.Linear(64, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 10))
        for p in self.parameters():
            p.data = torch.randn(p.shape, generator=stream) / 8

    def forward(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self.layers(batch[0]), batch[1])


@settings(max_examples=8)
@given(
    row=st.sampled_from([*TABLE]),
    H=st.integers(3, 5),
    speeds=st.lists(st.sampled_from([1.0, 1.3, 2.0, 5.0]), min_size=1, max_size=4),
    jitter=st.sampled_from([None, 0.4]),
    network=st.sampled_from([None, NETWORK]),
)
@example("decoupled", 3, [1.0, 1.3, 5.0, 1.0], 0.4, NETWORK)
@example("async DiLoCo", 3, [2.0, 1.0, 2.0], None, None)
def test_the_outcome_does_not_depend_on_who_is_computed_with_whom(
    row: str, H: int, speeds: list[float], jitter: float | None, network: Network | None
) -> None:
    options: dict[str, Any] = {"num_nodes": len(speeds), "compute": Compute(0.5, speeds=speeds, jitter=jitter)}
    options |= {"network": network, "model": Drawing(), "deterministic": True, "max_steps": 5}
    options |= {"val": examples(16), "val_interval": 2}
    strategy = made(row, H=H, **({"delay": 1} if row == "decoupled" else {}))
    together = outcome(run(strategy, **options))
    step = Workers.step

    def one_by_one(self: Workers, owed: Sequence[int]) -> None:
        for node, steps in reversed([*enumerate(owed)]):
            for _ in range(steps):
                step(self, [int(other == node) for other in range(len(owed))])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Workers, "step", one_by_one)
        assert outcome(run(strategy, **options)) == together


@pytest.mark.parametrize(
    ("row", "speeds", "first"),
    [
        ("async DiLoCo", [1, 1, 1, 1], 8),
        ("async DiLoCo", [1, 2, 1, 4], 4),  # when the fastest has taken 8 steps, all have taken 2 + 4 + 2 + 8 = 4 · 4
        ("delayed Nesterov", [1, 2, 1, 4], 4),
        ("decoupled", [1, 1, 1, 1], 4),  # the first of two fragments, after H / 2 steps
    ],
)
def test_a_run_in_which_no_worker_comes_to_the_server_is_warned_of(row: str, speeds: list[float], first: int) -> None:
    options: dict[str, Any] = {"compute": Compute(0.1, speeds=speeds), "network": None}
    with pytest.warns(UserWarning, match=f"first acts after step {first}, and the run ends after {first - 1}$"):
        assert not run(made(row, H=8), max_steps=first - 1, **options).ledger
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert run(made(row, H=8), max_steps=first, **options).ledger


# What every strategy must do ------------------------------------------------------------------------------------------


@every_row
def test_every_argument_has_an_effect(row: str) -> None:
    for argument, changed in TABLE[row][2].items():
        assert argument in changed
        assert outcome(run(made(row, **changed))) != of_row(row), argument


def test_the_table_knows_every_argument() -> None:
    known = {cls: set(changes) for cls, _, changes in TABLE.values()}
    for cls, _ in STRATEGIES.values():
        if cls.is_asynchronous:
            assert cls in known, f"tests/test_asynchronous.py, TABLE: add a row of {cls.__name__}"
            assert set(inspect.signature(cls).parameters) - {"attack", *COMMON} == known[cls], cls


@pytest.mark.parametrize(
    ("row", "argument"),
    [*zip([*TABLE, "decoupled"], ["max_norm", "warmup_steps", "lr", "inner_optim"], strict=True)],
)
def test_common_arguments_have_an_effect(row: str, argument: str) -> None:
    changed = made(row, **{"lr": None, **COMMON[argument]})
    sgd = {"inner_optim": COMMON["inner_optim"]["inner_optim"], "lr": None}
    plain = outcome(run(made(row, **sgd))) if argument == "max_norm" else of_row(row)
    assert outcome(run(changed)) != plain


@every_row
def test_two_runs_are_equal_and_their_bytes_are_a_formula(row: str) -> None:
    first, second = run(made(row), max_steps=20), run(made(row), max_steps=20)
    assert outcome(first) == outcome(second)
    # Every full phase is pushed: 4·P bytes. By fragments: two layers, of 1040 after 2 + 4n steps and 170 after 4n.
    H, steps = TABLE[row][1]["H"], ran(first).clock.steps
    expected = [4.0 * P * (n // H) for n in steps]
    if row == "decoupled":
        expected = [4.0 * (1040 * ((n + 2) // H) + 170 * (n // H)) for n in steps]
    assert first.ledger.node_payload_bytes.tolist() == expected
    assert sum(e.payload_bytes for e in first.ledger if e.collective == "pull") == first.ledger.server_wire_bytes > 0
    assert len({len(e.groups[0]) for e in first.ledger}) == 1


@pytest.mark.parametrize("name", [name for name, (cls, _) in STRATEGIES.items() if cls.is_asynchronous])
def test_it_learns_digits(name: str) -> None:
    (cls, arguments), (train, val) = STRATEGIES[name], digits()
    trainer = Trainer(MLP(hidden=(32,), seed=0), train, val)
    options: dict[str, Any] = {"compute": Compute(1, speeds=[1, 1, 1.5, 2], jitter=0.2), "network": NETWORK}
    options |= {"num_nodes": 4, "max_steps": 100, "val_size": 360, "val_interval": None, "progress": False}
    trainer.fit(strategy=cls(**arguments, lr=1e-2), **options)
    losses = trainer.history.measured("global_loss")[0]
    assert losses[-1] < 0.35 * losses[0]
    assert trainer.history.last("global_accuracy") > 0.85


# The record, and resuming ---------------------------------------------------------------------------------------------


@every_row
def test_a_run_resumes_in_the_middle_of_everything(row: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"max_steps": 14, "deterministic": True, "val": examples(16), "val_interval": 7}
    whole = outcome(run(made(row), **options))
    run(made(row), **{**options, "max_steps": 7}, save_dir=tmp_path)
    assert outcome(run(made(row), **options, save_dir=tmp_path, resume=True)) == whole
    with refused(ValueError, "compute.node_seconds"):
        run(made(row), **options, compute=2.0, resume=load_checkpoint(tmp_path, 7))
    fork = run(made(row), **options, resume=load_checkpoint(tmp_path, 7).fork())
    assert ran(fork).clock.taken == 4 * 7 and fork.history["step"][0] == 7


def test_the_record_has_its_seconds_and_no_others(tmp_path: Path) -> None:
    trainer = run(made("delayed Nesterov"))
    trainer.history.to_json(tmp_path / "history.json")
    for history in (trainer.history, History.from_json(tmp_path / "history.json")):
        time = vsim.timeline(history, NETWORK, SPEEDS)
        assert time.seconds.tolist() == [0.0, *trainer.history["clock_seconds"][1:]]
        assert 0 < time.utilization < 1
        assert time.compute_seconds.sum() + time.stalls.sum() == pytest.approx(time.seconds[-1])
        assert "12 steps" in repr(time)
        with refused(ValueError, "compute … Compute(0.2"):
            history.time(NETWORK, 0.8)
        with refused(ValueError, "no picture"):
            time.plot()


@pytest.mark.parametrize("leaves", [False, True])
def test_members_of_a_comparison_are_their_own_runs(tmp_path: Path, leaves: bool) -> None:
    strategies = {"lockstep": FedAvgStrategy(H=3, lr=1e-2), **{row: made(row) for row in TABLE}}
    if leaves:  # and the others are regrouped
        strategies["lockstep"] = FedAvgStrategy(H=3, inner_optim=OptimSpec("sgd", lr=1e30))
    options: dict[str, Any] = {"num_nodes": 4, "max_steps": 9, "batch_size": 8, "deterministic": True}
    with pytest.warns(UserWarning, match="non-finite") if leaves else nullcontext():
        comparison = vsim.compare(
            model(), uneven, strategies=strategies, compute=SPEEDS, network=NETWORK, progress=False, **options
        )
    for row in TABLE:
        alone = run(made(row), max_steps=9, deterministic=True).history
        assert np.array_equal(comparison[row].history.node_losses, alone.node_losses, equal_nan=True)
        assert list(comparison[row].history.ledger) == list(alone.ledger)
    if leaves:
        return
    assert "utilization" in comparison.table() and {"lockstep", *TABLE} == {*comparison.to_pandas()["strategy"]}
    comparison.to_csv(tmp_path / "all.csv")
    lines = (tmp_path / "all.csv").read_text().splitlines()
    assert len(lines) == 1 + 4 * 10 and lines[1].endswith(",,")  # no virtual time in lockstep
    alone_on_clock = vsim.compare(
        model(), uneven, strategies={"a": made("async DiLoCo")}, compute=SPEEDS, progress=False, **options
    )
    assert alone_on_clock["a"].history.last("clock_seconds") > 0


class Returning(AsynchronousStrategy):
    """Its server always lets `ready` continue, whichever worker arrives."""

    def __init__(self, ready: Any) -> None:
        self.ready = ready
        super().__init__(H=1)

    def receive(self, node: int, weights: Tensor, staleness: int) -> Sequence[int]:
        return self.ready  # type: ignore[no-any-return]


class Broken(TensorDataset):
    def __getitem__(self, index: int) -> Any:
        raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("strategy", "options", "error", "said"),
    [
        (lambda: AsyncDiLoCoStrategy(buffer=2, patience=2), {}, TypeError, "buffer … patience"),
        (lambda: AsyncDiLoCoStrategy(staleness="log"), {}, ValueError, "staleness … 'none', 'sqrt'"),
        (lambda: AsyncDiLoCoStrategy(H=1, staleness=lambda s: -1), {}, ValueError, "staleness weight"),
        (lambda: DelayedNesterovStrategy(c=0.5), {}, ValueError, "c … 0.25 … 0.5"),
        (lambda: DecoupledDiLoCoStrategy(quorum=5), {}, ValueError, "quorum … 4"),
        (lambda: DecoupledDiLoCoStrategy(H=2), {}, ValueError, "delay … H"),
        (lambda: DecoupledDiLoCoStrategy(H=3, fragments=9), {}, ValueError, "fragments … from 1 to 3 … 9"),
        (lambda: AsynchronousStrategy(H=1), {}, NotImplementedError, "AsynchronousStrategy … receive"),
        (lambda: AsyncDiLoCoStrategy(H=1, inner_optim="sgd", lr=1e30), {}, FloatingPointError, "non-finite loss"),
        (lambda: AsyncDiLoCoStrategy(), {"model": nn.Linear(3, 3)}, TypeError, "step 1 … given batch"),
        (lambda: AsyncDiLoCoStrategy(), {"data": Broken(torch.ones(8))}, OSError, "node 1 … step 1 … the disk is"),
        (lambda: AsyncDiLoCoStrategy(), {"compute": "fast"}, ValueError, "seconds_per_step"),
        (lambda: Returning([]), {}, RuntimeError, "all workers wait"),
        (lambda: Returning(None), {}, ValueError, "Returning … None"),
        (lambda: Returning(range(4)), {}, ValueError, "range(0, 4)"),
        (lambda: Returning([3, 3]), {"num_nodes": 1, "compute": 1.0}, ValueError, "[0] … [3, 3]"),
    ],
)
def test_refused(strategy: Callable[[], Strategy], options: dict[str, Any], error: type[Exception], said: str) -> None:
    with refused(error, said):
        run(strategy(), **options)
