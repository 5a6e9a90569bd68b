"""Loss against step, bytes and time: figures that read at a glance, in print as on a screen.

Every line has a colour, a dash pattern and a marker of its own, so that it is told apart with any kind of colour
vision, and in grey. Sizes are those of print: a figure of two panels is as wide as a page of text.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import one_of
from vsim.records.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.axis import Axis
    from matplotlib.figure import Figure

    Runs = Mapping[str, History | Sequence[History]]

# Okabe and Ito's palette, made to be told apart with any kind of colour vision; its yellow is too pale for a line.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
MARKERS = ("o", "s", "^", "D", "v", "<", ">", "p", "h")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.2, 1.2)), (0, (5, 1.2, 1.2, 1.2)), (0, (9, 2)))
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


def bands(runs: Runs, x: str = "step", y: str = "global_loss", ax: Axes | None = None, legend: bool = True) -> Axes:
    """Draw a column of several runs, one line for each name; of runs with several seeds their mean, and a band.

    The mean is taken over the seeds at every step that all of them have measured, and so are the bytes or seconds that
    it is drawn against. The band is one standard deviation (of the sample, n − 1) to both sides.

    Args:
        runs: name → history, or a list of histories with one for each seed.
        x: "step", "examples", "payload", "wire" (MB, on a logarithmic axis) or "time".
        y: a column of `History`.
        ax: where to draw; default the axes of a new figure.
        legend: whether to add one.

    Raises:
        ValueError, KeyError: there is no such x, or no column y.
    """
    column, divisor, label, logarithmic = X_AXES[one_of("x", x, X_AXES)]
    if ax is None:
        import matplotlib.pyplot as plt  # here, as it takes time, and may open windows

        with plt.rc_context(STYLE):
            return bands(runs, x, y, plt.subplots(figsize=(4.4, 3.2), dpi=150, layout="constrained")[1], legend)
    silent = []
    for i, (name, given) in enumerate(runs.items()):
        xs, mean, deviation = mean_over_seeds([given] if isinstance(given, History) else given, column, y)
        if logarithmic:
            known = xs > 0
            xs, mean, deviation = xs[known], mean[known], deviation[known]
            if not len(xs):
                silent.append(name)
                continue
        colour, spacing = COLOURS[i % len(COLOURS)], -(-len(xs) // MARKED_POINTS)
        ax.plot(
            xs / divisor,
            mean,
            label=name,
            color=colour,
            linestyle=DASHES[i % len(DASHES)],
            linewidth=1.3,
            marker=MARKERS[i % len(MARKERS)],
            # Lines that lie on each other show their markers at different points.
            markevery=(2 * i % spacing, spacing) if spacing > 1 else 1,
            markersize=4,
            markerfacecolor="white",
            markeredgewidth=1.0,
        )
        if deviation.any():
            ax.fill_between(xs / divisor, mean - deviation, mean + deviation, color=colour, alpha=0.18, linewidth=0)
    ax.set_xlabel(label)
    ax.set_ylabel(Y_LABELS.get(y, y.replace("_", " ")))
    ax.grid(True, color="0.9", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if logarithmic:
        ax.set_xscale("log")
        _label_decades(ax.xaxis)
    if silent:
        ax.set_title(f"not shown, as nothing is sent: {', '.join(silent)}", fontsize=7.5, color="0.4", loc="right")
    if legend and ax.get_lines():
        ax.legend(frameon=False, handlelength=3.2)
    return ax


def overview(runs: Runs, title: str = "", y: str = "global_loss") -> Figure:
    """Return a figure of two panels: loss against step, and the same loss against communicated bytes (log).

    Args:
        runs, y: as of `bands`.
        title: what stands above; "": nothing, as for a paper, where the caption says it.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with matplotlib.rc_context(STYLE):
        figure = Figure(figsize=(6.8, 3.1), dpi=150, layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        bands(runs, "step", y, left, legend=False)
        bands(runs, "payload", y, right, legend=False)
        right.set_ylabel("")
        _zoom_on_training(left, runs, y)
        handles, labels = left.get_legend_handles_labels()
        if labels:
            fitting = max(1, 108 // (max(map(len, labels)) + 10))
            columns = -(-len(labels) // -(-len(labels) // fitting))  # rows of about equal length
            figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, handlelength=3.2)
        if title:
            figure.suptitle(title, fontsize=9, x=0.01, ha="left")
    return figure


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


def _label_decades(axis: Axis) -> None:
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


def _zoom_on_training(ax: Axes, runs: Runs, y: str) -> None:
    """Let a run that diverges leave the picture, rather than press all others flat."""
    drawn = [[given] if isinstance(given, History) else given for given in runs.values()]
    finite = [values[np.isfinite(values)] for values in (h[y] for histories in drawn for h in histories)]
    finite = [values for values in finite if len(values)]
    if not finite:
        return
    start, best = max(values[0] for values in finite), min(values.min() for values in finite)
    if start > best and max(values.max() for values in finite) > start + 0.5 * (start - best):
        ax.set_ylim(best - 0.05 * (start - best), start + 0.1 * (start - best))
