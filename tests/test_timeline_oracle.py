"""The clock against a simulation in plain Python: nodes that only know their own next act, and messages on lines."""

from __future__ import annotations

import functools
import itertools
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st
from test_timeline import MOMENTS, computes, ledgers

from vsim import Compute, Ledger, Network, timeline
from vsim.network.cost import ALGORITHMS


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
        if self.algorithm == "ring":
            if collective == "broadcast":
                return (n - 2) * self.ring(group, 0.0) + self.ring(group, S)
            if collective == "all_gather":
                return (n - 1) * self.ring(group, S)
            return (2 if collective == "all_reduce" else 1) * (n - 1) * self.ring(group, S / n)
        if self.algorithm == "tree" or collective == "broadcast":
            up, down = self.climb(group, S, collective == "all_gather"), self.climb(group, S, False, down=True)
            if collective == "broadcast":
                return down
            if collective == "reduce_scatter":  # back go parts, as they came in a gather
                return up + self.climb(group, S / n, True, down=True)
            return up + (self.climb(group, n * S, False, down=True) if collective == "all_gather" else down)
        blocks = self.doubling(group, S if collective == "all_gather" else S / n)
        return 2 * blocks if collective == "all_reduce" else blocks

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

    @functools.lru_cache  # noqa: B019 (a tuple)
    def ring(self, group: tuple[int, ...], size: float) -> float:
        """A message on the slowest link of the best of all rings of the nodes themselves."""
        rings = ((group[0], *rest) for rest in itertools.permutations(group[1:]))
        return min(
            max(self.message(a, b, size) for a, b in zip(ring, (*ring[1:], ring[0]), strict=True)) for ring in rings
        )

    def climb(self, group: Sequence[int], S: float, gathers: bool, down: bool = False) -> float:
        """Up a tree (its sum or all that it has gathered), or down again, one round after the other."""
        has, total, span = dict.fromkeys(range(len(group)), 1), 0.0, 1
        while span < len(group):
            pairs = [(p, p - span) for p in range(span, len(group), 2 * span)]
            total += max(
                self.message(*((group[b], group[a]) if down else (group[a], group[b])), S * (has[a] if gathers else 1))
                for a, b in pairs
            )
            for a, b in pairs:
                has[b] += has[a]
            span *= 2
        return total

    def doubling(self, group: Sequence[int], block: float) -> float:
        """Every node passes on all blocks that it has, until each has all."""
        n, has, total = len(group), 1, 0.0
        while has < n:
            sent = min(has, n - has)
            total += max(self.message(group[p], group[(p + has) % n], sent * block) for p in range(n))
            has += sent
        return total


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
        tuple(tuple(draw(st.sampled_from(values)) for _ in range(n)) for _ in range(n))
        for values in ([1e5, 1e6, 3e6, 1e8], [0.0, 0.01, 0.3])
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
