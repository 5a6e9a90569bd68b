"""Keep how runs ended: their models in memory and, for a comparison, the rest in end.json or another process."""

from __future__ import annotations

import warnings
from typing import Any

from vsim.core.failing import Guard
from vsim.runs.acts.moment import Moment, Send
from vsim.runs.outcome import Outcome
from vsim.runs.race_folder import write_end
from vsim.runs.tracked import TrackedRun


class Conclude:
    """Keeps the models of complete runs, and notes how runs ended.

    Args:
        writes: whether this process writes files.
        send: sends an `Outcome` of a run to the process that shows the runs; None: this process does.
    """

    def __init__(self, writes: bool = False, send: Send | None = None) -> None:
        self.writes, self.send = writes, send
        self._sent: dict[TrackedRun, tuple[Any, ...]] = {}

    def __call__(self, moment: Moment, last: bool = False) -> None:
        """Conclude all runs.

        Args:
            last: whether training is over; after an error, other processes may not make this call.
        """
        for group in moment.groups:
            for run in group.runs:
                self._conclude(run, last)

    def _conclude(self, run: TrackedRun, last: bool) -> None:
        outcome = None
        if run.concluded and run.model is None and (run.is_alone or not last):
            run.finished_at = run.done if run.done < run.steps else None
            run.model = run.mean_model()
            if self.writes or self.send is not None:  # otherwise the run stays with its trainer
                with Guard(run.group, run):  # a strategy's own global weights may be wrong
                    run.keep_client_models()
            outcome = Outcome.of(run.model, run.spec.callbacks, run.client_models) if self.send else None
        if self.send is not None:
            self.tell(run, outcome)
        if self.writes and run.has_outcome and run.folder is not None and not (run.folder / "end.json").exists():
            try:
                write_end(run)
            except OSError as error:  # for instance, the disk is full; the record is still in memory
                warnings.warn(f"how {run.spec.label} ended is not saved: {error}", UserWarning, stacklevel=2)

    def tell(self, run: TrackedRun, outcome: Outcome | None = None) -> None:
        """Send an outcome. If none is given, send how the run ended, unless that was sent before."""
        known = run.error, run.stopped_at, run.finished_at
        if self.send is not None and (outcome is not None or known != self._sent.get(run, (None, None, None))):
            self._sent[run] = known
            outcome = outcome or Outcome()
            outcome.error, outcome.stopped_at, outcome.finished_at = known
            self.send([(run, outcome)])
