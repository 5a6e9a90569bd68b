"""The cost of a run's results: bytes, time or dollars up to every row of its record; and budgets.

A loss counts as a result once a node or a server holds the model. If the global model is the mean of nodes that differ
(FedAvg between syncs, SPARTA at any time), the cost includes the all-reduce of the weights that would form the mean.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import one_of, real_number
from vsim.cluster.traffic import traffic
from vsim.figures.words import size_text
from vsim.history.history import History
from vsim.history.reached import Crossing
from vsim.network import Compute, Network
from vsim.network.links import seconds
from vsim.network.timeline import duration

# The forms in which users may give the network and the compute from which hours are derived.
AnyNetwork = Network | str | float | None
AnyCompute = Compute | float | str | None
Floats = NDArray[np.float64]
Priced = tuple[Network, Compute] | None


def forming_bytes(history: History, way: str, weights_bytes: float) -> float:
    """Return the bytes of a node (of a client on average, for cohorts) in an all-reduce of all weights.

    Args:
        way: "payload" or "wire". weights_bytes: bytes of one node's weights.
    """
    of_all = traffic("all_reduce", history.num_nodes, history.ledger.server)
    if history.is_of_cohorts:
        total = of_all.total if way == "wire" else of_all.handed.sum()
        return float(total) * weights_bytes / history.ledger.num_nodes
    return float(of_all.busiest if way == "wire" else of_all.handed[0]) * weights_bytes


def forming_seconds(history: History, network: Network, weights_bytes: float) -> Floats:
    """Return the seconds of an all-reduce of all weights on a network: (1,), or (N, 1) on a `grid` of N networks."""
    network = network.for_run(history.ledger.of_clients)
    return network.seconds("all_reduce", network.kind(range(history.num_nodes)), weights_bytes)


def spent(history: History, of: str, weights_bytes: float, priced: Priced = None) -> Floats:
    """Return the cost (T,) up to every row, with the all-reduce that forms the global model where none exists.

    Args:
        of: "wire" or "payload", in bytes; "time" in seconds or "cost" in dollars, which need `priced`; or a column.
        weights_bytes: bytes of one node's weights.

    Raises:
        ValueError: "cost" without a price.
    """
    missing = ~history.formed
    if of in ("wire", "payload"):
        return history.bytes_per_node(of) + missing * forming_bytes(history, of, weights_bytes)
    if of not in ("time", "cost"):
        return history.column(of)
    assert priced is not None
    if not history.last("step") > 0:  # interrupted before the first step
        return np.zeros(len(history))
    timeline = history.time(*priced)
    taken = timeline.seconds[history["step"].astype(int)]
    if missing.any():
        taken = taken + missing * forming_seconds(history, priced[0], weights_bytes)
    if of == "time":
        return taken
    if math.isnan(timeline.dollars):
        raise ValueError("cost needs a price: give Compute(…, dollars_per_hour=…)")
    return taken * (timeline.dollars / timeline.seconds[-1])


def until(history: History, at: Crossing, costs: Floats) -> float:
    """Return the cost of a crossing: at its first measurement or its first formed model, whichever is lower; or NaN.

    Args:
        costs: the costs (T,) up to every row, from `spent`.
    """
    rows = np.searchsorted(history["step"], [step for step in at[:2] if not math.isnan(step)])
    return float(costs[rows].min()) if len(rows) else math.nan


class Use(NamedTuple):
    """How much of a budget the runs of a strategy used.

    Attributes:
        share: used share of the budget that is used up first, at most 1. steps: steps of the runs. steps_needed: steps
            that would use up the budget, in proportion; infinite for a run that costs nothing. ended: whether a run
            ended before any budget was used up: repeating its most expensive step would stay within all budgets.
    """

    share: float
    steps: float
    steps_needed: float
    ended: bool

    def __str__(self) -> str:
        more = "no number of steps" if math.isinf(self.steps_needed) else f"about {self.steps_needed:,.0f}"
        return f"{self.share:.0%} of it in {self.steps:,.0f} steps, where {more} would use it up"


def use(runs: Sequence[tuple[History, Sequence[tuple[Floats, float]]]]) -> Use:
    """Return the mean use of budgets by runs.

    Args:
        runs: for every run, its record and a pair for each budget: the cost (T,) up to every row, and the budget.
    """
    found = []
    for history, costs in runs:
        steps = history.last("step") if len(history) else 0.0
        shares = [last(own) / most if most else 1.0 for own, most in costs]
        ended = all(last(own) + _dearest(own, history.formed) <= most for own, most in costs)
        found.append((min(1.0, max(shares)), steps, steps / max(shares) if max(shares) else math.inf, ended))
    share, steps, needed, _ = np.mean(found, axis=0).tolist()
    return Use(share, steps, math.ceil(needed) if math.isfinite(needed) else needed, any(own[-1] for own in found))


def _dearest(costs: Floats, formed: NDArray[np.bool_]) -> float:
    """Return the largest rise of a cost between rows that both have, or both lack, a formed model."""
    return max(float(np.diff(costs[kind]).max(initial=0.0)) for kind in (formed, ~formed))


def last(costs: Floats) -> float:
    """Return the cost of the last row, 0 without rows."""
    return float(costs[-1]) if len(costs) else 0.0


def unused(uses: Mapping[str, Use]) -> str:
    """Return text about the strategies whose runs ended before the budget was used up, or ""."""
    return "; ".join(f"{name} used {own}" for name, own in uses.items() if own.ended)


# Kinds of costs, and budgets ------------------------------------------------------------------------------------------


class Cost(NamedTuple):
    """A cost of training: the column of a front, its name in the figure ("{each}": node or client), and its unit."""

    column: str
    label: str
    unit: float


COSTS = {
    "wire": Cost("wire MB", "sent on the wire per {each} (MB)", 1e6),
    "payload": Cost("payload MB", "payload communicated per {each} (MB)", 1e6),
    "time": Cost("hours", "hours on the network", 3600.0),
    "cost": Cost("dollars", "dollars", 1.0),
}
# Keys of budgets: costs, and columns of a history.
BUDGETS = (*COSTS, "step", "examples", "tokens")


def amount(of: str, value: Any, argument: str = "within", allowed: Sequence[str] = BUDGETS) -> float:
    """Return a budget as a number of bytes, seconds, dollars, steps, examples or tokens.

    >>> amount("wire", "2 GB"), amount("time", "10 h"), amount("cost", "$40")
    (2000000000.0, 36000.0, 40.0)

    Args:
        argument: the name of the budget's argument. allowed: the kinds of budget that the argument takes.

    Raises:
        TypeError: the value is neither a number nor text. ValueError: the value is below 0, or text of another form.
    """
    one_of(f"{argument}: a budget", of, allowed)
    where = f"{argument}[{of!r}]"
    if of == "time":
        return seconds(where, value, at_least=0)
    if isinstance(value, str):
        pattern, allowed = _TEXTS.get(of, ("", "a number"))
        match = re.fullmatch(pattern, value, flags=re.ASCII)
        if not pattern or match is None:
            raise ValueError(f"{where} must be {allowed}, got {value!r}")
        value = float(match["number"]) * _UNITS[match.groupdict().get("unit", "")]
    return real_number(where, value, at_least=0)


def amount_text(of: str, value: Any) -> str:
    """Return a budget as text.

    >>> amount_text("cost", 500), amount_text("wire", 2e9), amount_text("time", "10 h"), amount_text("examples", 1e6)
    ('$500', '2 GB/node', '10 h', '1,000,000 examples')
    """
    own = amount(of, value, "budget")
    if of in ("wire", "payload"):
        return f"{size_text(own)}{' of payload' if of == 'payload' else ''}/node"
    if of == "time":
        return duration(own)
    if of == "cost":
        return f"${own:,.0f}" if own >= 1000 or own.is_integer() else f"${own:,.2f}"
    return f"{own:,.10g} {of}{'s' if of == 'step' else ''}"


_NUMBER = r"(?P<number>(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?)"
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
_OF_BYTES = (
    rf"\s*{_NUMBER}\s*(?P<unit>[kMGT]?)B\s*",
    "a number of bytes, or text in B, kB, MB, GB or TB, such as '2 GB'",
)
_TEXTS = {
    **dict.fromkeys(("wire", "payload"), _OF_BYTES),
    "cost": (rf"\s*\$?\s*{_NUMBER}\s*", "a number of dollars, or text such as '$40'"),
}
