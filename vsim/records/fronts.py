"""Loss against cost: the runs that no other run dominates, and the best run within a budget."""

from __future__ import annotations

import base64
import io
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import one_of, real_number
from vsim.figures.style import literal, styled
from vsim.network.links import seconds
from vsim.records.plots import Looks, add_legend
from vsim.records.spent import Use, unused
from vsim.records.statistics import contenders, pairwise_p

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]


class Cost(NamedTuple):
    """A cost of training: the column of a front, its name in the figure, and the unit of the column."""

    column: str
    label: str
    unit: float


COSTS = {
    "wire": Cost("wire MB", "sent on the wire per node (MB)", 1e6),
    "payload": Cost("payload MB", "payload communicated per node (MB)", 1e6),
    "time": Cost("hours", "hours on the network", 3600.0),
    "cost": Cost("dollars", "dollars", 1.0),
}
# Keys of budgets: costs, and columns of a history.
BUDGETS = (*COSTS, "step", "examples", "tokens")


def amount(of: str, value: Any, argument: str = "within", allowed: Sequence[str] = BUDGETS) -> float:
    """Return a budget as a number of bytes, seconds, dollars, steps, examples or tokens.

    >>> amount("wire", "2 GB"), amount("time", "10 h"), amount("cost", "$40")
    (2000000000.0, 36000.0, 40.0)

    Args:
        argument: the argument that the budget is given in. allowed: the kinds of budget that it takes.

    Raises:
        TypeError: the value is neither a number nor text. ValueError: it is below 0, or text of another form.
    """
    one_of(f"{argument}: a budget", of, allowed)
    where = f"{argument}[{of!r}]"
    if of == "time":
        return seconds(where, value, at_least=0)
    if isinstance(value, str):
        pattern, allowed = _TEXTS.get(of, ("", "a number"))
        match = re.fullmatch(pattern, value, flags=re.ASCII)
        if not pattern or match is None:
            raise ValueError(f"{where} must be {allowed}, got {value!r}")
        value = float(match["number"]) * _UNITS[match.groupdict().get("unit", "")]
    return real_number(where, value, at_least=0)


_NUMBER = r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_OF_BYTES = (
    rf"\s*{_NUMBER}\s*(?P<unit>[kMGT]?)B\s*",
    "a number of bytes, or text in B, kB, MB, GB or TB, such as '2 GB'",
)
_TEXTS = {
    **dict.fromkeys(("wire", "payload"), _OF_BYTES),
    "cost": (rf"\s*\$?\s*{_NUMBER}\s*", "a number of dollars, or text such as '$40'"),
}


class Best(str):
    """The name of the best strategy, as text that is displayed as a sentence on how sure the result is.

    Attributes:
        loss: the strategy's loss, averaged over the seeds. within: the budget as text; "" without one.
        runner_up: the next best strategy, "" if there is none. runner_up_loss: its loss.
        p: of the paired t-test between the two, adjusted by Holm over all pairs of strategies, as the data chose the
            two; NaN with fewer than two common seeds.
        uses: name → how much of the budget the strategy's runs used, see `vsim.records.spent.Use`; empty without one.
    """

    loss: float
    within: str
    runner_up: str
    runner_up_loss: float
    p: float
    uses: Mapping[str, Use]

    @property
    def certain(self) -> bool | None:
        """Whether seeds tell the two apart (p ≤ 0.05).

        None with fewer than two common seeds, or if another strategy's runs ended before the budget was used up: with
        more steps it might be the best.
        """
        ended = any(own.ended for name, own in self.uses.items() if name != self)
        return None if math.isnan(self.p) or ended else self.p <= 0.05

    def __repr__(self) -> str:
        text = f"{self}: loss {self.loss:.4f}{f' within {self.within}' if self.within else ''}"
        ended = unused(self.uses)
        if self.runner_up:
            text += f"; runner-up {self.runner_up}: {self.runner_up_loss:.4f} ({self._sure})"
        return f"{text}; {ended}" if ended else text

    @property
    def _sure(self) -> str:
        if math.isnan(self.p):
            return "fewer than two common seeds, which cannot tell whether they differ"
        if self.certain is None:
            return "not decided, as runs ended before the budget"
        told = "the difference is certain" if self.certain else "seeds do not tell them apart"
        return f"{told}, p = {self.p:.2g}"


