"""What of Python a step depends on, found by watching one, so that a later step can be known to be the same.

Nothing is assumed of a model's code: a function that it calls must be found where it can be looked at again (in a
module, a class, an attribute, a closure), and so must every value that such a function can read. What cannot be
compared, such as a file or a random generator, or may act out of sight, such as print, is refused.
"""

from __future__ import annotations

import builtins
import collections
import contextlib
import copy
import dis
import enum
import functools
import gc
import operator
import os
import sys
import typing
from collections.abc import Iterable, Iterator, Mapping
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
from torch import Tensor

_VALUES = (
    *(type(None), bool, int, float, complex, str, bytes, range, slice, type(...)),
    *(torch.dtype, torch.device, torch.Size, torch.layout, torch.memory_format),
)
_SEQUENCES, _TABLES = (list, tuple, collections.deque), (dict, collections.OrderedDict, collections.defaultdict)
_MOST_VALUES = 20_000

# The code of these is known to depend on its arguments alone, or is looked after elsewhere (random numbers by the
# recording, which sees every draw).
_TORCH, _KERNELS, _VSIM, _PYTHON = (
    str(Path(file).parent) + os.sep
    for file in (torch.__file__, vsim_kernels.__file__, str(Path(__file__).parent), dis.__file__)
)
_TRUSTED_FOLDERS = (_TORCH, _KERNELS, _VSIM)
_TRUSTED_FILES = frozenset(
    [module.__file__ for module in (collections, contextlib, copy, enum, functools, operator, typing)]
    + ["<frozen abc>", "<frozen _collections_abc>"]
)
_OF_PYTHON = (_PYTHON, "<frozen ")
_INSTALLED = tuple(f"{os.sep}{folder}{os.sep}" for folder in ("site-packages", "dist-packages"))
# Parts of torch that do what a recording does not see: compiled code passes the dispatcher by, others write files or
# talk to other processes.
_NOT_TRUSTED = tuple(
    _TORCH + part
    for part in ("_inductor", f"_functorch{os.sep}_aot_autograd", "distributed", "serialization.py", "hub.py")
)


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
_ODD_IN_TORCH = _REVEALING | _names("manual_seed seed set_state graphsafe_set_state set_offset open print write input")
_READING_BY_NAME = _names("getattr hasattr __dict__ __getattr__ __getattribute__ attrgetter methodcaller")
_MODULES_OF_TORCH = (torch, torch.nn, torch.nn.functional)


class Unwatchable(Exception):
    """Something that a step depends on, or does, cannot be watched. The message says what."""


