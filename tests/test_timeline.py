"""The clock of a run, by hand and by its properties; `test_timeline_oracle.py` has a plain simulation of it."""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparisons_by_hand import check_refusals
from hypothesis import given, settings
from hypothesis import strategies as st
from matplotlib.colors import to_hex

import vsim
from vsim import Compute, Event, History, Ledger, Network, timeline
from vsim.cluster.plan import Segment
from vsim.data import digits
from vsim.models import MLP
from vsim.network.cost import ALGORITHMS, COLLECTIVES
from vsim.network.timeline import seconds_on
from vsim.strategy import DiLoCoStrategy

MOMENTS = ("gradients", "weights")


def record(num_nodes: int, steps: int, events: Sequence[tuple[Any, ...]] = ()) -> Ledger:
    """A ledger of (step, due, moment, collective, payload, groups), None for all nodes."""
    ledger = Ledger(num_nodes)
    for step, due, moment, collective, payload, groups in events:
        groups = ledger.everyone if groups is None else tuple(map(tuple, groups))
        ledger.record(Event(step, due, moment, collective, "x", payload, groups))
    ledger.steps = steps
    return ledger


@st.composite
def ledgers(draw: Any, max_nodes: int = 5, delays: bool = True) -> Ledger:
    K, steps = draw(st.integers(1, max_nodes)), draw(st.integers(0, 5))
    events = []
    for step in range(1, steps + 1):
        for moment in MOMENTS:
            for _ in range(draw(st.integers(0, 2))):
                due = step + (draw(st.integers(0, 2)) if delays else 0)
                collective = draw(st.sampled_from([one for one in COLLECTIVES if K > 1 or one != "send"]))
                groups: list[list[int]] | None = None
                if collective == "send":
                    pair = st.tuples(st.integers(0, K - 1), st.integers(0, K - 1)).filter(lambda p: p[0] != p[1])
                    groups = [list(p) for p in draw(st.lists(pair, min_size=1, max_size=3))]
                elif draw(st.booleans()):
                    order = draw(st.permutations(range(K)))
                    cut = draw(st.integers(0, K))
                    groups = [g for g in (order[:cut], order[cut:]) if g]
                payload = draw(st.sampled_from([0, 1e3, 1e5, 3e5]))
                events.append((step, due, moment, collective, payload, groups))
    return record(K, steps, events)


@st.composite
def computes(draw: Any, num_nodes: int) -> Compute:
    options: dict[str, Any] = {"layers": draw(st.sampled_from([None, 1, 2, 3, 7]))}
    if options["layers"] is not None:
        options["bucket_bytes"] = draw(st.sampled_from([0, 0, 4e4, 2e5]))
    if draw(st.booleans()):
        options["speeds"] = draw(st.lists(st.floats(0.3, 3), min_size=num_nodes, max_size=num_nodes))
    if draw(st.booleans()):
        options["jitter"] = 0.4
    return Compute(draw(st.floats(0.01, 2)), **options)


networks = st.builds(
    Network, st.floats(1e5, 1e8), st.floats(0, 0.5), collective=st.sampled_from(["ring", "tree", "server"])
)


@settings(max_examples=60)
@given(st.data(), ledgers(), networks)
def test_computed_and_waited_is_the_whole_time_also_from_files(data: Any, ledger: Ledger, network: Network) -> None:
    compute = data.draw(computes(ledger.num_nodes))
    line = timeline(ledger, network, compute)
    K, T = ledger.num_nodes, ledger.steps
    assert line.compute_seconds.shape == line.stalls.shape == (T,) and line.seconds.shape == (T + 1,)
    np.testing.assert_allclose(line.compute_seconds, np.broadcast_to(compute.steps(K).next(T), (T, K)).mean(1))
    np.testing.assert_allclose(line.compute_seconds.sum() + line.stalls.sum(), line.seconds[-1])
    assert (line.stalls >= 0).all() and (np.diff(line.seconds) >= 0).all() and 0 < line.utilization <= 1 + 1e-12
    again = Network.from_plain(network.as_plain()), Compute.from_plain(compute.as_plain())
    assert timeline(ledger, *again).seconds.tolist() == line.seconds.tolist()
    assert repr(again) == repr((network, compute))


