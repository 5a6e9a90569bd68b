"""The operations of K models at once, on stacked tensors (K, …), with a slice for every node.

On the CPU, products, attention and dropout masks are batched over the nodes. Cheaper operations (norms, losses,
activations) and operations with a fast kernel for one node (convolution) run node by node, because one node's
activations fit in the caches. Every operation here is then bitwise equal to the eager operation on one node alone,
forward and backward. On an accelerator every operation is one call for all nodes, see `favors_loops`, and equal up to
rounding. Each is an ordinary function of plain tensors; `vsim.engine.rules` uses them in place of functorch's rules.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten
from vsim_kernels.alignment import ALIGNMENT, are_apart, empty_rows_like, is_aligned, rows_apart

from vsim.cluster.randomness import drawing_from
from vsim.private_torch import unwatched, version

aten = torch.ops.aten


class VmapError(RuntimeError):
    """The model works on one node but not under torch.func.vmap."""


class NodesDifferError(VmapError):
    """A value that the model's Python reads differs between nodes, so that they may take different branches."""


def favors_loops(device: torch.device) -> bool:
    """Return whether cheap operations should run node by node on a device: on the CPU, because of its caches.

    On an accelerator each call is a launch, which takes longer than the arithmetic of a small node. The work of a step
    is therefore the same number of launches for any number of nodes. This is the only place that decides so.
    """
    return device.type in ("cpu", "meta")


class Stacked:
    """Marks a tensor (K, …) that holds a slice for every node."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor


def node_by_node(
    function: Callable[..., Any],
    num_nodes: int,
    args: Any,
    kwargs: Any,
    streams: Sequence[torch.Generator] | None = None,
) -> Any:
    """Call `function` once for each node with its slice of every `Stacked` argument; stack the tensors it returns.

    Differentiable, and exact: it *is* the eager operation on one node. In-place writes into a slice are kept.

    Args:
        args, kwargs: the arguments; a tensor that differs between the nodes is wrapped in `Stacked`. If one object is
            given twice, the function gets the same slice twice.
        streams: K generators that `function` draws from in place of the default generator, or None.

    Raises:
        NodesDifferError: `function` returns a value that is not a tensor and differs between nodes.
    """
    leaves, spec = tree_flatten((args, kwargs))
    stacked = {id(leaf): leaf.tensor for leaf in leaves if isinstance(leaf, Stacked)}
    slices = {key: _Slices.apply(tensor) for key, tensor in stacked.items()}
    at_first = {key: version(own[0]) for key, own in slices.items()}
    outcomes = []
    for node in range(num_nodes):
        own = [slices[id(leaf)][node] if isinstance(leaf, Stacked) else leaf for leaf in leaves]
        own_args, own_kwargs = tree_unflatten(own, spec)
        with nullcontext() if streams is None else drawing_from(streams[node]):
            outcomes.append(function(*own_args, **own_kwargs))
    for key, own in slices.items():
        if version(own[0]) != at_first[key]:
            _keep_written(stacked[key], own)

    def joined(*parts: Any) -> Any:
        if isinstance(parts[0], Tensor):
            return Stacked(_GradientApart.apply(_stack(parts)))
        if any(part != parts[0] for part in parts):
            name = getattr(function, "__name__", function)
            raise NodesDifferError(f"{name} is {parts[0]} on one node and not on another")
        return parts[0]

    return tree_map(joined, *outcomes)


class _Slices(torch.autograd.Function):
    """x (K, …) → its K slices; the gradient has the memory layout of the slices' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        return rows_apart(x).unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _stack(grads)


class _GradientApart(torch.autograd.Function):
    """The identity; the rows of its gradient lie apart in memory, see `vsim_kernels.alignment`."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.data  # no view, so that the model may change it in place

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return rows_apart(grad)


@torch.no_grad()
def _keep_written(stacked: Tensor, slices: Sequence[Tensor]) -> None:
    """Copy values that a function wrote into its slices, such as running statistics, back to the stacked tensor.

    If the slices are views, the values are there already; only the tensor's version is incremented.
    """
    if slices[0].data_ptr() != stacked.data_ptr():
        stacked.copy_(torch.stack(list(slices)))
    else:
        increment_version(stacked)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one memory layout, and keep the layout: later reductions then read memory in order."""
    first = parts[0]
    if first.is_contiguous():
        return torch.stack(list(parts))
    for dim in range(first.dim()):
        if first.stride(dim) == 0 and first.shape[dim] > 1:  # expanded
            return _stack([part.narrow(dim, 0, 1) for part in parts]).expand(len(parts), *first.shape)
    order = sorted(range(first.dim()), key=first.stride, reverse=True)
    if not first.permute(order).is_contiguous():
        return torch.stack(list(parts))
    back = [order.index(d) + 1 for d in range(first.dim())]
    return torch.stack([part.permute(order) for part in parts]).permute(0, *back)


