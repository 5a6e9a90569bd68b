"""How far the replicas of a run are apart."""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Columns of the node matrix that are compared at once, to bound the memory of the comparison.
_COLUMNS_AT_ONCE = 2**18


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
