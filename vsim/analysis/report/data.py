"""The data of a comparison's page: losses, bytes and clocks of all runs, as plain data."""

from __future__ import annotations

import copy
import inspect
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from vsim.analysis import summary
from vsim.analysis.asked import Asked
from vsim.analysis.cache import Cache
from vsim.analysis.columns import COLUMNS, Column, columns_of, headings
from vsim.analysis.compared import ComparedRun, Runs
from vsim.analysis.crossings import doubts
from vsim.analysis.losses import by_seed, compare_finals, compared_runs, final_loss, legend, loss_interval, note, sound
from vsim.analysis.losses import diverged as diverged_in
from vsim.analysis.losses import ties as ties_in
from vsim.analysis.provenance import describe
from vsim.analysis.report.anonymous import to_send, without_paths
from vsim.analysis.report.clocks import Clocks
from vsim.analysis.report.plain import plain, rounded, thinned
from vsim.analysis.spent import AnyCompute, AnyNetwork
from vsim.analysis.statistics import Ranking, contenders
from vsim.analysis.tables import HOURS, MEGABYTES, Heading, cell, unit_of
from vsim.figures.looks import Look
from vsim.figures.words import brief_list, quoted
from vsim.history.attendance import rounds
from vsim.history.curves import Y_LABELS
from vsim.history.history import CONSENSUS, History, mean_present
from vsim.network import Compute, Network, timeline
from vsim.network.clock import Clock, Span
from vsim.network.timeline import around_first_event

# Initial values of the sliders if neither the caller nor the comparison gives a network or compute.
NETWORK, COMPUTE = "1 Gbit/s, 20 ms", 1.0
# Limits on a page of few runs, and on a page of many (a sweep): measurements of the loss and of other columns, steps of
# a clock, rows of `node_losses`. Then the most runs that count as few, nodes with losses shown, and bars of a timeline.
_FEW = {"losses": 1000, "others": 150, "steps": 300, "rows": 80}
_MANY = {"losses": 100, "others": 0, "steps": 40, "rows": 0}
_MANY_RUNS, _MOST_NODES, _MOST_BARS, _NAMED = 60, 12, 400, 6
# Columns without curves: they are shown elsewhere on the page, or do not describe the training.
_NO_CURVES = (
    *("step", "examples", "tokens", "payload_bytes", "wire_bytes", "seconds", "validation_seconds", "memory_bytes"),
    *("global_loss_se", "global_formed", "val_examples", "val_total", "node_loss_min", "node_loss_max"),
    *("clock_seconds", "compute_seconds"),
)
_COLLECTIVES = {
    None: "through a server for clients, all-reduce as a ring for nodes",
    "ring": "all-reduce as a ring",
    "tree": "all-reduce as a tree",
    "halving-doubling": "all-reduce by halving and doubling",
    "server": "through a server",
}
_LABELS = {
    **Y_LABELS,
    "lr": "inner learning rate",
    "node_loss_std": "spread of the nodes' validation losses",
    "local_accuracy": "validation accuracy of node 0",
    "divergence": "drift: distance of the replicas from their mean",
    CONSENSUS: "distance of the replicas from their mean",
    "correlation": "correlation of the replicas' weights",
}


def content(
    comparison: Runs, network: AnyNetwork = None, compute: AnyCompute = None, cache: Cache | None = None
) -> dict[str, Any]:
    """Return the content of the page of a comparison or sweep, as dicts, lists, numbers and text for JSON.

    Args:
        network, compute: initial values of the sliders; default: the comparison's. Without them, the page
            has no hours until a slider moves.
        cache: holds the clocks of earlier pages.

    Raises:
        ValueError: there is no run, or the network or compute has another number of nodes.
    """
    if not len(comparison):
        raise ValueError("the comparison has no run to report")
    return _Page(comparison, network, compute, Cache() if cache is None else cache).as_plain()


