"""The collectives over torch.distributed: one node a process, so that stacked tensors have one row here."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor

from vsim.cluster.collectives import Collectives, Groups, reduce_rows, shares_of
from vsim.cluster.ledger import Ledger

_OPERATIONS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# What every backend reduces, with enough precision for a sum that is divided afterwards.
_NATIVE = (torch.float32, torch.float64)


class CollectiveFailure(RuntimeError):
    """A collective did not complete: a node is gone, or did not arrive in time."""


@contextmanager
def completing(what: str) -> Iterator[None]:
    """Raise what torch.distributed raises in a block as a `CollectiveFailure` that names the collective."""
    try:
        yield
    except RuntimeError as error:
        reason = str(error).strip().split("\n")[0]
        raise CollectiveFailure(f"{what} did not complete: {reason}") from error


class ProcessCollectives(Collectives):
    """Collectives between the processes of the default process group, rank k being node k.

    Args:
        ledger: where calls are recorded; every rank records the same.
        exact: gather the rows in rank order and reduce them with the simulator's kernel, for its bits; otherwise the
            process group's own reduction.
    """

    def __init__(self, ledger: Ledger, exact: bool) -> None:
        super().__init__(ledger)
        self.rank = dist.get_rank()
        self.exact = exact
        # Where the group's backend reaches tensors.
        self.device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")

    def _all_reduce(self, stacked: Tensor, op: str, groups: Groups | None, weights: Tensor | None) -> Tensor:
        if groups is not None:
            # Random groups would need a new process group at every call; nodes gather all rows and keep their group's.
            (own,) = [list(group) for group in groups if self.rank in group]
            rows = self._all_gather(stacked)[own]
            return reduce_rows(rows, op, None if weights is None else shares_of(weights[own]))[None]
        shares = None if weights is None else shares_of(weights)
        if self.exact or stacked.dtype not in _NATIVE:
            return reduce_rows(self._all_gather(stacked), op, shares)
        total = stacked[0].to(self.device, copy=True, memory_format=torch.contiguous_format)
        if shares is not None:
            total *= shares[self.rank].item()
        with self._completing("all_reduce"):
            dist.all_reduce(total, _OPERATIONS[op])
        if op == "mean" and shares is None:
            total /= self.num_nodes
        return total.to(stacked.device)

    def _all_gather(self, stacked: Tensor) -> Tensor:
        row = self._as_bytes(stacked[0])
        rows = [torch.empty_like(row) for _ in range(self.num_nodes)]
        with self._completing("all_gather"):
            dist.all_gather(rows, row)
        return torch.stack(rows).to(stacked.device).view(stacked.dtype).view(self.num_nodes, *stacked.shape[1:])

    def _broadcast(self, stacked: Tensor, src: int) -> Tensor:
        row = self._as_bytes(stacked[0]).clone()
        with self._completing("broadcast"):
            dist.broadcast(row, src)
        return row.to(stacked.device).view(stacked.dtype).view(stacked.shape[1:])

    def _as_bytes(self, row: Tensor) -> Tensor:
        """A row as it travels: bytes, as not every backend knows every dtype, where the backend can reach them."""
        return row.to(self.device).contiguous().view(-1).view(torch.uint8)

    @contextmanager
    def _completing(self, name: str) -> Iterator[None]:
        label = name if self.label == name else f"{name} of {self.label!r}"
        with completing(f"{label} at step {self.step} on node {self.rank}"):
            yield
