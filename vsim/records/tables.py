"""Numbers as cells of a table, and tables that fit a width."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

from vsim.arguments import a_text, given, one_of, whole_number

# Digits after the point, if not 2: more for losses and bytes, fewer for times and counts.
_SPREAD = (", worst tenth", ", worst", ", deviation", ", Gini", ", honest", ", attackers")
CLIENT_LOSSES, CLIENT_ACCURACIES = (
    tuple(f"client {name}{which}" for which in ("", f", {percentile}th percentile", *_SPREAD))
    for name, percentile in (("loss", 90), ("accuracy", 10))
)
SIMULATED = "seconds to simulate"
DIGITS = {
    **dict.fromkeys(("validation loss", "training loss", "test loss", "consensus distance", *CLIENT_LOSSES), 4),
    **dict.fromkeys((SIMULATED, "validation seconds"), 1),
}
# Characters that stand for LaTeX commands, because tabulate would escape the commands.
_BOLD, _END, _DAGGER, _PHANTOM = "\ue000", "\ue001", "\ue002", "\ue003"
_COMMANDS = {_BOLD: r"\textbf{", _END: "}", _DAGGER: r"\rlap{$^{\dagger}$}", _PHANTOM: r"\phantom{"}
_NUMBER = re.compile(r"(-?[\d.]+)(?: ± ([\d.]+))?( %|×|)")
_MARKDOWN = ("github", "pipe")
_USED = tuple(f"{of} used" for of in ("time", "cost", "wire", "examples"))  # shares of a budget
PERCENT, _TIMES = (
    ("accuracy", "test accuracy", "utilization", *CLIENT_ACCURACIES, *_USED),
    ("fewer bytes than AllReduce",),
)
# Columns that a table shows only on request, because a table with all columns is wider than a page.
ON_DEMAND = (
    *("perplexity", "payload MB/node", "payload MB/client", "busiest client MB", "validation seconds"),
    *("consensus distance", *CLIENT_LOSSES, *CLIENT_ACCURACIES),
)
_PAGE = 110  # characters
# Word in the name of a column → the units in which a table may show it: name, size in the first word's unit.
_SECONDS = (("milliseconds", 1e-3), ("seconds", 1.0), ("minutes", 60.0), ("hours", 3600.0), ("days", 86400.0))
UNITS = {
    "MB": tuple((name, 10.0 ** (3 * i - 6)) for i, name in enumerate(("B", "kB", "MB", "GB", "TB", "PB"))),
    "hours": tuple((name, size / 3600) for name, size in _SECONDS),
    "seconds": _SECONDS[1:],
}
_LONG, _MANY = 3, 1e4  # times are in days from 3 on; the largest number of a column is below 10,000 of its unit
UNDECIDED = "not significantly different from the best{} (p > 0.05; paired t-tests, Holm over all pairs)"


class Unit(NamedTuple):
    """How a column shows its numbers: its heading, the factor of all numbers, their digits and the sign behind them."""

    heading: str
    factor: float = 1.0
    digits: int = 2
    sign: str = ""


_PLAIN = Unit("")


class Marks(NamedTuple):
    """The marks of a column: the best rows, and the rows that do not differ significantly from the best.

    Attributes:
        legend: the meaning of the †, see `UNDECIDED`.
        remarks: lines below the table on how rows were compared.
    """

    column: str
    best: AbstractSet[int]
    undecided: AbstractSet[int]
    legend: str
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
    width: int | None = None,
) -> str:
    """Return rows of numbers and text as a table. All numbers of a column have one unit, which its heading names.

    Args:
        rows: column → number or text; NaN is shown as a dash. "<column> std" is the standard deviation of a column's
            number; "<column> low" and "<column> high" are the ends of its range.
        format: one of tabulate's, such as "simple", "github", "html" or "latex_booktabs".
        titles: columns that are always shown, in front.
        columns: the other columns to show, in this order; default: all but `on_demand`. By default, notes stand below
            a text table if their column would make it wider than a page.
        digits: digits after the point, for all columns or by column; default: by column.
        marks: the values to mark: † if a value does not differ significantly from the best, bold (LaTeX) for the best.
            Lines below the table explain the † and how rows were compared.
        notes: lines below the table.
        caption: caption of a LaTeX table, which is then a float with a label; "": a bare tabular.
        width: the most characters in a line of a "simple" table: headings are broken, columns are left out and notes
            are wrapped to fit. Default: no limit.

    Raises:
        TypeError: `columns` is not a list of names.
        ValueError: there is no such column or format, or digits are less than 0.
    """
    a_text("format", format)
    if columns is not None and not isinstance(columns, list | tuple):
        raise TypeError(f"columns must be a list of names, such as ['wire MB/node'], got {given(columns)}")
    known = [key for row in rows[:1] for key in row if not key.endswith((" std", " low", " high"))]
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
    alike = {key: [other for other in shown if _quantity(other) == _quantity(key)] for key in shown}
    units = {key: unit_of(key, [row[other] for other in alike[key] for row in rows]) for key in shown}
    units |= {key: units[key]._replace(digits=digits) for key, digits in own.items() if key in units}
    by_name = {
        key: [cell(row[key], row.get(f"{key} std"), units[key], _range_of(row, key)) for row in rows] for key in shown
    }
    if latex:
        by_name = {key: _padded(column) for key, column in by_name.items()}
    for i in range(len(rows)) if marks else ():
        assert marks is not None
        text = by_name[marks.column][i]
        if i in marks.undecided:
            by_name[marks.column][i] = text + (_DAGGER if latex else " †")
        elif i in marks.best and latex:
            by_name[marks.column][i] = f"{_BOLD}{text}{_END}"
    header = {key: [unit.heading] for key, unit in units.items()}
    simple = format == "simple"
    if asked is None and shown[-1:] == ["note"] and simple and _width(header, by_name) > (width or _PAGE):
        names = [", ".join(own) for own in zip(*(by_name[key] for key in titles), strict=True)]
        del header["note"]
        below += [f"{name}: {note}" for name, note in zip(names, by_name.pop("note"), strict=True) if note]
    if width is not None and simple:
        below += _fitted(header, by_name, len(titles) + 1, width)
    below += [*([f"† {marks.legend}"] if marks.undecided else []), *marks.remarks] if marks else []
    if width is not None and simple:
        below = [line for note in below for line in textwrap.wrap(note, max(width, 20), break_long_words=False)]
    cells = [list(row) for row in zip(*by_name.values(), strict=True)]
    return with_notes(aligned(cells, [*header.values()], format, len(titles)), below, format, caption)


def _width(header: Mapping[str, Sequence[str]], cells: Mapping[str, Sequence[str]]) -> int:
    return sum(max(map(len, [*header[key], *cells[key]])) + 2 for key in header) - 2


def _fitted(header: dict[str, list[str]], cells: dict[str, list[str]], least: int, width: int) -> list[str]:
    """Fit a table into a width: break its headings, then leave out columns from the right; return a note on these.

    Args:
        least: the number of columns that are always shown.
    """
    if _width(header, cells) > width:
        for key, (heading,) in header.items():
            narrowest = max(map(len, [*heading.split(), *cells[key]]))
            header[key] = textwrap.wrap(heading, narrowest, break_on_hyphens=False)
    left_out: list[str] = []
    for key in sorted([*header][least:], key=lambda key: (key == SIMULATED, [*header].index(key)), reverse=True):
        if _width(header, cells) <= width:
            break
        left_out.insert(0, " ".join(header.pop(key)))
        del cells[key]
    return [f"not shown in {width} characters: {', '.join(left_out)}"] if left_out else []


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


def aligned(
    cells: Sequence[Sequence[str]], header: Sequence[str | Sequence[str]], format: str, left: int | None = None
) -> str:
    """Return rows of text as a table; escape characters that the format would take for a border.

    Args:
        cells, header: the rows, and the names of the columns, each a text or its lines.
        format: one of tabulate's.
        left: the number of columns, such as names, that are aligned left; columns after them are aligned right.
            Default: all.

    Raises:
        ValueError: there is no such format.
    """
    from tabulate import tabulate, tabulate_formats  # imported here, since tabulate takes time to load

    one_of("format", format, tabulate_formats)
    left = len(header) if left is None else left
    heads = [[own] if isinstance(own, str) else list(own) for own in header]
    if format == "simple":  # like tabulate's format, without the blanks that it adds to columns
        tallest = max(map(len, heads))
        above = list(zip(*([""] * (tallest - len(own)) + own for own in heads), strict=True))
        widths = [max(map(len, column)) for column in zip(*above, *cells, strict=True)]
        lines = [*above, ["-" * width for width in widths], *cells]
        places = [*(["<"] * left), *([">"] * (len(header) - left))]
        shape = "  ".join(f"{{:{place}{width}}}" for place, width in zip(places, widths, strict=True))
        return "\n".join(shape.format(*line).rstrip() for line in lines)
    names = [" ".join(own) for own in heads]
    if format in _MARKDOWN:
        names, *cells = ([" ".join(cell.replace("|", "\\|").splitlines()) for cell in row] for row in (names, *cells))
    alignment = ["left" if i < left else "right" for i in range(len(names))] if cells else None
    return tabulate(cells, headers=names, tablefmt=format, disable_numparse=True, colalign=alignment)


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


def unit_of(key: str, values: Iterable[Any]) -> Unit:
    """Return how a column shows these numbers: in the largest unit in which all are at least a half, with equal digits.

    The largest number stays below 10,000 if a larger unit allows it, and the smallest has two significant digits.

    >>> unit_of("wire MB/node", [225.6e6, 3.9e6])
    Unit(heading='wire TB/node', factor=1e-06, digits=2, sign='')
    >>> unit_of("hours to 1.5", [0.25, 0.02]).heading
    'minutes to 1.5'
    """
    sizes = [size for value in values if not isinstance(value, str) and math.isfinite(value) and (size := abs(value))]
    if key in PERCENT:
        return Unit(key, 100.0, 1, " %")
    if key in _TIMES:
        return Unit(key, digits=1 if min(sizes, default=1.0) < 99.95 else 0, sign="×")
    word = next((word for word in UNITS if re.search(rf"\b{word}\b", key)), "")
    if not word and key != "dollars":
        return Unit(key, digits=0 if key.startswith("steps") else DIGITS.get(key, 2))
    units = UNITS.get(word, ((key, 1.0),))
    least, most = min(sizes, default=1.0), max(sizes, default=1.0)
    place = max(
        (i for i, (name, size) in enumerate(units) if least >= size * (_LONG if name == "days" else 0.5)), default=0
    )
    while most >= _MANY * units[place][1] and place < len(units) - 1:
        place += 1
    name, size = units[place] if sizes else (word, 1.0)  # a column of zeros is in the unit of its name
    digits = 0 if key == "dollars" and least >= 100 else DIGITS.get(key, 2)
    if sizes and key not in DIGITS:
        digits = min(max(digits, 1 - math.floor(math.log10(least / size))), 9)
    return Unit(re.sub(rf"\b{word}\b", name, key) if word else key, 1 / size, digits)


def _quantity(key: str) -> str:
    """Return what columns share whose units are equal: hours and "hours to 2" are shown in minutes, say, or in days."""
    return "hours" if key.startswith("hours to ") else key


def _range_of(row: Mapping[str, Any], key: str) -> tuple[float, float] | None:
    return (row[f"{key} low"], row[f"{key} high"]) if f"{key} low" in row else None


def cell(
    value: Any, deviation: float | None = None, unit: Unit = _PLAIN, ends: tuple[float, float] | None = None
) -> str:
    """Return the text of a cell: the number, and its standard deviation and range if there are, with the same number
    of digits.

    >>> [cell(value, 0.5, unit_of("validation loss", [value])) for value in (1.25, 123456.5)]
    ['1.2500 ± 0.5000', '123456']
    """
    if isinstance(value, str):
        return value
    if math.isnan(value):
        return "–"
    value *= unit.factor
    digits = unit.digits if abs(value) < 1e5 else 0
    form = f".{digits}f" if abs(value) < 1e9 or unit.heading == "steps" else ".3g"
    spread = f"{unit.factor * (deviation or 0.0):{form}}"
    span = "" if ends is None else " ({} to {})".format(*(f"{unit.factor * end:{form}}" for end in ends))
    return f"{value:{form}}{f' ± {spread}' if spread.strip('0.') else ''}{unit.sign}{span}"  # unless 0 in these digits
