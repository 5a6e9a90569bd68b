"""Loss against step, bytes and time: figures that read at a glance, in print as on a screen.

Sizes are those of print: a figure of two panels is as wide as a page of text.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import one_of
from vsim.records.history import History
from vsim.records.looks import MANY, Look, Looks, looks_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    Runs = Mapping[str, History | Sequence[History]]

_SIZES = {"linewidth": 1.3, "markersize": 4, "markeredgewidth": 1.0}
# Lines of more points than this are marked at so many of them.
MARKED_POINTS = 12

# x → (column, divisor, label, logarithmic)
X_AXES = {
    "step": ("step", 1.0, "step", False),
    "examples": ("examples", 1.0, "examples", False),
    "payload": ("payload_bytes", 1e6, "payload communicated per node (MB)", True),
    "wire": ("wire_bytes", 1e6, "sent on the wire per node (MB)", True),
    "time": ("seconds", 1.0, "training time (s)", False),
}
Y_LABELS = {
    "global_loss": "validation loss",
    "local_loss": "validation loss of node 0",
    "average_loss": "validation loss of the mean replica",
    "train_loss": "training loss",
    "global_accuracy": "validation accuracy",
}

# What figures are made with, unless they are the caller's; and what files are written with: in PDF the fonts are
# embedded as TrueType, which publishers ask for and which can be searched; in SVG letters are shapes, alike everywhere.
STYLE: Any = {
    "font.size": 8.5,
    "axes.labelsize": 8.5,
    "axes.linewidth": 0.7,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "xtick.major.width": 0.7,
    "ytick.major.width": 0.7,
    "legend.fontsize": 8,
}
_FILE: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "vsim"}
_METADATA = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}


def bands(
    runs: Runs,
    x: str = "step",
    y: str = "global_loss",
    ax: Axes | None = None,
    legend: bool = True,
    looks: Looks | None = None,
    diverged: Mapping[str, str] | None = None,
) -> Axes:
    """Draw a column of several runs, one line for each name; of runs with several seeds their mean, and a band.

    The mean is taken over the seeds at every step that all of them have measured, and so are the bytes or seconds that
    it is drawn against. The band is one standard deviation (of the sample, n − 1) to both sides; more than a dozen runs
    have none. A loss that rises far above its start leaves the picture.

    Args:
        runs: name → history, or a list of histories with one for each seed.
        x: "step", "examples", "payload", "wire" (MB, on a logarithmic axis) or "time".
        y: a column of `History`.
        ax: where to draw; default the axes of a new figure.
        legend: whether to add one.
        looks: of the lines; default by their order.
        diverged: name → what the legend says of a run that did; a cross at the upper edge is where it ends.

    Raises:
        ValueError, KeyError: there is no such x, or no column y.
    """
    from matplotlib.transforms import ScaledTranslation

    column, divisor, label, logarithmic = X_AXES[one_of("x", x, X_AXES)]
    if ax is None:
        import matplotlib

        figure = new_figure(4.4, 4.2 if legend and looks is not None and looks.key else 3.2)
        with matplotlib.rc_context(STYLE):
            return bands(runs, x, y, figure.subplots(), legend, looks, diverged)
    looks, diverged = looks or looks_of(list(runs)), diverged or {}
    silent, drawn, thin = [], [], len(runs) > MANY
    for i, (name, histories) in enumerate(_lists(runs).items()):
        xs, mean, deviation = mean_over_seeds(histories, column, y)
        look = looks.by_name[name]
        drawn.append(mean)
        if logarithmic:
            known = xs > 0
            xs, mean, deviation = xs[known], mean[known], deviation[known]
            if not any(history.last(column) > 0 for history in histories):
                silent.append(name)
                continue
        spacing = -(-len(xs) // MARKED_POINTS)
        ax.plot(
            xs / divisor,
            mean,
            label=f"{name}, {diverged[name]}" if name in diverged else name,
            **_line(look, thin),
            # Lines that lie on each other show their markers at different points.
            markevery=(2 * i % spacing, spacing) if spacing > 1 else 1,
        )
        if deviation.any() and not thin:
            ax.fill_between(
                xs / divisor, mean - deviation, mean + deviation, color=look.colour, alpha=0.18, linewidth=0
            )
        end = max((history.last(column) for history in histories), default=0.0) / divisor
        if name in diverged and not (logarithmic and end <= 0):
            cross: Any = {"color": look.colour, "marker": "x", "linestyle": "none", "label": "_"}
            ax.plot([end], [1.0], transform=ax.get_xaxis_transform(), clip_on=False, zorder=4, **cross)
    ax.set_xlabel(label)
    ax.set_ylabel(Y_LABELS.get(y, y.replace("_", " ")))
    bare(ax)
    if logarithmic:
        ax.set_xscale("log")
        label_decades(ax.xaxis)
    if y.endswith("loss") and (within := limits(drawn)) is not None:
        ax.set_ylim(within)
    if silent:
        # Names must fit above the axes.
        which = ", ".join(silent) if len(silent) <= 2 else f"{len(silent)} of {len(drawn)}"
        ax.set_title(f"not shown, as nothing is sent: {which}", fontsize=7.5, color="0.4", loc="right")
    whole = ax.get_figure(root=True)
    if legend and ax.get_lines() and whole is not None:
        handles, labels, columns = _legend(ax, looks, diverged)
        # A key, which says what colours and dashes stand for, has its place below.
        place: Any = {}
        if looks.key:
            below = ScaledTranslation(0, -34 / 72, whole.dpi_scale_trans)  # the axis' numbers and label
            place = {"loc": "upper center", "bbox_to_anchor": (0.5, 0), "bbox_transform": ax.transAxes + below}
            place |= {"handlelength": 2.4, "columnspacing": 1.2, "labelspacing": 0.3}
        ax.legend(handles, labels, ncols=columns, frameon=False, **{"handlelength": 3.2, **place})
    return ax


def overview(
    runs: Runs,
    title: str = "",
    y: str = "global_loss",
    looks: Looks | None = None,
    diverged: Mapping[str, str] | None = None,
) -> Figure:
    """Return a figure of two panels: loss against step, and the same loss against communicated bytes (log).

    Args:
        runs, y, looks, diverged: as of `bands`.
        title: what stands above; "": nothing, as for a paper, where the caption says it.
    """
    import matplotlib
    from matplotlib.figure import Figure

    looks = looks or looks_of(list(runs))
    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 3.1), dpi=150, layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        bands(runs, "step", y, left, False, looks, diverged)
        bands(runs, "payload", y, right, False, looks, diverged)
        right.set_ylabel("")
        handles, labels, columns = _legend(left, looks, diverged or {})
        if labels:
            if len(looks.key) <= 1:
                columns = legend_columns(labels)
            figure.set_figheight(3.1 + 0.15 * max(0, -(-len(labels) // columns) - 2))
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=3.2)
        if title:
            figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    return figure


def new_figure(width: float, height: float) -> Figure:
    """Return a figure of pyplot, which a notebook shows; sizes are in inches."""
    import matplotlib.pyplot as plt  # here, as it takes time, and may open windows

    # Not in the context of a style, at whose end settings of the backend would be lost that the first figure makes.
    return plt.figure(figsize=(width, height), dpi=150, layout="constrained")


def save(figure: Figure | Axes, path: str | Path) -> None:
    """Write a figure, or the one that axes are on, for a paper: PNG at 300 dots an inch, PDF with its fonts, or SVG.

    The same figure gives the same file, byte for byte: there is no date in it.

    Args:
        figure: of this module, or any of matplotlib's.
        path: ends in .png, .pdf or .svg.

    Raises:
        ValueError: it ends in something else.
    """
    import matplotlib
    from matplotlib.figure import Figure

    suffix = Path(path).suffix.lower()
    if suffix not in _METADATA:
        raise ValueError(f"the path of a figure must end in {', '.join(_METADATA)}, got {str(path)!r}")
    whole = figure if isinstance(figure, Figure) else figure.get_figure(root=True)
    assert whole is not None
    with matplotlib.rc_context(_FILE):
        whole.draw_without_rendering()  # lays it out; drawn for the first time it would be laid out a little otherwise
        whole.savefig(path, dpi=300, metadata=_METADATA[suffix])


def mean_over_seeds(
    histories: Sequence[History], x: str, y: str
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return x, the mean of y and its standard deviation, at every step at which all `histories` have measured both.

    >>> runs = [History(), History()]
    >>> for loss, run in zip([1.0, 3.0], runs): run.append({"step": 0, "train_loss": loss})
    >>> mean_over_seeds(runs, "step", "train_loss")
    (array([0.]), array([2.]), array([1.41421356]))
    """
    measured = [history.measured("step", x, y) for history in histories]
    steps = sorted(set.intersection(*(set(m[0].tolist()) for m in measured))) if measured else []
    if not steps:
        return np.empty(0), np.empty(0), np.empty(0)
    xs, ys = (np.stack([m[i][np.isin(m[0], steps)] for m in measured]) for i in (1, 2))  # (seeds, steps)
    return xs.mean(0), ys.mean(0), ys.std(0, ddof=1) if len(ys) > 1 else np.zeros(len(steps))


