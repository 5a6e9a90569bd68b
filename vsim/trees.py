"""The tensors of a batch: torch's `tree_leaves` and `tree_map`, with a fast path for the usual pair of tensors."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

_TENSORS = {Tensor}


def tensors_of(batch: Any) -> list[Any]:
    """Return the tensors of a batch."""
    if type(batch) in (list, tuple) and _TENSORS.issuperset(map(type, batch)):
        return list(batch)
    return tree_leaves(batch)


def mapped(function: Callable[[Any], Any], batch: Any) -> Any:
    """Return a batch with function(tensor) in place of every tensor."""
    if type(batch) is Tensor:
        return function(batch)
    if type(batch) in (list, tuple) and _TENSORS.issuperset(map(type, batch)):
        return type(batch)(map(function, batch))
    return tree_map(function, batch)
