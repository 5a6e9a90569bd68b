"""The code in README and documentation: found, run as it stands, and compared with what the page says it prints.

`python tests/page_code.py PAGE…` runs pages and writes what their blocks print into them.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import re
import shlex
import sys
import tempfile
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
    "strategies": [],
}
NUMBER = re.compile(r"(?<![A-Za-z_\d.])-?(?:\d{1,3}(?:,\d{3})+|\d+)?(?:(?<=\d)\.|\.(?=\d))?\d*(?:e[+-]?\d+)?(?<=[\d.])")
RTOL = 0.02  # kernels of other machines round differently, and training makes that larger
ROUNDING = 1e-5  # differences below this are rounding alone
OF_THE_MACHINE = ["seconds to simulate"]  # columns of tables whose values may always differ


class Block(NamedTuple):
    """A fenced block: language, text, the line of the page that the text begins at, and options of the fence."""

    kind: str
    text: str
    line: int
    options: dict[str, str] = {}  # noqa: RUF012


def blocks(page: Path) -> Iterator[Block]:
    """Yield the fenced blocks of a page in order."""
    text = page.read_text(encoding="utf-8")
    for match in re.finditer(r"^```(\w+)([^\n]*)\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        options = dict(word.split("=", 1) for word in shlex.split(match[2]))
        yield Block(match[1], match[3], text.count("\n", 0, match.start()) + 2, options)


def run_page(page: Path, write: bool = False) -> dict[str, Any]:
    """Run a page's blocks in order in one scope, and return the scope.

    python: executed. printed: must be what the Python since the last such block has printed, as `difference` compares.
    sh: lines that begin with `vsim` are run in this process, with few steps; other commands are left alone.

    Args:
        write: whether to write what was printed into the page, instead of comparing.
    """
    import matplotlib.pyplot as plt

    from vsim_cli import main

    if "from transformers" in page.read_text(encoding="utf-8"):
        import loadable_torchvision  # noqa: F401
    scope: dict[str, Any] = {"__name__": "__main__"}  # so that processes are sent what a page defines
    printed = io.StringIO()
    outputs = []
    for kind, text, line, options in blocks(page):
        where = f"{page.name}:{line}"
        if kind == "python":
            with contextlib.redirect_stdout(printed):
                exec(compile("\n" * (line - 1) + text, str(page), "exec"), scope)
        elif kind == "printed":
            here = printed.getvalue().replace(f"{os.getcwd()}{os.sep}", "")  # which differs from run to run
            found = "\n".join(row.rstrip() for row in here.strip("\n").splitlines())
            printed = io.StringIO()
            if write:
                outputs.append(found)
            elif why := difference(text.strip("\n"), found, **options):
                raise AssertionError(f"{where}: {why}. The page says\n{text}\nbut it prints\n{found}")
        elif kind == "sh":
            for command in text.replace("\\\n", " ").splitlines():
                words = shlex.split(command, comments=True)
                if words[:1] == ["vsim"]:
                    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
                        warnings.filterwarnings("ignore", ".* that was tried", UserWarning)  # in so few steps
                        assert main([*words[1:], *QUICK[words[1]]]) == 0, f"{where}: {command}"
    plt.close("all")
    if write:
        left = iter(outputs)
        old = page.read_text(encoding="utf-8")
        new = re.sub(
            r"^(```printed[^\n]*\n).*?(^```$)",
            lambda match: f"{match[1]}{next(left)}\n{match[2]}",
            old,
            flags=re.DOTALL | re.MULTILINE,
        )
        page.write_text(new, encoding="utf-8")
    return scope


def difference(page: str, found: str, rtol: str = "", free: str = "", columns: str = "") -> str:
    """Return how what a page says differs from what was found: "" if all words are equal, and numbers nearly.

    Args:
        rtol: how far numbers may be apart, relatively. Default: 2 %, or a unit of the last digit; 0 for integers.
        free: a pattern whose matches may differ, such as paths.
        columns: names of a table's columns whose values may differ, besides OF_THE_MACHINE, joined by commas.
    """
    names = [*OF_THE_MACHINE, *filter(None, columns.split(","))]
    texts = [_comparable(text, free, names) for text in (page, found)]
    words, others = (NUMBER.sub("#", text).split() for text in texts)
    if words != others:
        said, is_now = next(
            ((a, b) for a, b in zip([*words, "its end"], [*others, "its end"], strict=False) if a != b), ("", "")
        )
        return f"{said!r} is now {is_now!r}"
    for said, is_now in zip(*(NUMBER.findall(text) for text in texts), strict=True):
        least = min(filter(None, map(_last_digit, (said, is_now))), default=0.0)
        if "e-" in said + is_now:
            least = max(least, ROUNDING)
        a, b = (float(number.replace(",", "")) for number in (said, is_now))
        if not math.isclose(a, b, rel_tol=float(rtol or (RTOL if least else 0)), abs_tol=1.001 * least):
            return f"{said} is now {is_now}"
    return ""


def _last_digit(number: str) -> float:
    """The value of one unit of the last digit; 0 for an integer, which counts something."""
    digits, _, exponent = number.partition("e")
    decimals = len(digits.partition(".")[2])
    return 10.0 ** (int(exponent or 0) - decimals) if decimals or exponent else 0.0


def _comparable(text: str, free: str, columns: list[str]) -> str:
    """The text without what may differ; rules of tables, which follow the widths of numbers, in one form."""
    lines = text.splitlines()
    for i, line in enumerate(lines):
        if i and re.fullmatch(r" *-+(?: +-+)+", line):
            spans = [match.span() for match in re.finditer("-+", line)]
            unsaid = [span for span in spans if lines[i - 1][slice(*span)].strip() in columns]
            for j in range(i + 1, len(lines)):
                if not lines[j].strip():
                    break
                for start, end in unsaid:
                    lines[j] = lines[j][:start] + " " * (end - start) + lines[j][end:]
            lines[i] = "---"
    text = "\n".join(lines)
    return re.sub(free, "", text) if free else text


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))
    for name in sys.argv[1:]:
        page = Path(name).resolve()
        with tempfile.TemporaryDirectory() as folder:
            os.chdir(folder)
            run_page(page, write=True)
            os.chdir(ROOT)
        print(page.relative_to(ROOT), flush=True)
