"""Numbers as cells of a table."""

from __future__ import annotations

import html
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from vsim.arguments import a_text, given, one_of, whole_number

# Digits after the point, if not 2: more for losses and bytes, fewer for times and counts.
CLIENT_LOSSES, CLIENT_ACCURACIES = (
    tuple(f"client {name}{which}" for which in ("", f", {percentile}th percentile", ", worst tenth", ", worst"))
    for name, percentile in (("loss", 90), ("accuracy", 10))
)
DIGITS = {
    **dict.fromkeys(("validation loss", "training loss", "test loss", *CLIENT_LOSSES), 4),
    **dict.fromkeys(("machine seconds", "validation seconds"), 1),
}
# Characters that stand for LaTeX commands, because tabulate would escape the commands.
_BOLD, _END, _DAGGER, _PHANTOM = "\ue000", "\ue001", "\ue002", "\ue003"
_COMMANDS = {_BOLD: r"\textbf{", _END: "}", _DAGGER: r"\rlap{$^{\dagger}$}", _PHANTOM: r"\phantom{"}
_NUMBER = re.compile(r"(-?[\d.]+)(?: ± ([\d.]+))?( %| TB|×|)")
_MARKDOWN = ("github", "pipe")
_USED = tuple(f"{of} used" for of in ("time", "cost", "wire", "examples"))  # shares of a budget
PERCENT, _TIMES = (
    ("accuracy", "test accuracy", "utilization", *CLIENT_ACCURACIES, *_USED),
    ("times less than AllReduce",),
)
# Columns that a table shows only on request, because a table with all columns is wider than a page.
ON_DEMAND = (
    *("perplexity", "payload MB/node", "payload MB/client", "busiest client MB", "validation seconds"),
    *(*CLIENT_LOSSES, *CLIENT_ACCURACIES),
)
_PAGE = 100  # characters
UNDECIDED = "not told from the best by these seeds (p > 0.05, paired t-tests, Holm over all pairs)"


class Marks(NamedTuple):
    """The marks of a column: the best rows, and the rows that do not differ significantly from the best.

    Attributes:
        remarks: lines below the table on how rows were compared.
    """

    column: str
    best: AbstractSet[int]
    undecided: AbstractSet[int]
    remarks: Sequence[str] = ()


def text_table(
    rows: Sequence[Mapping[str, Any]],
    format: str,
    titles: Sequence[str],
    columns: Sequence[str] | None = None,
    digits: int | Mapping[str, int] | None = None,
    marks: Marks | None = None,
    notes: Sequence[str] = (),
    caption: str = "",
    on_demand: Sequence[str] = ON_DEMAND,
) -> str:
    """Return rows of numbers and text as a table.

    Args:
        rows: column → number or text; NaN is shown as a dash. "<column> std" is the standard deviation of a column's
            number.
        format: one of tabulate's, such as "simple", "github", "html" or "latex_booktabs".
        titles: columns that are always shown, in front.
        columns: the other columns to show, in this order; default: all but `on_demand`. By default, notes stand below
            a text table if their column would make it wider than a page.
        digits: digits after the point, for all columns or by column; default: by column.
        marks: the values to mark: † if a value does not differ significantly from the best, bold (LaTeX) for the best.
            Lines below the table explain the † and how rows were compared.
        notes: lines below the table.
        caption: caption of a LaTeX table, which is then a float with a label; "": a bare tabular.

    Raises:
        TypeError: `columns` is not a list of names.
        ValueError: there is no such column or format, or digits are less than 0.
    """
    a_text("format", format)
    if columns is not None and not isinstance(columns, list | tuple):
        raise TypeError(f"columns must be a list of names, such as ['wire MB/node'], got {given(columns)}")
    known = [key for row in rows[:1] for key in row if not key.endswith(" std")]
    by_column = digits if isinstance(digits, Mapping) else dict.fromkeys(known, digits)
    for name in columns or ():
        one_of("columns: each", name, known)
    for name in by_column:
        one_of("digits: a column", name, known)
    own = {name: whole_number("digits", n, at_least=0) for name, n in by_column.items() if n is not None}
    below, asked, latex = list(notes), columns, format.startswith("latex")
    if columns is None:
        columns = [name for name in known if name not in on_demand]
    shown = [*titles, *(name for name in columns if name not in titles)]
    if latex:  # the same number of digits in all rows
        for key in shown:
            known_digits = [_default_digits(key, row[key]) for row in rows if not isinstance(row[key], str)]
            own.setdefault(key, max(known_digits, default=0))
    cells = [[cell(key, row[key], row.get(f"{key} std"), own.get(key)) for key in shown] for row in rows]
    if latex:
        cells = [list(row) for row in zip(*map(_padded, zip(*cells, strict=True)), strict=True)]
    widths = [max(map(len, column)) + 2 for column in zip(shown, *cells, strict=True)]
    if asked is None and shown[-1:] == ["note"] and format == "simple" and sum(widths) - 2 > _PAGE:
        names = [", ".join(row[: len(titles)]) for row in cells]
        below += [f"{name}: {row[-1]}" for name, row in zip(names, cells, strict=True) if row[-1]]
        cells, shown = [row[:-1] for row in cells], shown[:-1]
    if marks is None:
        return with_notes(aligned(cells, shown, format, len(titles)), below, format, caption)
    place = shown.index(marks.column)
    for i, row in enumerate(cells):
        if i in marks.undecided:
            row[place] += _DAGGER if latex else " †"
        elif i in marks.best and latex:
            row[place] = f"{_BOLD}{row[place]}{_END}"
    table = aligned(cells, shown, format, len(titles))
    if marks.undecided:
        below.append(f"† {UNDECIDED}")
    return with_notes(table, [*below, *marks.remarks], format, caption)


