"""Who takes part in a collective, and how much each of them counts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor


def groups_of(among: Any, num_nodes: int) -> list[list[int]]:
    """Return the groups that are named: nodes are one group, groups of nodes several; empty ones are left out.

    Raises:
        ValueError: something named is no node, or is named twice.
    """
    parts: list[Any] = [part.tolist() if hasattr(part, "tolist") else part for part in among]
    groups = [list(part) for part in parts] if all(hasattr(part, "__iter__") for part in parts) else [parts]
    named = [node for group in groups for node in group]
    if any(type(node) is not int for node in named) or sorted({*named} & {*range(num_nodes)}) != sorted(named):
        raise ValueError(f"each of the nodes that take part must be named once, from 0 to {num_nodes - 1}; got {among}")
    return [group for group in groups if group]


def shares_of(weights: Tensor | None, group: Sequence[int]) -> Tensor | None:
    """Return the weights (K,) of the nodes of a group scaled to sum to 1, if there are any."""
    if weights is None:
        return None
    own = weights[list(group)]
    # On the CPU, where float64 always is: a few numbers, whatever the device and precision of what they weigh.
    return own.cpu().double() / own.sum().item()
