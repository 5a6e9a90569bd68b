"""Numbers that a user's Python keeps: in attributes, in dicts, lists and objects that they hold, and in globals.

With them go texts, None, which often stands for a number that is to come, tensors that are no parameters or buffers,
tuples of all these, and random generators.

They are found from the modules of a model and from a loss: through what their attributes hold, in their classes, and
through the variables that the code of these classes names. Code of libraries is not looked at.
"""

from __future__ import annotations

import functools
import sys
import sysconfig
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vsim.cluster.randomness import GENERATORS
from vsim.engine.kept import as_kept, content, is_kept

State = dict[str, Any]  # path of a holder → its numbers: name → number, or a list of numbers
Place = tuple[str, str | None]  # path and name; None: of a whole list
Change = list[Any]  # path, name (None: of a whole list), and what is there, if anything

_GENERATORS = tuple(GENERATORS)
_NUMBERS = frozenset([int, float, bool, complex, str, type(None)])
_OPAQUE = (Tensor, nn.Module, type, np.ndarray, str, bytes, torch.Generator, torch.optim.Optimizer)
_PLAIN = frozenset([*_NUMBERS, Tensor, torch.Size, torch.device, torch.dtype])
_MOST = 1000  # entries of a container that is looked into; larger ones are data, such as a vocabulary
_MOST_HOLDERS = 10_000
_MACHINERY = ("torch", "numpy", "builtins", "logging", "threading", "multiprocessing", "_io", "io")
_LIBRARIES = (sysconfig.get_path("stdlib"), str(Path(__file__).parents[1]))
_COMMON = frozenset(vars(nn.Module()))


class Holder(NamedTuple):
    """What holds numbers: the dict of an object, a dict, a list, a class, a variable of a closure, or a generator.

    Attributes:
        names: those that are looked at; None: all.
    """

    path: str
    of: Any
    names: frozenset[str] | None = None

    def read(self) -> Any:
        """Return its numbers; empty if there are none."""
        of = self.of
        if isinstance(of, list | deque):
            return as_kept(list(of)) if all(map(_is_number, of)) else []
        if isinstance(of, _GENERATORS):
            return {"state": _state_of(of)}
        items = vars(of) if isinstance(of, type) else {"": _content(of)} if isinstance(of, CellType) else of
        if self.names is not None:
            items = {name: items[name] for name in self.names if name in items}
        return {k: as_kept(v) for k, v in items.items() if _is_number(v) and k not in _COMMON}

    def write(self, numbers: Any) -> None:
        """Let its numbers be these."""
        of, now = self.of, self.read()
        if now == numbers or not (now or numbers):
            return
        if isinstance(of, list | deque):
            of.clear()
            of.extend(content(numbers))
            return
        if isinstance(of, _GENERATORS):
            _set_state(of, numbers["state"]) if numbers else None
            return
        for name in {**now, **dict(numbers)}:
            own = content(numbers.get(name))
            if now.get(name) is None and own is None:
                pass  # what is None at one time may be an object at another, which is no number
            elif isinstance(of, CellType):
                of.cell_contents = own
            elif isinstance(of, type):
                setattr(of, name, own) if name in numbers else delattr(of, name)
            elif name in numbers:
                of[name] = own
            else:
                del of[name]


def read(model: nn.Module, loss_fn: Any = None, code: bool = True) -> State:
    """Return all numbers: path of what holds them → numbers; code: those too that classes and functions name."""
    holders = _holders(model, loss_fn, code)
    return {h.path: found for h in holders if (found := h.read()) or isinstance(h.of, list | deque)}


def write(state: Mapping[str, Any], model: nn.Module, loss_fn: Any = None) -> None:
    """Let the numbers be as `read` returned them; others that have come are removed, but lists that are new stay."""
    for holder in list(_holders(model, loss_fn, True)):
        if holder.path in state or not isinstance(holder.of, list | deque):
            holder.write(state.get(holder.path, {}))


