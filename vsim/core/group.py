"""Runs whose rows lie together, and the only loop that trains them in lockstep.

    group ─► train(group) ─► Step, Step, …    whoever iterates validates, records, saves between two steps

The core knows nothing of what happens between steps.
"""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, Generic, Protocol, TypeVar

import torch
from torch import Tensor

from vsim.arguments import retold
from vsim.cluster.randomness import fingerprints
from vsim.cluster.replicas import Replicas
from vsim.cluster.state import CheckpointError
from vsim.core.few_rows import FewRows
from vsim.core.run import Diverged, Run
from vsim.data.batches import Uneven, of_rows, sizes_of
from vsim.engine.executor import Executor
from vsim.engine.machine import moved, synchronize, takes_one_thread, using_threads
from vsim.engine.objective import explained
from vsim.strategy.base import take_step
from vsim.trees import tensors_of

DRAW_FROM_NODES = "draw from cluster.generator in a strategy, or by torch's functions in a model"
R = TypeVar("R", bound=Run)


class Requests(Protocol):
    """Whether the user has asked to stop after the current step; see `vsim.training.interrupt`."""

    requested: bool
    insisted: bool

    def explains(self, error: Exception) -> bool:
        """Return whether an error may come of the request, so that it must not become the outcome of a run."""
        ...


@dataclass
class Step:
    """A completed step.

    Attributes:
        number: from 1. losses: of this process's present rows (R,). stops: whether a process was asked to stop.
    """

    number: int
    losses: Tensor
    stops: bool = False


