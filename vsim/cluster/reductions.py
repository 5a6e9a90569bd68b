"""Reductions over nodes: groups of participating nodes, their weights, and the kernel that reduces rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vsim.arguments import one_of

REDUCTIONS = ("mean", "sum", "max", "min")


def rows_on(device: torch.device, rows: Sequence[int]) -> Any:
    """Return an index for the given rows of a tensor on `device`, chosen so that the host need not wait for the device.

    On the CPU, the index is a list. On other devices, the host would wait until a list is copied. There, the index is a
    slice for adjacent rows, and a tensor for other rows.
    """
    if device.type in ("cpu", "meta"):
        return list(rows)
    if not len(rows) or list(rows) == list(range(rows[0], rows[0] + len(rows))):
        return slice(rows[0], rows[0] + len(rows)) if len(rows) else slice(0)
    index = torch.tensor(rows)
    return index.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else index.to(device)


def rows_of(stacked: Tensor, rows: Sequence[int]) -> Tensor:
    """Return a copy of some rows of a *stacked* tensor; see `rows_on`."""
    index = rows_on(stacked.device, rows)
    return stacked[index].clone() if isinstance(index, slice) else stacked[index]


def is_whole(tensor: Tensor) -> bool:
    """Return whether the values are integers or bools."""
    return not (tensor.is_floating_point() or tensor.is_complex())


def check_reduction(op: str, stacked: Tensor, weights: Tensor | None) -> None:
    """Raise a ValueError or TypeError unless `op` can reduce these rows with these weights."""
    one_of("op", op, REDUCTIONS)
    if weights is not None and op != "mean":
        raise ValueError(f"weights are for op='mean', got op={op!r}")
    if op == "mean" and is_whole(stacked):
        raise TypeError(f"op='mean' takes floating-point numbers, got a tensor of {stacked.dtype}")


def reduce_rows(stacked: Tensor, op: str, weights: Tensor | None = None) -> Tensor:
    """Reduce (R, …) over its rows in rank order. Every backend computes its exact results with this kernel."""
    if weights is not None:
        return torch.tensordot(weights.to(stacked), stacked, dims=1)
    if op == "mean":
        return stacked.mean(0) if len(stacked) > 1 else stacked[0].clone()
    if op == "sum":
        return stacked.sum(0)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def groups_of(among: Any, active: Sequence[int]) -> list[list[int]]:
    """Return the groups in `among` as positions in `active`, which lists the nodes that take part.

    A list of nodes is one group; a list of lists is several groups. Empty groups are left out.

    Raises:
        ValueError: an entry is not the number of a participating node, or appears twice.
    """
    parts: list[Any] = [part.tolist() if hasattr(part, "tolist") else part for part in among]
    groups = [list(part) for part in parts] if all(hasattr(part, "__iter__") for part in parts) else [parts]
    groups = [[_number(node) for node in group] for group in groups]
    named = [node for group in groups for node in group]
    if any(type(node) is not int for node in named) or sorted({*named} & {*active}) != sorted(named):
        known = f"from 0 to {len(active) - 1}" if isinstance(active, range) else f"of {list(active)}"
        raise ValueError(f"each of the nodes that take part must be named once, {known}; got {among}")
    places = active if isinstance(active, range) else {node: place for place, node in enumerate(active)}
    return [[places[node] for node in group] for group in groups if group]


def _number(node: Any) -> Any:
    """Return an integer of Python, numpy or torch as an int; return other values unchanged."""
    return node.__index__() if hasattr(node, "__index__") and not isinstance(node, bool) else node


def pairs_of(pairs: Any, active: Sequence[int]) -> list[tuple[int, int]]:
    """Return pairs (source, destination) of nodes as positions in `active`.

    Raises:
        ValueError: an entry is not a pair of participating nodes; or a node is twice a source, or twice a destination.
    """
    if _are_numbers_below(pairs, len(active)) and isinstance(active, range):  # a hundred thousand pairs take no time
        return list(map(tuple, pairs.tolist()))
    listed = [tuple(pair.tolist() if hasattr(pair, "tolist") else pair) for pair in pairs]
    if any(len(pair) != 2 for pair in listed):
        raise ValueError(f"pairs must be (source, destination), …; got {pairs}")
    listed = [tuple(node.tolist() if hasattr(node, "tolist") else node for node in pair) for pair in listed]
    ends = [(groups_of(nodes, active) or [[]])[0] for nodes in zip(*listed, strict=True)]
    return list(zip(*ends, strict=True))


def _are_numbers_below(pairs: Any, end: int) -> bool:
    """Return whether `pairs` is an array (m, 2) of numbers from 0 to end − 1, without a number twice in a column."""
    if not (isinstance(pairs, np.ndarray) and pairs.dtype == np.int64 and pairs.ndim == 2 and pairs.shape[1] == 2):
        return False
    within = len(pairs) == 0 or (pairs.min() >= 0 and pairs.max() < end)
    return bool(within) and all(len(np.unique(column)) == len(pairs) for column in pairs.T)


def shares_of(weights: Tensor | None, group: Sequence[int], num_nodes: int) -> Tensor | None:
    """Return the weights (n,) of a group of n nodes from `weights` (K,), scaled to sum to 1; None without weights.

    Raises:
        ValueError: `weights` does not have one weight per node, or the sum over the group is 0 or not finite.
    """
    if weights is None:
        return None
    if weights.shape != (num_nodes,):
        raise ValueError(f"weights must be one per node, ({num_nodes},), got the shape {tuple(weights.shape)}")
    # Compute these few numbers on the CPU, which always has float64.
    own = weights[list(group)].cpu()
    total = own.sum().item()
    if not math.isfinite(total) or not total:
        raise ValueError(f"weights of nodes that reduce together must have a finite sum, not 0; got {own.tolist()}")
    return own.double() / total


def round_up(x: float) -> int:
    """Return ⌈x⌉; if x exceeds a whole number by rounding errors only, return that number (1 / (1 / 49) > 49)."""
    return math.ceil(min(x, 2.0**62) * (1 - 1e-12))
