"""Node after node."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from vsim.executor.base import Executor, write_gradients
from vsim.randomness import drawing_from


class LoopExecutor(Executor):
    """Node after node, in ordinary eager PyTorch: the bits of K separate processes, for any model."""

    name = "loop"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        r = self.replicas
        self.names = [c.name for c in r.layout]
        weights = [
            [self._leaf(w)[0].detach().requires_grad_() for w in r.views(rows).values()] for rows in r.weights.split(1)
        ]
        grads = [list(r.views(row).values()) for row in r.grads]
        self.nodes = [
            (
                weights[min(k, len(weights) - 1)],
                grads[min(k, len(grads) - 1)],
                {name: self._leaf(b[k : k + 1], is_buffer=True)[0] for name, b in r.buffers.items()},
            )
            for k in range(r.num_nodes)
        ]

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        losses = []
        with self._moved_up_to_date():
            for node, (leaves, grads, buffers) in enumerate(self.nodes):
                own_batch = tree_map(lambda t, node=node: t[node], batch)
                with drawing_from(self.generators[node]), self._precision():
                    loss, _ = self._outcome(dict(zip(self.names, leaves, strict=True)), buffers, own_batch, False)
                if self.replicas.shares_grads:
                    write_gradients(loss, leaves, grads, share / len(self.nodes), first and node == 0)
                else:
                    write_gradients(loss, leaves, grads, share, first)
                losses.append(loss.detach())
        return torch.stack(losses) * share if share != 1.0 else torch.stack(losses)