@dataclass(eq=False)
class Group(Generic[R]):
    """Runs of equal model and shapes. Their nodes are rows of one matrix, whose gradients are computed in one call.

    Present rows come first: the rows of the runs in `taking`, which are computed. Then come the rows of runs that have
    ended, and rows without a node.

    Attributes:
        whole: all rows.
        make: makes an executor for some of the rows and their random generators.
        requests: whether this process was asked to stop.
        several: whether runs of this and other groups train together, and share the global random generators.
        apart: what a user may do, other than to draw from nodes' generators, if runs would share draws.
        tolerant: whether the other runs continue when a run fails; if False, the error is raised.
        ends_early: whether an error in a run's first step is raised even if `tolerant`, because no progress is lost.
        taking: the runs with present rows, in the order of their rows.
        executor: computes the losses and gradients of the present rows.
        few: computes some of the present rows, if nodes have batches of different sizes.
        batches: (step, stacked batch (R, B, …) for the present rows, on any device), from the next step on.
        batch: the batch computed last.
        is_small: whether one thread computes the present rows.
        steps: takes the steps; `train(group)`, unless the run is asynchronous.
    """

    runs: list[R]
    whole: Replicas
    make: Callable[[Replicas, list[torch.Generator]], Executor]
    requests: Requests
    several: bool = False
    apart: str = "give together=False, or "
    tolerant: bool = False
    ends_early: bool = True
    executor: Executor = field(init=False)
    few: FewRows = field(init=False)
    taking: list[R] = field(default_factory=list)
    batches: Iterator[tuple[int, Any]] = field(default_factory=lambda: iter(()))
    batch: Any = None
    is_small: bool = False
    steps: Iterator[Step] = field(init=False)
    _executors: dict[int, tuple[Executor, bool]] = field(default_factory=dict)  # by number of rows; with `is_small`

    def __post_init__(self) -> None:
        self.few = FewRows(self.whole, self.make)
        self.steps = train(self)
        for run in self.runs:
            run.group = self

    def place(self, run: R, rows: range) -> None:
        """Give a run these rows of the matrix."""
        earlier, run.rows = run.cluster.replicas, rows
        first = min(run.nodes.start, run.cluster.num_nodes - 1)  # a process without a node has one row
        run.cluster.replicas = self.whole.rows(rows.start, rows.stop, first)
        run.strategy.move_rows(earlier)

    def compute_first(self, taking: Sequence[R]) -> None:
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
    def minibatch_size(self) -> int | None:
        """The examples per node whose gradients are computed at once; None: the whole batch."""
        return self.runs[0].minibatch_size

    @property
    def running(self) -> list[R]:
        """The runs that will take another step."""
        return [run for run in self.runs if run.is_running]

    # Errors ---------------------------------------------------------------------------------------------------------

    def leave(self, run: R, error: Exception) -> None:
        """End a failed run so that the others continue; raise the error if they cannot, or if this loses no progress.

        After a request to stop, a run that fails has no outcome: the others complete the step, and all can be resumed.
        """
        if self.requests.explains(error):
            if self.requests.insisted or not (self.tolerant and run.is_alone):
                raise error
            warnings.warn(
                f"{run.spec.label}: interrupted in step {run.cluster.step}, which was not completed: {error!r}",
                UserWarning,
                stacklevel=2,
            )
            run.cut = True
            return
        nothing_lost = self.ends_early and (run.done == 0 or isinstance(error, CheckpointError))
        if not self.tolerant or not (isinstance(error, Diverged) or (run.is_alone and not nothing_lost)):
            raise error  # with several processes, the other processes may not have this error
        run.error = error

    def states_for_trial(self, run: R) -> dict[str, bytes]:
        """Return the states of the global random generators, if `run` is one of several and in its first steps."""
        return fingerprints(run.cluster.weights.device) if run.trial_steps > 0 and self.several else {}

    def check_draws(self, before: Mapping[str, bytes], run: R, who: str) -> None:
        """Raise a ValueError if `who` has drawn from global random generators since `states_for_trial` gave `before`.

        Runs that train together share these generators, so that the numbers of one run would depend on the others.
        """
        now = self.states_for_trial(run) if before else {}
        if found := [name for name, state in before.items() if state != now[name]]:
            raise ValueError(
                f"{who} draws from the global random generators ({', '.join(found)}), which runs that train together "
                f"would share: {self.apart}{DRAW_FROM_NODES}"
            )

    # Between processes ----------------------------------------------------------------------------------------------

    def exchange(
        self, losses: Tensor, batch: Any, resting: Mapping[R, Sequence[int]]
    ) -> tuple[dict[R, tuple[list[float], int, int]], bool]:
        """Return run → (losses (K,), examples, tokens of its nodes), and whether a process was asked to stop.

        All runs of the group share one message. In one process nothing is sent, and nobody is asked.

        Args:
            resting: run → the places of its nodes that rest, whose examples do not count.
        """
        runs = [*resting]
        if runs[0].is_alone:
            # The only copy from the device in a step, for which the host waits. Copying the losses of several steps at
            # once would let the host run ahead, but a run with a non-finite loss must end with the weights of its last
            # good step, and callbacks, loggers and early stopping need each step's losses in that step.
            values, found = losses.tolist(), {}
            for run in runs:
                own = run.taking
                taking = (row for row in range(own.start, own.stop) if row - own.start not in resting[run])
                found[run] = (values[own], *sizes_of(batch, taking))
            return found, False
        rows = [row for run in runs for row in range(run.taking.start, run.taking.stop)]
        alike = [sizes_of(batch)] * len(rows) if rows and not isinstance(batch, Uneven) else []
        sizes = alike or [sizes_of(batch, [row]) for row in rows]
        of_rows = torch.tensor([[self.requests.requested, *own] for own in sizes], dtype=torch.float64).view(-1, 3)
        table = torch.cat([losses[rows].cpu().double()[:, None], of_rows], 1)
        ranges = [run.cluster.collectives.ranges for run in runs]
        counts = [[len(nodes) for nodes in column] for column in zip(*ranges, strict=True)]  # by process, then run
        message = runs[0].cluster.collectives.all_rows(table, [sum(of_process) for of_process in counts], "losses")
        parts = iter(message.split([count for of_process in counts for count in of_process]))
        by_process = [[next(parts) for _ in of_process] for of_process in counts]
        found, stops = {}, False
        for run, *of_run in zip(runs, *by_process, strict=True):
            node_losses, requests, *of_nodes = torch.cat(of_run).T.tolist()
            stops = any(requests)
            examples, tokens = (sum(n for node, n in enumerate(one) if node not in resting[run]) for one in of_nodes)
            found[run] = node_losses, int(examples), int(tokens)
        return found, stops

    # Time -----------------------------------------------------------------------------------------------------------

    def settle(self, runs: Sequence[R]) -> None:
        """Wait for the device in the time of the step that these runs have taken; called before other work is timed."""
        started = time.perf_counter()
        synchronize(self.whole.weights.device)
        share_time(runs, time.perf_counter() - started)


