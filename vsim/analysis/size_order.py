"""The order of two strategies' losses at a size that was not trained, and the probability that the order holds."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from typing import TYPE_CHECKING, Any

from vsim.analysis.tables import aligned, with_notes
from vsim.analysis.trends import TOLD, AtSize, Fit, fitted, kept_share
from vsim.arguments import one_of, real_number
from vsim.figures.words import in_short

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = ("strategy", "parameters", "seed", "loss")
# The probability at which an order is decided; and how many orders, each seen at two sizes, a probability needs.
CALLED, FEWEST = 0.9, 20
# A target beyond the largest measured size by more than this factor is called extrapolated.
FAR = 100


@dataclass(frozen=True)
class Pair:
    """Two strategies: `ahead` has the lower loss at the target. Differences are of log loss.

    Attributes:
        sizes: how they differ at each measured size. difference, low, high: ahead − behind at the target, with its 95 %
            interval: measured there or, at a size that was not measured, by the trend. slope: change of the difference
            with a tenfold size; slope_low, slope_high: its interval.
        by_trend: P(ahead has the lower loss at the target) by the seeds there or, elsewhere, if the trend continues.
        probability: `by_trend`, shrunk towards 1/2 by how well orders held from size to size; NaN if the measurements
            give none.
        measured: whether the target is a size at which both were measured.
        turn: the size where the trend changes the order, between the target and a measured size next to it; else NaN.
        why: why the order is not decided; "" if it is.
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
    measured: bool
    turn: float
    why: str

    @property
    def decided(self) -> bool:
        """Whether the order is decided.

        At a measured size, seeds tell the strategies apart (p ≤ 0.05). Elsewhere, the order has a probability of at
        least 90 %, was seen at the measured sizes next to the target, and does not flip between measured sizes.
        """
        return not self.why

    @property
    def flips(self) -> list[tuple[float, float]]:
        """Pairs of neighbouring sizes at which seeds tell the strategies apart, but in opposite orders."""
        return _flips(self.sizes)

    def __str__(self) -> str:
        said = f"{self.ahead} before {self.behind}" if self.decided else f"{self.ahead} or {self.behind}"
        chance = "" if math.isnan(self.probability) else f"{_chance(self.probability)} that {self.ahead} is ahead"
        return "; ".join(filter(None, [said, chance, self._verdict()]))

    def _verdict(self) -> str:
        verdict = f"not decided: {self.why}" if self.why else "measured" if self.measured else "holds"
        return "; ".join([verdict, *([_said_of(self.flips)] if self.measured and self.flips else [])])


