"""Write llms.txt next to the pages: the index as links to the sources of the pages, each with its first sentence.

Programs that read documentation for somebody find there, in one small file, what there is [llmstxt.org].
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from docutils import nodes
from sphinx import addnodes
from sphinx.application import Sphinx


def first_sentence(page: nodes.document) -> str:
    """The first sentence of a page's text, in one line; empty if there is none."""
    for paragraph in page.findall(nodes.paragraph):
        if not isinstance(paragraph.parent, nodes.section):
            continue  # of a list or a table
        text = " ".join(paragraph.astext().split())
        return re.split(r"(?<=[.!?])\s", text, maxsplit=1)[0].removesuffix(":")
    return ""


def write(app: Sphinx, error: Exception | None) -> None:
    if error is not None or app.builder.name != "html":
        return
    env, index = app.env, app.env.get_doctree("index")
    lines = [f"# {app.config.project}", "", f"> {first_sentence(index)}"]
    for tree in index.findall(addnodes.toctree):
        lines += ["", f"## {tree['caption']}", ""]
        for _, page in tree["entries"]:
            said = first_sentence(env.get_doctree(page))
            title = env.titles[page].astext()
            lines.append(f"- [{title}](_sources/{page}.md.txt)" + f": {said}" * bool(said))
    (Path(app.outdir) / "llms.txt").write_text("\n".join(lines) + "\n", encoding="utf-8")


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("build-finished", write)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
