"""Which strategy reaches a loss first, over bandwidth and latency."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vsim.figures.style import STYLE, literal, sized
from vsim.network.links import delay, rate
from vsim.network.timeline import duration
from vsim.records.plots import Looks
from vsim.records.tables import aligned

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
# bit/s and seconds, where they are not given.
BANDWIDTHS, LATENCIES = np.logspace(6, 11, 61), np.logspace(-4, 0, 41)
# A table has about so many rows.
_ROWS = 5
# So many of those that do not reach the loss are named below the map.
_NAMED = 6


class Stretch(NamedTuple):
    """At one latency, from one bandwidth to the next: who is first there, and its seconds at both ends."""

    latency: float
    low: float
    high: float
    name: str
    seconds: tuple[float, float]


@dataclass(frozen=True, repr=False)
class Winners:
    """Who reaches a loss first, on every network of a grid.

    Attributes:
        loss: the target.
        bandwidths: (B,) in bit/s, ascending. latencies: (L,) in seconds, ascending.
        seconds: name → (L, B), when the strategy has the loss, in the mean of its seeds; of those that all of their
            seeds reach it.
        never: name → what is said of a strategy that does not.
        looks: of the strategies, by name.
    """

    loss: float
    bandwidths: Floats
    latencies: Floats
    seconds: Mapping[str, Floats]
    never: Mapping[str, str]
    looks: Looks

    @property
    def first(self) -> list[list[str]]:
        """(L, B): the name of the first; "" if nobody reaches the loss."""
        if not self.seconds:
            return [[""] * len(self.bandwidths) for _ in self.latencies]
        names = list(self.seconds)
        return [[names[i] for i in row] for row in np.argmin(list(self.seconds.values()), axis=0)]

    def stretches(self) -> list[Stretch]:
        """Return at every latency who is first from which bandwidth to which; between two of the grid, where equal.

        That is where the lines of both, in logarithms of bandwidth and seconds, cross.
        """
        found = []
        for i, row in enumerate(self.first if self.seconds else []):
            ends = [list(columns) for _, columns in groupby(range(len(row)), row.__getitem__)]
            edges = [self._crossing(i, one[-1], row[one[-1]], row[two[0]]) for one, two in pairwise(ends)]
            lows, highs = [self.bandwidths[0], *edges], [*edges, self.bandwidths[-1]]
            for own, low, high in zip(ends, lows, highs, strict=True):
                name = row[own[0]]
                took = self.seconds[name][i, own[0]], self.seconds[name][i, own[-1]]
                found.append(Stretch(float(self.latencies[i]), float(low), float(high), name, took))
        return found

    def _crossing(self, i: int, j: int, one: str, other: str) -> float:
        """The bandwidth between columns j and j + 1 at which two strategies are as fast."""
        ahead, behind = (np.log(self.seconds[name][i, j : j + 2]) for name in (one, other))
        gap = behind - ahead  # (2,), from above 0 to below
        share = gap[0] / (gap[0] - gap[1]) if gap[0] != gap[1] else 0.5
        low, high = np.log(self.bandwidths[j : j + 2])
        return math.exp(low + share * (high - low))

    def table(self, format: str = "simple") -> str:
        """Return as text, at some of the latencies, who is first from which bandwidth to which, and in what time."""
        chosen = self.latencies[:: -(-len(self.latencies) // _ROWS)]
        rows = [
            [delay(s.latency), _range(s, self.bandwidths), s.name, " … ".join(dict.fromkeys(map(duration, s.seconds)))]
            for s in self.stretches()
            if s.latency in chosen
        ]
        rows += [["", "", name, said] for name, said in self.never.items()]
        header = ["latency", "bandwidth", "first", f"time to loss {self.loss:g}"]
        return aligned(rows, header, format)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the map: a colour for each strategy that is first somewhere, its name, and lines where two are equal.

        Args:
            ax: where; default a new figure as wide as a column.
        """
        from matplotlib.colors import ListedColormap

        from vsim.figures.paper import new_figure, plain_ticks

        if ax is None:
            ax = new_figure(3.3, 2.7).subplots()
        bits, milliseconds = self.bandwidths, np.maximum(self.latencies, 1e-9) * 1e3
        ax.set(xscale="log", yscale="log", xlabel="bandwidth (bit/s)", ylabel="latency (ms)")
        first = np.array(self.first)
        shown = [name for name in self.seconds if (first == name).any()]
        if shown:
            index = np.vectorize(shown.index)(first)
            colours = [self.looks.by_name[name].colour for name in shown]
            kind: Any = {"cmap": ListedColormap(colours), "vmin": -0.5, "vmax": len(shown) - 0.5, "alpha": 0.45}
            ax.pcolormesh(bits, milliseconds, index, shading="nearest", rasterized=True, **kind)
        else:  # as wide as the map would be
            ax.plot(bits[[0, -1]], milliseconds[[0, -1]], linestyle="none")
        for i, name in enumerate(shown):
            own = index == i
            if len(shown) > 1 and min(own.shape) > 1:
                ahead = np.min([self.seconds[other] for other in self.seconds if other != name], axis=0)
                gap = np.log(ahead) - np.log(self.seconds[name])  # above 0 where it is first
                ax.contour(bits, milliseconds, gap, levels=[0.0], colors="white", linewidths=1.2)
            y, x = _inside(own)
            ax.text(
                bits[x],
                milliseconds[y],
                literal(name).replace(", ", ",\n"),
                ha="center",
                va="center",
                fontsize=STYLE["legend.fontsize"],
                clip_on=True,
            )
        plain_ticks(ax.xaxis)
        ax.xaxis.set_major_formatter(lambda value, _: rate(value).removesuffix("bit/s").replace(" ", ""))
        plain_ticks(ax.yaxis)
        sized(ax)
        ax.set_title(
            f"first to loss {self.loss:g}" if shown else f"nobody reaches {self.loss:g}", fontsize=8, loc="left"
        )
        if self.never:
            names = [f"{name} ({what})" for name, what in self.never.items()]
            more = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
            said = literal(f"not reached by {', '.join(names[:_NAMED])}{more}")
            below: Any = {"xytext": (0, -32), "xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
            ax.annotate(textwrap.fill(said, 55), (0, 0), fontsize=7, color="0.4", **below)
        return ax

    def __repr__(self) -> str:
        return self.table()


def _range(stretch: Stretch, bandwidths: Floats) -> str:
    low, high = bool(stretch.low > bandwidths[0]), bool(stretch.high < bandwidths[-1])
    texts = [f"from {rate(stretch.low)}" if low else "", f"to {rate(stretch.high)}" if high else ""]
    return " ".join(filter(None, texts)) or "any"


def _inside(region: NDArray[np.bool_]) -> tuple[int, int]:
    """Return the cell of a region that is furthest from its edge, in cells: where a name has most room."""
    framed = np.pad(region, 1)
    depth = np.zeros(framed.shape, dtype=int)
    while framed.any():
        depth += framed
        inner = framed.copy()
        for axis in (0, 1):
            inner &= np.roll(framed, 1, axis) & np.roll(framed, -1, axis)
        framed = inner
    deepest = np.argwhere(depth == depth.max())
    middle = deepest[np.abs(deepest - deepest.mean(0)).sum(1).argmin()]
    return int(middle[0]) - 1, int(middle[1]) - 1


def ascending(name: str, given: Sequence[float | str] | None, default: Floats, parse) -> Floats:  # type: ignore[no-untyped-def]
    """Return rates or delays, given as numbers or text, in their order; raise a ValueError if there are none."""
    if given is None:
        return default
    if isinstance(given, str) or not hasattr(given, "__len__"):
        raise TypeError(f"{name} must be a list, got {given!r}")
    values = sorted({parse(name, one.item() if hasattr(one, "item") else one) for one in given})
    if not values:
        raise ValueError(f"{name} must have at least one value")
    return np.array(values)
