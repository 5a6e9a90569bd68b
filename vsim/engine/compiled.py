"""The losses and gradients of all nodes, compiled."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import grad_and_value, vmap
from torch.utils._pytree import tree_leaves, tree_map
from vsim_kernels.alignment import rows_apart

from vsim.cluster.randomness import drawing_from
from vsim.cluster.replicas import Views
from vsim.engine.base import Before
from vsim.engine.memory import activation_bytes
from vsim.engine.vmap import Piece, VmapExecutor, even_pieces
from vsim.private_torch import (
    allow_saved_tensors_hooks,
    is_of_compiler,
    is_watched,
    recompile_limit,
    unwatched,
    without_performance_warnings,
)

# A compiled call takes as many nodes at once as keep so many bytes between forward and backward pass. Compiled code
# loses little by being called more often, and activations are then read again from the caches: a step of 16 GPTs takes
# 0.94 of the time that it takes in two pieces, a step of 4 ResNets 0.95.
ACTIVATIONS_AT_ONCE = 40_000_000
_MOST_GRAPHS = 256  # torch's own limit of what one process compiles


class CompileError(RuntimeError):
    """torch.compile cannot compile the model's vmapped loss here."""


class CompiledExecutor(VmapExecutor):
    """`VmapExecutor` with losses and gradients compiled by torch.compile into one graph, by functorch's own rules.

    On a CPU a call takes as many nodes as keep ACTIVATIONS_AT_ONCE bytes, unless `settings.chunk_size` says how many.
    Random operations of the model draw from one stream for all nodes, different numbers for each: reproducible, but not
    the draws of the other executors.

    Attributes:
        compile_seconds: the duration of the first step; None before it.

    Raises, at the first step:
        CompileError: the model breaks the graph (the operation and its line are named), or there is no compiler.
    """

    name = "compiled"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compile_seconds: float | None = None
        self.known: set[Any] = set()  # shapes for which there is a graph
        self._pieces_of: dict[Any, list[slice]] = {}  # by the shapes of a batch
        of_weights = None if self.replicas.shares_grads else 0
        for module in self.objective.model.modules():
            if isinstance(module, nn.Embedding) and module.padding_idx is not None:
                module.register_forward_hook(_without_gradient_of_padding)

        def loss_of_node(own: Views, buffers: Views, batch: Any) -> Tensor:
            with self._precision():
                return self._outcome(own, buffers, batch, False)[0]

        def total(weights: Views, buffers: Views, batch: Any) -> tuple[Tensor, Tensor]:
            of_nodes = vmap(loss_of_node, in_dims=(of_weights, 0, 0), randomness="different")
            losses: Tensor = of_nodes(weights, buffers, batch)
            return losses.sum(), losses

        def grads_and_losses(*parts: Any) -> tuple[Views, Tensor]:
            grads, (_, losses) = grad_and_value(total, has_aux=True)(*parts)
            return grads, losses

        # One graph of both: between a forward and a backward graph autograd would keep its books, which in a small
        # model takes longer than the arithmetic. Within a vmap a break of the graph would leave all of it uncompiled,
        # and silently.
        self.compiled = torch.compile(grads_and_losses, dynamic=False, fullgraph=True)

    @property
    def reason(self) -> str:  # type: ignore[override]
        return "" if self.compile_seconds is None else f"compiled in {self.compile_seconds:.1f} s"

    def losses_and_grads(self, batch: Any, minibatch_size: int | None = None) -> Tensor:
        started = time.perf_counter()
        losses = super().losses_and_grads(batch, minibatch_size)
        if self.compile_seconds is None:
            self.compile_seconds = time.perf_counter() - started
            if not self.replicas.grads.any():  # as of a loss that does not depend on the weights
                self._try_uncompiled(batch)
        return losses

    def _cut_for(self, batch: Any) -> None:
        """Choose the pieces for batches of these shapes: the same pieces for the same shapes, also in a resumed run."""
        shapes = tuple(t.shape for t in tree_leaves(batch))
        if shapes not in self._pieces_of:
            with unwatched():  # a mode that counts the operations of this step must not see this
                of_node = activation_bytes(self, tree_map(lambda t: t[0], batch))
            at_once = min(self.at_once, max(1, ACTIVATIONS_AT_ONCE // max(1, of_node)))
            # Pieces of one size are one graph.
            equal = max(n for n in range(1, at_once + 1) if self.replicas.num_held % n == 0)
            self._pieces_of[shapes] = even_pieces(self.replicas.num_held, equal if 2 * equal >= at_once else at_once)
        if self._pieces_of[shapes] != [piece.rows for piece in self.pieces]:
            self._cut(self._pieces_of[shapes])

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        if self.settings.chunk_size is None and self.replicas.weights.device.type == "cpu":
            self._cut_for(batch)
        if is_watched():  # a mode counts operations or memory, which a compiled graph hides
            return super()._backward(batch, share, first)
        losses = []
        try:
            with drawing_from(self.generators[0]), self._moved_up_to_date(), without_performance_warnings():
                for number, piece in enumerate(self.pieces):
                    own_batch = tree_map(torch.Tensor.contiguous, self._own_batch(batch, piece))
                    with self._own_state.of(range(piece.rows.start, piece.rows.stop)):
                        grads, of_piece = self._grads_and_losses(piece, own_batch)
                    if self.replicas.shares_grads:
                        _accumulate(piece.grads, grads, share / self.replicas.num_held, first and number == 0)
                    else:
                        _accumulate(piece.grads, grads, share, first)
                    losses.append(of_piece)
        except Exception as error:
            if self.compile_seconds is not None and not is_of_compiler(error):
                raise
            allow_saved_tensors_hooks()
            self._try_uncompiled(batch)
            raise CompileError(f"the model cannot be compiled: {_summary(error)}") from error
        return torch.cat(losses) * share

    @torch.no_grad()
    def _grads_and_losses(self, piece: Piece, batch: Any) -> tuple[list[Tensor], Tensor]:
        # Each with a storage of its own: views of one that a model writes to would become one operand, whose size the
        # compiler takes from the views, without the gap that ends the matrix.
        weights = {name: torch.from_dlpack(leaf.detach()) for name, leaf in piece.leaves.items()}
        shapes = tuple(t.shape for t in tree_leaves((weights, batch)))
        # Other shapes need other graphs, as many as a sweep has: torch's limit counts all runs of the process. At every
        # other step the limit holds, and stops a model whose Python is different at every call.
        limit = nullcontext() if shapes in self.known else recompile_limit(_MOST_GRAPHS)
        with limit:
            grads, losses = self.compiled(weights, piece.buffers, batch)
        self.known.add(shapes)
        return list(grads.values()), losses

    def _try_uncompiled(self, batch: Any) -> None:
        """Raise an error that is the model's own, which the compiler's errors say badly, or not at all."""
        before = Before(self)
        super()._backward(tree_map(rows_apart, batch), 1.0, True)
        before.restore()


def _without_gradient_of_padding(module: Any, inputs: tuple[Tensor], outputs: Tensor) -> Tensor:
    """Cut the gradient of padding off, which functorch's rule does in the table of the first node only."""
    return torch.where((inputs[0] == module.padding_idx)[..., None], outputs.detach(), outputs)


def _accumulate(sums: list[Tensor], grads: list[Tensor], share: float, first: bool) -> None:
    """Write or add share · gradients."""
    if first:
        torch._foreach_copy_(sums, grads)
        if share != 1.0:
            torch._foreach_mul_(sums, share)
    else:
        torch._foreach_add_(sums, grads, alpha=share)


def _summary(error: Exception) -> str:
    """The first line of a compiler's error, and the line of the model that it is about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = [line for line in lines if line.startswith("File ") and "site-packages" not in line]
    return f"{type(error).__name__}: {lines[0] if lines else ''}" + (f" ({where[-1]})" if where else "")
