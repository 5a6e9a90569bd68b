"""Loss against cost: the strategies that no other strategy dominates."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vsim.analysis.compared import Runs
from vsim.analysis.losses import by_seed, compared_runs, final_loss, loss_interval, ties
from vsim.analysis.spent import COSTS, AnyCompute, AnyNetwork, Floats, last
from vsim.analysis.statistics import contenders
from vsim.arguments import one_of
from vsim.figures.legends import add_legend
from vsim.figures.looks import Looks
from vsim.figures.style import literal, styled

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes


def pareto(comparison: Runs, cost: str = "wire", *, network: AnyNetwork = None, compute: AnyCompute = None) -> Front:
    """Return the strategies that no other strategy dominates in final loss and cost.

    Args:
        cost: "wire" or "payload" bytes per node, "time" on a network, or "cost" in dollars.
        network, compute: determine "time" and "cost", see `vsim.timeline`; default: the comparison's.

    Returns:
        A `Front`: a frame, and a figure. A strategy with a run that diverged or failed is not on the front; the
        others are compared over the seeds that all of them have.

    Raises:
        ValueError: there is no such cost. TypeError: "time" or "cost" without network and compute.
    """
    import pandas as pd

    kind = COSTS[one_of("cost", cost, COSTS)]
    priced = comparison.pricing_of([cost], network, compute)
    rows: list[dict[str, Any]] = []
    of_front = compared_runs(comparison)
    for name in comparison.order:
        own = of_front[name]
        low, high = loss_interval(comparison, own)
        row: dict[str, Any] = {
            "strategy": name,
            kind.column: statistics.fmean(last(comparison.spent(run, cost, priced)) for run in own) / kind.unit,
            "loss": statistics.fmean(final_loss(comparison, run) for run in own),
            **{"low": low, "high": high, "seeds": len(own), "front": False, "dominated_by": "", "tied": False},
            "steps": statistics.fmean(run.ledger.steps for run in own),
        }
        rows.append(row)
    means, tied = contenders(by_seed(comparison)), ties(comparison)
    sound = [row for row in rows if row["strategy"] in means]
    by = dominating([row[kind.column] for row in sound], [row["loss"] for row in sound])
    for row, places in zip(sound, by, strict=True):
        better = [sound[place]["strategy"] for place in places]
        row |= {"front": not better, "dominated_by": better[0] if better else ""}
        row["tied"] = bool(better) and tied[row["strategy"]].issuperset(better)
    frame = pd.DataFrame(rows)
    costs = frame[kind.column]
    frame["equal_steps"] = (frame["steps"] * costs.max() / costs).where(costs > 0, math.inf)
    return Front(cost, frame, comparison.looks(), comparison.loss_title, "client" if comparison.of_clients else "node")


@dataclass(frozen=True, repr=False)
class Front:
    """Loss against cost at the end of each strategy's runs. A notebook shows it as a figure.

    A run is on the front unless another run is at least as good in both loss and cost, and better in one of them. A run
    is shown at the end of its steps: with more steps, a cheap run might have got below a more expensive one.

    Attributes:
        cost: "wire", "payload", "time" or "cost".
        frame: strategy, the cost, loss (means over the seeds), low and high (the 95 % interval of the loss by Student's
            t; with one seed, by its standard error over the validation examples), seeds, front, dominated_by, tied
            (dominated only by strategies whose losses do not differ significantly), steps, and equal_steps: the steps
            that would cost as much as the most expensive run, if a strategy's cost is proportional to its steps.
        looks: looks of the strategies. loss: name of the loss. per: whether bytes are per "node" or per "client".
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
        """Draw all runs with their intervals, dominated runs faint, and a line through the front; † marks ties.

        A loss far above all other losses is marked at the upper edge, with its value; intervals end at the edges.

        Args:
            ax: default: the axes of a new figure as wide as a column.
        """
        from vsim.figures.paper import axes_of, plain_ticks

        own, ax = ax is None, axes_of(ax, 3.3, 2.5)
        kind = COSTS[self.cost]
        known = self.frame[np.isfinite(self.frame["loss"])]
        costs = known[kind.column]
        if len(known) and costs.max() > 10 * costs.min():
            positive = costs[costs > 0]
            none_free = bool((costs > 0).all())
            ax.set_xscale("log") if none_free else ax.set_xscale("symlog", linthresh=float(positive.min()) / 3)
            plain_ticks(ax.xaxis) if none_free else ax.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        front = known[known["front"]].sort_values(kind.column)
        ax.plot(front[kind.column], front["loss"], drawstyle="steps-post", color="0.6", linewidth=1.0, zorder=1)
        low, high = within(*known[["loss", "low", "high"]].to_numpy().T) if len(known) else (0.0, 1.0)
        pad = 0.1 * (high - low) or 0.05
        for row in known.to_dict("records"):
            look, alpha = self.looks.by_name[row["strategy"]], 1.0 if row["front"] else 0.6 if row["tied"] else 0.3
            spread = [[row["loss"] - row["low"]], [row["high"] - row["loss"]]]
            is_above = row["loss"] > high
            if is_above:
                said: Any = {"xytext": (0, -6), "textcoords": "offset points", "ha": "center", "va": "top"}
                ax.annotate(
                    f"{row['loss']:.3g}", (row[kind.column], high + pad), color=look.colour, fontsize=6.5, **said
                )
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
        ax.set(xlabel=kind.label.replace("{each}", self.per), ylabel=self.loss, ylim=(low - pad, high + pad))
        styled(ax)
        if 0 < len(known) <= _NAMED:
            add_legend(ax, Looks(self.looks.by_name), {}, own, inside=False)
        return ax

    def _repr_html_(self) -> str:
        from vsim.figures.paper import image_html

        table: str = self.frame.to_html(index=False, float_format=lambda value: f"{value:.4g}", escape=True)
        return table + image_html(self.plot(), f"loss against {COSTS[self.cost].column}")

    def __repr__(self) -> str:
        return str(self.frame.to_string(index=False, float_format=lambda value: f"{value:.4g}"))


_NAMED = 12  # strategies that a legend names


def within(losses: Floats, lows: Floats, highs: Floats) -> tuple[float, float]:
    """Return the range of losses to draw, so that neither one poor run nor wide intervals flatten the front.

    A loss is outside if it exceeds the third quartile by more than three interquartile ranges and by more than 15 % of
    the median. Intervals widen the range at most threefold.

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
