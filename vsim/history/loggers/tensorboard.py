"""A run's record for TensorBoard."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from vsim.arguments import a_path
from vsim.extras import extra
from vsim.history.loggers.base import Row, free_folders, x_of

# Columns whose last values the HParams page shows.
_RESULTS = ("train_loss", "global_loss", "local_loss", "payload_bytes", "wire_bytes")


class TensorBoardLogger:
    """An event file in `<log_dir>/<run_name>/`, for `tensorboard --logdir <log_dir>`: scalars, over steps or examples.

    The HParams page has a line for each run: the strategy and its arguments, nodes, batch size and seed, next to the
    last losses and bytes. Rows are in the file within a second. Folders are named as `CSVLogger` names them, and both
    loggers can share a folder.

    Args:
        log_dir: the folder of all runs; made if needed.

    Attributes:
        folder: the folder of the last run.

    Raises:
        ImportError: tensorboard is not installed.
    """

    def __init__(self, log_dir: str | Path = "logs") -> None:
        _tensorboard()
        self.log_dir = a_path("log_dir", log_dir)
        self.folder: Path | None = None
        self._writer: Any = None

    def start(self, config: Mapping[str, Any]) -> None:
        """Make the folder and the event file, with the configuration as a text."""
        self._x = config.get("log_x_axis") or "step"
        self.folder = next(free_folders(self.log_dir, config.get("run_name"), "events.out.tfevents.*"))
        self._writer = _tensorboard().SummaryWriter(str(self.folder), flush_secs=1)
        text = json.dumps(config, indent=2)
        self._writer.add_text("config", "\n".join(f"    {line}" for line in text.splitlines()), 0)
        self._writer.flush()
        self._settings, self._last = _settings(config), dict[str, float]()

    def log_train(self, row: Row) -> None:
        """Write a training step's numbers, as `train/loss`, `train/lr` and so on."""
        self._write("train", row)

    def log_validation(self, row: Row) -> None:
        """Write a validation's numbers, as `validation/global_loss` and so on."""
        self._write("validation", row)

    def finish(self, failure: str) -> None:
        """Close the event file."""
        if self._writer is not None:
            from torch.utils.tensorboard.summary import hparams

            for summary in hparams(self._settings, self._last):
                self._writer.file_writer.add_summary(summary)
            self._writer.close()
            self._writer = None

    def _write(self, part: str, row: Row) -> None:
        for name, value in row.items():
            if name != "step" and not math.isnan(value):
                tag = f"{part}/{name.removeprefix('train_')}"
                self._writer.add_scalar(tag, value, x_of(row, self._x))
                if name in _RESULTS:
                    self._last[tag] = value


def _settings(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return setting → number or text, for comparing runs on the HParams page."""
    strategy = config["strategy"]
    found = {"strategy": strategy["class"], **{key: config[key] for key in ("num_nodes", "batch_size", "seed")}}
    found |= strategy["arguments"]
    return {key: value if isinstance(value, bool | int | float | str) else str(value) for key, value in found.items()}


def _tensorboard() -> Any:
    return extra("torch.utils.tensorboard", "TensorBoardLogger", "tensorboard", "tensorboard")
