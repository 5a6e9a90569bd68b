"""Keeping the largest entries of every tile, and averaging what several nodes kept."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .dct import largest_divisor
from .precision import working_dtype


def topk_entries(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k entries of largest magnitude in every row, exactly.

    Two stages where that is less work. A row is seen as n/b groups of b entries, b the largest divisor of n
    up to sqrt(n/k). The k largest entries lie in the k groups with the largest maxima: any other group has k
    maxima before its own. So: the groups' maxima, the k best groups, the k largest of their k · b entries.

    Args:
        x: (M, n), floating.
        k: entries to keep in a row, at least 1; a k above n keeps all n.

    Returns:
        values (M, min(k, n)) with their sign, and their index (M, min(k, n)), int64, distinct in a row. The
        order inside a row is unspecified, and so is which of several equal magnitudes is kept at the edge
        (the same on every call).

    Raises:
        ValueError: k < 1.

    Source: DeMo [2411.19870], algorithm 1 (extraction of fast components).
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    rows, n = x.shape
    if k >= n:
        return x.clone(), torch.arange(n, device=x.device).expand(rows, n).contiguous()
    group = largest_divisor(n, math.isqrt(n // k))
    magnitude = x.abs()
    if group == 1:
        index = magnitude.topk(k, dim=1, sorted=False).indices
        return x.gather(1, index), index
    groups = n // group
    # Group j is the entries j, j + groups, …: this way round the maximum runs over whole rows of memory.
    grouped = magnitude.reshape(rows, group, groups)
    best = grouped.amax(1).topk(k, dim=1, sorted=False).indices  # (M, k) groups
    candidates = grouped.gather(2, best[:, None, :].expand(rows, group, k)).reshape(rows, group * k)
    place = candidates.topk(k, dim=1, sorted=False).indices  # (M, k) places among the candidates
    index = torch.div(place, k, rounding_mode="floor") * groups + best.gather(1, place % k)
    return x.gather(1, index), index


def scatter_mean(index: Tensor, values: Tensor, n: int) -> Tensor:
    """Every entry's mean over the nodes that sent it, and 0 where none did.

        out[i, j] = Σ_{k: j ∈ index[k, i]} value / #{k: j ∈ index[k, i]}

    An entry sent with value 0 counts as sent. Sums run over the nodes in rank order with one scatter a node, whose
    indices are distinct: bitwise equal on every run, also where a scatter with collisions adds atomically in any order.

    Args:
        index: *stacked* (K, M, s) int64, the entries each node sent of each of M tiles, distinct in a tile.
        values: *stacked* (K, M, s), floating.
        n: entries in a tile.

    Returns:
        *shared* (M, n) in the dtype of values (16-bit types are summed in float32).

    Source: DeMo [2411.19870], reference code (`batch_decompress`, `scatter_reduce` with "mean").
    """
    dtype = working_dtype(values.dtype)
    total = values.new_zeros((index.shape[1], n), dtype=dtype)
    senders = torch.zeros_like(total)
    one = total.new_ones(()).expand(index.shape[1:])
    for node_index, node_values in zip(index.unbind(), values.unbind(), strict=True):
        total.scatter_add_(1, node_index, node_values.to(dtype))
        senders.scatter_add_(1, node_index, one)
    return total.div_(senders.clamp_(min=1.0)).to(values.dtype)


def topk_entries_reference(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`topk_entries` by sorting every row (of equal magnitudes it keeps the first)."""
    kept = [sorted(range(x.shape[1]), key=lambda j: -abs(float(row[j])))[:k] for row in x]
    index = torch.tensor(kept, dtype=torch.int64, device=x.device).reshape(x.shape[0], min(k, x.shape[1]))
    return torch.stack([row[i] for row, i in zip(x, index, strict=True)]), index


def scatter_mean_reference(index: Tensor, values: Tensor, n: int) -> Tensor:
    """`scatter_mean`, entry by entry."""
    out = torch.zeros(index.shape[1], n, dtype=torch.float64)
    for tile in range(index.shape[1]):
        sent: dict[int, list[float]] = {}
        for node in range(index.shape[0]):
            for j, value in zip(index[node, tile].tolist(), values[node, tile].tolist(), strict=True):
                sent.setdefault(j, []).append(value)
        for j, received in sent.items():
            out[tile, j] = sum(received) / len(received)
    return out.to(values.device, values.dtype)
