"""The forms of operations that run for K nodes at once, under torch.func.vmap.

functorch has a rule for most operations that puts the node dimension into the operation. For some it is slow, for some
its result differs in the last bits from the operation on one node, and random ones do not draw from the nodes' own
generators. A `Lowering` puts the functions of `vsim.engine.batched` and `vsim.engine.products` in their place, while
the model's code stays as it is.

With `exact=True` every operation is bitwise equal to eager PyTorch on one node. Matrix products and attention are
batched (their kernels compute every matrix alike), exactly rounded arithmetic and mere moves of data are left to
functorch, and all other operations are called once for each node. An operation that cannot be called so is refused by
name.

Under autocast the other operations are called once for each node as well. Autocast casts the operands of an operation
as it is called: of a convolution, of a loss. functorch takes these apart first, and their parts are cast otherwise.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves, tree_map_only

from vsim.engine.kept import Apart
from vsim.engine.nodes import Nodes, name_of
from vsim.engine.rules import RULES


class Lowering(Nodes, TorchFunctionMode):
    """Within this context a function vmapped over nodes uses the operations of `batched` and `products`.

    Args:
        streams, exact, places: see `Nodes`.

    Attributes:
        watch: keep the account of `calls` and `differing`; off unless it is set.
        calls: (operation, way) → calls; the ways are "batched", "node by node" and "functorch".
        unproven: operations that functorch computes in a form of its own, by rules that vsim's tests may not know.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.watch = False
        self.calls: Counter[tuple[str, str]] = Counter()
        self.unproven: set[str] = set()
        self._of_apart: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self._node is None:  # nothing is vmapped yet
            return func(*args, **kwargs)
        if Apart in types and self.streams is not None:  # in a validation its rows may be others
            args, kwargs = tree_map_only(Apart, self._together, (args, kwargs))
        try:
            rule = RULES.get(func)
            if rule is not None:
                self.way = "batched"
                outcome = rule(self, *args, **kwargs)
                if outcome is not NotImplemented:
                    return self._note(func, self.way, outcome)
            if (name := name_of(func)) in _READS:
                return self.read(func, args, kwargs)
            if name in _WHOLE or (name.removesuffix("_") in _DRAWS and self.streams is not None):
                return self._note(func, "node by node", self.alone(func, args, kwargs))
            if (self.exact or self.watch or self.are_cast) and self._may_differ(func, args, kwargs):
                if self.exact or (self.are_cast and not self.why_not_alone(func, args, kwargs)):
                    return self._note(func, "node by node", self.alone(func, args, kwargs))
                self.differing.add(name)
                if name.removesuffix("_") not in _EXACT_ARITHMETIC and name not in _EXACT_ARITHMETIC:
                    self.unproven.add(name)
            return self._note(func, "functorch", func(*args, **kwargs))
        except Exception as error:
            self.failed = self.failed or error
            raise

    def _together(self, apart: Apart) -> Tensor:
        """Return what stands for the tensors of all nodes, within vmap."""
        if id(apart) not in self._of_apart:
            self._of_apart[id(apart)] = self.batch(apart.together())
        return self._of_apart[id(apart)]

    def _may_differ(self, func: Any, args: Any, kwargs: Any) -> bool:
        """Whether functorch's form of the operation may differ from the operation on one node in the last bits."""
        name = name_of(func)
        tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
        if name == "__get__" or not tensors:
            return False
        if any(t.is_complex() for t in tensors):  # a product, a magnitude: several operations each
            return True
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

    def _note(self, func: Any, way: str, outcome: Any) -> Any:
        if self.watch and any(isinstance(t, Tensor) for t in tree_leaves(outcome)):
            self.calls[name_of(func), way] += 1
        return outcome


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Correctly rounded, entry by entry: bitwise equal wherever an entry lies in memory.
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
# These tell the model's Python something of a tensor's entries.
_READS = _names(
    "__bool__ __int__ __float__ __complex__ __index__ __format__ __contains__ item tolist is_nonzero equal allclose"
)
# Run for every node as a whole: functorch has no rule for them, or a wrong one (it fills by the last node's value, and
# sums a gradient over what it has expanded), they draw out of sight, or compute no gradient of what is a wrapper.
_WHOLE = _names(
    """
    lstm gru rnn_tanh rnn_relu lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell multi_head_attention_forward
    index_fill index_fill_ select_scatter linear_cross_entropy
    """
)
# These draw, as `vsim.engine.rules` has no form for.
_DRAWS = _names(
    """
    rand randn randint randperm rand_like randn_like randint_like bernoulli normal multinomial poisson binomial dropout
    native_dropout feature_dropout alpha_dropout feature_alpha_dropout rrelu gumbel_softmax _standard_gamma
    _sample_dirichlet fractional_max_pool2d fractional_max_pool3d
    _fractional_max_pool2d fractional_max_pool2d_with_indices
    _fractional_max_pool3d fractional_max_pool3d_with_indices
    """
)
