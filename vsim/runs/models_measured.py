"""Losses and accuracies of several models on some examples, in few calls."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset

from vsim.arguments import retold
from vsim.cluster.randomness import EVALUATION, generator, isolated
from vsim.cluster.replicas import Views
from vsim.data.batches import validation_examples
from vsim.engine import Executor
from vsim.engine.executor import bits_of
from vsim.engine.indices import is_off_cpu
from vsim.engine.objective import Objective
from vsim.runs.tracked import TrackedRun


class Models(NamedTuple):
    """R models to measure.

    Attributes:
        weights: stacked (R, P). buffers: stacked (R, …). seed: seed of the models' random numbers.
        python: for each model, the row of the node whose Python object computes it; 0 if all nodes share one object.
    """

    weights: Tensor
    buffers: Views
    seed: int
    python: Sequence[int]


class Measured(NamedTuple):
    """Losses (R,) and accuracies (R,). Accuracies: None if the objective has none, NaN where no prediction counts."""

    losses: Tensor
    accuracies: Tensor | None


def of_nodes(run: TrackedRun, own_python: bool) -> Models:
    """Return the nodes' models."""
    replicas = run.cluster.replicas
    python = [*run.rows] if own_python else [0] * replicas.num_held
    return Models(replicas.weights, replicas.buffers, run.spec.seed, python)


def of_cluster(run: TrackedRun, own_python: bool) -> Models:
    """Return the global model and the mean replica; the first node's Python object computes the outputs of both."""
    assert run.measuring.weights is not None
    mean = run.measuring.weights if run.strategy.evaluates_mean else run.cluster.mean_weights()
    candidates = torch.stack([run.measuring.weights, mean])  # (2, P)
    buffers = {n: b.expand(2, *b.shape) for n, b in run.cluster.mean_buffers().items()}
    return Models(candidates, buffers, run.spec.seed, 2 * [run.rows.start if own_python else 0])


def examples_at_once(run: TrackedRun) -> int:
    """Return the examples per call: more than in training, as evaluation keeps no activations."""
    return 4 * (run.group.minibatch_size or run.spec.batch_size)


def cut(batch: Any, count: int, size: int) -> list[Any]:
    """Cut the first `count` examples of a batch into batches of up to `size`."""
    if count == len(tree_leaves(batch)[0]) <= size:
        return [batch]  # not cut, so its tensors need not begin with an example dimension
    return [tree_map(lambda t, a=a: t[a : min(a + size, count)], batch) for a in range(0, count, size)]


def examples_of(run: TrackedRun, dataset: Dataset[Any], most: int | None, when: str) -> tuple[Any, list[Any]]:
    """Return up to `most` examples of a dataset on the run's device, as one batch and in pieces; errors say `when`."""
    spec, device = run.spec, run.cluster.weights.device
    try:
        with isolated(spec.seed, device):  # a dataset may draw from the global generators
            collate = (spec.dataloader_kwargs or {}).get("collate_fn")
            batch = validation_examples(dataset, most, collate).batch
        batch = tree_map(lambda t: t.to(device), batch)
        return batch, cut(batch, len(tree_leaves(batch)[0]), examples_at_once(run))
    except Exception as error:
        raise retold(error, f"{when}: {error}")  # noqa: B904


def measured_together(
    executor: Executor, rows: Sequence[Models], pieces: Sequence[Any], objective: Objective | None = None
) -> tuple[Measured, bool]:
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
    return Measured(losses, accuracies), drew


def distinct_of(rows: Sequence[Models]) -> tuple[list[Models], list[list[int]]]:
    """Return the distinct models, each as `Models` of one row; and, for each of `rows`, the indices of its models."""
    distinct: list[Models] = []
    places: list[list[int]] = []
    # Find candidates by the sum of a row's bits. A floating-point sum would depend on the number of rows on a GPU.
    known: dict[tuple[int, int], list[int]] = {}
    for own in rows:
        places.append([])
        for row, total in enumerate(bits_of(own.weights).sum(1).tolist()):
            of = slice(row, row + 1)
            one = Models(own.weights[of], {n: b[of] for n, b in own.buffers.items()}, own.seed, own.python[of])
            candidates = known.setdefault((own.seed, total), [])
            place = next((at for at in candidates if _equal(distinct[at], one)), len(distinct))
            if place == len(distinct):
                distinct.append(one)
                candidates.append(place)
            places[-1].append(place)
    return distinct, places


def _equal(one: Models, other: Models) -> bool:
    """Return whether two rows have the same weights, buffers and Python object."""
    tensors = [(one.weights, other.weights), *((b, other.buffers[n]) for n, b in one.buffers.items())]
    return one.python[0] == other.python[0] and all(torch.equal(a, b) for a, b in tensors)
