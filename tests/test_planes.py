"""Planes against the clock itself, which `test_timeline_oracle.py` compares with a plain simulation."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from shared_comparisons import compared

import vsim
from vsim import Compute, Network, timeline
from vsim.cluster.ledger import Event
from vsim.cluster.participation import Dropout, Sample
from vsim.cluster.plan import Segment
from vsim.network.planes import planes
from vsim.strategy import (
    AloneStrategy,
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    FedAvgStrategy,
    NoLoCoStrategy,
    SimpleReduceStrategy,
    SPARTAStrategy,
    StreamingDiLoCoStrategy,
)

NODES, STEPS = 4, 24
MAKES: dict[str, Any] = {
    "AllReduce": SimpleReduceStrategy(lr=1e-3),
    "FedAvg": FedAvgStrategy(H=5, lr=1e-3),
    "DiLoCo": DiLoCoStrategy(H=5, lr=1e-3),
    "Streaming": StreamingDiLoCoStrategy(H=6, delay=2, lr=1e-3),
    "Eager": EagerDiLoCoStrategy(H=5, lr=1e-3),
    "NoLoCo": NoLoCoStrategy(H=5, lr=1e-3),
    "SPARTA": SPARTAStrategy(lr=1e-3),
    "SPARTA, late": SPARTAStrategy(async_delay=3, lr=1e-3),
    "alone": AloneStrategy(lr=1e-3),
}
COMPUTES: dict[str, dict[str, Any]] = {
    "at the end": {},
    "in layers": {"layers": 6, "bucket_bytes": 0},
    "of different speed": {"speeds": [1, 1, 0.5, 2], "jitter": 0.3},
}


@pytest.fixture(scope="module")
def runs() -> vsim.Comparison:
    return compared(MAKES, num_nodes=NODES, max_steps=STEPS)


@pytest.mark.parametrize(
    ("own", "collective"), [("at the end", "server"), ("in layers", "ring"), ("of different speed", "tree")]
)
def test_planes_are_the_clock(runs: vsim.Comparison, own: str, collective: str) -> None:
    compute = Compute(0.7, **COMPUTES[own])
    mean = compute.node_seconds.mean()
    steps = [0, 5, 13, STEPS]
    found = {name: planes(runs[name].ledger, Network(1e8, 0.1, collective=collective), compute, steps) for name in runs}

    @settings(max_examples=10)
    @given(st.floats(-4, 2), st.floats(-5, 0.5), st.floats(3, 11))
    def compare(seconds: float, latency: float, bandwidth: float) -> None:
        speed = Compute(0.7, **COMPUTES[own])
        speed.node_seconds = compute.node_seconds / mean * 10**seconds
        for name, own_planes in found.items():
            exact = timeline(runs[name], Network(10**bandwidth, 10**latency, collective=collective), speed)
            ours = own_planes.seconds(10**seconds, 10**latency, 10**bandwidth)
            np.testing.assert_allclose(ours, exact.seconds[steps], rtol=1e-3, err_msg=name)
            share = own_planes.computed * 10**seconds / ours[-1]
            assert math.isclose(share, exact.utilization, rel_tol=5e-4), name

    compare()


def test_what_waits_for_everything_is_one_plane(runs: vsim.Comparison) -> None:
    # Ring all-reduce among K nodes: 2 (K − 1) messages of a K-th of the payload, 24 times.
    one = planes(runs["AllReduce"].ledger, Network(1e9, 1), Compute(3), [STEPS])
    bits = 8 * sum(event.payload_bytes for event in runs["AllReduce"].ledger)
    ((compute, latency, inverse),) = one.planes[0]
    messages = 2 * (NODES - 1)
    assert [compute, latency, inverse] == pytest.approx([STEPS, STEPS * messages, bits * messages / NODES], rel=1e-7)
    for waits in ("FedAvg", "DiLoCo", "SPARTA"):
        assert {len(own) for own in planes(runs[waits].ledger, Network(1e9, 1), Compute(3), range(25)).planes} == {1}
    overlapping = planes(runs["Streaming"].ledger, Network(1e9, 1), Compute(3), [2, STEPS])
    assert len(overlapping.planes[0]) == 1 < len(overlapping.planes[1])


def test_a_message_with_a_step_to_arrive_is_two_planes() -> None:
    ledger = vsim.Ledger(2)
    ledger.steps = 2
    ledger.record(Event(1, 2, "weights", "all_reduce", "late", 1000, ((0, 1),)))
    # A ring of two: two messages of half the payload each, 8000 bits together, while the second step is computed.
    own = planes(ledger, Network(1e6, 0.1), Compute(1), [1, 2])
    assert own.planes[0] == pytest.approx(np.array([[1, 0, 0]]), abs=1e-6)
    assert own.planes[1][np.argsort(own.planes[1][:, 0])] == pytest.approx(
        np.array([[1, 2, 8000], [2, 0, 0]]), rel=1e-6
    )


def test_links_that_differ_change_by_factors(runs: vsim.Comparison) -> None:
    network = Network.regions({"eu": 2, "us": 2}, inside="10 Gbit/s, 1 ms", between="200 Mbit/s, 80 ms")
    for name in runs:
        own = planes(runs[name].ledger, network, Compute(0.5), [STEPS])
        other = Network.regions({"eu": 2, "us": 2}, inside="1 Gbit/s, 3 ms", between="20 Mbit/s, 240 ms")
        exact = timeline(runs[name], other, Compute(0.2)).seconds[-1]
        assert own.seconds(0.2, 3, 0.1)[0] == pytest.approx(exact, rel=5e-4), name


def test_a_servers_line_keeps_its_ratio(runs: vsim.Comparison) -> None:
    own = planes(runs["FedAvg"].ledger, Network(1e8, 0.1, collective="server", server=4e8), Compute(1), [STEPS])
    exact = timeline(runs["FedAvg"], Network(1e6, 0.02, collective="server", server=4e6), Compute(2)).seconds[-1]
    assert own.seconds(2, 0.02, 1e6)[0] == pytest.approx(exact, rel=5e-4)
    with pytest.raises(ValueError, match="ratio"):
        planes(runs["FedAvg"].ledger, Network(math.inf, server=1e6), Compute(1), [STEPS])


@pytest.mark.parametrize("participation", [Dropout(0.3), Sample(3, of=9)])
def test_nodes_that_come_and_go(participation: Any) -> None:
    strategies = {"FedAvg": FedAvgStrategy(H=4, lr=1e-3)}
    run = compared(strategies, num_nodes=3, max_steps=12, participation=participation)["FedAvg"]
    own = planes(run.ledger, Network(1e8, 0.1, collective="server"), Compute(1), [4, 12])
    exact = timeline(run, Network(2e6, 0.3, collective="server"), Compute(0.1)).seconds[[4, 12]]
    np.testing.assert_allclose(own.seconds(0.1, 0.3, 2e6), exact, rtol=5e-4)


def test_what_a_clock_decided_has_no_slope() -> None:
    network = Network(1e8, 0.01)
    strategies = {"async": AsyncDiLoCoStrategy(H=3, lr=1e-3)}
    asynchronous = compared(strategies, max_steps=9, network=network, compute=0.5)["async"]
    own = planes(asynchronous.ledger, network, Compute(0.5), [3, 9])
    assert own.decided == "both"
    assert own.seconds(0.5, 7, 1e3) == pytest.approx(timeline(asynchronous, network, Compute(0.5)).seconds[[3, 9]])
    ledger = vsim.Ledger(2)
    ledger.steps = 4
    ledger.attend(Segment(1, 4, (0, 1), seconds=30.0))
    waiting = planes(ledger, Network(1e8), Compute(0.5), [1, 4])
    assert waiting.decided == "compute"
    assert waiting.seconds(0.5, 0, 1e8) == pytest.approx([0.5, 30])