@dataclass(frozen=True, repr=False)
class Order:
    """The order of strategies at a target size, with the probability that it holds. Displayed as text or as a table.

    Attributes:
        to: parameters of the target. sizes: measured sizes, ascending. pairs: all pairs, in the order of `names`.
        names: the strategies, by the trend at the target, the best first.
        cases: how often two strategies have an order at a size and at a larger one. held: how often both agree.
        kept: the share of the distance of `Pair.by_trend` from 1/2 that `Pair.probability` keeps.
        left_out: name → sizes at which one of the strategy's runs has no loss. The trend leaves these sizes out, and
            may flatter the strategy. silent: name → sizes at which the strategy never communicated, although it did at
            others: it trained too few steps for its first sync. The trend leaves these sizes out, too.
    """

    to: float
    sizes: Sequence[float]
    pairs: Sequence[Pair]
    names: Sequence[str]
    held: int
    cases: int
    kept: float
    left_out: Mapping[str, Sequence[float]]
    silent: Mapping[str, Sequence[float]]

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
        """Return P(the loss of one is lower than that of the other at the target); NaN if there is none."""
        pair = self.pair(one, other)
        return pair.probability if pair.ahead == one else 1 - pair.probability

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per pair: ahead, behind, differences and slope with intervals, probability, decided, why."""
        import pandas

        columns = ("ahead", "behind", "difference", "low", "high", "slope", "slope_low", "slope_high", "probability")
        rows = [{c: getattr(pair, c) for c in (*columns, "decided", "why")} for pair in self.pairs]
        return pandas.DataFrame(rows, columns=[*columns, "decided", "why"])

    def table(self, format: str = "simple") -> str:
        """Return a text table by pair: differences at each size, the trend at the target, and the probability."""
        header = ["ahead", "behind", *map(in_short, self.sizes), f"at {in_short(self.to)}", "P", "order"]
        rows = []
        for pair in self.pairs:
            by_size = {at.parameters: f"{_relative(at.difference)}{'' if at.is_decided else ' †'}" for at in pair.sizes}
            trend = f"{_relative(pair.difference)} ({_relative(pair.low)} to {_relative(pair.high)})"
            own = [by_size.get(size, "–") for size in self.sizes]
            rows.append([pair.ahead, pair.behind, *own, trend, _chance(pair.probability), pair._verdict()])
        return with_notes(aligned(rows, header, format), self.notes(), format)

    def headline(self) -> str:
        """Return the target, its distance from the measured sizes, and the strategies in their order."""
        first = "extrapolated: " if self.factor > FAR else ""
        far = f"{self.factor:,.0f}" if self.factor >= 10 else f"{self.factor:.2g}"
        within = "a measured size" if self.to in self.sizes else "not beyond the measured sizes"
        where = f"{far} × the largest measured size" if self.factor > 1 else within
        names = [self.names[0]] if self.names else []
        for one, other in pairwise(self.names):
            names += [" < " if self.pair(one, other).decided else " ? ", other]
        return f"{first}order at {in_short(self.to)} parameters, {where}: {''.join(names)}"

    def notes(self) -> list[str]:
        """Return the sentences below the table."""
        span = f"{in_short(self.sizes[0])} to {in_short(self.sizes[-1])}"
        said = [f"relative differences of loss, ahead − behind, paired by seed; {len(self.sizes)} sizes, {span}"]
        if any(not at.is_decided for pair in self.pairs for at in pair.sizes):
            said.append("† not significantly different (p > 0.05)")
        if any(not self.pair(one, other).decided for one, other in pairwise(self.names)):
            said.append("?: which of the two is ahead is not decided")
        known = f"of {self.cases} orders of two strategies at one size, {self.held} held at a larger one"
        if math.isnan(self.kept):
            said.append(f"{known}: too few for a probability, which takes {FEWEST}")
        elif all(pair.measured for pair in self.pairs):
            said.append(
                f"measured at {in_short(self.to)}: decided where two strategies differ significantly (p ≤ {TOLD})"
            )
        else:
            kept = f", which leaves {self.kept:.0%} of the distance from 50 %" if self.factor > 1 else ""
            said.append(f"{known}{kept}; an order holds where P is at least {CALLED:.0%}")
        for name, sizes in self.left_out.items():
            said.append(f"{name}: runs without a loss at {', '.join(map(in_short, sizes))} are left out")
        for name, sizes in self.silent.items():
            said.append(f"{name}: left out at {', '.join(map(in_short, sizes))}, where it never communicated")
        return said

    def _repr_html_(self) -> str:
        import html

        return f"<p>{html.escape(self.headline())}</p>{self.table('html')}"

    def __repr__(self) -> str:
        return f"{self.headline()}\n{self.table()}"


def order(frame: Any, to: float) -> Order:
    """Return the order of strategies at a size, from their losses at other sizes.

    At a measured size, the measurement answers: the t-test over seeds, with the spread of all sizes. For any other
    size, a line is fitted to the differences of log loss with equal seeds, against log size. Its error at the target is
    the larger of two estimates: from all residuals (at least the spread over seeds), and from separate lines for each
    seed. Seeds of one size share what was tuned or rounded there. Where the means of sizes scatter about the line by
    more than seeds do (F test of lack of fit, p ≤ 0.1), each size therefore counts as one point, whatever its seeds.

    P follows from Student's t of the line at the target; a bootstrap of three seeds would have only ten different
    draws. P then shrinks towards 1/2 by exp(−rate · log10(to / largest size)). The rate is estimated, with a prior,
    from orders at measured sizes that did or did not hold at a larger size, weighted by how surely seeds tell the two
    apart. Orders of k strategies at S sizes share their runs, and count as (k − 1)(S − 1) independent cases.

    A line cannot know where an order changes. So a pair has no probability if its order at the target was not seen at
    the measured sizes next to the target, or if it flips between two sizes at which seeds tell it.

    Args:
        frame: columns "strategy", "parameters", "seed" and "loss", a row per run: a DataFrame, or a dict of lists. NaN
            is the loss of a run that diverged or failed. With a column "wire_bytes", sizes at which a strategy never
            communicated are left out, if it did at others.
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
    silent = silent_sizes(frame)
    for name, without in silent.items():
        losses[name] = {size: runs for size, runs in losses[name].items() if size not in without}
    fits = {(a, b): fitted(losses[a], losses[b], sizes, to) for a, b in combinations(losses, 2)}
    cases = [
        (math.log10(t.parameters / s.parameters), s.sureness * t.sureness)
        for fit in fits.values()
        for s, t in combinations(fit.sizes, 2)
        if s.difference and t.difference
    ]
    beyond = max(0.0, math.log10(to / sizes[-1]), math.log10(sizes[0] / to))
    kept = kept_share(cases, beyond, (len(losses) - 1) * (len(sizes) - 1))
    if beyond and len(cases) < FEWEST:
        kept = math.nan
    pairs = [_ranked(one, other, fit, to, kept, len(cases)) for (one, other), fit in fits.items()]
    score = dict.fromkeys(losses, 0.0)
    for pair in pairs:
        gap = 0.0 if math.isnan(pair.difference) else pair.difference
        score[pair.ahead] += gap
        score[pair.behind] -= gap
    names = sorted(score, key=lambda name: (score[name], name))
    place = {name: i for i, name in enumerate(names)}
    pairs.sort(key=lambda pair: sorted((place[pair.ahead], place[pair.behind])))
    left_out = {name: own for name, own in lacking.items() if own}
    held = sum(agree > 0 for _, agree in cases)
    return Order(to, sizes, pairs, names, held, len(cases), kept, left_out, silent)


