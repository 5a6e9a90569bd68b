"""Statistics of measurements: where a curve crosses a loss, and whether two strategies differ."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from operator import itemgetter
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from vsim.arguments import real_number

Floats = NDArray[np.float64]
# The chance of finding a difference for which `seeds_needed` asks, and the most seeds that it proposes.
POWER, MOST_SEEDS = 0.8, 10**6


class Difference(NamedTuple):
    """The mean of paired differences, its confidence interval, and the p-value of the two-sided paired t-test.

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
    if error <= 1e-12 * abs(mean) or not own.any():  # all pairs differ by the same amount
        return Difference(mean, mean, mean, 0.0 if mean else 1.0)
    from scipy import stats  # imported here, since scipy.stats takes long to load

    half = float(stats.t.ppf((1 + level) / 2, n - 1)) * error
    return Difference(mean, mean - half, mean + half, float(2 * stats.t.sf(abs(mean) / error, n - 1)))


def confidence_interval(values: ArrayLike, level: float = 0.95) -> tuple[float, float]:
    """Return the confidence interval of the mean of values (n,), by Student's t; NaN for fewer than two."""
    return paired(values, level)[1:3]


def holm(p: ArrayLike) -> tuple[Floats, Floats]:
    """Adjust p-values of several tests, so that the chance of any false discovery stays below the level [Holm 1979].

    >>> holm([0.01, 0.04, 0.03])[0].tolist()
    [0.03, 0.06, 0.06]

    NaN marks an impossible test: it stays NaN, and does not count as a test.

    Returns:
        The adjusted p-values (n,), and for each the number of tests m (n,) such that adjusted p = min(1, m · p).
    """
    own = np.asarray(p, dtype=np.float64)
    order = np.argsort(own, kind="stable")[: int(np.isfinite(own).sum())]  # NaN is last
    count = np.arange(len(order), 0, -1.0)
    largest = np.maximum.accumulate(count * own[order])
    adjusted, tests = np.full((2, len(own)), math.nan)
    adjusted[order] = np.minimum(1, largest)
    tests[order] = np.divide(largest, own[order], out=count, where=own[order] > 0)
    return adjusted, tests


def power(effect: float, seeds: int, level: float = 0.95) -> float:
    """Return the chance that a paired t-test of n seeds finds a difference of `effect` standard deviations."""
    from scipy import stats

    limit = stats.t.ppf((1 + level) / 2, seeds - 1)
    shift = effect * math.sqrt(seeds)
    # In the other tail, scipy returns NaN for some values below 1e-9.
    return float(stats.nct.sf(limit, seeds - 1, shift) + np.nan_to_num(stats.nct.cdf(-limit, seeds - 1, shift)))


def seeds_needed(differences: ArrayLike, level: float = 0.95) -> float:
    """Return how many seeds find a difference like this one with a chance of 80 %: an integer, at least 2.

    NaN for fewer than two pairs; infinite for equal pairs, or if a million seeds would not suffice.
    """
    own = np.asarray(differences, dtype=np.float64)
    if len(own) < 2 or not np.isfinite(own).all():
        return math.nan
    mean, deviation = abs(float(own.mean())), float(own.std(ddof=1))
    if not mean:
        return math.inf
    if deviation <= 1e-12 * mean:
        return 2
    from scipy import stats

    effect = mean / deviation
    # Start from the number for a normal distribution, which is a little too small.
    normal = ((stats.norm.ppf((1 + level) / 2) + stats.norm.ppf(POWER)) / effect) ** 2
    if normal > MOST_SEEDS:
        return math.inf
    seeds = max(2, math.ceil(normal))
    while power(effect, seeds, level) < POWER:
        seeds += 1
    return seeds


def _paired_p(values: Sequence[Mapping[int, float]], pairs: NDArray[np.int64]) -> Floats:
    """Return the p-values (m,) of `paired` for pairs (m, 2) of indices into `values`."""
    seeds = sorted(set().union(*values))
    table = np.array([[own.get(seed, math.nan) for seed in seeds] for own in values]).reshape(len(values), len(seeds))
    apart = table[pairs[:, 0]] - table[pairs[:, 1]]
    n, found = np.isfinite(apart).sum(1), np.full(len(pairs), math.nan)
    tested = n > 1
    if not tested.any():
        return found
    from scipy import stats

    known, n = np.ma.masked_invalid(apart[tested]), n[tested]
    mean, error = known.mean(1).data, known.std(1, ddof=1).data / np.sqrt(n)
    alike = error <= 1e-12 * abs(mean)
    p = 2 * stats.t.sf(abs(mean) / np.where(alike, 1, error), n - 1)
    found[tested] = np.where(alike, mean == 0, p)
    return found


def pairwise_p(values: Mapping[str, Mapping[int, float]]) -> Floats:
    """Return the p-values (n, n) of paired t-tests of any two strategies, by Holm over all pairs; see `differences`."""
    pairs = _pairs(len(values))
    found = np.full((len(values), len(values)), math.nan)
    found[tuple(pairs.T)] = found[tuple(pairs.T[::-1])] = holm(_paired_p(list(values.values()), pairs))[0]
    return found


