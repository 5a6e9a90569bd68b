"""Stop the runs that others have beaten."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np

from vsim.runs.acts.moment import Moment
from vsim.runs.tracked import TrackedRun

Keep = Callable[[int, Mapping[str, float]], Collection[str]]


class Halve:
    """At a rung, once all unfinished runs have reached it, stops the runs that do not continue.

    Args:
        runs: all runs of the comparison, also those that ended before a resume: the decision must not depend on it.
        rungs: the steps after which `keep` decides.
        keep: called as keep(step, scores), scores being name → mean loss over the seeds (inf after a failure); returns
            the names whose runs continue. None: all runs do.
        agreed: returns the first process's value in every process.
    """

    def __init__(
        self,
        runs: Sequence[TrackedRun] = (),
        rungs: Collection[int] = (),
        keep: Keep | None = None,
        agreed: Callable[[Collection[str]], Collection[str]] = lambda names: names,
    ) -> None:
        self.runs, self.rungs, self.keep, self.agreed = runs, rungs, keep, agreed

    def __call__(self, moment: Moment) -> None:
        if self.keep is None:
            return
        unfinished = [run for group in moment.groups for run in group.running]
        step = min((run.done for run in unfinished), default=0)
        if step not in self.rungs:
            return
        scores: dict[str, list[float]] = {}
        for run in self.runs:
            if run.stopped_at is None or run.stopped_at >= step:
                scores.setdefault(run.name, []).append(_score(run, step))
        kept = self.agreed(self.keep(step, {name: statistics.fmean(own) for name, own in scores.items()}))
        for run in unfinished:
            if run.name not in kept:
                run.stopped_at = run.done


def _score(run: TrackedRun, step: int) -> float:
    """Return the last validation loss up to a step, or else the mean training loss of the last tenth of steps.

    Infinite if the run had failed by then.
    """
    if run.error is not None and (run.diverged_at or run.recorded) <= step:
        return math.inf
    known = run.history["step"] <= step
    validated = run.history["global_loss"][known]
    if len(validated := validated[~np.isnan(validated)]):
        return float(validated[-1])
    losses = run.history["train_loss"][known]
    losses = losses[~np.isnan(losses)]
    return float(losses[-max(1, len(losses) // 10) :].mean())
