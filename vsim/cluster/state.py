"""The state of a run as a tree: what is found in its objects, to be saved.

`Snapshot` walks from a few roots through attributes, lists and dicts. It ends at tensors, numbers and random
generators, which are the state, and at functions, classes and the like, which are not. `vsim.checkpoint.restore` puts
it back.
"""

from __future__ import annotations

import collections
import functools
import io
import random
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

Node = Any  # of a tree: None, a bool, a number, a str, or a dict with its "kind", as JSON has them
_PLAIN = (type(None), bool, int, float, str)
FIXED = (
    type,
    types.FunctionType,
    types.BuiltinFunctionType,
    types.MethodType,
    types.ModuleType,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
    Enum,
    PurePath,
    range,
    slice,
)


class CheckpointError(ValueError):
    """A run cannot be saved, or a checkpoint cannot be used."""


class Stateful:
    """What lasts from step to step, to be saved with a run. The base of strategies, modules, selectors, compressors.

    The state is found: every attribute that is a tensor, a number, a text, a random generator (of torch, numpy or
    Python), an optimizer, or a list, tuple, dict, set or object of those. Attributes must be there after the setup, or
    be made of tensors, numbers, lists and dicts: an object is filled, never made, when a run is resumed. A value of
    another kind (an iterator, a file) is a `CheckpointError` when the run starts to save; `state_dict` and
    `load_state_dict` may then be overridden to say what the state is. What a function keeps in its closure is not seen.

    Attributes:
        shared_state: names of attributes that are the same on all nodes. Needed for those that change their shape
            during a run and whose first dimension may be K by chance, to resume with another backend.
    """

    shared_state: ClassVar[tuple[str, ...]] = ()

    def state_dict(self) -> dict[str, Any]:
        """Return name → state; here all attributes."""
        return dict(vars(self))

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take back what `state_dict` returned. Called after the setup for a run; here it sets all attributes."""
        for name in self.state_dict().keys() - state.keys():
            delattr(self, name)
        vars(self).update(state)


@dataclass
class _Storage:
    """Memory that tensors of one dtype look at, from element `start` to `stop`."""

    tensor: Tensor
    start: int
    stop: int

    def flat(self) -> Tensor:
        """The elements that are looked at (n,), on the CPU. Not a copy where they are there."""
        return self.tensor.as_strided((self.stop - self.start,), (1,), self.start).cpu()


@dataclass
class Shard:
    """What one process holds: a tree, and the memory that its tensors look at.

    Attributes:
        tree: the state, with a number in place of each tensor's memory.
        starts: for each memory, the element of it that is the first saved.
        storages: for each memory, its elements from there on, flat (n,) on the CPU.
    """

    tree: Node
    starts: list[int]
    storages: list[Tensor]

    def tensor(self, node: Mapping[str, Any]) -> Tensor:
        """Return the tensor that a node of the tree describes, on the CPU, sharing the memory of the shard."""
        if node["storage"] is None:
            return torch.empty(node["size"], dtype=getattr(torch, node["dtype"]))
        storage = self.storages[node["storage"]]
        offset = storage.storage_offset() + node["offset"] - self.starts[node["storage"]]
        return storage.as_strided(node["size"], node["stride"], offset)


class Snapshot:
    """The state of the objects that are reached from `roots`.

    Args:
        roots: name → object.
        known: name → object that is not part of the state but may be referred to, such as the cluster.
        memory: name → tensor whose memory is not saved here but may be looked at.

    Attributes:
        fixed: path → what is there and cannot be made anew from a tree: objects, functions.

    Raises:
        CheckpointError: something has a state that cannot be saved; it is named.
    """

    def __init__(self, roots: Mapping[str, Any], known: Mapping[str, Any], memory: Mapping[str, Tensor]) -> None:
        self.fixed: dict[str, str] = {}
        self._known = {id(value): name for name, value in known.items()}
        self._memory = {t.untyped_storage().data_ptr(): name for name, t in memory.items()}
        self._seen: dict[int, str] = {}
        self._kept_alive: list[Any] = []  # what was seen, so that no id is used twice
        self._storages: dict[tuple[int, torch.dtype], tuple[int, _Storage]] = {}
        self.tree = {name: self._node(value, name) for name, value in roots.items()}

    def shard(self) -> Shard:
        """Return tree and tensors. On the CPU the tensors are not copied."""
        storages = [storage for _, storage in self._storages.values()]
        flat = [s.flat() for s in storages]
        pointers = [t.data_ptr() for t in flat]
        # Memory that is looked at in two dtypes is saved as each.
        flat = [t.clone() if pointers.count(t.data_ptr()) > 1 else t for t in flat]
        return Shard(self.tree, [s.start for s in storages], flat)

    def _node(self, value: Any, path: str) -> Node:
        if type(value) in _PLAIN:
            return value
        if id(value) in self._known:
            return {"kind": "known", "name": self._known[id(value)]}
        if isinstance(value, FIXED):
            return self._fix(path, "fixed", described(value))
        if id(value) in self._seen:
            return {"kind": "seen", "path": self._seen[id(value)]}
        self._seen[id(value)] = path
        self._kept_alive.append(value)
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, torch.Generator):
            return {"kind": "generator", "state": self._node(value.get_state(), f"{path}.state")}
        if isinstance(value, np.random.Generator | np.random.RandomState | random.Random):
            what = self._fix(path, "random", name_of(type(value)))
            return {**what, "state": self._node(_random_state(value), f"{path}.state")}
        if isinstance(value, np.ndarray | np.generic):
            return self._array(value, path)
        return self._container(value, path) or self._object(value, path)

    def _container(self, value: Any, path: str) -> Node:
        if type(value) in (list, tuple, torch.Size, collections.deque):
            items = [self._node(item, f"{path}[{i}]") for i, item in enumerate(value)]
            kind = "list" if type(value) is list else "deque" if isinstance(value, collections.deque) else "tuple"
            return {"kind": kind, "items": items, "maxlen": getattr(value, "maxlen", None)}
        if isinstance(value, tuple):
            self._fix(path, "object", name_of(type(value)))
            return {"kind": "record", "items": [self._node(item, f"{path}[{i}]") for i, item in enumerate(value)]}
        if isinstance(value, set | frozenset) and all(type(item) in _PLAIN for item in value):
            kind = "set" if isinstance(value, set) else "frozenset"
            return {"kind": kind, "items": sorted(value, key=lambda item: (str(type(item)), str(item)))}
        if isinstance(value, dict):
            if type(value) not in (dict, collections.OrderedDict):
                self._fix(path, "object", name_of(type(value)))
            pairs = [[self._key(key, path), self._node(item, f"{path}[{key!r}]")] for key, item in value.items()]
            return {"kind": "dict", "items": pairs}
        return None

    def _object(self, value: Any, path: str) -> Node:
        self._fix(path, "object", name_of(type(value)))
        if isinstance(value, Optimizer):
            return self._optimizer(value, path)
        if isinstance(value, functools.partial):
            return {"kind": "partial", "items": self._node([list(value.args), dict(value.keywords)], f"{path}()")}
        attributes = attributes_of(value)
        if attributes is None:
            raise CheckpointError(
                f"{path} is a {name_of(type(value))}, whose state cannot be saved; hold tensors, numbers, lists, "
                "dicts or generators instead, or define state_dict() and load_state_dict() where it is held"
            )
        items = {name: self._node(item, f"{path}.{name}") for name, item in attributes.items()}
        return {"kind": "object", "class": name_of(type(value)), "items": items}

    def _optimizer(self, optimizer: Optimizer, path: str) -> Node:
        groups: list[dict[str, Node]] = []
        parameters: list[dict[str, Node]] = []
        for group in optimizer.param_groups:
            own = {key: item for key, item in group.items() if key not in ("params", "param_names")}
            groups.append({key: self._node(item, f"{path}.{key}") for key, item in own.items()})
            for p in group["params"]:
                where = f"{path}.state[{len(parameters)}]"
                state = {key: self._node(item, f"{where}.{key}") for key, item in optimizer.state.get(p, {}).items()}
                parameters.append({"parameter": self._node(p, f"{where}.parameter"), "state": state})
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        if any(id(key) not in held for key in optimizer.state):
            raise CheckpointError(f"{path} keeps state for something that is none of its parameters: cannot be saved")
        own = {name: self._node(item, f"{path}.{name}") for name, item in _own_attributes(optimizer).items()}
        return {"kind": "optimizer", "groups": groups, "parameters": parameters, "own": own}

    def _tensor(self, tensor: Tensor, path: str) -> Node:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise CheckpointError(
                f"{path} is a tensor of layout {tensor.layout} on {tensor.device}; only dense are saved"
            )
        node = {
            "kind": "tensor",
            "storage": None,
            "offset": tensor.storage_offset(),
            "size": list(tensor.shape),
            "stride": list(tensor.stride()),
            "dtype": str(tensor.dtype).removeprefix("torch."),
            "cpu": tensor.device.type == "cpu",
        }
        if isinstance(tensor, nn.Parameter):
            node["parameter"] = True
        if tensor.requires_grad:
            node["grad"] = True
        if not tensor.numel():
            return node
        if tensor.is_conj() or tensor.is_neg():
            raise CheckpointError(f"{path} is a lazily conjugated tensor: resolve_conj() it first")
        start = int(tensor.storage_offset())
        stop = start + 1 + sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
        pointer = tensor.untyped_storage().data_ptr()
        if pointer in self._memory:
            return {**node, "kind": "view", "of": self._memory[pointer]}
        number, storage = self._storages.setdefault(
            (pointer, tensor.dtype), (len(self._storages), _Storage(tensor.detach(), start, int(stop)))
        )
        storage.start, storage.stop = min(storage.start, start), max(storage.stop, int(stop))
        return {**node, "storage": number}

    def _array(self, array: np.ndarray[Any, Any] | np.generic, path: str) -> Node:
        if array.dtype.kind not in "biufc":
            raise CheckpointError(f"{path} is an array of {array.dtype}, which cannot be saved; only numbers are")
        contents = np.ascontiguousarray(array).view(np.uint8).copy() if array.size else np.empty(0, np.uint8)
        tensor = torch.from_numpy(contents.reshape(-1))
        self._kept_alive.append(tensor)
        data = self._tensor(tensor, path)
        scalar = isinstance(array, np.generic)
        return {"kind": "array", "data": data, "shape": list(array.shape), "dtype": array.dtype.str, "scalar": scalar}

    def _key(self, key: Any, path: str) -> Node:
        if type(key) in _PLAIN:
            return key
        if type(key) is tuple and all(type(part) in _PLAIN for part in key):
            return {"kind": "tuple", "items": list(key)}
        raise CheckpointError(f"{path} is a dict with the key {key!r}; numbers, texts and tuples of them can be saved")

    def _fix(self, path: str, kind: str, what: str) -> Node:
        self.fixed[path] = what
        return {"kind": kind, "is": what}


def attributes_of(value: Any) -> dict[str, Any] | None:
    """Return name → state of an object; None where it has none that can be found."""
    if speaks_for_itself(value) or isinstance(value, Stateful):
        state = value.state_dict()
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{name_of(type(value))}.state_dict() must return a dict, got {type(state).__name__}")
        return dict(state)
    if isinstance(value, io.IOBase):
        return None
    slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
    if not slots and not hasattr(value, "__dict__"):
        return None
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}


def speaks_for_itself(value: Any) -> bool:
    """Whether an object defines what its state is: a subclass that overrides, or a class with both methods."""
    if isinstance(value, nn.Module | Optimizer):
        return False
    if isinstance(value, Stateful):
        return type(value).state_dict is not Stateful.state_dict
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _slots(cls: type) -> Iterable[str]:
    names = vars(cls).get("__slots__", ())
    return [name for name in ((names,) if isinstance(names, str) else names) if name not in ("__dict__", "__weakref__")]


@functools.cache
def _common_to_optimizers() -> frozenset[str]:
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)])))


def _own_attributes(optimizer: Optimizer) -> dict[str, Any]:
    """What an optimizer of a user's own keeps beside state and groups."""
    return {name: item for name, item in vars(optimizer).items() if name not in _common_to_optimizers()}


def _random_state(value: Any) -> Any:
    if isinstance(value, random.Random):
        return value.getstate()
    return value.bit_generator.state if isinstance(value, np.random.Generator) else value.get_state(legacy=False)


def name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}" if cls.__module__ != "builtins" else cls.__qualname__


def described(value: Any) -> str:
    """Return what a function, class or other constant is, the same in every process."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return f"{getattr(value, '__module__', None) or ''}.{name}".lstrip(".") if name else str(value)
