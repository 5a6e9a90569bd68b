"""What operations become when they run for K nodes at once, under torch.func.vmap.

functorch has a rule for most operations that puts the node dimension into the operation. For some it is slow, for some
its result differs in the last bits from the operation on one node, and random ones do not draw from the nodes' own
generators. A `Lowering` puts the functions of `vsim.engine.batched` and `vsim.engine.products` in their place, while
the model's code stays as it is.

With `exact=True` every operation has the bits of eager PyTorch on one node. Matrix products and attention are batched
(their kernels compute every matrix alike), exactly rounded arithmetic and what only moves data is left to functorch,
and everything else is called once for each node. What cannot be done so is refused by name.
"""

from __future__ import annotations

import math
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from vsim.engine import batched, products
from vsim.engine.batched import Stacked

Rule = Callable[..., Any]


class InexactError(ValueError):
    """An operation has no form for all nodes at once that is known to have the bits of one node alone."""


class Lowering(TorchFunctionMode):
    """Within this context a function vmapped over nodes uses the operations of `batched` and `products`.

    Args:
        streams: a generator for each node of the vmapped call, in order; what is random draws from them. None: from
            the default generator, the same for all nodes.
        exact: only operations with the bits of one node alone; others raise an InexactError.
        places: id of a stacked parameter → where its gradient is wanted. What computes a parameter's whole gradient may
            write it there and return that tensor as the gradient; each place is used once.

    Attributes:
        num_nodes: the nodes of this vmapped call.
        watch: keep the account of the next two; off unless it is set.
        calls: (operation, way) → calls; the ways are "batched", "node by node" and "functorch".
        differing: the operations that took a form which may have other bits than one node alone.
    """

    def __init__(
        self,
        streams: Sequence[torch.Generator] | None,
        exact: bool = False,
        places: Mapping[int, Tensor] | None = None,
    ) -> None:
        super().__init__()
        self.streams = streams
        self.exact = exact
        self.places = dict(places or {})
        self.way = ""  # of the operation that is being computed: what a rule says of it
        self._level = -1
        self._node: Tensor | None = None
        self.watch = False
        self.calls: Counter[tuple[str, str]] = Counter()
        self.differing: set[str] = set()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._node is None:  # nothing is vmapped yet
            return func(*args, **kwargs)
        rule = _RULES.get(func)
        if rule is not None:
            self.way = "batched"
            outcome = rule(self, *args, **kwargs)
            if outcome is not NotImplemented:
                return self._note(func, self.way, outcome)
        if _name(func) in _WHOLE or (func in _RANDOM and self.streams is not None):
            return self._note(func, "node by node", self.alone(func, args, kwargs))
        if (self.exact or self.watch) and self._may_differ(func, args, kwargs):
            if self.exact:
                return self._note(func, "node by node", self.alone(func, args, kwargs))
            self.differing.add(_name(func))
        return self._note(func, "functorch", func(*args, **kwargs))

    @property
    def node(self) -> Tensor | None:
        """Any tensor that is batched over the nodes. The vmapped function sets it when it starts."""
        return self._node

    @node.setter
    def node(self, node: Tensor) -> None:
        self._node = node
        self._level = functorch.maybe_get_level(node)
        self.num_nodes = len(functorch.get_unwrapped(node))

    def of(self, t: Any) -> Tensor | None:
        """Return the stacked tensor (K, …) behind one that is batched over the nodes alone, else None."""
        if not isinstance(t, Tensor) or functorch.maybe_get_level(t) != self._level:
            return None
        stacked, dim = functorch.get_unwrapped(t), functorch.maybe_get_bdim(t)
        if functorch.is_functorch_wrapped_tensor(stacked):
            return None
        return stacked.movedim(dim, 0) if dim else stacked

    def spread(self, t: Tensor) -> Tensor | None:
        """Return (K, …) of a tensor that may be the same for all nodes; None for what is not ours."""
        stacked = self.of(t)
        if stacked is None and not functorch.is_functorch_wrapped_tensor(t):
            return t.expand(self.num_nodes, *t.shape)
        return stacked

    def spread_all(self, *tensors: Tensor | None) -> list[Any] | None:
        """Return (K, …) of every tensor that is there, see `spread`; None if one of them is not ours."""
        found: list[Tensor | None] = []
        for t in tensors:
            stacked = None if t is None else self.spread(t)
            if stacked is None and t is not None:
                return None
            found.append(stacked)
        return found

    def batch(self, stacked: Tensor) -> Tensor:
        """Wrap a stacked tensor (K, …) for the vmapped function."""
        return functorch._add_batch_dim(stacked, 0, self._level)

    def alone(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func` once for each node.

        Raises:
            InexactError: it writes into its arguments, or works on tensors of another transform in the model.
        """
        if kwargs.get("out") is not None or kwargs.get("inplace") or _writes(func):
            raise self._refusal(func, "writes into a tensor")
        leaves = tree_leaves((args, kwargs))
        if any(
            isinstance(t, Tensor) and functorch.is_functorch_wrapped_tensor(t) and self.of(t) is None for t in leaves
        ):
            raise self._refusal(func, "is inside another functorch transform")
        known: dict[int, Stacked] = {}  # F.multi_head_attention_forward asks whether query, key and value are one

        def mark(leaf: Any) -> Any:
            stacked = self.of(leaf)
            return leaf if stacked is None else known.setdefault(id(leaf), Stacked(stacked))

        marked = tree_map(mark, (args, kwargs))
        with outside_of_vmap():
            outcome = batched.node_by_node(func, self.num_nodes, marked[0], marked[1], self.streams)
        return tree_map(lambda t: self.batch(t.tensor) if isinstance(t, Stacked) else t, outcome)

    def _refusal(self, func: Any, why: str) -> Exception:
        if not self.exact:
            return NotImplementedError(f"{_name(func)} {why} and has no form for all nodes at once")
        return InexactError(
            f"{_name(func)} {why} and has no form for all nodes at once that is known to have the bits of one node "
            "alone; with deterministic=True use executor='loop'"
        )

    def _may_differ(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether functorch's form of the operation may have other bits than the operation on one node."""
        name = _name(func)
        if name == "__get__" or not any(isinstance(t, Tensor) for t in tree_leaves((args, kwargs))):
            return False
        if name in _EXACT_ARITHMETIC or name.removesuffix("_") in _EXACT_ARITHMETIC:
            return self._sums_in_backward([*args, *kwargs.values()])
        if name in _MOVES_DATA:
            return False
        if name in ("__getitem__", "__setitem__") and not any(isinstance(i, Tensor) for i in tree_leaves(args[1])):
            return False
        return not all(self.of(t) is None for t in tree_leaves((args, kwargs)))

    def _sums_in_backward(self, args: Iterable[Any]) -> bool:
        """Whether a tensor that needs a gradient is broadcast: its gradient is then a sum, whose order matters."""
        tensors = [t for t in args if isinstance(t, Tensor)]
        if len({t.shape for t in tensors}) == 1:
            return False
        shape = torch.broadcast_shapes(*(t.shape for t in tensors))
        return any(t.shape != shape and self.needs_grad(t) for t in tensors)

    def needs_grad(self, t: Tensor) -> bool:
        """Whether a gradient flows into a tensor of the vmapped function."""
        while functorch.is_functorch_wrapped_tensor(t):
            t = functorch.get_unwrapped(t)
        return t.requires_grad

    def note_product(self, name: str) -> None:
        """Note that a product is batched, which may differ in its bits."""
        if not self.exact and not products.batches_agree():
            self.differing.add(name)

    def _note(self, func: Any, way: str, outcome: Any) -> Any:
        if self.watch and any(isinstance(t, Tensor) for t in tree_leaves(outcome)):
            self.calls[_name(func), way] += 1
        return outcome


# Within this context plain stacked tensors are computed with as if no vmap was going on.
outside_of_vmap = temporarily_clear_interpreter_stack


def _name(func: Any) -> str:
    return str(getattr(func, "__name__", func))


def _writes(func: Any) -> bool:
    name = _name(func)
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Correctly rounded, entry by entry: the same bits wherever an entry lies in memory.
_EXACT_ARITHMETIC = _names(
    """
    add sub mul div neg abs square sqrt reciprocal true_divide subtract multiply divide negative absolute sign
    __add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __neg__ __abs__ __iadd__ __isub__
    __imul__ __itruediv__ relu relu6 hardtanh leaky_relu threshold clamp clamp_min clamp_max clip maximum minimum
    where eq ne lt le gt ge __eq__ __ne__ __lt__ __le__ __gt__ __ge__ isnan isinf isfinite logical_and logical_or
    logical_not bitwise_and bitwise_or bitwise_not __and__ __or__ __invert__ floor ceil round trunc masked_fill
    floor_divide remainder
    """
)
# These only move or name entries, or make new ones that do not depend on any.
_MOVES_DATA = _names(
    """
    view view_as reshape reshape_as flatten unflatten ravel transpose swapaxes t permute movedim moveaxis squeeze
    unsqueeze split chunk tensor_split unbind select narrow contiguous clone detach to float double half bfloat16 long
    int bool type type_as cpu cuda cat concat stack hstack vstack flip roll tril triu diagonal copy_ zero_ fill_
    zeros_like ones_like empty_like full_like new_zeros new_ones new_empty new_full new_tensor size dim numel
    is_floating_point is_complex is_contiguous stride ndimension requires_grad_ __len__ argmax one_hot unfold
    max_pool1d max_pool2d max_pool3d _max_pool1d _max_pool2d _max_pool3d avg_pool1d avg_pool2d avg_pool3d
    """
)
# Run for every node as a whole: functorch has no rule for them, or they draw out of sight.
_WHOLE = _names(
    "lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell multi_head_attention_forward"
)
_RANDOM: frozenset[Any] = frozenset(
    {
        *(
            torch.rand,
            torch.randn,
            torch.randint,
            torch.randperm,
            torch.rand_like,
            torch.randn_like,
            torch.randint_like,
        ),
        *(torch.bernoulli, torch.normal, torch.multinomial, torch.poisson, torch.binomial, torch.Tensor.bernoulli),
        *(torch.Tensor.multinomial, F.alpha_dropout, F.feature_alpha_dropout, F.rrelu, F.gumbel_softmax),
        *(F.fractional_max_pool2d, F.fractional_max_pool3d),
    }
)


def _plain_dtype(first: Tensor, *others: Tensor | None) -> bool:
    """Whether the tensors are of one dtype and autocast is not going to change it."""
    if torch.is_autocast_enabled(first.device.type):
        return False
    return all(t is None or t.dtype == first.dtype for t in others)


def _linear(nodes: Lowering, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not nodes.exact and not functorch.is_functorch_wrapped_tensor(weight):
        x = nodes.of(input)
        if x is not None and not (bias is not None and functorch.is_functorch_wrapped_tensor(bias)):
            nodes.differing.add("linear")  # one large product
            return nodes.batch(F.linear(x, weight, bias))
    all_stacked = nodes.spread_all(input, weight, bias)
    if all_stacked is None:
        return NotImplemented
    x, w, b = all_stacked
    place_of_w = place_of_b = None
    if torch.is_autocast_enabled(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        x, w, b = x.to(dtype), w.to(dtype), None if b is None else b.to(dtype)
    else:
        place_of_w, place_of_b = (nodes.places.pop(id(t), None) for t in (w, b))
    with outside_of_vmap():
        nodes.note_product("linear")
        return nodes.batch(products.linear(x, w, b, place_of_w, place_of_b, nodes.exact))


def _matmul(nodes: Lowering, input: Tensor, other: Tensor | None = None, mat2: Tensor | None = None) -> Any:
    other = mat2 if other is None else other  # which mm and bmm call so
    if other is None or input.dim() < 2 or other.dim() < 2 or (other.dim() > 2 and input.dim() != other.dim()):
        return NotImplemented
    both = nodes.spread_all(input, other)
    if both is None or not _plain_dtype(input, other):
        return NotImplemented
    with outside_of_vmap():
        nodes.note_product("matmul")
        a, b = both
        return nodes.batch(products.matmul(a, b, nodes.exact))


def _attention(
    nodes: Lowering,
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

    def rule(nodes: Lowering, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability must be between 0 and 1, got {p}")
        if not training or p == 0.0 or input.numel() == 0:
            return input
        if nodes.streams is None:
            return NotImplemented
        x = nodes.spread(input)
        if x is None:  # a transform of the user's own, inside the model
            if not functorch.is_batchedtensor(input):
                return NotImplemented
            if whole_features:
                raise NotImplementedError("feature dropout inside a vmap within the model; use executor='loop'")
            level, dim = functorch.maybe_get_level(input), functorch.maybe_get_bdim(input)
            dropped = rule(nodes, functorch.get_unwrapped(input).movedim(dim, 0), p)  # a dimension like any other
            return functorch._add_batch_dim(dropped, 0, level)
        one_example = input.dim() == without_batch
        with outside_of_vmap():
            dropped = batched.dropout(x[:, None] if one_example else x, p, whole_features, nodes.streams)
            dropped = dropped[:, 0] if one_example else dropped
        return input.copy_(nodes.batch(dropped)) if inplace else nodes.batch(dropped)

    return rule


def _gelu(nodes: Lowering, input: Tensor, *, approximate: str = "none") -> Any:
    x = nodes.of(input)
    if x is None:
        return NotImplemented
    with outside_of_vmap():
        return nodes.batch(batched.gelu(x, approximate))


def _embedding(
    nodes: Lowering,
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
    nodes: Lowering,
    weight: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    padding = None if padding_idx < 0 else padding_idx
    return _embedding(nodes, indices, weight, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


def _requires_grad(nodes: Lowering, tensor: Tensor) -> Any:
    """What a model is told; to torch's own code a wrapper says, as ever, that it needs none."""
    of_torch = str(sys._getframe(2).f_globals.get("__name__")).startswith("torch.")
    return NotImplemented if of_torch else nodes.needs_grad(tensor)


def _hook(nodes: Lowering, tensor: Tensor, hook: Any) -> Any:
    raise NotImplementedError("a hook on a tensor would never be called")


def _layer_norm(
    nodes: Lowering,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    stacked = nodes.spread_all(input, weight, bias)
    if stacked is None or not _plain_dtype(input, weight, bias):
        return NotImplemented
    x, w, b = stacked
    with outside_of_vmap():
        return nodes.batch(batched.layer_norm(x, normalized_shape, w, b, eps))


def _group_norm(nodes: Lowering, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    x = None if nodes.exact else nodes.of(input)
    if x is None or x.is_contiguous():
        return NotImplemented
    nodes.way = "functorch"  # which fails where there is something between the nodes
    nodes.differing.add("group_norm")
    return F.group_norm(nodes.batch(x.contiguous()), *args, **kwargs)


def _cross_entropy(
    nodes: Lowering,
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
    if stacked is None or not _plain_dtype(input):
        return NotImplemented
    with outside_of_vmap():
        logits, targets = stacked
        return nodes.batch(batched.cross_entropy(logits, targets, ignore_index))


def _convolution_rule(dims: int) -> Rule:
    def listed(value: int | Sequence[int]) -> list[int]:
        given = [value] if isinstance(value, int) else list(value)
        return given * dims if len(given) == 1 else given

    def rule(
        nodes: Lowering,
        input: Tensor,
        weight: Tensor,
        bias: Tensor | None = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
    ) -> Any:
        if not nodes.exact and not functorch.is_functorch_wrapped_tensor(weight):
            return NotImplemented  # shared weights: to functorch the nodes are more of the batch
        stacked = nodes.spread_all(input, weight, bias)
        one_dtype = _plain_dtype(input, weight, bias)
        if stacked is None or isinstance(padding, str) or input.dim() != dims + 2 or not one_dtype:
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
    nodes: Lowering,
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
    tensors = (input, running_mean, running_var, weight, bias)
    if are_shared or stacked is None or not _plain_dtype(*tensors) or input.device.type != "cpu":
        return NotImplemented
    if training:
        F._verify_batch_size(input.size())  # type: ignore[attr-defined]
    x, w, b = stacked
    with outside_of_vmap():
        return nodes.batch(batched.batch_norm(x, mean, var, w, b, training, momentum, eps))


def _pooling_rule(function: Rule, dims: int, is_exact: bool) -> Rule:
    def rule(nodes: Lowering, input: Tensor, *args: Any, **kwargs: Any) -> Any:
        x = nodes.of(input)
        if x is None or input.dim() != dims + 2 or (nodes.exact and not is_exact):
            return NotImplemented
        if not is_exact:
            nodes.differing.add(_name(function))
        with outside_of_vmap():
            return nodes.batch(batched.of_examples(lambda examples: function(examples, *args, **kwargs), x))

    return rule


_RULES: dict[Any, Rule] = {
    F.linear: _linear,
    torch.matmul: _matmul,
    torch.Tensor.matmul: _matmul,
    torch.Tensor.__matmul__: _matmul,
    torch.bmm: _matmul,
    torch.Tensor.bmm: _matmul,
    torch.mm: _matmul,
    torch.Tensor.mm: _matmul,
    F.scaled_dot_product_attention: _attention,
    F.dropout: _dropout_rule(whole_features=False),
    F.dropout1d: _dropout_rule(whole_features=True, without_batch=2),
    F.dropout2d: _dropout_rule(whole_features=True),  # which takes (B, C, L), but no single example
    F.dropout3d: _dropout_rule(whole_features=True, without_batch=4),
    F.gelu: _gelu,
    F.embedding: _embedding,
    torch.embedding: _torch_embedding,
    torch.Tensor.requires_grad.__get__: _requires_grad,  # type: ignore[attr-defined]
    torch.Tensor.register_hook: _hook,
    torch.Tensor.register_post_accumulate_grad_hook: _hook,
    F.layer_norm: _layer_norm,
    F.group_norm: _group_norm,
    F.cross_entropy: _cross_entropy,
    F.conv1d: _convolution_rule(1),
    F.conv2d: _convolution_rule(2),
    F.conv3d: _convolution_rule(3),
    F.batch_norm: _batch_norm,
    F.max_pool1d: _pooling_rule(F.max_pool1d, 1, is_exact=True),
    F.max_pool2d: _pooling_rule(F.max_pool2d, 2, is_exact=True),
    F.max_pool3d: _pooling_rule(F.max_pool3d, 3, is_exact=True),
    F.avg_pool1d: _pooling_rule(F.avg_pool1d, 1, is_exact=True),
    F.avg_pool2d: _pooling_rule(F.avg_pool2d, 2, is_exact=True),
    F.avg_pool3d: _pooling_rule(F.avg_pool3d, 3, is_exact=True),
    F.adaptive_avg_pool1d: _pooling_rule(F.adaptive_avg_pool1d, 1, is_exact=False),
    F.adaptive_avg_pool2d: _pooling_rule(F.adaptive_avg_pool2d, 2, is_exact=False),
    F.adaptive_avg_pool3d: _pooling_rule(F.adaptive_avg_pool3d, 3, is_exact=False),
}
