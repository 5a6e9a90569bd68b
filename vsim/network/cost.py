"""The cost of collectives: their rounds of messages, and the seconds of a ring whose links differ."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
ALGORITHMS = ("ring", "tree", "halving-doubling", "server")
COLLECTIVES = ("all_reduce", "merge", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "push", "pull")


def algorithm_of(named: str | None, of_clients: bool = False) -> str:
    """Return the algorithm of a run's collectives: the one that its network names; else a server for clients, and a
    ring for nodes."""
    return named or ("server" if of_clients else "ring")


class Round(NamedTuple):
    """Consecutive rounds of equal cost; the messages of a round travel at the same time.

    Attributes:
        times: number of rounds. share: size of a message divided by the payload, one for all pairs or (m,) by pair.
        pairs: (2, m) sources and targets, as indices in the group; None: around the ring, from each node to the next.
    """

    times: int
    share: float | Floats
    pairs: NDArray[np.int64] | None = None


@lru_cache(maxsize=4096)
def rounds(collective: str, n: int, algorithm: str) -> tuple[Round, ...]:
    """Return the rounds of a collective of n ≥ 2 nodes with a payload of S bytes each.

        ring              all-reduce: 2(n − 1) messages of S/n; reduce-scatter: n − 1 messages of S/n; all-gather: n − 1
                          messages of S; broadcast: flows through the nodes, n − 1 times the latency, and S once
        tree              log₂ n rounds towards the first node and log₂ n rounds back; messages of S in an all-reduce
        halving-doubling  log₂ n rounds of messages that halve (reduce-scatter) or double (all-gather), with the same
                          total size as in a ring; all-reduce: both in turn; broadcast: as in a tree

    A merge takes the rounds of an all-gather. log₂ is rounded up. If n is not a power of two, the last round is smaller
    [Bruck et al. 1997].
    """
    collective = "all_gather" if collective == "merge" else collective
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
        below = [np.minimum(span, n - first - span) for first, span in zip(firsts, spans, strict=True)]  # subtree sizes
        up = [Round(1, own if gathers else whole, p) for own, p in zip(below, inward, strict=True)]
        down = [Round(1, own * parts if scatters else parts, p) for own, p in zip(below[::-1], outward, strict=True)]
        return (*up, *down)
    if algorithm != "halving-doubling":
        raise NotImplementedError(f"vsim/network/cost.py: rounds() has no rounds for {algorithm!r}")
    places = np.arange(n)
    further = [(min(span, n - span), np.stack([places, (places + span) % n])) for span in spans]
    gather = [Round(1, size / (n if collective == "all_reduce" else 1), pairs) for size, pairs in further]
    scatter = [Round(1, size / n, pairs) for size, pairs in further[::-1]]
    return (*(scatter if collective != "all_gather" else []), *(gather if collective != "reduce_scatter" else []))


class Way(NamedTuple):
    """Messages to or from a server: `share` payloads for each of `nodes`, a slice of the group."""

    inward: bool
    nodes: slice
    share: float

    def payloads(self, n: int) -> float:
        """Return the number of payloads that the server's line carries for a group of n."""
        return len(range(n)[self.nodes]) * self.share


def ways(collective: str, n: int) -> tuple[Way, ...]:
    """Return the messages to a server, then those from the server, in a collective of n nodes.

    In an all-reduce or a merge the server computes the result, and sends it; in an all-gather it sends all rows.
    """
    all_in, source, others = Way(True, slice(None), 1.0), Way(True, slice(1), 1.0), slice(1, None)
    back = {"all_reduce": 1.0, "merge": 1.0, "all_gather": n - 1.0, "reduce_scatter": 1 / n, "pull": 1.0}
    if collective == "all_to_all":
        return tuple(Way(inward, slice(None), (n - 1) / n) for inward in (True, False))
    if collective == "broadcast":
        return source, Way(False, others, 1.0)
    to_server = () if collective == "pull" else (all_in,)
    return to_server if collective == "push" else (*to_server, Way(False, slice(None), back[collective]))


# If links differ, a node waits for the messages that it needs, not for the slowest link of a round -------------------


def ring_seconds(latency: Floats, seconds: Floats, links: NDArray[np.int64], times: int) -> Floats:
    """Return the time when the last node of a ring has its last message, in a collective of `times` rounds.

    A node forwards the message of the previous round once this message has arrived and the node's line is free:

        sent(i, r + 1) = max(sent(i − 1, r) + latency(i − 1) + seconds(i − 1), sent(i, r) + seconds(i))

    The last message thus ends a longest path of `times` rounds. In each round, the path either moves to the next link
    or stays and waits for the line. The longest path stays at the slowest link that it visits, and begins
    where a run of equal links begins, or ends where one ends.

    Args:
        latency, seconds: (P, …) a message's latency, and its seconds on the line, for each of P runs of equal links.
        links: (P,) number of links in every run. In this order, the runs make up the ring.
    """
    last: Floats = np.zeros(seconds.shape)
    shape = -1, *[1] * (seconds.ndim - 1)
    for way in (1, -1):
        total, slowest, left = np.zeros(seconds.shape), np.zeros(seconds.shape), np.full(len(links), times)
        for i in range(2 * len(links)):  # a collective takes fewer than two laps of the ring
            run = np.roll(np.arange(len(links))[::way], -i)
            more = np.minimum(links[run], left)
            left = left - more
            total = total + more.reshape(shape) * (latency[run] + seconds[run])
            slowest = np.maximum(slowest, seconds[run])
            last = np.maximum(last, total + left.reshape(shape) * slowest)
    return last.max(0)
