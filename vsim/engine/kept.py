"""Tensors of the step that forward keeps in attributes, as in `self.last = h.detach()`.

In the loop every node has its own. Vectorized, all nodes share the model's Python, and such an attribute holds the
first node's tensor, without its graph: the same as the loop's model of the first node. The proof lets only models pass
in which no later step computes with it: before its second step it spoils what the first has kept.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import torch
from torch import Tensor

from vsim.engine.objective import Objective


def of_step(objective: Objective, paths: Collection[str]) -> list[str]:
    """Return those of the paths of attributes that hold one tensor, in a module that PyTorch registers."""
    return [path for path, _, _ in _places(objective, paths)]


def take_first(objective: Objective, paths: Collection[str], of_first: Callable[[Tensor], Tensor]) -> None:
    """Replace the tensors of all nodes, at these paths, by those of the first node."""
    for _, attributes, name in _places(objective, paths):
        attributes[name] = of_first(attributes[name])


def values(objective: Objective, paths: Collection[str]) -> Callable[[], None]:
    """Return a function that sets the present tensors at these paths again."""
    found = [(attributes, name, attributes[name]) for _, attributes, name in _places(objective, paths)]

    def restore() -> None:
        for attributes, name, value in found:
            attributes[name] = value

    return restore


def spoil(objective: Objective, paths: Collection[str]) -> None:
    """Set the tensors at these paths to other values, with which no result of a later step is right."""
    for _, attributes, name in _places(objective, paths):
        value = attributes[name]
        real = value.is_floating_point() or value.is_complex()
        attributes[name] = torch.full_like(value, torch.nan) if real else ~value


def differing(objective: Objective, other: Objective, paths: Collection[str]) -> list[str]:
    """Return the paths at which the tensors of two copies differ by more than rounding."""
    ours, theirs = (
        {path: attributes[name] for path, attributes, name in _places(own, paths)} for own in (objective, other)
    )
    return [path for path in paths if not _are_close(ours.get(path), theirs.get(path))]


def _are_close(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None or ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        return ours is theirs
    if not (ours.is_floating_point() or ours.is_complex()):
        return torch.equal(ours, theirs)
    ours, theirs = ours.detach(), theirs.detach()
    apart = 0.1 * float(theirs.abs().nan_to_num(0.0).max()) if theirs.numel() else 0.0  # more than bfloat16 rounds
    return torch.allclose(ours, theirs, rtol=0.0, atol=apart, equal_nan=True)


def _places(objective: Objective, paths: Collection[str]) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield (path, the module's attributes, name) for those of the paths that hold a tensor."""
    for path in paths:
        module, _, name = path.rpartition(".")
        try:
            attributes = vars(objective.get_submodule(module))
        except AttributeError:  # of an object, or of a module that PyTorch does not register
            continue
        if type(attributes.get(name)) is Tensor:
            yield path, attributes, name
