"""Loss against step, bytes and time: figures that read at a glance, in print as on a screen.

Sizes are those of print: a figure of two panels is as wide as a page of text.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import one_of, real_number
from vsim.figures.style import STYLE, literal, styled
from vsim.network import Compute, Network
from vsim.records.history import History
from vsim.records.looks import MANY, Look, Looks, looks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from vsim.figures.paper import PaperFigure

    Runs = Mapping[str, History | Sequence[History]]

_SIZES = {"linewidth": 1.3, "markersize": 4, "markeredgewidth": 1.0}
# Lines of more points than this are marked at so many of them.
MARKED_POINTS = 12


class XAxis(NamedTuple):
    """What curves are drawn against: a column of `History`, or what a function makes of one, over its unit.

    Bytes are on a logarithmic axis, and so is what `is_wide`.
    """

    column: str | Callable[[History], NDArray[np.float64]]
    unit: float
    label: str
    is_bytes: bool = False
    is_wide: bool = False

    def values(self, history: History) -> NDArray[np.float64]:
        """Return x of every row, in its unit."""
        return (history[self.column] if isinstance(self.column, str) else self.column(history)) / self.unit


X_AXES = {
    "step": XAxis("step", 1, "step"),
    "examples": XAxis("examples", 1, "examples"),
    "tokens": XAxis("tokens", 1, "tokens"),
    "payload": XAxis("payload_bytes", 1e6, "payload communicated per node (MB)", True),
    "wire": XAxis("wire_bytes", 1e6, "sent on the wire per node (MB)", True),
    "seconds": XAxis("seconds", 1, "seconds of the simulation"),
}
_TIMES = ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes"), (1.0, "seconds"))
Y_LABELS = {
    "global_loss": "validation loss",
    "local_loss": "validation loss of node 0",
    "average_loss": "validation loss of the mean replica",
    "train_loss": "training loss",
    "global_accuracy": "validation accuracy",
}

PAGE = 6.8  # the width of a page of text in inches; of a column 3.3
# So many characters of a legend fit into an inch; a line's sample and the gaps beside it are as wide as so many.
_CHARACTERS, _BESIDE = 17, 9
# A legend of more entries than this stands below its axes, and one with longer names.
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
) -> Axes:
    """Draw a column of several runs, one line for each name; of runs with several seeds their mean, and a band.

    The mean is taken over the seeds at every step that all of them have measured, and so are the bytes or seconds that
    it is drawn against. The band is one standard deviation (of the sample, n − 1) to both sides; more than a dozen runs
    have none. A loss that rises far above its start leaves the picture.

    Against bytes, of all measurements with equal bytes the last is drawn: the loss that they have led to before more
    were sent. A run that sends nothing is a horizontal line at its last loss. Against everything else a thin line shows
    the loss of the mean replica where that is not the global model, as between two syncs of DiLoCo, whose outer weights
    stand still until then.

    Args:
        runs: name → history, or a list of histories with one for each seed.
        x: "step", "examples", "tokens", "payload", "wire" (MB, on a logarithmic axis), "seconds" of the simulation, or
            another axis, such as `time_axis`.
        y: a column of `History`.
        ax: where to draw; default the axes of a new figure.
        legend: whether to add one, below the axes if it has many entries.
        looks: of the lines; default by their names.
        diverged: name → what the legend says of a run that did; a cross at the upper edge is where it ends.
        logy: whether y is logarithmic, too.

    Raises:
        ValueError, KeyError: there is no such x, or no column y, or no run has tokens.
    """
    from vsim.figures.paper import new_figure, plain_ticks

    axis = x if isinstance(x, XAxis) else X_AXES[one_of("x", x, X_AXES)]
    lists = _lists(runs)
    looks, diverged = looks or looks_of(list(runs)), diverged or {}
    own = new_figure(4.4, 3.2) if ax is None else None
    ax = own.subplots() if own is not None else ax
    assert ax is not None
    if x == "tokens" and lists and not any(h.last("tokens") > 0 for histories in lists.values() for h in histories):
        raise ValueError("x='tokens' needs batches that hold token ids; x='examples' is there for all data")
    silent, drawn, thin = [], [], len(runs) > MANY
    for i, (name, histories) in enumerate(lists.items()):
        xs, mean, deviation = _points(histories, axis, y)
        look = looks.by_name[name]
        label = literal(f"{name}, {diverged[name]}" if name in diverged else name)
        drawn.append(mean)
        if axis.is_bytes and not any((axis.values(history) > 0).any() for history in histories):
            if len(mean) and name not in diverged:
                silent.append(name)
                ax.axhline(mean[-1], color=look.colour, linestyle=look.dash, linewidth=0.9, label=label)
            continue
        spacing = -(-len(xs) // MARKED_POINTS)
        # Lines that lie on each other show their markers at different points.
        marks = (2 * i % spacing, spacing) if spacing > 1 else 1
        ax.plot(xs, mean, label=label, markevery=marks, **_line(look, thin))
        if deviation.any() and not thin:
            ax.fill_between(xs, mean - deviation, mean + deviation, color=look.colour, alpha=0.18, linewidth=0)
        if y == "global_loss" and not (axis.is_bytes or thin or looks.key):
            _draw_mean_replica(ax, histories, axis, look.colour)
        end = max((np.nanmax(axis.values(history), initial=0) for history in histories), default=0.0)
        if name in diverged and not (axis.is_bytes and end <= 0):
            cross: Any = {"color": look.colour, "marker": "x", "linestyle": "none", "label": "_"}
            ax.plot([end], [1.0], transform=ax.get_xaxis_transform(), clip_on=False, zorder=4, **cross)
    ax.set_xlabel(axis.label)
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
        which = literal(", ".join(silent)) if len(silent) <= 2 else f"{len(silent)} of {len(drawn)}"
        ax.set_title(f"horizontal, as nothing is sent: {which}", fontsize=7.5, color="0.4", loc="right")
    rows = _add_legend(ax, looks, diverged) if legend and ax.get_lines() else 0
    if own is not None:
        own.set_figheight(3.2 + 0.15 * rows)
    return ax


def overview(
    runs: Runs,
    title: str = "",
    y: str = "global_loss",
    looks: Looks | None = None,
    diverged: Mapping[str, str] | None = None,
    x: str | XAxis = "step",
    logy: bool = False,
    width: float = PAGE,
) -> PaperFigure:
    """Return a figure of two panels: loss against step, and the same loss against bytes on the wire (log).

    Args:
        runs, y, looks, diverged, logy: as of `bands`. x: of the first panel.
        title: what stands above; "": nothing, as for a paper, where the caption says it.
        width: in inches; of a page, or of a column (3.3), where one panel stands below the other.

    Raises:
        ValueError: the width is not from 1 to 100 inches.
    """
    from vsim.figures.paper import PaperFigure

    looks = looks or looks_of(list(runs))
    beside = real_number("width", width, at_least=1, at_most=100) >= 5
    figure = PaperFigure(figsize=(width, 3.1 if beside else 4.4), dpi=150, layout="constrained")
    first, second = figure.subplots(*((1, 2) if beside else (2, 1)), sharey=True)
    bands(runs, x, y, first, False, looks, diverged, logy)
    bands(runs, "wire", y, second, False, looks, diverged, logy)
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
    """Return the axis of the time that runs would take on a network, logarithmic if some take ten times others'."""
    times = {id(one): one.time(network, compute).seconds[one["step"].astype(int)] for one in histories if len(one)}
    ends = [float(own[-1]) for own in times.values() if own[-1] > 0]
    unit, name = next(((u, n) for u, n in _TIMES if max(ends, default=0) >= 2 * u), _TIMES[-1])
    wide = bool(ends) and max(ends) > 10 * min(ends)
    return XAxis(
        lambda history: times.get(id(history), np.empty(0)), unit, f"time on the network ({name})", False, wide
    )


