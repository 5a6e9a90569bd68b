"""Figures: loss against step, bytes and time, and over two settings.

Sizes suit print: a figure of two panels is as wide as a page of text. A name has the same colour in every figure of a
comparison. A reserved name has it in every comparison, too; any other name, where no other has the same by its hash.
"""

from __future__ import annotations

import math
import re
import textwrap
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import a_text, one_of, real_number, true_or_false, whole_number
from vsim.figures.style import STYLE, literal, sized, styled
from vsim.network import Compute, Network
from vsim.records.tables import quoted

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vsim.figures.paper import PaperFigure

    Runs = Mapping[str, Any]  # name → a `History`, or one for each seed

History: TypeAlias = Any  # the module of `History` imports this one

# Okabe and Ito's palette, distinct for every kind of colour vision. Its yellow is left out, because it is too pale for
# a line. The purple at the end is added; it differs more from all other colours than these do from each other.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7", "#A020F0")
MARKERS = ("o", "s", "^", "D", "v", "<", ">", "p", "h")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)), (0, (9, 2)))
# Names with a reserved look, so that no two of them share one; only letters and digits are compared.
_KNOWN = ("allreduce", "fedavg", "diloco", "sparta", "spartadiloco", "demo", "alone", "streamingdiloco")
# Added to other names before they are hashed: chosen so that few of vsim's strategies share a colour.
_SALT = 663
# With more lines than this, a legend lists families, not lines.
MANY = 12
# A legend names at most this many values of one setting, evenly spaced among all.
_KEYS = 8

# A setting in a name, such as "H=5" or "inner_optim=SGD(lr=0.1, momentum=0.9)".
SETTING = re.compile(r"(\w+)=([^,(]*(?:\([^)]*\))?)")


@dataclass(frozen=True)
class Look:
    """The look of a line. With dash="none", only markers are drawn; with marker="", only the line."""

    colour: str
    dash: Any = "-"
    marker: str = "o"


@dataclass(frozen=True)
class Looks:
    """The looks of several lines.

    Attributes:
        by_name: name → look.
        key: the content of a legend: title → (text, look) of each line below it; empty: the legend lists the names.
    """

    by_name: Mapping[str, Look]
    key: Mapping[str, Sequence[tuple[str, Look]]] = field(default_factory=dict)


def looks_of(names: Sequence[str], shown: Sequence[str] | None = None) -> Looks:
    """Return looks for names: a colour each, as long as there are enough.

    A reserved name always has the same colour. So has any other name, unless it shares that with another of `names`.
    Where colours are too few for all of `names`, those in `shown`, which are drawn together, still differ.

    Names that differ only in settings, or that begin with the same reserved name, are a family and share a colour, in
    tints. If all names are of one family, the settings in the names decide the look, see `looks_by`.

    >>> [looks_of(names).by_name["DiLoCo, small"].colour for names in (["DiLoCo, small"], ["mine", "DiLoCo, small"])]
    ['#56B4E9', '#56B4E9']
    >>> [text for text, _ in looks_of(["AllReduce", *(f"DiLoCo H={H}, lr=0.1" for H in range(20))]).key[""]]
    ['AllReduce', 'DiLoCo (20)']
    """
    families: dict[str, list[str]] = {}
    for name in names:
        families.setdefault(_family(name), []).append(name)
    few = len(names) <= MANY
    if len(families) == 1 and len(names) > 1:
        settings = {name: dict(SETTING.findall(name)) for name in names}
        if not few and len({tuple(own) for own in settings.values()}) == 1:
            return looks_by(settings, list(settings[names[0]]), names)
        if few:
            return Looks({name: _look(i, i, i) for i, name in enumerate(names)})
    looks, key = {}, []
    for family, places in _places(families, {_family(name) for name in (names if shown is None else shown)}).items():
        members = families[family]
        first = _look(*places)
        key.append((family if len(members) == 1 else f"{family or 'runs'} ({len(members)})", first))
        for j, name in enumerate(members):
            own = _look(*(place + j for place in places))
            looks[name] = Look(
                _lighter(first.colour, 0.65 * j / len(members)), own.dash, own.marker if few else first.marker
            )
    return Looks(looks, {} if few else {"": key})


def _family(name: str) -> str:
    """Return the strategy in a name: a reserved name that it is or begins with, else the name before its settings.

    >>> [_family(name) for name in ("DiLoCo H=5", "AllReduce, all", "SPARTA + DiLoCo", "diloco:H=5", "mine, H = 5")]
    ['DiLoCo', 'AllReduce', 'SPARTA + DiLoCo', 'diloco', 'mine']
    """
    family = re.split(r"[\s,:]*\w+\s*=", name)[0]
    first = re.split(r"[^\w-]", family)[0]
    return family if _plain(family) in _KNOWN or _plain(first) not in _KNOWN else first


