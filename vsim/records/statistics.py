"""Statistics of measurements: where a curve crosses a loss, and whether two strategies differ."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vsim.arguments import real_number

Floats = NDArray[np.float64]
# Chance of finding a difference, for which `seeds_needed` asks; more seeds than this are never proposed.
POWER, MOST_SEEDS = 0.8, 10**6


class Crossing(NamedTuple):
    """The steps at which a curve reaches a loss; NaN if it never does.

    Between measurements the last value holds, so that a loss is reached where it is measured. Fewer measurements can
    only make a step later.

    Attributes:
        step: of the first measurement at or below the loss.
        formed: of the first such measurement of a model that exists, rather than of a mean that no node has.
        first: the earliest step at which the loss can have been reached: the one after the last measurement above it.
    """

    step: float
    formed: float
    first: float


NEVER = Crossing(math.nan, math.nan, math.nan)


def crossing(steps: ArrayLike, losses: ArrayLike, target: float, formed: ArrayLike | None = None) -> Crossing:
    """Return where a curve reaches a loss.

    >>> crossing([0, 20, 40, 60], [3.0, 2.0, 1.0, 1.5], 1.75, formed=[True, True, False, True])
    Crossing(step=40.0, formed=60.0, first=21.0)

    Args:
        steps: (M,) whole numbers, ascending. losses: (M,) measured at these steps. target: the loss to reach.
        formed: (M,) whether the measured model exists; default: all do.
    """
    at, measured = np.asarray(steps, dtype=np.float64), np.asarray(losses, dtype=np.float64)
    low = measured <= target
    reached = np.flatnonzero(low)
    if not len(reached):
        return NEVER
    i = int(reached[0])
    exists = reached if formed is None else np.flatnonzero(low & np.asarray(formed, dtype=bool))
    first = at[i - 1] + 1 if i else at[i]
    return Crossing(float(at[i]), float(at[exists[0]]) if len(exists) else math.nan, float(first))


class Difference(NamedTuple):
    """The mean of paired differences, its confidence interval, and p of the two-sided paired t-test.

    With fewer than two pairs, the interval and p are NaN.
    """

    difference: float
    low: float
    high: float
    p: float


def paired(differences: ArrayLike, level: float = 0.95) -> Difference:
    """Test whether paired differences (n,) are 0 in the mean.

    Equal pairs give a difference of 0 and p = 1; a constant difference other than 0 gives p = 0.
    """
    own = np.asarray(differences, dtype=np.float64)
    n = len(own)
    mean = float(own.mean()) if n else math.nan
    if n < 2 or not np.isfinite(own).all():
        return Difference(mean, math.nan, math.nan, math.nan)
    error = float(own.std(ddof=1)) / math.sqrt(n)
    if error <= 1e-12 * abs(mean) or not own.any():  # all pairs differ by the same
        return Difference(mean, mean, mean, 0.0 if mean else 1.0)
    from scipy import stats  # here, as it takes long to load

    half = float(stats.t.ppf((1 + level) / 2, n - 1)) * error
    return Difference(mean, mean - half, mean + half, float(2 * stats.t.sf(abs(mean) / error, n - 1)))


def interval(values: ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """Return the confidence interval of the mean of values (n,), by Student's t; NaN for fewer than two."""
    found = paired(values, level)
    return found.low, found.high


def holm(p: Sequence[float]) -> list[float]:
    """Adjust p-values of several tests, so that the chance of any false discovery stays below the level [Holm 1979].

    >>> holm([0.01, 0.04, 0.03])
    [0.03, 0.06, 0.06]

    NaN stands for a test that was impossible; it stays NaN, and does not count as a test.
    """
    adjusted, largest = [math.nan] * len(p), 0.0
    tested = sorted((value, i) for i, value in enumerate(p) if not math.isnan(value))
    for rank, (value, i) in enumerate(tested):
        largest = max(largest, min(1.0, (len(tested) - rank) * value))
        adjusted[i] = largest
    return adjusted


