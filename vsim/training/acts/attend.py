"""Let nodes leave and join for the step that follows."""

from __future__ import annotations

from vsim.training.acts.moment import Moment
from vsim.training.attendance import attend


class Attend:
    """Switches every run to its plan's nodes in the next step; nothing after the last step."""

    def __call__(self, moment: Moment) -> None:
        runs = [run for group in moment.groups for run in group.runs if run.trains]
        if running := [run.done for run in runs if run.is_running]:
            attend(moment.groups, runs, min(running) + 1)
