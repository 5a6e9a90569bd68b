"""Figures for a paper: files as publishers require them, and plain numbers as tick labels."""

from __future__ import annotations

import base64
import html
import io
import math
import warnings
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis, XAxis
from matplotlib.figure import Figure
from matplotlib.layout_engine import PlaceHolderLayoutEngine
from matplotlib.ticker import FuncFormatter, Locator, MaxNLocator, NullLocator

from vsim.arguments import given
from vsim.writing import replacing

# Settings of files: PDF embeds fonts as TrueType, which publishers require and readers can search; SVG draws letters as
# shapes, which look the same everywhere.
_FILE: Any = {"pdf.fonttype": 42, "ps.fonttype": 42, "svg.fonttype": "path", "svg.hashsalt": "vsim"}
_METADATA = {".png": {"Software": None}, ".svg": {"Date": None}, ".pdf": {"CreationDate": None}}
# About the fewest and the most tick labels of an axis.
_FEW, _MANY = 3, 7


class PaperFigure(Figure):
    """A matplotlib figure that can be saved for a paper."""

    def save(self, path: str | Path) -> None:
        """Write the figure to a file; see `vsim.figures.paper.save`."""
        save(self, path)


def axes_of(ax: Axes | None, width: float, height: float) -> Axes:
    """Return `ax`, by default the axes of a new figure of this size in inches; raise a TypeError for anything else."""
    if not isinstance(ax, Axes | None):
        raise TypeError(f"ax must be axes of matplotlib, got {given(ax)}")
    return new_figure(width, height).subplots() if ax is None else ax


def save(figure: Figure | Axes, path: str | Path) -> None:
    """Write a figure (or the figure of these axes) for a paper: PNG at 300 dots per inch, PDF with its fonts, or SVG.

    The file has no date: the same figure gives the same file, byte for byte.

    Args:
        figure: any figure or axes of matplotlib.
        path: ends in .png, .pdf or .svg.

    Raises:
        ValueError: the path has another ending.
    """
    suffix = Path(path).suffix.lower()
    if suffix not in _METADATA:
        raise ValueError(f"the path of a figure must end in {', '.join(_METADATA)}, got {str(path)!r}")
    whole = figure if isinstance(figure, Figure) else figure.get_figure(root=True)
    assert whole is not None
    image = io.BytesIO()  # not to a file: matplotlib may hide the error of a full disk
    with matplotlib.rc_context(_FILE):
        whole.draw_without_rendering()  # computes the layout, which differs slightly in a first drawing
        whole.savefig(image, format=suffix[1:], dpi=300, metadata=_METADATA[suffix])
    with replacing(Path(path)) as part:
        part.write_bytes(image.getvalue())


def image_html(figure: Figure | Axes, alt: str) -> str:
    """Return a figure (or the figure of these axes) as an HTML image; close it, so that a notebook shows it once."""
    import matplotlib.pyplot as plt

    whole, image = figure if isinstance(figure, Figure) else figure.get_figure(root=True), io.BytesIO()
    assert whole is not None
    whole.savefig(image, format="png", dpi=130, bbox_inches="tight")
    plt.close(whole)
    encoded = base64.b64encode(image.getvalue()).decode()
    return f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{encoded}"/>'


def new_figure(width: float, height: float) -> PaperFigure:
    """Return a figure of pyplot, which a notebook shows; sizes are in inches."""
    import matplotlib.pyplot as plt  # imported here, since pyplot may open windows

    return plt.figure(figsize=(width, height), dpi=150, layout="constrained", FigureClass=PaperFigure)  # type: ignore[return-value]


def fit(ax: Axes) -> None:
    """Make room for the labels and legend of the caller's axes, unless a layout engine of their figure does so."""
    figure = ax.get_figure(root=True)
    assert figure is not None
    is_free = isinstance(figure.get_layout_engine(), PlaceHolderLayoutEngine | None)  # tight_layout leaves the former
    if is_free and all(own.get_subplotspec() is not None for own in figure.axes):
        with warnings.catch_warnings():  # tight_layout warns if there is no room
            warnings.simplefilter("ignore")
            figure.tight_layout()


def whole_ticks(axis: Axis) -> None:
    """Label a linear axis that counts with whole numbers only."""
    if isinstance(axis.get_major_locator(), MaxNLocator):  # not an axis that the caller made logarithmic
        axis.set_major_locator(MaxNLocator("auto", integer=True, steps=[1, 2, 2.5, 5, 10]))


def plain_ticks(axis: Axis) -> None:
    """Label a logarithmic axis with plain numbers, for large and small ranges."""
    axis.set_major_locator(PlainLocator())
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.10g}"))
    axis.set_minor_locator(NullLocator())


class PlainLocator(Locator):
    """Ticks of a logarithmic axis: decades; for few decades, 1, 2 and 5 in each; for less than one, linear ticks.

    On an axis, there are only as many as their labels leave room for.
    """

    def __call__(self) -> Sequence[float]:
        assert self.axis is not None
        low, high = self.axis.get_view_interval()
        found = [self.tick_values(low, high, room) for room in range(2 * _MANY, 0, -1)]
        return next((ticks for ticks in found if len(ticks) < 2 or self._fits(ticks, low, high)), found[-1][:1])

    def _fits(self, ticks: Sequence[float], low: float, high: float) -> bool:
        """Return whether the labels of ticks do not touch."""
        assert isinstance(self.axis, Axis) and isinstance(self.axis.axes, Axes)
        (tick,), own = self.axis.get_major_ticks(1), self.axis.axes
        is_x, size = isinstance(self.axis, XAxis), float(tick.label1.get_fontsize())
        corners = own.get_window_extent()
        length = (corners.width if is_x else corners.height) * 72 / own.get_figure(root=True).dpi  # type: ignore[union-attr]
        labels = self.axis.get_major_formatter().format_ticks(list(ticks))
        wide = [size * (0.65 * len(label) + 0.5 if is_x else 1.3) for label in labels]
        at = length * np.log(np.array(ticks) / low) / math.log(high / low)
        return all(b - a >= (v + w) / 2 for (a, v), (b, w) in pairwise(zip(at, wide, strict=True)))

    def tick_values(self, vmin: float, vmax: float, room: int = 2 * _MANY) -> Sequence[float]:
        """Return the ticks between two numbers, on an axis with room for so many evenly spaced labels."""
        low, high = min(vmin, vmax), max(vmin, vmax)
        if low <= 0:  # while the axis is empty
            return []
        decades = 10.0 ** np.arange(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
        gap, most = math.log10(high / low) / max(1, room), max(2, min(_MANY, room))  # the least distance, in decades
        for factors, least in (([1.0], 0.0), ([1.0, 2.0, 5.0], math.log10(2)), ([1.0, 3.0], math.log10(3))):
            ticks = np.outer(decades, factors).flatten()
            ticks = ticks[(low <= ticks) & (ticks <= high)]
            if len(ticks) >= min(_FEW, most) and (least >= gap or len(factors) == 1):
                return [float(tick) for tick in ticks[:: -(-len(ticks) // most)]]
        for bins in range(min(_MANY - 2, most), 0, -1):
            linear = np.asarray(MaxNLocator(bins, steps=[1, 2, 5, 10]).tick_values(low, high))
            ticks = linear[(low <= linear) & (linear <= high)]
            if len(ticks) < 2 or math.log10(ticks[-1] / ticks[-2]) >= gap:
                break
        return [float(tick) for tick in ticks]
