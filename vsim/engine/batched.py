"""The operations of K models at once, on stacked tensors (K, …); matrix products are in `vsim.engine.products`.

Products, attention and dropout masks are batched over the nodes. Operations that are cheap beside them (norms, losses,
activations) or have a fast kernel for one node (convolution) run node by node: one node's activations fit in the
caches, and every operation here is then bitwise equal to the eager operation on that node alone, forward and backward.
Each is an ordinary function of plain tensors; `vsim.engine.lowering` puts them in the place of functorch's rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from vsim_kernels.alignment import rows_apart

from vsim.engine.stacked import Stacked, collected, each_node, may_fold, node_by_node

aten = torch.ops.aten


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Scaled dot-product attention of (K, B, …, T, d): the nodes are more of the batch.

    mask: (K, …) broadcast against (K, B, …, T, T), or None.
    """
    nodes, batch = query.shape[:2]
    if not may_fold(query, key, value, (*query.shape[1:-1], value.shape[-1])):
        stacked = (Stacked(query), Stacked(key), Stacked(value), None if mask is None else Stacked(mask))
        out: Stacked = node_by_node(F.scaled_dot_product_attention, nodes, stacked, options)
        return out.tensor
    if mask is not None:
        mask = mask.view(nodes, *[1] * (query.dim() - mask.dim()), *mask.shape[1:])
        mask = mask.expand(nodes, batch, *mask.shape[2:]).flatten(0, 1)
    q, k, v = (t.flatten(0, 1) for t in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options).unflatten(0, (nodes, batch))


def dropout(x: Tensor, p: float, whole_features: bool, streams: Sequence[torch.Generator]) -> Tensor:
    """x (K, …) · mask / (1 − p), every node's mask drawn as one eager call would, from that node's generator."""
    features = (*x.shape[:3], *[1] * (x.dim() - 3))  # one draw for each example and channel
    mask = x.new_empty(features) if whole_features else torch.empty_like(x)
    if p == 1.0:
        return x * mask.zero_()
    for row, stream in zip(mask, streams, strict=True):
        row.bernoulli_(1 - p, generator=stream)
    return x * mask.div_(1 - p)


class _Gelu(torch.autograd.Function):
    """x (K, …), approximate as of F.gelu → the shape of x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        y = torch.empty_like(x)
        for own_x, own_y in each_node(x, y):
            aten.gelu.out(own_x, approximate=approximate, out=own_y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        for own_grad, own_x, own_out in each_node(grad, x, out):
            aten.gelu_backward.grad_input(own_grad, own_x, approximate=ctx.approximate, grad_input=own_out)
        return out, None


class _Embedding(torch.autograd.Function):
    """indices (K, …) into table (K, V, d) → (K, …, d); the row `padding_idx` of every table gets no gradient."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, table: Tensor, padding_idx: int | None, scale_grad_by_freq: bool) -> Tensor:
        nodes, rows = table.shape[:2]
        try:  # by an operation, so that no number has to come to Python
            aten._assert_async(((indices >= 0) & (indices < rows)).all())
        except RuntimeError:
            raise IndexError(f"embedding: an index is out of range for a table of {rows} rows") from None
        first_row = torch.arange(0, nodes * rows, rows, device=indices.device)
        below = indices + first_row.view(-1, *[1] * (indices.dim() - 1))  # the tables one below the other
        ctx.save_for_backward(below)
        ctx.table_shape, ctx.padding_idx, ctx.scale_grad_by_freq = table.shape, padding_idx, scale_grad_by_freq
        return aten.embedding(table.flatten(0, 1), below)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (below,) = ctx.saved_tensors
        nodes, rows, width = ctx.table_shape
        flat = aten.embedding_dense_backward(grad, below, nodes * rows, -1, ctx.scale_grad_by_freq)
        table_grad = flat.view(nodes, rows, width)
        if ctx.padding_idx is not None:
            table_grad[:, ctx.padding_idx] = 0
        return None, table_grad, None, None