def _plain(name: str) -> str:
    plain = re.sub(r"[^a-z0-9]", "", name.lower())
    return "streamingdiloco" if plain == "streaming" else plain


def _places(families: Iterable[str], shown: Collection[str]) -> dict[str, tuple[int, int, int]]:
    """Return family → numbers of its colour, dash and marker: reserved for known names, else from a hash of the name.

    Other names get a dash that no family has, if one is left, and never the dash of a family with the same colour.
    """
    words = {family: _plain(family) for family in families}
    order = sorted(words, key=lambda one: (words[one] not in _KNOWN, one))
    codes = {family: zlib.crc32(f"{_SALT}{words[family]}".encode()) for family in order}
    colours = {one: _KNOWN.index(words[one]) if words[one] in _KNOWN else codes[one] % len(COLOURS) for one in order}
    colours = _apart(colours)
    colours |= _apart({family: colours[family] for family in order if family in shown})
    places, taken = {}, set[tuple[int, int]]()
    for family in order:
        colour = shift = colours[family]
        if words[family] not in _KNOWN:
            shift = colour + 1 + codes[family] // len(COLOURS) % (len(DASHES) - 1)  # not the dash of the known name
            used = {dash for _, dash in taken}
            used = used if len(used) < len(DASHES) else {dash for other, dash in taken if other == colour}
            shift += next((i for i in range(len(DASHES)) if (shift + i) % len(DASHES) not in used), 0)
        taken.add((colour, shift % len(DASHES)))
        places[family] = colour, shift, shift
    return {family: places[family] for family in words}


def _apart(colours: Mapping[str, int]) -> dict[str, int]:
    """Return colours no two of which are equal, while there are enough: of equal ones, the first family's stays.

    >>> _apart({"DiLoCo": 2, "ring": 2, "torus": 1, "star": 2})
    {'DiLoCo': 2, 'ring': 3, 'torus': 1, 'star': 4}
    """
    owners = {colour: family for family, colour in reversed([*colours.items()])}
    free = [colour for colour in range(len(COLOURS)) if colour not in owners]
    apart = dict(colours)
    for family, colour in colours.items():
        if owners[colour] != family and free:
            apart[family] = min(free, key=lambda one: (one - colour) % len(COLOURS))
            free.remove(apart[family])
    return apart


def _look(colour: int, dash: int, marker: int) -> Look:
    return Look(COLOURS[colour % len(COLOURS)], DASHES[dash % len(DASHES)], MARKERS[marker % len(MARKERS)])


def looks_by(settings: Mapping[str, Mapping[str, str]], order: Sequence[str], shown: Sequence[str]) -> Looks:
    """Return looks that show the first setting by colour, the second by dashes, and all others by markers.

    Args:
        settings: name → setting → value, as text.
        order: the settings; colour stands for the first.
        shown: the names that are drawn; the key lists only their values.
    """

    def values(keys: Sequence[str], names: Iterable[str] = settings) -> list[tuple[str, ...]]:
        return list(dict.fromkeys(tuple(settings[name][key] for key in keys) for name in names))

    first, second, others = order[:1], order[1:2], order[2:]
    # The settings that colours, dashes and markers stand for; a single setting uses all three.
    said = (first, second or first, others or second or first)
    known = [values(keys) for keys in said]
    colours = _colours(len(known[0]))

    def look(said_by: Sequence[tuple[str, ...] | None]) -> Look:
        """Return the look whose colour, dashes and marker stand for these values; None stands for no value."""
        c, d, m = (None if v is None else own.index(v) for v, own in zip(said_by, known, strict=True))
        colour, dash = ("#444444", "none") if c is None else (colours[c], "-")
        if d is not None:
            dash = DASHES[d % len(DASHES)]
            if second and len(known[1]) > len(DASHES):
                colour = _lighter(colour, 0.65 * d / len(known[1]))
        return Look(colour, dash, "" if m is None else MARKERS[m % len(MARKERS)])

    looks = {name: look([tuple(own[key] for key in keys) for keys in said]) for name, own in settings.items()}
    key: dict[str, list[tuple[str, Look]]] = {}
    for names in filter(None, (first, second, others)):
        found = values(names, sorted(shown, key=list(settings).index))
        if len(found) == 1 and len(shown) > 1:
            continue
        key[", ".join(names)] = lines = []
        for value in found[:: -(-len(found) // _KEYS)]:
            lines.append((", ".join(value), look([value if keys is names else None for keys in said])))
    return Looks(looks, key)


def _colours(count: int) -> Sequence[str]:
    """Return colours of the palette or, if it has too few, of a perceptually uniform colour map in order."""
    if count <= len(COLOURS):
        return COLOURS[:count]
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](0.92 * i / (count - 1))) for i in range(count)]


