"""Numbers as cells of a table."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from vsim.arguments import one_of, whole_number

# Digits after the point, where they are not 2. A loss or a number of bytes needs more, a time or a count fewer.
_DIGITS = {"validation loss": 4, "training loss": 4, "seconds": 1, "validation seconds": 1}
_MARKDOWN = ("github", "pipe")
_PERCENT, _TIMES = ("accuracy", "utilization"), ("times less than AllReduce",)


def text_table(
    rows: Sequence[Mapping[str, Any]],
    format: str,
    titles: Sequence[str],
    columns: Sequence[str] | None = None,
    digits: int | Mapping[str, int] | None = None,
) -> str:
    """Return rows of numbers and text as a table.

    Args:
        rows: column → number or text, NaN: a dash; "<column> std" is the standard deviation of a column's number.
        format: one of tabulate's, such as "simple", "github", "html" or "latex_booktabs".
        titles: columns that are always shown, in front.
        columns: those to show beside them, in this order; default all.
        digits: after the point, for all columns or by column; default by column.

    Raises:
        ValueError: there is no such column, or digits are less than 0.
    """
    if isinstance(columns, str):
        raise TypeError(f"columns must be several names, such as [{columns!r}], got {columns!r}")
    known = [key for row in rows[:1] for key in row if not key.endswith(" std")]
    given = digits if isinstance(digits, Mapping) else dict.fromkeys(known, digits)
    for name in [*(columns or ()), *given]:
        one_of("a column", name, known)
    own = {name: whole_number("digits", n, at_least=0) for name, n in given.items() if n is not None}
    shown = known if columns is None else [*titles, *(name for name in columns if name not in titles)]
    cells = [[_cell(key, row[key], row.get(f"{key} std"), own.get(key)) for key in shown] for row in rows]
    return aligned(cells, shown, format, stralign="right")


def aligned(cells: Sequence[Sequence[str]], header: Sequence[str], format: str, **options: Any) -> str:
    """Return text as a table in one of tabulate's formats, in which no character is taken for a border."""
    from tabulate import tabulate  # here, as it measures the width of text with tables that take time to load

    if format in _MARKDOWN:
        header, *cells = ([" ".join(cell.replace("|", "\\|").splitlines()) for cell in row] for row in (header, *cells))
    return tabulate(cells, headers=header, tablefmt=format, disable_numparse=True, **options)


def _cell(key: str, value: Any, deviation: float | None, digits: int | None) -> str:
    """Text for a cell: the number, and its standard deviation if there is one, with as many digits."""
    if isinstance(value, str):
        return value
    if math.isnan(value):
        return "–"
    unit, scale = (" %", 100.0) if key in _PERCENT else ("×", 1.0) if key in _TIMES else ("", 1.0)
    if digits is None:
        digits = _default_digits(key, value)
    value *= scale
    spread = "" if deviation is None else f"{scale * deviation:.{digits}f}"
    if deviation is None or not spread.strip("0."):  # all alike, to the digits shown
        return f"{value:.{digits}f}{unit}" if abs(value) < 1e5 else f"{value:.3g}{unit}"
    return (
        f"{value:.{digits}f} ± {spread}{unit}" if abs(value) < 1e5 else f"{value:.3g} ± {scale * deviation:.3g}{unit}"
    )


def _default_digits(key: str, value: float) -> int:
    if key in _PERCENT:
        return 1
    if key in _TIMES:
        return 1 if value < 99.95 else 0
    if key.startswith("hours") and 0 < value < 10:
        return 1 - math.floor(math.log10(value))
    if "MB" in key and 0 < value < 0.1:
        return 4
    return 0 if key.startswith("steps") else _DIGITS.get(key, 2)
