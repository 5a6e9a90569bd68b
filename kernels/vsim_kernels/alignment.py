"""Alignment of the nodes' tensors in memory, on which the last bits of their matrix products may depend.

A separate tensor begins at a multiple of 64 bytes. Row k of a dense stacked tensor (K, …) does so only if the size of a
row happens to be a multiple too, and some libraries sum in another order where an operand is not aligned (MKL on AMD's
processors, modulo 16 bytes). To make node k's products bitwise equal to the products of a single node, stacked
operands keep their rows a multiple of 64 bytes apart, with a gap behind each row if need be.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# What torch's allocators align tensors to, in bytes, or a divisor of it.
ALIGNMENT = 64


def matters(device: torch.device) -> bool:
    """Return whether results on a device may depend on alignment: on the CPU. Elsewhere every tensor is aligned."""
    return device.type == "cpu"


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor begins at a multiple of 64 bytes, as separate tensors do.

    True of all tensors where alignment does not matter.
    """
    return not matters(tensor.device) or tensor.data_ptr() % ALIGNMENT == 0


def aligned(tensor: Tensor) -> Tensor:
    """Return a tensor with these values that is aligned: the tensor itself if it is."""
    return tensor if is_aligned(tensor) else tensor.clone()


def empty_rows(num_rows: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised *stacked* (num_rows, *shape) tensor, every row dense and aligned."""
    like = torch.empty((), dtype=dtype, device=device)
    size = torch.Size(shape)
    strides = torch.empty(size, device="meta").stride()
    return _allocated(like, (num_rows, *size), strides, 0)


def are_apart(stacked: Tensor) -> bool:
    """Return whether the rows of a *stacked* (K, …) tensor are a multiple of 64 bytes apart; true of a single row.

    True of all tensors where alignment does not matter.
    """
    shape = stacked.shape
    return (
        not matters(stacked.device)
        or len(shape) < 2
        or shape[0] < 2
        or stacked.stride(0) * stacked.element_size() % ALIGNMENT == 0
    )


def rows_apart(stacked: Tensor) -> Tensor:
    """Return a *stacked* (K, …) tensor with these values and its rows a multiple of 64 bytes apart: itself if they are.

    Every row keeps its layout, and its offset from a multiple of 64 bytes is that of row 0: that of the same view of
    node k's own tensor.
    """
    if are_apart(stacked):
        return stacked
    inner = stacked
    for dim in range(1, stacked.dim()):
        if stacked.stride(dim) == 0:  # expanded: one entry stands for all
            inner = inner.narrow(dim, 0, min(1, stacked.shape[dim]))
    start = stacked.data_ptr() % ALIGNMENT // stacked.element_size()
    return _allocated(stacked, inner.shape, inner.stride()[1:], start).copy_(inner).expand(stacked.shape)


def _allocated(like: Tensor, shape: Sequence[int], strides: Sequence[int], start: int) -> Tensor:
    unit = ALIGNMENT // like.element_size()
    span = start + 1 + sum((n - 1) * stride for n, stride in zip(shape[1:], strides, strict=True) if n)
    pitch = -(-span // unit) * unit
    if not start:
        return like.new_empty_strided(shape, (pitch, *strides))
    return like.new_empty(shape[0] * pitch).as_strided(shape, (pitch, *strides), start)
