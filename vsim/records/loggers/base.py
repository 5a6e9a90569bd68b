"""What a logger is."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from vsim.records.loggers.rows import Row


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
