"""Validation: every node's own model, the global model, and how far apart the replicas are."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from vsim.cluster.randomness import EVALUATION, generator
from vsim.cluster.replicas import Views
from vsim.engine import Executor
from vsim.engine.base import check_examples
from vsim.engine.kept import joined
from vsim.engine.misfit import explained
from vsim.engine.python_state import State
from vsim.engine.stacked import NodesDifferError
from vsim.training.run import Run
from vsim.training.spec import Metric

# Columns of the node matrix that are compared at once: bounds the memory that measuring needs.
_COLUMNS_AT_ONCE = 2**18


class _Rows(NamedTuple):
    """Models to be measured: stacked weights (R, P), stacked buffers, the seed of what they draw, and of each what its
    Python keeps, None where that is the same for all.
    """

    weights: Tensor
    buffers: Views
    seed: int
    states: Sequence[State | None]


class _Measured(NamedTuple):
    """Stacked losses (R,) and accuracies (R,), which are None where the objective knows none."""

    losses: Tensor
    accuracies: Tensor | None


class Evaluator:
    """Measures the runs of a group without changing anything in them.

    Args:
        executor: computes the losses.
        batch: the validation examples, one batch (N, …) on the run's device.
        batch_size: examples at a time.
        rows_at_once: models that are put together for one call.
    """

    def __init__(self, executor: Executor, batch: Any, batch_size: int, rows_at_once: int) -> None:
        self.executor, self.batch = executor, batch
        self.rows_at_once = rows_at_once
        self.num_examples = len(tree_leaves(batch)[0])
        if self.num_examples > batch_size:
            check_examples(batch, 0)
        self.pieces = [
            tree_map(lambda t, a=start: t[a : a + batch_size], batch)
            for start in range(0, self.num_examples, batch_size)
        ]
        self._draws = False  # whether the model draws random numbers in evaluation mode
        self._reads: bool | None = None  # whether it reads tensors that nodes keep; None: not known

    def __call__(self, runs: Sequence[Run]) -> dict[Run, dict[str, float]]:
        """Return run → its validation columns of `History`."""
        with torch.no_grad():
            try:
                states = self._states(runs)
                to_measure = [f(m, states[m]) for m in runs for f in (_of_nodes, _of_cluster)]
                measured = iter(self._measure(to_measure))
            except Exception as error:
                when = f"in the validation after step {runs[0].done}"
                raise explained(error, self.executor.objective, self.batch, 0, when)  # noqa: B904  # has its cause
            found = {run: _columns(run, next(measured), next(measured)) for run in runs}
            for run, own in zip(runs, to_measure[1::2], strict=True):
                found[run] |= {name: self._mean(f, name, own) for name, f in run.spec.metrics.items()}
            return found

    def _states(self, runs: Sequence[Run]) -> dict[Run, list[State | None]]:
        """Return what the Python of every run's nodes keeps, as far as the model may read it."""
        own = self.executor.objective.states([row for run in runs for row in run.rows])
        try:
            together: State | None = None if self._reads else joined(own)
        except ValueError:  # numbers differ
            together = None
        if together is not None:
            if self._reads is None:
                self._reads = self._is_refused(runs[0], together)
            own = own if self._reads else [together] * len(own)
        each = iter(own)
        return {run: [next(each) for _ in run.rows] for run in runs}

    def _is_refused(self, run: Run, state: State) -> bool:
        """Whether the model computes with tensors that differ between nodes, for which others stand in this state."""
        objective, (weights, buffers, seed, _) = self.executor.objective, _of_nodes(run, [None])
        of_first = {name: b[0] for name, b in buffers.items()}
        stream = generator(seed, EVALUATION, device=weights.device)
        try:
            with objective.having(state):
                self.executor.apply(lambda _, batch: objective(batch), weights[0], of_first, self.pieces[0], stream)
        except NodesDifferError:
            return True
        return False

    def _mean(self, metric: Metric, name: str, rows: _Rows) -> float:
        """Return the mean over the examples of a user's metric of the first of these models."""
        stream = generator(rows.seed, EVALUATION, device=rows.weights.device)
        buffers = {n: b[0] for n, b in rows.buffers.items()}
        total = 0.0
        for piece in self.pieces:
            with self.executor.objective.having(rows.states[0]):
                outcome = self.executor.apply(metric, rows.weights[0], buffers, piece, stream)
            try:
                total += len(tree_leaves(piece)[0]) / self.num_examples * float(outcome)
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(f"metrics[{name!r}] must return a number, got {type(outcome).__name__}") from error
        return total

    def _measure(self, rows: Sequence[_Rows]) -> list[_Measured]:
        """Measure all rows, equal ones once; those with equal draws share a call, up to `rows_at_once` rows."""
        distinct, places = _distinct(rows)
        calls: list[list[_Rows]] = []
        for own in distinct:
            alike = bool(calls) and (not self._draws or calls[-1][0].seed == own.seed)
            if alike and calls[-1][0].states[0] is own.states[0] and len(calls[-1]) < self.rows_at_once:
                calls[-1].append(own)
            else:
                calls.append([own])
        found: list[_Measured] = []
        for together in calls:
            measured, drew = self._measure_together(together)
            if drew and not self._draws and len({own.seed for own in together}) > 1:
                self._draws = True  # every seed has numbers of its own
                return self._measure(rows)
            found.append(measured)
        losses = torch.cat([own.losses for own in found])
        known = [own.accuracies for own in found if own.accuracies is not None]
        accuracies = torch.cat(known) if known else None
        return [_Measured(losses[of], None if accuracies is None else accuracies[of]) for of in places]

    def _measure_together(self, rows: Sequence[_Rows]) -> tuple[_Measured, bool]:
        """Measure rows in one call per piece of the data; return also whether the model drew random numbers."""
        weights, buffers = rows[0].weights, rows[0].buffers
        if len(rows) > 1:
            weights = torch.cat([own.weights for own in rows])
            buffers = {name: torch.cat([own.buffers[name] for own in rows]) for name in buffers}
        doubles = _where_doubles_are(weights.device)
        totals: list[Tensor] = []  # of losses and, where they are known, of accuracies
        stream = generator(rows[0].seed, EVALUATION, device=weights.device)
        before = stream.get_state()
        for piece in self.pieces:
            share = len(tree_leaves(piece)[0]) / self.num_examples
            with self.executor.objective.having(rows[0].states[0]):
                outcomes = self.executor.evaluate(weights, buffers, piece, stream)
            shares = [share * outcome.to(doubles).double() for outcome in outcomes if outcome is not None]
            totals = [total + own for total, own in zip(totals, shares, strict=False)] if totals else shares
        drew = not torch.equal(stream.get_state(), before)
        losses, *accuracies = torch.stack(totals).cpu()
        return _Measured(losses, accuracies[0] if accuracies else None), drew


