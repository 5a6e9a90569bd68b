"""Loggers: a run's record in files, on Weights & Biases, in TensorBoard, or where a user's own logger puts it.

A logger is any object with the four methods of `Logger`. `RunLog` drives those of a run: it decides what is logged and
when, and sees to it that a logger neither changes what is trained nor ends it.
"""

from __future__ import annotations

import csv
import inspect
import itertools
import json
import math
import re
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol, TextIO, runtime_checkable

from vsim.arguments import one_of, reject_unknown
from vsim.cluster.randomness import preserved
from vsim.records.history import csv_field
from vsim.records.report import StepReport

Row = Mapping[str, float]
X_AXES = ("step", "examples")
# Columns of History under the names that they have in logs, in this order.
_TRAIN_COLUMNS = {
    "payload_bytes": "payload_bytes",
    "wire_bytes": "wire_bytes",
    "seconds": "seconds",
    "memory_bytes": "memory_bytes",
    "divergence": "divergence",
    "correlation": "correlation",
}
_VALIDATION_COLUMNS = ("average_loss", "node_loss_min", "node_loss_max", "node_loss_std", "payload_bytes", "wire_bytes")
_ACCURACIES = ("local_accuracy", "global_accuracy")


@runtime_checkable
class Logger(Protocol):
    """What a logger can do. Write your own with these methods; it need not inherit from this class.

    Calls come in this order, all in the process that called `fit`: `start`, then rows, then `finish`, which comes
    however the run ended. An error in `start` ends the run before its first step; one in a later call is a warning, and
    that logger gets no more rows.

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
            config: the configuration, of values that JSON can hold: the arguments of `fit` by their names (among them
                `run_name` and `log_x_axis`, None where not given), `total_steps`, `model`, `train_dataset`, `versions`.
        """

    def log_train(self, row: Row) -> None:
        """Take a training step's numbers: the columns of `train_row`, NaN where not known."""

    def log_validation(self, row: Row) -> None:
        """Take a validation's numbers: the columns of `validation_row`."""

    def finish(self, failure: str) -> None:
        """End the run; `failure` says why it did not get to its end, or is empty."""


