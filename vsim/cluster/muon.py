"""Muon for all nodes at once, and the choice of a model's parameters for Muon."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn
from vsim_kernels import newton_schulz

# `adjust_lr_fn` → the factor on the learning rate of a matrix (rows, columns).
_FACTORS = {
    "original": lambda rows, columns: math.sqrt(max(1, rows / columns)),
    "match_rms_adamw": lambda rows, columns: 0.2 * math.sqrt(max(rows, columns)),
}


class StackedMuon(torch.optim.Muon):
    """torch.optim.Muon over stacked matrices, with the products of all nodes in one call.

    Bitwise equal to one Muon per node if batched matrix products are bitwise equal to single products, otherwise equal
    up to rounding.

    Args:
        stacked: (R, n, m) each.
        options: see torch.optim.Muon.
    """

    def __init__(self, stacked: Iterable[Tensor], **options: Any) -> None:
        matrices = list(stacked)
        super().__init__([m[0].detach() for m in matrices], **options)  # checks the options
        self.param_groups[0]["params"] = matrices
        for m in matrices:  # allocate the buffers now, so that the memory of the state is known
            self._buffer(m)

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        """Step the matrices that have a gradient, on all nodes."""
        for group in self.param_groups:
            momentum, lr = group["momentum"], float(group["lr"])
            stepped = [(p, p.grad) for p in group["params"] if p.grad is not None]
            directions = []
            for p, grad in stepped:
                buffer = self._buffer(p).lerp_(grad, 1 - momentum)
                directions.append(grad.lerp(buffer, momentum) if group["nesterov"] else buffer)
            factors = newton_schulz(directions, group["ns_coefficients"], group["ns_steps"], group["eps"])
            for (p, _), factor in zip(stepped, factors, strict=True):
                scaled = lr * _FACTORS[group["adjust_lr_fn"] or "original"](*p.shape[1:])
                p.mul_(1 - lr * group["weight_decay"]).add_(factor, alpha=-scaled)

    def _buffer(self, p: Tensor) -> Tensor:
        state = self.state[p]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(p, memory_format=torch.contiguous_format)
        buffer: Tensor = state["momentum_buffer"]
        return buffer


def hidden_matrices(model: nn.Module) -> list[str]:
    """Return the names of all trainable matrices except embeddings and the last linear layer.

    The weights of a convolution count as a matrix (out, rest).
    """
    of_convolutions = {id(m.weight) for m in model.modules() if isinstance(m, nn.Conv1d | nn.Conv2d | nn.Conv3d)}
    of_embeddings = [m.weight for m in model.modules() if isinstance(m, nn.Embedding | nn.EmbeddingBag)]
    of_linear = [m.weight for m in model.modules() if isinstance(m, nn.Linear)]
    excluded = {id(weight) for weight in (*of_embeddings, *of_linear[-1:])}
    matrices = [(name, p) for name, p in model.named_parameters() if p.dim() == 2 or id(p) in of_convolutions]
    return [name for name, p in matrices if p.requires_grad and id(p) not in excluded]