def changed(before: Mapping[str, Any], now: Mapping[str, Any]) -> list[Place]:
    """Return (path, name) of all numbers that differ; the name is None where a list differs."""
    found: list[Place] = []
    for path in {**before, **now}:
        one, other = before.get(path, {}), now.get(path, {})
        if one is other or one == other:
            continue
        if isinstance(one, list) or isinstance(other, list):
            found.append((path, None))
        else:
            found += [(path, name) for name in {**one, **other} if one.get(name) != other.get(name)]
    return found


def with_changes(state: State, before: State, now: State) -> State:
    """Return a copy of a state in which all numbers that differ between two others are as in the latter."""
    return with_each(state, [at(now, place) for place in changed(before, now)])


def attributes(places: Iterable[Place], model: nn.Module) -> list[Holder] | None:
    """Return what holds the attributes of a model's modules at these places; None if a place is another."""
    own = {f"model.{path}".rstrip("."): vars(module) for path, module in model.named_modules()}
    names: dict[str, set[Any]] = {}
    for path, name in places:
        names.setdefault(path, set()).add(name)
    if not names.keys() <= own.keys():
        return None
    return [Holder(path, own[path], frozenset(of)) for path, of in names.items()]


def at(state: State, place: Place) -> Change:
    """Return what is at a place that `changed` returned."""
    path, name = place
    own = state.get(path, {})
    if name is None:
        return [path, None, own]
    return [path, name, own[name]] if name in own else [path, name]


def with_each(state: State, changes: Iterable[Change]) -> State:
    """Return a copy of a state with changes that `at` returned."""
    found = dict(state)
    for path, name, *value in changes:
        if name is None:
            (found[path],) = value
        else:
            found[path] = {k: v for k, v in found.get(path, {}).items() if k != name}
            found[path].update((name, v) for v in value)
    return {path: own for path, own in found.items() if own or isinstance(own, list)}


def dotted(places: list[Place]) -> str:
    """Return some of the places that `changed` returned as text."""
    names = [f"{path}.{name}" if name else path for path, name in places]
    return ", ".join(names[:4]) + (f" and {len(names) - 4} more" if len(names) > 4 else "")


# Where they are ------------------------------------------------------------------------------------------------------


def _holders(model: nn.Module, loss_fn: Any, code: bool) -> Iterator[Holder]:
    search = _Search(code)
    for name, root in (("model", model), ("loss_fn", loss_fn)):
        modules = root.named_modules() if isinstance(root, nn.Module) else ()
        for path, module in modules:
            yield from search.within(vars(module), f"{name}.{path}".rstrip("."))
            yield from search.of_class(type(module))
        if not modules:
            yield from search.of_value(root, name)
    for path, variables, names in search.variables.values():
        yield Holder(path, variables, frozenset(names))