class _Page:
    """Collects the content of the page of one comparison."""

    def __init__(self, comparison: Runs, network: AnyNetwork, compute: AnyCompute, cache: Cache) -> None:
        typed = any(str(call).startswith("vsim ") for call in comparison.calls)
        typed |= any(re.match(r"[a-z0-9_-]+:\w+=", name) for name in comparison)
        self.comparison = comparison.in_words() if typed else comparison
        network, compute = comparison.prices(network, compute)
        self.assumed = [what for what, own in (("network", network), ("compute", compute)) if own is None]
        self.network = Network.of(NETWORK if network is None else network)
        self.compute = Compute.of(COMPUTE if compute is None else compute)
        self.most = _FEW if len(comparison.all_runs) <= _MANY_RUNS else _MANY
        self.clocks = Clocks(self.network, self.compute, comparison.allreduce_bytes, self.most["steps"], cache)
        kinds = {history.ledger.of_clients for history in comparison.all_histories}
        self.shown = self.network.for_run(*kinds) if len(kinds) == 1 else self.network
        self.columns = self._columns()

    def _columns(self) -> list[str]:
        """The columns of `History` that have curves, the loss first."""
        loss = self.comparison.loss_column
        if not self.most["others"]:
            return [loss]
        histories = self.comparison.all_histories
        known = dict.fromkeys(column for history in histories for column in history.columns)
        measured = [c for c in known if any(np.isfinite(history.column(c)).any() for history in histories)]
        return [loss, *(column for column in measured if column != loss and column not in _NO_CURVES)]

    def as_plain(self) -> dict[str, Any]:
        comparison = self.comparison
        unpriced = copy.copy(comparison)
        unpriced.network = unpriced.compute = None
        rows = dict(zip(comparison.order, summary.numbers(Asked.of(unpriced)), strict=True))
        table, live = columns_of(Asked.of(unpriced)), [column for column in COLUMNS if column.is_live]
        (found, remarks), diverged, ties = compare_finals(comparison), diverged_in(comparison), ties_in(comparison)
        values, places = by_seed(comparison), {name: i for i, name in enumerate(rows)}
        ranked, looks, compared = contenders(values), comparison.looks(), compared_runs(comparison)
        runs = []
        for name, row in rows.items():
            own, ends = comparison.runs(name), loss_interval(comparison, compared[name])
            runs.append(
                {
                    "name": name,
                    **_look(looks.by_name[name]),
                    "row": {key: plain(value) for key, value in row.items()},
                    "interval": ends if all(map(math.isfinite, ends)) else None,
                    "mark": "best" if name in found.best else "tied" if name in found.undecided else "",
                    "ranked": name in ranked,
                    "ties": sorted(places[other] for other in ties.get(name, ())),
                    "diverged": diverged.get(name, ""),
                    "note": note(comparison, name),
                    "labels": comparison.labels(name),
                    "seeds": [self._seed(run, own) | {"begun": run.seed in values[name]} for run in own],
                    "compared": [i for i, run in enumerate(own) if run in compared[name]],
                    "nodes": self._node_losses(own[0].history),
                    "timeline": self._timeline(own[0].history),
                }
            )
        for run in runs:
            run["note"] = without_paths(run["note"])
        seeds = max(len(run["seeds"]) for run in runs)
        return {
            "title": comparison.title,
            "trained": comparison.trained,
            "date": comparison.date,
            "answer": self._answer(found, values),
            "loss": comparison.loss_column,
            "columns": {column: _LABELS.get(column, column.replace("_", " ")) for column in self.columns},
            "titles": list(comparison.labels(next(iter(rows)))),
            "table": [column.name for column in table if column.shown(comparison)],
            "more": [column.name for column in table if not column.shown(comparison)],
            "live": [_key(column) for column in live],
            "headings": {_key(one): _heading(one) for one in (*table, *live, Heading("wire {unit}", MEGABYTES))},
            "lossTitle": comparison.loss_title,
            "undecided": legend(found),
            "remarks": [
                *summary.budgeted(comparison),
                *summary.tuning(comparison),
                *remarks,
                *summary.unformed(comparison),
                *summary.resized(comparison),
            ],
            "runs": runs,
            "ledgers": self.clocks.ledgers,
            "assumed": self.assumed,
            "network": _network(self.shown),
            "compute": {
                "seconds": float(self.compute.node_seconds.mean()),
                "alike": len(set(self.compute.node_seconds.tolist())) == 1,
                "price": self.compute.dollars_per_hour,
                "text": repr(self.compute),
            },
            "nodes": comparison.num_nodes,
            "clients": comparison.of_clients,
            "weights": comparison.allreduce_bytes,
            "quantiles": _quantiles(seeds, len(runs)),
            "doubts": doubts(comparison, stays=False),
            "target": _target(comparison),
            "varied": getattr(comparison, "varied", []),
            "values": self._values(),
            "key": {title: [{"text": text, **_look(look)} for text, look in own] for title, own in looks.key.items()},
            "strategies": self._strategies(),
            "about": self._about(),
        }

    def _answer(self, found: Ranking, losses: Mapping[str, Mapping[int, float]]) -> str:
        """Return a sentence on which strategy is lowest, and one on whether the seeds decide it."""
        if not found.best or len(losses) < 2:
            return ""
        own = [loss for loss in losses[found.best[0]].values() if math.isfinite(loss)]
        best = _joined(found.best)
        ends = f"{best} {'end' if len(found.best) > 1 else 'ends'} with the lowest {self.comparison.loss_title}"
        mean = float(np.mean(own))
        (title,) = headings(self.comparison.loss_title)
        ends += f", {cell(mean, unit=unit_of(title, [mean]))}."
        seeds = max(map(len, losses.values()))
        if not found.tested:
            few = "One seed does" if seeds == 1 else "The seeds that all have do"
            return f"{ends} {few} not show whether that is chance: train several."
        if found.undecided:
            them = "them" if len(found.best) > 1 else "it"
            return f"{ends} These {seeds} seeds do not tell {them} from {_joined(found.undecided)}."
        return f"{ends} These {seeds} seeds tell it from all others (p ≤ 0.05)."

    def _strategies(self) -> list[list[str]]:
        """Names of strategies, what these do in the words of their class, and the settings of each, of a few names."""
        texts: dict[Any, str] = {}  # class, or the name of one that a file names → first paragraph of its docstring
        named: dict[str, list[str]] = {}
        for name in self.comparison.order:
            run = self.comparison.runs(name)[0]
            cls = _call(run).partition("(")[0] if run.trained is None else type(run.trained)
            if cls not in texts:
                known = "" if run.strategy is None else inspect.getdoc(type(run.strategy)) or ""
                texts[cls] = " ".join(known.split("\n\n")[0].split())
            named.setdefault(texts[cls], []).append(name)
        found = []
        for text, names in named.items():
            settings = [without_paths(_call(self.comparison.runs(name)[0]).partition("(")[2][:-1]) for name in names]
            if len(names) > 1:
                settings = [f"{name}: {own}" for name, own in zip(names, settings, strict=True)]
            swept = str(getattr(self.comparison, "strategy", "")) if len(named) == 1 else ""
            few = len(names) <= _NAMED and not swept
            if text:
                found.append([swept or _joined(names), text, "\n".join(settings if few else [])])
        return found

    def _values(self) -> dict[str, list[str]]:
        """Setting of a sweep → the text of its values, in their order."""
        points = getattr(self.comparison, "points", {})
        varied = getattr(self.comparison, "varied", [])
        return {key: list(dict.fromkeys(point.labels[key] for point in points.values())) for key in varied}

    def _about(self) -> list[list[str]]:
        """The description of the runs, as pairs of title and text."""
        comparison = self.comparison
        histories = comparison.all_histories
        examples = ", ".join(comparison.sampled) or histories[0].validated_on
        found = [
            ["started", comparison.date],
            ["nodes", ", ".join(str(n) for n in sorted({history.num_nodes for history in histories}))],
            ["clients", ", ".join(str(n) for n in sorted({h.ledger.num_nodes for h in histories if h.is_of_cohorts}))],
            ["steps", ", ".join(f"{n:,}" for n in sorted({history.ledger.steps for history in histories}))],
            ["seeds", ", ".join(str(n) for n in sorted({r.seed for n in comparison for r in comparison.runs(n)}))],
            ["weights", f"{comparison.allreduce_bytes:,} bytes"],
            ["data", _data(histories[0].config.get("train_dataset"))],
            ["validated on", f"{examples} examples" if examples else ""],
            ["executor", ", ".join(dict.fromkeys(history.executor for history in histories))],
            ["network", "none given" if "network" in self.assumed else repr(self.shown)],
            ["compute", "none given" if "compute" in self.assumed else repr(self.compute)],
        ]
        found.append(["provenance", without_paths(str(to_send(describe(comparison))))])
        settings = getattr(comparison, "settings", {})
        if len(settings) <= _MANY_RUNS:
            for name, own in settings.items():
                found.append([name, ", ".join(f"{key}={value}" for key, value in own.items())])
        return [[title, text] for title, text in found if text]

    def _seed(self, run: ComparedRun, others: Sequence[ComparedRun]) -> dict[str, Any]:
        history, loss = run.history, self.comparison.loss_column
        steps, losses = thinned(history, loss, self.most["losses"])
        formed = history.formed[np.searchsorted(history["step"], steps)] if loss == "global_loss" else np.ones(0, bool)
        curves = {
            column: (steps, losses) if column == loss else thinned(history, column, self.most["others"])
            for column in self.columns
            if column in history.columns
        }
        along = {"examples": history["examples"]} if len(history) else {}
        if history.last("tokens") > 0:
            along["tokens"] = history["tokens"]
        if history.ledger.attendance:
            along["rounds"] = rounds(history)
        return {
            "seed": run.seed,
            "sound": not run.failure or all(other.failure for other in others),
            "failed": run.failed,
            "loss": plain(final_loss(self.comparison, run)),
            "se": plain(history.last("global_loss_se")) if loss == "global_loss" else None,
            "note": run.note,
            "ledger": self.clocks.place(history, steps),
            "formed": [] if formed.all() else formed.tolist(),
            "forming": None if formed.all() else self.clocks.forming(history),
            **{what: [] for what in ("examples", "tokens", "rounds")},
            **{what: rounded(np.interp(steps, history["step"], own)) for what, own in along.items()},
            "curves": {column: [[int(step) for step in own[0]], rounded(own[1])] for column, own in curves.items()},
        }

    def _node_losses(self, history: History) -> dict[str, Any] | None:
        """Return training losses of some nodes, averaged over enough consecutive steps to leave few rows."""
        losses = history.node_losses
        if not self.most["rows"] or not len(losses):
            return None
        every = -(-len(losses) // self.most["rows"])
        shown = np.unique(np.linspace(0, losses.shape[1] - 1, min(_MOST_NODES, losses.shape[1])).astype(int))
        first = int(history.last("step")) - len(losses)
        blocks = [losses[start : start + every] for start in range(0, len(losses), every)]
        means = [mean_present(block) for block in blocks]
        ends = np.cumsum([len(block) for block in blocks]) + first
        return {
            "steps": [int(step) for step in ends],
            "shown": [int(node) for node in shown],
            "of": losses.shape[1],
            "losses": [rounded([own[node] for own in means]) for node in shown],
        }

    def _timeline(self, history: History) -> dict[str, Any] | None:
        """Return what some nodes do around the first sync, as bars: (what, node, start, end, step, label)."""
        ledger = history.ledger
        if self.assumed or not self.most["rows"] or ledger.seconds or ledger.num_nodes > 1000:
            return None
        first, last = around_first_event(ledger)
        spans: list[Span] = []
        try:
            timeline(ledger, self.network, self.compute)  # raises an error if another compute decided the run
            Clock(ledger, self.network, self.compute, spans.append).run(last)
        except ValueError:
            return None
        nodes = range(min(4, history.num_nodes))
        bars = [
            [span.what, node, *rounded(times), span.step, span.label]
            for span in spans
            for node in nodes
            if span.step >= first and (times := span.of_node(node)) is not None and times[1] > times[0]
        ]
        return {"steps": [first, last], "nodes": len(nodes), "bars": bars[:_MOST_BARS]} if bars else None


def _key(own: Heading) -> str:
    """Return the name of a column on the page, where one to a loss is to the target of the slider."""
    return own.to("target").name if isinstance(own, Column) else own.name


def _heading(own: Heading) -> dict[str, Any]:
    """Return how the page shows a column, from its record."""
    measure = own.measure
    return {
        # On the page, where there are other times, too, that of a whole run says which one it is.
        "title": "{unit} on the network" if own.name == "hours" else own.title,
        **{"own": measure.own, "units": measure.units, "factor": measure.factor, "sign": measure.sign},
        "digits": measure.digits if own.digits is None else own.digits,
        "fine": measure.fine and own.digits is None,
        "wholeFrom": measure.whole_from if math.isfinite(measure.whole_from) else None,
        "exact": measure.exact,
        "unitOf": own.unit_of or _key(own),
        "isHours": measure is HOURS,
        "scales": isinstance(own, Column) and own.scales,
        "isPriced": isinstance(own, Column) and own.is_priced,
        "isToLoss": isinstance(own, Column) and own.is_to_loss,
    }


def _joined(names: Sequence[str]) -> str:
    """Return names as text, such as 'A, "B, H = 5" and C'."""
    own = list(quoted(names).values())
    return (
        " and ".join(filter(None, [", ".join(own[:-1]), *own[-1:]])) if len(own) <= _NAMED else brief_list(own, _NAMED)
    )


def _call(run: ComparedRun) -> str:
    """Return the call that makes a run's strategy, as text."""
    about = run.history.config.get("strategy")
    return str(about.get("call", "")) if isinstance(about, Mapping) else ""


def _data(about: Any) -> str:
    """Return the name and the size of the training data."""
    if not isinstance(about, Mapping):
        return ""
    examples = f"{about['examples']:,} examples" if isinstance(about.get("examples"), int) else ""
    return ", ".join(filter(None, [str(about.get("name", about.get("class", about.get("function", "")))), examples]))


def _look(look: Look) -> dict[str, Any]:
    dash = [] if isinstance(look.dash, str) else [float(part) for part in look.dash[1]]
    return {"colour": look.colour, "dash": dash, "marker": look.marker, "bare": look.dash == "none"}


def _target(comparison: Runs) -> list[float]:
    """Return the range of target losses, from the lowest loss to the highest initial loss; and the initial target.

    The initial target is a loss that half of the strategies that learn reach, with all their seeds: the median of the
    lowest losses, over the strategies that come at least a tenth of the way from the start to the lowest loss.
    """
    column, names = comparison.loss_column, [name for name in comparison if name not in diverged_in(comparison)]
    measured = [[run.history.measured(column)[0] for run in sound(comparison.runs(name))] for name in names]
    curves = [own for own in ([losses for losses in one if len(losses)] for one in measured) if own]
    if not curves:
        return [0.0, 1.0, 0.5]
    starts = [float(losses[0]) for own in curves for losses in own]
    reached = sorted(max(float(losses.min()) for losses in own) for own in curves)
    low, start = min(float(losses.min()) for own in curves for losses in own), min(starts)
    learnt = [loss for loss in reached if loss <= start - (start - low) / 10] or reached
    target, fine = learnt[len(learnt) // 2], 10.0 ** math.floor(math.log10(max(start - low, 1e-9)) - 2)
    return [low, max(*starts, low + 1e-9), max(target, float(f"{math.ceil(target / fine) * fine:.12g}"))]


def _network(network: Network) -> dict[str, Any]:
    """Return the sliders' values: bandwidth and latency if links are equal, else 1, a factor for all links."""
    plain = network.as_plain()
    equal = plain["place"] is None
    bandwidth = float(plain["bits_per_second"][0][0]) if equal else 1.0
    latency = float(plain["latency"][0][0]) if equal else 1.0
    return {
        "equal": equal,
        "bandwidth": min(bandwidth, 1e15),
        "latency": latency,
        "collective": _COLLECTIVES[network.collective],
        "text": repr(network),
    }


def _quantiles(seeds: int, runs: int) -> dict[str, list[float]]:
    """Return number of seeds → for 2, 3, … runs: Student's t for a pair's interval, by Bonferroni over all pairs."""
    if seeds < 2 or runs < 2:
        return {}
    from scipy import stats

    tests = np.array([math.comb(n, 2) for n in range(2, runs + 1)])
    return {str(n): rounded(stats.t.isf(0.025 / tests, n - 1)) for n in range(2, seeds + 1)}  # type: ignore[misc]
