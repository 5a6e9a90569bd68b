"""The areas of a map of networks, and their names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vsim.figures.legends import LEGEND, legend_columns
from vsim.figures.style import STYLE, joined, literal, wrapped

if TYPE_CHECKING:
    from matplotlib.axes import Axes


Floats = NDArray[np.float64]

# So many tied strategies are one grey area of the map, with this name.
CROWD, OPEN, _GREY, _HATCH = 3, "no clear winner", "#D9D9D9", "//////"
# Letters of a note in an inch.
LETTERS = 19


def fill(ax: Axes, x: Floats, y: Floats, own: NDArray[np.bool_], colours: Sequence[str]) -> None:
    """Fill cells in the first colour, hatched in the second; in grey if there is no colour."""
    from matplotlib.colors import ListedColormap

    cells = np.ma.masked_where(~own, np.zeros(own.shape))
    kind: Any = {"shading": "nearest", "rasterized": True, "vmin": 0, "vmax": 1}
    ax.pcolormesh(x, y, cells, cmap=ListedColormap([*colours[:1], _GREY][:1]), **kind)
    if min(own.shape) < 2:
        return
    # Extend hatches to the edges of the outer cells, not only to their centres.
    level = np.pad(own.astype(float), 1, mode="edge")
    wide, high = (np.concatenate([[v[0] ** 1.5 / v[1] ** 0.5], v, [v[-1] ** 1.5 / v[-2] ** 0.5]]) for v in (x, y))
    for colour in colours[1:]:
        striped = ax.contourf(wide, high, level, levels=[0.5, 1.5], colors="none", hatches=[_HATCH])
        striped.set(edgecolor=colour, linewidth=0.0)
    if not own.all():
        ax.contour(wide, high, level, levels=[0.5], colors="white", linewidths=1.0)


def label(
    ax: Axes,
    x: Floats,
    y: Floats,
    areas: Mapping[tuple[str, ...], NDArray[np.bool_]],
    tints: Mapping[str, str],
    notes: str,
    own: bool,
) -> None:
    """Name the areas of a map: inside where the text fits, otherwise in a legend below the map, above the notes.

    Args:
        x, y: positions (B,) and (L,) of the cells, in data coordinates. areas: names → the area's cells (L, B).
        tints: name → the colour of its area. notes: text below map and legend.
        own: whether vsim made the figure, which then may grow.
    """
    from matplotlib.patches import Patch
    from matplotlib.transforms import ScaledTranslation

    from vsim.figures.paper import fit

    figure = ax.get_figure(root=True)
    assert figure is not None
    listed, height = list[tuple[str, ...]](), figure.get_figheight()
    blank = bool(areas) and not np.any(list(areas.values()), axis=0).all()
    width = 1.2 * figure.get_figwidth() * ax.get_position().width
    below: Any = {"xycoords": "axes fraction", "textcoords": "offset points", "va": "top"}
    while True:  # a legend makes the map smaller
        labels = [wrapped(_name(names), int(LETTERS * width) - 8) for names in listed]
        labels += ["none"] if blank else []
        columns = min(2, legend_columns(labels, width)) if labels else 1
        rows = -(-sum(1 + label.count("\n") for label in labels) // columns)
        if own:
            figure.set_figheight(height + 0.14 * rows + 0.13 * (notes.count("\n") + 1 if notes else 0))
        if labels:
            looks = [
                ([*(tints[name] for name in names), _GREY][0], [tints[name] for name in names[1:]]) for names in listed
            ]
            patches = [
                Patch(facecolor=face, hatch=_HATCH if edge else "", edgecolor=(*edge, face)[0]) for face, edge in looks
            ]
            patches += [Patch(facecolor="white", edgecolor="0.6", linewidth=0.6)] if blank else []
            place = ScaledTranslation(0, -32 / 72, figure.dpi_scale_trans)
            style: Any = {**LEGEND, "handlelength": 1.6, "fontsize": 7, "borderaxespad": 0, "borderpad": 0}
            ax.legend(
                patches,
                labels,
                loc="upper left",
                bbox_to_anchor=(0, 0),
                ncols=columns,
                bbox_transform=ax.transAxes + place,
                **style,
            )
        placed = [ax.annotate(notes, (0, 0), (0, -34 - 11 * rows), fontsize=7, color="0.4", **below)] if notes else []
        fit(ax)
        figure.draw_without_rendering()
        missing = []
        for names, cells in areas.items():
            if names not in listed:
                fitted = _inside(ax, x, y, cells, names)
                placed += [fitted] if fitted is not None else []
                missing += [names] if fitted is None else []
        if not missing:
            return
        listed += missing
        for text in placed:
            text.remove()


def _name(names: tuple[str, ...]) -> str:
    return literal(" or ".join(names)) or OPEN


def _texts(names: tuple[str, ...]) -> list[str]:
    """Return ways to break the name of an area into lines, the widest first."""
    text = joined(_name(names))
    lines = text.replace(" or ", " or\n")
    ways = [text, lines, lines.replace(", ", ",\n"), lines.replace(" ", "\n").replace("\nor", " or")]
    return [way.replace("\N{NO-BREAK SPACE}", " ") for way in dict.fromkeys(ways)]


def _inside(ax: Axes, x: Floats, y: Floats, own: NDArray[np.bool_], names: tuple[str, ...]) -> Any:
    """Write the names into their region, far from its edges; return the text, None if they do not fit."""
    columns = ax.transData.transform(np.stack([x, np.full(len(x), y[0])], 1))[:, 0]
    rows = ax.transData.transform(np.stack([np.full(len(y), x[0]), y], 1))[:, 1]
    from matplotlib.patheffects import withStroke

    frame = ax.get_window_extent()
    halo = [withStroke(linewidth=2, foreground="white", alpha=0.7)]
    style: Any = {"ha": "center", "va": "center", "fontsize": STYLE["legend.fontsize"], "path_effects": halo}
    for said in _texts(names):
        if own.all():
            text = ax.text(0.5, 0.5, said, transform=ax.transAxes, **style)
            if text.get_window_extent().width <= frame.width:
                return text
            text.remove()
            continue
        text = ax.text(x[0], y[0], said, **style)
        box = text.get_window_extent()
        if (cell := _roomiest(own, columns, rows, frame, box.width / 2 + 2, box.height / 2 + 1)) is not None:
            text.set_position((x[cell[1]], y[cell[0]]))
            return text
        text.remove()
    return None


def _roomiest(
    own: NDArray[np.bool_], columns: Floats, rows: Floats, frame: Any, wide: float, high: float
) -> tuple[int, int] | None:
    """Return the cell around which a box stays inside its area when it grows most; None if no cell has room for it.

    The box grows to all sides at once until no cell has room for it, and then in width and in height alone.

    Args:
        own: the area's cells (L, B). columns, rows: their positions in pixels, ascending. frame: the map's box.
        wide, high: half the box's width and height, in pixels.
    """
    counts = np.pad(own.cumsum(0).cumsum(1), ((1, 0), (1, 0)))

    def room(wide: float, high: float) -> NDArray[np.bool_]:
        left, right = np.searchsorted(columns, columns - wide), np.searchsorted(columns, columns + wide, "right")
        low, top = np.searchsorted(rows, rows - high)[:, None], np.searchsorted(rows, rows + high, "right")[:, None]
        inside = counts[top, right] - counts[low, right] - counts[top, left] + counts[low, left]
        in_frame = (frame.x0 <= columns - wide) & (columns + wide <= frame.x1)
        in_frame = in_frame & ((frame.y0 <= rows - high) & (rows + high <= frame.y1))[:, None]
        return in_frame & (inside == (top - low) * (right - left))

    cells = room(wide, high)
    for across, up in ((1, 1), (1, 0), (0, 1)):
        while (larger := room(wide + across, high + up) & cells).any():
            cells, wide, high = larger, wide + across, high + up
    found = np.argwhere(cells)
    return None if len(found) == 0 else (int(found[len(found) // 2][0]), int(found[len(found) // 2][1]))
