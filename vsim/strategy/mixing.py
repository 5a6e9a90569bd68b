"""Finds where code that is written as if for one node takes the values of several nodes together."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

# What only arranges values: the result may have no node dimension in front, and mixes nothing.
_ARRANGES = (
    *("getitem", "select", "unbind", "split", "tensor_split", "chunk", "narrow", "index_select", "gather", "stack"),
    *("unsqueeze", "squeeze", "expand", "expand_as", "repeat", "tile", "roll", "flip", "einsum"),
    *("transpose", "permute", "movedim", "moveaxis", "swapaxes", "swapdims", "adjoint", "t", "T", "mT", "H", "mH"),
)


class NoMixing(TorchFunctionMode):
    """Raises a ValueError, within its context, where an operation on stacked tensors gives one result for all nodes.

    It follows stacked tensors from parameters and their gradients through operations: `p.grad.abs().max()` is found.
    What functions under `torch.vmap` do with one node's tensors is theirs, and so is what is indexed (`p.grad[0]`).
    Collectives and optimizers are not looked at.

    Args:
        parameters: stacked (K, *shape). method: whose code it is, for the error.
    """

    def __init__(self, parameters: Sequence[Tensor], method: str) -> None:
        super().__init__()
        self._method = method
        self._num_rows = len(parameters[0]) if parameters else 1
        self._stacked: dict[int, weakref.ref[Tensor]] = {}
        for parameter in parameters:
            self._stacked[id(parameter)] = weakref.ref(parameter)

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._num_rows == 1 or not self._any_stacked((args, kwargs)) or not _is_called_by_user():
            return func(*args, **kwargs)
        name = getattr(func, "__name__", str(func))
        name = (func.__self__.__name__ if name == "__get__" else name).strip("_")
        try:
            result = func(*args, **kwargs)
        except RuntimeError as error:
            if name == "view":  # a row of a stacked tensor is not next to the one before
                raise ValueError(_message(name, self._method)) from error
            raise
        index = args[1] if name == "getitem" else None
        by_mask = isinstance(index, Tensor) and index.dtype == torch.bool and index.dim() > 1
        for tensor in _tensors(result):
            if name.startswith("new_") or (name in _ARRANGES and not by_mask):
                self._stacked.pop(id(tensor), None)
            elif tensor.dim() == 0 or len(tensor) != self._num_rows:
                raise ValueError(_message(name, self._method))
            else:
                self._stacked[id(tensor)] = weakref.ref(tensor)
        return result

    def _any_stacked(self, arguments: Any) -> bool:
        return any((known := self._stacked.get(id(t))) is not None and known() is t for t in _tensors(arguments))


def _tensors(values: Any) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def _is_called_by_user() -> bool:
    """Whether the operation that is now under way was called by a strategy: not by vsim, nor by an optimizer."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        module = frame.f_globals.get("__name__", "")
        if module.startswith(("vsim.", "vsim_kernels.", "torch.optim.")):
            return False
        if not module.startswith("torch."):
            return True
        frame = frame.f_back
    return True


def _message(name: str, method: str) -> str:
    if name == "foreach_norm":
        return (
            "clip_grad_norm_ over self.model.parameters() takes one norm over all nodes, for their gradients are "
            "stacked; give the strategy max_norm=, which clips every node's gradient by its own"
        )
    return (
        f"{name}() in {method}() mixes the nodes: parameters and gradients are stacked, (K, *shape), and its result is "
        "one for all nodes. Write a function of one node's tensor and call torch.vmap(function)(p.grad); or begin with "
        "p.grad.flatten(1), (K, n), and give dim=1. A value that nodes have in common takes all_reduce()"
    )
