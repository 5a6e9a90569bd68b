"""Show the progress of runs that train together."""

from __future__ import annotations

from vsim.runs.acts.moment import Moment
from vsim.runs.display import Display


class Show:
    """Tells a display of the step, and updates it; None: nothing is shown."""

    def __init__(self, display: Display | None = None) -> None:
        self.display = display

    def __call__(self, moment: Moment, last: bool = False) -> None:
        if self.display is not None:
            for run, report in moment.reports.items():
                self.display.hear(run, report)
            self.display.show(last)
