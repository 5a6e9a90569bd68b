"""The strategy for a model that is too large to try: the cost of each strategy at that size, and their order."""

from __future__ import annotations

import html
import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from vsim.analysis.columns import headings
from vsim.analysis.comparison import Comparison
from vsim.analysis.questions.winners import BANDWIDTHS, LATENCIES, Winners
from vsim.analysis.size_order import CALLED, FAR, Order, order
from vsim.analysis.spent import amount, amount_text
from vsim.analysis.tables import text_table, with_notes
from vsim.arguments import brief, given, naming
from vsim.cluster.ledger import Ledger
from vsim.figures.looks import Looks
from vsim.figures.words import in_short, size_text
from vsim.network import Compute, Network, timeline
from vsim.network.timeline import seconds_on
from vsim.shapes import naming_layers, sizes_of, without_values

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes

Floats = NDArray[np.float64]
# Kinds of budgets.
BUDGETS = ("time", "cost", "wire")
# Bandwidths that a search for the slowest network within the budget prices at once, at each latency of the map.
_AT_ONCE = 7
# Runs considered as advice: sizes grow by this factor, seeds by one of these; the advice is the cheapest that decides.
_STEPS, _MORE_SEEDS = np.sqrt(10.0), (1, 2, 4)


@dataclass(frozen=True)
class Priced:
    """The cost of a strategy at the target. `why` is the reason if there is no price; numbers are then NaN.

    Attributes:
        steps, seconds: length of the run. dollars: cost of all nodes; NaN if a node has no price. wire_bytes: bytes on
            the wire of the busiest node. utilization: the share of the time in which nodes compute.
        share: used share of the budget that is used up first; above 1, the run does not fit.
        memory_bytes: bytes of weights, gradients and states on a node, or on each of its machines; NaN without
            `Compute(memory=…)`. memory_limit: that memory.
    """

    steps: int
    seconds: float
    dollars: float
    wire_bytes: float
    utilization: float
    share: float
    why: str = ""
    memory_bytes: float = math.nan
    memory_limit: float = math.inf

    @property
    def fits(self) -> bool:
        """Whether the run is within all budgets, and its state within a node's memory."""
        return self.share <= 1 + 1e-12 and self.fits_memory

    @property
    def fits_memory(self) -> bool:
        """Whether the run's state fits into a node's memory, as far as a memory was given."""
        return not self.memory_bytes > self.memory_limit


