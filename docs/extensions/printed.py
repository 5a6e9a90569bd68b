"""Blocks of kind `printed`: what the code before them prints. The tests compare; here they are shown as they stand.

A block without columns is a message, whose lines may wrap. Beside columns, long lines of words are broken.
"""

from __future__ import annotations

import re
import textwrap
from typing import Any

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

COLUMNS = re.compile(r"\S {2,}\S|^ *--", re.MULTILINE)
WIDTH = 118  # characters of code beside the navigation, in a window of 1,300 pixels


def mark_messages(app: Sphinx, document: nodes.document) -> None:
    """Give blocks without columns the class `wraps`; break the lines of words in the others."""
    for block in document.findall(nodes.literal_block):
        if block.get("language") not in ("printed", "text"):
            continue
        if COLUMNS.search(block.astext()):
            lines = [_broken(line) for line in block.astext().splitlines()]
            block.children = [nodes.Text("\n".join(lines))]
            block.rawsource = block.astext()
        elif block.get("language") == "printed":
            block["classes"].append("wraps")


def _broken(line: str) -> str:
    """The line, in several if it is long and has no columns."""
    return line if len(line) <= WIDTH or COLUMNS.search(line) else textwrap.fill(line, WIDTH, subsequent_indent="   ")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_lexer("printed", TextLexer)
    app.connect("doctree-read", mark_messages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
