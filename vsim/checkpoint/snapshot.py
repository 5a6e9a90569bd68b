"""The state of a run as a tree of plain values and tensors. `vsim.checkpoint.restore` puts it back.

`Snapshot` walks from a few roots through attributes, lists and dicts. A node of its tree is None, a bool, a number or a
text, or a dict with its "kind":

    tensor   its "value", and how it is held
    array    numbers of numpy
    object   "class" and "items", [key, node] of each: containers, and all else that `parts_of` takes apart
    seen     the same object as at another "path"
    view     "of" the nodes' weights or gradients
    fixed    what "is" no state: functions, classes and the like
    each     "items": one for each of the nodes' processes, where they differ; see `merged`
"""

from __future__ import annotations

import collections
import io
import json
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vsim.cluster.collectives import Pending
from vsim.cluster.randomness import GENERATORS
from vsim.cluster.state import CheckpointError, described, name_of

Node = Any  # of a tree; its dicts have texts for keys, as JSON's do
_PLAIN = (type(None), bool, int, float, str)
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
FIXED = (*_FUNCTIONS, torch.dtype, torch.device, torch.layout, torch.memory_format, Enum, PurePath, range, slice)
CONTAINERS = (dict, list, tuple, set, frozenset, collections.deque)
# What a run that resumes can make anew; other objects must be there.
MADE: dict[str, Any] = {
    name_of(cls): cls for cls in (dict, collections.OrderedDict, list, tuple, torch.Size, set, frozenset, Pending)
}


class Snapshot:
    """The state of the objects that are reached from `roots`.

    Args:
        roots: name → object.
        known: name → object that is not part of the state but may be referred to, such as the cluster; or a tensor
            whose memory is saved under the root of this name, if there is one, and nowhere else.

    Attributes:
        tree: name → node. Its tensors share the memory of those that are saved.
        fixed: path → what is there and cannot be made anew from a tree: objects, functions.

    Raises:
        CheckpointError: something has a state that cannot be saved; it is named.
    """

    def __init__(self, roots: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        self.fixed: dict[str, str] = {}
        memory = {name: value for name, value in known.items() if isinstance(value, Tensor)}
        self._memory = {tensor.untyped_storage().data_ptr(): name for name, tensor in memory.items()}
        # With the object itself, so that no id is used twice.
        self._seen = {id(value): (name, value) for name, value in known.items() if name not in memory}
        self._storages: dict[int, int] = {}  # where memory is → its number
        self.tree: dict[str, Node] = {name: self._node(value, name) for name, value in roots.items()}

    def _node(self, value: Any, path: str) -> Node:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, FIXED):
            return {"kind": "fixed", "is": self._fix(path, described(value))}
        if id(value) in self._seen:
            return {"kind": "seen", "path": self._seen[id(value)][0]}
        if not isinstance(value, tuple | np.generic):  # nobody changes them, so that equal ones do as well
            self._seen[id(value)] = path, value
        if isinstance(value, Tensor):
            return self._tensor(value, path)
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.kind not in "biuf":
                raise CheckpointError(f"{path} is an array of {value.dtype}, which cannot be saved; only numbers are")
            scalar = isinstance(value, np.generic)
            return {"kind": "array", "numbers": value.tolist(), "dtype": value.dtype.str, "scalar": scalar}
        name, parts = name_of(type(value)), parts_of(value)
        if parts is None:
            raise CheckpointError(
                f"{path} is a {name}, whose state cannot be saved; hold tensors, numbers, lists, dicts or generators "
                "instead, or define state_dict() and load_state_dict() where it is held"
            )
        if name not in MADE:
            self._fix(path, name)
        indexed = isinstance(value, CONTAINERS)
        items = [[_key(key, path), self._node(part, part_of(path, key, indexed))] for key, part in parts.items()]
        return {"kind": "object", "class": name, "items": items}

    def _tensor(self, tensor: Tensor, path: str) -> Node:
        if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
            raise CheckpointError(
                f"{path} is a tensor of layout {tensor.layout} on {tensor.device}; only dense are saved"
            )
        pointer = tensor.untyped_storage().data_ptr()
        of = self._memory.get(pointer, path)
        if of != path and tensor.numel():
            self._fix(path, f"view of the nodes' {of}")
            return {"kind": "view", "of": of}
        return {
            "kind": "tensor",
            "value": tensor.detach().resolve_conj().resolve_neg(),
            "cpu": tensor.device.type == "cpu",
            "parameter": isinstance(tensor, nn.Parameter),
            "grad": tensor.requires_grad,
            "memory": self._storages.setdefault(pointer, len(self._storages)),
        }

    def _fix(self, path: str, what: str) -> str:
        self.fixed[path] = what
        return what


def part_of(path: str, key: Any, indexed: bool) -> str:
    """Return the path of a part of what is at `path`."""
    return f"{path}[{key!r}]" if indexed else f"{path}.{key}"


def _key(key: Any, path: str) -> Node:
    if type(key) in _PLAIN:
        return key
    if type(key) is tuple and all(type(part) in _PLAIN for part in key):
        return list(key)
    raise CheckpointError(f"{path} holds the key {key!r}; numbers, texts and tuples of them can be saved")


