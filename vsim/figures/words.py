"""Names and numbers as words."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def quoted(names: Iterable[str]) -> dict[str, str]:
    """Return name → how a list of these names shows it: in quotes if it has a comma, unless it stands alone.

    >>> print(", ".join(quoted(["DiLoCo", "DiLoCo, H = 5"]).values()))
    DiLoCo, "DiLoCo, H = 5"
    """
    names = list(names)
    return {name: f'"{name}"' if "," in name and len(names) > 1 else name for name in names}


def size_text(num_bytes: float) -> str:
    """Return the size of a model as text.

    >>> size_text(512), size_text(25_600), size_text(2.5e6), size_text(4e9)
    ('512 B', '25.6 kB', '2.50 MB', '4 GB')
    """
    if num_bytes < 999.5:
        return f"{num_bytes:.3g} B"
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e12:.3g} TB" if num_bytes >= 1e12 else f"{num_bytes / 1e9:.3g} GB"
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.3g} kB"


def in_short(parameters: float) -> str:
    """Return a number of parameters as text, such as 40k, 1.3B.

    >>> in_short(40_000), in_short(1.3e9), in_short(512)
    ('40k', '1.3B', '512')
    """
    parameters = float(f"{parameters:.3g}")
    for unit, size in (("T", 1e12), ("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if parameters >= size:
            return f"{parameters / size:.3g}{unit}" if parameters < 1e15 else f"{parameters / size:,.0f}{unit}"
    return f"{parameters:.3g}"


def brief_list(names: Sequence[str], most: int = 6) -> str:
    """Return names as text: all or, of more than `most`, the first ones and the number of others.

    >>> brief_list(["a", "b", "c"], 2)
    'a, b and 1 other'
    """
    more = len(names) - most
    return ", ".join(names[:most]) + (f" and {more} other{'s' if more > 1 else ''}" if more > 0 else "")