def _pairs(n: int) -> NDArray[np.int64]:
    """Return all pairs of n indices, (n · (n - 1) / 2, 2)."""
    return np.stack(np.triu_indices(n, 1), 1)


def differences(
    values: Mapping[str, Mapping[int, float]], to: str, level: float = 0.95, chosen: bool = False
) -> list[dict[str, Any]]:
    """Compare strategies with the strategy `to`, paired by the seeds with which both have a finite value.

    Args:
        values: strategy → seed → value. to: the strategy. level: the joint confidence of all tests, in (0, 1).
        chosen: whether these values chose `to`. Any two strategies might then have been compared, and all pairs count
            as tests; otherwise, only the pairs with `to` do.

    Returns:
        One dict for each other strategy: `strategy, difference` (its mean minus the mean of `to`, over common seeds),
        `p` (by Holm over all tests), `low, high` (the interval at the level of this test, which excludes 0 exactly if
        p ≤ 1 - level), `seeds` (common ones) and `seeds_needed` (at the level of this test).
    """
    level = real_number("level", level, above=0, below=1)
    names = list(values)
    place, pairs = names.index(to), _pairs(len(names))
    pairs = pairs if chosen else pairs[(pairs == place).any(1)]
    adjusted, tests = holm(_paired_p(list(values.values()), pairs))
    rows = []
    for pair, p, number in zip(pairs, adjusted.tolist(), tests.tolist(), strict=True):
        if place not in pair:
            continue
        name = names[int(pair.sum()) - place]
        apart = [own - values[to].get(seed, math.nan) for seed, own in values[name].items()]
        apart = [one for one in apart if math.isfinite(one)]
        own_level = level if math.isnan(number) else 1 - (1 - level) / number
        row = {"strategy": name, **paired(apart, own_level)._asdict(), "p": p, "seeds": len(apart)}
        rows.append({**row, "seeds_needed": seeds_needed(apart, own_level)})
    return rows


def contenders(values: Mapping[str, Mapping[int, float]]) -> dict[str, float]:
    """Return strategy → mean value for the strategies that can be the best, the best first.

    This is the only rule for missing runs: a run without a finite value, because it diverged or failed, is worse than
    any other, so that its strategy is not a contender. Contenders are compared over the seeds that all of them have or,
    if they share none, each over its own seeds.

    >>> contenders({"a": {0: 1.0, 1: 3.0}, "b": {0: 1.5}, "c": {0: 0.5, 1: math.nan}})
    {'a': 1.0, 'b': 1.5}
    """
    sound = {name: own for name, own in sorted(values.items()) if own and not _lacks_some(own)}
    shared = shared_seeds(sound.values())
    means = {name: fmean(own[seed] for seed in shared or own) for name, own in sound.items()}
    return dict(sorted(means.items(), key=itemgetter(1)))  # of equal means, the first by name


def shared_seeds(values: Iterable[Mapping[int, Any]]) -> list[int]:
    """Return the seeds that all of these mappings have."""
    seeds = [set(own) for own in values]
    return sorted(set.intersection(*seeds)) if seeds else []


class Ranking(NamedTuple):
    """The best names of a table (several if their values are equal), and the names not significantly different.

    Attributes:
        tested: whether a test was possible: there were at least two common seeds.
    """

    best: tuple[str, ...]
    undecided: tuple[str, ...]
    tested: bool


def ranking(
    values: Mapping[str, Mapping[int, float]], among: Iterable[str] | None = None, level: float = 0.95
) -> Ranking:
    """Return the strategies with the lowest mean value, and strategies that do not differ significantly from them.

    A strategy that lacks a value for some seeds is undecided if its other seeds do not decide the order.

    Args:
        values: strategy → seed → value, NaN for a run without one.
        among: the strategies that may be the best; default: all `contenders`.
    """
    means = contenders(values if among is None else {name: values[name] for name in among})
    if not means:
        return Ranking((), (), False)
    first, names = next(iter(means)), list(values)
    best = tuple(name for name in sorted(means) if values[name] == values[first])
    p = dict(zip(names, pairwise_p(values)[names.index(first)].tolist(), strict=True))
    undecided = []
    for name, own in values.items():
        apart = [own[seed] - values[first][seed] for seed in shared_seeds([own, values[first]])]
        differs = p[name] <= 1 - level and np.nanmean(apart) > 0
        if name not in best and not differs and (name in means or (not math.isnan(p[name]) and _lacks_some(own))):
            undecided.append(name)
    tested = any(not math.isnan(one) for one in p.values())
    return Ranking(best, tuple(undecided) if tested else (), tested)


def _lacks_some(own: Mapping[int, float]) -> bool:
    return not all(map(math.isfinite, own.values()))
