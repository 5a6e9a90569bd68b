"""What acts keep on a run: who takes part, what is measured, where outcomes go, what saving compares."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

from vsim.checkpoint.undeclared import Contents
from vsim.cluster.collectives import Collectives
from vsim.cluster.ledger import Ledger
from vsim.cluster.plan import Plan
from vsim.cluster.randomness import DataStates, global_states
from vsim.cluster.state import Lasting
from vsim.core.run import WHAT_HELPS, Diverged, Run
from vsim.data.batches import BatchSource
from vsim.history.history import History
from vsim.history.progress import Recorder
from vsim.training.clients import ClientModels, Clients
from vsim.training.spec import RunSpec


@dataclass(eq=False)
class Presence:
    """Which nodes take part in a run, and what they are fed.

    Attributes:
        collectives: how the run's nodes will communicate; the cluster's, once there is one.
        batches: stacked batches (R, B, …) of this process's nodes; with a plan, of all nodes that may take part.
        plan: which nodes take part in which steps; None: all nodes in all steps.
        data_states: the random states that the run's data draw from; None: the process's random generators.
        made: name → stacked state from the strategy's setup, with a row for each node of the setup.
        clients: the state of a population's clients; None without a population.
    """

    collectives: Collectives
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
        rungs: steps after which the run is validated, besides the requested steps.
        seconds: the time of all measurements, including those before a resume.
        weights: the global model's weights (P,) while they are measured.
    """

    client_data: Sequence[Dataset[Any]] = ()
    test_data: Sequence[Dataset[Any]] = ()
    evaluator: Callable[[Sequence[TrackedRun]], dict[TrackedRun, dict[str, float]]] | None = None
    rungs: Collection[int] = ()
    seconds: float = 0.0
    weights: Tensor | None = None


@dataclass(eq=False)
class Recording:
    """What is recorded of a run's last step.

    Attributes:
        row: the history's row of the last step.
        has_sent: whether nodes have communicated in the last step.
        known_events: the number of events in the ledger that are reported.
    """

    row: Mapping[str, float] = field(default_factory=dict)
    has_sent: bool = False
    known_events: int = 0


@dataclass(eq=False)
class Keeping:
    """What saving a run compares with.

    Attributes:
        lasting: the declarations of all state that lasts from step to step; saved, restored, and moved with the rows.
        settings: the settings that must be equal in a resumed run, once known; see `vsim.history.describe`.
        undeclared: the strategy's undeclared attributes when training began; see `vsim.checkpoint.undeclared`.
        left_states: the states of the process's random generators after training.
    """

    lasting: list[Lasting] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)
    undeclared: Contents = field(default_factory=dict)
    left_states: dict[str, Any] | None = None


