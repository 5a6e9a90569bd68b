"""The import path of figures for users; they are drawn in `vsim.figures`, `vsim.history` and `vsim.analysis`."""

from vsim.analysis.overview import overview
from vsim.figures.heatmap import Cell, heatmap
from vsim.figures.legends import LEGEND, PAGE, add_legend
from vsim.figures.looks import COLOURS, DASHES, MARKERS, Look, Looks, looks_by, looks_of
from vsim.figures.style import STYLE
from vsim.history.attendance import attendance, rounds
from vsim.history.curves import X_AXES, Y_LABELS, XAxis, bands, limits, mean_over_seeds, time_axis

__all__ = [
    "COLOURS",
    "DASHES",
    "LEGEND",
    "MARKERS",
    "PAGE",
    "STYLE",
    "X_AXES",
    "Y_LABELS",
    "Cell",
    "Look",
    "Looks",
    "XAxis",
    "add_legend",
    "attendance",
    "bands",
    "heatmap",
    "limits",
    "looks_by",
    "looks_of",
    "mean_over_seeds",
    "overview",
    "rounds",
    "time_axis",
]
