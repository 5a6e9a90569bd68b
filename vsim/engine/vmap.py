"""Compute all nodes together by torch.func.vmap."""

from __future__ import annotations

import functools
import itertools
import traceback
from collections import Counter
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from vsim.cluster.randomness import drawing_from
from vsim.cluster.replicas import Replicas, Views
from vsim.engine import batched
from vsim.engine import kept as keeping
from vsim.engine.attributes import Attributes
from vsim.engine.batched import NodesDifferError, NumbersDifferError, VmapError
from vsim.engine.executor import Executor, Settings, check_depends, cloned, write_gradients
from vsim.engine.indices import tables_at_once
from vsim.engine.looped import LoopExecutor
from vsim.engine.memory import available_bytes, node_bytes, nodes_that_fit
from vsim.engine.objective import Objective
from vsim.engine.proof import Proof, prove
from vsim.engine.rules import Lowering
from vsim.private_torch import has_backward_hooks, remove_batch_dim, unwatched, versions, within_vmap
from vsim.trees import mapped, tensors_of

# Upper bound of the weights of all nodes in one vmapped call on a CPU. More nodes in a call gain nothing: kernels are
# large already, and temporaries no longer fit in the caches. On accelerators, kernels gain from more nodes, up to the
# device's memory.
WEIGHTS_AT_ONCE = 2**22
_FEW = 8  # examples whose memory is measured for evaluation


_HERE = Path(__file__).parent


class Piece(NamedTuple):
    """The nodes of one vmapped call: their rows, weights by name, gradients, buffers by name, and their number."""

    rows: slice
    leaves: Views
    grads: list[Tensor]
    buffers: Views
    size: int


class _BeforeCall:
    """A copy of the state that a vmapped call may change before it fails.

    Args:
        batch: the tensors of the call's batch. python: sets the attributes of the model as they were.
    """

    def __init__(self, lowering: Lowering, piece: Piece, batch: list[Tensor], python: Callable[[], None]) -> None:
        self.lowering, self.python = lowering, python
        self.buffers = [(b, b.clone()) for b in piece.buffers.values()]
        self.tensors = *piece.leaves.values(), *batch
        self.versions = versions(self.tensors)

    def restore(self, error: VmapError) -> None:
        """Restore the nodes' random generators and buffers, and the model's attributes.

        Raises:
            VmapError: the model has changed its weights or its batch in place.
        """
        self.lowering.undraw()
        self.python()
        for buffer, value in self.buffers:
            buffer.copy_(value)
        if versions(self.tensors) != self.versions:
            raise VmapError(f"{error}, but for weights or a batch that it has changed in place already") from error


