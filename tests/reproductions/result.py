"""What a script reproduces, what it found, and the page that is made of what was found."""

from __future__ import annotations

import importlib
import json
import os
import platform
import shlex
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import date
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from scipy import stats

import vsim

HERE = Path(__file__).parent
RESULTS = HERE / "results"
PAGE = HERE.parents[1] / "docs" / "reproduced.md"
Found = Mapping[str, float | Sequence[float]]  # row → a value, or one a seed


@dataclass(frozen=True)
class Row:
    """One number: `expected` (or all from expected[0] to expected[1]), give or take `within`.

    `note` says what was found about a number that disagrees. `source` says where the number is, if rows differ in it.
    """

    expected: float | tuple[float, float]
    within: float = 0.0
    unit: str = ""
    note: str = ""
    source: str = ""


@dataclass(frozen=True)
class Table:
    """What a script reproduces.

    Args:
        title, setting: of the section; what is trained or computed, as text.
        source: paper and table, or the formula. url: of it.
        rows: what was published or derived.
        digits: of the printed numbers, after the point, or significant ones as in ".3g".
        quick_agrees: whether the quick form must agree with the rows, too.
        figure: a picture that `measure(False)` draws, in docs/.
        needs: data that this page was made without; the result is then not on it.
        is_part: whether less was trained than published, so that the rows are not compared.
        note: what a reader should know. expected_is: the heading of the rows' column.
    """

    title: str
    setting: str
    source: str
    url: str
    rows: Mapping[str, Row]
    digits: str = ".4g"
    quick_agrees: bool = True
    is_part: bool = False
    needs: str = ""
    figure: str = ""
    note: str = ""
    expected_is: str = "published"


@dataclass
class Result:
    """What was found, as it stands in a JSON file."""

    name: str
    table: dict[str, Any]
    found: dict[str, list[float]]
    seconds: float
    command: str
    date: str = field(default_factory=lambda: date.today().isoformat())
    versions: dict[str, str] = field(
        default_factory=lambda: {
            "vsim": vsim.__version__,
            "torch": torch.__version__,
            "python": platform.python_version(),
        }
    )
    cores: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))

    @classmethod
    def of(cls, script: ModuleType, found: Found, seconds: float, options: Sequence[str] = ()) -> Result:
        """Return the result of a script; rows that were not measured are left out."""
        name = script.__name__.rpartition(".")[2]
        values = {row: [float(v) for v in (one if isinstance(one, Sequence) else [one])] for row, one in found.items()}
        command = shlex.join(["python", "-m", "tests.reproductions", name, *(["--", *options] if options else [])])
        return cls(name, as_json(script.TABLE), values, seconds, command)

    def save(self) -> None:
        RESULTS.mkdir(exist_ok=True)
        text = json.dumps(asdict(self), indent=1, ensure_ascii=False)
        (RESULTS / f"{self.name}.json").write_text(text + "\n", encoding="utf-8")

    def lines(self) -> Iterator[tuple[str, str, str, bool]]:
        """Yield, for each row that was measured: its name, what was expected, what was measured, and if they agree."""
        for name, row in self.table["rows"].items():
            if name in self.found:
                mean, half = interval(self.found[name])
                yield name, self._expected(row), self._number(mean, row, half), agrees(mean, half, row)

    def section(self) -> str:
        """Return the page's section."""
        table = self.table
        script = f"../tests/reproductions/{self.name}.py"
        rows = [
            f"| | {table['expected_is']} | measured | agrees |",
            "| --- | --- | --- | --- |",
            *(f"| {name} | {e} | {m} | {self._compared(good)} |" for name, e, m, good in self.lines()),
        ]
        notes = [f"{name}: {row['note']}" for name, row in table["rows"].items() if row["note"] and name in self.found]
        notes = [note.replace(": \n", ":\n") for note in notes]  # a list of remarks
        versions = ", ".join(f"{name} {version}" for name, version in self.versions.items())
        cost = f"{_seconds(self.seconds)} s on {self.cores} cores, {self.date}, {versions}: `{self.command}`"
        return "\n\n".join(
            [
                f"## {table['title']}",
                table["setting"],
                f"[Script]({script}) · source: [{table['source']}]({table['url']})",
                *([f"![{table['title']}]({table['figure']})"] if table["figure"] else []),
                "\n".join(rows),
                *notes,
                *([table["note"]] if table["note"] else []),
                cost,
            ]
        )

    def _compared(self, good: bool) -> str:
        return "–" if self.table["is_part"] else "yes" if good else "**no**"

    def _expected(self, row: dict[str, Any]) -> str:
        low, high = bounds(row["expected"])
        unit = f" {row['unit']}" if row["unit"] else ""
        text = self._shown(low) if low == high else f"{self._shown(low)} to {self._shown(high)}"
        text += f" ± {_two_digits(row['within'])}" if row["within"] else ""
        return f"{text}{unit}" + (f" ({row['source']})" if row["source"] else "")

    def _number(self, mean: float, row: dict[str, Any], half: float) -> str:
        return (
            self._shown(mean) + (f" ± {_two_digits(half)}" if half else "") + (f" {row['unit']}" if row["unit"] else "")
        )

    def _shown(self, value: float) -> str:
        return format(value, self.table["digits"])


