"""The rows of a stack: one matrix that holds the nodes of all its runs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vsim.cluster.reductions import rows_on
from vsim.cluster.replicas import Replicas, matrix
from vsim.data.batches import Uneven
from vsim.engine import Executor
from vsim.engine.executor import bits_of

_SHARED = (
    "the model changes its weights in forward, on each node in another way, and with this strategy all nodes share one "
    "row of them: with deterministic=True every node has a row of its own"
)


@dataclass
class Rows:
    """The rows that are computed, and the rows that the runs hold.

    Attributes:
        whole: all nodes.
        parts: the nodes of each run, views of `whole`. Exception: if all nodes of a run share one row of weights or
            gradients, the run holds that row apart.
        spread: the runs that hold a row apart, each with its rows of `whole`.
    """

    whole: Replicas
    parts: list[Replicas]
    spread: list[tuple[Replicas, slice]] = field(default_factory=list)

    def copy_out(self) -> None:
        """Copy the shared row of weights of each `spread` run to all rows of the run."""
        for own, rows in self.spread:
            self.whole.weights[rows].copy_(own.weights)

    def gather_gradients(self) -> None:
        """Write the mean gradient to runs that share one row of gradients, and copy the shared row of weights back.

        Raises:
            ValueError: forward changed the copies of a shared row in different ways.
        """
        for own, rows in self.spread:
            copies = self.whole.weights[rows]
            own.weights.copy_(copies[:1])
            if not torch.equal(bits_of(own.weights).expand_as(copies), bits_of(copies)):
                raise ValueError(_SHARED)
            if own.shares_grads:
                torch.mean(self.whole.grads[rows], 0, keepdim=True, out=own.grads)


class FewRows:
    """Computes a part of an executor's rows, on copies; for instance, the rows whose batches have equal sizes.

    Args:
        engine: computes all rows.
        make: makes an executor for other rows and their random generators.

    Attributes:
        batch: the stacked batch (n, B, …) that was computed last.
    """

    def __init__(self, engine: Executor, make: Callable[[Replicas, list[torch.Generator]], Executor]) -> None:
        self.engine, self._make = engine, make
        self._made: dict[int, Executor] = {}  # by number of rows
        self.batch: Any = None

    @cached_property
    def _copies(self) -> Replicas:
        whole = self.engine.replicas
        size = whole.num_held, whole.num_parameters, whole.weights.dtype, whole.weights.device
        buffers = {name: b.clone() for name, b in whole.buffers.items()}
        return replace(whole, weights=matrix(*size), grads=matrix(*size), buffers=buffers)

    def of_uneven(self, batch: Uneven, minibatch_size: int | None) -> Tensor:
        """Return the losses (R,) of all rows, and write their gradients, part by part."""
        losses, replicas = torch.empty(0), self.engine.replicas
        if replicas.shares_grads:
            replicas.grads.zero_()
        for rows, part in zip(batch.rows, batch.parts, strict=True):
            own = self.losses_and_grads(rows, part, minibatch_size)
            losses = losses if len(losses) else own.new_empty(replicas.num_held)
            losses[rows_on(own.device, rows)] = own
        return losses

    def losses_and_grads(self, rows: list[int], batch: Any, minibatch_size: int | None) -> Tensor:
        """Return the losses (n,) of some rows on their stacked batch (n, B, …), and write their gradients.

        If all nodes share one row of gradients, add these rows' part of the mean to it.

        Raises:
            ValueError: the model changes weights that nodes share.
        """
        whole, self.batch = self.engine.replicas, batch
        places = rows_on(whole.weights.device, rows)
        if len(rows) not in self._made:
            self._made[len(rows)] = self._make(self._copies.rows(0, len(rows)), [])
        executor = self._made[len(rows)]
        few = executor.replicas
        executor.generators[:] = [self.engine.generators[row] for row in rows]  # type: ignore[index]
        weights = whole.weights.expand(whole.num_held, -1)[places]
        few.weights.copy_(weights)
        for name, buffer in few.buffers.items():
            buffer.copy_(whole.buffers[name][places])
        executor.objective.callers = rows
        try:
            losses = executor.losses_and_grads(batch, minibatch_size)
        finally:
            executor.objective.callers = None
        if not torch.equal(bits_of(few.weights), bits_of(weights)):
            if whole.shares_weights:
                raise ValueError(_SHARED)
            whole.weights[places] = few.weights
        if whole.shares_grads:
            whole.grads.add_(few.grads.sum(0), alpha=1 / whole.num_held)
        else:
            whole.grads[places] = few.grads
        for name, buffer in few.buffers.items():
            whole.buffers[name][places] = buffer
        return losses
