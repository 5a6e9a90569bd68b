"""The collectives over torch.distributed: one node a process, so that stacked tensors have one row here."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vsim.cluster.collectives import Collectives, Finish
from vsim.cluster.ledger import Ledger
from vsim.cluster.reductions import reduce_rows

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
    """Collectives between the processes of the default process group, rank k being the k-th node that takes part.

    Args:
        ledger: where calls are recorded; every rank records the same.
        exact: gather the rows in rank order and reduce them with the simulator's kernel, for its bits; otherwise the
            process group's own reduction.
        active: who takes part; None: all.
    """

    def __init__(self, ledger: Ledger, exact: bool, active: Sequence[int] | None = None) -> None:
        self.rank = dist.get_rank()
        super().__init__(ledger, range(self.rank, self.rank + 1), active)
        self.exact = exact
        # Where the group's backend reaches tensors.
        self.device = torch.device("cuda" if dist.get_backend() == "nccl" else "cpu")
        self._messages = 0

    def anew(self, active: Sequence[int]) -> ProcessCollectives:
        return ProcessCollectives(self.ledger, self.exact, active)

    def _all_reduce(self, stacked: Tensor, op: str, shares: Tensor | None) -> Finish:
        if self.exact or stacked.dtype not in _NATIVE:
            rows = self._all_gather(stacked)
            return lambda: reduce_rows(rows(), op, shares)
        total = stacked[0].to(self.device, copy=True, memory_format=torch.contiguous_format)
        if shares is not None:
            total *= shares[self.rank].item()
        wait = self._issue("all_reduce", lambda: [dist.all_reduce(total, _OPERATIONS[op], async_op=True)])

        def finish() -> Tensor:
            wait()
            mean = op == "mean" and shares is None
            return (total / self.num_nodes if mean else total).to(stacked.device)

        return finish

    def _all_gather(self, stacked: Tensor) -> Finish:
        # In turns, so that a line has one message each way: in gloo's own ring a node's request for more waits behind
        # what it sends, which takes up to half as long again.
        row, n = self._as_bytes(stacked), self.num_nodes
        rows = row.expand(n, -1).clone()
        self._messages += 1  # as in `_swapped`
        tag = self._messages

        def turn(by: int) -> Callable[[], None]:
            src, dst = (self.rank - by) % n, (self.rank + by) % n
            both = [dist.P2POp(dist.irecv, rows[src], src, tag=tag), dist.P2POp(dist.isend, row, dst, tag=tag)]
            return self._issue("all_gather", lambda: dist.batch_isend_irecv(both))

        first = [turn(1)] if n > 1 else []

        def wait() -> None:
            for arrived in first:
                arrived()
            for by in range(2, n):
                turn(by)()

        return lambda: self._from_bytes(rows, stacked, wait)

    def _broadcast(self, stacked: Tensor, src: int) -> Finish:
        row = self._as_bytes(stacked).clone()
        wait = self._issue("broadcast", lambda: [dist.broadcast(row, src, async_op=True)])
        return lambda: self._from_bytes(row[None], stacked, wait)[0]

    def _sent(self, stacked: Tensor, pairs: Sequence[tuple[int, int]]) -> Finish:
        own = self._as_bytes(stacked)
        parts = {dst: own for src, dst in pairs if src == self.rank}
        return self._swapped(parts, [src for src, dst in pairs if dst == self.rank], stacked)

    def _exchanged(self, stacked: Tensor, group: Sequence[int]) -> Finish:
        group = group if self.rank in group else []
        parts = self._as_bytes(stacked).view(stacked.shape[1], -1)
        return self._swapped(dict(zip(group, parts, strict=False)), group, stacked[:, 0])

    def _swapped(self, parts: Mapping[int, Tensor], sources: Sequence[int], like: Tensor) -> Finish:
        """Send bytes to nodes, and receive rows like that of `like` (1, …) from n `sources`: (n, …)."""
        # From node to node: groups that are drawn anew would need a new process group at every call.
        self._messages += 1  # the same everywhere, so that no message is taken for another
        rows = torch.empty(len(sources), like.numel() * like.element_size(), dtype=torch.uint8, device=self.device)
        messages = [
            dist.P2POp(dist.isend, part, dst, tag=self._messages) for dst, part in parts.items() if dst != self.rank
        ]
        for row, src in zip(rows, sources, strict=True):
            if src == self.rank:
                row.copy_(parts[src])
            else:
                messages.append(dist.P2POp(dist.irecv, row, src, tag=self._messages))
        wait = self._issue("messages", lambda: dist.batch_isend_irecv(messages) if messages else [])
        return lambda: self._from_bytes(rows, like, wait)

    def _as_bytes(self, stacked: Tensor) -> Tensor:
        """The row held here as it travels: bytes, as not every backend knows every dtype, where the backend is."""
        return stacked[0].to(self.device).contiguous().view(-1).view(torch.uint8)

    def _from_bytes(self, rows: Tensor, stacked: Tensor, wait: Callable[[], None]) -> Tensor:
        """Wait for the bytes of n rows that are like that of `stacked`."""
        wait()
        # Flat, as rows without a byte are no rows of another dtype.
        return rows.to(stacked.device).flatten().view(stacked.dtype).view(len(rows), *stacked.shape[1:])

    def _issue(self, name: str, call: Callable[[], Sequence[Any]]) -> Callable[[], None]:
        """Issue messages, and return what waits for all of them; what fails is raised as a `CollectiveFailure`."""
        label = name if self.label == name else f"{name} of {self.label!r}"
        where = f"{label} at step {self.step} on node {self.active[self.rank]}"
        with completing(where):
            works = call()

        def wait() -> None:
            with completing(where):
                for work in works:
                    work.wait()

        return wait
