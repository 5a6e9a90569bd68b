"""Forms of PyTorch operations that compute K nodes at once under torch.func.vmap.

For most operations, functorch has a rule that puts the node dimension into the operation. Some of functorch's rules are
slow, and its rules of random operations do not draw from the nodes' generators. Within a `Lowering`, the functions of
this module that are marked with `rule` replace functorch's rules; the model's code stays unchanged. functorch computes
all other operations. CONTRIBUTING.md ("Add a lowering") shows an example.

`vsim.engine.proof` checks for each model that vsim's and functorch's rules are right.

If autocast casts an operation that has no rule in this module, the operation is called once for each node: functorch
would decompose the operation first, and autocast would cast the parts differently.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map

from vsim.engine import batched
from vsim.engine.batched import Stacked, node_by_node
from vsim.engine.casting import CAST, cast
from vsim.private_torch import (
    add_batch_dim,
    batch_dim,
    batch_level,
    is_wrapped,
    outside_of_vmap,
    unwatched,
    unwrapped,
    verify_batch_size,
)


class Nodes:
    """The nodes of one vmapped call. Rules use this object to unwrap and wrap the nodes' tensors.

    Args:
        streams: a generator for each node of the vmapped call, in order, for random operations. None: draw the same
            numbers for all nodes, from the default generator.
        places: id of a stacked parameter → the tensor for its gradient. An operation that computes the whole gradient
            of a parameter may write it to its place, and return the place. Each place is used once.

    Attributes:
        num_nodes: the number of nodes in this vmapped call.
        shared: id of a tensor that `spread_all` has made by expansion → the tensor that all nodes share.
        way: how the current operation is called; rules may change `way`.
        failed: the first error that an operation raised; the model may have handled this error.
    """

    def __init__(self, streams: Sequence[Any] | None, places: Mapping[int, Tensor] | None = None) -> None:
        super().__init__()
        self.streams = streams
        self.places = dict(places or {})
        self.way = ""
        self.shared: dict[int, Tensor] = {}
        self.failed: Exception | None = None
        self.undrawn: list[tuple[torch.Generator, Tensor]] = []  # the streams' states before the first draw
        self._level = -1

    def begin(self, level: int, num_nodes: int, device: torch.device) -> None:
        """Begin a vmapped call: note functorch's level, the number of nodes and the device."""
        self._level, self.num_nodes, self._device_type = level, num_nodes, device.type

    @property
    def are_cast(self) -> bool:
        """Whether autocast is on."""
        return torch.is_autocast_enabled(self._device_type)

    def of(self, t: Any) -> Tensor | None:
        """Return the stacked tensor (K, …) behind a tensor vmapped over the nodes only; None for other values."""
        if not isinstance(t, Tensor) or batch_level(t) != self._level:
            return None
        stacked, dim = unwrapped(t), batch_dim(t)
        if is_wrapped(stacked):
            return None
        return stacked.movedim(dim, 0) if dim else stacked

    def spread_all(self, arguments: Iterable[Any]) -> list[Any] | None:
        """Return the arguments with a stacked tensor (K, …) for every tensor, including tensors that nodes share.

        Returns None if a tensor belongs to another functorch transform. Sets `has_spread_own`: whether any argument has
        a separate value for each node.
        """
        found, self.has_spread_own = list(arguments), False
        for place, argument in enumerate(found):
            if not isinstance(argument, Tensor):
                continue
            stacked = self.of(argument)
            if stacked is not None:
                self.has_spread_own = True
            elif is_wrapped(argument):
                return None
            else:
                stacked = argument.expand(self.num_nodes, *argument.shape)
                self.shared[id(stacked)] = argument
            found[place] = stacked
        return found

    def batch(self, stacked: Tensor) -> Tensor:
        """Wrap a stacked tensor (K, …) for the vmapped function."""
        return add_batch_dim(stacked, 0, self._level)

    def draw(self) -> Sequence[torch.Generator] | None:
        """Return the nodes' streams for an operation that draws, and keep the streams' states for `undraw`."""
        if self.streams is not None and not self.undrawn:
            self.undrawn = [(stream, stream.get_state()) for stream in self.streams]
        return self.streams

    def undraw(self) -> None:
        """Restore the streams to their states before the first draw."""
        for stream, state in self.undrawn:
            stream.set_state(state)

    def read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return the Python value that `func` reads from its tensors; the value must be the same on all nodes.

        Raises:
            NodesDifferError: the value differs between nodes.
        """
        if all(self.of(t) is None for t in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        with torch.no_grad(), unwatched():  # tensors in a mode that captures operations have no values
            return self._each(func, args, kwargs, None, on_host=True)

    def alone(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func` once for each node, with the node's generator.

        Raises:
            NotImplementedError: `func` writes into its arguments, works on tensors of another transform in the model,
                or draws from the model's own generator.
        """
        if why_not := self.why_not_alone(func, args, kwargs):
            raise refusal(func, why_not)
        return self._each(func, args, kwargs, self.draw())

    def why_not_alone(self, func: Any, args: Any, kwargs: Any) -> str:
        """Return why `func` cannot be called once for each node; empty if it can."""
        if kwargs.get("out") is not None or kwargs.get("inplace") or _writes(func):
            return "writes into a tensor"
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            return "draws from the model's own generator"
        if any(isinstance(t, Tensor) and is_wrapped(t) and self.of(t) is None for t in leaves):
            return "is inside another functorch transform"
        return ""

    def _each(
        self, func: Any, args: Any, kwargs: Any, streams: Sequence[torch.Generator] | None, on_host: bool = False
    ) -> Any:
        """Call `func` once for each node; with `on_host`, first copy the tensors of all nodes to the host at once."""
        known: dict[int, Any] = {}  # id → result, because F.multi_head_attention_forward tests `query is key`

        def mark(leaf: Any) -> Any:
            if not isinstance(leaf, Tensor):
                return leaf
            if id(leaf) not in known:
                stacked = self.of(leaf)
                own = leaf if stacked is None else stacked
                own = own.cpu() if on_host else own
                known[id(leaf)] = own if stacked is None else Stacked(own)
            return known[id(leaf)]

        with outside_of_vmap():
            marked = tree_map(mark, (args, kwargs))
            outcome = node_by_node(func, self.num_nodes, marked[0], marked[1], streams)
        return tree_map(lambda t: self.batch(t.tensor) if isinstance(t, Stacked) else t, outcome)


