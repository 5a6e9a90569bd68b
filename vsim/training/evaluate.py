"""Validate every node's model and the global model, and measure how far apart the replicas are."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.func import vmap
from torch.utils._pytree import tree_leaves, tree_map

from vsim.arguments import retold
from vsim.cluster.randomness import EVALUATION, generator, isolated
from vsim.cluster.replicas import Views
from vsim.core.group import Group
from vsim.data.batches import validation_examples
from vsim.engine import Executor, VmapExecutor
from vsim.engine.executor import bits_of, check_examples
from vsim.engine.indices import is_off_cpu
from vsim.engine.machine import using_threads
from vsim.engine.objective import Objective, explained
from vsim.private_torch import without_performance_warnings
from vsim.training.clients import OwnModels
from vsim.training.finetune import fine_tuned
from vsim.training.spec import Metric
from vsim.training.tracked import TrackedRun

# Columns of the node matrix that are compared at once, to bound the memory of the comparison.
_COLUMNS_AT_ONCE = 2**18
_OF_ONE_MODEL = 8  # number of batches that are joined when a single model is evaluated
_ONE_BY_ONE = 256  # number of examples for a standard error if the model cannot be vectorized over examples


class _Rows(NamedTuple):
    """R models to measure.

    Attributes:
        weights: stacked (R, P). buffers: stacked (R, …). seed: seed of the models' random numbers.
        python: for each model, the row of the node whose Python object computes it; 0 if all nodes share one object.
    """

    weights: Tensor
    buffers: Views
    seed: int
    python: Sequence[int]


class _Measured(NamedTuple):
    """Losses (R,) and accuracies (R,). Accuracies: None if the objective has none, NaN where no prediction counts."""

    losses: Tensor
    accuracies: Tensor | None


class Evaluator:
    """Measures runs that have the same validation examples, without changing the runs' state.

    Args:
        executor: computes the losses.
        batch: the validation examples, one batch (N, …) on the run's device.
        batch_size: examples per call.
        rows_at_once: models per call.
        total: number of examples in the dataset; default N.
    """

    def __init__(
        self, executor: Executor, batch: Any, batch_size: int, rows_at_once: int, total: int | None = None
    ) -> None:
        self.executor, self.batch = executor, batch
        self.batch_size, self.rows_at_once = batch_size, rows_at_once
        self.num_examples = len(tree_leaves(batch)[0])
        self.total = total or self.num_examples
        if self.num_examples > batch_size:
            check_examples(batch, 0)
        self._draws = False  # whether the model draws random numbers in evaluation mode

    @torch.no_grad()
    def __call__(self, runs: Sequence[TrackedRun]) -> dict[TrackedRun, dict[str, float]]:
        """Return run → the validation columns of `History`, with a standard error after the run's last step."""
        pieces = _cut(self.batch, self.num_examples, self.batch_size)
        try:
            own_python = self.executor.objective.differs
            to_measure = [f(m, own_python) for m in runs for f in (_of_nodes, _of_cluster)]
            measured = iter(self._measure(to_measure, pieces))
        except Exception as error:
            when = f"in the validation after step {runs[0].done}"
            raise explained(error, self.executor.objective, self.batch, 0, when)  # noqa: B904  # has its cause
        found = {run: _columns(run, next(measured), next(measured)) for run in runs}
        for run, own in zip(runs, to_measure[1::2], strict=True):
            columns = found[run]
            columns |= {"val_examples": self.num_examples, "val_total": self.total}
            if run.is_over:
                # The first node's process computes the standard error.
                se = self._standard_error(own, columns["global_loss"]) if 0 in run.nodes else math.nan
                columns["global_loss_se"] = se if run.is_alone else _of_first_process(run, se)
            columns |= {name: self._mean(f, name, own, pieces) for name, f in (run.spec.metrics or {}).items()}
        return found

    def _standard_error(self, rows: _Rows, loss: float) -> float:
        """Return the standard error, over examples, of the first model's loss.

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
                pieces = _cut(self.batch, min(most, self.num_examples), _OF_ONE_MODEL * self.batch_size)
                losses = torch.cat([own.cpu().double() for own in self._applied(function, rows, pieces)])
            except Exception:  # not vectorizable, or undefined for a single example
                continue
            error = float(losses.std()) / math.sqrt(self.num_examples)
            # Allow a small difference from the plain mean, because a loss may weight examples differently.
            return error if abs(float(losses.mean()) - loss) <= 3 * error + 1e-4 * abs(loss) else math.nan
        return math.nan

    def _applied(self, function: Callable[[Any, Any], Any], rows: _Rows, pieces: Sequence[Any]) -> Iterator[Any]:
        """Yield the results of function(model, batch) for the first model and every batch."""
        objective = self.executor.for_evaluation(rows.python[0])
        buffers = {name: b[0] for name, b in rows.buffers.items()}
        for piece in pieces:
            stream = generator(rows.seed, EVALUATION, device=rows.weights.device)
            yield self.executor.apply(function, rows.weights[0], buffers, piece, stream, objective)

    def _mean(self, metric: Metric, name: str, rows: _Rows, pieces: Sequence[Any]) -> float:
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

    def _measure(self, rows: Sequence[_Rows], pieces: Sequence[Any]) -> list[_Measured]:
        """Measure all rows, each distinct row once; a call takes up to `rows_at_once` rows with one random seed."""
        distinct, places = _distinct(rows)
        calls: list[list[_Rows]] = []
        for own in distinct:
            alike = bool(calls) and (not self._draws or calls[-1][0].seed == own.seed)
            if alike and calls[-1][0].python[0] == own.python[0] and len(calls[-1]) < self.rows_at_once:
                calls[-1].append(own)
            else:
                calls.append([own])
        found: list[_Measured] = []
        for together in calls:
            measured, drew = _measured_together(self.executor, together, pieces)
            if drew and not self._draws and len({own.seed for own in together}) > 1:
                self._draws = True  # from now on, one call per seed
                return self._measure(rows, pieces)
            found.append(measured)
        losses = torch.cat([own.losses for own in found])
        known = [own.accuracies for own in found if own.accuracies is not None]
        accuracies = torch.cat(known) if known else None
        return [_Measured(losses[of], None if accuracies is None else accuracies[of]) for of in places]


def _cut(batch: Any, count: int, size: int) -> list[Any]:
    """Cut the first `count` examples of a batch into batches of up to `size`."""
    if count == len(tree_leaves(batch)[0]) <= size:
        return [batch]  # not cut, so its tensors need not begin with an example dimension
    return [tree_map(lambda t, a=a: t[a : min(a + size, count)], batch) for a in range(0, count, size)]


def _measured_together(
    executor: Executor, rows: Sequence[_Rows], pieces: Sequence[Any], objective: Objective | None = None
) -> tuple[_Measured, bool]:
    """Measure models in one call per piece of the data; also return whether the models drew random numbers."""
    weights = torch.cat([own.weights for own in rows])  # a copy, which the model may change
    buffers = {name: torch.cat([own.buffers[name] for own in rows]) for name in rows[0].buffers}
    found: list[Tensor] = []  # per piece: losses (1, R); or losses, right and counted predictions (3, R)
    stream = generator(rows[0].seed, EVALUATION, device=weights.device)
    before, objective = stream.get_state(), objective or executor.for_evaluation(rows[0].python[0])
    examples = sum(len(tree_leaves(piece)[0]) for piece in pieces)
    for piece in pieces:
        losses, counts = executor.evaluate(weights, buffers, piece, stream, objective)
        found.append(torch.stack([losses, *(() if counts is None else counts.unbind(1))]))
    drew = not torch.equal(stream.get_state(), before)
    # Read once, and sum on the CPU, as MPS does not have float64.
    known = min(map(len, found))
    outcomes = torch.stack([own[:known] for own in found]).cpu().double()
    first, *others = (
        len(tree_leaves(piece)[0]) / examples * own[0] for piece, own in zip(pieces, outcomes, strict=True)
    )
    losses, accuracies = sum(others, first), None
    if known > 1:
        right, counted = outcomes[:, 1:].sum(0)
        accuracies = right / counted
        if bool(((accuracies < 0) | (accuracies > 1 + 1e-6)).any()):
            raise ValueError(f"an accuracy must be a share from 0 to 1, got {accuracies.tolist()}")
    for row in (~losses.isfinite()).nonzero().flatten().tolist() if is_off_cpu(weights) else ():
        own = executor.replicas.views(weights[row]), {name: b[row] for name, b in buffers.items()}
        for piece in pieces:
            objective.check_indices(*own, piece)
    return _Measured(losses, accuracies), drew


def measured_on(
    of: str, group: Group[TrackedRun], runs: Sequence[TrackedRun], briefly: bool = False
) -> dict[TrackedRun, dict[str, list[float]]]:
    """Return for each run the "losses" (N,) of its global model on N datasets, and the "accuracies" if known.

    On a client's data, the client's model replaces the global model if the strategy has personal layers, or if
    `client_val_steps` is given. Runs with the same data are measured together. With several processes, only the first
    node's process measures.

    Args:
        of: "client" for the data of every client, or "test" for the test data.
        briefly: whether to measure only the first client, or one batch of the test data.
    """
    at_once = VmapExecutor.nodes_at_once(group.whole, group.executor.settings)
    own_python, alike = group.executor.objective.differs, dict[Any, list[TrackedRun]]()
    for run in runs:
        data = run.spec.client_val_dataset if of == "client" else run.spec.test_dataset
        key = id(data), run.spec.seed, run if own_python else None
        alike.setdefault(key, []).append(run)
    found: dict[TrackedRun, dict[str, list[float]]] = {}
    for same in alike.values():
        for own in (same[i : i + at_once] for i in range(0, len(same), at_once)):
            found.update(zip(own, _measured_on(of, group, own, briefly), strict=True))
    return found


@torch.no_grad()
def _measured_on(
    of: str, group: Group[TrackedRun], runs: Sequence[TrackedRun], briefly: bool
) -> list[dict[str, list[float]]]:
    (run, *_), executor = runs, group.executor
    batch_size = 4 * (run.minibatch_size or run.spec.batch_size)
    if of == "client":
        datasets, most = run.measuring.client_data[: 1 if briefly else None], run.spec.val_size
    else:
        datasets, most = run.measuring.test_data, batch_size if briefly else sys.maxsize
    own_python = executor.objective.differs
    candidates = [_of_cluster(own, own_python) for own in runs]
    models = [_Rows(m.weights[:1], {n: b[:1] for n, b in m.buffers.items()}, m.seed, m.python[:1]) for m in candidates]
    objective, device = executor.for_evaluation(models[0].python[0]), models[0].weights.device
    own_models = {
        row: OwnModels(own.strategy, own.cluster, own.presence.clients)
        for row, own in enumerate(runs)
        if of == "client" and (own.strategy.is_personal or own.spec.client_val_steps)
    }
    found = torch.full((2, len(runs), len(datasets)), math.nan, dtype=torch.float64)  # losses, accuracies where known
    for number, dataset in enumerate(datasets if 0 in run.nodes else ()):
        batch: Any = None
        try:
            with isolated(run.spec.seed, device):  # a dataset may draw from the global generators
                collate = (run.spec.dataloader_kwargs or {}).get("collate_fn")
                batch = validation_examples(dataset, most, collate).batch
            batch = tree_map(lambda t: t.to(device), batch)
            pieces = _cut(batch, len(tree_leaves(batch)[0]), batch_size)
            for row, own_model in own_models.items():
                _, buffers, *_ = candidates[row]
                own = own_model(number, candidates[row].weights[0], {name: b[0] for name, b in buffers.items()})
                weights, tuned = fine_tuned(runs[row], number, *own) if runs[row].spec.client_val_steps else own
                own_buffers = {name: b[None] for name, b in tuned.items()}
                models[row] = models[row]._replace(weights=weights[None], buffers=own_buffers)
            with using_threads(1) if group.is_small else nullcontext():
                measured, _ = _measured_together(executor, models, pieces, objective)
        except Exception as error:
            data = f"data of client {number}" if of == "client" else "test data"
            when = f"in the validation on the {data} after step {run.done}"
            if batch is None:
                raise retold(error, f"{when}: {error}")  # noqa: B904
            raise explained(error, executor.objective, batch, 0, when)  # noqa: B904
        found[0, :, number] = measured.losses
        if measured.accuracies is not None:
            found[1, :, number] = measured.accuracies
    if not run.is_alone:
        collectives, held = run.cluster.collectives, run.cluster.replicas.num_held
        with collectives.unbilled():
            found = collectives.broadcast(found.expand(held, -1, -1, -1), label=f"losses of {of}")
    named = {"losses": found[0]} if found[1].isnan().all() else {"losses": found[0], "accuracies": found[1]}
    return [{name: values[row].tolist() for name, values in named.items()} for row in range(len(runs))]


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


def _of_nodes(run: TrackedRun, own_python: bool) -> _Rows:
    """Return the nodes' models."""
    replicas = run.cluster.replicas
    python = [*run.rows] if own_python else [0] * replicas.num_held
    return _Rows(replicas.weights, replicas.buffers, run.spec.seed, python)


