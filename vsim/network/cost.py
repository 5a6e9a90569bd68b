"""The cost of collectives: the rounds of messages that make them up, and the best ring where links differ."""

from __future__ import annotations

import itertools
from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
ALGORITHMS = ("ring", "tree", "halving-doubling", "server")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "push", "pull")


class Round(NamedTuple):
    """Rounds that follow each other and cost the same; the messages of a round travel at once.

    Attributes:
        times: number of rounds. share: size of a message, in payloads.
        pairs: (2, m) sources and targets, as places in the group; None: around a ring, which the network chooses.
    """

    times: int
    share: float
    pairs: NDArray[np.int64] | None = None


@lru_cache(maxsize=4096)
def rounds(collective: str, n: int, algorithm: str) -> tuple[Round, ...]:
    """Return the rounds of a collective of n ≥ 2 nodes that hand in S bytes each.

        ring              all-reduce 2(n − 1) messages of S/n, reduce-scatter n − 1, all-gather n − 1 of S; a broadcast
                          flows through the nodes: n − 1 times the latency, and S once
        tree              log₂ n rounds towards the first node, and as many back, of S in a reduction
        halving-doubling  log₂ n rounds of messages that halve (reduce-scatter) or double (all-gather), which together
                          are as large as in a ring; an all-reduce is both; a broadcast is the tree's

    log₂ is rounded up. If n is not a power of two, the last round is smaller [Bruck et al. 1997].
    """
    if collective == "send":
        return (Round(1, 1.0, np.array([[0], [1]])),)
    if algorithm == "ring":
        if collective == "broadcast":
            return Round(n - 2, 0.0), Round(1, 1.0)
        times = 2 * (n - 1) if collective == "all_reduce" else n - 1
        return (Round(times, 1.0 if collective == "all_gather" else 1 / n),)
    spans = [1 << r for r in range((n - 1).bit_length())]
    firsts = [np.arange(0, n - span, 2 * span) for span in spans]
    inward = [np.stack([first + span, first]) for first, span in zip(firsts, spans, strict=True)]
    outward = [pairs[::-1] for pairs in inward[::-1]]
    if collective == "broadcast":
        return tuple(Round(1, 1.0, pairs) for pairs in outward)
    if algorithm == "tree":
        whole, parts = {"all_reduce": (1.0, 1.0), "all_gather": (n, n), "reduce_scatter": (1.0, 1 / n)}[collective]
        gathers, scatters = collective == "all_gather", collective == "reduce_scatter"
        up = [Round(1, min(span, n - span) if gathers else whole, p) for span, p in zip(spans, inward, strict=True)]
        down = [
            Round(1, min(span, n - span) * parts if scatters else parts, p)
            for span, p in zip(spans[::-1], outward, strict=True)
        ]
        return (*up, *down)
    places = np.arange(n)
    further = [(min(span, n - span), np.stack([places, (places + span) % n])) for span in spans]
    gather = [Round(1, size / (n if collective == "all_reduce" else 1), pairs) for size, pairs in further]
    scatter = [Round(1, size / n, pairs) for size, pairs in further[::-1]]
    return (*(scatter if collective != "all_gather" else []), *(gather if collective != "reduce_scatter" else []))


class Way(NamedTuple):
    """Messages to a server or back: `share` payloads for each of `nodes`, which are places in the group."""

    inward: bool
    nodes: slice
    share: float

    def payloads(self, n: int) -> float:
        """Return how many payloads of a group of n the server's line carries."""
        return len(range(n)[self.nodes]) * self.share


def ways(collective: str, n: int) -> tuple[Way, ...]:
    """Return what goes to a server and then what comes back, for nodes that hand in S bytes each."""
    all_in, source, others = Way(True, slice(None), 1.0), Way(True, slice(1), 1.0), slice(1, None)
    back = {"all_reduce": 1.0, "all_gather": n - 1.0, "reduce_scatter": 1 / n, "pull": 1.0}
    if collective == "all_to_all":
        return tuple(Way(inward, slice(None), (n - 1) / n) for inward in (True, False))
    if collective == "broadcast":
        return source, Way(False, others, 1.0)
    there = () if collective == "pull" else (all_in,)
    return there if collective == "push" else (*there, Way(False, slice(None), back[collective]))


