"""The style of all figures, with the sizes of print."""

from __future__ import annotations

import re
import textwrap
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Settings of all figures, also on the caller's axes; update `plt.rcParams` with them for figures of your own.
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


def literal(text: str) -> str:
    """Escape text for matplotlib: "$" would start mathematics, and a leading "_" would drop the text from legends.

    >>> literal("$5"), literal("_own")
    ('\\\\$5', ' _own')
    """
    return (" " if text.startswith("_") else "") + text.replace("$", r"\$")


# Spaces at which a line must not end: around "=", and between a number and its unit.
_TIGHT = re.compile(r" (?==)|(?<==) |(?<=\d) (?=%|[kMGT]?(?:B|bit/s)\b|m?s\b)")


def joined(text: str) -> str:
    """Make the spaces inside a setting or quantity no-break spaces.

    >>> joined("SPARTA, p = 1 %").split(" ")
    ['SPARTA,', 'p\xa0=\xa01\xa0%']
    """
    return _TIGHT.sub("\N{NO-BREAK SPACE}", text)


def wrapped(text: str, width: int, **options: Any) -> str:
    """Break text into lines, but not inside a setting, a quantity or a word; see `textwrap.fill` for options.

    >>> print(wrapped("DiLoCo, H = 10", 10))
    DiLoCo,
    H = 10
    """
    lines = textwrap.fill(joined(text), max(1, width), break_on_hyphens=False, **options)
    return lines.replace("\N{NO-BREAK SPACE}", " ")


def styled(ax: Axes) -> None:
    """Give axes a pale grid and the sizes of print, and remove the upper and right lines of their frame."""
    ax.grid(True, color="0.9", linewidth=0.6)
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    sized(ax)


def sized(ax: Axes) -> None:
    """Give the text and lines of axes the sizes of print."""
    for spine in ax.spines.values():
        spine.set_linewidth(STYLE["axes.linewidth"])
    ax.tick_params(labelsize=STYLE["xtick.labelsize"], width=STYLE["xtick.major.width"])
    for label in (ax.xaxis.label, ax.yaxis.label):
        label.set_fontsize(STYLE["axes.labelsize"])
