"""Collectives of nodes that are all rows of one tensor: reductions over the node dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor

from vsim.cluster.collectives import Collectives, Finish, Pending
from vsim.cluster.ledger import Ledger
from vsim.cluster.reductions import reduce_rows, rows_of


class StackedCollectives(Collectives):
    """Collectives of nodes that are rows of one tensor; a collective is a reduction over dim 0."""

    def __init__(self, ledger: Ledger, active: Sequence[int] | None = None) -> None:
        super().__init__(ledger, [range(ledger.num_nodes if active is None else len(active))])
        if active is not None:
            self.attend(active)

    def start(
        self, collective: str | Callable[..., Tensor], *arguments: Any, delay: int = 0, **options: Any
    ) -> Pending:
        pending = super().start(collective, *arguments, delay=delay, **options)
        pending.arrived()
        return pending

    def _all_reduce(self, stacked: Tensor, op: str, shares: Tensor | None) -> Finish:
        return lambda: reduce_rows(stacked, op, shares)

    def _all_gather(self, stacked: Tensor) -> Finish:
        return lambda: stacked.clone()

    def _broadcast(self, stacked: Tensor, src: int) -> Finish:
        return lambda: stacked[src].clone()

    def _sent(self, stacked: Tensor, pairs: Sequence[tuple[int, int]]) -> Finish:
        return lambda: rows_of(stacked, [src for src, _ in pairs])

    def _exchanged(self, stacked: Tensor, group: Sequence[int]) -> Finish:
        return lambda: rows_of(stacked, group).transpose(0, 1)

    def _rows(self, stacked: Tensor, sources: Sequence[int], receivers: Sequence[int]) -> Finish:
        return lambda: rows_of(stacked, sources)  # one copy for all receivers