def _of_cluster(run: TrackedRun, own_python: bool) -> _Rows:
    """Return the global model and the mean replica; the first node's Python object computes the outputs of both."""
    assert run.measuring.weights is not None
    mean = run.measuring.weights if run.strategy.evaluates_mean else run.cluster.mean_weights()
    candidates = torch.stack([run.measuring.weights, mean])  # (2, P)
    buffers = {n: b.expand(2, *b.shape) for n, b in run.cluster.mean_buffers().items()}
    return _Rows(candidates, buffers, run.spec.seed, 2 * [run.rows.start if own_python else 0])


def _distinct(rows: Sequence[_Rows]) -> tuple[list[_Rows], list[list[int]]]:
    """Return the distinct models, each as `_Rows` of one row; and, for each of `rows`, the indices of its models."""
    distinct: list[_Rows] = []
    places: list[list[int]] = []
    # Find candidates by the sum of a row's bits. A floating-point sum would depend on the number of rows on a GPU.
    known: dict[tuple[int, int], list[int]] = {}
    for own in rows:
        places.append([])
        for row, total in enumerate(bits_of(own.weights).sum(1).tolist()):
            of = slice(row, row + 1)
            one = _Rows(own.weights[of], {n: b[of] for n, b in own.buffers.items()}, own.seed, own.python[of])
            candidates = known.setdefault((own.seed, total), [])
            place = next((at for at in candidates if _equal(distinct[at], one)), len(distinct))
            if place == len(distinct):
                distinct.append(one)
                candidates.append(place)
            places[-1].append(place)
    return distinct, places