class _LayerNorm(torch.autograd.Function):
    """x (K, …, *shape), weight and bias (K, *shape) → the shape of x."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        x, shape = x.contiguous(), list(shape)
        y = torch.empty_like(x)
        mean, rstd = x.new_empty(2, *x.shape[: x.dim() - len(shape)], *[1] * len(shape)).unbind(0)  # 1 / deviation
        for own_x, own_y, own_mean, own_rstd, w, b in each_node(x, y, mean, rstd, weight, bias):
            aten.native_layer_norm.out(own_x, shape, w, b, eps, out0=own_y, out1=own_mean, out2=own_rstd)
        ctx.save_for_backward(x, mean, rstd, weight, bias)
        ctx.shape = shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, weight, bias = ctx.saved_tensors
        needed = [ctx.needs_input_grad[i] for i in (0, 2, 3)]
        grads = [torch.empty_like(t) if need else None for t, need in zip((x, weight, bias), needed, strict=True)]
        grad = grad.contiguous()
        for own_grad, own_x, own_mean, own_rstd, w, b, *own in each_node(grad, x, mean, rstd, weight, bias, *grads):
            given = (own_grad, own_x, ctx.shape, own_mean, own_rstd, w, b, needed)
            if all(needed):
                aten.native_layer_norm_backward.out(*given, out0=own[0], out1=own[1], out2=own[2])
                continue
            for target, value in zip(own, aten.native_layer_norm_backward(*given), strict=True):
                if target is not None:
                    target.copy_(value)
        return grads[0], None, grads[1], grads[2], None


class _CrossEntropy(torch.autograd.Function):
    """logits (K, N, C), targets (K, N) of class numbers → (K,): every node's mean over its N."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        logits = logits.contiguous()
        log_probabilities = torch.log_softmax(logits, -1)
        each = [
            aten.nll_loss_forward(own, y, None, 1, ignore_index) for own, y in each_node(log_probabilities, targets)
        ]
        losses, counts = zip(*each, strict=True)
        ctx.save_for_backward(log_probabilities, targets, torch.stack(counts))
        ctx.ignore_index = ignore_index
        return torch.stack(losses)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        log_probabilities, targets, counts = ctx.saved_tensors
        # −grad / count at every target: what nll_loss_backward writes, for all nodes in one call.
        scale = torch.where(targets == ctx.ignore_index, 0.0, -(grad / counts)[:, None])
        index = targets.clamp(min=0)[..., None]
        sparse = torch.zeros_like(log_probabilities).scatter_(2, index, scale.to(log_probabilities)[..., None])
        return aten._log_softmax_backward_data(sparse, log_probabilities, 2, log_probabilities.dtype), None, None


def grouped_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any, weight_grad: Tensor | None = None
) -> Tensor:
    """The same as `convolution` in one call: the nodes are groups of channels, (B, K · C, *size).

    weight_grad: where the gradient of the weights is written, if it is wanted in a place of its own.
    """
    out: Tensor = _GroupedConvolution.apply(x, weight, bias, weight_grad, *geometry)
    return out


class _GroupedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weight_grad: Tensor | None, *geometry: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)  # not the dense copy of the weights, which would be in memory for long
        ctx.bias_sizes = None if bias is None else [bias.numel()]
        ctx.weight_grad, ctx.geometry = weight_grad, (*geometry[:-1], len(x) * geometry[-1])
        flat_bias = None if bias is None else bias.flatten()
        out: Tensor = aten.convolution(_channels(x), weight.flatten(0, 1), flat_bias, *ctx.geometry)
        return _nodes(out, len(x)).data  # no view, so that the model may change it in place

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        given = (_channels(grad), _channels(x), weight.flatten(0, 1), ctx.bias_sizes, *ctx.geometry)
        x_grad = weight_grad = bias_grad = None
        # In two calls, which is what the library makes of one: the gradient of the weights is in its place before the
        # other is computed.
        if for_weight or for_bias:
            _, weights, biases = aten.convolution_backward(*given, [False, for_weight, for_bias])
            if for_weight:
                weight_grad = weights.view(weight.shape)
                weight_grad = weight_grad if ctx.weight_grad is None else ctx.weight_grad.copy_(weight_grad)
            if for_bias:
                bias_grad = biases.view(len(x), -1)
            del weights, biases
        if for_x:
            x_grad = _nodes(aten.convolution_backward(*given, [True, False, False])[0], len(x))
        return x_grad, weight_grad, bias_grad, *[None] * (1 + len(ctx.geometry))


