"""The clock of a run: every node computes, sends over its line and waits, event by event of the ledger.

Times are kept in rows that have one entry while all nodes are alike, and K where they are not: an event of all nodes
costs the same for two nodes and for ten thousand.
"""

from __future__ import annotations

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
# Steps in which nothing is sent are taken together, so many numbers at a time.
_BLOCK = 1 << 20


@runtime_checkable
class Record(Protocol):
    """What a run has sent, event by event; see `Ledger` and `Event` of `vsim.cluster.ledger`."""

    num_nodes: int
    steps: int
    clock: dict[str, Any] | None
    seconds: list[tuple[float, float]]

    def __iter__(self) -> Iterator[Any]: ...


class Span(NamedTuple):
    """What nodes did in a step: "compute", "wait", or a line that was busy with an event: "send".

    Attributes:
        start, end: of each of the `nodes`, or one for all of them. nodes: None: all.
    """

    what: str
    step: int
    start: Floats
    end: Floats
    nodes: NDArray[np.int64] | None = None
    label: str = ""


class _Groups:
    """The groups of an event, those that have something to send."""

    def __init__(self, groups: Sequence[Sequence[int]], collective: str, network: Network, num_nodes: int) -> None:
        alone = collective in ("push", "pull")
        there = [group for group in groups if len(group) > 1 or (alone and group)]
        self._there, self.sizes = there, np.array([len(group) for group in there], dtype=np.int64)
        # What the price of a group depends on; all of them go through a server at the same time.
        shares = network.collective == "server" and collective not in ("send", "push", "pull")
        self.crowd: Crowd = tuple(sorted(Counter(self.sizes.tolist()).items())) if shares else ()
        places: dict[Hashable, int] = {}
        which = [places.setdefault(network.kind(group), len(places)) for group in there]
        self.kinds, self.which = list(places), np.array(which, dtype=np.int64)  # those that there are; of every group
        self.whole = len(there) == 1 and len(there[0]) == num_nodes  # of all nodes

    @cached_property
    def nodes(self) -> NDArray[np.int64]:
        """All nodes, group by group."""
        return np.concatenate([np.asarray(group, dtype=np.int64) for group in self._there])

    @cached_property
    def starts(self) -> NDArray[np.int64]:
        """Where in `nodes` the groups start."""
        return np.concatenate([[0], self.sizes.cumsum()[:-1]])

    @cached_property
    def apart(self) -> bool:
        """Whether no line is in two of the pairs: of the node that sends the one out, of the other the one in."""
        return all(len(set(ends.tolist())) == len(ends) for ends in self.nodes.reshape(-1, 2).T)


