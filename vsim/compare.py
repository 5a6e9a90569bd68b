"""Several strategies under identical conditions: the same model, data, order and seeds."""

from __future__ import annotations

import base64
import io
import math
import statistics
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vsim.arguments import whole_number
from vsim.cluster.ledger import Event, Ledger
from vsim.data.batches import Data
from vsim.engine.objective import LossFunction
from vsim.extras import extra
from vsim.records.history import COLUMNS, History, holding_a_record, read_json, write_csv, write_json
from vsim.records.loggers import Logger, check_run_name, date_and_time, folder_name
from vsim.records.plots import bands, overview
from vsim.strategy.base import Strategy
from vsim.trainer import Trainer

if TYPE_CHECKING:
    import pandas as pd
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass
class ComparedRun:
    """One strategy's run.

    Attributes:
        model: the mean of the nodes' final models; None if the run did not end, or was read from a file.
        failure: why the run did not end, or "".
        seed: of everything random in it.
        error: what was raised, if the run failed.
    """

    history: History
    ledger: Ledger
    model: nn.Module | None = None
    failure: str = ""
    seed: int = 42
    error: Exception | None = None


class Comparison(Mapping[str, ComparedRun]):
    """The runs of several strategies, by name. In a notebook it shows itself as a table and a figure.

    Where every strategy ran with several seeds, `comparison[name]` is its run with the first of them and
    `comparison.runs(name)` lists all; tables show mean ± standard deviation, and figures the mean and a band.

    Attributes:
        allreduce_bytes: what AllReduce would hand to its collectives in one step, per node: all gradients once.
        num_nodes: K.
    """

    def __init__(self, num_nodes: int, allreduce_bytes: int) -> None:
        self.num_nodes = num_nodes
        self.allreduce_bytes = allreduce_bytes
        self._runs: dict[str, list[ComparedRun]] = {}

    def __getitem__(self, name: str) -> ComparedRun:
        return self.runs(name)[0]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    def runs(self, name: str) -> list[ComparedRun]:
        """Return the runs of one strategy, one for each seed."""
        if name not in self._runs:
            raise KeyError(f"no run {name!r}; there are {', '.join(self._runs)}")
        return self._runs[name]

    @property
    def histories(self) -> dict[str, list[History]]:
        """Name → histories, one for each seed: what `vsim.records.plots.bands` draws."""
        return {name: [run.history for run in runs] for name, runs in self._runs.items()}

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict a strategy: the columns of the table as numbers.

        Losses are the last measured: of the global model on the validation data, or without any, the mean training
        loss of the last tenth of the run. `times less than AllReduce` is the payload of AllReduce for as many steps
        over this one's, NaN where nothing was communicated. With several seeds every number is the mean over those
        whose runs ended (all, if none did), and where it is not the same for all, "<column> std" follows: the standard
        deviation of the sample.
        """
        rows = []
        for name, runs in self._runs.items():
            ended = [run for run in runs if not run.failure] or runs
            numbers = [self._numbers(run.history) for run in ended]
            row: dict[str, Any] = {"strategy": name}
            for column in numbers[0]:
                values = [own[column] for own in numbers]
                row[column] = statistics.fmean(values)
                if len(set(values)) > 1 and all(map(math.isfinite, values)):
                    row[f"{column} std"] = statistics.stdev(values)
            if any(run.failure for others in self._runs.values() for run in others):
                row["note"] = _note(runs)
            rows.append(row)
        return rows

    def table(self, format: str = "simple") -> str:
        """Return the results as a text table; `format` is one of tabulate's: "simple", "github", "html", …"""
        from tabulate import tabulate  # here, as it measures the width of text with tables that take time to load

        rows = []
        for row in self.rows():
            numbers = {key: value for key, value in row.items() if not key.endswith(" std")}
            rows.append({key: _shown(key, value, row.get(f"{key} std")) for key, value in numbers.items()})
        return tabulate(rows, headers="keys", tablefmt=format, stralign="right", disable_numparse=True)

    def plot(self, x: str = "step", y: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the loss of every strategy against "step", "examples", "payload", "wire" or "time".

        Args:
            x: what to draw against; bytes are per node, on a logarithmic axis.
            y: a column of `History`; default the global validation loss, or the training loss without validation.
            ax: where; default a new figure.
        """
        return bands(self.histories, x, y or self._loss_column, ax)

    def figure(self, title: str | None = None) -> Figure:
        """Return the figure of two panels: loss against step, and against communicated bytes.

        Args:
            title: what stands above, default nodes and size; "": nothing, as for a paper.
        """
        return overview(self.histories, self._title() if title is None else title, self._loss_column)

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with one row a strategy, seed and step: these two and the columns of `History`."""
        frames = [
            run.history.to_pandas().assign(strategy=name, seed=run.seed)
            for name, runs in self._runs.items()
            for run in runs
        ]
        frame = extra("pandas", "to_pandas()", "pandas", "notebook").concat(frames, ignore_index=True)
        return frame[["strategy", "seed", *COLUMNS]]

    def to_csv(self, path: str | Path) -> None:
        """Write one line a strategy, seed and step, with the columns of `to_pandas`."""
        rows = (
            (name, run.seed, *values)
            for name, runs in self._runs.items()
            for run in runs
            for values in zip(*(run.history[c].tolist() for c in COLUMNS), strict=True)
        )
        write_csv(path, ("strategy", "seed", *COLUMNS), rows)

    def to_json(self, path: str | Path) -> None:
        """Write everything but the models to a file that `from_json` reads back: histories, ledgers, failures."""
        runs = [
            {
                "strategy": name,
                "seed": run.seed,
                "failure": run.failure,
                "history": run.history.as_plain(),
                "events": [list(event) for event in run.ledger],
            }
            for name, runs in self._runs.items()
            for run in runs
        ]
        write_json(path, {"num_nodes": self.num_nodes, "allreduce_bytes": self.allreduce_bytes, "runs": runs})

    @classmethod
    def from_json(cls, path: str | Path) -> Comparison:
        """Read what `to_json` wrote; the runs have no models.

        Raises:
            ValueError: the file holds something else.
        """
        content = read_json(path, "Comparison", ("num_nodes", "allreduce_bytes", "runs"))
        comparison = cls(content["num_nodes"], content["allreduce_bytes"])
        with holding_a_record(path, "Comparison"):
            for run in content["runs"]:
                ledger = Ledger()
                for event in run["events"]:
                    ledger.record(Event._make([*event[:-1], tuple(event[-1])]))
                comparison._add(
                    run["strategy"],
                    ComparedRun(History.from_plain(run["history"]), ledger, None, run["failure"], run["seed"]),
                )
        return comparison

    def _add(self, name: str, run: ComparedRun) -> None:
        self._runs.setdefault(name, []).append(run)

    def _numbers(self, history: History) -> dict[str, float]:
        """The columns of the table for one run, in their order."""
        steps = int(history.last("step")) if len(history) else 0
        numbers: dict[str, float] = {}
        if self._validated:
            numbers["validation loss"] = history.last("global_loss")
            numbers["perplexity"] = _perplexity(numbers["validation loss"])
            if any(not math.isnan(h.last("global_accuracy")) for h in self._all_histories()):
                numbers["accuracy"] = history.last("global_accuracy")
        else:
            (losses,) = history.measured("train_loss")
            numbers["training loss"] = float(losses[-max(1, steps // 10) :].mean()) if steps else math.nan
            numbers["perplexity"] = _perplexity(numbers["training loss"])
        payload = history.last("payload_bytes")
        numbers["payload MB/node"] = payload / 1e6
        numbers["wire MB/node"] = history.last("wire_bytes") / 1e6
        numbers["times less than AllReduce"] = self.allreduce_bytes * steps / payload if payload else math.nan
        numbers["seconds"] = history.last("seconds")
        return numbers

    def _all_histories(self) -> list[History]:
        return [run.history for runs in self._runs.values() for run in runs]

    @property
    def _validated(self) -> bool:
        return any(not math.isnan(h.last("global_loss")) for h in self._all_histories())

    @property
    def _loss_column(self) -> str:
        return "global_loss" if self._validated else "train_loss"

    def _title(self) -> str:
        seeds = max((len(runs) for runs in self._runs.values()), default=1)
        repeated = f", {seeds} seeds: mean ± standard deviation" if seeds > 1 else ""
        megabytes = self.allreduce_bytes / 1e6
        size = f"{megabytes:.2f} MB" if megabytes >= 0.1 else f"{1e3 * megabytes:.3g} kB"
        return f"{self.num_nodes} nodes, {size} of weights each{repeated}"

    def _repr_html_(self) -> str:
        image = io.BytesIO()
        self.figure().savefig(image, format="png", dpi=130)
        picture = base64.b64encode(image.getvalue()).decode()
        alt = f"loss against step and bytes of {', '.join(self)}"
        return f'{self.table("html")}<img alt="{alt}" src="data:image/png;base64,{picture}"/>'

    def __repr__(self) -> str:
        return f"Comparison({self._title()})\n{self.table()}"


def compare(
    model: nn.Module | Callable[[int], nn.Module],
    train_dataset: Data,
    val_dataset: Data | None = None,
    *,
    strategies: Mapping[str, Strategy],
    num_nodes: int,
    loss_fn: LossFunction | None = None,
    device: str | torch.device | None = None,
    logger: Logger | Sequence[Logger] | None = None,
    run_name: str | None = None,
    wandb_project: str | None = None,
    seeds: Sequence[int] | None = None,
    **fit_options: Any,
) -> Comparison:
    """Train the same model on the same data in the same order with several strategies.

    Args:
        model: that all runs start from; or a function f(seed) → model, so that every seed has initial weights of its
            own, the same for all strategies.
        train_dataset, val_dataset, loss_fn, device: as of `Trainer`.
        strategies: name → strategy.
        num_nodes: K.
        seeds: train every strategy once with each of them, instead of once with `seed`: tables then show mean ±
            standard deviation, and figures bands.
        logger, run_name, wandb_project: as of `Trainer.fit`. Every strategy is a run of its own, called
            "<run_name>/<name of the strategy>", which is also its folder; without a run name the date and time are it.
        fit_options: every other argument of `Trainer.fit`, the same for all; but save_dir, checkpoint_interval and
            resume belong to one run.

    Returns:
        A `Comparison`. All strategies are set up before the first one trains, so that what is refused is refused
        early. A run that fails later is kept with what it did and with the reason, and the others go on. On an
        interrupt what was done so far comes back. Both with a warning.

    Raises:
        TypeError, ValueError: as `Trainer.fit`.
        Exception: whatever the first run of all raises, except for a non-finite loss: nothing would be lost.
    """
    if not isinstance(strategies, Mapping):
        raise TypeError(f"strategies must be a dict of name → strategy, got {type(strategies).__name__}")
    if not strategies:
        raise ValueError("strategies is empty: give at least one, as a dict of name → strategy")
    odd = [f"{name}: {value!r}" for name, value in strategies.items() if not isinstance(value, Strategy)]
    if odd:
        raise TypeError(f"strategies must be Strategy objects, got {', '.join(odd)}")
    unnamed = [repr(name) for name in strategies if not isinstance(name, str)]
    if unnamed:
        raise TypeError(f"the names of strategies must be strings, got {', '.join(unnamed)}")
    what = "seed" if seeds is None else "every one of seeds"
    if seeds is None:
        seeds = [fit_options.pop("seed", 42)]
    elif "seed" in fit_options:
        raise TypeError("seed and seeds say the same thing; give one of them")
    seeds = [whole_number(what, seed, at_least=0) for seed in seeds]
    if not seeds or len(set(seeds)) < len(seeds):
        raise ValueError(f"seeds must be different numbers, at least one, got {list(seeds)}")
    of_one_run = [n for n in ("save_dir", "checkpoint_interval", "resume") if fit_options.get(n) not in (None, False)]
    if of_one_run and len(strategies) * len(seeds) > 1:
        several = f"{len(strategies)} strategies" if len(strategies) > 1 else f"with {len(seeds)} seeds"
        raise ValueError(
            f"{', '.join(of_one_run)} belongs to one run, and compare() trains {several}; give them to Trainer.fit, "
            "run by run"
        )

    if run_name is not None:
        check_run_name(run_name)
    logs = logger is not None or run_name is not None or wandb_project is not None
    folder = run_name or date_and_time()
    comparison: Comparison | None = None
    for seed in seeds:
        start = model if isinstance(model, nn.Module) else _made(model, seed)
        trainers = {
            name: Trainer(start, train_dataset, val_dataset, loss_fn=loss_fn, device=device) for name in strategies
        }
        if comparison is None:
            trainable = [p for p in start.parameters() if p.requires_grad]
            comparison = Comparison(num_nodes, sum(p.numel() * p.element_size() for p in trainable))
            for name in list(strategies)[1:]:  # the first is about to say for itself
                trainers[name].prepare(strategy=strategies[name], num_nodes=num_nodes, seed=seed, **fit_options)
        for name, trainer in trainers.items():
            label = name if len(seeds) == 1 else f"{name}, seed {seed}"
            trainer.run_label = label
            run = ComparedRun(trainer.history, trainer.ledger, seed=seed)
            try:
                run.model = trainer.fit(
                    strategy=strategies[name],
                    num_nodes=num_nodes,
                    seed=seed,
                    logger=logger,
                    run_name=f"{folder}/{folder_name(label)}" if logs else None,
                    wandb_project=wandb_project,
                    **fit_options,
                )
            except KeyboardInterrupt:
                run.failure = f"interrupted after step {max(0, len(trainer.history) - 1)}"
                warnings.warn(f"{label}: {run.failure}; the comparison holds what was done", UserWarning, stacklevel=2)
            except Exception as error:
                diverged = isinstance(error, FloatingPointError)
                if not diverged and not len(comparison):
                    raise
                run.failure = str(error).split(" (")[0] if diverged else f"{type(error).__name__}: {_first_line(error)}"
                run.error = error
                warnings.warn(f"{label}: {error}", UserWarning, stacklevel=2)
            run.history, run.ledger = trainer.history, trainer.ledger
            comparison._add(name, run)
            if run.failure.startswith("interrupted"):
                return comparison
    assert comparison is not None
    return comparison


def _made(model: Any, seed: int) -> nn.Module:
    if not callable(model) or isinstance(model, type):  # a class takes its first argument for something else
        raise TypeError(f"model must be a torch.nn.Module, or a function f(seed) that makes one, got {model!r}")
    made = model(seed)
    if not isinstance(made, nn.Module):
        raise TypeError(f"model({seed}) must return a torch.nn.Module, got {type(made).__name__}")
    return made


def _note(runs: Sequence[ComparedRun]) -> str:
    """Why runs did not end, if some did not."""
    failed = [run for run in runs if run.failure]
    if len(runs) == 1 or not failed:
        return failed[0].failure if failed else ""
    return "; ".join(f"seed {run.seed}: {run.failure}" for run in failed)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [""])[0]


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


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
    return f"{value:.{digits}f} ± {spread}{unit}"
