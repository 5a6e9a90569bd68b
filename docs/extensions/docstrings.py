"""The docstrings of the source are plain text with `code` in backticks; this makes reStructuredText of them.

Indented blocks that are no section of napoleon's (update rules, tables, examples of commands) are shown as they stand,
items that share a line of a section get one each, and characters that mean something in reStructuredText but nothing in
a docstring are escaped.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

from sphinx.application import Sphinx
from strategy_tables import golden

CODE = re.compile(r"(`[^`]*`)")
SPECIAL = re.compile(r"\*|\||(?<=\w)_(?!\w)")
LETTER = re.compile(r"((?:^|: )[A-Za-z])\.$")  # "num_nodes: K." is no list
HEADING = re.compile(r"^Attributes\b.*:$")
# Several items of a section on one line: "H: steps between syncs. lr: the learning rate."
ITEM = re.compile(r"(?<=[.;]) (?!default: )(?=[a-z]\w*: )")
OF_FIT = "Training|Validation|Cluster|Computing|Processes|Saving|Record and progress|Your own code"
SECTION = re.compile(rf"^(Args|Attributes.*|Columns|Examples?|Raises|Returns|Yields|{OF_FIT}):$")


TAKE_OPTIONS = {"prepare", "explain", "compare", "sweep", "tune", "verify", "ladder"}
INTERNAL = {"looks", "holding", "set"}


def escaped(line: str) -> str:
    """The line with *, | and a trailing _ escaped, except in `code`."""
    parts = CODE.split(line)
    plain = "".join(part if i % 2 else SPECIAL.sub(r"\\\g<0>", part) for i, part in enumerate(parts))
    return LETTER.sub(r"\1\\.", plain)


def indent_of(line: str) -> int:
    return len(line) - len(line.lstrip())


def prepare(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Rewrite the lines of a docstring in place, before napoleon reads them."""
    result: list[str] = []
    above = ""  # the last line that is not indented
    literal = prompt = False  # within a block that is shown as it stands; within an interpreter's example
    for number, line in enumerate(lines):
        if what == "property" and number == 0:
            line = line.replace(": ", " – ", 1)  # napoleon takes what stands before a colon for the type
        if not line.strip():
            prompt = False
        elif indent_of(line) == 0:
            if literal:
                result.append("")
            above, literal = line, False
        elif not literal and not SECTION.match(above) and indent_of(line) >= 4:
            first = number == 0 or not lines[number - 1].strip() or lines[number - 1] == above
            if first:
                result += ["", "::", ""]
                literal = True
        prompt = prompt or line.lstrip().startswith(">>>")
        if HEADING.match(line):
            line = line.replace(",", "").replace("`", "")
        if literal or prompt:
            result.append(line)
        elif SECTION.match(above) and line != above:
            first_item, *more = ITEM.split(line)
            result += [escaped(first_item), *("    " + escaped(item) for item in more)]
        else:
            result.append(escaped(line))
    lines[:] = [line for line in result if not line.startswith("Alias for field number")]


def link_history(app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]) -> None:
    """Link a strategy to its steps in numbers."""
    if what == "class" and (links := [f":ref:`{stem} <history-{stem}>`" for stem in golden().get(obj.__name__, {})]):
        lines += ["", f"Six steps in numbers: {', '.join(links)}.", ""]


def shorten(app: Sphinx, what: str, name: str, obj: Any, options: Any, signature: str, returns: str) -> Any:
    """Leave out of a signature what `Trainer.fit` documents, and how defaults are made."""
    if not signature:
        return None
    if name.rpartition(".")[2] in TAKE_OPTIONS and "num_epochs" in signature and name != "vsim.Trainer.fit":
        own = inspect.signature(inspect.unwrap(obj)).parameters.values()
        signature = "(" + ", ".join(str(p.replace(annotation=p.empty)) for p in own if p.name != "self") + ")"
    return signature.replace("<factory>", "…"), returns


def skip(app: Sphinx, what: str, name: str, obj: Any, skipped: bool, options: Any) -> bool | None:
    """Skip members that vsim's own modules call, and that matplotlib gives to a figure."""
    return True if name in INTERNAL else None


def setup(app: Sphinx) -> dict[str, Any]:
    app.connect("autodoc-process-docstring", prepare, priority=100)
    app.connect("autodoc-process-docstring", link_history, priority=600)  # after napoleon
    app.connect("autodoc-process-signature", shorten)
    app.connect("autodoc-skip-member", skip)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