def _lighter(colour: str, share: float) -> str:
    """Return "#RRGGBB" mixed with that share of white.

    >>> _lighter("#000080", 0.5)
    '#8080C0'
    """
    channels = (int(colour[i : i + 2], 16) for i in (1, 3, 5))
    return "#" + "".join(f"{round(c + (255 - c) * share):02X}" for c in channels)


_SIZES = {"linewidth": 1.3, "markersize": 4, "markeredgewidth": 1.0}
# Lines with more points than this have markers at only this many points.
MARKED_POINTS = 12


class XAxis(NamedTuple):
    """The x axis of curves: a column of `History`, or a function of a history, divided by its unit.

    The axis is logarithmic if `is_bytes` or `is_wide`. In the label, "{each}" stands for "node" or "client".
    """

    column: str | Callable[[History], NDArray[np.float64]]
    unit: float
    label: str
    is_bytes: bool = False
    is_wide: bool = False

    def values(self, history: History) -> NDArray[np.float64]:
        """Return x of every row, in its unit."""
        return (history[self.column] if isinstance(self.column, str) else self.column(history)) / self.unit

    def title(self, histories: Iterable[History]) -> str:
        """Return the label for these runs; for cohorts, bytes are per client on average."""
        of_cohorts = self.is_bytes and any(history.is_of_cohorts for history in histories)
        return self.label.replace("{each}", "client" if of_cohorts else "node")


X_AXES = {
    "step": XAxis("step", 1, "step"),
    "examples": XAxis("examples", 1, "examples"),
    "tokens": XAxis("tokens", 1, "tokens"),
    "round": XAxis(lambda history: rounds(history), 1, "round"),
    "payload": XAxis(
        lambda history: history.bytes_per_node("payload"), 1e6, "payload communicated per {each} (MB)", True
    ),
    "wire": XAxis(lambda history: history.bytes_per_node("wire"), 1e6, "sent on the wire per {each} (MB)", True),
    "seconds": XAxis("seconds", 1, "seconds of the simulation"),
}


def rounds(history: History) -> NDArray[np.float64]:
    """Return how many rounds were complete at every row of a run with `participation`.

    A round is a segment of the ledger's attendance; a part of a segment counts as a fraction.
    """
    segments = history.ledger.attendance
    bounds = [0, *(segment.last for segment in segments)]
    steps: NDArray[np.float64] = np.interp(history["step"], bounds, range(len(bounds)))
    return steps


def attendance(history: History, ax: Axes | None = None) -> Axes:
    """Draw which nodes took part in which steps and, above that, how many; see `History.plot_attendance`.

    Raises:
        ValueError: the run had no `participation`.
    """
    from matplotlib.colors import ListedColormap
    from matplotlib.patches import Patch
    from matplotlib.ticker import MaxNLocator

    from vsim.figures.paper import axes_of

    segments, number = history.ledger.attendance, history.ledger.num_nodes
    if not segments:
        raise ValueError(
            "plot_attendance needs a run with participation=: in this one, all nodes took part in all steps"
        )
    ax = axes_of(ax, 3.4, 2.6)
    steps = [segments[0].first - 1, *(min(segment.last, history.ledger.steps) for segment in segments)]
    cells = np.zeros((number, len(segments)))
    for own, segment in zip(cells.T, segments, strict=True):
        own[list(segment.nodes)], own[list(segment.late)] = 1, 2
    colours, edges = ("white", "#0072B2", "#E69F00"), np.arange(number + 1) - 0.5
    ax.pcolorfast(steps, edges, cells, cmap=ListedColormap(colours), vmin=0, vmax=2)
    ax.set(xlabel="step", ylabel="client" if history.is_of_cohorts else "node", ylim=(number - 0.5, -0.5))
    above = ax.inset_axes((0, 1.05, 1, 0.33), sharex=ax)
    counts = (cells == 1).sum(0)
    above.stairs(counts, steps, fill=True, color="0.5")
    above.set(ylabel="count", ylim=(0, 1.15 * counts.max()))
    above.tick_params("x", labelbottom=False, length=0)
    above.spines[["top", "right"]].set_visible(False)
    for axis in (above.yaxis, ax.yaxis):
        axis.set_major_locator(MaxNLocator(2 if axis is above.yaxis else 5, integer=True))
    if (cells == 2).any():
        patches = [
            Patch(color=colour, label=label) for colour, label in zip(colours[1:], ("present", "late"), strict=True)
        ]
        ax.legend(handles=patches, loc="lower left", bbox_to_anchor=(0, 1.4), ncols=2, **{**LEGEND, "handlelength": 1})
    for axes in (ax, above):
        sized(axes)
    return ax