def refusal(func: Any, why: str) -> Exception:
    """Return the error for an operation that has no form for all nodes."""
    return NotImplementedError(f"{name_of(func)} {why} and has no form for all nodes at once")


def name_of(func: Any) -> str:
    """Return the name of an operation."""
    return str(getattr(func, "__name__", func))


_PRODUCTS = frozenset({"linear", "matmul", "mm", "bmm", "addmm", "baddbmm", "__matmul__"})


def multiplications(name: str, args: Sequence[Any], outcome: Any) -> int:
    """Return the multiplications of a convolution, product or attention, from shapes; 0 for all other operations."""
    tensors = [t for t in args if isinstance(t, Tensor)]
    if not isinstance(outcome, Tensor) or len(tensors) < 2:
        return 0
    if name.startswith("conv"):
        return outcome.numel() * math.prod(tensors[1].shape[1:])
    if name in _PRODUCTS:  # a bias comes last, and a matrix that is added first
        return outcome.numel() * int(tensors[-2].shape[-1])
    if name == "scaled_dot_product_attention":
        return 2 * outcome.numel() * int(tensors[1].shape[-2])
    return 0


def _writes(func: Any) -> bool:
    name = name_of(func)
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")


Form = Callable[..., Any]

RULES: dict[Any, Form] = {}  # operation → its form for all nodes: f(nodes, operation, *args, **kwargs)


