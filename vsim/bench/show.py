"""What `vsim bench` has measured, as tables, as a picture and as JSON."""

from __future__ import annotations

import json
import platform
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import matplotlib
import torch
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator, ScalarFormatter
from tabulate import tabulate

from vsim.bench.measure import Line, StrategyLine
from vsim.bench.workloads import MODELS

_STYLES = {"separate": "k:", "loop": "C1--", "vmap": "C0-", "trace": "C3-", "compiled": "C2-"}


def table(lines: Sequence[Line]) -> str:
    """Return the lines as a table: milliseconds a step, ratios to K separate modules, to the floor, and of memory."""
    compiled = ["compiled"] if any("compiled" in line.seconds for line in lines) else []
    timed = ["separate", "vmap", "trace", "loop", "exact", *compiled]
    compared = ["vmap", "trace", "exact", "exact, fused", "auto", *compiled]
    to_floor = ["vmap", *compiled]
    rows = [
        [
            line.model,
            line.num_nodes,
            *(f"{1e3 * line.seconds[c]:.3g}" if c in line.seconds else "" for c in timed),
            *(f"{line.ratios[c]:.2f}" if c in line.ratios else "" for c in compared),
            line.chosen,
            *(f"{line.floor_ratios[c]:.2f}" if c in line.floor_ratios else "" for c in to_floor),
            f"{line.share_of_peak:.0%}",
            f"{line.memory_ratio:.2f}",
        ]
        for line in lines
    ]
    header = ["model", "K", "K modules ms", *(f"{c} ms" for c in timed[1:]), *(f"{c} ×" for c in compared), "auto is"]
    header += [*(f"{c} / floor" for c in to_floor), "of peak", "memory"]
    return tabulate(rows, header, disable_numparse=True, stralign="right")


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
    """Draw the time of a node's step against K, beside that of a separate module."""
    models = list(dict.fromkeys(line.model for line in lines))
    with matplotlib.rc_context({"font.size": 9}):
        drawing = Figure(figsize=(3.1 * len(models), 3.3), layout="constrained")
        for ax, model in zip(drawing.subplots(1, len(models), squeeze=False)[0], models, strict=True):
            own = [line for line in lines if line.model == model]
            nodes = [line.num_nodes for line in own]
            for label, style in _STYLES.items():
                if any(label not in line.seconds for line in own):
                    continue
                a_node = [1e3 * line.seconds[label] / line.num_nodes for line in own]
                name = "separate modules" if label == "separate" else label
                ax.plot(nodes, a_node, style, marker="o", markersize=3, label=name)
            floor = [1e3 * line.floor_seconds / line.num_nodes for line in own]
            ax.fill_between(nodes, floor, color="0.9", label="floor", linewidth=0)
            ax.set_xscale("log", base=2)
            ax.xaxis.set_major_locator(FixedLocator(nodes))
            ax.xaxis.set_minor_locator(NullLocator())
            ax.xaxis.set_major_formatter(ScalarFormatter())
            ax.set(title=MODELS[model].title, xlabel="nodes", ylim=(0, None))
        drawing.axes[0].set_ylabel("ms a node and step")
        labelled: dict[str, Any] = {}
        for ax in drawing.axes:
            handles, labels = ax.get_legend_handles_labels()
            labelled.update(zip(labels, handles, strict=True))
        drawing.legend(
            labelled.values(), labelled, loc="outside lower center", ncols=5 if len(models) > 1 else 2, frameon=False
        )
    return drawing


def save(lines: Sequence[Line], folder: Path, by_strategy: Sequence[StrategyLine] = ()) -> list[Path]:
    """Write bench.json and bench.png, and return their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    record = {
        "torch": torch.__version__,
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
