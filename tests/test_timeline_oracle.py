"""The clock against a simulation in plain Python: nodes that only know their own next act, and messages on lines."""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_timeline import MOMENTS, computes, ledgers

from vsim import Compute, Ledger, Network, timeline
from vsim.network.cost import ALGORITHMS, COLLECTIVES


class Wires(NamedTuple):
    """A network as plain numbers: the links from place to place, and the place of every node."""

    bits: tuple[tuple[float, ...], ...]
    delay: tuple[tuple[float, ...], ...]
    place: tuple[int, ...]
    algorithm: str
    server: float | None

    def message(self, source: int, target: int, size: float) -> float:
        i, j = self.place[source], self.place[target]
        return self.delay[i][j] + 8 * size / self.bits[i][j]

    def held(self, inward: bool, size: float) -> float:
        """The server stands where node 0 is, on a line as fast as the fastest there."""
        home = self.place[0]
        lines = [row[home] for row in self.bits] if inward else self.bits[home]
        return 8 * size / (self.server or max((bits for bits in lines if bits < math.inf), default=math.inf))

    def price(self, collective: str, group: Sequence[int], S: float, sizes: Sequence[int]) -> float:
        """Of one of the groups of these sizes that meet at a server at once."""
        n, source, others = len(group), group[:1], group[1:]
        if collective == "merge" and self.algorithm != "server":
            collective = "all_gather"
        if collective == "send":
            return self.message(group[0], group[1], S)
        if collective == "all_to_all":
            return self.to_each(group, S / n, sum((m - 1) * S for m in sizes))
        if collective in ("push", "pull") or self.algorithm == "server":
            inward = {"pull": (), "broadcast": source}.get(collective, group)
            outward = {"push": (), "broadcast": others}.get(collective, group)
            back = {"all_gather": (n - 1) * S, "reduce_scatter": S / n}.get(collective, S)
            all_in, all_out = len(inward) * S, len(outward) * back
            if collective not in ("push", "pull"):  # of all groups
                all_in = sum(1 if collective == "broadcast" else m for m in sizes) * S
                parts = {
                    "all_gather": lambda m: m * (m - 1),
                    "reduce_scatter": lambda m: 1,
                    "broadcast": lambda m: m - 1,
                }
                all_out = sum(parts.get(collective, lambda m: m)(m) for m in sizes) * S
            up = [self.held(True, all_in), *(self.message(k, 0, S) for k in inward)]
            down = [self.held(False, all_out), *(self.message(0, k, back) for k in outward)]
            return max(up) + max(down)
        if self.algorithm == "ring":  # in the order of the nodes' numbers
            group = (*(k for k in sorted(group) if k >= group[0]), *(k for k in sorted(group) if k < group[0]))
        if self.algorithm == "ring" and collective == "broadcast":  # of infinitely many pieces
            chain = list(itertools.pairwise(group))
            return sum(self.message(*link, 0) for link in chain) + max(self.line(*link, S) for link in chain)
        return self.sent(messages(collective, self.algorithm, n), group, S)

    def to_each(self, group: Sequence[int], part: float, at_server: float) -> float:
        """One message after the other out of every line, and into it; or all parts to the server, and others back."""
        both = [(a, b) for a in group for b in group if a != b]
        if self.algorithm != "server":
            out, into = ([sum(self.message(*p, part) for p in both if p[way] == k) for k in group] for way in (0, 1))
            return max(*out, *into)
        parts = (len(group) - 1) * part
        up = [self.held(True, at_server), *(self.message(k, 0, parts) for k in group)]
        down = [self.held(False, at_server), *(self.message(0, k, parts) for k in group)]
        return max(up) + max(down)

    def line(self, source: int, target: int, size: float) -> float:
        return self.message(source, target, size) - self.message(source, target, 0)

    def sent(self, program: Program, group: Sequence[int], S: float) -> float:
        """When the last message has arrived, if nodes that only know their own part of a program carry it out.

        A node sends a message when it has all that it receives in earlier rounds and its line is free. The message
        leaves the line, flies, and goes in over the line of its target, in the order of the rounds. `one_at_a_time`: a
        node neither sends nor receives the next before this one has arrived.
        """
        rounds, one_at_a_time = program
        todo: list[list[tuple[int, str, int, float]]] = [[] for _ in group]  # of every node: round, what, whom, bytes
        for r, pairs in enumerate(rounds):
            for a, b, share in pairs:
                todo[a].append((r, "out", b, share * S))
                todo[b].append((r, "in", a, share * S))
        outward = [[act for act in own if act[1] == "out"] for own in todo]
        inward = [[act for act in own if act[1] == "in"] for own in todo]
        flying: dict[tuple[int, int, int], float] = {}  # source, target, round: bytes of what knocks at its target
        busy: dict[tuple[str, int], bool] = defaultdict(bool)
        events: list[tuple[float, int, str, int, int, int, float]] = []
        number = itertools.count()

        def act(now: float, k: int) -> None:
            if one_at_a_time:
                if todo[k] and not busy["all", k]:
                    r, what, other, size = todo[k][0]
                    if todo[other] and todo[other][0][0] == r and todo[other][0][2] == k and not busy["all", other]:
                        a, b = (k, other) if what == "out" else (other, k)
                        busy["all", a] = busy["all", b] = True
                        end = now + self.message(group[a], group[b], size)
                        heapq.heappush(events, (end, next(number), "both", a, b, r, size))
                return
            if outward[k] and not busy["out", k]:
                r, _, other, size = outward[k][0]
                if not any(receipt[0] < r for receipt in inward[k]):
                    del outward[k][0]
                    busy["out", k] = True
                    link = group[k], group[other]
                    heapq.heappush(events, (now + self.line(*link, size), next(number), "left", k, other, r, size))
                    heapq.heappush(events, (now + self.message(*link, 0), next(number), "knocks", k, other, r, size))
            if inward[k] and not busy["in", k]:
                r, _, other, size = inward[k][0]
                if (other, k, r) in flying:
                    busy["in", k] = True
                    end = now + self.line(group[other], group[k], size)
                    heapq.heappush(events, (end, next(number), "arrived", other, k, r, size))

        now = 0.0
        for k in range(len(group)):
            act(now, k)
        while events:
            now, _, what, a, b, r, size = heapq.heappop(events)
            if what == "both":
                busy["all", a] = busy["all", b] = False
                del todo[a][0], todo[b][0]
            elif what == "left":
                busy["out", a] = False
            elif what == "knocks":
                flying[a, b, r] = size
            else:
                busy["in", b] = False
                del inward[b][0]
            for k in range(len(group)):
                act(now, k)
        assert not any(todo if one_at_a_time else [*outward, *inward])
        return now


