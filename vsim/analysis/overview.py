"""The figure of a comparison: loss against step, and against bytes on the wire."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from vsim.arguments import real_number
from vsim.figures.legends import LEGEND, PAGE, legend_columns, legend_of, rows_of
from vsim.figures.looks import Looks, looks_of
from vsim.figures.style import wrapped
from vsim.history.curves import XAxis, bands

if TYPE_CHECKING:
    from vsim.figures.paper import PaperFigure

    Runs = Mapping[str, Any]  # name → a `History`, or one for each seed


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
    handles, labels, columns = legend_of(first, looks, diverged or {}, width)
    if labels:
        if len(looks.key) <= 1:
            columns = legend_columns(labels, width)
        figure.set_figheight(figure.get_figheight() + 0.15 * max(0, rows_of(labels, columns) - 2))
        figure.legend(handles, labels, loc="outside lower center", ncols=columns, **LEGEND)
    if title:
        figure.suptitle(wrapped(title, int(15 * width)), fontsize=9, x=0.01, ha="left")
    return figure
