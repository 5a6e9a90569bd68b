"""Events that repeat from period to period, stored once: the ledger of a long run that was priced, not trained."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple


class Repeat(NamedTuple):
    """Copies of the events `block` of a ledger, after their own steps: those of every `period` steps, up to a step.

    Attributes:
        first, stop: the places of the block among the recorded events; the copies follow the event before `stop`.
        begin: the number of the step before the block's first step.
        period: the number of the block's steps. last: the last step of the copies, which may be within a period.
        copies: the number of copied events.
    """

    first: int
    stop: int
    begin: int
    period: int
    last: int
    copies: int

    @classmethod
    def of(cls, events: Sequence[Any], first: int, begin: int, period: int, last: int) -> Repeat:
        """Return the copies of events[first:], those of the steps begin + 1 to begin + period, up to step `last`."""
        whole, rest = divmod(last - begin - period, period)
        within = sum(event.step - begin <= rest for event in events[first:])
        return cls(first, len(events), begin, period, last, whole * (len(events) - first) + within)

    def times(self, event: Any) -> int:
        """Return how often an event of the block is copied."""
        return (self.last - event.step) // self.period

    def copy(self, events: Sequence[Any], number: int) -> Any:
        """Return copied event `number`, from 0."""
        periods, place = divmod(number, self.stop - self.first)
        event, later = events[self.first + place], (1 + periods) * self.period
        return event._replace(step=event.step + later, due=event.due + later)


def unrolled(events: Sequence[Any], repeats: Sequence[Repeat]) -> Iterator[Any]:
    """Yield the recorded events and all copies, in the order of the steps."""
    place = 0
    for one in repeats:
        yield from events[place : one.stop]
        yield from (one.copy(events, number) for number in range(one.copies))
        place = one.stop
    yield from events[place:]
