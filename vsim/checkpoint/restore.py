"""Restoring the state of a run: a tree of `vsim.checkpoint.snapshot`, into the objects of a run that was set up anew.

`Restorer` walks these objects as `Snapshot` did, and writes the saved values into the tensors that are there. Nothing
is imported or called by a name from the tree: objects must be there already.

The nodes of a run may be held together, as rows of stacked tensors, or apart, one row in each process. A tree that was
taken one way can be restored the other way: stacked values are cut into rows or put together, shared values must be
equal. The placement of a value is declared (see `vsim.cluster.state.Stateful`), or inferred from the shapes in the run
that was set up.
"""

from __future__ import annotations

import collections
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vsim.checkpoint.snapshot import FIXED, GENERATORS, SEQUENCES, Node, Shard, fill, flat_bytes, state_of
from vsim.cluster.collectives import Pending
from vsim.cluster.state import CheckpointError, described, name_of, placements_of

Saved = Sequence[tuple[Shard, Node]]  # one value, as it was in each of the processes that hold a part of it
_ABSENT: Any = object()


class Restorer:
    """Writes saved values into the objects of a run that was set up anew.

    Args:
        shards: one, from a run whose nodes are held as here; one of every node, if they were apart and are together
            here; or the one of all, if they were together and are apart here.
        node: the node held here, where that is one of several that were saved together; else None.
        num_nodes: K.
        known, memory: as of `Snapshot`.
        device: where tensors that are made anew go, if they were not on the CPU.

    Raises:
        CheckpointError: a saved value does not fit the object that is there.
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
        self.moves = len(shards) > 1 or node is not None  # between nodes together and nodes apart
        self._shards, self._node, self._num_nodes = shards, node, num_nodes
        self._memory, self._device = memory, device
        self._made = dict(known)  # path → what was restored
        self._written: dict[int, int] = {}  # where a tensor begins here → number of the memory that was saved

    def restore(self, name: str, live: Any, placement: str | None = None) -> Any:
        """Write the state of the root `name` into `live`; return it, or what replaces it.

        Args:
            placement: "stacked" or "shared"; None: told from shapes, or declared by what is met on the way.
        """
        try:
            saved = [(shard, shard.tree[name]) for shard in self._shards]
        except KeyError:
            raise CheckpointError(f"the checkpoint holds no {name}") from None
        return self._value(saved, live, name, placement)

    def _value(self, saved: Saved, live: Any, path: str, placement: str | None) -> Any:
        node = saved[0][1]
        if not isinstance(node, dict):
            if any(type(n) is not type(node) or (n != node and n == n) for _, n in saved):
                raise _differs(path, f" ({', '.join(repr(n) for _, n in saved[:4])})")
            return node
        if any(not isinstance(n, dict) or n["kind"] != node["kind"] for _, n in saved):
            raise _differs(path)
        self._made[path] = restored = _KINDS[node["kind"]](self, saved, live, path, placement)
        return restored

    def _seen(self, saved: Saved, live: Any, path: str, placement: str | None) -> Any:
        made = self._made.get(saved[0][1]["path"], live)
        if made is _ABSENT:
            raise CheckpointError(f"{path} was the same object as {saved[0][1]['path']}, which is not there here")
        return made

    def _fixed(self, saved: Saved, live: Any, path: str, placement: str | None) -> Any:
        if not isinstance(live, FIXED) or described(live) != saved[0][1]["is"]:
            raise CheckpointError(f"{path} was {saved[0][1]['is']}, and is {_shown(live)} here")
        return live

    # Tensors

    def _tensor(self, saved: Saved, live: Any, path: str, placement: str | None) -> Tensor:
        node, shape = saved[0][1], live.shape if isinstance(live, Tensor) else None
        value = self._part([shard.tensors[n["at"]] for shard, n in saved], shape, path, placement)
        if shape == value.shape and live.dtype == value.dtype:
            alike = isinstance(live, nn.Parameter) == node["parameter"] and (live.device.type == "cpu") == node["cpu"]
            if alike and self._is_free(live, node["memory"]):
                with torch.no_grad():
                    return live.copy_(value)
        made = value.clone().to("cpu" if node["cpu"] else self._device)
        return nn.Parameter(made, node["grad"]) if node["parameter"] else made.requires_grad_(node["grad"])

    def _is_free(self, live: Tensor, memory: int) -> bool:
        """Whether `live` can be written to: what was apart does not meet in one tensor that a setup gave two names."""
        if any(n > 1 and step == 0 for n, step in zip(live.shape, live.stride(), strict=True)):  # it is expanded
            return False
        return not live.numel() or self._written.setdefault(live.data_ptr(), memory) == memory

    def _part(self, parts: list[Tensor], shape: torch.Size | None, path: str, placement: str | None) -> Tensor:
        """Return what of saved tensors belongs here: the value, a row of it, or the rows of all nodes.

        Args:
            shape: of the tensor that is there.
        """
        first = parts[0]
        if not self.moves or (len(parts) == 1 and placement == "shared"):
            return first
        placement = "shared" if not first.dim() else placement or self._placement(parts, shape, path)
        if placement == "shared":
            if not all(_equal(part, first) for part in parts):
                raise _differs(path)
            return first
        rows = torch.cat(parts)
        if self._node is not None and len(rows) > 1:
            rows = rows[self._node : self._node + 1]
        one = shape is not None and shape[:1] == (1,) and _equal(rows, rows[:1].expand_as(rows))
        return rows[:1] if one else rows

    def _placement(self, parts: list[Tensor], shape: torch.Size | None, path: str) -> str:
        """Return whether an undeclared value is stacked or shared: by its shape after the setup."""
        saved, here = (1, self._num_nodes) if len(parts) > 1 else (self._num_nodes, 1)
        first = parts[0].shape
        if shape == first or first[0] != saved:
            return "shared"
        if shape is not None and shape[:1] == (here,):
            return "stacked"
        raise CheckpointError(
            f"{path} may be stacked, a row for each node, or be shared by all with the same first dimension: declare "
            "it in the setup, with self.keep_stacked() or self.keep_shared(), or resume with the backend that saved it"
        )

    def _view(self, saved: Saved, live: Any, path: str, placement: str | None) -> Any:
        """A view, which the setup has made, of memory that is restored elsewhere or holds no state."""
        memory = self._memory[saved[0][1]["of"]].untyped_storage().data_ptr()
        if not isinstance(live, Tensor) or live.untyped_storage().data_ptr() != memory:
            raise CheckpointError(f"{path} was a view of the nodes' {saved[0][1]['of']}, and is {_shown(live)} here")
        return live

    def _array(self, saved: Saved, live: Any, path: str, placement: str | None) -> Any:
        if any(repr(n) != repr(saved[0][1]) for _, n in saved):
            raise _differs(path)
        value = np.array(saved[0][1]["items"], saved[0][1]["dtype"])
        return value[()] if saved[0][1]["scalar"] else value

    def _pending(self, saved: Saved, live: Any, path: str, placement: str | None) -> Pending:
        results = [(shard, n["result"]) for shard, n in saved]
        result, due = self._value(results, _ABSENT, path, placement), int(saved[0][1]["due"])
        return Pending(self._made["collectives"], due, lambda: result)

    # Containers and objects

    def _sequence(self, saved: Saved, live: Any, path: str, placement: str | None) -> Any:
        kind = saved[0][1]["class"]
        old = list(live) if isinstance(live, list | tuple | collections.deque) else []
        self._made[path] = made = []
        for i, (column, own) in enumerate(self._columns(saved, old, path, placement)):
            made.append(self._value(column, old[i] if i < len(old) else _ABSENT, f"{path}[{i}]", own))
        if kind in SEQUENCES:
            return made if kind == "list" else SEQUENCES[kind](made)
        _check_class(kind, live, path)
        if isinstance(live, tuple):
            return type(live)(*made)
        live.clear()
        live.extend(made)
        return live

    def _columns(
        self, saved: Saved, old: Sequence[Any], path: str, placement: str | None
    ) -> list[tuple[Saved, str | None]]:
        """Return every item that is to be here, and its placement: one of a single node is as it was there."""
        lists = [(shard, n["items"]) for shard, n in saved]
        counts = {len(items) for _, items in lists}
        first, items = lists[0]
        spreads = len(lists) > 1 and counts == {1} and len(old) == self._num_nodes
        narrows = self._node is not None and counts == {self._num_nodes} and len(old) == 1
        if (spreads or narrows) and placement != "shared" and self._num_nodes > 1:
            kinds = {item["kind"] if isinstance(item, dict) else "plain" for item in items}
            if not kinds & {"tensor", "view", "array"} and (placement == "stacked" or "plain" not in kinds):
                # Such as a generator or an optimizer for each node.
                own = [(shard, of_node[0]) for shard, of_node in lists]
                return [([item], "shared") for item in (own if spreads else [(first, items[self._node or 0])])]
            if placement is None:
                raise CheckpointError(
                    f"{path} has an item for each of {self._num_nodes} nodes, or by chance as many: declare it in the "
                    "setup, with self.keep_stacked() or self.keep_shared()"
                )
        if len(counts) > 1:
            raise _differs(path)
        return [([(shard, own[i]) for shard, own in lists], placement) for i in range(len(items))]

    def _dict(self, saved: Saved, live: Any, path: str, placement: str | None) -> Any:
        self._made[path] = made = {}
        old = live if isinstance(live, dict) else {}
        keys = [key for key, _ in saved[0][1]["items"]]
        if any([key for key, _ in n["items"]] != keys for _, n in saved):
            raise _differs(path)
        for i, saved_key in enumerate(keys):
            key = tuple(saved_key) if isinstance(saved_key, list) else saved_key
            own = [(shard, n["items"][i][1]) for shard, n in saved]
            made[key] = self._value(own, old.get(key, _ABSENT), f"{path}[{key!r}]", placement)
        if type(live) is dict or not isinstance(live, dict):
            return made
        live.clear()
        live.update(made)
        return live

    def _object(self, saved: Saved, live: Any, path: str, placement: str | None) -> Any:
        first = saved[0][1]
        _check_class(first["class"], live, path)
        if any(n["items"].keys() != first["items"].keys() for _, n in saved):
            raise _differs(path)
        self._made[path] = live
        old, declared = state_of(live) or {}, placements_of(live)
        state = {}
        for name in first["items"]:
            own = [(shard, n["items"][name]) for shard, n in saved]
            placed = "shared" if isinstance(live, tuple(GENERATORS)) else declared.get(name, placement)
            state[name] = self._value(own, old.get(name, _ABSENT), f"{path}.{name}", placed)
        try:
            fill(live, state)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be filled with what was saved: {error}") from error
        return live


_KINDS: dict[str, Callable[[Restorer, Saved, Any, str, str | None], Any]] = {
    "seen": Restorer._seen,
    "fixed": Restorer._fixed,
    "tensor": Restorer._tensor,
    "view": Restorer._view,
    "array": Restorer._array,
    "pending": Restorer._pending,
    "sequence": Restorer._sequence,
    "dict": Restorer._dict,
    "object": Restorer._object,
}


def _check_class(saved: str, live: Any, path: str) -> None:
    if live is _ABSENT:
        raise CheckpointError(f"{path} was made during the run, so that it is not there to be filled")
    if name_of(type(live)) != saved:
        raise CheckpointError(f"{path} was a {saved}, and is {_shown(live)} here")


def _equal(a: Tensor, b: Tensor) -> bool:
    """Whether tensors are bitwise equal, NaN included."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    return torch.equal(a, b) or torch.equal(flat_bytes(a), flat_bytes(b))


def _shown(live: Any) -> str:
    return "absent" if live is _ABSENT else f"a {name_of(type(live))}"


def _differs(path: str, given: str = "") -> CheckpointError:
    return CheckpointError(
        f"{path} differs between the nodes' processes{given}, so the simulator has no one value for it; resume "
        "with backend='process', or keep what is each node's own in stacked tensors"
    )
