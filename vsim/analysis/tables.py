"""Numbers as cells of a table, and tables that fit a width."""

from __future__ import annotations

import html
import math
import re
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, NamedTuple

from vsim.arguments import a_text, given, one_of, whole_number

# Characters that stand for LaTeX commands, because tabulate would escape the commands.
_BOLD, _END, _DAGGER, _PHANTOM = "\ue000", "\ue001", "\ue002", "\ue003"
_COMMANDS = {_BOLD: r"\textbf{", _END: "}", _DAGGER: r"\rlap{$^{\dagger}$}", _PHANTOM: r"\phantom{"}
_NUMBER = re.compile(r"(-?[\d.]+)(?: ± ([\d.]+))?( %|×|)")
_MARKDOWN = ("github", "pipe")
_PAGE = 110  # characters
UNDECIDED = "not significantly different from the best{} (p > 0.05; paired t-tests, Holm over all pairs)"


class Measure(NamedTuple):
    """What the numbers of a column measure, which says how they are shown.

    Attributes:
        own: the unit of the numbers, which is in the column's name; "" if they have none.
        units: the units in which a table may show them, ascending: name, size in `own`, and the least number of this
            unit that is shown in it.
        digits: digits after the point. fine: whether there are more if the smallest number needs them for two
            significant ones. whole_from: there are none if all numbers are at least this.
        factor: what the numbers are multiplied by. sign: what follows each of them.
        exact: whether even a large number has all its digits.
    """

    own: str = ""
    units: tuple[tuple[str, float, float], ...] = (("", 1.0, 0.5),)
    digits: int = 2
    fine: bool = False
    whole_from: float = math.inf
    factor: float = 1.0
    sign: str = ""
    exact: bool = False


_SECONDS = (("seconds", 1.0, 0.5), ("minutes", 60.0, 0.5), ("hours", 3600.0, 0.5), ("days", 86400.0, 3.0))
NUMBER, COUNT = Measure(), Measure(digits=0, exact=True)
SHARE, TIMES = Measure(digits=1, factor=100.0, sign=" %"), Measure(digits=1, whole_from=99.95, sign="×")
DOLLARS = Measure(fine=True, whole_from=100)
MEGABYTES = Measure(
    "MB",
    tuple((name, 10.0 ** (3 * i - 6), 0.5) for i, name in enumerate(("B", "kB", "MB", "GB", "TB", "PB"))),
    fine=True,
)
SECONDS = Measure("seconds", _SECONDS, fine=True)
_OF_AN_HOUR = tuple((name, size / 3600, least) for name, size, least in (("milliseconds", 1e-3, 0.5), *_SECONDS))
HOURS = Measure("hours", _OF_AN_HOUR, fine=True)
_MANY = 1e4  # the largest number of a column is below 10,000 of its unit


@dataclass(frozen=True)
class Heading:
    """How a column of a table is shown. A column without one shows text, or numbers with two digits.

    Attributes:
        title: the heading; "{unit}" stands for the unit of the numbers, which a table chooses.
        measure: what the numbers measure. digits: digits after the point, if not the measure's.
        unit_of: the name of the column whose unit this one has, too.
        is_first_out: whether a narrow table leaves it out before all others.
    """

    title: str
    measure: Measure = NUMBER
    digits: int | None = None
    unit_of: str = ""
    is_first_out: bool = False

    @property
    def name(self) -> str:
        """The name of the column in rows and files: the title, with the unit that the numbers have there."""
        return self.title.replace("{unit}", self.measure.own)


