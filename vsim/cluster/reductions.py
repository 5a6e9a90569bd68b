"""How the rows of several nodes become one: what can be reduced, and the kernel that does."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.arguments import one_of

REDUCTIONS = ("mean", "sum", "max", "min")


def is_whole(tensor: Tensor) -> bool:
    """Whether the values are whole numbers or bools."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def check_reduction(op: str, stacked: Tensor, weights: Tensor | None) -> None:
    """Raise a ValueError or TypeError unless rows can be reduced so."""
    one_of("op", op, REDUCTIONS)
    if weights is not None and op != "mean":
        raise ValueError(f"weights are for op='mean', got op={op!r}")
    if op == "mean" and is_whole(stacked):
        raise TypeError(f"op='mean' takes floating-point numbers, got a tensor of {stacked.dtype}")


def reduce_rows(stacked: Tensor, op: str, weights: Tensor | None = None) -> Tensor:
    """Reduce (R, …) over its rows in rank order: the one kernel that every backend's exact result comes from."""
    if weights is not None:
        return torch.tensordot(weights.to(stacked), stacked, dims=1)
    if op == "mean":
        return stacked.mean(0)
    if op == "sum":
        return stacked.sum(0)
    return stacked.amax(0) if op == "max" else stacked.amin(0)
