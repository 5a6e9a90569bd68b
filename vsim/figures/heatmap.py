"""A map of numbers over two settings."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from vsim.figures.style import literal, sized

if TYPE_CHECKING:
    from matplotlib.axes import Axes


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
