"""The state of a run as a tree of plain values and tensors: capture, merge over processes, cut to rows, restore.

A node of the tree is None, a bool, a number or a text, or a dict with its "kind":

    tensor   "value": a list of tensors to concatenate; "rows": whether the first dimension is over the nodes
    array    numbers of NumPy
    object   "items": [key, node] of each part (see `parts_of`); "rows": whether there is one item for each node
    same     the object at another "path"
    view     a view "of" the nodes' weights or gradients
    fixed    "is": the name of something that is not state, such as a function or class
    each     "items": one for each process, for unstacked values that differ between processes

Restoring fills the objects of a run that was set up the same way. No name in the tree is imported or called.
"""

from __future__ import annotations

import collections
import functools
import io
import itertools
import json
import types
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vsim.cluster.collectives import Pending
from vsim.cluster.optimizers import JointOptimizers
from vsim.cluster.randomness import GENERATORS
from vsim.cluster.state import CheckpointError, described, name_of, placements_of, with_extra_state

Node = Any  # a node of a tree; the keys of its dicts are texts, as in JSON
_PLAIN = (type(None), bool, int, float, str)
_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
FIXED = (*_FUNCTIONS, torch.dtype, torch.device, torch.layout, torch.memory_format, Enum, PurePath, range, slice)
_LISTS = (list, tuple, collections.deque)
_SETS = (set, frozenset)
# Classes whose objects restoring can make; objects of other classes must exist.
_MADE: dict[str, Any] = {
    name_of(cls): cls for cls in (dict, collections.OrderedDict, list, tuple, torch.Size, *_SETS, Pending)
}
_ABSENT: Any = object()


class Snapshot:
    """The state of the objects that are reached from `roots`.

    Args:
        roots: name → (object, placement). Placements are "stacked"; "shared"; "rows", for a list with an item for each
            node; "parts", for a list of stacked items; and None if the placement is not declared.
        known: name → object that is not part of the state but may be referred to, such as the cluster; or name →
            tensor whose memory is saved only under the root of this name, if there is one.
        rows: R, the number of nodes held here.

    Attributes:
        tree: name → node. Its tensors share memory with the objects' tensors.
        fixed: path → description of an object that cannot be made from a tree, and must exist before restoring.

    Raises:
        CheckpointError: an object, which the message names, has state that cannot be saved.
    """

    def __init__(self, roots: Mapping[str, tuple[Any, str | None]], known: Mapping[str, Any], rows: int) -> None:
        self.fixed: dict[str, str] = {}
        self._rows = rows
        memory = {name: value for name, value in known.items() if isinstance(value, Tensor)}
        self._memory = {tensor.untyped_storage().data_ptr(): name for name, tensor in memory.items()}
        # Keep the objects themselves, so that no id is reused.
        self._seen = {id(value): (name, value) for name, value in known.items() if name not in memory}
        self._storages: dict[int, str] = {}  # address of memory → path of the first tensor there
        self.tree: dict[str, Node] = {name: self._node(value, name, where) for name, (value, where) in roots.items()}

    def _node(self, value: Any, path: str, placement: str | None) -> Node:
        if type(value) in _PLAIN:
            return value
        if isinstance(value, FIXED):
            return {"kind": "fixed", "is": self._fix(path, described(value))}
        if id(value) in self._seen:
            return {"kind": "same", "path": self._seen[id(value)][0]}
        if not isinstance(value, tuple | np.generic):  # immutable values may be saved twice
            self._seen[id(value)] = path, value
        if isinstance(value, Tensor):
            return self._tensor(value, path, placement)
        if isinstance(value, np.ndarray | np.generic):
            if value.dtype.kind not in "biuf":
                raise CheckpointError(f"{path} is an array of {value.dtype}, which cannot be saved; only numbers are")
            scalar = isinstance(value, np.generic)
            return {"kind": "array", "numbers": value.tolist(), "dtype": value.dtype.str, "scalar": scalar}
        name, parts = name_of(type(value)), parts_of(value, path)
        if name not in _MADE:
            self._fix(path, name)
        of_nodes = isinstance(value, _LISTS) and len(value) == self._rows and not any(map(torch.is_tensor, value))
        rows = placement == "rows" or (placement == "stacked" and of_nodes)
        inner, own = "stacked" if placement == "parts" else placement, _declared(value)
        if isinstance(value, Optimizer) and placement == "stacked":
            by_node = not all(len(p) in (1, self._rows) for p in _parameters(value) if p.dim())
            own = {"groups": "shared", "state": "rows" if by_node else "parts", "own": "shared"}
        items = [
            [_key(key, path), self._node(part, part_of(value, path, key), "shared" if rows else own.get(key, inner))]
            for key, part in parts.items()
        ]
        return {"kind": "object", "class": name, "items": items, "rows": rows}

    def _tensor(self, tensor: Tensor, path: str, placement: str | None) -> Node:
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
            "value": [tensor.detach().resolve_conj().resolve_neg()],
            "rows": placement == "stacked" and tensor.dim() > 0,
            "cpu": tensor.device.type == "cpu",
            "parameter": isinstance(tensor, nn.Parameter),
            "grad": tensor.requires_grad,
            "memory": self._storages.setdefault(pointer, path),
        }

    def _fix(self, path: str, what: str) -> str:
        self.fixed[path] = what
        return what


