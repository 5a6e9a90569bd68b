"""Check that runs can be saved, and save them."""

from __future__ import annotations

from vsim.arguments import naming
from vsim.core.group import Guard
from vsim.training import resume
from vsim.training.acts.moment import Moment
from vsim.training.tracked import TrackedRun


class CheckWeights:
    """Checks the weights of runs that are over, which no later loss would reveal."""

    def __call__(self, moment: Moment) -> None:
        moment.each(TrackedRun.check_weights, moment.over)


class CheckDeclared:
    """After each of a run's first two steps here, checks that nothing undeclared has changed, if its state may move."""

    def __init__(self, several: bool) -> None:
        self.several, self.is_done = several, False

    def __call__(self, moment: Moment) -> None:
        if self.is_done:
            return
        for run in (trying := [run for run in moment.training if run.trial_steps > 0]):
            run.trial_steps -= 1
        moment.each(self._check, [run for run in trying if run.is_to_be_moved])
        runs = [run for group in moment.groups for run in group.runs]
        self.is_done = all(run.trial_steps == 0 for run in runs if run.is_running)

    def _check(self, run: TrackedRun) -> None:
        with naming(run.spec.label if self.several else ""):
            resume.check_declared(run)


class Save:
    """Saves runs whose checkpoint is due, and all runs where training stops."""

    def __call__(self, moment: Moment) -> None:
        for run in moment.reached:
            if run.spec.saving is None:
                moment.saved = False
            elif run.trains:
                with Guard(run.group, run):
                    moment.saved &= resume.save_if_due(run, moment.stops)
