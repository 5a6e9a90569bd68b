"""Collectives for code written as if for one node: called like torch.distributed's, in place, on stacked tensors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor
from torch.distributed import ReduceOp

from vsim.cluster.collectives import Among, Bytes, Collectives, Nodes, Pairs

_REDUCTIONS = {"SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min"}
_current: ContextVar[Collectives] = ContextVar("collectives")


@contextmanager
def communicating_through(collectives: Collectives) -> Iterator[None]:
    """Return a context, for a step of a strategy, in which this module's functions use `collectives`."""
    token = _current.set(collectives)
    try:
        yield
    finally:
        _current.reset(token)


def all_reduce(
    tensor: Tensor,
    op: str | ReduceOp.RedOpType = "sum",
    *,
    label: str = "all_reduce",
    among: Among = None,
    payload_bytes: Bytes = None,
    summable: bool = False,
) -> None:
    """Replace every node's row of stacked `tensor` (K, …) by the "sum", "mean", "max" or "min" over the nodes.

    Args:
        tensor: stacked (K, …), changed in place.
        op: the reduction, by name or as ReduceOp.SUM, AVG, MAX or MIN of torch.distributed.
        label: the name of the call in the ledger.
        among: the nodes that take part, as a list or tensor of their numbers, or groups of nodes that reduce
            separately; default all. Other nodes neither send nor pay, and keep their rows. When nodes come and go,
            `self.cluster.active` lists the participating nodes.
        payload_bytes: bytes that one node sends, if not the bytes of its row (such as with fewer bits per number).
        summable: whether a sum of messages is no larger than one message, as with numbers in bfloat16. Codes with a
            scale per node cannot be summed: send them by all_gather. Without summable=True, fewer bytes get a warning.
    """
    collectives = _collectives("all_reduce", tensor)
    name = op if isinstance(op, str) else _REDUCTIONS.get(op.name, op.name)
    reduced = collectives.all_reduce(
        tensor, name, label=label, among=among, payload_bytes=payload_bytes, summable=summable
    )
    tensor.copy_(reduced)


def broadcast(
    tensor: Tensor,
    src: int | None = None,
    *,
    among: Nodes = None,
    label: str = "broadcast",
    payload_bytes: Bytes = None,
) -> None:
    """Replace every node's row of stacked `tensor` (K, …) by the row of node `src`, by default the first.

    Other arguments: see all_reduce.
    """
    collectives = _collectives("broadcast", tensor)
    tensor.copy_(collectives.broadcast(tensor, src, among=among, label=label, payload_bytes=payload_bytes))


def all_gather(
    tensor_list: list[Tensor] | None,
    tensor: Tensor,
    *,
    among: Nodes = None,
    label: str = "all_gather",
    payload_bytes: Bytes = None,
) -> list[Tensor]:
    """Give every node the rows of all nodes.

    Args:
        tensor_list: one stacked tensor (K, …) for each node that takes part, in node order, to fill in place with this
            node's row; or None.
        tensor: stacked (K, …), the row that every node sends.
        among, label, payload_bytes: see all_reduce. A node that does not take part finds its own row in every tensor.

    Returns:
        `tensor_list`, or a new list of n tensors of the shape of `tensor`, which share memory between nodes.
    """
    collectives = _collectives("all_gather", tensor)
    gathered = collectives.all_gather(tensor, among=among, label=label, payload_bytes=payload_bytes)
    rows = list(gathered if among is None else gathered.unbind(1))
    if tensor_list is None:
        return [row.expand_as(tensor) for row in rows]
    if len(tensor_list) != len(rows):
        raise ValueError(f"tensor_list must hold one tensor for each of {len(rows)} nodes, got {len(tensor_list)}")
    for target, row in zip(tensor_list, rows, strict=True):
        target.copy_(row)
    return tensor_list


def send(tensor: Tensor, pairs: Pairs, *, label: str = "send", payload_bytes: Bytes = None) -> None:
    """For every pair (src, dst), replace the row of node `dst` in stacked `tensor` (K, …) by the row of node `src`.

    All pairs send at the same time. A node is a source at most once, and a destination at most once.
    """
    tensor.copy_(_collectives("send", tensor).send(tensor, pairs, label=label, payload_bytes=payload_bytes))


def _collectives(name: str, tensor: Tensor) -> Collectives:
    collectives = _current.get(None)
    if collectives is None:
        raise RuntimeError(f"{name}() communicates between the nodes of a run: call it in a strategy's step()")
    if not isinstance(tensor, Tensor) or tensor.dim() == 0:
        raise ValueError(f"{name}() takes a stacked tensor, with the node dimension in front; got {tensor!r}")
    return collectives
