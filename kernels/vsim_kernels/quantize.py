"""Fewer bits per number: uniform and stochastic quantization, signs, and votes on signs.

A quantizer returns integer codes and a scale; `dequantize` multiplies them. In all quantizers, a row of zeros gives
zeros, NaN counts as 0, an infinity gets the largest code of its sign, and the scale is computed from finite entries. No
quantizer returns NaN, so check for divergence before quantizing.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .precision import working_dtype


def quantize(x: Tensor, bits: int, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """Quantize symmetrically and uniformly to `bits` bits.

        bits ≥ 2:  L = 2^(bits−1) − 1,  scale = max|x| / L,  code = round(x / scale) in −L … L
        bits = 1:  scale = mean|x|,     code = −1 where x < 0, else +1

    Rounds to the nearest code, ties to even. With 2 bits or more, the error is at most scale / 2, 0 stays 0, and one of
    the 2^bits codes is unused. With 1 bit, 0 has no code, and mean|x| is the scale of least squared error.

    Args:
        x: any shape, floating.
        bits: 1 to 16.
        dim: the dimension whose entries share a scale; default: all. For *stacked* (K, N), −1 gives each node a scale.

    Returns:
        codes, the shape of x, int8 up to 8 bits and int16 above; and scale, broadcastable to x, float32 (or
        float64 if x is).

    Raises:
        ValueError: bits is out of range.
        TypeError: x is not floating.

    >>> codes, scale = quantize(torch.tensor([-6.0, 1.0, 3.0]), bits=3)
    >>> codes, scale
    (tensor([-3,  0,  2], dtype=torch.int8), tensor([2.]))
    """
    if not 1 <= bits <= 16:
        raise ValueError(f"bits must be between 1 and 16, got {bits}")
    x = x.to(working_dtype(x.dtype))
    if bits == 1:
        return (x < 0).to(torch.int8).mul_(-2).add_(1), _mean_magnitude(x, dim)
    levels = 2 ** (bits - 1) - 1
    scale = _max_magnitude(x, dim) / levels
    codes = _ratio(x, scale).round_().clamp_(-levels, levels)
    return codes.to(_code_dtype(levels)), scale


def dequantize(codes: Tensor, scale: Tensor) -> Tensor:
    """Return codes · scale in the dtype of `scale`; shapes broadcast."""
    return codes.to(scale.dtype) * scale


def uniform_quantize(x: Tensor, bits: int, dim: int | None = None) -> Tensor:
    """Return the values that the receiver of `quantize(x, bits, dim)` decodes, in the shape and dtype of x.

    Raises:
        ValueError: bits is out of range.
        TypeError: x is not floating.

    >>> uniform_quantize(torch.tensor([-6.0, 1.0, 3.0]), bits=3)
    tensor([-6.,  0.,  4.])
    """
    return dequantize(*quantize(x, bits, dim)).to(x.dtype)


def stochastic_codes(x: Tensor, levels: int, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """Quantize each row without bias by QSGD, on a grid scaled by the row's norm, with the given random numbers.

        scale = ‖x‖₂ / s,   y = |x| / scale,   code = sign(x) · (floor(y) + [u < y − floor(y)])

    so that E[code · scale] = x for u ~ U[0, 1), and codes lie in −s … s.

    Args:
        x: (…, n), floating; the last dimension is a row.
        levels: s, 1 to 32767.
        uniform: the shape of x, independent draws from U[0, 1).

    Returns:
        codes, the shape of x, int8 if s ≤ 127, else int16; and scale (…, 1), float32 (or float64 if x is).

    Raises:
        ValueError: levels is out of range.
        TypeError: x is not floating.

    Source: QSGD [1610.02132], section 3.1.
    """
    if not 1 <= levels <= 32767:
        raise ValueError(f"levels must be between 1 and 32767, got {levels}")
    x = x.to(working_dtype(x.dtype))
    magnitude = _magnitude(x)
    norm = torch.linalg.vector_norm(magnitude, dim=-1, keepdim=True)
    if x.shape[-1] > 0:
        # Squares of tiny entries underflow, squares of huge ones overflow. Codes are unbiased for any norm ≥ max|x|.
        norm = torch.maximum(norm, magnitude.amax(-1, keepdim=True)).clamp_(max=torch.finfo(x.dtype).max)
    scale = norm / levels
    y = _ratio(x, scale).abs_().clamp_(max=levels)
    low = y.floor()
    # Compare u with the remainder, which is exact; floor(y + u) would round y + u if s is large.
    codes = low.add_(uniform < y.sub_(low)).copysign_(x)
    return codes.to(_code_dtype(levels)), scale


def majority_vote(signs: Tensor) -> Tensor:
    """Return the sign that most nodes voted for: sign(Σ_k s_k).

    Args:
        signs: *stacked* (K, …) of −1, 0 and +1; 0 is an abstention.

    Returns:
        *shared* (…) in the dtype of signs; a tie gives 0, so that the parameter stays unchanged.

    Source: signSGD with majority vote [1810.05291].

    >>> majority_vote(torch.tensor([[1.0, 1.0, 0.0], [1.0, -1.0, 0.0], [-1.0, 0.0, -1.0]]))
    tensor([ 1.,  0., -1.])
    """
    return signs.sum(0).sign().to(signs.dtype)


def _magnitude(x: Tensor) -> Tensor:
    """Return |x|, with 0 for entries that are not finite."""
    return x.abs().nan_to_num_(0.0, 0.0, 0.0)


def _max_magnitude(x: Tensor, dim: int | None) -> Tensor:
    """Return the largest finite |x|, with the dimension kept; 0 if no entry is finite."""
    dims = _spanned(x, dim)
    if x.numel() == 0:
        return x.sum(dims, keepdim=True)
    return _magnitude(x).amax(dims, keepdim=True)


def _mean_magnitude(x: Tensor, dim: int | None) -> Tensor:
    """Return the mean |x|, counting non-finite entries as 0, with the dimension kept; 0 without entries."""
    count = max(x.numel() if dim is None else x.shape[dim], 1)
    return _magnitude(x).div_(count).sum(_spanned(x, dim), keepdim=True)  # divide first, because the sum could overflow


def _spanned(x: Tensor, dim: int | None) -> list[int]:
    return list(range(x.dim())) if dim is None else [dim]


def _ratio(x: Tensor, scale: Tensor) -> Tensor:
    """Return x / scale, with 0 for NaN; keep infinities. Where the scale is 0, codes don't matter: divide by 1."""
    return (x / torch.where(scale > 0, scale, 1.0)).nan_to_num_(0.0, float("inf"), -float("inf"))


