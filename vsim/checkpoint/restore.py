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
from torch.optim import Optimizer

from vsim.checkpoint.snapshot import CONTAINERS, FIXED, MADE, Node, fill, part_of, parts_of
from vsim.cluster.collectives import Pending
from vsim.cluster.randomness import GENERATORS
from vsim.cluster.state import CheckpointError, described, name_of, placements_of

_ABSENT: Any = object()


class Restorer:
    """Writes saved values into the objects of a run that was set up anew.

    Args:
        together: whether the nodes were saved together, as rows; if not, by a process each.
        num_saved: how many they were.
        rows: which of them each node here continues. apart: whether it is one node of several processes.
        known: as of `Snapshot`. Tensors that are made anew go where its "weights" are, if they were not on the CPU.

    Attributes:
        moves: whether values move between nodes together and nodes apart, or between nodes.

    Raises:
        CheckpointError: a saved value does not fit the object that is there.
    """

    def __init__(
        self, together: bool, num_saved: int, rows: Sequence[int], apart: bool, known: Mapping[str, Any]
    ) -> None:
        self.moves = together == apart or (not apart and list(rows) != list(range(num_saved)))
        self._rows, self._apart = list(rows), apart
        self._num_saved = num_saved if together else 1  # rows of a stacked tensor that was saved
        self._made = dict(known)  # path → what was restored
        self._written: dict[int, int] = {}  # where a tensor begins here → number of the memory that was saved

    def restore(self, saved: Node, live: Any, path: str, placement: str | None = None) -> Any:
        """Write a node into `live`, which is at `path`; return it, or what replaces it.

        Args:
            placement: "stacked" or "shared"; "parts": a sequence of stacked values; None: told from shapes, or
                declared by what is met on the way.
        """
        if not isinstance(saved, dict):
            return saved
        match saved["kind"]:
            case "each" if self._apart:
                return self.restore(saved["items"][self._rows[0]], live, path, placement)
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
        if len(parts) > 1:
            return torch.cat([parts[row] for row in self._rows])
        if self._apart:
            return first if len(first) == 1 else first[self._rows]
        # What the setup does not make, such as an optimizer's moments, has a row for each of weights.
        like: torch.Size = self._made["weights"].shape if shape is None else shape
        if len(first) == 1:  # equal nodes share it
            return first.expand(like[0], *first.shape[1:])
        return first[self._rows[: like[0]]]

    def _inferred(self, saved: torch.Size, shape: torch.Size | None, path: str) -> str:
        """Return whether an undeclared value is stacked or shared: by its shape after the setup."""
        rows, here = self._num_saved, len(self._rows)
        if saved[0] != rows or (shape == saved and (rows != here or rows == 1)):
            return "shared"
        if shape is not None and shape[:1] == (here,) != saved[:1]:
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
        if isinstance(live, Optimizer) and placement == "stacked":
            of_all = all(len(p) == len(self._rows) for group in live.param_groups for p in group["params"] if p.dim())
            declared = {"groups": "shared", "state": "parts" if of_all else "stacked"}
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
        counts = self._num_saved, len(self._rows)
        moves = self.moves and max(counts) > 1 and isinstance(target, list | tuple | collections.deque)
        as_many = moves and placement not in ("shared", "parts") and (len(items), len(old)) == counts
        if as_many and self._is_of_nodes([node for _, node in items], list(old.values()), path, placement):
            for i, row in enumerate(self._rows):
                of_node = copy.copy(self)
                of_node.moves, of_node._rows, of_node._apart = False, [row], True
                yield i, items[row if len(items) > 1 else 0][1], of_node, "shared"
            return
        for key, node in items:
            yield key, node, self, "stacked" if placement == "parts" else placement

    def _is_of_nodes(self, items: list[Node], live: list[Any], path: str, placement: str | None) -> bool:
        """Whether a sequence with as many items as there are nodes has one for each, whose own state it is."""
        kinds = {_kind(node) for node in items}
        if self._num_saved == len(self._rows):  # by chance, more often than not
            constant = kinds == {"plain"} and items == live
            own = any(isinstance(value, (*GENERATORS, Optimizer)) for value in live)
            if constant or (placement is None and kinds != {"plain"} and not own):
                return False
        if not kinds & {"tensor", "view", "array"} and (
            placement == "stacked" or (self._num_saved != len(self._rows) and "plain" not in kinds)
        ):
            return True
        if placement is None:
            raise CheckpointError(
                f"{path} has an item for each of {max(self._num_saved, len(self._rows))} nodes, or by chance as many: "
                "declare it in the setup, with self.keep_stacked() or self.keep_shared()"
            )
        return False


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
