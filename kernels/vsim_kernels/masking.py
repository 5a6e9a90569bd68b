"""Averaging some columns of the matrix of replicas, in place.

x is *stacked* (K, N), one row a node; `index` is *shared* (m,) int64 and names distinct columns. x may be a
row slice of a larger matrix: it is read and written through its strides and never reallocated.

`gather` and `scatter_` with an expanded index walk along each row and take strided rows as they are. On a CPU
`index_select` first copies a strided x whole, and advanced indexing walks down the columns: up to three times
slower. Compiling the two that write does not pay there: the compiled code copies all of x.
"""

from __future__ import annotations

import torch
from torch import Tensor


def mean_entries(x: Tensor, index: Tensor) -> Tensor:
    """Mean over the nodes of the chosen columns: out_i = (1/K) Σ_k x[k, index_i].

    Args:
        x: *stacked* (K, N), floating.
        index: *shared* (m,) int64; order and repetitions are respected.

    Returns:
        *shared* (m,), in the dtype of x (16-bit types are summed in float32).
    """
    return x.gather(1, index.expand(x.shape[0], -1)).mean(0)


def write_entries_(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Write the same values in the chosen columns of every node: x[k, index_i] = values_i, in place.

    Args:
        x: *stacked* (K, N), changed in place and returned.
        index: *shared* (m,) int64, distinct (a repeated column would take either value).
        values: *shared* (m,), in the dtype of x.
    """
    nodes = x.shape[0]
    return x.scatter_(1, index.expand(nodes, -1), values.expand(nodes, -1))


def average_entries_(x: Tensor, index: Tensor) -> Tensor:
    """Replace the chosen columns by their mean over the nodes, in place, and return x.

    `write_entries_(x, index, mean_entries(x, index))` in one call: the sparse averaging of SPARTA
    (openreview stFPf3gzq1).

    Args:
        x: *stacked* (K, N), changed in place.
        index: *shared* (m,) int64, distinct.
    """
    return write_entries_(x, index, mean_entries(x, index))


def mean_entries_reference(x: Tensor, index: Tensor) -> Tensor:
    """`mean_entries`, entry by entry and node by node."""
    means = [sum(float(row[i]) for row in x) / x.shape[0] for i in index.tolist()]
    return torch.tensor(means, dtype=torch.float64).to(x.device, x.dtype)


def write_entries_reference_(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """`write_entries_`, entry by entry and node by node."""
    for row in x:
        for i, value in zip(index.tolist(), values, strict=True):
            row[i] = value
    return x


def average_entries_reference_(x: Tensor, index: Tensor) -> Tensor:
    """`average_entries_`, entry by entry and node by node."""
    return write_entries_reference_(x, index, mean_entries_reference(x, index))
