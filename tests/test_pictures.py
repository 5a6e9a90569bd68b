"""The pictures of README and documentation: each is drawn by the code of its page, or by a script that is named."""

from __future__ import annotations

import ast
import importlib
import re
from pathlib import Path
from typing import Any

import pytest
from page_code import ROOT, blocks
from pictures import ELSEWHERE, draw, pictures

import vsim.figures.paper
from vsim.figures.looks import COLOURS

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_picture_has_its_code(page: Path) -> None:
    drawn = {path: expression for _, expression, path in pictures(page)}
    others = {path for other in PAGES for _, _, path in pictures(other)}
    code = "\n".join(block.text for block in blocks(page) if block.kind == "python")
    for target in re.findall(r"!\[[^\]]*\]\(([^)]+\.png)\)", page.read_text(encoding="utf-8")):
        path = (page.parent / target).resolve()
        assert path.is_file() and (path in others) != (path.relative_to(ROOT).as_posix() in ELSEWHERE), target
    for expression in drawn.values():
        names = {node.id for node in ast.walk(ast.parse(expression, mode="eval")) if isinstance(node, ast.Name)}
        assert names and all(re.search(rf"\b{name}\b", code) for name in names), expression


def test_no_picture_is_left_over() -> None:
    shown = {path for page in PAGES for _, _, path in pictures(page)} | {ROOT / path for path in ELSEWHERE}
    assert set((ROOT / "docs" / "images").glob("*.png")) <= shown
    assert all((ROOT / path).is_file() for path in ELSEWHERE)


def test_pictures_are_drawn_where_they_stand(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page, saved = tmp_path / "page.md", dict[str, Any]()
    picture = "<!-- picture: x + {0} -->\n![x]({0}.png)\n"
    page.write_text(
        picture.format(1)
        + "```python\nx = 5\n```\n"
        + picture.format(2)
        + "```python\nx = 7\n```\n"
        + picture.format(3)
    )
    monkeypatch.setattr("pictures.write", lambda figure, path: saved.update({path.stem: figure}))
    assert [path.stem for path in draw(page)] == ["1", "2", "3"]
    assert saved == {"1": 8, "2": 7, "3": 10}


def test_the_figure_of_the_bench_names_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "tests" / "benchmarks"))
    bench = importlib.import_module("bench_step")
    made: list[Any] = []
    monkeypatch.setattr(vsim.figures.paper, "save", lambda figure, path: made.append(figure))
    seconds = {"separate": 3e-3, "auto": 1e-3, "bare": 5e-4, "floor": 2e-4}
    lines = [{"model": name, "num_nodes": k, "seconds": seconds} for name in ("mlp", "gpt") for k in (1, 4)]
    bench.draw(lines, tmp_path / "bench.png")
    (figure,) = made
    assert [text.get_text() for text in figure.legends[0].get_texts()] == ["K modules", "auto", "bare", "floor"]
    assert [ax.get_title() for ax in figure.axes] == ["MLP", "GPT"]
    measured = [line for line in figure.axes[0].get_lines() if len(line.get_xdata())]
    assert measured[0].get_ydata() == pytest.approx([3.0, 0.75]) and {line.get_color() for line in measured} <= {
        *COLOURS
    }
