"""A run's time on every network at once: the largest of a few planes.

The time of a lockstep clock is a longest path, whose edges are multiples of compute seconds, latencies and bytes over
bandwidth. The time at which a step is done is therefore convex and piecewise linear in these three,

    T(compute, latency, bandwidth) = max over planes of  a · compute + b · latency + d / bandwidth,

with one plane for a strategy that waits for all its messages, and several for a strategy that computes meanwhile.

The planes are found as cutting planes [Kelley 1960]. The slope of the clock at a point is a plane that is nowhere above
the clock. In the region where a given plane is the largest, the clock minus that plane is convex, and so largest at a
corner of the region. If the planes reach the clock at all corners, they reach the clock everywhere; at a corner where
they do not, the slope of the clock is a further plane.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vsim.network.clock import Clock, Record
from vsim.network.compute import Compute
from vsim.network.links import Network
from vsim.network.timeline import timeline

Floats = NDArray[np.float64]
# TOLERANCE: the allowed relative difference between the clock and the planes. Planes are found with a gap of up to
# twice this difference, and then raised by half of their gap. _LOST: the allowed relative error of slopes.
TOLERANCE, _LOST = 4.5e-4, 1e-4
# The most planes for one step.
_MOST_PLANES = 60
# The most numbers in an array of the times on several networks.
_NUMBERS = 1 << 22
# The first points are these multiples of the latency, and of the 1/bandwidth, that alone takes as long as all compute.
# Beyond the largest factor, the smallest term is negligible.
_FACTORS = np.array([0.0, *10.0 ** np.linspace(-5, 5, 11)])
# The most rounds of corners, and the most of these rounds in which all planes miss a point; and the relative distance
# from a point at which slopes are taken, because at the point itself the clock may bend.
_ROUNDS, _TRIES, _BESIDE = 20, 3, 1e-4 * np.array([1.0, 0.6])


@dataclass(frozen=True, repr=False)
class Planes:
    """The times at which a run is done with some of its steps, as a function of the speed of nodes and network.

    Attributes:
        steps: (S,) ascending.
        planes: an array (P, 3) for every step: the factors of compute, latency and 1/bandwidth. Compute is the mean
            over the nodes of a step's seconds. If all links are equal, latency is in seconds and bandwidth in bit/s;
            otherwise both are relative to those of the network.
        computed: compute seconds until the last of the steps, divided by the seconds of one step; both are means over
            the nodes.
        compute: mean seconds of a step of the `Compute` that was given.
        decided: the settings that decided the run's course: "", "compute", or "both" compute and network. With
            other settings, the run would have taken another course; its compute must therefore stay the same.
    """

    steps: NDArray[np.int64]
    planes: tuple[Floats, ...]
    computed: float
    compute: float
    decided: str = ""

    def seconds(self, compute: float, latency: float, bandwidth: float) -> Floats:
        """Return the times (S,) when the last node is done with each of the steps, in the units of the planes."""
        at = np.array([compute, latency, 1 / bandwidth])
        return np.array([(own @ at).max() for own in self.planes])


def planes(ledger: Record, network: Network, compute: Compute, steps: Sequence[int]) -> Planes:
    """Return the times of a run's steps as planes.

    Args:
        ledger: the run's ledger.
        network: if its links differ, one factor scales all bandwidths (a server's, too), and another all latencies.
        compute: if its seconds change, the ratios between nodes and the parts of messages stay the same.
        steps: the steps whose times to return.

    Raises:
        ValueError: the clock is not a maximum of few planes, because the start of a message's parts depends on which
            node waits.
    """
    chosen = sorted({int(step) for step in steps})
    mean = float(compute.node_seconds.mean())
    decided = "both" if ledger.seconds else "compute" if _waits_for_a_clock(ledger) else ""
    if decided == "both":
        line = timeline(ledger, network, compute)
        own = [np.array([[line.seconds[step] / mean, 0.0, 0.0]]) for step in chosen]
        return Planes(np.array(chosen), tuple(own), float(line.compute_seconds.sum()) / mean, mean, decided)
    if decided:
        timeline(ledger, network, compute)  # raises if another compute decided the run
    pricing = _Pricing(ledger, network, compute if decided else _scaled(compute, 1 / mean), chosen)
    unit = mean if decided else 1.0
    found = _fitted(pricing, unit)
    return Planes(np.array(chosen), tuple(found), pricing.computed / unit, mean, decided)


def _fitted(pricing: _Pricing, unit: float) -> list[Floats]:
    """Return the planes of every step."""
    many = ValueError(f"the time of this run is not the largest of {_MOST_PLANES} planes on {pricing.given!r}")
    count, tries = len(pricing.steps), 0
    found = [np.zeros((0, 3))] * count
    points, seconds, slopes = np.zeros((0, 3)), np.zeros((0, count)), np.zeros((0, count, 3))
    asked, known = pricing.grid(), set[tuple[float, ...]]()
    for turn in range(_ROUNDS):
        fresh = pricing.sampled(asked, unit, _BESIDE * (-1) ** turn)
        points, seconds, slopes = (np.concatenate(two) for two in zip((points, seconds, slopes), fresh, strict=True))
        known.update(map(tuple, pricing.digits(asked)))
        again, corners = [], [np.zeros((0, 2))]
        for i in reversed(range(count)):  # the last step has the most planes
            if turn and _missing(fresh[0] @ found[i].T, fresh[1][:, i]).max() <= 2 * TOLERANCE:
                continue
            found[i], missed = _covering(points, seconds[:, i], slopes[:, i])
            if len(found[i]) > _MOST_PLANES:
                raise many
            again += missed
            corners.append(pricing.corners(found[i], unit))
        tries += bool(again)
        if tries == _TRIES:
            break
        asked = np.concatenate(corners)
        asked = asked[np.unique(pricing.digits(asked), axis=0, return_index=True)[1]]
        asked = asked[[tuple(own) not in known for own in pricing.digits(asked)]]
        asked = np.concatenate([asked, points[np.unique(np.array(again, dtype=int)), 1:]])
        if not len(asked):
            missing = [_missing(points @ own.T, seconds[:, i]).max() for i, own in enumerate(found)]
            return [own * (1 + share / 2) for own, share in zip(found, missing, strict=True)]
    raise many


def _missing(values: Floats, seconds: Floats) -> Floats:
    """Return the share (N,) of the clock's `seconds` (N,) that the largest of the planes' `values` (N, P) lacks."""
    return np.where(seconds > 0, 1 - values.max(1) / np.maximum(seconds, 1e-300), 0)


def _covering(points: Floats, seconds: Floats, slopes: Floats) -> tuple[Floats, list[int]]:
    """Return a few of the planes `slopes` (N, 3) that reach the clock at points (N, 3), and the points missed."""
    values, chosen, missed = np.zeros((len(points), 1)), list[int](), list[int]()
    # Among planes that are about equally good at a point, prefer planes that are good elsewhere, then the first.
    weights = points / np.where(seconds > 0, seconds, np.inf)[:, None]
    even, allowed = 1e-4 * np.round(slopes @ weights.mean(0), 2), np.ones(len(slopes), dtype=bool)
    while not missed:
        missing = _missing(values, seconds)
        worst = int(missing.argmax())
        if missing[worst] <= 2 * TOLERANCE:
            break
        heights = np.round(slopes @ weights[worst], 4) + even
        while True:
            best = int(np.where(allowed, heights, -1.0).argmax())
            own = points @ slopes[best]
            if not allowed[best] or (own <= seconds * (1 + _LOST) + 1e-12).all():
                break
            allowed[best] = False  # the plane is above the clock: the clock bends there
        if len(chosen) > _MOST_PLANES or not allowed[best] or best in chosen:
            missed.append(worst)
        else:
            chosen.append(best)
            values = np.column_stack([values, own])
    return slopes[chosen] if chosen else np.zeros((1, 3)), missed


def _dot(one: Floats, other: Floats) -> Floats:
    return (one * other).sum(-1)


def _waits_for_a_clock(ledger: Record) -> bool:
    """Return whether compute seconds decided which nodes were late, or whether deadlines decide when rounds end."""
    return bool(ledger.clock) or any(segment.seconds for segment in getattr(ledger, "attendance", ()))


def _scaled(compute: Compute, factor: float) -> Compute:
    other = copy.copy(compute)
    other.node_seconds = compute.node_seconds * factor
    return other


class _Pricing:
    """Prices a run on networks that differ from a given network by factors."""

    def __init__(self, ledger: Record, network: Network, compute: Compute, steps: Sequence[int]) -> None:
        self.given, self.network = network, network.in_units()
        self.ledger, self.compute, self.steps = ledger, compute, list(steps)
        self.computed, huge = 0.0, 1e12
        alone, *ends = self._clock(np.array([0.0, huge, 0.0]), np.array([0.0, 0.0, huge]))[:, -1]
        self.whole = float(alone) or 1.0
        # scale: the factors of latency and of 1/bandwidth at which each alone takes as long as all the compute.
        # box: the largest factors that matter, 0 for latency or bytes that never add to the compute.
        self.scale = np.array([huge * self.whole / end if end > 2 * alone else 1.0 for end in ends])
        self.box = np.array([end > 2 * alone for end in ends]) * self.scale * _FACTORS[-1]

    def _clock(self, latencies: Floats, inverses: Floats) -> Floats:
        """Return seconds (N, S) with these factors of latency and of 1/bandwidth."""
        last, found = max(self.steps, default=0), [np.empty((0, len(self.steps)))]
        many = max(1, _NUMBERS // max(last + 1, self.ledger.num_nodes))
        for start in range(0, len(latencies), many):
            part = slice(start, start + many)
            clock = Clock(self.ledger, self.network.scaled(inverses[part], latencies[part]), self.compute).run(last)
            self.computed = float(clock.compute[:last].sum())
            found.append(clock.seconds[self.steps].T)
        return np.concatenate(found)

    def grid(self) -> Floats:
        """Return the initial factors (N, 2) of latency and 1/bandwidth, from the most to the least precise slopes."""
        ways = [_FACTORS * by if most else np.zeros(1) for by, most in zip(self.scale, self.box, strict=True)]
        own = np.column_stack([own.ravel() for own in np.meshgrid(*ways, indexing="ij")])
        return own[np.argsort(np.abs(self.digits(own)).max(1), kind="stable")]

    def digits(self, ways: Floats) -> Floats:
        """Map factors (N, 2) to rounded logarithms (N, 2), which are equal for about equal factors."""
        return np.round(np.log10(ways / self.scale + 1e-7), 5) + 0.0

    def corners(self, planes: Floats, unit: float) -> Floats:
        """Return the factors (N, 2) at the corners of the regions where one of the planes (P, 3) is the largest."""
        a, *by = (planes * np.array([unit, *self.scale]) / self.whole).T
        slopes, box = np.stack(by, 1), self.box / self.scale
        one, other = np.triu_indices(len(a), 1)
        # Two planes intersect in a line: `start` is its point nearest to the origin, `way` its direction.
        normal, gap = slopes[one] - slopes[other], a[other] - a[one]
        length = np.hypot(*normal.T)
        meet = length > 1e-9
        one, other, normal, gap, length = (own[meet] for own in (one, other, normal, gap, length))
        start = normal * (gap / length**2)[:, None]
        way = normal[:, ::-1] * [-1, 1] / length[:, None]
        # At start + way * t, both planes are the largest, and the factors in the box, if room + along * t >= 0.
        room = np.column_stack(
            [a[one, None] - a + _dot(slopes[one, None] - slopes, start[:, None]), start, box - start]
        )
        along = np.column_stack([_dot(slopes[one, None] - slopes, way[:, None]), way, -way])
        itself = np.arange(len(one))
        for two in (one, other):
            room[itself, two], along[itself, two] = 0.0, 0.0
        with np.errstate(divide="ignore", invalid="ignore"):
            ends = -room / along
        first = np.where(along > 1e-12, ends, -np.inf).max(1, initial=-np.inf)
        last = np.where(along < -1e-12, ends, np.inf).min(1, initial=np.inf)
        inside = (first <= last) & ~((np.abs(along) <= 1e-12) & (room < -1e-9)).any(1)
        found = np.concatenate([(start + t[:, None] * way)[inside] for t in (first, last)])
        return np.clip(found, 0, box) * self.scale

    def sampled(self, ways: Floats, unit: float, beside: Floats) -> tuple[Floats, Floats, Floats]:
        """Return points (N, 3) for factors (N, 2), the seconds (N, S) at these points, and slopes (N, S, 3) nearby."""
        near = ways * (1 + beside)
        # Differences span steps small enough to stay on one plane, and large enough for precise slopes.
        steps = np.maximum(1e-5 * near, 1e-9 * self.scale * (1 + (near / self.scale).sum(1, keepdims=True)))
        at = np.concatenate([ways, near, near + steps * [1, 0], near + steps * [0, 1]])
        here, own, *later = np.split(self._clock(*at.T), 4)
        by = [(one - own) / step[:, None] for one, step in zip(later, steps.T, strict=True)]
        by_compute = (own - sum(one * way[:, None] for one, way in zip(by, near.T, strict=True))) / unit
        points = np.column_stack([np.full(len(ways), unit), ways])
        return points, here, np.maximum(np.stack([by_compute, *by], 2), 0)
