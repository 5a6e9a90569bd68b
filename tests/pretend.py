"""An accelerator in Python: tensors say that they are on pretend:0, and compute on the CPU.

Code that mixes devices fails here as on a GPU, and whatever comes back to the host is counted. Random numbers are the
CPU's, so that a run here has the numbers of a run there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

import vsim.trainer

_GENERATOR = torch.Generator
# Before the first backward pass of the process, with which autograd knows all the devices that it will ever know.
_setup_privateuseone_for_python_backend("pretend")  # type: ignore[no-untyped-call]
torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16]  # type: ignore[attr-defined]
DEVICE = torch.device("pretend", 0)
# Operations that PyTorch lets take tensors of two devices: copies, and indices from the host.
_MAY_MIX = {"_to_copy", "copy_", "index", "index_put_", "_index_put_impl_"}
_IN_PLACE = {"copy_", "index_put_", "_index_put_impl_", "set_"}


class Reads:
    """How often the host has waited for values of the device."""

    count = 0


class OnDevice(Tensor):
    """A tensor with the same values as `values`, a tensor on the CPU."""

    __torch_function__ = torch._C._disabled_torch_function_impl
    values: Tensor

    @staticmethod
    def __new__(cls, values: Tensor) -> OnDevice:
        made = Tensor._make_wrapper_subclass(
            cls,
            values.size(),
            strides=values.stride(),
            storage_offset=values.storage_offset(),
            dtype=values.dtype,
            layout=values.layout,
            device=DEVICE,
            requires_grad=values.requires_grad,
        )
        made.values = values
        return made  # type: ignore[no-any-return]

    def data_ptr(self) -> int:
        return self.values.data_ptr()

    def untyped_storage(self) -> torch.UntypedStorage:
        return self.values.untyped_storage()

    def tolist(self) -> Any:
        Reads.count += 1
        return self.values.tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError(f"can't convert {DEVICE} device type tensor to numpy. Use Tensor.cpu() first.")

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _compute(func, args, kwargs or {})


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    name = func.overloadpacket.__name__
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    here = [t for t in tensors if isinstance(t, OnDevice)]
    elsewhere = [t for t in tensors if not isinstance(t, OnDevice) and t.dim()]
    if here and elsewhere and name not in _MAY_MIX:
        raise RuntimeError(f"Expected all tensors to be on the same device, but found {DEVICE} and cpu ({func})")
    device = kwargs.get("device")
    if name in _IN_PLACE:
        stays = isinstance(args[0], OnDevice)
    else:
        stays = bool(here) if device is None else torch.device(device).type == DEVICE.type
    Reads.count += bool(here) and (not stays or name in ("_local_scalar_dense", "nonzero", "equal"))
    if device is not None and stays:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    known = {id(t.values): t for t in here}
    with _disable_current_modes():
        result = func(*tree_map(_values, args), **tree_map(_values, kwargs))

    def placed(t: Any) -> Any:
        if not isinstance(t, Tensor) or isinstance(t, OnDevice):
            return t
        return known[id(t)] if id(t) in known else OnDevice(t) if stays else t

    return tree_map(placed, result)


def _values(t: Any) -> Any:
    return t.values if isinstance(t, OnDevice) else t


def _implemented(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _compute(func, args, kwargs)


# All that makes tensors out of none begins with one of these; a copy_ comes without Python's turn from torch.tensor.
_LIBRARY = torch.library.Library("aten", "IMPL")
for _func in (torch.ops.aten.empty.memory_format, torch.ops.aten.empty_strided.default, torch.ops.aten.copy_.default):
    _LIBRARY.impl(_func, _implemented(_func), "PrivateUse1")
# Autocast casts nothing here by itself; what vsim casts under it, it does.
_ALL = torch.library.Library("_", "IMPL")
_ALL.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


class _Anywhere(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _GENERATOR)


class _Generator(metaclass=_Anywhere):
    """torch.Generator, whose numbers for the device are the CPU's."""

    def __new__(cls, device: Any = "cpu") -> Any:
        return _GENERATOR("cpu" if torch.device(device) == DEVICE else device)


@contextmanager
def accelerator() -> Iterator[torch.device]:
    """Within this context there is a device pretend:0 for PyTorch and vsim."""
    Reads.count = 0
    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
        stack.enter_context(
            mock.patch.object(vsim.trainer, "pick_device", lambda device: torch.device(device or DEVICE))
        )
        yield DEVICE