def validate(runs: Sequence[Run]) -> dict[Run, dict[str, float]]:
    """Return run → its validation columns, for runs with validation data; a group is measured together."""
    by_evaluator: dict[Any, list[Run]] = {}
    for run in runs:
        if run.evaluator is not None:
            by_evaluator.setdefault(run.evaluator, []).append(run)
    found: dict[Run, dict[str, float]] = {}
    for evaluator, own in by_evaluator.items():
        found.update(evaluator(own))
    return found


def _of_nodes(run: Run, states: Sequence[State | None]) -> _Rows:
    """The nodes' own models; one where they are one by construction."""
    replicas = run.cluster.replicas
    if replicas.shares_weights and not replicas.buffers and all(state is states[0] for state in states):
        return _Rows(replicas.weights, {}, run.spec.seed, states[:1])
    return _Rows(replicas.weights.expand(replicas.num_held, -1), replicas.buffers, run.spec.seed, states)


def _of_cluster(run: Run, states: Sequence[State | None]) -> _Rows:
    """The global model and the mean replica, whose Python is that of the first node."""
    assert run.global_weights is not None
    candidates = torch.stack([run.global_weights, run.cluster.mean_weights()])  # (2, P)
    buffers = {n: b.expand(2, *b.shape) for n, b in run.cluster.mean_buffers().items()}
    return _Rows(candidates, buffers, run.spec.seed, [states[0], states[0]])