@dataclass(frozen=True, repr=False)
class BudgetMap(Winners):
    """The leading strategy within the budget, on every network of a grid.

    Attributes:
        cells: names (L, B) of the first strategy that fits, and of those not decided against it; () if none fits.
    """

    cells: Sequence[Sequence[tuple[str, ...]]] = ()

    @property
    def first(self) -> list[list[tuple[str, ...]]]:
        """The cells (L, B) as lists."""
        return [list(row) for row in self.cells]

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw the map: a colour for each strategy, hatched where the order is not decided, blank where no strategy
        fits.
        """
        ax = super().plot(ax)
        shown = any(names for row in self.cells for names in row)
        ax.set_title(self.note if shown else f"none {self.note}", fontsize=8, loc="left")
        return ax


@dataclass(frozen=True, repr=False)
class Decision:
    """Which strategy to train a large model with. Displayed as text, and in a notebook with the map of networks.

    Attributes:
        order: the order of the strategies at the target. costs: name → the cost of the strategy at the target.
        within: the budget as text. first: the leading strategy within the budget; "" if no strategy fits.
        undecided: name → P(`first` has the lower loss), for strategies that fit and whose order with `first` is open.
        map: the answer on other networks. assumptions: what the answer assumes. advice: runs that would decide.
    """

    order: Order
    costs: Mapping[str, Priced]
    within: str
    first: str
    undecided: Mapping[str, float]
    map: BudgetMap
    assumptions: Sequence[str]
    advice: str

    @property
    def decided(self) -> bool:
        """Whether one strategy is ahead of all others within the budget with a probability of at least 90 %."""
        return bool(self.first) and not self.undecided

    def answer(self) -> str:
        """Return the answer in a sentence; it begins with "extrapolated" beyond 100 × the largest measured size."""
        begin = "extrapolated: " if self.order.factor > FAR else ""
        whom, where = f"for {in_short(self.order.to)} parameters", f"within {self.within}"
        fitting = [name for name, own in self.costs.items() if own.fits]
        if not fitting:
            known = {name: own.share for name, own in self.costs.items() if not own.why}
            if not known:
                return f"{begin}no strategy has a price {whom}"
            known = {name: share for name, share in known.items() if self.costs[name].fits_memory} or known
            nearest = min(known, key=known.__getitem__)
            if not self.costs[nearest].fits_memory:
                smallest = min(known, key=lambda name: self.costs[name].memory_bytes)
                return f"{begin}none {whom} {where}: the smallest, {smallest}, needs {_memory(self.costs[smallest])}"
            return f"{begin}none {whom} {where}: the nearest, {nearest}, takes {known[nearest]:.3g} times as much"
        if len(fitting) == 1:
            return f"{begin}{self.first} {whom}, the only one {where}"
        if self.decided:
            least = min(self.order.probability(self.first, name) for name in fitting if name != self.first)
            return (
                f"{begin}{self.first} {whom} {where}, ahead of all others that fit with at least "
                f"{math.floor(100 * least)} %"
            )
        others = ", ".join(
            f"{name} ({self._why(name) if math.isnan(chance) else f'{chance:.0%} that {self.first} is ahead'})"
            for name, chance in self.undecided.items()
        )
        return f"{begin}not decided {whom} {where}: {self.first}, or {others}"

    def _why(self, name: str) -> str:
        return self.order.pair(self.first, name).why

    def to_pandas(self) -> pd.DataFrame:
        """Return one row per strategy, in the order of the table: the numbers of `Priced`, `fits` and `ahead`.

        ahead: P(`first` has a lower loss than this strategy at the target).
        """
        import pandas

        rows = [
            {
                "strategy": name,
                **{
                    key: getattr(own, key)
                    for key in ("steps", "seconds", "dollars", "wire_bytes", "utilization", "share", "memory_bytes")
                },
                "fits": own.fits,
                "ahead": self._ahead(name),
            }
            for name, own in self._ordered()
        ]
        return pandas.DataFrame(rows)

    def _ordered(self) -> list[tuple[str, Priced]]:
        """Return the strategies: first those that fit, in the order at the target, then all others, by their share of
        the budget.
        """
        place = {name: i for i, name in enumerate(self.order.names)}
        return sorted(
            self.costs.items(),
            key=lambda own: (
                not own[1].fits,
                place[own[0]] if own[1].fits else np.nan_to_num(own[1].share, nan=np.inf),
            ),
        )

    def _ahead(self, name: str) -> float:
        return self.order.probability(self.first, name) if self.first and name != self.first else math.nan

    def table(self, format: str = "simple") -> str:
        """Return a text table, a line per strategy: time, dollars, bytes, the share of the budget, and the order."""
        priced = any(not math.isnan(own.dollars) for own in self.costs.values())
        last = f"P(behind {self.first})" if self.first else "order"
        rows = []
        for name, own in self._ordered():
            chance = self._ahead(name)
            ahead = "first" if name == self.first else "–" if math.isnan(chance) else f"{chance:.0%}"
            share = f"{own.share:.0%}" if own.share < 10 else f"{own.share:,.0f} ×"
            if not own.fits:
                share += f", does not fit{'' if own.fits_memory else f': needs {_memory(own)}'}"
            rows.append(
                {
                    "strategy": name,
                    "hours": own.seconds / 3600,
                    **({"dollars": own.dollars} if priced else {}),
                    "wire MB/node": own.wire_bytes / 1e6,
                    "utilization": own.utilization,
                    "of the budget": "–" if own.why else share,
                    last: own.why or ahead,
                }
            )
        shown = headings("hours", "dollars", "wire MB/node", "utilization")
        return text_table(rows, format, ["strategy"], headings=shown)

    def plot(self, ax: Axes | None = None) -> Axes:
        """Draw `map`.

        Args:
            ax: default: the axes of a new figure as wide as a column.
        """
        return self.map.plot(ax)

    def _notes(self) -> list[str]:
        return [*(f"{i}. {said}" for i, said in enumerate(self.assumptions, 1)), f"next: {self.advice}"]

    def _repr_html_(self) -> str:
        from vsim.figures.paper import image_html

        picture = image_html(self.plot(), f"which strategy is ahead within {self.within}, over bandwidth and latency")
        order = f"<p>{html.escape(self.order.headline())}</p>{self.order.table('html')}"
        table = with_notes(self.table("html"), self._notes(), "html")
        return f"<p><b>{html.escape(self.answer())}</b></p>{table}{picture}{order}"

    def __repr__(self) -> str:
        return "\n".join([self.answer(), "", self.table(), "", *self._notes(), "", repr(self.order)])


def _memory(own: Priced) -> str:
    return f"{size_text(own.memory_bytes)} of {size_text(own.memory_limit)} of memory"


def decide(
    largest: Comparison,
    losses: pd.DataFrame,
    to: float,
    num_nodes: int,
    network: Network,
    compute: Compute,
    within: Mapping[str, Any],
    steps: Mapping[str, int],
    training: str,
    is_tuned: bool,
    bytes_per_parameter: int | None,
    strategies: Mapping[str, Any],
    looks: Looks,
    progress: bool = False,
) -> Decision:
    """Return the strategy to train a large model with; see `Ladder.decide`.

    Args:
        largest: the comparison whose strategies are priced. losses: a row per run, see `order`. to: target parameters.
        steps: name → steps at the target. training: text about the steps. is_tuned: whether settings were tuned.
        strategies: name → strategy to price instead of the run's. looks: the looks of the strategies on the map.
        progress: whether to show a bar.
    """
    from tqdm.auto import tqdm

    from vsim.core.memory_of_node import node_bytes  # loads the core, and few readers of a ladder need it

    if not isinstance(within, Mapping) or not within:
        raise TypeError(f"within must be a dict such as {{'time': '10 h'}}, got {given(within)}")
    budgets = {of: amount(of, value, "within", BUDGETS) for of, value in within.items()}
    if "cost" in budgets and compute.dollars_per_hour is None:
        raise ValueError("within: 'cost' needs a price of a node: give compute=Compute(…, dollars_per_hour=…)")
    network = network.for_run(of_clients=False)
    network.check(num_nodes)
    found = order(losses, to)
    bare = without_values(to, compute.layers if compute.layers > 1 else None, None, bytes_per_parameter)
    compute = compute.of_model(sizes_of(bare))
    compute.steps(num_nodes)
    costs: dict[str, Priced] = {}
    fits: dict[str, NDArray[np.bool_]] = {}
    most = _seconds_allowed(budgets, compute, num_nodes)
    bar = tqdm(largest, desc="pricing", unit="strategy", dynamic_ncols=True, disable=None if progress else True)
    for name in bar:
        bar.set_postfix_str(name)
        strategy, seed = strategies.get(name, largest[name].strategy), largest[name].seed
        if not hasattr(strategy, "dry_run"):
            raise TypeError(
                f"{name} was read from a file that does not hold its strategy: give strategies={{{name!r}: …}}, got "
                f"{strategy!r:.100}"
            )
        held: list[float] = []
        measure = None if compute.memory is None else lambda own, held=held: held.append(node_bytes(own, bare))
        try:
            with naming(name), naming_layers(bare):
                ledger = strategy.dry_run(bare, num_nodes, steps[name], seed, compute.totals(num_nodes), measure)
        except ValueError as error:
            nothing = dict.fromkeys(("seconds", "dollars", "wire_bytes", "utilization", "share"), math.nan)
            costs[name] = Priced(steps[name], **nothing, why=brief(str(error).removeprefix(f"{name}: ")))
            continue
        costs[name] = _priced(ledger, network, compute, budgets, *held)
        if budgets.get("wire", math.inf) >= costs[name].wire_bytes and costs[name].fits_memory:
            fits[name] = _fits_on_map(ledger, network, compute, most)
    fitting = [name for name in found.names if costs[name].fits]
    first = fitting[0] if fitting else ""
    undecided = {name: found.probability(first, name) for name in fitting[1:] if not found.pair(first, name).decided}
    limits = " and ".join(amount_text(of, value) for of, value in within.items())
    cells = _cells(found, fits)
    chart = BudgetMap(math.nan, BANDWIDTHS, LATENCIES, {}, {}, looks, f"ahead within {limits}", cells=cells)
    sizes = f"{len(found.sizes)} sizes from {in_short(found.sizes[0])} to {in_short(found.sizes[-1])}"
    small = largest[next(iter(largest))].history.num_nodes
    tuned = "tuned at the largest size" if is_tuned else "those of the ladder, not tuned at each size"
    far = f"{float(f'{found.factor:.3g}'):,.10g}"
    assumptions = [
        f"Every run trains {training}; a node computes {compute.node_seconds.mean():.3g} s a step on {network!r}, "
        "without failures.",
        f"Strategies keep their settings ({tuned}) at {num_nodes} nodes, where the losses are of {small} nodes, with "
        "the ladder's model, data and batches.",
        f"The order is the trend over {sizes}, {far} times smaller than the target: P says how far to "
        "trust it, and no loss is predicted.",
    ]
    if compute.memory is not None:
        whole = "a node" if compute.pipeline is None else f"each of a node's {compute.pipeline.machines} equal machines"
        assumptions.append(
            f"The memory of {whole}, {size_text(compute.memory)}, holds weights, gradients and the states of optimizer "
            "and strategy; activations and buffers come on top, and are not counted."
        )
    advice = _advice(found, losses, first, undecided, fitting)
    return Decision(found, costs, limits, first, undecided, chart, assumptions, advice)


def _priced(
    ledger: Ledger, network: Network, compute: Compute, budgets: Mapping[str, float], held: float = math.nan
) -> Priced:
    line = timeline(ledger, network, compute)
    taken, sent = float(line.seconds[-1]), float(ledger.wire_bytes)
    used = {"time": taken, "cost": line.dollars, "wire": sent}
    share = max(used[of] / most if most else math.inf if used[of] else 0.0 for of, most in budgets.items())
    priced = Priced(ledger.steps, taken, line.dollars, sent, line.utilization, share)
    if compute.memory is None:
        return priced
    machines = 1 if compute.pipeline is None else compute.pipeline.machines
    return replace(priced, memory_bytes=held / machines, memory_limit=compute.memory)


def _fits_on_map(ledger: Ledger, network: Network, compute: Compute, most: float) -> NDArray[np.bool_]:
    """Return on which networks (L, B) of the map a run takes at most so many seconds.

    A run is not slower where the bandwidth is higher. So search, at each latency, for the lowest that suffices.
    """
    low, high = np.zeros(len(LATENCIES), dtype=int), np.full(len(LATENCIES), len(BANDWIDTHS))
    while (low < high).any():
        tried = low + (np.arange(1, _AT_ONCE + 1)[:, None] * (high - low)) // (_AT_ONCE + 1)
        bits, delays = BANDWIDTHS[np.minimum(tried, len(BANDWIDTHS) - 1)], np.broadcast_to(LATENCIES, tried.shape)
        seconds = seconds_on(ledger, bits.ravel(), delays.ravel(), network.options, compute, [ledger.steps])
        suffices = (seconds.reshape(tried.shape) <= most) | (tried >= high)
        low = np.maximum(low, np.where(suffices, 0, tried + 1).max(0))
        high = np.minimum(high, np.where(suffices, tried, len(BANDWIDTHS)).min(0))
    return np.arange(len(BANDWIDTHS)) >= low[:, None]


def _seconds_allowed(budgets: Mapping[str, float], compute: Compute, num_nodes: int) -> float:
    """Return the seconds that a run may take, by time and by cost."""
    most = [budgets["time"]] if "time" in budgets else []
    if "cost" in budgets and compute.dollars_per_hour:
        most.append(3600 * budgets["cost"] / (compute.dollars_per_hour * num_nodes))
    return min(most, default=math.inf) * (1 + 1e-12)


def _cells(found: Order, fits: Mapping[str, NDArray[np.bool_]]) -> list[list[tuple[str, ...]]]:
    """Return the cells (L, B): the first strategy that fits, and all that fit and are not decided against the first."""
    cells = []
    for i in range(len(LATENCIES)):
        row: list[tuple[str, ...]] = []
        for j in range(len(BANDWIDTHS)):
            own = [name for name in found.names if name in fits and fits[name][i, j]]
            row.append(tuple(sorted(n for n in own if n == own[0] or not found.pair(own[0], n).decided)))
        cells.append(row)
    return cells


def _advice(
    found: Order, losses: pd.DataFrame, first: str, undecided: Mapping[str, float], fitting: Sequence[str]
) -> str:
    """Return which size to train next, with how many seeds, to decide the order if the trend continues."""
    if not fitting:
        return (
            "nothing that trains decides; raise the budget, or compare strategies that send less or compute meanwhile"
        )
    if not undecided:
        return "nothing, it is decided"
    rival = min(undecided, key=lambda name: (not math.isnan(undecided[name]), undecided[name]))
    pair = found.pair(first, rival)
    if pair.measured:
        return f"to tell {first} from {rival}, train more seeds at {in_short(found.to)}"
    seeds = max((at.seeds for at in pair.sizes), default=1)
    sizes = [size for size in (found.sizes[-1] * _STEPS ** np.arange(1, 40)).tolist() if size < found.to]
    options: list[tuple[float, float, int]] = []  # runs, size, seeds
    for number in (factor * seeds for factor in _MORE_SEEDS):

        def decides(size: float, number: int = number) -> bool:
            return order(_with_size(found, losses, size, number), found.to).pair(first, rival).decided

        # What a size decides, larger ones do: ask the largest that is cheaper than what was found, and then search.
        cheaper = [size for size in sizes if all(size * number < cost for cost, _, _ in options)]
        if cheaper and decides(cheaper[-1]):
            size = cheaper[bisect_left(cheaper[:-1], True, key=decides)]
            options.append((size * number, size, number))
    if not options:
        return f"no single size below {in_short(found.to)} would tell {first} from {rival}, even if the trend goes on"
    _, size, number = min(options)
    return (
        f"to tell {first} from {rival}, train a size of about {in_short(size)} with {number} seeds: P reaches "
        f"{CALLED:.0%} if the trend goes on there"
    )


def _with_size(found: Order, losses: pd.DataFrame, size: float, seeds: int) -> dict[str, list[Any]]:
    """Return losses with a further size, where every strategy follows its trend and seeds differ as measured."""
    frame = losses[["strategy", "parameters", "seed", "loss"]].dropna()
    without = [(name, size) for own in (found.left_out, found.silent) for name in own for size in own[name]]
    frame = frame[[at not in without for at in zip(frame["strategy"], frame["parameters"], strict=True)]]
    rows = [list(own) for own in zip(*(frame[column] for column in frame), strict=True)]
    for name, own in frame.groupby("strategy"):
        x, logs = np.log(own["parameters"].to_numpy(float)), np.log(own["loss"].to_numpy(float))
        slope, start = np.polyfit(x, logs, 1)
        residuals = logs - slope * x - start
        for seed in range(seeds):
            loss = math.exp(start + slope * math.log(size) + float(residuals[seed % len(residuals)]))
            rows.append([name, size, seed, loss])
    return dict(zip(("strategy", "parameters", "seed", "loss"), map(list, zip(*rows, strict=True)), strict=True))