def _channels(x: Tensor) -> Tensor:
    """(K, B, C, …) → (B, K · C, …)"""
    return x.transpose(0, 1).flatten(1, 2)


def _nodes(x: Tensor, nodes: int) -> Tensor:
    """(B, K · C, …) → (K, B, C, …)"""
    return x.unflatten(1, (nodes, -1)).transpose(0, 1)


class _Convolution(torch.autograd.Function):
    """x (K, B, C, *size), weight (K, out, in, *kernel), bias (K, out) → (K, B, out, *size).

    geometry: stride, padding, dilation as lists, transposed, output_padding, groups; as of aten's convolution.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
        x, weight = rows_apart(x), rows_apart(weight)
        ctx.save_for_backward(x, weight)
        ctx.geometry = geometry
        ctx.bias_sizes = None if bias is None else [bias.shape[1]]
        each = ([aten.convolution(*own, *geometry)] for own in each_node(x, weight, bias))
        (out,) = collected(each, len(x))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        needed = list(ctx.needs_input_grad[:3])
        outcomes = (
            aten.convolution_backward(*own, ctx.bias_sizes, *ctx.geometry, needed)
            for own in each_node(rows_apart(grad), x, weight)
        )
        grads = collected((_wanted(parts, needed) for parts in outcomes), len(x))
        return *grads, *[None] * len(ctx.geometry)


def of_examples(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply a function of a batch of examples (N, …), each by itself, to those of all nodes (K, B, …) in one call.

    They are taken in the order in which they lie in memory (`grouped_convolution` leaves the nodes inside the batch),
    so that nothing is copied, and what follows finds the same order.
    """
    inside = x.stride(0) < x.stride(1)
    nodes_and_examples = x.transpose(0, 1) if inside else x
    y = function(nodes_and_examples.flatten(0, 1)).unflatten(0, nodes_and_examples.shape[:2])
    return y.transpose(0, 1) if inside else y


class _BatchNorm(torch.autograd.Function):
    """x (K, B, C, …), everything else (K, C) → the shape of x; the running statistics are updated in place."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        training: bool,
        momentum: float,
        eps: float,
    ) -> Tensor:
        each = each_node(x, weight, bias, running_mean, running_var)
        y, mean, rstd = collected((aten.native_batch_norm(*own, training, momentum, eps) for own in each), len(x))
        ctx.save_for_backward(x, weight, running_mean, running_var, mean, rstd)
        ctx.training, ctx.eps = training, eps
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, *rest = ctx.saved_tensors
        needed = [ctx.needs_input_grad[i] for i in (0, 3, 4)]
        each = each_node(grad, x, *rest)
        outcomes = (aten.native_batch_norm_backward(*own, ctx.training, ctx.eps, needed) for own in each)
        for_x, for_weight, for_bias = collected((_wanted(parts, needed) for parts in outcomes), len(x))
        return for_x, None, None, for_weight, for_bias, None, None, None


def _wanted(parts: Sequence[Tensor], needed: Sequence[bool]) -> list[Tensor | None]:
    """Return the gradients that are needed, and None for the others."""
    return [part if need else None for part, need in zip(parts, needed, strict=True)]


# As functions.
gelu: Callable[..., Tensor] = _Gelu.apply
embedding: Callable[..., Tensor] = _Embedding.apply
layer_norm: Callable[..., Tensor] = _LayerNorm.apply
cross_entropy: Callable[..., Tensor] = _CrossEntropy.apply
convolution: Callable[..., Tensor] = _Convolution.apply
batch_norm: Callable[..., Tensor] = _BatchNorm.apply
