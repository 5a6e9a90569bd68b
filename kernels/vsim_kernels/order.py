"""Sort stacked tensors over the nodes, entry by entry."""

from __future__ import annotations

import torch
from torch import Tensor


def sort_rows(rows: Tensor) -> list[Tensor]:
    """Sort each entry's n values, one from each node, in ascending order.

    On a CPU, uses Batcher's merge exchange, which compares and exchanges whole rows about n·log²(n)/4 times, at memory
    bandwidth; `torch.sort` would sort the few values of each entry separately. On other devices, where each exchange
    would be two kernel launches, uses `torch.sort`.

    Args:
        rows: *stacked* (n, …).

    Returns:
        n tensors (…), *shared*: the smallest values of all entries first, the largest last.

    Source: Knuth, The Art of Computer Programming 3, algorithm 5.2.2M.
    """
    if rows.device.type != "cpu":
        return list(rows.sort(dim=0).values.unbind())
    own, n = list(rows.unbind()), len(rows)
    p = top = 1 << (n - 1).bit_length() >> 1
    while p:
        q, remainder, distance = top, 0, p
        while distance:
            for i in range(n - distance):
                if i & p == remainder:
                    low, high = own[i], own[i + distance]
                    own[i], own[i + distance] = torch.minimum(low, high), torch.maximum(low, high)
            distance, q, remainder = q - p, q >> 1, p
        p >>= 1
    return own


def sort_rows_reference(rows: Tensor) -> list[Tensor]:
    """`sort_rows` by torch."""
    return list(rows.sort(dim=0).values.unbind())