def _two_digits(value: float) -> str:
    """Return a number with two significant digits and without an exponent: 140, not 1.4e+02."""
    return f"{float(f'{value:.2g}'):.10g}" if value >= 1 else f"{value:.2g}"


def as_json(table: Table) -> dict[str, Any]:
    """Return a table as JSON would give it back."""
    plain: dict[str, Any] = json.loads(json.dumps(asdict(table)))
    return plain


def bounds(expected: float | Sequence[float]) -> tuple[float, float]:
    low, high = expected if isinstance(expected, Sequence) else (expected, expected)
    return low, high


def _two_digits(value: float) -> str:
    """Return two significant digits, and no exponent of large numbers: 140 instead of 1.4e+02."""
    return f"{float(f'{value:.2g}'):g}"


def _seconds(seconds: float) -> str:
    return f"{seconds:,.0f}" if seconds >= 100 else f"{seconds:.3g}"


def interval(values: Sequence[float]) -> tuple[float, float]:
    """Return the mean of values, and half of its 95 % interval by Student's t: 0 for one value."""
    n = len(values)
    if n == 1:
        return values[0], 0.0
    return statistics.fmean(values), float(stats.t.ppf(0.975, n - 1)) * statistics.stdev(values) / n**0.5


def agrees(mean: float, half: float, row: Mapping[str, Any]) -> bool:
    """Whether the interval of what was measured and that of what was expected have a number in common."""
    low, high = bounds(row["expected"])
    return low - row["within"] - half <= mean <= high + row["within"] + half


def scripts() -> dict[str, ModuleType]:
    """Return the scripts by name: the modules of this folder that have a TABLE."""
    package = __name__.rpartition(".")[0]
    names = sorted(path.stem for path in HERE.glob("*.py") if not path.stem.startswith("_"))
    modules = {name: importlib.import_module(f"{package}.{name}") for name in names}
    return {name: module for name, module in modules.items() if hasattr(module, "TABLE")}


def results() -> list[Result]:
    """Return what the JSON files hold."""
    return [Result(**json.loads(path.read_text(encoding="utf-8"))) for path in sorted(RESULTS.glob("*.json"))]


def page() -> str:
    """Return the text of docs/reproduced.md, from the JSON files; scripts without one are named."""
    found = results()
    summary = []
    for result in found:
        good = [agree for *_, agree in result.lines()]
        anchor = "".join(c for c in result.table["title"].lower().replace(" ", "-") if c.isalnum() or c in "-_")
        links = f"[{result.table['source']}]({result.table['url']})"
        count = "a part, not compared" if result.table["is_part"] else f"{sum(good)} of {len(good)}"
        summary.append(f"| [{result.table['title']}](#{anchor}) | {links} | {count} | {_seconds(result.seconds)} |")
    head = """# Reproduced results

Which published numbers and formulas does vsim reproduce? In a checkout, `python -m tests.reproductions [NAME …]`
measures them again, saves one JSON file for each in `tests/reproductions/results/`, and writes this page from those
files; `--quick` runs short forms, and saves nothing. *Measured* is a mean ± half of its 95 % interval over seeds,
where there are several. A row agrees if this interval overlaps the expected value ± tolerance. Rows that disagree stay
in the table, with what was found about them.

| result | source | rows that agree | seconds |
| --- | --- | --- | --- |
"""
    known = {result.name for result in found}
    missing = [
        f"Not measured here: [{script.TABLE.title}](../tests/reproductions/{name}.py) needs {script.TABLE.needs}."
        for name, script in scripts().items()
        if name not in known and script.TABLE.needs
    ]
    summary += ["", *missing] if missing else []
    return head + "\n".join([*summary, ""]) + "\n" + "\n\n".join(result.section() for result in found) + "\n"
