"""What a collective costs, as rounds of messages: the same for every network, which says how long a message takes."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

ALGORITHMS = ("ring", "tree", "halving-doubling", "server")
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast", "all_to_all", "send", "push", "pull")


class Round(NamedTuple):
    """So many rounds one after the other, in each of which messages travel at once.

    Attributes:
        times: how many. share: the size of a message, in payloads.
        pairs: (2, m) from which place of the group to which; None: around a ring, which the network chooses.
    """

    times: int
    share: float
    pairs: NDArray[np.int64] | None = None


@lru_cache(maxsize=4096)
def rounds(collective: str, n: int, algorithm: str) -> tuple[Round, ...]:
    """Return the rounds of a collective of n ≥ 2 nodes, where S is what a node hands in.

        ring              all-reduce 2(n − 1) messages of S/n, reduce-scatter n − 1, all-gather n − 1 of S; a broadcast
                          flows through the nodes: n − 1 times the latency, and S once
        tree              log₂ n rounds towards the first node, and as many back, of S in a reduction
        halving-doubling  log₂ n rounds of messages that halve (reduce-scatter) or double (all-gather), which together
                          are as large as in a ring; an all-reduce is both; a broadcast is the tree's

    log₂ is rounded up. The last round of a number that is no power of two is smaller [Bruck et al. 1997].
    """
    if collective == "send":
        return (Round(1, 1.0, np.array([[0], [1]])),)
    if algorithm == "ring":
        if collective == "broadcast":
            return Round(n - 2, 0.0), Round(1, 1.0)
        times = 2 * (n - 1) if collective == "all_reduce" else n - 1
        return (Round(times, 1.0 if collective == "all_gather" else 1 / n),)
    spans = [1 << r for r in range((n - 1).bit_length())]
    inward = [_halves(n, span) for span in spans]  # the second half of every 2 · span places sends to the first
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
    """Messages to a server, or back from it: of these nodes of the group, each of so many payloads."""

    inward: bool
    nodes: slice
    share: float

    def payloads(self, n: int) -> float:
        """How many payloads of a group of n the server's line carries."""
        return len(range(n)[self.nodes]) * self.share


def ways(collective: str, n: int) -> tuple[Way, ...]:
    """Return what goes to a server and then what comes back, where S is what a node hands in."""
    all_in, source, others = Way(True, slice(None), 1.0), Way(True, slice(1), 1.0), slice(1, None)
    back = {"all_reduce": 1.0, "all_gather": n - 1.0, "reduce_scatter": 1 / n, "pull": 1.0}
    if collective == "all_to_all":
        return tuple(Way(inward, slice(None), (n - 1) / n) for inward in (True, False))
    if collective == "broadcast":
        return source, Way(False, others, 1.0)
    there = () if collective == "pull" else (all_in,)
    return there if collective == "push" else (*there, Way(False, slice(None), back[collective]))


def _halves(n: int, span: int) -> NDArray[np.int64]:
    first = np.arange(0, n - span, 2 * span)
    return np.stack([first + span, first])
