"""Runs whose rows lie together, and the only loop that trains them in lockstep.

    group ─► train(group) ─► Step, Step, …    the caller validates, records and saves between two steps

The core knows nothing of what happens between steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from vsim.arguments import retold
from vsim.cluster.replicas import Replicas
from vsim.core.algorithm import take_step
from vsim.core.exchange import exchange
from vsim.core.failing import Guard, Requests, all_leave, check_draws, leave, states_for_trial
from vsim.core.few_rows import SubsetExecutor
from vsim.core.run import Diverged, Run
from vsim.data.batches import Uneven, of_rows
from vsim.engine.executor import Executor
from vsim.engine.machine import moved, synchronize, takes_one_thread, using_threads
from vsim.engine.objective import Objective, explained
from vsim.trees import tensors_of

R = TypeVar("R", bound=Run)
Kept = tuple[list[int], list[Tensor]]  # rows; of each matrix with rows, a copy of these


@dataclass
class Step:
    """A completed step.

    Attributes:
        number: from 1. losses: of this process's present rows (R,).
        stops: with several processes, whether one was asked to stop; a single one knows its own request.
    """

    number: int
    losses: Tensor
    stops: bool = False


@dataclass(eq=False)
class Group(Generic[R]):
    """Runs of equal model and shapes. Their nodes are rows of one matrix, whose gradients are computed in one call.

    Present rows come first: the rows of the runs in `present`, which are computed. Then come the rows of runs that have
    ended, and rows without a node.

    Attributes:
        whole: all rows. objective: model and loss.
        make: makes an executor for some of the rows and their random generators.
        requests: whether this process was asked to stop.
        minibatch_size: the examples per node whose gradients are computed at once; None: the whole batch.
        several: whether runs of this and other groups train together, and share the global random generators.
        apart: what a user may do, other than to draw from nodes' generators, if runs would share draws.
        isolates_failures: whether the other runs continue when a run fails; if False, the error is raised.
        raises_first: whether an error in a run's first step is raised even if `isolates_failures`, as no progress is
            lost.
        rng_check_steps: the number of coming steps in which draws from global random generators and undeclared state
            are detected; the act `CheckDeclared` counts them down.
        present: the runs whose rows are computed, in the order of their rows; a run that ends stays until rows move.
        executor: computes the losses and gradients of the present rows.
        few: computes some of the present rows, if nodes have batches of different sizes.
        batches: (step, stacked batch (R, B, …) for the present rows, on any device), from the next step on.
        batch: the batch computed last.
        is_small: whether one thread computes the present rows.
        steps: takes the steps; `train(group)`, unless the run is asynchronous.
    """

    runs: list[R]
    whole: Replicas
    objective: Objective
    make: Callable[[Replicas, list[torch.Generator]], Executor]
    requests: Requests
    minibatch_size: int | None = None
    several: bool = False
    apart: str = "give together=False, or "
    isolates_failures: bool = False
    raises_first: bool = True
    rng_check_steps: int = 2
    executor: Executor = field(init=False)
    few: SubsetExecutor = field(init=False)
    present: list[R] = field(default_factory=list)
    batches: Iterator[tuple[int, Any]] = field(default_factory=lambda: iter(()))
    batch: Any = None
    is_small: bool = False
    steps: Iterator[Step] = field(init=False)
    _executors: dict[int, tuple[Executor, bool]] = field(default_factory=dict)  # by number of rows; with `is_small`

    def __post_init__(self) -> None:
        self.few = SubsetExecutor(self.whole, self.make)
        self.steps = train(self)
        for run in self.runs:
            run.group = self

    def place(self, run: R, rows: range) -> None:
        """Give a run these rows of the matrix."""
        earlier, run.rows = run.cluster.replicas, rows
        first = min(run.nodes.start, run.cluster.num_nodes - 1)  # a process without a node has one row
        run.cluster.replicas = self.whole.rows(rows.start, rows.stop, first)
        run.strategy.move_rows(earlier)

    def compute_first(self, runs: Sequence[R]) -> None:
        """From now on, compute the rows of these runs, which are the first rows of the matrix."""
        self.present = [run for run in runs if run.nodes]
        streams = [stream for run in self.present for stream in run.generators[: len(run.rows)]]
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

    def gradient_at(self, run: R, at: Tensor, batch: Any = None) -> Tensor:
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
    def running(self) -> list[R]:
        """The runs that will take another step."""
        return [run for run in self.runs if run.is_running]

    # Time -----------------------------------------------------------------------------------------------------------

    def settle(self, runs: Sequence[R]) -> None:
        """Wait for the device in the time of the step that these runs have taken; called before other work is timed."""
        started = time.perf_counter()
        synchronize(self.whole.weights.device)
        share_time(runs, time.perf_counter() - started)


def share_time(runs: Sequence[Run], seconds: float) -> None:
    """Give runs that trained together their shares of the time, in proportion to their nodes."""
    num_nodes = sum(run.cluster.num_nodes for run in runs)
    for run in runs:
        run.seconds += seconds * run.cluster.num_nodes / num_nodes


def train(group: Group[Any]) -> Iterator[Step]:
    """Take one step after the other with the runs of a group that are still running, and yield each."""
    while runs := group.running:
        yield _step(group, runs)


def _step(group: Group[Any], runs: Sequence[Run]) -> Step:
    started, step = time.perf_counter(), Step(runs[0].done + 1, torch.empty(0))
    device, steps = group.whole.weights.device, {run.done + 1 for run in runs}
    for run in runs:
        run.ledger.position.begin(step.number)
        run.lr = run.cluster.lr
    kept: dict[Run, Kept] = {}
    for run in group.present:
        if run.cluster.plan is not None or not run.is_running:
            _check_present(run, step.number)
            kept[run] = _kept(run)
    try:
        of_step, batch = next(group.batches) if group.present else (step.number, [])
        if any(t.device != device for t in tensors_of(batch)):
            batch = moved(batch, device)
    except Exception as error:
        all_leave(group, runs, retold(error, f"the batches of step {step.number}: {error}"))
        return step
    if {of_step, *steps} != {step.number}:  # would train on wrong examples without a sign of it
        raise RuntimeError(f"step {step.number} got the batch of step {of_step} for runs whose next steps are {steps}")
    before = states_for_trial(group, runs[0])
    with using_threads(1) if group.is_small else nullcontext():
        try:
            with runs[0].computing():
                step.losses = group.losses_and_grads(batch) if group.present else step.losses
        except Exception as error:  # an error of the model or the data, which all runs of the group share
            given = group.few.batch if isinstance(batch, Uneven) else batch
            all_leave(group, runs, explained(error, group.executor.objective, given, 1, f"at step {step.number}"))
            return step
        check_draws(group, before, runs[0], "the model")
        with torch.no_grad():
            _end_step(group, step, runs, batch, kept)
    share_time([run for run in runs if run.trains], time.perf_counter() - started)
    return step


def _check_present(run: Run, step: int) -> None:
    """Raise a RuntimeError if other nodes than those of the run's plan are present, as nothing has let them attend."""
    nodes = run.cluster.active if run.cluster.plan is None else run.cluster.plan.segment(step).nodes
    if run.is_running and nodes != run.cluster.active:
        raise RuntimeError(
            f"step {step} is of nodes {[*nodes]}, and {[*run.cluster.active]} are present: train(group) alone lets no "
            "nodes come and go; take the steps of vsim.runs.fit.steps([group])"
        )


