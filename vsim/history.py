"""The record of a run: columns with one value a step."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    import pandas as pd

COLUMNS = (
    "step",
    "examples",
    "train_loss",
    "lr",
    "payload_bytes",
    "wire_bytes",
    "seconds",
    "local_loss",
    "global_loss",
    "average_loss",
    "node_loss_min",
    "node_loss_max",
    "node_loss_std",
    "local_accuracy",
    "global_accuracy",
    "divergence",
    "correlation",
)


class History:
    """One row a step, the first for step 0, before training. What was not measured at a step is NaN.

    Columns:
        step: completed optimizer steps. examples: examples that all nodes have trained on so far.
        train_loss: mean over the nodes of the loss of their batches at this step. lr: the inner learning rate used.
        payload_bytes, wire_bytes: communicated so far, per node.
        seconds: wall-clock time of training so far, evaluation left out.
        local_loss: validation loss of node 0. global_loss: of the global model: the strategy's own (DiLoCo's outer
            weights), or the mean replica. average_loss: of the mean replica.
        node_loss_min, node_loss_max, node_loss_std: over the validation losses of all nodes.
        local_accuracy, global_accuracy: validation accuracy of node 0 and of the global model, where known.
        divergence: root mean square distance of the replicas from their mean, relative to the mean's length.
        correlation: mean Pearson correlation of the weights over pairs of nodes.

    `history["train_loss"]` is a column as a numpy array of float64. `node_losses` is (T, K), row t − 1 for step t.
    """

    def __init__(self, strategy: str = "", num_nodes: int = 1) -> None:
        self.strategy = strategy
        self.num_nodes = num_nodes
        self.executor = ""
        self._columns: dict[str, list[float]] = {name: [] for name in COLUMNS}
        self._node_losses: list[NDArray[np.float64]] = []

    def append(self, row: Mapping[str, float], node_losses: Iterable[float] | None = None) -> None:
        """Add the row of a step; `node_losses` (K,) are its training losses, absent for step 0."""
        for name, column in self._columns.items():
            column.append(float(row.get(name, math.nan)))
        if node_losses is not None:
            self._node_losses.append(np.asarray(node_losses, dtype=np.float64))

    def update_last(self, row: Mapping[str, float]) -> None:
        """Fill in measurements of the last row."""
        for name, value in row.items():
            self._columns[name][-1] = float(value)

    @property
    def node_losses(self) -> NDArray[np.float64]:
        """(T, K): the training loss of every node at every step."""
        return np.stack(self._node_losses) if self._node_losses else np.empty((0, self.num_nodes))

    def __getitem__(self, column: str) -> NDArray[np.float64]:
        if column not in self._columns:
            raise KeyError(f"no column {column!r}; there are {', '.join(COLUMNS)}")
        return np.asarray(self._columns[column])

    def __len__(self) -> int:
        return len(self._columns["step"])

    def measured(self, *columns: str) -> tuple[NDArray[np.float64], ...]:
        """Return these columns at the steps at which all of them were measured.

        >>> history = History()
        >>> history.append({"step": 0, "global_loss": 2.0}); history.append({"step": 1})
        >>> history.measured("step", "global_loss")
        (array([0.]), array([2.]))
        """
        values = [self[name] for name in columns]
        known = ~np.isnan(np.stack(values)).any(0)
        return tuple(v[known] for v in values)

    def last(self, column: str) -> float:
        """Return the last value measured in a column, NaN if there is none."""
        (values,) = self.measured(column)
        return float(values[-1]) if len(values) else math.nan

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with one row a step. Needs pandas."""
        frame = import_pandas().DataFrame(self._columns)
        return frame.astype({"step": int, "examples": int})

    def to_csv(self, path: str | Path) -> None:
        """Write one line a step; what was not measured is an empty field."""
        write_csv(path, COLUMNS, zip(*self._columns.values(), strict=True))

    def __repr__(self) -> str:
        done = int(self._columns["step"][-1]) if len(self) else 0
        return (
            f"History({self.strategy or 'run'}: {self.num_nodes} nodes, {done} steps, "
            f"train loss {self.last('train_loss'):.4f}, global loss {self.last('global_loss'):.4f})"
        )


def write_csv(path: str | Path, header: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Write rows of values; NaN becomes an empty field and whole numbers lose their point."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows([_field(value) for value in row] for row in rows)


def _field(value: Any) -> Any:
    if not isinstance(value, float):
        return value
    if math.isnan(value):
        return ""
    return int(value) if (value.is_integer() and abs(value) >= 1) or value == 0 else value


def import_pandas() -> Any:
    """Return pandas, or raise an ImportError that says how to get it."""
    try:
        import pandas
    except ImportError as error:
        raise ImportError('to_pandas() needs pandas: pip install "vsim[notebook]"') from error
    return pandas