_TIMES = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
Y_LABELS = {
    "global_loss": "validation loss",
    "local_loss": "validation loss of node 0",
    "average_loss": "validation loss of the mean replica",
    "train_loss": "training loss",
    "global_accuracy": "validation accuracy",
}

# The argument of a run that measures a column.
_MEASURED_BY = {
    **dict.fromkeys(("divergence", "correlation"), "correlation_interval="),
    "consensus_distance": "a strategy on a graph and a validation dataset",
    **dict.fromkeys(("test_loss", "test_accuracy"), "test_dataset="),
    **dict.fromkeys(("local_accuracy", "global_accuracy"), "a validation dataset, and accuracy= if it is not known"),
}

PAGE = 6.8  # inches: the width of a page of text; a column has 3.3
# Characters of a legend that fit into an inch, and the width of a line's sample with its gaps, in characters.
_CHARACTERS, _BESIDE = 17, 9
# The same in the small letters of a legend on the caller's axes.
_SMALL, _SAMPLE = 20, 8
# A legend with more entries or longer names than this stands below its axes.
_INSIDE, _SHORT = 4, 40
_MEAN_REPLICA = "mean replica"
_THIN: Any = {"linewidth": 0.7, "alpha": 0.7}
LEGEND: Any = {
    **{"frameon": False, "fontsize": STYLE["legend.fontsize"], "handlelength": 2.8},
    **{"columnspacing": 1.2, "labelspacing": 0.3},
}


