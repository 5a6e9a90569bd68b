"""A picture of a run in time: what nodes compute, what their lines carry, and where they wait."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from vsim.figures.style import STYLE, styled
from vsim.network.clock import Clock, Record, Span
from vsim.network.compute import Compute
from vsim.network.links import Network

if TYPE_CHECKING:
    from matplotlib.axes import Axes

# Told apart with any kind of colour vision, and in grey.
_COMPUTE, _WAIT = "#999999", "#FBE0D0"
_SENT = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
# Steps shown beside those of the first event.
_AROUND = 2


def window(ledger: Record) -> tuple[int, int]:
    """Return the first and the last step that show the first event, from before it is sent to after it is due."""
    first = next((event for event in ledger if event.step > 0), None)
    if first is None:
        return 1, min(ledger.steps, 1 + 2 * _AROUND)
    return max(1, first.step - _AROUND), min(ledger.steps, first.due + _AROUND)


def gantt(
    ledger: Record,
    network: Network,
    compute: Compute,
    steps: tuple[int, int],
    nodes: Sequence[int],
    ax: Axes | None = None,
) -> Axes:
    """Draw some steps of some nodes; see `Timeline.plot`."""
    if ax is None:
        from vsim.figures.paper import new_figure

        ax = new_figure(6.8, 1.1 + 0.5 * len(nodes)).subplots()
    spans: list[Span] = []
    Clock(ledger, network, compute, spans.append).run(steps[1])
    began = min((_of(s, n)[0] for s in spans if s.what == "compute" and s.step == steps[0] for n in nodes), default=0.0)
    colours: dict[str, str] = {}
    for span in spans:
        if span.what == "send" and span.step >= steps[0]:
            colours.setdefault(span.label, _SENT[len(colours) % len(_SENT)])
    for row, node in enumerate(nodes):
        for span in spans:
            if span.nodes is not None and node not in span.nodes:
                continue
            start, end = _of(span, node)
            start = max(start, began)
            if end <= start:
                continue
            if span.what == "send":
                colour = colours.get(span.label, _SENT[0])
                ax.broken_barh([(start, end - start)], (row + 0.12, 0.3), facecolor=colour)
            else:
                computes = span.what == "compute"
                style: Any = {"facecolor": _COMPUTE} if computes else {"facecolor": _WAIT, "hatch": "////"}
                edge = "white" if computes else "#D55E00"
                ax.broken_barh([(start, end - start)], (row - 0.3, 0.36), edgecolor=edge, linewidth=0.6, **style)
    return _finished(ax, spans, steps, nodes, colours, began, ledger.num_nodes)


def _of(span: Span, node: int) -> tuple[float, float]:
    place = node if span.nodes is None else int(np.flatnonzero(span.nodes == node)[0])
    start, end = (float(times[place] if len(times) > 1 else times[0]) for times in (span.start, span.end))
    return start, end


def _finished(
    ax: Axes,
    spans: Sequence[Span],
    steps: tuple[int, int],
    nodes: Sequence[int],
    colours: dict[str, str],
    began: float,
    num_nodes: int,
) -> Axes:
    """Add what the picture needs to be read without its text."""
    from matplotlib.patches import Patch

    end = max((float(span.end.max()) for span in spans), default=1.0)
    ax.set_xlim(began, end)
    ax.set_ylim(len(nodes) - 0.4, -0.75)
    ax.set_yticks(range(len(nodes)), [f"node {node}" for node in nodes])
    ax.tick_params(axis="y", length=0)
    ax.set_xlabel("seconds")
    # The numbers of the steps, over the first node, where they fit.
    wide = (end - began) / 28
    last = -np.inf
    for span in spans:
        if span.what == "compute" and span.step >= steps[0] and (span.nodes is None or nodes[0] in span.nodes):
            start, stop = _of(span, nodes[0])
            middle = (start + stop) / 2
            if middle - last >= wide:
                text = f"step {span.step}" if last == -np.inf and stop - start > 3 * wide else f"{span.step}"
                ax.text(middle, -0.38, text, ha="center", va="bottom", fontsize=7, color="0.35")
                last = middle
    styled(ax)
    ax.grid(False, axis="y")
    ax.spines["left"].set_visible(False)
    handles = [
        Patch(facecolor=_COMPUTE, label="computes"),
        Patch(facecolor=_WAIT, edgecolor="#D55E00", hatch="////", linewidth=0.6, label="waits"),
        *(Patch(facecolor=colour, label=f"its line: {label}") for label, colour in colours.items()),
    ]
    width = ax.get_window_extent().width / ax.get_figure(root=True).dpi  # type: ignore[union-attr]
    longest = max(len(str(handle.get_label())) for handle in handles)
    ax.legend(
        handles=handles,
        loc="lower left",
        bbox_to_anchor=(0, 1),
        ncols=max(1, int(width * 15 / (longest + 7))),
        frameon=False,
        fontsize=STYLE["legend.fontsize"],
        handlelength=1.4,
        columnspacing=1.2,
        borderaxespad=0.2,
    )
    if len(nodes) < num_nodes:
        ax.set_ylabel(f"{len(nodes)} of {num_nodes:,} nodes", fontsize=7.5, color="0.4")
    return ax
