"""The collectives, independent of the backend that holds the nodes.

Every collective takes a *stacked* tensor (R, …), with a row for each node held here (all K in the simulator). A result
that is equal on all nodes is returned once, as a *shared* tensor; a result that differs between nodes is returned
stacked. Results never share memory with the arguments. Only this module writes to the ledger.

`among=` lists the nodes that take part. Other nodes neither send nor pay, and keep their rows.
"""

from __future__ import annotations

import math
import warnings
from abc import ABC, abstractmethod
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from typing import Any, ParamSpec

import numpy as np
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import tree_map_only

from vsim.arguments import one_of, real_number, whole_number
from vsim.cluster.ledger import Event, Ledger
from vsim.cluster.reductions import check_reduction, groups_of, is_whole, pairs_of, reduce_rows, rows_on, shares_of

Nodes = Sequence[int] | Tensor | None  # numbers of nodes; None: all nodes
Among = Nodes | Sequence[Sequence[int] | Tensor]
Pairs = Sequence[tuple[int, int]] | Tensor | NDArray[np.int64]
Bytes = float | None  # None: the bytes of a row
Finish = Callable[[], Tensor]  # waits for the issued messages, and returns the result
Merge = Callable[[Tensor, Tensor | None], Tensor]  # f(rows (n, …), weights (n,) that sum to 1 or None) → (…)
COLLECTIVES = ("all_reduce", "merge", "all_gather", "all_to_all", "broadcast", "send", "push", "pull")
_P = ParamSpec("_P")


def _awaited(issue: Callable[_P, Finish]) -> Callable[_P, Tensor]:
    """Make a collective wait for its result. `Collectives.start` calls the wrapped function, which does not wait."""

    @wraps(issue)
    def collective(*args: _P.args, **kwargs: _P.kwargs) -> Tensor:
        return issue(*args, **kwargs)()

    return collective


class Pending:
    """A collective whose result is taken later; see `Collectives.start`. A run saves its pending collectives.

    Attributes:
        due: the step at which the result is taken.
    """

    def __init__(self, collectives: Collectives, due: int, finish: Finish) -> None:
        self.due = due
        self._collectives, self._finish = collectives, finish

    def result(self) -> Tensor:
        """Return the result of the collective.

        Raises:
            RuntimeError: the current step is not the step `due`.
        """
        if self._collectives.position.step != self.due:
            raise RuntimeError(
                f"the result of this collective is due at step {self.due}, and was taken at step "
                f"{self._collectives.position.step}; give start() the delay after which it is taken"
            )
        return self.arrived()

    def arrived(self) -> Tensor:
        """Wait for the result and return it, at any step."""
        result = self._finish()
        self._finish = lambda: result
        return result

    def then(self, change: Callable[[Tensor], Tensor]) -> Pending:
        """Return this collective with `change` applied to its result."""
        return Pending(self._collectives, self.due, lambda: change(self.arrived()))


