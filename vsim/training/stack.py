"""A stack: runs of equal model and shapes, whose nodes are rows of one matrix, computed in one call."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from itertools import chain
from typing import Any

import torch
from torch import Tensor

from vsim.cluster.reductions import rows_on
from vsim.cluster.replicas import Replicas, matrix
from vsim.data.batches import Uneven, of_rows
from vsim.engine import Executor
from vsim.engine.executor import undone
from vsim.engine.machine import takes_one_thread
from vsim.training.run import Run


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
        whole: all rows.
        make: makes an executor for some of the rows and their random generators.
        taking: the runs with present rows, in the order of their rows.
        executor: computes the losses and gradients of the present rows.
        few: computes some of the present rows, if nodes have batches of different sizes.
        batches: (step, stacked batch (R, B, …) for the present rows, on any device), from the next step on.
        batch: the batch computed last.
        take_own_step: takes a step of the stack's only run, if the run is asynchronous.
        is_small: whether one thread computes the present rows.
    """

    runs: list[Run]
    whole: Replicas
    make: Callable[[Replicas, list[torch.Generator]], Executor]
    executor: Executor = field(init=False)
    few: FewRows = field(init=False)
    taking: list[Run] = field(default_factory=list)
    batches: Iterator[tuple[int, Any]] = field(default_factory=lambda: iter(()))
    batch: Any = None
    take_own_step: Callable[[], None] | None = None
    is_small: bool = False
    _executors: dict[int, tuple[Executor, bool]] = field(default_factory=dict)  # by number of rows; with `is_small`

    def place(self, run: Run, rows: range) -> None:
        """Give a run these rows of the matrix."""
        earlier, run.rows = run.cluster.replicas, rows
        first = min(run.nodes.start, run.cluster.num_nodes - 1)  # a process without a node has one row
        run.cluster.replicas = self.whole.rows(rows.start, rows.stop, first)
        run.strategy.move_rows(earlier)

    def compute_first(self, taking: Sequence[Run]) -> None:
        """From now on, compute the rows of these runs, which are the first rows of the matrix."""
        self.taking = [run for run in taking if run.nodes]
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

    def coming_batch(self) -> Any:
        """Return the batch of the next step, which `batches` will yield again."""
        first = next(self.batches)
        self.batches = chain([first], self.batches)
        return first[1]

    def losses_and_grads(self, batch: Any) -> Tensor:
        """Return the losses (R,) of a stacked batch (R, B, …) or an Uneven; write gradients to the runs' rows."""
        self.batch = batch
        self.executor.settings.undrawn.clear()
        if isinstance(batch, Uneven):
            return self.few.of_uneven(batch, self.minibatch_size)
        return self.executor.losses_and_grads(batch, self.minibatch_size)

    def gradient_at(self, run: Run, at: Tensor, batch: Any = None) -> Tensor:
        """Return the gradients (R, P) of a run's rows at other weights; see `Cluster.gradient`."""
        if not run.nodes:
            return torch.zeros_like(at)
        own = range(run.rows.start, run.rows.start + len(at))
        if self.executor.draws_jointly and len(own) < self.executor.replicas.num_held:
            if batch is not None:
                raise ValueError(
                    "gradient(batch=…) of a model that draws random numbers: with compile=True, they depend on the "
                    "other runs of the comparison; give it together=False or compile=False"
                )
            weights = self.executor.replicas.weights.clone()
            weights[own.start : own.stop] = at
            return self._grads_at(range(len(weights)), weights, self.batch)[own.start : own.stop]
        return self._grads_at(own, at, of_rows(self.batch, own) if batch is None else batch)

    def _grads_at(self, rows: range, weights: Tensor, batch: Any) -> Tensor:
        """Return the gradients (n, P) of adjacent rows at other weights (n, P), on their batch."""
        grads = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device)
        parts = [([*range(len(rows))], batch)]
        if isinstance(batch, Uneven):
            parts = [*zip(batch.rows, batch.parts, strict=True)]
        for places, part in parts:
            own = [rows.start + place for place in places]
            with torch.enable_grad():
                grads[places] = self.few.grads_at(own, weights[places], part, self.minibatch_size)
        return grads

    @property
    def minibatch_size(self) -> int | None:
        """The examples per node whose gradients are computed at once; None: the whole batch."""
        return self.runs[0].minibatch_size