class Clock:
    """Takes a run's steps on a network. Everything that it does follows from its arguments.

    Attributes:
        seconds: (T + 1,) when the last node was done with step t.
        compute, stalls: (T,) computed and waited in step t + 1, in the mean of the nodes.
    """

    def __init__(
        self, ledger: Record, network: Network, compute: Compute, watch: Callable[[Span], None] | None = None
    ) -> None:
        network.check(ledger.num_nodes)
        self.num_nodes, self.network, self.layers = ledger.num_nodes, network, compute.layers
        self.computed = compute.steps(ledger.num_nodes)
        self.watch = watch
        self.now = np.zeros(1)  # (1,) or (K,): how far every node is
        self.ready = self.now  # when it could send the first layer of what it sends next
        self.busy = np.zeros((2, 1))  # until when its line is, outwards and inwards
        self.server = np.zeros(2)  # likewise that of a server
        self.steps = ledger.steps
        self.seconds, self.compute, self.stalls = (np.zeros(self.steps + i) for i in (1, 0, 0))
        self.events: dict[tuple[int, str], list[tuple[Any, _Groups, list[float]]]] = {}
        self.due: dict[tuple[int, str], list[tuple[_Groups, Floats]]] = {}
        # Who takes part, segment by segment; now; None: all. Until when the round lasts at least.
        self.attendance = {segment.first: segment for segment in getattr(ledger, "attendance", ())}
        self.there: NDArray[np.int64] | None = None
        self.until, self.began, self.last = 0.0, 0, 0
        self.local: NDArray[np.int64] | None = None  # steps of those there, which rest for the others
        self._plan(ledger)

    def _plan(self, ledger: Record) -> None:
        """Price all events, those of one kind together."""
        parts: dict[tuple[int, str], tuple[object, _Groups]] = {}  # the groups are held, so that no other has their id
        prices: dict[tuple[str, Hashable, Crowd], dict[float, float]] = {}
        planned = []
        for event in ledger:
            key = id(event.groups), event.collective
            if key not in parts:
                groups = _Groups(event.groups, event.collective, self.network, self.num_nodes)
                parts[key] = event.groups, groups
            groups = parts[key][1]
            if groups.kinds:
                planned.append((event, groups))
                for one in groups.kinds:
                    prices.setdefault((event.collective, one, groups.crowd), {})[event.payload_bytes] = 0.0
        for (collective, kind, crowd), own in prices.items():
            seconds = self.network.seconds(collective, kind, np.array(list(own)) / self.layers, crowd)
            own.update(zip(own, seconds.tolist(), strict=True))
        for event, groups in planned:
            price = [prices[event.collective, one, groups.crowd][event.payload_bytes] for one in groups.kinds]
            self.events.setdefault((event.step, event.moment), []).append((event, groups, price))

    def run(self, until: int | None = None) -> Clock:
        """Take all steps, or those to `until`."""
        steps = self.steps if until is None else until
        issued = {event.step for own in self.events.values() for event, _, _ in own}
        due = {event.due for own in self.events.values() for event, _, _ in own}
        turns = {step for segment in self.attendance.values() for step in (segment.first, segment.last)}
        self._communicate(0, MOMENTS)  # before training
        self.stalls[:1] += self.now.mean()
        done = 0
        for step in [*sorted(step for step in issued | due | turns if 0 < step <= steps), steps + 1]:
            while done < step - 1:
                done = self._quiet_steps(done, step - 1)
            if step <= steps:
                self._attend(step)
                before = self.now
                self._communicate(step, MOMENTS[:1])
                own = self._compute(step)
                self._meet_deadline(step)
                self._communicate(step, MOMENTS[1:])
                self.stalls[done] += (self.now - before - own).mean()
                done = step
                self.seconds[done] = self.now.max()
        self.stalls[-1:] += (self.seconds[steps] - self.now).mean()
        np.maximum(self.stalls, 0, out=self.stalls)  # which rounding leaves below
        if self.attendance:  # in the mean of those that took part; below 0 where others had been waiting for a step
            self.stalls = np.diff(self.seconds) - self.compute
        return self

    def _quiet_steps(self, done: int, until: int) -> int:
        """Take steps in which nothing is sent or awaited; return how many are done."""
        count = min(until - done, max(1, _BLOCK // self.num_nodes)) if self.watch is None else 1
        own, mean = self._computed(done, count)
        ends = self.now + own.cumsum(0)
        self._show("compute", done + 1, self.now, ends[-1])
        self.now = self.ready = ends[-1]
        taken = slice(done, done + count)
        self.compute[taken], self.seconds[1:][taken] = mean, ends.max(1)
        return taken.stop

    def _compute(self, step: int) -> Floats:
        (own,), (self.compute[step - 1],) = self._computed(step - 1, 1)
        began, self.now = self.now, self.now + own
        parts = 3 * self.layers - 1
        self.ready = began + own * ((self.layers + 1) / parts) if self.layers > 1 else self.now
        self._show("compute", step, began, self.now)
        return own

    def _computed(self, done: int, count: int) -> tuple[Floats, Floats]:
        """Return what every node computes in the next steps, (count, 1) or (count, K), and the mean of those there."""
        own = self.computed.next(count)
        if self.there is None:
            return own, own.mean(1)
        there = np.broadcast_to(own, (count, self.num_nodes))[:, self.there]
        if self.local is not None:
            there = there * (np.arange(count)[:, None] + (done - self.began) < self.local)
        masked = np.zeros((count, self.num_nodes))
        masked[:, self.there] = there
        return masked, there.mean(1)

    def _attend(self, step: int) -> None:
        """Let those take part who do from this step on; who joins has not been waiting."""
        segment = self.attendance.get(step)
        if segment is None:
            return
        self._spread()
        nodes, began = np.array(segment.nodes), self.now.max()
        joining = nodes if self.there is None else np.setdiff1d(nodes, self.there)
        self.now[joining] = np.maximum(self.now[joining], began if step > 1 else 0.0)
        self.ready = self.now.copy()
        self.there, self.until = nodes, began + segment.seconds if segment.seconds else 0.0
        self.began, self.last = step - 1, segment.last
        self.local = np.array(segment.steps) if segment.steps else None

    def _meet_deadline(self, step: int) -> None:
        """Wait for the deadline of the round that this step is the last of."""
        if self.until and step == self.last:
            assert self.there is not None
            self._spread()
            self.now[self.there] = np.maximum(self.now[self.there], self.until)
            self.ready = self.now.copy()

    def _communicate(self, step: int, moments: Sequence[str]) -> None:
        for moment in moments:
            for event, groups, price in self.events.get((step, moment), ()):
                ends = self._send(event, groups, np.array(price)[groups.which])
                if event.due == event.step:
                    self._wait(step, groups, ends)
                else:
                    self.due.setdefault((event.due, moment), []).append((groups, ends))
            for groups, ends in self.due.pop((step, moment), ()):
                self._wait(step, groups, ends)

    def _send(self, event: Any, groups: _Groups, price: Floats) -> Floats:
        """Put an event on the lines; return when each of its groups is done: (groups,)."""
        if event.collective in ("push", "pull"):
            return self._through_server(event, groups, price)
        if groups.whole and event.collective != "send":
            first = max(self.ready.max(), self.busy.max())
            ends = np.maximum(first + self.layers * price, self.now.max() + price)
            self.busy = np.full((2, 1), ends[0])
            self._show("send", event.step, np.array([first]), ends, label=event.label)
            return ends
        self._spread()
        if event.collective == "send" and not groups.apart:  # messages of one line queue in their order
            alone = np.zeros(1, dtype=np.int64), np.full(1, 2)
            pairs = zip(groups.nodes.reshape(-1, 2), price[:, None], strict=True)
            return np.concatenate([self._in_parallel(event, pair, *alone, own) for pair, own in pairs])
        return self._in_parallel(event, groups.nodes, groups.starts, groups.sizes, price)

    def _in_parallel(
        self, event: Any, nodes: NDArray[np.int64], starts: NDArray[np.int64], sizes: NDArray[np.int64], price: Floats
    ) -> Floats:
        out, into = self.busy
        pair = event.collective == "send"
        free = np.maximum(out, into)[nodes]
        if pair:  # out of the first, into the second
            free = np.stack([out[nodes[::2]], into[nodes[1::2]]], 1).flatten()
        first = np.maximum.reduceat(np.maximum(self.ready[nodes], free), starts)
        last = np.maximum.reduceat(self.now[nodes], starts)
        ends: Floats = np.maximum(first + self.layers * price, last + price)
        spread = np.repeat(ends, sizes)
        out[nodes[::2] if pair else nodes] = ends if pair else spread
        into[nodes[1::2] if pair else nodes] = ends if pair else spread
        self._show("send", event.step, np.repeat(first, sizes), spread, nodes, event.label)
        return ends

    def _through_server(self, event: Any, groups: _Groups, price: Floats) -> Floats:
        """A message waits on the server's line for those before it alone, however slow the lines of their nodes."""
        self._spread()
        inward = event.collective == "push"
        way = int(not inward)
        ends = np.zeros(len(price))
        for i, nodes in enumerate(np.split(groups.nodes, groups.starts[1:])):
            held = self.network.server_seconds(inward, len(nodes) * event.payload_bytes / self.layers)
            first = max(self.ready[nodes].max(), self.busy[way, nodes].max())
            part = max(first + price[i], self.server[way] + held)
            ends[i] = max(part + (self.layers - 1) * price[i], self.now[nodes].max() + price[i])
            last = first if self.layers == 1 else ends[i] - price[i]  # when its last part starts
            self.busy[way, nodes], self.server[way] = ends[i], max(last, self.server[way]) + held
            self._show("send", event.step, np.array([first]), ends[i : i + 1], nodes, event.label)
        return ends

    def _wait(self, step: int, groups: _Groups, ends: Floats) -> None:
        """Let the nodes of groups wait until these are done; what they send then follows."""
        before = self.now
        if groups.whole:
            self.now = np.maximum(self.now, ends)
        else:
            self._spread()
            np.maximum.at(self.now, groups.nodes, np.repeat(ends, groups.sizes))
        self.ready = np.where(self.now > before, self.now, self.ready)
        if groups.whole and (self.now == self.now[0]).all() and (self.ready == self.ready[0]).all():
            self.now, self.ready = self.now[:1], self.ready[:1]  # alike again
        self._show("wait", step, before, self.now)

    def _spread(self) -> None:
        """Give every node entries of its own."""
        self.now, self.ready = (np.broadcast_to(row, (self.num_nodes,)).copy() for row in (self.now, self.ready))
        self.busy = np.broadcast_to(self.busy, (2, self.num_nodes)).copy()

    def _show(self, what: str, step: int, start: Floats, end: Floats, nodes: Any = None, label: str = "") -> None:
        if self.watch is not None:
            self.watch(Span(what, step, start, end, nodes, label))
