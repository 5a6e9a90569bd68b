"""Batching rules of vsim's own, where functorch's are not the real run's: dropout drawn node by node.

Under `torch.func.vmap` a dropout draws one large mask from one generator. On a real cluster every node draws its own
mask from its own generator. `NodeDropout` does that: entered around a vmapped call, it catches the dropout functions
and fills the mask of node k from node k's generator, with the bits that eager PyTorch would draw there.

Dropout inside `F.multi_head_attention_forward` or `F.scaled_dot_product_attention` is out of its sight: that is
drawn by functorch, different on every node and reproducible, but not from the node's own generator.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_FEATURE_DROPOUTS = (F.dropout1d, F.dropout2d, F.dropout3d)


class NodeDropout(TorchFunctionMode):
    """Within this context, dropout in a function vmapped over nodes draws from each node's own generator.

    Args:
        generators: one for each node of the vmapped call, in order.

    Attributes:
        node: any tensor that is batched over the nodes; the vmapped function sets it when it starts, so that even
            a value that is the same on all nodes is dropped differently on each.
    """

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        super().__init__()
        self.generators = generators
        self.node: Tensor | None = None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.dropout or func in _FEATURE_DROPOUTS:
            return self._dropout(func in _FEATURE_DROPOUTS, *args, **kwargs)
        return func(*args, **kwargs)

    def _dropout(
        self,
        whole_features: bool,
        input: Tensor,
        p: float = 0.5,
        training: bool = True,
        inplace: bool = False,
    ) -> Tensor:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability must be between 0 and 1, got {p}")
        if not training or p == 0.0 or input.numel() == 0:
            return input
        dropped = _Drop.apply(input, self.node, p, whole_features, self.generators)
        return input.copy_(dropped) if inplace else dropped


class _Drop(torch.autograd.Function):
    """x · mask / (1 − p): the rule below is all there is, as the node dimension is always batched."""

    @staticmethod
    def forward(x: Tensor, node: Tensor, p: float, whole_features: bool, generators: Any) -> Tensor:
        raise NotImplementedError("dropout by node outside of a call vmapped over nodes")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        raise NotImplementedError("dropout by node outside of a call vmapped over nodes")

    @staticmethod
    def vmap(
        info: Any, in_dims: Any, x: Tensor, node: Tensor, p: float, whole_features: bool, generators: Any
    ) -> tuple[Tensor, int]:
        x_dim, node_dim = in_dims[:2]
        if node_dim is None:  # a vmap of the user's own, inside the model: its dimension is one like any other
            if whole_features:
                raise NotImplementedError("feature dropout inside a vmap within the model; use executor='loop'")
            return _Drop.apply(x.movedim(x_dim, 0), node, p, whole_features, generators), 0
        x = x.expand(info.batch_size, *x.shape) if x_dim is None else x.movedim(x_dim, 0)  # (K, …)
        features = (*x.shape[:3], *[1] * (x.dim() - 3))  # one draw for each example and channel
        mask = x.new_empty(features) if whole_features else torch.empty_like(x)
        if p == 1.0:
            return x * mask.zero_(), 0
        for row, generator in zip(mask, generators, strict=True):
            row.bernoulli_(1 - p, generator=generator)
        return x * mask.div_(1 - p), 0
