"""Blocks of kind `printed`: what the code before them prints. The tests compare; here they are shown as they stand."""

from __future__ import annotations

from typing import Any

from pygments.lexers.special import TextLexer
from sphinx.application import Sphinx


def setup(app: Sphinx) -> dict[str, Any]:
    app.add_lexer("printed", TextLexer)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
