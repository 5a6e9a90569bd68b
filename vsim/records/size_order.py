"""The order of two strategies' losses at a size that was not trained, and the probability that the order holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import one_of, real_number
from vsim.records.tables import aligned, with_notes

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
COLUMNS = ("strategy", "parameters", "seed", "loss")
# The probability at which an order is decided; and how many orders, each seen at two sizes, a probability needs.
CALLED, FEWEST = 0.9, 20
# A target beyond the largest measured size by more than this factor is called extrapolated.
FAR = 100
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
        sureness: 2 P(the first has the higher loss) − 1, from −1 (it is better) to 1; ±1 if one seed allows no test.
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
        return abs(self.sureness) >= 0.95

    def reversed(self) -> AtSize:
        """Return the difference with the two strategies exchanged."""
        return AtSize(self.parameters, self.seeds, -self.difference, -self.high, -self.low, -self.sureness)


@dataclass(frozen=True)
class Pair:
    """Two strategies: `ahead` has the lower loss at the target by the trend. Differences are of log loss.

    Attributes:
        sizes: how they differ at each measured size. difference, low, high: the trend at the target, ahead − behind,
            with its 95 % interval. slope: change of the difference with a tenfold size; slope_low, slope_high: its
            interval. by_trend: P(ahead has the lower loss at the target), if the trend continues. probability:
            `by_trend`, shrunk towards 1/2 by how well orders held from size to size; NaN if too few orders were seen.
    """

    ahead: str
    behind: str
    sizes: Sequence[AtSize]
    difference: float
    low: float
    high: float
    slope: float
    slope_low: float
    slope_high: float
    by_trend: float
    probability: float

    @property
    def decided(self) -> bool:
        """Whether the order has a probability of at least 90 %."""
        return self.probability >= CALLED

    @property
    def flips(self) -> list[tuple[float, float]]:
        """Pairs of neighbouring sizes at which seeds tell the strategies apart, but in opposite orders."""
        decided = [at for at in self.sizes if at.is_decided]
        return [(a.parameters, b.parameters) for a, b in pairwise(decided) if a.sureness * b.sureness < 0]

    @property
    def turn(self) -> float:
        """The size beyond the largest measured one where the trend changes the order; NaN if it does not."""
        last = self.sizes[-1]
        if last.difference * self.difference >= 0 or not self.slope:
            return math.nan
        return float(last.parameters * 10 ** max(0.0, -self._trend_at(last.parameters) / self.slope))

    def _trend_at(self, parameters: float) -> float:
        x = np.log10([at.parameters for at in self.sizes])
        seeds = np.array([at.seeds for at in self.sizes])
        mean = np.average([at.difference for at in self.sizes], weights=seeds)
        return float(mean + self.slope * (math.log10(parameters) - np.average(x, weights=seeds)))

    def __str__(self) -> str:
        said = [f"{self.ahead} before {self.behind}" if self.decided else f"{self.ahead} or {self.behind}: not decided"]
        if not math.isnan(self.probability):
            said.append(f"{_chance(self.probability)} that {self.ahead} is ahead")
        return "; ".join([*said, *self._notes()])

    def _notes(self) -> list[str]:
        said = [f"flips between {in_short(low)} and {in_short(high)}" for low, high in self.flips]
        return said if math.isnan(self.turn) else [*said, f"the trend turns at about {in_short(self.turn)}"]


@dataclass(frozen=True, repr=False)
class Order:
    """The order of strategies at a target size, with the probability that it holds. Displayed as text or as a table.

    Attributes:
        to: parameters of the target. sizes: measured sizes, ascending. pairs: all pairs, in the order of `names`.
        names: the strategies, by the trend at the target, the best first.
        cases: how often two strategies have an order at a size and at a larger one. held: how often both agree.
        kept: the share of the distance of `Pair.by_trend` from 1/2 that `Pair.probability` keeps.
        left_out: name → sizes at which one of the strategy's runs has no loss. The trend leaves these sizes out, and
            may flatter the strategy.
    """

    to: float
    sizes: Sequence[float]
    pairs: Sequence[Pair]
    names: Sequence[str]
    held: int
    cases: int
    kept: float
    left_out: Mapping[str, Sequence[float]]

    @property
    def factor(self) -> float:
        """The size of the target, divided by the largest measured size."""
        return self.to / self.sizes[-1]

    @property
    def decided(self) -> bool:
        """Whether all pairs are decided."""
        return all(pair.decided for pair in self.pairs)

    def pair(self, one: str, other: str) -> Pair:
        """Return the `Pair` of two strategies.

        Raises:
            ValueError: there is no such strategy, or both are the same.
        """
        for name in (one, other):
            one_of("a strategy", name, self.names)
        found = [pair for pair in self.pairs if {pair.ahead, pair.behind} == {one, other}]
        if not found:
            raise ValueError(f"an order is of two strategies, got {one!r} twice")
        return found[0]

    def probability(self, one: str, other: str) -> float:
        """Return P(the loss of one is lower than that of the other at the target); NaN if too few orders were seen."""
        pair = self.pair(one, other)
        return pair.probability if pair.ahead == one else 1 - pair.probability

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per pair: ahead, behind, differences and slope with intervals, probability, decided."""
        import pandas

        columns = ("ahead", "behind", "difference", "low", "high", "slope", "slope_low", "slope_high", "probability")
        rows = [{**{c: getattr(pair, c) for c in columns}, "decided": pair.decided} for pair in self.pairs]
        return pandas.DataFrame(rows, columns=[*columns, "decided"])

    def table(self, format: str = "simple") -> str:
        """Return a text table by pair: differences at each size, the trend at the target, and the probability."""
        header = ["ahead", "behind", *map(in_short, self.sizes), f"trend at {in_short(self.to)}", "P", "order"]
        rows = []
        for pair in self.pairs:
            by_size = {at.parameters: f"{_relative(at.difference)}{'' if at.is_decided else ' †'}" for at in pair.sizes}
            trend = f"{_relative(pair.difference)} ({_relative(pair.low)} to {_relative(pair.high)})"
            verdict = "; ".join(["holds" if pair.decided else "not decided", *pair._notes()])
            own = [by_size.get(size, "–") for size in self.sizes]
            rows.append([pair.ahead, pair.behind, *own, trend, _chance(pair.probability), verdict])
        return with_notes(aligned(rows, header, format), self.notes(), format)

    def headline(self) -> str:
        """Return the target, its distance from the measured sizes, and the strategies in their order."""
        first = "extrapolated: " if self.factor > FAR else ""
        far = f"{self.factor:,.0f}" if self.factor >= 10 else f"{self.factor:.2g}"
        where = f"{far} × the largest measured size" if self.factor > 1 else "not beyond the measured sizes"
        names = [self.names[0]] if self.names else []
        for one, other in pairwise(self.names):
            names += [" < " if self.pair(one, other).decided else " ? ", other]
        return f"{first}order at {in_short(self.to)} parameters, {where}: {''.join(names)}"

    def notes(self) -> list[str]:
        """Return the sentences below the table."""
        span = f"{in_short(self.sizes[0])} to {in_short(self.sizes[-1])}"
        said = [f"relative differences of loss, ahead − behind, paired by seed; {len(self.sizes)} sizes, {span}"]
        if any(not at.is_decided for pair in self.pairs for at in pair.sizes):
            said.append("† not told apart by these seeds (p > 0.05)")
        known = f"of {self.cases} orders of two strategies at one size, {self.held} held at a larger one"
        if self.factor > 1 and self.cases < FEWEST:
            said.append(f"{known}: too few for a probability, which takes {FEWEST}")
        else:
            kept = f", which leaves {self.kept:.0%} of the distance from 50 %" if self.factor > 1 else ""
            said.append(f"{known}{kept}; an order holds where P is at least {CALLED:.0%}")
        for name, sizes in self.left_out.items():
            said.append(f"{name}: runs without a loss at {', '.join(map(in_short, sizes))} are left out")
        return said

    def _repr_html_(self) -> str:
        import html

        return f"<p>{html.escape(self.headline())}</p>{self.table('html')}"

    def __repr__(self) -> str:
        return f"{self.headline()}\n{self.table()}"