def _declared(value: Any) -> Mapping[Any, str]:
    """Return name → placement for the parts of an object that declare their own placement."""
    return {"optimizers": value.placement} if isinstance(value, JointOptimizers) else placements_of(value)


def part_of(value: Any, path: str, key: Any) -> str:
    """Return the path of a part of the value at `path`."""
    return f"{path}[{key!r}]" if isinstance(value, (dict, *_LISTS)) else f"{path}.{key}"


def _key(key: Any, path: str) -> Node:
    if type(key) in _PLAIN:
        return key
    if type(key) is tuple and all(type(part) in _PLAIN for part in key):
        return list(key)
    raise CheckpointError(f"{path} holds the key {key!r}; numbers, texts and tuples of them can be saved")


# Rows -----------------------------------------------------------------------------------------------------------------


def merged(nodes: Sequence[Node]) -> Node:
    """Merge the packed nodes of all processes (see `vsim.checkpoint.files`) into one node, with rows in order."""
    first = nodes[0]
    if all(isinstance(node, dict) and node["kind"] == first["kind"] for node in nodes) and "rows" in first:
        if all(node["rows"] for node in nodes):
            field = "value" if first["kind"] == "tensor" else "items"
            return {**first, field: [part for node in nodes for part in node[field]]}
        alike = first["kind"] == "object" and len({json.dumps(node["class"]) for node in nodes}) == 1
        if alike and len({json.dumps([key for key, _ in node["items"]]) for node in nodes}) == 1:
            columns = zip(*(node["items"] for node in nodes), strict=True)
            return {**first, "items": [[column[0][0], merged([node for _, node in column])] for column in columns]}
    return first if len({json.dumps(node) for node in nodes}) == 1 else {"kind": "each", "items": list(nodes)}


def cut(node: Node, rows: Sequence[int], held: Sequence[int]) -> Node:
    """Cut the stacked values of a node to these rows. The rows of one process also get that process's own values.

    Args:
        held: the number of rows that each process held.
    """
    if not isinstance(node, dict):
        return node
    if node["kind"] == "each":
        own = [i for i, end in enumerate(itertools.accumulate(held)) if [*rows] == [*range(end - held[i], end)]]
        return cut(node["items"][own[0]], range(len(rows)), [len(rows)]) if own else node
    if node["kind"] == "tensor" and node["rows"]:
        parts = node["value"]
        if sum(map(len, parts)) < sum(held):  # equal nodes share one row
            return {**node, "value": parts[:1]}
        if list(rows) == list(range(sum(held))):
            return node
        of_nodes = [row for part in parts for row in part.split(1)]
        return {**node, "value": [of_nodes[row] for row in rows] if len(parts) > 1 else [parts[0][list(rows)]]}
    if node["kind"] == "object":
        items = node["items"]
        if node["rows"]:
            return {**node, "items": [[i, items[r if len(items) > 1 else 0][1]] for i, r in enumerate(rows)]}
        return {**node, "items": [[key, cut(item, rows, held)] for key, item in items]}
    return node


def objects_in(node: Node) -> Iterator[Node]:
    """Yield the nodes of all objects in a tree."""
    if isinstance(node, dict) and node["kind"] == "object":
        yield node
        for _, item in node["items"]:
            yield from objects_in(item)


# Restoring ------------------------------------------------------------------------------------------------------------


