"""End training after the step in which it was asked for."""

from __future__ import annotations

from vsim.runs.acts.moment import Moment
from vsim.runs.interrupt import Interrupt, Interrupted


class Ask:
    """Decides once, before runs are saved, whether training ends here: later requests wait for the next step."""

    def __init__(self, interrupt: Interrupt) -> None:
        self.interrupt = interrupt

    def __call__(self, moment: Moment) -> None:
        if moment.groups[0].runs[0].is_alone:  # otherwise processes have exchanged the requests in the step
            moment.stops |= self.interrupt.requested


class Stop:
    """Raises `Interrupted` where training ends."""

    def __call__(self, moment: Moment) -> None:
        if moment.stops:
            raise Interrupted(moment.number, moment.groups[0].runs[0].spec.saving if moment.saved else None)
