"""Node after node."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from vsim.cluster.randomness import drawing_from
from vsim.cluster.replicas import Views
from vsim.engine.base import Executor, check_depends, write_or_add


class LoopExecutor(Executor):
    """Node after node, in ordinary eager PyTorch: bitwise equal to K separate processes, for any model."""

    name = "loop"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        r = self.replicas
        self.names = [c.name for c in r.layout]
        # The weights of a node, and the parameters that the model gets, which are views of them.
        homes = [[self._leaf(w)[0] for w in r.views(rows).values()] for rows in r.weights.split(1)]
        leaves = [[home.detach().requires_grad_() for home in own] for own in homes]
        grads = [list(r.views(row).values()) for row in r.grads]
        self.nodes = [
            _Node(
                homes[min(k, len(homes) - 1)],
                leaves[min(k, len(leaves) - 1)],
                grads[min(k, len(grads) - 1)],
                {name: self._leaf(b[k : k + 1])[0] for name, b in r.buffers.items()},
            )
            for k in range(r.num_held)
        ]

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        return self.compute(range(len(self.nodes)), batch, share, first)

    def compute(self, numbers: Iterable[int], batch: Any, share: float, first: bool) -> Tensor:
        """Do the same for the nodes of these numbers alone, with their parts of a stacked batch (K, B, …) of all."""
        losses, row = [], None
        with self._moved_up_to_date():
            for number in numbers:
                node = self.nodes[number]
                own_batch = tree_map(lambda t, number=number: t[number], batch)
                parameters = dict(zip(self.names, node.leaves, strict=True))
                # Until the gradients are computed: a checkpointed part of the model runs again for them.
                streams, tensors = drawing_from(self.generators[number]), self._placed(parameters, node.buffers)
                with self._own_state.of(range(number, number + 1)), streams, tensors:
                    with self._precision():
                        loss, _ = self.objective(own_batch, False)
                    self._own_state.check_reached(loss)
                    own_share = share / len(self.nodes) if self.replicas.shares_grads else share
                    gradients = _gradients(loss, node.leaves, own_share)
                write_or_add(node.grads, gradients, first and (number == 0 or not self.replicas.shares_grads))
                _keep_assigned(node)
                losses.append(loss.detach())
                if len(losses) == 1:
                    row = self._bits_of_row(node.homes)
            if len(losses) > 1:
                self._check_row(node.homes, row)
        return torch.stack(losses) * share if share != 1.0 else torch.stack(losses)


class _Node(NamedTuple):
    """The weights of a node, its parameters that are views of them, its gradients, and its buffers by name."""

    homes: list[Tensor]
    leaves: list[Tensor]
    grads: list[Tensor]
    buffers: Views


def _gradients(loss: Tensor, leaves: list[Tensor], share: float) -> list[Tensor]:
    """Return the gradients of share · loss. By `backward`, as in any script: a reentrant checkpoint requires that."""
    check_depends(loss)
    loss.backward(torch.full_like(loss, share))
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients


def _keep_assigned(node: _Node) -> None:
    """Copy weights back that the model has assigned by `weight.data = …`."""
    for leaf, home in zip(node.leaves, node.homes, strict=True):
        if leaf.data_ptr() != home.data_ptr():
            home.copy_(leaf.detach())
            leaf.data = home
