"""Runs, stacks of runs whose gradients are computed in one call, and the ensemble of all that train together."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path
from torch.utils.data import Dataset

from vsim.cluster.cluster import Cluster
from vsim.cluster.collectives import Collectives
from vsim.cluster.ledger import Ledger
from vsim.cluster.plan import Plan
from vsim.cluster.randomness import OwnGlobals, global_states
from vsim.data.batches import BatchSource, Uneven, of_rows
from vsim.engine import Executor
from vsim.engine.machine import Threads
from vsim.engine.memory import Held
from vsim.engine.objective import Objective
from vsim.records.history import COLUMNS, SPREAD, VALIDATED, History
from vsim.records.progress import Reporter
from vsim.strategy.base import Strategy
from vsim.training.clients import Clients
from vsim.training.interrupt import Interrupt
from vsim.training.optimizers import Optimizers
from vsim.training.rows import FewRows, Rows
from vsim.training.spec import RunSpec

_WHAT_HELPS = "A lower learning rate, warmup_steps or max_norm usually helps"
_IGNORED = -100  # the label of an example that torch's cross_entropy leaves out


@dataclass(eq=False)
class Run:
    """One strategy with one seed on K nodes: its own state and record, independent of the runs that train with it.

    `vsim.training.setup` places a run in a matrix; until then it has no rows, cluster and strategy. Where nodes come
    and go, a copy that continues from its state is placed again.

    Attributes:
        spec: what was asked. report: gets the outcome of every step.
        history: the record of these outcomes, where this process keeps one.
        nodes: those held in this process. collectives: how they communicate. batches: stacked batches (R, B, …).
        plan: which nodes take part in which steps; None: all nodes in all steps.
        globals: the global random generators as this run alone would find them; None: the process's are its own.
        minibatch_size: examples per node whose gradients are computed at once; None: the whole batch.
        continues: the rows of its start that its nodes continue from; None: each its own.
        rows: its rows of the stack's matrix. cluster: its nodes. strategy: the run's own copy.
        streams: a random generator per node, for randomness in the model.
        objective: model and loss, shared with its stack.
        max_steps: steps to train; fewer than it was asked for once it was stopped.
        evaluator: measures it on the validation data; None: there are no such data.
        examples, tokens, seconds, validation_seconds: totals, including those before a resume. Runs that train
            together share the seconds of a step in proportion to their nodes.
        row: the history's row of the last step.
        starts: whether its first row is still to be reported; False if it resumes.
        draws: whether code of its strategy may draw from global random generators of its own.
        left_states: of the process's generators, as training left them.
        settings: what must be equal in a run that resumes, once they are known; see `vsim.checkpoint.settings`.
        fixed: path → objects in its state that a run which resumes cannot make.
        error: why it left the run before the others.
        stopped: whether it was asked to stop before the others.
        rungs: steps after which it is validated, besides the requested ones.
        node_losses: the losses of its nodes (K,) in the step that is being taken, or was taken last.
        clients: what belongs to the clients of a population, where its rows serve one.
        client_data: of each node or client, on which the global model is measured at the end; none: it is not.
    """

    spec: RunSpec
    report: Reporter
    history: History | None
    nodes: range
    collectives: Collectives
    batches: BatchSource
    plan: Plan | None = None
    globals: OwnGlobals | None = None
    minibatch_size: int | None = None
    continues: Sequence[int] | None = None
    client_data: Sequence[Dataset[Any]] = ()
    rows: range = field(init=False)
    cluster: Cluster = field(init=False)
    strategy: Strategy = field(init=False)
    streams: list[torch.Generator] = field(init=False)
    objective: Objective = field(init=False)
    interrupt: Interrupt = field(init=False)
    max_steps: int = field(init=False)
    evaluator: Callable[[Sequence[Run]], dict[Run, dict[str, float]]] | None = None
    examples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    validation_seconds: float = 0.0
    row: Mapping[str, float] = field(default_factory=dict)
    starts: bool = True
    draws: bool = False
    left_states: dict[str, Any] | None = None
    settings: dict[str, Any] = field(default_factory=dict)
    fixed: Mapping[str, str] = field(default_factory=dict)
    error: Exception | None = None
    stopped: bool = False
    rungs: Collection[int] = ()
    # Of the step that is being taken: its losses per node, learning rate, and the events of the ledger before it.
    node_losses: list[float] = field(default_factory=list)
    lr: float = 0.0
    known_events: int = 0
    clients: Clients | None = None
    # Of nodes that rest in this step: rows, weights, buffers.
    _kept: tuple[list[int], Tensor, list[Tensor]] | None = None
    # Weights to be measured next, shared (P,).
    global_weights: Tensor | None = None

    # The clock ------------------------------------------------------------------------------------------------------
    # It counts completed steps: what is due after step t is asked for when `done` is t.

    @property
    def steps(self) -> int:
        """The steps that were asked for."""
        spec = self.spec
        return spec.num_epochs * self.batches.steps_per_epoch if spec.max_steps is None else spec.max_steps

    @property
    def start(self) -> int:
        """The completed steps that it starts with."""
        return 0 if self.spec.start is None else self.spec.start.step

    @property
    def done(self) -> int:
        """Completed steps."""
        return self.cluster.completed

    @property
    def is_over(self) -> bool:
        """Whether it has completed its last step."""
        return self.done >= self.max_steps

    @property
    def trains(self) -> bool:
        """Whether it has neither failed nor been stopped."""
        return self.error is None and not self.stopped

    @property
    def is_running(self) -> bool:
        """Whether it will take another step."""
        return self.trains and not self.is_over

    def stop(self) -> None:
        """End the run after the completed step, as if `max_steps` had been that number."""
        self.max_steps = self.done

    def begins_segment(self, step: int) -> bool:
        """Return whether the next step, `step`, begins a segment of its plan, or a fork within a segment."""
        if self.plan is None or not self.is_running or self.done != step - 1:
            return False
        return self.starts or self.plan.segment(step).first == step

    @property
    def is_validated(self) -> bool:
        """Whether a validation is due: in the first and the last row, at a rung, and every `val_interval` steps."""
        return self.evaluator is not None and (
            self.starts or self.is_over or self.done in self.rungs or _every(self.spec.val_interval, self.done)
        )

    @property
    def is_spread_measured(self) -> bool:
        """Whether the divergence of its replicas is due to be measured."""
        return _every(self.spec.correlation_interval, self.done)

    @property
    def is_saved(self) -> bool:
        """Whether a checkpoint is due."""
        saving = self.spec.saving
        return saving is not None and saving.wanted and (self.is_over or _every(saving.interval, self.done))

    @property
    def random_states(self) -> dict[str, Any]:
        """The states of its global random generators."""
        if self.globals is not None:
            return self.globals.states
        return global_states(self.cluster.weights.device) if self.left_states is None else self.left_states

    @property
    def ledger(self) -> Ledger:
        """The record of its communication."""
        return self.cluster.collectives.ledger

    def keep_resting(self) -> None:
        """Keep the rows of nodes that rest in the step that begins."""
        rows, buffers = self.cluster.resting, self.cluster.replicas.buffers
        self._kept = (rows, self.cluster.weights[rows], [b[rows] for b in buffers.values()]) if rows else None

    @torch.no_grad()
    def put_back_resting(self) -> None:
        """Restore the rows of nodes that rest in this step, which were computed with the others."""
        if self._kept is None:
            return
        rows, weights, buffers = self._kept
        self.cluster.replicas.weights[rows] = weights
        for buffer, kept in zip(self.cluster.replicas.buffers.values(), buffers, strict=True):
            buffer[rows] = kept

    @property
    def losses_of_all(self) -> list[float]:
        """The losses of its nodes (K,) in the last step, NaN where one did not take part; a cohort's in its order."""
        spec, losses = self.spec, self.node_losses
        if self.plan is None or spec.num_nodes < spec.population:
            return [*losses, *[math.nan] * (spec.num_nodes - len(losses))]
        own = dict(zip(self.cluster.active, losses, strict=True))
        return [own.get(node, math.nan) for node in range(spec.num_nodes)]

    @property
    def is_alone(self) -> bool:
        """Whether all its nodes are held in this process."""
        return self.cluster.replicas.num_held == self.cluster.num_nodes

    @property
    def model(self) -> nn.Module:
        """The live model, whose Python computes the losses of all nodes; its tensors are not a node's.

        An attribute that is assigned takes effect at the next step, for all runs of its group. If a model
        changes its attributes in `forward`, this is the first node's model, and assignments apply to all nodes' models.
        """
        return self.objective.model

    @property
    def loss_fn(self) -> Any:
        """The live loss function, None without one."""
        return self.objective.loss_fn

    @property
    def columns(self) -> list[str]:
        """The columns of the history that are measured, at some steps or all."""
        validated = self.evaluator is not None
        apart = self.spec.correlation_interval is not None
        own = [c for c in COLUMNS if (validated or c not in VALIDATED) and (apart or c not in SPREAD)]
        return [*own, *self.strategy.measured(), *(self.spec.metrics or ())]

    @property
    def shares(self) -> tuple[bool, bool]:
        """Whether its nodes share one row of weights, and one of gradients."""
        # Separate processes have a row each; so has an exact run, whose sums have the order of theirs.
        in_one = not self.spec.deterministic and len(self.nodes) == self.collectives.num_nodes > 1
        strategy = self.spec.strategy
        return in_one and strategy.shares_weights, in_one and strategy.shares_grads

    def attended(self, step: int) -> Run:
        """Return a run that is not set up yet, with the nodes that take part in step number `step`."""
        assert self.plan is not None
        nodes = self.plan.segment(step).nodes
        collectives, batches = self.collectives.anew(nodes), self.batches.attended(nodes, self.plan.missed(step))
        return replace(self, nodes=collectives.nodes, collectives=collectives, batches=batches)

    def moved(self, step: int) -> Run:
        """Return it with the nodes that take part in `step`, and the rows of its start that they continue from.

        A joining node copies the first node that stays, or else the first that leaves.
        """
        assert self.plan is not None
        run, before, peer = self.attended(step), list(self.collectives.active), self.plan.peer(step)
        rows = [before.index(node if node in before else peer) for node in run.collectives.active]
        return replace(run, continues=rows)

    def here(self) -> AbstractContextManager[None]:
        """Return the context in which it draws from the global generators as if it were alone."""
        return nullcontext() if self.globals is None else self.globals.here()

    def global_model(self) -> nn.Module:
        """Return the global model that is validated, as an ordinary module: a copy."""
        replicas, buffers = self.cluster.replicas, self.cluster.mean_buffers()
        with torch.no_grad(), self.strategy.evaluating():
            return replicas.as_module(self.evaluated_weights(), buffers, like=self.spec.model)

    def evaluated_weights(self) -> Tensor:
        """Return the weights (P,) of the global model, once they are seen to be that.

        Raises:
            TypeError: the strategy returns something else.
        """
        weights, own = self.strategy.global_weights(), self.cluster.weights[0]
        if not isinstance(weights, Tensor) or (weights.shape, weights.dtype) != (own.shape, own.dtype):
            given = f"{weights.dtype} {tuple(weights.shape)}" if isinstance(weights, Tensor) else repr(weights)
            raise TypeError(
                f"{type(self.strategy).__name__}: global_weights() must return shared weights, "
                f"{own.dtype} {tuple(own.shape)}; got {given}"
            )
        return weights

    def mean_model(self) -> nn.Module:
        """Return the mean of its nodes' models as an ordinary module."""
        cluster = self.cluster
        return cluster.replicas.as_module(self.mean_weights(), cluster.mean_buffers(), like=self.spec.model)

    def mean_weights(self) -> Tensor:
        """Return the mean of its nodes' weights (P,), as they are evaluated."""
        with torch.no_grad(), self.strategy.evaluating():
            return self.cluster.mean_weights()

    def check_losses(self, losses: Mapping[int, float], batch: Any, rows: slice = slice(None)) -> None:
        """Raise a FloatingPointError if losses, node → loss of the step that is taken, are not finite.

        Args:
            batch: the step's stacked batch. rows: this run's rows of it.
        """
        if math.isfinite(sum(losses.values())):
            return
        odd = {node: value for node, value in losses.items() if value - value != 0}
        if odd:
            given, step = ", ".join(f"node {node}: {value}" for node, value in list(odd.items())[:8]), self.cluster.step
            own = batch if rows == slice(None) else of_rows(batch, range(rows.start, rows.stop))
            whole = {f"batch{keystr(path)}": t for path, t in tree_flatten_with_path(own)[0]}
            odd_data = [name for name, t in whole.items() if t.is_floating_point() and not bool(t.isfinite().all())]
            told = f"The data are not finite: {', '.join(odd_data)}" if odd_data else _WHAT_HELPS
            unlabelled = [name for name, t in whole.items() if _has_row_of(t, _IGNORED)]
            if unlabelled and not odd_data and any(map(math.isnan, odd.values())):
                told = f"No label is left in the batch of a node: {', '.join(unlabelled)} is {_IGNORED} throughout"
            raise FloatingPointError(
                f"non-finite loss at step {step} on nodes {list(odd)} ({given}); the history up to step {step - 1} is "
                f"kept. {told}"
            )

    def check_weights(self) -> None:
        """Raise a FloatingPointError if weights are not finite; after the last step no loss would show it."""
        cluster = self.cluster
        if bool(cluster.mean_weights().isfinite().all()):
            return
        with cluster.collectives.unbilled():
            finite = cluster.collectives.all_gather(cluster.weights.isfinite().all(1).long()[:, None], label="finite")
        told = zip(cluster.active, finite.flatten().tolist(), strict=True)
        odd = [node for node, is_finite in told if not is_finite]
        where = (
            f"weights after step {self.done} on nodes {odd}"
            if odd
            else f"mean of the nodes' weights after step {self.done}"
        )
        raise FloatingPointError(f"non-finite {where}. {_WHAT_HELPS}")


