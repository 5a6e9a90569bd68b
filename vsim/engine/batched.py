"""Operations of K models at once, on stacked tensors (K, …) with a slice for every node.

Each operation is an ordinary function of plain tensors, and makes one call for all nodes where that is fast.
`vsim.engine.rules` uses these functions in place of functorch's rules. Each node's slice of a result equals the result
of the operation on this node's tensors, up to rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.autograd.graph import increment_version
from torch.utils._pytree import tree_flatten, tree_map, tree_unflatten

from vsim.cluster.randomness import drawing_from
from vsim.private_torch import version

aten = torch.ops.aten


class VmapError(RuntimeError):
    """The model works on one node but not under torch.func.vmap."""


class NodesDifferError(VmapError):
    """The model's Python code reads a value that differs between nodes, so that nodes may take different branches."""


class NumbersDifferError(NodesDifferError):
    """The value that differs is a float, such as that of a loss: it will differ in nearly every step."""


def is_cache_bound(device: torch.device) -> bool:
    """Return whether a device is fastest with a few nodes at once, as a CPU is, because of its caches.

    On an accelerator, the launch of a kernel takes longer than the arithmetic of a small node, so a step should launch
    equally many kernels for any number of nodes.
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

    Differentiable. In-place writes into a slice are kept.

    Args:
        args, kwargs: the arguments; tensors that differ between nodes are wrapped in `Stacked`. If one `Stacked` object
            is given twice, `function` also gets one slice object twice.
        streams: K generators that `function` draws from in place of the default generator, or None.

    Raises:
        NodesDifferError: `function` returns a value that is not a tensor and differs between nodes; a
            `NumbersDifferError` if it is a float.
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
            return Stacked(_stack(parts))
        if any(part != parts[0] for part in parts):
            name = getattr(function, "__name__", function)
            kind = NumbersDifferError if isinstance(parts[0], float) else NodesDifferError
            raise kind(f"{name} is {parts[0]} on one node and not on another")
        return parts[0]

    return tree_map(joined, *outcomes)


class _Slices(torch.autograd.Function):
    """Cut x (K, …) into its K slices; the gradient of x has the memory layout of the slices' gradients."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> tuple[Tensor, ...]:
        return x.unbind(0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Tensor:
        return _stack(grads)


@torch.no_grad()
def _keep_written(stacked: Tensor, slices: Sequence[Tensor]) -> None:
    """Copy values that a function wrote into its slices, such as running statistics, back to the stacked tensor.

    If the slices are views, the stacked tensor has the values already; only its version is incremented.
    """
    if slices[0].data_ptr() != stacked.data_ptr():
        stacked.copy_(torch.stack(list(slices)))
    else:
        increment_version(stacked)


def _stack(parts: Sequence[Tensor]) -> Tensor:
    """Stack tensors of one memory layout, and keep the layout, so that later reductions read memory in order."""
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


# Operations ---------------------------------------------------------------------------------------------------------


def attention(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, **options: Any) -> Tensor:
    """Scaled dot-product attention of query, key and value (K, B, …, T, d), with the nodes merged into the batch.

    mask: (K, …), broadcast to (K, B, …, T, T), or None.
    """
    nodes, batch = query.shape[:2]
    if mask is not None:
        mask = mask.view(nodes, *[1] * (query.dim() - mask.dim()), *mask.shape[1:])
        mask = mask.expand(nodes, batch, *mask.shape[2:]).flatten(0, 1)
    q, k, v = (t.flatten(0, 1) for t in (query, key, value))
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, **options).unflatten(0, (nodes, batch))


def dropout(
    x: Tensor, p: float, whole_features: bool, streams: Sequence[torch.Generator], inplace: bool = False
) -> Tensor:
    """Dropout of x (K, …) with probability p; each node's generator draws the node's mask as an eager call would.

    Masks are drawn by one call per node, even on an accelerator, so that a node's numbers depend only on its generator.
    """
    if p == 1.0:
        return x * torch.zeros_like(x)
    if not (whole_features or inplace or is_cache_bound(x.device)):  # CUDA's kernel for dropout draws other numbers
        ones = torch.ones_like(x[0])
        return x * (_stack([_dropped(ones, p, stream) for stream in streams]) != 0) * (1 / (1 - p))
    features = (*x.shape[:3], *[1] * (x.dim() - 3))  # one number is drawn for each example and channel
    mask = x.new_empty(features) if whole_features else torch.empty_like(x)
    for row, stream in zip(mask, streams, strict=True):
        row.bernoulli_(1 - p, generator=stream)
    return x * mask.div_(1 - p)


def _dropped(ones: Tensor, p: float, stream: torch.Generator) -> Tensor:
    with drawing_from(stream):
        return F.dropout(ones, p)


