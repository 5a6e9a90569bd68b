"""Writes what the documentation lists of strategies, from the classes: `python docs/extensions/strategy_tables.py`."""

from __future__ import annotations

import inspect
import json
import re
import textwrap
from pathlib import Path
from typing import Any

import vsim.strategy
from vsim.algorithms.per_node import replaced_by
from vsim.strategy import Algorithm

DOCS = Path(__file__).parents[1]
GOLDEN = DOCS.parent / "tests" / "golden"
FAMILIES = {
    "data parallel": "Every node communicates at every step.",
    "local steps": "Nodes take H local steps between syncs.",
    "graphs": "Nodes send to their neighbours on a graph, and their weights differ.",
    "federated": "Clients hold their own data; in each round, a cohort of them meets at a server.",
    "rollouts": "One node trains, and sends its weights to receivers that use them.",
    "asynchronous": "Workers have their own speeds, on [a virtual clock](asynchronous.md); give `compute=`.",
}
# Names in the README, where they are others than those of the classes.
NAMES = {
    "SimpleReduce": "AllReduce",
    "StreamingDiLoCo": "Streaming DiLoCo",
    "EagerDiLoCo": "Eager DiLoCo",
    "DESLOC": "DES-LOC",
    "SPARTADiLoCo": "SPARTA-DiLoCo",
    "Hierarchical": "hierarchical averaging",
    "Alone": "nodes alone",
    "Gossip": "gossip",
    "GradientTracking": "gradient tracking",
    "ExactDiffusion": "exact diffusion",
    "QuasiGlobalMomentum": "quasi-global momentum",
    "PushSum": "push-sum",
    "Scaffold": "SCAFFOLD",
    "DPFedAvg": "DP-FedAvg",
    "QFedAvg": "q-FedAvg",
    "DelayedNesterov": "delayed Nesterov",
    "DecoupledDiLoCo": "Decoupled DiLoCo",
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
            "| class | what the nodes do | payload of a node | source |",
            "| --- | --- | --- | --- |",
            *(f"| {' | '.join(row(cls))} |" for cls in strategies(family)),
        ]
        sections.append(f"## {family.capitalize()}\n\n{text}\n\n" + "\n".join(rows) + "\n")
        if found := [f"- `{cls.__name__}`: {what}." for cls in strategies(family) if (what := deviations(cls))]:
            sections.append("Deviations from the papers:\n\n" + "\n".join(found) + "\n")
    wholes = [cls.__name__ for family in FAMILIES for cls in strategies(family) if replaced_by(cls)]
    text = (
        "`CommunicateOptimizeStrategy([SPARTAStrategy(), DiLoCoStrategy(H=50)])` lets strategies communicate in turn, "
        f"around one inner optimizer. No parts of others are {', '.join(f'`{name}`' for name in wholes)}."
    )
    return "\n".join([*sections, f"## Compositions\n\n{text}\n"])


def names() -> str:
    """The README's list: the names of each family."""
    lines = []
    for family in FAMILIES:
        plain = [cls.__name__.removesuffix("Strategy") for cls in strategies(family)]
        line = f"- **{family.capitalize()}**: {', '.join(NAMES.get(name, name) for name in plain)}."
        lines.append(textwrap.fill(line, 120, subsequent_indent="  ", break_on_hyphens=False))
    return "\n".join(lines)


def parts() -> list[str]:
    """The names of the exported algorithms that are only parts of others."""
    exported = {name: getattr(vsim.strategy, name) for name in vsim.strategy.__all__}
    s = vsim.strategy
    bases = (Algorithm, s.Strategy, s.AsynchronousStrategy, s.CommunicateOptimizeStrategy)
    algorithms = {n: c for n, c in exported.items() if isinstance(c, type) and issubclass(c, Algorithm)}
    return [name for name, cls in algorithms.items() if cls not in bases and not hasattr(cls, "family")]


def reference(names: list[str]) -> str:
    """A table of the reference, whose entries have pages of their own."""
    options = [".. autosummary::", "   :toctree: generated", "   :template: plain.rst", "   :nosignatures:", ""]
    return "\n".join(["```{eval-rst}", *options, *(f"   vsim.strategy.{name}" for name in names), "```\n"])


def golden() -> dict[str, dict[str, Any]]:
    """The histories of tests/golden: class → name → what its file holds."""
    found: dict[str, dict[str, Any]] = {}
    for path in sorted(GOLDEN.glob("*.json")):
        history = json.loads(path.read_text(encoding="utf-8"))
        found.setdefault(history["call"].partition("(")[0], {})[path.stem] = history
    return found


def histories() -> str:
    """A table for each history: the weights of each node after each step, and the bytes that it sends."""
    named = {name: history for cls in _named() for name, history in golden().get(cls, {}).items()}
    most = max((history["gradients"] for history in named.values()), key=lambda steps: len(steps[0]))
    sections = ["## Gradients", _table("gradient", [[*rows] for rows in most], range(1, len(most) + 1), {})]
    for name, history in named.items():
        steps = range(len(history["weights"]))
        sent = {"bytes": ["", *(f"{size:g}" for size in history["bytes"])]}
        table = _table("weights", history["weights"], steps, sent)
        sections.append(f"(history-{name})=\n## {name}\n\n`{history['call']}`\n\n{table}")
    return "\n\n".join(sections) + "\n"


def _table(what: str, steps: list[list[list[float]]], numbers: range, columns: dict[str, list[str]]) -> str:
    """A row for each step, a column for each node, and more columns."""
    heads = ["step", *(f"{what} of node {node}" for node in range(len(steps[0]))), *columns]
    lines = [heads, ["---"] * len(heads)]
    for i, (number, nodes) in enumerate(zip(numbers, steps, strict=True)):
        values = [", ".join(f"{value:.5g}" for value in node).replace("-", "−") for node in nodes]
        lines.append([str(number), *values, *(cells[i] for cells in columns.values())])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def row(cls: type[Algorithm]) -> list[str]:
    """The cells of a class: its name, what its nodes do, and from its docstring payload and source."""
    summary, *rest = paragraphs(cls)
    payload = next(p.removeprefix("Payload: ") for p in rest if p.startswith("Payload: "))
    return [
        f"`{cls.__name__}`",
        re.sub(r" ?\[.*?\]", "", summary).rstrip("."),
        payload.partition(". ")[0].rstrip("."),
        ", ".join(_link(*found) for found in SOURCE.findall(summary)) or "–",
    ]


def deviations(cls: type[Algorithm]) -> str:
    """What a docstring says of deviations from the paper; empty if it says nothing, or that there are none."""
    found = [m[1] for p in paragraphs(cls) if (m := re.match(r"Deviations? from [^:]*: (.*)", p))]
    return found[0].rstrip(".") if found and found[0] != "none." else ""


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
    DOCS.parent / "README.md": names,
    DOCS / "strategies.md": tables,
    DOCS / "api" / "strategies.md": lambda: reference(_named()),
    DOCS / "api" / "parts.md": lambda: reference(parts()),
    DOCS / "api" / "histories.md": histories,
}

if __name__ == "__main__":
    for path in PAGES:
        path.write_text(written(path), encoding="utf-8")
