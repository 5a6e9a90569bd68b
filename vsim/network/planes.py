"""A run's time on every network at once: the largest of a few planes.

A lockstep clock is a longest path, whose edges are multiples of compute seconds, latencies and bytes over bandwidth.
When a step is done is therefore convex and piecewise linear in the three,

    T(compute, latency, bandwidth) = max over planes of  a · compute + b · latency + d / bandwidth,

with one plane for a strategy that waits for all it sends, and several for one that computes meanwhile.
"""

from __future__ import annotations

import copy
import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vsim.network.clock import Clock, Record
from vsim.network.compute import Compute
from vsim.network.links import Network
from vsim.network.timeline import timeline

Floats = NDArray[np.float64]
# The planes may be below the clock by this share, at every network of the grid that they are compared on.
TOLERANCE = 5e-4
# More planes than this for one step are not worth having.
_MOST_PLANES = 60
# Of a map of networks, at most this many numbers are held at a time.
_NUMBERS = 1 << 22
# Latency and bytes, where each alone takes as long as all the compute, times these powers of ten: beyond them the
# smaller term no longer counts. The coarse grid is enough for runs with one plane: where a convex function
# is a plane at points, it is that plane between them.
_COARSE = np.linspace(-5, 5, 6)
_FINE = np.concatenate([np.linspace(-5, -2.5, 4), np.linspace(-2, 2, 25), np.linspace(2.5, 5, 4)])
# Rounds of looking where planes meet, steps to look along, and the powers of ten of the other term.
_ROUNDS, _WATCHED, _MOST_MEETINGS, _ALONG = 4, 6, 500, np.linspace(-3, 3, 9)


@dataclass(frozen=True, repr=False)
class Planes:
    """The times at which a run is done with some of its steps, as a function of the speed of nodes and network.

    Attributes:
        steps: (S,) ascending.
        planes: of every step (P, 3): the factors of compute, latency and 1/bandwidth. Compute is in seconds a step, in
            the mean of the nodes; latency in seconds and bandwidth in bit/s where all links are equal, and otherwise
            relative to the network's.
        computed: what a node computed until the last of the steps, in the mean of the nodes, over that of one step.
        compute: the mean seconds of a step of the compute that was given.
        decided: what the run's course depended on, so that another is another run: "", "compute", or "both" compute and
            network. A run that was decided has no slope: compute must stay the same.
    """

    steps: NDArray[np.int64]
    planes: tuple[Floats, ...]
    computed: float
    compute: float
    decided: str = ""

    def seconds(self, compute: float, latency: float, bandwidth: float) -> Floats:
        """Return (S,) when the last node is done with each of the steps, in the units of the planes."""
        at = np.array([compute, latency, 1 / bandwidth])
        return np.array([(own @ at).max() for own in self.planes])


def planes(ledger: Record, network: Network, compute: Compute, steps: Sequence[int]) -> Planes:
    """Return a run's time as planes.

    Args:
        ledger: of the run. network: its links may differ: then all bandwidths, and all latencies, change by one factor.
            A server's bandwidth changes with the others. compute: nodes keep their ratios, and messages their parts.
        steps: the steps whose times are asked for.

    Raises:
        ValueError: the clock is not a maximum of few planes: the best ring changes with the network, or the parts in
            which a message is sent depend on which node waits.
    """
    chosen = sorted({int(step) for step in steps})
    mean = float(compute.node_seconds.mean())
    decided = "both" if ledger.seconds else "compute" if _waits_for_a_clock(ledger) else ""
    if decided == "both":
        line = timeline(ledger, network, compute)
        own = [np.array([[line.seconds[step] / mean, 0.0, 0.0]]) for step in chosen]
        return Planes(np.array(chosen), tuple(own), float(line.compute_seconds.sum()) / mean, mean, decided)
    if decided:
        timeline(ledger, network, compute)  # which raises if another compute decided
    pricing = _Pricing(ledger, network, compute if decided else _scaled(compute, 1 / mean), chosen)
    unit = mean if decided else 1.0
    found = _fitted(pricing, unit)
    return Planes(np.array(chosen), tuple(found), pricing.computed / unit, mean, decided)


