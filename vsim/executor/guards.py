"""What of Python a step depends on, found by watching one, so that a later step can be known to be the same.

Nothing is assumed of a model's code: a function that it calls must be found where it can be looked at again (in a
module, a class, an attribute, a closure), and so must every value that such a function can read. What cannot be
compared, such as a file or a random generator, or may act out of sight, such as print, is refused.
"""

from __future__ import annotations

import collections
import contextlib
import copy
import dis
import enum
import functools
import operator
import sys
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import (
    BuiltinFunctionType,
    CellType,
    CodeType,
    FrameType,
    FunctionType,
    GetSetDescriptorType,
    MemberDescriptorType,
    MethodDescriptorType,
    MethodType,
    ModuleType,
    SimpleNamespace,
    WrapperDescriptorType,
)
from typing import Any

import torch
import vsim_kernels
from torch import Tensor, nn

_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_SEQUENCES, _TABLES = (list, tuple, collections.deque), (dict, collections.OrderedDict, collections.defaultdict)
_MOST_VALUES = 20_000

# The code of these is known to depend on its arguments alone, or is looked after elsewhere (random numbers by the
# recording, which sees every draw).
_TORCH = str(Path(torch.__file__).parent) + "/"
_TRUSTED_FOLDERS = (_TORCH, str(Path(vsim_kernels.__file__).parent) + "/", str(Path(__file__).parent.parent) + "/")
_TRUSTED_FILES = frozenset(
    [module.__file__ for module in (collections, contextlib, copy, enum, functools, operator, typing)]
    + ["<frozen abc>", "<frozen _collections_abc>"]
)
_OF_PYTHON = (str(Path(dis.__file__).parent) + "/", "<frozen ")
_INSTALLED = ("/site-packages/", "/dist-packages/")
# Compiled code passes the dispatcher by, and what other processes send is not of this step.
_NOT_TRUSTED = tuple(_TORCH + part for part in ("_inductor/", "_functorch/_aot_autograd/", "distributed/"))


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_MODULES = _names("torch math operator itertools functools typing collections einops vsim vsim_kernels")
_BUILTINS = _names(
    """
    abs all any bin callable chr divmod getattr hasattr isinstance issubclass iter len max min next ord pow repr round
    setattr sorted sum __build_class__
    """
)
# Of tensors: they bring numbers to Python, where a recording does not see what becomes of them.
_REVEALING = _names(
    """
    item tolist numpy __array__ __dlpack__ data_ptr storage untyped_storage __bool__ __int__ __float__ __index__
    """
)
_OF_RANDOM_STATE = _names("manual_seed seed set_state graphsafe_set_state set_offset")


_READING_BY_NAME = _names("__dict__ __getattr__ __getattribute__ attrgetter methodcaller")


class Unwatchable(Exception):
    """Something that a step depends on, or does, cannot be watched. The message says what."""


class Calls:
    """Within this context it is noted which functions are called that are not of a library that is trusted.

    Attributes:
        codes: code of a Python function → its globals.
        odd: what was done that cannot be repeated; empty if nothing was.
        uses_getattr: a name that is read may be none that stands in the code.
    """

    def __init__(self) -> None:
        self.codes: dict[CodeType, dict[str, Any]] = {}
        self.odd = ""
        self.uses_getattr = False
        self._trusted: dict[CodeType, bool] = {}
        self._of_python: set[CodeType] = set()  # trusted as long as only trusted code calls it

    def __enter__(self) -> Calls:
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)

    def _event(self, frame: FrameType, event: str, arg: Any) -> None:
        code = frame.f_code
        if event == "call":
            trusted = self._trusted.get(code)
            if trusted is None:
                trusted = _is_trusted(code.co_filename, frame.f_globals)
                if not trusted and _is_of_python(code.co_filename):
                    self._of_python.add(code)
                    trusted = True
            if trusted and code in self._of_python and frame.f_back is not None:
                trusted = self._trusted.get(frame.f_back.f_code, True)
            self._trusted[code] = trusted
            if not trusted:
                self._of_python.discard(code)
                self.codes[code] = frame.f_globals
        elif event == "c_call" and not self.odd:
            name = getattr(arg, "__name__", "")
            if not self._trusted.get(code, True):
                self.uses_getattr = self.uses_getattr or name == "getattr"
                if not _is_pure(arg, name):
                    self.odd = f"it calls {name}"
            elif name in _REVEALING | _OF_RANDOM_STATE and code.co_filename.startswith(_TORCH):
                self.odd = f"it calls {name}"


