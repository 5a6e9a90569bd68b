"""The code in README and documentation: found, run as it stands, and compared with what the page says it prints."""

from __future__ import annotations

import contextlib
import io
import re
import shlex
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parents[1]
# Arguments added to the commands of a page, to make their test quick.
QUICK_TRAINING = ["--steps", "2", "--val-size", "16", "--quiet", "--out", "vsim-out"]
QUICK = {
    "compare": QUICK_TRAINING,
    "sweep": QUICK_TRAINING,
    "verify": ["--steps", "2", "--quiet"],
    "time": ["--steps", "2"],
    "report": [],
    "show": [],
}


class Block(NamedTuple):
    """A fenced block: its language, its text, and the line of the page that the text begins at."""

    kind: str
    text: str
    line: int


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w+)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        yield Block(match[1], match[2], text.count("\n", 0, match.start()) + 2)


def run_page(page: Path) -> dict[str, Any]:
    """Run a page's blocks in order in one scope, and return the scope.

    python: executed. printed: must be what the Python since the last such block has printed; … stands for anything.
    sh: lines that begin with `vsim` are run in this process, with few steps; other commands are left alone.
    """
    import matplotlib.pyplot as plt

    from vsim_cli import main

    scope: dict[str, Any] = {"__name__": "__main__"}  # so that processes are sent what a page defines
    printed = io.StringIO()
    for kind, text, line in blocks(page):
        where = f"{page.name}:{line}"
        if kind == "python":
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * (line - 1) + text, str(page), "exec"), scope)
        elif kind == "printed":
            pattern = ".*?".join(map(re.escape, text.strip().split("…")))
            found = printed.getvalue().strip()
            assert re.fullmatch(pattern, found, re.DOTALL), f"{where}: the page says\n{text}\nbut it prints\n{found}"
            printed = io.StringIO()
        elif kind == "sh":
            for command in text.replace("\\\n", " ").splitlines():
                words = shlex.split(command, comments=True)
                if words[:1] == ["vsim"]:
                    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                        warnings.filterwarnings("ignore", ".* that was tried", UserWarning)  # in so few steps
                        assert main([*words[1:], *QUICK[words[1]]]) == 0, f"{where}: {command}"
    plt.close("all")
    return scope
