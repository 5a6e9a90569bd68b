"""Encode a run's state as plain values and tensors, join parts of several processes, cut out rows, and fill a run.

An encoded value is None, a bool, a number, a text, a tensor, a list of encoded values, or a dict with a
single item, kind → content:

    tuple, set, frozenset, deque   items
    dict, OrderedDict, Counter     pairs of key and value
    nodes        an item for each node
    array        a NumPy array's dtype, its numbers, and whether it is a scalar
    generator    the state of a random generator
    optimizer    class, groups, attributes and state of a torch optimizer
    joint        the optimizers of a joint optimizer
    module       tensors by name, and extra states by path, of a torch module
    object       the `state_dict()` of another object
    pending      the step at which a collective is due, and its result
    each         a value for each process, where the values differ

Values are encoded as "stacked", where the first dimension of tensors is over the nodes, or as "shared". Filling writes
to existing tensors, generators, optimizers, modules and objects, and never imports or calls what encoded state names.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vsim.cluster.collectives import Collectives, Pending
from vsim.cluster.optimizers import JointOptimizers, forget, nodes_of, stepped_tensors
from vsim.cluster.randomness import GENERATORS
from vsim.cluster.state import CheckpointError, name_of, with_extra_state
from vsim.history.describe import flat_bytes

Encoded = Any  # see the module's docstring
_PLAIN = (type(None), bool, int, float, str)
_DICTS: dict[str, Any] = {cls.__name__: cls for cls in (dict, collections.OrderedDict, collections.Counter)}
_CONTAINERS: dict[str, Any] = {cls.__name__: cls for cls in (tuple, set, frozenset, collections.deque)}
# Kind whose content may have rows → index of the content's only item with rows; None: all of the content has rows.
_WITH_ROWS: dict[str, int | None] = {
    **dict.fromkeys(("tuple", "deque", *_DICTS, "joint", "object", "pending"), None),
    **{"optimizer": 3, "module": 0},
}


def encoded(value: Any, path: str, stacked: bool = False, rows: int = 0) -> Encoded:
    """Encode a value; the encoded tensors share memory with the value's tensors.

    Args:
        path: the value's name in errors. stacked: whether tensors have a row for each of this process's `rows` nodes.

    Raises:
        CheckpointError: the value, or a part of it, cannot be saved.
    """

    def encode(value: Any, key: Any, stacked: bool = stacked) -> Encoded:
        return encoded(value, f"{path}[{key!r}]", stacked, rows)

    def items(values: Any, stacked: bool = stacked) -> list[Encoded]:
        return [encode(item, i, stacked) for i, item in enumerate(values)]

    def pairs(value: Mapping[Any, Any], stacked: bool = stacked, kind: str = "dict") -> Encoded:
        if odd := [key for key in value if not isinstance(key, (*_PLAIN, tuple))]:
            raise CheckpointError(f"{path} has the key {odd[0]!r}: numbers, texts and tuples of them can be saved")
        return {kind: [[encoded(key, f"a key of {path}"), encode(item, key, stacked)] for key, item in value.items()]}

    kind = type(value)
    if kind in _PLAIN:
        return value
    if isinstance(value, Tensor):
        if value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
            raise CheckpointError(
                f"{path} is a tensor of layout {value.layout} on {value.device}: only dense are saved"
            )
        return value.detach().resolve_conj().resolve_neg()
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biuf":
        return {"array": [value.dtype.str, value.tolist(), isinstance(value, np.generic)]}
    if _DICTS.get(kind.__name__) is kind:
        return pairs(value, stacked, kind.__name__)
    if stacked and kind in (list, tuple) and len(value) == rows and not any(map(torch.is_tensor, value)):
        return {"nodes": items(value, False)}
    if kind is list:
        return items(value)
    if _CONTAINERS.get(kind.__name__) is kind:
        ordered = sorted(value, key=lambda item: str((type(item), item))) if kind in (set, frozenset) else value
        return {kind.__name__: items(ordered)}
    if isinstance(value, Pending):
        return {"pending": [value.due, encode(value.arrived(), "result")]}
    if isinstance(value, tuple(GENERATORS)):
        return {"generator": encode(_generator(value)[0](value), "state", False)}
    if isinstance(value, JointOptimizers):
        by_node = stacked and value.placement == "rows"
        of_each = items(value.optimizers, stacked and not by_node)
        return {"joint": {"nodes": of_each} if by_node else of_each}
    if isinstance(value, Optimizer):
        parameters = _parameters(value)
        if {id(p) for p in value.state} - {id(p) for p in parameters}:
            raise CheckpointError(f"{path}: {kind.__name__} keeps state for something that is none of its parameters")
        groups = [{k: v for k, v in g.items() if k not in ("params", "param_names")} for g in value.param_groups]
        own = {k: v for k, v in vars(value).items() if k not in _common_attributes() and not callable(v)}
        by_node = stacked and not all(len(p) == rows for p in parameters if p.dim())
        states = items([dict(value.state.get(p, {})) for p in parameters], stacked and not by_node)
        facts = [name_of(kind), encode(groups, "groups", False), encode(own, "own", False)]
        return {"optimizer": [*facts, {"nodes": states} if by_node else states]}
    if isinstance(value, nn.Module):
        extra = {name: module.get_extra_state() for name, module in with_extra_state(value)}
        return {"module": [pairs(_tensors_of(value)), pairs(extra, False)]}
    if all(callable(getattr(value, method, None)) for method in ("state_dict", "load_state_dict")):
        return {"object": encode(value.state_dict(), "state_dict")}
    what = f"an array of {value.dtype}" if isinstance(value, np.ndarray) else f"a {kind.__qualname__}"
    raise CheckpointError(
        f"{path} is {what}, which cannot be saved: tensors, numbers, texts, random generators, optimizers, modules "
        "and objects with state_dict and load_state_dict are, and lists, tuples, dicts and sets of these"
    )


# Rows -----------------------------------------------------------------------------------------------------------------


def joined(parts: Sequence[Encoded], held: Sequence[int], stacked: bool) -> Encoded:
    """Join the encoded parts of one value from all processes; concatenate stacked rows in the order of the processes.

    Args:
        held: the number of rows that each process held.
    """
    first = parts[0]
    if stacked and 0 in held:  # a process without a node has a row that belongs to no node
        having = [(part, own) for part, own in zip(parts, held, strict=True) if own]
        return joined([part for part, _ in having], [own for _, own in having], True)
    if stacked and isinstance(first, Tensor) and [len(part) if _has_rows(part) else 0 for part in parts] == [*held]:
        return torch.cat([part.to(first.device) for part in parts])
    if stacked and isinstance(first, list) and all(isinstance(p, list) and len(p) == len(first) for p in parts):
        return [joined(column, held, True) for column in zip(*parts, strict=True)]
    if stacked and isinstance(first, dict) and all(isinstance(p, dict) and p.keys() == first.keys() for p in parts):
        ((kind, _),) = first.items()
        of_kind = [part[kind] for part in parts]
        if kind == "nodes" and [len(items) for items in of_kind] == [*held]:
            return {kind: [*itertools.chain(*of_kind)]}
        if kind in _WITH_ROWS:
            if (place := _WITH_ROWS[kind]) is None:
                return {kind: joined(of_kind, held, True)}
            columns = enumerate(zip(*of_kind, strict=True))
            return {kind: [joined(column, held, i == place) for i, column in columns]}
    same = all(_equal(first, part) for part in parts)
    return first if same else {"each": list(parts)}


def cut(value: Encoded, rows: Sequence[int], held: Sequence[int]) -> Encoded:
    """Cut these rows out of a stacked value. If values differ between processes, take that of the rows' process."""
    if isinstance(value, Tensor):
        whole = not value.dim() or len(value) < sum(held) or [*rows] == [*range(sum(held))]  # fewer: no rows of nodes
        return value if whole else value[list(rows)]
    if isinstance(value, list):
        return [cut(item, rows, held) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "nodes":
        return {kind: [copy.deepcopy(content[row]) for row in rows]}
    if kind not in _WITH_ROWS:
        return own_of(value, rows, held)
    if (place := _WITH_ROWS[kind]) is None:
        return {kind: cut(content, rows, held)}
    return {kind: [cut(own, rows, held) if i == place else own for i, own in enumerate(content)]}


def _has_rows(value: Encoded) -> bool:
    return isinstance(value, Tensor) and value.dim() > 0


def own_of(value: Encoded, rows: Sequence[int], held: Sequence[int]) -> Encoded:
    """Return a shared value; where processes differ, the value of the process that held exactly these rows."""
    if isinstance(value, dict) and "each" in value:
        ranges = [[*range(end - own, end)] for own, end in zip(held, itertools.accumulate(held), strict=True)]
        ranges = ranges if len(ranges) == len(value["each"]) else [own for own in ranges if own]
        return value["each"][ranges.index([*rows])] if [*rows] in ranges else value
    return value


def _equal(one: Encoded, other: Encoded) -> bool:
    """Return whether two encoded values are equal, tensors bit for bit."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape
        return same and torch.equal(flat_bytes(one.cpu()), flat_bytes(other.cpu()))
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(one[key], other[key]) for key in one)
    return bool(one == other or (one != one and other != other))


def first_rows(value: Any, made: Any, number: int) -> Any:
    """Return a stacked value with `number` rows, to be filled; if possible, the first rows of the setup's value `made`.

    Optimizers and modules are changed in place, and lose their state.
    """
    if isinstance(value, Tensor):
        same = isinstance(made, Tensor) and made.data_ptr() == value.data_ptr() and len(made) >= number
        return made[:number] if same else None
    if isinstance(value, nn.Module):
        _resize(_tensors_of(value).values(), number)
        return value
    if isinstance(value, Optimizer | JointOptimizers):
        _resize(stepped_tensors(value), number)
        forget(value)
        for nodes in nodes_of(value):
            nodes.attend()
        return value
    if isinstance(value, dict):
        return {k: first_rows(own, made.get(k) if isinstance(made, dict) else None, number) for k, own in value.items()}
    if isinstance(value, list | tuple) and any(map(torch.is_tensor, value)):
        known = made if isinstance(made, list | tuple) and len(made) == len(value) else [None] * len(value)
        return [first_rows(own, own_made, number) for own, own_made in zip(value, known, strict=True)]
    return made[:number] if isinstance(made, list | tuple) else value


def _resize(tensors: Iterable[Tensor], number: int) -> None:
    """Set the number of rows of stacked tensors and of their gradients, to at most their number in the setup."""
    for tensor in tensors:
        grad, tensor.grad = tensor.grad, None
        tensor.data = tensor.as_strided((number, *tensor.shape[1:]), tensor.stride()).data
        tensor.grad = None if grad is None else grad.as_strided((number, *grad.shape[1:]), grad.stride())


# Filling --------------------------------------------------------------------------------------------------------------


class Filler:
    """Writes encoded state into the objects of a run.

    Args:
        collectives: the run's collectives, needed by pending results. device: the device of newly made tensors.
    """

    def __init__(self, collectives: Collectives, device: torch.device) -> None:
        self._collectives, self._device = collectives, device
        self._written: dict[int, list[tuple[str, Tensor, Tensor]]] = {}  # address of memory → path, live, saved

    def fill(self, value: Encoded, live: Any, path: str) -> Any:
        """Write an encoded value, cut to this process's rows, into `live`; return `live` or its replacement.

        Raises:
            CheckpointError: `live` is not of the value's kind.
        """
        if isinstance(value, Tensor):
            return self._tensor(value, live, path)
        if isinstance(value, list):
            items = live if isinstance(live, list | tuple | collections.deque) and len(live) == len(value) else ()
            both = itertools.zip_longest(value, items)
            return [self.fill(item, own, f"{path}[{i}]") for i, (item, own) in enumerate(both)]
        if not isinstance(value, dict):
            return value
        ((kind, content),) = value.items()
        if kind == "nodes":
            return self.fill(content, live, path)
        if kind in _DICTS:
            keys, old = [self.fill(key, None, path) for key, _ in content], live if isinstance(live, Mapping) else {}
            pairs = zip(keys, content, strict=True)
            return _DICTS[kind]({k: self.fill(own, old.get(k), f"{path}[{k!r}]") for k, (_, own) in pairs})
        if kind in _CONTAINERS:
            made = _CONTAINERS[kind](self.fill(content, live, path))
            is_deque = kind == "deque" and isinstance(live, collections.deque)
            return collections.deque(made, live.maxlen) if is_deque else made
        if kind == "array":
            dtype, numbers, scalar = content
            return np.array(numbers, dtype)[()] if scalar else np.array(numbers, dtype)
        if kind == "pending":
            result = self.fill(content[1], None, path)
            return Pending(self._collectives, content[0], lambda: result)
        if kind == "each":
            raise CheckpointError(
                f"{path} differs between the processes that saved it, so that there is no one value for all nodes: "
                "resume in as many processes, or keep what is each node's own in stacked tensors"
            )
        if not isinstance(live, _FILLED[kind]) or (kind == "object" and not hasattr(live, "load_state_dict")):
            raise CheckpointError(f"{path} was a {kind}, and is a {type(live).__name__} here: make it in the setup")
        getattr(self, f"_{kind}")(content, live, path)
        return live

    def _tensor(self, value: Tensor, live: Any, path: str) -> Tensor:
        if not isinstance(live, Tensor):
            return value.to(self._device, copy=True)
        once = all(n == 1 or step for n, step in zip(live.shape, live.stride(), strict=True))
        if not once or live.shape != value.shape or live.dtype != value.dtype:
            return value.to(live.device, copy=True)
        self._written.setdefault(live.untyped_storage().data_ptr(), []).append((path, live, value))
        with torch.no_grad():
            return live.copy_(value)

    def check(self) -> None:
        """Raise a CheckpointError if tensors that were saved from separate memory share memory in this run."""
        for path, live, value in (one for own in self._written.values() if len(own) > 1 for one in own):
            if not _equal(live.detach(), value):
                raise CheckpointError(
                    f"{path} shares memory with other state after the setup, and was apart when saved"
                )

    def _generator(self, content: Encoded, live: Any, path: str) -> None:
        state = content if isinstance(content, Tensor) else self.fill(content, None, path)  # always on the CPU
        _generator(live)[1](live, state)

    def _joint(self, content: Encoded, live: JointOptimizers, path: str) -> None:
        items = content["nodes"] if isinstance(content, dict) else content
        if len(items) != len(live.optimizers):
            raise CheckpointError(f"{path} had {len(items)} optimizers, and has {len(live.optimizers)} here")
        self.fill(items, live.optimizers, path)

    def _optimizer(self, content: Encoded, live: Optimizer, path: str) -> None:
        name, groups, own, states = content
        if name != name_of(type(live)):
            raise CheckpointError(f"{path} was a {name}, and is a {name_of(type(live))} here")
        parameters = _parameters(live)
        states = states["nodes"] if isinstance(states, dict) else states
        if len(parameters) != len(states) or len(live.param_groups) != len(groups):
            raise CheckpointError(f"{path} had {len(states)} parameters, and has {len(parameters)} here")
        for p, saved in zip(parameters, states, strict=True):
            state = self.fill(saved, live.state.get(p, {}), path)
            if state or p in live.state:
                live.state[p] = state
        for group, saved in zip(live.param_groups, groups, strict=True):
            group.update(self.fill(saved, group, path))
        vars(live).update(self.fill(own, vars(live), path))

    def _module(self, content: Encoded, live: nn.Module, path: str) -> None:
        tensors, extra = _tensors_of(live), self.fill(content[1], None, path)
        for name, filled in self.fill(content[0], tensors, path).items():
            if filled is not tensors.get(name):
                raise CheckpointError(f"{path}: {name} had another shape or dtype")
        for name, module in with_extra_state(live):
            module.set_extra_state(extra[name])

    def _object(self, content: Encoded, live: Any, path: str) -> None:
        live.load_state_dict(self.fill(content, live.state_dict(), path))


_FILLED: dict[str, Any] = {
    "generator": tuple(GENERATORS),
    "joint": JointOptimizers,
    "optimizer": Optimizer,
    "module": nn.Module,
    "object": object,
}


def _generator(value: Any) -> tuple[Any, Any]:
    """Return the functions that read and write the state of a random generator."""
    return next(both for kind, both in GENERATORS.items() if isinstance(value, kind))


def _parameters(optimizer: Optimizer) -> list[Tensor]:
    return [p for group in optimizer.param_groups for p in group["params"]]


def _tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Return name → parameter or buffer, including non-persistent buffers."""
    return {**dict(module.named_parameters()), **dict(module.named_buffers())}


@functools.cache
def _common_attributes() -> frozenset[str]:
    """Return the names of the attributes that every optimizer has."""
    return frozenset(vars(torch.optim.SGD([torch.zeros(1)])))