class Guards:
    """Everything that the functions that were called can read, as it is now.

    Args:
        calls: what a step has called.
        roots: the objects from which it began.

    Raises:
        Unwatchable: something cannot be compared with what it was.
    """

    def __init__(self, calls: Calls, *roots: Any) -> None:
        if calls.odd:
            raise Unwatchable(calls.odd)
        self._calls = calls
        self._read = {name for code in calls.codes for name in code.co_names}
        # Whether a name that is read may be one that does not stand in the code.
        self._reads_by_name = calls.uses_getattr or bool(self._read & _READING_BY_NAME)
        self._entries: list[tuple[Any, Any, Any]] = []  # (container, key, value)
        self._lengths: list[tuple[Any, int]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._sets: list[tuple[set[Any], frozenset[Any]]] = []
        self._tensors: list[tuple[Tensor, int, torch.Size]] = []
        self._known: dict[int, Any] = {}  # by id, kept so that ids stay theirs
        self._found: set[CodeType] = set()
        for code in calls.codes:
            self._look_through(code)
        for root in roots:
            self._watch(root, "the model")
        for code, names in calls.codes.items():
            self._watch_names(code, names, set())
        lost = [code.co_name for code in calls.codes if code not in self._found]
        if lost:
            raise Unwatchable(f"it calls {lost[0]}, which is found nowhere")

    def hold(self) -> bool:
        """Whether everything is as it was."""
        try:
            return (
                all(container[key] is value or _equal(container[key], value) for container, key, value in self._entries)
                and all(len(container) == length for container, length in self._lengths)
                and all(cell.cell_contents is value or _equal(cell.cell_contents, value) for cell, value in self._cells)
                and all(now == then for now, then in self._sets)
                and all(t.data_ptr() == place and t.shape == shape for t, place, shape in self._tensors)
            )
        except Exception:  # an entry that is gone, a closure's cell that is empty, a tensor without memory
            return False

    def _look_through(self, code: CodeType) -> None:
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME" and str(instruction.argval).split(".")[0] not in _MODULES:
                raise Unwatchable(f"{code.co_name} imports {instruction.argval}")
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise Unwatchable(f"{code.co_name} sets {instruction.argval}")
            if instruction.opname == "MATCH_CLASS":
                self._reads_by_name = True

    def _watch(self, value: Any, where: str) -> None:
        if isinstance(value, (*_VALUES, enum.Enum)) or id(value) in self._known:
            return
        if len(self._known) > _MOST_VALUES or len(self._entries) > _MOST_VALUES:
            raise Unwatchable("it depends on too much")
        self._known[id(value)] = value
        noted = (self._entries, self._lengths, self._cells, self._sets, self._tensors)
        counts = [len(notes) for notes in noted]
        try:
            self._watch_parts(value, where)
        except Unwatchable:
            # Where it does not matter somebody goes on, and may find it again where it does.
            del self._known[id(value)]
            for notes, count in zip(noted, counts, strict=True):
                del notes[count:]  # type: ignore[attr-defined]
            raise

    def _watch_parts(self, value: Any, where: str) -> None:
        if isinstance(value, BuiltinFunctionType) or type(value) is object:
            return  # calls of C were looked at when they were made
        if isinstance(value, Tensor):
            if torch._C._functorch.is_functorch_wrapped_tensor(value):
                raise Unwatchable(f"{where} is a tensor of a step")
            self._tensors.append((value, value.data_ptr(), value.shape))  # what it holds is read anew
            return
        if isinstance(value, FunctionType):
            self._watch_function(value, where)
        elif isinstance(value, type):
            self._watch_class(value)
        elif isinstance(value, MethodType):
            self._watch(value.__self__, where)
            self._watch(value.__func__, where)
        elif isinstance(value, functools.partial):
            for part in (value.func, value.args, value.keywords):
                self._watch(part, where)
        elif isinstance(value, property):
            for accessor in (value.fget, value.fset, value.fdel):
                self._watch(accessor, where)
        elif isinstance(value, staticmethod | classmethod):
            self._watch(value.__func__, where)
        elif type(value) in _SEQUENCES:
            self._lengths.append((value, len(value)))
            self._watch_entries(value, enumerate(value), where)
        elif type(value) in _TABLES:
            self._lengths.append((value, len(value)))
            self._watch_entries(value, value.items(), where)
        elif type(value) in (set, frozenset):
            if not all(isinstance(v, _VALUES) for v in value):
                raise Unwatchable(f"{where} is a set of more than numbers and names")
            if isinstance(value, set):
                self._sets.append((value, frozenset(value)))
        elif isinstance(value, ModuleType):
            if value.__name__.split(".")[0] not in _MODULES:
                raise Unwatchable(f"it reads module {value.__name__}")
        else:
            self._watch_object(value, where)

    def _watch_entries(self, container: Any, entries: Any, where: str) -> None:
        for key, value in entries:
            if not isinstance(key, _VALUES):
                self._watch(key, where)
            self._entries.append((container, key, value))
            self._watch(value, f"{where}[{key!r}]")

    def _watch_object(self, value: Any, where: str) -> None:
        attributes = getattr(value, "__dict__", None)
        if type(attributes) is not dict or not (type(value) is SimpleNamespace or _is_of_attributes(type(value))):
            raise Unwatchable(f"{where} is a {type(value).__name__}, which cannot be compared with what it was")
        self._watch(type(value), where)
        self._lengths.append((attributes, len(attributes)))
        for name, attribute in attributes.items():
            self._entries.append((attributes, name, attribute))
            try:
                self._watch(attribute, f"{where}.{name}")
            except Unwatchable:
                if not isinstance(value, nn.Module) or self._reads_by_name or name in self._read:
                    raise
                if callable(attribute) or (_is_torchs(type(value)) and name != "_flat_weight_refs"):
                    raise  # it may be torch that calls or reads it

    def _watch_class(self, cls: type) -> None:
        for base in cls.__mro__:
            if _is_torchs(base) or base.__module__.split(".")[0] in _MODULES | {"builtins", "abc", "enum"}:
                continue
            for name, value in list(vars(base).items()):
                runs = isinstance(value, FunctionType | property | staticmethod | classmethod)
                if not runs and (name.startswith("__") or not (name in self._read or self._reads_by_name)):
                    continue
                self._entries.append((vars(base), name, value))
                self._watch(value, f"{base.__name__}.{name}")

    def _watch_function(self, function: FunctionType, where: str) -> None:
        code = function.__code__
        is_called = code in self._calls.codes
        if is_called or hasattr(function, "__wrapped__"):
            self._watch_cells(function, where)
        if not is_called:
            return
        for nested in _with_nested(code):
            self._found.add(nested)
        for defaults in (function.__defaults__, function.__kwdefaults__):
            if defaults is not None:
                self._watch(defaults, f"a default of {code.co_name}")

    def _watch_cells(self, function: FunctionType, where: str) -> None:
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True):
            try:
                value = cell.cell_contents
            except ValueError:  # empty
                raise Unwatchable(f"{where} has a variable {name} without a value") from None
            self._cells.append((cell, value))
            self._watch(value, name)

    def _watch_names(self, code: CodeType, names: Mapping[str, Any], above: set[int]) -> None:
        for name in code.co_names:
            if name not in names:
                continue
            value = names[name]
            self._entries.append((names, name, value))
            if isinstance(value, ModuleType) and _is_written(value) and not self._reads_by_name:
                # A module of the user's own: what stands in the code is what may be read of it.
                if id(value) not in above:
                    self._watch_names(code, vars(value), above | {id(value)})
            else:
                self._watch(value, name)