def rule(*operations: Any, with_nodes: bool = False) -> Callable[[Form], Form]:
    """Mark a function of stacked tensors as the form in which `operations` compute all nodes.

    The function gets the arguments of the operation, with a stacked tensor (K, …) in place of every tensor; tensors
    that nodes share are expanded. The function returns the stacked result, or NotImplemented to leave the operation to
    functorch.

    Args:
        with_nodes: whether the form gets the `Nodes` as its first argument.
    """

    def register(form: Form) -> Form:
        def of_wrapped(nodes: Nodes, operation: Any, *args: Any, **kwargs: Any) -> Any:
            spread = nodes.spread_all((*args, *kwargs.values()))
            if spread is None or not nodes.has_spread_own:
                return NotImplemented
            own = [nodes] if with_nodes else []
            with outside_of_vmap():
                outcome = form(*own, *spread[: len(args)], **dict(zip(kwargs, spread[len(args) :], strict=True)))
            return nodes.batch(outcome) if isinstance(outcome, Tensor) else outcome

        RULES.update(dict.fromkeys(operations, of_wrapped))
        return form

    return register


def rule_of_wrapped(*operations: Any) -> Callable[[Form], Form]:
    """Mark f(nodes, operation, *args, **kwargs) as the form of `operations`; f gets vmapped, not stacked, tensors."""

    def register(form: Form) -> Form:
        RULES.update(dict.fromkeys(operations, form))
        return form

    return register


# Products and attention -----------------------------------------------------------------------------------------------


