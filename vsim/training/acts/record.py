"""One row of the history for every step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import torch

from vsim.engine.memory import Held
from vsim.history.progress import StepReport
from vsim.training.acts.moment import Moment, Send
from vsim.training.tracked import TrackedRun


class Record:
    """Makes every run's row of a step, with the columns that others have measured, and records it.

    Args:
        send: sends the reports of all runs to the process that shows them; None: this process does.

    Attributes:
        memory: returns how many bytes of a device's memory this process holds.
    """

    def __init__(self, send: Send | None = None) -> None:
        self.send, self.memory = send, Held()

    def __call__(self, moment: Moment) -> None:
        if not moment.reached:
            return
        memory = self.memory(moment.reached[0].cluster.weights.device)
        moment.each(lambda run: self._record(moment, run, memory))
        if self.send is not None and moment.reports:
            self.send([*moment.reports.items()])

    def _record(self, moment: Moment, run: TrackedRun, memory: float) -> None:
        ledger, recording, executor = run.ledger, run.recording, run.group.executor
        measured, own = moment.columns.pop(run, {}), run.strategy.columns()
        row: dict[str, float] = {"step": run.done, "examples": run.examples}
        of_run = executor.name, run.max_steps, run.group.minibatch_size
        if run.starts:
            row |= {"payload_bytes": 0, "wire_bytes": 0, "seconds": 0}
            row |= {"validation_seconds": run.measuring.seconds, **measured, **own}
            report = StepReport(row, None, [], *of_run, preparing=executor.preparing)
        else:
            row |= {"tokens": run.tokens or math.nan, "train_loss": _mean_of_known(run.node_losses), "lr": run.lr}
            row |= {"payload_bytes": ledger.payload_bytes, "wire_bytes": ledger.wire_bytes, "seconds": run.seconds}
            row |= {"validation_seconds": run.measuring.seconds, "memory_bytes": memory, **own, **measured}
            events, recording.known_events = ledger[recording.known_events :], len(ledger)
            report = StepReport(row, run.losses_of_all, events, *of_run, executor.reason)
            recording.has_sent = bool(run.spec.callbacks) and report.has_sent
        report.segment = ledger.attendance[-1] if ledger.attendance else None
        recording.row = _of_first(run, row)
        moment.reports[run] = report if 0 in run.nodes else replace(report, row=recording.row)
        run.recorder(moment.reports[run])
        run.starts = False


class Amend:
    """Replaces values of a row by those that were measured after it was recorded; `send`: see `Record`."""

    def __init__(self, send: Send | None = None) -> None:
        self.send = send

    def __call__(self, moment: Moment) -> None:
        if moment.columns:
            amended: dict[TrackedRun, StepReport] = {}
            moment.each(lambda run: self._amend(moment, run, amended), [*moment.columns])
            if self.send is not None and amended:
                self.send([*amended.items()])

    def _amend(self, moment: Moment, run: TrackedRun, amended: dict[TrackedRun, StepReport]) -> None:
        recording = run.recording
        recording.row = {**recording.row, **moment.columns.pop(run)}
        report = replace(moment.reports[run], row=recording.row, events=[], segment=None, amends=True)
        amended[run] = replace(report, client_val=moment.client_val.pop(run, {}))
        run.recorder(amended[run])


def _of_first(run: TrackedRun, row: dict[str, float]) -> dict[str, float]:
    """Return the row of the first node's process, which callbacks and processes without nodes get."""
    if run.is_alone or not (run.spec.callbacks or run.presence.plan is not None):
        return row
    collectives, held = run.cluster.collectives, run.cluster.replicas.num_held
    values = torch.tensor([list(row.values())], dtype=torch.float64).expand(held, -1)
    with collectives.unbilled():
        return dict(zip(row, collectives.broadcast(values, label="row").tolist(), strict=True))


def _mean_of_known(losses: Sequence[float]) -> float:
    """Return the mean of the losses that are not NaN, those of nodes that took a step; NaN if no node took one."""
    total = sum(losses)
    if math.isnan(total):
        known = [loss for loss in losses if loss == loss]
        return sum(known) / len(known) if known else total
    return total / len(losses)
