"""The bytes that autograd keeps of a batch between the forward and the backward pass."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from vsim.engine.base import Executor, cloned, undone


def activation_bytes(executor: Executor, batch: Any) -> int:
    """Return the bytes that autograd keeps of one node's batch between the forward and the backward pass.

    Every storage counts once. Parameters, buffers and the batch itself do not count: they are there anyway.

    Args:
        executor: whose first node computes, on its own: an executor that takes n nodes at once keeps about n times as
            much. Nothing in it changes.
        batch: one node's batch (B, …), on the device of the replicas.
    """
    node, batch = executor.replicas.rows(0, 1), cloned(batch)
    weights = {name: w[0].detach().requires_grad_() for name, w in node.views(node.weights).items()}
    buffers = {name: b[0].clone() for name, b in node.buffers.items()}
    there = [*weights.values(), *buffers.values(), *node.frozen.values(), *tree_leaves(batch)]
    addresses = {t.untyped_storage().data_ptr() for t in there}
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in addresses:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    keeping = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with undone(executor), torch.enable_grad(), executor._precision(), keeping:
        outcome = executor._outcome(weights, buffers, batch, False)
    del outcome  # not before: a storage that is freed leaves its address to another
    return sum(kept.values())
