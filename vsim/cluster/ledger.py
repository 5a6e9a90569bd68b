"""The ledger records every collective call as an event; wire bytes and time are derived from the events."""

from __future__ import annotations

import copy
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import countable, real_number, whole_number
from vsim.cluster.plan import BYTES_OF_A_CLIENT, Segment
from vsim.cluster.repeats import Repeat, unrolled
from vsim.cluster.traffic import traffic

if TYPE_CHECKING:
    import pandas as pd

Groups = tuple[Sequence[int], ...]
BYTES_OF_A_STEP = 256  # lower bound of the memory for the record of a step


@dataclass
class Position:
    """The current step and moment of a run, set by the run and read by its collectives and strategy.

    Attributes:
        step: the number of the current step, from 1; between two steps, the number of completed steps.
        moment: see `Event`; "end" once the step is completed.
        has_communicated: whether the strategy's modules have communicated the weights in this step.
    """

    step: int = 0
    moment: str = "end"
    has_communicated: bool = False

    def begin(self, step: int, moment: str = "gradients") -> None:
        """Go to a step."""
        self.step, self.moment, self.has_communicated = step, moment, False


class Event(NamedTuple):
    """One call of a collective. Bytes on the wire and time are derived from these facts.

    Attributes:
        step: the step in which the nodes hand in their tensors; the first step is 1.
        due: the step at which the result is taken, at the same moment; `step` itself if the nodes wait for the result.
        moment: "gradients", before the optimizer step; "weights", after it; or "start", before the step computes.
        collective: "all_reduce", "all_gather", "broadcast", …; see `vsim.cluster.traffic`.
        label: names the content and the sender of the communication.
        payload_bytes: bytes that one node hands in.
        groups: the groups of nodes that took part, separately and in parallel. In a broadcast, the first node of each
            group is the source.
        joined: whether the event is part of the previous event's message, and pays no latency.
        server: whether a server carries out the collective, as among clients: each sends its row once, and the server
            sends the result. Bytes on the wire are otherwise those of a ring.
    """

    step: int
    due: int
    moment: str
    collective: str
    label: str
    payload_bytes: float
    groups: Groups
    joined: bool = False
    server: bool = False

    @property
    def wire_bytes(self) -> float:
        """Bytes that the busiest node transmits."""
        return self._wire()[0]

    @property
    def total_wire_bytes(self) -> float:
        """Bytes that all nodes transmit together."""
        return self._wire()[1]

    @property
    def server_wire_bytes(self) -> float:
        """Bytes that the server transmits. A server is not a node."""
        return self._wire()[2]

    @property
    def total_payload_bytes(self) -> float:
        """Bytes that all nodes hand in together."""
        return self.payload_bytes * sum(
            float(traffic(self.collective, len(g), self.server).handed.sum()) for g in self.groups
        )

    def _wire(self) -> tuple[float, float, float]:
        return _wire_bytes(self.collective, _sizes(self.groups), self.payload_bytes, self.server)


@lru_cache(maxsize=64)
def _sizes(groups: Groups) -> tuple[tuple[int, int], ...]:
    """Return (size, number of groups of this size) for all sizes."""
    return tuple(Counter(map(len, groups)).items())


@lru_cache(maxsize=4096)
def _wire_bytes(
    collective: str, sizes: tuple[tuple[int, int], ...], payload_bytes: float, through_server: bool
) -> tuple[float, float, float]:
    """Return the bytes that the busiest node, all nodes and the server transmit in groups of these sizes."""
    groups = [(traffic(collective, n, through_server), count) for n, count in sizes]
    payload = Fraction(payload_bytes)
    busiest = max((of_each.busiest for of_each, _ in groups), default=Fraction(0))
    total = sum(of_each.total * count for of_each, count in groups)
    server = sum(of_each.server * count for of_each, count in groups)
    return float(busiest * payload), float(total * payload), float(server * payload)


# Properties of `Event` that are columns of `Ledger.to_pandas`.
_DERIVED = ("wire_bytes", "total_wire_bytes", "server_wire_bytes")


class _Kept(tuple[Sequence[int], ...]):
    """Groups that a ledger keeps, whose hash is computed once."""

    _hash: int

    def __hash__(self) -> int:
        if "_hash" not in vars(self):
            self._hash = super().__hash__()
        return self._hash

    def __copy__(self) -> _Kept:  # a ledger asks whether groups are this object
        return self


@lru_cache(maxsize=64)
def _own_shares(collective: str, groups: Groups, num_nodes: int, through_server: bool) -> NDArray[np.float64]:
    """Return (2, K): the payloads that each node hands in, and that it transmits, in a collective of these groups."""
    own = np.zeros((2, num_nodes))
    for n in set(map(len, groups)):
        nodes = np.array([g for g in groups if len(g) == n])  # (groups, n)
        share = traffic(collective, n, through_server)
        each = [np.tile(payloads.astype(np.float64), len(nodes)) for payloads in (share.handed, share.sent)]
        own += [np.bincount(nodes.flatten(), shares, num_nodes) for shares in each]
    return own