def bands(
    runs: Runs,
    x: str | XAxis = "step",
    y: str = "global_loss",
    ax: Axes | None = None,
    legend: bool = True,
    looks: Looks | None = None,
    diverged: Mapping[str, str] | None = None,
    logy: bool = False,
    from_step: int = 0,
) -> Axes:
    """Draw a column of several runs, one line for each name; with several seeds, draw their mean and a band.

    The mean over the seeds, of y and of the bytes or seconds on the x axis, is taken at every step that all seeds have
    measured. The band extends by one standard deviation (of the sample, n − 1) to both sides; with more than a dozen
    runs there are no bands. A loss that rises far above its start is cut off.

    Against bytes, only the last of several measurements with equal bytes is drawn, which is the loss reached before
    more bytes were sent. A run that sends nothing is a horizontal line at its last loss. On other axes, a thin line
    shows the loss of the mean replica if it differs from the global model, as between two syncs of DiLoCo, whose outer
    weights do not change between syncs.

    Args:
        runs: name → history, or a list of histories with one for each seed.
        x: "step", "examples", "tokens", "payload", "wire" (MB, on a logarithmic axis), "seconds" of the simulation, or
            another axis, such as `time_axis`.
        y: a column of `History`.
        ax: where to draw; default the axes of a new figure.
        legend: whether to add a legend; one with many entries stands below the axes.
        looks: the looks of the lines; default: by their names.
        diverged: name → the legend's text for a run that diverged; a cross at the upper edge marks its end.
        logy: whether the y axis is logarithmic; divergence and consensus_distance always are, from the first value
            above 0.
        from_step: the first step to draw, as the first losses may flatten all others.

    Raises:
        ValueError, KeyError: there is no such x, or no column y, or no run has measured y or has tokens.
    """
    from vsim.figures.paper import axes_of, fit, plain_ticks

    logy = true_or_false("logy", logy) or a_text("y", y) in ("divergence", "consensus_distance")
    from_step = whole_number("from_step", from_step, at_least=0)
    axis = x if isinstance(x, XAxis) else X_AXES[one_of("x", x, X_AXES)]
    lists = _lists(runs)
    looks, diverged = looks or looks_of(list(runs)), diverged or {}
    own, ax = ax is None, axes_of(ax, 4.4, 3.2)
    if x == "tokens" and lists and not any(h.last("tokens") > 0 for histories in lists.values() for h in histories):
        raise ValueError("x='tokens' needs batches that hold token ids; x='examples' is there for all data")
    if x == "round" and not all(h.ledger.attendance for histories in lists.values() for h in histories):
        raise ValueError("x='round' needs participation=, which has rounds; x='step' is there for all runs")
    _check_measured(y, [history for histories in lists.values() for history in histories])
    silent, drawn, thin = [], [], len(runs) > MANY
    for i, (name, histories) in enumerate(lists.items()):
        xs, mean, deviation = _points(histories, axis, y, from_step)
        if logy:
            xs, mean, deviation = xs[mean > 0], mean[mean > 0], deviation[mean > 0]
        look = looks.by_name[name]
        label = literal(f"{name}, {diverged[name]}" if name in diverged else name)
        drawn.append(mean)
        if axis.is_bytes and not any((axis.values(history) > 0).any() for history in histories):
            if len(mean) and name not in diverged:
                silent.append(name)
                ax.axhline(mean[-1], color=look.colour, linestyle=look.dash, linewidth=0.9, label=label)
            continue
        spacing = -(-len(xs) // MARKED_POINTS)
        # Lines that cover each other have their markers at different points.
        marks = (2 * i % spacing, spacing) if spacing > 1 else 1
        ax.plot(xs, mean, label=label, markevery=marks, **_line(look, thin))
        if deviation.any() and not thin:
            ax.fill_between(xs, mean - deviation, mean + deviation, color=look.colour, alpha=0.18, linewidth=0)
        if y == "global_loss" and not (axis.is_bytes or thin or looks.key):
            _draw_mean_replica(ax, histories, axis, look.colour, from_step)
        end = max((np.nanmax(axis.values(history), initial=0) for history in histories), default=0.0)
        if name in diverged and not (axis.is_bytes and end <= 0):
            cross: Any = {"color": look.colour, "marker": "x", "linestyle": "none", "label": "_"}
            ax.plot([end], [1.0], transform=ax.get_xaxis_transform(), clip_on=False, zorder=4, **cross)
    ax.set_xlabel(axis.title(history for histories in lists.values() for history in histories))
    ax.set_ylabel(Y_LABELS.get(y, y.replace("_", " ")))
    styled(ax)
    if axis.is_bytes or axis.is_wide:
        ax.set_xscale("log")
        plain_ticks(ax.xaxis)
    if logy:
        ax.set_yscale("log")
        plain_ticks(ax.yaxis)
    if y.endswith("loss") and (within := limits(drawn, logy)) is not None:
        ax.set_ylim(within)
    if silent:
        # Names must fit above the axes.
        which = literal(", ".join(quoted(silent).values())) if len(silent) <= 2 else f"{len(silent)} of {len(drawn)}"
        sends = "sends" if len(silent) == 1 else "send"
        said = f"{which} {sends} nothing (horizontal line{'s' * (len(silent) > 1)})"
        ax.set_title(said, fontsize=7.5, color="0.4", loc="right")
    if legend and ax.get_lines():
        add_legend(ax, looks, diverged, own)
    elif legend:
        fit(ax)
    return ax


def _check_measured(y: str, histories: Sequence[History]) -> None:
    """Raise an error if no run has measured column `y`, although some run has begun."""
    begun = [history for history in histories if history.last("step") > 0]
    having = [history for history in begun if y in history.columns]
    if not begun or any(not math.isnan(history.last(y)) for history in having):
        return
    if not having:
        begun[0][y]  # raises a KeyError with the names of all columns
    needs = f"train with {_MEASURED_BY[y]}" if y in _MEASURED_BY else "another column has values"
    known = dict.fromkeys(c for history in begun for c in history.columns if not math.isnan(history.last(c)))
    raise ValueError(f"y={y!r} was measured in no run: {needs}; measured are {', '.join(known)}")


def overview(
    runs: Runs,
    title: str = "",
    y: str = "global_loss",
    looks: Looks | None = None,
    diverged: Mapping[str, str] | None = None,
    x: str | XAxis = "step",
    logy: bool = False,
    width: float = PAGE,
    from_step: int = 0,
) -> PaperFigure:
    """Return a figure of two panels: loss against step, and the same loss against bytes on the wire (log).

    Args:
        runs, y, looks, diverged, logy, from_step: see `bands`. x: the x axis of the first panel.
        title: the title; "" for no title, as in a paper, whose caption has it.
        width: in inches: a page's width, or a column's (3.3); in a column, the panels are stacked.

    Raises:
        ValueError: the width is not from 1 to 100 inches.
    """
    from vsim.figures.paper import PaperFigure

    looks = looks or looks_of(list(runs))
    beside = real_number("width", width, at_least=1, at_most=100) >= 5
    figure = PaperFigure(figsize=(width, 3.1 if beside else 4.4), dpi=150, layout="constrained")
    first, second = figure.subplots(*((1, 2) if beside else (2, 1)), sharey=True)
    bands(runs, x, y, first, False, looks, diverged, logy, from_step)
    bands(runs, "wire", y, second, False, looks, diverged, logy, from_step)
    if beside:
        second.set_ylabel("")
    handles, labels, columns = _legend(first, looks, diverged or {}, width)
    if labels:
        if len(looks.key) <= 1:
            columns = legend_columns(labels, width)
        figure.set_figheight(figure.get_figheight() + 0.15 * max(0, _rows(labels, columns) - 2))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, **LEGEND)
    if title:
        figure.suptitle(textwrap.fill(title, int(15 * width)), fontsize=9, x=0.01, ha="left")
    return figure


