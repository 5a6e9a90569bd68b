"""Validate every node's model and the global model of runs."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from vsim.arguments import retold
from vsim.cluster.randomness import EVALUATION, generator
from vsim.engine import Executor
from vsim.engine.executor import check_examples
from vsim.engine.objective import Objective, explained
from vsim.private_torch import without_performance_warnings
from vsim.runs.models_measured import (
    Measured,
    Models,
    cut,
    distinct_of,
    examples_at_once,
    measured_together,
    of_cluster,
    of_nodes,
)
from vsim.runs.spec import Metric
from vsim.runs.tracked import TrackedRun

_OF_ONE_MODEL = 8  # number of batches that are joined when a single model is evaluated
_ONE_BY_ONE = 256  # number of examples for a standard error if the model cannot be vectorized over examples


def validate(runs: Sequence[TrackedRun]) -> dict[TrackedRun, dict[str, float]]:
    """Return run → validation columns, for runs with validation data. Runs with the same evaluator share calls."""
    by_evaluator: dict[Any, list[TrackedRun]] = {}
    for run in runs:
        if run.measuring.evaluator is not None:
            by_evaluator.setdefault(run.measuring.evaluator, []).append(run)
    found: dict[TrackedRun, dict[str, float]] = {}
    for evaluator, own in by_evaluator.items():
        found.update(evaluator(own))
    return found


class Evaluator:
    """Measures runs that have the same validation examples, without changing the runs' state.

    Args:
        executor: computes the losses.
        batch: the validation examples, one batch (N, …) on the run's device.
        rows_at_once: models per call.
        total: number of examples in the dataset; default N.
    """

    def __init__(self, executor: Executor, batch: Any, rows_at_once: int, total: int | None = None) -> None:
        self.executor, self.batch, self.rows_at_once = executor, batch, rows_at_once
        self.num_examples = len(tree_leaves(batch)[0])
        self.total = total or self.num_examples
        self._draws = False  # whether the model draws random numbers in evaluation mode

    @torch.no_grad()
    def __call__(self, runs: Sequence[TrackedRun]) -> dict[TrackedRun, dict[str, float]]:
        """Return run → the validation columns of `History`, with a standard error after the run's last step."""
        size = examples_at_once(runs[0])
        pieces = self.pieces(size)
        try:
            own_python = self.executor.objective.differs
            overall = [of_cluster(run, own_python) for run in runs]
            to_measure = [
                own
                for run, of_run in zip(runs, overall, strict=True)
                for own in ([of_nodes(run, own_python)] if run.spec.val_nodes else []) + [of_run]
            ]
            measured = iter(self._measure(to_measure, pieces))
        except Exception as error:
            when = f"in the validation after step {runs[0].done}"
            raise explained(error, self.executor.objective, self.batch, 0, when)  # noqa: B904  # has its cause
        found = {run: _columns(run, next(measured) if run.spec.val_nodes else None, next(measured)) for run in runs}
        for run, own in zip(runs, overall, strict=True):
            columns = found[run]
            columns |= {"val_examples": self.num_examples, "val_total": self.total}
            if run.is_over:
                # The first node's process computes the standard error.
                se = self._standard_error(own, columns["global_loss"], size) if 0 in run.nodes else math.nan
                columns["global_loss_se"] = se if run.is_alone else _of_first_process(run, se)
            columns |= {name: self._mean(f, name, own, pieces) for name, f in (run.spec.metrics or {}).items()}
        return found

    def pieces(self, size: int) -> list[Any]:
        """Return the examples in batches of up to `size`."""
        if self.num_examples > size:
            check_examples(self.batch, 0)
        return cut(self.batch, self.num_examples, size)

    def _standard_error(self, rows: Models, loss: float, size: int) -> float:
        """Return the standard error, over examples, of the first model's loss; `size`: examples per call.

        NaN if the loss of a batch is not the mean of its examples' losses, as in contrastive learning.
        """
        if self.num_examples < 2:
            return math.nan

        loss_fn = self.executor.objective.copied().loss_fn  # which may count

        def loss_of_one(model: nn.Module) -> Callable[[Any], Tensor]:
            objective = Objective(model, loss_fn)
            return lambda example: objective(tree_map(lambda t: t[None], example))[0].detach()

        def at_once(model: nn.Module, batch: Any) -> Tensor:
            with without_performance_warnings():
                return vmap(loss_of_one(model), randomness="same")(batch)

        def one_by_one(model: nn.Module, batch: Any) -> Tensor:
            examples = (tree_map(lambda t, i=i: t[i], batch) for i in range(len(tree_leaves(batch)[0])))
            return torch.stack([*map(loss_of_one(model), examples)])

        for function, most in ((at_once, self.num_examples), (one_by_one, _ONE_BY_ONE)):
            try:
                check_examples(self.batch, 0)
                # One model with several batches takes as much memory as several models with one batch.
                pieces = cut(self.batch, min(most, self.num_examples), _OF_ONE_MODEL * size)
                losses = torch.cat([own.cpu().double() for own in self._applied(function, rows, pieces)])
            except Exception:  # not vectorizable, or undefined for a single example
                continue
            error = float(losses.std()) / math.sqrt(self.num_examples)
            # Allow a small difference from the plain mean, because a loss may weight examples differently.
            return error if abs(float(losses.mean()) - loss) <= 3 * error + 1e-4 * abs(loss) else math.nan
        return math.nan

    def _applied(self, function: Callable[[Any, Any], Any], rows: Models, pieces: Sequence[Any]) -> Iterator[Any]:
        """Yield the results of function(model, batch) for the first model and every batch."""
        objective = self.executor.for_evaluation(rows.python[0])
        buffers = {name: b[0] for name, b in rows.buffers.items()}
        for piece in pieces:
            stream = generator(rows.seed, EVALUATION, device=rows.weights.device)
            yield self.executor.apply(function, rows.weights[0], buffers, piece, stream, objective)

    def _mean(self, metric: Metric, name: str, rows: Models, pieces: Sequence[Any]) -> float:
        """Return a user-defined metric of the first model, averaged over the examples."""
        total = examples = 0.0
        outcomes = self._applied(metric, rows, pieces)
        for piece in pieces:
            size = len(tree_leaves(piece)[0])
            try:
                outcome = next(outcomes)
            except Exception as error:
                raise retold(error, f"metrics[{name!r}]: {error}") from error
            try:
                total, examples = total + size * float(outcome), examples + size
            except (TypeError, ValueError, RuntimeError) as error:
                raise TypeError(f"metrics[{name!r}] must return a number, got {type(outcome).__name__}") from error
            except OverflowError as error:
                raise ValueError(f"metrics[{name!r}] returned a number that is too large for a float") from error
        return total / examples

    def _measure(self, rows: Sequence[Models], pieces: Sequence[Any]) -> list[Measured]:
        """Measure all rows, each distinct row once; a call takes up to `rows_at_once` rows with one random seed."""
        distinct, places = distinct_of(rows)
        calls: list[list[Models]] = []
        for own in distinct:
            alike = bool(calls) and (not self._draws or calls[-1][0].seed == own.seed)
            if alike and calls[-1][0].python[0] == own.python[0] and len(calls[-1]) < self.rows_at_once:
                calls[-1].append(own)
            else:
                calls.append([own])
        found: list[Measured] = []
        for together in calls:
            measured, drew = measured_together(self.executor, together, pieces)
            if drew and not self._draws and len({own.seed for own in together}) > 1:
                self._draws = True  # from now on, one call per seed
                return self._measure(rows, pieces)
            found.append(measured)
        losses = torch.cat([own.losses for own in found])
        known = [own.accuracies for own in found if own.accuracies is not None]
        accuracies = torch.cat(known) if known else None
        return [Measured(losses[of], None if accuracies is None else accuracies[of]) for of in places]