class Calls:
    """Within this context it is noted which functions are called that are not of a library that is trusted.

    Attributes:
        codes: code of a Python function → its globals.
        odd: what was done that cannot be repeated; empty if nothing was.
    """

    def __init__(self) -> None:
        self.codes: dict[CodeType, dict[str, Any]] = {}
        self.odd = ""
        self._trusted: dict[CodeType, bool] = {}
        self._of_python: set[CodeType] = set()  # trusted as long as only trusted code calls it
        self._collects_garbage = gc.isenabled()

    def __enter__(self) -> Calls:
        gc.disable()  # what finalizers call, of whatever became garbage before, is not of this step
        sys.setprofile(self._event)
        return self

    def __exit__(self, *_: object) -> None:
        sys.setprofile(None)
        if self._collects_garbage:
            gc.enable()

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
                is_odd = not _is_pure(arg, name)
            else:
                is_odd = name in _ODD_IN_TORCH and code.co_filename.startswith(_TORCH)
            if is_odd:
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
        self._codes = calls.codes
        self._read = {name for code in calls.codes for name in code.co_names}
        # Whether a name that is read may be one that does not stand in the code.
        self._reads_by_name = bool(self._read & _READING_BY_NAME)
        self._entries: list[tuple[Any, Any, Any]] = []  # (container, key, value)
        self._absent: list[tuple[Any, str]] = []  # (container, a key that it does not have)
        self._lengths: list[tuple[Any, int]] = []
        self._orders: list[tuple[Any, list[Any]]] = []
        self._cells: list[tuple[CellType, Any]] = []
        self._sets: list[tuple[set[Any], frozenset[Any]]] = []
        self._objects: list[tuple[Any, type, dict[str, Any]]] = []
        self._functions: list[tuple[FunctionType, Any, Any, Any]] = []
        self.tensors: list[tuple[Tensor, Any]] = []  # and how they lie in memory
        self._known: dict[int, Any] = {}  # by id, kept so that ids stay theirs
        self._found: set[CodeType] = set()
        globals_of = {code: self._look_through(code) for code in calls.codes}
        for root in roots:
            self._watch(root, "the model")
        for code, names in calls.codes.items():
            self._watch_globals(globals_of[code], names)
            self._watch_names(code, names, set())
        for module in _MODULES_OF_TORCH:
            self._note(vars(module), self._read & vars(module).keys())
        lost = [code.co_name for code in calls.codes if code not in self._found]
        if lost:
            raise Unwatchable(f"it calls {lost[0]}, which is found nowhere")

    def cover(self, calls: Calls) -> bool:
        """Whether these calls are of functions that are watched, and do nothing else."""
        return not calls.odd and calls.codes.keys() <= self._codes.keys()

    def hold(self) -> bool:
        """Whether everything is as it was."""
        try:
            return (
                all(container[key] is value or _equal(container[key], value) for container, key, value in self._entries)
                and all(name not in container for container, name in self._absent)
                and all(len(container) == length for container, length in self._lengths)
                and all(list(table) == order for table, order in self._orders)
                and all(cell.cell_contents is value or _equal(cell.cell_contents, value) for cell, value in self._cells)
                and all(now == then for now, then in self._sets)
                and all(type(o) is cls and o.__dict__ is attributes for o, cls, attributes in self._objects)
                and all(
                    f.__code__ is code and f.__defaults__ is defaults and f.__kwdefaults__ is named
                    for f, code, defaults, named in self._functions
                )
                and all(_lies(tensor) == lies for tensor, lies in self.tensors)
            )
        except Exception:  # an entry that is gone, a closure's cell that is empty, a tensor without memory
            return False

    def _look_through(self, code: CodeType) -> set[str]:
        """Return the names of the globals and builtins that some code reads."""
        names = set()
        for instruction in dis.get_instructions(code):
            if instruction.opname == "IMPORT_NAME" and str(instruction.argval).split(".")[0] not in _MODULES:
                raise Unwatchable(f"{code.co_name} imports {instruction.argval}")
            if instruction.opname in ("STORE_GLOBAL", "DELETE_GLOBAL"):
                raise Unwatchable(f"{code.co_name} sets {instruction.argval}")
            if instruction.opname == "MATCH_CLASS":
                self._reads_by_name = True
            if instruction.opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                names.add(str(instruction.argval))
        return names

    def _note(self, table: Mapping[str, Any], names: Iterable[str]) -> None:
        self._entries += [(table, name, table[name]) for name in names]

    def _watch(self, value: Any, where: str) -> None:
        if type(value) in _VALUES or id(value) in self._known:
            return
        if len(self._known) > _MOST_VALUES or len(self._entries) > _MOST_VALUES:
            raise Unwatchable("it depends on too much")
        self._known[id(value)] = value
        if type(value) is object:
            return
        if isinstance(value, BuiltinFunctionType):
            owner = value.__self__
            is_bound = not (owner is None or isinstance(owner, ModuleType | type))
            if is_bound or not _is_pure(value, value.__name__):
                raise Unwatchable(f"{where} is {value.__name__}, which does more than compute")
        elif isinstance(value, Tensor):
            self._watch_tensor(value, where)
        elif isinstance(value, FunctionType):
            self._watch_function(value, where)
        elif isinstance(value, type):
            self._watch_class(value)
        elif isinstance(value, MethodType):
            self._watch(value.__self__, where)
            self._watch(value.__func__, where)
        elif type(value) is functools.partial:
            if getattr(value.func, "__name__", "") in _READING_BY_NAME:
                raise Unwatchable(f"{where} reads attributes by their names")
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
            if value:
                self._orders.append((value, list(value)))
            else:
                self._lengths.append((value, 0))
            self._watch_entries(value, value.items(), where)
        elif type(value) in (set, frozenset):
            if not all(type(v) in _VALUES for v in value):
                raise Unwatchable(f"{where} is a set of more than numbers and names")
            if isinstance(value, set):
                self._sets.append((value, frozenset(value)))
        elif isinstance(value, ModuleType):
            if value.__name__.split(".")[0] not in _MODULES:
                raise Unwatchable(f"it reads module {value.__name__}")
        else:
            self._watch_object(value, where)

    def _watch_tensor(self, tensor: Tensor, where: str) -> None:
        if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
            raise Unwatchable(f"{where} is a tensor of a step")
        self.tensors.append((tensor, _lies(tensor)))  # what it holds is read anew
        self._watch(tensor.__dict__, where)

    def _watch_entries(self, container: Any, entries: Any, where: str) -> None:
        for key, value in entries:
            self._watch(key, where)
            self._entries.append((container, key, value))
            self._watch(value, f"{where}[{key!r}]")

    def _watch_object(self, value: Any, where: str) -> None:
        attributes = getattr(value, "__dict__", None)
        of_attributes = isinstance(value, enum.Enum) or type(value) is SimpleNamespace or _is_of_attributes(type(value))
        if type(attributes) is not dict or not of_attributes:
            raise Unwatchable(f"{where} is a {type(value).__name__}, which cannot be compared with what it was")
        self._objects.append((value, type(value), attributes))
        self._watch(type(value), where)
        self._lengths.append((attributes, len(attributes)))
        for name, attribute in attributes.items():
            self._entries.append((attributes, name, attribute))
            self._watch(attribute, f"{where}.{name}")

    def _watch_class(self, cls: type) -> None:
        if not _is_trusted_class(type(cls)):
            raise Unwatchable(f"{cls.__name__} is made by {type(cls).__name__}, and not as classes are")
        for base in cls.__mro__:
            if _is_trusted_class(base):
                self._note(vars(base), {"forward", "__call__"} & vars(base).keys())
                continue
            self._lengths.append((vars(base), len(vars(base))))
            for name, value in list(vars(base).items()):
                runs = isinstance(value, FunctionType | property | staticmethod | classmethod)
                is_read = name in self._read or (self._reads_by_name and not name.startswith("__"))
                if runs or is_read:
                    self._entries.append((vars(base), name, value))
                    self._watch(value, f"{base.__name__}.{name}")

    def _watch_function(self, function: FunctionType, where: str) -> None:
        code = function.__code__
        is_called = code in self._codes
        if not is_called and _is_trusted(code.co_filename, function.__globals__):
            if hasattr(function, "__wrapped__"):
                self._watch_cells(function, where)
            return
        self._functions.append((function, code, function.__defaults__, function.__kwdefaults__))
        self._watch(function.__dict__, where)
        if not is_called:
            return
        self._watch_cells(function, where)
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

    def _watch_globals(self, read: set[str], names: Mapping[str, Any]) -> None:
        """Watch what is not among the globals: builtins, where nothing may come before them."""
        for name in read - names.keys():
            if name not in vars(builtins):
                raise Unwatchable(f"it reads {name}, which is not there")
            self._absent.append((names, name))
            self._note(vars(builtins), [name])
            self._watch(vars(builtins)[name], name)

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
    return type(value) is type(other) and type(value) in _VALUES and repr(value) == repr(other)