def _equal(one: _Rows, other: _Rows) -> bool:
    """Return whether two rows have the same weights, buffers and Python object."""
    tensors = [(one.weights, other.weights), *((b, other.buffers[n]) for n, b in one.buffers.items())]
    return one.python[0] == other.python[0] and all(torch.equal(a, b) for a, b in tensors)


def _of_first_process(run: TrackedRun, value: float) -> float:
    """Return, in every process of a run, the value from the first node's process."""
    collectives, num_held = run.cluster.collectives, run.cluster.replicas.num_held
    with collectives.unbilled():
        same = torch.full((num_held, 1), value, dtype=torch.float64)
        return float(collectives.broadcast(same, label="standard error"))


def _columns(run: TrackedRun, nodes: _Measured, overall: _Measured) -> dict[str, float]:
    collectives = run.cluster.collectives
    with collectives.unbilled():
        local = collectives.all_gather(nodes.losses)  # (K,)
    columns: dict[str, Tensor] = {
        "local_loss": local[0],
        "global_loss": overall.losses[0],
        "average_loss": overall.losses[-1],
        "node_loss_min": local.min(),
        "node_loss_max": local.max(),
        "node_loss_std": (local - local[0]).std(correction=0),  # exactly 0 for equal losses
        "global_formed": torch.tensor(
            not run.strategy.evaluates_mean or run.strategy.has_global_model(run.measuring.weights)
        ),
    }
    if run.strategy.is_gossip:
        with collectives.unbilled():
            columns["consensus_distance"] = collectives.all_gather(_from_mean(run).to(local)).square().mean().sqrt()
    if nodes.accuracies is not None and overall.accuracies is not None:
        with collectives.unbilled():
            columns["local_accuracy"] = collectives.broadcast(nodes.accuracies)
        columns["global_accuracy"] = overall.accuracies[0]
    return {name: float(value) for name, value in columns.items()}


