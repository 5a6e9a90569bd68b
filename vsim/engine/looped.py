"""Compute the nodes one after another: the reference for the proofs of the other executors."""

from __future__ import annotations

from collections.abc import Iterable
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from vsim_kernels.alignment import rows_apart

from vsim.cluster.randomness import drawing_from
from vsim.cluster.replicas import Views
from vsim.engine.attributes import Attributes
from vsim.engine.executor import Executor, check_depends, write_or_add
from vsim.trees import mapped


class LoopExecutor(Executor):
    """Computes one node after another in eager PyTorch: bitwise equal to K separate processes, for any model.

    Every node has its own copy of the model's Python objects; the copies share frozen tensors.
    """

    name = "loop"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        r = self.replicas
        self.names = [c.name for c in r.layout]
        # `homes` are each node's weights; `leaves` are views of them, as parameters for the model.
        homes = [[self._leaf(w)[0] for w in r.views(rows).values()] for rows in r.weights.split(1)]
        leaves = [[home.detach().requires_grad_() for home in own] for own in homes]
        grads = [list(r.views(row).values()) for row in r.grads]
        buffers = [{name: self._leaf(b[k : k + 1])[0] for name, b in r.buffers.items()} for k in range(r.num_held)]
        self.nodes = list(map(_Node, homes, leaves, grads, buffers))

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        self.objective.separate()
        return self.compute(range(len(self.nodes)), batch, share, first)

    def compute(self, numbers: Iterable[int], batch: Any, share: float, first: bool) -> Tensor:
        """Do the work of `_backward` for the nodes with these numbers only; `batch` has rows for all nodes."""
        batch, losses = mapped(rows_apart, batch), []
        python = Attributes(self.objective.owners()).noted() if self.objective.is_shared else None
        with self._moved_up_to_date():
            for number in numbers:
                if python is not None:
                    python()  # one step of all nodes: each begins with the same attributes
                node, objective = self.nodes[number], self.objective.of_row(number)
                own_batch = mapped(itemgetter(number), batch)
                parameters = dict(zip(self.names, node.leaves, strict=True))
                # Keep the context until the gradients are computed, because checkpointed parts of the model run again.
                stream = self.generators[number]
                with drawing_from(stream) as before, objective.with_tensors(parameters, node.buffers):
                    self.settings.undrawn.setdefault(stream, before)
                    with self._precision():
                        loss = self._loss(objective, own_batch)
                    gradients = _gradients(loss, node.leaves, share)
                self._warn_of_frozen(parameters)
                write_or_add(node.grads, gradients, first)
                keep_assigned(node.leaves, node.homes)
                losses.append(loss.detach())
        return torch.stack(losses) * share if share != 1.0 else torch.stack(losses)


class _Node(NamedTuple):
    """A node's weights, parameters (views of the weights), gradients, and buffers by name."""

    homes: list[Tensor]
    leaves: list[Tensor]
    grads: list[Tensor]
    buffers: Views


def _gradients(loss: Tensor, leaves: list[Tensor], share: float) -> list[Tensor]:
    """Return the gradients of share · loss. Calls `backward`, which reentrant checkpointing requires."""
    check_depends(loss)
    loss.backward(torch.full_like(loss, share))
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients


def keep_assigned(leaves: Iterable[Tensor], homes: Iterable[Tensor]) -> None:
    """Copy back to `homes` the weights that the model has reassigned (`weight.data = …`, as nn.LSTM does on CUDA)."""
    for leaf, home in zip(leaves, homes, strict=True):
        if leaf.data_ptr() != home.data_ptr():
            home.copy_(leaf.detach())
            leaf.data = home
