"""The runs of a sweep: a sorted comparison that knows each run's settings, and can draw a map over two settings."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vsim.analysis.compared import ComparedRun
from vsim.analysis.comparison import Comparison
from vsim.analysis.losses import by_seed, candidates, diverged, final_loss, rank
from vsim.analysis.spent import AnyCompute, AnyNetwork
from vsim.analysis.statistics import shared_seeds
from vsim.arguments import one_of, true_or_false
from vsim.figures.heatmap import Cell, heatmap
from vsim.figures.looks import Looks, looks_by
from vsim.history.curves import bands
from vsim.history.history import COLUMNS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Point:
    """One combination of settings: `values`, name → value; and `labels`, name → text of a setting that varies."""

    values: dict[str, Any]
    labels: dict[str, str]


class Sweep(Comparison):
    """A `Comparison` of one strategy with different settings; see `vsim.sweep`. Its table is sorted, the best first.

    Attributes:
        varied: the settings that vary, in their order. points: name → `Point`.
    """

    def __init__(self, allreduce_bytes: int, points: Mapping[str, Point], strategy: str = "") -> None:
        super().__init__(allreduce_bytes)
        self.strategy = strategy
        self.points = points
        self.varied = list(next(iter(points.values())).labels)

    @classmethod
    def of_points(cls, runs: Comparison, points: Mapping[str, Point], strategy: str) -> Sweep:
        """Return the sweep of a comparison's runs, with the same pricing."""
        sweep = cls(runs.allreduce_bytes, points, strategy)
        vars(sweep).update(vars(runs))
        return sweep

    @property
    def varied_options(self) -> list[str]:  # type: ignore[override]
        """The options of `fit` among the settings that vary."""
        return [name for name in ("num_nodes", "batch_size") if name in self.varied]

    def _empty_with(self, other: Comparison) -> Comparison:
        alike = isinstance(other, Sweep) and (other.strategy, other.varied) == (self.strategy, self.varied)
        if not (alike and isinstance(other, Sweep) and self._fixed == other._fixed):
            return super()._empty_with(other)
        return Sweep(self.allreduce_bytes, {**self.points, **other.points}, self.strategy)

    @property
    def _fixed(self) -> dict[str, str]:
        """Setting → value, as text, for settings that do not vary."""
        values = next(iter(self.points.values())).values
        return {name: str(_plain(value, str(value))) for name, value in values.items() if name not in self.varied}

    def renamed(self, names: Mapping[str, str]) -> Sweep:
        """See `Comparison.renamed`."""
        other = super().renamed(names)
        other.points = {names.get(name, name): point for name, point in self.points.items()}
        return other

    @property
    def settings(self) -> dict[str, dict[str, Any]]:
        """Name → settings of the run, including settings that do not vary."""
        return {name: dict(self.points[name].values) for name in self}

    def chosen(self) -> str:
        """Return the setting that `tune=` takes: the best or, if settings are tied with the best, the middle one.

        A setting is tied with the best if the mean difference of their losses over the seeds is within its standard
        error; with one seed, only equal losses are tied. Of two settings in the middle, take the better one.
        """
        best, losses = self.best(), by_seed(self)
        tied = sorted(
            (name for name in candidates(self) if _is_tied(losses[name], losses[best])),
            key=lambda name: statistics.fmean(losses[name].values()),
        )
        places = np.array([[self._place(name, key) for key in self.varied] for name in tied])
        return tied[int(abs(places - places.mean(0)).sum(1).argmin())]

    def _place(self, name: str, key: str) -> int:
        """Return the index of a run's value among the tried ones: numbers by size, other values in the given order."""
        tried = {point.labels[key]: point.values[key] for point in self.points.values()}
        order = sorted(tried, key=tried.__getitem__) if are_numbers(tried.values()) else list(tried)
        return order.index(self.points[name].labels[key])

    def sends_most(self, name: str, setting: str) -> bool:
        """Return whether a run sends more than all runs that differ from it only in the value of `setting`."""
        sent, own = {key: self[key].history.last("wire_bytes") for key in self}, self.points[name].values
        others = [
            key
            for key, point in self.points.items()
            if [what for what, value in point.values.items() if value is not own[what]] == [setting]
        ]
        ended = [key for key in others if self[key].ended]
        return bool(ended) and all(sent[name] > sent[key] for key in ended)

    def plot(
        self,
        x: str = "step",
        y: str | None = None,
        ax: Axes | None = None,
        *,
        logy: bool = False,
        from_step: int = 0,
        legend: bool = True,
        network: AnyNetwork = None,
        compute: AnyCompute = None,
        colour: str | None = None,
    ) -> Axes:
        """Draw the loss of every run; runs with the same value of one setting share a colour, as the legend shows.

        Args:
            x, y, ax, logy, from_step, legend, network, compute: see `Comparison.plot`.
            colour: the setting that colours stand for; default: the first. Dashes stand for the next setting, markers
                for all others.
        """
        first = None if colour is None else one_of("colour", colour, self.varied)
        axis, y = self._x_axis(x, network, compute), self.loss_column if y is None else y
        true_or_false("legend", legend)
        return bands(self._drawn(), axis, y, ax, legend, self.looks(first), diverged(self), logy, from_step)

    def heatmap(self, x: str, y: str, /, *, ax: Axes | None = None, **fixed: Any) -> Axes:
        """Draw a map of the final loss, averaged over the seeds, by the values of two settings as ordered categories.

        A cell with a failed run is hatched. A cell that `halving` or Ctrl-C stopped shows the step of its loss.

        Args:
            x, y: two settings that vary.
            ax: the axes to draw on; default: a new figure as wide as a column.
            fixed: values to show of other settings that vary; default: in each cell, the run with the best values.

        Raises:
            ValueError: there is no such setting, or no run with these values.
        """
        if len(self.varied) < 2:
            raise ValueError(f"a map is over two settings that vary; here {', '.join(self.varied) or 'none'} does")
        one_of("x", x, self.varied)
        one_of("y", y, [name for name in self.varied if name != x])
        others = [name for name in self.varied if name not in (x, y)]
        for key in fixed:
            one_of("a setting to fix", key, others)
        shown = [name for name in self.order if all(self._is(name, key, value) for key, value in fixed.items())]
        if not shown:
            raise ValueError(f"no run with {', '.join(f'{key}={value!r}' for key, value in fixed.items())}")
        cells: dict[tuple[str, str], Cell] = {}
        for name in shown:  # the best first
            labels = self.points[name].labels
            cells.setdefault((labels[x], labels[y]), self._cell(name))
        values = [list(dict.fromkeys(point.labels[key] for point in self.points.values())) for key in (x, y)]
        x_values, y_values = ([v for v in own if any(v == at[i] for at in cells)] for i, own in enumerate(values))
        free = [key for key in others if key not in fixed]
        remark = [f"best of {', '.join(free)}"] if free else []
        remark += [f"{key} = {value}" for key, value in fixed.items()]
        return heatmap(cells, (x, x_values), (y, y_values), self.loss_title, "; ".join(remark), ax)

    def _cell(self, name: str) -> Cell:
        runs = self.runs(name)
        failed = [run for run in runs if run.failed]
        if failed:
            what = "diverged" if all(run.diverged_at is not None for run in failed) else "failed"
            return Cell(math.nan, what if len(failed) == len(runs) else f"{len(failed)} of {len(runs)}\n{what}")
        steps = {int(run.history.last("step")) for run in runs if not run.ended}
        return Cell(statistics.fmean(final_loss(self, run) for run in runs), f"step {min(steps)}" if steps else "")

    def _is(self, name: str, key: str, value: Any) -> bool:
        point = self.points[name]
        own = point.values[key]
        return own is value or point.labels[key] == str(value) or (type(own) is not str and bool(own == value))

    @property
    def order(self) -> list[str]:
        """The names in the order of the table, the best first."""
        return sorted(self, key=lambda name: rank(self, name))

    def labels(self, name: str) -> dict[str, Any]:
        """Return the settings of a row of the table as text."""
        return dict(self.points[name].labels) or {"strategy": name}

    def _titled_runs(self) -> Iterator[tuple[dict[str, Any], ComparedRun]]:
        for titles, run in super()._titled_runs():
            point = self.points[titles["strategy"]]
            own = {key: _plain(point.values[key], label) for key, label in point.labels.items()}
            # A setting that shares its name with a column of steps, such as lr, gets another name.
            yield titles | {f"{key}_setting" if key in COLUMNS else key: value for key, value in own.items()}, run

    def looks(self, first: str | None = None) -> Looks:
        """Return the looks of the lines: colours stand for the setting `first`, by default the first that varies."""
        if not self.varied:
            return super().looks()
        order = sorted(self.varied, key=lambda key: key != first)
        return looks_by({name: point.labels for name, point in self.points.items()}, order, list(self))

    def _pictures(self) -> dict[str, Figure | Axes]:
        x, y, *_ = (*self.varied, None, None)
        return super()._pictures() | ({f"loss over {x} and {y}": self.heatmap(x, y)} if x and y else {})

    @property
    def title(self) -> str:
        """The strategy and the number of settings, followed by nodes, size and number of seeds, as text."""
        return f"{self.strategy}, {len(self)} settings; {super().title}"

    _keys: tuple[str, ...] = ("allreduce_bytes", "runs", "strategy", "settings", "labels")

    def _as_plain(self) -> dict[str, Any]:
        settings = {
            name: {key: _plain(value, point.labels.get(key, str(value))) for key, value in point.values.items()}
            for name, point in self.points.items()
        }
        labels = {name: point.labels for name, point in self.points.items()}
        return {**super()._as_plain(), "strategy": self.strategy, "settings": settings, "labels": labels}

    @classmethod
    def _empty(cls, content: Mapping[str, Any]) -> Sweep:
        points = {name: Point(content["settings"][name], labels) for name, labels in content["labels"].items()}
        return cls(content["allreduce_bytes"], points, content["strategy"])


def are_numbers(values: Iterable[Any]) -> bool:
    """Return whether all values are numbers, and none True or False."""
    return all(isinstance(one, (int, float)) and not isinstance(one, bool) for one in values)


def _is_tied(own: Mapping[int, float], best: Mapping[int, float]) -> bool:
    apart = [own[seed] - best[seed] for seed in shared_seeds([own, best])]
    error = statistics.stdev(apart) / math.sqrt(len(apart)) if len(apart) > 1 else 0.0
    return statistics.fmean(apart) <= error if apart else False


def _plain(value: Any, label: str) -> Any:
    """Return a setting as files hold it: numbers and text unchanged, other values as text."""
    if isinstance(value, np.generic):
        value = value.item()
    finite = not isinstance(value, float) or math.isfinite(value)
    return value if (value is None or isinstance(value, (bool, int, float, str))) and finite else label
