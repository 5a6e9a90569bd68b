"""How two strategies differ from size to size, and how far the trend of it is to be trusted."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# p-values: of two strategies at one size, below which seeds tell them apart; and of lack of fit, below which the means
# of sizes scatter about the line by more than seeds do.
TOLD, _LACK_OF_FIT = 0.05, 0.1
# The rate at which orders are lost, per factor of ten in size: a grid of values, and the rate's exponential prior, with
# a mean of 0.5. A priori, orders hold at ten times the size with a chance of 80 %, as in DataDecide (arXiv:2504.11393).
_RATES = np.linspace(0.0, 15.0, 601)
_PRIOR = 2.0


@dataclass(frozen=True)
class AtSize:
    """How two strategies differ at one size: log loss of the first − log loss of the second, averaged over seeds.

    Attributes:
        parameters: the size. seeds: number of seeds with which both have a loss. difference: the mean. low, high: its
            95 % interval.
        sureness: 2 P(the first has the higher loss) − 1, from −1 (it is better) to 1; ±1 if one seed allows no test,
            so that an order of single seeds is called only if it is the same at all sizes.
    """

    parameters: float
    seeds: int
    difference: float
    low: float
    high: float
    sureness: float

    @property
    def is_decided(self) -> bool:
        """Whether seeds tell the two apart at this size (p ≤ 0.05)."""
        return abs(self.sureness) >= 1 - TOLD

    def reversed(self) -> AtSize:
        """Return the difference with the two strategies exchanged."""
        return AtSize(self.parameters, self.seeds, -self.difference, -self.high, -self.low, -self.sureness)


@dataclass(frozen=True)
class _Estimate:
    """A value, its standard error, and the degrees of freedom of the error."""

    value: float = math.nan
    error: float = math.nan
    freedom: int = 0

    @property
    def half(self) -> float:
        """Half the width of the 95 % interval."""
        from scipy.special import stdtrit

        return self.error * float(stdtrit(self.freedom, 0.975)) if self.freedom else math.nan

    @property
    def sureness(self) -> float:
        """2 P(the true value is above 0) − 1; ±1 where nothing tells the error, or there is none."""
        from scipy.special import stdtr  # of Student's t; scipy.stats takes long to load, and for single numbers

        if not self.error > 1e-12 * abs(self.value):
            return float(np.sign(self.value))
        return float(2 * stdtr(self.freedom, self.value / self.error) - 1)


@dataclass(frozen=True)
class Fit:
    """How a pair differs at each size; the difference at the target; and the slope of the line through the sizes."""

    sizes: list[AtSize]
    at_target: _Estimate
    slope: _Estimate
    measured: bool  # whether the target is a size whose seeds give the difference there


def fitted(
    one: Mapping[float, Mapping[int, float]], other: Mapping[float, Mapping[int, float]], sizes: list[float], to: float
) -> Fit:
    from scipy.special import fdtrc  # of Fisher's F

    apart: dict[float, dict[int, float]] = {}
    for size in sizes:
        own, theirs = one.get(size, {}), other.get(size, {})
        found = {seed: math.log(own[seed] / theirs[seed]) for seed in own if seed in theirs}
        if found and all(map(math.isfinite, found.values())):
            apart[size] = found
    means = {size: float(np.mean([*own.values()])) for size, own in apart.items()}
    spread = [value - means[size] for size, own in apart.items() for value in own.values()]
    inside, within = len(spread) - len(apart), float(np.square(spread).sum())  # degrees of freedom, sum of squares
    noise = within / inside if inside else math.nan
    measured = {size: _Estimate(means[size], math.sqrt(noise / len(own)), inside) for size, own in apart.items()}
    at_sizes = [
        AtSize(size, len(apart[size]), at.value, at.value - at.half, at.value + at.half, at.sureness)
        for size, at in measured.items()
    ]
    target, slope = _Estimate(), _Estimate()
    if len(apart) > 1:
        x, d, seeds = np.array([(math.log10(s / to), v, k) for s, own in apart.items() for k, v in own.items()]).T
        target, slope, squares = _line(x, d, noise if inside else 0.0)
        off, freedom = squares - within, len(apart) - 2  # of the means of sizes, about the line
        ratio = (off / freedom / noise if noise else math.inf) if inside and freedom and off > 0 else 0.0
        if ratio and fdtrc(freedom, inside, ratio) <= _LACK_OF_FIT:
            target, slope, _ = _line(np.unique(x), np.array([*means.values()]), 0.0)
        whole = [seeds == seed for seed in np.unique(seeds) if (seeds == seed).sum() == len(apart)]
        if len(whole) > 1:  # a line for each seed that has all sizes
            lines = np.array([[own.value for own in _line(x[at], d[at], 0.0)[:2]] for at in whole])
            errors = lines.std(axis=0, ddof=1) / math.sqrt(len(lines))
            target, slope = (
                replace(own, error=max(own.error, float(error)))
                for own, error in zip((target, slope), errors, strict=True)
            )
    if inside and to in measured:
        target = measured[to]
    return Fit(at_sizes, target, slope, bool(inside) and to in measured)


def _line(x: Floats, d: Floats, least: float) -> tuple[_Estimate, _Estimate, float]:
    """Return the value at 0 of the line through points, its slope, and the sum of squares about it.

    Args:
        least: the variance of a point, at least.
    """
    middle, freedom = x.mean(), len(x) - 2
    spread_of_x = float(np.square(x - middle).sum())
    slope = float(((x - middle) * d).sum() / spread_of_x)
    value = float(d.mean() - slope * middle)
    squares = float(np.square(d - value - slope * x).sum())
    variance = max(squares / freedom, least) if freedom else math.nan
    errors = math.sqrt(variance * (1 / len(x) + middle**2 / spread_of_x)), math.sqrt(variance / spread_of_x)
    return _Estimate(value, errors[0], freedom), _Estimate(slope, errors[1], freedom), squares


def kept_share(cases: Sequence[tuple[float, float]], beyond: float, independent: int) -> float:
    """Return the expected share of an order's sureness at the measured sizes that is left at the target.

    A pair with the signed sureness c at one size and c' at another has the likelihood 1 + exp(−rate · distance) c c'.

    Args:
        cases: distance of two sizes in factors of ten, and c c'. beyond: distance of the target from the sizes.
        independent: the number of independent cases that `cases` count as.
    """
    if not cases:
        return 1.0 if not beyond else math.nan
    distance, agree = np.array(cases).T[:, :, None]
    weight = min(1.0, independent / len(cases))
    logs = weight * np.log1p(np.exp(-_RATES * distance) * agree * (1 - 1e-9)).sum(0) - _PRIOR * _RATES
    density = np.exp(logs - logs.max())
    return float((density * np.exp(-_RATES * beyond)).sum() / density.sum())