def time_axis(histories: Iterable[History], network: Network, compute: Compute) -> XAxis:
    """Return the axis of the runs' time on a network; logarithmic if some runs take ten times as long as others."""
    begun = [one for one in histories if one.last("step") > 0]
    times = {id(one): one.time(network, compute).seconds[one["step"].astype(int)] for one in begun}
    ends = [float(own[-1]) for own in times.values() if own[-1] > 0]
    unit, name = next(((u, n) for u, n in _TIMES if max(ends, default=0) >= 2 * u), _TIMES[-1])
    wide = bool(ends) and max(ends) > 10 * min(ends)
    return XAxis(
        lambda history: times.get(id(history), np.zeros(len(history))),
        unit,
        f"time on the network ({name})",
        False,
        wide,
    )


def x_axis(
    x: str, histories: Sequence[History], network: Network | str | float | None, compute: Compute | float | str | None
) -> str | XAxis:
    """Return the axis named `x`. Only x="time" takes network and compute: the time is derived from them.

    Raises:
        TypeError: x is "time" and network or compute is missing, or x is another quantity and one of them is given.
    """
    if isinstance(x, str) and x == "time":
        return time_axis(histories, Network.of(network), Compute.of(compute))
    if network is not None or compute is not None:
        raise TypeError(f"network and compute have no effect with x={x!r}; x='time' follows from them")
    return x


