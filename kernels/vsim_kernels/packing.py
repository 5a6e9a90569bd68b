"""Pack whole numbers of a few bits each into bytes without gaps: the form in which indices and codes are sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor


def pack_bits(parts: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """Write whole numbers one after another into bytes, the lowest bit first; two 12-bit numbers take three bytes.

    Args:
        parts: *stacked* (K, n_i) of whole numbers from 0 to 2^width − 1, one part or more.
        widths: bits per number, for each part, at least 0.

    Returns:
        *stacked* (K, ceil(Σ n_i · width_i / 8)), uint8; the last byte is filled with zeros.

    >>> [f"{byte:02x}" for byte in pack_bits([torch.tensor([[0xABC, 0xDEF]])], [12])[0].tolist()]
    ['bc', 'fa', 'de']
    """
    bits = [_bits_of(part, width) for part, width in zip(parts, widths, strict=True)]
    stream = torch.cat(bits, dim=1)
    return _numbers_of(F.pad(stream, (0, -stream.shape[1] % 8)), 8).to(torch.uint8)


def unpack_bits(packed: Tensor, counts: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    """Invert `pack_bits`: return part i, of `counts[i]` numbers per node, as *stacked* (K, counts[i]), int64."""
    sizes = [count * width for count, width in zip(counts, widths, strict=True)]
    stream = _bits_of(packed, 8)[:, : sum(sizes)].split(sizes, dim=1)
    return [
        _numbers_of(bits, width) if width else bits.new_zeros(len(bits), count, dtype=torch.int64)
        for bits, count, width in zip(stream, counts, widths, strict=True)
    ]


def _bits_of(numbers: Tensor, width: int) -> Tensor:
    """Return the lowest `width` bits of each number, lowest first: (K, n) → (K, n · width), uint8."""
    places = torch.arange(width, device=numbers.device)
    return (numbers[..., None] >> places).bitwise_and_(1).to(torch.uint8).flatten(1)


def _numbers_of(bits: Tensor, width: int) -> Tensor:
    """Return the numbers of `width` bits each, the inverse of `_bits_of`: (K, n · width) → (K, n), int64."""
    places = torch.arange(width, device=bits.device)
    return (bits.unflatten(1, (-1, width)) << places).sum(-1)


def pack_bits_reference(parts: Sequence[Tensor], widths: Sequence[int]) -> Tensor:
    """`pack_bits`, with Python's unlimited whole numbers."""
    rows = []
    for node in range(len(parts[0])):
        number = at = 0
        for part, width in zip(parts, widths, strict=True):
            for value in part[node].tolist():
                number |= value << at
                at += width
        rows.append(list(number.to_bytes(-(-at // 8), "little")))
    return torch.tensor(rows, dtype=torch.uint8).reshape(len(rows), -1)


def unpack_bits_reference(packed: Tensor, counts: Sequence[int], widths: Sequence[int]) -> list[Tensor]:
    """Unpack bit by bit in Python, as a reference for `unpack_bits`."""
    parts: list[list[list[int]]] = [[] for _ in counts]
    for row in packed.tolist():
        number = int.from_bytes(bytes(row), "little")
        for part, count, width in zip(parts, counts, widths, strict=True):
            part.append([number >> i * width & (1 << width) - 1 for i in range(count)])
            number >>= count * width
    return [torch.tensor(p, dtype=torch.int64).reshape(len(packed), c) for p, c in zip(parts, counts, strict=True)]