def _padded(column: Sequence[str]) -> list[str]:
    """Return the cells of a column, with invisible text that aligns its numbers at their decimal points."""
    found = [_NUMBER.fullmatch(cell) for cell in column]
    widest = max((one[2] for one in found if one and one[2]), key=len, default="")

    def padded(one: re.Match[str]) -> str:
        number, spread, unit = one.groups()
        if not spread:
            return f"{number}{_PHANTOM} ± {widest}{_END}{unit}"
        more = len(widest) - len(spread)
        return f"{number} ± {_PHANTOM + more * '0' + _END if more else ''}{spread}{unit}"

    return [padded(one) if one and widest else cell for one, cell in zip(found, column, strict=True)]


def quoted(names: Iterable[str]) -> dict[str, str]:
    """Return name → how a list of these names shows it: in quotes if it has a comma, unless it stands alone.

    >>> print(", ".join(quoted(["DiLoCo", "DiLoCo, H = 5"]).values()))
    DiLoCo, "DiLoCo, H = 5"
    """
    names = list(names)
    return {name: f'"{name}"' if "," in name and len(names) > 1 else name for name in names}


def with_notes(table: str, notes: Sequence[str], format: str, caption: str = "") -> str:
    """Return a table with lines of text below it."""
    if format.startswith("latex"):
        return _float(table, notes, format, caption)
    if "html" in format:
        return "\n".join([table, *(f"<p>{html.escape(note)}</p>" for note in notes)])
    begin = "\n" if format in _MARKDOWN else ""
    return "\n".join([table, *(begin + " ".join(note.split()) for note in notes)])


def _float(table: str, notes: Sequence[str], format: str, caption: str) -> str:
    """Return a LaTeX table with its notes; and, except for a bare tabular or a longtable, with caption and label."""
    from tabulate import LATEX_ESCAPE_RULES

    def text(own: str) -> str:
        own = " ".join(own.split())
        own = own if format == "latex_raw" else "".join(LATEX_ESCAPE_RULES.get(letter, letter) for letter in own)
        return own.replace("†", r"$^{\dagger}$")

    needs = [rf"% needs \usepackage{{{package}}}" for package in ("booktabs", "longtable") if package in format]
    for mark, command in _COMMANDS.items():
        table = table.replace(mark, command)
    below = [r"\par\smallskip", *(rf"{{\footnotesize {text(note)}\par}}" for note in notes)] if notes else []
    if not caption or format == "latex_longtable":
        return "\n".join([*needs, table, *below])
    head = [*needs, r"\begin{table}", r"\centering", rf"\caption{{{text(caption)}}}", r"\label{tab:comparison}"]
    return "\n".join([*head, table, *below, r"\end{table}"])


def aligned(cells: Sequence[Sequence[str]], header: Sequence[str], format: str, left: int | None = None) -> str:
    """Return rows of text as a table; escape characters that the format would take for a border.

    Args:
        cells, header: the rows, and the names of the columns.
        format: one of tabulate's.
        left: the number of columns, such as names, that are aligned left; columns after them are aligned right.
            Default: all.

    Raises:
        ValueError: there is no such format.
    """
    from tabulate import tabulate, tabulate_formats  # imported here, since tabulate takes time to load

    one_of("format", format, tabulate_formats)
    left = len(header) if left is None else left
    if format == "simple":  # like tabulate's format, without the blanks that it adds to columns
        widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
        lines = [header, ["-" * width for width in widths], *cells]
        places = [*(["<"] * left), *([">"] * (len(header) - left))]
        shape = "  ".join(f"{{:{place}{width}}}" for place, width in zip(places, widths, strict=True))
        return "\n".join(shape.format(*line).rstrip() for line in lines)
    if format in _MARKDOWN:
        header, *cells = ([" ".join(cell.replace("|", "\\|").splitlines()) for cell in row] for row in (header, *cells))
    alignment = ["left" if i < left else "right" for i in range(len(header))] if cells else None
    return tabulate(cells, headers=header, tablefmt=format, disable_numparse=True, colalign=alignment)


def cell(key: str, value: Any, deviation: float | None = None, digits: int | None = None) -> str:
    """Return the text of a cell: the number, and its standard deviation if there is one, with the same number of
    digits.

    >>> cell("validation loss", 1.25, 0.5), cell("utilization", 0.5), cell("wire MB/node", 0.01234)
    ('1.2500 ± 0.5000', '50.0 %', '0.0123')
    """
    if isinstance(value, str):
        return value
    if math.isnan(value):
        return "–"
    unit, scale = (" %", 100.0) if key in PERCENT else ("×", 1.0) if key in _TIMES else ("", 1.0)
    if digits is None:
        digits = _default_digits(key, value)
    if "MB" in key and abs(value) >= 1e6:
        unit, scale = " TB", 1e-6
    value *= scale
    number = f"{value:.{digits}f}" if abs(value) < 1e5 or key == "steps" else f"{value:.3g}"
    if deviation is None:
        return number + unit
    spread = f"{scale * deviation:.{digits}f}"
    if spread.strip("0."):  # not 0 in the digits shown
        number += f" ± {spread if abs(value) < 1e5 else f'{scale * deviation:.3g}'}"
    return number + unit


def _default_digits(key: str, value: float) -> int:
    if key in PERCENT:
        return 1
    if key in _TIMES:
        return 1 if value < 99.95 else 0
    if key.startswith("hours") and 0 < value < 10:
        return 1 - math.floor(math.log10(value))
    if "MB" in key and 0 < value < 0.1:
        return 4
    return 0 if key.startswith("steps") else DIGITS.get(key, 2)
