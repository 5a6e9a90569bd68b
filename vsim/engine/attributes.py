"""What a model and its loss keep in Python: find attributes, compare and set them, undo what calls have changed.

Attributes belong to owners: the modules of model and loss, modules within their attributes, which torch does not
register, and a loss that is an object. `Outside` finds what calls can change elsewhere: globals, class attributes and
variables of closures.
"""

from __future__ import annotations

import collections
import copy
import functools
import hashlib
import io
import logging
import pickle
import sys
import types
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vsim.cluster.randomness import GENERATORS
from vsim.private_torch import hooks_of, is_wrapped, tensor_tables, version

# Attributes of every module, without the flag `training`, which forward or a callback may set.
_COMMON = frozenset(vars(nn.Module())) - {"training"}
_SEQUENCES = (list, tuple, set, frozenset, collections.deque)
_SCALARS = frozenset({bool, int, float, complex, str, bytes, type(None)})  # which hold nothing else
_DICTS = (dict, collections.OrderedDict, collections.Counter)


class Owner(NamedTuple):
    """An object with attributes. `is_hidden` marks a module that torch does not register, whose tensors no node has."""

    path: str
    value: Any
    is_hidden: bool = False


def owners(model: nn.Module, loss_fn: Any) -> list[Owner]:
    """Return the owners of attributes, each once, those of the model first."""
    loss_fn = getattr(loss_fn, "__self__", loss_fn)  # of a bound method
    roots = {"model": model, **({"loss_fn": loss_fn} if isinstance(loss_fn, nn.Module) else {})}
    found = [Owner(path, m) for root, of in roots.items() for path, m in of.named_modules(prefix=root)]
    if not isinstance(loss_fn, nn.Module | types.FunctionType) and _has_attributes(loss_fn):
        found.append(Owner("loss_fn", loss_fn))
    known, seen = {id(owner.value) for owner in found}, set[int]()
    for owner in found:  # which grows
        for name, value in attributes_of(owner.value):
            if type(value) in _SCALARS:  # most attributes
                continue
            for path, inner in _tensors_and_modules(value, f"{owner.path}.{name}", seen):
                if isinstance(inner, nn.Module) and id(inner) not in known:
                    own = [Owner(where, m, True) for where, m in inner.named_modules(prefix=path)]
                    found += [one for one in own if id(one.value) not in known]
                    known.update(id(one.value) for one in own)
    return found


def attributes_of(owner: Any) -> Iterator[tuple[str, Any]]:
    """Yield (name, value) of an owner's attributes and buffers, except parameters, submodules and hooks."""
    if not isinstance(owner, nn.Module):
        yield from vars(owner).items()
        return
    for name, value in {**vars(owner), **tensor_tables(owner)[1]}.items():
        is_of_rnn = isinstance(owner, nn.RNNBase) and name == "_flat_weights"  # references to its parameters
        if name not in _COMMON and not is_of_rnn:
            yield name, value


def tensors_in(owner: Any) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, tensor) for all tensors in an owner's attributes, however deep, and in its buffers."""
    for name, value in attributes_of(owner):
        if type(value) in _SCALARS:
            continue
        for _, inner in _tensors_and_modules(value, name, set()):
            if isinstance(inner, Tensor):
                yield name, inner


