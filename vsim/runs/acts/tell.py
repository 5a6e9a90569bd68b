"""Call the user's callbacks: at the start, after each step, and at the end."""

from __future__ import annotations

from collections.abc import MutableMapping
from contextlib import nullcontext

import torch
from torch import nn

from vsim.core.failing import Guard
from vsim.runs.acts.moment import Moment
from vsim.runs.callbacks import notify, notify_row, watching
from vsim.runs.interrupt import Interrupt
from vsim.runs.tracked import TrackedRun
from vsim.runs.view import RunView


class Tell:
    """The base of the three. A Ctrl-C that a callback lets through is a request to stop after the step.

    Args:
        interrupt: holds the request.
        values: model that callbacks see → checksums of its parameters; see `vsim.runs.callbacks.watching`.
    """

    def __init__(self, interrupt: Interrupt, values: MutableMapping[nn.Module, dict[str, int]]) -> None:
        self.interrupt, self.values = interrupt, values

    def __call__(self, moment: Moment) -> None:
        for run in moment.reached:
            if run.spec.callbacks and run.trains:
                with Guard(run.group, run):
                    self.tell(run)

    def tell(self, run: TrackedRun) -> None:
        """Call a run's callbacks."""
        raise NotImplementedError


class OnStart(Tell):
    """Calls `on_start`."""

    def tell(self, run: TrackedRun) -> None:
        with watching(run, self.values):
            for callback in run.spec.callbacks:
                with self.interrupt.requested_inside():
                    notify(callback, "on_start", RunView(run))
        _agree_on_the_last_step(run)


class OnStep(Tell):
    """Calls `on_step`, `on_sync` if nodes have communicated, and `on_evaluation` if the row has a validation."""

    def tell(self, run: TrackedRun) -> None:
        with watching(run, self.values):
            for callback in run.spec.callbacks:
                with self.interrupt.requested_inside():
                    notify_row([callback], RunView(run), run.recording.has_sent)
        _agree_on_the_last_step(run)


def _agree_on_the_last_step(run: TrackedRun) -> None:
    """With several processes, take the earliest last step: a callback may have stopped the run in one of them only."""
    if run.is_alone:
        return
    collectives, held = run.cluster.collectives, run.cluster.replicas.num_held
    with collectives.unbilled():
        last = collectives.all_gather(torch.full((held, 1), run.max_steps), label="last step")
    run.max_steps = int(last.min())


class OnEnd(Tell):
    """Calls `on_end` of runs that are over, which are then concluded."""

    def __call__(self, moment: Moment) -> None:
        moment.each(self.tell, moment.over)

    def tell(self, run: TrackedRun) -> None:
        with watching(run, self.values):
            for callback in run.spec.callbacks:
                # With several processes, an interrupt raises: a request could no longer reach the other processes.
                with self.interrupt.requested_inside() if run.is_alone else nullcontext():
                    notify(callback, "on_end", RunView(run))
        run.concluded = True
