"""A run in time: the time when each step is done, the time spent waiting, and a picture of both."""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import a_list, a_path, real_number, whole_number
from vsim.figures.style import STYLE, styled
from vsim.network.clock import Clock, Record, Span
from vsim.network.compute import Compute
from vsim.network.links import Network
from vsim.writing import replacing

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
DRAWS = 32  # of a compute that varies
# The most numbers in an array of the times on several networks.
_NUMBERS = 1 << 22


@dataclass(frozen=True, repr=False)
class Timeline:
    """A run in time.

    Attributes:
        seconds: (T + 1,) the time when the last node is done with step t; the first is 0.
        compute_seconds: (T,) seconds that a node computed in step t + 1.
        stalls: (T,) seconds that a node waited in step t + 1 for other nodes and for messages; the last step includes
            the wait for the last node. compute_seconds and stalls are means over the nodes; they sum to `seconds[-1]`.
        ledger, network, compute: the messages, network and compute from which these times follow.
        quantiles: share → (T + 1,), the quantiles of `seconds` over draws of a compute that varies; empty unless asked
            for, see `timeline`.
    """

    seconds: Floats
    compute_seconds: Floats
    stalls: Floats
    ledger: Record
    network: Network
    compute: Compute
    quantiles: Mapping[float, Floats] = field(default_factory=dict)

    @property
    def utilization(self) -> float:
        """The share of the time in which nodes compute; 1 before the first step."""
        total = float(self.seconds[-1])
        return float(self.compute_seconds.sum()) / total if total else 1.0

    @property
    def dollars(self) -> float:
        """Dollars for all nodes until the run ends; NaN if the compute has no `dollars_per_hour`."""
        price = self.compute.dollars_per_hour
        return math.nan if price is None else price * self.ledger.num_nodes * float(self.seconds[-1]) / 3600

    def plot(
        self, steps: tuple[int, int] | None = None, nodes: Sequence[int] | None = None, ax: Axes | None = None
    ) -> Axes:
        """Draw when nodes compute and wait, and the messages on their lines; needs matplotlib.

        Args:
            steps: the first and the last step to draw. Default: the steps around the first event.
            nodes: nodes to draw. Default: the first four.
            ax: axes to draw on. Default: the axes of a new figure.

        Raises:
            ValueError: there are no such steps or nodes, or the run is asynchronous.
        """
        total, num_nodes = self.ledger.steps, self.ledger.num_nodes
        drawn = a_list("steps", around_first_event(self.ledger) if steps is None else steps)
        ends = [whole_number("steps", step, at_least=0) for step in drawn]
        if len(ends) != 2 or not 1 <= ends[0] <= ends[1] <= total:
            raise ValueError(f"steps must be the first and the last that are drawn, of 1 … {total}, got {steps}")
        given = a_list("nodes", range(min(4, num_nodes)) if nodes is None else nodes)
        shown = [whole_number("nodes", node, at_least=0, at_most=num_nodes - 1) for node in given]
        return _gantt(self, (ends[0], ends[1]), shown, ax)

    def to_perfetto(self, path: str | Path) -> None:
        """Write the run as a trace for https://ui.perfetto.dev or chrome://tracing: a row for each node, in which it
        computes, waits or is absent, and its messages above.

        The file is JSON in the Trace Event Format
        (https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): complete events ("X") in
        microseconds, and asynchronous events ("b", "e") for messages, which overlap with them. It has one event for
        each node, step and message.

        Raises:
            ValueError: the run is asynchronous. OSError: the file cannot be written.
        """
        names = range(self.ledger.num_nodes)
        events: list[dict[str, Any]] = [
            {"ph": "M", "name": "process_name", "pid": node, "tid": 0, "args": {"name": f"node {node}"}}
            for node in names
        ]
        for number, (what, step, label, node, start, end) in enumerate(_bars(self, self.ledger.steps, names)):
            own = {"name": label or _NAMED[what], "cat": what, "pid": node, "tid": 0, "args": {"step": step}}
            begin, stop = 1e6 * start, 1e6 * end
            if what == "send":
                events += [{**own, "ph": ph, "id": number, "ts": ts} for ph, ts in (("b", begin), ("e", stop))]
            elif stop > begin:
                events.append({**own, "ph": "X", "ts": begin, "dur": stop - begin})
        with replacing(a_path("path", path)) as part:
            part.write_text(json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}), encoding="utf-8")

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with one row per step: step, seconds, compute_seconds, stalls, and a column for each
        quantile, such as "seconds 90 %"."""
        import pandas as pd  # imported here, since pandas takes half a second to load

        own = {"step": np.arange(1, len(self.seconds)), "seconds": self.seconds[1:]}
        own |= {"compute_seconds": self.compute_seconds, "stalls": self.stalls}
        return pd.DataFrame(own | {f"seconds {100 * share:g} %": one[1:] for share, one in self.quantiles.items()})

    def __repr__(self) -> str:
        ends = {share: duration(float(seconds[-1])) for share, seconds in sorted(self.quantiles.items())}
        shown = ", ".join(f"{share:.4g}: {text}" for share, text in ends.items())
        return (
            f"Timeline({len(self.stalls)} steps in {duration(float(self.seconds[-1]))}"
            f"{f' (quantiles {shown})' if shown else ''}, {self.utilization:.1%} of it compute, on {self.network!r})"
        )


def timeline(
    run: Any,
    network: Network | str | float | None = None,
    compute: Compute | float | str | None = None,
    *,
    quantiles: Sequence[float] | None = None,
    draws: int = DRAWS,
) -> Timeline:
    """Return the times at which a run would have done its steps on a network.

        a step     every node computes, and sends the strategy's payload: at the end, or layer by layer during the
                   backward pass
        an event   starts when the last of its nodes is ready and their lines are free, and takes the time of its
                   collective on this network
        its end    delays the step in which the event is due, at the moment within the step at which it started

    Args:
        run: a ledger, or an object with a ledger: a Trainer, a History, a run of a Comparison.
        network: a `Network`, text such as "200 Mbit/s, 50 ms", or the path of a file (see `Network.from_file`).
        compute: a `Compute`, the seconds of a step, or the path of a file.
        quantiles: shares in [0, 1]. The steps of a compute that varies, by `jitter` or `factors`, are drawn `draws`
            more times, and `Timeline.quantiles` has the quantiles of the times. This takes `draws` times as long.
        draws: number of these draws, at least 2. Quantiles near 0 or 1 need many.

    Raises:
        TypeError: `run` has no ledger; network or compute is missing; or quantiles of a compute that does not vary.
        ValueError: the run has taken no step; network or compute has another number of nodes; or the run was
            decided by another network or compute: an asynchronous run depends on both, stragglers on the compute.
    """
    ledger = getattr(run, "ledger", run)
    if not isinstance(ledger, Record):
        raise TypeError(f"run must be a ledger, a Trainer, a History or a run of a Comparison, got {run!r}")
    if ledger is not run and not ledger.steps:
        raise ValueError(f"run has taken no step yet: train it first, or see vsim.price; got {run!r}")
    network, compute = Network.of(network).for_run(ledger.of_clients), Compute.of(compute)
    _check_decided(ledger, network, compute)
    shares = [
        real_number("quantiles", one, at_least=0, at_most=1)
        for one in a_list("quantiles", [0.5] if quantiles is None else quantiles)
    ]
    whole_number("draws", draws, at_least=2, at_most=10**6)
    if quantiles is not None and not compute.varies:
        raise TypeError(f"quantiles have no effect with {compute!r}, which does not vary: give jitter= or factors=")
    if quantiles is not None and ledger.clock:
        raise ValueError("the run's course was decided by one draw of its compute, so that it has no quantiles")
    if ledger.seconds:  # an asynchronous run recorded its times
        seconds, computed = np.array([(0.0, 0.0), *ledger.seconds]).T
        return Timeline(seconds, np.diff(computed), np.diff(seconds - computed), ledger, network, compute)
    clock = Clock(ledger, network, compute).run()
    found: dict[float, Floats] = {}
    if quantiles is not None:
        drawn = [Clock(ledger, network, compute.drawn(draw)).run().seconds[:, 0] for draw in range(draws)]
        found = dict(zip(shares, np.quantile(drawn, shares, axis=0), strict=True))
    return Timeline(clock.seconds[:, 0], clock.compute, clock.stalls[:, 0], ledger, network, compute, found)


def median_draw(ledger: Record, compute: Compute) -> Compute:
    """Return a compute that varies with the seed of the median among some draws: of the run's time without messages."""
    if not compute.varies or ledger.clock:
        return compute
    drawn = [compute.drawn(draw) for draw in range(DRAWS)]
    ends = [Clock(ledger, Network(math.inf), one).run().seconds[-1, 0] for one in drawn]
    return drawn[int(np.argsort(ends)[len(ends) // 2])]


def seconds_on(
    ledger: Record,
    bandwidths: Floats,
    latencies: Floats,
    options: Mapping[str, Any],
    compute: Compute,
    steps: Sequence[int],
) -> Floats:
    """Return the times (N, steps) when the last node is done with each of these steps, on N networks of equal links.

    Times scale with compute: T(c · seconds, B, a) = c · T(seconds, c · B, a / c). So one map serves nodes of any speed.

    Args:
        bandwidths: (N,) in bit/s. latencies: (N,) in seconds. options: see `Network.grid`.

    Raises:
        ValueError: the run is asynchronous, and therefore has times only for its own network.
    """
    _check_decided(ledger, None, compute)
    last, found = max(steps, default=0), []
    many = max(1, _NUMBERS // max(last + 1, ledger.num_nodes))
    for start in range(0, len(bandwidths), many):
        part = slice(start, start + many)
        networks = Network.grid(bandwidths[part], latencies[part], **options)
        found.append(Clock(ledger, networks, compute).run(last).seconds[list(steps)].T)
    return np.concatenate(found)


def _check_decided(ledger: Record, network: Network | None, compute: Compute) -> None:
    """Raise a ValueError if another network or compute decided the run's course; network=None is always another."""
    decided, own, odd = ledger.clock or {}, [], []
    if "network" in decided:
        its_network = Network.from_plain(decided["network"]).for_run(ledger.of_clients)
        own.append(repr(its_network))
        if network is None or network.as_plain() != its_network.as_plain():
            odd.append("network")
    if "compute" in decided:
        its_compute = Compute.from_plain(decided["compute"])
        own.append(repr(its_compute))
        if not compute.decides_as(its_compute):
            odd.append("compute")
    if odd:
        why = "is asynchronous" if "network" in decided else "dropped stragglers by their compute seconds"
        raise ValueError(
            f"the run {why}, so that another {' or '.join(odd)} is another run: this one has the seconds of "
            f"{' and '.join(own)}; train it on what is asked for, {network or 'other networks'!r} and {compute!r}"
        )


def duration(seconds: float) -> str:
    """Return a duration as text in a readable unit.

    >>> [duration(s) for s in (0.0123, 12.3, 4000, 1e6)]
    ['12.3 ms', '12.3 s', '1.11 h', '11.6 days']
    """
    for unit, name in ((86400.0, "days"), (3600.0, "h"), (60.0, "min"), (1.0, "s")):
        if seconds >= (3 if unit == 86400 else 1) * unit:
            return f"{seconds / unit:.3g} {name}"
    return f"{seconds * 1e3:.3g} ms"


# The picture ----------------------------------------------------------------------------------------------------------

# Colours that are distinct for any kind of colour vision, and in grey.
_COMPUTE, _WAIT, _HATCH = "#999999", "#FBE0D0", "#D55E00"
_SENT = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00")
_NAMED = {"compute": "computes", "wait": "waits", "late": "late: work dropped", "absent": "absent"}
# Steps shown before and after the first event.
_AROUND = 2


def around_first_event(ledger: Record) -> tuple[int, int]:
    """Return the first and last step to draw: from just before the first event is sent to just after it is due."""
    first = next((event for event in ledger if event.step > 0), None)
    if first is None:
        return 1, min(ledger.steps, 1 + 2 * _AROUND)
    return max(1, first.step - _AROUND), min(ledger.steps, first.due + _AROUND)


def _bars(line: Timeline, last: int, nodes: Sequence[int]) -> list[tuple[str, int, str, int, float, float]]:
    """Return (what, step, label, row, start, end) of what these nodes do up to step `last`; see `Span`."""
    if line.ledger.seconds:
        raise ValueError("the timeline of an asynchronous run has no picture: its nodes are at no common step")
    watched: list[Span] = []
    Clock(line.ledger, line.network, line.compute, watched.append).run(last)
    return [
        (span.what, span.step, span.label, row, *times)
        for row, node in enumerate(nodes)
        for span in watched
        if (times := span.of_node(node)) is not None
    ]


def _gantt(line: Timeline, steps: tuple[int, int], nodes: Sequence[int], ax: Axes | None) -> Axes:
    """Draw some steps of some nodes; see `Timeline.plot`."""
    from matplotlib.patches import Patch

    from vsim.figures.paper import axes_of

    bars = _bars(line, steps[1], nodes)
    ax = axes_of(ax, 6.8, 1.1 + 0.5 * len(nodes))
    shown = [start for what, step, _, _, start, _ in bars if what == "compute" and step == steps[0]]
    began, end = min(shown, default=0.0), max((bar[-1] for bar in bars), default=1.0)
    labels = dict.fromkeys(label for what, step, label, *_ in bars if what == "send" and step >= steps[0])
    colours = dict(zip(labels, itertools.cycle(_SENT), strict=False))
    look: dict[str, Any] = {
        "compute": {"facecolor": _COMPUTE, "edgecolor": "white", "linewidth": 0.6},
        "wait": {"facecolor": _WAIT, "edgecolor": _HATCH, "linewidth": 0.6, "hatch": "////"},
        "late": {"facecolor": "white", "edgecolor": _COMPUTE, "linewidth": 0.6, "hatch": "xxxx"},
        "absent": {"facecolor": "white", "edgecolor": _COMPUTE, "linewidth": 0.6},
    }
    numbered = -math.inf  # x of the last step number that was written above the first node
    for what, step, label, row, start, stop in bars:
        start = max(start, began)
        if stop <= start:
            continue
        if what == "send":
            ax.broken_barh([(start, stop - start)], (row + 0.12, 0.3), facecolor=colours.get(label, _SENT[0]))
            continue
        ax.broken_barh([(start, stop - start)], (row - 0.3, 0.36), **look[what])
        middle, wide = (start + stop) / 2, (end - began) / 28
        if what == "compute" and row == 0 and step >= steps[0] and middle - numbered >= wide:
            text = f"step {step}" if numbered == -math.inf and stop - start > 3 * wide else f"{step}"
            ax.text(middle, -0.38, text, ha="center", va="bottom", fontsize=7, color="0.35")
            numbered = middle
    ax.set(xlim=(began, end), ylim=(len(nodes) - 0.4, -0.75), xlabel="seconds")
    if began > 0:
        ax.set_xlabel(f"seconds from the start of the run; drawn from step {steps[0]}")
    ax.set_yticks(range(len(nodes)), [f"node {node}" for node in nodes])
    ax.tick_params(axis="y", length=0)
    styled(ax)
    ax.grid(False, axis="y")
    ax.spines["left"].set_visible(False)
    found = {"compute", "wait", *(what for what, _, _, _, _, stop in bars if stop > began)}
    handles = [Patch(**own, label=_NAMED[what]) for what, own in look.items() if what in found]
    handles += [Patch(facecolor=colour, label=f"sends: {label}") for label, colour in colours.items()]
    width = ax.get_window_extent().width / ax.get_figure(root=True).dpi  # type: ignore[union-attr]
    letters, lengths = width * 18, [len(str(handle.get_label())) + 7 for handle in handles]
    columns = len(handles) if sum(lengths) <= letters else max(1, int(letters / max(lengths)))
    place: Any = {"loc": "lower left", "bbox_to_anchor": (0, 1), "borderaxespad": 0.2}
    size: Any = {"fontsize": STYLE["legend.fontsize"], "handlelength": 1.4, "columnspacing": 1.2}
    ax.legend(handles=handles, ncols=columns, frameon=False, **place, **size)
    if len(nodes) < line.ledger.num_nodes:
        ax.set_ylabel(f"{len(nodes)} of {line.ledger.num_nodes:,} nodes", fontsize=7.5, color="0.4")
    return ax
