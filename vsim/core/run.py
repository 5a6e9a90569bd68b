"""A run: one strategy with one seed on K nodes, as a group trains it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map

from vsim.cluster.cluster import Cluster
from vsim.cluster.collectives import Collectives
from vsim.cluster.ledger import Ledger
from vsim.cluster.randomness import fingerprints
from vsim.core.algorithm import Algorithm
from vsim.data.batches import Uneven, of_rows
from vsim.engine.indices import is_off_cpu
from vsim.engine.objective import Objective, explained

WHAT_HELPS = "A lower learning rate, warmup_steps or max_norm usually helps"
_IGNORED = -100  # the label of an example that torch's cross_entropy leaves out


class Diverged(FloatingPointError):
    """Losses or weights of a run are not finite. All processes of the run raise this at the same time.

    Attributes:
        step: the first step with such a loss, or after which weights are not finite.
    """

    def __init__(self, message: str, step: int) -> None:
        super().__init__(message, step)
        self.step = step

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass(eq=False)
class Run:
    """One strategy with one seed on K nodes: where it stands. What acts keep for themselves is in `TrackedRun`.

    Attributes:
        spec: what was asked; the core reads its label, and whether the run is deterministic.
        group: the runs that are computed together, a `Group`.
        rows: this process's rows of the group's matrix, for present nodes of the run; one row if there are none.
        cluster: the run's nodes. strategy: the run's copy of the strategy.
        generators: for randomness in the model, one for each row that this process may hold at once.
        max_steps: steps to train; `stop` makes it the number of completed steps.
        examples, tokens, seconds: totals, including those before a resume. Runs that train together share the seconds
            of a step in proportion to their nodes.
        error: the error that ended this run; the other runs continue.
        stopped_at: the step after which this run was stopped, while the other runs continue.
        cut: whether an error ended this run after a request to stop; it has no outcome, and its last checkpoint counts.
        node_losses: the losses of the nodes (K,) in the current or last step. lr: its learning rate.
    """

    spec: Any
    group: Any = field(init=False)
    rows: range = field(init=False)
    cluster: Cluster = field(init=False)
    strategy: Algorithm = field(init=False)
    generators: list[torch.Generator] = field(init=False)
    max_steps: int = field(init=False)
    examples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    error: Exception | None = None
    stopped_at: int | None = None
    cut: bool = False
    node_losses: list[float] = field(default_factory=list)
    lr: float = 0.0

    # The clock counts completed steps: actions due after step t happen when `done` is t.

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
        return self.error is None and self.stopped_at is None and not self.cut

    @property
    def is_running(self) -> bool:
        """Whether the run will take another step."""
        return self.trains and self.cluster.completed < self.max_steps

    def stop(self) -> None:
        """End the run here, as if `max_steps` had been the number of completed steps."""
        self.max_steps = self.done

    @property
    def objective(self) -> Objective:
        """Model and loss, which all runs of the group share."""
        objective: Objective = self.group.objective
        return objective

    @property
    def collectives(self) -> Collectives:
        """How nodes communicate."""
        return self.cluster.collectives

    @property
    def ledger(self) -> Ledger:
        """The record of the run's communication."""
        return self.cluster.collectives.ledger

    @property
    def nodes(self) -> range:
        """Indices of this process's nodes among the present nodes."""
        return self.cluster.collectives.nodes

    @property
    def present_rows(self) -> slice:
        """The rows of the matrix of this process's present nodes."""
        return slice(self.rows.start, self.rows.start + len(self.nodes))

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run's checkpoints, and sends its record to the process that shows it."""
        return self.cluster.collectives.rank == 0

    @property
    def is_alone(self) -> bool:
        """Whether this process holds all nodes of the run."""
        return self.cluster.collectives.is_alone

    @contextmanager
    def computing(self) -> Iterator[None]:
        """Return a context for calls of the model in a step.

        Raises:
            ValueError: with `deterministic=True`, the model draws from `random` or `numpy.random`, which no node owns.
        """
        device = self.cluster.weights.device
        before = fingerprints(device) if self.spec.deterministic and self.group.rng_check_steps > 0 else {}
        yield
        now = fingerprints(device) if before else {}
        if found := [name for name in ("random", "numpy.random") if before.get(name) != now.get(name)]:
            raise ValueError(
                f"with deterministic=True a model must not draw from {' and '.join(found)} in forward, where nodes "
                "have no generators of their own: draw by torch's functions, or leave out deterministic"
            )

    def check_losses(
        self, losses: Mapping[int, float], batch: Any, rows: slice = slice(None), nodes: Sequence[int] | None = None
    ) -> None:
        """Raise `Diverged` if a loss of the current step is not finite.

        Args:
            losses: node → loss, of those that count. batch: the step's stacked batch. rows: this run's rows of it.
            nodes: the nodes that have a row in the batch, in its order, in any process; default: those of `losses`.

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
                self._check_indices([*losses] if nodes is None else nodes, odd, own)
            whole = {f"batch{keystr(path)}": t for path, t in tree_flatten_with_path(own)[0]}
            odd_data = [name for name, t in whole.items() if t.is_floating_point() and not bool(t.isfinite().all())]
            advice = f"The data are not finite: {', '.join(odd_data)}" if odd_data else WHAT_HELPS
            unlabelled = [name for name, t in whole.items() if _has_row_of(t, _IGNORED)]
            if unlabelled and not odd_data and any(map(math.isnan, odd.values())):
                advice = f"No label is left in the batch of a node: {', '.join(unlabelled)} is {_IGNORED} throughout"
            raise Diverged(
                f"non-finite loss at step {step} on nodes {list(odd)} ({given}); the history up to step {step - 1} is "
                f"kept. {advice}",
                step,
            )

    def _check_indices(self, nodes: Sequence[int], odd: Collection[int], batch: Any) -> None:
        """Raise an IndexError if an index was out of range in the loss of one of this process's `odd` nodes.

        Args:
            nodes: the nodes that have a row in the batch. odd: nodes with a non-finite loss.
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


def _first(stacked: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t[0] for name, t in stacked.items()}


def _has_row_of(batch: Tensor, value: int) -> bool:
    """Return whether a stacked tensor of integers has a row in which every number is `value`."""
    whole = not (batch.is_floating_point() or batch.is_complex()) and batch.numel() > 0
    return whole and bool((batch == value).flatten(1).all(1).any())