def _code_dtype(levels: int) -> torch.dtype:
    return torch.int8 if levels <= 127 else torch.int16


def quantize_reference(x: Tensor, bits: int, dim: int | None = None) -> tuple[Tensor, Tensor]:
    """`quantize`, number by number (finite entries only)."""
    rows = x.to(working_dtype(x.dtype))
    rows = rows.reshape(1, -1) if dim is None else rows.movedim(dim, -1)
    flat = rows.reshape(-1, rows.shape[-1])
    levels = 2 ** (bits - 1) - 1
    codes = torch.zeros(flat.shape, dtype=_code_dtype(levels))
    scales = torch.zeros(flat.shape[0], 1, dtype=flat.dtype)
    for r, row in enumerate(flat):
        if bits == 1:
            scales[r] = sum(abs(float(v)) for v in row) / len(row)
        else:
            scales[r] = max(abs(v) for v in row) / levels
        for j, v in enumerate(row):
            if bits == 1:
                codes[r, j] = -1 if v < 0 else 1
            elif scales[r] > 0:
                codes[r, j] = min(max(round(float(v / scales[r])), -levels), levels)
    if dim is None:
        return codes.reshape(x.shape), scales.reshape([1] * x.dim())
    shape = (*rows.shape[:-1], 1)
    return codes.reshape(rows.shape).movedim(-1, dim), scales.reshape(shape).movedim(-1, dim)


def uniform_quantize_reference(x: Tensor, bits: int, dim: int | None = None) -> Tensor:
    """`uniform_quantize`, from `quantize_reference`."""
    codes, scale = quantize_reference(x, bits, dim)
    return (codes * scale).to(x.dtype)


def stochastic_codes_reference(x: Tensor, levels: int, uniform: Tensor) -> tuple[Tensor, Tensor]:
    """`stochastic_codes`, number by number in Python's float64 (finite entries only)."""
    codes = torch.zeros(x.shape, dtype=_code_dtype(levels)).reshape(-1, x.shape[-1])
    scales = torch.zeros(codes.shape[0], 1, dtype=working_dtype(x.dtype))
    rows, draws = x.reshape(codes.shape).tolist(), uniform.reshape(codes.shape).tolist()
    for r, (row, draw) in enumerate(zip(rows, draws, strict=True)):
        scale = math.hypot(*row) / levels
        scales[r] = scale
        for j, (v, u) in enumerate(zip(row, draw, strict=True)):
            y = abs(v) / scale if scale > 0 else 0.0
            code = math.floor(y) + (u < y - math.floor(y))
            codes[r, j] = code if v > 0 else -code
    return codes.reshape(x.shape), scales.reshape(*x.shape[:-1], 1)


def majority_vote_reference(signs: Tensor) -> Tensor:
    """`majority_vote`, by counting."""
    out = torch.zeros_like(signs[0]).flatten()
    for j, votes in enumerate(signs.reshape(signs.shape[0], -1).T.tolist()):
        ups, downs = votes.count(1), votes.count(-1)
        out[j] = (ups > downs) - (ups < downs)
    return out.reshape(signs.shape[1:])