def _from_mean(run: TrackedRun) -> Tensor:
    """Return the distances (R,) of this process's nodes from the mean replica."""
    mean = run.measuring.weights if run.strategy.evaluates_mean else run.cluster.mean_weights()
    assert mean is not None
    return torch.stack([torch.linalg.vector_norm(row - mean) for row in run.cluster.weights])


def replica_spread(weights: Tensor) -> dict[str, float]:
    """Return two measures of the distance between stacked weights (K, P).

    divergence: sqrt(mean_k |θ_k − θ̄|²) / |θ̄|, the root mean square distance from the mean replica relative to its
    length. correlation: the mean over pairs of nodes of the Pearson correlation of their weights, NaN for one node.

    >>> replica_spread(torch.tensor([[1.0, 2.0, 3.0], [1.0, 2.0, 3.0]]))
    {'divergence': 0.0, 'correlation': 1.0}
    """
    num_nodes = len(weights)
    # Subtract row 0 first, so that equal rows are exactly 0 apart, however their mean is rounded. Read the sums over
    # all blocks of columns at once, and add them in float64 on the CPU, because MPS has no float64.
    means = weights.mean(1, keepdim=True)
    blocks = weights.split(_COLUMNS_AT_ONCE, dim=1)
    lengths, squares = [], []
    for block in blocks:
        apart = block - block[0]
        mean = apart.mean(0)
        lengths.append(torch.stack([(apart - mean).square().sum(), (block[0] + mean).square().sum()]))
        squares.append((block - means).square().sum(1))
    distance = length = standardized_distance = 0.0
    for own_distance, own_length in torch.stack(lengths).tolist():
        distance, length = distance + own_distance, length + own_length
    total = torch.zeros(num_nodes, dtype=torch.float64)
    for own in torch.stack(squares).cpu():
        total += own
    # For rows z_k with mean 0 and length 1, the correlation of a pair is 1 − |z_j − z_k|² / 2. Its mean over all pairs
    # is 1 − sum_k |z_k − z̄|² / (K − 1).
    deviations, distances = total.sqrt().to(weights)[:, None], []
    for block in blocks:
        standardized = (block - means) / deviations
        apart = standardized - standardized[0]
        distances.append((apart - apart.mean(0)).square().sum())
    for own_distance in torch.stack(distances).tolist():
        standardized_distance += own_distance
    return {
        "divergence": math.sqrt(distance / num_nodes / length) if length else math.nan,
        "correlation": 1 - standardized_distance / (num_nodes - 1) if num_nodes > 1 else math.nan,
    }
