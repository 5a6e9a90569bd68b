"""From reports to the record of a run: history, and the progress that a user sees."""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from vsim.records.history import History
from vsim.records.live import LiveRace
from vsim.records.report import StepReport


@dataclass(eq=False)
class Recorder:
    """Keeps what is reported: history and progress. What was done stays on an interrupt.

    Attributes:
        history: gets a row a step.
        progress: show a progress bar, or with "plot" a figure in the notebook; description: what it says.
    """

    history: History
    progress: bool | str = False
    description: str = ""

    def __post_init__(self) -> None:
        self.odd_validation: int | None = None  # the first step whose validation loss was not finite
        self.has_warned = False
        self.bar: Any = None
        own = {self.description: [self.history]}
        self.live = LiveRace(own, self.description) if self.progress == "plot" else None

    def __call__(self, report: StepReport) -> None:
        row = report.row
        self._note_validation(row)
        self.history.executor, self.history.executor_reason = report.executor, report.executor_reason
        self.history.minibatch_size = report.minibatch_size
        self.history.append(row, report.node_losses)
        self._advance(int(row["step"]), report)

    def _note_validation(self, row: Mapping[str, float]) -> None:
        """Warn of a validation loss that is not finite, unless the training loss of the next step is not either."""
        self._warn_of_validation()
        losses = [row[name] for name in ("local_loss", "global_loss", "average_loss") if name in row]
        if not all(map(math.isfinite, losses)) and self.odd_validation is None:
            self.odd_validation = int(row["step"])

    def _warn_of_validation(self) -> None:
        if self.odd_validation is not None and not self.has_warned:
            self.has_warned = True
            warnings.warn(
                f"non-finite validation loss at step {self.odd_validation}, where the training loss is finite: look at "
                "the validation data, and at what the model does in evaluation mode",
                UserWarning,
                stacklevel=2,
            )

    def _advance(self, step: int, report: StepReport) -> None:
        if not self.progress:
            return
        if self.live is not None:
            self.live.update(report.max_steps)
            return
        if self.bar is None:
            from tqdm.auto import tqdm

            self.bar = tqdm(
                total=report.max_steps,
                initial=step - ("train_loss" in report.row),
                desc=self.description,
                unit="step",
                dynamic_ncols=True,
                disable=None,  # not into files and pipes
            )
        if report.preparing:
            self.bar.set_postfix_str(report.preparing)
        if "train_loss" in report.row:
            megabytes = report.row["wire_bytes"] / 1e6
            self.bar.set_postfix_str(f"loss {report.row['train_loss']:.3f}, {megabytes:.2f} MB sent", refresh=False)
            self.bar.update()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.live is not None:
            self.live.close()
        if kind is None:
            self._warn_of_validation()
