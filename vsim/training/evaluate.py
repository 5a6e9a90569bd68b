"""Validation: every node's own model, the global model, and how far apart the replicas are."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from vsim.cluster.cluster import Cluster
from vsim.cluster.randomness import EVALUATION, generator
from vsim.cluster.replicas import Replicas, Views
from vsim.engine import Executor
from vsim.strategy.base import Strategy

# Columns of the node matrix that are compared at once: bounds the memory that measuring needs.
_COLUMNS_AT_ONCE = 2**18


class Evaluator:
    """Measures a run without changing anything in it.

    Args:
        executor: computes the losses.
        batch: the validation examples, one batch (N, …) on the run's device.
        batch_size: examples at a time.
        seed: whatever the model draws in evaluation mode is the same at every evaluation.
    """

    def __init__(self, executor: Executor, batch: Any, batch_size: int, seed: int) -> None:
        self.executor = executor
        self.seed = seed
        self.num_examples = len(tree_leaves(batch)[0])
        self.pieces = [
            tree_map(lambda t, a=start: t[a : a + batch_size], batch)
            for start in range(0, self.num_examples, batch_size)
        ]

    def __call__(self, cluster: Cluster, strategy: Strategy) -> dict[str, float]:
        """Return the validation columns of `History`."""
        replicas = cluster.replicas
        own, own_accuracies = self._measure_nodes(replicas)
        with cluster.collectives.unbilled():
            local = cluster.collectives.all_gather(own)  # (K,)
        global_weights, mean_weights = strategy.global_weights(), cluster.mean_weights()
        candidates = torch.stack([global_weights, mean_weights])  # (2, P)
        if torch.equal(global_weights, mean_weights):
            candidates = candidates[:1]
        buffers = {n: b.expand(len(candidates), *b.shape) for n, b in cluster.mean_buffers().items()}
        overall, overall_accuracies = self._measure(candidates, buffers)

        columns = {
            "local_loss": local[0],
            "global_loss": overall[0],
            "average_loss": overall[-1],
            "node_loss_min": local.min(),
            "node_loss_max": local.max(),
            "node_loss_std": local.std(correction=0),
        }
        if own_accuracies is not None and overall_accuracies is not None:
            with cluster.collectives.unbilled():
                columns["local_accuracy"] = cluster.collectives.broadcast(own_accuracies)
            columns["global_accuracy"] = overall_accuracies[0]
        return {name: float(value) for name, value in columns.items()}

    def _measure_nodes(self, replicas: Replicas) -> tuple[Tensor, Tensor | None]:
        """Return (losses, accuracies) of all nodes, stacked (K,); equal replicas are measured once."""
        own = {"": replicas.weights, **replicas.buffers}
        if not all(torch.equal(t, t[:1].expand_as(t)) for t in own.values()):
            return self._measure(replicas.weights.expand(replicas.num_held, -1), replicas.buffers)
        first = replicas.rows(0, 1)
        loss, accuracy = self._measure(first.weights, first.buffers)
        return loss.expand(replicas.num_held), None if accuracy is None else accuracy.expand(replicas.num_held)

    def _measure(self, weights: Tensor, buffers: Views) -> tuple[Tensor, Tensor | None]:
        """Return (losses, accuracies), stacked (R,), over all validation examples."""
        losses = torch.zeros(len(weights), dtype=torch.float64)
        accuracies: Tensor | None = torch.zeros_like(losses)
        stream = generator(self.seed, EVALUATION, device=weights.device)
        for piece in self.pieces:
            share = len(tree_leaves(piece)[0]) / self.num_examples
            loss, accuracy = self.executor.evaluate(weights, buffers, piece, stream)
            losses += share * loss.double().cpu()
            if accuracy is None or accuracies is None:
                accuracies = None
            else:
                accuracies += share * accuracy.double().cpu()
        return losses, accuracies


def replica_spread(weights: Tensor) -> dict[str, float]:
    """Return how far apart stacked weights (K, P) are.

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
