"""Choose entries of a long vector: the columns that take part in a round of communication.

These functions are not for `torch.compile`, because the number of chosen entries is random; `masking` has the
arithmetic on the chosen columns.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

# Most numbers drawn at a time: limits the float64 temporaries to 8 MB, which stay in the caches.
_PIECE = 1 << 20


def bernoulli_indices(
    numel: int, p: float, generator: torch.Generator, device: torch.device | str | None = None
) -> Tensor:
    """Return the indices at which `numel` independent Bernoulli(p) draws are 1, without making `numel` draws.

    The gaps between the ones of a Bernoulli sequence are independent and geometric,

        gap = 1 + floor(log(1 − u) / log(1 − p)),    u ~ U[0, 1),

    so that the running sum of the drawn gaps gives the sorted indices. For p > 1/2, the zeros are drawn instead. The
    distribution is exact up to float64 rounding of u and the logarithms.

    Indices are drawn on the CPU and then moved, so that nodes with different accelerators choose the same entries. Not
    for `torch.compile`, because the length of the result is random.

    Args:
        numel: length of the vector, at least 0.
        p: probability of each entry, in [0, 1].
        generator: a CPU generator, the only source of randomness; the number of its draws is random.
        device: the result's device; default: the CPU. On the meta device, nothing is drawn; m is the expected number.

    Returns:
        (m,) int64, ascending and distinct, *shared*; m ~ Binomial(numel, p).

    Raises:
        ValueError: an argument is out of range, or the generator is not a CPU generator.

    Source: Devroye (1986), Non-Uniform Random Variate Generation, chapter X.2 (geometric variates by inversion).

    >>> bernoulli_indices(4, 1.0, torch.Generator())
    tensor([0, 1, 2, 3])
    """
    if numel < 0:
        raise ValueError(f"numel must be at least 0, got {numel}")
    if not 0.0 <= p <= 1.0:
        raise ValueError(f"p must lie in [0, 1], got {p}")
    if generator.device.type != "cpu":
        raise ValueError(f"entries are drawn from a CPU generator, got one on {generator.device}")
    if device is not None and torch.device(device).type == "meta":
        return torch.empty(round(numel * p), dtype=torch.int64, device="meta")
    if p <= 0.5:
        return _ones(numel, p, generator).to(device or "cpu")
    kept = torch.ones(numel, dtype=torch.bool)
    kept[_ones(numel, 1.0 - p, generator)] = False  # 1 − p is exact in floating point for p in [1/2, 1]
    return kept.nonzero().flatten().to(device or "cpu")


def _ones(numel: int, p: float, generator: torch.Generator) -> Tensor:
    """Return the result of `bernoulli_indices` for 0 ≤ p ≤ 1/2, on the CPU."""
    if numel == 0 or p == 0.0:
        return torch.empty(0, dtype=torch.int64)
    pieces = []
    last = -1  # index of the last 1 so far; a Bernoulli sequence is memoryless, so draws may continue behind it
    while last < numel - 1:
        expected = (numel - 1 - last) * p
        # Draw four standard deviations more than expected: one in 30,000 calls then needs a second piece.
        count = min(int(expected + 4.0 * math.sqrt(expected)) + 8, _PIECE)
        u = torch.rand(count, dtype=torch.float64, generator=generator)
        gaps = u.neg_().log1p_().div_(math.log1p(-p)).floor_().add_(1.0)
        # Clamp gaps, which exceed int64 for a tiny p, to one step past the end.
        indices = gaps.clamp_(max=numel + 1).to(torch.int64).cumsum(0).add_(last)
        pieces.append(indices)
        last = int(indices[-1])
    indices = torch.cat(pieces) if len(pieces) > 1 else pieces[0]
    return indices[: int(torch.searchsorted(indices, numel))]


def bernoulli_indices_reference(
    numel: int, p: float, generator: torch.Generator, device: torch.device | str | None = None
) -> Tensor:
    """`bernoulli_indices` by its definition: toss a coin for every entry (same distribution, other draws)."""
    coins = [float(torch.rand((), dtype=torch.float64, generator=generator)) for _ in range(numel)]
    chosen = [i for i, coin in enumerate(coins) if coin < p]
    return torch.tensor(chosen, dtype=torch.int64, device=device)


def chunk_sizes(numel: int, count: int) -> list[int]:
    """Return the sizes of the `count` chunks into which `numel` entries are cut; the first chunks get the remainder.

    Cuts as `torch.tensor_split` does; some chunks are empty if count > numel.

    Raises:
        ValueError: numel is negative or count is not positive.

    >>> chunk_sizes(10, 4)
    [3, 3, 2, 2]
    """
    if numel < 0 or count < 1:
        raise ValueError(f"need numel >= 0 and count >= 1, got numel={numel}, count={count}")
    size, rest = divmod(numel, count)
    return [size + 1] * rest + [size] * (count - rest)
