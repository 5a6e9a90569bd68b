"""Collectives over torch.distributed. Stacked tensors have a row for each of this process's nodes."""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from vsim.cluster.collectives import Collectives, Finish
from vsim.cluster.ledger import Ledger
from vsim.cluster.reductions import reduce_rows, rows_of

_OPERATIONS = {"mean": dist.ReduceOp.SUM, "sum": dist.ReduceOp.SUM, "max": dist.ReduceOp.MAX, "min": dist.ReduceOp.MIN}
# Devices of backends that cannot access the CPU's memory.
_DEVICES = {"nccl": "cuda"}
# Dtypes that every backend can reduce, and that are precise enough for a sum that is divided afterwards.
_NATIVE = (torch.float32, torch.float64)


class CollectiveFailure(RuntimeError):
    """A collective did not complete, because a node has ended or did not arrive in time."""


@contextmanager
def completing(what: str) -> Iterator[None]:
    """Convert torch.distributed's errors in a block to a `CollectiveFailure` that names the collective."""
    try:
        yield
    except RuntimeError as error:
        reason, _, last = str(error).strip().partition("Last error:")  # nccl adds a reason at the end
        lines = [text.strip().split("\n")[0] for text in (reason, last) if text.strip()]
        raise CollectiveFailure(f"{what} did not complete: {'; '.join(lines)}") from error


def open_group(backend: str, store: dist.Store, rank: int, size: int, timeout: timedelta) -> None:
    """Make the default process group. A collective that does not complete in `timeout` raises an error."""
    name = "TORCH_NCCL_BLOCKING_WAIT"  # nccl reads this here; without it, nccl aborts the process after the timeout
    sets = backend == "nccl" and name not in os.environ
    if sets:
        os.environ[name] = "1"
    try:
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    finally:
        if sets:
            del os.environ[name]