def order(frame: Any, to: float) -> Order:
    """Return the order of strategies at a size, from their losses at other sizes.

    For each pair of strategies, fit a line to the differences of log loss with equal seeds, against log size. Its error
    at the target is the larger of two estimates: from all residuals (at least the spread over seeds), and from separate
    lines for each seed. P follows from Student's t of the line at the target; a bootstrap of three seeds would have
    only ten different draws. P then shrinks towards 1/2 by exp(−rate · log10(to / largest size)). The rate is
    estimated, with a prior, from orders at measured sizes that did or did not hold at a larger size, weighted by how
    surely seeds tell the two apart. Orders of k strategies at S sizes share their runs, and count as (k − 1)(S − 1)
    independent cases.

    Args:
        frame: columns "strategy", "parameters", "seed" and "loss", a row per run: a DataFrame, or a dict of lists. NaN
            is the loss of a run that diverged or failed.
        to: parameters of the target.

    Raises:
        ValueError: a column is missing, or there are fewer than two strategies or sizes, or a loss is not above 0.
    """
    to = real_number("to", to, at_least=1)
    losses = _by_strategy(frame)
    sizes = sorted({size for own in losses.values() for size in own})
    if len(losses) < 2 or len(sizes) < 2:
        raise ValueError(f"an order takes two strategies and two sizes, got {len(losses)} and {len(sizes)}")
    lacking = {
        name: [size for size, runs in own.items() if not all(map(math.isfinite, runs.values()))]
        for name, own in losses.items()
    }
    fits = {pair: _fitted(losses[pair[0]], losses[pair[1]], sizes, to) for pair in combinations(losses, 2)}
    cases = [
        (math.log10(t.parameters / s.parameters), s.sureness * t.sureness)
        for fit in fits.values()
        for s, t in combinations(fit.sizes, 2)
        if s.difference and t.difference
    ]
    beyond = max(0.0, math.log10(to / sizes[-1]), math.log10(sizes[0] / to))
    kept = _kept(cases, beyond, (len(losses) - 1) * (len(sizes) - 1))
    if beyond and len(cases) < FEWEST:
        kept = math.nan
    pairs = [_ranked(one, other, fit, kept) for (one, other), fit in fits.items()]
    score = dict.fromkeys(losses, 0.0)
    for pair in pairs:
        gap = 0.0 if math.isnan(pair.difference) else pair.difference
        score[pair.ahead] += gap
        score[pair.behind] -= gap
    names = sorted(score, key=lambda name: (score[name], name))
    place = {name: i for i, name in enumerate(names)}
    pairs.sort(key=lambda pair: sorted((place[pair.ahead], place[pair.behind])))
    left_out = {name: own for name, own in lacking.items() if own}
    return Order(to, sizes, pairs, names, sum(agree > 0 for _, agree in cases), len(cases), kept, left_out)


