"""Codes that index a table of values: bins around the mean, and FP4.

In all functions, NaN counts as 0, and ±infinity as ± the largest finite magnitude of the row. Tables are therefore
finite.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .precision import working_dtype
from .quantize import _max_magnitude, _ratio

# One sign bit, three exponent bits, no mantissa: codes 0 … 7 are 0 and 2^−6 … 1, codes 8 … 15 are the negative values.
E3M0 = torch.tensor([0.0, *(2.0**e for e in range(-6, 1)), 0.0, *(-(2.0**e) for e in range(-6, 1))])
_HALFWAY: list[float] = ((E3M0[:7] + E3M0[1:8]) / 2).tolist()  # from this |x| / scale on, the next code is nearer
_CODES_AT_ONCE = 16  # codes per temporary of `_sums_by_code`, which has 16 times the entries of y


def statistical_codes(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """Quantize a row to 2^bits bins over six standard deviations around its mean; decode a bin as its entries' mean.

        scale = 6 · std(x) / 2^bits,  code = round((x − mean(x)) / scale + 2^bits / 2) in 0 … 2^bits − 1
        table[c] = mean of the entries with code c, 0 without entries

    The mean of a bin's entries minimises their squared error, so the norm of the error is at most the norm of x.

    Args:
        x: (…, n), floating; the last dimension is a row. The standard deviation of a row divides by n − 1.
        bits: bits per code, 1 to 8.

    Returns:
        codes, the shape of x, uint8; and table (…, 2^bits), float32 (or float64 if x is), for `look_up`.

    Raises:
        ValueError: bits is out of range.
        TypeError: x is not floating.

    Source: SparseLoCo [2508.15706] with 2 bits; INTELLECT-1 [2412.01152] with 8.

    >>> codes, table = statistical_codes(torch.tensor([-3.0, -1.0, 0.0, 1.0, 2.0, 7.0]), bits=2)
    >>> codes.tolist(), look_up(codes, table).tolist()
    ([1, 2, 2, 2, 2, 3], [-3.0, 0.5, 0.5, 0.5, 0.5, 7.0])
    """
    if not 1 <= bits <= 8:
        raise ValueError(f"bits must be between 1 and 8, got {bits}")
    x = x.to(working_dtype(x.dtype))
    largest = _max_magnitude(x, -1)
    y = _ratio(x, largest).clamp_(-1, 1)  # scaled to [−1, 1], so that no square or sum underflows or overflows
    centered = y - y.mean(-1, keepdim=True)
    scale = torch.linalg.vector_norm(centered, dim=-1, keepdim=True) * (6 / 2**bits / max(x.shape[-1] - 1, 1) ** 0.5)
    codes = _ratio(centered, scale).add_(2**bits / 2).round_().clamp_(0, 2**bits - 1).long()
    sums = _sums_by_code(y, codes, 2**bits)
    counts = _sums_by_code(torch.ones_like(y), codes, 2**bits)
    return codes.to(torch.uint8), sums.div_(counts.clamp_(min=1)).mul_(largest)


def _sums_by_code(y: Tensor, codes: Tensor, number: int) -> Tensor:
    """Return (…, number): for each code, the sum of the entries of y (…, n) with that code; bitwise equal on every run.

    A CPU scatters in the order of the entries. Other devices would add entries of one code in any order. There, each
    code is summed over a separate copy of the row, in which entries with other codes are 0.
    """
    if _adds_in_order(y):
        return y.new_zeros(*y.shape[:-1], number).scatter_add_(-1, codes, y)
    parts = torch.arange(number, device=y.device).split(_CODES_AT_ONCE)
    zero = y.new_zeros(())
    return torch.cat([torch.where(codes[..., None, :] == c[:, None], y[..., None, :], zero).sum(-1) for c in parts], -1)


def _adds_in_order(y: Tensor) -> bool:
    return y.device.type in ("cpu", "meta")


def fp4_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round to 0 or ±2^−6 … ±1 times a row's largest magnitude, whichever is nearest: E3M0, sign and 3 exponent bits.

        scale = max|x|,  code = the index in `E3M0` of the value nearest to x / scale; ties to the larger magnitude

    Args:
        x: (…, n), floating; the last dimension is a row.

    Returns:
        codes, the shape of x, uint8 in 0 … 15; and scale (…, 1), float32 (or float64 if x is). The receiver decodes
        look_up(codes, E3M0 · scale).

    Raises:
        TypeError: x is not floating.

    >>> codes, scale = fp4_codes(torch.tensor([-8.0, 3.0, 2.9, 0.0]))
    >>> look_up(codes, E3M0 * scale).tolist()
    [-8.0, 4.0, 2.0, 0.0]
    """
    x = x.to(working_dtype(x.dtype))
    scale = _max_magnitude(x, -1)
    y = _ratio(x, scale).abs_()
    codes = (x < 0).to(torch.uint8).mul_(8)
    for halfway in _HALFWAY:  # torch.bucketize takes four times as long
        codes += y >= halfway
    return codes, scale


def look_up(codes: Tensor, table: Tensor) -> Tensor:
    """Return the value of every code: codes (…, n), tables (…, values) → (…, n) in the dtype of the tables."""
    return table.gather(-1, codes.long())


def statistical_codes_reference(x: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """`statistical_codes`, number by number in Python's float64 (finite entries only)."""
    rows = x.reshape(-1, x.shape[-1]).tolist()
    bins = 2**bits
    codes, table = torch.zeros(len(rows), x.shape[-1], dtype=torch.uint8), torch.zeros(len(rows), bins)
    for r, row in enumerate(rows):
        shift = sum(row) / len(row)
        std = (sum((v - shift) ** 2 for v in row) / max(len(row) - 1, 1)) ** 0.5
        fell: list[list[float]] = [[] for _ in range(bins)]
        for j, v in enumerate(row):
            code = min(max(round((v - shift) / (6 * std / bins) + bins / 2), 0), bins - 1) if std > 0 else bins // 2
            codes[r, j] = code
            fell[code].append(v)
        table[r] = torch.tensor([sum(values) / len(values) if values else 0.0 for values in fell])
    return codes.reshape(x.shape), table.reshape(*x.shape[:-1], bins)


def fp4_codes_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """`fp4_codes`, by trying all values (finite entries only)."""
    rows = x.reshape(-1, x.shape[-1]).tolist()
    values = E3M0.tolist()
    codes, scales = torch.zeros(len(rows), x.shape[-1], dtype=torch.uint8), torch.zeros(len(rows), 1)
    for r, row in enumerate(rows):
        scales[r] = scale = max(map(abs, row))
        for j, v in enumerate(row):
            usable = range(8, 16) if v < 0 else range(8)
            y = v / scale if scale > 0 else 0.0
            codes[r, j] = min(usable, key=lambda code: (abs(values[code] - y), -abs(values[code])))
    return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], 1)
