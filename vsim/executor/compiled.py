"""The vmapped loss and its gradient, compiled."""

from __future__ import annotations

import time
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.utils._pytree import tree_map

from vsim.executor.vmap import Piece, VmapExecutor, without_performance_warnings
from vsim.randomness import drawing_from
from vsim.replicas import Views


class CompileError(RuntimeError):
    """torch.compile cannot compile the model's vmapped loss here."""


class CompiledExecutor(VmapExecutor):
    """`VmapExecutor` with loss and gradient compiled by torch.compile, by functorch's own rules.

    What is random in the model draws from one stream for all nodes, a different draw for each: reproducible, but not
    the draws of the other executors.

    Attributes:
        compile_seconds: what the first step took; None before it.

    Raises, at the first step:
        CompileError: the model breaks the graph (the operation and its line are named), or there is no compiler.
    """

    name = "compiled"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.compile_seconds: float | None = None
        of_weights = None if self.replicas.shares_grads else 0

        def losses_of(leaves: Views, buffers: Views, batch: Any) -> Tensor:
            def loss_of_node(own: Views, buffers: Views, batch: Any) -> Tensor:
                return self._outcome(own, buffers, batch, False)[0]

            losses: Tensor = vmap(loss_of_node, in_dims=(of_weights, 0, 0), randomness="different")(
                leaves, buffers, batch
            )
            return losses

        # Within a vmap a break of the graph would leave all of it uncompiled, and silently.
        self.compiled = torch.compile(losses_of, dynamic=False, fullgraph=True)

    def losses_and_grads(self, batch: Any, minibatch_size: int | None = None) -> Tensor:
        started = time.perf_counter()
        losses = super().losses_and_grads(batch, minibatch_size)
        if self.compile_seconds is None:
            self.compile_seconds = time.perf_counter() - started
            self.reason = f"compiled in {self.compile_seconds:.1f} s"
        return losses

    def _backward(self, batch: Any, share: float, first: bool) -> Tensor:
        try:
            with drawing_from(self.generators[0]):
                return super()._backward(batch, share, first)
        except Exception as error:
            if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
                raise CompileError(f"the model cannot be compiled: {_summary(error)}") from error
            raise

    def lowering(self, piece: int = 0, first: bool = False) -> Any:
        """Nothing: the compiler sees functorch's rules."""
        return nullcontext()

    def _note(self, lowering: Any) -> None:
        """Nothing was seen."""

    def _losses(self, piece: Piece, batch: Any, lowering: Any) -> Tensor:
        with without_performance_warnings():
            losses: Tensor = self.compiled(piece.leaves, piece.buffers, tree_map(torch.Tensor.contiguous, batch))
        return losses


def _summary(error: Exception) -> str:
    """The first line of a compiler's error, and the line of the model that it is about."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    where = [line for line in lines if line.startswith("File ") and "site-packages" not in line]
    return f"{type(error).__name__}: {lines[0] if lines else ''}" + (f" ({where[-1]})" if where else "")
