"""Choose the loggers of a run, pass rows to them, and continue the run if a logger fails."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from vsim.arguments import a_text, one_of
from vsim.cluster.randomness import preserved
from vsim.history.loggers.base import Logger, Row, check_run_name, train_row, validation_row
from vsim.history.loggers.csv import CSVLogger
from vsim.history.loggers.wandb import WandbLogger

X_AXES = ("step", "examples")


def run_loggers(
    logger: Logger | Sequence[Logger] | None, run_name: str | None, wandb_project: str | None, log_x_axis: str
) -> list[Logger]:
    """Check these arguments of `fit`, and return the loggers that they ask for.

    Raises:
        TypeError: an argument is not a logger, or has no effect.
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
        loggers.append(WandbLogger(a_text("wandb_project", wandb_project)))
    one_of("log_x_axis", log_x_axis, X_AXES)
    if log_x_axis != "step" and all(isinstance(one, CSVLogger) for one in loggers):
        raise ValueError(
            f"log_x_axis={log_x_axis!r} has no effect without a logger that draws, such as WandbLogger or "
            "TensorBoardLogger: CSV files hold both columns"
        )
    return loggers


def for_one_run(logger: Logger | Sequence[Logger] | None) -> list[Logger] | None:
    """Return the loggers of one of several simultaneous runs: vsim's loggers are copied; a user's logger is shared."""
    if logger is None:
        return None
    loggers: Sequence[Any] = logger if isinstance(logger, (list, tuple)) else [logger]
    return [copy.deepcopy(one) if type(one).__module__.startswith("vsim.") else one for one in loggers]


class RunLog:
    """The callback that passes a run's rows to its loggers.

    A row is logged every `interval` steps, at the last step, and at every step at which the replicas' divergence was
    measured. Every validation is logged. The global random generators of torch (on the CPU), numpy and Python are
    restored after a logger is called.

    Args:
        loggers: the loggers, in the order in which they are called.
        config: the configuration of the run; `total_steps` and the minibatch size are added when they are known.
        interval: steps between rows.
    """

    def __init__(self, loggers: Sequence[Logger], config: Mapping[str, Any], interval: int = 1) -> None:
        self.loggers = list(loggers)
        self.config = dict(config)
        self.interval = interval
        self._last: dict[str, float] | None = None  # the row that was logged last
        self._started: list[Logger] = []

    here = True

    def on_start(self, run: Any) -> None:
        """Start the loggers; `run` has `max_steps` and `minibatch_size`."""
        config = {**self.config, "total_steps": run.max_steps, "minibatch_size": run.minibatch_size}
        with preserved():
            for logger in self.loggers:
                self._started.append(logger)  # before `start`: a logger that fails may have opened files
                logger.start(config)

    def on_step(self, run: Any) -> None:
        """Log the row of a step if it is due."""
        row = dict(run.row)
        if self._last is None:
            self._last = {"step": 0, "examples": 0, "seconds": 0} if row["step"] == 1 else row
        if self._is_due(row, run.max_steps):
            metrics = self.config.get("metrics") or ()  # metrics are logged with validations
            self._pass_on("log_train", train_row({name: row[name] for name in row if name not in metrics}, self._last))
            self._last = row

    def on_evaluation(self, run: Any) -> None:
        """Log a validation."""
        self._last = dict(run.row) if self._last is None else self._last
        self._pass_on("log_validation", validation_row(run.row))

    def on_exit(self, failure: str) -> None:
        """End the run for all loggers, including failed ones."""
        with preserved():
            for logger in self._started:
                with _as_warning(logger, "finish"):
                    logger.finish(failure)
        self._started = []

    def _is_due(self, row: Row, max_steps: int) -> bool:
        step = int(row["step"])
        return step % self.interval == 0 or step == max_steps or "divergence" in row

    def _pass_on(self, method: str, row: Row) -> None:
        with preserved():
            for logger in list(self.loggers):
                with _as_warning(logger, f"{method} of step {int(row['step'])}") as failed:
                    getattr(logger, method)(row)
                if failed:
                    self.loggers.remove(logger)

    def __deepcopy__(self, memo: Any) -> RunLog:
        return self  # each run of a comparison already has its own


@contextmanager
def _as_warning(logger: Logger, what: str) -> Iterator[list[Exception]]:
    """Convert errors that a logger raises in a block to warnings, and collect them in the yielded list."""
    failed: list[Exception] = []
    try:
        yield failed
    except Exception as error:
        failed.append(error)
        warnings.warn(
            f"{type(logger).__name__} failed in {what} ({type(error).__name__}: {error}) and gets no more rows; "
            "training continues, and trainer.history has everything",
            UserWarning,
            stacklevel=3,
        )
