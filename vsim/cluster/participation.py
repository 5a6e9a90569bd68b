"""Plan which nodes take part in which steps: cohorts of a population, failures and joins, stragglers.

A node that does not take part takes no step, counts in no mean, draws no random number and sends nothing. Participation
is decided in advance, from the seed. A `Plan` is a sequence of `Segment`s; within a segment, the same nodes take part.
"""

from __future__ import annotations

import copy
import csv
import math
import sys
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vsim.arguments import (
    a_list,
    a_path,
    countable,
    given,
    known_keywords,
    one_of,
    real_number,
    true_or_false,
    whole_number,
)
from vsim.cluster.plan import BYTES_OF_A_CLIENT, Candidates, Plan, Round, Segment
from vsim.cluster.randomness import PARTICIPATION, generator
from vsim.cluster.store import Store
from vsim.reading import read_text

_ROUNDING = 1 + 1e-12  # relative tolerance for rounding errors of arrival times and of counts


class Participation(ABC):
    """A rule for which nodes take part in which steps of a run: `fit(participation=…)`."""

    needs_compute = False  # whether compute seconds decide which nodes take part

    def population(self, num_nodes: int) -> int:
        """Return the number of nodes, or clients, that may take part in a run of K nodes."""
        return num_nodes

    def of_run(self, number: int) -> Participation:
        """Return this participation for run `number` of several runs; each run gets separate storage."""
        return self

    def changes_nothing(self, num_nodes: int) -> bool:
        """Return whether all K nodes take part in all steps, as without a plan."""
        return False

    def eligible(self, num_nodes: int) -> set[int]:
        """Return the nodes, or clients, that may take part in some step if the run is long enough."""
        return set(range(self.population(num_nodes)))

    @abstractmethod
    def plan(self, given: Round) -> Plan:
        """Return the plan of a run.

        Raises:
            ValueError: the participation names nodes that the run does not have.
        """

    def __repr__(self) -> str:
        given = [f"{name}={value!r}" for name, value in vars(self).items() if value is not None]
        return f"{type(self).__name__}({', '.join(given)})"


class ByChance(Participation):
    """Each node takes part in each round with a given probability; at least one node takes part.

    Attributes:
        rounds: steps per round; None: from one sync of the strategy to the next.
    """

    rounds: int | None = None

    @abstractmethod
    def missing(self, number: int, num_nodes: int) -> NDArray[np.float64] | float:
        """Return the probability that each node misses round `number` (from 0): (K,), or one number for all nodes.

        Raises:
            ValueError: the probabilities are for another number of nodes.
        """

    def present(self, number: int, num_nodes: int, stream: torch.Generator) -> list[int]:
        """Draw the nodes that take part in round `number`."""
        missing = self.missing(number, num_nodes)
        margins = torch.rand(num_nodes, generator=stream).double().numpy() - missing
        # Below 0 for all nodes, the largest margin decides; a node with probability 0 takes part only if all have 0.
        return np.flatnonzero(margins >= 0).tolist() or [int((margins - (np.asarray(missing) >= 1)).argmax())]

    def plan(self, given: Round) -> Plan:
        self.missing(0, given.num_nodes)  # raises an error before training
        return Plan(self._segments(given, given.rounds(self.rounds, type(self).__name__)), given.num_nodes)

    def _segments(self, given: Round, rounds: Iterator[tuple[int, int]]) -> Iterator[Segment]:
        for number, (first, last) in enumerate(rounds):
            nodes = self.present(number, given.num_nodes, generator(given.seed, PARTICIPATION, number))
            yield Segment(first, last, tuple(nodes))


class Dropout(ByChance):
    """Each node misses a round with probability p, drawn each round; at least one node takes part.

    Args:
        p: in [0, 1).
        rounds: steps per round; default: from one sync of the strategy to the next.
    """

    @known_keywords
    def __init__(self, p: float, *, rounds: int | None = None) -> None:
        self.p = real_number("p", p, at_least=0, below=1)
        self.rounds = None if rounds is None else whole_number("rounds", rounds)

    def changes_nothing(self, num_nodes: int) -> bool:
        return self.p == 0

    def missing(self, number: int, num_nodes: int) -> float:
        return self.p


