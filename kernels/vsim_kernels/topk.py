"""Keep the largest entries of every tile, and sum or average the entries that several nodes kept."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .dct import largest_divisor
from .precision import working_dtype

_WHOLE = {2: torch.int16, 4: torch.int32, 8: torch.int64}  # bytes per number → integer dtype


def topk_entries(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """Return the k entries of largest magnitude in every row, exactly.

    For n > 8k, the work is done in stages. A row is n/b groups of b entries, where b is the largest divisor of n up to
    sqrt(n/k). The k largest entries lie in the k groups with the largest maxima, because these k maxima are at least as
    large as any entry of other groups. The stages: compute the groups' maxima; find the k best groups by the same
    procedure; find the k largest of the k · b entries of these groups.

    Args:
        x: (…, n), floating.
        k: how many entries to keep of each row, at least 1; a k above n keeps all n.

    Returns:
        values (…, min(k, n)) with sign, and index (…, min(k, n)), int64, without repeats. The order of the entries and
        the choice among equal magnitudes are unspecified, but the same on every call.

    Raises:
        ValueError: k < 1.

    Source: DeMo [2411.19870], algorithm 1 (extraction of fast components).
    """
    if k < 1:
        raise ValueError(f"k must be at least 1, got {k}")
    n = x.shape[-1]
    if k >= n:
        return x.clone(), torch.arange(n, device=x.device).expand(x.shape).contiguous()
    # Compare the bits of magnitudes as whole numbers, which have the same order: faster, without a case for NaN.
    bits = x.abs().view(_WHOLE[x.element_size()])
    index = _largest(bits.reshape(-1, n), k).view(*x.shape[:-1], k)
    return x.gather(-1, index), index


def _largest(x: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest entries of every row: (M, n) → (M, k)."""
    rows, n = x.shape
    group = largest_divisor(n, math.isqrt(n // k)) if n > 8 * k else 1  # one stage is faster for n ≤ 8k
    if group == 1:
        return x.topk(k, dim=1, sorted=False).indices
    groups = n // group
    # Group j has the entries j, j + groups, …, so that the maximum runs over whole rows of memory.
    grouped = x.reshape(rows, group, groups)
    best = _largest(grouped.amax(1), k)  # (M, k) groups
    starts = torch.arange(0, n, groups, device=x.device)
    candidates = (starts[:, None] + best[:, None]).flatten(1)  # (M, group · k) places
    return candidates.gather(1, x.gather(1, candidates).topk(k, dim=1, sorted=False).indices)


def scatter_sum(index: Tensor, values: Tensor, n: int) -> Tensor:
    """Return every entry's sum over the nodes that sent the entry: out[j] = Σ_{k: j ∈ index[k]} value.

    The result is bitwise equal on every run. A CPU scatters into one vector in the order of the ranks. Other devices
    would add values of one entry atomically in any order; there, each node's values are scattered into a separate row
    of a temporary (K, n) tensor, and the rows are summed.

    Args:
        index: *stacked* (K, s) int64, the entries that each node sent, none twice.
        values: *stacked* (K, s), floating.
        n: the number of entries of the result.

    Returns:
        *shared* (n,) in the dtype of values.
    """
    if index.device.type == "cpu":
        return values.new_zeros(n).scatter_add_(0, index.flatten(), values.flatten())
    return values.new_zeros(len(index), n).scatter_(1, index, values).sum(0)


def scatter_mean(index: Tensor, values: Tensor, n: int) -> Tensor:
    """Return every entry's mean over the nodes that sent the entry, and 0 for entries that no node sent.

        out[j] = Σ_{k: j ∈ index[k]} value / #{k: j ∈ index[k]}

    An entry sent with value 0 counts as sent. `scatter_sum` adds the values. On every device, one scatter counts the
    senders, because whole numbers may be added in any order.

    Args:
        index, values, n: see `scatter_sum`.

    Returns:
        *shared* (n,) in the dtype of values (16-bit types are summed in float32).

    Source: DeMo [2411.19870], reference code (`batch_decompress`, `scatter_reduce` with "mean").
    """
    total, sent = scatter_sum(index, values.to(working_dtype(values.dtype)), n), index.flatten()
    senders = torch.zeros_like(total).scatter_add_(0, sent, total.new_ones(()).expand_as(sent))
    return total.div_(senders.clamp_(min=1.0)).to(values.dtype)


def topk_entries_reference(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`topk_entries` by sorting every row (keeps the first of equal magnitudes)."""
    kept = [sorted(range(x.shape[1]), key=lambda j: -abs(float(row[j])))[:k] for row in x]
    index = torch.tensor(kept, dtype=torch.int64, device=x.device).reshape(x.shape[0], min(k, x.shape[1]))
    return torch.stack([row[i] for row, i in zip(x, index, strict=True)]), index


def scatter_sum_reference(index: Tensor, values: Tensor, n: int) -> Tensor:
    """`scatter_sum`, entry by entry."""
    total = [0.0] * n
    for j, value in zip(index.flatten().tolist(), values.flatten().tolist(), strict=True):
        total[j] += value
    return torch.tensor(total, dtype=torch.float64).to(values.device, values.dtype)


def scatter_mean_reference(index: Tensor, values: Tensor, n: int) -> Tensor:
    """`scatter_mean`, entry by entry."""
    sent: list[list[float]] = [[] for _ in range(n)]
    for j, value in zip(index.flatten().tolist(), values.flatten().tolist(), strict=True):
        sent[j].append(value)
    means = [sum(received) / max(1, len(received)) for received in sent]
    return torch.tensor(means, dtype=torch.float64).to(values.device, values.dtype)
