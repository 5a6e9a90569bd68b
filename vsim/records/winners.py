"""Which strategy reaches a loss first at each bandwidth and latency, and where the data cannot tell."""

from __future__ import annotations

import math
import textwrap
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import a_list, true_or_false
from vsim.figures.style import STYLE, literal, sized
from vsim.network import Compute, Network
from vsim.network.links import bits_per_second, delay, rate
from vsim.network.links import seconds as delay_of
from vsim.network.timeline import duration, seconds_on
from vsim.records.compared import ComparedRun, Runs
from vsim.records.crossings import doubts, never, racers
from vsim.records.plots import Looks
from vsim.records.spent import AnyCompute, forming_seconds
from vsim.records.statistics import Crossing, shared_seeds
from vsim.records.summary import tuning
from vsim.records.tables import aligned, quoted, size_text, with_notes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
# Default bandwidths in bit/s, and latencies in seconds.
BANDWIDTHS, LATENCIES = np.logspace(6, 11, 61), np.logspace(-4, 0, 41)
# About how many latencies a table shows, and how many of the strategies that do not reach the loss a map names.
_ROWS, _NAMED = 5, 6
# The smallest share of the map for which a region gets a label next to the map; and the most such labels.
_SMALL, _BESIDE = 0.004, 4
# The most names in the label of a tie, and the most letters of a name.
_TIED, _LONG = 4, 24
# Costs within this factor are equal but for rounding.
_EQUAL = 1 + 1e-9


def winners(
    comparison: Runs,
    loss: float,
    bandwidths: Sequence[float | str] | None = None,
    latencies: Sequence[float | str] | None = None,
    compute: AnyCompute = None,
    *,
    collective: str | None = None,
    stays: bool = False,
) -> Winners:
    """Return which strategy reaches a loss first at each bandwidth and latency; a notebook shows the result as a map.

    Cells name all tied strategies; see `Race`. A warning says if, on more than a tenth of the map, strategies are tied
    only because validation is rare, which a smaller `val_interval` would settle.

    Args:
        loss: the target. A strategy's time is the mean over its seeds, all of which must reach the loss.
        bandwidths: in bit/s or as text; default: 1 Mbit/s to 100 Gbit/s.
        latencies: in seconds or as text; default: 0.1 ms to 1 s.
        compute: see `vsim.timeline`; default: the comparison's.
        collective: the algorithm of collectives, see `Network`; default: that of the comparison's network. The line of
            a server, too, is that of the comparison's network.
        stays: see `steps_to`.
    """
    true_or_false("stays", stays)
    bits = ascending("bandwidths", bandwidths, BANDWIDTHS, bits_per_second)
    delays = ascending("latencies", latencies, LATENCIES, lambda name, one: delay_of(name, one, at_least=0))
    options = {} if comparison.network is None else comparison.network.options
    options |= {} if collective is None else {"collective": collective}
    grid = np.tile(bits, len(delays)), np.repeat(delays, len(bits)), options
    networks = Network.grid(grid[0], grid[1], **options)
    node, size = Compute.of(comparison.compute if compute is None else compute), comparison.allreduce_bytes

    def until_loss(run: ComparedRun, at: Crossing, might: float) -> Floats:
        """Return the three costs (3, L, B) of a run in a `Race`, in seconds."""
        known = at.step if math.isnan(at.formed) else at.formed
        steps = [run.history.last("step") if math.isnan(step) else step for step in (at.step, known, at.first, might)]
        reached, of_formed, first, least = seconds_on(run.ledger, *grid, node, [*map(int, steps)]).T
        if math.isnan(at.step):
            reached = first = np.full_like(least, math.inf)
            least = reached if math.isnan(might) else least
        else:
            if at.step != at.formed:  # no node has the model
                reached = reached + forming_seconds(run.history, networks, size)[:, 0]
            if not math.isnan(at.formed):
                reached = np.minimum(reached, of_formed)
            first, least = reached if at.first == at.step else first, reached if might == at.step else least
        return np.reshape([reached, first, least], (3, len(delays), len(bits)))

    times = {
        name: {run.seed: until_loss(run, at, might) for run, at, might in own}
        for name, own in racers(comparison, loss, stays).items()
    }
    note = ", to stay" if stays else ""
    if comparison.measured_bytes is not None:
        note += f", {size_text(size)} of weights\n(losses of {size_text(comparison.measured_bytes)})"
    remarks = [*doubts(comparison, stays), *tuning(comparison)]
    found = Winners(loss, bits, delays, times, never(comparison, loss, stays), comparison.looks(), note, remarks)
    if found.left_open > 0.1:
        warnings.warn(
            f"validation is too rare to tell which strategy is first to loss {loss:g} on {found.left_open:.0%} "
            "of the map; a smaller val_interval would settle it",
            stacklevel=2,
        )
    return found


