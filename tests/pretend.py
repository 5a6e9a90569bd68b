"""Accelerators in Python: devices pretend:0 and pretend:1, whose tensors PyTorch takes for a GPU's.

Their memory is the CPU's, and so are their kernels and random numbers: a run here is bitwise equal to a run there. But
whatever CUDA or MPS refuses fails here, with its message; and launches of kernels, reads by the host and copies from it
are counted. There are two profiles:

* cuda: an index out of range is an asynchronous error. The operation returns, and every later one raises.
* mps: float64 does not exist, nor do some operations; an index out of range gives wrong numbers without an error.

What a pretended device cannot do: compile, recurrent layers, and errors in a hook of autograd's on saved tensors, which
end the process, because PyTorch asks a guard in Python for the stream while the error is pending. Memory of it is never
pinned, and code that asks for the type "cuda" or "mps" does not meet it.
"""

from __future__ import annotations

import ctypes
import re
import sys
import weakref
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from pathlib import Path
from typing import Any, ClassVar
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.backend_registration import _DummyDeviceGuard, _setup_privateuseone_for_python_backend
from vsim_kernels import lowrank

import vsim  # noqa: F401  # all that picks a device
from vsim.engine import machine

aten = torch.ops.aten
_CPU_KERNELS = torch._C.DispatchKeySet(torch._C.DispatchKey.CPU)
_GENERATOR = torch.Generator


class Device:
    """What the devices are like, and what they have done since `accelerator` began.

    Attributes:
        profile: "cuda" or "mps".
        launches: how often each operation was started on a device. Views and allocations start nothing.
        reads: how often the host has waited for each operation that brings values to it.
        uploads: how often the host has waited for a copy of its memory to a device.
        unrepeatable: operations that have added numbers in an order that differs from run to run on CUDA.
        error: of the device, if it is lost.
    """

    profile = "cuda"
    launches: ClassVar[Counter[str]] = Counter()
    reads: ClassVar[Counter[str]] = Counter()
    uploads = 0
    unrepeatable: ClassVar[set[str]] = set()
    error: str | None = None

    @classmethod
    def begin(cls, profile: str) -> None:
        """Forget everything."""
        cls.profile, cls.launches, cls.reads, cls.uploads, cls.error = profile, Counter(), Counter(), 0, None
        cls.unrepeatable = set()
        _PENDING.clear()

    @classmethod
    def name(cls, device: torch.device) -> str:
        """Return what a message calls a device."""
        return str(device) if device.type == "cpu" else f"{cls.profile}:{device.index or 0}"


def launches() -> int:
    """Return the number of launches so far."""
    return sum(Device.launches.values())


def reads() -> int:
    """Return the number of reads so far."""
    return sum(Device.reads.values())


# Tensors ------------------------------------------------------------------------------------------------------------
# A tensor on a device is a real one of PyTorch's: DLPack knows the kind of its device. Only the label in the capsule is
# changed on the way, so that memory is shared and freed as usual.

_address = ctypes.pythonapi.PyCapsule_GetPointer
_address.restype, _address.argtypes = ctypes.c_void_p, (ctypes.py_object, ctypes.c_char_p)
_ON_CPU, _ON_EXTENSION = 1, 12  # DLDeviceType


def _labelled(t: Tensor, kind: int, index: int) -> Tensor:
    """Return a tensor on the same memory that says that it is on another device."""
    capsule = torch._C._to_dlpack(t)
    address = _address(capsule, b"dltensor")
    ctypes.c_int32.from_address(address + 8).value = kind
    ctypes.c_int32.from_address(address + 12).value = index
    return torch._C._from_dlpack(capsule)  # type: ignore[no-any-return]


def is_there(t: Any) -> bool:
    """Return whether an object is a tensor on a pretended device."""
    return isinstance(t, Tensor) and t.device.type == "pretend"


def on_cpu(t: Tensor) -> Tensor:
    """Return a tensor on the CPU with the memory of one on a device, uncounted."""
    return _labelled(t.detach(), _ON_CPU, 0)


