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
import copy
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vsim.checkpoint.snapshot import CONTAINERS, FIXED, GENERATORS, MADE, Node, fill, part_of, parts_of
from vsim.cluster.collectives import Pending
from vsim.cluster.state import CheckpointError, described, name_of, placements_of

_ABSENT: Any = object()


class Restorer:
    """Writes saved values into the objects of a run that was set up anew.

    Args:
        together: whether the nodes were saved together, as rows; if not, by a process each.
        node: the node held here; None: all are, as rows.
        num_nodes: K.
        known: as of `Snapshot`. Tensors that are made anew go where its "weights" are, if they were not on the CPU.

    Attributes:
        moves: whether values move between nodes together and nodes apart.

    Raises:
        CheckpointError: a saved value does not fit the object that is there.
    """

    def __init__(self, together: bool, node: int | None, num_nodes: int, known: Mapping[str, Any]) -> None:
        self.moves = together != (node is None)
        self._node, self._num_nodes = node, num_nodes
        self._made = dict(known)  # path → what was restored
        self._written: dict[int, int] = {}  # where a tensor begins here → number of the memory that was saved

    def restore(self, saved: Node, live: Any, path: str, placement: str | None = None) -> Any:
        """Write a node into `live`, which is at `path`; return it, or what replaces it.

        Args:
            placement: "stacked" or "shared"; None: told from shapes, or declared by what is met on the way.
        """
        if not isinstance(saved, dict):
            return saved
        match saved["kind"]:
            case "each" if self._node is not None:
                return self.restore(saved["items"][self._node], live, path, placement)
            case "each":
                restored: Any = self._tensor(_tensors(saved["items"], path), live, path, placement)
            case "tensor":
                restored = self._tensor([saved], live, path, placement)
            case "object":
                restored = self._object(saved, live, path, placement)
            case "array":
                numbers = np.array(saved["numbers"], saved["dtype"])
                restored = numbers[()] if saved["scalar"] else numbers
            case "seen":
                restored = self._made.get(saved["path"], live)
                if restored is _ABSENT:
                    raise CheckpointError(f"{path} was the same object as {saved['path']}, which is not there here")
            case "view":  # of memory that is restored elsewhere or holds no state
                memory, restored = self._made[saved["of"]].untyped_storage(), live
                if not isinstance(live, Tensor) or live.untyped_storage().data_ptr() != memory.data_ptr():
                    raise CheckpointError(f"{path} was a view of the nodes' {saved['of']}, and is {_shown(live)}")
            case "fixed":
                restored = live
                if not isinstance(live, FIXED) or described(live) != saved["is"]:
                    raise CheckpointError(f"{path} was {saved['is']}, and is {_shown(live)}")
            case kind:
                raise ValueError(f"{path} is of an unknown kind, {kind!r}")
        self._made[path] = restored
        return restored

    # Tensors

    def _tensor(self, saved: Sequence[Node], live: Any, path: str, placement: str | None) -> Tensor:
        """Restore a tensor from one node of the tree, or from one of every process where these differ."""
        node, shape = saved[0], live.shape if isinstance(live, Tensor) else None
        parts = [own["value"] for own in saved]
        value = self._part(parts, shape, path, placement) if self.moves else parts[0]
        if shape == value.shape and live.dtype == value.dtype:
            alike = isinstance(live, nn.Parameter) == node["parameter"] and (live.device.type == "cpu") == node["cpu"]
            if alike and self._is_free(live, node["memory"]):
                with torch.no_grad():
                    return live.copy_(value)
        made = value.to("cpu" if node["cpu"] else self._made["weights"].device, copy=True)
        return nn.Parameter(made, node["grad"]) if node["parameter"] else made.requires_grad_(node["grad"])

    def _is_free(self, live: Tensor, memory: int) -> bool:
        """Whether `live` can be written to: what was apart does not meet in one tensor that a setup gave two names."""
        if any(n > 1 and step == 0 for n, step in zip(live.shape, live.stride(), strict=True)):  # it is expanded
            return False
        return not live.numel() or self._written.setdefault(live.data_ptr(), memory) == memory

    def _part(self, parts: Sequence[Tensor], shape: torch.Size | None, path: str, placement: str | None) -> Tensor:
        """Return what of a saved tensor belongs here: the value, a row of it, or the rows of all nodes.

        Args:
            parts: the one value, or where they differ that of every process.
            shape: of the tensor that is there.
        """
        first = parts[0]
        placement = "shared" if not first.dim() else placement or self._inferred(first.shape, shape, path)
        if placement == "shared":
            if len(parts) > 1:
                raise _differs(path)
            return first
        if self._node is not None:
            return first[self._node : self._node + 1] if len(first) > 1 else first
        if (
            len(parts) == 1
        ):  # what the setup does not make, such as an optimizer's moments, has a row for each of weights
            like: torch.Size = self._made["weights"].shape if shape is None else shape
            return first if like[:1] == (1,) else torch.cat([first] * self._num_nodes)
        return torch.cat(list(parts))

    def _inferred(self, saved: torch.Size, shape: torch.Size | None, path: str) -> str:
        """Return whether an undeclared value is stacked or shared: by its shape after the setup."""
        rows, here = (1, self._num_nodes) if self._node is None else (self._num_nodes, 1)
        if shape == saved or saved[0] != rows:
            return "shared"
        if shape is not None and shape[:1] == (here,):
            return "stacked"
        raise CheckpointError(
            f"{path} may be stacked, a row for each node, or be shared by all with the same first dimension: declare "
            "it in the setup, with self.keep_stacked() or self.keep_shared(), or resume with the backend that saved it"
        )

    # Containers and objects

    def _object(self, saved: Node, live: Any, path: str, placement: str | None) -> Any:
        name = saved["class"]
        cls, same = MADE.get(name), name_of(type(live)) == name
        if cls is None and not same:
            raise CheckpointError(f"{path} was a {name}, and is {_shown(live)}")
        target = live if cls is None else None if cls is Pending else cls()
        self._made[path] = target  # to which its parts may refer
        old: Mapping[Any, Any] = (parts_of(live) or {}) if same else {}
        declared: Mapping[Any, str] = placements_of(live)
        placement = "shared" if isinstance(live, tuple(GENERATORS)) else placement
        indexed = issubclass(cls or type(live), CONTAINERS)
        parts = {}
        for given, node, restorer, placed in self._items(saved["items"], target, old, path, placement):
            key = tuple(given) if isinstance(given, list) else given
            own = part_of(path, key, indexed)
            parts[key] = restorer.restore(node, old.get(key, _ABSENT), own, declared.get(key) or placed)
        if cls is Pending:
            return Pending(self._made["collectives"], int(parts["due"]), lambda: parts["result"])
        try:
            return fill(target, parts)
        except (RuntimeError, TypeError, ValueError) as error:
            raise CheckpointError(f"{path} cannot be filled with what was saved: {error}") from error

    def _items(
        self, items: Sequence[Any], target: Any, old: Mapping[Any, Any], path: str, placement: str | None
    ) -> Iterator[tuple[Any, Node, Restorer, str | None]]:
        """Yield key, node and placement of every part that is to be here, and who restores it.

        In a sequence with an item for each node, such as its generator or optimizer, an item is as it was on that node.
        """
        counts = (1, self._num_nodes) if self._node is None else (self._num_nodes, 1)
        moves = self.moves and self._num_nodes > 1 and isinstance(target, list | tuple | collections.deque)
        if moves and placement != "shared" and (len(items), len(old)) == counts:
            kinds = {_kind(node) for _, node in items}
            if not kinds & {"tensor", "view", "array"} and (placement == "stacked" or "plain" not in kinds):
                for i, node in enumerate(range(self._num_nodes) if self._node is None else [self._node]):
                    of_node = copy.copy(self)
                    of_node.moves, of_node._node = False, node
                    yield i, items[node if len(items) > 1 else 0][1], of_node, "shared"
                return
            if placement is None:
                raise CheckpointError(
                    f"{path} has an item for each of {self._num_nodes} nodes, or by chance as many: declare it in the "
                    "setup, with self.keep_stacked() or self.keep_shared()"
                )
        for key, node in items:
            yield key, node, self, placement


def _kind(node: Node) -> str:
    if not isinstance(node, dict):
        return "plain"
    return _kind(node["items"][0]) if node["kind"] == "each" else str(node["kind"])


def _tensors(items: Sequence[Node], path: str) -> Sequence[Node]:
    """Return the nodes of all processes where each is a tensor."""
    kinds = {_kind(node) for node in items}
    if kinds == {"tensor"}:
        return items
    raise _differs(path, f" ({', '.join(map(repr, items[:4]))})" if kinds == {"plain"} else "")


def _shown(live: Any) -> str:
    made = "not there to be filled, as it was made during the run"
    return made if live is _ABSENT else f"a {name_of(type(live))} here"


def _differs(path: str, given: str = "") -> CheckpointError:
    return CheckpointError(
        f"{path} differs between the nodes' processes{given}, so the simulator has no one value for it; resume "
        "with backend='process', or keep what is each node's own in stacked tensors"
    )