def merged(nodes: Sequence[Node]) -> Node:
    """Return one node of those of all processes, packed (see `vsim.checkpoint.files`): an "each" where they differ."""
    first = nodes[0]
    if len({json.dumps(node) for node in nodes}) == 1:
        return first
    if all(isinstance(node, dict) and node["kind"] == "object" for node in nodes):
        heads = {json.dumps([node["class"], [key for key, _ in node["items"]]]) for node in nodes}
        if len(heads) == 1:
            columns = zip(*(node["items"] for node in nodes), strict=True)
            return {**first, "items": [[column[0][0], merged([node for _, node in column])] for column in columns]}
    return {"kind": "each", "items": list(nodes)}


# Objects: what their parts are, and how they take them back -----------------------------------------------------------


def parts_of(value: Any) -> Mapping[Any, Any] | None:
    """Return key → part of a container, name → state of another object; None where it has none that can be found."""
    if isinstance(value, dict):
        return value
    if isinstance(value, set | frozenset):
        return dict.fromkeys(sorted(value, key=lambda item: str((type(item), item))))
    if isinstance(value, CONTAINERS):
        return dict(enumerate(value))
    if isinstance(value, Pending):
        return {"due": value.due, "result": value.arrived()}
    for kind, (read, _) in GENERATORS.items():
        if isinstance(value, kind):
            return {"state": read(value)}
    if isinstance(value, nn.Module):
        return {**_tensors_of(value), **own_attributes(value)}
    if isinstance(value, Optimizer):
        parameters = _parameters(value)
        if {id(p) for p in value.state} - {id(p) for p in parameters}:
            raise CheckpointError(f"{name_of(type(value))} keeps state for something that is none of its parameters")
        groups = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in value.param_groups]
        # One list: a parameter may be all rows, or that of a node.
        state = [{"of": p, **value.state.get(p, {})} for p in parameters]
        return {"groups": groups, "state": state, "own": attributes_of(value)}
    if all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
        state = value.state_dict()
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{name_of(type(value))}.state_dict() must return a dict, got {type(state).__name__}")
        return state
    return vars(value) if hasattr(value, "__dict__") and not isinstance(value, io.IOBase) else None


def fill(value: Any, parts: dict[Any, Any]) -> Any:
    """Let an object have the parts that `parts_of` returned of it, or of its like; return it, or what replaces it.

    Raises:
        ValueError: something that must be there has another shape.
    """
    write = next((write for kind, (_, write) in GENERATORS.items() if isinstance(value, kind)), None)
    if write is not None:
        write(value, parts["state"])
    elif isinstance(value, dict):
        value.clear()
        value.update(parts)
    elif isinstance(value, list | collections.deque):
        value.clear()
        value.extend(parts.values())
    elif isinstance(value, set | frozenset):
        return type(value)(parts)
    elif isinstance(value, tuple):
        return type(value)(parts.values()) if name_of(type(value)) in MADE else type(value)(*parts.values())
    elif isinstance(value, nn.Module):
        odd = [name for name, tensor in _tensors_of(value).items() if parts.pop(name, None) is not tensor]
        if odd:
            raise ValueError(f"{odd} had another shape or dtype")
        set_own_attributes(value, parts)
    elif isinstance(value, Optimizer):
        parameters = _parameters(value)
        if len(parameters) != len(parts["state"]) or len(value.param_groups) != len(parts["groups"]):
            raise ValueError(f"it had {len(parts['state'])} parameters, and has {len(parameters)} here")
        for i, (p, state) in enumerate(zip(parameters, parts["state"], strict=True)):
            if state.pop("of") is not p:
                raise ValueError(f"parameter {i} had another shape or place, and is {list(p.shape)} here")
            if state or p in value.state:
                value.state[p] = state
        for group, restored in zip(value.param_groups, parts["groups"], strict=True):
            group.update(restored)
        vars(value).update(parts["own"])
    elif callable(getattr(value, "load_state_dict", None)):
        value.load_state_dict(parts)
    else:
        vars(value).clear()
        vars(value).update(parts)
    return value


def attributes_of(value: nn.Module | Optimizer) -> dict[str, Any]:
    """Return name → value of what a module or optimizer has beside what every one has."""
    common = vars(nn.Module() if isinstance(value, nn.Module) else torch.optim.SGD([torch.zeros(1)])).keys()
    return {name: own for name, own in vars(value).items() if name not in common}


def own_attributes(module: nn.Module) -> dict[tuple[str, str], Any]:
    """Return (path, name) → what modules keep beside parameters and buffers: numbers, tensors, generators."""
    return {
        (path, name): value
        for path, own in module.named_modules()
        for name, value in attributes_of(own).items()
        if isinstance(value, (*_PLAIN, Tensor, np.generic, *GENERATORS)) or _is_of_plain(value)
    }


def _is_of_plain(value: Any) -> bool:
    return type(value) is tuple and all(isinstance(v, _PLAIN) or _is_of_plain(v) for v in value)


def set_own_attributes(module: nn.Module, state: Mapping[tuple[str, str], Any]) -> None:
    """Put back what `own_attributes` returned."""
    for (path, name), value in state.items():
        vars(module.get_submodule(path))[name] = value


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]