def _on_device(t: Tensor, index: int) -> Tensor:
    if Device.profile == "mps" and t.dtype in (torch.float64, torch.complex128):
        raise TypeError(
            f"Cannot convert a MPS Tensor to {str(t.dtype).partition('.')[2]} dtype as the MPS framework doesn't "
            f"support {str(t.dtype).partition('.')[2]}. Please use float32 instead."
        )
    return _labelled(t, _ON_EXTENSION, index)


def _two_devices() -> Any:
    """Return a device guard that counts two devices, for which autograd starts a thread each.

    A guard in Python always counts one. The count is a virtual function in C++, so the guard gets another table of
    them, in the order of the header.
    """
    guard = _DummyDeviceGuard()
    header = Path(torch.__file__).parent / "include/c10/core/impl/DeviceGuardImplInterface.h"
    functions = re.findall(r"^  virtual [^(]*?(~?\w+)\(", header.read_text(), re.MULTILINE)
    place = 2 + functions.index("deviceCount")  # behind the offset to the top and the type
    value = ctypes.c_void_p.from_address(id(guard) + 2 * ctypes.sizeof(ctypes.c_void_p)).value
    table = ctypes.c_void_p.from_address(value)  # type: ignore[arg-type]
    kind = ctypes.c_void_p * (len(functions) + 3)  # a destructor takes two places
    own = kind(*kind.from_address(table.value - 2 * ctypes.sizeof(ctypes.c_void_p)))  # type: ignore[operator]
    count = ctypes.CFUNCTYPE(ctypes.c_int8, ctypes.c_void_p)
    assert count(own[place])(value) == 1, "torch's header does not fit to its library"
    two = count(lambda _: 2)
    own[place] = ctypes.cast(two, ctypes.c_void_p).value
    table.value = ctypes.addressof(own) + 2 * ctypes.sizeof(ctypes.c_void_p)
    return guard, own, two


# Before the first backward pass of the process, with which autograd knows all the devices that it will ever know.
_KEPT = _two_devices()
_setup_privateuseone_for_python_backend("pretend", device_guard=_KEPT[0])  # type: ignore[no-untyped-call]
DEVICE, OTHER = torch.device("pretend", 0), torch.device("pretend", 1)


# Operations ---------------------------------------------------------------------------------------------------------

# They bring values to the host. Copies do, too, and indices of bools.
_READS = {
    *("_local_scalar_dense", "equal", "nonzero", "nonzero_numpy", "masked_select", "is_nonzero", "allclose"),
    *("unique_dim", "_unique", "_unique2", "unique_consecutive", "bincount", "repeat_interleave"),
}
# They take numbers of rows; CUDA checks these within the kernel, and MPS does not.
_INDEXED = {
    *("embedding", "embedding_dense_backward", "index", "index_select", "index_add", "index_add_", "index_copy_"),
    *("index_put_", "_index_put_impl_", "gather", "scatter", "scatter_", "scatter_add", "scatter_add_", "take"),
    *("nll_loss_forward", "nll_loss_backward", "nll_loss2d_forward", "nll_loss2d_backward", "index_fill_"),
}
# Operations that PyTorch lets take indices from the host.
_MAY_MIX = {"index", "index_put", "index_put_", "_index_put_impl_", "_unsafe_index"}
# What MPS does not have.
_MISSING = {"mps": {"_assert_async", "_fused_adagrad_", "linalg_qr", "linalg_eig", "linalg_eigvals", "_linalg_svd"}}


