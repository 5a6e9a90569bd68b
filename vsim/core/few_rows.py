"""Compute some of a group's rows as copies: rows whose batches have one size, or rows at other weights."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vsim.cluster.reductions import rows_on
from vsim.cluster.replicas import Replicas, matrix
from vsim.data.batches import Uneven
from vsim.engine.executor import Executor, undone


class SubsetExecutor:
    """Computes some of an executor's rows, as copies: rows whose batches have one size, or rows at other weights.

    Args:
        whole: all rows of the stack.
        make: makes an executor for the copied rows and their random generators.

    Attributes:
        engine: the executor of all present rows.
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
        """Return the losses (R,) of all rows, and write their gradients; a call computes the batches of one size."""
        losses, replicas = torch.empty(0), self.engine.replicas
        for rows, part in zip(batch.rows, batch.parts, strict=True):
            own = self.losses_and_grads(rows, part, minibatch_size)
            losses = losses if len(losses) else own.new_empty(replicas.num_held)
            losses[rows_on(own.device, rows)] = own
        return losses

    def losses_and_grads(self, rows: list[int], batch: Any, minibatch_size: int | None) -> Tensor:
        """Return the losses (n,) of some rows on their stacked batch (n, B, …), and write their gradients."""
        whole, self.batch = self.engine.replicas, batch
        places = rows_on(whole.weights.device, rows)
        executor = self._placed(rows, whole.weights[places])
        few, losses = executor.replicas, _computed(executor, rows, batch, minibatch_size)
        whole.weights[places], whole.grads[places] = few.weights, few.grads
        for name, buffer in few.buffers.items():
            whole.buffers[name][places] = buffer
        return losses

    def grads_at(self, rows: list[int], weights: Tensor, batch: Any, minibatch_size: int | None) -> Tensor:
        """Return the gradients (n, P) of some rows at other weights (n, P), on their stacked batch (n, B, …).

        The model draws the numbers of the current step again. The rows and their random generators do not change.

        Args:
            weights: must not share memory with the rows.
        """
        is_all = len(rows) == self.engine.replicas.num_held
        executor = self.engine if is_all else self._placed(rows, weights)
        own = executor.replicas
        kept = own.grads.clone()
        with undone(executor):
            executor.rewind()
            own.weights.copy_(weights)
            _computed(executor, rows, batch, minibatch_size)
            found = own.grads.clone()
        own.grads.copy_(kept)
        return found

    def _placed(self, rows: list[int], weights: Tensor) -> Executor:
        """Return an executor of copies of the rows, with these weights (n, P) and the rows' buffers."""
        whole, number = self.engine.replicas, len(rows)
        if number not in self._made:
            self._made[number] = self._make(self._copies.rows(0, number), [])
        executor, places = self._made[number], rows_on(whole.weights.device, rows)
        executor.generators[:] = [self.engine.generators[row] for row in rows]
        executor.replicas.weights.copy_(weights)
        for name, buffer in executor.replicas.buffers.items():
            buffer.copy_(whole.buffers[name][places])
        return executor


def _computed(executor: Executor, rows: list[int], batch: Any, minibatch_size: int | None) -> Tensor:
    """Return the losses (n,) of an executor whose rows are copies of `rows`."""
    executor.objective.node_of_row = rows
    try:
        return executor.losses_and_grads(batch, minibatch_size)
    finally:
        executor.objective.node_of_row = None