class Restorer:
    """Writes a tree, cut to the rows held here, into the objects of a run that was set up the same way.

    Args:
        known: see `Snapshot`. New tensors are made on the device of its "weights", unless they were saved from the CPU.
        moved: whether the state was saved by other rows or another number of processes. Undeclared state must then be a
            number or unchanged since the setup, because nothing says which nodes it belongs to.

    Raises:
        CheckpointError: a saved value does not fit the existing object.
    """

    def __init__(self, known: Mapping[str, Any], moved: bool) -> None:
        self._made = dict(known)  # path → restored object
        self._moved = moved
        self._written: dict[int, str] = {}  # address of memory here → saved memory

    def root(self, node: Node, live: Any, name: str, placement: str | None) -> Any:
        """Write the node of a root into `live`; return `live`, or the object that replaces it."""
        return self._restore(node, live, name, self._moved and placement is None)

    def _restore(self, node: Node, live: Any, path: str, free: bool, rows: int | None = None) -> Any:
        """Write a node into `live`; return `live`, or the object that replaces it.

        Args:
            free: whether the placement is unknown, so that the node must equal `live`.
            rows: for state that a new optimizer lacks, the number of rows of its parameter.
        """
        if free and not _unchanged(node, live):
            raise _undeclared(path)
        if not isinstance(node, dict):
            return node
        match node["kind"]:
            case "tensor":
                restored: Any = self._tensor(node, live, rows)
            case "object":
                restored = self._object(node, live, path, free, rows)
            case "array":
                restored = _array(node)
            case "same":
                restored = self._made.get(node["path"], live)
                if restored is _ABSENT:
                    raise CheckpointError(f"{path} was the same object as {node['path']}, which is not there here")
            case "view":  # its memory is restored elsewhere, or holds no state
                memory, restored = self._made[node["of"]].untyped_storage(), live
                if not isinstance(live, Tensor) or live.untyped_storage().data_ptr() != memory.data_ptr():
                    raise _misfit(path, f"a view of the nodes' {node['of']}", live)
            case "fixed":
                restored = live
                if not isinstance(live, FIXED) or described(live) != node["is"]:
                    raise _misfit(path, node["is"], live)
            case "each":
                raise _differs(path, node["items"])
            case kind:
                raise ValueError(f"{path} is of an unknown kind, {kind!r}")
        self._made[path] = restored
        return restored

    def _tensor(self, node: Node, live: Any, rows: int | None) -> Tensor:
        value = _joined(node)
        here = len(live) if isinstance(live, Tensor) and live.dim() else rows
        if node["rows"] and here is not None and here != len(value) and 1 in (here, len(value)):
            value = value[:1].expand(here, *value.shape[1:])  # equal nodes share one row in the checkpoint or here
        fits = isinstance(live, Tensor) and live.shape == value.shape and live.dtype == value.dtype
        alike = fits and isinstance(live, nn.Parameter) == node["parameter"]
        if alike and (live.device.type == "cpu") == node["cpu"] and self._is_free(live, node["memory"]):
            with torch.no_grad():
                return live.copy_(value)
        made = value.to("cpu" if node["cpu"] else self._made["weights"].device, copy=True)
        return nn.Parameter(made, node["grad"]) if node["parameter"] else made.requires_grad_(node["grad"])

    def _is_free(self, live: Tensor, memory: str) -> bool:
        """Return whether `live` can be written to: its memory does not hold values of another saved tensor already."""
        if any(n > 1 and step == 0 for n, step in zip(live.shape, live.stride(), strict=True)):  # `live` is expanded
            return False
        return not live.numel() or self._written.setdefault(live.untyped_storage().data_ptr(), memory) == memory

    def _object(self, node: Node, live: Any, path: str, free: bool, rows: int | None) -> Any:
        name, items = node["class"], node["items"]
        cls, same = _MADE.get(name), name_of(type(live)) == name
        if cls is None and not same:
            raise _misfit(path, f"a {name}", live)
        target = live if cls in (None, Pending) else cls()
        self._made[path] = target  # its parts may refer to it
        old, declared = parts_of(live, path) if same else {}, _declared(live)
        if node["rows"] and len(old) == 1:  # equal nodes share one item
            items = items[:1]
        keys = [tuple(key) if isinstance(key, list) else key for key, _ in items]
        container = isinstance(target, (dict, *_LISTS, *_SETS))
        if free and container and [*old] != keys:
            raise _undeclared(path)
        parts = {}
        for key, (_, own) in zip(keys, items, strict=True):
            given = key in declared or (not container and _is_number(own))
            there = old.get(key, _ABSENT)
            parts[key] = self._restore(own, there, part_of(target, path, key), free and not given, rows)
            if key == "of" and torch.is_tensor(parts[key]) and parts[key].dim():  # the state's parameter
                rows = len(parts[key])
        if cls is Pending:
            return Pending(self._made["collectives"], int(parts["due"]), lambda: parts["result"])
        try:
            return fill(target, parts)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be filled with what was saved: {error}") from error


def _is_number(node: Node) -> bool:
    return not isinstance(node, dict) or (node["kind"] == "tensor" and not node["value"][0].dim())


def _joined(node: Node) -> Tensor:
    parts: list[Tensor] = node["value"]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def _array(node: Node) -> Any:
    numbers = np.array(node["numbers"], node["dtype"])
    return numbers[()] if node["scalar"] else numbers


def _unchanged(node: Node, live: Any) -> bool:
    """Return whether a node without parts is equal to the live value."""
    if not isinstance(node, dict):
        return type(node) is type(live) and (node == live or (node != node and live != live))
    if node["kind"] == "tensor":
        value = _joined(node)
        same = isinstance(live, Tensor) and live.dtype == value.dtype
        return same and torch.equal(live.detach().cpu(), value.cpu())
    return node["kind"] != "array" or np.array_equal(_array(node), live)