@dataclass(eq=False, repr=False)
class TrackedRun(Run):
    """A run from its options to its outcome, with what acts keep for themselves.

    It begins with options and an empty record. `vsim.training.setup` gives it data and rows, and the act `Place` its
    nodes, which `free` takes away.

    Attributes:
        name: the name of the run's strategy or setting, the same for all seeds.
        history: the run's record. recorder: keeps it, and shows a single run's progress.
        presence, measuring, recording, keeping: what those need who let nodes attend, measure, record and save.
        starts: whether no row is recorded yet; False in a resumed run.
        concluded: whether the last step is reported and saved, and `on_end` of the callbacks has been called.
        model: the mean of the nodes' final models, once a run of a comparison is complete.
        client_models: the models that clients use, once a run of a comparison or in processes is complete; None if the
            clients' state is in a folder.
        finished_at: the step after which a callback ended the run early.
    """

    spec: RunSpec
    recorder: Recorder = field(kw_only=True)
    name: str = field(default="", kw_only=True)
    presence: Presence = field(init=False)
    recording: Recording = field(default_factory=Recording, init=False)
    measuring: Measuring = field(default_factory=Measuring, init=False)
    keeping: Keeping = field(default_factory=Keeping, init=False)
    starts: bool = field(default=True, init=False)
    concluded: bool = field(default=False, init=False)
    model: nn.Module | None = field(default=None, init=False)
    client_models: ClientModels | None = field(default=None, init=False)
    finished_at: int | None = field(default=None, init=False)

    @classmethod
    def of(cls, spec: RunSpec, name: str = "") -> TrackedRun:
        """Return a run with an empty record that has the run's label."""
        history = History(spec.label, spec.num_nodes, spec.population)
        return cls(spec, recorder=Recorder(history, False, spec.label), name=name)

    @property
    def history(self) -> History:
        """The record of the outcomes of all steps."""
        return self.recorder.history

    @property
    def ledger(self) -> Ledger:
        """The record of the run's communication."""
        return self.recorder.history.ledger

    @property
    def has_begun(self) -> bool:
        """Whether the history has a row."""
        return len(self.history) > 0

    @property
    def recorded(self) -> int:
        """The last step that the history has; 0 without one."""
        return int(self.history["step"][-1]) if self.has_begun else 0

    @property
    def has_outcome(self) -> bool:
        """Whether the run is complete, has failed, or was stopped; an interrupted run has no outcome."""
        return any(one is not None for one in (self.model, self.error, self.stopped_at))

    @property
    def diverged_at(self) -> int | None:
        """The first step with a loss or weights that are not finite."""
        return self.error.step if isinstance(self.error, Diverged) else None

    @property
    def folder(self) -> Path | None:
        """The folder of the run's checkpoints; None if the run is not saved."""
        return None if self.spec.saving is None else self.spec.saving.folder

    def release_clients(self) -> None:
        """Let other runs use the folder of the clients' state."""
        if "presence" in vars(self) and self.presence.plan is not None and self.presence.plan.store is not None:
            self.presence.plan.store.release()

    def free(self) -> None:
        """Forget nodes and data; options, record and outcome stay."""
        vars(self).update(measuring=Measuring(), keeping=Keeping(), generators=[])
        for name in ("group", "cluster", "strategy", "presence"):
            vars(self).pop(name, None)

    @property
    def steps(self) -> int:
        """The number of steps that the options ask for."""
        spec = self.spec
        return (
            (spec.num_epochs or 1) * self.presence.batches.steps_per_epoch if spec.max_steps is None else spec.max_steps
        )

    @property
    def plan(self) -> Plan:
        """The plan of a run that has one."""
        assert self.presence.plan is not None
        return self.presence.plan

    def begins_segment(self, step: int) -> bool:
        """Return whether `step` is the next step, and begins a new run or a segment of the run's plan."""
        if self.presence.plan is None or not self.is_running or self.done != step - 1:
            return False
        return self.starts or self.presence.plan.segment(step).first == step

    @property
    def validation_is_due(self) -> bool:
        """Whether a validation is due: at the start, at the end, at a rung, and every `val_interval` steps."""
        return self.measuring.evaluator is not None and (
            self.starts
            or self.is_over
            or self.done in self.measuring.rungs
            or _every(self.spec.val_interval, self.done)
        )

    @property
    def spread_is_due(self) -> bool:
        """Whether a measurement of the replicas' divergence is due."""
        return _every(self.spec.correlation_interval, self.done)

    @property
    def checkpoint_is_due(self) -> bool:
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
    def losses_of_all(self) -> list[float]:
        """The losses of the nodes (K,) in the last step, NaN for absent nodes; in a cohort's order if there is one."""
        spec, losses = self.spec, self.node_losses
        if self.presence.plan is None or spec.num_nodes < spec.population:
            return [*losses, *[math.nan] * (spec.num_nodes - len(losses))]
        own = dict(zip(self.cluster.active, losses, strict=True))
        return [own.get(node, math.nan) for node in range(spec.num_nodes)]

    def fetching(self) -> AbstractContextManager[None]:
        """Return a context in which the run's data draw from the global generators as if the run were alone."""
        return nullcontext() if self.presence.data_states is None else self.presence.data_states.here()

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

    def keep_client_models(self) -> None:
        """Keep the clients' models for the time after the run; not those of clients whose state is in a folder."""
        if self.strategy.is_personal and self.presence.plan is not None and self.presence.plan.store is not None:
            return
        with torch.no_grad(), self.strategy.evaluation():
            given = self.evaluated_weights(), self.cluster.mean_buffers()
            self.client_models = ClientModels.of(self.strategy, self.presence.clients, *given)

    def mean_weights(self) -> Tensor:
        """Return the mean over the nodes (P,) of the weights that the strategy evaluates."""
        with torch.no_grad(), self.strategy.evaluation():
            return self.cluster.mean_weights()

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
        raise Diverged(f"non-finite {where}. {WHAT_HELPS}", self.done)


def _every(interval: int | None, step: int) -> bool:
    return interval is not None and step % interval == 0