def _equal(value: Any, other: Any) -> bool:
    """Whether two simple values cannot be told apart."""
    return type(value) is type(other) and isinstance(value, _VALUES) and repr(value) == repr(other)


def _is_torchs(cls: type) -> bool:
    return cls.__module__.split(".")[0] == "torch"


def _is_of_attributes(cls: type) -> bool:
    """Whether its objects are nothing but their attributes: no slots, and nothing that is written in C."""
    names = [(name, value) for base in cls.__mro__[:-1] for name, value in vars(base).items()]
    return not any(
        isinstance(value, MethodDescriptorType | MemberDescriptorType | WrapperDescriptorType)
        or (name == "__new__" and isinstance(value, BuiltinFunctionType))
        or (isinstance(value, GetSetDescriptorType) and name not in ("__dict__", "__weakref__"))
        for name, value in names
    )


def _is_written(module: ModuleType) -> bool:
    """Whether it is Python that was written by hand for this model, as far as can be told: not an installed library."""
    file = getattr(module, "__file__", None) or ""
    is_installed = file.startswith((*_OF_PYTHON, *_TRUSTED_FOLDERS)) or any(part in file for part in _INSTALLED)
    return file.endswith(".py") and not is_installed


def _is_of_python(file: str) -> bool:
    return file.startswith(_OF_PYTHON) and not any(part in file for part in _INSTALLED)


def _is_trusted(file: str, names: Mapping[str, Any]) -> bool:
    if file.startswith(_NOT_TRUSTED):
        return False
    if file == "<string>":  # what dataclasses and named tuples write, but also what a user gives to `python -c`
        home = str(names.get("__name__", ""))
        return home.split(".")[0] in _MODULES or home.startswith("namedtuple_")
    return file.startswith(_TRUSTED_FOLDERS) or "/einops/" in file or file in _TRUSTED_FILES


def _is_pure(function: Any, name: str) -> bool:
    """Whether a function of C does nothing but compute from its arguments, or is seen by a recording."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType):
        home = str(getattr(function, "__module__", ""))
        if home == "builtins":
            return name in _BUILTINS
        of_torch = home.split(".")[0] == "torch" and name not in _REVEALING | _OF_RANDOM_STATE
        return of_torch or home in ("math", "operator", "_operator", "itertools", "functools", "_functools")
    if isinstance(owner, type):  # a constructor, such as dict.fromkeys
        return owner.__module__.split(".")[0] in ("builtins", "torch")
    of_torch = type(owner).__module__.split(".")[0] == "torch" and not isinstance(owner, torch.Generator)
    if of_torch or isinstance(owner, Tensor):
        return name not in _REVEALING | _OF_RANDOM_STATE
    return isinstance(owner, (*_VALUES[1:], *_SEQUENCES, *_TABLES, set, frozenset))


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)