# The best ring where links differ: a ring is as fast as its slowest link ----------------------------------------------

# The exact search keeps at most this many sets of visits.
_MOST_VISITS = 2**8


def slowest_on_best_ring(
    latency: Floats, seconds_per_byte: Floats, message_bytes: Floats, nodes: NDArray[np.int64] | None = None
) -> Floats:
    """Return the seconds of a message on the slowest link of the best ring, for several message sizes (E,): (E,).

    A ring may visit a place as often as it has nodes. The search is exact for up to 8 nodes, and for up to 4 places
    whose inner links are the fastest: there n − 1 visits are enough, and the remaining nodes follow in a row. Of 5
    places each is visited at most twice, of 6 to 8 once. Beyond that, return the better of two rings, one built for
    short messages and one for long ones, by insertion: take the places with the poorest links first, and put each where
    the slower of its two links is fastest; then move each place twice if that helps.

    Args:
        latency, seconds_per_byte: (n, n) from place to place, n at least 2; on the diagonal between nodes of one place.
        message_bytes: (E,).
        nodes: (n,) number of nodes at each place; default: one.
    """
    nodes = np.ones(len(latency), dtype=np.int64) if nodes is None else nodes
    candidates = range(int(min(nodes.max(), _MOST_VISITS)), 0, -1)
    most = next((m for m in candidates if np.prod(np.minimum(nodes, m) + 1.0) <= _MOST_VISITS), 1)
    visits = np.minimum(nodes, most)
    if len(nodes) <= _MOST_VISITS.bit_length() - 1:
        slowest = _exact(latency[..., None] + seconds_per_byte[..., None] * message_bytes, visits.tolist())
    else:
        links = [(ring, np.roll(ring, -1)) for ring in map(_inserted, (latency, seconds_per_byte))]
        slowest = np.minimum(*((latency[own] + seconds_per_byte[own] * message_bytes[:, None]).max(1) for own in links))
    inner = np.flatnonzero(nodes > visits)
    inside = latency[inner, inner] + seconds_per_byte[inner, inner] * message_bytes[:, None]
    return np.maximum(slowest, inside.max(1, initial=0))


def _exact(cost: Floats, visits: list[int]) -> Floats:
    """Search all rings with these numbers of visits; `cost` is (n, n, E)."""
    # By the number of visits of every place and the last place: the slowest link of the best such path from place 0.
    paths = {((1, *[0] * (len(visits) - 1)), 0): np.zeros(cost.shape[2])}
    for visited in itertools.product(range(1, visits[0] + 1), *(range(most + 1) for most in visits[1:])):
        for j, times in enumerate(visited):
            before = (*visited[:j], times - 1, *visited[j + 1 :])
            steps = [np.maximum(paths[before, i], cost[i, j]) for i in range(len(visits)) if (before, i) in paths]
            if steps:
                paths[visited, j] = np.minimum.reduce(steps)
    whole = [np.maximum(paths[tuple(visits), j], cost[j, 0]) for j in range(len(visits)) if (tuple(visits), j) in paths]
    return np.minimum.reduce(whole)


def _inserted(cost: Floats) -> NDArray[np.int64]:
    """Build a ring by insertion."""

    def inserted(ring: NDArray[np.int64], place: int) -> NDArray[np.int64]:
        slower = np.maximum(cost[ring, place], cost[place, np.roll(ring, -1)])
        return np.insert(ring, int(slower.argmin()) + 1, place)

    def links(ring: NDArray[np.int64]) -> list[float]:
        slowest_first: list[float] = np.sort(cost[ring, np.roll(ring, -1)])[::-1].tolist()
        return slowest_first

    nearest = np.where(np.eye(len(cost), dtype=bool), np.inf, cost).min(1)
    order = np.argsort(-nearest, kind="stable")
    ring = order[:1]
    for place in order[1:]:
        ring = inserted(ring, place)
    for place in np.tile(order, 2):
        other = inserted(ring[ring != place], place)
        if links(other) < links(ring):
            ring = other
    return ring