class Cheapest(str):
    """The name of the strategy that reaches a loss with the fewest bytes, displayed as a sentence that names ties.

    Attributes:
        loss: the target. megabytes: on the wire until then, averaged over the seeds.
        tied: strategies that cannot be told from it, by the seeds or because validation is too rare.
    """

    loss: float
    megabytes: float
    tied: tuple[str, ...]

    def __repr__(self) -> str:
        tied = f"; not told from {', '.join(self.tied)}" if self.tied else ""
        return f"{self}: {self.megabytes:.3g} MB to loss {self.loss:g}{tied}"


def best_of(
    values: Mapping[str, Mapping[int, float]],
    among: Iterable[str] | None = None,
    within: str = "",
    uses: Mapping[str, Use] = MappingProxyType({}),
) -> Best:
    """Return the strategy with the lowest mean value.

    Args:
        values: strategy → seed → value, NaN for a run without a value. among: the strategies of which one may be the
            best; default: all `contenders`. within: the budget, as text. uses: see `Best`.

    Raises:
        ValueError: no strategy has a value with all seeds.
    """
    means = contenders(values if among is None else {name: values[name] for name in among})
    if not means:
        raise ValueError(f"no strategy has a loss{f' within {within}' if within else ''} with all its seeds")
    first, *others = means
    best = Best(first)
    best.loss, best.within, best.uses = means[first], within, uses
    best.runner_up, best.runner_up_loss, best.p = "", math.nan, math.nan
    if others:
        best.runner_up, best.runner_up_loss = others[0], means[others[0]]
        names = list(values)
        best.p = float(pairwise_p(values)[names.index(first), names.index(others[0])])
    return best


def loss_within(losses: Floats, costs: Sequence[tuple[Floats, float]]) -> float:
    """Return the last loss that was measured at a cost within the budgets; NaN if there is none.

    Args:
        losses: (T,) of every row, NaN where not measured.
        costs: pairs of a cost (T,) of every row, and its budget.
    """
    within = ~np.isnan(losses)
    for own, most in costs:
        within &= own <= most * (1 + 1e-12)
    return float(losses[within][-1]) if within.any() else math.nan


