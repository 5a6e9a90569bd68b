"""The state of a run as a tree: what is found in its objects, and how it is put back.

`Snapshot` walks from a few roots through attributes, lists and dicts. It ends at tensors, numbers and random
generators, which are the state, and at functions, classes and the like, which are not. `Restorer` walks the same
objects of a run that was set up anew, and writes what was saved into them: into the tensors that are there, so that
what shares their memory follows. Nothing is imported or called by a name from the tree: objects must be there already.

The nodes of a run may be held together, as rows of stacked tensors, or apart, one row in each process. A tree that was
taken one way can be put back the other way: rows are cut out, or put together. What is stacked is told from the shapes
that the objects have when they are set up.
"""

from __future__ import annotations

import collections
import functools
import io
import random
import types
from collections.abc import Iterable, Mapping, Sequence
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
_FIXED = (
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
_ABSENT: Any = object()


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


def write_rows(target: Tensor, rows: Tensor) -> None:
    """Write stacked `rows` (R, …) into `target` (R, …), which may be one row that all nodes share (stride 0).

    Raises:
        CheckpointError: the rows differ, and `target` is one row.
    """
    if len(target) > 1 and target.stride(0) == 0 and target.numel():
        if not torch.equal(rows, rows[:1].expand_as(rows)):
            raise CheckpointError("the nodes differ, but this run keeps one row for all of them")
        target, rows = target[0], rows[0]
    target.copy_(rows)


# Saving --------------------------------------------------------------------------------------------------------------


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
        if isinstance(value, _FIXED):
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
            what = self._fix(path, "random", _name_of(type(value)))
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
            self._fix(path, "object", _name_of(type(value)))
            return {"kind": "record", "items": [self._node(item, f"{path}[{i}]") for i, item in enumerate(value)]}
        if isinstance(value, set | frozenset) and all(type(item) in _PLAIN for item in value):
            kind = "set" if isinstance(value, set) else "frozenset"
            return {"kind": kind, "items": sorted(value, key=lambda item: (str(type(item)), str(item)))}
        if isinstance(value, dict):
            if type(value) not in (dict, collections.OrderedDict):
                self._fix(path, "object", _name_of(type(value)))
            pairs = [[self._key(key, path), self._node(item, f"{path}[{key!r}]")] for key, item in value.items()]
            return {"kind": "dict", "items": pairs}
        return None

    def _object(self, value: Any, path: str) -> Node:
        self._fix(path, "object", _name_of(type(value)))
        if isinstance(value, Optimizer):
            return self._optimizer(value, path)
        if isinstance(value, functools.partial):
            return {"kind": "partial", "items": self._node([list(value.args), dict(value.keywords)], f"{path}()")}
        attributes = attributes_of(value)
        if attributes is None:
            raise CheckpointError(
                f"{path} is a {_name_of(type(value))}, whose state cannot be saved; hold tensors, numbers, lists, "
                "dicts or generators instead, or define state_dict() and load_state_dict() where it is held"
            )
        items = {name: self._node(item, f"{path}.{name}") for name, item in attributes.items()}
        return {"kind": "object", "class": _name_of(type(value)), "items": items}

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
    if _speaks_for_itself(value) or isinstance(value, Stateful):
        state = value.state_dict()
        if not isinstance(state, Mapping):
            raise CheckpointError(
                f"{_name_of(type(value))}.state_dict() must return a dict, got {type(state).__name__}"
            )
        return dict(state)
    if isinstance(value, io.IOBase):
        return None
    slots = [name for cls in type(value).__mro__ for name in _slots(cls) if hasattr(value, name)]
    if not slots and not hasattr(value, "__dict__"):
        return None
    return {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}


def _speaks_for_itself(value: Any) -> bool:
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


def _set_random_state(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    else:
        value.set_state(state)


def _name_of(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}" if cls.__module__ != "builtins" else cls.__qualname__


def described(value: Any) -> str:
    """Return what a function, class or other constant is, the same in every process."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return f"{getattr(value, '__module__', None) or ''}.{name}".lstrip(".") if name else str(value)


# Restoring -----------------------------------------------------------------------------------------------------------


class Restorer:
    """Writes what was saved into the objects of a run that was set up anew.

    Args:
        shards: one, from a run whose nodes are held as here; one of every node, if they were apart and are together
            here; or the one of all, if they were together and are apart here.
        node: the node held here, where that is one of several that were saved together; else None.
        num_nodes: K.
        known, memory: as of `Snapshot`.
        device: where tensors that are made anew go, if they were not on the CPU.

    Raises:
        CheckpointError: what was saved does not fit what is there.
    """

    def __init__(
        self,
        shards: Sequence[Shard],
        node: int | None,
        num_nodes: int,
        known: Mapping[str, Any],
        memory: Mapping[str, Tensor],
        device: torch.device,
    ) -> None:
        self.shards = shards
        self.node = node
        self.num_nodes = num_nodes
        self.joins = len(shards) > 1
        self.only_state = False  # of optimizers, and not their settings
        self._known, self._memory, self._device = known, memory, device
        self._made: dict[str, Any] = {}
        # Saved memory → the tensor here that took its place, and the saved view that it was.
        self._joined: dict[tuple[int, int], tuple[int, int]] = {}  # memories of several shards that became one
        self._places: dict[tuple[int, int], list[tuple[Tensor, Mapping[str, Any]]]] = {}
        # Memory here → which saved memory it took the place of, and where.
        self._served: dict[int, list[tuple[Any, Mapping[str, Any]]]] = {
            t.untyped_storage().data_ptr(): [(name, _extent(t))] for name, t in memory.items()
        }
        self._used: dict[int, Any] = {}  # the lists and objects here that have been filled
        self._rebuilt: dict[int, Tensor] = {}  # saved memory → that of the tensors that were not there

    def restore(self, name: str, live: Any) -> Any:
        """Write the state of the root `name` into `live`; return it, or what replaces it."""
        try:
            nodes = [shard.tree[name] for shard in self.shards]
        except KeyError:
            raise CheckpointError(f"the checkpoint holds no {name}") from None
        return self._value(nodes, live, name)

    # A value is restored from its nodes in all shards. `alone` is the shard of the one node that a value belongs to,
    # below a list that has an item for every node.

    def _value(
        self, nodes: Sequence[Node], live: Any, path: str, shared: bool = False, alone: int | None = None
    ) -> Any:
        first = nodes[0]
        if not isinstance(first, dict):
            if any(type(n) is not type(first) or (n != first and n == n) for n in nodes):
                raise CheckpointError(self._apart(path, nodes))
            return first
        kind = first["kind"]
        if any(not isinstance(n, dict) or n["kind"] != kind for n in nodes):
            raise CheckpointError(self._apart(path, ["", ""]))
        if kind == "known":
            return self._known[first["name"]]
        if kind == "seen":
            made = self._made.get(first["path"], live)
            if made is _ABSENT:
                raise CheckpointError(f"{path} was the same object as {first['path']}, which is not there here")
            return made
        if kind == "fixed":
            if live is _ABSENT or not isinstance(live, _FIXED) or described(live) != first["is"]:
                raise CheckpointError(f"{path} was {first['is']}, and is {self._shown(live)} here")
            return live
        restored = getattr(self, f"_{kind}")(nodes, live, path, shared, alone)
        self._made[path] = restored
        return restored

    def _apart(self, path: str, nodes: Sequence[Node]) -> str:
        given = f" ({', '.join(map(repr, nodes[:4]))})" if nodes[0] != "" else ""
        return (
            f"{path} differs between the nodes' processes{given}, so the simulator has no one value for it; resume "
            "with backend='process', or keep what is each node's own in stacked tensors"
        )

    def _shown(self, live: Any) -> str:
        return "absent" if live is _ABSENT else f"a {_name_of(type(live))}"

    # Tensors

    def _tensor(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Tensor:
        shards = self.shards if alone is None else [self.shards[alone]]
        saved = [shard.tensor(node) for shard, node in zip(shards, nodes, strict=True)]
        fits = isinstance(live, Tensor)
        value = self._part(saved, live.shape if fits else None, path, shared or (alone is not None))
        if self.joins and alone is None:
            for shard_number, node in enumerate(nodes):
                self._joined[shard_number, node["storage"]] = (0, nodes[0]["storage"])
        same_shape = fits and live.shape == value.shape and live.dtype == value.dtype
        same_place = same_shape and (live.device.type == "cpu") == nodes[0]["cpu"]
        kept_apart = fits and self._serves_another(nodes[0], live, alone)
        alike = same_place and isinstance(live, nn.Parameter) == ("parameter" in nodes[0])
        if alike and not kept_apart and self._shares_alike(nodes[0], live, alone):
            with torch.no_grad():
                if live.dim() and live.numel():
                    write_rows(live, value)
                else:
                    live.copy_(value)
            return live
        target = self._anew(nodes[0], value, path, alone)
        if "parameter" in nodes[0]:
            return nn.Parameter(target, requires_grad="grad" in nodes[0])
        return target.requires_grad_() if "grad" in nodes[0] else target

    def _serves_another(self, node: Mapping[str, Any], live: Tensor, alone: int | None) -> bool:
        """Whether the memory of `live` has taken the place of another tensor's, with which this one shared none."""
        if node["storage"] is None or not live.numel():
            return False
        number, here = self._memory_of(node, alone), _extent(live)
        served = self._served.setdefault(live.untyped_storage().data_ptr(), [])
        if any(other != number and _overlap(here, there) for other, there in served):
            return True
        served.append((number, here))
        return False

    def _memory_of(self, node: Mapping[str, Any], alone: int | None) -> tuple[int, int]:
        """Return which saved memory a tensor looks at: of which shard, and its number there."""
        own = (alone or 0, node["storage"])
        return self._joined.get(own, own)

    def _anew(self, node: Mapping[str, Any], value: Tensor, path: str, alone: int | None) -> Tensor:
        """Return a new tensor; if it shared memory with others, it does again."""
        device = "cpu" if node["cpu"] else self._device
        number = node["storage"]
        if number is None:
            return value.clone().to(device)
        places = self._places.setdefault(self._memory_of(node, alone), [])
        for other, saved in places:
            if not _overlap(node, saved):
                continue
            if list(other.stride()) == saved["stride"] and list(other.shape) == saved["size"]:
                shift = other.storage_offset() - saved["offset"]
                return other.detach().as_strided(node["size"], node["stride"], node["offset"] + shift)
            raise CheckpointError(f"{path} shared memory with another tensor, and cannot here")
        if self._moves:
            made = value.clone().to(device)
        else:
            shard = self.shards[0]
            if number not in self._rebuilt:
                self._rebuilt[number] = shard.storages[number].clone().to(device)
            made = self._rebuilt[number].as_strided(node["size"], node["stride"], node["offset"] - shard.starts[number])
        places.append((made, node))
        return made

    @property
    def _moves(self) -> bool:
        """Whether nodes that were together are apart here, or the other way round."""
        return self.joins or self.node is not None

    def _part(self, saved: Sequence[Tensor], shape: torch.Size | None, path: str, shared: bool) -> Tensor:
        """Return what of the saved tensors belongs here: the value, a row of it, or the rows of all nodes."""
        first = saved[0]
        if not self._moves or (len(saved) == 1 and (shared or not first.dim())):
            return first
        if self.joins:
            equal = all(t.shape == first.shape and _same_bits(t, first) for t in saved[1:])
            one_row = first.shape[:1] == (1,) and all(t.shape == first.shape for t in saved)
            if one_row and not shared and (shape is None or shape[:1] == (self.num_nodes,)):
                if shape is not None or not equal:
                    return torch.cat(list(saved))
            elif equal:
                return first
            else:
                raise CheckpointError(self._apart(path, ["", ""]))
        elif shape is not None and shape == first.shape:
            return first
        elif first.shape[:1] == (self.num_nodes,):
            if shape is not None and shape[:1] == (1,):
                assert self.node is not None
                return first[self.node : self.node + 1]
        else:
            return first
        raise CheckpointError(
            f"{path} may be stacked, a row for every node, or be shared by all with the same first dimension: name it "
            "in shared_state, or resume with the backend that saved it"
        )

    def _shares_alike(self, node: Mapping[str, Any], live: Tensor, alone: int | None) -> bool:
        """Whether `live` shares memory with the tensors with which the saved one did; if so, note its place."""
        if node["storage"] is None:
            return True
        places = self._places.setdefault(self._memory_of(node, alone), [])
        pointer = live.untyped_storage().data_ptr()
        apart = [saved for other, saved in places if other.untyped_storage().data_ptr() != pointer]
        if not self._moves and any(_overlap(node, saved) for saved in apart):
            return False
        places.append((live, node))
        return True

    def _view(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Tensor:
        """A view of memory that is restored elsewhere, or holds no state."""
        memory, node = self._memory[nodes[0]["of"]], nodes[0]
        if isinstance(live, Tensor) and live.untyped_storage().data_ptr() == memory.untyped_storage().data_ptr():
            return live
        if self._moves:
            raise CheckpointError(f"{path} became a view of the nodes' {node['of']} during the run; not so here")
        made = memory.detach().as_strided(node["size"], node["stride"], node["offset"])
        return nn.Parameter(made, "grad" in node) if "parameter" in node else made

    def _array(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Any:
        node, dtype = nodes[0], np.dtype(nodes[0]["dtype"])
        data = self._tensor([n["data"] for n in nodes], None, path, True, alone)
        value = np.frombuffer(data.numpy().tobytes(), dtype).reshape(node["shape"])
        if node["scalar"]:
            return value[()]
        if isinstance(live, np.ndarray) and live.shape == value.shape and live.dtype == value.dtype:
            live[...] = value
            return live
        return value.copy()

    def _generator(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Any:
        state = self._tensor([n["state"] for n in nodes], None, f"{path}.state", True, alone)
        stream = live if isinstance(live, torch.Generator) and self._free(live) else torch.Generator()
        try:
            stream.set_state(state)
        except (RuntimeError, TypeError) as error:
            raise CheckpointError(
                f"{path}: a generator's state does not fit one on {stream.device}: {error}"
            ) from error
        return stream

    def _random(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Any:
        self._check_class(nodes[0]["is"], live, path)
        _set_random_state(live, self._value([n["state"] for n in nodes], _ABSENT, f"{path}.state", True, alone))
        return live

    # Containers

    def _list(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Any:
        columns = self._columns(nodes, live, path, shared, alone)
        made = live if type(live) is list and self._free(live) else []
        self._made[path] = made
        old = list(made)
        made[:] = [
            self._value(own, old[i] if i < len(old) else _ABSENT, f"{path}[{i}]", shared, node)
            for i, (own, node) in enumerate(columns)
        ]
        return made

    def _columns(
        self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None
    ) -> list[tuple[list[Node], int | None]]:
        """Return the nodes of every item to be here, and the shard that it is from if it belongs to one node."""
        lists = [node["items"] for node in nodes]
        here = len(live) if type(live) in (list, tuple) else None
        if self._moves and not shared and alone is None and self.num_nodes > 1 and here is not None:
            counts = {len(items) for items in lists}
            items = [item for own in lists for item in own]
            # Such as a generator or an optimizer for every node.
            each = all(isinstance(item, dict) and item.get("kind") not in ("tensor", "view", "array") for item in items)
            spread = self.joins and counts == {1} and here == self.num_nodes
            narrowed = not self.joins and counts == {self.num_nodes} and here == 1
            if each and spread:
                return [([own[0]], node) for node, own in enumerate(lists)]
            if each and narrowed:
                assert self.node is not None
                return [([lists[0][self.node]], 0)]
            if spread or narrowed:
                raise CheckpointError(
                    f"{path} has an entry for each of {self.num_nodes} nodes, or by chance as many: name it in "
                    "shared_state, or keep what is each node's own in stacked tensors"
                )
        if len({len(items) for items in lists}) > 1:
            raise CheckpointError(self._apart(path, ["", ""]))
        return [(list(own), alone) for own in zip(*lists, strict=True)]

    def _tuple(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Any:
        old = live if isinstance(live, tuple) else ()
        columns = self._columns(nodes, live, path, shared, alone)
        items = [
            self._value(own, old[i] if i < len(old) else _ABSENT, f"{path}[{i}]", shared, node)
            for i, (own, node) in enumerate(columns)
        ]
        return torch.Size(items) if type(live) is torch.Size else tuple(items)

    def _record(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Any:
        if not isinstance(live, tuple) or len(live) != len(nodes[0]["items"]):
            raise CheckpointError(f"{path} was a named tuple, and is {self._shown(live)} here")
        items = self._tuple(nodes, tuple(live), path, shared, alone)
        return type(live)(*items)

    def _deque(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Any:
        items = self._list(nodes, _ABSENT, path, shared, alone)
        if not isinstance(live, collections.deque):
            return collections.deque(items, nodes[0]["maxlen"])
        live.clear()
        live.extend(items)
        return live

    def _set(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Any:
        items = set(self._list(nodes, _ABSENT, path, True, alone))
        if not isinstance(live, set):
            return items
        live.clear()
        live.update(items)
        return live

    def _frozenset(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Any:
        return frozenset(self._list(nodes, _ABSENT, path, True, alone))

    def _dict(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Any:
        made = live if isinstance(live, dict) and self._free(live) else {}
        self._made[path] = made
        old = dict(made)
        made.clear()
        keys = [[_key(key) for key, _ in node["items"]] for node in nodes]
        if any(own != keys[0] for own in keys):
            raise CheckpointError(self._apart(path, ["", ""]))
        for i, key in enumerate(keys[0]):
            own = [node["items"][i][1] for node in nodes]
            made[key] = self._value(own, old.get(key, _ABSENT), f"{path}[{key!r}]", shared, alone)
        return made

    # Objects

    def _check_class(self, saved: str | None, live: Any, path: str) -> None:
        if live is _ABSENT:
            raise CheckpointError(f"{path} was made during the run, so that it is not there to be filled")
        if saved is not None and _name_of(type(live)) != saved:
            raise CheckpointError(f"{path} was a {saved}, and is {self._shown(live)} here")
        if not self._free(live):
            raise CheckpointError(f"{path} was an object of its own when it was saved, and is not here")

    def _free(self, live: Any) -> bool:
        """Whether something here has not been filled yet; it is then."""
        free = id(live) not in self._used
        self._used[id(live)] = live
        return free

    def _object(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Any:
        self._check_class(nodes[0]["class"], live, path)
        self._made[path] = live
        old = attributes_of(live) or {}
        names = nodes[0]["items"].keys()
        if any(node["items"].keys() != names for node in nodes):
            raise CheckpointError(self._apart(path, ["", ""]))
        declared = getattr(type(live), "shared_state", ()) if isinstance(live, Stateful) else ()
        state = {
            name: self._value(
                [node["items"][name] for node in nodes],
                old.get(name, _ABSENT),
                f"{path}.{name}",
                shared or name in declared,
                alone,
            )
            for name in names
        }
        if _speaks_for_itself(live) or isinstance(live, Stateful):
            live.load_state_dict(state)
        else:
            for name in old.keys() - state.keys():
                object.__delattr__(live, name)
            for name, value in state.items():
                if value is not old.get(name, _ABSENT):
                    object.__setattr__(live, name, value)
        return live

    def _partial(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Any:
        if not isinstance(live, functools.partial):
            raise CheckpointError(f"{path} was a functools.partial, and is {self._shown(live)} here")
        there = [list(live.args), dict(live.keywords)]
        args, keywords = self._value([n["items"] for n in nodes], there, f"{path}()", shared, alone)
        return functools.partial(live.func, *args, **keywords)

    def _optimizer(self, nodes: Sequence[Node], live: Any, path: str, shared: bool, alone: int | None) -> Any:
        if not isinstance(live, Optimizer):
            raise CheckpointError(f"{path} was an optimizer, and is {self._shown(live)} here")
        self._check_class(None, live, path)
        self._made[path] = live
        parameters = [p for group in live.param_groups for p in group["params"]]
        columns = self._columns([{"items": n["parameters"]} for n in nodes], parameters, path, shared, alone)
        if len(columns) != len(parameters) or len(nodes[0]["groups"]) != len(live.param_groups):
            raise CheckpointError(f"{path} had {len(columns)} parameters, and has {len(parameters)} here")
        for i, (p, (own, node)) in enumerate(zip(parameters, columns, strict=True)):
            where = f"{path}.state[{i}]"
            if self._value([o["parameter"] for o in own], p, f"{where}.parameter", shared, node) is not p:
                raise CheckpointError(f"{where}: the parameter had another shape or place, and is {list(p.shape)} here")
            state = {}
            for key in own[0]["state"]:
                saved = [o["state"][key] for o in own]
                like = _like(saved[0], own[0]["parameter"])
                template = torch.empty_like(p, requires_grad=False) if like else _ABSENT
                state[key] = self._value(saved, template, f"{where}.{key}", shared or not like, node)
            if state or p in live.state:
                live.state[p] = state
        if self.only_state:
            return live
        for i, group in enumerate(live.param_groups):
            for key in nodes[0]["groups"][i]:
                saved = [n["groups"][i][key] for n in nodes]
                group[key] = self._value(saved, group.get(key, _ABSENT), f"{path}.{key}", True, alone)
        for name in nodes[0]["own"]:
            saved = [n["own"][name] for n in nodes]
            value = self._value(saved, getattr(live, name, _ABSENT), f"{path}.{name}", shared, alone)
            vars(live)[name] = value
        return live


def _key(key: Any) -> Any:
    return tuple(key["items"]) if isinstance(key, dict) else key


def _like(state: Node, parameter: Node) -> bool:
    """Whether a tensor of an optimizer's state is shaped as its parameter is."""
    return isinstance(state, dict) and state["kind"] == "tensor" and state["size"] == parameter["size"]


def _same_bits(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or torch.equal(
        a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    )


def _extent(tensor: Tensor) -> Mapping[str, Any]:
    return {"offset": tensor.storage_offset(), "size": list(tensor.shape), "stride": list(tensor.stride())}


def _overlap(a: Mapping[str, Any], b: Mapping[str, Any]) -> bool:
    """Whether two views of one memory have an element in common."""

    def last(node: Mapping[str, Any]) -> int:
        return int(node["offset"]) + sum((n - 1) * step for n, step in zip(node["size"], node["stride"], strict=True))

    if a["offset"] > last(b) or b["offset"] > last(a):
        return False
    if a == b or (len(a["size"]) == 1 == len(b["size"]) and a["stride"] == [1] == b["stride"]):
        return True
    start, stop = min(a["offset"], b["offset"]), max(last(a), last(b)) + 1
    seen = torch.zeros(stop - start, dtype=torch.bool)
    seen.as_strided(a["size"], a["stride"], a["offset"] - start).fill_(True)
    return bool(seen.as_strided(b["size"], b["stride"], b["offset"] - start).any())
