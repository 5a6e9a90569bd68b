"""Discrete cosine transform of tiles: the basis in which DeMo [2411.19870] looks for large components.

A parameter is cut into equal tiles; the side of a tile is the largest divisor of the dimension up to a limit:

    matrix  (rows, cols)  → tiles (h, w)    two-dimensional DCT of each tile
    vector  (n,)          → tiles (1, w)    one-dimensional
    (out, a, b, …)        → folded to (out, a·b·…) first, then as a matrix
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from .precision import working_dtype

_matrices: dict[tuple[int, torch.device, torch.dtype], Tensor] = {}


def dct_matrix(n: int, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> Tensor:
    """Return the orthonormal DCT-II matrix C: C @ x is the transform of x, and C.T is the inverse.

        C[u, i] = sqrt((2 − [u = 0]) / n) · cos(π (2i + 1) u / 2n)

    The matrix is built once per (n, device, dtype), in float64 on the CPU (some devices lack float64), then cast. The
    result is the cached tensor: don't write to it. Compiled code uses the cache, too; if a matrix is not cached yet,
    `torch.compile` traces how it is built, and compiles again at the next call.

    Args:
        n: size, at least 1.
        device: the device of the matrix.
        dtype: floating dtype of the matrix.

    Returns:
        (n, n), *shared*.

    Raises:
        ValueError: n < 1.

    Source: Ahmed, Natarajan, Rao (1974), Discrete Cosine Transform.
    """
    if n < 1:
        raise ValueError(f"n must be at least 1, got {n}")
    key = (n, torch.device(device), dtype)
    if key not in _matrices:
        # A matrix built under inference_mode would be unusable in a later autograd graph.
        with torch.inference_mode(False), torch.no_grad():
            i = torch.arange(n, dtype=torch.float64, device="cpu")
            # Reduce the angle to one turn in integers first, which is exact for any n.
            turns = torch.outer(i, 2.0 * i + 1.0).remainder(4.0 * n)  # (n, n), in units of π / 2n
            matrix = torch.cos(turns * (math.pi / (2.0 * n))) * math.sqrt(2.0 / n)
            matrix[0] = math.sqrt(1.0 / n)
            _matrices[key] = matrix.to(dtype).to(device)
    return _matrices[key]


def largest_divisor(n: int, at_most: int) -> int:
    """Return the largest divisor of n up to `at_most`: the side of DeMo's tiles.

    Raises:
        ValueError: n or at_most is below 1.

    >>> largest_divisor(384, 64), largest_divisor(100, 64), largest_divisor(67, 64)
    (64, 50, 1)
    """
    if n < 1 or at_most < 1:
        raise ValueError(f"need n >= 1 and at_most >= 1, got n={n}, at_most={at_most}")
    divisor = min(n, at_most)
    while n % divisor:
        divisor -= 1
    return divisor


def tile_shape(shape: Sequence[int], chunk: int) -> tuple[int, int]:
    """Return the shape (h, w) of a parameter's tiles, h, w ≤ chunk; `shape` is without the node dimension.

    Raises:
        ValueError: a dimension or chunk is below 1.

    >>> tile_shape((128, 384), 64), tile_shape((100,), 64), tile_shape((32, 3, 3, 3), 64)
    ((64, 64), (1, 50), (32, 27))
    """
    rows, cols = matrix_shape(shape)
    return largest_divisor(rows, chunk), largest_divisor(cols, chunk)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return the shape (out, product of the other dimensions) of a parameter as a matrix; a vector is one row.

    >>> matrix_shape((32, 3, 3, 3)), matrix_shape((100,)), matrix_shape(())
    ((32, 27), (1, 100), (1, 1))
    """
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def dct_tiles(tiles: Tensor) -> Tensor:
    """Return the orthonormal DCT-II of every tile: C_h X C_wᵀ.

    Args:
        tiles: (M, h, w), transformed in both dimensions, or (M, n), transformed in the last dimension. 16-bit types
            are transformed in float32 and rounded once, at the end.

    Returns:
        The same shape and dtype.
    """
    return _both_sides(tiles, inverse=False)


def idct_tiles(tiles: Tensor) -> Tensor:
    """Return the inverse of `dct_tiles`: C_hᵀ X C_w; same arguments."""
    return _both_sides(tiles, inverse=True)


def _both_sides(tiles: Tensor, inverse: bool) -> Tensor:
    dtype = working_dtype(tiles.dtype)
    out = tiles.to(dtype)
    right = dct_matrix(tiles.shape[-1], tiles.device, dtype)
    out = out @ (right if inverse else right.T)  # one product for all rows of all tiles
    if tiles.dim() == 3 and tiles.shape[1] > 1:
        left = dct_matrix(tiles.shape[1], tiles.device, dtype)
        out = (left.T if inverse else left) @ out
    return out.to(tiles.dtype)


def dct_tiles_reference(tiles: Tensor) -> Tensor:
    """`dct_tiles` from the definition, coefficient by coefficient, in float64."""
    out = tiles.to(torch.float64).reshape(tiles.shape[0], -1, tiles.shape[-1])
    waves_h, waves_w = _waves(out.shape[1]), _waves(out.shape[2])
    rows = [[[(x * torch.outer(a, b)).sum() for b in waves_w] for a in waves_h] for x in out]
    return torch.tensor(rows, dtype=torch.float64).reshape(tiles.shape).to(tiles.dtype)


def idct_tiles_reference(tiles: Tensor) -> Tensor:
    """`idct_tiles` from the definition, as a sum of waves weighted by the coefficients, in float64."""
    coefficients = tiles.to(torch.float64).reshape(tiles.shape[0], -1, tiles.shape[-1])
    out = torch.zeros_like(coefficients)
    for tile, coefficient in zip(out, coefficients, strict=True):
        for u, a in enumerate(_waves(out.shape[1])):
            for v, b in enumerate(_waves(out.shape[2])):
                tile += coefficient[u, v] * torch.outer(a, b)
    return out.reshape(tiles.shape).to(tiles.dtype)


def _waves(n: int) -> list[Tensor]:
    """Return the n orthonormal cosine waves of length n by the formula."""
    waves = []
    for u in range(n):
        norm = math.sqrt((1 if u == 0 else 2) / n)
        wave = [norm * math.cos(math.pi * (2 * i + 1) * u / (2 * n)) for i in range(n)]
        waves.append(torch.tensor(wave, dtype=torch.float64))
    return waves