class Stretch(NamedTuple):
    """The first strategy at one latency in a range of bandwidths, and its seconds at both ends of the range.

    If strategies are tied, `name` joins their names with "or", and the seconds are those of the fastest.
    """

    latency: float
    low: float
    high: float
    name: str
    seconds: tuple[float, float]


@dataclass(frozen=True)
class Race:
    """The strategy that reaches a loss at the least cost, and strategies tied with it, in each cell (say, a network).

    The first strategy has the least mean cost over the seeds common to all strategies that reach the loss with all
    seeds. Another strategy is tied with the first

    - if its least possible cost, given rare validation, is at most the first's,
    - if its least possible cost, given noise, is at most the first's, or
    - if 0 is in the interval of the paired difference between the two, by Bonferroni over all pairs of strategies, as
      the data chose the first. Equal strategies then count as different with a chance of at most 5 %.

    Attributes:
        costs: name → seed → (3, …) three costs for each cell: until the loss is measured, infinite if never; the least
            possible cost between measurements; and the least possible cost within noise, which is the cost of the whole
            run if the run ended above the loss.
    """

    costs: Mapping[str, Mapping[int, Floats]]

    @cached_property
    def means(self) -> dict[str, Floats]:
        """Name → mean costs (3, …) over the seeds by which strategies are compared; names in alphabetical order."""
        reach = {name for name, own in self.costs.items() if all(np.isfinite(cost[0]).all() for cost in own.values())}
        shared = shared_seeds(self.costs[name] for name in reach)
        return {
            name: np.mean([own[seed] for seed in (shared if name in reach and shared else own)], axis=0)
            for name, own in sorted(self.costs.items())
        }

    @cached_property
    def first(self) -> NDArray[np.int64]:
        """For each cell (…), the index in `means` of the first strategy."""
        return np.argmin([own[0] for own in self.means.values()], axis=0)

    @cached_property
    def _tied(self) -> tuple[NDArray[np.bool_], NDArray[np.bool_]]:
        """Return two arrays (M, …): whether noise ties a strategy with the first, and whether rare validation does."""
        names = list(self.means)
        lowest = np.min([own[0] for own in self.means.values()], axis=0)
        by_noise, by_validation = np.zeros((2, len(names), *self.first.shape), dtype=bool)
        for i, j in np.ndindex(len(names), len(names)):
            here = self.means[names[i]][0] <= lowest * _EQUAL  # the first, and its equals
            if i == j or not here.any():
                continue
            latest, (_, earliest, least) = self.means[names[i]][0, here] * _EQUAL, self.means[names[j]][:, here]
            one, other = self.costs[names[i]], self.costs[names[j]]
            apart = [other[seed][0, here] - one[seed][0, here] for seed in shared_seeds([one, other])]
            by_validation[j, here] |= earliest <= latest
            by_noise[j, here] |= (least <= latest) | _seeds_cannot_tell(apart, math.comb(len(names), 2))
        return by_noise, by_validation

    @property
    def ahead(self) -> NDArray[np.bool_]:
        """Array (M, …): whether each of the M strategies in `means` is a cell's first strategy, or tied with it."""
        places = np.arange(len(self.means)).reshape(-1, *[1] * self.first.ndim)
        return np.logical_or(*self._tied) | (self.first == places)

    @property
    def left_open(self) -> NDArray[np.bool_]:
        """Array (M, …): whether rare validation alone, without noise, ties a strategy with a cell's first strategy."""
        by_noise, by_validation = self._tied
        mean = np.array([own[0] for own in self.means.values()])
        return by_validation & ~by_noise & (mean > mean.min(0) * _EQUAL)


