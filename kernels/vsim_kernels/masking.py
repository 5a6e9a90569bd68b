"""Write some columns of the matrix of replicas in place.

x is *stacked* (K, N), one row per node; `index` is *shared* (m,) int64 and names distinct columns. x may be a slice of
rows of a larger matrix; `scatter_` writes through the strides of x, and never reallocates x.

`scatter_` with an expanded index writes row by row. On a CPU, advanced indexing is up to three times slower, because
it writes column by column; compiled code is slower, too, because it copies all of x.
"""

from __future__ import annotations

from torch import Tensor


def write_entries_(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """Write the same values in the chosen columns of every node: x[k, index_i] = values_i, in place.

    Args:
        x: *stacked* (K, N), changed in place and returned.
        index: *shared* (m,) int64, distinct (if a column were repeated, it would get either value).
        values: *shared* (m,), in the dtype of x.
    """
    nodes = x.shape[0]
    return x.scatter_(1, index.expand(nodes, -1), values.expand(nodes, -1))


def write_entries_reference_(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    """`write_entries_`, entry by entry and node by node."""
    for row in x:
        for i, value in zip(index.tolist(), values, strict=True):
            row[i] = value
    return x
