"""The methods of a logger, the rows that loggers get, and the folders that runs are logged to."""

from __future__ import annotations

import itertools
import math
import re
import warnings
from collections.abc import Iterator, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

from vsim.arguments import encodable
from vsim.history.history import ACCURACIES, COLUMNS


@runtime_checkable
class Logger(Protocol):
    """The methods of a logger. Your own logger needs these methods, but need not inherit from this class.

    Calls are made in the process that called `fit`: first `start`, then rows, then `finish`, however the run ended. An
    error in `start` ends the run before its first step. An error in a later call becomes a warning, and the logger gets
    no more rows.

    Example:
        >>> class Printer:
        ...     def start(self, config): print(config["run_name"], config["num_nodes"])
        ...     def log_train(self, row): print(row["step"], row["lr"])
        ...     def log_validation(self, row): print(row["step"], "validated")
        ...     def finish(self, failure): print("failed" if failure else "done")
        >>> from vsim import Trainer
        >>> from vsim.data import digits
        >>> from vsim.models import MLP
        >>> from vsim.strategy import DiLoCoStrategy
        >>> train, val = digits()
        >>> options = {"num_nodes": 4, "max_steps": 2, "progress": False}
        >>> _ = Trainer(MLP(seed=0), train, val).fit(strategy=DiLoCoStrategy(lr=0.01), logger=Printer(), **options)
        None 4
        0 validated
        1 0.01
        2 0.01
        2 validated
        done
    """

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin a run.

        Args:
            config: the configuration, as values for JSON: the arguments of `fit` by name (including `run_name` and
                `log_x_axis`, None if not given), `total_steps`, `model`, `train_dataset`, `versions`.
        """

    def log_train(self, row: Row) -> None:
        """Log the numbers of a training step: the columns of `train_row`, NaN where unknown."""

    def log_validation(self, row: Row) -> None:
        """Log the numbers of a validation: the columns of `validation_row`."""

    def finish(self, failure: str) -> None:
        """End the run; `failure` says why the run did not complete, or is empty."""


Row = Mapping[str, float]
# Columns of History, in this order.
_TRAIN_COLUMNS = ("payload_bytes", "wire_bytes", "seconds", "memory_bytes", "divergence", "correlation")
_VALIDATION_COLUMNS = ("average_loss", "node_loss_min", "node_loss_max", "node_loss_std", "payload_bytes", "wire_bytes")


def train_row(row: Row, before: Row) -> dict[str, float]:
    """Return the row of a training step.

    Args:
        row: the history's row of the step. before: the history's row of the previously logged step.

    Returns:
        step, examples_trained (by all nodes), train_loss (the mean over the nodes' batches of this step),
        train_perplexity = exp(train_loss), lr, payload_bytes and wire_bytes (so far, per node), seconds (of training so
        far), memory_bytes, divergence and correlation (NaN where not measured), examples_per_second and
        tokens_per_second (of all nodes together, over the training time since the step logged before; tokens are NaN
        where batches do not hold token ids, see `vsim.data.batches.sizes_of`), and the strategy's own columns.
    """
    elapsed = row["seconds"] - before["seconds"]
    tokens_before = before.get("tokens", 0.0) if before["step"] else 0.0

    def per_second(count: float) -> float:
        return count / elapsed if elapsed > 0 else math.nan

    return {
        "step": row["step"],
        "examples_trained": row["examples"],
        "train_loss": row["train_loss"],
        "train_perplexity": perplexity(row["train_loss"]),
        "lr": row["lr"],
        **{name: row.get(name, math.nan) for name in _TRAIN_COLUMNS},
        "examples_per_second": per_second(row["examples"] - before["examples"]),
        "tokens_per_second": per_second(row.get("tokens", math.nan) - tokens_before),
        **{name: value for name, value in row.items() if name not in COLUMNS},
    }


def validation_row(row: Row) -> dict[str, float]:
    """Return the row of a validation; see `History` for the columns.

    step, local_loss, local_perplexity, global_loss, global_perplexity, local_accuracy and global_accuracy where they
    are known, examples_trained, average_loss, node_loss_min, node_loss_max, node_loss_std, payload_bytes, wire_bytes,
    and the metrics of `fit`.
    """
    return {
        "step": row["step"],
        "local_loss": row.get("local_loss", math.nan),
        "local_perplexity": perplexity(row.get("local_loss", math.nan)),
        "global_loss": row["global_loss"],
        "global_perplexity": perplexity(row["global_loss"]),
        **{name: row[name] for name in ACCURACIES if name in row},
        "examples_trained": row["examples"],
        **{name: row.get(name, math.nan) for name in _VALIDATION_COLUMNS},
        **{name: value for name, value in row.items() if name not in COLUMNS},
    }


def perplexity(loss: float) -> float:
    """Return exp(loss), infinity where that is too large for a float.

    >>> perplexity(0.0), perplexity(1e4)
    (1.0, inf)
    """
    return math.exp(loss) if loss < 700 else math.inf


def x_of(row: Row, axis: str) -> int:
    """Return the position of a row on the axis "step" or "examples"."""
    return int(row["examples_trained" if axis == "examples" else "step"])


def check_run_name(run_name: str) -> str:
    """Return `run_name` if it can name a folder within the log folder; "a/b" is a folder within another."""
    if not isinstance(run_name, str):
        raise TypeError(f"run_name must be a string, got {run_name!r} of type {type(run_name).__name__}")
    parts = Path(encodable("run_name", run_name)).parts
    too_long = any(len(part.encode()) > 200 for part in parts)  # file systems take 255 bytes; a number may be added
    if not parts or Path(run_name).is_absolute() or ".." in parts or "\0" in run_name or too_long:
        allowed = "with names of at most 200 bytes" if too_long else "such as 'diloco' or 'a/b'"
        raise ValueError(f"run_name must name a folder within the log folder, {allowed}; got {run_name!r}")
    return run_name


def date_and_time() -> str:
    """Return date and time, the default name of a run."""
    return datetime.now().strftime("%Y%m%d_%H%M%S")


def folder_name(label: str) -> str:
    """Return a label as a name that every file system accepts.

    >>> folder_name("diloco:H=50,outer_lr=0.7")
    'diloco_H=50,outer_lr=0.7'
    """
    return re.sub(r"[^\w.,=+-]", "_", label).strip(".") or "_"


def free_folders(log_dir: Path, run_name: str | None, *patterns: str) -> Iterator[Path]:
    """Yield folders for a run, and make them if needed: `<log_dir>/<run_name>`, then numbered ones.

    Args:
        log_dir: the folder of all runs. run_name: None for the date and time.
        patterns: patterns of files; a folder with a matching file holds a run already, and is skipped.
    """
    name = date_and_time() if run_name is None else run_name
    for number in itertools.count(1):
        folder = log_dir / (name if number == 1 else f"{name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        if any(next(folder.glob(pattern), None) for pattern in patterns):
            continue
        if number > 1 and run_name is not None:
            warnings.warn(f"{log_dir / name} holds a run already; this one is in {folder}", UserWarning, stacklevel=2)
        yield folder