def _tensors_and_modules(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of the tensors and modules in a value: in containers and in the attributes of objects.

    Args:
        seen: ids of the containers and objects that are known; filled here.
    """
    coming = [(path, value)]
    while coming:
        path, value = coming.pop()
        if isinstance(value, Tensor | nn.Module):
            yield path, value
            continue
        if type(value) in _SCALARS or id(value) in seen:
            continue
        if isinstance(value, dict):
            parts = [(f"{path}[{key!r}]", own) for key, own in value.items()]
        elif isinstance(value, _SEQUENCES):
            parts = [(f"{path}[{i}]", own) for i, own in enumerate(value)]
        elif _has_attributes(value):
            slots = [vars(cls).get("__slots__", ()) for cls in type(value).__mro__]
            names = [name for own in slots for name in ([own] if isinstance(own, str) else own)]
            own = {**{n: getattr(value, n) for n in names if hasattr(value, n)}, **getattr(value, "__dict__", {})}
            parts = [(f"{path}.{name}", one) for name, one in own.items()]
        else:
            continue
        seen.add(id(value))
        coming += reversed(parts)


def _has_attributes(value: Any) -> bool:
    """Return whether `copy.deepcopy` copies the attributes of an object."""
    shared = type, types.ModuleType, types.FunctionType, types.MethodType, logging.Logger
    has = type(value).__dictoffset__ != 0 or any("__slots__" in vars(cls) for cls in type(value).__mro__)
    return has and not isinstance(value, shared)


def shown(path: str) -> str:
    """Return an attribute's path as a user would write it."""
    return path.removeprefix("model.")


def is_plain(value: Any, tensors: bool = False, depth: int = 0) -> bool:
    """Return whether a value is a number, a text, a bool or None, or a list, tuple, set or dict of such values.

    Args:
        tensors: whether tensors count as plain.
    """
    kind = type(value)
    if kind in (bool, int, float, str, type(None)):
        return True
    if depth > 8:  # or a list that contains itself
        return False
    if kind in _DICTS:
        keys_are_plain = all(is_plain(key, False, depth + 1) and not isinstance(key, np.generic) for key in value)
        return keys_are_plain and all(is_plain(own, tensors, depth + 1) for own in value.values())
    if kind in _SEQUENCES:
        return all(is_plain(own, tensors, depth + 1) for own in value)
    if kind is Tensor:
        return tensors and value.grad_fn is None and value.layout is torch.strided and not value.is_quantized
    return isinstance(value, np.generic) and value.dtype.kind in "biuf"


# Contents -------------------------------------------------------------------------------------------------------------


class _Pickler(pickle.Pickler):
    """Pickles attributes for comparison: tensors by value; registered tensors, modules, functions and classes by name.

    Attributes:
        registered: ids of parameters and buffers, whose values are the nodes'.
    """

    registered: Container[int]

    def persistent_id(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            return "registered" if id(value) in self.registered else _digest(value)
        if isinstance(value, torch.Generator):
            return _digest(value.get_state())
        if isinstance(value, nn.Module | types.FunctionType | type):
            return type(value).__name__, getattr(value, "__qualname__", "")
        return None


def _digest(value: Tensor) -> tuple[Any, ...]:
    """Return dtype, shape and a checksum of a tensor; its identity if its values cannot be read."""
    if is_wrapped(value) or value.is_meta or value.is_quantized or value.layout is not torch.strided:
        return id(value), version(value)
    flat = value.detach().resolve_conj().resolve_neg().cpu().contiguous().flatten().view(torch.uint8)
    return str(value.dtype), tuple(value.shape), hashlib.blake2b(flat.numpy().data, digest_size=16).digest()


def content_of(value: Any, registered: Container[int] = (), is_tree: bool = True) -> bytes:
    """Return the comparable content of a value, as far as pickle takes it.

    Args:
        is_tree: whether no part refers to another one, so that equal contents are equal bytes.
    """
    file = io.BytesIO()
    pickler = _Pickler(file)
    pickler.registered, pickler.fast = registered, is_tree
    with suppress(Exception):
        pickler.dump(value)
    return file.getvalue()


def contents_of(found: Iterable[Owner], buffers: Container[str]) -> dict[str, bytes]:
    """Return path → comparable content of the owners' attributes, and of the tensors of hidden modules.

    Buffers that are not in `buffers`, because `forward` made them, count as attributes. Attributes that pickle refuses
    are not compared.
    """
    contents, known = dict[str, bytes](), dict[int, bytes]()  # owners may share an object, such as a config
    found, registered = list(found), set[int]()
    for path, owner, is_hidden in found:
        if isinstance(owner, nn.Module) and not is_hidden:
            parameters, own = tensor_tables(owner)
            registered |= {id(t) for t in parameters.values()}
            registered |= {id(t) for name, t in own.items() if f"{path}.{name}" in buffers}
    for path, owner, is_hidden in found:
        hidden = tensor_tables(owner)[0].items() if is_hidden else ()
        for name, value in (*attributes_of(owner), *hidden):
            if f"{path}.{name}" in buffers:
                continue
            if id(value) not in known:
                known[id(value)] = content_of(value, registered, is_plain(value))
            contents[f"{path}.{name}"] = known[id(value)]
    return contents


def plain_values(found: Iterable[Owner], tensors: bool = False) -> dict[str, Any]:
    """Return path → value for the plain attributes of owners, see `is_plain`; no buffers."""
    of_all = ((owner.path, name, value) for owner in found for name, value in vars(owner.value).items())
    return {f"{path}.{name}": value for path, name, value in of_all if name not in _COMMON and is_plain(value, tensors)}


def set_values(found: Iterable[Owner], values: Mapping[str, Any], drop: Iterable[str] = ()) -> None:
    """Set plain attributes by path, containers in place, and delete others. Paths that no owner has are left out."""
    tables = {owner.path: vars(owner.value) for owner in found}
    for path, value in values.items():
        owner, _, name = path.rpartition(".")
        table = tables.get(owner, {})
        if name in table and type(table[name]) is type(value) and _may_change_in_place(table[name]):
            _refill(table[name], copy.deepcopy(value))
        else:
            table[name] = copy.deepcopy(value)
    for owner, _, name in (path.rpartition(".") for path in drop):
        tables.get(owner, {}).pop(name, None)


def changed(before: Mapping[str, bytes], now: Mapping[str, bytes]) -> list[str]:
    """Return the paths of attributes that are new or differ."""
    return [path for path, content in now.items() if before.get(path) != content]


# Undoing --------------------------------------------------------------------------------------------------------------


class Attributes:
    """The attributes of owners, which `noted` notes, to be set again."""

    def __init__(self, found: Sequence[Owner]) -> None:
        self._tables = [vars(owner.value) for owner in found]
        self._tables += [tensor_tables(owner.value)[1] for owner in found if isinstance(owner.value, nn.Module)]
        self._containers: dict[int, Any] = {}  # with those within them
        coming = [value for owner in found for _, value in attributes_of(owner.value) if _may_change_in_place(value)]
        while coming:
            value = coming.pop()
            if _may_change_in_place(value):
                self._containers[id(value)] = value
            if isinstance(value, (*_SEQUENCES, dict)):
                coming += value.values() if isinstance(value, dict) else value

    def noted(self) -> Callable[[], None]:
        """Return a function that sets all attributes to their present values. Objects are set by reference."""
        tables = [(table, table.copy()) for table in self._tables]
        containers = [(value, value.copy()) for value in self._containers.values()]

        def restore() -> None:
            for table, before in tables:
                table.clear()
                table.update(before)
            for value, before in containers:
                _refill(value, before)

        return restore


def _may_change_in_place(value: Any) -> bool:
    return type(value) in (list, set, collections.deque, *_DICTS) and is_plain(value)


def _refill(container: Any, content: Any) -> None:
    """Give a list, set, deque or dict the content of another one."""
    container.clear()
    (container.extend if isinstance(container, list | collections.deque) else container.update)(content)


_MISSING = object()
_FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, staticmethod, classmethod, property)
_LASTING = (type, types.ModuleType, types.FunctionType)  # what an import or a compiler may have added meanwhile
_LIBRARIES = {"builtins", "torch", "numpy", "vsim", "vsim_kernels", *sys.stdlib_module_names} - {"__main__"}


class Outside(AbstractContextManager["Outside"]):
    """Restore at the end of a block what calls may change outside of owners: globals, class attributes, closures.

    Follows the names in the code of the owners' methods, functions and hooks, and in the user's functions and classes
    that such code names. Values are restored by reference; lists and dicts of plain values and random generators also
    in place.

    Args:
        functions: other functions that are called.
    """

    def __init__(self, found: Iterable[Owner], functions: Iterable[Any] = ()) -> None:
        self._places: list[tuple[Any, str, Any]] = []  # namespace, name, value
        self._containers: list[tuple[Any, Any]] = []  # with copies
        self._generators: list[tuple[str, Any, bytes]] = []  # name, generator, state
        self._classes: dict[type, set[str]] = {}  # class → names of its attributes
        self._seen = set[int]()
        for _, owner, _ in found:
            hooks = hooks_of(owner).values() if isinstance(owner, nn.Module) else ()
            values = [*(value for _, value in attributes_of(owner)), *(hook for own in hooks for hook in own.values())]
            for value in (type(owner), *values):
                self._visit("", value if isinstance(value, (type, *_FUNCTIONS)) else type(value))
        for function in functions:
            self._visit("", function)

    def drawn(self) -> list[str]:
        """Return the names of the generators outside of the owners that have advanced."""
        return [name for name, generator, state in self._generators if _state_of(generator) != state]

    def __exit__(self, *details: object) -> None:
        for namespace, name, value in self._places:
            now = _get(namespace, name)
            if now is not value and not (value is _MISSING and isinstance(now, _LASTING)):
                _set(namespace, name, value)
        for cls, names in self._classes.items():
            for name in vars(cls).keys() - names:
                if not (name.startswith("__") or isinstance(vars(cls)[name], _LASTING)):
                    delattr(cls, name)
        for container, before in self._containers:
            if container != before:
                _refill(container, before)
        for _, generator, state in self._generators:
            _functions_of(generator)[1](generator, pickle.loads(state))

    def _visit(self, name: str, value: Any) -> None:
        """Note the places in which a value may be changed: of a function those that its code names."""
        if id(value) in self._seen:
            return
        self._seen.add(id(value))
        if isinstance(value, tuple(GENERATORS)):
            self._generators.append((name, value, _state_of(value)))
        elif _may_change_in_place(value):
            self._containers.append((value, copy.deepcopy(value)))
        elif isinstance(value, types.FunctionType):
            named = {each for code in _codes(value.__code__) for each in code.co_names}
            modules = [m for each in named if isinstance(m := value.__globals__.get(each), types.ModuleType)]
            for each in named:
                self._note(value.__globals__, each)
            for module in (m for m in modules if not _is_of_library(m.__name__)):
                for each in named & vars(module).keys():
                    self._note(vars(module), each)
            for cell in value.__closure__ or ():
                self._note(cell, "cell_contents")
            for each in vars(value):
                self._note(vars(value), each)
        elif isinstance(value, _FUNCTIONS):
            for part in ("func", "__func__", "__self__", "fget"):
                self._visit(name, getattr(value, part, None))
        elif isinstance(value, type):
            for cls in value.__mro__:
                if cls not in self._classes and not _is_of_library(cls.__module__):
                    self._classes[cls] = {*vars(cls)}
                    for each in self._classes[cls]:
                        self._note(cls, each)
        elif type(value).__dictoffset__ and not isinstance(value, types.ModuleType):
            self._visit(name, type(value))
            for each in vars(value):
                self._note(vars(value), each, follows=False)

    def _note(self, namespace: Any, name: str, follows: bool = True) -> None:
        """Note the value of a name, and follow it; without `follows`, only what can change in place."""
        value = _get(namespace, name)
        self._places.append((namespace, name, value))
        if isinstance(namespace, type) and isinstance(value, _FUNCTIONS):
            self._visit(name, value)
        else:
            self._follow(name, value, follows)

    def _follow(self, name: str, value: Any, into_code: bool) -> None:
        """Visit a value, or the parts of a container, if it can change in place or is the user's code."""
        if _may_change_in_place(value) or isinstance(value, tuple(GENERATORS)):
            self._visit(name, value)
        elif isinstance(value, dict | list | tuple):
            if id(value) not in self._seen:
                self._seen.add(id(value))
                for part in value.values() if isinstance(value, dict) else value:
                    self._follow(name, part, into_code)
        elif into_code and not isinstance(value, types.ModuleType) and _is_users(value):
            self._visit(name, value)


def _codes(code: types.CodeType) -> Iterator[types.CodeType]:
    """Yield a function's code, and the code of functions within it."""
    yield code
    for one in code.co_consts:
        if isinstance(one, types.CodeType):
            yield from _codes(one)


def _is_of_library(module: str) -> bool:
    return module.partition(".")[0] in _LIBRARIES


def _is_users(value: Any) -> bool:
    """Return whether the code of a function, of a class, or of an object's class is the user's."""
    while isinstance(value, types.MethodType | functools.partial):
        value = value.__func__ if isinstance(value, types.MethodType) else value.func
    return _is_users_module((value if isinstance(value, type | types.FunctionType) else type(value)).__module__)


@functools.cache
def _is_users_module(name: str) -> bool:
    file = getattr(sys.modules.get(name), "__file__", None) or ""
    return not _is_of_library(name) and not {"site-packages", "dist-packages"} & {*Path(file).parts}


def _get(namespace: Any, name: str) -> Any:
    if isinstance(namespace, types.CellType):
        return getattr(namespace, name, _MISSING)  # the cell may be empty
    return (vars(namespace) if isinstance(namespace, type) else namespace).get(name, _MISSING)


def _set(namespace: Any, name: str, value: Any) -> None:
    if not isinstance(namespace, dict):
        delattr(namespace, name) if value is _MISSING else setattr(namespace, name, value)
    elif value is _MISSING:
        namespace.pop(name, None)
    else:
        namespace[name] = value


def _functions_of(generator: Any) -> tuple[Any, Any]:
    return next(both for kind, both in GENERATORS.items() if isinstance(generator, kind))


def _state_of(generator: Any) -> bytes:
    return pickle.dumps(_functions_of(generator)[0](generator))
