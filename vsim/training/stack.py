"""A stack: runs of equal model and shapes, whose nodes are rows of one matrix, computed in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from vsim.cluster.reductions import rows_on
from vsim.cluster.replicas import Replicas, matrix
from vsim.data.batches import Uneven, of_rows
from vsim.engine import Executor
from vsim.engine.executor import bits_of, undone
from vsim.engine.machine import takes_one_thread
from vsim.private_torch import storage_key
from vsim.training.joint_steps import Optimizers
from vsim.training.run import Run

_SHARED = (
    "the model changes its weights in forward, on each node in another way, and with this strategy all nodes share one "
    "row of them: with deterministic=True every node has a row of its own"
)


class FewRows:
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
        if replicas.shares_grads:
            replicas.grads.zero_()
        for rows, part in zip(batch.rows, batch.parts, strict=True):
            own = self.losses_and_grads(rows, part, minibatch_size)
            losses = losses if len(losses) else own.new_empty(replicas.num_held)
            losses[rows_on(own.device, rows)] = own
        return losses

    def losses_and_grads(self, rows: list[int], batch: Any, minibatch_size: int | None) -> Tensor:
        """Return the losses (n,) of some rows on their stacked batch (n, B, …), and write their gradients.

        If all nodes share one row of gradients (their mean), add the given rows' contribution to the shared row.

        Raises:
            ValueError: the model changes weights that nodes share.
        """
        whole, self.batch = self.engine.replicas, batch
        places = rows_on(whole.weights.device, rows)
        weights = whole.weights.expand(whole.num_held, -1)[places]
        executor = self._placed(rows, weights)
        few, losses = executor.replicas, _computed(executor, rows, batch, minibatch_size)
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

    def grads_at(self, rows: list[int], weights: Tensor, batch: Any, minibatch_size: int | None) -> Tensor:
        """Return the gradients (n, P) of some rows at other weights (n, P), on their stacked batch (n, B, …).

        The rows themselves and their random generators do not change.
        """
        executor = self._placed(rows, weights)
        with undone(executor):
            _computed(executor, rows, batch, minibatch_size)
        return executor.replicas.grads.clone()

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
    executor.objective.callers = rows
    try:
        return executor.losses_and_grads(batch, minibatch_size)
    finally:
        executor.objective.callers = None


@dataclass(eq=False)
class Stack:
    """Runs of equal model and shapes. Their nodes are rows of one matrix, whose gradients are computed in one call.

    Present rows come first: the rows of the runs in `taking`, which are computed. Then come the rows of runs that have
    ended, and rows without a node.

    Attributes:
        whole: all rows. If all nodes of a run share one row of weights or gradients, and the stack has other runs,
            the run keeps that row outside the matrix.
        make: makes an executor for some of the rows and their random generators.
        taking: the runs with present rows, in the order of their rows.
        executor: computes the losses and gradients of the present rows.
        few: computes some of the present rows, if nodes have batches of different sizes.
        batches: stacked batches (R, B, …) for the present rows, on any device. batch: the batch computed last.
        optimizers: the runs' inner optimizers; optimizers with equal settings share a call.
        take_own_step: takes a step of the stack's only run, if the run is asynchronous.
        is_small: whether one thread computes the present rows.
    """

    runs: list[Run]
    whole: Replicas
    make: Callable[[Replicas, list[torch.Generator]], Executor]
    executor: Executor = field(init=False)
    few: FewRows = field(init=False)
    optimizers: Optimizers = field(init=False)
    taking: list[Run] = field(default_factory=list)
    batches: Iterator[Any] = field(default_factory=lambda: iter(()))
    batch: Any = None
    take_own_step: Callable[[], None] | None = None
    is_small: bool = False
    _apart: list[tuple[Replicas, slice]] = field(default_factory=list)  # row outside the matrix, slice of its copies
    _executors: dict[int, tuple[Executor, bool]] = field(default_factory=dict)  # by number of rows; with `is_small`

    def place(self, run: Run, rows: range) -> None:
        """Give a run these rows of the matrix, in addition to its rows outside the matrix."""
        earlier, run.rows = run.cluster.replicas, rows
        first = min(run.nodes.start, run.cluster.num_nodes - 1)  # a process without a node has one row
        own = self.whole.rows(rows.start, rows.stop, first)
        if storage_key(earlier.weights) != storage_key(self.whole.weights):
            own = replace(own, weights=earlier.weights)
        if storage_key(earlier.grads) != storage_key(self.whole.grads):
            own = replace(own, grads=earlier.grads)
        run.cluster.replicas = own
        run.strategy.move_rows(earlier)

    def compute_first(self, taking: Sequence[Run]) -> None:
        """From now on, compute the rows of these runs, which are the first rows of the matrix."""
        self.taking = [run for run in taking if run.nodes]
        key = storage_key(self.whole.weights)
        apart = (run for run in self.taking if storage_key(run.cluster.replicas.weights) != key)
        self._apart = [(run.cluster.replicas, run.taking) for run in apart]
        streams = [stream for run in self.taking for stream in run.generators[: len(run.rows)]]
        if not streams and self._executors:
            return
        number = len(streams) or self.whole.num_held
        if number not in self._executors:
            made = self.make(self.whole.rows(0, number), streams)
            self._executors[number] = made, takes_one_thread(made)
        self.executor, self.is_small = self._executors[number]
        self.executor.generators[:] = streams
        self.few.engine = self.executor
        self.optimizers = Optimizers([run.strategy for run in self.taking])

    def losses_and_grads(self, batch: Any) -> Tensor:
        """Return the losses (R,) of a stacked batch (R, B, …) or an Uneven; write gradients to the runs' rows.

        Raises:
            ValueError: forward changes the copies of a shared row differently.
        """
        self.batch = batch
        for own, rows in self._apart:
            self.whole.weights[rows].copy_(own.weights)
        if isinstance(batch, Uneven):
            losses = self.few.of_uneven(batch, self.minibatch_size)
        else:
            losses = self.executor.losses_and_grads(batch, self.minibatch_size)
        for own, rows in self._apart:
            copies = self.whole.weights[rows]
            own.weights.copy_(copies[:1])
            if not torch.equal(bits_of(own.weights).expand_as(copies), bits_of(copies)):
                raise ValueError(_SHARED)
            if storage_key(own.grads) != storage_key(self.whole.grads):
                torch.mean(self.whole.grads[rows], 0, keepdim=True, out=own.grads)
        return losses

    def gradient_at(self, run: Run, at: Tensor, batch: Any = None) -> Tensor:
        """Return the gradients (R, P) of a run's rows at other weights; see `Cluster.gradient`."""
        if not run.nodes:
            return torch.zeros_like(at)
        start, grads = run.rows.start, torch.empty(at.shape, dtype=at.dtype, device=at.device)
        if batch is None:
            batch = of_rows(self.batch, range(start, start + len(at)))
        parts = [([*range(len(at))], batch)]
        if isinstance(batch, Uneven):
            parts = [*zip(batch.rows, batch.parts, strict=True)]
        for own, part in parts:
            rows = [start + row for row in own]
            with torch.enable_grad():
                grads[own] = self.few.grads_at(rows, at[own], part, self.minibatch_size)
        return grads

    @property
    def minibatch_size(self) -> int | None:
        """The examples per node whose gradients are computed at once; None: the whole batch."""
        return self.runs[0].minibatch_size