def _seeds_cannot_tell(apart: Sequence[Floats], tests: int) -> NDArray[np.bool_] | bool:
    """Return whether 0 is in the interval of paired differences (n, cells), whose means are at least 0."""
    if len(apart) < 2 or not np.isfinite(apart).all():
        return False
    from scipy import stats

    own = np.array(apart)
    error = own.std(0, ddof=1) / math.sqrt(len(own))
    return np.asarray(own.mean(0) <= stats.t.isf(0.025 / tests, len(own) - 1) * error)


@dataclass(frozen=True, repr=False)
class Winners:
    """The strategy that reaches a loss first, on every network of a grid. A notebook shows it as a map.

    Only strategies that reach the loss with all seeds are first. Another strategy is tied with the first if validation
    is too coarse, or the seeds too few, to tell which of the two is first; see `Race`.

    Attributes:
        loss: the target.
        bandwidths: (B,) in bit/s, ascending. latencies: (L,) in seconds, ascending.
        times: name → seed → (3, L, B) seconds; see `Race`. Empty if no strategy reaches the loss with all seeds.
        never: name → text about a strategy that does not reach the loss with all seeds.
        looks: looks of the strategies. note: text that is added to the title. remarks: sentences below map and table.
    """

    loss: float
    bandwidths: Floats
    latencies: Floats
    times: Mapping[str, Mapping[int, Floats]]
    never: Mapping[str, str]
    looks: Looks
    note: str = ""
    remarks: Sequence[str] = ()

    @cached_property
    def _race(self) -> Race:
        return Race(self.times)

    @cached_property
    def seconds(self) -> dict[str, Floats]:
        """Name → mean seconds (L, B) over the seeds, by alphabet; infinite if a seed never reaches the loss."""
        return {name: own[0] for name, own in self._race.means.items()}

    @cached_property
    def first(self) -> list[list[tuple[str, ...]]]:
        """The cells (L, B): names of the first strategy and of all tied with it; () if none reaches the loss."""
        if not self.times:
            return [[()] * len(self.bandwidths) for _ in self.latencies]
        return [
            [tuple(name for name, own in zip(self.seconds, cell, strict=True) if own) for cell in row]
            for row in np.moveaxis(self._race.ahead, 0, -1).tolist()
        ]

    @property
    def left_open(self) -> float:
        """The share of the map where only rare validation ties strategies; a smaller val_interval would settle it."""
        return float(self._race.left_open.any(0).mean()) if self.times else 0.0

    def stretches(self) -> list[Stretch]:
        """Return, for every latency, the ranges of bandwidth with the same first strategy.

        Two strategies change places where their lines, in logarithms of bandwidth and seconds, cross; a tie begins and
        ends between two bandwidths of the grid.
        """
        found = []
        fastest = np.min(list(self.seconds.values()), axis=0) if self.seconds else np.empty((0, 0))
        for i, row in enumerate(self.first if self.seconds else []):
            ends = [list(columns) for _, columns in groupby(range(len(row)), row.__getitem__)]
            edges = [self._crossing(i, one[-1], row[one[-1]], row[two[0]]) for one, two in pairwise(ends)]
            lows, highs = [self.bandwidths[0], *edges], [*edges, self.bandwidths[-1]]
            for own, low, high in zip(ends, lows, highs, strict=True):
                took = float(fastest[i, own[0]]), float(fastest[i, own[-1]])
                name = " or ".join(row[own[0]])
                found.append(Stretch(float(self.latencies[i]), float(low), float(high), name, took))
        return found

    def _crossing(self, i: int, j: int, one: tuple[str, ...], other: tuple[str, ...]) -> float:
        """Return the bandwidth between columns j and j + 1 at which the first strategies change."""
        low, high = np.log(self.bandwidths[j : j + 2])
        share = 0.5
        if len(one) == len(other) == 1:
            ahead, behind = (np.log(self.seconds[name][i, j : j + 2]) for (name,) in (one, other))
            gap = behind - ahead  # (2,), from above 0 to below
            share = gap[0] / (gap[0] - gap[1]) if gap[0] != gap[1] else 0.5
        return math.exp(low + share * (high - low))

    def table(self, format: str = "simple") -> str:
        """Return a text table: for some latencies, the first strategy in each range of bandwidths, and its time."""
        chosen = self.latencies[:: -(-len(self.latencies) // _ROWS)]
        rows = [
            [delay(s.latency), _range(s, self.bandwidths), s.name, " … ".join(dict.fromkeys(map(duration, s.seconds)))]
            for s in self.stretches()
            if s.latency in chosen
        ]
        rows += [["", "", name, said] for name, said in self.never.items()]
        header = ["latency", "bandwidth", "first", f"time to loss {self.loss:g}"]
        return with_notes(aligned(rows, header, format), self.remarks, format)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the map: a colour for each strategy that is first somewhere; hatched in both colours where two are tied.

        A label that does not fit into its region stands next to the map, with a line to the region.

        Args:
            ax: default: the axes of a new figure as wide as a column.
        """
        from vsim.figures.paper import axes_of, plain_ticks

        ax = axes_of(ax, 3.3, 2.7)
        bits, milliseconds = self.bandwidths, np.maximum(self.latencies, 1e-9) * 1e3
        ax.set(xscale="log", yscale="log", xlabel="bandwidth (bit/s)", ylabel="latency (ms)")
        shown = sorted({names for row in self.first for names in row if names})
        index = np.array([[shown.index(names) if names else -1 for names in row] for row in self.first])
        ax.plot(bits[[0, -1]], milliseconds[[0, -1]], linestyle="none")  # the map's width, even without winners
        for i, names in enumerate(shown):
            self._fill(ax, bits, milliseconds, index == i, names)
        plain_ticks(ax.xaxis)
        ax.xaxis.set_major_formatter(lambda value, _: rate(value).removesuffix("bit/s").replace(" ", ""))
        plain_ticks(ax.yaxis)
        sized(ax)
        some = any(said != "never" for said in self.never.values())
        none = f"no strategy reaches {self.loss:g}{' with all seeds' if some else ''}"
        title = f"first to loss {self.loss:g}" if shown else none
        ax.set_title(literal(f"{title}{self.note}"), fontsize=8, loc="left")
        self._say_below(ax)
        _label(ax, bits, milliseconds, {names: index == i for i, names in enumerate(shown)})
        return ax

    def _fill(self, ax: Axes, bits: Floats, milliseconds: Floats, own: NDArray[np.bool_], names: Sequence[str]) -> None:
        from matplotlib.colors import ListedColormap, to_rgb

        colours = [tuple(0.45 * c + 0.55 for c in to_rgb(self.looks.by_name[name].colour)) for name in names]
        cells = np.ma.masked_where(~own, np.zeros(own.shape))
        kind: Any = {"shading": "nearest", "rasterized": True, "vmin": 0, "vmax": 1}
        ax.pcolormesh(bits, milliseconds, cells, cmap=ListedColormap(colours[:1]), **kind)
        if min(own.shape) < 2:
            return
        # Extend hatches to the edges of the outer cells, not only to their centres.
        level = np.pad(own.astype(float), 1, mode="edge")
        x, y = (
            np.concatenate([[v[0] ** 1.5 / v[1] ** 0.5], v, [v[-1] ** 1.5 / v[-2] ** 0.5]])
            for v in (bits, milliseconds)
        )
        for colour, hatch in zip(colours[1:], ("//////", "\\\\\\\\\\\\", "......"), strict=False):
            striped = ax.contourf(x, y, level, levels=[0.5, 1.5], colors="none", hatches=[hatch])
            striped.set(edgecolor=colour, linewidth=0.0)
        if not own.all():
            ax.contour(x, y, level, levels=[0.5], colors="white", linewidths=1.0)

    def _say_below(self, ax: Axes) -> None:
        names = [f"{name} ({self.never[own]})" for own, name in quoted(self.never).items()]
        more = f" and {len(names) - _NAMED} others" if len(names) > _NAMED else ""
        never = [textwrap.fill(literal(f"not reached by {', '.join(names[:_NAMED])}{more}"), 55)] if names else []
        if said := [*never, *(textwrap.fill(literal(one), 42) for one in self.remarks)]:
            below: Any = {"xytext": (0, -32), "xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
            ax.annotate("\n".join(said), (0, 0), fontsize=7, color="0.4", **below)

    def _repr_html_(self) -> str:
        from vsim.figures.paper import image_html

        return image_html(self.plot(), f"which strategy reaches loss {self.loss:g} first, over bandwidth and latency")

    def __repr__(self) -> str:
        return self.table()


def _range(stretch: Stretch, bandwidths: Floats) -> str:
    low, high = bool(stretch.low > bandwidths[0]), bool(stretch.high < bandwidths[-1])
    texts = [f"from {rate(stretch.low)}" if low else "", f"to {rate(stretch.high)}" if high else ""]
    return " ".join(filter(None, texts)) or "any"


# Labels of regions ----------------------------------------------------------------------------------------------------


def _label(ax: Axes, x: Floats, y: Floats, regions: Mapping[tuple[str, ...], NDArray[np.bool_]]) -> None:
    """Name regions of a map: inside where the text fits, otherwise next to the map with a line to the region.

    Args:
        x, y: positions (B,) and (L,) of the cells, in data coordinates. regions: names → the region's cells (L, B).
    """
    from vsim.figures.paper import fit

    depths = {names: _depth(own) for names, own in regions.items()}
    outside: list[tuple[str, ...]] = []
    while True:  # a label next to the map makes the map narrower
        placed = _outside(ax, x, y, {names: depths[names] for names in outside})
        fit(ax)
        ax.get_figure(root=True).draw_without_rendering()  # type: ignore[union-attr]
        missing = []
        for names, own in regions.items():
            if names not in outside:
                fitted = _inside(ax, x, y, own, depths[names], names)
                placed += [fitted] if fitted is not None else []
                missing += [names] if fitted is None and own.mean() >= _SMALL else []
        missing = sorted(missing, key=lambda names: -regions[names].sum())[: max(0, _BESIDE - len(outside))]
        if not missing:
            return
        outside += missing
        for text in placed:
            text.remove()


def _texts(names: tuple[str, ...]) -> list[str]:
    """Return ways to break the names of a region into lines, the widest first; see `_short` for many names."""
    names = _short(names)
    whole = literal(" or ".join(names))
    lines = literal(" or\n".join(names))
    return list(
        dict.fromkeys([whole, lines, lines.replace(", ", ",\n"), lines.replace(" ", "\n").replace("\nor", " or")])
    )


def _short(names: tuple[str, ...]) -> tuple[str, ...]:
    """Return tied names for a label, and cut long ones; of more than four, the first three and the number of others."""
    few = names if len(names) <= _TIED else (*names[: _TIED - 1], f"{len(names) - _TIED + 1} others")
    return tuple(name if len(name) <= _LONG else f"{name[: _LONG - 1]}…" for name in few)


def _inside(
    ax: Axes, x: Floats, y: Floats, own: NDArray[np.bool_], depth: NDArray[np.int64], names: tuple[str, ...]
) -> Any:
    """Write the names into their region, as deep inside as they fit; return the text, None if they do not fit."""
    columns = ax.transData.transform(np.stack([x, np.full(len(x), y[0])], 1))[:, 0]
    rows = ax.transData.transform(np.stack([np.full(len(y), x[0]), y], 1))[:, 1]
    frame = ax.get_window_extent()
    style: Any = {"ha": "center", "va": "center", "fontsize": STYLE["legend.fontsize"]}
    deepest = np.argwhere(depth > 0)[np.argsort(-depth[depth > 0], kind="stable")][:200]
    for said in _texts(names):
        if own.all():
            text = ax.text(0.5, 0.5, said, transform=ax.transAxes, clip_on=True, **style)
            if text.get_window_extent().width <= frame.width or said == _texts(names)[-1]:
                return text
            text.remove()
            continue
        text = ax.text(x[0], y[0], said, **style)
        box = text.get_window_extent()
        wide, high = box.width / 2 + 2, box.height / 2 + 1
        for i, j in deepest:
            across, up = np.abs(columns - columns[j]) <= wide, np.abs(rows - rows[i]) <= high
            edges = columns[j] - wide, columns[j] + wide, rows[i] - high, rows[i] + high
            in_frame = frame.x0 <= edges[0] and edges[1] <= frame.x1 and frame.y0 <= edges[2] and edges[3] <= frame.y1
            if in_frame and own[np.ix_(up, across)].all():
                text.set_position((x[j], y[i]))
                return text
        text.remove()
    return None


def _outside(ax: Axes, x: Floats, y: Floats, depths: Mapping[tuple[str, ...], NDArray[np.int64]]) -> list[Any]:
    """Write names to the right of the map, one below the other, with lines to the deepest cells of their regions."""
    from matplotlib.text import Text

    line: Any = {"arrowstyle": "-", "color": "0.2", "linewidth": 0.6, "shrinkA": 1, "shrinkB": 0, "relpos": (0, 0.5)}
    frame = ax.get_window_extent()
    labels: list[tuple[float, float, Any]] = []  # heights of region and text (shares of the axes), the text
    for names, depth in sorted(depths.items(), key=lambda one: -int((one[1] > 0).sum())):  # the largest first
        deepest = np.argwhere(depth == depth.max())
        i, j = deepest[deepest[:, 1].argmax()]  # the nearest to the text, so that the line crosses least of the map
        lines = [" or ".join(names)] if len(names) <= 2 else _short(names)
        said = literal("\n".join(textwrap.fill(line, 16, break_long_words=False) for line in lines))
        where: Any = {"xytext": (1.05, 0.5), "textcoords": "axes fraction", "va": "top"}
        text = ax.annotate(said, (x[j], y[i]), fontsize=6.5, arrowprops=line, **where)
        height = Text.get_window_extent(text).height / frame.height + 0.05  # without the line to the region
        if sum(own for _, own, _ in labels) + height > 1.1:
            text.remove()
            continue
        row = ax.transData.transform((x[j], y[i]))[1]
        labels.append(((row - frame.y0) / frame.height, height, text))
    top, below = 1.02, sum(height for _, height, _ in labels)
    for row, height, text in sorted(labels, key=lambda label: -label[0]):
        top = min(top, max(row + height / 2, below - 0.05))
        text.set_position((1.05, top))
        top, below = top - height, below - height
    return [text for _, _, text in labels]


def _depth(region: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Return how far every cell is from the edge of its region, in cells; 0 outside."""
    framed = np.pad(region, 1)
    depth = np.zeros(framed.shape, dtype=np.int64)
    while framed.any():
        depth += framed
        inner = framed.copy()
        for axis in (0, 1):
            inner &= np.roll(framed, 1, axis) & np.roll(framed, -1, axis)
        framed = inner
    return depth[1:-1, 1:-1]


def ascending(name: str, given: Sequence[float | str] | None, default: Floats, parse) -> Floats:  # type: ignore[no-untyped-def]
    """Return rates or delays, given as numbers or text, in ascending order; raise a ValueError if there are none."""
    if given is None:
        return default
    return np.array(sorted({parse(name, one) for one in a_list(name, given)}))