def _compute(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Compute an operation that has an argument or its result on a device, by the CPU's kernel."""
    name = func.overloadpacket.__name__
    if any(r.alias_info is not None and not r.alias_info.is_write for r in func._schema.returns):
        return func.redispatch(_CPU_KERNELS, *args, **kwargs)  # a view: the kernel looks at shapes alone
    if name in _MISSING.get(Device.profile, ()):
        raise NotImplementedError(
            f"The operator 'aten::{name}' is not currently implemented for the MPS device. If you want this op to be "
            "considered for addition please comment on https://github.com/pytorch/pytorch/issues/141287. As a "
            "temporary fix, you can set the environment variable `PYTORCH_ENABLE_MPS_FALLBACK=1` to use the CPU as a "
            "fallback for this op. WARNING: this will be slower than running natively on MPS."
        )
    _raise_if_lost()
    device = _common_device(name, args, kwargs)
    Device.launches[name] += len(args[0]) if name.startswith("_foreach_") and Device.profile == "mps" else 1
    if name in _READS or (name in _MAY_MIX and _counts_mask(args)):
        _wait(name)
    if "device" in kwargs:
        kwargs = {**kwargs, "device": torch.device("cpu")}
    theirs = {id(t): (t, _for_cpu(t)) for t in tree_leaves((args, kwargs)) if is_there(t)}
    known = {id(here): there for there, here in theirs.values()}

    def here(value: Any) -> Any:
        if isinstance(value, _GENERATOR):
            return _stream(value, device)
        return theirs[id(value)][1] if id(value) in theirs else value

    random = torch.Tag.nondeterministic_seeded in func.tags
    with _below(), _as_default(device) if random else nullcontext():
        if _collides(name, tree_map(here, args), kwargs):
            Device.unrepeatable.add(name)
        result = _called(func, name, tree_map(here, args), tree_map(here, kwargs))
    for there, own in theirs.values():
        if there.shape != own.shape:  # an `out` that had no size yet
            _replace(there, own)

    def there(value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        return known[id(value)] if id(value) in known else _on_device(value, device.index)

    return tree_map(there, result)


def _counts_mask(args: Any) -> bool:
    """Return whether the host waits for the number of entries that a mask selects; CUDA writes a number without."""
    has_mask = any(i is not None and i.dtype in (torch.bool, torch.uint8) for i in args[1])
    fills = Device.profile == "cuda" and len(args) > 2 and args[2].dim() == 0
    return has_mask and not fills


def _collides(name: str, args: Any, kwargs: Any) -> bool:
    """Return whether an operation adds several numbers at one place, and the sum depends on their order."""
    name = name.rstrip("_")
    if name in ("scatter_add", "index_add"):
        target, dim, index, source = args[:4]
        if name == "index_add":
            index = index.view(-1, *[1] * (target.dim() - 1 - dim % target.dim())).expand_as(source)
        sent = torch.zeros_like(target).scatter_add(dim, index, torch.ones_like(source)).gather(dim, index)
    elif name in ("index_put", "_index_put_impl") and (args[3:4] == (True,) or kwargs.get("accumulate")):
        target, index, source = args[:3]
        places = torch.arange(target.numel()).view(target.shape)[tuple(slice(None) if i is None else i for i in index)]
        source = source.expand_as(places)
        sent = torch.bincount(places.flatten(), minlength=target.numel())[places]
    else:
        return False
    return bool(((sent > 1) & (source != source.round())).any())  # whole numbers add up in any order


@contextmanager
def _below() -> Iterator[None]:
    """Compute as one kernel: no mode, and no graph, sees what is computed."""
    with _disable_current_modes(), torch._C._AutoDispatchBelowAutograd():
        yield


def _for_cpu(t: Tensor) -> Tensor:
    # Memory of PyTorch's own, which an operation may enlarge.
    return torch.empty(0, dtype=t.dtype) if t.shape == (0,) else _labelled(t, _ON_CPU, 0)


def _replace(t: Tensor, by: Tensor) -> None:
    """Give a tensor on a device other memory."""
    own = _labelled(by, _ON_EXTENSION, t.device.index)
    storage = own.untyped_storage()
    aten.set_.source_Storage_storage_offset.redispatch(_CPU_KERNELS, t, storage, 0, own.shape, own.stride())


def _common_device(name: str, args: Any, kwargs: dict[str, Any]) -> torch.device:
    """Return the device of an operation.

    Raises:
        RuntimeError: there are several.
    """
    tensors = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)]
    there = [t.device for t in tensors if is_there(t)]
    here = [t for t in tensors if not is_there(t)]
    mixed = [t.device for t in here if (t.dim() or not there) and name not in _MAY_MIX]
    found = list(dict.fromkeys([*there, *mixed]))
    if len(found) > 1:
        raise RuntimeError(
            "Expected all tensors to be on the same device, but found at least two devices, "
            f"{Device.name(found[0])} and {Device.name(found[1])}! (when checking arguments of {name})"
        )
    if name in _MAY_MIX and there and any(t is not None and not is_there(t) for t in args[1]):
        _upload()
    given = kwargs.get("device")
    device = torch.device(given) if given is not None else found[0]
    return torch.device("pretend", device.index or 0)


