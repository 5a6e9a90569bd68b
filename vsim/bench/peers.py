"""The same step without vsim: K separate modules, and what a researcher writes around a compiler."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, vmap

from vsim.bench.workloads import LR
from vsim.private_torch import recompile_limit, without_performance_warnings

_MOST_APART = 1e-4  # of losses, in nats; roundings of float32 differ by 1e-6
Step = Callable[[], list[float]]  # takes a step and returns the loss of every node before it


def separate(model: nn.Module, batch: Sequence[Tensor]) -> Step:
    """K modules with an optimizer each, as torch has it by default."""
    nodes = [copy.deepcopy(model) for _ in batch[0]]
    optimizers = [torch.optim.AdamW(node.parameters(), lr=LR) for node in nodes]

    def step() -> list[float]:
        losses = []
        for node, optimizer, *own in zip(nodes, optimizers, *batch, strict=True):
            optimizer.zero_grad()
            loss = node(own)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    return step


def bare(model: nn.Module, batch: Sequence[Tensor]) -> Step:
    """The vmapped gradients of stacked weights, compiled, and one fused optimizer over the stacked weights."""

    def stacked(tensor: Tensor) -> Tensor:
        return tensor.detach().expand(len(batch[0]), *tensor.shape).clone()

    weights = {name: stacked(parameter) for name, parameter in model.named_parameters()}  # (K, *shape)
    buffers = {name: stacked(buffer) for name, buffer in model.named_buffers()}
    optimizer = torch.optim.AdamW(weights.values(), lr=LR, fused=True)

    def loss(own: dict[str, Tensor], own_buffers: dict[str, Tensor], own_batch: Sequence[Tensor]) -> Tensor:
        return functional_call(model, (own, own_buffers), (own_batch,))

    gradients = torch.compile(vmap(grad_and_value(loss)), dynamic=False, fullgraph=True)
    # The limit counts the lines before this one.
    with torch.no_grad(), recompile_limit(256), without_performance_warnings():
        gradients(weights, buffers, batch)

    @torch.no_grad()
    def step() -> list[float]:
        grads, losses = gradients(weights, buffers, batch)
        for name, weight in weights.items():
            weight.grad = grads[name]
        optimizer.step()
        return losses.tolist()

    return step


def check_agreement(peers: dict[str, Step]) -> None:
    """Take two steps with every peer; the second tells whether gradients and optimizers are the same, too.

    Raises:
        RuntimeError: the losses of a node are not those of the first peer, up to rounding.
    """
    (first, step), *others = peers.items()
    for number in (1, 2):
        expected = torch.tensor(step())
        for name, other in others:
            apart = (torch.tensor(other()) - expected).abs().max().item()
            if not apart <= _MOST_APART:
                raise RuntimeError(
                    f"{name} is no comparison: at step {number} its losses are up to {apart:.2g} from those of {first}"
                )
