"""What `vsim bench` has measured, as tables, as a picture and as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, LogLocator, NullLocator
from tabulate import tabulate

from vsim.bench.measure import Line, StrategyLine
from vsim.bench.workloads import MODELS
from vsim.figures.style import STYLE, styled

_STYLES = {
    "separate": "k:",
    "loop": "C1--",
    "vmap": "C0-",
    "trace": "C3-",
    "compiled": "C2-",
    "bare": "C7--",
    "jax": "C4--",
}
_TIMED = ["separate", "loop", "vmap", "trace", "exact", "compiled", "bare", "jax", "floor"]
_NAMES = {"separate": "K modules", "jax": "JAX"}
_COMPARED = [(label, "separate") for label in ("vmap", "trace", "exact", "exact, fused", "auto", "compiled")]
_COMPARED += [("vmap", "floor"), ("compiled", "bare"), ("vmap", "jax"), ("trace", "jax"), ("compiled", "jax")]


def table(lines: Sequence[Line]) -> str:
    """Return the lines as two tables: milliseconds a step, and ratios (`×`: to K separate modules)."""
    known = {label for line in lines for label in line.seconds}
    timed = [label for label in _TIMED if label in known]
    rows = [
        [
            *(f"{1e3 * line.seconds[label]:.3g}" if label in line.seconds else "" for label in timed),
            line.chosen,
            f"{line.share_of_peak:.0%}",
            f"{line.memory_ratio:.2f}",
        ]
        for line in lines
    ]
    milliseconds = _of_lines(lines, rows, [*(f"{_name(label)} ms" for label in timed), "auto is", "of peak", "memory"])
    compared = [(label, base) for label, base in _COMPARED if {label, base} <= known]
    rows = [
        [f"{line.ratios[base][label]:.2f}" if base in line.ratios else "" for label, base in compared] for line in lines
    ]
    header = [f"{label} ×" if base == "separate" else f"{label} / {_name(base)}" for label, base in compared]
    versions = "; ".join(f"{package} {version}" for package, version in _versions(lines).items())
    return f"{milliseconds}\n\n{_of_lines(lines, rows, header)}\n\n{versions}; {torch.get_num_threads()} threads"


def _of_lines(lines: Sequence[Line], rows: list[list[str]], header: list[str]) -> str:
    rows = [[line.model, str(line.num_nodes), *row] for line, row in zip(lines, rows, strict=True)]
    return tabulate(rows, ["model", "K", *header], disable_numparse=True, stralign="right")


def _name(label: str) -> str:
    return _NAMES.get(label, label)


def _versions(lines: Sequence[Line]) -> dict[str, str]:
    timed = ("torch", "jax") if any("jax" in line.seconds for line in lines) else ("torch",)
    return {package: version(package) for package in timed}


def strategy_table(lines: Sequence[StrategyLine]) -> str:
    """Return the lines as a table, one row a model, K and strategy."""
    rows = [
        [
            line.model,
            line.num_nodes,
            label,
            f"{1e3 * seconds:.3g}",
            f"{line.ratios[label]:.2f}",
            f"{line.held_bytes[label] / 1e6:.3g}",
        ]
        for line in lines
        for label, seconds in line.seconds.items()
    ]
    first = next(iter(lines[0].seconds)) if lines else ""
    return tabulate(
        rows,
        ["model", "K", "strategy", "ms/step", f"× {first}", "weights, gradients, optimizer MB"],
        disable_numparse=True,
        colalign=("left", "right", "left", "right", "right", "right") if rows else None,
    )


def figure(lines: Sequence[Line]) -> Figure:
    """Draw the time of a node's step against K beside its peers, a model beside the other, at most a page wide."""
    models = list(dict.fromkeys(line.model for line in lines))
    with matplotlib.rc_context({**STYLE, "axes.titlesize": STYLE["axes.labelsize"]}):
        drawing = Figure(figsize=(min(3.3 * len(models), 7), 3), layout="constrained")
        for ax, model in zip(drawing.subplots(1, len(models), squeeze=False)[0], models, strict=True):
            own = [line for line in lines if line.model == model]
            nodes = [line.num_nodes for line in own]
            for label, style in _STYLES.items():
                if any(label not in line.seconds for line in own):
                    continue
                a_node = [1e3 * line.seconds[label] / line.num_nodes for line in own]
                ax.plot(nodes, a_node, style, marker="o", markersize=3, linewidth=1.2, label=_name(label))
            floor = [1e3 * line.seconds["floor"] / line.num_nodes for line in own]
            lowest = 0.7 * min(floor)
            ax.fill_between(nodes, floor, lowest, color="0.9", label="floor", linewidth=0)
            ax.set_xscale("log", base=2)
            ax.set_yscale("log")
            ax.xaxis.set_major_locator(FixedLocator(nodes))
            ax.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
            for axis in (ax.xaxis, ax.yaxis):
                axis.set_minor_locator(NullLocator())
                axis.set_major_formatter("{x:g}")
            ax.set(title=MODELS[model].title, xlabel="nodes", ylim=(lowest, None))
            styled(ax)
        drawing.axes[0].set_ylabel("ms a node and step")
        labelled: dict[str, Any] = {}
        for ax in drawing.axes:
            handles, labels = ax.get_legend_handles_labels()
            labelled.update(zip(labels, handles, strict=True))
        drawing.legend(
            labelled.values(), labelled, loc="outside lower center", ncols=8 if len(models) > 1 else 3, frameon=False
        )
    return drawing


def save(lines: Sequence[Line], folder: Path, by_strategy: Sequence[StrategyLine] = ()) -> list[Path]:
    """Write bench.json and bench.png, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        **_versions(lines),
        "threads": torch.get_num_threads(),
        "machine": platform.platform(),
        "capability": torch.backends.cpu.get_cpu_capability(),
        "lines": [asdict(line) for line in lines],
        "by_strategy": [asdict(line) for line in by_strategy],
    }
    paths = [folder / "bench.json", folder / "bench.png"]
    paths[0].write_text(json.dumps(record, indent=1), encoding="utf-8")
    figure(lines).savefig(paths[1], dpi=200)
    return paths
