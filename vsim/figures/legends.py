"""Legends: inside a figure or below it, and the lines that they name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from vsim.figures.looks import Look, Looks
from vsim.figures.style import STYLE, literal, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes


_SIZES = {"linewidth": 1.3, "markersize": 4, "markeredgewidth": 1.0}
PAGE = 6.8  # inches: the width of a page of text; a column has 3.3
# Characters of a legend that fit into an inch, and the width of a line's sample with its gaps, in characters.
_CHARACTERS, _BESIDE = 17, 9
# The same in the small letters of a legend on the caller's axes.
_SMALL, _SAMPLE = 20, 8
# A legend with more entries or longer names than this stands below its axes.
_INSIDE, _SHORT = 4, 40
MEAN_REPLICA = "mean replica"
THIN: Any = {"linewidth": 0.7, "alpha": 0.7}
LEGEND: Any = {
    **{"frameon": False, "fontsize": STYLE["legend.fontsize"], "handlelength": 2.8},
    **{"columnspacing": 1.2, "labelspacing": 0.3},
}


def legend_columns(labels: Sequence[str], width: float = PAGE) -> int:
    """Return the number of columns in which a legend fits below a figure of this width, in rows of similar length."""
    longest = max(len(line) for label in labels for line in label.split("\n"))
    fitting = max(1, int(_CHARACTERS * width) // (longest + _BESIDE))
    return -(-len(labels) // -(-len(labels) // fitting))


def rows_of(labels: Sequence[str], columns: int) -> int:
    """Return the number of lines of text of a legend."""
    return -(-sum(1 + label.count("\n") for label in labels) // columns)


def legend_of(ax: Axes, looks: Looks, diverged: Mapping[str, str], width: float) -> tuple[list[Any], list[str], int]:
    """Return a legend's handles, labels and number of columns: a line per name or, with a key, a column per setting.

    A name that is wider than the legend takes several lines.
    """
    from matplotlib.lines import Line2D

    if not looks.key:
        handles, labels = ax.get_legend_handles_labels()
        most = max(10, int(0.9 * _CHARACTERS * width) - _BESIDE)  # counted in wide letters
        labels = [label if len(label) <= most else wrapped(label, most) for label in labels]
        if any(line.get_gid() == MEAN_REPLICA for line in ax.get_lines()):
            handles.append(Line2D([], [], color="0.3", **THIN))
            labels.append(f"thin: {MEAN_REPLICA}")
        return handles, labels, 1
    empty = ("", Look("none", "none", ""))
    groups = [[*([(title, empty[1])] if title else []), *lines] for title, lines in looks.key.items()]
    if diverged:
        min(groups, key=len).append(("diverged", Look("#444444", "none", "x")))
    rows = max(map(len, groups))
    lines = [line for group in groups for line in [*group, *[empty] * (rows - len(group))]]
    return [Line2D([], [], **line_style(look)) for _, look in lines], [literal(text) for text, _ in lines], len(groups)


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
    handles, labels, columns = legend_of(ax, looks, diverged, width)
    style, place = dict(LEGEND), dict[str, Any]()
    is_below = not inside or bool(looks.key) or len(labels) > _INSIDE or max(map(len, labels)) > _SHORT
    if not own and not looks.key:
        style |= {"fontsize": 7, "handlelength": 2.4, "columnspacing": 0.8, "handletextpad": 0.5}
        columns = 2 if is_below and len(labels) > 1 else 1
        most = int(_SMALL * width / columns) - _SAMPLE
        labels = [wrapped(label, most, max_lines=3, placeholder=" …") for label in labels]
    if is_below:
        below = ScaledTranslation(0, -34 / 72, figure.dpi_scale_trans)  # the axis' numbers and label
        place = {"loc": "upper center", "bbox_to_anchor": (0.45, 0), "bbox_transform": ax.transAxes + below}
        columns = legend_columns(labels, width) if own and not looks.key else columns
    ax.legend(handles, labels, ncols=columns, **style, **place)
    if not own:
        fit(ax)
    elif is_below:
        figure.set_figheight(figure.get_figheight() + 0.15 * rows_of(labels, columns))


def line_style(look: Look, thin: bool = False) -> dict[str, Any]:
    sizes = {"linewidth": 0.8, "markersize": 2.5, "markeredgewidth": 0.7} if thin else _SIZES
    style = {"color": look.colour, "linestyle": look.dash, "marker": look.marker, "markerfacecolor": "white"}
    return {**style, **sizes}
