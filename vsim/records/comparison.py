"""The runs of several strategies side by side: a table, figures and files."""

from __future__ import annotations

import base64
import copy
import io
import math
import statistics
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

from vsim.extras import extra
from vsim.records.compared import ComparedRun
from vsim.records.history import History, holding_a_record, read_json, write_csv, write_json
from vsim.records.looks import MANY, Looks, looks_of
from vsim.records.plots import Y_LABELS, bands, overview

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Self = TypeVar("Self", bound="Comparison")


class Comparison(Mapping[str, ComparedRun]):
    """The runs of several strategies, by name. In a notebook it shows itself as a table and a figure.

    Where every strategy ran with several seeds, `comparison[name]` is its run with the first of them and
    `comparison.runs(name)` lists all; tables show mean ± standard deviation, and figures the mean and a band.
    `comparison[["AllReduce", "DiLoCo"]]` is the comparison of these alone; they keep their colours.

    Attributes:
        allreduce_bytes: what AllReduce would hand to its collectives in one step, per node: all gradients once.
    """

    def __init__(self, allreduce_bytes: int) -> None:
        self.allreduce_bytes = allreduce_bytes
        self._runs: dict[str, list[ComparedRun]] = {}
        self._names: list[str] = []  # of all runs, of a selection too: the looks of lines follow from them

    @overload
    def __getitem__(self, name: str) -> ComparedRun: ...
    @overload
    def __getitem__(self: Self, name: list[str]) -> Self: ...
    def __getitem__(self: Self, name: str | list[str]) -> ComparedRun | Self:
        if not isinstance(name, list):
            return self.runs(name)[0]
        selection = copy.copy(self)
        selection._runs = {one: self.runs(one) for one in name}
        return selection

    def __iter__(self) -> Iterator[str]:
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def runs(self, name: str) -> list[ComparedRun]:
        """Return the runs of one strategy, one for each seed."""
        if name not in self._runs:
            raise KeyError(f"no run {name!r}; there are {', '.join(self._runs)}")
        return self._runs[name]

    @property
    def num_nodes(self) -> int | None:
        """K; None if it is not the same for all."""
        numbers = {history.num_nodes for history in self._all_histories()}
        return numbers.pop() if len(numbers) == 1 else None

    def best(self) -> str:
        """Return the name of the lowest final loss, on average over the seeds.

        Runs that diverged, failed or were stopped early count only where no other is left.

        Raises:
            ValueError: all diverged or failed.
        """
        best = min(self, key=self._rank, default=None)
        if best is None or self._rank(best)[0] == 2:
            raise ValueError("no run got to its end" + (f"; {best}: {self._note(best)}" if best else ""))
        return best

    def steps_to(self, loss: float) -> dict[str, list[float]]:
        """Return name → for each seed the first step with a validation loss of at most `loss`, NaN if there is none.

        It is as fine as `val_interval`. Without validation the loss is that of the training batches.
        """

        def first(history: History) -> float:
            steps, losses = history.measured("step", self._loss_column)
            return float(min(steps[losses <= loss], default=math.nan))

        return {name: [first(history) for history in histories] for name, histories in self.histories.items()}

    @property
    def histories(self) -> dict[str, list[History]]:
        """Name → histories, one for each seed: what `vsim.records.plots.bands` draws."""
        return {name: [run.history for run in runs] for name, runs in self._runs.items()}

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict a strategy: the columns of the table as numbers.

        Losses are the last measured: of the global model on the validation data, or without any, the mean training
        loss of the last tenth of the run; NaN of a run that diverged. `times less than AllReduce` is the payload of
        AllReduce for as many steps over this one's, NaN where nothing was communicated. With several seeds every
        number is the mean over those whose runs ended (all, if none did), and where it is not the same for all,
        "<column> std" follows: the standard deviation of the sample.
        """
        rows = []
        for name in self._ordered():
            runs = self._runs[name]
            numbers = [self._numbers(run) for run in _sound(runs)]
            row: dict[str, Any] = {**self._titles(name)}
            for column in numbers[0]:
                values = [own[column] for own in numbers]
                row[column] = statistics.fmean(values)
                if len(set(values)) > 1 and all(map(math.isfinite, values)):
                    row[f"{column} std"] = statistics.stdev(values)
            if not all(run.ended for others in self._runs.values() for run in others):
                row["note"] = self._note(name)
            rows.append(row)
        return rows

    def table(self, format: str = "simple") -> str:
        """Return the results as a text table; `format` is one of tabulate's: "simple", "github", "html", …"""
        from tabulate import tabulate  # here, as it measures the width of text with tables that take time to load

        diverged, rows = self._diverged(), []
        for name, row in zip(self._ordered(), self.rows(), strict=True):
            shown = {
                key: _shown(key, value, row.get(f"{key} std")) for key, value in row.items() if not key.endswith(" std")
            }
            if name in diverged:
                shown[self._loss_title] = diverged[name]
            rows.append(shown)
        return tabulate(rows, headers="keys", tablefmt=format, stralign="right", disable_numparse=True)

    def plot(self, x: str = "step", y: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the loss of every strategy against "step", "examples", "payload", "wire" or "time".

        Args:
            x: what to draw against; bytes are per node, on a logarithmic axis.
            y: a column of `History`; default the global validation loss, or the training loss without validation.
            ax: where; default a new figure.
        """
        return bands(self._drawn(), x, y or self._loss_column, ax, True, self._looks(), self._diverged())

    def figure(self, title: str | None = None) -> Figure:
        """Return the figure of two panels: loss against step, and against communicated bytes.

        Args:
            title: what stands above, default nodes and size; "": nothing, as for a paper.
        """
        title = self._title() if title is None else title
        return overview(self._drawn(), title, self._loss_column, self._looks(), self._diverged())

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with one row a strategy, seed and step: these two and the columns of `History`."""
        pandas = extra("pandas", "to_pandas()", "pandas", "notebook")
        frames = [run.history.to_pandas().assign(**titles) for titles, run in self._titled_runs()]
        titles, _ = next(self._titled_runs())
        return pandas.concat(frames, ignore_index=True)[[*titles, *self._columns]]

    def to_csv(self, path: str | Path) -> None:
        """Write one line a strategy, seed and step, with the columns of `to_pandas`."""
        titles, _ = next(self._titled_runs())
        rows = (
            (*own.values(), *values)
            for own, run in self._titled_runs()
            for values in zip(*(run.history[c].tolist() for c in self._columns), strict=True)
        )
        write_csv(path, (*titles, *self._columns), rows)

    @property
    def _columns(self) -> list[str]:
        """Those of all histories: their runs have the same metrics."""
        return list(dict.fromkeys(c for _, run in self._titled_runs() for c in run.history.columns))

    def to_json(self, path: str | Path) -> None:
        """Write everything but the models, for `from_json`: histories, ledgers, failures."""
        write_json(path, self._as_plain())

    @classmethod
    def from_json(cls: type[Self], path: str | Path) -> Self:
        """Read what `to_json` wrote; the runs have no models.

        Raises:
            ValueError: the file holds something else.
        """
        content = read_json(path, cls.__name__, cls._keys)
        with holding_a_record(path, cls.__name__):
            return cls._from_plain(content)

    _keys: tuple[str, ...] = ("allreduce_bytes", "runs")

    def _as_plain(self) -> dict[str, Any]:
        runs = [{"strategy": name, **run.as_plain()} for name, runs in self._runs.items() for run in runs]
        return {"allreduce_bytes": self.allreduce_bytes, "runs": runs}

    @classmethod
    def _from_plain(cls: type[Self], content: Mapping[str, Any]) -> Self:
        comparison = cls._empty(content)
        for run in content["runs"]:
            comparison.add(run["strategy"], ComparedRun.from_plain(run))
        return comparison

    @classmethod
    def _empty(cls: type[Self], content: Mapping[str, Any]) -> Self:
        return cls(content["allreduce_bytes"])

    def add(self, name: str, run: ComparedRun) -> None:
        """Add a run of one seed."""
        if name not in self._runs:
            self._names.append(name)
        self._runs.setdefault(name, []).append(run)

    def _titles(self, name: str) -> dict[str, Any]:
        """What a row of the table is called: column → text."""
        return {"strategy": name}

    def _titled_runs(self) -> Iterator[tuple[dict[str, Any], ComparedRun]]:
        """All runs, with what their lines in files begin with: column → value."""
        for name, runs in self._runs.items():
            for run in runs:
                yield {"strategy": name, "seed": run.seed}, run

    def _ordered(self) -> list[str]:
        """The names in the order of the table."""
        return list(self._runs)

    def _numbers(self, run: ComparedRun) -> dict[str, float]:
        """The columns of the table for one run, in their order."""
        history, numbers = run.history, {}
        steps = int(history.last("step")) if len(history) else 0
        loss = numbers[self._loss_title] = self._loss(run)
        numbers["perplexity"] = math.inf if loss >= 700 else math.exp(loss)
        if self._validated and any(not math.isnan(h.last("global_accuracy")) for h in self._all_histories()):
            numbers["accuracy"] = math.nan if run.diverged_at is not None else history.last("global_accuracy")
        payload = history.last("payload_bytes")
        numbers["payload MB/node"] = payload / 1e6
        numbers["wire MB/node"] = history.last("wire_bytes") / 1e6
        numbers["times less than AllReduce"] = self.allreduce_bytes * steps / payload if payload else math.nan
        numbers["seconds"] = history.last("seconds")
        return numbers

    def _loss(self, run: ComparedRun) -> float:
        if run.diverged_at is not None:
            return math.nan
        if self._validated:
            return run.history.last("global_loss")
        (losses,) = run.history.measured("train_loss")
        return float(losses[-max(1, len(losses) // 10) :].mean()) if len(losses) else math.nan

    def _rank(self, name: str) -> tuple[int, float, float]:
        """The lower, the better: those that ended by their loss, those stopped later, those that failed later."""
        runs = self._runs[name]
        loss = statistics.fmean(map(self._loss, runs))
        steps = min(run.history.last("step") if len(run.history) else 0.0 for run in runs)
        if not math.isfinite(loss) or any(run.failed for run in runs):
            return 2, -steps, 0.0
        return (0, 0.0, loss) if all(run.ended for run in runs) else (1, -steps, loss)

    def _drawn(self) -> dict[str, list[History]]:
        return {name: [run.history for run in _sound(runs)] for name, runs in self._runs.items()}

    def _diverged(self) -> dict[str, str]:
        """Name → "diverged at step 4" for those all of whose runs did."""
        said = {}
        for name, runs in self._runs.items():
            steps = sorted(run.diverged_at for run in runs if run.diverged_at is not None)
            if len(steps) == len(runs):
                one = steps[0] == steps[-1]
                said[name] = f"diverged at step {steps[0]}" if one else f"diverged at steps {steps[0]} to {steps[-1]}"
        return said

    def _looks(self) -> Looks:
        return looks_of(self._names)

    def _note(self, name: str) -> str:
        """Why runs did not end, if some did not."""
        runs = self._runs[name]
        notes = {run.seed: run.note for run in runs if run.note}
        if len(notes) == len(runs) and len(set(notes.values())) == 1:
            return runs[0].note
        return "; ".join(f"seed {seed}: {note}" for seed, note in notes.items())

    def _all_histories(self) -> list[History]:
        return [run.history for runs in self._runs.values() for run in runs]

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
        seeds = max((len(runs) for runs in self._runs.values()), default=1)
        spread = f"{seeds} seeds: mean ± standard deviation" if len(self) <= MANY else f"mean of {seeds} seeds"
        repeated = f", {spread}" if seeds > 1 else ""
        megabytes = self.allreduce_bytes / 1e6
        size = f"{megabytes:.2f} MB" if megabytes >= 0.1 else f"{1e3 * megabytes:.3g} kB"
        nodes = sorted({history.num_nodes for history in self._all_histories()})
        return f"{' or '.join(map(str, nodes))} nodes, {size} of weights each{repeated}"

    def _pictures(self) -> dict[str, Figure]:
        """What a notebook shows below the table: what it is → figure."""
        return {f"loss against step and bytes of {', '.join(self)}": self.figure()}

    def _repr_html_(self) -> str:
        html = self.table("html")
        for alt, figure in self._pictures().items():
            image = io.BytesIO()
            figure.savefig(image, format="png", dpi=130)
            html += f'<img alt="{alt}" src="data:image/png;base64,{base64.b64encode(image.getvalue()).decode()}"/>'
        return html

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self._title()})\n{self.table()}"


def _sound(runs: list[ComparedRun]) -> list[ComparedRun]:
    """The runs that did not fail, or all if all did."""
    return [run for run in runs if not run.failure] or runs


def _shown(key: str, value: Any, deviation: float | None = None) -> str:
    """Text for a cell: the number, and its standard deviation if there is one, with as many digits."""
    if isinstance(value, str):
        return value
    if math.isnan(value):
        return "–"
    if key == "accuracy":
        return f"{100 * value:.1f} %" if deviation is None else f"{100 * value:.1f} ± {100 * deviation:.1f} %"
    digits = {"validation loss": 4, "training loss": 4, "seconds": 1}.get(key, 2)
    unit = ""
    if key.endswith("MB/node") and 0 < value < 0.1:
        digits = 4
    if key == "times less than AllReduce":
        digits, unit = (1 if value < 99.95 else 0), "×"
    spread = "" if deviation is None else f"{deviation:.{digits}f}"
    if not spread.strip("0."):  # all alike, to the digits shown
        return f"{value:.{digits}f}{unit}" if abs(value) < 1e5 else f"{value:.3g}{unit}"
    return f"{value:.{digits}f} ± {spread}{unit}" if abs(value) < 1e5 else f"{value:.3g} ± {deviation:.3g}{unit}"
