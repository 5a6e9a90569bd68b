"""The memory that a run keeps on a node, counted on tensors without values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from vsim.cluster.frozen import skipping
from vsim.cluster.optimizers import torch_optimizers
from vsim.cluster.state import owners, placements_of
from vsim.core.algorithm import Algorithm


@torch.no_grad()
def node_bytes(strategy: Algorithm, model: nn.Module) -> float:
    """Return the bytes that a node keeps from step to step, at the end of a dry run; see `Algorithm.dry_run`.

    The sum of the model's parameters and buffers, gradients of the trainable parameters, the inner optimizer's state,
    and the state that the strategy declares, such as DiLoCo's φ and its outer momentum. Activations, and buffers that
    a step or a message needs for a while, are not counted.

    Args:
        strategy: the run's own copy. model: without values.

    Raises:
        ValueError: the inner optimizer does not step tensors without values, so that the size of its state is unknown.
    """
    cluster, parameters = strategy.cluster, list(model.parameters())
    own = sum(t.nbytes for t in (*parameters, *model.buffers()))
    own += sum(p.nbytes for p in parameters if p.requires_grad)  # gradients
    try:
        with skipping(cluster):
            strategy.optim.step()
    except (NotImplementedError, RuntimeError, TypeError) as error:
        said = str(error).splitlines()[0]
        raise ValueError(f"the memory of {strategy.optim_spec} is unknown without values: {said}") from error
    rows = [leaf for one in torch_optimizers(strategy.optim) for leaf in _tensors(one)]
    for part in owners(strategy).values():
        for name, placement in placements_of(part).items():
            found = list(_tensors(vars(part).get(name)))
            if placement == "stacked":
                rows += found
            else:
                own += sum(t.nbytes for t in found)
    return own + sum(t.nbytes for t in rows) / len(cluster.weights)


def _tensors(value: Any) -> Iterator[Tensor]:
    """Yield the tensors without values that a value holds, also as the state of an optimizer or another object."""
    for leaf in tree_leaves(value):
        if isinstance(leaf, Tensor):
            if leaf.is_meta:
                yield leaf
        elif hasattr(leaf, "state_dict"):
            yield from _tensors(leaf.state_dict())
