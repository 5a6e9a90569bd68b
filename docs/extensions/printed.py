"""Blocks of kind `printed`: what the code before them prints. The tests compare; here they are shown as they stand.

A block without columns is a message, whose lines may wrap.
"""

from __future__ import annotations

import re
from typing import Any

from docutils import nodes
from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx

COLUMNS = re.compile(r"\S {2,}\S|^ *--", re.MULTILINE)


def mark_messages(app: Sphinx, document: nodes.document) -> None:
    """Give blocks without columns the class `wraps`."""
    for block in document.findall(nodes.literal_block):
        if block.get("language") == "printed" and not COLUMNS.search(block.astext()):
            block["classes"].append("wraps")


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_lexer("printed", TextLexer)
    app.connect("doctree-read", mark_messages)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
