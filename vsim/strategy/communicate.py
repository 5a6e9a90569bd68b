"""Collectives for per-node code: in place, on stacked tensors, as torch.distributed would be called on one node."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar

from torch import Tensor
from torch.distributed import ReduceOp

from vsim.cluster.collectives import Collectives

_REDUCTIONS = {"SUM": "sum", "AVG": "mean", "MAX": "max", "MIN": "min"}
_current: ContextVar[Collectives] = ContextVar("collectives")


@contextmanager
def communicating_through(collectives: Collectives) -> Iterator[None]:
    """Make the functions of this module go through `collectives` for a block: the step of a strategy."""
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
    groups: Sequence[Sequence[int] | Tensor] | None = None,
    payload_bytes: float | None = None,
) -> None:
    """Replace every node's row of stacked `tensor` (K, …) by the "sum", "mean", "max" or "min" over the nodes.

    Args:
        tensor: stacked (K, …), changed in place.
        op: the reduction, also as torch.distributed names it: ReduceOp.SUM, AVG, MAX or MIN.
        label: its name in the ledger.
        groups: a partition of the nodes, as lists or tensors of their numbers: every group then reduces on its own.
        payload_bytes: what one node sends, if that is not its row as it is: fewer bits, for instance.
    """
    partition = None if groups is None else [[int(node) for node in group] for group in groups]
    collectives = _collectives("all_reduce", tensor)
    name = op if isinstance(op, str) else _REDUCTIONS.get(op.name, op.name)
    tensor.copy_(collectives.all_reduce(tensor, name, label=label, groups=partition, payload_bytes=payload_bytes))


def broadcast(tensor: Tensor, src: int = 0, *, label: str = "broadcast", payload_bytes: float | None = None) -> None:
    """Replace every node's row of stacked `tensor` (K, …) by that of node `src`; `payload_bytes` as of all_reduce."""
    row = _collectives("broadcast", tensor).broadcast(tensor, src, label=label, payload_bytes=payload_bytes)
    tensor.copy_(row.clone())


def all_gather(
    tensor_list: list[Tensor] | None, tensor: Tensor, *, label: str = "all_gather", payload_bytes: float | None = None
) -> list[Tensor]:
    """Give every node the rows of all nodes.

    Args:
        tensor_list: K stacked tensors (K, …) to fill in place, the one at position j with node j's row; or None.
        tensor: stacked (K, …): what every node sends.
        label, payload_bytes: as of all_reduce.

    Returns:
        `tensor_list`, or a new list of K tensors of the shape of `tensor`, which share memory between nodes.
    """
    rows = _collectives("all_gather", tensor).all_gather(tensor, label=label, payload_bytes=payload_bytes)
    if tensor_list is None:
        return [row.expand_as(tensor) for row in rows.clone()]
    if len(tensor_list) != len(rows):
        raise ValueError(f"tensor_list must hold one tensor for each of {len(rows)} nodes, got {len(tensor_list)}")
    for target, row in zip(tensor_list, rows, strict=True):
        target.copy_(row)
    return tensor_list


def _collectives(name: str, tensor: Tensor) -> Collectives:
    collectives = _current.get(None)
    if collectives is None:
        raise RuntimeError(f"{name}() communicates between the nodes of a run: call it in a strategy's step()")
    if tensor is None or tensor.dim() == 0:
        raise ValueError(f"{name}() takes a stacked tensor, with the node dimension in front; got {tensor!r}")
    return collectives
