"""A run: one strategy with one seed on K nodes."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map
from torch.utils.data import Dataset

from vsim.checkpoint.undeclared import Contents
from vsim.cluster.cluster import Cluster
from vsim.cluster.collectives import Collectives
from vsim.cluster.ledger import Ledger
from vsim.cluster.plan import Plan
from vsim.cluster.randomness import DataStates, fingerprints, global_states
from vsim.cluster.state import Lasting
from vsim.data.batches import BatchSource, Uneven, ValidationExamples, of_rows
from vsim.engine.indices import is_off_cpu
from vsim.engine.objective import Objective, explained
from vsim.records.history import History
from vsim.records.progress import Reporter
from vsim.strategy.base import Algorithm
from vsim.training.clients import Clients
from vsim.training.interrupt import Interrupt
from vsim.training.spec import RunSpec

_WHAT_HELPS = "A lower learning rate, warmup_steps or max_norm usually helps"
_IGNORED = -100  # the label of an example that torch's cross_entropy leaves out


class Diverged(FloatingPointError):
    """Losses or weights of a run are not finite. All processes of the run raise this at the same time."""


@dataclass(eq=False)
class Presence:
    """Which nodes take part in a run, and what they are fed.

    Attributes:
        batches: stacked batches (R, B, …) of this process's nodes; with a plan, of all nodes that may take part.
        plan: which nodes take part in which steps; None: all nodes in all steps.
        data_states: the random states that the run's data draw from; None: the process's random generators.
        made: name → stacked state from the strategy's setup, with a row for each node of the setup.
        clients: the state of a population's clients; None without a population.
    """

    batches: BatchSource
    plan: Plan | None = None
    data_states: DataStates | None = None
    made: dict[str, Any] = field(default_factory=dict)
    clients: Clients | None = None


@dataclass(eq=False)
class Measuring:
    """How a run is measured.

    Attributes:
        client_data: validation data of each node or client, for measuring the final global model; may be empty.
        test_data: the test data, for measuring the final global model; may be empty.
        evaluator: measures the run on the validation data; None without validation data.
        examples: the validation examples, on the run's device; None until they are found.
        rungs: steps after which the run is validated, besides the requested steps.
        seconds: the time of all measurements, including those before a resume.
        weights: the global model's weights (P,) while they are measured.
    """

    client_data: Sequence[Dataset[Any]] = ()
    test_data: Sequence[Dataset[Any]] = ()
    evaluator: Callable[[Sequence[Run]], dict[Run, dict[str, float]]] | None = None
    examples: ValidationExamples | None = None
    rungs: Collection[int] = ()
    seconds: float = 0.0
    weights: Tensor | None = None


@dataclass(eq=False)
class Recording:
    """Where the outcomes of a run's steps go.

    Attributes:
        report: called with the `StepReport` of every step.
        history: the record of the outcomes of all steps; None if this process keeps no record.
        row: the history's row of the last step.
        known_events: the number of events in the ledger that are reported.
    """

    report: Reporter
    history: History | None
    row: Mapping[str, float] = field(default_factory=dict)
    known_events: int = 0


@dataclass(eq=False)
class Keeping:
    """What saving a run compares with.

    Attributes:
        settings: the settings that must be equal in a resumed run, once known; see `vsim.records.describe`.
        undeclared: the strategy's undeclared attributes when training began; see `vsim.checkpoint.undeclared`.
        left_states: the states of the process's random generators after training.
    """

    settings: dict[str, Any] = field(default_factory=dict)
    undeclared: Contents = field(default_factory=dict)
    left_states: dict[str, Any] | None = None


@dataclass(eq=False)
class Run:
    """One strategy with one seed on K nodes. Its state and record are independent of the runs that train with it.

    `vsim.training.setup` places a run in a matrix; until then the run has no rows, cluster or strategy.

    Attributes:
        spec: what was asked.
        collectives: how nodes communicate.
        presence, measuring, recording, keeping: what those need who let nodes attend, measure, record and save.
        minibatch_size: examples per node whose gradients are computed at once; None: the whole batch.
        rows: this process's rows of the stack's matrix, for present nodes of the run; one row if there are none.
        cluster: the run's nodes. strategy: the run's copy of the strategy.
        generators: for randomness in the model, one for each row that this process may hold at once.
        lasting: the declarations of all state that lasts from step to step; saved, restored, and moved with the rows.
        objective: model and loss, shared with the run's stack.
        max_steps: steps to train; after `stop`, fewer than `steps`.
        examples, tokens, seconds: totals, including those before a resume. Runs that train together share the seconds
            of a step in proportion to their nodes.
        starts: whether the history's first row is still to be reported; False in a resumed run.
        error: the error that ended this run; the other runs continue.
        stopped: whether this run was stopped before the other runs.
        cut: whether an error ended this run after a request to stop; it has no outcome, and its last checkpoint counts.
        concluded: whether the last step is reported and saved, and `on_end` of the callbacks has been called.
        trial_steps: the number of coming steps in which draws from the global random generators are detected.
        node_losses: the losses of the nodes (K,) in the current or last step. lr: its learning rate.
    """

    spec: RunSpec
    collectives: Collectives
    presence: Presence
    recording: Recording
    measuring: Measuring = field(default_factory=Measuring)
    keeping: Keeping = field(default_factory=Keeping)
    minibatch_size: int | None = None
    rows: range = field(init=False)
    cluster: Cluster = field(init=False)
    strategy: Algorithm = field(init=False)
    generators: list[torch.Generator] = field(init=False)
    lasting: list[Lasting] = field(default_factory=list)
    objective: Objective = field(init=False)
    interrupt: Interrupt = field(init=False)
    max_steps: int = field(init=False)
    starts: bool = True
    examples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    error: Exception | None = None
    stopped: bool = False
    cut: bool = False
    concluded: bool = False
    trial_steps: int = 2
    node_losses: list[float] = field(default_factory=list)
    lr: float = 0.0
    # Rows, weights and buffers of nodes that rest in this step.
    _kept: tuple[list[int], Tensor, list[Tensor]] | None = None

    # The clock ------------------------------------------------------------------------------------------------------
    # The clock counts completed steps: actions due after step t happen when `done` is t.

    @property
    def steps(self) -> int:
        """The number of steps that the options ask for."""
        spec = self.spec
        return (
            (spec.num_epochs or 1) * self.presence.batches.steps_per_epoch if spec.max_steps is None else spec.max_steps
        )

    @property
    def start(self) -> int:
        """The number of completed steps that the run starts from."""
        return 0 if self.spec.start is None else self.spec.start.step

    @property
    def done(self) -> int:
        """The number of completed steps."""
        return self.cluster.completed

    @property
    def is_over(self) -> bool:
        """Whether the run has completed its last step."""
        return self.cluster.completed >= self.max_steps

    @property
    def trains(self) -> bool:
        """Whether the run has neither failed nor been stopped."""
        return self.error is None and not (self.stopped or self.cut)

    @property
    def is_running(self) -> bool:
        """Whether the run will take another step."""
        return self.trains and not self.is_over

    def stop(self) -> None:
        """End the run here, as if `max_steps` had been the number of completed steps."""
        self.max_steps = self.done

    def begins_segment(self, step: int) -> bool:
        """Return whether `step` is the next step, and begins a new run or a segment of the run's plan."""
        if self.presence.plan is None or not self.is_running or self.done != step - 1:
            return False
        return self.starts or self.presence.plan.segment(step).first == step

    @property
    def is_validated(self) -> bool:
        """Whether a validation is due: at the start, at the end, at a rung, and every `val_interval` steps."""
        return self.measuring.evaluator is not None and (
            self.starts
            or self.is_over
            or self.done in self.measuring.rungs
            or _every(self.spec.val_interval, self.done)
        )

    @property
    def is_spread_measured(self) -> bool:
        """Whether a measurement of the replicas' divergence is due."""
        return _every(self.spec.correlation_interval, self.done)

    @property
    def is_saved(self) -> bool:
        """Whether a checkpoint is due."""
        saving = self.spec.saving
        return saving is not None and saving.wanted and (self.is_over or _every(saving.interval, self.done))

    @property
    def is_to_be_moved(self) -> bool:
        """Whether the run's state must be savable or movable, as the run is saved, or its nodes come and go."""
        return self.presence.plan is not None or (self.spec.saving is not None and self.spec.saving.wanted)

    @property
    def random_states(self) -> dict[str, Any]:
        """The states of the random generators that the run's data draw from; if the run trains alone, the process's."""
        if self.presence.data_states is not None:
            return self.presence.data_states.states
        return (
            global_states(self.cluster.weights.device) if self.keeping.left_states is None else self.keeping.left_states
        )

    @property
    def ledger(self) -> Ledger:
        """The record of the run's communication."""
        return self.cluster.collectives.ledger

    @property
    def nodes(self) -> range:
        """Indices of this process's nodes among the present nodes."""
        return self.collectives.nodes

    @property
    def taking(self) -> slice:
        """The rows of the matrix of this process's present nodes."""
        return slice(self.rows.start, self.rows.start + len(self.nodes))

    @property
    def is_first(self) -> bool:
        """Whether this process keeps the run's record, and writes its checkpoints."""
        return self.collectives.rank == 0

    def keep_resting(self) -> None:
        """Save the rows of resting nodes, or of a run that has ended, before the next step computes all rows."""
        rows = self.cluster.resting if self.is_running else [*range(len(self.nodes))]
        buffers = self.cluster.replicas.buffers
        self._kept = (rows, self.cluster.weights[rows], [b[rows] for b in buffers.values()]) if rows else None

    def put_back_resting(self) -> None:
        """Restore the rows that `keep_resting` saved, because the step has updated every row."""
        if self._kept is None:
            return
        rows, weights, buffers = self._kept
        self.cluster.replicas.weights[rows] = weights
        for buffer, kept in zip(self.cluster.replicas.buffers.values(), buffers, strict=True):
            buffer[rows] = kept

    @property
    def losses_of_all(self) -> list[float]:
        """The losses of the nodes (K,) in the last step, NaN for absent nodes; in a cohort's order if there is one."""
        spec, losses = self.spec, self.node_losses
        if self.presence.plan is None or spec.num_nodes < spec.population:
            return [*losses, *[math.nan] * (spec.num_nodes - len(losses))]
        own = dict(zip(self.cluster.active, losses, strict=True))
        return [own.get(node, math.nan) for node in range(spec.num_nodes)]

    @property
    def is_alone(self) -> bool:
        """Whether this process holds all nodes of the run."""
        return self.collectives.is_alone

    def fetching(self) -> AbstractContextManager[None]:
        """Return a context in which the run's data draw from the global generators as if the run were alone."""
        return nullcontext() if self.presence.data_states is None else self.presence.data_states.here()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context for calls of the model in a step.

        Raises:
            ValueError: with `deterministic=True`, the model draws from `random` or `numpy.random`, which no node owns.
        """
        device = self.cluster.weights.device
        before = fingerprints(device) if self.spec.deterministic and self.trial_steps > 0 else {}
        yield
        now = fingerprints(device) if before else {}
        if found := [name for name in ("random", "numpy.random") if before.get(name) != now.get(name)]:
            raise ValueError(
                f"with deterministic=True a model must not draw from {' and '.join(found)} in forward, where nodes "
                "have no generators of their own: draw by torch's functions, or leave out deterministic"
            )

    def evaluated_weights(self) -> Tensor:
        """Return the weights (P,) of the global model.

        Raises:
            TypeError: the strategy does not return a tensor of the weights' shape and dtype.
        """
        weights, own = self.strategy.model_weights(), self.cluster.weights[0]
        if not isinstance(weights, Tensor) or (weights.shape, weights.dtype) != (own.shape, own.dtype):
            given = f"{weights.dtype} {tuple(weights.shape)}" if isinstance(weights, Tensor) else repr(weights)
            raise TypeError(
                f"{type(self.strategy).__name__}: the global weights must be shared weights, "
                f"{own.dtype} {tuple(own.shape)}; got {given}"
            )
        return weights

    def mean_model(self) -> nn.Module:
        """Return the mean of the nodes' models as an ordinary module."""
        cluster = self.cluster
        return cluster.replicas.as_module(self.mean_weights(), cluster.mean_buffers(), like=self.spec.model)

    def mean_weights(self) -> Tensor:
        """Return the mean over the nodes (P,) of the weights that the strategy evaluates."""
        with torch.no_grad(), self.strategy.evaluation():
            return self.cluster.mean_weights()

    def check_losses(self, losses: Mapping[int, float], batch: Any, rows: slice = slice(None)) -> None:
        """Raise `Diverged` if a loss of the current step is not finite.

        Args:
            losses: node → loss. batch: the step's stacked batch. rows: this run's rows of the batch.

        Raises:
            IndexError: on an accelerator, an index in a node's batch is out of range.
        """
        if math.isfinite(sum(losses.values())):
            return
        odd = {node: value for node, value in losses.items() if value - value != 0}
        if odd:
            given, step = ", ".join(f"node {node}: {value}" for node, value in list(odd.items())[:8]), self.cluster.step
            own = batch if rows == slice(None) else of_rows(batch, range(rows.start, rows.stop))
            if is_off_cpu(batch):
                self._check_indices([*losses], odd, own)
            whole = {f"batch{keystr(path)}": t for path, t in tree_flatten_with_path(own)[0]}
            odd_data = [name for name, t in whole.items() if t.is_floating_point() and not bool(t.isfinite().all())]
            advice = f"The data are not finite: {', '.join(odd_data)}" if odd_data else _WHAT_HELPS
            unlabelled = [name for name, t in whole.items() if _has_row_of(t, _IGNORED)]
            if unlabelled and not odd_data and any(map(math.isnan, odd.values())):
                advice = f"No label is left in the batch of a node: {', '.join(unlabelled)} is {_IGNORED} throughout"
            raise Diverged(
                f"non-finite loss at step {step} on nodes {list(odd)} ({given}); the history up to step {step - 1} is "
                f"kept. {advice}"
            )

    def _check_indices(self, nodes: Sequence[int], odd: Collection[int], batch: Any) -> None:
        """Raise an IndexError if an index was out of range in the loss of one of this process's `odd` nodes.

        Args:
            nodes: the nodes whose losses are known. odd: nodes with a non-finite loss.
            batch: the batch of this process's nodes.
        """
        held, replicas = [self.cluster.active[row] for row in self.nodes], self.cluster.replicas
        for place, node in enumerate(node for node in nodes if node in held):
            if node not in odd:
                continue
            row, part = held.index(node), of_rows(batch, range(place, place + 1))
            own = tree_map(lambda t: t[0], part.parts[0] if isinstance(part, Uneven) else part)
            one, objective = replicas.rows(row, row + 1), self.objective.of_row(self.rows[row])
            try:
                objective.check_indices(_first(one.views(one.weights)), _first(one.buffers), own)
            except IndexError as error:
                raise explained(error, objective, own, 0, f"at step {self.cluster.step} on node {node}")  # noqa: B904

    def check_weights(self) -> None:
        """Raise `Diverged` if weights are not finite, which after the last step no later loss would reveal."""
        cluster = self.cluster
        if bool(cluster.mean_weights().isfinite().all()):
            return
        with cluster.collectives.unbilled():
            finite = cluster.collectives.all_gather(cluster.weights.isfinite().all(1).long()[:, None], label="finite")
        by_node = zip(cluster.active, finite.flatten().tolist(), strict=True)
        odd = [node for node, is_finite in by_node if not is_finite]
        where = (
            f"weights after step {self.done} on nodes {odd}"
            if odd
            else f"mean of the nodes' weights after step {self.done}"
        )
        raise Diverged(f"non-finite {where}. {_WHAT_HELPS}")


def _first(stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t[0] for name, t in stacked.items()}


def _every(interval: int | None, step: int) -> bool:
    return interval is not None and step % interval == 0


def _has_row_of(batch: Tensor, value: int) -> bool:
    """Return whether a stacked tensor of integers has a row in which every number is `value`."""
    whole = not (batch.is_floating_point() or batch.is_complex()) and batch.numel() > 0
    return whole and bool((batch == value).flatten(1).all(1).any())