def collected(outcomes: Iterable[Sequence[Tensor | None]], num_nodes: int) -> list[Any]:
    """Stack the results of each node, part by part, while each result is in the caches; None stays None."""
    stacked: list[Tensor | None] = []
    for node, parts in enumerate(outcomes):
        if not node:
            stacked = [None if part is None else empty_rows_like(part, num_nodes) for part in parts]
        for whole, part in zip(stacked, parts, strict=True):
            if whole is not None and part is not None:
                whole[node].copy_(part)
    return stacked


def each_node(first: Tensor, *others: Tensor | None) -> Iterator[tuple[Any, ...]]:
    """Return an iterator over the nodes that yields each node's slices of stacked tensors (K, …); None stays None."""
    columns = (itertools.repeat(None, first.shape[0]) if t is None else t.unbind(0) for t in others)
    return zip(first.unbind(0), *columns, strict=True)


def may_fold(*operands: Tensor | Sequence[int]) -> bool:
    """Return whether nodes may join a batch of matrices: all operands (or dense rows of given shapes) are aligned.

    Only the CPU needs alignment.
    """
    device, dtype = next((t.device, t.dtype) for t in operands if isinstance(t, Tensor))
    if not favors_loops(device):
        return True
    sizes = [math.prod(t.shape[1:] if isinstance(t, Tensor) else t) for t in operands]
    return all(size * dtype.itemsize % ALIGNMENT == 0 for size in sizes) and all(
        are_apart(t) for t in operands if isinstance(t, Tensor)
    )


# Operations ---------------------------------------------------------------------------------------------------------


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Scaled dot-product attention of (K, B, …, T, d), with the nodes as a part of the batch.

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
    """x (K, …) · mask / (1 − p); every node's generator draws its mask as an eager call would.

    These draws are the one exception to `favors_loops`: each is a launch on an accelerator, too, since a node's numbers
    depend on its own generator only, whichever nodes are computed with it.
    """
    features = (*x.shape[:3], *[1] * (x.dim() - 3))  # one draw for each example and channel
    mask = x.new_empty(features) if whole_features else torch.empty_like(x)
    if p == 1.0:
        return x * mask.zero_()
    for row, stream in zip(mask, streams, strict=True):
        row.bernoulli_(1 - p, generator=stream)
    return x * mask.div_(1 - p)


class _Gelu(torch.autograd.Function):
    """x (K, …), approximate: see F.gelu → the shape of x. Node by node."""

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


def _check_indices(indices: Tensor, rows: int) -> None:
    """Raise an IndexError on the CPU for an index that is not in 0 … rows − 1; `vsim.engine.indices` does elsewhere.

    An operation checks the indices, so that no number has to come to Python, and a graph has the check, too.
    """
    if indices.device.type != "cpu":
        return
    try:
        aten._assert_async(((indices >= 0) & (indices < rows)).all())
    except RuntimeError:
        raise IndexError(f"embedding: an index is out of range for a table of {rows} rows") from None


class _Embedding(torch.autograd.Function):
    """indices (K, …) into table (K, V, d) → (K, …, d); the row `padding_idx` of every table gets no gradient."""

    @staticmethod
    def forward(ctx: Any, indices: Tensor, table: Tensor, padding_idx: int | None, scale_grad_by_freq: bool) -> Tensor:
        nodes, rows = table.shape[:2]
        _check_indices(indices, rows)
        first_row = torch.arange(0, nodes * rows, rows, device=indices.device)
        below = indices + first_row.view(-1, *[1] * (indices.dim() - 1))  # stack all tables into one
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