@dataclass(frozen=True, repr=False)
class Front:
    """Loss against cost at the end of each strategy's runs. A notebook shows it as a figure.

    A run is on the front unless another run is at least as good in both loss and cost, and better in one of them. Every
    run is where its steps ended: with more of them, a cheap one might have gone below a dearer one.

    Attributes:
        cost: "wire", "payload", "time" or "cost".
        frame: strategy, the cost, loss (means over the seeds), low and high (the 95 % interval of the loss by Student's
            t; with one seed, by its standard error over the validation examples), seeds, front, dominated_by, tied
            (dominated only by strategies from whose loss its own cannot be told), steps, and equal_steps: the steps
            that would cost as much as the dearest run, in proportion.
        looks: of the strategies, by name. loss: which loss is shown. per: whether bytes are per node or per client.
    """

    cost: str
    frame: pd.DataFrame
    looks: Looks
    loss: str = "loss"
    per: str = "node"

    @property
    def names(self) -> list[str]:
        """The strategies on the front, the cheapest first."""
        on_front = self.frame[self.frame["front"]]
        return list(on_front.sort_values([COSTS[self.cost].column, "strategy"])["strategy"])

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw all runs with their intervals, dominated ones faint, and a line through the front; † marks ties.

        A loss far above the others is marked at the upper edge, with its number; intervals end at the edges.

        Args:
            ax: default: the axes of a new figure as wide as a column.
        """
        from vsim.figures.paper import axes_of

        own, ax = ax is None, axes_of(ax, 3.3, 2.5)
        kind = COSTS[self.cost]
        known = self.frame[np.isfinite(self.frame["loss"])]
        costs = known[kind.column]
        if len(known) and costs.max() > 10 * costs.min():
            positive = costs[costs > 0]
            none_free = bool((costs > 0).all())
            ax.set_xscale("log") if none_free else ax.set_xscale("symlog", linthresh=float(positive.min()) / 3)
        front = known[known["front"]].sort_values(kind.column)
        ax.plot(front[kind.column], front["loss"], drawstyle="steps-post", color="0.6", linewidth=1.0, zorder=1)
        low, high = within(*known[["loss", "low", "high"]].to_numpy().T) if len(known) else (0.0, 1.0)
        pad = 0.1 * (high - low) or 0.05
        for row in known.to_dict("records"):
            look, alpha = self.looks.by_name[row["strategy"]], 1.0 if row["front"] else 0.6 if row["tied"] else 0.3
            spread = [[row["loss"] - row["low"]], [row["high"] - row["loss"]]]
            is_above = row["loss"] > high
            if is_above:
                said: Any = {
                    "xytext": (0, -6),
                    "textcoords": "offset points",
                    "ha": "center",
                    "va": "top",
                    "fontsize": 6.5,
                }
                ax.annotate(f"{row['loss']:.3g}", (row[kind.column], high + pad), color=look.colour, **said)
            ax.errorbar(
                row[kind.column],
                high + pad if is_above else row["loss"],
                yerr=None if is_above or math.isnan(row["low"]) else spread,
                color=look.colour,
                marker="^" if is_above else look.marker or "o",
                clip_on=not is_above,
                markersize=5,
                capsize=2,
                alpha=alpha,
                linestyle="none",
                label=literal(row["strategy"] + (" †" if row["tied"] else "")),
            )
        ax.set(xlabel=kind.label.replace("per node", f"per {self.per}"), ylabel=self.loss, ylim=(low - pad, high + pad))
        styled(ax)
        if 0 < len(known) <= _NAMED:
            add_legend(ax, Looks(self.looks.by_name), {}, own, inside=False)
        return ax

    def _repr_html_(self) -> str:
        import matplotlib.pyplot as plt

        figure = self.plot().get_figure(root=True)
        assert figure is not None
        image = io.BytesIO()
        figure.savefig(image, format="png", dpi=150, bbox_inches="tight")
        plt.close(figure)
        encoded = base64.b64encode(image.getvalue()).decode()
        table: str = self.frame.to_html(index=False, float_format=lambda value: f"{value:.4g}", escape=True)
        return f'{table}<img alt="loss against {COSTS[self.cost].column}" src="data:image/png;base64,{encoded}"/>'

    def __repr__(self) -> str:
        return str(self.frame.to_string(index=False, float_format=lambda value: f"{value:.4g}"))


_NAMED = 12  # strategies that a legend names


def within(losses: Floats, lows: Floats, highs: Floats) -> tuple[float, float]:
    """Return the losses between which a front is drawn, so that neither one poor run nor wide intervals flatten it.

    Losses above the third quartile by more than three interquartile ranges, or by more than 15 % of the median if that
    is more, are outside. Intervals widen the range at most threefold.

    >>> losses = np.array([1.0, 1.1, 1.2, 1.3, 9.0])
    >>> within(losses, losses - 0.05, losses + 5)
    (0.95, 1.6)
    """
    first, median, third = np.quantile(losses, [0.25, 0.5, 0.75])
    kept = losses <= third + 3 * max(third - first, 0.05 * abs(median))
    low, high = losses.min(), losses[kept].max()
    span = high - low or math.inf
    lowest, highest = np.nanmin([low, *lows[kept]]), np.nanmax([high, *highs[kept]])
    return round(float(max(lowest, low - span)), 9), round(float(min(highest, high + span)), 9)


def dominating(costs: Sequence[float], losses: Sequence[float]) -> list[list[int]]:
    """Return for each run the indices of the runs that dominate it, the best first.

    >>> dominating([1.0, 2.0, 2.0, 3.0], [3.0, 2.0, 2.5, 2.0])
    [[], [], [1], [1]]
    """
    places = sorted(range(len(costs)), key=lambda i: (losses[i], costs[i], i))
    return [
        [i for i in places if costs[i] <= cost and losses[i] <= loss and (costs[i], losses[i]) != (cost, loss)]
        for cost, loss in zip(costs, losses, strict=True)
    ]
