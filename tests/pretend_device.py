"""An accelerator in Python: a device pretend:0, whose tensors PyTorch takes for a GPU's.

Its memory is the CPU's, and so are its kernels and random numbers. But what CUDA or MPS refuses fails here, such as
operands on two devices, float64, and operations that MPS does not have; launches of kernels and reads by the host are
counted.

A pretended device cannot compile, cast, or run recurrent layers. Code that asks for the type "cuda" or "mps" does not
meet it. What runs compute on a device is in any_device.py, for real ones.
"""

from __future__ import annotations

import ctypes
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _setup_privateuseone_for_python_backend
from vsim_kernels import lowrank

import vsim  # noqa: F401  # all that picks a device
from vsim.engine import machine

aten = torch.ops.aten
_CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_GENERATOR = torch.Generator


LAUNCHES: Counter[str] = Counter()  # of operations on the device, and "upload": copies of the host's memory
READS: Counter[str] = Counter()  # operations that bring values to the host, which waits for them


# Tensors ------------------------------------------------------------------------------------------------------------
# A tensor on the device is a real one of PyTorch's: DLPack knows the kind of its device. Only the label in the capsule
# is changed on the way, so that memory is shared and freed as usual.

_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_ON_CPU, _ON_EXTENSION = 1, 12  # DLDeviceType


def _labelled(t: Tensor, kind: int) -> Tensor:
    """Return a tensor on the same memory that says that it is on another device."""
    capsule = torch._C._to_dlpack(t)
    address = _address(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + 8).value = kind
    ctypes.c_int32.from_address(address + 12).value = 0
    return torch._C._from_dlpack(capsule)  # type: ignore[no-any-return]


def is_there(t: Any) -> bool:
    """Return whether an object is a tensor on the device."""
    return isinstance(t, Tensor) and t.device.type == "pretend"


def _on_device(t: Tensor) -> Tensor:
    if t.dtype in (torch.float64, torch.complex128):
        raise TypeError(f"Cannot convert a MPS Tensor: the MPS framework doesn't support {str(t.dtype)[6:]}.")
    return _labelled(t, _ON_EXTENSION)


_setup_privateuseone_for_python_backend("pretend")  # type: ignore[no-untyped-call]
DEVICE = torch.device("pretend", 0)


# Operations ---------------------------------------------------------------------------------------------------------

# They bring values to the host. Copies do, too, and indices of bools.
_READS = {
    *("_local_scalar_dense", "equal", "nonzero", "nonzero_numpy", "masked_select", "is_nonzero", "allclose"),
    *("unique_dim", "_unique", "_unique2", "unique_consecutive", "bincount", "repeat_interleave"),
}
# Operations that PyTorch lets take indices from the host.
_MAY_MIX = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# What MPS does not have.
_MISSING = {"_assert_async", "_fused_adagrad_", "linalg_qr", "linalg_eig", "linalg_eigvals", "_linalg_svd"}


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation that has an argument or its result on the device, by the CPU's kernel."""
    name = func.overloadpacket.__name__
    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        return func.redispatch(_CPU_KERNELS, *args, **kwargs)  # a view: the kernel looks at shapes alone
    if name in _MISSING:
        raise NotImplementedError(
            f"The operator 'aten::{name}' is not currently implemented for the MPS device. As a temporary fix, you can "
            "set the environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1`."
        )
    _refuse_mixed(name, args, kwargs)
    LAUNCHES[name] += 1
    has_mask = name in _MAY_MIX and any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    if name in _READS or has_mask:
        READS[name] += 1
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    theirs = {id(t): (t, _for_cpu(t)) for t in tree_leaves((args, kwargs)) if is_there(t)}
    known = {id(own): old for old, own in theirs.values()}

    def here(value: Any) -> Any:
        if isinstance(value, _GENERATOR) and value._cdata not in _OF_DEVICE:
            raise RuntimeError("Expected a 'pretend' device type for generator but found 'cpu'")
        return theirs[id(value)][1] if id(value) in theirs else value

    def there(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return known[id(value)] if id(value) in known else _on_device(value)

    with _below():
        result = _called(func, tree_map(here, args), tree_map(here, kwargs))
    for old, own in theirs.values():
        if old.shape != own.shape:  # an `out` that had no size yet
            _replace(old, own)
    return tree_map(there, result)


@contextmanager
def _below() -> Iterator[None]:
    """Compute as one kernel: no mode, and no graph, sees what is computed."""
    with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
        yield


def _for_cpu(t: Tensor) -> Tensor:
    # Memory of PyTorch's own, which an operation may enlarge.
    return torch.empty(0, dtype=t.dtype) if t.shape == (0,) else _labelled(t, _ON_CPU)


def _replace(t: Tensor, by: Tensor) -> None:
    """Give a tensor on the device other memory."""
    own = _labelled(by, _ON_EXTENSION)
    storage = own.untyped_storage()
    aten.set_.source_Storage_storage_offset.redispatch(_CPU_KERNELS, t, storage, 0, own.shape, own.stride())


def _refuse_mixed(name: str, args: Any, kwargs: dict[str, Any]) -> None:
    """Raise a RuntimeError if an operation has tensors here and there, other than a number or a permitted index."""
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    here = [t for t in tensors if not is_there(t)]
    if name in _MAY_MIX and here:
        LAUNCHES["upload"] += 1
    elif here and (any(t.dim() for t in here) or len(here) == len(tensors)):
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"pretend:0 and cpu! (when checking arguments of {name})"
        )


