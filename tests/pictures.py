"""The pictures of README and documentation, drawn anew by the code of their pages.

In front of a picture, a page has the expression that draws it, which readers do not see:

    <!-- picture: comparison.figure() -->
    ![Loss against step](images/comparing.png)

`python tests/pictures.py PAGE…` runs the code of pages, and writes their pictures. A picture above all code is drawn at
the end of its page. `python tests/pictures.py report` takes the pictures of a report, by chromium.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from page_code import ROOT, blocks

PICTURE = re.compile(r"^<!-- picture: (.+?) -->\n!\[[^\]]*\]\(([^)]+\.png)\)", re.MULTILINE)
# Pictures that something else makes.
ELSEWHERE = {
    "docs/images/atlas.png": "vsim/atlas/pages.py",
    "docs/images/designs.png": "tests/benchmarks/bench_designs.py",
    "docs/images/penalty.png": "notebooks/penalty.ipynb",
    "docs/images/measured_clusters.png": "tests/reproductions/measured_clusters.py",
    "docs/images/quadratics.png": "tests/reproductions/quadratics.py",
    "docs/images/relaysgd_figure.png": "tests/reproductions/relaysgd_figure.py",
    **dict.fromkeys(("docs/images/report.png", "docs/images/report_top.png"), "tests/pictures.py"),
}
# Picture of a report → its height in pixels.
REPORT = {"report.png": 2260, "report_top.png": 1120}


def pictures(page: Path) -> Iterator[tuple[int, str, Path]]:
    """Yield the pictures of a page that its code draws: line, expression, file."""
    text = page.read_text(encoding="utf-8")
    for match in PICTURE.finditer(text):
        yield text.count("\n", 0, match.start()) + 1, match[1], (page.parent / match[2]).resolve()


def write(figure: Any, path: Path) -> None:
    """Write a figure for a page: a column of a paper is about 600 pixels wide."""
    from vsim.figures.paper import save

    save(figure, path)
    reduce(path, 0.6)


def reduce(path: Path, share: float = 1.0) -> None:
    """Make a picture smaller, by its size and its number of colours."""
    from PIL import Image

    with Image.open(path) as image:
        size = round(share * image.width), round(share * image.height)
        small = image.convert("RGB").resize(size, Image.Resampling.LANCZOS)
        small.quantize(128, Image.Quantize.FASTOCTREE).save(path, optimize=True)  # median cut merges colours of lines


def draw(page: Path) -> list[Path]:
    """Run the Python of a page, write its pictures, and return their files."""
    import matplotlib.pyplot as plt

    code = [(block.line, block.text) for block in blocks(page) if block.kind == "python"]
    first, last = code[0][0], code[-1][0] + 1
    drawn = [(line if line > first else last, expression, path) for line, expression, path in pictures(page)]
    scope: dict[str, Any] = {"__name__": "__main__"}
    for line, text, *path in sorted([*code, *drawn], key=lambda one: one[0]):
        with contextlib.redirect_stdout(io.StringIO()):
            if path:
                write(eval(text, scope), path[0])
            else:
                exec(compile("\n" * (line - 1) + text, str(page), "exec"), scope)
        plt.close("all")
    return [path for _, _, path in drawn]


def draw_report() -> list[Path]:
    """Train seven strategies, and write pictures of their page."""
    import vsim
    from vsim import Compute
    from vsim.data import digits
    from vsim.models import MLP
    from vsim.strategy import (
        AloneStrategy,
        DeMoStrategy,
        DiLoCoStrategy,
        FedAvgStrategy,
        SimpleReduceStrategy,
        SPARTAStrategy,
        StreamingDiLoCoStrategy,
    )

    strategies = {
        "AllReduce": SimpleReduceStrategy(lr=2e-3),
        "FedAvg": FedAvgStrategy(H=10, lr=2e-3),
        "DiLoCo": DiLoCoStrategy(H=10, lr=2e-3),
        "Streaming DiLoCo": StreamingDiLoCoStrategy(H=10, fragments=2, delay=1, mixing=0.5, lr=2e-3),
        "SPARTA": SPARTAStrategy(lr=2e-3),
        "DeMo": DeMoStrategy(index_bytes="packed", compression_topk=8, lr=2e-3),
        "alone": AloneStrategy(lr=2e-3),
    }
    comparison = vsim.compare(
        MLP(seed=0), *digits(), strategies=strategies, num_nodes=8, max_steps=120, val_interval=2, seeds=list(range(8))
    )
    page = comparison.report("report.html", network="200 Mbit/s, 50 ms", compute=Compute(0.8, dollars_per_hour=2))
    for name, height in REPORT.items():
        command = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars"]
        command += [
            f"--window-size=1280,{height}",
            f"--screenshot={ROOT / 'docs' / 'images' / name}",
            page.resolve().as_uri(),
        ]
        subprocess.run(command, check=True, capture_output=True)
        reduce(ROOT / "docs" / "images" / name)
    return [ROOT / "docs" / "images" / name for name in REPORT]


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    for place in [name if name == "report" else Path(name).resolve() for name in sys.argv[1:]]:
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            for path in draw_report() if isinstance(place, str) else draw(place):
                print(path)
            os.chdir(ROOT)
