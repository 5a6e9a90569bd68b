"""What autocast does to operations that functorch takes apart before autocast sees them, done to their operands.

Of a convolution functorch leaves one of another name, which autocast does not know; of a loss in float32, its parts in
bfloat16. Vmapped in eager PyTorch these are called node by node instead, see `vsim.engine.lowering`. A compiled graph
has functorch's forms alone, and the casts before them cost it nothing.

The lists are those of PyTorch's documentation ("Automatic Mixed Precision package", operations by policy), as far as
functorch takes these operations apart: `tests/test_compile.py` compares all kinds with eager nodes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

_Function = Callable[..., Any]


def _functions(modules: tuple[Any, ...], names: str) -> frozenset[_Function]:
    return frozenset(getattr(m, name) for m in modules for name in names.split() if hasattr(m, name))


_ANYWHERE = (torch, F, Tensor, torch.linalg)
_LOWER = _functions(
    _ANYWHERE,
    """
    conv1d conv2d conv3d conv_tbc conv_transpose1d conv_transpose2d conv_transpose3d addmm addbmm baddbmm prelu vecdot
    linear matmul mm bmm __matmul__ __rmatmul__ scaled_dot_product_attention
    """,
)
_FLOAT32 = _functions(
    _ANYWHERE,
    """
    cross_entropy nll_loss binary_cross_entropy binary_cross_entropy_with_logits poisson_nll_loss kl_div l1_loss
    mse_loss smooth_l1_loss huber_loss hinge_embedding_loss cosine_embedding_loss margin_ranking_loss
    soft_margin_loss triplet_margin_loss multi_margin_loss multilabel_margin_loss cdist trace prod
    """,
)
# A CPU's kernels take an input in bfloat16 beside weights in float32, compute in float32, and return the input's dtype.
_MIXED = _functions((F,), "layer_norm group_norm batch_norm instance_norm rms_norm")


class Casting(TorchFunctionMode):
    """Within this context functions of the lists above get their operands as autocast would have cast them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOWER:
            args = [cast(a) for a in args]
            kwargs = {name: cast(a) for name, a in kwargs.items()}
        elif func in _FLOAT32:
            args = [cast(a, torch.float32) for a in args]
            kwargs = {name: cast(a, torch.float32) for name, a in kwargs.items()}
        elif func in _MIXED and args and is_cast(args[0]) and args[0].device.type == "cpu":
            return func(args[0].float(), *args[1:], **kwargs).to(args[0].dtype)
        if func is Tensor.unflatten:  # a method of Python's own, through which the compiler does not see
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)


class Casts(TorchFunctionMode):
    """Notes whether autocast is on for any function that is called within this context, as in a region of the model."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or any(is_cast(operand) for operand in args)
        return func(*args, **(kwargs or {}))


def is_cast(operand: Any) -> bool:
    """Whether autocast casts such an operand of an operation that it knows: what is in float64 it leaves alone."""
    eligible = isinstance(operand, Tensor) and operand.is_floating_point() and operand.dtype != torch.float64
    return eligible and torch.is_autocast_enabled(operand.device.type)


def cast(operand: Any, dtype: torch.dtype | None = None) -> Any:
    """Return an operand in a dtype, None for autocast's own; what autocast leaves alone, as it is."""
    if not is_cast(operand):
        return operand
    return operand.to(torch.get_autocast_dtype(operand.device.type) if dtype is None else dtype)
