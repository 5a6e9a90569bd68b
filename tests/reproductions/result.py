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
DOCS = HERE.parents[1] / "docs"
PAGE, LONG_PAGE = DOCS / "reproduced.md", DOCS / "long_reproductions.md"
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
        is_part: whether less was trained than published, so that the rows are not compared: the result is on the page
            of long reproductions. whole: with is_part, what the whole would take.
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
    whole: str = ""
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
        rows = [f"| | {table['expected_is']} | measured | agrees |", "| --- | --- | --- | --- |"]
        rows += [f"| {name} | {e} | {m} | {'yes' if good else '**no**'} |" for name, e, m, good in self.lines()]
        if table["is_part"]:
            rows = [f"| | {table['expected_is']} | of a part |", "| --- | --- | --- |"]
            rows += [f"| {name} | {e} | {m} |" for name, e, m, _ in self.lines()]
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
                *([f"**The whole:** {table['whole']}"] if table["whole"] else []),
                "\n".join(rows),
                *notes,
                *([table["note"]] if table["note"] else []),
                cost,
            ]
        )

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


def headline(found: Sequence[Result]) -> str:
    """Return how many numbers agree, which README repeats."""
    agreeing = {result.table["title"]: [agree for *_, agree in result.lines()] for result in found}
    every = [agree for own in agreeing.values() for agree in own]
    worst = sorted(agreeing, key=lambda title: agreeing[title].count(False))[-2:]
    there = sum(agreeing[title].count(False) for title in worst)
    sources = len({result.table["url"] for result in found})
    return (
        f"{sum(every)} of {len(every)} published or derived numbers from {sources} sources agree; {there} of the "
        f"{every.count(False)} others are in two tables of simulated bandwidths"
    )


def page() -> str:
    """Return the text of docs/reproduced.md, from the JSON files of what was compared."""
    found = [result for result in results() if not result.table["is_part"]]
    summary = []
    for result in found:
        good = [agree for *_, agree in result.lines()]
        anchor = "".join(c for c in result.table["title"].lower().replace(" ", "-") if c.isalnum() or c in "-_")
        links = f"[{result.table['source']}]({result.table['url']})"
        count = f"{sum(good)} of {len(good)}"
        summary.append(f"| [{result.table['title']}](#{anchor}) | {links} | {count} | {_seconds(result.seconds)} |")
    head = f"""# Reproduced results

**{headline(found)}.** Rows that disagree stay
in the tables, with what was found about them.

In a checkout, `python -m tests.reproductions [NAME …]` measures them again, saves one JSON file for each in
`tests/reproductions/results/`, and writes this page from those files; `--quick` runs short forms, and saves nothing.
*Measured* is a mean ± half of its 95 % interval over seeds, where there are several. A row agrees if this interval
overlaps the expected value ± tolerance. Runs on clusters are compared in [measured clusters](measured_clusters.md), and
results that take many hours are in [long reproductions](long_reproductions.md).

| result | source | rows that agree | seconds |
| --- | --- | --- | --- |
"""
    return head + "\n".join([*summary, ""]) + "\n" + "\n\n".join(result.section() for result in found) + "\n"


def long_page() -> str:
    """Return the text of docs/long_reproductions.md: scripts that take many hours, or data that is not at hand."""
    found = [result for result in results() if result.table["is_part"]]
    sections = [result.section() for result in found]
    for name, script in scripts().items():
        if script.TABLE.needs:
            published = "\n".join(
                f"| {row} | {one.expected:{script.TABLE.digits}} |" for row, one in script.TABLE.rows.items()
            )
            source = f"source: [{script.TABLE.source}]({script.TABLE.url})"
            sections.append(
                f"## {script.TABLE.title}\n\n{script.TABLE.setting}\n\n[Script](../tests/reproductions/{name}.py) · "
                f"{source}\n\n**The whole:** {script.TABLE.whole}\n\nNot measured here: it needs {script.TABLE.needs}."
                f"\n\n| | published |\n| --- | --- |\n{published}"
            )
    head = """# Long reproductions

Scripts for whoever has the hours, or the data. Here they were run in part, or not at all, so nothing on this page is
compared: what a part gave shows that a script runs, not that a number is reproduced. See [reproduced
results](reproduced.md) for the numbers that were compared.
"""
    return "\n\n".join([head.rstrip(), *sections]) + "\n"
