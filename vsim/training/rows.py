"""The rows of a stack: one matrix that holds the nodes of all its runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vsim.cluster.reductions import rows_on
from vsim.cluster.replicas import Replicas, matrix
from vsim.data.batches import Uneven
from vsim.engine import Executor
from vsim.engine.executor import bits_of
from vsim.private_torch import storage_key

_SHARED = (
    "the model changes its weights in forward, on each node in another way, and with this strategy all nodes share one "
    "row of them: with deterministic=True every node has a row of its own"
)


@dataclass
class Rows:
    """The rows that are computed, and the rows that the runs hold.

    What a run holds is a view of `whole`. Exception: if all nodes of a run share one row of weights or gradients, and
    other runs train beside it, the run holds that row apart.

    Attributes:
        whole: all rows.
    """

    whole: Replicas

    def part(self, rows: range, first_node: int, held: Replicas | None = None) -> Replicas:
        """Return the rows of a run, which keeps the row that it has `held` apart."""
        own = self.whole.rows(rows.start, rows.stop, first_node)
        if held is not None and storage_key(held.weights) != storage_key(self.whole.weights):
            own = replace(own, weights=held.weights)
        if held is not None and storage_key(held.grads) != storage_key(self.whole.grads):
            own = replace(own, grads=held.grads)
        return own

    def _apart(self, parts: Sequence[tuple[Replicas, slice]]) -> list[tuple[Replicas, slice]]:
        return [(own, rows) for own, rows in parts if storage_key(own.weights) != storage_key(self.whole.weights)]

    def copy_out(self, parts: Sequence[tuple[Replicas, slice]]) -> None:
        """Copy rows of weights that runs hold apart to all rows of these runs.

        Args:
            parts: what each run holds, and its rows.
        """
        for own, rows in self._apart(parts):
            self.whole.weights[rows].copy_(own.weights)

    def gather_gradients(self, parts: Sequence[tuple[Replicas, slice]]) -> None:
        """Write the mean gradient to runs that share one row of gradients, and copy the shared row of weights back.

        Raises:
            ValueError: forward changed the copies of a shared row in different ways.
        """
        for own, rows in self._apart(parts):
            copies = self.whole.weights[rows]
            own.weights.copy_(copies[:1])
            if not torch.equal(bits_of(own.weights).expand_as(copies), bits_of(copies)):
                raise ValueError(_SHARED)
            if storage_key(own.grads) != storage_key(self.whole.grads):
                torch.mean(self.whole.grads[rows], 0, keepdim=True, out=own.grads)


class FewRows:
    """Computes a part of an executor's rows, on copies; for instance, the rows whose batches have equal sizes.

    Args:
        whole: as many rows as there can be.
        make: makes an executor for other rows and their random generators.

    Attributes:
        engine: computes all rows that are present.
        batch: the stacked batch (n, B, …) that was computed last.
    """

    engine: Executor

    def __init__(self, whole: Replicas, make: Callable[[Replicas, list[torch.Generator]], Executor]) -> None:
        self._whole, self._make = whole, make
        self._made: dict[int, Executor] = {}  # by number of rows
        self.batch: Any = None

    @cached_property
    def _copies(self) -> Replicas:
        whole = self._whole
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
        executor.generators[:] = [self.engine.generators[row] for row in rows]
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