Program = tuple[list[list[tuple[int, int, float]]], bool]


def messages(collective: str, algorithm: str, n: int) -> Program:
    """The rounds of messages, each (source, target, payloads), and whether nodes are at one message at a time."""
    if algorithm == "ring":
        times = 2 * (n - 1) if collective == "all_reduce" else n - 1
        share = 1 if collective == "all_gather" else 1 / n
        return [[(i, (i + 1) % n, share) for i in range(n)]] * times, False
    if algorithm == "tree" or collective == "broadcast":
        up, has, span = [], [1] * n, 1
        while span < n:
            up.append([(p, p - span, has[p]) for p in range(span, n, 2 * span)])
            for p, other, _ in up[-1]:
                has[other] += has[p]
            span *= 2
        down = [[(other, p, blocks) for p, other, blocks in pairs] for pairs in up[::-1]]

        def times(pairs: list[list[tuple[int, int, int]]], one: float | None, block: float = 1) -> Any:
            return [[(a, b, block * blocks if one is None else one) for a, b, blocks in own] for own in pairs]

        whole = {"broadcast": [], "all_gather": times(up, None)}.get(collective, times(up, 1))
        back = {"all_gather": times(down, n), "reduce_scatter": times(down, None, 1 / n)}
        return [*whole, *back.get(collective, times(down, 1))], True
    gather, has_all = [], 1
    while has_all < n:  # every node passes on all blocks that it has
        sent = min(has_all, n - has_all)
        gather.append([(p, (p + has_all) % n, sent / (1 if collective == "all_gather" else n)) for p in range(n)])
        has_all += sent
    return [
        *([] if collective == "all_gather" else gather[::-1]),
        *([] if collective == "reduce_scatter" else gather),
    ], False


