"""Networks: units, and what a collective costs, against formulas, every ring, and what the messages carry."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import vsim
from vsim.cluster.traffic import traffic
from vsim.network import Compute, Network
from vsim.network.cost import rounds
from vsim.network.links import bits_per_second, seconds

COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
ALGORITHMS = ("ring", "tree", "halving-doubling", "server")


@pytest.mark.parametrize(
    ("text", "bits"),
    [
        ("200 Mbit/s", 2e8),
        ("1 Gbit/s", 1e9),
        ("1Gbps", 1e9),
        ("2.5 Tbit/s", 2.5e12),
        ("64 kbit/s", 64e3),
        ("1e9 bit/s", 1e9),
        (".5 kb/s", 500.0),
        (5, 5.0),
        (np.int64(5), 5.0),
        (np.float32(5), 5.0),
        (math.inf, math.inf),
    ],
)
def test_rates(text: Any, bits: float) -> None:
    assert bits_per_second("bandwidth", text) == bits


@pytest.mark.parametrize(
    ("text", "value"), [("50 ms", 0.05), ("20 us", 2e-5), ("3 µs", 3e-6), ("3 μs", 3e-6), ("2 s", 2.0), (0, 0.0)]
)
def test_durations(text: Any, value: float) -> None:
    assert seconds("latency", text) == pytest.approx(value)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Network("10 MB"), "'10 MB': that is bytes, and no rate; as a rate 80 Mbit/s"),
        (lambda: Network("10 MB/s"), "that is bytes a second; as a rate 80 Mbit/s"),
        (lambda: Network("fast"), "bandwidth must be a rate in bits, such as '200 Mbit/s', got 'fast'"),
        (lambda: Network("1.2.3 Mbit/s"), "got '1.2.3 Mbit/s'$"),
        (lambda: Network("1.2.3 MB"), "got '1.2.3 MB'$"),
        (lambda: Network("10 MiB/s"), "got '10 MiB/s'$"),
        (lambda: Network(0), "bandwidth must be > 0, got 0"),
        (lambda: Network("-3 Mbit/s"), "bandwidth must be > 0"),
        (lambda: Network(math.nan), "bandwidth must be > 0"),
        (lambda: Network(1e9, -1), "latency must be >= 0"),
        (lambda: Network(1e9, math.inf), "latency must be >= 0 and finite"),
        (lambda: Network(1e9, "50 mm"), "latency must be a duration, such as '50 ms', got '50 mm'"),
        (lambda: Network(1e9, collective="rings"), "did you mean 'ring'"),
        (lambda: Network.parse("1 Gbit/s, 1 ms, 2 ms"), "a network is 'bandwidth, latency, collective'"),
        (lambda: Network.between([[1, 2], [3, 4], [5, 6]]), r"\(K, K\) matrix, from every node to every other, got 3"),
        (lambda: Network.between([[1, 2], [3, 4]], np.ones((3, 3))), "bandwidth is of 2 nodes, and latency of 3"),
        (lambda: Network.between([[1, -2], [3, 4]]), r"bandwidth\[0, 1\] must be > 0, got -2"),
        (lambda: Network.regions({"a": 1, "b": 1}, "1 Gbit/s", {}), "no links are given for a and b"),
        (lambda: Network.regions({"a": 1}, {"c": "1 Gbit/s"}, 1e9), "there is no region c; there are a"),
        (lambda: Network.regions({"a": 0}, 1e9, 1e9), r"regions\['a'\] must be a whole number >= 1"),
        (lambda: Network.regions({"a": 1}, "1 Gbit/s, 1 ms, tree", 1e9), "links are 'bandwidth, latency'"),
        (lambda: Compute(1, speeds=[]), "must have one number per node, and there is none"),
        (lambda: Compute(0), "seconds_per_step must be > 0"),
        (lambda: Compute(math.inf), "must be > 0 and finite"),
        (lambda: Compute([1, 2], speeds=[1, 2, 3]), "has 2 values, one per node, and speeds 3"),
        (lambda: Compute(1, layers=0), "layers must be a whole number >= 1"),
        (lambda: Compute(1, jitter=-1), "jitter must be >= 0"),
        (lambda: Compute.from_flops(1e12, 1e12, mfu=2), "mfu must be > 0 and <= 1"),
    ],
)
def test_bad_values(make: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Network([[1, 2], [3, 4]]), "bandwidth must be a number, .* Network.between takes a matrix"),
        (lambda: Network(np.array([1e9, 1e9])), "bandwidth must be a number"),
        (lambda: Network.between(3), r"bandwidth must be a \(K, K\) matrix, from every node to every other, got 3"),  # type: ignore[arg-type]
        (lambda: Network.between([1, 2]), r"\(K, K\) matrix, from every node to every other, got \[1, 2\]"),
        (lambda: Network.between([[1, 2], [3, 4]], None), "latency must be a .* matrix, .* got None"),  # type: ignore[arg-type]
        (lambda: Network.regions({}, 1e9, 1e9), "regions must be a mapping, name to nodes, .*, got {}"),  # type: ignore[arg-type]
        (lambda: Network.regions(["a"], 1e9, 1e9), r"regions must be a mapping, .*, got \['a'\]"),  # type: ignore
        (
            lambda: Network.regions({"eu": 1, "us": 1}, 1e9, {"eu-us": 1e9}),  # type: ignore[dict-item]
            r"between must map pairs of names to links, such as \('eu', 'us'\), got 'eu-us'",
        ),
        (lambda: Compute(1, speeds=2), "speeds must be numbers, one per node, got 2"),  # type: ignore[arg-type]
        (lambda: Compute(np.array(1.0)), "seconds_per_step must be a number"),  # type: ignore[arg-type]
        (lambda: Network(1e9, delay=3), "unknown argument 'delay'"),
        (lambda: Compute(1, speed=[2]), "did you mean 'speeds'"),
        (lambda: Compute(1, seed=3), "seed is that of the jitter, and has no effect without"),
        (lambda: Network.of(None), "network is missing"),
        (lambda: Compute.of(None), "compute is missing"),
    ],
)
def test_bad_types(make: Any, message: str) -> None:
    with pytest.raises(TypeError, match=message):
        make()


def test_what_cannot_be_priced_is_refused() -> None:
    alike = Network("1 Gbit/s")
    world = Network.regions({"eu": 4, "us": 4}, inside="10 Gbit/s, 1 ms", between="200 Mbit/s, 80 ms")
    with pytest.raises(ValueError, match=r"collective must be one of 'all_reduce', .*, got 'allreduce'; did you mean"):
        alike.seconds("allreduce", 8, 1e6)
    for number in (-1.0, math.nan):
        with pytest.raises(ValueError, match=f"payload_bytes must be >= 0, got {number}"):
            alike.seconds("all_reduce", 8, [1e6, number])
    with pytest.raises(
        ValueError, match=r"links differ, and it matters which nodes take part: give kind.nodes., got kind=8"
    ):
        world.seconds("all_reduce", 8, 1e6)  # not eight nodes in one region
    with pytest.raises(TypeError, match=r"kind must be a whole number, got range\(0, 8\)"):
        alike.seconds("all_reduce", range(8), 1e6)
    with pytest.raises(ValueError, match="kind must be a whole number >= 1, got 0"):
        alike.seconds("all_reduce", 0, 1e6)
    for node in (-1, 8):
        with pytest.raises(ValueError, match=rf"nodes must be from 0 to 7, got \[0, {node}\]"):
            world.kind([0, node])


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
        **{(algorithm, "all_to_all"): (n - 1) * (a + s / n) for algorithm in ("ring", "tree", "halving-doubling")},
    }
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
            assert pairs is not None
            assert len(set(pairs[1].tolist())) == pairs.shape[1], "a node receives one message at once"
            for source, target in pairs.T:
                knows[target] |= before[source]
        everything = set(range(n)) if collective != "broadcast" else {0}
        assert all(one >= everything for one in knows), collective


def test_regions() -> None:
    given: Any = {"inside": "10 Gbit/s, 1 ms", "between": {("eu", "us"): ("200 Mbit/s", "80 ms"), ("eu", "as"): 1e8}}
    given["between"]["us", "as"] = "50 Mbit/s, 100 ms"
    network = Network.regions({"eu": 2, "us": 3, "as": 1}, **given)
    assert network.num_nodes == 6
    s = 8 * 1e6
    for group, slowest in [((0, 1), 0.001 + s / 2 / 1e10), ((0, 2), 0.08 + s / 2 / 2e8), ((2, 5), 0.1 + s / 2 / 5e7)]:
        price = network.seconds("all_reduce", network.kind(group), 1e6)
        assert price == pytest.approx(2 * slowest)
    # The longest way of ten messages: twice over the slow links us - as, as - eu and eu - us, and four inside.
    e, f, g, i = (a + s / 6 / bits for a, bits in ((0.08, 2e8), (0.1, 5e7), (0, 1e8), (0.001, 1e10)))
    whole = network.seconds("all_reduce", network.kind(range(6)), 1e6)
    assert whole == pytest.approx(2 * (e + f + g) + 4 * i)
    assert network.seconds("send", network.kind((5, 0)), 1e6) == pytest.approx(s / 1e8)


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


def test_a_slow_pair_of_a_tree_holds_up_only_its_own() -> None:
    """1 Mbit/s; node 1 sends to node 0 in 2 s more than others, and node 3 to node 2 in 3 s more."""
    latency = np.zeros((5, 5))
    latency[1, 0], latency[3, 2] = 2, 3
    network = Network.between(np.full((5, 5), 1e6), latency, collective="tree")
    # 125 kB, 1 s. Up: 1 → 0 until 3 and 3 → 2 until 4, 2 → 0 until 5, 4 → 0 until 6. Down: 0 → 4, 0 → 2, 0 → 1, 2 → 3.
    assert network.seconds("all_reduce", network.kind(range(5)), 125e3) == pytest.approx(6 + 3)
    latency[2, 0] = 2  # until 7, then 4 → 0 until 8; without node 4, which has its message long before
    network = Network.between(np.full((5, 5), 1e6), latency, collective="tree")
    assert network.seconds("all_reduce", network.kind(range(5)), 125e3) == pytest.approx(8 + 3)
    assert network.seconds("all_reduce", network.kind(range(4)), 125e3) == pytest.approx(7 + 2)


@given(
    st.sampled_from(ALGORITHMS), st.sampled_from(COLLECTIVES), st.integers(2, 9), st.floats(0, 1), st.floats(1e3, 1e9)
)
def test_between_equal_links_is_the_network_of_equal_links(
    algorithm: str, collective: str, n: int, latency: float, bandwidth: float
) -> None:
    one = Network(bandwidth, latency, collective=algorithm)
    other = Network.between(np.full((n, n), bandwidth), latency, collective=algorithm, server=bandwidth)
    if algorithm == "server":  # where links are given, node 0 is next to it
        return
    np.testing.assert_allclose(
        other.seconds(collective, other.kind(range(n)), [1e3, 1e6]), one.seconds(collective, n, [1e3, 1e6])
    )


def test_up_and_down_of_a_server_are_links_of_their_own() -> None:
    """Node 1 sends 1 MB in 8 s and receives it in 1; node 0 is next to the server, whose line takes 1 s for it."""
    network = Network.between([[0, 8e6], [1e6, 0]], collective="server", server="8 Mbit/s")
    found = {one: float(network.seconds(one, (0, 1), 1e6)[0]) for one in ("push", "pull", "all_reduce", "broadcast")}
    assert found == {"push": 8, "pull": 2, "all_reduce": 10, "broadcast": 2}  # node 0 sends over the server's line


def test_a_server_stands_beside_node_0() -> None:
    network = Network.between([[0, 1e6, 2e6], [1e6, 0, 5e6], [2e6, 5e6, 0]], 0.5, collective="server")
    # In and out of the slowest line, 1 Mbit/s; the server's own is the fastest at node 0, 2 Mbit/s.
    assert network.seconds("all_reduce", network.kind(range(3)), 1e5) == pytest.approx(2 * max(3 * 0.8 / 2, 0.5 + 0.8))


@settings(max_examples=50)
@given(
    st.sampled_from(ALGORITHMS),
    st.sampled_from(COLLECTIVES),
    st.integers(2, 6).flatmap(lambda n: st.lists(st.floats(1e3, 1e9), min_size=n * n, max_size=n * n)),
    st.floats(1, 100),
    st.data(),
)
def test_no_price_falls_when_a_link_gets_slower(
    algorithm: str, collective: str, bits: list[float], factor: float, data: Any
) -> None:
    n = math.isqrt(len(bits))
    matrix = np.array(bits).reshape(n, n)
    slower = matrix.copy()
    slower[data.draw(st.integers(0, n - 1)), data.draw(st.integers(0, n - 1))] /= factor
    before, after = (
        network.seconds(collective, network.kind(range(n)), 1e6)
        for network in (Network.between(m, 0.01, collective=algorithm) for m in (matrix, slower))
    )
    assert after >= before * (1 - 1e-12)


def test_networks_say_what_they_are() -> None:
    for network in (Network(math.inf), Network.between([[0]])):
        assert "inf bit/s, 0 ms, ring)" in repr(network)
    assert repr(Network.between([[0, "1 Mbit/s"], [2e6, 0]], "5 ms")) == (
        "Network(2 nodes at 2 places, 1 Mbit/s … 2 Mbit/s, 5 ms, ring)"
    )


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


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda: Network.between([[0, 1e6], [1e6, 0]]).seconds("all_reduce", (0, 5), 1), "places from 0 to 1.*5"),
        (lambda: Network.between([[0, 1e6], [1e6, 0]]).seconds("all_reduce", (0, 0.5), 1), "places from 0 to 1.*0.5"),
        (lambda: Network(1e9).kind([0, 0]), "every node once.*0, 0"),
        (lambda: Network(1e9).check("4"), "num_nodes must be a whole number, got '4'"),
        (lambda: Network.parse("1 Gbit/s, rnig"), "'ring', 'tree'.*got 'rnig'; did you mean 'ring'"),
        (lambda: vsim.Deadline(second=2), "did you mean 'seconds'"),
        (lambda: vsim.OverCommit(factr=2), "did you mean 'factor'"),
    ],
)
def test_a_slip_is_named(ask: Callable[[], object], told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        ask()


def test_compute_seconds_may_be_a_tensor() -> None:
    own = Compute(torch.tensor([1.0, 2.0], dtype=torch.float64), speeds=torch.tensor([1.0, 4.0]))
    assert own.node_seconds.tolist() == [1.0, 0.5]
