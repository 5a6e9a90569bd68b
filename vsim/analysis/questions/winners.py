"""Which strategy reaches a loss first at each bandwidth and latency, and where the data cannot tell."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby, pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vsim.analysis.areas import CROWD, LETTERS, OPEN, fill, label
from vsim.analysis.asked import target
from vsim.analysis.compared import ComparedRun, Runs
from vsim.analysis.crossings import doubts, never, racers
from vsim.analysis.racing import Race
from vsim.analysis.spent import AnyCompute, forming_seconds
from vsim.analysis.summary import tuning
from vsim.analysis.tables import aligned, with_notes
from vsim.arguments import a_list
from vsim.figures.looks import Looks
from vsim.figures.style import literal, sized, wrapped
from vsim.figures.words import brief_list, quoted, size_text
from vsim.history.reached import Crossing
from vsim.network import Compute, Network
from vsim.network.links import bits_per_second, delay, rate
from vsim.network.links import seconds as delay_of
from vsim.network.timeline import duration, median_draw, seconds_on

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
# Default bandwidths in bit/s, and latencies in seconds.
BANDWIDTHS, LATENCIES = np.logspace(6, 11, 61), np.logspace(-4, 0, 41)
# About how many latencies a table shows, and how many strategies a note names.
_ROWS, _NAMED = 5, 6


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
        compute: see `vsim.timeline`; default: the comparison's. If it varies, each run takes its median draw of 32.
        collective: the algorithm of collectives, see `Network`; default: that of the comparison's network. The line of
            a server, too, is that of the comparison's network.
        stays: see `steps_to`.
    """
    loss = target(loss, stays)
    bits = ascending("bandwidths", bandwidths, BANDWIDTHS, bits_per_second)
    delays = ascending("latencies", latencies, LATENCIES, lambda name, one: delay_of(name, one, at_least=0))
    options = {} if comparison.network is None else comparison.network.options
    options |= {} if collective is None else {"collective": collective}
    grid = np.tile(bits, len(delays)), np.repeat(delays, len(bits)), options
    networks = Network.grid(grid[0], grid[1], **options)
    node, size = Compute.of(comparison.prices(None, compute)[1]), comparison.allreduce_bytes

    def until_loss(run: ComparedRun, at: Crossing, might: float) -> Floats:
        """Return the three costs (3, L, B) of a run in a `Race`, in seconds."""
        known = at.step if math.isnan(at.formed) else at.formed
        steps = [run.history.last("step") if math.isnan(step) else step for step in (at.step, known, at.first, might)]
        own = median_draw(run.ledger, node)
        reached, of_formed, first, least = seconds_on(run.ledger, *grid, own, [*map(int, steps)]).T
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
    lost, looks, measure = never(comparison, loss, stays), comparison.looks(), comparison.loss_title
    found = Winners(loss, bits, delays, times, lost, looks, note, remarks, measure)
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
        measure: the name of the loss.
    """

    loss: float
    bandwidths: Floats
    latencies: Floats
    times: Mapping[str, Mapping[int, Floats]]
    never: Mapping[str, str]
    looks: Looks
    note: str = ""
    remarks: Sequence[str] = ()
    measure: str = "loss"

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
            [
                delay(_brief(s.latency)),
                _range(s, self.bandwidths),
                s.name,
                " … ".join(dict.fromkeys(map(duration, s.seconds))),
            ]
            for s in self.stretches()
            if s.latency in chosen
        ]
        rows += [["", "", name, said] for name, said in self.never.items()]
        header = ["latency", "bandwidth", "first", f"time to loss {self.loss:g}"]
        return with_notes(aligned(rows, header, format), self.remarks, format)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the map: a colour for each strategy that is first somewhere; hatched in the second colour where two are
        tied, and grey where more are.

        The legend below the map names the areas that are too small for their names. Notes below it name the strategies
        that are nowhere first.

        Args:
            ax: default: the axes of a new figure as wide as a column.
        """
        from vsim.figures.paper import axes_of, plain_ticks

        own, ax = ax is None, axes_of(ax, 3.3, 2.5)
        bits, milliseconds = self.bandwidths, np.maximum(self.latencies, 1e-9) * 1e3
        ax.set(xscale="log", yscale="log", xlabel="bandwidth (bit/s)", ylabel="latency (ms)")
        areas = self._areas()
        ax.plot(
            bits[[0, -1]], milliseconds[[0, -1]], color="0", linestyle="none"
        )  # the map's width, even without winners
        tints = self._tints()
        for names, cells in areas.items():
            fill(ax, bits, milliseconds, cells, [tints[name] for name in names])
        plain_ticks(ax.xaxis)
        ax.xaxis.set_major_formatter(lambda value, _: rate(value).removesuffix("bit/s").replace(" ", ""))
        plain_ticks(ax.yaxis)
        sized(ax)
        width = ax.get_position().width * ax.get_figure(root=True).get_figwidth()  # type: ignore[union-attr]
        title = "\n".join(wrapped(line, int(17 * width)) for line in self._title(bool(areas)).split("\n"))
        ax.set_title(literal(title), fontsize=8, loc="left")
        notes = [wrapped(literal(one), int(LETTERS * width)) for one in self._notes(areas)]
        label(ax, bits, milliseconds, areas, tints, "\n".join(notes), own)
        return ax

    def _title(self, is_reached: bool) -> str:
        target = f"{self.loss:.1f}" if self.loss == round(self.loss, 1) else f"{self.loss:g}"
        if is_reached:
            return f"First to reach a {self.measure} of {target}{self.note}"
        seeds = " with all seeds" if any(said != "never" for said in self.never.values()) else ""
        return f"No strategy reaches a {self.measure} of {target}{seeds}{self.note}"

    def _areas(self) -> dict[tuple[str, ...], NDArray[np.bool_]]:
        """Return names → cells (L, B) where these one or two are first; () → cells where three or more are tied."""
        keys = [[None if not names else names if len(names) < CROWD else () for names in row] for row in self.first]
        shown = sorted({key for row in keys for key in row if key is not None}, key=lambda key: (not key, key))
        return {key: np.array([[own == key for own in row] for row in keys]) for key in shown}

    def _tints(self) -> dict[str, str]:
        """Return name → the colour of its area: a pale tint of its line's colour, or a paler one if that is taken."""
        from matplotlib.colors import to_hex, to_rgb

        found: dict[str, str] = {}
        for name in dict.fromkeys(name for row in self.first for names in row for name in sorted(names)):
            line = np.array(to_rgb(self.looks.by_name[name].colour))
            options = [to_hex(tuple(share * line + 1 - share)) for share in (0.45, 0.25, 0.65, 0.35)]
            found[name] = next((tint for tint in options if tint not in found.values()), options[0])
        return found

    def _notes(self, areas: Mapping[tuple[str, ...], NDArray[np.bool_]]) -> list[str]:
        """Return sentences about the strategies that no area names, and the remarks."""
        ahead = {name for row in self.first for names in row for name in names}
        named = {name for names in areas for name in names}
        crowd = [name for name in self.looks.by_name if name in ahead - named]
        behind = [name for name in self.seconds if name not in ahead and name not in self.never]
        return [
            *(
                [f"{OPEN}: three or more are tied{', among them ' + _listed(crowd) if crowd else ''}"]
                if () in areas
                else []
            ),
            *([f"nowhere first: {_listed(behind)}"] if behind else []),
            *missed(self.never),
            *self.remarks,
        ]

    def _repr_html_(self) -> str:
        from vsim.figures.paper import image_html

        return image_html(self.plot(), f"which strategy reaches loss {self.loss:g} first, over bandwidth and latency")

    def __repr__(self) -> str:
        return self.table()


