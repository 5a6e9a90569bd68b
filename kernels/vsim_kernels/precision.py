"""The dtype in which kernels compute, which may be wider than the dtype of the tensors."""

from __future__ import annotations

import torch


def working_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype in which to compute with tensors of `dtype`: float32 for 16-bit types, else `dtype` itself.

    Raises:
        TypeError: `dtype` is not a real floating dtype.

    >>> working_dtype(torch.bfloat16), working_dtype(torch.float64)
    (torch.float32, torch.float64)
    """
    if not dtype.is_floating_point:
        raise TypeError(f"expected a floating-point tensor, got {dtype}")
    return torch.float32 if dtype.itemsize < 4 else dtype
