"""A plan: which nodes take part in which steps of a run, segment by segment."""

from __future__ import annotations

import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from vsim.cluster.store import Store

# f(first, last, local) → every node's compute seconds for steps first … last (from 1), or for `local` steps if given.
ComputeSeconds = Callable[[int, int, NDArray[np.int64] | None], NDArray[np.float64]]
Nodes = tuple[int, ...]
BYTES_OF_A_CLIENT = 64  # least memory per client that a plan, or the order of its examples, takes


class Segment(NamedTuple):
    """Steps in which the same nodes take part.

    Attributes:
        first, last: the numbers of the first and last step, from 1.
        nodes: the nodes that take part, in ascending order.
        late: the nodes that computed but arrived too late; their work is lost.
        seconds: the least duration of the segment in seconds, if a deadline sets one.
        steps: the number of local steps after which each node rests; empty: nodes take all steps of the segment.
    """

    first: int
    last: int
    nodes: Nodes
    late: Nodes = ()
    seconds: float = 0.0
    steps: tuple[int, ...] = ()


class Candidates(NamedTuple):
    """A round whose clients are known once candidates have reported their losses.

    Attributes:
        clients: the candidates, in the order in which they were drawn. number: how many of them take part.
        settled: f(clients that take part, in ascending order) → the round's segment.
        segment: the segment in which the first `number` candidates take part; it holds until losses are reported.
    """

    clients: Nodes
    number: int
    settled: Callable[[Nodes], Segment]
    segment: Segment


class Round(NamedTuple):
    """The facts about a run from which its plan is made.

    Attributes:
        num_nodes, seed: arguments of the run. period: steps from one sync of the run's strategy to the next.
        seconds: the compute seconds of nodes, if known.
        epochs: (N,) the number of steps in an epoch of each node or client.
        syncs: the steps of all syncs of the run, given if intervals differ; `period` is then the shortest interval.
        sizes: (N,) the number of examples of each node or client.
    """

    num_nodes: int
    seed: int
    period: int
    seconds: ComputeSeconds | None = None
    epochs: NDArray[np.float64] | None = None
    syncs: tuple[int, ...] = ()
    sizes: NDArray[np.float64] | None = None

    def rounds(self, rounds: int | None, what: str) -> Iterator[tuple[int, int]]:
        """Yield the first and the last step of every round: `rounds` steps each, or by default from sync to sync.

        Raises:
            ValueError: `rounds` does not fit the syncs; the error names `what`.
        """
        if rounds is not None and self.syncs:
            raise ValueError(
                f"{what}: rounds={rounds} has no effect where H is a schedule, which has rounds of its own"
            )
        period = self.period if rounds is None else rounds
        if period % self.period:
            raise ValueError(
                f"{what}: rounds={rounds} must be a multiple of the {self.period} steps from one sync of the strategy "
                "to the next"
            )
        last = self.syncs[-1] if self.syncs else 0
        of_syncs = zip((0, *self.syncs), self.syncs, strict=False)
        return chain(((before + 1, end) for before, end in of_syncs), _every(last, period))


def _every(last: int, period: int) -> Iterator[tuple[int, int]]:
    for first in range(last + 1, sys.maxsize, period):
        yield first, first + period - 1