def _every(interval: int | None, step: int) -> bool:
    return interval is not None and step % interval == 0


def _has_row_of(batch: Tensor, value: int) -> bool:
    """Return whether all numbers of a row of a stacked tensor of whole numbers are this one."""
    whole = not (batch.is_floating_point() or batch.is_complex()) and batch.numel() > 0
    return whole and bool((batch == value).flatten(1).all(1).any())


class AsynchronousWorkers(Protocol):
    """The workers of one asynchronous run; see `vsim.training.asynchronous`."""

    def take_step(self) -> None: ...


@dataclass(eq=False)
class Stack:
    """Runs of equal model and shapes: their nodes are rows of one matrix, whose gradients are one call.

    Attributes:
        matrix: their rows; see `vsim.training.rows`.
        executor: computes the losses and gradients of all rows.
        batches: stacked batches (R, B, …) for all rows, on any device.
        minibatch_size: examples per node at once; None: the whole batch.
        optimizers: its runs' optimizers, stepped in few calls.
        few: computes some of the rows, where batches differ in size between nodes.
        workers: of its only run, if that is asynchronous: they take the steps then.
        has_stepped: whether a step has been taken since it was assembled.
    """

    runs: list[Run]
    matrix: Rows
    executor: Executor
    batches: Iterator[Any]
    minibatch_size: int | None
    optimizers: Optimizers
    few: FewRows
    workers: AsynchronousWorkers | None = None
    has_stepped: bool = False

    def losses_and_grads(self, batch: Any) -> Tensor:
        """Return losses (R,) of a stacked batch (R, B, …) or an Uneven, and write gradients to the rows of each run."""
        self.matrix.copy_out()
        if isinstance(batch, Uneven):
            losses = self.few.of_uneven(batch, self.minibatch_size)
        else:
            losses = self.executor.losses_and_grads(batch, self.minibatch_size)
        self.matrix.gather_gradients()
        return losses

    @cached_property
    def threads(self) -> Threads:
        """Chooses the threads of its steps."""
        return Threads(self.executor)

    @property
    def rows(self) -> list[tuple[Run, slice]]:
        """Every run with its rows."""
        found, start = [], 0
        for run in self.runs:
            stop = start + run.cluster.replicas.num_held
            found.append((run, slice(start, stop)))
            start = stop
        return found