def mean_over_seeds(
    histories: Sequence[History], axis: XAxis, y: str
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return x, the mean of y and its standard deviation, at every step at which all `histories` have measured both.

    >>> runs = [History(), History()]
    >>> for loss, run in zip([1.0, 3.0], runs): run.append({"step": 0, "train_loss": loss})
    >>> mean_over_seeds(runs, X_AXES["step"], "train_loss")
    (array([0.]), array([2.]), array([1.41421356]))
    """
    tables = [np.stack([history["step"], axis.values(history), history[y]]) for history in histories]  # (3, rows)
    measured = [table[:, ~np.isnan(table).any(0)] for table in tables]
    steps = sorted(set.intersection(*(set(m[0].tolist()) for m in measured))) if measured else []
    if not steps:
        return np.empty(0), np.empty(0), np.empty(0)
    xs, ys = (np.stack([m[i][np.isin(m[0], steps)] for m in measured]) for i in (1, 2))  # (seeds, steps)
    return xs.mean(0), ys.mean(0), ys.std(0, ddof=1) if len(ys) > 1 else np.zeros(len(steps))


def last_of_equal(xs: NDArray[np.float64]) -> NDArray[np.bool_]:
    """Return which of the numbers, which do not fall, is the last of those equal to it.

    >>> last_of_equal(np.array([0.0, 0.0, 2.0, 2.0, 3.0]))
    array([False,  True, False,  True,  True])
    """
    return np.append(np.diff(xs) > 0, True) if len(xs) else np.empty(0, bool)


def limits(curves: Iterable[NDArray[np.float64]], log: bool = False) -> tuple[float, float] | None:
    """Return limits within which a loss that diverges leaves the picture, rather than press all others flat.

    None: there is none that does.
    """
    finite = [values for values in (curve[np.isfinite(curve)] for curve in curves) if len(values)]
    if not finite:
        return None
    start, best = max(values[0] for values in finite), min(values.min() for values in finite)
    if start <= best or max(values.max() for values in finite) <= start + 0.5 * (start - best):
        return None
    return 0.97 * best if log else best - 0.05 * (start - best), start + 0.1 * (start - best)


def legend_columns(labels: Sequence[str], width: float = PAGE) -> int:
    """Return in how many columns a legend below a figure of this width fits, in rows of about equal length."""
    longest = max(len(line) for label in labels for line in label.split("\n"))
    fitting = max(1, int(_CHARACTERS * width) // (longest + _BESIDE))
    return -(-len(labels) // -(-len(labels) // fitting))


def _rows(labels: Sequence[str], columns: int) -> int:
    """Return how many lines of text a legend has below each other."""
    return -(-sum(1 + label.count("\n") for label in labels) // columns)


def _legend(ax: Axes, looks: Looks, diverged: Mapping[str, str], width: float) -> tuple[list[Any], list[str], int]:
    """Handles, labels and columns of a legend: a line for each name, or the key with a column for each setting.

    A name that is longer than a legend of this width takes several lines.
    """
    from matplotlib.lines import Line2D

    if not looks.key:
        handles, labels = ax.get_legend_handles_labels()
        most = max(10, int(0.9 * _CHARACTERS * width) - _BESIDE)  # of wide letters
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


def _add_legend(ax: Axes, looks: Looks, diverged: Mapping[str, str]) -> int:
    """Add a legend: inside where it is short, below where it would cover the lines; return its rows below."""
    from matplotlib.transforms import ScaledTranslation

    figure = ax.get_figure(root=True)
    assert figure is not None
    width = 1.2 * figure.get_figwidth() * ax.get_position().width  # with the numbers of the y axis
    handles, labels, columns = _legend(ax, looks, diverged, width)
    place: Any = {}
    is_below = bool(looks.key) or len(labels) > _INSIDE or max(map(len, labels)) > _SHORT
    if is_below:
        below = ScaledTranslation(0, -34 / 72, figure.dpi_scale_trans)  # the axis' numbers and label
        place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": ax.transAxes + below}
        columns = columns if looks.key else legend_columns(labels, width)
    ax.legend(handles, labels, ncols=columns, **LEGEND, **place)
    return _rows(labels, columns) if is_below else 0


def _draw_mean_replica(ax: Axes, histories: Sequence[History], axis: XAxis, colour: str) -> None:
    """Draw the loss of the mean replica where it is not that of the global model."""
    xs, mean, _ = _points(histories, axis, "average_loss")
    whole = _points(histories, axis, "global_loss")[1]
    if len(mean) and not np.array_equal(mean, whole):
        ax.plot(xs, mean, color=colour, label="_", gid=_MEAN_REPLICA, **_THIN)


def _points(
    histories: Sequence[History], axis: XAxis, y: str
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return what is drawn: x in its unit, and mean and deviation of y; of points with equal bytes the last."""
    xs, mean, deviation = mean_over_seeds(histories, axis, y)
    if (axis.is_bytes or axis.is_wide) and len(xs):
        last = last_of_equal(xs) & ((xs > 0) | (xs[-1] == 0))  # of a run that sends nothing its end
        xs, mean, deviation = xs[last], mean[last], deviation[last]
    return xs, mean, deviation


def _line(look: Look, thin: bool = False) -> dict[str, Any]:
    sizes = {"linewidth": 0.8, "markersize": 2.5, "markeredgewidth": 0.7} if thin else _SIZES
    style = {"color": look.colour, "linestyle": look.dash, "marker": look.marker, "markerfacecolor": "white"}
    return {**style, **sizes}


def _lists(runs: Runs) -> dict[str, Sequence[History]]:
    return {name: [given] if isinstance(given, History) else given for name, given in runs.items()}
