"""Tensors (K, …) with a slice for every node, and what calls an operation on each slice by itself."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from vsim_kernels.alignment import ALIGNMENT, are_apart, empty_rows_like, rows_apart

from vsim.cluster.randomness import drawing_from
from vsim.private_torch import version


class VmapError(RuntimeError):
    """The model works on one node but not under torch.func.vmap."""


class NodesDifferError(VmapError):
    """What the model's Python gets to know differs between the nodes, which may each go another way."""


class Stacked:
    """Marks a tensor (K, …) as one that holds a slice for every node."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def node_by_node(
    function: Callable[..., Any],
    num_nodes: int,
    args: Any,
    kwargs: Any,
    streams: Sequence[torch.Generator] | None = None,
) -> Any:
    """Call `function` once for each node with its slice of every `Stacked` argument; stack the tensors it returns.

    Differentiable, and exact: it *is* the eager operation on one node. What it writes into a slice is kept.

    Args:
        args, kwargs: the arguments; a tensor that differs between the nodes is wrapped in `Stacked`. The same object
            given twice is the same slice twice.
        streams: K generators that `function` draws from in place of the default generator, or None.

    Raises:
        NodesDifferError: what it returns is no tensor, and not the same on all nodes.
    """
    leaves, spec = tree_flatten((args, kwargs))
    stacked = {id(leaf): leaf.tensor for leaf in leaves if isinstance(leaf, Stacked)}
    slices = {key: _Slices.apply(tensor) for key, tensor in stacked.items()}
    at_first = {key: version(own[0]) for key, own in slices.items()}
    outcomes = []
    for node in range(num_nodes):
        own = [slices[id(leaf)][node] if isinstance(leaf, Stacked) else leaf for leaf in leaves]
        own_args, own_kwargs = tree_unflatten(own, spec)
        with nullcontext() if streams is None else drawing_from(streams[node]):
            outcomes.append(function(*own_args, **own_kwargs))
    for key, own in slices.items():
        if version(own[0]) != at_first[key]:
            _keep_written(stacked[key], own)

    def joined(*parts: Any) -> Any:
        if isinstance(parts[0], Tensor):
            return Stacked(_GradientApart.apply(_stack(parts)))
        if any(part != parts[0] for part in parts):
            name = getattr(function, "__name__", function)
            raise NodesDifferError(f"{name} is {parts[0]} on one node and not on another")
        return parts[0]

    return tree_map(joined, *outcomes)


class _Slices(torch.autograd.Function):
    """x (K, …) → its K slices; the gradient is laid out in memory as theirs are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        return rows_apart(x).unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _stack(grads)


class _GradientApart(torch.autograd.Function):
    """The identity, whose gradient comes with its rows apart, see `vsim_kernels.alignment`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.data  # no view, so that the model may change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return rows_apart(grad)


@torch.no_grad()
def _keep_written(stacked: Tensor, slices: Sequence[Tensor]) -> None:
    """Copy back what a function has written into slices that are copies, and let others know of what it has in others.

    Running statistics, say.
    """
    if slices[0].data_ptr() != stacked.data_ptr():
        stacked.copy_(torch.stack(list(slices)))
    else:
        increment_version(stacked)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one layout and keep it: kernels that reduce them later go through memory in its order."""
    first = parts[0]
    if first.is_contiguous():
        return torch.stack(list(parts))
    for dim in range(first.dim()):
        if first.stride(dim) == 0 and first.shape[dim] > 1:  # expanded
            return _stack([part.narrow(dim, 0, 1) for part in parts]).expand(len(parts), *first.shape)
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    if not first.permute(order).is_contiguous():
        return torch.stack(list(parts))
    back = [order.index(d) + 1 for d in range(first.dim())]
    return torch.stack([part.permute(order) for part in parts]).permute(0, *back)


def collected(outcomes: Iterable[Sequence[Tensor | None]], num_nodes: int) -> list[Any]:
    """Stack what a function returns for each node, part by part, each while it is in the caches; None stays None."""
    stacked: list[Tensor | None] = []
    for node, parts in enumerate(outcomes):
        if not node:
            stacked = [None if part is None else empty_rows_like(part, num_nodes) for part in parts]
        for whole, part in zip(stacked, parts, strict=True):
            if whole is not None and part is not None:
                whole[node].copy_(part)
    return stacked


def each_node(first: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Return an iterator over the nodes, of each one's slices of stacked tensors (K, …); None stays None."""
    columns = (itertools.repeat(None, first.shape[0]) if t is None else t.unbind(0) for t in others)
    return zip(first.unbind(0), *columns, strict=True)


def may_fold(*operands: Tensor | Sequence[int]) -> bool:
    """Whether the nodes may become more of a batch of matrices: all these, or dense rows of such a shape, lie apart."""
    dtype = next(t.dtype for t in operands if isinstance(t, Tensor))
    sizes = [math.prod(t.shape[1:] if isinstance(t, Tensor) else t) for t in operands]
    return all(size * dtype.itemsize % ALIGNMENT == 0 for size in sizes) and all(
        are_apart(t) for t in operands if isinstance(t, Tensor)
    )