@dataclass(eq=False)
class Ensemble:
    """Runs that are set up to train together: all that the training loop needs.

    Attributes:
        runs: in the order in which they were given. stacks: the same runs, as they are computed.
        executor: makes what computes losses and gradients, see `vsim.training.setup`.
        interrupt: asks the run to stop after a step.
        tolerant: whether the others continue when a run fails; if not, its error ends the run.
        ends_early: whether an error in the first step, when nothing is lost yet, ends the run all the same.
        regroups: whether the remaining runs move to smaller matrices; see `vsim.training.attendance`.
        watch: called as f(run) when a step is reported for all runs.
        stopping: called as f(run) after a step; the runs that it returns stop there.
        memory: the bytes that this process holds of a device.
    """

    runs: list[Run]
    stacks: list[Stack]
    max_steps: int
    executor: Callable[..., Executor]
    interrupt: Interrupt = field(default_factory=Interrupt)
    tolerant: bool = False
    ends_early: bool = True
    regroups: bool = True
    watch: Callable[[Ensemble], None] | None = None
    stopping: Callable[[Ensemble], Collection[Run]] | None = None
    memory: Held = field(default_factory=Held)

    @property
    def training(self) -> list[Run]:
        """The runs that have not left."""
        return [run for run in self.runs if run.trains]

    @property
    def unfinished(self) -> list[Run]:
        """The runs whose last step is still to come."""
        return [run for run in self.runs if run.is_running]

    @property
    def is_alone(self) -> bool:
        """Whether all nodes are held in this process; of all runs or none."""
        return self.runs[0].is_alone

    @property
    def only(self) -> tuple[Run, Stack]:
        """The run and its group, of a run with one run."""
        ((run,), (stack,)) = self.runs, self.stacks
        return run, stack