def _called(func: Any, name: str, args: Any, kwargs: Any) -> Any:
    """Call a CPU kernel; an index out of range is an error of another kind on a device."""
    # A number that was to become a tensor comes as a number, for which there is another overload.
    given = zip(func._schema.arguments, args, strict=False)
    has_number = any(isinstance(a.type, torch.TensorType) and isinstance(value, int | float) for a, value in given)
    try:
        return (func.overloadpacket if has_number else func)(*args, **kwargs)
    except (IndexError, RuntimeError) as error:
        asserts = name == "_assert_async"
        if not asserts and (name.removesuffix("_out") not in _INDEXED or "out of" not in str(error)):
            raise
        if Device.profile == "cuda":
            Device.error = "device-side assert triggered"
        if asserts:
            return None
        shapes = tree_map(lambda t: t.to("meta") if isinstance(t, Tensor) else t, (args, kwargs))
        written = next((t for t in tree_leaves(args) if isinstance(t, Tensor)), None) if name.endswith("_") else None
        if written is not None:
            return written
        return tree_map(
            lambda t: torch.full_like(t, 0, device="cpu") if isinstance(t, Tensor) else t,
            func(*shapes[0], **shapes[1]),
        )


def _raise_if_lost() -> None:
    if Device.error is not None:
        raise torch.AcceleratorError(
            f"CUDA error: {Device.error}\nCUDA kernel errors might be asynchronously reported at some other API call, "
            "so the stacktrace below might be incorrect."
        )


# Copies -------------------------------------------------------------------------------------------------------------

# Copies that the host does not wait for: the source's memory, offset, shape and strides, its values, the target, and
# whether the device keeps the memory.
_PENDING: list[tuple[torch.UntypedStorage, Any, Tensor, Tensor, bool]] = []


def _wait(name: str) -> None:
    """Let the host wait for everything that was started, and count that.

    Raises:
        RuntimeError: memory that was still to be copied is not there any more.
    """
    Device.reads[name] += 1
    synchronize()


def _upload() -> None:
    Device.uploads += 1
    synchronize()


def synchronize(device: Any = None) -> None:
    """Let the host wait for everything that was started."""
    _raise_if_lost()
    pending = _PENDING.copy()
    _PENDING.clear()
    for storage, place, values, target, is_kept in pending:
        if is_there(target):
            freed = not is_kept and torch._C._storage_Use_Count(storage._cdata) == 1  # of this list
            source = torch.empty(0, dtype=values.dtype).set_(storage, *place)
            if freed or not torch.equal(_bytes(source), _bytes(values)):
                raise AssertionError("memory was freed or written to before the device had copied it")
        else:
            with _below():
                target.copy_(values)


def _bytes(t: Tensor) -> Tensor:
    return t.contiguous().flatten().view(torch.uint8)