def even_ranges(num_nodes: int, num_processes: int) -> list[range]:
    """Divide the nodes into ranges of sizes as equal as possible, one for each process.

    >>> even_ranges(5, 2)
    [range(0, 2), range(2, 5)]
    """
    bounds = [num_nodes * rank // num_processes for rank in range(num_processes + 1)]
    return [range(start, stop) for start, stop in itertools.pairwise(bounds)]


class ProcessCollectives(Collectives):
    """Collectives between the processes of the default process group, each of which holds a range of the nodes.

    The ranges are in the order of the ranks, with sizes as equal as possible.

    Args:
        ledger: records the calls; every rank records the same events.
        exact: gather all rows in the order of the nodes and reduce them with the simulator's kernel, so that results
            are bitwise equal to the simulator's. Otherwise reduce this process's rows, then use the process group's
            reduction.
        num_nodes: the number of nodes in all processes; default: the ledger's number, which may count clients.
        tags: the counter that numbers messages, shared by runs that use the same processes; default: a new counter.
    """

    def __init__(
        self,
        ledger: Ledger,
        exact: bool,
        num_nodes: int | None = None,
        tags: Iterator[int] | None = None,
    ) -> None:
        super().__init__(ledger, even_ranges(num_nodes or ledger.num_nodes, dist.get_world_size()), dist.get_rank())
        self.exact = exact
        # The device on which the group's backend can access tensors.
        self.device = torch.device(_DEVICES.get(dist.get_backend(), "cpu"))
        self._gathers_at_once = dist.get_backend() == "nccl"
        # All processes number their messages in the same way, so that messages match.
        self._tags = itertools.count(1) if tags is None else tags
        if self._gathers_at_once:
            # nccl connects all ranks at the first call, so that all ranks must make this call, and not only the two
            # ranks of a message. If two ranks have the same GPU, it raises an error.
            with completing(f"the first collective of rank {self.rank}"):
                dist.all_reduce(torch.ones(1, device=self.device))

    def of_processes(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * dist.get_world_size()
        with completing(f"exchanging values at step {self.position.step}"):
            dist.all_gather_object(values, value)
        return values

    def from_process(self, tensor: Tensor, rank: int) -> Tensor:
        sent = tensor.to(self.device, copy=True)
        self._issue("broadcast", lambda: [dist.broadcast(sent, rank, async_op=True)])()
        return sent.to(tensor.device)

    def broadcast_object(self, value: Any, rank: int = 0) -> Any:
        message = [value]
        with completing(f"learning what process {rank} knows at step {self.position.step}"):
            dist.broadcast_object_list(message, rank)
        return message[0]

    @property
    def rank_of(self) -> list[int]:
        """The process of each present node."""
        return [rank for rank, nodes in enumerate(self.ranges) for _ in nodes]

    def _all_reduce(self, stacked: Tensor, op: str, shares: Tensor | None) -> Finish:
        if self.exact or stacked.dtype not in _NATIVE or not all(self.ranges):
            rows = self._all_gather(stacked)
            return lambda: reduce_rows(rows(), op, shares)
        own = stacked.to(self.device, copy=True, memory_format=torch.contiguous_format)
        if shares is not None:
            for row, share in zip(own, shares[self.nodes.start : self.nodes.stop].tolist(), strict=True):
                row *= share
        total = own[0] if len(own) == 1 else reduce_rows(own, "sum" if op == "mean" else op, None)
        wait = self._issue("all_reduce", lambda: [dist.all_reduce(total, _OPERATIONS[op], async_op=True)])

        def finish() -> Tensor:
            wait()
            mean = op == "mean" and shares is None
            return (total / self.num_nodes if mean else total).to(stacked.device)

        return finish

    def all_rows(self, stacked: Tensor, held: Sequence[int], label: str) -> Tensor:
        self.label = label
        return self._gathered(stacked, held)()

    def _all_gather(self, stacked: Tensor) -> Finish:
        return self._gathered(stacked, [len(nodes) for nodes in self.ranges])

    def _gathered(self, stacked: Tensor, held: Sequence[int]) -> Finish:
        """Gather the rows of all processes; process i holds `held[i]` rows."""
        own, size = self._as_bytes(stacked)[: held[self.rank]], len(held)
        rows = own.new_empty(sum(held), own.shape[1])
        by_rank = list(rows.split([*held]))
        if self._gathers_at_once:  # nccl knows the links between GPUs
            if len(set(held)) == 1:
                wait = self._issue("all_gather", lambda: [dist.all_gather_into_tensor(rows, own, async_op=True)])
            else:  # nccl, unlike gloo, takes ranges of different sizes
                wait = self._issue("all_gather", lambda: [dist.all_gather(by_rank, own, async_op=True)])
            return lambda: self._from_bytes(rows, stacked, wait)
        # Exchange in turns, so that a connection carries one message each way. In gloo's ring, a node's request waits
        # behind the data that the node sends, which takes up to 1.5 times as long.
        by_rank[self.rank].copy_(own)
        tag = next(self._tags)

        def turn(by: int) -> Callable[[], None]:
            src, dst = (self.rank - by) % size, (self.rank + by) % size
            both = [dist.P2POp(dist.irecv, by_rank[src], src, tag=tag), dist.P2POp(dist.isend, own, dst, tag=tag)]
            return self._issue_messages("all_gather", [one for one in both if one.tensor.numel()])

        first = [turn(1)] if size > 1 else []

        def take_turns() -> None:
            for arrived in first:
                arrived()
            for by in range(2, size):
                turn(by)()

        return lambda: self._from_bytes(rows, stacked, take_turns)

    def _broadcast(self, stacked: Tensor, src: int) -> Finish:
        row = self._as_bytes(stacked)[src - self.nodes.start if src in self.nodes else 0].clone()
        wait = self._issue("broadcast", lambda: [dist.broadcast(row, self.rank_of[src], async_op=True)])
        return lambda: self._from_bytes(row[None], stacked, wait)[0]

    def _sent(self, stacked: Tensor, pairs: Sequence[tuple[int, int]]) -> Finish:
        own = self._as_bytes(stacked)
        return self._delivered(pairs, lambda row, _: own[row], stacked)

    def _rows(self, stacked: Tensor, sources: Sequence[int], receivers: Sequence[int]) -> Finish:
        if len(receivers) == self.num_nodes and not all(self.ranges):  # processes without a node receive, too
            rows = self._all_gather(stacked)
            return lambda: rows_of(rows(), sources)
        one_a_rank = {self.rank_of[dst]: dst for dst in receivers}.values()
        return self._sent(stacked, [(src, dst) for dst in one_a_rank for src in sources])

    def _exchanged(self, stacked: Tensor, group: Sequence[int]) -> Finish:
        own, n = self._as_bytes(stacked), len(group)
        parts = own.view(len(own), n, own.shape[1] // max(n, 1))
        pairs = [(src, dst) for dst in group for src in group]
        rows = self._delivered(pairs, lambda row, dst: parts[row, group.index(dst)], stacked[:, 0])
        return lambda: (found := rows()).view(len(found) // max(n, 1), n, *found.shape[1:])

    def _delivered(
        self, pairs: Sequence[tuple[int, int]], payload: Callable[[int, int], Tensor], like: Tensor
    ) -> Finish:
        """Send bytes `payload(row, dst)` for every pair (src, dst); return the bytes for this process's nodes.

        Args:
            payload: returns the bytes; `row` is the row of the node src among this process's rows.
            like: a stacked tensor (R, …); every message has the shape and dtype of its rows. The result is (n, …).
        """
        # Send from node to node, because groups that change with each call would need a new process group each time.
        tag = next(self._tags)
        arriving = [src for src, dst in pairs if dst in self.nodes]
        width = math.prod(like.shape[1:]) * like.element_size()
        rows = torch.empty(len(arriving), width, dtype=torch.uint8, device=self.device)
        places, messages = iter(rows), []
        for src, dst in pairs:
            sent = payload(src - self.nodes.start, dst) if src in self.nodes else None
            if dst in self.nodes:
                place = next(places)
                if sent is None:
                    messages.append(dist.P2POp(dist.irecv, place, self.rank_of[src], tag=tag))
                else:
                    place.copy_(sent)
            elif sent is not None:
                messages.append(dist.P2POp(dist.isend, sent, self.rank_of[dst], tag=tag))
        wait = self._issue_messages("messages", messages)
        return lambda: self._from_bytes(rows, like, wait)

    def _as_bytes(self, stacked: Tensor) -> Tensor:
        """Return this process's rows as bytes (R, n) on the backend's device, as some backends lack some dtypes."""
        rows = stacked.to(self.device).contiguous()
        return rows.view(-1).view(torch.uint8).view(len(rows), math.prod(rows.shape[1:]) * rows.element_size())

    def _from_bytes(self, rows: Tensor, stacked: Tensor, wait: Callable[[], None]) -> Tensor:
        """Wait for the bytes of n rows, and return n rows with the dtype and shape of the rows of `stacked`."""
        wait()
        # Flatten first, because rows of 0 bytes cannot be viewed in another dtype.
        return rows.to(stacked.device).flatten().view(stacked.dtype).view(len(rows), *stacked.shape[1:])

    def _issue_messages(self, name: str, messages: list[Any]) -> Callable[[], None]:
        return self._issue(name, lambda: dist.batch_isend_irecv(messages) if messages else [])

    def _issue(self, name: str, call: Callable[[], Sequence[Any]]) -> Callable[[], None]:
        """Issue messages, and return a function that waits for them. Both raise a `CollectiveFailure` on errors."""
        label = name if self.label == name else f"{name} of {self.label!r}"
        own = [self.active[node] for node in self.nodes]
        whom = f"node{'s' if len(own) > 1 else ''} {str(own).strip('[]')}" if own else f"rank {self.rank}"
        where = f"{label} at step {self.position.step} on {whom}"
        with completing(where):
            works = call()

        def wait() -> None:
            with completing(where):
                for work in works:
                    work.wait()

        return wait
