"""The runs of several strategies side by side: a table, figures and files."""

from __future__ import annotations

import base64
import copy
import html
import io
import math
import statistics
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, overload

import numpy as np
from numpy.typing import NDArray
from typing_extensions import Self

from vsim.arguments import a_list, a_text, encodable, given, naming, one_of, real_number, true_or_false
from vsim.cluster.ledger import Ledger
from vsim.cluster.traffic import traffic
from vsim.network import Compute, Network
from vsim.network.links import bits_per_second, seconds
from vsim.network.timeline import seconds_on
from vsim.records.describe import BY_NAME, Conditions, Provenance, describe, provenance
from vsim.records.fronts import COSTS, Best, Cheapest, Front, amount, best_of, dominating, loss_within
from vsim.records.history import TESTED, History, holding_a_record, read_json, write_csv, write_json
from vsim.records.plots import MANY, PAGE, Y_LABELS, Looks, XAxis, bands, looks_of, overview, rounds, x_axis
from vsim.records.spent import Priced, Use, forming_bytes, forming_seconds, last, spent, until, unused, use
from vsim.records.statistics import (
    NEVER,
    Crossing,
    Difference,
    Ranking,
    contenders,
    differences,
    interval,
    pairwise_p,
    ranking,
    shared_seeds,
)
from vsim.records.tables import CLIENT_ACCURACIES, CLIENT_LOSSES, Marks, text_table
from vsim.records.winners import BANDWIDTHS, LATENCIES, Race, Winners, ascending
from vsim.shapes import naming_layers, without_values

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure
    from torch import nn

    from vsim.figures.paper import PaperFigure
    from vsim.records.report.page import Report

_NAMED = 6  # strategies that a note names
_ALIKE = 0.02  # a difference in compression up to which no note names it
# Attributes of a run that files hold besides its history.
_PLAIN = ("failure", "seed", "diverged_at", "stopped_at")