def _copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Copy values to or from a device, or within."""
    _raise_if_lost()
    there = [t.device for t in (source, target) if is_there(t)]
    here, own = (_labelled(t, _ON_CPU, 0) if is_there(t) else t for t in (source, target))
    # A shape that is broadcast, and another dtype, are allowed.
    if len(there) == 2:
        Device.launches["copy_"] += 1
    elif is_there(source) and not non_blocking:
        _wait("copy_")
    elif not non_blocking:
        _upload()
    else:
        Device.launches["copy_"] += 1
        with _below():
            values = source.clone() if is_there(target) else here.clone()
        keeps = source.is_pinned() or Device.profile == "cuda"
        place = source.storage_offset(), source.shape, source.stride()
        _PENDING.append((source.untyped_storage(), place, values, target, keeps))
        if is_there(source) and own.is_floating_point():
            with _below():
                own.fill_(torch.nan)  # its values come later
            return target
    with _below():
        own.copy_(here)
    return target


# Memory -------------------------------------------------------------------------------------------------------------


def _empty(func: Any) -> Callable[..., Tensor]:
    def allocate(*args: Any, **kwargs: Any) -> Tensor:
        index = torch.device(kwargs["device"]).index or 0
        with _below():
            values = func(*args, **{**kwargs, "device": torch.device("cpu"), "pin_memory": False})
            if values.is_floating_point():
                values.fill_(torch.nan)  # so that numbers that nobody has written are seen
        return _on_device(values, index)

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


def _convolution(*args: Any) -> Any:
    return _compute(aten.convolution.default, args, {})


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *geometry: Any) -> Any:
    *others, needed = geometry
    sizes = [weight.shape[1] * others[-1] if others[3] else weight.shape[0]]  # of the bias: transposed or not
    return _compute(aten.convolution_backward.default, (grad, x, weight, sizes, *others, needed), {})


_BY_HAND: dict[Any, Callable[..., Any]] = {
    aten.convolution_overrideable.default: _convolution,
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
_REST = torch.library.Library("_", "IMPL")
_REST.fallback(lambda func, *args, **kwargs: _compute(func, args, kwargs), "PrivateUse1")
_REST.fallback(torch.library.fallthrough_kernel, "AutocastPrivateUse1")


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention in one kernel where the CPU has one, as a GPU has, or in steps."""
    if dropout_p == 0.0 and not enable_gqa and query.dim() == 4 and attn_mask is None:
        fused = aten._scaled_dot_product_flash_attention_for_cpu
        return fused(query, key, value, 0.0, is_causal, scale=scale)[0]  # type: ignore[no-any-return]
    steps = aten._scaled_dot_product_attention_math
    options = {"scale": scale, "enable_gqa": enable_gqa}
    return steps(query, key, value, attn_mask, dropout_p, is_causal, **options)[0]  # type: ignore[no-any-return]


for _key in ("PrivateUse1", "AutogradPrivateUse1"):
    _LIBRARY.impl("scaled_dot_product_attention", _attention, _key)


# Autocast -----------------------------------------------------------------------------------------------------------

# What each device casts is listed in PyTorch's documentation ("Automatic Mixed Precision"). These are of the CPU's
# list, so that numbers can be compared, and the models of the tests call no others.
_TO_LOWER = {
    *("conv1d", "conv2d", "conv3d", "bmm", "mm", "baddbmm", "addmm", "addbmm", "linear", "matmul", "prelu"),
    *("conv_transpose1d", "conv_transpose2d", "conv_transpose3d", "scaled_dot_product_attention"),
}
_TO_FLOAT32 = {"nll_loss", "nll_loss2d", "cross_entropy_loss", "mse_loss", "l1_loss", "smooth_l1_loss", "kl_div"}
_AUTOCAST = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)


def _casting(func: Any, lowers: bool) -> Callable[..., Any]:
    def cast(t: Any) -> Any:
        if not is_there(t) or not t.is_floating_point() or t.dtype == torch.float64:
            return t
        return t.to(torch.get_autocast_dtype("pretend") if lowers else torch.float32)

    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(_AUTOCAST):
            return func(*tree_map(cast, args), **tree_map(cast, kwargs))

    return kernel


for _name in (*_TO_LOWER, *_TO_FLOAT32):
    for _overload in getattr(aten, _name).overloads():
        if not _overload.endswith("out"):
            _func = getattr(getattr(aten, _name), _overload)
            _LIBRARY.impl(_func, _casting(_func, _name in _TO_LOWER), "AutocastPrivateUse1")


# Random numbers -----------------------------------------------------------------------------------------------------


class _OfDevice(_GENERATOR):
    """A generator of a device. Its numbers come from `stream`; by itself it is on the CPU, and not to be drawn from."""

    where: torch.device
    stream: torch.Generator

    def __new__(cls, device: Any = DEVICE) -> Any:
        made = super().__new__(cls, "cpu")
        made.stream, made.where = _GENERATOR("cpu"), torch.device("pretend", torch.device(device).index or 0)
        _STREAMS[made._cdata] = made
        return made

    def __init__(self, device: Any = DEVICE) -> None:
        """Nothing is left to do."""
        self._at_first = _GENERATOR.get_state(self)

    @property
    def device(self) -> torch.device:
        return self.where

    def manual_seed(self, seed: int) -> Any:
        self.stream.manual_seed(seed)
        return self

    def seed(self) -> int:
        return self.stream.seed()

    def initial_seed(self) -> int:
        return self.stream.initial_seed()

    def get_state(self) -> Tensor:
        return self.stream.get_state()

    def set_state(self, state: Tensor) -> Any:
        self.stream.set_state(state)
        return self

    def check(self) -> None:
        """Raise a RuntimeError if an operation on the CPU has drawn from it."""
        if not torch.equal(_GENERATOR.get_state(self), self._at_first):
            raise RuntimeError(f"Expected a 'cpu' device type for generator but found '{Device.profile}'")


