"""A run's record on Weights & Biases."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from typing import Any

from vsim.arguments import a_text, reject_unknown
from vsim.extras import extra
from vsim.history.loggers.base import Row, x_of


class WandbLogger:
    """A run on Weights & Biases: rows as `train_loss`, `lr`, `global_loss` and so on over the steps, or the examples.

    Args:
        project: the name of the project.
        experiment_name: the run's name on Weights & Biases; default: the `run_name` of `fit`.
        init: further arguments of `wandb.init`, such as `mode="offline"`, `dir`, `entity`, `group`, `tags`. The default
            group of a run called "a/b", as `vsim.compare` names the runs of a comparison, is "a". By default, W&B
            prints nothing and does not capture output; `settings=` changes that.

    Attributes:
        run: W&B's object of the last run. url: the address of that run; None offline.

    Raises:
        ImportError: wandb is not installed.
        TypeError: an argument in `init` is not one of `wandb.init`'s.
        ValueError: there is no key, or Weights & Biases rejects it; raised when the run starts.
    """

    def __init__(self, project: str, experiment_name: str | None = None, **init: Any) -> None:
        a_text("WandbLogger: project", project)
        if experiment_name is not None:
            a_text("WandbLogger: experiment_name", experiment_name)
        wandb = extra("wandb", "WandbLogger", "wandb", "wandb")
        own = {"project", "name", "config", "reinit"}
        valid = [name for name in inspect.signature(wandb.init).parameters if name not in own]
        reject_unknown(init, ["project", "experiment_name", *valid], "WandbLogger()")
        self.project = project
        self.experiment_name = experiment_name
        self.init = init
        self.run: Any = None
        self.url: str | None = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Begin a separate run, next to any run that the process already has."""
        wandb = extra("wandb", "WandbLogger", "wandb", "wandb")
        self._x = config.get("log_x_axis") or "step"
        group = (config.get("run_name") or "").rpartition("/")[0] or None
        try:
            self.run = wandb.init(
                project=self.project,
                name=self.experiment_name or config.get("run_name"),
                config=dict(config),
                reinit="create_new",
                **{"settings": wandb.Settings(silent=True, console="off"), "group": group, **self.init},
            )
        except wandb.Error as error:  # no key, no such entity, no connection
            reason = " ".join(str(error).split())
            raise ValueError(
                f"Weights & Biases refuses the run: {reason} — `wandb login` or WANDB_API_KEY gives the key, "
                "WandbLogger(…, mode='offline') needs none"
            ) from error
        self.url = self.run.url if not self.run.offline else None

    def log_train(self, row: Row) -> None:
        """Log the numbers of a training step or a validation."""
        self.run.log({name: v for name, v in row.items() if not math.isnan(v)}, step=x_of(row, self._x))

    log_validation = log_train

    def finish(self, failure: str) -> None:
        """End the run, and mark it as failed if it failed."""
        if self.run is not None:
            self.run.finish(exit_code=1 if failure else 0)