def layer_norm(x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """x (K, …, *shape), weight and bias (K, *shape) → the shape of x."""
    if favors_loops(x.device):
        out: Tensor = _LayerNorm.apply(x, shape, weight, bias, eps)
        return out
    y = F.layer_norm(x, shape, eps=eps)
    # The kernel takes one weight for all examples: multiply by those of each node afterwards.
    weight, bias = (t if t is None else t.view(len(t), *[1] * (x.dim() - t.dim()), *shape) for t in (weight, bias))
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


class _LayerNorm(torch.autograd.Function):
    """`layer_norm`, node by node."""

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
    """logits (K, N, C), targets (K, N) of class numbers → (K,), every node's mean over its N examples."""

    @staticmethod
    def forward(ctx: Any, logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
        logits = logits.contiguous()
        log_probabilities = torch.log_softmax(logits, -1)
        if favors_loops(logits.device):
            each = [
                aten.nll_loss_forward(own, y, None, 1, ignore_index) for own, y in each_node(log_probabilities, targets)
            ]
            losses, counts = map(torch.stack, zip(*each, strict=True))
        else:
            each_example = F.nll_loss(
                log_probabilities.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="none"
            )
            precise = torch.promote_types(logits.dtype, torch.float32)  # bfloat16 counts up to 256
            counts = (targets != ignore_index).sum(1, dtype=precise)
            losses = (each_example.view(targets.shape).sum(1, dtype=precise) / counts).to(logits.dtype)
        ctx.save_for_backward(log_probabilities, targets, counts)
        ctx.ignore_index = ignore_index
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        log_probabilities, targets, counts = ctx.saved_tensors
        # Write −grad / count at every target, as nll_loss_backward does, for all nodes in one call.
        ignored = targets == ctx.ignore_index
        scale = torch.where(ignored, 0.0, -(grad / counts)[:, None])
        index = targets.masked_fill(ignored, 0)[..., None]
        sparse = torch.zeros_like(log_probabilities).scatter_(2, index, scale.to(log_probabilities)[..., None])
        return aten._log_softmax_backward_data(sparse, log_probabilities, 2, log_probabilities.dtype), None, None


def grouped_convolution(
    x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any, weight_grad: Tensor | None = None
) -> Tensor:
    """Compute `convolution` in one call, with the nodes as groups of channels, (B, K · C, *size).

    weight_grad: an optional tensor for the gradient of the weights.
    """
    out: Tensor = _GroupedConvolution.apply(x, weight, bias, weight_grad, *geometry)
    return out


class _GroupedConvolution(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, weight_grad: Tensor | None, *geometry: Any
    ) -> Tensor:
        ctx.save_for_backward(x, weight)  # not the dense copy of the weights, to free it early
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
        # Use two calls, as the library itself would: the gradient of the weights is then written to its place before
        # the gradient of the input is computed.
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

    geometry: stride, padding, dilation as lists, transposed, output_padding, groups; see aten's convolution.
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
    """Apply a function that treats each example of (N, …) separately to all nodes' examples (K, B, …) in one call.

    The examples are taken in the order in which they lie in memory (`grouped_convolution` leaves the nodes inside the
    batch). Nothing is copied, and the result has the same order.
    """
    inside = x.stride(0) < x.stride(1)
    nodes_and_examples = x.transpose(0, 1) if inside else x
    y = function(nodes_and_examples.flatten(0, 1)).unflatten(0, nodes_and_examples.shape[:2])
    return y.transpose(0, 1) if inside else y


def batch_norm(
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None,
    bias: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> Tensor:
    """x (K, B, C, …), all other tensors (K, C) → the shape of x; the running statistics are updated in place."""
    if favors_loops(x.device):
        out: Tensor = _BatchNorm.apply(x, running_mean, running_var, weight, bias, training, momentum, eps)
        return out
    mean, var = (None if t is None else t.view(-1) for t in (running_mean, running_var))  # views: they are updated
    weight, bias = (None if t is None else t.flatten() for t in (weight, bias))
    return _nodes(F.batch_norm(_channels(x), mean, var, weight, bias, training, momentum, eps), len(x))


class _BatchNorm(torch.autograd.Function):
    """`batch_norm`, node by node."""

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
embedding: Callable[..., Tensor] = _Embedding.apply
cross_entropy: Callable[..., Tensor] = _CrossEntropy.apply
convolution: Callable[..., Tensor] = _Convolution.apply


def gelu(x: Tensor, approximate: str) -> Tensor:
    """x (K, …), approximate: see F.gelu → the shape of x."""
    out: Tensor = _Gelu.apply(x, approximate) if favors_loops(x.device) else F.gelu(x, approximate=approximate)
    return out


# Matrix products, each bitwise equal to the product alone -----------------------------------------------------------
#
# In most cases a library's batched product computes every matrix as its single product does. The exceptions are very
# small matrices, sums so long that threads divide them, operands at odd places in memory, and some processors with
# several threads. In these cases the products of an exact run are computed one by one, within one call if possible.


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    weight_grad: Tensor | None = None,
    bias_grad: Tensor | None = None,
    exact: bool = True,
) -> Tensor:
    """x (K, …, in), weight (K, out, in), bias (K, out) → (K, …, out): one product for all nodes.

    weight_grad, bias_grad: optional tensors for the gradients, for instance, rows of the nodes' gradient matrix;
    autograd's gradients are then these tensors. exact: bitwise equal to one node alone, even if that takes a call for
    each node, see `agree`.
    """
    if x.dim() == 2:  # one example a node, without a batch dimension
        return linear(x[:, None], weight, bias, weight_grad, bias_grad, exact)[:, 0]
    place = None if weight_grad is None else weight_grad.transpose(1, 2)
    out: Tensor = _Product.apply(x.flatten(1, -2), weight.transpose(1, 2), bias, exact, place, bias_grad)
    return out.view(*x.shape[:-1], weight.shape[1]) if x.dim() != 3 else out


def matmul(a: Tensor, b: Tensor, exact: bool = True) -> Tensor:
    """a (K, …, n, m), b (K, m, p) or (K, …, m, p) → (K, …, n, p); exact: as in `linear`."""
    if b.dim() == 3 and a.dim() >= 3:
        return _Product.apply(a.flatten(1, -2), b, None, exact, None, None).unflatten(1, a.shape[1:-1])
    if (batches_agree() or not exact) and may_fold(a, b, (*a.shape[1:-1], b.shape[-1])):
        return torch.matmul(a, b)
    product: Stacked = node_by_node(torch.matmul, len(a), (Stacked(a), Stacked(b)), {})
    return product.tensor


class _Product(torch.autograd.Function):
    """a (K, n, m) · b (K, m, p) + bias (K, p), computed forward and backward as torch.mm does on one node.

    If a matrix lies in memory by columns, its gradient is the transpose of the gradient of its transpose; computed
    directly, the last bits would differ.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, exact: bool, *places: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.exact, ctx.places = exact, places
        return _products(a, b, bias, exact)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        b_place, bias_place = ctx.places
        for_a, for_b, for_bias = ctx.needs_input_grad[:3]
        a_grad = b_grad = None
        if for_a and _by_columns(a):
            a_grad = _products(b, grad.transpose(1, 2), None, ctx.exact).transpose(1, 2)
        elif for_a:
            a_grad = _products(grad, b.transpose(1, 2), None, ctx.exact)
        if for_b and _by_columns(b):
            place = None if b_place is None else b_place.transpose(1, 2)
            b_grad = _products_over_examples(grad.transpose(1, 2), a, place, ctx.exact).transpose(1, 2)
        elif for_b:
            b_grad = _products_over_examples(a.transpose(1, 2), grad, b_place, ctx.exact)
        return a_grad, b_grad, torch.sum(grad, 1, out=bias_place) if for_bias else None, None, None, None


def _by_columns(matrices: Tensor) -> bool:
    return matrices.stride(1) == 1 and matrices.stride(2) == matrices.shape[1]


def agree(a: Tensor, b: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether, on the CPU, one call of a (K, n, m) · b (K, m, p) + bias (K, p) has the bits of K calls.

    Several threads may divide a batch otherwise than a single matrix, and on some CPUs the last bits then differ. The
    library decides by shapes, places in memory and the number of threads. If a sample of products shows a difference on
    this CPU, each kind of product is tried on random numbers; otherwise none is tried.
    """
    if a.is_meta or batches_agree():
        return True
    return _agree(_lie(a), _lie(b), bias is not None, a.dtype, torch.get_num_threads())


def batches_agree() -> bool:
    """Return whether a sample of products is bitwise equal in a batch and alone, on this CPU and number of threads."""
    return _sample_agrees(torch.get_num_threads())


# If a single column is computed in another way, one trial in ten shows no difference, because the sums happen to round
# to the same bits.
_TRIALS = 8
_Lie = tuple[torch.Size, tuple[int, ...], int]  # shape, strides, bytes from a multiple of 64 to the first element


def _lie(t: Tensor) -> _Lie:
    return t.shape, t.stride(), t.data_ptr() % ALIGNMENT


@functools.cache
@unwatched()
def _sample_agrees(threads: int) -> bool:
    for rows, inner, columns in itertools.product((5, 10, 24, 48, 100), (8, 24, 64), (24, 48, 64, 128)):
        a, b = (rows_apart(torch.empty(3, *shape)) for shape in ((rows, inner), (inner, columns)))
        if not _agree(_lie(a), _lie(b), False, a.dtype, threads):
            return False
    return True


@functools.cache
@torch.no_grad()
def _agree(a: _Lie, b: _Lie, with_bias: bool, dtype: torch.dtype, threads: int) -> bool:
    stream = torch.Generator().manual_seed(0)
    with unwatched(), torch.autocast("cpu", enabled=False):  # no observers, no casts
        return all(_agrees_once(a, b, with_bias, dtype, stream) for _ in range(_TRIALS))


def _agrees_once(a: _Lie, b: _Lie, with_bias: bool, dtype: torch.dtype, stream: torch.Generator) -> bool:
    left, right = (_filled(lie, dtype, stream) for lie in (a, b))
    if not with_bias:
        return _all_are(torch.bmm(left, right), torch.mm(left[0], right[0]))
    bias = torch.randn(right.shape[2], dtype=dtype, generator=stream)
    biases = bias.expand(len(left), 1, -1)
    return _all_are(torch.baddbmm(biases, left, right), torch.addmm(bias, left[0], right[0]))


def _filled(lie: _Lie, dtype: torch.dtype, stream: torch.Generator) -> Tensor:
    """Return the same random matrix for all nodes, with the memory layout `lie`."""
    shape, strides, begin = lie
    start = begin // dtype.itemsize
    size = start + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    matrices = torch.empty(size, dtype=dtype).as_strided(shape, strides, start)
    return matrices.copy_(torch.randn(shape[1:], dtype=dtype, generator=stream))


def _all_are(matrices: Tensor, matrix: Tensor) -> bool:
    return torch.equal(matrices, matrix.expand_as(matrices))


def _products(a: Tensor, b: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
    """a (K, n, m), b (K, m, p), bias (K, p) → a · b + bias, (K, n, p); exact: each bitwise equal to one product."""
    (nodes, rows, inner), columns = a.shape, b.shape[2]
    if nodes == 1:
        alone = a.new_empty(1, rows, columns)
        torch.mm(a[0], b[0], out=alone[0]) if bias is None else torch.addmm(bias[0], a[0], b[0], out=alone[0])
        return alone
    if not favors_loops(a.device):
        return torch.bmm(a, b) if bias is None else torch.baddbmm(bias[:, None], a, b)
    a, b = rows_apart(a), rows_apart(b)
    if rows * inner * columns < _TINY_PRODUCT or 1 in (rows, inner, columns):
        each = each_node(a, b, bias)
        return torch.stack([x @ y if z is None else torch.addmm(z, x, y) for x, y, z in each])
    dense_rows_are_apart = rows * columns * a.element_size() % ALIGNMENT == 0
    out = None if dense_rows_are_apart and (not exact or agree(a, b, bias)) else _with_gaps(a, (rows, columns))
    return torch.bmm(a, b, out=out) if bias is None else torch.baddbmm(bias[:, None], a, b, out=out)


def _products_over_examples(a: Tensor, b: Tensor, out: Tensor | None, exact: bool) -> Tensor:
    """a (K, n, m) · b (K, m, p) as in `_products`, but m may be so large that threads divide the sum.

    In a batch the threads would divide the sum otherwise, so such products are computed one by one.
    """
    if not favors_loops(a.device):
        return torch.bmm(a, b, out=out)
    (nodes, rows, inner), columns = a.shape, b.shape[2]
    if 1 in (nodes, rows, inner, columns) or rows * inner * columns <= _SMALL_PRODUCT:
        product = _products(a, b, None, exact)
        return product if out is None else out.copy_(product)
    a, b = rows_apart(a), rows_apart(b)
    if out is not None and is_aligned(out) and are_apart(out) and not out.is_contiguous():
        return torch.bmm(a, b, out=out)
    product = torch.bmm(a, b, out=_with_gaps(a, (rows, columns)))
    return product if out is None else out.copy_(product)


def _with_gaps(like: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return an empty tensor (K, *shape) with gaps between the matrices, which torch.bmm then computes one by one."""
    unit = ALIGNMENT // like.element_size()
    pitch = math.prod(shape) // unit * unit + unit
    return like.new_empty_strided((len(like), *shape), (pitch, shape[1], 1))  # no view: it may be written to in place


# Numbers of multiplications in a matrix product. Below the first, torch.bmm has its own kernel, which sums in another
# order (at::native, bmm_out_or_baddbmm_). Up to the second, threads do not share a product. The product of a vector and
# a matrix has another kernel, too.
_TINY_PRODUCT, _SMALL_PRODUCT = 400, 2**16
