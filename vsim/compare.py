"""Several strategies under identical conditions: the same model, data, order and seed."""

from __future__ import annotations

import base64
import io
import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vsim.data.batches import Data
from vsim.history import COLUMNS, History, import_pandas, write_csv
from vsim.ledger import Ledger
from vsim.objective import LossFunction
from vsim.plot import overview, plot_histories
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
        model: the mean of the nodes' final models; None if the run did not end.
        failure: why the run did not end, or "".
    """

    history: History
    ledger: Ledger
    model: nn.Module | None = None
    failure: str = ""


class Comparison(Mapping[str, ComparedRun]):
    """The runs of several strategies, by name. In a notebook it shows itself as a table and a figure.

    Attributes:
        allreduce_bytes: what AllReduce would hand to its collectives in one step, per node: all gradients once.
        num_nodes: K.
    """

    def __init__(self, num_nodes: int, allreduce_bytes: int) -> None:
        self.num_nodes = num_nodes
        self.allreduce_bytes = allreduce_bytes
        self._runs: dict[str, ComparedRun] = {}

    def __getitem__(self, name: str) -> ComparedRun:
        if name not in self._runs:
            raise KeyError(f"no run {name!r}; there are {', '.join(self._runs)}")
        return self._runs[name]

    def __iter__(self):  # type: ignore[no-untyped-def]
        return iter(self._runs)

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def histories(self) -> dict[str, History]:
        """Name → history."""
        return {name: run.history for name, run in self._runs.items()}

    def rows(self) -> list[dict[str, Any]]:
        """Return one dict a strategy: the columns of the table as numbers.

        Losses are the last measured: of the global model on the validation data, or without any, the mean training
        loss of the last tenth of the run. `times_less` is the payload of AllReduce for as many steps over this one's,
        NaN where nothing was communicated.
        """
        rows = []
        for name, run in self._runs.items():
            steps = int(run.history.last("step")) if len(run.history) else 0
            payload = run.ledger.payload_bytes
            row: dict[str, Any] = {"strategy": name}
            if self._validated:
                row["validation loss"] = run.history.last("global_loss")
                row["perplexity"] = _perplexity(row["validation loss"])
                if any(not math.isnan(h.last("global_accuracy")) for h in self.histories.values()):
                    row["accuracy"] = run.history.last("global_accuracy")
            else:
                (losses,) = run.history.measured("train_loss")
                row["training loss"] = float(losses[-max(1, steps // 10) :].mean()) if steps else math.nan
                row["perplexity"] = _perplexity(row["training loss"])
            row["payload MB/node"] = payload / 1e6
            row["wire MB/node"] = run.ledger.wire_bytes / 1e6
            row["times less than AllReduce"] = self.allreduce_bytes * steps / payload if payload else math.nan
            row["seconds"] = run.history.last("seconds")
            if any(r.failure for r in self._runs.values()):
                row["note"] = run.failure
            rows.append(row)
        return rows

    def table(self, format: str = "simple") -> str:
        """Return the results as a text table; `format` is one of tabulate's: "simple", "github", "html", …"""
        from tabulate import tabulate  # here, as it measures the width of text with tables that take time to load

        rows = [{key: _shown(key, value) for key, value in row.items()} for row in self.rows()]
        return tabulate(rows, headers="keys", tablefmt=format, stralign="right", disable_numparse=True)

    def plot(self, x: str = "step", y: str | None = None, ax: Axes | None = None) -> Axes:
        """Draw the loss of every strategy against "step", "examples", "payload", "wire" or "time".

        Args:
            x: what to draw against; bytes are per node, on a logarithmic axis.
            y: a column of `History`; default the global validation loss, or the training loss without validation.
            ax: where; default a new figure.
        """
        if ax is None:
            import matplotlib.pyplot as plt

            ax = plt.subplots(figsize=(6.0, 4.0), layout="constrained")[1]
        return plot_histories(self.histories, ax, x, y or self._loss_column)

    def figure(self, title: str = "") -> Figure:
        """Return the figure of two panels: loss against step, and against communicated bytes."""
        return overview(self.histories, title or self._title(), self._loss_column)

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with one row a strategy and step: `strategy` and the columns of `History`."""
        frames = [run.history.to_pandas().assign(strategy=name) for name, run in self._runs.items()]
        frame = import_pandas().concat(frames, ignore_index=True)
        return frame[["strategy", *COLUMNS]]

    def to_csv(self, path: str | Path) -> None:
        """Write one line a strategy and step, with the columns of `to_pandas`."""
        rows = (
            (name, *values)
            for name, run in self._runs.items()
            for values in zip(*(run.history[c].tolist() for c in COLUMNS), strict=True)
        )
        write_csv(path, ("strategy", *COLUMNS), rows)

    @property
    def _validated(self) -> bool:
        return any(not math.isnan(h.last("global_loss")) for h in self.histories.values())

    @property
    def _loss_column(self) -> str:
        return "global_loss" if self._validated else "train_loss"

    def _title(self) -> str:
        return f"{self.num_nodes} nodes, {self.allreduce_bytes / 1e6:.2f} MB of weights each"

    def _repr_html_(self) -> str:
        image = io.BytesIO()
        self.figure().savefig(image, format="png", dpi=110)
        picture = base64.b64encode(image.getvalue()).decode()
        alt = f"loss against step and bytes of {', '.join(self)}"
        return f'{self.table("html")}<img alt="{alt}" src="data:image/png;base64,{picture}"/>'

    def __repr__(self) -> str:
        return f"Comparison({self._title()})\n{self.table()}"


def compare(
    model: nn.Module,
    train_dataset: Data,
    val_dataset: Data | None = None,
    *,
    strategies: Mapping[str, Strategy],
    num_nodes: int,
    loss_fn: LossFunction | None = None,
    device: str | torch.device | None = None,
    **fit_options: Any,
) -> Comparison:
    """Train the same model on the same data in the same order with several strategies.

    Args:
        model, train_dataset, val_dataset, loss_fn, device: as of `Trainer`.
        strategies: name → strategy.
        num_nodes: K.
        fit_options: every other argument of `Trainer.fit`, the same for all.

    Returns:
        A `Comparison`. A strategy whose loss becomes non-finite is kept with what it did, and the others go on. On an
        interrupt what was done so far comes back, with a warning.

    Raises:
        TypeError, ValueError: as `Trainer.fit`.
    """
    if not isinstance(strategies, Mapping):
        raise TypeError(f"strategies must be a dict of name → strategy, got {type(strategies).__name__}")
    if not strategies:
        raise ValueError("strategies is empty: give at least one, as a dict of name → strategy")
    odd = [f"{name}: {value!r}" for name, value in strategies.items() if not isinstance(value, Strategy)]
    if odd:
        raise TypeError(f"strategies must be Strategy objects, got {', '.join(odd)}")
    trainable = [p for p in model.parameters() if p.requires_grad]
    comparison = Comparison(num_nodes, sum(p.numel() * p.element_size() for p in trainable))
    for name, strategy in strategies.items():
        trainer = Trainer(model, train_dataset, val_dataset, loss_fn=loss_fn, device=device)
        trainer.run_label = name
        final, failure = None, ""
        try:
            final = trainer.fit(strategy=strategy, num_nodes=num_nodes, **fit_options)
        except FloatingPointError as error:
            failure = str(error).split(" (")[0]
            warnings.warn(f"{name}: {error}", UserWarning, stacklevel=2)
        except KeyboardInterrupt:
            failure = f"interrupted after step {len(trainer.history) - 1}"
            warnings.warn(f"{name}: {failure}; the comparison holds what was done", UserWarning, stacklevel=2)
        comparison._runs[name] = ComparedRun(trainer.history, trainer.ledger, final, failure)
        if failure.startswith("interrupted"):
            break
    return comparison


def _perplexity(loss: float) -> float:
    return math.exp(loss) if loss < 700 else math.inf


def _shown(key: str, value: Any) -> str:
    if isinstance(value, str):
        return value
    if math.isnan(value):
        return "–"
    if key == "accuracy":
        return f"{100 * value:.1f} %"
    if key == "times less than AllReduce":
        return f"{value:.1f}×" if value < 99.95 else f"{value:.0f}×"
    digits = {"validation loss": 4, "training loss": 4, "seconds": 1}.get(key, 2)
    return f"{value:.{digits}f}" if abs(value) < 1e5 else f"{value:.3g}"
