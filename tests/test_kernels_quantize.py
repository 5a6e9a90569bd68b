"""Quantizers: against their references, their error bounds, and input that is not nice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from vsim_kernels import (
    dequantize,
    majority_vote,
    quantize,
    stochastic_codes,
    uniform_quantize,
)
from vsim_kernels.precision import working_dtype
from vsim_kernels.quantize import (
    majority_vote_reference,
    quantize_reference,
    stochastic_codes_reference,
    uniform_quantize_reference,
)

LARGEST = torch.finfo(torch.float32).max
bits = st.integers(1, 16)
dims = st.sampled_from([None, 0, -1])
ordinary = st.floats(-1e4, 1e4, width=32).map(lambda v: 0.0 if abs(v) < 1e-4 else v)
anything = st.floats(width=32)


def tensors(elements, min_dims=1):
    shapes = array_shapes(min_dims=min_dims, max_dims=3, max_side=6)
    return arrays(np.float32, shapes, elements=elements).map(torch.from_numpy)


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def stochastic_quantize(x: torch.Tensor, levels: int, generator: torch.Generator) -> torch.Tensor:
    """What the receiver of a QSGD message sees: the shape and dtype of x."""
    uniform = torch.rand(x.shape, generator=generator, dtype=working_dtype(x.dtype))
    return dequantize(*stochastic_codes(x, levels, uniform)).to(x.dtype)


@settings(max_examples=40)
@given(x=tensors(ordinary), bits=bits, dim=dims)
def test_quantize_against_reference(x, bits, dim):
    codes, scale = quantize(x, bits, dim)
    expected, expected_scale = quantize_reference(x, bits, dim)
    assert codes.dtype == expected.dtype and scale.dtype == torch.float32
    assert codes.shape == x.shape and scale.shape == expected_scale.shape
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    assert torch.equal(codes, expected)
    torch.testing.assert_close(uniform_quantize(x, bits, dim), uniform_quantize_reference(x, bits, dim))


@settings(max_examples=40)
@given(x=tensors(ordinary), bits=st.integers(2, 16), dim=dims)
def test_error_is_at_most_half_a_step(x, bits, dim):
    codes, scale = quantize(x, bits, dim)
    assert codes.abs().max() <= 2 ** (bits - 1) - 1
    error = (dequantize(codes, scale) - x).abs()
    assert (error <= 0.5 * scale * (1 + 1e-6) + 4e-7 * x.abs()).all()
    assert (uniform_quantize(x, bits, dim)[x == 0] == 0).all()


def test_quantize_by_hand():
    # 4 bits: L = 7, max 14, scale 2. 5 / 2 = 2.5 rounds to the even 2; −3 / 2 = −1.5 to −2; 14 / 2 = 7.
    codes, scale = quantize(torch.tensor([5.0, -3.0, 14.0, 0.9]), 4)
    assert codes.tolist() == [2, -2, 7, 0] and scale.tolist() == [2.0]
    # 1 bit: mean|x| = (4 + 0 + 2) / 3 = 2, and 0 takes the positive code.
    codes, scale = quantize(torch.tensor([-4.0, 0.0, 2.0]), 1)
    assert codes.tolist() == [-1, 1, 1] and scale.tolist() == [2.0]
    # A scale to each row: 1 / 1 and 3 / 1 at 2 bits.
    assert uniform_quantize(torch.tensor([[1.0, 0.2], [3.0, -2.0]]), 2, dim=-1).tolist() == [
        [1.0, 0.0],
        [3.0, -3.0],
    ]


@settings(max_examples=40)
@given(x=tensors(anything), bits=bits, dim=dims, levels=st.sampled_from([1, 7, 127, 32767]))
def test_nothing_makes_a_nan(x, bits, dim, levels):
    for out in (
        uniform_quantize(x, bits, dim),
        stochastic_quantize(x, levels, generator()),
    ):
        assert not out.isnan().any()


def test_infinities_saturate_and_nan_is_nothing():
    # Scale from the finite entries: max 6 over L = 3.
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 6.0, 1.0])
    codes, scale = quantize(x, 3)
    assert codes.tolist() == [3, -3, 0, 3, 0] and scale.tolist() == [2.0]
    codes, scale = stochastic_codes(x[:4], 3, torch.zeros(4))
    assert codes.tolist() == [3, -3, 0, 3] and scale.tolist() == [2.0]
    # 1 bit: mean magnitude (6 + 1) / 5 = 1.4, and NaN is not below 0.
    codes, scale = quantize(x, 1)
    assert codes.tolist() == [1, -1, 1, 1, 1]
    torch.testing.assert_close(scale, torch.tensor([1.4]))


@pytest.mark.parametrize(
    "x", [torch.zeros(2, 3), torch.zeros(2, 0), torch.zeros(0, 3), torch.tensor([[0.0, 0.0], [1.0, -1.0]])]
)
def test_zeros_and_nothing_stay_what_they_are(x):
    for out in (
        *(uniform_quantize(x, bits, dim) for bits in (1, 2, 8) for dim in (None, -1) if dim or not x.any()),
        *([] if x.any() else [stochastic_quantize(x, 4, generator())]),
    ):
        assert torch.equal(out, x)


@settings(max_examples=40)
@given(x=tensors(ordinary), levels=st.sampled_from([1, 2, 15, 127, 128, 1000]), seed=st.integers(0, 2**31))
def test_stochastic_against_reference(x, levels, seed):
    uniform = torch.rand(x.shape, generator=generator(seed))
    codes, scale = stochastic_codes(x, levels, uniform)
    expected, expected_scale = stochastic_codes_reference(x, levels, uniform)
    assert codes.dtype == expected.dtype and codes.abs().max() <= levels
    torch.testing.assert_close(scale, expected_scale, rtol=1e-6, atol=0)
    # In float32 y sometimes lands just next to the integer or the draw: then the code is one away.
    y = x.double().abs() / expected_scale.clamp(min=1e-30)
    near = ((y - y.floor()) - uniform).abs().lt(1e-3) | (y - y.round()).abs().lt(1e-3)
    assert ((codes == expected) | near).all()
    assert ((codes.int() - expected.int()).abs() <= 1).all()


def test_stochastic_by_hand():
    # Norm 5, s = 2, scale 2.5: y = 1.2 and 1.6. With u = 0.1 both go up (0.1 < 0.2, 0.6); with u = 0.3 only
    # the second does.
    x = torch.tensor([3.0, -4.0])
    assert stochastic_codes(x, 2, torch.tensor([0.1, 0.1]))[0].tolist() == [2, -2]
    assert stochastic_codes(x, 2, torch.tensor([0.3, 0.3]))[0].tolist() == [1, -2]


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])  # squares below and above what float32 holds
@pytest.mark.parametrize("levels", [1, 4, 1000])
def test_stochastic_is_unbiased(scale, levels):
    x = torch.tensor([0.5, -1.0, 0.03, 0.0, 2.0]) * scale
    repeats = 20_000
    out = stochastic_quantize(x.expand(repeats, -1), levels, generator(1)) / scale
    # One draw has at most half a step's standard deviation: the norm over s, over 2. Five of the mean's.
    step = max(float(stochastic_codes(x, levels, torch.zeros(5))[1]) / scale, 1e-6)
    assert ((out.double().mean(0) - (x / scale).double()).abs() < 5 * 0.5 * step / repeats**0.5 + 1e-6).all()


def test_norm_beyond_the_largest_number_saturates():
    out = stochastic_quantize(torch.full((4,), LARGEST), 4, generator())
    assert out.isfinite().all() and torch.equal(out, torch.full((4,), LARGEST))


@settings(max_examples=40)
@given(arrays(np.float32, st.tuples(st.integers(1, 6), st.integers(1, 8)), elements=st.sampled_from([-1, 0, 1])))
def test_votes_against_counting(signs):
    signs = torch.from_numpy(signs)
    for votes in (signs, signs.to(torch.int8), signs.bfloat16()):
        out = majority_vote(votes)
        assert out.dtype == votes.dtype
        assert torch.equal(out, majority_vote_reference(votes))


def test_half_precision_in_and_out():
    x = torch.randn(4, 100, generator=generator()).bfloat16()
    for out in (uniform_quantize(x, 8, -1), uniform_quantize(x, 1), stochastic_quantize(x, 8, generator())):
        assert out.dtype == torch.bfloat16
    codes, scale = quantize(x, 8)
    assert scale.dtype == torch.float32 and torch.equal(codes, quantize(x.float(), 8)[0])
    assert quantize(x.double(), 8)[1].dtype == torch.float64


def test_refused():
    for bits in (0, 17):
        with refused(ValueError, f"bits … between 1 and 16 … {bits}"):
            quantize(torch.zeros(2), bits)
    for levels in (0, 32768):
        with refused(ValueError, f"levels … between 1 and 32767 … {levels}"):
            stochastic_quantize(torch.zeros(2), levels, generator())
    with refused(TypeError, "floating-point … torch.int64"):
        working_dtype(torch.int64)
