"""Compute the nodes one after another."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from vsim.cluster.randomness import drawing_from
from vsim.cluster.replicas import Views
from vsim.engine.executor import Before, Executor, Settings, check_depends, write_or_add
from vsim.engine.objective import listed
from vsim.private_torch import unwatched


class LoopExecutor(Executor):
    """Computes node after node in ordinary eager PyTorch: bitwise equal to K separate processes, for any model.

    If the model changes attributes in `forward`, every node has its own copy of the model.
    """

    name = "loop"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        r = self.replicas
        self.names = [c.name for c in r.layout]
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

    @property
    def reason(self) -> str:  # type: ignore[override]
        changes = self.objective.changes
        return f"the model changes {listed(changes)} in forward: every node has a copy of it" if changes else ""

    def losses_and_grads(self, batch: Any, minibatch_size: int | None = None) -> Tensor:
        losses = super().losses_and_grads(batch, minibatch_size)
        if self.objective.changes:
            self.objective.note()
        return losses

    def _use_python(self, changes: list[str]) -> None:
        if not changes:
            return
        if self.objective.is_resumed and (unsaved := self.objective.unsaved()):
            warnings.warn(
                f"the model changes {listed(unsaved)} in forward, which a checkpoint does not hold: this run continues "
                "with the values of the model that was given; make it a buffer (register_buffer), or define "
                "get_extra_state and set_extra_state",
                UserWarning,
                stacklevel=3,
            )
        self.objective.is_resumed = False
        self.objective.follow()
        self.objective.part(self.objective.callers or range(len(self.nodes)))

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        return self.compute(range(len(self.nodes)), batch, share, first)

    def compute(self, numbers: Iterable[int], batch: Any, share: float, first: bool) -> Tensor:
        """Compute only the nodes with these numbers, as `_backward` does; `batch` is the stacked batch of all nodes."""
        losses, row = [], None
        with self._moved_up_to_date():
            for number in numbers:
                node, objective = self.nodes[number], self.objective.of_row(number)
                own_batch = tree_map(lambda t, number=number: t[number], batch)
                parameters = dict(zip(self.names, node.leaves, strict=True))
                # Keep the context until the gradients are computed, as checkpointed parts of the model run again.
                with drawing_from(self.generators[number]), objective.placed(parameters, node.buffers):
                    with self._precision():
                        loss, _ = objective(own_batch, False)
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


def _keep_assigned(node: _Node) -> None:
    """Copy back weights that the model has assigned by `weight.data = …`."""
    for leaf, home in zip(node.leaves, node.homes, strict=True):
        if leaf.data_ptr() != home.data_ptr():
            home.copy_(leaf.detach())
            leaf.data = home


# Tolerances relative to the norm of a parameter's gradient, or to _LEAST_SHARE of the norm of all gradients if that is
# larger, as a gradient that cancels out is nothing but rounding. If a rule of functorch is wrong, the relative error is
# about 1.
ROUNDING, ROUNDING_OF_BFLOAT16, _LEAST_SHARE = 0.1, 0.5, 0.05


def rounding(executor: Executor) -> float:
    """Return the largest relative difference from the loop that counts as rounding."""
    precise = executor.replicas.weights.dtype in (torch.float32, torch.float64) and not executor.settings.autocast
    return ROUNDING if precise else ROUNDING_OF_BFLOAT16


def agrees_with_loop(
    executor: Executor, losses: Tensor, before: Before, batch: Any, rtol: float, minibatch_size: int | None = None
) -> str:
    """Return what differs between an executor's step and the loop's; empty if they agree.

    Losses and gradients are compared. With rtol=0 they must be bitwise equal, and so must buffers. The executor's
    results are kept.

    Args:
        losses: the executor's losses; its gradients are in the replicas.
        before: the state before the step. batch: the stacked batch of the step.
        rtol: largest norm of a difference, relative to the norm of the parameter's gradient; 0: bitwise equal.
    """
    replicas = executor.replicas
    left = Before(executor)
    ours = {
        "gradient": replicas.views(replicas.grads.clone()),
        "buffer": {n: b.clone() for n, b in replicas.buffers.items()},
    }
    before.restore()
    loop = LoopExecutor(replicas, executor.objective, executor.generators, Settings(executor.settings.autocast))
    loop.step = executor.step - 1
    with unwatched():  # a mode that counts operations must not see this
        expected = loop.losses_and_grads(batch, minibatch_size)
    theirs = {"gradient": replicas.views(replicas.grads), "buffer": replicas.buffers}
    odd = ""
    if rtol == 0:
        odd = "" if _equal(losses, expected) else "the loss"
        for kind, tensors in ours.items() if not odd else ():
            odd = odd or next((f"the {kind} of {n}" for n, t in tensors.items() if not _equal(t, theirs[kind][n])), "")
    else:
        least = max(_LEAST_SHARE * replicas.grads.norm(), 100 * torch.finfo(replicas.grads.dtype).eps)
        for name, own in ours["gradient"].items():
            error, norm = (own - theirs["gradient"][name]).norm(), theirs["gradient"][name].norm()
            if error > rtol * max(norm, least):
                off = f"by {error:.2g} where its norm is {norm:.2g}"
                odd = f"the gradient of {name} differs from that of eager PyTorch, {off}"
                break
        if not odd and not torch.allclose(losses, expected, rtol=rtol, atol=rtol, equal_nan=True):
            odd = f"the losses {losses.tolist()} differ from {expected.tolist()}, computed node by node"
    left.restore()
    for name, own in ours["gradient"].items():
        theirs["gradient"][name].copy_(own)
    return odd


def _equal(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal. NaN equals NaN, as diverged nodes do not show that results differ."""
    return torch.equal(one, other) or bool(torch.isclose(one, other, rtol=0, atol=0, equal_nan=True).all())