class _Gelu(torch.autograd.Function):
    """GELU of x (K, …), by one call per node, which keeps activations in a CPU's caches; `approximate`: see F.gelu."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, approximate: str) -> Tensor:
        ctx.save_for_backward(x)
        ctx.approximate = approximate
        y = torch.empty_like(x)
        for own_x, own_y in zip(x, y, strict=True):
            aten.gelu.out(own_x, approximate=approximate, out=own_y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (x,) = ctx.saved_tensors
        out = torch.empty_like(x)
        for own_grad, own_x, own_out in zip(grad, x, out, strict=True):
            aten.gelu_backward.grad_input(own_grad, own_x, approximate=ctx.approximate, grad_input=own_out)
        return out, None


def _check_indices(indices: Tensor, rows: int) -> None:
    """On the CPU, raise an IndexError for an index outside 0 … rows − 1; for other devices, see `vsim.engine.indices`.

    The check is a tensor operation, which a compiled graph can contain and for which Python reads no number.
    """
    if indices.device.type != "cpu":
        return
    try:
        aten._assert_async(((indices >= 0) & (indices < rows)).all())
    except RuntimeError:
        raise IndexError(f"embedding: an index is out of range for a table of {rows} rows") from None


class _Embedding(torch.autograd.Function):
    """Look up indices (K, …) in table (K, V, d) → (K, …, d); row `padding_idx` of every table gets no gradient."""

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
    """Layer normalization of x (K, …, *shape) over `shape`, with weight and bias (K, *shape)."""
    y = F.layer_norm(x, shape, eps=eps)
    # The kernel takes one weight for all examples; each node's weight is multiplied afterwards.
    weight, bias = (t if t is None else t.view(len(t), *[1] * (x.dim() - t.dim()), *shape) for t in (weight, bias))
    if weight is not None and bias is not None:
        return torch.addcmul(bias, y, weight)  # in one pass
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def cross_entropy(logits: Tensor, targets: Tensor, ignore_index: int) -> Tensor:
    """Cross-entropy of logits (K, N, C) and class numbers (K, N) → (K,), every node's mean over its N examples."""
    each = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=ignore_index, reduction="none")
    precise = torch.promote_types(logits.dtype, torch.float32)  # bfloat16 counts exactly only up to 256
    counts = (targets != ignore_index).sum(1, dtype=precise)
    return (each.view(targets.shape).sum(1, dtype=precise) / counts).to(logits.dtype)


def convolution(x: Tensor, weight: Tensor, bias: Tensor | None, *geometry: Any) -> Tensor:
    """Convolution of x (K, B, C, *size) with weight (K, out, in, *kernel) and bias (K, out) → (K, B, out, *size).

    One grouped convolution of (B, K · C, *size) computes all nodes.

    geometry: stride, padding, dilation as lists, transposed, output_padding, groups; see aten's convolution.
    """
    *others, groups = geometry
    flat_bias = None if bias is None else bias.flatten()
    out = aten.convolution(_channels(x), weight.flatten(0, 1), flat_bias, *others, len(x) * groups)
    return _nodes(out, len(x))


def _channels(x: Tensor) -> Tensor:
    """(K, B, C, …) → (B, K · C, …)"""
    return x.transpose(0, 1).flatten(1, 2)


def _nodes(x: Tensor, nodes: int) -> Tensor:
    """(B, K · C, …) → (K, B, C, …)"""
    return x.unflatten(1, (nodes, -1)).transpose(0, 1)


def of_examples(function: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """Apply `function`, which treats each example of (N, …) separately, to the examples (K, B, …) of all nodes at once.

    To avoid a copy, examples are merged in the order of memory: in the output of `convolution`, the node dimension
    varies faster than the batch dimension. The result has the same memory order.
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
    """Batch norm of x (K, B, C, …); all other tensors are (K, C), and running statistics are updated in place."""
    mean, var = (None if t is None else t.view(-1) for t in (running_mean, running_var))  # views, to update in place
    weight, bias = (None if t is None else t.flatten() for t in (weight, bias))
    return _nodes(F.batch_norm(_channels(x), mean, var, weight, bias, training, momentum, eps), len(x))


embedding: Callable[..., Tensor] = _Embedding.apply


def gelu(x: Tensor, approximate: str) -> Tensor:
    """GELU of x (K, …); `approximate`: see F.gelu."""
    out: Tensor = _Gelu.apply(x, approximate) if is_cache_bound(x.device) else F.gelu(x, approximate=approximate)
    return out


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    weight_grad: Tensor | None = None,
    bias_grad: Tensor | None = None,
) -> Tensor:
    """Linear map of x (K, …, in) by weight (K, out, in) and bias (K, out) → (K, …, out): one product for all nodes.

    weight_grad, bias_grad: optional tensors, such as parts of the nodes' gradient matrix, to which the backward pass
    writes the gradients; autograd then returns these tensors.
    """
    if x.dim() == 2:  # one example per node, without a batch dimension
        return linear(x[:, None], weight, bias, weight_grad, bias_grad)[:, 0]
    out: Tensor = _Linear.apply(x.flatten(1, -2), weight, bias, weight_grad, bias_grad)
    return out.view(*x.shape[:-1], weight.shape[1]) if x.dim() != 3 else out


class _Linear(torch.autograd.Function):
    """Linear map of x (K, n, in) by weight (K, out, in) and bias (K, out) → (K, n, out)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *places: Tensor | None) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.places = places
        return torch.bmm(x, weight.mT) if bias is None else torch.baddbmm(bias[:, None], x, weight.mT)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        of_weight, of_bias = ctx.places
        for_x, for_weight, for_bias = ctx.needs_input_grad[:3]
        return (
            torch.bmm(grad, weight) if for_x else None,
            torch.bmm(grad.mT, x, out=of_weight) if for_weight else None,
            torch.sum(grad, 1, out=of_bias) if for_bias else None,
            None,
            None,
        )


def matmul(a: Tensor, b: Tensor) -> Tensor:
    """Matrix product of a (K, …, n, m) and b (K, m, p) or (K, …, m, p) → (K, …, n, p)."""
    if b.dim() == 3 and a.dim() > 3:
        return torch.bmm(a.flatten(1, -2), b).unflatten(1, a.shape[1:-1])
    return torch.matmul(a, b)