def _end_step(group: Group[Any], step: Step, runs: Sequence[Run], batch: Any, kept: Mapping[Run, Kept]) -> None:
    """Exchange and check the losses, before a strategy acts; then take every run's own part of the step."""
    resting = {run: run.cluster.resting_nodes for run in runs}
    found, step.stops = exchange(step.losses, batch, resting, group.requests.requested)
    for run in runs:
        run.node_losses, examples, tokens = found[run]
        run.examples, run.tokens = run.examples + examples, run.tokens + tokens
        known = dict(zip(run.cluster.active, run.node_losses, strict=True))
        for node in resting[run]:  # its row was computed beside the others, and is put back
            del known[run.cluster.active[node]]
        try:
            run.check_losses(known, batch, run.present_rows, run.cluster.active)
        except (Diverged, IndexError) as error:
            leave(group, run, error)
        for node in resting[run]:
            run.node_losses[node] = math.nan
        run.cluster.losses = run.node_losses
    for run in group.present:
        if not run.is_running and run in kept:
            _put_back(run, kept[run])
    for run in runs:
        if run.trains:
            with Guard(group, run):
                take_step(run.strategy, partial(_put_back, run, kept[run]) if run in kept else None)


# The step updates all rows: what rows held before is kept, and put back after the optimizer, before nodes communicate.


def _kept(run: Run) -> Kept:
    """Return a copy of the rows of resting nodes, or of a run that has ended."""
    rows = run.cluster.resting if run.is_running else [*range(len(run.nodes))]
    return rows, [matrix[rows] for matrix in (run.cluster.weights, *run.cluster.replicas.buffers.values()) if rows]


def _put_back(run: Run, kept: Kept) -> None:
    rows, copies = kept
    replicas = run.cluster.replicas
    for matrix, own in zip((replicas.weights, *replicas.buffers.values()), copies, strict=True) if rows else ():
        matrix[rows] = own