class _Search:
    """One search through objects and code, each of which is looked at once."""

    def __init__(self, code: bool) -> None:
        self.code = code
        self.seen: set[int] = set()
        self.variables: dict[int, tuple[str, dict[str, Any], set[str]]] = {}  # of modules: those that code names

    def within(self, items: Any, path: str) -> Iterator[Holder]:
        """A container, and what is reached from it."""
        if id(items) in self.seen or len(items) > _MOST or len(self.seen) > _MOST_HOLDERS:
            return
        self.seen.add(id(items))
        yield Holder(path, items)
        for name, value in list(items.items() if isinstance(items, dict) else enumerate(items)):
            if name not in _COMMON and type(value) not in _PLAIN:
                yield from self.of_value(value, f"{path}.{name}")

    def of_value(self, value: Any, path: str) -> Iterator[Holder]:
        if isinstance(value, _GENERATORS) and value is not torch.default_generator:
            yield Holder(path, value)
            return
        if isinstance(value, _OPAQUE):
            return
        if isinstance(value, dict | list | deque):
            yield from self.within(value, path)
        elif isinstance(value, tuple):
            for i, item in enumerate(value[:_MOST]):
                yield from self.of_value(item, f"{path}.{i}")
        elif isinstance(value, functools.partial):
            yield from self.of_value((value.func, value.args, value.keywords), path)
        elif isinstance(value, MethodType):
            yield from self.of_value(value.__func__, path)
        elif isinstance(value, FunctionType):
            yield from self.of_function(value)
        elif hasattr(value, "__dict__") and type(value).__module__.partition(".")[0] not in _MACHINERY:
            yield from self.within(vars(value), path)
            yield from self.of_class(type(value))

    def of_class(self, cls: type) -> Iterator[Holder]:
        """The numbers of a class and of those that it inherits from, and what their functions name."""
        for base in cls.__mro__:
            if not self.code or id(base) in self.seen:
                continue
            self.seen.add(id(base))
            if _is_library(sys.modules.get(base.__module__)):
                continue
            yield Holder(base.__qualname__, base)
            for name, value in list(vars(base).items()):
                if not name.startswith("__") or isinstance(value, FunctionType):
                    yield from self.of_value(value, f"{base.__qualname__}.{name}")

    def of_function(self, function: FunctionType) -> Iterator[Holder]:
        """The variables that a function names: of its module, of a module that it uses, of a closure."""
        code = function.__code__
        if not self.code or id(code) in self.seen or _is_of_library(code.co_filename):
            return
        self.seen.add(id(code))
        names = _names(code)
        variables = function.__globals__
        self.variables.setdefault(id(variables), (function.__module__, variables, set()))[2].update(names)
        for name, value in [(name, variables[name]) for name in names if name in variables]:
            if isinstance(value, ModuleType) and not _is_library(value):
                own = vars(value)
                self.variables.setdefault(id(own), (value.__name__, own, set()))[2].update(names)
            elif type(value) not in _NUMBERS:
                yield from self.of_value(value, f"{function.__module__}.{name}")
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            path, value = f"{function.__qualname__}.{name}", _content(cell)
            if _is_number(value):
                yield Holder(path, cell)
            yield from self.of_value(value, path)
        yield from self.of_value(function.__defaults__ or (), f"{function.__qualname__}.defaults")


def _is_number(value: Any) -> bool:
    if type(value) is tuple:
        return len(value) <= _MOST and all(map(_is_number, value))
    return type(value) in _NUMBERS or isinstance(value, np.generic) or is_kept(value)


def _state_of(generator: Any) -> Any:
    """Return the state of a random generator: numbers, texts, and tuples and dicts of them."""
    if isinstance(generator, torch.Generator):
        return generator.get_state().numpy().tobytes().hex()
    read, _ = _access(generator)
    return _without_arrays(read(generator))


def _set_state(generator: Any, state: Any) -> None:
    if isinstance(generator, torch.Generator):
        state = torch.frombuffer(bytearray.fromhex(state), dtype=torch.uint8)
    _, write = _access(generator)
    write(generator, state)


def _access(generator: Any) -> tuple[Callable[[Any], Any], Callable[[Any, Any], Any]]:
    return next(access for kind, access in GENERATORS.items() if isinstance(generator, kind))


def _without_arrays(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_arrays(part) for key, part in value.items()}
    return tuple(value.tolist()) if isinstance(value, np.ndarray) else value


@functools.cache
def _names(code: CodeType) -> frozenset[str]:
    """Return the names that code uses, with those of functions within it."""
    inner = [_names(own) for own in code.co_consts if isinstance(own, CodeType)]
    return frozenset(code.co_names).union(*inner)


def _content(cell: CellType) -> Any:
    try:
        return cell.cell_contents
    except ValueError:  # not assigned yet
        return None


def _is_library(module: ModuleType | None) -> bool:
    if module is None or module.__name__ == "__main__":  # of a notebook
        return False
    file = getattr(module, "__file__", None)
    return file is None or _is_of_library(file)


def _is_of_library(file: str) -> bool:
    return file.startswith(_LIBRARIES) or "site-packages" in file or "dist-packages" in file