def _lies(tensor: Tensor) -> tuple[Any, ...]:
    """Return where and how a tensor lies in memory."""
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


def _is_trusted_class(cls: type) -> bool:
    """Whether it is torch's, Python's or one of vsim, and not one that only says so."""
    module = sys.modules.get(cls.__module__)
    is_library = cls.__module__.split(".")[0] in _MODULES | {"builtins", "abc", "enum"}
    return is_library and getattr(module, cls.__name__, None) is cls


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
    einops = getattr(sys.modules.get("einops"), "__file__", None)
    is_einops = einops is not None and file.startswith(str(Path(einops).parent) + os.sep)
    return file.startswith(_TRUSTED_FOLDERS) or is_einops or file in _TRUSTED_FILES


def _is_pure(function: Any, name: str) -> bool:
    """Whether a function of C does nothing but compute from its arguments, or is seen by a recording."""
    owner = getattr(function, "__self__", None)
    if owner is None or isinstance(owner, ModuleType):
        home = str(getattr(function, "__module__", ""))
        if home == "builtins":
            return name in _BUILTINS
        of_torch = home.split(".")[0] == "torch" and name not in _ODD_IN_TORCH
        return of_torch or home in ("math", "operator", "_operator", "itertools", "functools", "_functools")
    if isinstance(owner, type):  # a constructor, such as dict.fromkeys
        return owner.__module__.split(".")[0] in ("builtins", "torch")
    of_torch = type(owner).__module__.split(".")[0] == "torch" and not isinstance(owner, torch.Generator)
    if of_torch or isinstance(owner, Tensor):
        return name not in _ODD_IN_TORCH
    return isinstance(owner, (*_VALUES[1:], *_SEQUENCES, *_TABLES, set, frozenset))


def _with_nested(code: CodeType) -> Iterator[CodeType]:
    """Yield a function's code and that of the functions within it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _with_nested(constant)
