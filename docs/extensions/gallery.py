"""The directive `notebooks`: a card for each notebook, with a picture and its row of notebooks/README.md."""

from __future__ import annotations

import base64
import html
import json
import re
import shutil
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"
ROW = re.compile(r"^\| \[(\w+)\]\(\w+\.ipynb\) \| (.*?) \| (.*?) \| (.*?) \|$", re.MULTILINE)


def picture(name: str) -> bytes:
    """The first picture, as a PNG, of the cell tagged `answer`, otherwise of the notebook; empty without pictures."""
    cells = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text(encoding="utf-8"))["cells"]
    cells.sort(key=lambda cell: "answer" not in cell["metadata"].get("tags", []))
    for output in (output for cell in cells for output in cell.get("outputs", [])):
        data = output.get("data", {})
        in_html = re.search(r"data:image/png;base64,([^\"]+)", "".join(data.get("text/html", "")))
        if png := data.get("image/png") or (in_html and in_html[1]):
            return base64.b64decode(png)
    return b""


class Gallery(SphinxDirective):
    """A card for each row of the table in notebooks/README.md."""

    def run(self) -> list[nodes.Node]:
        cards = []
        pictures, downloads = (Path(self.env.app.outdir) / name for name in ("_images", "_downloads"))
        for folder in (pictures, downloads):
            folder.mkdir(parents=True, exist_ok=True)
        for name, question, answer, minutes in ROW.findall((NOTEBOOKS / "README.md").read_text(encoding="utf-8")):
            shown = ""
            if png := picture(name):
                (pictures / f"notebook_{name}.png").write_bytes(png)
                shown = f'<img src="_images/notebook_{name}.png" alt="A figure of {name}" loading="lazy">'
            shutil.copy(NOTEBOOKS / f"{name}.ipynb", downloads)
            unit = "minute" if minutes in ("1", "½") else "minutes"
            text = re.sub(r"`(.*?)`", r"<code>\1</code>", html.escape(answer))
            cards.append(
                f"<li>{shown}<div><strong>{html.escape(question)}</strong><p>{text}.</p>"
                f'<p><a href="_downloads/{name}.ipynb">notebooks/{name}.ipynb</a>, {minutes} {unit}</p></div></li>'
            )
        return [nodes.raw("", f'<ul class="gallery">{"".join(cards)}</ul>', format="html")]


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_directive("notebooks", Gallery)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