def label_decades(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers: 0.1, 1, 10; over less than two decades 2 and 5 as well."""
    from matplotlib import rcParams
    from matplotlib.ticker import FuncFormatter, LogLocator

    def between(value: float, _: int | None) -> str:
        low, high = axis.get_view_interval()
        return f"{value:g}" if math.log10(high / low) < 2 else ""

    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(LogLocator(subs=(2.0, 5.0)))
    axis.set_minor_formatter(FuncFormatter(between))
    # On one line with the others, though their ticks are shorter.
    shorter = rcParams["xtick.major.size"] - rcParams["xtick.minor.size"]
    axis.set_tick_params(which="minor", pad=rcParams["xtick.major.pad"] + shorter)


def limits(curves: Iterable[NDArray[np.float64]]) -> tuple[float, float] | None:
    """Return limits within which a loss that diverges leaves the picture, rather than press all others flat.

    None: there is none that does.
    """
    finite = [values for values in (curve[np.isfinite(curve)] for curve in curves) if len(values)]
    if not finite:
        return None
    start, best = max(values[0] for values in finite), min(values.min() for values in finite)
    if start <= best or max(values.max() for values in finite) <= start + 0.5 * (start - best):
        return None
    return best - 0.05 * (start - best), start + 0.1 * (start - best)


def bare(ax: Axes) -> None:
    """Leave of a frame what is needed: a pale grid, and the axes to the left and below."""
    ax.grid(True, color="0.9", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def legend_columns(labels: Sequence[str]) -> int:
    """Return in how many columns a legend below a figure of page width fits, in rows of about equal length."""
    fitting = max(1, 108 // (max(map(len, labels)) + 10))
    return -(-len(labels) // -(-len(labels) // fitting))


def _legend(ax: Axes, looks: Looks, diverged: Mapping[str, str]) -> tuple[list[Any], list[str], int]:
    """Handles, labels and columns of a legend: a line for each name, or the key with a column for each setting."""
    from matplotlib.lines import Line2D

    if not looks.key:
        return *ax.get_legend_handles_labels(), 1
    empty = ("", Look("none", "none", ""))
    groups = [[*([(title, empty[1])] if title else []), *lines] for title, lines in looks.key.items()]
    if diverged:
        min(groups, key=len).append(("diverged", Look("#444444", "none", "x")))
    rows = max(map(len, groups))
    lines = [line for group in groups for line in [*group, *[empty] * (rows - len(group))]]
    return [Line2D([], [], **_line(look)) for _, look in lines], [text for text, _ in lines], len(groups)


def _line(look: Look, thin: bool = False) -> dict[str, Any]:
    sizes = {"linewidth": 0.8, "markersize": 2.5, "markeredgewidth": 0.7} if thin else _SIZES
    style = {"color": look.colour, "linestyle": look.dash, "marker": look.marker, "markerfacecolor": "white"}
    return {**style, **sizes}


def _lists(runs: Runs) -> dict[str, Sequence[History]]:
    return {name: [given] if isinstance(given, History) else given for name, given in runs.items()}
