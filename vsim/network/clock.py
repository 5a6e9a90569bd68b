"""The lockstep clock: every node computes, sends over its line and waits, event by event of the ledger.

A row of times has one entry while all nodes are alike, and K entries once they differ. Thus an event of nodes that are
alike is priced as fast for ten thousand as for two. N alternative networks are priced in one pass, with a row each.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from numpy.typing import NDArray

from vsim.network.compute import Compute
from vsim.network.links import Crowd, Network

Floats = NDArray[np.float64]
MOMENTS = ("start", "gradients", "weights")
# Steps without communication are computed together, in arrays of at most this many numbers.
_BLOCK = 1 << 20
# Times that differ by this share of the time so far are equal, as rounding adds up to less.
_ROUNDING = 1e-12
# Steps that are simulated one by one, though they repeat, to the bits of a run that was trained.
MOST_TAKEN = 1000
# Periods of repeated messages after which times may be those of before.
_CYCLES = 16


@runtime_checkable
class Record(Protocol):
    """The messages of a run, event by event; see `Ledger` and `Event` of `vsim.cluster.ledger`."""

    num_nodes: int
    of_clients: bool
    steps: int
    clock: dict[str, Any] | None
    seconds: list[tuple[float, float]]

    def __iter__(self) -> Iterator[Any]: ...


class Span(NamedTuple):
    """A stretch of nodes' time: "compute", "wait", "late" (its work is dropped), "absent", or "send" for a busy line.

    Attributes:
        start, end: seconds, one entry for each of the `nodes` or one for all. nodes: (n,); None: all nodes.
    """

    what: str
    step: int
    start: Floats
    end: Floats
    nodes: NDArray[np.int64] | None = None
    label: str = ""

    def of_node(self, node: int) -> tuple[float, float] | None:
        """Return the start and end of a node's stretch; None if the span does not include the node."""
        if self.nodes is not None and node not in self.nodes:
            return None
        place = node if self.nodes is None else int(np.flatnonzero(self.nodes == node)[0])
        start, end = (float(times[place] if len(times) > 1 else times[0]) for times in (self.start, self.end))
        return start, end


def _messages(ledger: Record) -> Iterator[Any]:
    """Yield the events of a ledger, without copies of repeated ones; merge events that travel as one message."""
    message = None
    for event in getattr(ledger, "recorded", ledger):
        if event.joined and message is not None:
            payload, label = message.payload_bytes + event.payload_bytes, f"{message.label}, {event.label}"
            message = message._replace(payload_bytes=payload, label=label)
        else:
            if message is not None:
                yield message
            message = event
    if message is not None:
        yield message


class _Groups:
    """Those groups of an event in which data is sent."""

    def __init__(self, event: Any, network: Network, ledger: Record) -> None:
        groups, collective, num_nodes = event.groups, event.collective, ledger.num_nodes
        shares = network.collective == "server" and collective not in ("send", "push", "pull")
        # A client that is alone in its round sends to the server, too.
        alone = collective in ("push", "pull") or (shares and event.server)
        sending = [group for group in groups if len(group) > 1 or (alone and group)]
        self._sending, self.sizes = sending, np.array([len(group) for group in sending], dtype=np.int64)
        # The sizes of all groups, which use a server at the same time and so change each other's price.
        self.crowd: Crowd = tuple(sorted(Counter(self.sizes.tolist()).items())) if shares else ()
        places: dict[Hashable, int] = {}
        which = [places.setdefault(network.kind(group), len(places)) for group in sending]
        self.kinds, self.which = list(places), np.array(which, dtype=np.int64)  # the kinds, and each group's kind
        self.whole = len(sending) == 1 and len(sending[0]) == num_nodes  # one group of all nodes
        # Whether every node sends to one node and receives from one, over equal links.
        self.even = collective == "send" and len(sending) == num_nodes and len(places) == 1 and self.apart

    @cached_property
    def nodes(self) -> NDArray[np.int64]:
        """All nodes, group by group."""
        return np.concatenate([np.asarray(group, dtype=np.int64) for group in self._sending])

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """The index in `nodes` at which each group starts."""
        return np.concatenate([[0], self.sizes.cumsum()[:-1]])

    @cached_property
    def apart(self) -> bool:
        """Whether no two pairs of a "send" share a line: a sender's outward line or a receiver's inward line."""
        return all(len(set(ends.tolist())) == len(ends) for ends in self.nodes.reshape(-1, 2).T)


class _Planned(NamedTuple):
    """An event sent in `parts` messages; each message takes `prices[i]` (N,) seconds in groups of kind i."""

    event: Any
    groups: _Groups
    parts: int
    prices: list[Floats]


