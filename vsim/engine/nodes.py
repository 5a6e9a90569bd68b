"""The nodes of a vmapped call: the stacked tensors behind what the model sees, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from vsim.engine import products
from vsim.engine.stacked import Stacked, node_by_node
from vsim.private_torch import add_batch_dim, batch_dim, batch_level, is_wrapped, outside_of_vmap, unwatched, unwrapped


class InexactError(ValueError):
    """An operation has no form for all nodes at once that is known to be bitwise equal to one node alone."""


class Nodes:
    """The nodes of one vmapped call, whose tensors rules take apart and put together.

    Args:
        streams: a generator for each node of the vmapped call, in order, for random operations. None: they draw from
            the default generator, the same for all nodes.
        exact: only operations that are bitwise equal to one node alone; others raise an InexactError.
        places: id of a stacked parameter → the tensor for its gradient. An operation that computes a parameter's whole
            gradient may write it there and return that tensor as the gradient; each place is used once.

    Attributes:
        num_nodes: the nodes of this vmapped call.
        way: how the operation that is being computed is called, as its rule says.
        differing: the operations whose form may differ from one node alone in the last bits.
        failed: the first error of an operation, which the model may have handled.
    """

    def __init__(
        self, streams: Sequence[Any] | None, exact: bool = False, places: Mapping[int, Tensor] | None = None
    ) -> None:
        super().__init__()
        self.streams = streams
        self.exact = exact
        self.places = dict(places or {})
        self.way = ""
        self.differing: set[str] = set()
        self.failed: Exception | None = None
        self._undrawn: list[tuple[torch.Generator, Tensor]] = []  # the streams' states before the first draw
        self._level = -1
        self._node: Tensor | None = None

    @property
    def node(self) -> Tensor | None:
        """Any tensor on their device that is batched over the nodes. The vmapped function sets it when it starts."""
        return self._node

    @node.setter
    def node(self, node: Tensor) -> None:
        self._device_type = node.device.type
        self._level = batch_level(node)
        self.num_nodes = len(unwrapped(node))
        self._node = node

    @property
    def are_cast(self) -> bool:
        """Whether autocast is on."""
        return torch.is_autocast_enabled(self._device_type)

    def of(self, t: Any) -> Tensor | None:
        """Return the stacked tensor (K, …) behind one that is batched over the nodes alone, else None."""
        if not isinstance(t, Tensor) or batch_level(t) != self._level:
            return None
        stacked, dim = unwrapped(t), batch_dim(t)
        if is_wrapped(stacked):
            return None
        return stacked.movedim(dim, 0) if dim else stacked

    def spread(self, t: Tensor) -> Tensor | None:
        """Return (K, …) of a tensor that may be the same for all nodes; None for a tensor of another transform."""
        stacked = self.of(t)
        if stacked is None and not is_wrapped(t):
            return t.expand(self.num_nodes, *t.shape)
        return stacked

    def spread_all(self, *tensors: Tensor | None) -> list[Any] | None:
        """Return (K, …) of every tensor that is there, see `spread`; None if one of them is not ours."""
        found: list[Tensor | None] = []
        for t in tensors:
            stacked = None if t is None else self.spread(t)
            if stacked is None and t is not None:
                return None
            found.append(stacked)
        return found

    def batch(self, stacked: Tensor) -> Tensor:
        """Wrap a stacked tensor (K, …) for the vmapped function."""
        return add_batch_dim(stacked, 0, self._level)

    def draw(self) -> Sequence[torch.Generator] | None:
        """Return the streams that an operation is about to draw from."""
        if self.streams is not None and not self._undrawn:
            self._undrawn = [(stream, stream.get_state()) for stream in self.streams]
        return self.streams

    def undraw(self) -> None:
        """Let the streams be as if nothing had been drawn."""
        for stream, state in self._undrawn:
            stream.set_state(state)

    def read(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Return what `func` tells the model's Python of its tensors, where it is the same on all nodes.

        Raises:
            NodesDifferError: it is not.
        """
        if all(self.of(t) is None for t in tree_leaves((args, kwargs))):
            return func(*args, **kwargs)
        with torch.no_grad(), unwatched():  # a number, which a mode that captures operations could not give
            return self._each(func, args, kwargs, None)

    def alone(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Call `func` once for each node, whose generator it draws from.

        Raises:
            InexactError: it writes into its arguments, works on tensors of another transform in the model, or draws
                from a generator of the model's own, of which every node has one.
        """
        if why_not := self.why_not_alone(func, args, kwargs):
            raise self.refusal(func, why_not)
        return self._each(func, args, kwargs, self.draw())

    def why_not_alone(self, func: Any, args: Any, kwargs: Any) -> str:
        """Return why `func` cannot be called once for each node; empty if it can."""
        if kwargs.get("out") is not None or kwargs.get("inplace") or _writes(func):
            return "writes into a tensor"
        leaves = tree_leaves((args, kwargs))
        if any(isinstance(leaf, torch.Generator) for leaf in leaves):
            return "draws from the model's own generator"
        if any(isinstance(t, Tensor) and is_wrapped(t) and self.of(t) is None for t in leaves):
            return "is inside another functorch transform"
        return ""

    def _each(self, func: Any, args: Any, kwargs: Any, streams: Sequence[torch.Generator] | None) -> Any:
        known: dict[int, Stacked] = {}  # F.multi_head_attention_forward asks whether query, key and value are one

        def mark(leaf: Any) -> Any:
            stacked = self.of(leaf)
            return leaf if stacked is None else known.setdefault(id(leaf), Stacked(stacked))

        marked = tree_map(mark, (args, kwargs))
        with outside_of_vmap():
            outcome = node_by_node(func, self.num_nodes, marked[0], marked[1], streams)
        return tree_map(lambda t: self.batch(t.tensor) if isinstance(t, Stacked) else t, outcome)

    def refusal(self, func: Any, why: str) -> Exception:
        """Return the error of an operation that has no form for all nodes."""
        if not self.exact:
            return NotImplementedError(f"{name_of(func)} {why} and has no form for all nodes at once")
        return InexactError(
            f"{name_of(func)} {why} and has no form for all nodes at once that is known to be bitwise equal to one "
            "node alone; with deterministic=True use executor='loop'"
        )

    def needs_grad(self, t: Tensor) -> bool:
        """Whether a gradient flows into a tensor of the vmapped function."""
        while is_wrapped(t):
            t = unwrapped(t)
        return t.requires_grad

    def note_product(self, name: str) -> None:
        """Note that a product is batched, which may differ in the last bits."""
        if not self.exact and not products.batches_agree():
            self.differing.add(name)


def name_of(func: Any) -> str:
    """Return the name of an operation."""
    return str(getattr(func, "__name__", func))


def _writes(func: Any) -> bool:
    name = name_of(func)
    return name == "__setitem__" or (name.endswith("_") and not name.endswith("__")) or name.startswith("__i")
