"""The documentation: every block runs, every link leads somewhere, and it is built without a warning or a fetch."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from page_code import ROOT, Block, blocks, difference, run_page

import vsim
import vsim.strategy

PAGES = [
    ROOT / "CONTRIBUTING.md",
    ROOT / "CHANGELOG.md",
    ROOT / "SECURITY.md",
    *sorted(p for p in (ROOT / "docs").rglob("*.md") if "_build" not in p.parts),
]

LONG = {"tuning", "asynchronous", "participation", "laws", "optuna", "checkpoints", "own-model", "designs"}


def title(page: Path) -> str:
    return str(page.relative_to(ROOT))


def runs() -> list[Any]:
    """Return the pages with code; pages that start processes, or train for long, are marked as slow."""
    pages = []
    for page in PAGES:
        code = "".join(block.text for block in blocks(page) if block.kind in ("python", "sh"))
        slow = [pytest.mark.slow] if page.stem in LONG or re.search(r"verify|backend=\"process\"", code) else []
        pages += [pytest.param(page, id=title(page), marks=slow)] if code else []
    return pages


@pytest.mark.parametrize("page", runs())
@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")  # DeMo on the small models here
def test_every_block_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for optional in re.findall(r"^(?:import|from) (optuna|seaborn)\b", page.read_text(encoding="utf-8"), re.MULTILINE):
        pytest.importorskip(optional)  # in the extra `test`, and so in CI
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(ROOT / "tests"))
    run_page(page)


def test_a_page_that_is_wrong_fails(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\nprint(x, 'and more')\n```\n\n```printed\n1 and more\n```\n")
    assert next(iter(blocks(page))) == Block("python", "x = 1\nprint(x, 'and more')\n", 4, {})
    assert run_page(page)["x"] == 1
    page.write_text("```python\nprint(1)\n```\n```printed\n2\n```\n")
    with pytest.raises(AssertionError, match=r"page.md:5: 2 is now 1. The page says\s+2\s+but it prints\s+1"):
        run_page(page)
    run_page(page, write=True)
    assert page.read_text() == "```python\nprint(1)\n```\n```printed\n1\n```\n"
    page.write_text("```sh\nls  # not run\nvsim compare --strategies none\n```\n")
    with pytest.raises(AssertionError, match="vsim compare --strategies none"):
        run_page(page)


TABLE = "strategy  loss    seconds\n--------  ------  -------\nA         1.0000      2.0\n"
DIFFERENCES: list[tuple[str, str, dict[str, str], str]] = [
    ("loss 1.000 at step 5", "loss 1.019 at step 5", {}, ""),
    ("loss 1.000 at step 5", "loss 1.03 at step 5", {}, "1.000 is now 1.03"),
    ("loss 1.000 at step 5", "loss 1.3 at step 5", {"rtol": "0.3"}, ""),
    ("loss 1.000 at step 5", "loss 1.000 at step 6", {}, "5 is now 6"),
    ("-0.1", "0.1", {}, "-0.1 is now 0.1"),
    ("4,000 of 10", "4,001 of 10", {}, "4,000 is now 4,001"),
    ("apart by 1e-07", "apart by 0", {}, ""),
    ("DiLoCo 1.0 †", "DiLoCo 1.0", {}, "'†' is now 'its end'"),
    ("mean of A", "mean of B", {}, "'A' is now 'B'"),
    ("at /a/b.txt", "at /c/b.txt", {"free": r"/\w/"}, ""),
    (TABLE, TABLE.replace("2.0", "9.5"), {}, "2.0 is now 9.5"),
    (TABLE, TABLE.replace("2.0", "9.5"), {"columns": "seconds"}, ""),
    (TABLE, TABLE.replace("1.0000", "1.1"), {"columns": "seconds"}, "1.0000 is now 1.1"),
    (TABLE, TABLE.replace("seconds", "minutes"), {"columns": "seconds"}, "'seconds' is now 'minutes'"),
]


@pytest.mark.parametrize(("page", "found", "options", "why"), DIFFERENCES)
def test_words_are_compared_exactly_and_numbers_nearly(
    page: str, found: str, options: dict[str, str], why: str
) -> None:
    assert difference(page, found, **options) == why


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=title)
def test_output_says_what_it_shows(page: Path) -> None:
    for block in blocks(page):
        if block.kind == "printed":
            where = f"{page.name}:{block.line}"
            assert re.search(r"[A-Za-z]{2}", re.sub(r"\b(True|False|None|nan)\b", "", block.text)), f"{where}: no words"


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=title)
def test_links_between_files_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text(encoding="utf-8")):
        assert (page.parent / target).exists(), target


@pytest.mark.parametrize("page", [ROOT / "README.md", *PAGES], ids=title)
def test_no_section_stands_twice(page: Path) -> None:
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)
    heads = re.findall(r"^## .+$", text, re.MULTILINE)
    assert len({*heads}) == len(heads), heads


def test_the_saved_answer_is_that_of_the_notebook() -> None:
    section = (ROOT / "docs" / "ladder.md").read_text(encoding="utf-8").partition("## The answer, saved\n")[2]
    said = section.partition("```text\n")[2].partition("```")[0]
    assert said.count("\n") > 10
    cells = json.loads((ROOT / "notebooks" / "decide.ipynb").read_text(encoding="utf-8"))["cells"]
    texts = ["".join(output.get("data", {}).get("text/plain", "")) for c in cells for output in c.get("outputs", [])]
    (answer,) = (text for text in texts if text.startswith(said.partition("\n")[0]))
    assert answer.startswith(said)


def test_what_pages_say_of_strategies_is_made_from_the_classes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "docs" / "extensions"))
    made = importlib.import_module("strategy_tables")
    for page in made.PAGES:
        assert page.read_text(encoding="utf-8") == made.written(page), (
            f"{page}: run python docs/extensions/strategy_tables.py"
        )
    bases = {"Strategy", "CommunicateOptimizeStrategy", "AsynchronousStrategy"}
    exported = {n for n in vsim.strategy.__all__ if n.endswith("Strategy")}
    named = {cls.__name__ for family in made.FAMILIES for cls in made.strategies(family)}
    assert exported - bases == named, f"these need a `family`, one of {[*made.FAMILIES]}: {exported - bases - named}"

    class Faster(vsim.strategy.DiLoCoStrategy):
        """Do less: FasterLoCo [Somebody 2027, arXiv:2701.00001].

        Payload: 4 bytes every H steps. Seldom more.

        Deviations from the paper: it is no faster.
        """

        family = "local steps"

    monkeypatch.setattr(vsim.strategy, "Faster", Faster, raising=False)
    monkeypatch.setattr(vsim.strategy, "__all__", [*vsim.strategy.__all__, "Faster"])
    made_now = made.tables()
    assert (
        "| `Faster` | Do less: FasterLoCo | 4 bytes every H steps | [2701.00001](https://arxiv.org/abs/2701.00001) |\n"
        in made_now
    )
    assert "- `Faster`: it is no faster.\n" in made_now
    assert all(page.read_text(encoding="utf-8") != made.written(page) for page in [*made.PAGES][:2])


def test_changelog_and_citation_name_the_version() -> None:
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    newest = re.search(r"^## \[([\d.]+)\] - ([\d-]+)$", changelog, re.MULTILINE)
    coming = re.search(r"^## \[Unreleased\]\n\nThis will be ([\d.]+),", changelog, re.MULTILINE)
    citation = (ROOT / "CITATION.cff").read_text(encoding="utf-8")
    assert newest and vsim.__version__ == (f"{coming[1]}.dev0" if coming else newest[1])
    assert f'version: {newest[1]}\ndate-released: "{newest[2]}"\n' in citation


def test_the_changelog_of_a_version_is_short() -> None:
    newest = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## [")[1]
    assert newest.count("\n") <= 80  # with the table of old and new names: no diary


@pytest.mark.slow
def test_it_is_built_without_a_warning_and_fetches_nothing(tmp_path: Path) -> None:
    pytest.importorskip("sphinx")
    command = [sys.executable, "-m", "sphinx", "-q", "-W", "--keep-going", "-b", "html", "docs", str(tmp_path)]
    command += ["-D", "toc_object_entries=0"]  # members in the pages' contents take half of the time
    result = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stderr
    pages = list(tmp_path.rglob("*.html"))
    assert len(pages) > len(PAGES)
    # Links may lead elsewhere; what a browser loads by itself must be here.
    loads = re.compile(
        r"<(?:script|img|link rel=\"(?:stylesheet|preload|icon)\")[^>]*(?:src|href)=\"((?:https?:)?//[^\"]+)"
    )
    for page in pages:
        assert loads.findall(page.read_text(encoding="utf-8")) == [], page
    for sheet in tmp_path.rglob("*.css"):
        assert not re.search(r"url\([\"']?(?:https?:)?//|@import [\"']http", sheet.read_text(encoding="utf-8")), sheet
    assert "<math" in (tmp_path / "bytes.html").read_text(encoding="utf-8")
    gallery = (tmp_path / "notebooks.html").read_text(encoding="utf-8")
    assert gallery.count('<li><img src="_images/notebook_') == len([*(ROOT / "notebooks").glob("*.ipynb")])
    # llms.txt has every page of the index, with a first sentence, and each link leads to its source.
    listed = (tmp_path / "llms.txt").read_text(encoding="utf-8")
    assert listed.startswith("# vsim\n\n> vsim simulates distributed training in one process.\n\n## Start here\n\n- [")
    index = (ROOT / "docs" / "index.md").read_text(encoding="utf-8")
    pages_of_index = "".join(re.findall(r"```{toctree}\n(?::[^\n]*\n)+\n(.*?)```", index, re.DOTALL)).split()
    links = re.findall(r"^- \[.+\]\(_sources/(.+)\.md\.txt\): .+$", listed, re.MULTILINE)
    assert links == pages_of_index and all((tmp_path / "_sources" / f"{page}.md.txt").is_file() for page in links)