def _called(func: Any, args: Any, kwargs: Any) -> Any:
    # A number that was to become a tensor comes as a number, for which there is another overload.
    given = zip(func._schema.arguments, args, strict=False)
    has_number = any(isinstance(a.type, torch.TensorType) and isinstance(value, int | float) for a, value in given)
    return (func.overloadpacket if has_number else func)(*args, **kwargs)


# Copies and memory --------------------------------------------------------------------------------------------------


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy values to or from the device, or within."""
    if not is_there(source):
        LAUNCHES["upload"] += 1
    elif is_there(target) or non_blocking:
        LAUNCHES["copy_"] += 1
    else:
        READS["copy_"] += 1
    here, own = (_labelled(t, _ON_CPU) if is_there(t) else t for t in (source, target))
    with _below():  # a shape that is broadcast, and another dtype, are allowed
        own.copy_(here)
    return target


def _empty(func: Any) -> Callable[..., Tensor]:
    def allocate(*args: Any, **kwargs: Any) -> Tensor:
        with _below():
            values = func(*args, **{**kwargs, "device": torch.device("cpu"), "pin_memory": False})
            if values.is_floating_point():
                values.fill_(torch.nan)  # so that numbers that nobody has written are seen
        return _on_device(values)

    return allocate


def _resize(t: Tensor, size: Any, *, memory_format: Any = None) -> Tensor:
    if tuple(t.shape) != tuple(size):
        with _below():
            _replace(t, torch.empty(size, dtype=t.dtype))
    return t


def _redispatched(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: func.redispatch(_CPU_KERNELS, *args, **kwargs)


def _implemented(func: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: _compute(func, args, kwargs)


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *geometry: Any) -> Any:
    *others, needed = geometry
    sizes = [weight.shape[1] * others[-1] if others[3] else weight.shape[0]]  # of the bias: transposed or not
    return _compute(aten.convolution_backward.default, (grad, x, weight, sizes, *others, needed), {})


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **options: Any,
) -> Any:
    """Attention in one kernel where the CPU has one, as a GPU has, or in steps."""
    if dropout_p == 0.0 and query.dim() == 4 and attn_mask is None:
        fused = aten._scaled_dot_product_flash_attention_for_cpu
        return fused(query, key, value, 0.0, is_causal, scale=options.get("scale"))[0]
    steps = aten._scaled_dot_product_attention_math
    return steps(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]


_BY_HAND: dict[Any, Callable[..., Any]] = {
    aten.convolution_overrideable.default: _implemented(aten.convolution.default),
    aten.convolution_backward_overrideable.default: _convolution_backward,
    aten.empty.memory_format: _empty(aten.empty.memory_format),
    aten.empty_strided.default: _empty(aten.empty_strided.default),
    aten.resize_.default: _resize,
    aten._copy_from.default: _copy,
    aten._copy_from_and_resize.default: _copy,
    **{f: _redispatched(f) for f in (aten.set_.source_Storage, aten.set_.source_Storage_storage_offset)},
    **{f: _redispatched(f) for f in (aten.set_.source_Tensor, aten.is_set_to.default)},
}


def _operations() -> Iterator[Any]:
    """Yield the operations that have a kernel of their own on the CPU, and those on lists."""
    names = [name for name in torch._C._dispatch_get_registrations_for_dispatch_key("CPU") if name[:6] == "aten::"]
    names += [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("aten::_foreach_")]
    for name in dict.fromkeys(names):
        packet, _, overload = name[6:].partition(".")
        yield getattr(getattr(aten, packet), overload or "default")


_LIBRARY = torch.library.Library("aten", "IMPL")
for _func in {*_operations(), *_BY_HAND}:
    _LIBRARY.impl(_func, _BY_HAND.get(_func) or _implemented(_func), "PrivateUse1")
for _key in ("PrivateUse1", "AutogradPrivateUse1"):
    _LIBRARY.impl("scaled_dot_product_attention", _attention, _key)
_REST = torch.library.Library("_", "IMPL")
_REST.fallback(lambda func, *args, **kwargs: _compute(func, args, kwargs), "PrivateUse1")


# Random numbers, and the rest that torch.cuda has ---------------------------------------------------------------------

# By default the device draws from the CPU's default generator; its own generators are known by their place in memory.
_OF_DEVICE: weakref.WeakValueDictionary[int, torch.Generator] = weakref.WeakValueDictionary()


class _Either(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _GENERATOR)


class _OfDevice(_GENERATOR):
    device = DEVICE  # type: ignore[assignment]


class _Generator(metaclass=_Either):
    """torch.Generator, that knows the device."""

    get_state, set_state = _GENERATOR.get_state, _GENERATOR.set_state

    def __new__(cls, device: Any = "cpu") -> Any:
        if torch.device(device).type != "pretend":
            return _GENERATOR(device)
        made = _OfDevice("cpu")
        _OF_DEVICE[made._cdata] = made
        return made


torch.pretend.device_count = lambda: 1  # type: ignore[attr-defined]
torch.pretend.init = lambda: None  # type: ignore[attr-defined]
torch.pretend.synchronize = lambda device=None: None  # type: ignore[attr-defined]
torch.pretend.default_generators = [torch.default_generator]  # type: ignore[attr-defined]
_STORAGE_CLONE = torch.storage._StorageBase.clone


def _storage_clone(storage: Any) -> Any:
    if storage.device.type != "pretend":
        return _STORAGE_CLONE(storage)
    with torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return flat.clone().untyped_storage()


@contextmanager
def accelerator() -> Iterator[torch.device]:
    """Within this context PyTorch and vsim have the device."""
    LAUNCHES.clear()
    READS.clear()
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    # A Parameter may not become one of a device that PyTorch does not know, but modules may swap them.
    torch.__future__.set_swap_module_params_on_conversion(True)
    picks = [m for m in [*sys.modules.values()] if vars(m).get("pick_device") is machine.pick_device]
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
            stack.enter_context(mock.patch.object(torch.storage._StorageBase, "clone", _storage_clone))
            for module in picks:
                stack.enter_context(mock.patch.object(module, "pick_device", lambda device: torch.device(device)))
            stack.enter_context(mock.patch.object(lowrank, "_WITHOUT_QR", {"pretend"}))  # known by name
            yield DEVICE
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