class Guard(AbstractContextManager[None]):
    """A context for the code of one run, in which an error ends that run only; see `Group.leave`."""

    def __init__(self, group: Group[R], run: R) -> None:
        self.group, self.run = group, run

    def __enter__(self) -> None:
        self.before = self.group.states_for_trial(self.run)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None and self.before:
            who = f"{self.run.spec.label}: its strategy or a callback"
            self.group.check_draws(self.before, self.run, who)
        if not isinstance(error, Exception) or not self.group.tolerant:
            return False
        self.group.leave(self.run, error)
        return True


def all_leave(group: Group[R], runs: Sequence[R], error: Exception) -> None:
    """End these runs, which share what has failed: the data or the model."""
    for run in runs:
        group.leave(run, error)


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
        run.lr = run.strategy.lr
    for run in group.taking:
        if run.cluster.plan is not None or not run.is_running:
            run.keep_resting()
    try:
        of_step, batch = next(group.batches) if group.taking else (step.number, [])
        if any(t.device != device for t in tensors_of(batch)):
            batch = moved(batch, device)
    except Exception as error:
        all_leave(group, runs, retold(error, f"the batches of step {step.number}: {error}"))
        return step
    if {of_step, *steps} != {step.number}:  # would train on wrong examples without a sign of it
        raise RuntimeError(f"step {step.number} got the batch of step {of_step} for runs whose next steps are {steps}")
    before = group.states_for_trial(runs[0])
    with using_threads(1) if group.is_small else nullcontext():
        try:
            with runs[0].computing():
                step.losses = group.losses_and_grads(batch) if group.taking else step.losses
        except Exception as error:  # an error of the model or the data, which all runs of the group share
            given = group.few.batch if isinstance(batch, Uneven) else batch
            all_leave(group, runs, explained(error, group.executor.objective, given, 1, f"at step {step.number}"))
            return step
        group.check_draws(before, runs[0], "the model")
        with torch.no_grad():
            _end_step(group, step, runs, batch)
    share_time([run for run in runs if run.trains], time.perf_counter() - started)
    return step


def _end_step(group: Group[Any], step: Step, runs: Sequence[Run], batch: Any) -> None:
    """Exchange and check the losses, before a strategy acts; then take every run's own part of the step."""
    resting = {run: run.cluster.resting_nodes for run in runs}
    found, step.stops = group.exchange(step.losses, batch, resting)
    for run in runs:
        run.node_losses, examples, tokens = found[run]
        run.examples, run.tokens = run.examples + examples, run.tokens + tokens
        try:
            run.check_losses(dict(zip(run.cluster.active, run.node_losses, strict=True)), batch, run.taking)
        except (Diverged, IndexError) as error:
            group.leave(run, error)
        for node in resting[run]:
            run.node_losses[node] = math.nan
        run.cluster.losses = run.node_losses
    for run in group.taking:
        if not run.is_running:
            run.put_back_resting()
    for run in runs:
        if run.trains:
            with Guard(group, run):
                take_step(run.strategy, run.put_back_resting)
