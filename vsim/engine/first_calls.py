"""A workaround: MKL's vector functions, whose very first call may be imprecise where several threads make it."""

from __future__ import annotations

import functools

import torch

# Those that torch takes from MKL on the CPU.
_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p"),
    *("sin", "sinh", "sqrt", "tan", "tanh"),
)


@functools.cache
def settle() -> None:
    """Call every vector function once, in this thread, so that no run does it.

    MKL chooses a function's kernel when it is first called in a process. Where the threads of a parallel operation make
    that call together, one of them may get a kernel of low accuracy, for that call: AdamW's first √v is then off by up
    to 1e-3 in half of its entries, in about one of ten processes that start on a busy machine
    [github.com/pytorch/pytorch/issues/188792].
    """
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in _FUNCTIONS:
            getattr(torch, name)(one)