@dataclass(eq=False)
class ComparedRun:
    """One strategy's run.

    Attributes:
        model: the mean of the nodes' final models; None if the run did not end, or was read from a file.
        failure: why the run did not end, or "".
        seed: the seed of everything random in the run.
        error: the error, if the run failed.
        callbacks: the run's own copies of the given ones.
        diverged_at: the first step with a loss or weights that are not finite; None if there was none.
        stopped_at: the step after which a sweep with `halving` stopped the run; None if it was not stopped.
        strategy: the strategy; None if the run was read from a file, and the strategy is not one of vsim's own.
        measured_less: how many times fewer bytes than AllReduce's the run sent, if its bytes are another model's.
    """

    # Makes a strategy from the text of its call; set by `vsim.compare`, as records do not import strategies.
    remade: ClassVar[Callable[[str], Any]] = staticmethod(lambda call: None)

    history: History
    model: nn.Module | None = None
    failure: str = ""
    seed: int = 42
    error: Exception | None = None
    diverged_at: int | None = None
    stopped_at: int | None = None
    callbacks: Sequence[Any] = ()
    strategy: Any = None
    measured_less: float | None = None

    @property
    def ledger(self) -> Ledger:
        """The ledger of the run's communication."""
        return self.history.ledger

    @property
    def ended(self) -> bool:
        """Whether the run reached its last step."""
        return not self.failure and self.stopped_at is None

    @property
    def failed(self) -> bool:
        """Whether the run diverged or raised an error; interrupted runs and runs stopped by `halving` did not fail."""
        return bool(self.failure) and not self.failure.startswith("interrupted")

    @property
    def note(self) -> str:
        """Why the run did not reach its last step, or ""."""
        return f"stopped after step {self.stopped_at}" if self.stopped_at is not None else self.failure

    def as_plain(self) -> dict[str, Any]:
        """Return everything but the model and the error as dicts, lists, numbers and text, which JSON can hold."""
        plain = {key: getattr(self, key) for key in _PLAIN}
        less = {} if self.measured_less is None else {"measured_less": self.measured_less}
        return {**plain, **less, "history": self.history.as_plain()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> ComparedRun:
        """Make the run that `as_plain` was of."""
        run = cls(History.from_plain(plain["history"]), **{key: plain[key] for key in _PLAIN})
        run.measured_less = plain.get("measured_less")
        run.remake_strategy()
        return run

    def remake_strategy(self) -> None:
        """Make the strategy from the configuration, if all of it is vsim's own."""
        about = self.history.config.get("strategy", {})
        strategy = type(self).remade(about.get("call", ""))
        if strategy is not None and describe(strategy).items() <= about.items():
            self.strategy = strategy


# What hours are derived from, and how both may be given.
AnyNetwork = Network | str | float | None
AnyCompute = Compute | float | str | None
Floats = NDArray[np.float64]


_KINDS: dict[str, type[Comparison]] = {}  # kinds of comparisons by name, for files that hold one in another


class Comparison(Mapping[str, ComparedRun]):
    """The runs of several strategies, by name. A notebook shows a comparison as a table and a figure.

    With several seeds, `comparison[name]` is the strategy's run with the first seed, and `comparison.runs(name)` lists
    all its runs; tables show mean ± standard deviation, and figures the mean and a band.
    `comparison[["AllReduce", "DiLoCo"]]` is the comparison of these two strategies, which keep their colours.

    Attributes:
        allreduce_bytes: bytes per node that AllReduce would hand to its collectives in one step: all gradients once.
        network, compute: the default network and compute for deriving hours; None if there are none.
        tuned: name → the `Sweep` in which `tune=` found the strategy's settings; empty without it.
        calls: the calls or commands that trained it.
    """

    def __init_subclass__(cls) -> None:
        _KINDS[cls.__name__] = cls

    def __init__(self, allreduce_bytes: int) -> None:
        self.allreduce_bytes = allreduce_bytes
        self.network: Network | None = None
        self.compute: Compute | None = None
        self.tuned: dict[str, Any] = {}  # values are Sweeps, whose module imports this one
        self.calls: list[str] = []
        self._measured_bytes: int | None = None  # of the trained model, if bytes are another model's
        self._runs: dict[str, list[ComparedRun]] = {}
        self._names: list[str] = []  # of all runs, of a selection too: the looks of lines follow from them

    @overload
    def __getitem__(self, name: str) -> ComparedRun: ...
    @overload
    def __getitem__(self, name: list[str]) -> Self: ...
    def __getitem__(self, name: str | list[str]) -> ComparedRun | Self:
        if not isinstance(name, list):
            return self.runs(name)[0]
        return self._selected(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def runs(self, name: str) -> list[ComparedRun]:
        """Return the runs of one strategy, one for each seed."""
        if not isinstance(name, str) or name not in self._runs:
            raise KeyError(f"no run {name!r}; there are {', '.join(self._runs)}")
        return self._runs[name]

    @property
    def num_nodes(self) -> int | None:
        """K; None if runs have different numbers of nodes."""
        numbers = {history.num_nodes for history in self._all_histories()}
        return numbers.pop() if len(numbers) == 1 else None

    @property
    def histories(self) -> dict[str, list[History]]:
        """Name → histories, one for each seed: what `vsim.records.plots.bands` draws."""
        return {name: [run.history for run in runs] for name, runs in self._runs.items()}

    def _add(self, name: str, run: ComparedRun) -> None:
        """Add a run of one seed."""
        if name not in self._runs:
            self._names.append(name)
        self._runs.setdefault(name, []).append(run)

    def _price_as(self, other: Comparison) -> None:
        """Derive bytes and hours from the sizes, network and compute of another comparison."""
        self.allreduce_bytes, self._measured_bytes = other.allreduce_bytes, other._measured_bytes
        self.network, self.compute = other.network, other.compute

    def _selected(self, names: Sequence[str]) -> Self:
        other = copy.copy(self)
        other._runs = {name: self.runs(name) for name in names}
        return other

    def without(self, *names: str) -> Self:
        """Return the runs of all other strategies; they keep their colours.

        Raises:
            ValueError: there is no such strategy, or no other.
        """
        for name in names:
            one_of("a strategy", name, self)
        left = [name for name in self if name not in names]
        if not left:
            raise ValueError(f"nothing is left without {', '.join(names)}")
        return self._selected(left)

    def renamed(self, names: Mapping[str, str]) -> Self:
        """Return the same runs, some of them renamed: name → new name.

        Raises:
            TypeError: a name is not text. ValueError: there is no such name, or two strategies would have one name.
        """
        if not isinstance(names, Mapping) or not all(isinstance(one, str) and one.strip() for one in names.values()):
            raise TypeError(f"names must be a dict of name → new name, got {names!r}")
        for name in names:
            one_of("a strategy", name, self)
        called = [encodable("the name of a run", names.get(name, name)) for name in self]
        if twice := sorted({name for name in called if called.count(name) > 1}):
            raise ValueError(f"two strategies would be called {', '.join(twice)}")
        return self._renamed(names)

    def _renamed(self, names: Mapping[str, str]) -> Self:
        other = copy.copy(self)
        other._runs = {names.get(name, name): self.runs(name) for name in self}
        other._names = [names.get(name, name) for name in self._names]
        other.tuned = {names.get(name, name): sweep for name, sweep in self.tuned.items()}
        return other

    def __or__(self, other: Comparison) -> Comparison:
        """Return the runs of both comparisons. Of two runs with one name and seed, keep a run that ended, or the first.

        The union of two sweeps over the same settings is a sweep.

        Raises:
            ValueError: the runs are of different problems (model, data, nodes, steps, options), or one name has two
                strategies; the message names the differences. Or the two derive hours from different networks.
        """
        if not isinstance(other, Comparison):
            raise no_comparison("what a comparison is joined with", other)
        pairs = [(c, name, run) for c in (self, other) for name in c for run in c.runs(name)]
        common = Conditions([*self.varied_options, *other.varied_options])
        for _, name, run in pairs:
            common.check(name, run.seed, run.history.config)
        for what in ("allreduce_bytes", "_measured_bytes"):
            if (sizes := (getattr(self, what), getattr(other, what)))[0] != sizes[1]:
                raise ValueError(f"the two are priced for models of different sizes: {sizes[0]} and {sizes[1]} bytes")
        both = self._empty_with(other)
        both._measured_bytes = self._measured_bytes
        for what in ("network", "compute"):
            own, theirs = getattr(self, what), getattr(other, what)
            if own is not None and theirs is not None and own.as_plain() != theirs.as_plain():
                raise ValueError(
                    f"their hours are derived from different {what}: {own!r} and {theirs!r}; set the "
                    f"{what} of the second to that of the first, or to None"
                )
            setattr(both, what, theirs if own is None else own)
        runs: dict[str, dict[int, ComparedRun]] = {}
        for _, name, run in pairs:
            own_runs = runs.setdefault(name, {})
            if run.seed not in own_runs or (run.ended and not own_runs[run.seed].ended):
                own_runs[run.seed] = run
        for name, by_seed in runs.items():
            for run in by_seed.values():
                both._add(name, run)
        both.tuned = {**other.tuned, **self.tuned}
        both.calls = list(dict.fromkeys([*self.calls, *other.calls]))
        return both

    # The options of `fit` that a sweep varies, and in which its runs may differ.
    varied_options: Sequence[str] = ()

    def _empty_with(self, other: Comparison) -> Comparison:
        """Return an empty comparison that can take the runs of both."""
        return Comparison(self.allreduce_bytes)

    def describe(self) -> Provenance:
        """Describe what was compared: strategies, model, data, options, versions, machine, date, call and executor.

        Only options that differ from the defaults of `Trainer.fit` are listed. A comparison from a file without
        configurations is described only by its strategies and seeds.
        """
        runs = {name: own[0].history.config.get("strategy", {}) for name, own in self._runs.items()}
        by_name = {name: [run.seed for run in own] for name, own in self._runs.items()}
        alike = len({tuple(own) for own in by_name.values()}) == 1
        seeds: Any = next(iter(by_name.values())) if alike else by_name
        calls = {name: own.get("call", "") for name, own in runs.items()}
        configs = [run.history.config for own in self._runs.values() for run in own if run.history.config]
        computed = dict.fromkeys(filter(None, (history.computed for history in self._all_histories())))
        tuned = {name: f"{own.chosen()} of {len(own)} settings" for name, own in self.tuned.items() if name in self}
        return provenance(calls, seeds, self.calls, configs, list(computed), tuned)

    def _titles(self, name: str) -> dict[str, Any]:
        """Return the titles of a row of the table: column → text."""
        chosen = {name: sweep._titles(sweep.chosen()) for name, sweep in self.tuned.items()}
        settings = dict.fromkeys(key for own in chosen.values() for key in own)
        return {"strategy": name, **{key: chosen.get(name, {}).get(key, "–") for key in settings}}

    def _titled_runs(self) -> Iterator[tuple[dict[str, Any], ComparedRun]]:
        """Yield all runs, each with the first columns of its lines in files: column → value."""
        for name, runs in self._runs.items():
            for run in runs:
                yield {"strategy": name, "seed": run.seed}, run

    def _all_runs(self) -> list[ComparedRun]:
        return [run for runs in self._runs.values() for run in runs]

    def _all_histories(self) -> list[History]:
        return [run.history for run in self._all_runs()]

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with a row per strategy, seed and step: strategy, seed and the columns of `History`.

        With a `client_val_dataset`, the last row of each run has the table's columns on clients, too.
        """
        import pandas as pd

        titled = list(self._titled_runs())
        titles = [title for own, _ in titled[:1] for title in own]
        # Some strategies have their own columns.
        columns = dict.fromkeys(column for _, run in titled for column in run.history.columns)
        frames = [run.history.to_pandas().assign(**own) for own, run in titled]
        for frame, (_, run) in zip(frames, titled, strict=True):
            for name, value in self._on_clients(run).items():
                columns[name] = None
                frame[name] = [*[math.nan] * (len(frame) - 1), value][-len(frame) :] if len(frame) else []
        return pd.concat(frames, ignore_index=True)[[*titles, *columns]]

    def to_csv(self, path: str | Path) -> None:
        """Write one line per strategy, seed and step, with the columns of `to_pandas`."""
        write_csv(path, self.to_pandas())

    def to_json(self, path: str | Path) -> None:
        """Write everything but the models, for `from_json`: histories, ledgers, failures."""
        write_json(path, self._as_plain())

    @classmethod
    def from_json(cls, path: str | Path) -> Self:
        """Read a file that `to_json` wrote; the runs have no models.

        Raises:
            ValueError: the file holds something else.
        """
        content = read_json(path, cls.__name__, cls._keys)
        with holding_a_record(path, cls.__name__):
            return cls._from_plain(content)

    _keys: tuple[str, ...] = ("allreduce_bytes", "runs")

    def _as_plain(self) -> dict[str, Any]:
        runs = [{"strategy": name, **run.as_plain()} for name, runs in self._runs.items() for run in runs]
        priced = {key: None if own is None else own.as_plain() for key, own in self._priced_on.items()}
        more: dict[str, Any] = {"tuned": {name: sweep._as_plain() for name, sweep in self.tuned.items()}}
        more |= {"measured_bytes": self._measured_bytes, "calls": self.calls}
        own = {key: value for key, value in more.items() if value}
        return {"allreduce_bytes": self.allreduce_bytes, "runs": runs, **priced, **own}

    @property
    def _priced_on(self) -> dict[str, Network | Compute | None]:
        return {"network": self.network, "compute": self.compute}

    @classmethod
    def _from_plain(cls, content: Mapping[str, Any]) -> Self:
        comparison = cls._empty(content)
        if content.get("network") is not None:
            comparison.network = Network.from_plain(content["network"])
            comparison.compute = Compute.from_plain(content["compute"])
        for run in content["runs"]:
            comparison._add(run["strategy"], ComparedRun.from_plain(run))
        comparison._measured_bytes, comparison.calls = content.get("measured_bytes"), list(content.get("calls", []))
        for name, sweep in content.get("tuned", {}).items():
            comparison.tuned[name] = _KINDS["Sweep"]._from_plain(sweep)
        return comparison

    @classmethod
    def _empty(cls, content: Mapping[str, Any]) -> Self:
        return cls(content["allreduce_bytes"])

    def best(
        self, within: Mapping[str, Any] | None = None, network: AnyNetwork = None, compute: AnyCompute = None
    ) -> Best:
        """Return the name of the strategy with the lowest loss, on average over the seeds.

        The name is displayed as a sentence that names the runner-up, and says whether seeds tell the two apart. A
        strategy with a run that diverged or failed is not the best; see `vsim.records.statistics.contenders` for runs
        that are missing.

        Args:
            within: budgets, such as `{"wire": "2 GB"}` or `{"time": "10 h", "cost": "$40"}`. The loss of a run is then
                the last loss measured within all budgets; a mean that no node has costs one more all-reduce. Default:
                the final loss; runs that were stopped early count only if none got to its end. If runs ended before a
                budget was used up, the sentence says how many steps would use it up. Keys: "wire" and "payload" bytes
                per node (for cohorts, per client on average), "time", "cost" in dollars, "step", "examples", "tokens".
            network, compute: determine "time" and "cost", see `vsim.timeline`; default: the comparison's.

        Raises:
            ValueError: every strategy has a run that diverged or failed, or has no loss within the budget; or a budget
                has another key.
            TypeError: "time" or "cost" without network and compute, or network and compute without them.
        """
        if within is not None:
            return self._best_within(within, network, compute)
        if network is not None or compute is not None:
            raise TypeError("network and compute have no effect without a budget of time or cost in within=")
        among = self._candidates()
        if not among:
            names = sorted(self, key=self._rank)
            raise ValueError("no run got to its end" + (f"; {names[0]}: {self._note(names[0])}" if names else ""))
        return best_of(self._by_seed(self._loss), among)

    def _candidates(self) -> list[str]:
        """Return the strategies of which one is the best: that ended or, if none did, that took the most steps."""
        ranks = {name: self._rank(name)[:2] for name in self}
        first = min(ranks.values(), default=(2, 0.0))
        return [name for name, own in ranks.items() if own == first and first[0] < 2]

    def _ranking(self) -> tuple[Ranking, list[str]]:
        """Return which final losses are the best or not told from them, and text on how they were compared."""
        losses, among = self._by_seed(self._loss), self._candidates()
        found, remarks = ranking(losses, among), []
        known = {name: sum(map(math.isfinite, own.values())) for name, own in losses.items()}
        if sum(number > 0 for number in known.values()) > 1 and found.best and not found.tested:
            seeds = "one seed" if max(map(len, losses.values())) == 1 else "fewer than two common seeds"
            remarks.append(f"{seeds}: no interval says whether losses differ")
        if len({frozenset(losses[name]) for name in among}) > 1:
            shared = shared_seeds(losses[name] for name in among)
            over = f"the seeds that all have, {', '.join(map(str, shared))}" if shared else "its own, as none is common"
            remarks.append(f"seeds differ: a strategy is the best by its mean over {over}")
        partly = {name: own for name, own in known.items() if 0 < own < len(losses[name])}
        if partly:
            named = _named([f"{name} ({own} of {len(losses[name])})" for name, own in partly.items()])
            remarks.append(f"mean of the runs with a result, which cannot be the best: {named}")
        return found, remarks

    def _best_within(self, within: Mapping[str, Any], network: AnyNetwork, compute: AnyCompute) -> Best:
        if not isinstance(within, Mapping) or not within:
            raise TypeError(f"within must be a dict such as {{'wire': '2 GB'}}, got {within!r}")
        budgets = {of: amount(of, value) for of, value in within.items()}
        if not {"time", "cost"} & budgets.keys():
            if network is not None or compute is not None:
                raise TypeError("network and compute have no effect without a budget of time or cost in within=")
            priced = None
        else:
            priced = self._must_be_priced(network, compute)

        costs = {
            run: [(self._spent(run, of, priced), most) for of, most in budgets.items()] for run in self._all_runs()
        }

        said = " and ".join(f"{value} ({of})" for of, value in within.items())
        losses = self._by_seed(lambda run: loss_within(run.history.column(self._loss_column), costs[run]))
        return best_of(losses, None, said, self._uses(costs))

    def _uses(self, costs: Mapping[ComparedRun, Sequence[tuple[Floats, float]]]) -> dict[str, Use]:
        """Return name → how much of their budgets the strategy's sound runs used."""
        return {name: use([(run.history, costs[run]) for run in _sound(runs)]) for name, runs in self._runs.items()}

    def _spent(self, run: ComparedRun, of: str, priced: Priced = None) -> Floats:
        """Return what the result of every row has cost, see `spent`."""
        return spent(run.history, of, self.allreduce_bytes, priced)

    def pareto(self, cost: str = "wire", *, network: AnyNetwork = None, compute: AnyCompute = None) -> Front:
        """Return the strategies that no other strategy dominates in final loss and cost.

        Args:
            cost: "wire" or "payload" bytes per node, "time" on a network, or "cost" in dollars.
            network, compute: determine "time" and "cost", see `vsim.timeline`; default: the comparison's.

        Returns:
            A `Front`: a frame, and a figure. A strategy with a run that diverged or failed is not on the front; the
            others are compared over the seeds that all of them have.

        Raises:
            ValueError: there is no such cost. TypeError: "time" or "cost" without network and compute.
        """
        import pandas

        kind = COSTS[one_of("cost", cost, COSTS)]
        if cost in ("wire", "payload") and (network is not None or compute is not None):
            raise TypeError(f"network and compute have no effect on {cost!r}; 'time' and 'cost' follow from them")
        priced = self._must_be_priced(network, compute) if cost in ("time", "cost") else None
        rows: list[dict[str, Any]] = []
        finals = self._finals()
        for name in self._ordered():
            runs = finals[name]
            low, high = self._loss_interval(runs)
            row = {
                "strategy": name,
                kind.column: statistics.fmean(last(self._spent(run, cost, priced)) for run in runs) / kind.unit,
                "loss": statistics.fmean(map(self._loss, runs)),
                "low": low,
                "high": high,
            }
            steps = statistics.fmean(run.ledger.steps for run in runs)
            row |= {"seeds": len(runs), "front": False, "dominated_by": "", "tied": False, "steps": steps}
            rows.append(row)
        means = contenders(self._by_seed(self._loss))
        sound = [row for row in rows if row["strategy"] in means]
        by = dominating([row[kind.column] for row in sound], [row["loss"] for row in sound])
        ties = self._ties()
        for row, places in zip(sound, by, strict=True):
            better = [str(sound[place]["strategy"]) for place in places]
            row |= {"front": not better, "dominated_by": better[0] if better else ""}
            row["tied"] = bool(better) and ties[str(row["strategy"])].issuperset(better)
        dearest = max(row[kind.column] for row in rows)
        for row in rows:
            row["equal_steps"] = row["steps"] * dearest / row[kind.column] if row[kind.column] else math.inf
        per = "client" if self._of_clients else "node"
        return Front(cost, pandas.DataFrame(rows), self._looks(), self._loss_title, per)

    def _finals(self) -> dict[str, list[ComparedRun]]:
        """Return name → the runs whose final losses a front compares: of the seeds that all contenders have."""
        losses = self._by_seed(self._loss)
        means = contenders(losses)
        shared = shared_seeds(losses[name] for name in means)
        return {
            name: [run for run in runs if run.seed in (shared or losses[name])] if name in means else _sound(runs)
            for name, runs in self._runs.items()
        }

    def _loss_interval(self, runs: Sequence[ComparedRun]) -> tuple[float, float]:
        """Return the 95 % interval of the mean loss: by Student's t or, of one run, by its standard error."""
        losses = [self._loss(run) for run in runs]
        if len(losses) > 1:
            return interval(losses)
        error = 1.96 * runs[0].history.last("global_loss_se") if self._validated else math.nan
        return losses[0] - error, losses[0] + error

    def _ties(self) -> dict[str, set[str]]:
        """Return name → the strategies from whose final loss its own cannot be told.

        By all pairs of seeds; of two strategies of one seed, if the lower loss is in the interval of the higher one.
        """
        losses = self._by_seed(self._loss)
        names, open_ = list(losses), pairwise_p(losses) > 0.05
        ties = {name: {names[i] for i in np.flatnonzero(own)} for name, own in zip(names, open_, strict=True)}
        alone = {name: loss for name, own in losses.items() if len(own) == 1 for loss in own.values()}
        for name, loss in alone.items():
            low, _ = self._loss_interval(_begun(self._runs[name]))
            ties[name] |= {other for other, own in alone.items() if low <= own <= loss}
        return ties

    def steps_to(
        self, loss: float | None = None, of: str = "step", *, accuracy: float | None = None, stays: bool = False
    ) -> dict[str, list[float]]:
        """Return name → for each seed the first step with a validation loss of at most `loss`, NaN if there is none.

        Between measurements the last value holds. Without validation, the training loss is used.

        Args:
            loss: the target. accuracy: the validation accuracy to reach instead, from 0 to 1; give one of the two.
            of: another column of `History` to return at that step, such as "wire_bytes", or "round" of a run with
                `participation`. Bytes are those until a node has the model: a mean that no node has costs one more
                all-reduce.
            stays: whether the loss counts as reached only where no later measurement is above it. Otherwise the first
                measurement counts, which noise makes early: of two equal curves, the noisier one seems to be faster.
        """
        true_or_false("stays", stays)
        if (loss is None) == (accuracy is None):
            raise TypeError(f"steps_to takes one of loss= and accuracy=, got {loss!r:.100} and {accuracy!r:.100}")
        if accuracy is None:
            crossings = self._crossings(loss, stays)  # type: ignore[arg-type]
        else:
            real_number("accuracy", accuracy, at_least=0, at_most=1)
            if all(math.isnan(h.last("global_accuracy")) for h in self._all_histories()):
                raise ValueError("accuracy=: the validation of these runs has none; give loss=")
            crossings = self._crossings(accuracy, stays, of="global_accuracy")
        ways = {f"{way}_bytes": way for way in ("wire", "payload")}

        def value(run: ComparedRun, at: Crossing) -> float:
            if of in ways:
                return until(run.history, at, self._spent(run, ways[of]))
            if of == "round" and not math.isnan(at.step):
                return float(rounds(run.history)[np.searchsorted(run.history["step"], at.step)])
            return run.history.at_step(at.step, "step" if of == "round" else of)

        if a_text("of", of) == "round" and not all(h.ledger.attendance for h in self._all_histories()):
            raise ValueError("of='round' needs participation=, which has rounds; of='step' is there for all runs")
        return {name: [value(run, at) for run, at in own] for name, own in crossings.items()}

    def _crossings(
        self, loss: float, stays: bool, begun: bool = False, of: str | None = None
    ) -> dict[str, list[tuple[ComparedRun, Crossing]]]:
        """Return name → for each seed, or for those that have `_begun`, the run, and where it reaches the loss."""
        return {
            name: [(run, self._crossing(run, loss, stays, of)) for run in (_begun(runs) if begun else runs)]
            for name, runs in self._runs.items()
        }

    def _crossing(self, run: ComparedRun, loss: float, stays: bool, of: str | None = None) -> Crossing:
        at = run.history.crossing(loss, of or self._loss_column, stays)
        return NEVER if stays and run.failed else at

    def _racers(self, loss: float, stays: bool) -> dict[str, list[tuple[ComparedRun, Crossing, float]]]:
        """Return name → for each seed the run, where it reaches the loss, and the first step at which it might.

        Noise may hide that a run is at the loss already. With one seed, it might be there where its loss is within
        1.96 standard errors. A run of several that ended before the loss might have reached it next; NaN for a run that
        failed. Only if some strategy reaches the loss with all seeds, and without those that do with none.
        """
        found = {}
        for name, own in self._crossings(loss, stays, begun=True).items():
            if any(not math.isnan(at.step) for _, at in own):
                found[name] = [(run, at, self._might(run, at, loss, stays, len(own) == 1)) for run, at in own]
        return found if any(all(not math.isnan(at.step) for _, at, _ in own) for own in found.values()) else {}

    def _might(self, run: ComparedRun, at: Crossing, loss: float, stays: bool, alone: bool) -> float:
        if math.isnan(at.step):
            return math.nan if run.failed else run.history.last("step")
        error = run.history.last("global_loss_se") if alone and self._validated else math.nan
        return at.step if math.isnan(error) else self._crossing(run, loss + 1.96 * error, stays).step

    def differences(self, to: str | None = None, of: str = "global_loss", level: float = 0.95) -> pd.DataFrame:
        """Return how strategies differ from one of them in a column's last value, paired by seed.

        Args:
            to: the strategy to compare with, chosen before you saw the results; default: the best, which the results
                choose. Any two might then have been compared, so that p is adjusted for all pairs of strategies. The
                same holds for `to=comparison.best()`.
            of: a column of `History`, whose last value is compared, or a column of the table on clients, such as
                "client accuracy, worst tenth". A run that diverged or failed has no value.
            level: the confidence level of all tests together, in (0, 1).

        Returns:
            A DataFrame `strategy, difference, low, high, p, seeds, seeds_needed`. difference: the strategy's mean minus
            the mean of `to`, over the seeds with which both have a value. p: of the paired t-test, adjusted by Holm.
            low, high: the interval of the difference, by Student's t, at the level that Holm leaves to this test: it
            excludes 0 exactly if p ≤ 1 - level. seeds_needed: the number of seeds that find such a difference at that
            level with a chance of 80 %, infinite if there is none. With one seed there are no intervals and no p.

        Raises:
            ValueError: there is no such strategy or column.
        """
        import pandas

        to = self.best() if to is None else one_of("to", to, self)
        on_clients = self._on_clients
        columns = (column for history in self._all_histories() for column in history.columns)
        one_of("of", of, dict.fromkeys([*columns, *on_clients(self._all_runs()[0])]))

        def last(run: ComparedRun) -> float:
            return run.history.last(of) if of in run.history.columns else on_clients(run).get(of, math.nan)

        rows = differences(self._by_seed(last), to, level, chosen=isinstance(to, Best))
        frame = pandas.DataFrame(rows, columns=["strategy", *Difference._fields, "seeds", "seeds_needed"])
        needed = [row["seeds_needed"] for row in rows]
        if not all(map(math.isfinite, needed)):
            frame["seeds_needed"] = pandas.Series(needed, dtype=object)  # so that the others stay integers
        return frame

    def _by_seed(self, value: Callable[[ComparedRun], float]) -> dict[str, dict[int, float]]:
        """Return name → seed → a value of the run, NaN if it failed; without runs that took no step, see `_begun`."""
        return {
            name: {
                run.seed: math.nan if run.failed or run.diverged_at is not None else value(run) for run in _begun(runs)
            }
            for name, runs in self._runs.items()
        }

    def cheapest(
        self,
        loss: float,
        hours: float | None = None,
        network: AnyNetwork = None,
        compute: AnyCompute = None,
        *,
        stays: bool = False,
    ) -> Cheapest:
        """Return the strategy that reaches a loss within `hours` with the fewest bytes on the wire.

        The name is displayed as a sentence that names strategies tied with it, see `Race`; without `hours`, also those
        that reach the loss with some seeds only. Of equal strategies, return the first in alphabetical order. A warning
        names strategies that validation cannot tell apart from it, and those that did not reach the loss but ended
        before `hours` were over.

        Args:
            loss: the target, which every seed must reach. hours: the limit on this network; default: no limit.
            network, compute: see `vsim.timeline`; default: the comparison's.
            stays: see `steps_to`.

        Raises:
            ValueError: no strategy reaches the loss. TypeError: hours need network and compute.
        """
        loss, hours = real_number("loss", loss), None if hours is None else real_number("hours", hours, above=0)
        priced = self._priced(network, compute) if hours is None else self._must_be_priced(network, compute)
        true_or_false("stays", stays)
        racers, ended = self._racers(loss, stays), ""
        whole = {name: own for name, own in racers.items() if not any(math.isnan(at.step) for _, at, _ in own)}
        within, took = whole, dict[str, float]()
        if hours is not None:
            clocks = {run: self._spent(run, "time", priced) / 3600 for run in self._all_runs()}
            took = contenders(
                {n: {run.seed: until(run.history, at, clocks[run]) for run, at, _ in own} for n, own in whole.items()}
            )
            within = {name: own for name, own in whole.items() if took[name] <= hours}
            uses = self._uses({run: [(own, hours)] for run, own in clocks.items()})
            ended = unused({name: own for name, own in uses.items() if name not in whole})
            ended = f"not all runs had {hours:g} hours to reach loss {loss:g}: {ended}" if ended else ""
        if not within:
            hint = "".join(f"; the first is {name}, in {own:.3g} hours" for name, own in list(took.items())[:1])
            hint += f"; {ended}" if ended else ""
            raise ValueError(f"no run reaches loss {loss:g}{'' if hours is None else f' within {hours:g} hours'}{hint}")
        if ended:
            warnings.warn(ended, stacklevel=2)
        racers = racers if hours is None else within
        race = Race({n: {one[0].seed: self._megabytes(*one) for one in own} for n, own in racers.items()})
        names, place = list(race.means), int(race.first)
        best = Cheapest(names[place])
        best.loss, best.megabytes = loss, float(race.means[best][0])
        best.tied = tuple(name for name, ahead in zip(names, race.ahead, strict=True) if ahead and name != best)
        if others := [name for name, left_open in zip(names, race.left_open, strict=True) if left_open]:
            warnings.warn(
                f"validation is too coarse to tell {best}, which takes {best.megabytes:.3g} MB to loss {loss:g}, from "
                f"{', '.join(others)}; a smaller val_interval would settle it",
                stacklevel=2,
            )
        return best

    def winners(
        self,
        loss: float,
        bandwidths: Sequence[float | str] | None = None,
        latencies: Sequence[float | str] | None = None,
        compute: AnyCompute = None,
        *,
        collective: str = "ring",
        stays: bool = False,
    ) -> Winners:
        """Return which strategy reaches a loss first, over bandwidth and latency; a notebook shows the result as a map.

        Tied strategies are all named; see `Race`. A warning says if validation leaves more than a tenth of the map
        open, which a smaller `val_interval` would settle.

        Args:
            loss: the target. A strategy's time is the mean over its seeds, all of which must reach the loss.
            bandwidths: in bit/s or as text; default: 1 Mbit/s to 100 Gbit/s.
            latencies: in seconds or as text; default: 0.1 ms to 1 s.
            compute: see `vsim.timeline`; default: the comparison's.
            collective: the algorithm of collectives, see `Network`.
            stays: see `steps_to`.
        """
        true_or_false("stays", stays)
        bits = ascending("bandwidths", bandwidths, BANDWIDTHS, bits_per_second)
        delays = ascending("latencies", latencies, LATENCIES, lambda name, one: seconds(name, one, at_least=0))
        grid = np.tile(bits, len(delays)), np.repeat(delays, len(bits)), collective
        own, never = Compute.of(self.compute if compute is None else compute), self._never(loss, stays)
        networks = Network.grid(grid[0], grid[1], collective=collective)
        times = {
            name: {
                run.seed: self._seconds_until(run, at, might, networks, grid, own).reshape(3, len(delays), len(bits))
                for run, at, might in racers
            }
            for name, racers in self._racers(loss, stays).items()
        }
        note, remarks = f"{', to stay' if stays else ''}{self._sized}", [*self._doubts(stays), *self._tuning()]
        winners = Winners(loss, bits, delays, times, never, self._looks(), note, remarks)
        if winners.left_open > 0.1:
            warnings.warn(
                f"validation is too rare to tell which strategy is first to loss {loss:g} on {winners.left_open:.0%} "
                "of the map; a smaller val_interval would settle it",
                stacklevel=2,
            )
        return winners

    def _doubts(self, stays: bool) -> list[str]:
        """Return what to say of when a loss is reached: if one seed only, and noise."""
        said = []
        if all(len(runs) == 1 for runs in self._runs.values()):
            known = any(not math.isnan(history.last("global_loss_se")) for history in self._all_histories())
            said.append(f"one seed: {'ties by the standard errors of validation' if known else 'no intervals'}")
        return [*said, *self._noisy(stays)]

    def _noisy(self, stays: bool) -> list[str]:
        """Return a note if losses of a sample may be reached early by noise."""
        sampled = bool(self._sampled()) and not stays
        return ["validated on a sample: noise lets a curve reach a loss early; see stays=True"] if sampled else []

    def _seconds_until(
        self,
        run: ComparedRun,
        at: Crossing,
        might: float,
        networks: Network,
        grid: tuple[Floats, Floats, str],
        compute: Compute,
    ) -> Floats:
        """Return (3, N) the costs of a `Race` of a run in seconds on N networks."""
        last_step = run.history.last("step")
        known = at.step if math.isnan(at.formed) else at.formed
        steps = [int(last_step if math.isnan(step) else step) for step in (at.step, known, at.first, might)]
        reached, of_formed, first, least = seconds_on(run.ledger, *grid, compute, steps).T
        if math.isnan(at.step):
            never = np.full_like(reached, math.inf)
            return np.stack([never, never, never if math.isnan(might) else least])
        if at.step != at.formed:  # no node has the model
            reached = reached + forming_seconds(run.history, networks, self.allreduce_bytes)[:, 0]
        if not math.isnan(at.formed):
            reached = np.minimum(reached, of_formed)
        return np.stack([reached, reached if at.first == at.step else first, reached if might == at.step else least])

    def _megabytes(self, run: ComparedRun, at: Crossing, might: float) -> Floats:
        """Return (3,) the costs of a `Race` of a run in MB on the wire."""
        sent = run.history.bytes_per_node("wire") / 1e6
        if math.isnan(at.step):
            return np.array([math.inf, math.inf, math.inf if math.isnan(might) else sent[-1]])
        reached = until(run.history, at, self._spent(run, "wire")) / 1e6
        first, least = sent[np.searchsorted(run.history["step"], [at.first, might])]
        return np.array([reached, reached if at.first == at.step else first, reached if might == at.step else least])

    def at(
        self,
        *,
        parameters: float | None = None,
        layers: int | None = None,
        model: nn.Module | None = None,
        bytes_per_parameter: int | None = None,
        strategies: Mapping[str, Any] | None = None,
    ) -> Self:
        """Return the same losses with the bytes and hours of a model of another size; titles show both sizes.

        A comparison of a small model shows how many steps each strategy needs. The cost of these steps depends on the
        size of the target model: each strategy's own code runs on tensors of that size without values, see
        `vsim.price`.

        Args:
            parameters, layers, model, bytes_per_parameter: describe the target model, see `vsim.price`.
            strategies: name → strategy, for strategies of your own in a comparison that was read from a file. Files
                keep those that are made of vsim's own classes, numbers and text.

        Raises:
            ValueError: a strategy cannot be priced without training; or nodes took part in some of the steps only.
            TypeError: a name has no strategy.
        """
        if not isinstance(strategies, Mapping | None):
            raise TypeError(f"strategies must be a dict of name → strategy, got {given(strategies)}")
        bare = without_values(parameters, layers, model, bytes_per_parameter)
        clock = None if self.compute is None or self.num_nodes is None else self.compute.totals(self.num_nodes)
        other = copy.copy(self)
        other.allreduce_bytes = sum(p.numel() * p.element_size() for p in bare.parameters() if p.requires_grad)
        other._measured_bytes = self.allreduce_bytes if self._measured_bytes is None else self._measured_bytes
        other._runs = {}
        for name, runs in self._runs.items():
            first = runs[0]
            if any(run.ledger.attendance for run in runs):
                raise ValueError(
                    f"{name}: at() prices runs in which all nodes take part in all steps, and this one had "
                    "participation=; the report's slider of the model's size multiplies its bytes"
                )
            strategy = (strategies or {}).get(name, first.strategy)
            if not hasattr(strategy, "dry_run"):
                raise TypeError(
                    f"{name} was read from a file without strategies: give at(…, strategies={{{name!r}: …}}), got "
                    f"{strategy!r:.100}"
                )
            most = max(1, *(run.ledger.steps for run in runs))
            with naming(name), naming_layers(bare):
                ledger = strategy.dry_run(bare, first.history.num_nodes, most, first.seed, clock)
            other._runs[name] = [
                replace(
                    run, history=run.history.with_ledger(ledger), measured_less=run.measured_less or self._less(run)
                )
                for run in runs
            ]
        return other

    def _less(self, run: ComparedRun) -> float | None:
        """Return how many times fewer bytes than AllReduce's a run sent; None if it sent nothing."""
        numbers = self._numbers(run, None, False, None, self._of_clients)
        less = numbers["times less than AllReduce"]
        return less if math.isfinite(less) else None

    def _resized(self) -> list[str]:
        """Return a note on strategies that compress otherwise at the size of `at` than where their losses are from."""
        said = []
        for name in self._ordered():
            measured, priced = self[name].measured_less, self._less(self[name])
            if measured is not None and priced is not None and abs(priced / measured - 1) > _ALIKE:
                said.append(f"{name} {measured:.3g}× as measured, {priced:.3g}× as priced")
        return [f"losses are of another compression than bytes: {_named(said)}"] if said else []

    def _never(self, loss: float, stays: bool = False) -> dict[str, str]:
        """Return name → text for each strategy with a seed that does not reach the loss."""
        said = {}
        for name, own in self._crossings(loss, stays, begun=True).items():
            reach = sum(not math.isnan(at.step) for _, at in own)
            if reach < len(own):
                said[name] = f"{reach} of {len(own)} runs" if reach else "never"
        return said

    def _priced(self, network: AnyNetwork, compute: AnyCompute) -> Priced:
        """Return the network and compute for deriving hours: the given ones, or else the comparison's; None without."""
        network = self.network if network is None else network
        compute = self.compute if compute is None else compute
        if network is None and compute is None:
            return None
        return Network.of(network, "server" if self._of_clients else "ring"), Compute.of(compute)

    def _must_be_priced(self, network: AnyNetwork, compute: AnyCompute) -> tuple[Network, Compute]:
        return self._priced(network, compute) or (Network.of(None), Compute.of(None))  # which raises

    def rows(
        self, loss: float | None = None, network: AnyNetwork = None, compute: AnyCompute = None, *, stays: bool = False
    ) -> list[dict[str, Any]]:
        """Return one dict per strategy: the columns of the table as numbers.

        Losses are the last measured losses of the global model on the validation data or, without validation, the mean
        training loss over the last tenth of the run; NaN for a run that diverged. `times less than AllReduce` is the
        bytes that AllReduce sends on the wire in as many steps, divided by this strategy's bytes; NaN if nothing was
        sent. For cohorts of clients, bytes are means over all clients, next to the busiest client's and the server's,
        and a network's collectives go through a server unless its text names another algorithm. With a
        `client_val_dataset`, "client accuracy" is the mean over the clients, next to their 10th percentile, the mean of
        the worst tenth and the worst client; without accuracies, "client loss" with the 90th percentile. With a
        `test_dataset`, "test loss" and "test accuracy" are the final global model's. With several seeds, every
        number is the mean over the runs that ended (over all runs, if none ended; until a loss, over all runs
        that began); if the runs differ, "<column> std"
        follows, the standard deviation of the sample. If strategies may take different numbers of steps, "steps" has
        them. With a budget, "time used", "wire used" and so on are the shares of it.

        Args:
            loss: adds the steps and the bytes on the wire to this loss, see `steps_to`; NaN if a run never reaches it.
            network, compute: add the hours that the run would take, the share of hours in which nodes compute, and the
                hours to `loss`; see `vsim.timeline`; default: the comparison's.
            stays: see `steps_to`.
        """
        if true_or_false("stays", stays) and loss is None:
            raise TypeError("stays=True has no effect without loss=")
        rows, priced = [], self._priced(network, compute)
        of_clients = self._of_clients
        for name in self._ordered():
            runs = self._runs[name]
            numbers = {run: self._numbers(run, loss, stays, priced, of_clients) for run in runs}
            row: dict[str, Any] = {**self._titles(name)}
            for column in numbers[runs[0]]:
                to_loss = loss is not None and column.endswith(f" to {loss:g}")
                values = [numbers[run][column] for run in (_begun(runs) if to_loss else _sound(runs))]
                row[column] = statistics.fmean(values)
                if len(set(values)) > 1 and all(map(math.isfinite, values)):
                    row[f"{column} std"] = statistics.stdev(values)
            if not all(run.ended for others in self._runs.values() for run in others):
                row["note"] = self._note(name)
            rows.append(row)
        return rows

    def table(
        self,
        format: str = "simple",
        *,
        columns: Sequence[str] | None = None,
        digits: int | Mapping[str, int] | None = None,
        loss: float | None = None,
        network: AnyNetwork = None,
        compute: AnyCompute = None,
        stays: bool = False,
    ) -> str:
        """Return the results as a text table.

        Args:
            format: one of tabulate's: "simple", "github", "html", "latex", "latex_booktabs", …
            columns: the columns of `rows` to show, in this order.
            digits: digits after the point, for all columns or by column.
            loss: adds the cost of reaching this loss, see `rows`; marks strategies that never reach it.
            network, compute: add hours; see `rows`.
            stays: see `steps_to`.

        A † marks losses that do not differ significantly from the best: their p in `differences()` is above 0.05. Lines
        below say if one seed allows no test, if seeds differ, and which strategies have runs without a result. A LaTeX
        table is a float with a caption, the label tab:comparison and the notes below; the best is in bold, and numbers
        are aligned at their points.

        Raises:
            ValueError: there is no such column.
        """
        diverged, rows = self._diverged(), self.rows(loss, network, compute, stays=stays)
        never = {} if loss is None else self._never(loss, stays)
        for name, row in zip(self._ordered(), rows, strict=True):
            if name in diverged:
                row[self._loss_title] = diverged[name]
            if name in never:
                row |= {key: never[name] for key in row if key.endswith(f" to {loss:g}")}
        at = self._measured_at()
        for name, row in zip(self._ordered(), rows, strict=True):
            if name in diverged or any(run.ended for run in self._runs[name]):
                continue
            if not row["note"].endswith(f" step {at[name]}"):
                row["note"] += f" (loss of step {at[name]})" if at[name] else " (no loss yet)"
        if self._sampled():
            for name, row in zip(self._ordered(), rows, strict=True):
                row["validated on"] = ", ".join(dict.fromkeys(h.validated_on for h in self.histories[name]))
        titles = [title for name in self._ordered()[:1] for title in self._titles(name)]
        marks: Marks | None = None
        has_loss = columns is None or (isinstance(columns, list | tuple) and self._loss_title in columns)
        if len(self) > 1 and has_loss:
            found, remarks = self._ranking()
            places = {name: i for i, name in enumerate(self._ordered())}
            best, others = ({places[name] for name in names} for names in (found.best, found.undecided))
            marks = Marks(self._loss_title, best, others, remarks)
        notes = [*self._budgeted(), *([*self._tuning(), *self._unformed()] if has_loss else [])]
        notes += [*(self._noisy(stays) if loss is not None else []), *self._resized()]
        return text_table(rows, format, titles, columns, digits, marks, notes, self._title())

    def _measured_at(self) -> dict[str, str]:
        """Return name → the steps of the final losses, as text; "" without any but that of the start."""
        found = {}
        for name, runs in self._runs.items():
            steps = {run.history.measured("step", self._loss_column)[0].max(initial=0) for run in _sound(runs)}
            found[name] = ", ".join(f"{step:g}" for step in sorted(steps) if step)
        return found

    def _unformed(self) -> list[str]:
        """Return a note on final losses of models that no node has, if there are any."""
        sound = {name: [run.history for run in _sound(self._runs[name])] for name in self._ordered()}
        names = [
            name for name, own in sound.items() if any(not h.formed.all() and h.last("global_formed") == 0 for h in own)
        ]
        if not names:
            return []
        bytes_of = max(forming_bytes(h, "wire", self.allreduce_bytes) for name in names for h in sound[name])
        each = "client" if self._of_clients else "node"
        how = f"the loss is of the mean of {each}s that differ; to form it takes {_size(bytes_of)}/{each} more"
        return [f"{_named(names)}: {how}"]

    def plot(
        self,
        x: str = "step",
        y: str | None = None,
        ax: Axes | None = None,
        *,
        logy: bool = False,
        network: AnyNetwork = None,
        compute: AnyCompute = None,
    ) -> Axes:
        """Draw the loss of every strategy.

        Args:
            x: "step", "examples" or "tokens"; "round", for runs with `participation`; "payload" or "wire", bytes per
                node (for cohorts, per client on average) on a logarithmic axis; "time" on a network; or "seconds" of
                the simulation.
            y: a column of `History`; default the global validation loss, or the training loss without validation.
            ax: the axes to draw on; default: a new figure.
            logy: whether y is logarithmic, too.
            network, compute: determine "time", see `vsim.timeline`; default: the comparison's.
        """
        axis = self._x_axis(x, network, compute)
        y = self._loss_column if y is None else y
        return bands(self._drawn(), axis, y, ax, True, self._looks(), self._diverged(), logy)

    @overload
    def report(
        self, path: None = None, *, network: AnyNetwork = None, compute: AnyCompute = None, title: str | None = None
    ) -> Report: ...
    @overload
    def report(
        self, path: str | Path, *, network: AnyNetwork = None, compute: AnyCompute = None, title: str | None = None
    ) -> Path: ...
    def report(
        self,
        path: str | Path | None = None,
        *,
        network: AnyNetwork = None,
        compute: AnyCompute = None,
        title: str | None = None,
    ) -> Report | Path:
        """Write a page whose sliders set bandwidth, latency, seconds per step, model size and price of a node.

        The page is one HTML file, which a browser opens without a network. It shows curves, the table, the map of
        winners, and loss against cost, all updated when a slider moves.

        Args:
            path: the path of the file. Default: write no file, and let a notebook show the page.
            network, compute: initial values of the sliders; default: the comparison's. Without them, the page has no
                hours until a slider moves.
            title: the title of the page; default: the names of the strategies.

        Returns:
            The path; without a path, the page as a `Report`.

        Raises:
            ValueError: there is no run, or the network or compute has another number of nodes.
        """
        from vsim.records.report.page import report

        page = report(
            {self._names_in_short() if title is None else a_text("title", title): self}, network, compute, title
        )
        return page if path is None else page.save(path)

    def _names_in_short(self) -> str:
        names = [textwrap.shorten(name, 40, placeholder="…") for name in self]
        return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")

    def _x_axis(self, x: str, network: AnyNetwork, compute: AnyCompute) -> str | XAxis:
        if isinstance(x, str) and x == "time":
            network, compute = self._must_be_priced(network, compute)
        return x_axis(x, self._all_histories(), network, compute)

    def figure(
        self,
        title: str | None = None,
        *,
        strategies: list[str] | None = None,
        x: str = "step",
        logy: bool = False,
        width: float = PAGE,
        network: AnyNetwork = None,
        compute: AnyCompute = None,
    ) -> PaperFigure:
        """Return the figure of two panels: loss against step, and against bytes on the wire.

        The figure's `save(path)` writes a PDF, PNG or SVG in the style of a paper.

        Args:
            title: the title; default: nodes and size; "" for no title, as in a paper.
            strategies: names to draw, default all.
            x, network, compute: of the first panel, see `plot`.
            logy: whether the loss is on a logarithmic axis.
            width: in inches; the width of a page (6.8), or of a column (3.3), in which the panels are stacked.
        """
        if title is not None and not isinstance(title, str):
            raise TypeError(f"title must be a text, got {title!r}")
        shown = self if strategies is None else self[a_list("strategies", strategies)]
        title = "; ".join([shown._title(), *shown._tuning()]) if title is None else title
        looks = shown._looks()
        axis = shown._x_axis(x, network, compute)
        return overview(shown._drawn(), title, self._loss_column, looks, shown._diverged(), axis, logy, width)

    def _ordered(self) -> list[str]:
        """The names in the order of the table."""
        return list(self._runs)

    def _numbers(
        self,
        run: ComparedRun,
        target: float | None,
        stays: bool,
        priced: Priced,
        of_clients: bool,
    ) -> dict[str, float]:
        """Return the columns of the table for one run, in their order.

        Args:
            target, stays: a loss to reach, see `steps_to`.
            of_clients: whether cohorts trained.
        """
        history, numbers = run.history, {}
        steps = int(history.last("step")) if len(history) else 0
        loss = numbers[self._loss_title] = self._loss(run)
        numbers["perplexity"] = math.inf if loss >= 700 else math.exp(loss)
        if self._validated and any(not math.isnan(h.last("global_accuracy")) for h in self._all_histories()):
            numbers["accuracy"] = math.nan if math.isnan(loss) else history.last("global_accuracy")
        for column in TESTED:
            if any(not math.isnan(h.last(column)) for h in self._all_histories()):
                own = math.nan if run.diverged_at is not None else history.last(column)
                numbers[column.replace("_", " ")] = own
        numbers |= self._on_clients(run)
        if self._lengths_differ:
            numbers["steps"] = steps
        ledger, everyone = history.ledger, traffic("all_reduce", history.num_nodes)
        if of_clients:  # the busiest client's bytes depend on the draw of clients; the mean does not
            sent, of_allreduce = ledger.total_wire_bytes, float(everyone.total)
            numbers["wire MB/client"] = sent / ledger.num_nodes / 1e6
            numbers["payload MB/client"] = float(ledger.node_payload_bytes.mean()) / 1e6
            numbers["busiest client MB"] = ledger.wire_bytes / 1e6
            numbers["server MB"] = ledger.server_wire_bytes / 1e6
        else:
            sent, of_allreduce = history.last("wire_bytes"), float(everyone.busiest)
            numbers["wire MB/node"] = sent / 1e6
            numbers["payload MB/node"] = history.last("payload_bytes") / 1e6
        of_allreduce *= self.allreduce_bytes * steps
        numbers["times less than AllReduce"] = of_allreduce / sent if sent else math.nan
        numbers["machine seconds"] = history.last("seconds")
        if self._validated:
            numbers["validation seconds"] = history.last("validation_seconds")
        if target is not None:
            at = self._crossing(run, target, stays)
            numbers |= {f"steps to {target:g}": at.step}
            numbers |= {f"wire MB to {target:g}": until(history, at, self._spent(run, "wire")) / 1e6}
        if priced is not None:
            timeline = history.time(*priced) if steps else None  # interrupted before the first step
            numbers["hours"] = math.nan if timeline is None else float(timeline.seconds[-1]) / 3600
            numbers["utilization"] = math.nan if timeline is None else timeline.utilization
            if priced[1].dollars_per_hour is not None:
                numbers["dollars"] = math.nan if timeline is None else timeline.dollars
            if target is not None:
                numbers[f"hours to {target:g}"] = until(history, at, self._spent(run, "time", priced)) / 3600
        used = {"wire": sent, "examples": history.last("examples")}
        if priced is not None:
            used |= {"time": 3600 * numbers["hours"], "cost": numbers.get("dollars", math.nan)}
        budget = {of: amount(of, most, "budget") for of, most in self.budget.items() if of in used}
        return numbers | {f"{of} used": used[of] / most for of, most in budget.items()}

    @property
    def budget(self) -> dict[str, Any]:
        """What every run may use, as it was given to `compare`; empty without a budget."""
        budgets = (history.config.get("budget") for history in self._all_histories())
        return next((dict(own) for own in budgets if own and own != BY_NAME), {})

    @property
    def _lengths_differ(self) -> bool:
        """Whether runs were to take different numbers of steps, or as many as a budget is enough for."""
        return len({h.config.get("max_steps") for h in self._all_histories()}) > 1 or bool(self.budget)

    def _budgeted(self) -> list[str]:
        """Return a note on the budget, if there is one."""
        if not self.budget:
            return []
        said = {of: own if isinstance(own, str) else f"{own:,.10g}" for of, own in self.budget.items()}
        size = f", priced for {float(self.budget['at']):.4g} parameters" if "at" in said else ""
        most = f", at most {said['max_steps']} steps" if "max_steps" in said else ""
        found = " and ".join(f"{own} ({of})" for of, own in said.items() if of not in ("at", "max_steps"))
        return [f"budget of each run: {found}{size}{most}"]

    def _tuning(self) -> list[str]:
        """Return a note on the strategies that were tuned, with their numbers of settings, if there are any."""
        tuned = [f"{name} ({len(self.tuned[name])} settings)" for name in self if name in self.tuned]
        others = [name for name in self if name not in self.tuned]
        return [f"tuned: {_named(tuned)}" + (f"; not tuned: {_named(others)}" if others else "")] if tuned else []

    def _on_clients(self, run: ComparedRun) -> dict[str, float]:
        """Return the columns on the performance of each client's model on its data; empty if no run measured it."""
        measured, history = frozenset().union(*(one.measured_on_clients for one in self._all_histories())), run.history
        if "accuracies" in measured:
            titles, values, sign = CLIENT_ACCURACIES, history.client_val_accuracies, 1
            values = values[~np.isnan(values)]  # without clients of whom no label counts
        elif "losses" in measured:
            titles, values, sign = CLIENT_LOSSES, history.client_val_losses, -1
        else:
            return {}
        if not len(values) or run.diverged_at is not None:
            return dict.fromkeys(titles, math.nan)
        ordered = sign * np.sort(sign * values)  # the worst client first
        worst = ordered[: math.ceil(len(values) / 10)]
        percentile = np.percentile(values, 10 if sign > 0 else 90)
        return dict(zip(titles, map(float, (values.mean(), percentile, worst.mean(), ordered[0])), strict=True))

    @property
    def _of_clients(self) -> bool:
        """Whether cohorts of a larger population trained."""
        return any(history.is_of_cohorts for history in self._all_histories())

    def _loss(self, run: ComparedRun) -> float:
        if run.diverged_at is not None:
            return math.nan
        if self._validated:
            steps, losses = run.history.measured("step", "global_loss")
            return float(losses[-1]) if len(steps) and steps[-1] > 0 else math.nan
        (losses,) = run.history.measured("train_loss")
        return float(losses[-max(1, len(losses) // 10) :].mean()) if len(losses) else math.nan

    def _rank(self, name: str) -> tuple[int, float, float]:
        """Return a sort key, the best first: ended runs by loss, then stopped and failed runs, the latest first."""
        runs = self._runs[name]
        loss = statistics.fmean(map(self._loss, _begun(runs)))
        steps = min(run.history.last("step") if len(run.history) else 0.0 for run in runs)
        if not math.isfinite(loss) or any(run.failed for run in runs):
            return 2, -steps, 0.0
        return (0, 0.0, loss) if all(run.ended for run in runs) else (1, -steps, loss)

    def _drawn(self) -> dict[str, list[History]]:
        return {name: [run.history for run in _sound(runs)] for name, runs in self._runs.items()}

    def _diverged(self) -> dict[str, str]:
        """Return name → "diverged at step 4" for strategies all of whose runs diverged."""
        said = {}
        for name, runs in self._runs.items():
            steps = sorted(run.diverged_at for run in runs if run.diverged_at is not None)
            if len(steps) == len(runs):
                one = steps[0] == steps[-1]
                said[name] = f"diverged at step {steps[0]}" if one else f"diverged at steps {steps[0]} to {steps[-1]}"
        return said

    def _looks(self) -> Looks:
        looks = looks_of(self._names)  # of all, so that some of them keep theirs
        return Looks(looks.by_name) if len(self) <= MANY else looks

    def _note(self, name: str) -> str:
        """Return why some runs did not end, or ""."""
        runs = self._runs[name]
        notes = {run.seed: run.note for run in runs if run.note}
        if len(notes) == len(runs) and len(set(notes.values())) == 1:
            return runs[0].note
        return "; ".join(f"seed {seed}: {note}" for seed, note in notes.items())

    @property
    def _validated(self) -> bool:
        return any(not math.isnan(h.last("global_loss")) for h in self._all_histories())

    @property
    def _loss_column(self) -> str:
        return "global_loss" if self._validated else "train_loss"

    @property
    def _loss_title(self) -> str:
        return Y_LABELS[self._loss_column]

    def _title(self) -> str:
        numbers = sorted({len(runs) for runs in self._runs.values()})
        seeds = " or ".join(map(str, numbers))
        spread = f"{seeds} seeds: mean ± standard deviation" if len(self) <= MANY else f"mean of {seeds} seeds"
        repeated = f", {spread}" if max(numbers, default=1) > 1 else ""
        size = _size(self.allreduce_bytes)
        if self._measured_bytes is not None:
            size += f" (losses of {_size(self._measured_bytes)})"
        nodes = sorted({history.num_nodes for history in self._all_histories()})
        sampled = "".join(f", validated on {part} examples" for part in self._sampled())
        who = f"{' or '.join(map(str, nodes))} nodes"
        if self._of_clients:
            clients = sorted({history.ledger.num_nodes for history in self._all_histories()})
            who = f"cohorts of {' or '.join(map(str, nodes))} of {' or '.join(f'{n:,}' for n in clients)} clients"
        return f"{who}, {size} of weights each{repeated}{sampled}"

    def _sampled(self) -> list[str]:
        """Return the numbers of validation examples, such as "2,048 of 50,000", where they are a part of all."""
        return list(dict.fromkeys(h.validated_on for h in self._all_histories() if " of " in h.validated_on))

    @property
    def _sized(self) -> str:
        """Text for a map's title if bytes and losses are of models of different size."""
        if self._measured_bytes is None:
            return ""
        return f", {_size(self.allreduce_bytes)} of weights\n(losses of {_size(self._measured_bytes)})"

    def _pictures(self) -> dict[str, Figure]:
        """Return the figures that a notebook shows below the table, by title."""
        return {f"loss against step and bytes of {', '.join(self)}": self.figure()}

    def _repr_html_(self) -> str:
        shown = self.table("html")
        for alt, figure in self._pictures().items():
            image = io.BytesIO()
            figure.savefig(image, format="png", dpi=130)
            encoded = base64.b64encode(image.getvalue()).decode()
            shown += f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{encoded}"/>'
        return shown

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._title()})\n{self.table()}"


def no_comparison(name: str, given: Any, kind: type[Comparison] = Comparison) -> TypeError:
    """Make the error for an argument that must be a comparison, or one of its kinds, and is something else."""
    hint = f"; read it with {kind.__name__}.from_json" if isinstance(given, str | Path) else ""
    return TypeError(f"{name} must be a {kind.__name__}, got {given!r}{hint}")


def _size(num_bytes: float) -> str:
    """Return the size of a model as text."""
    if num_bytes >= 1e9:
        return f"{num_bytes / 1e12:.3g} TB" if num_bytes >= 1e12 else f"{num_bytes / 1e9:.3g} GB"
    return f"{num_bytes / 1e6:.2f} MB" if num_bytes >= 1e5 else f"{num_bytes / 1e3:.3g} kB"


def _named(names: Sequence[str]) -> str:
    """Return names as text, only the first of many."""
    return ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} others" if len(names) > _NAMED else "")


def _sound(runs: list[ComparedRun]) -> list[ComparedRun]:
    """Return the runs that did not fail, or all runs if all failed."""
    return [run for run in runs if not run.failure] or runs


def _begun(runs: list[ComparedRun]) -> list[ComparedRun]:
    """Return the runs that took a step or failed, without those that were interrupted before; all if none did."""
    return [run for run in runs if run.failed or run.history.last("step") > 0] or runs
