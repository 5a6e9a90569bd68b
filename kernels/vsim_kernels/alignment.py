"""Alignment of the nodes' tensors in memory, on which the last bits of matrix products may depend.

A separate tensor begins at a multiple of 64 bytes. Row k > 0 of a dense stacked tensor (K, …) is so placed only if the
size of a row is a multiple of 64 bytes. Some libraries sum in another order if an operand is not aligned (MKL on AMD
processors: to 16 bytes). To make node k's products bitwise equal to the products of a run with one node, the rows of
stacked operands are placed a multiple of 64 bytes apart, with a gap behind each row if needed.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

# Alignment in bytes, a divisor of the alignment of torch's allocators.
ALIGNMENT = 64


def matters(device: torch.device) -> bool:
    """Return whether results on a device may depend on alignment. Only on the CPU: other devices align all tensors."""
    return device.type == "cpu"


def is_aligned(tensor: Tensor) -> bool:
    """Return whether a tensor begins at a multiple of 64 bytes, as separate tensors do.

    True for all tensors on devices where alignment does not matter.
    """
    return not matters(tensor.device) or tensor.data_ptr() % ALIGNMENT == 0


def aligned(tensor: Tensor) -> Tensor:
    """Return the tensor if it is aligned, else an aligned copy."""
    return tensor if is_aligned(tensor) else tensor.clone()


def empty_rows(num_rows: int, shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return an uninitialised *stacked* (num_rows, *shape) tensor, every row dense and aligned."""
    like = torch.empty((), dtype=dtype, device=device)
    size = torch.Size(shape)
    strides = torch.empty(size, device="meta").stride()
    return _allocated(like, (num_rows, *size), strides, 0)


def are_apart(stacked: Tensor) -> bool:
    """Return whether the rows of a *stacked* (K, …) tensor are a multiple of 64 bytes apart; true for a single row.

    True for all tensors on devices where alignment does not matter.
    """
    shape = stacked.shape
    return (
        not matters(stacked.device)
        or len(shape) < 2
        or shape[0] < 2
        or stacked.stride(0) * stacked.element_size() % ALIGNMENT == 0
    )


def rows_apart(stacked: Tensor) -> Tensor:
    """Return the *stacked* (K, …) tensor if its rows are a multiple of 64 bytes apart, else a copy whose rows are.

    The rows of the copy keep their strides. All begin at the offset that row 0 has from a multiple of 64 bytes, as the
    same view does in a run with one node.
    """
    if are_apart(stacked):
        return stacked
    inner = stacked
    for dim in range(1, stacked.dim()):
        if stacked.stride(dim) == 0:  # expanded: copy one entry for all
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