@rule(F.linear, with_nodes=True)
def _linear(nodes: Nodes, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    of_all: Any = nodes.shared.get(id(weight)), nodes.shared.get(id(bias))
    if of_all[0] is not None and id(x) not in nodes.shared and (bias is None) == (of_all[1] is None):
        return F.linear(x, *of_all)  # one large product
    if x.is_complex():
        return NotImplemented
    x, weight, bias = map(cast, (x, weight, bias))
    place_of_weight, place_of_bias = (nodes.places.pop(id(t), None) for t in (weight, bias))  # none for cast tensors
    return batched.linear(x, weight, bias, place_of_weight, place_of_bias)


@rule(
    *(
        torch.matmul,
        torch.Tensor.matmul,
        torch.Tensor.__matmul__,
        torch.bmm,
        torch.Tensor.bmm,
        torch.mm,
        torch.Tensor.mm,
    ),
)
def _matmul(a: Tensor, other: Tensor | None = None, mat2: Tensor | None = None) -> Any:
    b = mat2 if other is None else other  # mm and bmm call this argument mat2
    if b is None or a.dim() < 3 or b.dim() < 3 or (b.dim() > 3 and a.dim() != b.dim()):
        return NotImplemented
    a, b = map(cast, (a, b))
    if a.dtype != b.dtype or a.is_complex():  # complex gradients use conjugates
        return NotImplemented
    return batched.matmul(a, b)


@rule_of_wrapped(F.scaled_dot_product_attention)
def _attention(
    nodes: Nodes,
    operation: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    options |= {"dropout_p": dropout_p, "is_causal": is_causal}
    if dropout_p > 0.0 and nodes.streams is not None:
        return nodes.alone(operation, (query, key, value), {"attn_mask": attn_mask, **options})
    stacked = nodes.spread_all((query, key, value, attn_mask))
    if stacked is None or query.dim() < 3:
        return NotImplemented
    with outside_of_vmap():
        return nodes.batch(batched.attention(*stacked, **options))


# Random operations ----------------------------------------------------------------------------------------------------


def _dropout(operation: Any, whole_features: bool, without_batch: int | None = None) -> None:
    """Register a kind of dropout. An input with `without_batch` dimensions is one example (C, …)."""

    @rule_of_wrapped(operation)
    def dropout(
        nodes: Nodes, operation: Any, input: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
    ) -> Any:
        if not 0.0 <= p <= 1.0:
            raise ValueError(f"dropout probability must be between 0 and 1, got {p}")
        if not training or p == 0.0 or input.numel() == 0:
            return input
        streams, stacked = nodes.draw(), nodes.spread_all((input,))
        if streams is None or stacked is None:
            return NotImplemented
        (x,) = stacked
        one_example = input.dim() == without_batch
        with outside_of_vmap():
            dropped = batched.dropout(x[:, None] if one_example else x, p, whole_features, streams, inplace)
            dropped = dropped[:, 0] if one_example else dropped
            return nodes.batch(x.copy_(dropped) if inplace else dropped)


_dropout(F.dropout, whole_features=False)
_dropout(F.dropout1d, whole_features=True, without_batch=2)
_dropout(F.dropout2d, whole_features=True)  # also takes inputs (B, C, L), but no single example
_dropout(F.dropout3d, whole_features=True, without_batch=4)


@rule_of_wrapped(
    *(
        getattr(torch.Tensor, f"{kind}_")
        for kind in ("bernoulli", "cauchy", "exponential", "geometric", "log_normal", "normal", "random", "uniform")
    )
)
def _filling(nodes: Nodes, operation: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Fill a tensor with random numbers in place."""
    if kwargs.pop("generator", None) is not None:
        raise refusal(operation, "draws from the model's own generator")
    streams, stacked = nodes.draw(), nodes.of(input)
    if streams is None or stacked is None:
        return NotImplemented  # nodes share this tensor: functorch raises an error, because it cannot be filled
    columns = [itertools.repeat(a) if (own := nodes.of(a)) is None else own for a in (*args, *kwargs.values())]
    with outside_of_vmap():
        for node, (stream, *own_args) in enumerate(zip(streams, *columns, strict=False)):
            named = dict(zip(kwargs, own_args[len(args) :], strict=True))
            operation(stacked[node], *own_args[: len(args)], **{"generator": stream, **named})
    return input


@rule_of_wrapped(torch.empty, torch.empty_like, torch.Tensor.new_empty)
def _empty(nodes: Nodes, operation: Any, *args: Any, **kwargs: Any) -> Any:
    """Return an uninitialised stacked tensor, which every node will fill with its own numbers."""
    like = any(isinstance(t, Tensor) and is_wrapped(t) for t in (*args, *kwargs.values()))
    if nodes.streams is None or kwargs.get("out") is not None or like:
        return NotImplemented  # a tensor that is made like a stacked one is stacked already
    with outside_of_vmap():
        return nodes.batch(torch.stack([operation(*args, **kwargs)] * nodes.num_nodes))


@rule_of_wrapped(torch.Tensor.register_hook, torch.Tensor.register_post_accumulate_grad_hook)
def _hook(nodes: Nodes, operation: Any, tensor: Tensor, hook: Any) -> Any:
    raise NotImplementedError("a hook on a tensor would never be called")


@rule_of_wrapped(torch.Tensor.data_ptr)
def _data_ptr(nodes: Nodes, operation: Any, tensor: Tensor) -> Any:
    """Return one address for all weights, so that nn.LSTM on CUDA does not move them."""
    return 0 if is_wrapped(tensor) else NotImplemented


# Lookups, activations, norms and losses -------------------------------------------------------------------------------


@rule(F.gelu)
def _gelu(x: Tensor, *, approximate: str = "none") -> Tensor:
    return batched.gelu(x, approximate)


@rule(F.embedding, with_nodes=True)
def _embedding(
    nodes: Nodes,
    indices: Tensor,
    table: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    if id(table) in nodes.shared and (max_norm is not None or not scale_grad_by_freq):
        return NotImplemented  # frequencies must be counted in each node's own batch
    if max_norm is not None:
        with torch.no_grad():
            for own_table, own_indices in zip(table, indices, strict=True):
                torch.embedding_renorm_(own_table, own_indices.contiguous(), max_norm, norm_type)
    return batched.embedding(indices, table, padding_idx, scale_grad_by_freq)


@rule(torch.embedding, with_nodes=True)
def _torch_embedding(
    nodes: Nodes,
    table: Tensor,
    indices: Tensor,
    padding_idx: int = -1,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Any:
    padding = None if padding_idx < 0 else padding_idx
    return _embedding(nodes, indices, table, padding, scale_grad_by_freq=scale_grad_by_freq, sparse=sparse)


@rule(F.layer_norm)
def _layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    lowered = torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float32
    if lowered and not batched.is_cache_bound(x.device):  # as autocast does, except on the CPU
        (x, weight, bias), lowered = (cast(t, torch.float32) for t in (x, weight, bias)), False
    if lowered or x.is_complex() or any(t is not None and t.dtype != x.dtype for t in (weight, bias)):
        return NotImplemented
    return batched.layer_norm(x, normalized_shape, weight, bias, eps)


@rule_of_wrapped(F.group_norm)
def _group_norm(nodes: Nodes, operation: Any, input: Tensor, *args: Any, **kwargs: Any) -> Any:
    x = None if torch.is_autocast_enabled(input.device.type) else nodes.of(input)
    if x is None or x.is_contiguous():
        return NotImplemented
    nodes.way = "functorch"  # its rule needs the nodes' rows to be adjacent in memory
    return operation(nodes.batch(x.contiguous()), *args, **kwargs)


@rule(F.cross_entropy)
def _cross_entropy(
    logits: Tensor,
    targets: Tensor,
    weight: Tensor | None = None,
    size_average: bool | None = None,
    ignore_index: int = -100,
    reduce: bool | None = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    unusual = weight is not None or size_average is not None or reduce is not None or label_smoothing
    if unusual or reduction != "mean" or logits.dim() != 3 or targets.dim() != 2 or targets.is_floating_point():
        return NotImplemented
    return batched.cross_entropy(cast(logits, torch.float32), targets, ignore_index)


@rule(F.batch_norm, with_nodes=True)
def _batch_norm(
    nodes: Nodes,
    x: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    if id(running_mean) in nodes.shared or id(running_var) in nodes.shared:
        return NotImplemented
    if training:
        verify_batch_size(x[0].size())
    return batched.batch_norm(x, running_mean, running_var, weight, bias, training, momentum, eps)


# Convolution and pooling ----------------------------------------------------------------------------------------------


@rule(F.conv1d, F.conv2d, F.conv3d, with_nodes=True)
def _convolution(
    nodes: Nodes,
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    dims = weight.dim() - 3
    if id(weight) in nodes.shared:
        return NotImplemented  # with shared weights, functorch merges the nodes into the batch
    if isinstance(padding, str) or x.dim() != dims + 3:
        return NotImplemented
    x, weight, bias = map(cast, (x, weight, bias))
    if len({t.dtype for t in (x, weight, bias) if t is not None}) > 1:
        return NotImplemented

    def listed(value: int | Sequence[int]) -> list[int]:
        given = [value] if isinstance(value, int) else list(value)
        return given * dims if len(given) == 1 else given

    geometry = (listed(stride), listed(padding), listed(dilation), False, [0] * dims, groups)
    if _is_better_as_groups(x[0], weight[0], geometry):
        return batched.convolution(x, weight, bias, *geometry)
    nodes.way = "node by node"
    own = Stacked(x), Stacked(weight), None if bias is None else Stacked(bias)
    return node_by_node(torch.convolution, nodes.num_nodes, (*own, *geometry), {}).tensor


def _is_better_as_groups(x: Tensor, weight: Tensor, geometry: Any) -> bool:
    """Return whether a convolution is faster as groups of channels, because each node has little work.

    With more work, one call per node is as fast, and gives results in the memory layout that later operations expect.
    On a CPU, the bounds are measured, and groups of few channels are slow. On an accelerator, a node has little work if
    a kernel's launch may take as long as the node's arithmetic; with more work, cuDNN is faster without groups
    [github.com/pytorch/pytorch/issues/73764]. The bound for accelerators is an estimate from shapes alone, because
    measured times would give runs of one seed different bits.
    """
    stride, *_ = geometry
    channels = weight.shape[1]
    outputs = x.numel() // x.shape[1] * weight.shape[0] // math.prod(stride)
    if not batched.is_cache_bound(x.device):
        return outputs * weight[0].numel() < _LITTLE_WORK
    return channels == 1 or (channels >= 32 and outputs < 2**15)


_LITTLE_WORK = 2**30  # multiplications of a node; a GPU computes some 10¹³ per second


def _pooling(function: Any, dims: int) -> None:
    @rule(function)
    def pooling(x: Tensor, *args: Any, **kwargs: Any) -> Any:
        if x.dim() != dims + 3:
            return NotImplemented
        return batched.of_examples(lambda examples: function(examples, *args, **kwargs), x)


for _dims in (1, 2, 3):
    for _kind in ("max_pool", "avg_pool", "adaptive_avg_pool"):
        _pooling(getattr(F, f"{_kind}{_dims}d"), _dims)


# All other operations -------------------------------------------------------------------------------------------------


class Lowering(Nodes, TorchFunctionMode):
    """Context in which a function that is vmapped over nodes uses the forms of this module.

    Args:
        streams, places: see `Nodes`.

    Attributes:
        watch: whether to count `calls`; default: False.
        calls: (operation, way) → number of calls; the ways are "batched", "node by node" and "functorch".
        work: (operation, way) → multiplications of a node, see `multiplications`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.watch = False
        self.calls: Counter[tuple[str, str]] = Counter()
        self.work: Counter[tuple[str, str]] = Counter()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        try:
            outcome, form = NotImplemented, RULES.get(func)
            if form is not None:
                self.way = "batched"
                self.shared.clear()
                outcome = form(self, func, *args, **kwargs)
            if outcome is NotImplemented:
                outcome = self._without_rule(func, args, kwargs)
        except Exception as error:
            self.failed = self.failed or error
            raise
        if self.watch and any(isinstance(t, Tensor) for t in tree_leaves(outcome)):
            self.calls[name_of(func), self.way] += 1
            self.work[name_of(func), self.way] += multiplications(name_of(func), args, outcome)
        return outcome

    def _without_rule(self, func: Any, args: Any, kwargs: Any) -> Any:
        kind, self.way = _KINDS.get(getattr(func, "__name__", "")), "node by node"
        if kind == "reads":
            return self.read(func, args, kwargs)
        decomposed = func in CAST and self.are_cast and not self.why_not_alone(func, args, kwargs)
        if kind == "whole" or decomposed or (kind == "draws" and self.streams is not None):
            return self.alone(func, args, kwargs)
        self.way = "functorch"
        return func(*args, **kwargs)


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Operations that return Python values that depend on a tensor's entries.
_READS = _names(
    "__bool__ __int__ __float__ __complex__ __index__ __format__ __contains__ item tolist is_nonzero equal allclose"
)
# Operations that are called once for each node, for one of four reasons: functorch has no rule; functorch's rule is
# wrong (fills with the last node's value, or sums a gradient over expanded tensors); the operation draws internally; or
# the operation computes no gradient under vmap.
_WHOLE = _names(
    """
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell multi_head_attention_forward
    index_fill index_fill_ select_scatter linear_cross_entropy
    """
)
# Random operations without a form in this module.
_DRAWS = _names(
    """
    rand randn randint randperm rand_like randn_like randint_like bernoulli cauchy exponential geometric log_normal
    normal random uniform multinomial poisson binomial dropout
    native_dropout dropout1d dropout2d dropout3d feature_dropout alpha_dropout feature_alpha_dropout rrelu
    gumbel_softmax _standard_gamma _sample_dirichlet fractional_max_pool2d fractional_max_pool3d
    _fractional_max_pool2d fractional_max_pool2d_with_indices
    _fractional_max_pool3d fractional_max_pool3d_with_indices
    """
)
_KINDS = {
    **dict.fromkeys(_READS, "reads"),
    **dict.fromkeys(_WHOLE, "whole"),
    **{name: "draws" for drawing in _DRAWS for name in (drawing, f"{drawing}_")},
}