@settings(max_examples=40)
@given(st.data(), ledgers(delays=False), st.lists(st.tuples(st.floats(1e5, 1e8), st.floats(0, 0.5)), min_size=1))
def test_many_networks_at_once_are_each_by_itself(data: Any, ledger: Ledger, links: list[tuple[float, float]]) -> None:
    algorithm, compute = data.draw(st.sampled_from(ALGORITHMS)), data.draw(computes(ledger.num_nodes))
    steps = [ledger.steps, 0, ledger.steps // 2]
    found = seconds_on(ledger, *np.array(links).T, {"collective": algorithm}, compute, steps)
    for link, own in zip(links, found, strict=True):
        line = timeline(ledger, Network(*link, collective=algorithm), compute)
        np.testing.assert_allclose(own, line.seconds[steps], rtol=1e-12, atol=1e-12)


# The messages of a step: (the step that wants the result, moment, collective, payload, groups; None: all nodes).
Sent = tuple[int, str, str, float, Any]
SERVER: Any = {"collective": "server"}
LAYERS = Compute(5, layers=2, bucket_bytes=0)
BY_HAND: dict[str, tuple[int, Sent, Network, Compute, float]] = {
    # 2.5 s (10 MB over 32 Mbit/s, as 2 · 1/2 · S) from 1 s on, due at step 3, which is computed at 3 s: at 3.5 s.
    "a delayed result": (2, (3, "weights", "all_reduce", 10e6, None), Network(32e6), Compute(1), 3.5),
    # Two layers: 5 pieces of 1 s, 2 forward and 3 backward; gradients are ready at 3 s and 5 s, each sent in 1 s or 4.
    "layers, fast": (2, (1, "gradients", "all_reduce", 2e6, None), Network(8e6), LAYERS, 6),
    "layers, slow": (2, (1, "gradients", "all_reduce", 2e6, None), Network(2e6), LAYERS, 11),
    "no layers": (2, (1, "gradients", "all_reduce", 2e6, None), Network(8e6), Compute(5), 7),
    # 1 s each from node 0 to 1 and to 2: one after the other. From 0 to 1 and from 1 to 0: at once, full duplex.
    "a line out": (3, (1, "weights", "send", 1e6, [(0, 1), (0, 2)]), Network(8e6), Compute(1), 3),
    "full duplex": (3, (1, "weights", "send", 1e6, [(0, 1), (1, 0)]), Network(8e6), Compute(1), 2),
    "a line in": (3, (1, "weights", "send", 1e6, [(0, 1), (2, 1)]), Network(8e6), Compute(1), 3),
    # 1 MB in and out on a line of 8 Mbit/s: all four nodes take 4 s each way, in one group or in two.
    "a server": (4, (1, "weights", "all_reduce", 1e6, None), Network(8e6, **SERVER), Compute(1), 9),
    "islands": (4, (1, "weights", "all_reduce", 1e6, [(0, 1), (2, 3)]), Network(8e6, **SERVER), Compute(1), 9),
    # Five come in; out go two to each of three nodes, and one to each of two.
    "unequal": (5, (1, "weights", "all_gather", 1e6, [(0, 1, 2), (3, 4)]), Network(8e6, **SERVER), Compute(1), 14),
    # Two nodes push over own lines of 8 s to a server whose line takes 1 s for it: the second is not behind.
    "slow lines": (2, (1, "weights", "push", 1e6, [(0,), (1,)]), Network(1e6, server=8e6), Compute(1), 9),
    "a slow server": (2, (1, "weights", "push", 1e6, [(0,), (1,)]), Network(8e6, server=1e6), Compute(1), 17),
}


@pytest.mark.parametrize("case", BY_HAND)
def test_a_message_by_hand(case: str) -> None:
    nodes, (due, *sent), network, compute, end = BY_HAND[case]
    line = timeline(record(nodes, due, [(1, due, *sent)]), network, compute)
    assert line.seconds[-1] == pytest.approx(end)
    assert line.stalls.sum() + line.compute_seconds.sum() == pytest.approx(end)


def test_equal_groups_are_held_once() -> None:
    ledger = record(1000, 2, [(s, s, "weights", "all_reduce", 1e6, [range(500), range(500, 1000)]) for s in (1, 2)])
    assert ledger[0].groups is ledger[1].groups


def test_islands_wait_for_their_own_alone() -> None:
    ledger = record(4, 1, [(1, 1, "weights", "all_reduce", 1e6, [(0, 1), (2, 3)])])
    line = timeline(ledger, 8e6, Compute([1, 2, 3, 4]))
    # 1 s each: 0 and 1 are done at 3 s, 2 and 3 at 5 s; waits of 2, 1, 2, 1, and of two nodes for the end.
    assert line.seconds[-1] == 5 and line.stalls.tolist() == [(2 + 1 + 2 + 1 + 2 + 2) / 4]
    empty = timeline(record(2, 0), 1e6, 1.0)
    assert empty.seconds.tolist() == [0] and empty.utilization == 1 and "0 steps" in repr(empty)


@functools.cache
def trained() -> vsim.Trainer:
    trainer = vsim.Trainer(MLP(hidden=(16,)), digits()[0])
    trainer.fit(strategy=DiLoCoStrategy(H=3), num_nodes=2, max_steps=7, progress=False)
    return trainer


def test_trainers_histories_and_ledgers(tmp_path: Path) -> None:
    trainer = trained()
    payload = 4 * (64 * 16 + 16 + 16 * 10 + 10)
    trainer.history.to_json(tmp_path / "history.json")
    again = History.from_json(tmp_path / "history.json")
    lines = [timeline(one, 1e6, 2.0) for one in (trainer, trainer.history, trainer.ledger)]
    for line in [*lines, trainer.history.time(1e6, 2.0), again.time("1 Mbit/s", Compute(2))]:
        assert line.seconds[-1] == pytest.approx(7 * 2 + 2 * 8 * payload / 1e6)


def test_mistakes_are_named() -> None:
    history, untrained = trained().history, vsim.Trainer(MLP(hidden=(4,)), digits()[0])
    three: Any = Network.between(np.ones((3, 3)))
    line = timeline(record(9, 300), 8e6, 1.0)
    check_refusals(
        [
            (lambda: timeline(3, 1e6, 1.0), TypeError, ["run must be a ledger", "Trainer", "got 3"]),
            (lambda: timeline(untrained, 1e6, 1.0), ValueError, ["run", "no step", "train it first"]),
            (lambda: history.time("1 Mbit/s"), TypeError, ["compute is missing"]),
            (lambda: history.time(compute=1.0), TypeError, ["network is missing"]),
            (lambda: history.time(three, 1.0), ValueError, ["network", "3 nodes", "2"]),
            (lambda: history.time(1e6, Compute([1, 2, 3])), ValueError, ["compute", "3 nodes", "2"]),
            (lambda: line.plot(steps=(0, 3)), ValueError, ["steps", "1 … 300", "0"]),
            (lambda: line.plot(nodes=[9]), ValueError, ["nodes", "from 0 to 8", "9"]),
        ]
    )


def bars(ax: Any) -> dict[Any, list[tuple[float, float]]]:
    """Colour → (start, end) of the bars, in their order."""
    found: dict[Any, list[tuple[float, float]]] = {}
    for bar in ax.collections:
        for path in bar.get_paths():
            x = path.vertices[:, 0]
            found.setdefault(to_hex(bar.get_facecolor()[0]).upper(), []).append((x.min(), x.max()))
    return found


def test_the_picture_shows_every_second() -> None:
    """2 steps of 1 and 2 s; 1 s is sent after step 1. Node 0 waits 1 + 1 s, node 1 one; then they compute again."""
    line = timeline(record(2, 2, [(1, 1, "weights", "all_reduce", 1e6, None)]), 8e6, Compute([1, 2]))
    ax = line.plot()
    drawn = bars(ax)
    assert drawn["#999999"] == [(0, 1), (3, 4), (0, 2), (3, 5)]
    assert drawn["#FBE0D0"] == [(1, 3), (2, 3)] and drawn["#0072B2"] == [(2, 3), (2, 3)]
    assert [text.get_text() for text in ax.get_legend().get_texts()] == ["computes", "waits", "sends: x"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["node 0", "node 1"]
    assert ax.get_xlabel() == "seconds"
    second = line.plot(steps=(2, 2), nodes=[1])
    assert bars(second)["#999999"] == [(3, 5)] and "drawn from step 2" in second.get_xlabel()


def test_the_wait_for_a_deadline_is_drawn_as_such() -> None:
    ledger = record(2, 2)
    ledger.attend(Segment(1, 2, (0, 1), (), 5.0, ()))
    line = timeline(ledger, 8e6, 1.0)
    drawn = bars(line.plot(steps=(1, 2)))
    assert line.seconds[-1] == 5 and drawn == {"#999999": [(0, 1), (1, 2)] * 2, "#FBE0D0": [(2, 5)] * 2}


def test_late_and_absent_nodes_are_drawn() -> None:
    ledger = record(4, 3)
    ledger.attend(Segment(1, 2, (0, 1), (2,), 3.0, ()))
    ledger.attend(Segment(3, 3, (0, 1, 2), (), 0.0, ()))
    ax = timeline(ledger, 8e6, 1.0).plot(steps=(1, 3))
    named, patches = ([*one] for one in (ax.get_legend().get_texts(), ax.get_legend().get_patches()))
    legend = {text.get_text(): patch for text, patch in zip(named, patches, strict=True)}
    assert list(legend) == ["computes", "waits", "late: work dropped", "absent"]
    drawn = [(bar.get_hatch(), *bar.get_paths()[0].get_extents().intervalx) for bar in ax.collections]
    assert [(start, end) for hatch, start, end in drawn if hatch == legend["late: work dropped"].get_hatch()] == [
        (0, 3)
    ]
    white = bars(ax)["#FFFFFF"]
    assert white == [(0, 3), (0, 3), (3, 4)]  # node 2 is late in the first round, node 3 absent in both


def test_the_picture_of_many_nodes_and_steps_is_that_of_the_first_event() -> None:
    line = timeline(record(9, 300, [(s, s + 1, "weights", "all_reduce", 1e6, None) for s in (100, 200)]), 8e6, 1.0)
    ax = line.plot()
    assert [label.get_text() for label in ax.get_yticklabels()] == [f"node {k}" for k in range(4)]
    assert ax.get_xlim()[0] == pytest.approx(97) and ax.get_ylabel() == "4 of 9 nodes"
    assert "step 98" in [text.get_text() for text in ax.texts]


@pytest.mark.slow
@pytest.mark.parametrize(("options", "islands"), [({}, False), ({"speeds": np.linspace(1, 2, 10_000)}, True)])
def test_ten_thousand_nodes_and_events(options: dict[str, Any], islands: bool) -> None:
    """The slowest node computes 0.5 s a step and never waits: no node is later, in whatever islands they meet."""
    draws: list[Any] = [None]
    if islands:  # other islands of 100 nodes from step to step, ten times by turns
        draws = [np.random.default_rng(i).permutation(10_000).reshape(100, 100).tolist() for i in range(10)]
    events = [(step, step, "gradients", "all_reduce", 4e6, draws[step % len(draws)]) for step in range(1, 10_001)]
    line = timeline(record(10_000, 10_000, events), Network("1 Gbit/s", "10 ms"), Compute(0.5, **options))
    size = 100 if islands else 10_000
    ring = 2 * (size - 1) * 0.01 + 2 * (size - 1) / size * 4e6 / 125e6
    np.testing.assert_allclose(line.seconds, (0.5 + ring) * np.arange(10_001), rtol=1e-9)


# A trace --------------------------------------------------------------------------------------------------------------


def test_a_trace_is_valid_and_has_what_nodes_do(tmp_path: Path) -> None:
    """By the Trace Event Format: a list of objects with ph, name, pid and tid; ts and dur in microseconds; complete
    events of a thread are apart or nested; asynchronous ones come in pairs of one id, cat and name."""
    line = vsim.price(
        DiLoCoStrategy(H=3),
        parameters=1e6,
        num_nodes=3,
        max_steps=7,
        network="100 Mbit/s, 10 ms",
        compute=Compute([0.1, 0.2, 0.15], jitter=0.1),
    )
    line.to_perfetto(tmp_path / "trace.json")
    content = json.loads((tmp_path / "trace.json").read_text())
    events = content["traceEvents"]
    assert content["displayTimeUnit"] in ("ms", "ns") and isinstance(events, list)
    for event in events:
        assert event["ph"] in ("M", "X", "b", "e") and isinstance(event["name"], str)
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] != "M":
            assert event["ts"] >= 0 and event["cat"] and event["args"]["step"] in range(1, 8)
    assert [e["args"]["name"] for e in events if e["ph"] == "M"] == ["node 0", "node 1", "node 2"]
    for node in range(3):
        own = sorted((e["ts"], e["ts"] + e["dur"]) for e in events if e["ph"] == "X" and e["pid"] == node)
        assert all(end <= start + 1e-3 for (_, end), (start, _) in itertools.pairwise(own))
        assert own[-1][1] <= 1e6 * line.seconds[-1] + 1e-3
        pairs = [
            (e["id"], e["cat"], e["name"], e["ph"], e["ts"]) for e in events if e["pid"] == node and e["ph"] in "be"
        ]
        assert len(pairs) == 4  # two syncs
        for begin, end in zip(pairs[::2], pairs[1::2], strict=True):
            assert begin[:3] == end[:3] and (begin[3], end[3]) == ("b", "e") and begin[4] < end[4]
    computed = sum(e["dur"] for e in events if e["ph"] == "X" and e["cat"] == "compute") / 3e6
    waited = sum(e["dur"] for e in events if e["ph"] == "X" and e["cat"] == "wait") / 3e6
    assert computed == pytest.approx(line.compute_seconds.sum()) and 0 < waited <= line.stalls.sum() + 1e-9