def _fitted(pricing: _Pricing, unit: float) -> list[Floats]:
    """Return the planes of every step: from a coarse grid, a fine one, and from where the planes found meet."""
    for powers in (_COARSE, _FINE):
        sampled = pricing.sampled(pricing.grid(powers), unit)
        found = _covering_all(*sampled, 1 if powers is _COARSE else _MOST_PLANES)
        if found is not None and powers is _COARSE:
            return found
    for _ in range(_ROUNDS):
        if found is None:
            break
        watched = np.unique(np.linspace(0, len(found) - 1, _WATCHED).round().astype(int))
        there = np.concatenate([pricing.meetings(found[i], unit) for i in watched])
        there = there[:: 1 + len(there) // _MOST_MEETINGS]
        points, seconds, slopes = pricing.sampled(there, unit)
        if not len(points) or all(
            _missing(points @ own.T, seconds[:, i]) <= 1.6 * TOLERANCE for i, own in enumerate(found)
        ):
            return found
        grown = [np.concatenate(both) for both in zip(sampled, (points, seconds, slopes), strict=True)]
        sampled = grown[0], grown[1], grown[2]
        found = _covering_all(*sampled, _MOST_PLANES)
    raise ValueError(f"the time of this run is not the largest of {_MOST_PLANES} planes on {pricing.given!r}")


def _missing(values: Floats, seconds: Floats) -> float:
    """Return by which share planes (N, P) stay below the clock (N,), at most."""
    return float(np.where(seconds > 0, 1 - values.max(1) / np.maximum(seconds, 1e-300), 0).max())


def _covering_all(points: Floats, seconds: Floats, slopes: Floats, most: int) -> list[Floats] | None:
    """Return the planes of every step, see `_covering`; None if there are none for one of them."""
    found = []
    for i in range(seconds.shape[1]):
        own = _covering(points, seconds[:, i], slopes[:, i], most)
        if own is None:
            return None
        found.append(own)
    return found


def _waits_for_a_clock(ledger: Record) -> bool:
    """Whether compute seconds decided who was late, or a deadline does when a round ends."""
    return bool(ledger.clock) or any(segment.seconds for segment in getattr(ledger, "attendance", ()))


def _scaled(compute: Compute, factor: float) -> Compute:
    other = copy.copy(compute)
    other.node_seconds = compute.node_seconds * factor
    return other


class _Pricing:
    """Prices a run on networks that differ from one by factors."""

    def __init__(self, ledger: Record, network: Network, compute: Compute, steps: Sequence[int]) -> None:
        self.given, self.network = network, network.in_units()
        self.ledger, self.compute, self.steps = ledger, compute, list(steps)
        self.computed = 0.0
        alone = self._clock(np.zeros(1), np.zeros(1))
        # What latency and bytes take next to compute; 0: nothing.
        huge = 1e12
        ends = self._clock(np.array([huge, 0.0]), np.array([0.0, huge]))[:, -1:] / huge
        self.whole, self.each = float(alone[0, -1]), np.where(ends[:, 0] * huge > 2 * alone[0, -1], ends[:, 0], 0.0)

    def _clock(self, latencies: Floats, inverses: Floats) -> Floats:
        """Return (N, S) seconds with these factors of latency, and of 1/bandwidth."""
        last, found = max(self.steps, default=0), [np.empty((0, len(self.steps)))]
        many = max(1, _NUMBERS // max(last + 1, self.ledger.num_nodes))
        for start in range(0, len(latencies), many):
            part = slice(start, start + many)
            clock = Clock(self.ledger, self.network.scaled(inverses[part], latencies[part]), self.compute).run(last)
            self.computed = float(clock.compute[:last].sum())
            found.append(clock.seconds[self.steps].T)
        return np.concatenate(found)

    @property
    def scale(self) -> list[float]:
        """The factors of latency, and of 1/bandwidth, at which each alone takes as long as all the compute."""
        return [(self.whole or 1.0) / own if own else 1.0 for own in self.each]

    def grid(self, powers: Floats) -> Floats:
        """Return the factors of latency and 1/bandwidth at these powers of ten and at 0: (N, 2)."""
        ways = [np.array([0.0, *10.0**powers]) if own else np.zeros(1) for own in self.each]
        both = np.meshgrid(*(own * by for own, by in zip(ways, self.scale, strict=True)), indexing="ij")
        return np.column_stack([own.ravel() for own in both])

    def meetings(self, planes: Floats, unit: float) -> Floats:
        """Return factors (N, 2) at which the largest of the planes (P, 3) are two, and next to these."""
        along = [10.0**_ALONG * by for by in self.scale]
        found = [np.empty((0, 2))]
        for one, other in itertools.combinations(planes, 2):
            a, b, d = one - other
            with np.errstate(divide="ignore", invalid="ignore"):
                latencies = np.stack([-(a * unit + d * along[1]) / b, along[1]], 1)
                inverses = np.stack([along[0], -(a * unit + b * along[0]) / d], 1)
            own = np.concatenate([latencies, inverses])
            own = own[np.isfinite(own).all(1) & (own > 0).all(1) & (own < 1e5 * np.array(self.scale)).all(1)]
            values = np.column_stack([np.full(len(own), unit), own]) @ np.stack([one, *planes]).T
            own = own[values[:, 0] >= values.max(1) * (1 - 1e-6)]
            # Next to them as well: on a bend of the clock there is no slope.
            found += [own, own * [1.001, 1.0], own * [0.999, 1.0]]
        return np.concatenate(found)

    def sampled(self, ways: Floats, unit: float) -> tuple[Floats, Floats, Floats]:
        """Return the points (N, 3) of these factors (N, 2), the seconds there (N, S), and the slopes (N, S, 3)."""
        latencies, inverses = ways.T
        # Small enough to stay on one plane, large enough for the digits.
        both = zip((latencies, inverses), self.scale, strict=True)
        steps = [np.maximum(1e-5 * own, 1e-8 * by) for own, by in both]
        here = self._clock(latencies, inverses)
        by_latency = (self._clock(latencies + steps[0], inverses) - here) / steps[0][:, None]
        by_inverse = (self._clock(latencies, inverses + steps[1]) - here) / steps[1][:, None]
        by_compute = (here - by_latency * latencies[:, None] - by_inverse * inverses[:, None]) / unit
        points = np.stack([np.full(len(latencies), unit), latencies, inverses], 1)
        return points, here, np.maximum(np.stack([by_compute, by_latency, by_inverse], 2), 0)


def _covering(points: Floats, seconds: Floats, slopes: Floats, most: int) -> Floats | None:
    """Return a few of the planes (P, 3) whose maximum is the clock at all points (N, 3); None if there are none.

    A plane that a bend of the clock lies under is above the clock somewhere, and does not count.
    """
    values = slopes @ points.T  # (planes, points)
    below = (values <= seconds * (1 + 1e-4) + 1e-12).all(1)
    reached, chosen = np.zeros(len(points)), list[int]()
    # Of planes that are as good at a point, that which is good elsewhere: digits are lost where one term is tiny.
    everywhere = 1e-4 * (values / np.maximum(seconds, 1e-300)).mean(1)
    while True:
        missing = np.where(seconds > 0, 1 - reached / np.maximum(seconds, 1e-300), 0)
        worst = int(missing.argmax())
        if missing[worst] <= TOLERANCE:
            own = slopes[chosen] if chosen else np.zeros((1, 3))
            return np.unique(own, axis=0)
        best = int(np.where(below, values[:, worst] / seconds[worst] + everywhere, -1.0).argmax())
        if len(chosen) == most or not below[best] or best in chosen:
            return None
        chosen.append(best)
        reached = np.maximum(reached, values[best])
