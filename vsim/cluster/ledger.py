"""What was communicated: every collective call as an event with its bytes."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vsim.extras import extra

if TYPE_CHECKING:
    import pandas as pd


class Event(NamedTuple):
    """One call of a collective by the whole cluster.

    Attributes:
        step: the optimizer step it belongs to; the first step is 1.
        collective: "all_reduce", "all_gather", "broadcast", …
        label: what was communicated, and by whom.
        payload_bytes: what one node hands to the collective.
        wire_bytes: what that node then transmits under the collective's algorithm. Where nodes differ (groups of
            unequal size, the source of a broadcast), both are those of the busiest node.
        total_wire_bytes: what all nodes transmit together.
        group_sizes: the number of nodes in every group that took part.
    """

    step: int
    collective: str
    label: str
    payload_bytes: float
    wire_bytes: float
    total_wire_bytes: float
    group_sizes: tuple[int, ...]


class Ledger(Sequence[Event]):
    """The events of one run, in order; a sequence of `Event`.

    Attributes:
        payload_bytes, wire_bytes: the totals so far, per node.
        total_wire_bytes: the total so far over all nodes.
    """

    def __init__(self) -> None:
        self._events: list[Event] = []
        self.payload_bytes = 0.0
        self.wire_bytes = 0.0
        self.total_wire_bytes = 0.0

    def record(self, event: Event) -> None:
        """Append an event. Only the collectives call this: that is what makes the count complete."""
        self._events.append(event)
        self.payload_bytes += event.payload_bytes
        self.wire_bytes += event.wire_bytes
        self.total_wire_bytes += event.total_wire_bytes

    def continue_from(self, other: Ledger) -> None:
        """Begin with the events of another record."""
        for event in other:
            self.record(event)

    def __len__(self) -> int:
        return len(self._events)

    def __iter__(self) -> Iterator[Event]:
        return iter(self._events)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        return self._events[index]

    def by_label(self) -> dict[str, float]:
        """Return label → payload bytes per node over the run."""
        totals: dict[str, float] = {}
        for event in self._events:
            totals[event.label] = totals.get(event.label, 0.0) + event.payload_bytes
        return totals

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with one row an event and the columns of `Event`. Needs pandas."""
        return extra("pandas", "to_pandas()", "pandas", "notebook").DataFrame(self._events, columns=Event._fields)

    def __repr__(self) -> str:
        return (
            f"Ledger({len(self)} events, payload {self.payload_bytes / 1e6:.3f} MB a node, "
            f"wire {self.wire_bytes / 1e6:.3f} MB a node)"
        )
