"""The state of a run put back: a tree that `vsim.cluster.state` took, into the objects of a run that was set up anew.

`Restorer` walks these objects as `Snapshot` did, and writes what was saved into them: into the tensors that are there,
so that what shares their memory follows. Nothing is imported or called by a name from the tree: objects must be there
already.

The nodes of a run may be held together, as rows of stacked tensors, or apart, one row in each process. A tree that was
taken one way can be put back the other way: rows are cut out, or put together. What is stacked is told from the shapes
that the objects have when they are set up.
"""

from __future__ import annotations

import collections
import functools
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from vsim.cluster.state import (
    FIXED,
    CheckpointError,
    Node,
    Shard,
    Stateful,
    attributes_of,
    described,
    name_of,
    speaks_for_itself,
)

_ABSENT: Any = object()


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


def _set_random_state(value: Any, state: Any) -> None:
    if isinstance(value, random.Random):
        value.setstate(state)
    elif isinstance(value, np.random.Generator):
        value.bit_generator.state = state
    else:
        value.set_state(state)


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
            if live is _ABSENT or not isinstance(live, FIXED) or described(live) != first["is"]:
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
        return "absent" if live is _ABSENT else f"a {name_of(type(live))}"

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
        if saved is not None and name_of(type(live)) != saved:
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
        if speaks_for_itself(live) or isinstance(live, Stateful):
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