class Clock:
    """Simulates the steps of a run on a network, or on the N networks of a `Network.grid`.

    Attributes:
        seconds: (T + 1, N) the time when the last node was done with step t.
        compute: (T,) seconds computed in step t + 1. stalls: (T, N) seconds waited in step t + 1. Both are means over
            the nodes.
    """

    def __init__(
        self, ledger: Record, network: Network, compute: Compute, watch: Callable[[Span], None] | None = None
    ) -> None:
        network.check(ledger.num_nodes)
        self.num_nodes, self.settings = ledger.num_nodes, compute
        self.network = network.for_run(ledger.of_clients)
        self.computed = compute.steps(ledger.num_nodes)
        self.watch = watch
        self.steps, many = ledger.steps, network.alternatives
        self.now = np.zeros((many, 1))  # (N, 1) or (N, K): every node's time
        self.ready = self.now  # when a node could send the first layer of its next message
        self.busy = np.zeros((2, many, 1))  # time until which a node's line is busy, outwards and inwards
        self.server = np.zeros((2, many))  # time until which the server's line is busy, inwards and outwards
        self.seconds, self.stalls = np.zeros((self.steps + 1, many)), np.zeros((self.steps, many))
        self.compute = np.zeros(self.steps)
        self.events: dict[tuple[int, str], list[_Planned]] = {}
        self.due: dict[tuple[int, str], list[tuple[_Groups, Floats]]] = {}
        # Participation: first step → segment; present nodes (None: all); earliest end of the round (N,).
        self.attendance = {segment.first: segment for segment in getattr(ledger, "attendance", ())}
        self.present: NDArray[np.int64] | None = None
        self.late: NDArray[np.int64] = np.empty(0, dtype=np.int64)  # absent nodes that computed for nothing
        self.began_at = np.zeros(many)  # when the segment began
        self.until: Floats | None = None
        self.began, self.last = 0, 0
        self.repeats: Sequence[Any] = getattr(ledger, "repeats", ())
        self.later = 0  # steps from the recorded events to their copies that are sent now
        self.local: NDArray[np.int64] | None = None  # steps of each present node in the segment, after which it rests
        self._plan(ledger)

    def _plan(self, ledger: Record) -> None:
        """Compute the prices of all events, for each kind of group."""
        known: dict[tuple[int, str], tuple[object, _Groups]] = {}  # holds the groups, so that their ids stay unique
        prices: dict[tuple[str, Hashable, Crowd], dict[float, Floats]] = {}
        planned = []
        for event in _messages(ledger):
            key = id(event.groups), event.collective
            if key not in known:
                groups = _Groups(event, self.network, ledger)
                known[key] = event.groups, groups
            groups = known[key][1]
            if groups.kinds:
                parts = self.settings.parts(event.payload_bytes)
                planned.append((event, groups, parts, event.payload_bytes / parts))
                for kind in groups.kinds:
                    prices.setdefault((event.collective, kind, groups.crowd), {})[planned[-1][3]] = np.empty(0)
        for (collective, kind, crowd), own in prices.items():
            seconds = np.atleast_2d(self.network.seconds(collective, kind, list(own), crowd))
            own.update(zip(own, np.ascontiguousarray(seconds.T), strict=True))
        for event, groups, parts, size in planned:
            price = [prices[event.collective, kind, groups.crowd][size] for kind in groups.kinds]
            self.events.setdefault((event.step, event.moment), []).append(_Planned(event, groups, parts, price))

    def run(self, until: int | None = None) -> Clock:
        """Simulate all steps, or the steps up to `until`."""
        steps = self.steps if until is None else until
        issued = {one.event.step for own in self.events.values() for one in own}
        due = {one.event.due for own in self.events.values() for one in own}
        turns = {step for segment in self.attendance.values() for step in (segment.first, segment.last)}
        known = sorted(issued | due | turns)
        self._communicate(0, MOMENTS)  # before training
        self.stalls[:1] += self.now.mean(1)
        done = 0
        for repeat in self.repeats:
            first = repeat.begin + repeat.period
            done = self._steps(done, min(first, steps), known)
            done = self._periods(done, min(repeat.last, steps), repeat, known)
        self._steps(done, steps, sorted({*known, *(step for step, _ in self.due)}))
        self._show_absent(steps)
        self.stalls[-1:] += (self.seconds[steps][:, None] - self.now).mean(1)
        np.maximum(self.stalls, 0, out=self.stalls)  # rounding may leave numbers below 0
        if self.attendance:  # means over present nodes, below 0 while they are all behind an absent node
            self.stalls = np.diff(self.seconds, axis=0) - self.compute[:, None]
        if (share := self.settings.utilization) != 1:  # waits inside a node
            self.stalls += (1 - share) * self.compute[:, None]
            self.compute *= share
        return self

    def _steps(self, done: int, until: int, known: Sequence[int]) -> int:
        """Simulate the steps after `done` up to `until`, and return `until`; only `known` steps may have messages."""
        for step in [*known[bisect_right(known, done) : bisect_right(known, until)], until + 1]:
            while done < step - 1:
                done = self._quiet_steps(done, step - 1)
            if step <= until:
                self._attend(step)
                before = self.now
                self._communicate(step, MOMENTS[:1])
                own = self._compute(step)
                self._meet_deadline(step)
                self._communicate(step, MOMENTS[1:])
                self.stalls[done] += (self.now - before - own).mean(1)
                done = step
                self.seconds[done] = self.now.max(1)
        return done

    def _periods(self, done: int, last: int, repeat: Any, known: Sequence[int]) -> int:
        """Simulate the copies of a ledger's repeated events, which begin after step `done`, up to step `last`.

        Times follow from earlier times by maxima and sums. Once all of them are those of an earlier period, but for a
        common delay, all later periods therefore take as long.
        """
        period, begin = repeat.period, repeat.begin
        offsets = sorted({(step - begin - 1) % period + 1 for step in known if step > begin})
        block = [one.event.collective for (step, _), own in self.events.items() for one in own if step > begin]
        ways = [way for way, collective in enumerate(("push", "pull")) if collective in block]
        earlier: list[tuple[int, tuple[Any, ...], Floats]] = []
        repeats = self.watch is None and not self.settings.varies and not self.attendance
        while done < last:
            if repeats and done + max(period, MOST_TAKEN) < last:
                shape, state = self._state(done, ways)
                for before, its_shape, its in earlier:
                    if shape == its_shape and self._is_later(state, its):
                        done = self._copy_steps(before, done, last, (state - its)[:, :1])
                        repeats = False
                        break
                earlier = [(done, shape, state), *earlier[: min(_CYCLES, 4 * _BLOCK // state.size)]]
            self.later = done - begin
            done = self._steps(done, min(done + period, last), [done + offset for offset in offsets])
        self.later = 0
        return done

    def _state(self, done: int, ways: Sequence[int]) -> tuple[tuple[Any, ...], Floats]:
        """Return what the steps after `done` depend on: the shapes of times, and the times (N, …).

        Args:
            ways: ways of the server's line that are used: 0 inwards, 1 outwards.
        """
        # No message starts before its nodes are ready, so that it does not matter since when a line is free.
        lines = np.maximum(self.busy, self.ready.min(1)[:, None])
        waits = [
            (due - done, moment, id(groups), ends) for (due, moment), own in self.due.items() for groups, ends in own
        ]
        served = [self.server[way][:, None] for way in ways]
        times = [self.now, self.ready, *lines, *served, *(ends for *_, ends in waits)]
        return (*(one.shape for one in times), *(one[:3] for one in waits)), np.concatenate(times, 1)

    def _is_later(self, state: Floats, earlier: Floats) -> bool:
        """Whether the times (N, …) of a state are those of an earlier one, but for a common delay on each network."""
        delays = state - earlier
        return bool((np.ptp(delays, axis=1) <= _ROUNDING * self.now.max(1)).all())

    def _copy_steps(self, before: int, done: int, last: int, delay: Floats) -> int:
        """Copy the steps before + 1 to done as often as they fit before `last`, each time later by `delay` (N, 1)."""
        length = done - before
        times = (last - done) // length
        after = done + times * length
        moved = self.seconds[before + 1 : done + 1] + np.arange(1, times + 1)[:, None, None] * delay[:, 0]
        self.seconds[done + 1 : after + 1] = moved.reshape(after - done, -1)
        self.compute[done:after] = np.tile(self.compute[before:done], times)
        self.stalls[done:after] = np.tile(self.stalls[before:done], (times, 1))
        delay = times * delay
        self.now, self.ready = self.now + delay, self.ready + delay
        self.busy, self.server = self.busy + delay, self.server + delay[:, 0]
        self.due = {
            (due + after - done, moment): [(groups, ends + delay) for groups, ends in own]
            for (due, moment), own in self.due.items()
        }
        return after

    def _quiet_steps(self, done: int, until: int) -> int:
        """Simulate steps without communication, up to step `until`; return the number of the last completed step."""
        count = 1 if self.watch is not None else min(until - done, max(1, _BLOCK // (self.num_nodes * len(self.now))))
        own, mean = self._computed(done, count)
        ends = self.now + own.cumsum(0)[:, None]  # (count, N, 1 | K)
        self._show("compute", done + 1, self.now, ends[-1])
        self.now = self.ready = ends[-1]
        taken = slice(done, done + count)
        self.compute[taken], self.seconds[1:][taken] = mean, ends.max(2)
        return taken.stop

    def _compute(self, step: int) -> Floats:
        (own,), (self.compute[step - 1],) = self._computed(step - 1, 1)
        began, self.now = self.now, self.now + own
        layers = self.settings.layers
        self.ready = began + own * ((layers + 1) / (3 * layers - 1)) if layers > 1 else self.now
        self._show("compute", step, began, self.now)
        return own

    def _computed(self, done: int, count: int) -> tuple[Floats, Floats]:
        """Return the compute seconds of the next steps, (count, 1) or (count, K), and their mean over present nodes."""
        own = self.computed.next(count)
        if self.present is None:
            return own, own.mean(1)
        computed = np.broadcast_to(own, (count, self.num_nodes))[:, self.present]
        if self.local is not None:
            computed = computed * (np.arange(count)[:, None] + (done - self.began) < self.local)
        masked = np.zeros((count, self.num_nodes))
        masked[:, self.present] = computed
        return masked, computed.mean(1)

    def _attend(self, step: int) -> None:
        """Change the present nodes if this step begins a segment; joining nodes start at the latest node's time."""
        segment = self.attendance.get(step)
        if segment is None:
            return
        self._show_absent(step - 1)
        self._spread()
        nodes, began = np.array(segment.nodes), self.now.max(1)
        self.late, self.began_at = np.array(segment.late, dtype=np.int64), began
        joining = nodes if self.present is None else np.setdiff1d(nodes, self.present)
        self.now[:, joining] = np.maximum(self.now[:, joining], began[:, None] if step > 1 else 0.0)
        self.ready = self.now.copy()
        self.present, self.until = nodes, began + segment.seconds if segment.seconds else None
        self.began, self.last = step - 1, segment.last
        self.local = np.array(segment.steps) if segment.steps else None

    def _meet_deadline(self, step: int) -> None:
        """Wait for the round's deadline, if this step is the round's last."""
        if self.until is not None and step == self.last:
            assert self.present is not None
            self._spread()
            before = self.now.copy()
            self.now[:, self.present] = np.maximum(self.now[:, self.present], self.until[:, None])
            self.ready = self.now.copy()
            self._show("wait", step, before, self.now)

    def _communicate(self, step: int, moments: Sequence[str]) -> None:
        for moment in moments:
            for planned in self.events.get((step - self.later, moment), ()):
                ends = self._send(planned)
                if planned.event.due == planned.event.step:
                    self._wait(step, planned.groups, ends)
                else:
                    due = planned.event.due + self.later
                    self.due.setdefault((due, moment), []).append((planned.groups, ends))
            for groups, ends in self.due.pop((step, moment), ()):
                self._wait(step, groups, ends)

    def _send(self, planned: _Planned) -> Floats:
        """Put an event on the lines; return the time (N, groups) when each group of the event is done."""
        event, groups, parts, prices = planned
        ready = self._ready(parts)
        if groups.even and self.now.shape == ready.shape == self.busy.shape[1:] == (len(self.now), 1):
            first = np.maximum(ready, self.busy.max(0))  # all nodes are alike, and stay so
            price = prices[0][:, None]
            ends: Floats = np.maximum(first + parts * price, self.now + price)
            self.busy = np.stack([ends, ends])
            self._show("send", event.step, first, ends, label=event.label)
            return ends
        price = np.stack(prices, 1)[:, groups.which]
        if event.collective in ("push", "pull"):
            return self._through_server(event, groups, ready, price, parts)
        if groups.whole and event.collective != "send":
            first = np.maximum(ready.max(1), self.busy.max((0, 2)))[:, None]
            ends = np.maximum(first + parts * price, self.now.max(1, keepdims=True) + price)
            self.busy = np.stack([ends, ends])
            self._show("send", event.step, first, ends, label=event.label)
            return ends
        self._spread()
        ready = np.broadcast_to(ready, self.now.shape)
        if event.collective == "send" and not groups.apart:  # messages on one line queue in order
            alone = np.zeros(1, dtype=np.int64), np.full(1, 2)
            pairs = enumerate(groups.nodes.reshape(-1, 2))
            each = [self._in_parallel(event, pair, *alone, ready, price[:, i : i + 1], parts) for i, pair in pairs]
            return np.concatenate(each, 1)
        return self._in_parallel(event, groups.nodes, groups.starts, groups.sizes, ready, price, parts)

    def _ready(self, parts: int) -> Floats:
        """Return the time when the first of several parts can be sent."""
        layers = self.settings.layers
        if parts in (1, layers):
            return self.now if parts == 1 else self.ready
        return self.ready + (self.now - self.ready) * ((layers / parts - 1) / (layers - 1))

    def _in_parallel(
        self,
        event: Any,
        nodes: NDArray[np.int64],
        starts: NDArray[np.int64],
        sizes: NDArray[np.int64],
        ready: Floats,
        price: Floats,
        parts: int,
    ) -> Floats:
        out, into = self.busy
        pair = event.collective == "send"
        free = np.maximum(out, into)[:, nodes]
        if pair:  # the source's line outwards, the target's inwards
            free = np.stack([out[:, nodes[::2]], into[:, nodes[1::2]]], 2).reshape(len(free), -1)
        first = np.maximum.reduceat(np.maximum(ready[:, nodes], free), starts, axis=1)
        last = np.maximum.reduceat(self.now[:, nodes], starts, axis=1)
        ends: Floats = np.maximum(first + parts * price, last + price)
        spread = np.repeat(ends, sizes, axis=1)
        out[:, nodes[::2] if pair else nodes] = ends if pair else spread
        into[:, nodes[1::2] if pair else nodes] = ends if pair else spread
        self._show("send", event.step, np.repeat(first, sizes, axis=1), spread, nodes, event.label)
        return ends

    def _through_server(self, event: Any, groups: _Groups, ready: Floats, price: Floats, parts: int) -> Floats:
        """Push or pull. A message waits for earlier messages on the server's line, but not for slow lines of nodes."""
        self._spread()
        ready = np.broadcast_to(ready, self.now.shape)
        inward = event.collective == "push"
        way = int(not inward)
        ends = np.zeros(price.shape)
        for i, nodes in enumerate(np.split(groups.nodes, groups.starts[1:])):
            busy = self.network.server_seconds(inward, len(nodes) * event.payload_bytes / parts)
            first = np.maximum(ready[:, nodes].max(1), self.busy[way][:, nodes].max(1))
            part = np.maximum(first + price[:, i], self.server[way] + busy)
            ends[:, i] = np.maximum(part + (parts - 1) * price[:, i], self.now[:, nodes].max(1) + price[:, i])
            last = first if parts == 1 else ends[:, i] - price[:, i]  # when the last part starts
            self.busy[way][:, nodes] = ends[:, i : i + 1]
            self.server[way] = np.maximum(last, self.server[way]) + busy
            self._show("send", event.step, first[:, None], ends[:, i : i + 1], nodes, event.label)
        return ends

    def _wait(self, step: int, groups: _Groups, ends: Floats) -> None:
        """Make the nodes of groups wait until `ends`; their next messages start no earlier."""
        before = self.now
        if groups.whole or (groups.even and ends.shape[1] == 1):
            self.now = np.maximum(self.now, ends)
        else:
            self._spread()
            np.maximum.at(self.now.T, groups.nodes, np.repeat(ends, groups.sizes, axis=1).T)
        self.ready = np.where(self.now > before, self.now, self.ready)
        if groups.whole and (self.now == self.now[:, :1]).all() and (self.ready == self.ready[:, :1]).all():
            self.now, self.ready = self.now[:, :1], self.ready[:, :1]  # all nodes are alike again
        self._show("wait", step, before, self.now)

    def _spread(self) -> None:
        """Expand the rows to one entry for each node."""
        many = len(self.now), self.num_nodes
        self.now, self.ready = (np.broadcast_to(row, many).copy() for row in (self.now, self.ready))
        self.busy = np.broadcast_to(self.busy, (2, *many)).copy()

    def _show_absent(self, step: int) -> None:
        """Show where nodes were late or absent in the segment that ends with this step."""
        if self.watch is None or self.present is None:
            return
        now = np.broadcast_to(self.now, (len(self.now), self.num_nodes))  # one column stands for all nodes
        end = now[:, self.present].max(1, keepdims=True)
        absent = np.setdiff1d(np.arange(self.num_nodes), [*self.present, *self.late])
        for what, nodes in (("late", self.late), ("absent", absent)):
            if len(nodes):
                self._show(what, step, self.began_at[:, None], end, nodes)

    def _show(self, what: str, step: int, start: Floats, end: Floats, nodes: Any = None, label: str = "") -> None:
        if self.watch is not None:  # draw only the first of alternative networks
            self.watch(Span(what, step, start[0], end[0], nodes, label))