def mean_over_seeds(
    histories: Sequence[History], axis: XAxis, y: str, from_step: int = 0
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return x, the mean of y and its standard deviation, at every step at which all `histories` have measured both;
    `from_step` is the first step.

    >>> from vsim import History
    >>> runs = [History(), History()]
    >>> for loss, run in zip([1.0, 3.0], runs): run.append({"step": 0, "train_loss": loss})
    >>> mean_over_seeds(runs, X_AXES["step"], "train_loss")
    (array([0.]), array([2.]), array([1.41421356]))
    """
    tables = [np.stack([history["step"], axis.values(history), history[y]]) for history in histories]  # (3, rows)
    measured = [table[:, ~np.isnan(table).any(0) & (table[0] >= from_step)] for table in tables]
    steps = sorted(set.intersection(*(set(m[0].tolist()) for m in measured))) if measured else []
    if not steps:
        return np.empty(0), np.empty(0), np.empty(0)
    xs, ys = (np.stack([m[i][np.isin(m[0], steps)] for m in measured]) for i in (1, 2))  # (seeds, steps)
    return xs.mean(0), ys.mean(0), ys.std(0, ddof=1) if len(ys) > 1 else np.zeros(len(steps))


def last_of_equal(xs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return whether each of these non-decreasing numbers is the last of equal ones.

    >>> last_of_equal(np.array([0.0, 0.0, 2.0, 2.0, 3.0]))
    array([False,  True, False,  True,  True])
    """
    return np.append(np.diff(xs) > 0, True) if len(xs) else np.empty(0, bool)


def limits(curves: Iterable[NDArray[np.float64]], log: bool = False) -> tuple[float, float] | None:
    """Return limits of the y axis that cut off diverging losses, which would otherwise flatten all other curves.

    None if no loss diverges.
    """
    finite = [values for values in (curve[np.isfinite(curve)] for curve in curves) if len(values)]
    if not finite:
        return None
    start, best = max(values[0] for values in finite), min(values.min() for values in finite)
    if start <= best or max(values.max() for values in finite) <= start + 0.5 * (start - best):
        return None
    return 0.97 * best if log else best - 0.05 * (start - best), start + 0.1 * (start - best)


def legend_columns(labels: Sequence[str], width: float = PAGE) -> int:
    """Return the number of columns in which a legend fits below a figure of this width, in rows of similar length."""
    longest = max(len(line) for label in labels for line in label.split("\n"))
    fitting = max(1, int(_CHARACTERS * width) // (longest + _BESIDE))
    return -(-len(labels) // -(-len(labels) // fitting))


def _rows(labels: Sequence[str], columns: int) -> int:
    """Return the number of lines of text of a legend."""
    return -(-sum(1 + label.count("\n") for label in labels) // columns)


def _legend(ax: Axes, looks: Looks, diverged: Mapping[str, str], width: float) -> tuple[list[Any], list[str], int]:
    """Return a legend's handles, labels and number of columns: a line per name or, with a key, a column per setting.

    A name that is wider than the legend takes several lines.
    """
    from matplotlib.lines import Line2D

    if not looks.key:
        handles, labels = ax.get_legend_handles_labels()
        most = max(10, int(0.9 * _CHARACTERS * width) - _BESIDE)  # counted in wide letters
        labels = [label if len(label) <= most else textwrap.fill(label, most) for label in labels]
        if any(line.get_gid() == _MEAN_REPLICA for line in ax.get_lines()):
            handles.append(Line2D([], [], color="0.3", **_THIN))
            labels.append(f"thin: {_MEAN_REPLICA}")
        return handles, labels, 1
    empty = ("", Look("none", "none", ""))
    groups = [[*([(title, empty[1])] if title else []), *lines] for title, lines in looks.key.items()]
    if diverged:
        min(groups, key=len).append(("diverged", Look("#444444", "none", "x")))
    rows = max(map(len, groups))
    lines = [line for group in groups for line in [*group, *[empty] * (rows - len(group))]]
    return [Line2D([], [], **_line(look)) for _, look in lines], [literal(text) for text, _ in lines], len(groups)


def add_legend(ax: Axes, looks: Looks, diverged: Mapping[str, str], own: bool, inside: bool = True) -> None:
    """Add a legend: inside the axes if it is short, below them if it would cover the lines.

    Args:
        own: whether vsim made the figure, which then may grow; otherwise, the legend has at most two columns, and its
            letters are smaller.
        inside: whether a legend may be inside.
    """
    from matplotlib.transforms import ScaledTranslation

    from vsim.figures.paper import fit

    figure = ax.get_figure(root=True)
    assert figure is not None
    width = 1.2 * figure.get_figwidth() * ax.get_position().width  # including the tick labels of the y axis
    handles, labels, columns = _legend(ax, looks, diverged, width)
    style, place = dict(LEGEND), dict[str, Any]()
    is_below = not inside or bool(looks.key) or len(labels) > _INSIDE or max(map(len, labels)) > _SHORT
    if not own and not looks.key:
        style |= {"fontsize": 7, "handlelength": 2.4, "columnspacing": 0.8, "handletextpad": 0.5}
        columns = 2 if is_below and len(labels) > 1 else 1
        most = int(_SMALL * width / columns) - _SAMPLE
        labels = [textwrap.fill(label, most, max_lines=3, placeholder=" …") for label in labels]
    if is_below:
        below = ScaledTranslation(0, -34 / 72, figure.dpi_scale_trans)  # the axis' numbers and label
        place = {"loc": "upper center", "bbox_to_anchor": (0.45, 0), "bbox_transform": ax.transAxes + below}
        columns = legend_columns(labels, width) if own and not looks.key else columns
    ax.legend(handles, labels, ncols=columns, **style, **place)
    if not own:
        fit(ax)
    elif is_below:
        figure.set_figheight(figure.get_figheight() + 0.15 * _rows(labels, columns))


def _draw_mean_replica(ax: Axes, histories: Sequence[History], axis: XAxis, colour: str, from_step: int) -> None:
    """Draw the mean replica's loss as a thin line if it differs from the global model's."""
    xs, mean, _ = _points(histories, axis, "average_loss", from_step)
    whole = _points(histories, axis, "global_loss", from_step)[1]
    if len(mean) and not np.array_equal(mean, whole):
        ax.plot(xs, mean, color=colour, label="_", gid=_MEAN_REPLICA, **_THIN)


def _points(
    histories: Sequence[History], axis: XAxis, y: str, from_step: int
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the points to draw: x in its unit, mean and deviation of y; of points with equal bytes, only the last."""
    xs, mean, deviation = mean_over_seeds(histories, axis, y, from_step)
    if (axis.is_bytes or axis.is_wide) and len(xs):
        last = last_of_equal(xs) & ((xs > 0) | (xs[-1] == 0))  # if nothing is sent, keep the last point
        xs, mean, deviation = xs[last], mean[last], deviation[last]
    return xs, mean, deviation


def _line(look: Look, thin: bool = False) -> dict[str, Any]:
    sizes = {"linewidth": 0.8, "markersize": 2.5, "markeredgewidth": 0.7} if thin else _SIZES
    style = {"color": look.colour, "linestyle": look.dash, "marker": look.marker, "markerfacecolor": "white"}
    return {**style, **sizes}


def _lists(runs: Runs) -> dict[str, Sequence[History]]:
    return {name: given if isinstance(given, Sequence) else [given] for name, given in runs.items()}


# A perceptually uniform colour map: equal differences of loss look equal, also in grey. The lowest loss is brightest.
_MAP = "viridis_r"
_PALE, _HATCH = (0.96, 0.96, 0.96, 1.0), "/////"
# Text below this size, in points, is left out.
_SMALLEST = 4.0


class Cell(NamedTuple):
    """A cell of a heatmap. value=NaN marks a failed setting, which is hatched; `note` is a text in the cell."""

    value: float
    note: str = ""


def heatmap(
    cells: Mapping[tuple[str, str], Cell],
    x: tuple[str, Sequence[str]],
    y: tuple[str, Sequence[str]],
    label: str,
    remark: str = "",
    ax: Axes | None = None,
) -> Axes:
    """Draw a cell for each pair of values, with its number in it; the best is bold, failed runs are hatched.

    Args:
        cells: (value of x, value of y) → cell; other cells stay white.
        x, y: the name of a setting, and its values in order, as text.
        label: describes the numbers. remark: a small text above the map.
        ax: the axes to draw on; default: a new figure, as wide as a column if that is enough.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.patches import Patch, Rectangle

    from vsim.figures.paper import axes_of, plain_ticks

    (x_name, x_values), (y_name, y_values) = x, y
    ax = axes_of(ax, min(6.8, max(3.3, 1.4 + 0.42 * len(x_values))), min(6.0, 1.05 + 0.4 * len(y_values)))
    known = [cell.value for cell in cells.values() if math.isfinite(cell.value)]
    colours = ScalarMappable(_norm(known), _MAP)
    figure = ax.get_figure(root=True)
    assert figure is not None
    width, height = figure.get_size_inches() * (ax.get_position().width, ax.get_position().height)
    room = 72 * 0.8 * width / len(x_values), 72 * 0.8 * height / len(y_values)  # points; 0.2 for a colour bar
    digits = 3 if not known or max(known) - min(known) > 0.1 * abs(min(known)) else 4  # significant

    def write(text: str, at: tuple[int, int], colour: str, weight: str = "normal") -> None:
        lines = text.split("\n")
        size = min(7.5, room[0] / (0.58 * max(map(len, lines))), room[1] / (1.25 * len(lines)))
        if size >= _SMALLEST:
            ax.text(*at, text, ha="center", va="center", fontsize=size, color=colour, weight=weight, linespacing=1.05)

    for (x_value, y_value), cell in cells.items():
        at = x_values.index(x_value), y_values.index(y_value)
        failed = not math.isfinite(cell.value)
        face = _PALE if failed else tuple(colours.to_rgba(np.array(cell.value)))
        corner, edge = (at[0] - 0.5, at[1] - 0.5), "0.8" if failed else "white"
        hatch = _HATCH if failed else None
        ax.add_patch(Rectangle(corner, 1, 1, facecolor=face, linewidth=0.5, edgecolor=edge, hatch=hatch))
        bright = 0.299 * face[0] + 0.587 * face[1] + 0.114 * face[2] > 0.5
        number = [] if failed else [f"{cell.value:#.{digits}g}".rstrip(".")]
        best = not failed and cell.value == min(known)
        text = "\n".join(filter(None, [*number, cell.note]))
        write(text, at, "black" if bright else "white", "bold" if best else "normal")
    ax.set(xlim=(-0.5, len(x_values) - 0.5), ylim=(-0.5, len(y_values) - 0.5), xlabel=x_name, ylabel=y_name)
    ax.set_xticks(range(len(x_values)), list(map(literal, x_values)))
    ax.set_yticks(range(len(y_values)), list(map(literal, y_values)))
    if max(map(len, x_values)) * len(x_values) * 4.6 > 72 * width:
        ax.tick_params("x", rotation=90)
    sized(ax)
    ax.tick_params(length=0)
    ax.spines[:].set_visible(False)
    if known:
        bar = figure.colorbar(colours, ax=ax, label=label, aspect=30, pad=0.02)
        bar.outline.set_visible(False)
        sized(bar.ax)
        if bar.ax.get_yscale() == "log":
            plain_ticks(bar.ax.yaxis)
    if len(known) < len(cells):
        notes = [cell.note for cell in cells.values() if math.isnan(cell.value)]
        why = "diverged" if all("diverged" in note for note in notes) else "failed"
        hatched = Patch(facecolor=_PALE, hatch=_HATCH, edgecolor="0.8", label=f"hatched: {why}")
        ax.legend(handles=[hatched], loc="lower right", bbox_to_anchor=(1, 1), frameon=False, fontsize=7, borderpad=0)
    if remark:
        ax.set_title(literal(remark), fontsize=7.5, color="0.4", loc="left")
    return ax


def _norm(values: Sequence[float]):  # type: ignore[no-untyped-def]
    """Return a scale of colours, logarithmic if losses differ by factors, so that an outlier does not hide the rest."""
    from matplotlib.colors import LogNorm, Normalize

    low, high = min(values, default=0.0), max(values, default=1.0)
    return LogNorm(low, high) if 0 < 3 * low < high else Normalize(low, high)