def train_row(row: Row, before: Row) -> dict[str, float]:
    """Return what is logged of a training step.

    Args:
        row: the history's row of the step. before: that of the step that was logged before it.

    Returns:
        step, examples_trained (by all nodes), train_loss (the mean over the nodes' batches of this step),
        train_perplexity = exp(train_loss), lr, payload_bytes and wire_bytes (so far, per node), seconds (of training so
        far), memory_bytes, divergence and correlation (NaN where not measured), examples_per_second and
        tokens_per_second (of all nodes together, over the training time since the step logged before; tokens are NaN
        where batches do not hold token ids, see `vsim.training.loop.tokens_in`).
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
        **{name: row.get(column, math.nan) for column, name in _TRAIN_COLUMNS.items()},
        "examples_per_second": per_second(row["examples"] - before["examples"]),
        "tokens_per_second": per_second(row.get("tokens", math.nan) - tokens_before),
    }


def validation_row(row: Row) -> dict[str, float]:
    """Return what is logged of a validation: see `History` for the columns.

    step, local_loss, local_perplexity, global_loss, global_perplexity, local_accuracy and global_accuracy where they
    are known, examples_trained, average_loss, node_loss_min, node_loss_max, node_loss_std, payload_bytes, wire_bytes.
    """
    return {
        "step": row["step"],
        "local_loss": row["local_loss"],
        "local_perplexity": perplexity(row["local_loss"]),
        "global_loss": row["global_loss"],
        "global_perplexity": perplexity(row["global_loss"]),
        **{name: row[name] for name in _ACCURACIES if name in row},
        "examples_trained": row["examples"],
        **{name: row[name] for name in _VALIDATION_COLUMNS},
    }


def perplexity(loss: float) -> float:
    """Return exp(loss), infinity where that is too large for a float.

    >>> perplexity(0.0), perplexity(1e4)
    (1.0, inf)
    """
    return math.exp(loss) if loss < 700 else math.inf


class RunLog:
    """Passes a run's reports to its loggers.

    A row is logged every `interval` steps, at the last step, and at every step at which the replicas' divergence was
    measured; validations are logged whenever there is one. What a logger draws from the global random generators of
    torch (on the CPU), numpy and Python is put back.

    Args:
        loggers: in the order in which they are called.
        config: the configuration of the run; `total_steps` and the minibatch size are added when they are known.
        interval: steps between rows.
    """

    def __init__(self, loggers: Sequence[Logger], config: Mapping[str, Any], interval: int = 1) -> None:
        self.loggers = list(loggers)
        self.config = dict(config)
        self.interval = interval
        self._last: dict[str, float] | None = None  # the row that was logged before
        self._started: list[Logger] = []

    def __call__(self, report: StepReport) -> None:
        row = dict(report.row)
        with preserved():
            if self._last is None:
                self._start(report)
                self._last = row
            if row["step"] > 0 and self._is_due(row, report.max_steps):
                self._tell("log_train", train_row(row, self._last))
                self._last = row
            if "global_loss" in row:
                self._tell("log_validation", validation_row(row))

    def finish(self, failure: str) -> None:
        """End the run for all loggers, those that have failed too."""
        with preserved():
            for logger in self._started:
                with _as_warning(logger, "finish"):
                    logger.finish(failure)
        self._started = []

    def _start(self, report: StepReport) -> None:
        config = {**self.config, "total_steps": report.max_steps, "minibatch_size": report.minibatch_size}
        for logger in self.loggers:
            self._started.append(logger)  # before: what it has opened when it fails is to be closed
            logger.start(config)

    def _is_due(self, row: Row, max_steps: int) -> bool:
        step = int(row["step"])
        return step % self.interval == 0 or step == max_steps or "divergence" in row

    def _tell(self, method: str, row: Row) -> None:
        for logger in list(self.loggers):
            with _as_warning(logger, f"{method} of step {int(row['step'])}") as failed:
                getattr(logger, method)(row)
            if failed:
                self.loggers.remove(logger)


@contextmanager
def _as_warning(logger: Logger, what: str) -> Iterator[list[Exception]]:
    """Turn what a logger raises in a block into a warning, and note it in the list."""
    failed: list[Exception] = []
    try:
        yield failed
    except Exception as error:
        failed.append(error)
        warnings.warn(
            f"{type(logger).__name__} failed in {what} ({type(error).__name__}: {error}) and gets no more rows; "
            "training goes on, and trainer.history has everything",
            UserWarning,
            stacklevel=3,
        )


class CSVLogger:
    """Files in `<log_dir>/<run_name>/`: `train.csv`, `validation.csv` and `config.json`.

    Every row is in its file as soon as it is logged, so that an interrupted run, or one that was killed, keeps its
    files. What was not measured is an empty field. A folder that holds a run already is left alone: the new run then
    gets a number (`<run_name>-2`), and a warning says so. Without a run name the date and time are the name.

    Args:
        log_dir: the folder of all runs; made if it is not there.

    Attributes:
        folder: that of the last run.
    """

    def __init__(self, log_dir: str | Path = "logs") -> None:
        self.log_dir = _folder(log_dir)
        self.folder: Path | None = None
        self._tables: dict[str, _Table] = {}

    def start(self, config: Mapping[str, Any]) -> None:
        """Make the folder and write `config.json`."""
        self._close()
        text = json.dumps(config, indent=2, allow_nan=False) + "\n"
        for folder in free_folders(self.log_dir, config.get("run_name"), "*.csv", "config.json"):
            # "x": of several runs that start at once, one gets the folder.
            with suppress(FileExistsError), (folder / "config.json").open("x", encoding="utf-8") as file:
                file.write(text)
                self.folder = folder
                break

    def log_train(self, row: Row) -> None:
        """Write a line of `train.csv`."""
        self._table("train.csv").write(row)

    def log_validation(self, row: Row) -> None:
        """Write a line of `validation.csv`."""
        self._table("validation.csv").write(row)

    def finish(self, failure: str) -> None:
        """Close the files."""
        self._close()

    def _table(self, name: str) -> _Table:
        assert self.folder is not None
        if name not in self._tables:
            self._tables[name] = _Table(self.folder / name)
        return self._tables[name]

    def _close(self) -> None:
        for table in self._tables.values():
            table.close()
        self._tables = {}


class _Table:
    """A CSV file that grows by a line at a time; the first row names the columns."""

    def __init__(self, path: Path) -> None:
        self._file: TextIO = path.open("x", newline="", encoding="utf-8")
        self._writer: Any = csv.writer(self._file)
        self._columns: list[str] = []

    def write(self, row: Row) -> None:
        if not self._columns:
            self._columns = list(row)
            self._writer.writerow(self._columns)
        self._writer.writerow([csv_field(row.get(name, math.nan)) for name in self._columns])
        self._file.flush()

    def close(self) -> None:
        self._file.close()


class WandbLogger:
    """A run on Weights & Biases: rows as `train_loss`, `lr`, `global_loss` and so on over the steps, or the examples.

    Args:
        project: the project there.
        experiment_name: the run's name there; default the `run_name` of `fit`.
        init: further arguments of `wandb.init`, such as `mode="offline"`, `dir`, `entity`, `group`, `tags`. W&B prints
            nothing and does not capture what is printed, unless `settings=` says otherwise.

    Attributes:
        run: the run object of the last run. url: its address, None offline.

    Raises:
        ImportError: wandb is not installed.
        TypeError: an argument is not one of `wandb.init`.
    """

    def __init__(self, project: str, experiment_name: str | None = None, **init: Any) -> None:
        if not isinstance(project, str) or not project:
            raise TypeError(f"WandbLogger: project must be the name of a project, got {project!r}")
        wandb = _import_wandb()
        own = {"project", "name", "config", "reinit"}
        valid = [name for name in inspect.signature(wandb.init).parameters if name not in own]
        reject_unknown(init, ["project", "experiment_name", *valid], "WandbLogger()")
        self.project = project
        self.experiment_name = experiment_name
        self.init = init
        self.run: Any = None
        self.url: str | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin a run of its own, beside any that the process has."""
        wandb = _import_wandb()
        self._x = config.get("log_x_axis") or "step"
        self.run = wandb.init(
            project=self.project,
            name=self.experiment_name or config.get("run_name"),
            config=dict(config),
            reinit="create_new",
            **{"settings": wandb.Settings(silent=True, console="off"), **self.init},
        )
        self.url = self.run.url if not self.run.offline else None

    def log_train(self, row: Row) -> None:
        """Log a training step's numbers."""
        self._log(row)

    def log_validation(self, row: Row) -> None:
        """Log a validation's numbers."""
        self._log(row)

    def finish(self, failure: str) -> None:
        """End the run; one that failed is marked so."""
        if self.run is not None:
            self.run.finish(exit_code=1 if failure else 0)

    def _log(self, row: Row) -> None:
        self.run.log({name: v for name, v in row.items() if not math.isnan(v)}, step=_x_of(row, self._x))


