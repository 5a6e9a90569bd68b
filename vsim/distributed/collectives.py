"""The collectives over torch.distributed: one node a process, so that stacked tensors have one row here."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from vsim.collectives import Collectives, Groups, reduce_rows
from vsim.ledger import Ledger

_OPERATIONS = {"sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}


class CollectiveFailure(RuntimeError):
    """A collective did not complete: a node is gone, or did not arrive in time."""


class ProcessCollectives(Collectives):
    """Collectives between the processes of the default process group, rank k being node k.

    Args:
        ledger: where calls are recorded; every rank records the same.
        exact: gather the rows in rank order and reduce them with the simulator's kernel, for its bits; otherwise the
            process group's own reduction.
    """

    def __init__(self, ledger: Ledger, exact: bool) -> None:
        super().__init__(dist.get_world_size(), ledger)
        self.rank = dist.get_rank()
        self.exact = exact
        self.device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def _all_reduce(self, stacked: Tensor, op: str, groups: Groups | None, weights: Tensor | None) -> Tensor:
        if groups is not None:
            # Random groups would need a process group each, made anew every time; all hear all, and keep their own.
            (own,) = [list(group) for group in groups if self.rank in group]
            rows = self._all_gather(stacked)[own]
            shares = None if weights is None else weights[own] / weights[own].sum()
            return reduce_rows(rows, op, shares)[None]
        shares = None if weights is None else weights / weights.sum()
        if self.exact:
            return reduce_rows(self._all_gather(stacked), op, shares)
        total = stacked[0].clone(memory_format=torch.contiguous_format)
        if shares is not None:
            total *= shares[self.rank].to(total.dtype)
        self._call("all_reduce", lambda: dist.all_reduce(total, _OPERATIONS.get(op, dist.ReduceOp.SUM)))
        return total.div_(self.num_nodes) if op == "mean" and shares is None else total

    def _all_gather(self, stacked: Tensor) -> Tensor:
        row = self._as_bytes(stacked[0])
        rows = [torch.empty_like(row) for _ in range(self.num_nodes)]
        self._call("all_gather", lambda: dist.all_gather(rows, row))
        return torch.stack(rows).to(stacked.device).view(stacked.dtype).view(self.num_nodes, *stacked.shape[1:])

    def _broadcast(self, stacked: Tensor, src: int) -> Tensor:
        row = self._as_bytes(stacked[0]).clone()
        self._call("broadcast", lambda: dist.broadcast(row, src))
        return row.to(stacked.device).view(stacked.dtype).view(stacked.shape[1:])

    def _as_bytes(self, row: Tensor) -> Tensor:
        """A row as it travels: bytes, as not every backend knows every dtype, where the backend can reach them."""
        return row.to(self.device).contiguous().view(-1).view(torch.uint8)

    def _call(self, name: str, collective: Callable[[], object]) -> None:
        try:
            collective()
        except RuntimeError as error:
            reason = str(error).strip().split("\n")[0]
            raise CollectiveFailure(
                f"{self.label or name} ({name}) at step {self.step} did not complete on node {self.rank}: {reason}"
            ) from error