def _of_first_process(run: TrackedRun, value: float) -> float:
    """Return, in every process of a run, the value from the first node's process."""
    collectives, num_held = run.cluster.collectives, run.cluster.replicas.num_held
    with collectives.unbilled():
        same = torch.full((num_held, 1), value, dtype=torch.float64)
        return float(collectives.broadcast(same, label="standard error"))


def _columns(run: TrackedRun, nodes: Measured | None, overall: Measured) -> dict[str, float]:
    """Return the validation columns; those of the nodes' own models are unknown without `nodes`."""
    collectives = run.cluster.collectives
    columns: dict[str, Tensor] = {
        "global_loss": overall.losses[0],
        "average_loss": overall.losses[-1],
        "global_formed": torch.tensor(
            not run.strategy.evaluates_mean or run.strategy.has_global_model(run.measuring.weights)
        ),
    }
    if overall.accuracies is not None:
        columns["global_accuracy"] = overall.accuracies[0]
    with collectives.unbilled():
        if nodes is not None:
            local = collectives.all_gather(nodes.losses)  # (K,)
            columns |= {
                "local_loss": local[0],
                "node_loss_min": local.min(),
                "node_loss_max": local.max(),
                "node_loss_std": (local - local[0]).std(correction=0),  # exactly 0 for equal losses
            }
            if nodes.accuracies is not None:
                columns["local_accuracy"] = collectives.broadcast(nodes.accuracies)
        if run.strategy.is_gossip:
            distances = collectives.all_gather(_from_mean(run).to(overall.losses))
            columns["consensus_distance"] = distances.square().mean().sqrt()
    return {name: float(value) for name, value in columns.items()}


def _from_mean(run: TrackedRun) -> Tensor:
    """Return the distances (R,) of this process's nodes from the mean replica."""
    mean = run.measuring.weights if run.strategy.evaluates_mean else run.cluster.mean_weights()
    assert mean is not None
    return torch.stack([torch.linalg.vector_norm(row - mean) for row in run.cluster.weights])
