"""The scripts of reproduced results: the page is what they found, and the quick form of each still finds it."""

from __future__ import annotations

import ast
import importlib.util
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
from reproductions import relaysgd_figure, result

SCRIPTS = sorted(path.stem for path in result.HERE.glob("*.py") if "\nTABLE = " in path.read_text(encoding="utf-8"))
# What users import from.
PUBLIC = {
    "vsim",
    "vsim.cluster",
    "vsim.data",
    "vsim.models",
    "vsim.network",
    "vsim.records.plots",
    "vsim.strategy",
    "vsim.strategy.communicate",
}


# Scripts without training that take no longer than a few seconds.
AT_ONCE = ("demo_bytes", "desloc_bytes", "ditto_lambda", "dsgd_rates", "privacy_epsilon", "qsr_shares", "scaling_laws")


def test_the_pages_are_what_the_files_give() -> None:
    for page, text in ((result.PAGE, result.page()), (result.LONG_PAGE, result.long_page())):
        assert page.read_text(encoding="utf-8") == text, "run python -m tests.reproductions --page"


def test_the_page_has_only_what_was_compared_and_readme_says_how_much_agrees() -> None:
    compared = [found for found in result.results() if not found.table["is_part"]]
    text, readme = result.page(), (result.PAGE.parents[1] / "README.md").read_text(encoding="utf-8")
    agreeing = sum(good for found in compared for *_, good in found.lines())
    assert f"**{agreeing} of {text.count('| yes |') + text.count('| **no** |')} " in text.splitlines()[2]
    assert f"[{result.headline(compared)}](docs/reproduced.md)" in " ".join(readme.split())
    for found in compared:  # what disagrees is explained, by row or for the table
        assert all(good or found.table["rows"][row]["note"] or found.table["note"] for row, _, _, good in found.lines())


def test_every_script_has_a_result_whose_text_is_the_scripts() -> None:
    scripts = result.scripts()
    measured = [found.name for found in result.results()]
    assert [*scripts] == SCRIPTS
    assert all(name in measured or scripts[name].TABLE.needs for name in scripts) and {*measured} <= scripts.keys()
    for found in result.results():
        assert found.table == result.as_json(scripts[found.name].TABLE), "run python -m tests.reproductions --page"
        assert found.found and found.found.keys() <= found.table["rows"].keys()


def test_a_number_that_disagrees_says_so() -> None:
    rows = {"far": result.Row(1.0, within=0.1, note="too far"), "near": result.Row((1, 2)), "left out": result.Row(0)}
    table = result.Table("Title", "Setting.", "Somebody 2027", "https://arxiv.org/abs/2701.00001", rows)
    found = result.Result("name", result.as_json(table), {"far": [1.2], "near": [0.8, 1.0]}, 1.5, "command")
    assert [good for *_, good in found.lines()] == [False, True]
    section = found.section()
    assert "| far | 1 ± 0.1 | 1.2 | **no** |" in section and "far: too far" in section
    assert f"| near | 1 to 2 | 0.9 ± {12.7062 * 0.1414214 / math.sqrt(2):.2g} | yes |" in section


def imports(path: Path) -> Iterator[tuple[str, str | None]]:
    """Yield the modules of vsim that a file imports, and what it imports from them."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((alias.name, None) for alias in node.names if alias.name.split(".")[0] == "vsim")
        elif isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] == "vsim":
            yield from ((str(node.module), alias.name) for alias in node.names)


@pytest.mark.parametrize("path", sorted(result.HERE.glob("*.py")), ids=lambda path: path.name)
def test_scripts_import_what_users_import(path: Path) -> None:
    assert {module for module, _ in imports(path)} <= PUBLIC


def test_what_benchmarks_import_is_there() -> None:
    for path in (result.HERE.parent / "benchmarks").glob("*.py"):
        for module, name in imports(path):
            found = importlib.import_module(module)
            assert name is None or hasattr(found, name) or importlib.util.find_spec(f"{module}.{name}"), (path, name)


def test_two_hundred_integers_of_a_figure() -> None:
    """Steps of gossip, D², tracking, push-sum and relayed sums, as the figure's authors printed them."""
    rows = relaysgd_figure.quick_settings()
    found = relaysgd_figure.count(rows)
    assert len(rows) >= 200 and {row.algorithm for row in rows} == {row.algorithm for row in relaysgd_figure.settings()}
    assert [found[row] for row in rows] == [row.steps for row in rows]


@pytest.mark.parametrize("name", [pytest.param(n, marks=[] if n in AT_ONCE else pytest.mark.slow) for n in SCRIPTS])
def test_the_quick_form_still_finds_it(name: str) -> None:
    """A row agrees if it does on the page."""
    if name == "privacy_epsilon":
        pytest.importorskip("dp_accounting")
    script = result.scripts()[name]
    try:
        measured = script.measure(True)
    except FileNotFoundError as error:  # data that the machine does not have
        pytest.skip(str(error))
    found = result.Result.of(script, measured, seconds=0.0)
    assert found.found and found.found.keys() <= script.TABLE.rows.keys()
    saved = {row: good for one in result.results() if one.name == name for row, _, _, good in one.lines()}
    for row, expected, measured, good in found.lines():
        assert all(map(math.isfinite, found.found[row]))
        assert good is saved.get(row, True) or not script.TABLE.quick_agrees, (row, expected, measured)