class TensorBoardLogger:
    """An event file in `<log_dir>/<run_name>/`, for `tensorboard --logdir <log_dir>`: scalars, over steps or examples.

    Rows are in the file within a second. Folders are named as by `CSVLogger`, with which it can share one.

    Args:
        log_dir: the folder of all runs; made if it is not there.

    Attributes:
        folder: that of the last run.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, log_dir: str | Path = "logs") -> None:
        _import_summary_writer()
        self.log_dir = _folder(log_dir)
        self.folder: Path | None = None
        self._writer: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Make the folder and the event file, with the configuration as a text."""
        self._x = config.get("log_x_axis") or "step"
        self.folder = next(free_folders(self.log_dir, config.get("run_name"), "events.out.tfevents.*"))
        self._writer = _import_summary_writer()(str(self.folder), flush_secs=1)
        text = json.dumps(config, indent=2)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), 0)
        self._writer.flush()

    def log_train(self, row: Row) -> None:
        """Write a training step's numbers, as `train/loss`, `train/lr` and so on."""
        self._write("train", row)

    def log_validation(self, row: Row) -> None:
        """Write a validation's numbers, as `validation/global_loss` and so on."""
        self._write("validation", row)

    def finish(self, failure: str) -> None:
        """Close the event file."""
        if self._writer is not None:
            self._writer.close()
            self._writer = None

    def _write(self, part: str, row: Row) -> None:
        for name, value in row.items():
            if name != "step" and not math.isnan(value):
                tag = f"{part}/{name.removeprefix('train_')}"
                self._writer.add_scalar(tag, value, _x_of(row, self._x))


