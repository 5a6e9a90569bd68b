"""Check that runs can be saved, and save them."""

from __future__ import annotations

from vsim.arguments import naming
from vsim.training import resume
from vsim.training.acts.moment import Moment
from vsim.training.tracked import TrackedRun


class CheckWeights:
    """Checks the weights of runs that are over, which no later loss would reveal."""

    def __call__(self, moment: Moment) -> None:
        moment.each(TrackedRun.check_weights, lambda run: run.is_over)


class CheckDeclared:
    """After each of a run's first two steps here, checks that nothing undeclared has changed, if its state may move."""

    def __init__(self, several: bool) -> None:
        self.several = several

    def __call__(self, moment: Moment) -> None:
        for run in moment.due():
            run.trial_steps -= 1
        moment.each(self._check, lambda run: run.trial_steps in (0, 1) and run.is_to_be_moved)

    def _check(self, run: TrackedRun) -> None:
        with naming(run.spec.label if self.several else ""):
            resume.check_declared(run)


class Save:
    """Saves runs whose checkpoint is due, and all runs where training stops."""

    def __call__(self, moment: Moment) -> None:
        moment.saved = all(run.spec.saving is not None for run in moment.due())
        moment.each(lambda run: self._save(moment, run), lambda run: run.spec.saving is not None)

    def _save(self, moment: Moment, run: TrackedRun) -> None:
        moment.saved &= resume.save_if_due(run, moment.stops)
