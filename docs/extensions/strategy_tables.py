"""Writes what the documentation lists of strategies, from the classes: `python docs/extensions/strategy_tables.py`."""

from __future__ import annotations

import inspect
import re
from pathlib import Path

import vsim.strategy
from vsim.strategy import Algorithm, CommunicationModule

DOCS = Path(__file__).parents[1]
FAMILIES = {
    "data parallel": "Every node communicates at every step.",
    "local steps": "Nodes train alone for H steps, then meet.",
    "federated": "Clients with data of their own, cohorts of which meet at a server.",
    "asynchronous": "Workers have their own speeds, on [a virtual clock](asynchronous.md); give `compute=`.",
}
SOURCE = re.compile(r"(arXiv:|openreview\.net/forum\?id=)([\w.]+\w)")


def strategies(family: str) -> list[type[Algorithm]]:
    """The exported strategies that name this family, the oldest source first."""
    exported = [getattr(vsim.strategy, name) for name in vsim.strategy.__all__]
    classes = [cls for cls in exported if isinstance(cls, type) and issubclass(cls, Algorithm)]
    found = [cls for cls in classes if vars(cls).get("family") == family]
    return sorted(found, key=lambda cls: (_year(paragraphs(cls)[0]), cls.__name__))


def tables() -> str:
    """The page's tables, a section for each family."""
    sections = []
    for family, text in FAMILIES.items():
        rows = [
            "| class | what the nodes do | payload of a node | source | deviations |",
            "| --- | --- | --- | --- | --- |",
            *(f"| {' | '.join(row(cls))} |" for cls in strategies(family)),
        ]
        sections.append(f"## {family.capitalize()}\n\n{text}\n\n" + "\n".join(rows) + "\n")
    listed = ", ".join(f"`{name}`" for name in modules())
    text = f"`CommunicateOptimizeStrategy([modules])` runs any communication modules in order: {listed}."
    return "\n".join([*sections, f"## Compositions\n\n{text}\n"])


def modules() -> list[str]:
    """The names of the exported communication modules."""
    exported = {name: getattr(vsim.strategy, name) for name in vsim.strategy.__all__}
    return [n for n, c in exported.items() if isinstance(c, type) and CommunicationModule in c.__mro__[1:]]


def reference(names: list[str]) -> str:
    """Entries of the reference."""
    entries = [f".. autoclass:: vsim.strategy.{name}\n   :no-members:" for name in names]
    return "\n".join(["```{eval-rst}", *entries, "```\n"])


def row(cls: type[Algorithm]) -> list[str]:
    """The cells of a class: its call, what its nodes do, and from its docstring payload, source and deviations."""
    names = [n for n in inspect.signature(cls.__init__).parameters if n not in ("self", "inner_optim", "options")]
    summary, *rest = paragraphs(cls)
    payload = next(p.removeprefix("Payload: ") for p in rest if p.startswith("Payload: "))
    deviations = [m[1] for p in rest if (m := re.match(r"Deviations? from [^:]*: (.*)", p))]
    return [
        f"`{cls.__name__}({', '.join(names[:4])}{', …' if len(names) > 4 else ''})`",
        re.sub(r" ?\[.*?\]", "", summary).rstrip("."),
        payload.partition(". ")[0].rstrip("."),
        ", ".join(_link(*found) for found in SOURCE.findall(summary)) or "–",
        deviations[0].rstrip(".") if deviations else "–",
    ]


def paragraphs(cls: type[Algorithm]) -> list[str]:
    """The paragraphs of a docstring, each in one line."""
    return [" ".join(paragraph.split()) for paragraph in (inspect.getdoc(cls) or "").split("\n\n")]


def written(page: Path) -> str:
    """The page's text with what is made from the classes as it is now."""
    text = page.read_text(encoding="utf-8")
    made = PAGES[page]()
    return re.sub(r"(: begin -->\n).*?(<!-- end -->)", lambda m: f"{m[1]}\n{made}\n{m[2]}", text, flags=re.DOTALL)


def _link(where: str, number: str) -> str:
    url = f"https://arxiv.org/abs/{number}" if where == "arXiv:" else f"https://{where}{number}"
    return f"[{number}]({url})"


def _year(summary: str) -> str:
    """Digits that sort by date: of arXiv's number, else of the year."""
    found = re.search(r"arXiv:([\d.]+)", summary) or re.search(r"20(\d\d)", summary)
    return found[1] if found else ""


def _named() -> list[str]:
    return [*(cls.__name__ for family in FAMILIES for cls in strategies(family)), "CommunicateOptimizeStrategy"]


PAGES = {
    DOCS / "strategies.md": tables,
    DOCS / "api" / "strategies.md": lambda: reference(_named()),
    DOCS / "api" / "modules.md": lambda: reference(modules()),
}

if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path), encoding="utf-8")
