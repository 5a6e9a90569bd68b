"""The table of rules: the form of each operation of torch for K nodes at once.

A rule takes the vmapped nodes and the operation's arguments, and returns its result, or NotImplemented to leave the
operation to functorch's own rule or to a call for each node.
"""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from vsim.engine import batched, products
from vsim.engine.casting import cast
from vsim.engine.nodes import Nodes, name_of
from vsim.private_torch import (
    add_batch_dim,
    batch_dim,
    batch_level,
    is_batched,
    is_wrapped,
    outside_of_vmap,
    unwrapped,
    verify_batch_size,
)

Rule = Callable[..., Any]


def _one_dtype(first: Tensor, *others: Tensor | None) -> bool:
    """Whether the tensors are of one real dtype, which autocast keeps where the operation is none of products."""
    if first.is_complex() or (torch.is_autocast_enabled(first.device.type) and first.dtype != torch.float32):
        return False
    return all(t is None or t.dtype == first.dtype for t in others)


def _linear(nodes: Nodes, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not nodes.exact and not is_wrapped(weight):
        x = nodes.of(input)
        if x is not None and not (bias is not None and is_wrapped(bias)):
            nodes.differing.add("linear")  # one large product
            return nodes.batch(F.linear(x, weight, bias))
    all_stacked = nodes.spread_all(input, weight, bias)
    if all_stacked is None or input.is_complex():
        return NotImplemented
    x, w, b = map(cast, all_stacked)
    place_of_w, place_of_b = (nodes.places.pop(id(t), None) for t in (w, b))  # of what was cast, none
    with outside_of_vmap():
        nodes.note_product("linear")
        return nodes.batch(products.linear(x, w, b, place_of_w, place_of_b, nodes.exact))


def _matmul(nodes: Nodes, input: Tensor, other: Tensor | None = None, mat2: Tensor | None = None) -> Any:
    other = mat2 if other is None else other  # which mm and bmm call so
    if other is None or input.dim() < 2 or other.dim() < 2 or (other.dim() > 2 and input.dim() != other.dim()):
        return NotImplemented
    both = nodes.spread_all(input, other)
    if both is None:
        return NotImplemented
    a, b = map(cast, both)
    if a.dtype != b.dtype or a.is_complex():  # whose gradients are of conjugates
        return NotImplemented
    with outside_of_vmap():
        nodes.note_product("matmul")
        return nodes.batch(products.matmul(a, b, nodes.exact))


def _attention(
    nodes: Nodes,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    learned_mask = attn_mask is not None and nodes.needs_grad(attn_mask)
    if (dropout_p > 0.0 and nodes.streams is not None) or learned_mask:
        kwargs = {"attn_mask": attn_mask, "dropout_p": dropout_p, "is_causal": is_causal, **options}
        return nodes.alone(F.scaled_dot_product_attention, (query, key, value), kwargs)
    stacked = nodes.spread_all(query, key, value)
    if stacked is None or query.dim() < 3:
        return NotImplemented
    mask = None if attn_mask is None else nodes.spread(attn_mask)
    if attn_mask is not None and mask is None:
        return NotImplemented
    with outside_of_vmap():
        q, k, v = stacked
        out = batched.attention(q, k, v, mask, dropout_p=dropout_p, is_causal=is_causal, **options)
    return nodes.batch(out)


def _dropout_rule(whole_features: bool, without_batch: int | None = None) -> Rule:
    """Return the rule of a kind of dropout. An input of `without_batch` dimensions is (C, …) and not (B, C, …)."""

    def rule(nodes: Nodes, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability must be between 0 and 1, got {p}")
        if not training or p == 0.0 or input.numel() == 0:
            return input
        streams, x = nodes.draw(), nodes.spread(input)
        if streams is None:
            return NotImplemented
        if x is None:  # a transform of the user's own, inside the model
            if not is_batched(input):
                return NotImplemented
            if whole_features:
                raise NotImplementedError("feature dropout inside a vmap within the model; use executor='loop'")
            level, dim = batch_level(input), batch_dim(input)
            dropped = rule(nodes, unwrapped(input).movedim(dim, 0), p)  # a dimension like any other
            return add_batch_dim(dropped, 0, level)
        one_example = input.dim() == without_batch
        with outside_of_vmap():
            dropped = batched.dropout(x[:, None] if one_example else x, p, whole_features, streams)
            dropped = dropped[:, 0] if one_example else dropped
        return input.copy_(nodes.batch(dropped)) if inplace else nodes.batch(dropped)

    return rule


def _filling_rule(function: Rule) -> Rule:
    """Return the rule of an operation that fills a tensor with random numbers in place."""

    def rule(nodes: Nodes, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        if kwargs.pop("generator", None) is not None:
            raise nodes.refusal(function, "draws from the model's own generator")
        streams, stacked = nodes.draw(), nodes.of(input)
        if streams is None or stacked is None:
            return NotImplemented  # one tensor for all nodes, of which functorch says that it cannot be filled
        columns = [itertools.repeat(a) if (own := nodes.of(a)) is None else own for a in (*args, *kwargs.values())]
        with outside_of_vmap():
            for node, (stream, *own_args) in enumerate(zip(streams, *columns, strict=False)):
                named = dict(zip(kwargs, own_args[len(args) :], strict=True))
                function(stacked[node], *own_args[: len(args)], **{"generator": stream, **named})
        return input

    return rule


def _empty_rule(function: Rule) -> Rule:
    """Return the rule of a constructor of memory, which every node is going to fill with its own numbers."""

    def rule(nodes: Nodes, *args: Any, **kwargs: Any) -> Any:
        like = any(isinstance(t, Tensor) and is_wrapped(t) for t in (*args, *kwargs.values()))
        if nodes.streams is None or kwargs.get("out") is not None or like:
            return NotImplemented  # what is made like a tensor of each node is each node's own
        with outside_of_vmap():
            return nodes.batch(torch.stack([function(*args, **kwargs)] * nodes.num_nodes))

    return rule


def _gelu(nodes: Nodes, input: Tensor, *, approximate: str = "none") -> Any:
    x = nodes.of(input)
    if x is None:
        return NotImplemented
    with outside_of_vmap():
        return nodes.batch(batched.gelu(x, approximate))


def _embedding(
    nodes: Nodes,
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    table = nodes.spread(weight) if scale_grad_by_freq else nodes.of(weight)  # frequencies are of a node's own batch
    indices = nodes.spread(input)
    if table is None or indices is None or (max_norm is not None and nodes.of(weight) is None):
        return NotImplemented
    with outside_of_vmap():
        if max_norm is not None:
            with torch.no_grad():
                for own_table, own_indices in zip(table, indices, strict=True):
                    torch.embedding_renorm_(own_table, own_indices.contiguous(), max_norm, norm_type)
        return nodes.batch(batched.embedding(indices, table, padding_idx, scale_grad_by_freq))


def _torch_embedding(
    nodes: Nodes,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    padding = None if padding_idx < 0 else padding_idx
    return _embedding(nodes, indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def _requires_grad(nodes: Nodes, tensor: Tensor) -> Any:
    """What a model is told; to torch's own code a wrapper says, as ever, that it needs none."""
    of_torch = str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.")
    return NotImplemented if of_torch else nodes.needs_grad(tensor)


def _hook(nodes: Nodes, tensor: Tensor, hook: Any) -> Any:
    raise NotImplementedError("a hook on a tensor would never be called")


def _grad_fn(nodes: Nodes, tensor: Tensor) -> Any:
    of_torch = str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.")
    if of_torch or not nodes.needs_grad(tensor):
        return NotImplemented
    raise NotImplementedError("grad_fn is none of one node's, and a hook on it would never be called")


def _layer_norm(
    nodes: Nodes,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    stacked = nodes.spread_all(input, weight, bias)
    if stacked is None or not _one_dtype(input, weight, bias):
        return NotImplemented
    x, w, b = stacked
    with outside_of_vmap():
        return nodes.batch(batched.layer_norm(x, normalized_shape, w, b, eps))


def _group_norm(nodes: Nodes, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    x = None if nodes.exact or torch.is_autocast_enabled(input.device.type) else nodes.of(input)
    if x is None or x.is_contiguous():
        return NotImplemented
    nodes.way = "functorch"  # which fails where there is something between the nodes
    nodes.differing.add("group_norm")
    return F.group_norm(nodes.batch(x.contiguous()), *args, **kwargs)


def _cross_entropy(
    nodes: Nodes,
    input: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    unusual = weight is not None or size_average is not None or reduce is not None or label_smoothing
    if unusual or reduction != "mean" or input.dim() != 2 or target.dim() != 1 or target.is_floating_point():
        return NotImplemented
    stacked = nodes.spread_all(input, target)
    if stacked is None:
        return NotImplemented
    logits, targets = cast(stacked[0], torch.float32), stacked[1]
    with outside_of_vmap():
        return nodes.batch(batched.cross_entropy(logits, targets, ignore_index))


def _convolution_rule(dims: int) -> Rule:
    def listed(value: int | Sequence[int]) -> list[int]:
        given = [value] if isinstance(value, int) else list(value)
        return given * dims if len(given) == 1 else given

    def rule(
        nodes: Nodes,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if not nodes.exact and not is_wrapped(weight):
            return NotImplemented  # shared weights: to functorch the nodes are more of the batch
        stacked = nodes.spread_all(input, weight, bias)
        if stacked is None or isinstance(padding, str) or input.dim() != dims + 2:
            return NotImplemented
        stacked = [cast(t) for t in stacked]
        if len({t.dtype for t in stacked if t is not None}) > 1:
            return NotImplemented
        geometry = (listed(stride), listed(padding), listed(dilation), False, [0] * dims, groups)
        if nodes.exact or not _is_better_as_groups(input, weight, geometry):
            nodes.way = "node by node"
            with outside_of_vmap():
                return nodes.batch(batched.convolution(*stacked, *geometry))
        nodes.differing.add(f"conv{dims}d")
        place = nodes.places.pop(id(stacked[1]), None)
        with outside_of_vmap():
            return nodes.batch(batched.grouped_convolution(*stacked, *geometry, weight_grad=place))

    return rule


def _is_better_as_groups(x: Tensor, weight: Tensor, geometry: Any) -> bool:
    """Whether a convolution is faster as groups of channels: measured on CPU, where that is not much work a node.

    More work is as fast node by node, and its results lie in memory as what follows wants them; groups of few channels
    are slow.
    """
    stride, *_ = geometry
    channels = weight.shape[1]
    outputs = x.numel() // x.shape[1] * weight.shape[0] // math.prod(stride)
    return x.device.type != "cpu" or channels == 1 or (channels >= 32 and outputs < 2**15)


def _batch_norm(
    nodes: Nodes,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    mean, var = (None if t is None else nodes.of(t) for t in (running_mean, running_var))
    are_shared = (mean is None) != (running_mean is None) or (var is None) != (running_var is None)
    stacked = nodes.spread_all(input, weight, bias)
    if are_shared or stacked is None or input.device.type != "cpu":
        return NotImplemented
    if training:
        verify_batch_size(input.size())
    x, w, b = stacked
    with outside_of_vmap():
        return nodes.batch(batched.batch_norm(x, mean, var, w, b, training, momentum, eps))


def _pooling_rule(function: Rule, dims: int, is_exact: bool) -> Rule:
    def rule(nodes: Nodes, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = nodes.of(input)
        if x is None or input.dim() != dims + 2 or (nodes.exact and not is_exact):
            return NotImplemented
        if not is_exact:
            nodes.differing.add(name_of(function))
        with outside_of_vmap():
            return nodes.batch(batched.of_examples(lambda examples: function(examples, *args, **kwargs), x))

    return rule


RULES: dict[Any, Rule] = {
    F.linear: _linear,
    **dict.fromkeys((torch.matmul, torch.Tensor.matmul, torch.Tensor.__matmul__), _matmul),
    **dict.fromkeys((torch.bmm, torch.Tensor.bmm, torch.mm, torch.Tensor.mm), _matmul),
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout_rule(whole_features=False),
    F.dropout1d: _dropout_rule(whole_features=True, without_batch=2),
    F.dropout2d: _dropout_rule(whole_features=True),  # which takes (B, C, L), but no single example
    F.dropout3d: _dropout_rule(whole_features=True, without_batch=4),
    **{function: _empty_rule(function) for function in (torch.empty, torch.empty_like, torch.Tensor.new_empty)},
    F.gelu: _gelu,
    F.embedding: _embedding,
    torch.embedding: _torch_embedding,
    torch.Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.grad_fn.__get__: _grad_fn,  # type: ignore[union-attr]
    torch.Tensor.register_hook: _hook,
    torch.Tensor.register_post_accumulate_grad_hook: _hook,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.cross_entropy: _cross_entropy,
    F.batch_norm: _batch_norm,
}
for kind in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform"):
    function = getattr(torch.Tensor, f"{kind}_")
    RULES[function] = _filling_rule(function)
for dims in (1, 2, 3):
    RULES[getattr(F, f"conv{dims}d")] = _convolution_rule(dims)
    for kind, is_exact in (("max_pool", True), ("avg_pool", True), ("adaptive_avg_pool", False)):
        function = getattr(F, f"{kind}{dims}d")
        RULES[function] = _pooling_rule(function, dims, is_exact)
