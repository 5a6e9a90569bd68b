"""Loss against step, bytes and time: figures that read at a glance, in colours that everyone can tell apart."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from vsim.arguments import one_of
from vsim.history import History

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# Okabe and Ito's palette, made to be told apart with any kind of colour vision; its yellow is too pale for a line.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">")
DASHES: tuple[Any, ...] = ("-", (0, (5, 1.5)), (0, (1.5, 1)))

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


def plot_histories(
    histories: Mapping[str, History], ax: Axes, x: str = "step", y: str = "global_loss", legend: bool = True
) -> Axes:
    """Draw a column of several runs on `ax`, one line a run.

    Args:
        histories: name → history.
        x: "step", "examples", "payload", "wire" (bytes, on a logarithmic axis) or "time".
        y: a column of `History`.
        legend: whether to add one.
    """
    column, divisor, label, logarithmic = X_AXES[one_of("x", x, X_AXES)]
    silent = []
    for i, (name, history) in enumerate(histories.items()):
        xs, ys = history.measured(column, y)
        if logarithmic:
            xs, ys = xs[xs > 0], ys[xs > 0]
            if not len(xs):
                silent.append(name)
                continue
        ax.plot(
            xs / divisor,
            ys,
            label=name,
            color=COLOURS[i % len(COLOURS)],
            linestyle=DASHES[i // len(COLOURS) % len(DASHES)],
            linewidth=1.6,
            marker=MARKERS[i % len(MARKERS)] if len(xs) <= 40 else None,
            markersize=4.5,
            markerfacecolor="white",
            markeredgewidth=1.2,
        )
    if logarithmic:
        ax.set_xscale("log")
        ax.xaxis.set_major_formatter("{x:g}")
    ax.set_xlabel(label)
    ax.set_ylabel(Y_LABELS.get(y, y.replace("_", " ")))
    ax.grid(True, color="0.9", linewidth=0.8)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    if silent:
        ax.annotate(f"no bytes: {', '.join(silent)}", (0.02, 0.02), xycoords="axes fraction", fontsize=8, color="0.4")
    if legend and ax.get_lines():
        ax.legend(frameon=False, fontsize=9)
    return ax


def overview(histories: Mapping[str, History], title: str = "", y: str = "global_loss") -> Figure:
    """Return a figure of two panels: loss against step, and the same loss against communicated bytes (log)."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 4.0), dpi=150, layout="constrained")
    left, right = figure.subplots(1, 2, sharey=True)
    plot_histories(histories, left, "step", y, legend=False)
    plot_histories(histories, right, "payload", y, legend=False)
    right.set_ylabel("")
    _zoom_on_training(left, histories, y)
    handles, labels = left.get_legend_handles_labels()
    columns = len(labels) if len(labels) <= 6 else -(-len(labels) // 2)
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=9, handlelength=3)
    if title:
        figure.suptitle(title, fontsize=10.5, x=0.01, ha="left")
    return figure


def _zoom_on_training(ax: Axes, histories: Mapping[str, History], y: str) -> None:
    """Let a run that diverges leave the picture, rather than press all others flat."""
    finite = [values[np.isfinite(values)] for values in (h[y] for h in histories.values())]
    finite = [values for values in finite if len(values)]
    if not finite:
        return
    start, best = max(values[0] for values in finite), min(values.min() for values in finite)
    if start > best and max(values.max() for values in finite) > start + 0.5 * (start - best):
        ax.set_ylim(best - 0.05 * (start - best), start + 0.1 * (start - best))