def _range(stretch: Stretch, bandwidths: Floats) -> str:
    low, high = bool(stretch.low > bandwidths[0]), bool(stretch.high < bandwidths[-1])
    texts = [f"from {rate(_brief(stretch.low))}" if low else "", f"to {rate(_brief(stretch.high))}" if high else ""]
    return " ".join(filter(None, texts)) or "any"


def _brief(value: float) -> float:
    """Round a number to two digits, as between the points of a grid no more are known; keep three if it has no others.

    >>> _brief(0.0794328), _brief(0.125)
    (0.079, 0.125)
    """
    return value if value == float(f"{value:.3g}") else float(f"{value:.2g}")


def missed(never: Mapping[str, str]) -> list[str]:
    """Return sentences about the strategies that do not reach the loss with all seeds.

    >>> missed({"lost": "never", "sometimes": "1 of 2 runs", "alone": "never"})
    ['not reached by lost, alone', 'reached by only 1 of 2 runs of sometimes']
    """
    lost = [name for name, said in never.items() if said == "never"]
    partly = [f"{said} of {name}" for name, said in zip(quoted(never).values(), never.values(), strict=True)]
    partly = [text for text in partly if not text.startswith("never")]
    return [
        *([f"not reached by {_listed(lost)}"] if lost else []),
        *([f"reached by only {brief_list(partly, _NAMED)}"] if partly else []),
    ]


def _listed(names: Sequence[str]) -> str:
    return brief_list(list(quoted(names).values()), _NAMED)


def ascending(name: str, given: Sequence[float | str] | None, default: Floats, parse) -> Floats:  # type: ignore[no-untyped-def]
    """Return rates or delays, given as numbers or text, in ascending order; raise a ValueError if there are none."""
    if given is None:
        return default
    return np.array(sorted({parse(name, one) for one in a_list(name, given)}))