class VmapExecutor(Executor):
    """Computes all nodes together, by `torch.func.vmap` of one node's loss.

    Nodes are computed in pieces that fit in the caches of a CPU, or in the free memory of an accelerator. The free
    memory is measured at the first batch of each shape.

    A model may read values from tensors in Python (`if mask.all()`, `.item()`) if they are equal on all nodes. In three
    cases, the loop computes the nodes of a call instead:

    - a value that Python reads differs between nodes;
    - the model handles an error of an operation;
    - the call fails after an earlier call has succeeded.

    Attributes:
        calls, work: (operation, way) → calls, and multiplications of a node, in the first step; see `Lowering`.
        not_vmapped: number of calls that the loop has taken over.
        differing: in words, the last float that Python read and that differed between nodes.
        kept: paths of attributes in which `forward` keeps a tensor of the step, see `vsim.engine.kept`.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.at_once = self.nodes_at_once(self.replicas, self.settings)
        on_accelerator = not batched.is_cache_bound(self.replicas.weights.device)
        self._fits_memory = self._cuts_by_batch = on_accelerator and self.settings.chunk_size is None
        self._pieces_of: dict[Any, list[slice]] = {}  # shapes of a batch → pieces
        self._rows_of: dict[Any, int] = {}  # shapes of a batch → rows that are evaluated at once
        self.calls: Counter[tuple[str, str]] = Counter()
        self.work: Counter[tuple[str, str]] = Counter()
        self.not_vmapped = 0
        self.differing = ""
        self.kept: Collection[str] = ()
        self._why_not_vmapped = ""
        self.has_worked = False
        self.left: dict[Any, VmapError] = {}  # shapes of batches that the loop computes → reason
        self._left_nodes = False  # whether the loop has computed nodes in training
        self.pieces: list[Piece] = []
        self._submodules = list(self.objective.modules())
        self._attributes = Attributes(self.objective.owners())
        self._cut(even_pieces(self.replicas.num_held, self.at_once))

    def _cut(self, pieces: list[slice]) -> None:
        """Cut the nodes into these pieces from now on."""
        r = self.replicas
        self.pieces.clear()
        for rows in pieces:
            part = r.rows(rows.start, rows.stop)
            leaves = {name: w.data.requires_grad_() for name, w in part.views(part.weights).items()}
            grads = part.views(part.grads)
            self.pieces.append(Piece(rows, leaves, list(grads.values()), part.buffers, part.num_held))

    @staticmethod
    def nodes_at_once(replicas: Replicas, settings: Settings) -> int:
        """Return the largest number of nodes in a vmapped call, without considering free memory.

        Raises:
            ValueError: the embedding tables are too large for the device.
        """
        most = replicas.num_held
        if batched.is_cache_bound(replicas.weights.device):
            most = max(1, WEIGHTS_AT_ONCE // replicas.num_parameters)
        wanted = min(replicas.num_held, settings.chunk_size or most)
        fitting = tables_at_once(replicas) if replicas.weights.device.type == "mps" else wanted
        if settings.chunk_size is not None and fitting < wanted:
            raise ValueError(
                f"chunk_size={settings.chunk_size} nodes at once have an embedding table with more entries than "
                f"vsim looks up at once on MPS; at most chunk_size={fitting} here"
            )
        return min(wanted, fitting)

    def _cut_for(self, batch: Any) -> None:
        """Cut the nodes into pieces for batches shaped like `batch`. Equal shapes get equal pieces."""
        shapes = tuple(t.shape for t in tensors_of(batch))
        if shapes not in self._pieces_of:
            with unwatched():  # hide the measurement from modes that count operations
                at_once = self._at_once_for(tree_map(lambda t: t[0], batch))
            self._pieces_of[shapes] = even_pieces(self.replicas.num_held, at_once)
        if self._pieces_of[shapes] != [piece.rows for piece in self.pieces]:
            self._cut(self._pieces_of[shapes])

    def _at_once_for(self, batch: Any) -> int:
        """Return the largest number of nodes in a call if each node's batch is shaped like `batch` (B, …)."""
        return self._fitting(node_bytes(self, batch))

    def _fitting(self, of_node: int) -> int:
        """Return the number of nodes that fit into the free memory, if each takes `of_node` bytes."""
        weights = self.replicas.weights
        free = available_bytes(weights.device)
        if self.settings.position.step <= 1:  # leave room for the optimizer's state; Adam's takes two matrices
            free -= 2 * weights.nbytes
        return min(self.at_once, nodes_that_fit(free, of_node, weights[0].nbytes))

    def _rows_at_once(self, batch: Any) -> int:
        """Return the largest number of rows that are evaluated at once on a shared batch (B, …).

        Measures a few examples, because batches for evaluation are larger than for training.
        """
        if not self._fits_memory:
            return self.at_once
        leaves = tree_leaves(batch)
        shapes = tuple(t.shape for t in leaves)
        if shapes not in self._rows_of:
            lengths = {len(t) for t in leaves if t.dim()}
            size = min(lengths) if len(lengths) == 1 else 1  # tensors of different lengths cannot be cut
            few = min(size, _FEW)
            own = batch if few == size else tree_map(lambda t: t[:few] if t.dim() else t, batch)
            with unwatched():
                self._rows_of[shapes] = self._fitting(node_bytes(self, own, evaluating=True) * size // few)
        return self._rows_of[shapes]

    @property
    def name(self) -> str:  # type: ignore[override]
        return "vmap, loop" if self._left_nodes else "vmap"

    @property
    def reason(self) -> str:  # type: ignore[override]
        if not self.not_vmapped:
            return ""
        return f"{self.not_vmapped} calls went to the loop; the first: {self._why_not_vmapped}"

    @functools.cached_property
    def _loop(self) -> LoopExecutor:
        return LoopExecutor(self.replicas, self.objective, self.generators, self.settings)

    def prove(self, batch: Any, share: float = 1.0) -> Proof:
        """Prove the steps on stacked batches (K, B, …) shaped like `batch`, see `vsim.engine.proof`."""
        return prove(self, type(self), batch)

    def lowering(self, piece: int = 0, first: bool = False) -> Lowering:
        """Return the context in which the nodes of a piece are computed."""
        rows, leaves, grads, *_ = self.pieces[piece]
        # An operation may write a gradient directly to its place unless the gradient is scaled or summed later.
        places = zip(leaves.values(), grads, strict=True) if first else ()
        lowering = Lowering(self.generators[rows], {id(leaf): place for leaf, place in places})
        lowering.watch = not self.calls
        return lowering

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        if self._cuts_by_batch:
            self._cut_for(batch)
        if self.left and (why := self.left.get(shapes_of(batch))) is not None:
            self._leave_to_the_loop(why)
            return self._loop.compute(range(self.replicas.num_held), batch, share, first)
        losses, python = [], self._attributes.noted()
        for number, piece in enumerate(self.pieces):
            if number == 1:
                of_first = keeping.values(self.objective, self.kept)
            if number:
                python()  # one step of all nodes: each piece begins with the same attributes
            lowering, own_batch = self.lowering(number, first=first and share == 1.0), self._own_batch(batch, piece)
            before = _BeforeCall(lowering, piece, tensors_of(own_batch), python)
            try:
                with self._precision():
                    stacked = self._losses(piece, own_batch, lowering)
                self._write_gradients(stacked, piece, share, first)
            except VmapError as error:
                before.restore(error)
                losses.append(self._by_loop(piece, batch, share, first, error))
                continue
            self.has_worked = True
            self.calls, self.work = self.calls or lowering.calls, self.work or lowering.work
            for stream, state in lowering.undrawn:
                self.settings.undrawn.setdefault(stream, state)
            losses.append(stacked.detach() * share if share != 1.0 else stacked.detach())
        if len(self.pieces) > 1:
            of_first()
        return losses[0] if len(losses) == 1 else torch.cat(losses)

    def _by_loop(self, piece: Piece, batch: Any, share: float, first: bool, error: VmapError) -> Tensor:
        """After a failed call, compute the nodes of a piece one by one; return share · losses.

        If the model itself is wrong, the loop raises the model's error.
        """
        losses = self._loop.compute(range(piece.rows.start, piece.rows.stop), batch, share, first)
        if not self.has_worked and not isinstance(error, NodesDifferError):
            raise error
        if isinstance(error, NumbersDifferError):
            self.differing = str(error)
        self._leave_to_the_loop(error)
        return losses

    def _leave_to_the_loop(self, error: VmapError) -> None:
        self._why_not_vmapped = self._why_not_vmapped or str(error)
        self.not_vmapped += 1
        self._left_nodes = True

    def _write_gradients(self, losses: Tensor, piece: Piece, share: float, first: bool) -> None:
        leaves = list(piece.leaves.values())
        check_depends(losses)
        try:
            write_gradients(losses, leaves, piece.grads, share, first)
        except Exception as error:  # for instance, a checkpointed part of the model runs again outside of vmap
            raise VmapError(_explain_vmap_failure(error)) from error

    def _own_batch(self, batch: Any, piece: Piece) -> Any:
        return batch if len(self.pieces) == 1 else mapped(lambda t: t[piece.rows], batch)

    def _losses(self, piece: Piece, batch: Any, lowering: Lowering) -> Tensor:
        """Return the losses of a piece's nodes, with their autograd graph.

        Raises:
            VmapError: modules have hooks on gradients; autograd works outside of vmap and would not call them.
        """
        if has_backward_hooks(self._submodules):
            raise VmapError(_explain_vmap_failure(ValueError("a module's hook on gradients would never be called")))

        def loss_of_node(own: Views, buffers: Views, batch: Any) -> Tensor:
            with self.objective.with_tensors(own, buffers):
                return self.objective(batch, False)[0]

        parts = (piece.leaves, piece.buffers, batch)
        losses: Tensor = self._vmapped(self.objective, loss_of_node, lowering, piece.size, *parts)
        return losses

    def _evaluate(
        self, objective: Objective, weights: Tensor, buffers: Views, batch: Any, stream: torch.Generator
    ) -> tuple[Tensor, Tensor | None]:
        def outcome_of_node(own: Views, buffers: Views, batch: Any) -> tuple[Tensor, ...]:
            with objective.with_tensors(own, buffers):
                return tuple(x for x in objective(batch, True) if x is not None)

        outcomes = []
        state = stream.get_state()
        for rows in even_pieces(len(weights), self._rows_at_once(batch)):
            own_buffers = {name: b[rows].clone() for name, b in buffers.items()}
            parts = (self.replicas.views(weights[rows]), own_buffers, cloned(batch))
            stream.set_state(state)
            try:
                with drawing_from(stream), self._precision():
                    size, lowering = rows.stop - rows.start, Lowering(None)
                    own = self._vmapped(objective, outcome_of_node, lowering, size, *parts, batch_of_all=True)
                    outcomes.append(own)
            except VmapError as error:
                stream.set_state(state)
                evaluated = super()._evaluate(objective, weights, buffers, batch, stream)
                self._why_not_vmapped = self._why_not_vmapped or str(error)
                self.not_vmapped += 1
                return evaluated
        columns = [torch.cat(column) for column in zip(*outcomes, strict=True)]
        return columns[0], columns[1] if len(columns) > 1 else None

    def _vmapped(
        self,
        objective: Objective,
        of_node: Callable[..., Any],
        lowering: Lowering,
        size: int,
        weights: Views,
        buffers: Views,
        batch: Any,
        batch_of_all: bool = False,
    ) -> Any:
        """Call of_node(weights, buffers, batch) once, vmapped over all nodes; return its stacked results.

        Args:
            objective: what `of_node` calls.
            size: K, the number of nodes.
            weights, buffers, batch: stacked over the nodes.
            batch_of_all: whether the nodes share `batch`, as in evaluation; they then draw the same random numbers.
        """
        try:
            with within_vmap(size, "same" if batch_of_all else "different") as level:
                lowering.begin(level, size, self.replicas.weights.device)
                own_weights = {n: lowering.batch(w) for n, w in weights.items()}
                own_buffers = {n: lowering.batch(b) for n, b in buffers.items()}
                own_batch = batch if batch_of_all else mapped(lowering.batch, batch)
                with lowering:
                    outcome = of_node(own_weights, own_buffers, own_batch)
                stacked = mapped(lambda t: remove_batch_dim(t, level, size, 0), outcome)
                keeping.take_first(
                    objective, self.kept, lambda t: remove_batch_dim(t.detach(), level, size, 0)[0].clone()
                )
        except Exception as error:
            kind = type(error) if isinstance(error, NodesDifferError) else VmapError
            raise kind(_explain_vmap_failure(error)) from error
        if lowering.failed is not None:  # the model handled an error that perhaps only some nodes have
            kind = NumbersDifferError if isinstance(lowering.failed, NumbersDifferError) else NodesDifferError
            raise kind(_explain_vmap_failure(lowering.failed)) from lowering.failed
        return stacked


def shapes_of(batch: Any) -> tuple[Any, ...]:
    """Return the shapes and dtypes of a node's part of a stacked batch (K, B, …)."""
    return tuple((t.shape[1:], t.dtype) for t in tensors_of(batch))


def even_pieces(num_nodes: int, at_once: int) -> list[slice]:
    """Cut nodes into even pieces of at most `at_once` nodes, because a last piece of one node would be slow."""
    count = -(-num_nodes // at_once)
    bounds = [num_nodes * i // count for i in range(count + 1)]
    return [slice(a, b) for a, b in itertools.pairwise(bounds)]


def _explain_vmap_failure(error: Exception) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    where = [f for f in frames if "torch" not in f.filename.split("/")]
    where = [f for f in where if Path(f.filename).parent not in (_HERE, _HERE.parent)]
    at = f" at {where[-1].filename}:{where[-1].lineno}, `{where[-1].line}`" if where else ""
    reason = str(error).strip().split("\n")[0]
    if any(f.filename.endswith("torch/utils/checkpoint.py") for f in frames):
        reason = "activation checkpointing computes a part of the model again, outside of the vmap"
    return f"the model cannot be vectorised over nodes{at}: {reason} — executor='loop' runs it node by node"