def in_short(parameters: float) -> str:
    """Return a number of parameters as text, such as 40k, 1.3B.

    >>> in_short(40_000), in_short(1.3e9), in_short(512)
    ('40k', '1.3B', '512')
    """
    parameters = float(f"{parameters:.3g}")
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}" if parameters < 1e15 else f"{parameters / size:,.0f}{unit}"
    return f"{parameters:.3g}"


def _relative(difference: float) -> str:
    """Return a difference of logarithms as text in per cent."""
    share = 100 * math.expm1(difference)
    return "–" if math.isnan(share) else f"{share:+.{0 if abs(share) >= 9.95 else 1}f} %".replace("-", "−")


def _chance(probability: float) -> str:
    return "–" if math.isnan(probability) else f"{probability:.0%}" if probability < 0.995 else "> 99%"


def _by_strategy(frame: Any) -> dict[str, dict[float, dict[int, float]]]:
    """Return name → size → seed → loss."""
    missing = [name for name in COLUMNS if name not in frame]
    if missing:
        raise ValueError(f"frame has no column {missing[0]!r}; it needs {', '.join(COLUMNS)}")
    found: dict[str, dict[float, dict[int, float]]] = {}
    for name, size, seed, loss in zip(*(list(frame[column]) for column in COLUMNS), strict=True):
        size, loss = real_number("parameters", size, above=0), float(loss)
        if loss <= 0:
            raise ValueError(f"loss must be above 0, as orders are of logarithms; {name} at {size:g} has {loss:g}")
        found.setdefault(str(name), {}).setdefault(size, {})[int(seed)] = loss if math.isfinite(loss) else math.nan
    return found