def power(effect: float, seeds: int, level: float = 0.95) -> float:
    """Return the chance that a paired t-test of n seeds finds a difference of `effect` standard deviations."""
    from scipy import stats

    limit = stats.t.ppf((1 + level) / 2, seeds - 1)
    shift = effect * math.sqrt(seeds)
    return float(stats.nct.sf(limit, seeds - 1, shift) + stats.nct.cdf(-limit, seeds - 1, shift))


def seeds_needed(differences: ArrayLike, level: float = 0.95) -> float:
    """Return how many seeds find a difference like this one with a chance of 80 %, at least 2.

    NaN for fewer than two pairs; infinite for equal pairs, or if a million seeds would not suffice.
    """
    own = np.asarray(differences, dtype=np.float64)
    if len(own) < 2 or not np.isfinite(own).all():
        return math.nan
    mean, deviation = abs(float(own.mean())), float(own.std(ddof=1))
    if not mean:
        return math.inf
    if deviation <= 1e-12 * mean:
        return 2.0
    from scipy import stats

    effect = mean / deviation
    # The number for a normal distribution is a little too small.
    normal = ((stats.norm.ppf((1 + level) / 2) + stats.norm.ppf(POWER)) / effect) ** 2
    if normal > MOST_SEEDS:
        return math.inf
    seeds = max(2, math.ceil(normal))
    while power(effect, seeds, level) < POWER:
        seeds += 1
    return float(seeds)


def differences(
    values: Mapping[str, Mapping[int, float]], to: str, level: float = 0.95
) -> list[dict[str, float | str]]:
    """Compare strategies with one of them, paired by seed.

    Args:
        values: strategy → seed → value. to: the strategy to compare with. level: of the intervals, in (0, 1).

    Returns:
        One dict for each other strategy: `strategy, difference` (its mean minus the mean of `to`, over common seeds),
        `low, high` (the interval of this difference alone), `p` (by Holm over all strategies), `seeds` (common ones)
        and `seeds_needed`.
    """
    level = real_number("level", level, above=0, below=1)
    rows: list[dict[str, float | str]] = []
    for name, own in values.items():
        if name != to:
            pairs = [own[seed] - values[to][seed] for seed in own if seed in values[to]]
            pairs = [pair for pair in pairs if not math.isnan(pair)]
            found = paired(pairs, level)._asdict()
            rows.append({"strategy": name, **found, "seeds": len(pairs), "seeds_needed": seeds_needed(pairs, level)})
    for row, p in zip(rows, holm([float(row["p"]) for row in rows]), strict=True):
        row["p"] = p
    return rows


class Ranking(NamedTuple):
    """The best names of a table (equal to the last bit), and the names that do not differ significantly from them.

    Attributes:
        tested: whether there was anything to test, two seeds at least.
    """

    best: tuple[str, ...]
    undecided: tuple[str, ...]
    tested: bool


def ranking(values: Mapping[str, Mapping[int, float]], level: float = 0.95) -> Ranking:
    """Return the strategies with the lowest mean value, and strategies that do not differ significantly from them."""
    means = {name: float(np.mean(list(own.values()))) for name, own in sorted(values.items()) if own}
    means = {name: mean for name, mean in means.items() if math.isfinite(mean)}
    if not means:
        return Ranking((), (), False)
    first = min(means, key=means.__getitem__)  # of equal ones the first by name, whatever the order of the dict
    best = tuple(name for name in means if values[name] == values[first])
    rows = differences({name: values[name] for name in means}, first, level)
    others = [row for row in rows if row["strategy"] not in best]
    tested = any(not math.isnan(float(row["p"])) for row in others)
    undecided = tuple(str(row["strategy"]) for row in others if not float(row["p"]) <= 1 - level)
    return Ranking(best, undecided if tested else (), tested)