_STREAMS: weakref.WeakValueDictionary[int, _OfDevice] = weakref.WeakValueDictionary()


def _stream(generator: torch.Generator, device: torch.device) -> torch.Generator:
    """Return the stream of a generator that an operation on a device is given."""
    own = _STREAMS.get(generator._cdata)  # type: ignore[attr-defined]
    if own is None:
        raise RuntimeError(f"Expected a '{Device.profile}' device type for generator but found 'cpu'")
    if own.device != device:
        raise RuntimeError(f"Expected a '{Device.name(device)}' generator device but found '{Device.name(own.device)}'")
    return own.stream


@contextmanager
def _as_default(device: torch.device) -> Iterator[None]:
    """Draw from the device's own default generator where none is given."""
    default, own = torch.default_generator, torch.pretend.default_generators[device.index]  # type: ignore[attr-defined]
    kept = default.get_state()
    default.set_state(own.get_state())
    try:
        yield
    finally:
        own.set_state(default.get_state())
        default.set_state(kept)


class _Either(type):
    def __instancecheck__(cls, value: Any) -> bool:
        return isinstance(value, _GENERATOR)


class _Generator(metaclass=_Either):
    """torch.Generator, that knows the devices."""

    get_state, set_state = _GENERATOR.get_state, _GENERATOR.set_state

    def __new__(cls, device: Any = "cpu") -> Any:
        return _OfDevice(device) if torch.device(device).type == "pretend" else _GENERATOR(device)


# As torch.cuda ------------------------------------------------------------------------------------------------------

torch.pretend.get_amp_supported_dtype = lambda: [torch.bfloat16, torch.float16]  # type: ignore[attr-defined]
torch.pretend.device_count = lambda: 2  # type: ignore[attr-defined]
torch.pretend.init = lambda: None  # type: ignore[attr-defined]
torch.pretend.synchronize = lambda device=None: _wait("synchronize")  # type: ignore[attr-defined]
torch.pretend.default_generators = [_OfDevice(DEVICE), _OfDevice(OTHER)]  # type: ignore[attr-defined]


def _storage_clone(storage: Any) -> Any:
    if storage.device.type != "pretend":
        return _STORAGE_CLONE(storage)
    with torch.no_grad():
        flat = torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
        return flat.clone().untyped_storage()


_STORAGE_CLONE = torch.storage._StorageBase.clone


def _picked(device: Any) -> torch.device:
    return torch.device(device or DEVICE)


@contextmanager
def accelerator(profile: str = "cuda") -> Iterator[torch.device]:
    """Within this context PyTorch and vsim have devices pretend:0 and pretend:1.

    Raises:
        RuntimeError: at the end: an operation on the CPU has drawn from a device's generator.
    """
    Device.begin(profile)
    swaps = torch.__future__.get_swap_module_params_on_conversion()
    # A Parameter may not become one of a device that PyTorch does not know, but modules may swap them.
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        with ExitStack() as stack:
            stack.enter_context(mock.patch.object(torch, "Generator", _Generator))
            stack.enter_context(mock.patch.object(torch.storage._StorageBase, "clone", _storage_clone))
            for module in [
                m
                for m in list(sys.modules.values())
                if getattr(m, "__dict__", {}).get("pick_device") is machine.pick_device
            ]:
                stack.enter_context(mock.patch.object(module, "pick_device", _picked))
            if profile == "mps":  # what vsim knows of it by its name
                stack.enter_context(mock.patch.object(lowrank, "_WITHOUT_QR", {"pretend"}))
            yield DEVICE
        for generator in list(_STREAMS.values()):
            generator.check()
        if Device.error is None:
            synchronize()
    finally:
        torch.__future__.set_swap_module_params_on_conversion(swaps)