@dataclass(frozen=True)
class _Fit:
    """The differences of a pair at each size, and the line through them: its value at the target, and its slope."""

    sizes: list[AtSize]
    at_target: tuple[float, float]  # the mean, and its standard error
    slope: tuple[float, float]
    freedom: int


def _fitted(
    one: Mapping[float, Mapping[int, float]], other: Mapping[float, Mapping[int, float]], sizes: list[float], to: float
) -> _Fit:
    from scipy.stats import t

    apart: dict[float, dict[int, float]] = {}
    for size in sizes:
        own, theirs = one.get(size, {}), other.get(size, {})
        found = {seed: math.log(own[seed] / theirs[seed]) for seed in own if seed in theirs}
        if found and all(map(math.isfinite, found.values())):
            apart[size] = found
    means = {size: float(np.mean([*own.values()])) for size, own in apart.items()}
    spread = [value - means[size] for size, own in apart.items() for value in own.values()]
    inside = len(spread) - len(apart)  # degrees of freedom
    noise = math.sqrt(float(np.square(spread).sum()) / inside) if inside else math.nan
    at_sizes = []
    for size, own in apart.items():
        error, mean = noise / math.sqrt(len(own)), means[size]
        sure = float(np.sign(mean)) if not error > 1e-12 * abs(mean) else float(2 * t.cdf(mean / error, inside) - 1)
        half = error * float(t.ppf(0.975, inside)) if inside else math.nan
        at_sizes.append(AtSize(size, len(own), mean, mean - half, mean + half, sure))
    nothing = math.nan, math.nan
    if len(apart) < 2:
        return _Fit(at_sizes, nothing, nothing, 0)
    x, d, seeds = np.array([(math.log10(s), v, k) for s, own in apart.items() for k, v in own.items()]).T
    middle = x.mean()
    spread_of_x = float(np.square(x - middle).sum())
    slope = float(((x - middle) * d).sum() / spread_of_x)
    away, freedom = math.log10(to) - middle, len(d) - 2
    mean = float(d.mean() + slope * away)
    if not freedom:
        return _Fit(at_sizes, (mean, math.nan), (slope, math.nan), 0)
    residuals = d - d.mean() - slope * (x - middle)
    variance = max(float(np.square(residuals).sum()) / freedom, 0.0 if math.isnan(noise) else noise**2)
    error, slope_error = math.sqrt(variance * (1 / len(d) + away**2 / spread_of_x)), math.sqrt(variance / spread_of_x)
    lines = []  # one for each seed that has all sizes
    for seed in np.unique(seeds):
        own_x, own_d = x[seeds == seed], d[seeds == seed]
        if len(own_x) == len(apart):
            lines.append(np.polyfit(own_x - math.log10(to), own_d, 1)[::-1])
    if len(lines) > 1:
        by_seed = np.std(lines, axis=0, ddof=1) / math.sqrt(len(lines))
        error, slope_error = max(error, float(by_seed[0])), max(slope_error, float(by_seed[1]))
    return _Fit(at_sizes, (mean, error), (slope, slope_error), freedom)


def _ranked(one: str, other: str, fit: _Fit, kept: float) -> Pair:
    from scipy.stats import t

    (mean, error), (slope, slope_error) = fit.at_target, fit.slope
    sign = -1.0 if mean > 0 else 1.0
    ahead, behind = (other, one) if mean > 0 else (one, other)
    wide = float(t.ppf(0.975, fit.freedom)) if fit.freedom else math.nan
    if not fit.freedom:
        by_trend = math.nan
    elif error > 1e-12 * abs(mean):
        by_trend = float(t.cdf(abs(mean) / error, fit.freedom))
    else:
        by_trend = 1.0 if mean else 0.5
    difference, change = -abs(mean), sign * slope
    sizes = fit.sizes if sign > 0 else [at.reversed() for at in fit.sizes]
    ends = difference - wide * error, difference + wide * error
    slopes = change, change - wide * slope_error, change + wide * slope_error
    return Pair(ahead, behind, sizes, difference, *ends, *slopes, by_trend, 0.5 + kept * (by_trend - 0.5))


def _kept(cases: Sequence[tuple[float, float]], beyond: float, independent: int) -> float:
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
