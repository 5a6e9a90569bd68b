"""The collectives, and their stacked implementation: reductions down the node dimension.

Every collective takes a *stacked* tensor (R, …): a row for each node held here (all K in the simulator). A result that
is equal on all nodes comes back once, as a *shared* tensor; one that differs between groups comes back stacked. This
is where the ledger is written, and nowhere else.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from vsim.arguments import one_of, whole_number
from vsim.cluster.ledger import Event, Ledger

Groups = Sequence[Sequence[int]]
REDUCTIONS = ("mean", "sum", "max", "min")


def reduce_rows(stacked: Tensor, op: str, weights: Tensor | None = None) -> Tensor:
    """Reduce (R, …) over its rows in rank order: the one kernel that every backend's exact result comes from."""
    if weights is not None:
        return torch.tensordot(weights.to(stacked), stacked, dims=1)
    if op == "mean":
        return stacked.mean(0)
    if op == "sum":
        return stacked.sum(0)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


class Collectives(ABC):
    """The collectives of a cluster of K nodes; every call is recorded in the ledger.

    Attributes:
        num_nodes: K.
        ledger: where calls are recorded.
        step, moment: the step that calls now belong to, and whether they come before its optimizer step, "gradients",
            or after it, "weights"; the cluster and the strategy set them.
        label: that of the last call.
    """

    def __init__(self, ledger: Ledger) -> None:
        self.num_nodes = ledger.num_nodes
        self.ledger = ledger
        self.step, self.moment = 0, "weights"
        self.label = ""
        self._billed = True

    def all_reduce(
        self,
        stacked: Tensor,
        op: str,
        *,
        label: str = "all_reduce",
        groups: Groups | None = None,
        weights: Tensor | None = None,
        payload_bytes: float | None = None,
    ) -> Tensor:
        """Reduce over the nodes.

        Args:
            stacked: (R, …).
            op: "mean", "sum", "max" or "min".
            label: its name in the ledger.
            groups: a partition of range(K); every group then reduces on its own.
            weights: (K,), one per node, for a weighted mean; they are scaled to sum to 1 in every group.
            payload_bytes: what one node hands in, if that is not its row as it is (packed indices, fewer bits).

        Returns:
            Shared (…); with `groups`, stacked (R, …): every row the result of its own group.
        """
        one_of("op", op, REDUCTIONS)
        if weights is not None and op != "mean":
            raise ValueError(f"weights are for op='mean', got op={op!r}")
        self._record("all_reduce", label, stacked, groups, payload_bytes)
        return self._all_reduce(stacked, op, groups, weights)

    def all_gather(self, stacked: Tensor, *, label: str = "all_gather", payload_bytes: float | None = None) -> Tensor:
        """Give every node the rows of all: (R, …) → shared (K, …), in the order of the ranks."""
        self._record("all_gather", label, stacked, None, payload_bytes)
        return self._all_gather(stacked)

    def broadcast(
        self, stacked: Tensor, src: int = 0, *, label: str = "broadcast", payload_bytes: float | None = None
    ) -> Tensor:
        """Give every node the row of node `src`: (R, …) → shared (…)."""
        whole_number("src", src, at_least=0, at_most=self.num_nodes - 1)
        order = None if src == 0 else [[*range(src, self.num_nodes), *range(src)]]  # along the ring
        self._record("broadcast", label, stacked, order, payload_bytes)
        return self._broadcast(stacked, src)

    @contextmanager
    def unbilled(self) -> Iterator[None]:
        """Leave calls out of the ledger for a block: measurements of a run are not part of the run."""
        before, self._billed = self._billed, False
        try:
            yield
        finally:
            self._billed = before

    def _record(
        self, collective: str, label: str, stacked: Tensor, groups: Groups | None, payload_bytes: float | None
    ) -> None:
        self.label = label
        if groups is not None:
            check_partition(groups, self.num_nodes)
        if not self._billed:
            return
        if payload_bytes is None:
            payload_bytes = stacked[0].numel() * stacked.element_size()
        taking_part = self.ledger.everyone if groups is None else tuple(map(tuple, groups))
        self.ledger.record(Event(self.step, self.step, self.moment, collective, label, payload_bytes, taking_part))

    @abstractmethod
    def _all_reduce(self, stacked: Tensor, op: str, groups: Groups | None, weights: Tensor | None) -> Tensor: ...

    @abstractmethod
    def _all_gather(self, stacked: Tensor) -> Tensor: ...

    @abstractmethod
    def _broadcast(self, stacked: Tensor, src: int) -> Tensor: ...


class StackedCollectives(Collectives):
    """All nodes are rows of one tensor, so that a collective is a reduction over dim 0."""

    def _all_reduce(self, stacked: Tensor, op: str, groups: Groups | None, weights: Tensor | None) -> Tensor:
        if groups is None:
            return reduce_rows(stacked, op, None if weights is None else shares_of(weights))
        result = torch.empty_like(stacked)
        for group in groups:
            rows = torch.as_tensor(group, device=stacked.device)
            own = None if weights is None else shares_of(weights[list(group)])
            result[rows] = reduce_rows(stacked[rows], op, own)
        return result

    def _all_gather(self, stacked: Tensor) -> Tensor:
        return stacked

    def _broadcast(self, stacked: Tensor, src: int) -> Tensor:
        return stacked[src]


def shares_of(weights: Tensor) -> Tensor:
    """Return weights (n,) scaled to sum to 1."""
    # On the CPU, where float64 always is: a few numbers, whatever the device and precision of what they weigh.
    return weights.cpu().double() / weights.sum().item()


def check_partition(groups: Groups, num_nodes: int) -> None:
    """Raise a ValueError unless every node is in exactly one of the groups."""
    if sorted(node for group in groups for node in group) != list(range(num_nodes)):
        raise ValueError(f"groups must hold each of the nodes 0 … {num_nodes - 1} exactly once, got {groups}")
