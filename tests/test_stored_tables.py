"""Stored tables and notes are those that vsim prints today, and agree with themselves."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from page_code import ROOT, blocks

from vsim.analysis.columns import COLUMNS
from vsim.analysis.tables import HOURS, UNDECIDED, Heading

PAGES = [ROOT / "README.md", *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts)]
NOTEBOOKS = sorted((ROOT / "notebooks").glob("*.ipynb"))


def _in_any_unit(heading: Heading) -> str:
    """A pattern of what a table may call a column."""
    title = re.escape(heading.title).replace(r"\ ", " ").replace(re.escape("{loss}"), r"[\d.]+")
    return title.replace(re.escape("{unit}"), f"({'|'.join(name for name, *_ in heading.measure.units)})")


# Headings of tables of results: of comparisons, of decisions, and of `vsim time`.
_HEADING = re.compile(
    "|".join(map(_in_any_unit, (*COLUMNS, Heading("{unit} per step", HOURS))))
    + r"|note|validated on|of the budget|order|P\(behind .*\)"
)
_PAIRS = re.escape("not significantly different (p > 0.05)")  # of two strategies, at a size of a ladder
_LEGEND = re.escape(UNDECIDED).replace(r"\{\}", "(, .+| at that size)")
# Lines that vsim no longer prints, by a few words of each.
_OLD = (
    *("not told", "no interval says", "to form it takes", "machine seconds", "times less than AllReduce", "(time)"),
    *("nodes that differ", "seeds do not tell", "horizontal, as nothing", "(wire)", "(cost)"),
)


def outputs(path: Path) -> Iterator[str]:
    """Yield the outputs that a page or notebook stores, HTML as text with two blanks between cells."""
    if path.suffix == ".md":
        yield from (block.text for block in blocks(path) if block.kind in ("printed", "text"))
        return
    for cell in json.loads(path.read_text(encoding="utf-8"))["cells"]:
        for output in cell.get("outputs", ()):
            data = output.get("data", {})
            yield "".join(data.get("text/plain", output.get("text", "")))
            if page := "".join(data.get("text/html", "")):
                rows = re.sub(r"</t[hd]>\s*<t[hd][^>]*>", "  ", page)
                yield html.unescape(re.sub(r"<[^>]+>", "\n", rows))


def wrong(text: str) -> list[str]:
    """Return what is old or contradicts itself in an output."""
    found = [f"old words: {old}" for old in _OLD if old in text]
    lines = text.splitlines()
    found += [
        f"legend: {line}"
        for line in lines
        if line.startswith("† ") and not re.fullmatch(f"† ({_LEGEND}|{_PAIRS})", line)
    ]
    for i, line in enumerate(lines):
        names = [name.strip() for name in re.split(r"  +", line.strip())]
        if any(name in ("validation loss", "training loss") for name in names) and len(names) > 2:
            first = names.index(next(name for name in names if name in ("validation loss", "training loss")))
            found += [f"heading: {name}" for name in names[first:] if not (" = " in name or _HEADING.fullmatch(name))]
        words = line.rstrip("\\").split()  # pandas ends the lines of a table that it breaks with it
        if {"difference", "low", "high", "p"} <= set(words):
            found += [] if "to" in words else ["differences without their baseline"]
            found += list(_contradictions(words, lines[i + 1 :]))
    return found


def _contradictions(header: list[str], rows: list[str]) -> Iterator[str]:
    """Yield rows of differences whose interval excludes 0 although p > 0.05, or the other way round."""
    behind = header[header.index("difference") :]
    for row in rows:
        cells = row.split()[-len(behind) :]
        try:
            own = dict(zip(behind, map(float, cells), strict=True))
        except ValueError:
            break
        rounding = 10.0 ** -len(cells[behind.index("low")].partition(".")[2])
        if min(abs(own["low"]), abs(own["high"]), abs(own["p"] - 0.05)) <= rounding:
            continue  # rounded to the border
        if (own["low"] > 0 or own["high"] < 0) != (own["p"] <= 0.05):
            yield f"interval and p: {row}"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_pages_show_what_is_printed_today(path: Path) -> None:
    assert [why for text in outputs(path) for why in wrong(text)] == []


NOW = """
strategy   validation loss  wire GB/node  fewer bytes than AllReduce  minutes  seconds to 1.5
AllReduce         0.2000 †          1.00                        1.0×     2.00           30.00
† not significantly different from the best, DiLoCo (p > 0.05; paired t-tests, Holm over all pairs)
strategy        to  difference    low  high     p  seeds  seeds_needed
  DiLoCo AllReduce       0.106  0.019 0.193 0.034      3             4
  FedAvg AllReduce       0.106 -0.019 0.193 0.234      3            24
"""


@pytest.mark.parametrize(
    ("old", "new", "why"),
    [
        ("", "", ""),
        ("fewer bytes than", "times less than", "heading: times less than AllReduce"),
        ("GB/node", "gigabytes", "heading: wire gigabytes"),
        ("seconds to 1.5", "seconds", ""),
        (", DiLoCo (p", " (p", "legend: "),
        (" over all pairs", "", "legend: "),
        ("0.034", "0.134", "interval and p: "),
        ("0.234", "0.034", "interval and p: "),
        ("        to  ", "            ", "differences without their baseline"),
        ("DiLoCo (p", "DiLoCo (time)(p", "old words: (time)"),
    ],
)
def test_what_is_old_or_contradicts_itself_is_found(old: str, new: str, why: str) -> None:
    found = wrong(NOW.replace(old, new, 1) if old else NOW)
    assert any(one.startswith(why) for one in found) if why else found == []


def test_a_table_that_pandas_breaks_is_read_to_the_break() -> None:
    broken = "strategy to difference low high p  \\\n0 FedAvg DiLoCo 0.14 0.003 0.28 {p}   \n\n  seeds\n0 3"
    assert wrong(broken.format(p=0.0476)) == [] and wrong(broken.format(p=0.0876))[0].startswith("interval and p: ")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebooks_show_what_is_printed_today(path: Path) -> None:
    assert [why for text in outputs(path) for why in wrong(text)] == []
