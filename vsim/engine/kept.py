"""Tensors that a model's Python keeps from one call to the next, beside its parameters and buffers: each node's own."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from vsim.engine.stacked import NodesDifferError
from vsim.private_torch import batch_dim, is_wrapped, unwrapped, version


class Kept:
    """A tensor in a state of `vsim.engine.python_state`: equal to itself, until somebody writes to it."""

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        written = tensor.stacked if isinstance(tensor, Apart) else tensor
        self.version = 0
        if written is not None and not (is_wrapped(written) or written.is_inference()):
            self.version = version(written)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Kept) and (self.tensor is other.tensor) and self.version == other.version

    __hash__ = None  # type: ignore[assignment]

    def __reduce__(self) -> Any:  # another process counts its own writes
        return Kept, (self.tensor,)


class Apart(Tensor):
    """Stands for tensors that differ between the nodes of a call, and can be computed with only where they are stacked.

    Attributes:
        of_nodes: the tensor of each.
        stacked: all of them (K, …), once somebody has asked for that.
    """

    of_nodes: list[Kept]
    stacked: Tensor | None

    @classmethod
    def of(cls, of_nodes: list[Kept]) -> Apart:
        """Return one for these."""
        own = torch.empty(0).as_subclass(cls)
        own.of_nodes, own.stacked = of_nodes, None
        return own

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise NodesDifferError(
            "a tensor that the model keeps from an earlier call differs between nodes; a buffer (register_buffer) may "
            "differ, and be computed with for all at once"
        )

    def together(self) -> Tensor:
        """Return them stacked (K, …).

        Raises:
            NodesDifferError: they have other shapes or dtypes.
        """
        if self.stacked is None:
            tensors = [kept.tensor for kept in self.of_nodes]
            if len(kinds := {(tensor.shape, tensor.dtype) for tensor in tensors}) > 1:
                raise NodesDifferError(
                    "a tensor that the model keeps from an earlier call has another shape or dtype on another node: "
                    f"{' and '.join(f'{dtype} {list(shape)}' for shape, dtype in kinds)}"
                )
            self.stacked = torch.stack(tensors)
        return self.stacked


def is_kept(value: Any) -> bool:
    """Whether a value is a tensor that a model may keep: no parameter."""
    return type(value) in (Tensor, Apart)


def as_kept(value: Any) -> Any:
    """Return a value with a `Kept` for every tensor in it."""
    return _mapped(lambda part: Kept(part) if is_kept(part) else part, value)


def content(value: Any, copies: bool = False) -> Any:
    """Return a value with the tensor of every `Kept` in it, or a copy of that."""
    return each_kept(lambda kept: kept.tensor.detach().clone() if copies else kept.tensor, value)


def each_kept(function: Callable[[Kept], Any], value: Any) -> Any:
    """Return a value with function(kept) for every `Kept` in its dicts, lists and tuples."""
    return _mapped(lambda part: function(part) if isinstance(part, Kept) else part, value)


def _mapped(function: Callable[[Any], Any], value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _mapped(function, part) for key, part in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_mapped(function, part) for part in value)
    return function(value)


def joined(values: Sequence[Any]) -> Any:
    """Return one value for several nodes: theirs, but for tensors that differ, for which an `Apart` stands.

    Raises:
        ValueError: something else differs.
    """
    first = values[0]
    if all(value is first or value == first for value in values):
        return first
    kinds = {type(value) for value in values}
    if kinds == {Kept}:
        return Kept(Apart.of(list(values)))
    if kinds == {dict} and all(value.keys() == first.keys() for value in values):
        return {key: joined([value[key] for value in values]) for key in first}
    if kinds in ({list}, {tuple}) and all(len(value) == len(first) for value in values):
        return type(first)(joined(parts) for parts in zip(*values, strict=True))
    raise ValueError("they differ")


def apart(state: dict[str, Any], num_nodes: int, paths: Iterable[str] | None = None) -> list[dict[str, Any]]:
    """Return each node's own of a state that a vmapped call has left: the state itself if all have the same.

    Args:
        paths: where tensors may be that are not the same for all; None: anywhere.
    """
    of_nodes: dict[int, list[Kept]] = {}  # by id of what stands for them

    def note(kept: Kept) -> None:
        tensor = kept.tensor
        if isinstance(tensor, Apart):
            of_nodes[id(kept)] = tensor.of_nodes
        elif is_wrapped(tensor):
            of_nodes[id(kept)] = [*map(Kept, unwrapped(tensor).unbind(batch_dim(tensor)))]

    parts = {}
    for path in state if paths is None else paths:
        known = len(of_nodes)
        each_kept(note, state[path])
        if len(of_nodes) > known:
            parts[path] = state[path]
    if not parts:
        return num_nodes * [state]

    def of_node(i: int, kept: Kept) -> Kept:
        return of_nodes[id(kept)][i] if id(kept) in of_nodes else kept

    return [{**state, **each_kept(partial(of_node, i), parts)} for i in range(num_nodes)]


def written_to(before: Sequence[Any], now: Sequence[Any]) -> list[int]:
    """Return which of several values have a tensor that was there before, and was written to in between."""
    versions: dict[int, int] = {}
    found: list[bool] = []
    each_kept(lambda kept: versions.setdefault(id(kept.tensor), kept.version), list(before))

    def is_written(value: Any) -> bool:
        found.clear()
        each_kept(lambda kept: found.append(versions.get(id(kept.tensor), kept.version) != kept.version), value)
        return any(found)

    return [i for i, value in enumerate(now) if is_written(value)]