def _misfit(path: str, was: str, live: Any) -> CheckpointError:
    made = "not there to be filled, as it was made during the run"
    return CheckpointError(f"{path} was {was}, and is {made if live is _ABSENT else f'a {name_of(type(live))} here'}")


def _undeclared(path: str) -> CheckpointError:
    return CheckpointError(
        f"{path} has changed since the setup and is not declared, so that nothing says which nodes it belongs to: "
        "declare it in the setup, with self.keep_stacked() or self.keep_shared(), or resume with the backend and the "
        "number of processes that saved it"
    )


def _differs(path: str, items: Sequence[Node]) -> CheckpointError:
    plain = not any(isinstance(item, dict) for item in items)
    given = f" ({', '.join(map(repr, items[:4]))})" if plain else ""
    return CheckpointError(
        f"{path} differs between the processes that saved it{given}, so there is no one value for all nodes; resume in "
        "as many processes, or keep what is each node's own in stacked tensors"
    )


# Objects: what their parts are, and how they take them back -----------------------------------------------------------


def parts_of(value: Any, path: str) -> Mapping[Any, Any]:
    """Return key → item of a container, or name → state of another object.

    Raises:
        CheckpointError: the state of the object cannot be found.
    """
    if isinstance(value, dict):
        return value
    if isinstance(value, _LISTS):
        return dict(enumerate(value))
    if isinstance(value, _SETS):
        return dict.fromkeys(sorted(value, key=lambda item: str((type(item), item))))
    if isinstance(value, Pending):
        return {"due": value.due, "result": value.arrived()}
    if isinstance(value, tuple(GENERATORS)):
        return {"state": _generator(value)[0](value)}
    if isinstance(value, nn.Module):
        return {**tensors_of(value), **{f"{p} state": m.get_extra_state() for p, m in with_extra_state(value)}}
    if isinstance(value, JointOptimizers):
        return {"optimizers": value.optimizers}
    name = name_of(type(value))
    if isinstance(value, Optimizer):
        parameters = _parameters(value)
        if {id(p) for p in value.state} - {id(p) for p in parameters}:
            raise CheckpointError(f"{path}: {name} keeps state for something that is none of its parameters")
        groups = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in value.param_groups]
        own = {k: v for k, v in vars(value).items() if k not in _common_attributes()}
        return {"groups": groups, "state": [{"of": p, **value.state.get(p, {})} for p in parameters], "own": own}
    if all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
        state = value.state_dict()
        if not isinstance(state, Mapping):
            raise CheckpointError(f"{path}: {name}.state_dict() must return a dict, got {type(state).__name__}")
        return state
    if not hasattr(value, "__dict__") or isinstance(value, io.IOBase):
        raise CheckpointError(
            f"{path} is a {name}, whose state cannot be saved; hold tensors, numbers, lists, dicts or generators "
            "instead, or define state_dict() and load_state_dict() where it is held"
        )
    return vars(value)


def fill(value: Any, parts: dict[Any, Any]) -> Any:
    """Set the parts of an object, in the form of `parts_of`; return the object, or the object that replaces it.

    Raises:
        ValueError: an existing part has another shape.
    """
    if isinstance(value, tuple):
        return type(value)(parts.values()) if name_of(type(value)) in _MADE else type(value)(*parts.values())
    if isinstance(value, _SETS):
        return type(value)(parts)
    if isinstance(value, dict):
        value.clear()
        value.update(parts)
    elif isinstance(value, list | collections.deque):
        value.clear()
        value.extend(parts.values())
    elif isinstance(value, tuple(GENERATORS)):
        _generator(value)[1](value, parts["state"])
    elif isinstance(value, nn.Module):
        odd = [name for name, tensor in tensors_of(value).items() if parts[name] is not tensor]
        if odd:
            raise ValueError(f"{odd} had another shape or dtype")
        for path, module in with_extra_state(value):
            module.set_extra_state(parts[f"{path} state"])
    elif isinstance(value, JointOptimizers):
        if len(parts["optimizers"]) != len(value.optimizers):
            raise ValueError(f"there were {len(parts['optimizers'])} optimizers, and are {len(value.optimizers)} here")
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


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return name → parameter or buffer, including non-persistent buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


def _generator(value: Any) -> tuple[Any, Any]:
    """Return the functions that read and write the state of a random generator."""
    return next(both for kind, both in GENERATORS.items() if isinstance(value, kind))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


@functools.cache
def _common_attributes() -> frozenset[str]:
    """Return the names of the attributes that every optimizer has."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)])))
