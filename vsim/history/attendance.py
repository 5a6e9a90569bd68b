"""Who took part in which steps of a run: rounds, and a figure."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from vsim.figures.legends import LEGEND
from vsim.figures.style import sized

if TYPE_CHECKING:
    from matplotlib.axes import Axes


History: TypeAlias = Any  # the module of `History` imports this one


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

    from vsim.figures.paper import axes_of, whole_ticks

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
    whole_ticks(ax.xaxis)
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
