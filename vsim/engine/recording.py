"""A step's operations, recorded once and called again without the Python, functorch and autograd that led to them.

The operations are those that reach PyTorch's kernels, with the same arguments, so the result has the same bits. A small
model spends most of a step on the way there.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakTensorKeyDictionary

_MOST_CALLS = 5_000  # more take seconds to compile, and have long kernels or many nodes to spread their cost over
_ROOM = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_DEPENDS_ON_DATA = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)


class _Kind(NamedTuple):
    """What is known of an operation before it is called.

    Attributes:
        refusal: why it can never be recorded; empty if it can.
        depends_on_data: what it returns has a shape or is a number that depends on the values of its arguments.
        draws: from a generator. place_of_dropout: of the argument that says whether it does.
        written: (place, name) of the arguments that it writes to.
        is_idle: it does nothing but return a view of what it is given, or room for something.
        is_sequence: whether its results come in a list.
    """

    name: str
    refusal: str
    depends_on_data: bool
    draws: bool
    place_of_dropout: int | None
    written: list[tuple[int, str]]
    is_idle: bool
    is_sequence: bool


class _Call(NamedTuple):
    """One operation: its arguments as source text, the names in them, the names of its results (None: not needed)."""

    function: Any
    kind: _Kind
    arguments: str
    inputs: frozenset[str]
    outputs: list[str | None]


class Recorder(TorchDispatchMode):
    """Notes the operations of a step that is computed within this context.

    Args:
        batch: the tensors that are others at every step.
        written: tensors that stay where they are and that the step may write to, as gradients and buffers.
        staying: tensors that stay and are only read, such as weights.
        streams: the generators that it may draw from.

    Attributes:
        makes_constants: it reads tensors that are none of these, such as one that is made of numbers.
        calls: what was noted.
        reason: why that is not the whole of the step, or not of another one; empty if it is.
    """

    def __init__(
        self,
        batch: Sequence[Tensor],
        written: Iterable[Tensor],
        staying: Iterable[Tensor],
        streams: Iterable[torch.Generator],
    ) -> None:
        super().__init__()
        self.calls: list[_Call] = []
        self.reason = ""
        self._streams = {_identity(stream) for stream in streams}
        self._written = {_storage(t) for t in written}
        self._known_to_stay = self._written | {_storage(t) for t in staying if _is_plain(t)}
        self.makes_constants = False
        self._constants: dict[str, Any] = {}
        self._names = WeakTensorKeyDictionary()  # tensor → name
        self._used: set[str] = set()  # names in the arguments that are being written down
        # What is made in the step, and what stays. A reference that is held keeps an address from being taken again.
        self._of_step: dict[int, StorageWeakRef] = {}
        self._staying: dict[int, StorageWeakRef] = {}
        self._views: dict[Any, str] = {}  # a place in memory and a way to see it → name
        self.inputs = [f"b{i}" for i in range(len(batch))]
        for name, tensor in zip(self.inputs, batch, strict=True):
            self._name_of_step(tensor, name)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing compiles this, and not to be compiled takes a hundred calls an operation

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        call = None
        try:
            call = None if self.reason else self._begin(func, args, kwargs)
        except Exception as error:  # a kind of tensor that knows no better
            self.reason = f"noting {func}: {error!r}"
        outcome = func(*args, **kwargs)
        try:
            if call is not None:
                self._end(call, outcome)
        except Exception as error:
            self.reason = f"noting {func}: {error!r}"
        return outcome

    def step(self, outcome: Tensor) -> Callable[..., Tensor] | None:
        """Return the function batch → `outcome` that calls again what was noted; None, and a reason, if there is none.

        Args:
            outcome: what the step has returned.
        """
        self._used = set()
        result = self._text(outcome)
        if self.reason:
            return None
        lines: list[str] = []
        namespace = dict(self._constants)
        alive = set(self._used)
        for number in range(len(self.calls) - 1, -1, -1):
            call = self.calls[number]
            wanted = [name if name in alive else None for name in call.outputs]
            if call.kind.is_idle and not any(wanted):
                continue  # all others stay: what they are given may be wrong, which they would tell
            last_used = sorted(name for name in call.inputs - alive if name[0] != "c")
            if last_used:
                lines.append(" = ".join(last_used) + " = None")
            alive |= call.inputs
            namespace[f"f{number}"] = call.function._op
            called = f"f{number}({call.arguments})"
            names = ", ".join(name or "_" for name in wanted) + ("," if call.kind.is_sequence else "")
            lines.append(f"{names} = {called}" if any(wanted) else called)
        body = "\n    ".join([*reversed(lines), f"return {result}"])
        exec(compile(f"def step({', '.join(self.inputs)}):\n    {body}\n", "<recorded step>", "exec"), namespace)
        step = namespace["step"]

        @torch.no_grad()
        def without_autograd(*batch: Tensor) -> Tensor:
            with torch._C._AutoDispatchBelowAutograd():
                outcome: Tensor = step(*batch)
            return outcome

        return without_autograd

    def _begin(self, func: Any, args: Any, kwargs: Any) -> _Call | None:
        """Write a call down, before it changes anything; None, and a reason, if it cannot be repeated."""
        kind = _kind_of(func)
        self._used = set()
        words = [self._text(a) for a in args] + [f"{name}={self._text(a)}" for name, a in kwargs.items()]
        self.reason = kind.refusal or self.reason or self._refusal(kind, args, kwargs)
        return None if self.reason else _Call(func, kind, ", ".join(words), frozenset(self._used), [])

    def _refusal(self, kind: _Kind, args: Any, kwargs: Any) -> str:
        """Why a call cannot be repeated; empty if it can."""
        if len(self.calls) == _MOST_CALLS:
            return f"it has more than {_MOST_CALLS} operations"
        if kind.depends_on_data and not _selects_by_numbers(kind.name, args):
            return f"what {kind.name} returns depends on data in more than its numbers"
        if kind.draws and not self._draws_from_own(kind, args, kwargs):
            return f"{kind.name} draws from a generator that others draw from, too"
        for index, name in kind.written:
            given = args[index] if index < len(args) else kwargs.get(name)
            for tensor in given if isinstance(given, list | tuple) else [given]:
                if tensor is not None and _storage(tensor) not in self._written and not self._is_of_step(tensor):
                    return f"{kind.name} writes to a tensor that is no buffer"
        return ""

    def _draws_from_own(self, kind: _Kind, args: Any, kwargs: Any) -> bool:
        given = [value for value in (*args, *kwargs.values()) if isinstance(value, torch.Generator)]
        if given:
            return all(_identity(stream) in self._streams for stream in given)
        # Attention has a place for dropout, which is 0 unless somebody wants it.
        index = kind.place_of_dropout
        return index is not None and (args[index] if index < len(args) else kwargs.get("dropout_p", 0.0)) == 0.0

    def _text(self, value: Any) -> str:
        """Return the source text of an argument."""
        if isinstance(value, Tensor):
            return self._tensor_text(value)
        if isinstance(value, list | tuple):
            inside = "".join(f"{self._text(v)}, " for v in value)
            return f"[{inside}]" if isinstance(value, list) else f"({inside})"
        if value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value)):
            return repr(value)
        return self._constant(value)

    def _tensor_text(self, tensor: Tensor) -> str:
        name = self._names.get(tensor)
        if name is None and not _is_plain(tensor):
            self.reason = "it computes with tensors of a kind of their own"
            return ""
        if name is None:
            if self._is_of_step(tensor):
                self.reason = "the model reaches a tensor in a way that PyTorch does not see, such as .data"
                return ""
            self.makes_constants = self.makes_constants or _storage(tensor) not in self._known_to_stay
            self._staying.setdefault(_storage(tensor), StorageWeakRef(tensor.untyped_storage()))
            name = self._names[tensor] = self._constant(tensor.detach())
        self._used.add(name)
        return str(name)

    def _constant(self, value: Any) -> str:
        name = f"c{len(self._constants)}"
        self._constants[name] = value
        return name

    def _is_of_step(self, tensor: Tensor) -> bool:
        made = self._of_step.get(_storage(tensor))
        return made is not None and not made.expired()

    def _name_of_step(self, tensor: Tensor, name: str) -> None:
        self._names[tensor] = name
        storage = _storage(tensor)
        made = self._of_step.get(storage)
        if made is None or made.expired():
            self._of_step[storage] = StorageWeakRef(tensor.untyped_storage())
        self._views[_view(tensor)] = name

    def _end(self, call: _Call, outcome: Any) -> None:
        """Note a call with what it has returned."""
        kind = call.kind
        results = list(outcome) if isinstance(outcome, list | tuple) else [outcome]
        if not all(r is None or (isinstance(r, Tensor) and _is_plain(r)) for r in results):
            self.reason = f"what {kind.name} returns is no plain tensor"
            return
        for result in results:
            name = None
            if result is not None and result not in self._names:
                known = None if kind.written else self._seen_so(result)
                if known is None:
                    name = f"v{len(self.calls)}_{len(call.outputs)}"
                    self._name_of_step(result, name)
                else:
                    self._names[result] = known
            call.outputs.append(name)
        if any(call.outputs) or not call.kind.is_idle:
            self.calls.append(call)

    def _seen_so(self, result: Tensor) -> str | None:
        """Return the name of a tensor that is the same view of the same memory, if there is one.

        A view of what stays is one more that stays.
        """
        if self._is_of_step(result):
            return self._views.get(_view(result))
        staying = self._staying.get(_storage(result))
        if staying is None or staying.expired():
            return None
        key = _view(result)
        if key not in self._views:
            self._views[key] = self._constant(result.detach())
        return self._views[key]


def _identity(stream: Any) -> int:
    address: int = stream._cdata  # an operation is given another Python object for the same generator
    return address


def _storage(tensor: Tensor) -> int:
    address: int = tensor.untyped_storage()._cdata
    return address


def _view(tensor: Tensor) -> Any:
    return _storage(tensor), tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def _is_plain(tensor: Tensor) -> bool:
    """Whether a tensor is numbers in memory, as they are: no subclass, not sparse, not to be conjugated."""
    is_of_torch = type(tensor) in (Tensor, torch.nn.Parameter)
    in_memory = is_of_torch and tensor.layout is torch.strided and not tensor.is_nested
    return in_memory and not (tensor.is_conj() or tensor.is_neg())


@functools.cache
def _kind_of(func: Any) -> _Kind:
    if not isinstance(func, OpOverload):
        return _Kind(str(func), f"{func} is not a single operation", False, False, None, [], False, False)
    name = func.overloadpacket.__name__
    arguments, returns = func._schema.arguments, func._schema.returns
    return _Kind(
        name,
        f"{name} changes the shape of a tensor in place" if torch.Tag.inplace_view in func.tags else "",
        any(tag in func.tags for tag in _DEPENDS_ON_DATA),
        torch.Tag.nondeterministic_seeded in func.tags,
        next((i for i, a in enumerate(arguments) if a.name == "dropout_p"), None),
        [(i, a.name) for i, a in enumerate(arguments) if a.alias_info is not None and a.alias_info.is_write],
        not func._schema.is_mutable and (_is_of_views(returns) or name in _ROOM),
        len(returns) > 1 or (len(returns) == 1 and isinstance(returns[0].type, torch.ListType)),
    )


def _is_of_views(returns: Sequence[Any]) -> bool:
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


def _selects_by_numbers(name: str, args: Any) -> bool:
    """Whether it is an indexing whose result has the same shape for all values: by numbers, not by a mask."""
    if name not in ("index", "index_put", "index_put_", "_unsafe_index"):
        return False
    return not any(isinstance(t, Tensor) and t.dtype in (torch.bool, torch.uint8) for t in args[1])