def silent_sizes(frame: Any) -> dict[str, list[float]]:
    """Return name → sizes at which no run of the strategy sent a byte, for strategies that did at other sizes.

    Such runs were too short for the strategy's first sync, and say nothing about it.
    """
    if "wire_bytes" not in frame:
        return {}
    sent: dict[str, dict[float, float]] = {}
    for name, size, own in zip(
        *(list(frame[column]) for column in ("strategy", "parameters", "wire_bytes")), strict=True
    ):
        by_size = sent.setdefault(str(name), {})
        by_size[float(size)] = max(by_size.get(float(size), 0.0), float(own))
    found = {name: sorted(size for size, own in by_size.items() if not own) for name, by_size in sent.items()}
    return {name: sizes for name, sizes in found.items() if sizes and len(sizes) < len(sent[name])}


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


def _flips(sizes: Sequence[AtSize]) -> list[tuple[float, float]]:
    decided = [at for at in sizes if at.is_decided]
    return [(a.parameters, b.parameters) for a, b in pairwise(decided) if a.sureness * b.sureness < 0]


def _said_of(flips: Sequence[tuple[float, float]]) -> str:
    return ", ".join(f"flips between {in_short(low)} and {in_short(high)}" for low, high in flips)


def _ranked(one: str, other: str, fit: Fit, to: float, kept: float, cases: int) -> Pair:
    target, slope = fit.at_target, fit.slope
    sign = -1.0 if target.value > 0 else 1.0
    ahead, behind = (other, one) if target.value > 0 else (one, other)
    difference, change = -abs(target.value), sign * slope.value
    sizes = fit.sizes if sign > 0 else [at.reversed() for at in fit.sizes]
    by_trend = 0.5 + abs(target.sureness) / 2 if target.freedom else math.nan
    near = [*[at for at in sizes if at.parameters <= to][-1:], *[at for at in sizes if at.parameters >= to][:1]]
    against = [at.parameters for at in near if at.difference * difference < 0]
    turn = math.nan
    if against and not fit.measured:
        zero = -difference / change if change else math.inf  # of the line, in factors of ten from the target
        low, high = sorted((against[0], to))
        turn = to * 10**zero if math.log10(low / to) < zero < math.log10(high / to) else against[0]
    probability = 0.5 + kept * (by_trend - 0.5)
    flips = _flips(sizes)
    if not near:
        why = "no size at which both have a loss with the same seed"
    elif fit.measured:
        why = "" if abs(target.sureness) >= 1 - TOLD else f"seeds do not tell them apart there (p > {TOLD})"
    elif not target.freedom:
        why = "too few sizes and seeds for the error of a trend"
    elif flips:
        why = _said_of(flips)
    elif against:
        why = f"the trend turns at about {in_short(turn)}"
    elif math.isnan(kept):
        why = f"{cases} orders are too few for a probability"
    else:
        why = "" if probability >= CALLED else f"P is below {CALLED:.0%}"
    if not fit.measured and (flips or against):
        probability = math.nan
    ends = (difference - target.half, difference + target.half)
    slopes = (change, change - slope.half, change + slope.half)
    return Pair(ahead, behind, sizes, difference, *ends, *slopes, by_trend, probability, fit.measured, turn, why)