def _x_of(row: Row, axis: str) -> int:
    return int(row["examples_trained" if axis == "examples" else "step"])


def run_loggers(
    logger: Logger | Sequence[Logger] | None, run_name: str | None, wandb_project: str | None, log_x_axis: str
) -> list[Logger]:
    """Return the loggers that these arguments of `fit` ask for, checked.

    Raises:
        TypeError: something is not a logger, or has no effect.
        ValueError: `run_name` or `log_x_axis` is not allowed.
    """
    loggers: list[Any] = []
    if logger is not None:
        loggers = list(logger) if isinstance(logger, (list, tuple)) else [logger]
    elif run_name is not None:
        loggers = [CSVLogger()]
    for one in loggers:
        if isinstance(one, type) or not isinstance(one, Logger):
            raise TypeError(
                "logger must be a CSVLogger(), WandbLogger(…), TensorBoardLogger() or an object with the methods "
                f"start, log_train, log_validation and finish, or a list of them; got {one!r}"
            )
    if run_name is not None:
        check_run_name(run_name)
    if wandb_project is not None:
        loggers.append(WandbLogger(wandb_project))
    one_of("log_x_axis", log_x_axis, X_AXES)
    if log_x_axis != "step" and all(isinstance(one, CSVLogger) for one in loggers):
        raise ValueError(
            f"log_x_axis={log_x_axis!r} has no effect without a logger that draws, such as WandbLogger or "
            "TensorBoardLogger: CSV files hold both columns"
        )
    return loggers


def check_run_name(run_name: str) -> str:
    """Return `run_name` if it can name a folder within the log folder; "a/b" is one within another."""
    if not isinstance(run_name, str):
        raise TypeError(f"run_name must be a string, got {run_name!r} of type {type(run_name).__name__}")
    parts = Path(run_name).parts
    if not parts or Path(run_name).is_absolute() or ".." in parts or "\0" in run_name:
        raise ValueError(
            f"run_name must name a folder within the log folder, such as 'diloco' or 'a/b'; got {run_name!r}"
        )
    return run_name


def _folder(log_dir: Any) -> Path:
    if not isinstance(log_dir, str | Path):
        raise TypeError(f"log_dir must be the path of a folder, got {log_dir!r}")
    return Path(log_dir)


def date_and_time() -> str:
    """Return the name of a run that was given none."""
    return datetime.now().strftime("%Y%m%d_%H%M%S")


def folder_name(label: str) -> str:
    """Return a label as every file system takes it for a name.

    >>> folder_name("diloco:H=50,outer_lr=0.7")
    'diloco_H=50,outer_lr=0.7'
    """
    return re.sub(r"[^\w.,=+-]", "_", label).strip(".") or "_"


def free_folders(log_dir: Path, run_name: str | None, *patterns: str) -> Iterator[Path]:
    """Yield folders for a run, made if need be: `<log_dir>/<run_name>`, then those with a number.

    Args:
        log_dir: the folder of all runs. run_name: None for the date and time.
        patterns: a folder with a file that fits one of them holds a run already and is left out.
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


def _import_wandb() -> Any:
    try:
        import wandb
    except ImportError as error:
        raise ImportError('WandbLogger needs wandb: pip install "vsim[wandb]"') from error
    return wandb


def _import_summary_writer() -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError as error:
        raise ImportError('TensorBoardLogger needs tensorboard: pip install "vsim[tensorboard]"') from error
    return SummaryWriter