class DayNight(ByChance):
    """Nodes take part by day, and rarely by night; at least one node takes part in every round.

    In round r = 0, 1, … node k takes part with probability  night + (day − night) · (1 + cos 2π(r / period + z_k)) / 2,
    where z_k = ⌊k · zones / K⌋ / zones is its time zone. The first round is at noon in the first zone.

    Args:
        period: rounds in a day, at least 2.
        day, night: the probabilities at noon, in (0, 1], and at midnight, in [0, day].
        zones: time zones, evenly spaced around the clock; neighbouring nodes share one.
        rounds: steps per round; default: from one sync of the strategy to the next.
    """

    @known_keywords
    def __init__(
        self, period: int, *, day: float = 1.0, night: float = 0.1, zones: int = 1, rounds: int | None = None
    ) -> None:
        self.period = whole_number("period", period, at_least=2)
        self.day = real_number("day", day, above=0, at_most=1)
        self.night = real_number("night", night, at_least=0, at_most=self.day)
        self.zones = whole_number("zones", zones)
        self.rounds = None if rounds is None else whole_number("rounds", rounds)

    def changes_nothing(self, num_nodes: int) -> bool:
        return self.night == 1

    def missing(self, number: int, num_nodes: int) -> NDArray[np.float64]:
        zones = np.array([k * self.zones // num_nodes for k in range(num_nodes)]) / self.zones
        darkness: NDArray[np.float64] = (1 - np.cos(2 * np.pi * (number / self.period % 1 + zones))) / 2
        return 1 - (self.day - (self.day - self.night) * darkness)


class Availability(ByChance):
    """Each node takes part with the probabilities of a table; at least one node takes part in every round.

    >>> Availability([[1, 0.2], [0.2, 1]])  # two nodes take turns
    Availability(2 nodes, period=2)

    Args:
        p: (K,), each node's or client's probability in [0, 1] of taking part in a round; or (T, K), for T rounds,
            repeated in turn. In a round, a node with probability 0 takes part only if all nodes have 0.
        rounds: steps per round; default: from one sync of the strategy to the next.
    """

    @known_keywords
    def __init__(self, p: Any, *, rounds: int | None = None) -> None:
        self.p = _table("p", p, (1, 2), at_most=1)
        self.p = self.p.reshape(-1, self.p.shape[-1])
        if not self.p.any():
            raise ValueError(f"p must be above 0 for at least one node, got {given(p)} with zeros only")
        self.rounds = None if rounds is None else whole_number("rounds", rounds)

    def changes_nothing(self, num_nodes: int) -> bool:
        return bool((self.p == 1).all())

    def eligible(self, num_nodes: int) -> set[int]:
        in_some_round = self.p.any(0) | ~self.p.any(1).all()  # where all have probability 0, one of all takes part
        return set(np.flatnonzero(in_some_round).tolist())

    def missing(self, number: int, num_nodes: int) -> NDArray[np.float64]:
        if self.p.shape[1] != num_nodes:
            raise ValueError(f"{self} is for {self.p.shape[1]} nodes or clients, and the run has {num_nodes}")
        found: NDArray[np.float64] = 1 - self.p[number % len(self.p)]
        return found

    def __repr__(self) -> str:
        rounds = "" if self.rounds is None else f", rounds={self.rounds}"
        return f"{type(self).__name__}({self.p.shape[1]} nodes, period={len(self.p)}{rounds})"


class ByLabel(Availability):
    """Classes take turns: a client with more examples of the current class is more likely to take part.

    In a turn of class c, client k takes part with probability  otherwise + (1 − otherwise) · n_kc / max_c' n_kc',
    where n_kc is the number of examples of class c that client k has. If c is the client's largest class, the
    probability is 1. At least one client takes part in every round.

    Args:
        counts: (K, classes) the examples of every client by class, such as `partition(…).counts`.
        turn: the number of rounds in a class's turn.
        otherwise: the probability of a client without examples of the class, in [0, 1].
        rounds: steps per round; default: from one sync of the strategy to the next.

    Deviations: in "YCycle" [Wang et al. 2023, FedGS], labels take turns in numerical order, and a client counts as
    having every label between its smallest and its largest label.
    """

    @known_keywords
    def __init__(self, counts: Any, *, turn: int = 1, otherwise: float = 0.1, rounds: int | None = None) -> None:
        own = _table("counts", counts, (2,)).T  # (classes, K)
        if not own.any():
            raise ValueError(f"counts must have at least one example, got {given(counts)} with zeros only")
        otherwise = real_number("otherwise", otherwise, at_least=0, at_most=1)
        p = 1 - (1 - otherwise) * (1 - own / np.maximum(own.max(0), 1e-300))
        super().__init__(p.repeat(countable("turn", turn, "rounds", p.nbytes), axis=0), rounds=rounds)


def _table(name: str, value: Any, dims: tuple[int, ...], at_most: float = math.inf) -> NDArray[np.float64]:
    """Return `value` as an array; raise an error unless its ndim is in `dims`, and its numbers in [0, at_most]."""
    shape = f"numbers in {' or '.join(map(str, dims))} dimensions"
    try:
        found = np.asarray(value, np.float64).copy()
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(f"{name} must be {shape}, got {given(value)}") from error
    if found.ndim not in dims or not found.size:
        raise ValueError(f"{name} must be {shape}, got {given(value)} of shape {found.shape}")
    if not ((found >= 0) & (found <= at_most) & np.isfinite(found)).all():
        bounds = f">= 0 and <= {at_most:g}" if at_most < math.inf else "finite and >= 0"
        raise ValueError(f"{name} must be {bounds}, got {given(value)}, from {found.min()} to {found.max()}")
    return found


class Schedule(Participation):
    """Failures, leaves and joins that are known in advance.

    >>> Schedule({0: [0, 1, 2], 100: [0, 1], 250: [0, 1, 2, 3]})
    Schedule({0: (0, 1, 2), 100: (0, 1), 250: (0, 1, 2, 3)})

    Args:
        changes: completed steps → the nodes that take part from then on. Before the first change, all nodes take part.
    """

    def __init__(self, changes: Mapping[int, Iterable[int]]) -> None:
        if not isinstance(changes, Mapping):
            raise TypeError(f"a Schedule takes a dict of step → nodes, got {changes!r}")
        found = {}
        for step, nodes in changes.items():
            if not isinstance(nodes, Iterable):
                raise TypeError(f"Schedule, step {step}: nodes must be a list of nodes, got {nodes!r}")
            own = [whole_number(f"Schedule, step {step}: a node", node, at_least=0) for node in nodes]
            if not own or len(set(own)) < len(own):
                raise ValueError(f"Schedule, step {step}: nodes must be at least one, each once; got {own}")
            found[whole_number("Schedule: a step", step, at_least=0)] = tuple(sorted(own))
        self.changes = dict(sorted(found.items()))

    def changes_nothing(self, num_nodes: int) -> bool:
        return all(nodes == tuple(range(num_nodes)) for nodes in self.changes.values())

    def eligible(self, num_nodes: int) -> set[int]:
        return set().union(*self.changes.values(), () if 0 in self.changes else range(num_nodes))

    def plan(self, given: Round) -> Plan:
        everyone = tuple(range(given.num_nodes))
        for step, nodes in self.changes.items():
            if not set(nodes) <= set(everyone):
                raise ValueError(f"Schedule, step {step}: nodes are 0 … {given.num_nodes - 1}, got {list(nodes)}")
        changes = {0: everyone, **self.changes}
        ends = [*list(changes)[1:], sys.maxsize]
        segments = (Segment(at + 1, end, nodes) for (at, nodes), end in zip(changes.items(), ends, strict=True))
        return Plan(segments, given.num_nodes)

    def __repr__(self) -> str:
        return f"Schedule({self.changes})"


class Trace(Participation):
    """Failures, leaves and joins from a record, for instance of a cluster's scheduler.

    Args:
        file: a CSV file with the columns step, node and event ("join", "leave" or "fail"), or a list of such rows. An
            event happens after `step` completed steps. A node takes part from the start unless its first event is a
            join.
    """

    def __init__(self, file: str | Path | Iterable[tuple[int, int, str]]) -> None:
        self.events = sorted(_events(file), key=lambda event: event[0])

    def changes_nothing(self, num_nodes: int) -> bool:
        return not self.events

    def eligible(self, num_nodes: int) -> set[int]:
        return self._schedule(num_nodes).eligible(num_nodes)

    def plan(self, given: Round) -> Plan:
        return self._schedule(given.num_nodes).plan(given)

    def _schedule(self, num_nodes: int) -> Schedule:
        first: dict[int, str] = {}
        for _, node, event in self.events:
            first.setdefault(node, event)
        present = {node for node in range(num_nodes) if first.get(node) != "join"}
        changes = {0: tuple(sorted(present))}
        for step, node, event in self.events:
            if node >= num_nodes:
                raise ValueError(f"Trace, step {step}: nodes are 0 … {num_nodes - 1}, got {node}")
            if (event == "join") == (node in present):
                raise ValueError(
                    f"Trace, step {step}: node {node} cannot {event}; it is {'' if node in present else 'not '}present"
                )
            (present.add if event == "join" else present.remove)(node)
            changes[step] = tuple(sorted(present))
        if () in changes.values():
            empty = next(step for step, nodes in changes.items() if not nodes)
            raise ValueError(f"Trace: no node is left after step {empty}")
        return Schedule(changes)


def _events(file: Any) -> Iterator[tuple[int, int, str]]:
    if isinstance(file, str | Path):
        table = csv.DictReader(read_text(Path(file)).splitlines())
        missing = {"step", "node", "event"} - set(table.fieldnames or ())
        if missing:
            raise ValueError(f"{file} must have the columns step, node, event; it lacks {sorted(missing)}")
        rows = [(row["step"], row["node"], row["event"]) for row in table]
    elif isinstance(file, Iterable):
        rows = list(file)
    else:
        raise TypeError(f"a Trace takes a file or rows of (step, node, event), got {file!r}")
    for row in rows:
        if not isinstance(row, list | tuple | np.ndarray) or len(row) != 3:
            raise ValueError(f"Trace: a row must be (step, node, event), got {row!r}")
        step, node, event = row
        at, which = (int(n) if isinstance(n, str) and n.strip().isdecimal() else n for n in (step, node))
        one_of("Trace: event", event, ("join", "leave", "fail"))
        yield whole_number("Trace: a step", at, at_least=0), whole_number("Trace: a node", which, at_least=0), event


# Stragglers -----------------------------------------------------------------------------------------------------------


class Stragglers(Participation):
    """A rule that decides which nodes of a round arrive in time. Late nodes lose their work, and join the next round.

    The rule needs `fit(compute=…)`: a node arrives when it has computed the steps of the round, or of its epochs. With
    `participation=rule`, a round lasts from one sync of the strategy to the next. With `Sample(stragglers=rule)`, a
    round is a round of `Sample`.
    """

    needs_compute = True
    factor = 1.0  # clients drawn for each client wanted

    @abstractmethod
    def count(self, arrivals: NDArray[np.float64], wanted: int, steps: int) -> tuple[int, float]:
        """Return how many of the first arrivals count, at least 1, and the least duration of the round in seconds.

        Args:
            arrivals: seconds from the beginning of the round, in ascending order.
            wanted: the number of nodes wanted, without extra draws. steps: the number of steps of the round.
        """

    def begun(self) -> Stragglers:
        """Return the rule to apply to one run's rounds in order; default: this rule, which has no state."""
        return self

    def plan(self, given: Round) -> Plan:
        return Plan(self._segments(given), given.num_nodes)

    def _segments(self, given: Round) -> Iterator[Segment]:
        everyone, rule = tuple(range(given.num_nodes)), self.begun()
        for first, last in given.rounds(None, type(self).__name__):
            yield rule.segment(Segment(first, last, everyone), given.num_nodes, given)

    def segment(self, drawn: Segment, wanted: int, given: Round, local: NDArray[np.int64] | None = None) -> Segment:
        """Return a segment with the nodes that arrive in time; `local` (N,): how many steps each client must take."""
        if given.seconds is None:
            raise TypeError(
                f"{type(self).__name__} needs compute seconds: fit(…, compute=Compute(seconds_per_step, …))"
            )
        seconds = given.seconds(drawn.first, drawn.last, local)[list(drawn.nodes)]
        order = np.argsort(seconds, kind="stable")
        count, until = self.count(seconds[order], wanted, drawn.last - drawn.first + 1)
        here, late = (tuple(sorted(drawn.nodes[i] for i in part)) for part in (order[:count], order[count:]))
        return drawn._replace(nodes=here, late=late, seconds=until)


class Deadline(Stragglers):
    """Drop nodes that arrive after the deadline; always keep the fastest.

    Args:
        seconds: the deadline in seconds from the start of a round. "adaptive": the median of the nodes' arrivals in
            recent rounds plus k median absolute deviations. Arrivals are counted per step, so that rounds may differ in
            length. The first round waits for all nodes.
        k: for "adaptive", the number of deviations; default 3.
        quorum: for "adaptive", the least share of nodes to wait for, rounded up; default 0.5.
        window: for "adaptive", the number of recent rounds; default 10.
    """

    _recent: deque[NDArray[np.float64]]  # the nodes' seconds per step, by round

    @known_keywords
    def __init__(
        self,
        seconds: float | str,
        *,
        k: float | None = None,
        quorum: float | None = None,
        window: int | None = None,
    ) -> None:
        if isinstance(seconds, str):
            self.seconds: float | str = one_of("seconds", seconds, ("adaptive",))
            self.k: float | None = real_number("k", 3.0 if k is None else k, at_least=0)
            self.quorum: float | None = real_number("quorum", 0.5 if quorum is None else quorum, above=0, at_most=1)
            self.window: int | None = whole_number("window", 10 if window is None else window)
            return
        self.seconds = real_number("seconds", seconds, above=0)
        given = {"k": k, "quorum": quorum, "window": window}
        if idle := [name for name, value in given.items() if value is not None]:
            raise TypeError(
                f"Deadline: {' and '.join(idle)} has no effect with seconds={seconds}, only with 'adaptive'"
            )

    def begun(self) -> Deadline:
        own = copy.copy(self)
        own._recent = deque(maxlen=vars(self).get("window"))
        return own

    def count(self, arrivals: NDArray[np.float64], wanted: int, steps: int) -> tuple[int, float]:
        deadline, at_least = self.seconds, 1
        if isinstance(deadline, str):
            assert self.k is not None and self.quorum is not None
            at_least = math.ceil(self.quorum * len(arrivals) / _ROUNDING)
            known = np.concatenate([*self._recent]) if self._recent else np.array([np.inf])
            self._recent.append(arrivals / steps)
            middle = np.median(known)
            deviation = 0.0 if np.isinf(middle) else float(np.median(np.abs(known - middle)))
            deadline = steps * float(middle + self.k * deviation)
        arrived = max(at_least, int((arrivals <= deadline * _ROUNDING).sum()))
        return arrived, max(deadline, float(arrivals[arrived - 1])) if arrived < len(arrivals) else 0.0


class DropSlowest(Stragglers):
    """End a round when all but the slowest nodes have arrived.

    Args:
        share: the share of nodes to drop, 0 < share < 1; their number is rounded down.
    """

    @known_keywords
    def __init__(self, share: float) -> None:
        self.share = real_number("share", share, above=0, below=1)

    def count(self, arrivals: NDArray[np.float64], wanted: int, steps: int) -> tuple[int, float]:
        return len(arrivals) - int(self.share * len(arrivals) * _ROUNDING), 0.0


class OverCommit(Stragglers):
    """Draw more clients than wanted, and end the round when the wanted number of clients have arrived; for `Sample`.

    Args:
        factor: clients to draw for each client wanted, > 1 [Bonawitz et al. 2019, arXiv:1902.01046: 1.3].
    """

    @known_keywords
    def __init__(self, factor: float = 1.3) -> None:
        self.factor = real_number("factor", factor, above=1)

    def plan(self, given: Round) -> Plan:
        raise TypeError(f"OverCommit draws more clients than are wanted: Sample(n, of=N, stragglers={self})")

    def count(self, arrivals: NDArray[np.float64], wanted: int, steps: int) -> tuple[int, float]:
        return min(wanted, len(arrivals)), 0.0


class Partial(Stragglers):
    """Let some clients of a round take fewer local steps than the others, or drop them; for `Sample`.

    A client that has taken its E_k ≤ E steps rests until the round ends, and its weights are averaged as they are then
    [Li et al. 2018, FedProx, arXiv:1812.06127]. E is the length of the round or, with `epochs`, the steps of the
    client's epochs.

    Args:
        share: the share of each cohort that takes fewer steps, in [0, 1]; the number of clients is rounded down. Which
            clients these are, and their E_k, uniform in 1 … E, are drawn in each round from the seed.
        steps: (N,) the most steps of each client, at least 1, instead of `share`: E_k = min(E, steps[k]).
        drop: whether the work of these clients is lost, as in FedAvg; if False, it counts, as in FedProx. At least one
            client of a cohort is kept.

    Deviations from the paper: E_k is a number of steps; in the paper, it is a number of epochs.
    """

    needs_compute = False

    @known_keywords
    def __init__(self, share: float | None = None, *, steps: Sequence[int] | None = None, drop: bool = False) -> None:
        if (share is None) == (steps is None):
            raise TypeError(f"Partial takes share or steps, one of them; got share={share!r}, steps={steps!r}")
        self.share = None if share is None else real_number("share", share, at_least=0, at_most=1)
        self.steps: tuple[int, ...] | None = None
        if steps is not None:
            self.steps = tuple(whole_number("steps of a client", own) for own in a_list("steps", steps))
        self.drop = true_or_false("drop", drop)
        if self.drop and self.share == 1:
            raise ValueError("share must be below 1 with drop=True, got 1: no client of a round would be left")

    def changes_nothing(self, num_nodes: int) -> bool:
        return self.share == 0

    def plan(self, given: Round) -> Plan:
        raise TypeError(f"{self} is for clients, which start each round afresh: Sample(n, of=N, stragglers={self})")

    def count(self, arrivals: NDArray[np.float64], wanted: int, steps: int) -> tuple[int, float]:
        raise NotImplementedError("Partial goes by steps, not by arrivals")

    def check(self, n: int, of: int) -> None:
        """Raise a ValueError if this has no effect on cohorts of n, or is for another number of clients than `of`."""
        if self.share and int(self.share * n * _ROUNDING) == 0:
            raise ValueError(f"share={self.share} of a cohort of {n} is less than one client; give at least 1/{n}")
        if self.steps is not None and len(self.steps) != of:
            raise ValueError(f"steps must have a number for each of the {of} clients, got {len(self.steps)}")

    def segment(self, drawn: Segment, wanted: int, given: Round, local: NDArray[np.int64] | None = None) -> Segment:
        nodes = np.array(drawn.nodes)
        whole = np.full(len(nodes), drawn.last - drawn.first + 1) if local is None else local[nodes]
        own = whole.copy()  # E_k
        if self.steps is not None:
            own = np.minimum(own, np.array(self.steps)[nodes])
            fewer = own < whole
        else:
            assert self.share is not None
            stream = generator(given.seed, PARTICIPATION, drawn.first, 1)  # the round's other draws stay as they are
            fewer = np.zeros(len(nodes), dtype=bool)
            fewer[torch.randperm(len(nodes), generator=stream)[: int(self.share * len(nodes) * _ROUNDING)]] = True
            parts = torch.rand(len(nodes), generator=stream, dtype=torch.float64).numpy()
            own[fewer] = 1 + np.floor(parts * whole).astype(np.int64)[fewer]
        if not self.drop:
            return drawn._replace(steps=tuple(own.tolist()))
        if fewer.all():
            fewer[own.argmax()] = False
        return drawn._replace(nodes=tuple(nodes[~fewer].tolist()), late=tuple(nodes[fewer].tolist()))


SELECTIONS = ("uniform", "size", "power_of_choice")


class Sample(Participation):
    """Draw a cohort of n clients from a population of N for each round, without replacement; one row trains one client.

    A client starts a round from the global weights, with a fresh inner optimizer. Its data, random stream and lasting
    state (`keep_client` of `vsim.cluster.state.Stateful`) continue from the client's previous round. With n = N, and
    without `epochs`, `stragglers` and `available`, no cohorts are drawn: clients are nodes, which keep their weights
    and optimizers as in a run without `participation`.

    Args:
        n: clients per cohort; the run's num_nodes.
        of: N, the population. A dataset is split among N clients as by DistributedSampler; a factory is called as
            f(client, N, True).
        rounds: local steps per round; default: from one sync of the strategy to the next.
        epochs: passes of each client through its data per round, rounded up to whole batches; the client then rests
            until the round ends. The round must be long enough for the client with the most data. None: clients take
            all steps of a round.
        select: how to draw a cohort. "uniform": all clients alike. "size": in proportion to their numbers of examples,
            one client after the other. "power_of_choice": draw `candidates` clients by size, which fetch the global
            model and report its loss on all of their data; those with the largest losses train, and ties are broken at
            random [Cho et al. 2020, arXiv:2010.01243]. With the last two, a plain mean is meant, the default of most
            strategies: an average by examples would count a client's size twice.
        candidates: for "power_of_choice", their number, from n to N.
        stragglers: `Deadline`, `DropSlowest`, `OverCommit` or `Partial`; None: wait for all clients.
        available: `DayNight`, `ByLabel`, `Availability` or `Dropout`, which decides from which clients a cohort is
            drawn. If fewer than n clients are available, the cohort is smaller. None: all clients.
        store: a folder for the clients' state, with one file per tensor (in a comparison, one folder per run); None:
            memory. Files have their full size for the population from the start. Only one run at a time may use a
            folder.
    """

    # Instances hold only what differs, so that plain samples have the descriptions of earlier versions.
    select = "uniform"
    candidates: int | None = None

    @known_keywords
    def __init__(
        self,
        n: int,
        *,
        of: int,
        select: str = "uniform",
        candidates: int | None = None,
        rounds: int | None = None,
        epochs: float | None = None,
        stragglers: Stragglers | None = None,
        available: ByChance | None = None,
        store: str | Path | None = None,
    ) -> None:
        self.n, self.of = whole_number("n", n), countable("of", of, "clients", BYTES_OF_A_CLIENT)
        if self.n > self.of:
            raise ValueError(f"a cohort of {n} cannot be drawn from a population of {of}")
        self.rounds = None if rounds is None else whole_number("rounds", rounds)
        self.epochs = None if epochs is None else real_number("epochs", epochs, above=0)
        if not isinstance(stragglers, Stragglers | None):
            raise TypeError(f"stragglers must be Deadline, DropSlowest, OverCommit or Partial, got {stragglers!r}")
        if isinstance(stragglers, Partial):
            stragglers.check(self.n, self.of)
        self.stragglers = stragglers
        self._choose_selection(select, candidates)
        if not isinstance(available, ByChance | None):
            raise TypeError(f"available must be DayNight, ByLabel, Availability or Dropout, got {available!r}")
        if available is not None and available.rounds is not None:
            raise TypeError(f"rounds={available.rounds} has no effect in available={available}: give Sample(rounds=…)")
        self.available = available
        self.store = None if store is None else a_path("store", store)
        if self.store is not None and self.changes_nothing(n):
            raise ValueError(f"store has no effect in {self}: all {n} clients take part in all rounds; leave it out")

    def _choose_selection(self, select: str, candidates: int | None) -> None:
        if one_of("select", select, SELECTIONS) != "uniform":
            self.select = select
            if self.n == self.of:
                raise ValueError(f"select={select!r} has no effect where all {self.of} clients are drawn; leave it out")
        if (candidates is None) == (select == "power_of_choice"):
            raise TypeError(
                f"candidates belongs to select='power_of_choice': give both or none, got candidates={candidates!r} "
                f"with select={select!r}"
            )
        if candidates is not None:
            self.candidates = whole_number("candidates", candidates, at_least=self._drawn, at_most=self.of)

    @property
    def _drawn(self) -> int:
        """The number of clients drawn for a cohort, of which some may be late."""
        factor = 1.0 if self.stragglers is None else self.stragglers.factor
        return min(self.of, math.ceil(factor * self.n / _ROUNDING))

    @property
    def needs_compute(self) -> bool:  # type: ignore[override]
        return self.stragglers is not None and self.stragglers.needs_compute

    def population(self, num_nodes: int) -> int:
        return self.of

    def changes_nothing(self, num_nodes: int) -> bool:
        waits = self.stragglers is None or self.stragglers.changes_nothing(num_nodes)
        return num_nodes == self.n == self.of and waits and self.epochs is None and self.available is None

    def eligible(self, num_nodes: int) -> set[int]:
        return super().eligible(num_nodes) if self.available is None else self.available.eligible(self.of)

    def of_run(self, number: int) -> Sample:
        own = copy.copy(self)
        own.store = None if self.store is None else self.store / str(number)
        return own

    def plan(self, given: Round) -> Plan:
        if given.num_nodes != self.n:
            raise ValueError(f"num_nodes is the size of a cohort, {self.n} of {self}; got {given.num_nodes}")
        rounds = given.rounds(self.rounds, "Sample")
        if self.available is not None:
            self.available.missing(0, self.of)  # raises an error before training
        period = given.period if self.rounds is None else self.rounds
        if self.epochs is not None and (most := int(self._local_steps(given).max())) > period:
            raise ValueError(
                f"{self}: a client takes up to {most} steps to go through its data, and a round has {period}; let the "
                "strategy sync less often, or give rounds="
            )
        store = None if self.store is None else Store(self.store)
        favours = self.select != "uniform"
        return Plan(self._segments(given, rounds), self.of, renews=True, store=store, favours=favours)

    def _segments(self, given: Round, rounds: Iterator[tuple[int, int]]) -> Iterator[Segment | Candidates]:
        local = None if self.epochs is None else self._local_steps(given)  # (N,)
        rule = self.stragglers
        rule = None if rule is None or rule.changes_nothing(self.n) else rule.begun()

        def settled(first: int, last: int, rule: Stragglers | None, clients: tuple[int, ...]) -> Segment:
            segment = Segment(first, last, clients)
            if rule is not None:
                segment = rule.segment(segment, self.n, given, local)
            if local is not None and not segment.steps:
                segment = segment._replace(steps=tuple(local[list(segment.nodes)].tolist()))
            return segment

        for number, (first, last) in enumerate(rounds):
            stream = generator(given.seed, PARTICIPATION, number)
            order = self._order(given, stream)
            if self.available is not None:
                order = order[torch.isin(order, torch.tensor(self.available.present(number, self.of, stream)))]
            drawn = tuple(sorted(order[: self._drawn].tolist()))
            if self.candidates is None:
                yield settled(first, last, rule, drawn)
                continue
            until_then = settled(first, last, copy.deepcopy(rule), drawn)  # the rule hears of each round once
            clients = tuple(order[: self.candidates].tolist())
            yield Candidates(clients, len(drawn), partial(settled, first, last, rule), until_then)

    def _order(self, given: Round, stream: torch.Generator) -> Tensor:
        """Draw clients one after the other, without replacement: all alike, or in proportion to their size."""
        if self.select == "uniform":
            return torch.randperm(self.of, generator=stream)
        # The first of independent exponential clocks that run at the clients' sizes is client k's with probability
        # n_k / Σ n, and the rest run on as if they started again.
        clocks = -np.log1p(-torch.rand(self.of, generator=stream, dtype=torch.float64).numpy()) / given.sizes
        return torch.from_numpy(np.argsort(clocks, kind="stable"))

    def _local_steps(self, given: Round) -> NDArray[np.int64]:
        assert self.epochs is not None
        assert given.epochs is not None
        return np.minimum(np.ceil(self.epochs * given.epochs / _ROUNDING), 2.0**62).astype(np.int64)
