"""Networks: units, and what a collective costs, against formulas, every ring, and what the messages carry."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from comparisons_by_hand import check_refusals

import vsim
from vsim.cluster.traffic import traffic
from vsim.network import Compute, Network
from vsim.network.cost import rounds
from vsim.network.links import bits_per_second, seconds

COLLECTIVES = ("all_reduce", "merge", "all_gather", "reduce_scatter", "broadcast")
ALGORITHMS = ("ring", "tree", "halving-doubling", "server")


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("200 Mbit/s", 2e8),
        ("1Gbps", 1e9),
        ("2.5 Tbit/s", 2.5e12),
        ("1e9 bit/s", 1e9),
        (".5 kb/s", 500.0),
        (np.float32(5), 5.0),
    ],
)
def test_rates(text: Any, bits: float) -> None:
    assert bits_per_second("bandwidth", text) == bits


@pytest.mark.parametrize(
    ("text", "value"), [("50 ms", 0.05), ("20 us", 2e-5), ("3 µs", 3e-6), ("3 μs", 3e-6), ("2 s", 2.0), (0, 0.0)]
)
def test_durations(text: Any, value: float) -> None:
    assert seconds("latency", text) == pytest.approx(value)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 8])
def test_prices_by_their_formulas(n: int) -> None:
    S, B, a, log = 3e6, 1e8, 0.02, math.ceil(math.log2(n))
    s = 8 * S / B
    expected = {
        ("ring", "all_reduce"): 2 * (n - 1) * a + 2 * (n - 1) / n * s,
        ("ring", "reduce_scatter"): (n - 1) * a + (n - 1) / n * s,
        ("ring", "all_gather"): (n - 1) * (a + s),
        ("ring", "broadcast"): (n - 1) * a + s,
        ("tree", "all_reduce"): 2 * log * (a + s),
        ("tree", "broadcast"): log * (a + s),
        ("tree", "all_gather"): 2 * log * a + (n - 1) * s + log * n * s,
        ("tree", "reduce_scatter"): 2 * log * a + log * s + (n - 1) / n * s,
        ("halving-doubling", "all_reduce"): 2 * log * a + 2 * (n - 1) / n * s,
        ("halving-doubling", "reduce_scatter"): log * a + (n - 1) / n * s,
        ("halving-doubling", "all_gather"): log * a + (n - 1) * s,
        ("halving-doubling", "broadcast"): log * (a + s),
        ("server", "all_reduce"): 2 * max(n * s, a + s),
        ("server", "broadcast"): a + s + max((n - 1) * s, a + s),
        ("server", "all_gather"): max(n * s, a + s) + max(n * (n - 1) * s, a + (n - 1) * s),
        ("server", "reduce_scatter"): max(n * s, a + s) + max(s, a + s / n),
        ("server", "all_to_all"): 2 * max((n - 1) * s, a + (n - 1) / n * s),
        ("server", "merge"): 2 * max(n * s, a + s),  # the server sends the result, not all rows
        **{(algorithm, "all_to_all"): (n - 1) * (a + s / n) for algorithm in ("ring", "tree", "halving-doubling")},
    }
    expected |= {(own, "merge"): expected[own, "all_gather"] for own in ALGORITHMS[:3]}
    for (algorithm, collective), price in expected.items():
        found = Network(B, a, collective=algorithm).seconds(collective, n, [S, 2 * S])
        assert found[0] == pytest.approx(price), (algorithm, collective)
    assert Network(B, a).seconds("send", 2, S) == pytest.approx(a + s)
    assert Network(B, a, server=B / 4).seconds("push", n, S) == pytest.approx(max(4 * n * s, a + s))


def test_an_all_to_all_takes_as_long_as_its_busiest_line() -> None:
    # 10 Mbit/s and 1 s, but for the links of node 2, 1 Mbit/s and 3 s. A part of 125 kB is 1 Mbit: 1.1 s, or 4 s.
    # Node 2 sends three of 4 s; node 0 two of 1.1 s and one of 4 s; together they are through when node 2 is.
    slow = Network.regions(
        {"a": 2, "b": 1, "c": 1},
        "10 Mbit/s, 1 s",
        {("a", "b"): "1 Mbit/s, 3 s", ("c", "b"): "1 Mbit/s, 3 s", ("a", "c"): "10 Mbit/s, 1 s"},
    )
    assert slow.seconds("all_to_all", slow.kind(range(4)), 4 * 125e3) == pytest.approx(12)
    assert slow.seconds("all_to_all", slow.kind([0, 1, 3]), 3 * 125e3) == pytest.approx(2.2)
    # One way alone: into node 1 it takes 2 s, out of it 1 s.
    one_way = Network.between([[0, 1e6], [2e6, 0]])
    assert one_way.seconds("all_to_all", one_way.kind(range(2)), 2 * 250e3) == pytest.approx(2)


@pytest.mark.parametrize("collective", COLLECTIVES)
def test_a_ring_takes_as_long_as_its_busiest_node_sends(collective: str) -> None:
    for n in (2, 3, 8):
        sent = sum(times * share for times, share, _ in rounds(collective, n, "ring"))
        assert sent == pytest.approx(float(traffic(collective, n).busiest))


@pytest.mark.parametrize("algorithm", ["tree", "halving-doubling"])
@pytest.mark.parametrize("n", [2, 3, 5, 8, 13])
def test_the_messages_carry_what_the_collective_promises(algorithm: str, n: int) -> None:
    for collective in ("all_reduce", "all_gather", "broadcast"):
        knows = [{place} for place in range(n)]
        for _, _, pairs in rounds(collective, n, algorithm):
            before = [set(one) for one in knows]
            assert len(set(pairs[1].tolist())) == pairs.shape[1], "a node receives one message at once"
            for source, target in pairs.T:
                knows[target] |= before[source]
        everything = set(range(n)) if collective != "broadcast" else {0}
        assert all(one >= everything for one in knows), collective


def test_laps_of_a_ring_overlap() -> None:
    """Two regions, slow links 3 → 4 and 7 → 0: a node waits for its left neighbour only."""
    world = Network.regions({"eu": 4, "us": 4}, inside="10 Gbit/s, 1 ms", between="200 Mbit/s, 80 ms")
    # 1 Mbit: 1.1 ms inside; between 5 ms on the line, and 80 ms. A way of 14 messages crosses four times, with nine
    # messages inside; in one round it waits for a slow line.
    short = world.seconds("all_reduce", world.kind(range(8)), 1e6)
    assert short == pytest.approx(4 * 85e-3 + 9 * 1.1e-3 + 5e-3)
    # 100 Mbit: a slow line is always busy, and the last message has its latency.
    assert world.seconds("all_reduce", world.kind(range(8)), 100e6) == pytest.approx(14 * 0.5 + 0.08)
    assert world.seconds("all_gather", world.kind(range(8)), 12.5e6) == pytest.approx(7 * 0.5 + 0.08)
    # A broadcast from node 2: 2, 3, 4 … 7, 0, 1, with both slow links; from node 0 with one.
    for source, crossings in ((2, 2), (0, 1)):
        group = [*range(source, 8), *range(source)]
        found = world.seconds("broadcast", world.kind(group), 100e6)
        assert found == pytest.approx(crossings * 0.08 + (7 - crossings) * 1e-3 + 4)


def test_compute() -> None:
    assert Compute("800 ms").node_seconds == 0.8
    assert Compute([1, 2], speeds=[2, 1]).node_seconds.tolist() == [0.5, 2]
    assert Compute.from_flops(1e12, 1e12, mfu=0.5, layers=3).node_seconds == 2
    jittery = Compute(2.0, jitter=0.3, seed=1)
    drawn = jittery.steps(50).next(2000)
    assert drawn.shape == (2000, 50) and drawn.mean() == pytest.approx(2, rel=0.01)
    assert np.log(drawn).std() == pytest.approx(0.3, rel=0.01)
    parts = jittery.steps(50)
    np.testing.assert_array_equal(np.concatenate([parts.next(1), parts.next(7)]), jittery.steps(50).next(8))

    own = Compute(torch.tensor([1.0, 2.0], dtype=torch.float64), speeds=torch.tensor([1.0, 4.0]))
    assert own.node_seconds.tolist() == [1.0, 0.5]


def test_mistakes_are_named() -> None:
    two, world = Network.between([[0, 1e6], [1e6, 0]]), Network.regions({"eu": 4, "us": 4}, "10 Gbit/s", "1 Mbit/s")
    of, alike, between, regions, node = Network, Network(1e9), Network.between, Network.regions, Compute
    values: list[tuple[Callable[[], Any], list[Any]]] = [
        (lambda: of("10 MB"), ["'10 MB'", "bytes", "80 Mbit/s"]),
        (lambda: of("10 MB/s"), ["bytes a second", "80 Mbit/s"]),
        (lambda: Network.of(200), ["network: 200 is in bit/s", "'200 Mbit/s'", "Network(200)"]),
        (lambda: of("fast"), ["bandwidth", "rate in bits", "'200 Mbit/s'", "'fast'"]),
        (lambda: of("1.2.3 Mbit/s"), ["bandwidth", "'1.2.3 Mbit/s'"]),
        (lambda: of("1e400 bit/s"), ["bandwidth", "1.8e308", "'1e400 bit/s'"]),
        (lambda: of(1e9, "50 mm"), ["latency", "'50 ms'", "'50 mm'"]),
        (lambda: of(1e9, collective="rings"), ["collective", "'rings'", "'ring'"]),
        (lambda: of.parse("1 Gbit/s, 1 ms, 2 ms"), ["bandwidth, latency, collective", "2 ms"]),
        (lambda: of.parse("1 Gbit/s, rnig"), ["'tree'", "'rnig'", "did you mean 'ring'"]),
        (lambda: between([[1, 2], [3, 4], [5, 6]]), ["(K, K) matrix", "3"]),
        (lambda: between([[1, 2], [3, 4]], np.ones((3, 3))), ["bandwidth", "2 nodes", "latency", "3"]),
        (lambda: between([[1, -2], [3, 4]]), ["bandwidth[0, 1]", "> 0", "-2"]),
        (lambda: regions({"a": 1, "b": 1}, "1 Gbit/s", {}), ["no links", "a and b"]),
        (lambda: regions({"a": 1}, {"c": "1 Gbit/s"}, 1e9), ["no region c", "a"]),
        (lambda: regions({"a": 1}, "1 Gbit/s, 1 ms, tree", 1e9), ["links", "'bandwidth, latency'"]),
        (lambda: regions({"a": 10**10}, 1e9, 1e9), ["regions", "1000000", "10000000000"]),
        (lambda: node(1, speeds=[]), ["speeds", "one number per node"]),
        (lambda: node([1, 2], speeds=[1, 2, 3]), ["2 values", "speeds 3"]),
        (lambda: alike.seconds("allreduce", 8, 1e6), ["collective", "'all_reduce'", "'allreduce'", "did you mean"]),
        (lambda: alike.seconds("all_reduce", 8, [1e6, -1.0]), ["payload_bytes", ">= 0", "-1.0"]),
        (lambda: alike.seconds("all_reduce", 0, 1e6), ["kind", ">= 1", "got 0"]),
        (lambda: world.seconds("all_reduce", 8, 1e6), ["links differ", "kind", "kind=8"]),
        (lambda: world.kind([0, 8]), ["nodes", "from 0 to 7", "[0, 8]"]),
        (lambda: two.seconds("all_reduce", (0, 5), 1), ["places from 0 to 1", "5"]),
        (lambda: alike.kind([0, 0]), ["every node once", "0, 0"]),
    ]
    types: list[tuple[Callable[[], Any], list[Any]]] = [
        (lambda: of([[1, 2], [3, 4]]), ["bandwidth", "a number", "Network.between"]),
        (lambda: between([1, 2]), ["(K, K) matrix", "[1, 2]"]),
        (lambda: between([[1, 2], [3, 4]], None), ["latency", "matrix", "None"]),
        (lambda: regions({}, 1e9, 1e9), ["regions", "name to nodes", "{}"]),
        (lambda: regions({"eu": 1, "us": 1}, 1e9, {"eu-us": 1e9}), ["between", "('eu', 'us')", "'eu-us'"]),
        (lambda: node(np.array(1.0)), ["seconds_per_step", "a number"]),
        (lambda: node(1, speed=[2]), ["'speed'", "did you mean 'speeds'"]),
        (lambda: node(1, seed=3), ["seed", "no effect", "jitter"]),
        (lambda: node(1, bucket_bytes=1e6), ["bucket_bytes", "no effect", "layers"]),
        (lambda: alike.seconds("all_reduce", range(8), 1e6), ["kind", "whole number", "range(0, 8)"]),
        (lambda: vsim.Deadline(second=2), ["'second'", "did you mean 'seconds'"]),
        (lambda: vsim.OverCommit(factr=2), ["'factr'", "did you mean 'factor'"]),
    ]
    for kind, cases in ((ValueError, values), (TypeError, types)):
        check_refusals([(call, kind, words) for call, words in cases])
