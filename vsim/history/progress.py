"""Reports of steps, and the recorder that turns them into a history and shows progress."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from vsim.cluster.ledger import Event
from vsim.cluster.plan import Segment
from vsim.history.history import History
from vsim.history.live import LiveRace

Hook = Callable[[int, float], Any]


@dataclass
class StepReport:
    """The report of a step: the row of the history, the nodes' losses (K,), the events of the ledger.

    `executor`, `max_steps` and `minibatch_size` (None: the whole batch) are the run's. `segment` lists the nodes that
    take part, unless all nodes take part in all steps. `preparing` names long work that precedes the next step.
    `client_val` holds the global model's "losses" (N,) on the clients' data, and "accuracies" (N,) if known.
    """

    row: Mapping[str, float]
    node_losses: Sequence[float] | None
    events: Sequence[Event]
    executor: str
    max_steps: int
    minibatch_size: int | None = None
    executor_reason: str = ""
    segment: Segment | None = None
    preparing: str = ""
    amends: bool = False  # whether the row replaces the last reported one
    client_val: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def has_sent(self) -> bool:
        """Whether nodes have communicated in this step; nodes that join or begin a round do so before it."""
        step = self.row["step"]
        return any(event.step == step and event.moment != "start" for event in self.events)


@dataclass(eq=False)
class Recorder:
    """Records reports in a history, and shows progress. After an interrupt, the recorded steps remain.

    Attributes:
        history: gets one row per step.
        progress: True or "table" for a progress bar ("table" is for several runs), "plot" for a figure in the notebook.
        description: the text of the bar.
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
        if report.amends:
            self.history.amend(row, report.client_val)
            return
        self._note_validation(row)
        self.history.executor, self.history.executor_reason = report.executor, report.executor_reason
        self.history.minibatch_size = report.minibatch_size
        self.history.append(row, report.node_losses)
        self._advance(int(row["step"]), report)

    def _note_validation(self, row: Mapping[str, float]) -> None:
        """Warn about a non-finite validation loss, unless the next step's training loss is not finite, either."""
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
                disable=None,  # no bar in files and pipes
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