def _distinct(rows: Sequence[_Rows]) -> tuple[list[_Rows], list[list[int]]]:
    """Return the rows that differ, each by itself, and for all rows of each of `rows` which of them they equal."""
    distinct: list[_Rows] = []
    places: list[list[int]] = []
    known: dict[tuple[int, float], list[int]] = {}  # equal rows have equal sums
    for own in rows:
        places.append([])
        for row, total in enumerate(own.weights.sum(1).tolist()):
            of = slice(row, row + 1)
            one = _Rows(own.weights[of], {n: b[of] for n, b in own.buffers.items()}, own.seed, own.states[of])
            candidates = known.setdefault((own.seed, total), [])
            place = next((at for at in candidates if _equal(distinct[at], one)), len(distinct))
            if place == len(distinct):
                distinct.append(one)
                candidates.append(place)
            places[-1].append(place)
    return distinct, places


def _equal(one: _Rows, other: _Rows) -> bool:
    """Whether two rows have the same weights, buffers, and state of their Python."""
    tensors = [(one.weights, other.weights), *((b, other.buffers[n]) for n, b in one.buffers.items())]
    return one.states[0] is other.states[0] and all(torch.equal(a, b) for a, b in tensors)


def _columns(run: Run, nodes: _Measured, overall: _Measured) -> dict[str, float]:
    collectives, num_held = run.cluster.collectives, run.cluster.replicas.num_held
    with collectives.unbilled():
        local = collectives.all_gather(nodes.losses.expand(num_held))  # (K,)
    columns: dict[str, Tensor] = {
        "local_loss": local[0],
        "global_loss": overall.losses[0],
        "average_loss": overall.losses[-1],
        "node_loss_min": local.min(),
        "node_loss_max": local.max(),
        "node_loss_std": local.std(correction=0),
    }
    if nodes.accuracies is not None and overall.accuracies is not None:
        with collectives.unbilled():
            columns["local_accuracy"] = collectives.broadcast(nodes.accuracies.expand(num_held))
        columns["global_accuracy"] = overall.accuracies[0]
    return {name: float(value) for name, value in columns.items()}


def replica_spread(weights: Tensor) -> dict[str, float]:
    """Return two measures of the distance between stacked weights (K, P).

    divergence: sqrt(mean_k |θ_k − θ̄|²) / |θ̄|, the root mean square distance from the mean replica relative to its
    length. correlation: the mean over pairs of nodes of the Pearson correlation of their weights, NaN for one node.

    >>> replica_spread(torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]))
    {'divergence': 0.0, 'correlation': 1.0}
    """
    num_nodes = len(weights)
    # Distances are taken from row 0, so that equal rows are exactly 0 apart, whatever the rounding of their mean.
    distance = length = 0.0
    means = weights.mean(1, keepdim=True)
    squares = torch.zeros(num_nodes, dtype=torch.float64, device=_where_doubles_are(weights.device))
    for block in weights.split(_COLUMNS_AT_ONCE, dim=1):
        apart = block - block[0]
        mean = apart.mean(0)
        distance += float((apart - mean).square().sum())
        length += float((block[0] + mean).square().sum())
        squares += (block - means).square().sum(1).to(squares)
    # Of rows z_k with mean 0 and length 1 the correlation of a pair is 1 − |z_j − z_k|² / 2; its mean over all pairs is
    # 1 − sum_k |z_k − z̄|² / (K − 1).
    deviations, standardized_distance = squares.sqrt().to(weights)[:, None], 0.0
    for block in weights.split(_COLUMNS_AT_ONCE, dim=1):
        standardized = (block - means) / deviations
        apart = standardized - standardized[0]
        standardized_distance += float((apart - apart.mean(0)).square().sum())
    return {
        "divergence": math.sqrt(distance / num_nodes / length) if length else math.nan,
        "correlation": 1 - standardized_distance / (num_nodes - 1) if num_nodes > 1 else math.nan,
    }


def _where_doubles_are(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "mps" else device