class Ledger(Sequence[Event]):
    """The events of one run, in order; a sequence of `Event`.

    Wire bytes assume ring algorithms among nodes, and a server among clients.

    Attributes:
        num_nodes: K, or the number of clients in a population.
        of_clients: whether the nodes of a step are a cohort of a larger population of clients.
        server: the `server` of events from now on: `of_clients`, unless a file of version 0.2.0, which has the bytes of
            rings among clients, is continued.
        position: the current position of the recorded run.
        attendance: the segments of steps in which the same nodes took part; empty if all nodes took part in all steps.
        steps: the number of recorded steps, including steps without an event.
        clock: the time settings that influenced the results, as plain data: the compute that decided which nodes were
            late, or the compute and network of an asynchronous run; None if results do not depend on time.
        seconds: for every step of an asynchronous run, two numbers in seconds: the time when the step was done, and the
            nodes' mean compute time until then.
        repeats: events that repeat, each stored once, in a run that was priced; see `vsim.cluster.repeats`.
        doubted: labels of all-reduces whose payload got a warning in this run.
        total_wire_bytes, server_wire_bytes: bytes transmitted so far by all nodes, and by the server (not a node).
    """

    def __init__(self, num_nodes: int, of_clients: bool = False) -> None:
        self.num_nodes = num_nodes
        self.of_clients = self.server = of_clients
        self.position = Position()
        self.attendance: list[Segment] = []
        self.everyone: Groups = _Kept([range(num_nodes)])
        # Equal groups are one object, stored and priced once.
        self._groups: dict[Groups, Groups] = {self.everyone: self.everyone}
        self.steps = 0
        self.clock: dict[str, Any] | None = None
        self.seconds: list[tuple[float, float]] = []
        self.total_wire_bytes = self.server_wire_bytes = 0.0
        self.doubted: set[str] = set()
        self._events: list[Event] = []
        self.repeats: list[Repeat] = []
        # Payload and wire bytes: the part equal on all nodes (2,), the additional bytes of each node (2, K), and the
        # maximum of these (2,). Most events concern all nodes alike, and must be recorded without a sum over K nodes.
        self._alike = [0.0, 0.0]
        self._own = np.zeros((2, 1))
        self._most = [0.0, 0.0]

    def record(self, event: Event) -> None:
        """Append an event. Called by the collectives alone, once per call, so that the count is complete."""
        if (groups := self._groups.get(event.groups)) is None:
            groups = _Kept(event.groups)
            self._groups[groups] = groups
        event = event._replace(groups=groups)
        self._count(event, 1)
        self._events.append(event)

    def _count(self, event: Event, times: int) -> None:
        """Add the bytes of an event that happened so many times."""
        payload, (wire, total, server) = times * event.payload_bytes, (times * size for size in event._wire())
        of_all = traffic(event.collective, self.num_nodes, event.server)
        if event.groups is self.everyone and of_all.is_even:
            self._alike = [self._alike[0] + payload * float(of_all.handed[0]), self._alike[1] + wire]
        else:
            shares = _own_shares(event.collective, event.groups, self.num_nodes, event.server)
            self._own = self._own + payload * shares
            self._most = self._own.max(1).tolist()
        self.total_wire_bytes += total
        self.server_wire_bytes += server

    @property
    def last_due(self) -> int:
        """The last step at which a message is due; 0 if there is none."""
        copied = (
            event.due + own.times(event) * own.period
            for own in self.repeats
            for event in self._events[own.first : own.stop]
        )
        return max(*(event.due for event in self._events), *copied, 0, 0)

    def repeat(self, first: int, begin: int, period: int, last: int) -> None:
        """Record that the events from place `first` on repeat up to step `last`, without a copy of each.

        Args:
            begin, period: the events are those of the steps begin + 1 to begin + period.
        """
        own = Repeat.of(self._events, first, begin, period, last)
        for event in self._events[first:]:
            if times := own.times(event):
                self._count(event, times)
        self.repeats.append(own)

    @property
    def recorded(self) -> Sequence[Event]:
        """The events without the copies of `repeats`."""
        return self._events

    def attend(self, segment: Segment) -> None:
        """Record which nodes take part in a segment of steps, unless the segment is recorded already."""
        if not self.attendance or self.attendance[-1].first < segment.first:
            self.attendance.append(segment)

    @property
    def payload_bytes(self) -> float:
        """Bytes handed in so far by the node that has handed in the most."""
        return self._alike[0] + self._most[0]

    @property
    def wire_bytes(self) -> float:
        """Bytes transmitted so far by the node that has transmitted the most."""
        return self._alike[1] + self._most[1]

    @property
    def node_payload_bytes(self) -> NDArray[np.float64]:
        """(K,) the bytes that each node has handed in so far."""
        return np.full(self.num_nodes, self._alike[0]) + self._own[0]

    @property
    def node_wire_bytes(self) -> NDArray[np.float64]:
        """(K,) the bytes that each node has transmitted so far."""
        return np.full(self.num_nodes, self._alike[1]) + self._own[1]

    def continue_from(self, other: Ledger) -> None:
        """Begin with the record of another ledger, but keep this ledger's position."""
        record = {name: copy.copy(value) for name, value in vars(other).items()}
        vars(self).update(record, position=self.position)

    def as_plain(self) -> dict[str, Any]:
        """Return the record as dicts, lists, numbers and text, which JSON can hold.

        Most events repeat from step to step, and most concern all nodes. An event is therefore stored as its step, the
        step at which it is due, and its place in "kinds"; null stands for all nodes.
        """
        kinds: dict[str, int] = {}
        events = []
        for event in self:
            groups = None if event.groups == self.everyone else [list(map(int, group)) for group in event.groups]
            kind = json.dumps([*event[2:6], groups, *([True] if event.joined else [])])
            events.append([event.step, event.due, kinds.setdefault(kind, len(kinds))])
        kinds_of = [json.loads(kind) for kind in kinds]
        clocked = {} if self.clock is None else {"clock": self.clock, "seconds": self.seconds}
        attendance = {"attendance": self.attendance} if self.attendance else {}
        server = {"server": True} if self.server else {}
        return {"steps": self.steps, "events": events, "kinds": kinds_of, **clocked, **attendance, **server}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], num_nodes: int, of_clients: bool = False) -> Ledger:
        """Restore the ledger of K nodes, or of K clients, from the output of `as_plain`.

        Raises:
            TypeError, ValueError: a number has a wrong type or range, or counts more items than memory holds.
        """
        ledger = cls(countable("num_nodes", num_nodes, "nodes", BYTES_OF_A_CLIENT), of_clients)
        ledger.server = plain.get("server") is True
        ledger.steps = countable("steps", plain["steps"], "steps", BYTES_OF_A_STEP, at_least=0)
        kinds = []
        for moment, collective, label, payload, groups, *joined in plain["kinds"]:
            those = ledger.everyone if groups is None else tuple(map(tuple, groups))
            kinds.append(event := Event(0, 0, moment, collective, label, payload, those, bool(joined), ledger.server))
            real_number("payload_bytes", event.payload_bytes, at_least=0)
            if groups is not None and not all(0 <= node < num_nodes for group in those for node in group):
                raise ValueError(f"a group of {event.label!r} has other nodes than 0 to {num_nodes - 1}")
        latest = max((max(step, due) for step, due, _ in plain["events"]), default=0)
        countable("the step of an event", latest, "steps", BYTES_OF_A_STEP, at_least=0)
        for step, due, kind in plain["events"]:
            for at in (step, due):
                whole_number("the step of an event", at, at_least=0)
            ledger.record(kinds[kind]._replace(step=step, due=due))
        ledger.clock = plain.get("clock")
        ledger.seconds = [(now, computed) for now, computed in plain.get("seconds", [])]
        ledger.attendance = [
            Segment(first, last, tuple(nodes), tuple(late), seconds, tuple(local))
            for first, last, nodes, late, seconds, local in plain.get("attendance", ())
        ]
        return ledger

    def __len__(self) -> int:
        return len(self._events) + sum(own.copies for own in self.repeats)

    def __iter__(self) -> Iterator[Event]:
        return unrolled(self._events, self.repeats) if self.repeats else iter(self._events)

    def __getitem__(self, index):  # type: ignore[no-untyped-def]
        if not self.repeats:
            return self._events[index]
        if isinstance(index, slice):
            return list(self)[index]
        place = range(len(self))[index]
        for own in self.repeats:
            if place < own.stop:
                break
            if place < own.stop + own.copies:
                return own.copy(self._events, place - own.stop)
            place -= own.copies
        return self._events[place]

    def by_label(self) -> dict[str, float]:
        """Return label → payload bytes over the run for a node that takes part in every event."""
        totals: dict[str, float] = {}
        for event in self._events:
            totals[event.label] = totals.get(event.label, 0.0) + event.payload_bytes
        for own in self.repeats:
            for event in self._events[own.first : own.stop]:
                totals[event.label] += own.times(event) * event.payload_bytes
        return totals

    def to_pandas(self) -> pd.DataFrame:
        """Return a DataFrame with one row per event: the columns of `Event`, and derived columns."""
        import pandas as pd

        rows = [[*event, *(getattr(event, name) for name in _DERIVED)] for event in self]
        return pd.DataFrame(rows, columns=[*Event._fields, *_DERIVED])

    def __repr__(self) -> str:
        return (
            f"Ledger({len(self)} events, payload {self.payload_bytes / 1e6:.3f} MB a node, "
            f"wire {self.wire_bytes / 1e6:.3f} MB a node)"
        )
