"""What runs that train together do as one: show their progress, and stop those that the others have beaten."""

from __future__ import annotations

from collections.abc import Callable, Collection

from vsim.training.acts.moment import Moment
from vsim.training.tracked import TrackedRun


class Show:
    """Shows the progress of all runs.

    Args:
        watch: reads what the runs have recorded; None: nothing is shown.
    """

    def __init__(self, watch: Callable[[], None] | None) -> None:
        self.watch = watch

    def __call__(self, moment: Moment) -> None:
        if self.watch is not None:
            self.watch()


class Halve:
    """At a rung, stops the runs that do not continue.

    Args:
        stopping: returns the runs to stop now; None: no runs are.
    """

    def __init__(self, stopping: Callable[[], Collection[TrackedRun]] | None) -> None:
        self.stopping = stopping

    def __call__(self, moment: Moment) -> None:
        for run in () if self.stopping is None else self.stopping():
            run.stopped = True
