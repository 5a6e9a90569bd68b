"""Cast operands as torch.autocast does, for operations that functorch decomposes before autocast sees them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode


def is_cast(operand: Any) -> bool:
    """Return whether autocast, when on, casts an operand of this dtype and device. Autocast never casts float64."""
    eligible = isinstance(operand, Tensor) and operand.is_floating_point() and operand.dtype != torch.float64
    return eligible and operand.device.type != "meta" and torch.is_autocast_enabled(operand.device.type)


def cast(operand: Any, dtype: torch.dtype | None = None) -> Any:
    """Cast an operand to a dtype (default: autocast's) if `is_cast(operand)`; otherwise return it unchanged."""
    if not is_cast(operand):
        return operand
    return operand.to(torch.get_autocast_dtype(operand.device.type) if dtype is None else dtype)


# functorch decomposes some operations before autocast sees them: it turns a convolution into an operation that autocast
# does not know, and a loss in float32 into parts in bfloat16. In compiled code, `Casting` therefore casts the operands
# of these operations. (Without compilation, vsim calls them node by node, so that autocast sees them.) The lists below
# follow the policies in PyTorch's documentation ("Automatic Mixed Precision package").
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
) | _functions((torch.fft,), "fft ifft fft2 ifft2 fftn ifftn rfft irfft rfft2 irfft2 rfftn irfftn hfft ihfft")
# On a CPU, normalizations of a bfloat16 input compute in float32 with float32 weights, and return bfloat16.
_MIXED = _functions((F,), "layer_norm group_norm batch_norm instance_norm rms_norm")
# On a CPU, autocast does not cast products of vectors, but functorch turns them into products that autocast casts.
_OF_VECTORS = _functions((torch, Tensor), "mv dot addmv")
CAST = _LOWER | _FLOAT32 | _MIXED | _OF_VECTORS


class Casting(TorchFunctionMode):
    """Context that casts the operands of the functions listed above as autocast would."""

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
        if func is Tensor.unflatten:  # a method written in Python, which the compiler cannot trace
            return torch.unflatten(*args, **kwargs)
        return func(*args, **kwargs)


class Casts(TorchFunctionMode):
    """Context that records in `seen` whether autocast is on in any function call; the model itself may turn it on."""

    seen = False

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen = self.seen or any(is_cast(operand) for operand in args)
        return func(*args, **(kwargs or {}))
