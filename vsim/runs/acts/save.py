"""Check that runs can be saved, and save them."""

from __future__ import annotations

from vsim.arguments import naming
from vsim.core.failing import Guard
from vsim.runs import saving
from vsim.runs.acts.moment import Moment
from vsim.runs.tracked import TrackedRun


class CheckWeights:
    """Checks the weights of runs that are over, which no later loss would reveal."""

    def __call__(self, moment: Moment) -> None:
        moment.each(TrackedRun.check_weights, moment.over)


class CheckSavable:
    """Before training, notes what strategies do not declare, and raises if state of a run cannot be saved."""

    def __call__(self, moment: Moment) -> None:
        for run in moment.reached:
            with naming(run.spec.label if run.group.several else ""):
                saving.begin(run)


class CheckDeclared:
    """After each of a run's first two steps here, checks that nothing undeclared has changed, if its state may move."""

    def __call__(self, moment: Moment) -> None:
        for group in moment.groups:
            if group.rng_check_steps > 0:
                reached = [run for run in moment.training if run.group is group]
                group.rng_check_steps -= bool(reached)
                moment.each(self._check, [run for run in reached if run.must_be_serializable])

    def _check(self, run: TrackedRun) -> None:
        with naming(run.spec.label if run.group.several else ""):
            saving.check_declared(run)


class Save:
    """Saves runs whose checkpoint is due, and all runs where training stops."""

    def __call__(self, moment: Moment) -> None:
        for run in moment.reached:
            if run.spec.saving is None:
                moment.saved = False
            elif run.trains:
                with Guard(run.group, run):
                    moment.saved &= saving.save_if_due(run, moment.stops)