def simulated(ledger: Ledger, wires: Wires, own: Any, compute: Compute) -> tuple[list[float], list[float]]:
    """Return seconds and mean stalls of all steps.

    Every node computes, hands in and waits. Once all nodes of a group have handed in a message, it is sent part by part
    when it is the first in the queues of its lines.
    """
    K, events, server = ledger.num_nodes, list(ledger), ("push", "pull")
    handed: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(dict)  # event and group → node → parts' times
    done: dict[tuple[int, int], float] = {}
    L = compute.layers

    def ready(began: float, seconds: float, count: int) -> list[float]:
        """When the last layer of every bucket is: pieces L + 1, L + 3, …, 3L − 1 of the step."""
        ends = [L + 1 + 2 * ((j + 1) * L / count - 1) for j in range(count)]
        return [began + seconds * (end / (3 * L - 1) if L > 1 else 1) for end in ends]

    # As many full buckets as there can be, at most one a layer.
    parts = [
        max(n for n in range(1, L + 1) if n == 1 or event.payload_bytes >= n * compute.bucket_bytes) for event in events
    ]

    queues: dict[tuple[str, int], list[tuple[int, int]]] = defaultdict(list)
    lines: dict[tuple[int, int], list[tuple[str, int]]] = {}
    for e, event in enumerate(events):
        for g, group in enumerate(event.groups):
            if len(group) > 1 or event.collective in server:
                own_lines = {
                    "send": [("out", group[0]), ("in", group[-1])],
                    "push": [("out", k) for k in group],
                    "pull": [("in", k) for k in group],
                }
                both = [(way, k) for k in group for way in ("out", "in")]
                lines[e, g] = own_lines.get(event.collective, both)
                for line in [*lines[e, g], *([(event.collective, -1)] if event.collective in server else [])]:
                    queues[line].append((e, g))
    ends: list[list[float]] = [[0.0] * K for _ in range(ledger.steps + 1)]
    waits: list[list[float]] = [[0.0] * K for _ in range(ledger.steps + 1)]

    def node(k: int) -> Iterator[None]:
        now, began, seconds = 0.0, 0.0, 0.0
        for step in range(1, ledger.steps + 1):
            seconds = float(own[step - 1, k])
            began = now
            now += seconds
            computed = now
            for moment in MOMENTS:
                at = [e for e, event in enumerate(events) if event.moment == moment]
                for e in [e for e in at if events[e].step == step] + [e for e in at if events[e].step < step]:
                    mine = [(e, g) for g, group in enumerate(events[e].groups) if k in group and (e, g) in lines]
                    if events[e].step == step:
                        for one in mine:
                            handed[one][k] = ready(began, seconds, parts[e])
                    if events[e].due == step and mine:
                        while not all(one in done for one in mine):
                            yield
                        if (arrived := max(done[one] for one in mine)) > now:
                            now, began, seconds = arrived, arrived, 0.0
            ends[step][k], waits[step][k] = now, now - computed

    free: dict[tuple[str, int], float] = defaultdict(float)

    def send_what_can() -> None:
        for (e, g), its in list(lines.items()):
            event, group = events[e], events[e].groups[g]
            ways = [*its, *([(event.collective, -1)] if event.collective in server else [])]
            if (e, g) in done or len(handed[e, g]) < len(set(group)) or any(queues[way][0] != (e, g) for way in ways):
                continue
            size = event.payload_bytes / parts[e]
            sizes = tuple(len(one) for one in event.groups if len(one) > 1)
            seconds = wires.price(event.collective, tuple(group), size, sizes)
            end = 0.0
            for j in range(parts[e]):
                start = max(*(times[j] for times in handed[e, g].values()), *(free[line] for line in its))
                end = start + seconds
                if event.collective in server:
                    line = (event.collective, -1)
                    free[line] = max(start, free[line]) + wires.held(event.collective == "push", len(group) * size)
                    end = max(end, free[line])
                free.update(dict.fromkeys(its, end))
            done[e, g] = end
            for way in ways:
                queues[way].pop(0)

    running = [node(k) for k in range(K)]
    while running:
        running = [one for one in running if next(one, running) is not running]
        send_what_can()
    seconds = [max(row) for row in ends]
    stalls = [sum(row) / K for row in waits[1:]]
    if stalls:
        stalls[-1] += sum(seconds[-1] - t for t in ends[-1]) / K
    return seconds, stalls