class Unit(NamedTuple):
    """How a column shows its numbers: its heading, the factor of all numbers, their digits and the sign behind them.

    Attributes:
        exact: whether even a large number has all its digits.
    """

    heading: str
    factor: float = 1.0
    digits: int = 2
    sign: str = ""
    exact: bool = False


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
    on_demand: Sequence[str] = (),
    width: int | None = None,
    headings: Iterable[Heading] = (),
) -> str:
    """Return rows of numbers and text as a table. All numbers of a column have one unit, which its heading names.

    Args:
        rows: column → number or text; NaN is shown as a dash. "<column> std" is the standard deviation of a column's
            number.
        format: one of tabulate's, such as "simple", "github", "html" or "latex_booktabs".
        titles: columns that are always shown, in front.
        columns: the other columns to show, in this order; default: all but those `on_demand`. By default, notes stand
            below a text table if their column would make it wider than a page.
        digits: digits after the point, for all columns or by column; default: by column.
        marks: the values to mark: † if a value does not differ significantly from the best, bold (LaTeX) for the best.
            Lines below the table explain the † and how rows were compared.
        notes: lines below the table.
        caption: caption of a LaTeX table, which is then a float with a label; "": a bare tabular.
        width: the most characters in a line of a "simple" table: headings are broken, columns are left out and notes
            are wrapped to fit. Default: no limit.
        headings: how columns are shown, see `Heading`.

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
    by_title = {heading.name: heading for heading in headings}
    heads = {key: by_title.get(key) or Heading(key) for key in shown}
    alike = {key: [other for other in shown if _of_unit(heads[other]) == _of_unit(heads[key])] for key in shown}
    units = {key: unit_of(heads[key], [row[other] for other in alike[key] for row in rows]) for key in shown}
    units |= {key: units[key]._replace(digits=digits) for key, digits in own.items() if key in units}
    by_name = {key: [cell(row[key], row.get(f"{key} std"), units[key]) for row in rows] for key in shown}
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
        below += _fitted(header, by_name, len(titles) + 1, width, {key for key in shown if heads[key].is_first_out})
    below += [*([f"† {marks.legend}"] if marks.undecided else []), *marks.remarks] if marks else []
    if width is not None and simple:
        below = [line for note in below for line in textwrap.wrap(note, max(width, 20), break_long_words=False)]
    cells = [list(row) for row in zip(*by_name.values(), strict=True)]
    return with_notes(aligned(cells, [*header.values()], format, len(titles)), below, format, caption)


def _width(header: Mapping[str, Sequence[str]], cells: Mapping[str, Sequence[str]]) -> int:
    return sum(max(map(len, [*header[key], *cells[key]])) + 2 for key in header) - 2


def _fitted(
    header: dict[str, list[str]], cells: dict[str, list[str]], least: int, width: int, first_out: AbstractSet[str]
) -> list[str]:
    """Fit a table into a width: break its headings, then leave out columns from the right; return a note on these.

    Args:
        least: the number of columns that are always shown. first_out: the columns that are left out before all others.
    """
    if _width(header, cells) > width:
        for key, (heading,) in header.items():
            narrowest = max(map(len, [*heading.split(), *cells[key]]))
            header[key] = textwrap.wrap(heading, narrowest, break_on_hyphens=False)
    left_out: list[str] = []
    for key in sorted([*header][least:], key=lambda key: (key in first_out, [*header].index(key)), reverse=True):
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


def unit_of(heading: Heading, values: Iterable[Any]) -> Unit:
    """Return how a column shows these numbers: in the largest unit in which all are at least a half, with equal digits.

    The largest number stays below 10,000 if a larger unit allows it, and the smallest has two significant digits.

    >>> unit_of(Heading("wire {unit}/node", MEGABYTES), [225.6e6, 3.9e6])
    Unit(heading='wire TB/node', factor=1e-06, digits=2, sign='', exact=False)
    >>> unit_of(Heading("{unit} to 1.5", HOURS), [0.25, 0.02]).heading
    'minutes to 1.5'
    """
    own = heading.measure
    sizes = [size for value in values if not isinstance(value, str) and math.isfinite(value) and (size := abs(value))]
    least, most = min(sizes, default=1.0), max(sizes, default=1.0)
    name, size = own.own, 1.0  # a column of zeros is in the unit of its name
    if sizes:
        place = max((i for i, (_, unit, fewest) in enumerate(own.units) if least >= unit * fewest), default=0)
        while most >= _MANY * own.units[place][1] and place < len(own.units) - 1:
            place += 1
        name, size, _ = own.units[place]
    digits = own.digits if heading.digits is None else heading.digits
    if sizes and least >= own.whole_from:
        digits = 0
    if sizes and own.fine and heading.digits is None:
        digits = min(max(digits, 1 - math.floor(math.log10(least / size))), 9)
    return Unit(heading.title.replace("{unit}", name), own.factor / size, digits, own.sign, own.exact)


def _of_unit(heading: Heading) -> str:
    """Return the name of the column that says in which unit this one is shown."""
    return heading.unit_of or heading.name


def cell(value: Any, deviation: float | None = None, unit: Unit = _PLAIN) -> str:
    """Return the text of a cell: the number, and its standard deviation if there is one, with the same number of
    digits.

    >>> loss = Heading("validation loss", digits=4)
    >>> [cell(value, 0.5, unit_of(loss, [value])) for value in (1.25, 123456.5)]
    ['1.2500 ± 0.5000', '123456']
    """
    if isinstance(value, str):
        return value
    if math.isnan(value):
        return "–"
    value *= unit.factor
    digits = unit.digits if abs(value) < 1e5 else 0
    form = f".{digits}f" if abs(value) < 1e9 or unit.exact else ".3g"
    spread = f"{unit.factor * (deviation or 0.0):{form}}"
    return f"{value:{form}}{f' ± {spread}' if spread.strip('0.') else ''}{unit.sign}"  # unless 0 in the digits shown
