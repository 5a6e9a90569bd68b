"""Tiles and their cosine transform."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import fft
from strategies_by_hand import normal
from vsim_kernels import dct_matrix, dct_tiles, idct_tiles, largest_divisor, matrix_shape, tile_shape
from vsim_kernels.dct import dct_tiles_reference, idct_tiles_reference

seeds = st.integers(0, 2**31)


@pytest.mark.parametrize("shape", [(3, 64, 64), (2, 48, 10), (5, 1, 64), (5, 50), (2, 7, 1)])
@pytest.mark.parametrize(("dtype", "error"), [(torch.float32, 1e-6), (torch.float64, 1e-13)])
def test_transform_is_scipys(shape, dtype, error):
    x = normal(*shape, dtype=dtype)
    axes = range(1, len(shape))
    theirs = fft.dctn(x.double().numpy(), axes=axes, norm="ortho")
    assert np.abs(dct_tiles(x).numpy() - theirs).max() < error * np.abs(theirs).max()
    back = fft.idctn(x.double().numpy(), axes=axes, norm="ortho")
    assert np.abs(idct_tiles(x).numpy() - back).max() < error * np.abs(back).max()


@settings(max_examples=40)
@given(tiles=st.integers(1, 3), h=st.integers(1, 7), w=st.integers(1, 7), flat=st.booleans(), seed=seeds)
def test_transform_against_reference(tiles, h, w, flat, seed):
    shape = (tiles, w) if flat else (tiles, h, w)
    x = normal(*shape, seed=seed, dtype=torch.float64)
    torch.testing.assert_close(dct_tiles(x), dct_tiles_reference(x))
    torch.testing.assert_close(idct_tiles(x), idct_tiles_reference(x))


@settings(max_examples=40)
@given(tiles=st.integers(1, 3), h=st.integers(1, 40), w=st.integers(1, 70), seed=seeds)
def test_inverse_and_energy(tiles, h, w, seed):
    x = normal(tiles, h, w, seed=seed)
    y = dct_tiles(x)
    torch.testing.assert_close(idct_tiles(y), x, rtol=0, atol=1e-5)
    torch.testing.assert_close(y.norm(), x.norm(), rtol=1e-5, atol=0)


def test_two_by_two_by_hand():
    # C for n = 2: row 0 is (1, 1)/sqrt 2; row 1 is (cos(pi/4), cos(3 pi/4)) = (1, -1)/sqrt 2.
    # C [[1, 2], [3, 5]] Cᵀ = 1/2 [[1+2+3+5, 1-2+3-5], [1+2-3-5, 1-2-3+5]] = [[5.5, -1.5], [-2.5, 0.5]].
    r = 1 / math.sqrt(2)
    torch.testing.assert_close(dct_matrix(2), torch.tensor([[r, r], [r, -r]]))
    x = torch.tensor([[[1.0, 2.0], [3.0, 5.0]]])
    torch.testing.assert_close(dct_tiles(x), torch.tensor([[[5.5, -1.5], [-2.5, 0.5]]]))


@pytest.mark.parametrize("n", [1, 2, 3, 64, 301])
def test_matrix_is_orthonormal(n):
    c = dct_matrix(n, "cpu", torch.float64)
    torch.testing.assert_close(c @ c.T, torch.eye(n, dtype=torch.float64), rtol=0, atol=1e-12)


def test_matrix_is_built_once_for_each_device_and_dtype():
    assert dct_matrix(9) is dct_matrix(9, torch.device("cpu"), torch.float32)
    assert dct_matrix(9, dtype=torch.float64).dtype == torch.float64
    assert dct_matrix(9, "meta").device.type == "meta"


def test_matrix_built_in_inference_mode_serves_autograd_later():
    with torch.inference_mode():
        dct_matrix(11)
    x = torch.ones(1, 11, requires_grad=True)
    dct_tiles(x).sum().backward()
    assert not dct_matrix(11).is_inference() and x.grad is not None


def test_half_precision_rounds_once():
    x = normal(4, 64, 64).bfloat16()
    y = dct_tiles(x)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, dct_tiles(x.float()).bfloat16())


def test_a_node_alone_is_the_node_among_others():
    stacked = normal(4, 6, 64, 64)  # six tiles a node
    together = dct_tiles(stacked.flatten(0, 1)).view_as(stacked)
    for k in range(4):
        torch.testing.assert_close(together[k], dct_tiles(stacked[k]))


@given(n=st.integers(1, 3000), at_most=st.integers(1, 200))
def test_largest_divisor(n, at_most):
    assert largest_divisor(n, at_most) == max(d for d in range(1, at_most + 1) if n % d == 0)


def test_refused():
    for call, message in (
        (lambda: largest_divisor(0, 64), "need n >= 1 and at_most >= 1"),
        (lambda: largest_divisor(64, 0), "need n >= 1 and at_most >= 1"),
        (lambda: dct_matrix(0), "n must be at least 1, got 0"),
    ):
        with pytest.raises(ValueError, match=message):
            call()


@given(shape=st.lists(st.integers(1, 12), max_size=4), chunk=st.integers(1, 9))
def test_the_sides_of_a_tile_divide_those_of_the_folded_parameter(shape, chunk):
    rows, cols = matrix_shape(shape)
    assert rows * cols == math.prod(shape) and rows == (shape[0] if len(shape) > 1 else 1)
    assert tile_shape(shape, chunk) == (largest_divisor(rows, chunk), largest_divisor(cols, chunk))
