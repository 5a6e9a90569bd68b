"""Compute the nodes one after another: the reference that the other executors are proved against."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from vsim_kernels.alignment import rows_apart

from vsim.cluster.randomness import drawing_from
from vsim.cluster.replicas import Views
from vsim.engine.executor import SHARED_ROW, Executor, bits_of, check_depends, write_or_add
from vsim.private_torch import version


class LoopExecutor(Executor):
    """Computes node after node in ordinary eager PyTorch: bitwise equal to K separate processes, for any model.

    Every node has its own copy of the model's Python; the copies share frozen tensors.
    """

    name = "loop"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        r = self.replicas
        self.names = [c.name for c in r.layout]
        models = (self.objective.model, *self.objective.originals)
        self._strangers = {id(p): name for model in models for name, p in model.named_parameters()}
        self._originals = [t for model in self.objective.originals for t in (*model.parameters(), *model.buffers())]
        self._has_checked = False
        # Weights of each node, and views of these weights as parameters for the model.
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

    def losses_and_grads(self, batch: Any, minibatch_size: int | None = None) -> Tensor:
        self.objective.part()
        return super().losses_and_grads(batch, minibatch_size)

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        return self.compute(range(len(self.nodes)), batch, share, first)

    def compute(self, numbers: Iterable[int], batch: Any, share: float, first: bool) -> Tensor:
        """Compute only the nodes with these numbers, as `_backward` does; `batch` is the stacked batch of all nodes.

        Raises:
            ValueError: the model changes a row of weights that nodes share, or its loss depends on parameters that
                belong to no node.
        """
        batch, losses = tree_map(rows_apart, batch), []
        row = self.replicas.weights.clone() if self.replicas.shares_weights else None
        with self._moved_up_to_date():
            for number in numbers:
                node, objective = self.nodes[number], self.objective.of_row(number)
                own_batch = tree_map(lambda t, number=number: t[number], batch)
                of_originals = [] if self._has_checked else list(map(version, self._originals))
                parameters = dict(zip(self.names, node.leaves, strict=True))
                # Keep the context until the gradients are computed, as checkpointed parts of the model run again.
                with drawing_from(self.generators[number]), objective.placed(parameters, node.buffers):
                    with self._precision():
                        loss, _ = objective(own_batch, False)
                    self._check_reached(loss, of_originals)
                    own_share = share / len(self.nodes) if self.replicas.shares_grads else share
                    gradients = _gradients(loss, node.leaves, own_share)
                write_or_add(node.grads, gradients, first and (number == 0 or not self.replicas.shares_grads))
                keep_assigned(node.leaves, node.homes)
                losses.append(loss.detach())
        if row is not None and not row.is_meta and not torch.equal(bits_of(row), bits_of(self.replicas.weights)):
            raise ValueError(SHARED_ROW)
        return torch.stack(losses) * share if share != 1.0 else torch.stack(losses)

    def _check_reached(self, loss: Tensor, of_originals: list[int]) -> None:
        """Check that the first loss depends only on parameters of the node, and that it changed only the node's.

        During a step, a node's own tensors replace the module's parameters. But a parameter held elsewhere, in a list
        or in a function that names the trainer's model, is still the original.

        Args:
            of_originals: the versions of the originals' tensors before.

        Raises:
            ValueError: the loss depends on other parameters, or a function changes the original.
        """
        if self._has_checked:
            return
        self._has_checked = True
        if of_originals != list(map(version, self._originals)):
            raise ValueError(
                "a function that names the model changes the model that was given, not the copies that a run trains: "
                "take the module from a hook's arguments, or use a bound method (self.register_forward_hook(self.f))"
            )
        nodes = [loss.grad_fn]
        seen = set(nodes)
        while nodes:
            node = nodes.pop()
            name = self._strangers.get(id(getattr(node, "variable", None)))
            if name is not None:
                raise ValueError(
                    f"the loss depends on {name} not by the module that has it but by another way, such as a list, a "
                    "closure or a global variable, where it belongs to no node and is never trained: take it from "
                    "its module, in forward"
                )
            found = {following for following, _ in getattr(node, "next_functions", ()) if following is not None}
            nodes += found - seen
            seen |= found


class _Node(NamedTuple):
    """A node's weights, parameters (views of the weights), gradients, and buffers by name."""

    homes: list[Tensor]
    leaves: list[Tensor]
    grads: list[Tensor]
    buffers: Views


def _gradients(loss: Tensor, leaves: list[Tensor], share: float) -> list[Tensor]:
    """Return the gradients of share · loss. Calls `backward`, because reentrant checkpointing requires it."""
    check_depends(loss)
    loss.backward(torch.full_like(loss, share))
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
    for leaf in leaves:
        leaf.grad = None
    return gradients


def keep_assigned(leaves: Iterable[Tensor], homes: Iterable[Tensor]) -> None:
    """Copy back weights that the model has assigned by `weight.data = …`, as nn.LSTM does on CUDA."""
    for leaf, home in zip(leaves, homes, strict=True):
        if leaf.data_ptr() != home.data_ptr():
            home.copy_(leaf.detach())
            leaf.data = home