@st.composite
def networks(draw: Any, K: int) -> tuple[Network, Wires]:
    """A network three ways: all links alike, regions, or every link its own; both directions may differ."""
    algorithm, server = draw(st.sampled_from(ALGORITHMS)), draw(st.sampled_from([None, 2e6]))
    options = {"collective": algorithm, "server": server}
    kind = draw(st.sampled_from(["alike", "regions", "between"]))
    counts = [K] if kind == "alike" else [1] * K
    if kind == "regions":
        cuts = sorted(draw(st.sets(st.integers(1, K - 1), max_size=3))) if K > 1 else []
        counts = [b - a for a, b in itertools.pairwise([0, *cuts, K])]
    n = len(counts)
    bits, delay = (
        tuple(tuple(draw(st.sampled_from(values) | any_other) for _ in range(n)) for _ in range(n))
        for values, any_other in (([1e5, 1e6, 3e6, 1e8], st.floats(1e5, 1e9)), ([0.0, 0.01, 0.3], st.floats(0, 1)))
    )
    place = tuple(itertools.chain.from_iterable([i] * count for i, count in enumerate(counts)))
    if kind == "alike":
        return Network(bits[0][0], delay[0][0], **options), Wires(bits, delay, place, algorithm, server)
    if kind == "between":
        network = Network.between(bits, delay, **options)
        bits, delay = (
            tuple(tuple(same if i == j else one for j, one in enumerate(row)) for i, row in enumerate(matrix))
            for matrix, same in ((bits, math.inf), (delay, 0.0))
        )
        return network, Wires(bits, delay, place, algorithm, server)
    names = "abcd"[:n]
    links = {(a, b): (bits[i][j], delay[i][j]) for i, a in enumerate(names) for j, b in enumerate(names)}
    inside = {a: links[a, a] for a in names}
    between = {pair: link for pair, link in links.items() if pair[0] != pair[1]}
    network = Network.regions(dict(zip(names, counts, strict=True)), inside, between, **options)
    return network, Wires(bits, delay, place, algorithm, server)


@settings(max_examples=100)
@given(st.data(), ledgers())
def test_the_clock_is_what_nodes_and_lines_do(data: Any, ledger: Ledger) -> None:
    K = ledger.num_nodes
    network, wires = data.draw(networks(K))
    compute = data.draw(computes(K))
    own = np.broadcast_to(compute.steps(K).next(ledger.steps), (ledger.steps, K))
    line = timeline(ledger, network, compute)
    seconds, stalls = simulated(ledger, wires, own, compute)
    np.testing.assert_allclose(line.seconds, seconds, rtol=1e-9)
    np.testing.assert_allclose(line.stalls, stalls, rtol=1e-9, atol=1e-9)


@settings(max_examples=100)
@given(st.data(), st.integers(2, 9), st.sampled_from(COLLECTIVES[:5]))
def test_a_node_waits_for_what_it_needs(data: Any, n: int, collective: str) -> None:
    network, wires = data.draw(networks(n))
    group = tuple(data.draw(st.permutations(range(n)))[: data.draw(st.integers(2, n))])
    kind = network.kind(group)
    sizes = data.draw(st.lists(st.just(0.0) | st.floats(1e3, 1e8), min_size=1, max_size=3))
    own = [wires.price(collective, group, S, (len(group),)) for S in sizes]
    np.testing.assert_allclose(network.seconds(collective, kind, sizes), own, rtol=1e-9)
    # All links changed by factors.
    slower, later = data.draw(st.floats(0.1, 10)), data.draw(st.floats(0, 10))
    changed = wires._replace(
        bits=tuple(tuple(one / slower for one in row) for row in wires.bits),
        delay=tuple(tuple(one * later for one in row) for row in wires.delay),
        server=wires.server and wires.server / slower,
    )
    others = [changed.price(collective, group, S, (len(group),)) for S in sizes]
    scaled = network.scaled(np.array([1.0, slower]), np.array([1.0, later]))
    np.testing.assert_allclose(scaled.seconds(collective, kind, sizes), [own, others], rtol=1e-9)


def test_pieces_of_a_broadcast_flow_through_a_chain() -> None:
    bits, delay = (
        ((1e9, 1e6, 1e9), (1e9, 1e9, 4e5), (2e6, 1e9, 1e9)),
        ((0.0, 0.2, 9.0), (9.0, 0.0, 0.3), (0.1, 9.0, 0.0)),
    )
    wires, pieces = Wires(bits, delay, (0, 1, 2), "ring", None), 200
    network = Network.between(bits, delay)
    for group in ([0, 1, 2], [1, 2, 0], [2, 0, 1]):
        rounds = [[(hop, hop + 1, 1 / pieces) for hop in (0, 1) if 0 <= r - hop < pieces] for r in range(pieces + 1)]
        sent = wires.sent((rounds, False), group, 1e6)
        assert network.seconds("broadcast", network.kind(group), 1e6) == pytest.approx(sent, rel=0.01)