class Plan:
    """The nodes that take part in a run, segment by segment.

    Args:
        segments: an endless iterator over consecutive segments, or candidates for them, from step 1 on.
        population: the number of nodes, or clients, that may take part.
        renews: whether every segment is a round of clients, which start from the global weights with fresh optimizers.
            Otherwise nodes keep their state, and a joining node copies the state of another node.
        store: a folder for the clients' state; None: memory.
        favours: whether some clients are drawn more often than others by their size or loss.
    """

    def __init__(
        self,
        segments: Iterator[Segment | Candidates],
        population: int,
        renews: bool = False,
        store: Store | None = None,
        favours: bool = False,
    ) -> None:
        self.population, self.renews, self.store, self.favours = population, renews, store, favours
        self._coming, self._known = segments, list[Segment]()
        self._open: Candidates | None = None  # of the last known segment, until their losses are reported
        self._append_next()
        # The number of a segment; each node's completed steps and number of joins before this segment.
        self._number, self._steps, self._times = 0, *np.zeros((2, population), dtype=np.int64)

    def segment(self, step: int) -> Segment:
        """Return the segment that contains step number `step`, from 1."""
        return self._known[self._number_of(step)]

    def candidates(self, step: int) -> Nodes:
        """Return the clients whose losses decide who takes part in the segment of `step`; () if that is decided."""
        segment = self.segment(step)
        return self._open.clients if self._open is not None and segment is self._known[-1] else ()

    def choose(self, losses: Sequence[float]) -> None:
        """Let the candidates with the largest losses take part; `losses` are in the order of `candidates`."""
        assert self._open is not None
        largest = np.argsort(-np.asarray(losses, np.float64), kind="stable")[: self._open.number]
        self._settle(self._open.clients[i] for i in largest)

    def repeat(self, attendance: Sequence[Segment], step: int) -> None:
        """Choose the clients that took part up to `step` in a run that resumes, as its ledger has recorded them.

        Of clients that are no candidates, as in a checkpoint of another run, the first candidates stand in.
        """
        recorded, first = {own.first: (*own.nodes, *own.late) for own in attendance}, 1
        while first <= step:
            if self.candidates(first) and self._open is not None:
                clients = recorded.get(first, ())
                fits = clients and {*clients} <= {*self._open.clients}
                self._settle(clients if fits else self._open.clients[: self._open.number])
            first = self.segment(first).last + 1

    def _settle(self, clients: Iterable[int]) -> None:
        assert self._open is not None
        self._known[-1], self._open = self._open.settled(tuple(sorted(clients))), None

    def _append_next(self) -> None:
        if self._open is not None:
            raise ValueError(
                f"losses decide which clients take part from step {self._known[-1].first} on, so that rounds after it "
                "are known only during training"
            )
        coming = next(self._coming)
        self._open = coming if isinstance(coming, Candidates) else None
        self._known.append(coming.segment if isinstance(coming, Candidates) else coming)

    def segments(self, steps: int) -> Iterator[Segment]:
        """Yield the segments of a run of that many steps.

        Raises:
            ValueError: losses that are not known yet decide which clients take part.
        """
        step = 1
        while step <= steps:
            segment = self.segment(step)
            yield segment
            step = segment.last + 1

    def clock(self, step: int) -> NDArray[np.int64]:
        """Return (N,) the number of steps that each node has completed before the segment of `step`."""
        self._count_to(self._number_of(step))
        return self._steps

    def times(self, step: int) -> NDArray[np.int64]:
        """Return (N,) how often each node has begun to take part before the segment of `step`."""
        self._count_to(self._number_of(step))
        return self._times

    def missed(self, step: int) -> list[int]:
        """Return how many steps each node in the segment of `step` has missed before this segment."""
        segment, clock = self.segment(step), self.clock(step)
        return [segment.first - 1 - int(clock[node]) for node in segment.nodes]

    def joining(self, step: int) -> Nodes:
        """Return the nodes that join with the segment of `step`; all nodes of the segment if the plan renews."""
        number = self._number_of(step)
        before = () if self.renews or number == 0 else self._known[number - 1].nodes
        return tuple(node for node in self._known[number].nodes if node not in before)

    def peer(self, step: int) -> int:
        """Return the node that nodes joining at `step` copy: the first node that stays, else the first that leaves."""
        before, now = self.segment(step - 1).nodes, self.segment(step).nodes
        return next((node for node in before if node in now), before[0])

    def machines(self, step: int) -> Nodes:
        """Return the machines of the segment of `step`: machine k for node k, or the first n machines for n clients."""
        nodes = self.segment(step).nodes
        return tuple(range(len(nodes))) if self.renews else nodes

    def _number_of(self, step: int) -> int:
        while self._known[-1].last < step:
            self._append_next()
        return bisect_left(self._known, step, key=lambda segment: segment.last)

    def _count_to(self, number: int) -> None:
        if number < self._number:
            self._number, self._steps, self._times = 0, *np.zeros((2, self.population), dtype=np.int64)
        while self._number < number:
            segment = self._known[self._number]
            self._steps, self._times = self._steps.copy(), self._times.copy()
            self._steps[list(segment.nodes)] += segment.steps or segment.last - segment.first + 1
            self._times[list(self.joining(segment.first))] += 1
            self._number += 1