class Collectives(ABC):
    """The collectives of a cluster of K nodes; every call is recorded in the ledger.

    All collectives take the following arguments:

    - `label`: the name in the ledger;
    - `payload_bytes`: the bytes that one node hands in, for packed or quantized rows; default: the bytes of its row;
    - `among`: the nodes that take part; default: all. `all_reduce` and `merge` also take a list of several groups, each
      of which reduces separately. With `among`, results are stacked, and a node that does not take part keeps its row.

    Arguments name nodes by their numbers in `active`; rows and weights are in the order of `active`.

    The n nodes that take part now have the places 0 … n − 1 in `active`. A process that holds none of these nodes calls
    the collectives, too, to keep its shared state up to date; it passes one row, which no node receives.

    Args:
        ledger: records the calls.
        machines: the machines of each process, in the order of the processes. A machine computes for one node, or in
            turn for clients of a population. rank: the number of this process.

    Attributes:
        active: the ledger's numbers of the nodes that take part now. num_nodes: n, how many take part now.
        nodes: the places in `active` that this process holds. ranges: the places that each process holds.
        is_alone: whether this process holds all machines.
        position: the step and moment of the calls, shared with the ledger.
        label: the label of the last call.
    """

    def __init__(self, ledger: Ledger, machines: Sequence[range], rank: int = 0) -> None:
        self.ledger, self.machines, self.rank = ledger, machines, rank
        self.is_alone = len(machines) == 1
        self.attend(range(sum(map(len, machines))))
        self.position = ledger.position
        self.label = ""
        self._billed = True
        self._joins = False
        self._delay = 0

    def attend(self, active: Sequence[int], machines: Sequence[int] | None = None) -> None:
        """Set the nodes that take part from now on, by their numbers in the ledger.

        Args:
            machines: the machines that compute for these nodes, in the same order; default: the first machines.
        """
        self.num_nodes, everyone = len(active), range(self.ledger.num_nodes)
        is_everyone = active == everyone if isinstance(active, range) else [*active] == [*everyone[: len(active) + 1]]
        self.active = everyone if is_everyone else active
        machines = range(len(active)) if machines is None else machines
        ends = [bisect_left(machines, own.stop) for own in self.machines]
        self.ranges = [range(start, end) for start, end in zip([0, *ends], ends, strict=False)]
        self.nodes = self.ranges[self.rank]

    @_awaited
    def all_reduce(
        self,
        stacked: Tensor,
        op: str,
        *,
        among: Among = None,
        weights: Tensor | None = None,
        label: str = "all_reduce",
        payload_bytes: Bytes = None,
        summable: bool = False,
    ) -> Finish:
        """Reduce over the nodes.

        Args:
            stacked: (R, …).
            op: "mean", "sum", "max" or "min". The sum of integers or bools is an int64; their mean raises an error.
            weights: (K,), one per node, for a weighted mean; scaled to sum to 1 in every group.
            summable: whether a sum of messages takes no more bytes than one message. If so, a `payload_bytes` below the
                bytes of a row gives no warning. Use `all_gather` for messages that are not summable, such as codes with
                a scale for each node.

        Returns:
            Shared (…); with `among`, stacked (R, …), where every row is the result of its own group.
        """
        if summable and payload_bytes is None:
            raise TypeError("summable=True has no effect without payload_bytes=")
        check_reduction(op, stacked, weights)
        groups = [range(self.num_nodes)] if among is None else groups_of(among, self.active)
        shares = [shares_of(weights, group, self.num_nodes) for group in groups]
        self._record("all_reduce", label, stacked, groups, payload_bytes, summable)
        if among is None:
            return self._all_reduce(stacked, op, shares[0])
        stacked = stacked.long() if op == "sum" and is_whole(stacked) else stacked
        return self._by_group(stacked, lambda rows, shares: reduce_rows(rows, op, shares), groups, shares)

    @_awaited
    def merge(
        self,
        stacked: Tensor,
        function: Merge,
        *,
        among: Among = None,
        weights: Tensor | None = None,
        label: str = "merge",
        payload_bytes: Bytes = None,
    ) -> Finish:
        """Gather the rows, and merge them by a function: on every node or, among clients, on the server.

        In a ring, a merge takes the messages of an all-gather. A server sends the result only.

        Args:
            stacked: (R, …).
            function: f(dense rows (n, …), weights (n,) or None) → (…).
            among, weights: see `all_reduce`, also for the result.
        """
        groups = [range(self.num_nodes)] if among is None else groups_of(among, self.active)
        shares = [shares_of(weights, group, self.num_nodes) for group in groups]
        self._record("merge", label, stacked, groups, payload_bytes)
        if among is None:
            return _merged(self._all_gather(stacked), function, shares[0])
        return self._by_group(stacked, function, groups, shares)

    def _by_group(
        self, stacked: Tensor, function: Merge, groups: Sequence[Sequence[int]], shares: Sequence[Tensor | None]
    ) -> Finish:
        rows = [self._rows(stacked, group, group) for group in groups]
        merged = [_merged(own, function, weights) for own, weights in zip(rows, shares, strict=True)]
        return self._written(stacked, list(zip(groups, merged, strict=True)))

    @_awaited
    def all_gather(
        self, stacked: Tensor, *, among: Nodes = None, label: str = "all_gather", payload_bytes: Bytes = None
    ) -> Finish:
        """Give every node the rows of all nodes: (R, …) → shared (K, …), in the order of the ranks.

        With `among` of n nodes, the result is stacked (R, n, …), in the order of `among`. A node that does not take
        part gets its own row n times.
        """
        group = self._one_group(among)
        self._record("all_gather", label, stacked, [group], payload_bytes)
        if among is None:
            return self._all_gather(stacked)
        own = stacked[:, None].repeat_interleave(len(group), 1)
        return self._written(own, [(group, self._rows(stacked, group, group))])

    @_awaited
    def all_to_all(
        self, stacked: Tensor, *, among: Nodes = None, label: str = "all_to_all", payload_bytes: Bytes = None
    ) -> Finish:
        """Send part j of every row to node j of n: (R, n, …) → stacked (R, n, …), whose part i came from node i."""
        group = self._one_group(among)
        if stacked.shape[1:2] != (len(group),):
            raise ValueError(f"all_to_all takes a part for each of {len(group)} nodes, got {tuple(stacked.shape)}")
        self._record("all_to_all", label, stacked, [group], payload_bytes)
        return self._written(stacked, [(group, self._exchanged(stacked, group))])

    @_awaited
    def broadcast(
        self,
        stacked: Tensor,
        src: int | None = None,
        *,
        among: Nodes = None,
        label: str = "broadcast",
        payload_bytes: Bytes = None,
    ) -> Finish:
        """Give every node the row of node `src`, by default the first: (R, …) → shared (…); with `among`, (R, …)."""
        group = self._one_group(among)
        taking_part = self._named(group)
        src = (taking_part or self.active)[0] if src is None else whole_number("src", src, at_least=0)
        if src not in taking_part:
            raise ValueError(f"src must be one of the nodes that take part, {list(taking_part)}, got {src}")
        first = taking_part.index(src)
        along = [*group[first:], *group[:first]] if first else group
        self._record("broadcast", label, stacked, [along], payload_bytes)
        if among is None:
            return self._broadcast(stacked, group[first])
        row = self._rows(stacked, [group[first]], group)
        return self._written(stacked, [(group, lambda: row()[0])])

    @_awaited
    def send(self, stacked: Tensor, pairs: Pairs, *, label: str = "send", payload_bytes: Bytes = None) -> Finish:
        """Send rows from node to node, all at the same time.

        Args:
            stacked: (R, …).
            pairs: (src, dst), …; each node is a source at most once, and a destination at most once. A pair with
                src == dst neither sends nor pays.

        Returns:
            Stacked (R, …): row `dst` is the row of `src`; all other rows are unchanged.
        """
        routes = [pair for pair in pairs_of(pairs, self.active) if pair[0] != pair[1]]
        self._record("send", label, stacked, routes, payload_bytes)
        here = [dst - self.nodes.start for _, dst in routes if dst in self.nodes]
        arriving = self._sent(stacked, routes)

        def finish() -> Tensor:
            result = stacked.clone()
            arrived = arriving()  # wait in every process: a node that only sends must have sent its row
            result[rows_on(result.device, here)] = arrived
            return result

        return finish

    @_awaited
    def push(self, stacked: Tensor, *, among: Nodes = None, label: str = "push", payload_bytes: Bytes = None) -> Finish:
        """Send rows to a server, which is not a node: (R, …) → shared (n, …), in the order of `among`.

        Every process repeats the server's computations, so that the server's state is shared.
        """
        group = self._one_group(among)
        self._record("push", label, stacked, [group], payload_bytes)
        return self._all_gather(stacked) if among is None else self._rows(stacked, group, range(self.num_nodes))

    @_awaited
    def pull(
        self,
        shared: Tensor,
        stacked: Tensor | None = None,
        *,
        among: Nodes = None,
        label: str = "pull",
        payload_bytes: Bytes = None,
    ) -> Finish:
        """Fetch a value (…) from the server, which transmits the value to every node that pulls.

        Returns:
            A copy of `shared` if `stacked` is not given. Otherwise stacked (R, …): nodes that pull have the row
            `shared`, and all other nodes have their rows of `stacked` (R, …).
        """
        group = self._one_group(among)
        self._record("pull", label, shared[None], [group], payload_bytes)
        return shared.clone if stacked is None else self._written(stacked, [(group, lambda: shared)])

    def start(
        self, collective: str | Callable[..., Tensor], *arguments: Any, delay: int = 0, **options: Any
    ) -> Pending:
        """Start a collective on the tensors' current values, and take its result later, while training continues.

        The simulator computes the result at once; processes send in the background.

        Args:
            collective: the name of a method of this class; or a function that communicates through this object, such as
                a compressor's exchange of several messages. Processes wait for a function here, as its later messages
                depend on earlier ones. arguments, options: the arguments of the method or function.
            delay: steps until the result is taken, at least 0. The ledger records the step of the result as `due`, even
                if the run ends earlier.
        """
        if not callable(collective):
            one_of("collective", collective, COLLECTIVES)
        kept, named = tree_map_only(Tensor, Tensor.clone, (arguments, options))
        self._delay = whole_number("delay", delay, at_least=0)
        try:
            if callable(collective):
                result = collective(*kept, **named)
                return Pending(self, self.position.step + delay, lambda: result)
            finish: Finish = getattr(type(self), collective).__wrapped__(self, *kept, **named)
        finally:
            self._delay = 0
        return Pending(self, self.position.step + delay, finish)

    @contextmanager
    def unbilled(self) -> Iterator[None]:
        """Leave the calls of a block out of the ledger: for measurements, which are not part of a run."""
        before, self._billed = self._billed, False
        try:
            yield
        finally:
            self._billed = before

    @contextmanager
    def joined(self) -> Iterator[None]:
        """Bill the calls of a block as parts of one message: the bytes of all calls, and one latency.

        A call joins the previous call if step, moment, collective, nodes and delay are equal; otherwise it begins a new
        message. Processes send the parts one after another.
        """
        before, self._joins = self._joins, True
        try:
            yield
        finally:
            self._joins = before

    def _one_group(self, among: Nodes) -> Sequence[int]:
        if among is None:
            return range(self.num_nodes)
        groups = groups_of(among, self.active)
        if len(groups) > 1:
            raise ValueError(f"among must be the nodes that take part, not groups of them, got {among}")
        return groups[0] if groups else []

    def _record(
        self,
        collective: str,
        label: str,
        stacked: Tensor,
        groups: Sequence[Sequence[int]],
        payload_bytes: Bytes,
        summable: bool = True,
    ) -> None:
        rows, held = stacked.shape[:1], max(1, len(self.nodes))
        if collective != "pull" and rows != (held,):
            allowed = f"with a row for each of {held} nodes in front"
            raise ValueError(f"{collective} takes a stacked tensor, {allowed}; got the shape {tuple(stacked.shape)}")
        if payload_bytes is not None:
            payload_bytes = real_number("payload_bytes", payload_bytes, at_least=0, below=math.inf)
        self.label = label
        taking_part = tuple(self._named(group) for group in groups if group)
        if not self._billed or not taking_part:
            return
        size = stacked[0].numel() * stacked.element_size()
        if payload_bytes is None:
            payload_bytes = size
        elif payload_bytes < size and not summable and label not in self.ledger.doubted:
            self.ledger.doubted.add(label)
            if self.rank == 0:  # warn once, not once per process
                warnings.warn(
                    f"{collective} with label={label!r}: payload_bytes={payload_bytes:g}, and a row has {size}. Short "
                    "messages can seldom be added up on their way around a ring: send them by all_gather, or give "
                    "summable=True where their sums are no larger",
                    UserWarning,
                    stacklevel=4,
                )
        step, moment = self.position.step, "weights" if self.position.moment == "end" else self.position.moment
        facts = collective, label, payload_bytes, taking_part
        event = Event(step, step + self._delay, moment, *facts, server=self.ledger.server)
        if self._joins and len(self.ledger):
            before = self.ledger[-1]._replace(label=label, payload_bytes=payload_bytes, joined=False)
            event = event._replace(joined=before == event)
        self.ledger.record(event)

    def _named(self, group: Sequence[int]) -> Sequence[int]:
        """Return the ledger's numbers of the nodes at the places `group` in `active`."""
        if isinstance(self.active, range):  # all nodes
            return group if isinstance(group, range) else tuple(group)
        return tuple(self.active[node] for node in group)

    def _written(self, stacked: Tensor, parts: Sequence[tuple[Sequence[int], Finish]]) -> Finish:
        """Return a copy of `stacked` in which each part (nodes, values) of `parts` fills the rows of its nodes."""

        def finish() -> Tensor:
            result = stacked.clone()
            for nodes, received in parts:
                here = [node - self.nodes.start for node in nodes if node in self.nodes]
                if here:
                    result[rows_on(result.device, here)] = received()
            return result

        return finish

    # Methods of a backend -------------------------------------------------------------------------------------------

    def of_processes(self, value: Any) -> list[Any]:
        """Return the value of every process, by rank; every process must call this method. Not billed."""
        return [value]

    def all_rows(self, stacked: Tensor, held: Sequence[int], label: str) -> Tensor:
        """Return the rows (n, …) of all processes, by rank; every process must call this method. Not billed.

        Args:
            stacked: the rows of this process. held: the number of rows of every process. label: for error messages.
        """
        return stacked

    def from_process(self, tensor: Tensor, rank: int) -> Tensor:
        """Return the tensor of process `rank`; every process must pass a tensor of equal shape. Not billed."""
        return tensor

    def broadcast_object(self, value: Any, rank: int = 0) -> Any:
        """Return the value of process `rank`; every process must call this method. Not billed."""
        return value

    @abstractmethod
    def _all_reduce(self, stacked: Tensor, op: str, shares: Tensor | None) -> Finish:
        """(R, …) → shared (…); `shares` (K,) sum to 1."""

    @abstractmethod
    def _all_gather(self, stacked: Tensor) -> Finish:
        """(R, …) → shared (K, …)."""

    @abstractmethod
    def _broadcast(self, stacked: Tensor, src: int) -> Finish:
        """(R, …) → shared (…)."""

    @abstractmethod
    def _sent(self, stacked: Tensor, pairs: Sequence[tuple[int, int]]) -> Finish:
        """(R, …) → (n, …): the row of `src`, for each of the n pairs (src, dst) whose `dst` is held here."""

    @abstractmethod
    def _exchanged(self, stacked: Tensor, group: Sequence[int]) -> Finish:
        """(R, n, …) → (m, n, …): m of the n nodes of a group are held here; each gets a part from all n nodes."""

    def _rows(self, stacked: Tensor, sources: Sequence[int], receivers: Sequence[int]) -> Finish:
        """(R, …) → (n, …): the rows of n `sources`, received once if any of the `receivers` is held here."""
        return self._sent(stacked, [(src, dst) for dst in receivers for src in sources])


def _merged(rows: Finish, function: Merge, shares: Tensor | None) -> Finish:
    def finish() -> Tensor:
        dense = rows().contiguous()
        # Do not cast shares to the dtype of integer rows: shares below 1 would become 0.
        return function(dense, None if shares is None else shares.to(dense.device if is_whole(dense) else dense))

    return finish
