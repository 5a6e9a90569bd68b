"""Codes that index a table: against their references, by hand, and on input that is not nice."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import array_shapes, arrays
from vsim_kernels import E3M0, fp4_codes, look_up, statistical_codes
from vsim_kernels.codebooks import fp4_codes_reference, statistical_codes_reference

# Whole numbers: whether a quotient rounds up must not hang on the last bit.
whole = st.integers(-1000, 1000).map(float)
anything = st.floats(width=32)


def tensors(elements: st.SearchStrategy[float]) -> st.SearchStrategy[torch.Tensor]:
    shapes = array_shapes(min_dims=1, max_dims=3, max_side=9)
    return arrays(np.float32, shapes, elements=elements).map(torch.from_numpy)


def decoded(codes_and_scale: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
    """What the receiver of FP4 sees."""
    codes, scale = codes_and_scale
    return look_up(codes, E3M0 * scale)


@settings(max_examples=40)
@given(x=tensors(whole), bits=st.integers(1, 8))
def test_bins_against_reference(x: torch.Tensor, bits: int) -> None:
    codes, table = statistical_codes(x, bits)
    expected, means = statistical_codes_reference(x, bits)
    assert codes.dtype == torch.uint8 and codes.shape == x.shape and table.shape == (*x.shape[:-1], 2**bits)
    if torch.equal(codes, expected):
        torch.testing.assert_close(table, means, rtol=1e-5, atol=1e-3)
    else:  # on the border of two bins
        assert ((codes.int() - expected.int()).abs() <= 1).all() and (codes != expected).float().mean() < 0.5


def test_the_reference_is_met_to_the_code() -> None:
    x = torch.randn(20, 500, generator=torch.Generator().manual_seed(0))
    for bits in range(1, 9):
        codes, table = statistical_codes(x, bits)
        expected, means = statistical_codes_reference(x, bits)
        equal = codes == expected  # but for one entry on the border of two bins, whose means it moves
        assert (~equal).sum() <= 1 and ((codes.int() - expected.int()).abs() <= 1).all()
        rows = equal.all(1)
        torch.testing.assert_close(look_up(codes, table)[rows], look_up(expected, means)[rows], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("scale", [1.0, 1e-40, 1e37])  # squares below and above what float32 holds
def test_bins_by_hand(scale: float) -> None:
    # Mean 1; squares 16 + 4 + 1 + 0 + 1 + 36 = 58, std √(58/5) = 3.41. 4 bins are 6 · 3.41 / 4 = 5.11 wide, so that
    # (v − 1) / 5.11 + 2 is 1.22, 1.61, 1.80, 2, 2.20 and 3.17.
    codes, table = statistical_codes(torch.tensor([-3.0, -1.0, 0.0, 1.0, 2.0, 7.0]) * scale, 2)
    assert codes.tolist() == [1, 2, 2, 2, 2, 3]
    torch.testing.assert_close(table / scale, torch.tensor([0.0, -3.0, 0.5, 7.0]), rtol=1e-3, atol=0)
    # 256 bins are 64 times narrower, 0.0798: −50.1, −25.1, −12.5, 0, 12.5 and 75.2 bins from the middle, 128.
    codes, table = statistical_codes(torch.tensor([-3.0, -1.0, 0.0, 1.0, 2.0, 7.0]) * scale, 8)
    assert codes.tolist() == [78, 103, 115, 128, 141, 203]


@settings(max_examples=40)
@given(x=tensors(whole), bits=st.integers(1, 8))
def test_neither_code_takes_away_more_than_there_is(x: torch.Tensor, bits: int) -> None:
    for received in (look_up(*statistical_codes(x, bits)), decoded(fp4_codes(x))):
        assert ((received - x).square().sum(-1) <= x.square().sum(-1) * (1 + 1e-5)).all()


@settings(max_examples=40)
@given(x=tensors(whole))
def test_fp4_against_reference(x: torch.Tensor) -> None:
    codes, scale = fp4_codes(x)
    expected, expected_scale = fp4_codes_reference(x)
    assert codes.dtype == torch.uint8 and torch.equal(scale, expected_scale)
    border = torch.isclose((x / scale).abs()[..., None], (E3M0[:7] + E3M0[1:8]) / 2, rtol=1e-6, atol=0).any(-1)
    assert ((codes == expected) | border).all()


def test_the_codebook_of_fp4() -> None:
    # Sign, three bits of exponent, no mantissa: a power of two an exponent, but for the smallest, which is 0.
    assert E3M0[:8].tolist() == [0, 1 / 64, 1 / 32, 1 / 16, 1 / 8, 1 / 4, 1 / 2, 1]
    assert torch.equal(E3M0[8:], -E3M0[:8])
    x = 3 * torch.cat([E3M0[8:], E3M0[:8]])
    assert torch.equal(decoded(fp4_codes(x)), x)
    # Half way from 0.5 to 1 is 0.75, from 1/64 to 1/32 is 3/128, from 0 to 1/64 is 1/128; there it is the larger.
    near = torch.tensor([[1.0, 0.75, 0.749, 3 / 128, 0.0234, 1 / 128, 0.0078, -0.75, -0.0078]])
    assert decoded(fp4_codes(near)).tolist() == [[1, 1, 0.5, 1 / 32, 1 / 64, 1 / 64, 0, -1, 0]]


@settings(max_examples=40)
@given(x=tensors(anything), bits=st.integers(1, 8))
def test_nothing_makes_a_nan(x: torch.Tensor, bits: int) -> None:
    for codes, table in (statistical_codes(x, bits), fp4_codes(x)):
        assert table.isfinite().all() and codes.int().max() < 2 ** max(bits, 4)


def test_infinities_are_the_largest_entry_and_nan_is_nothing() -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 6.0])
    assert decoded(fp4_codes(x)).tolist() == [6, -6, 0, 6]
    codes, table = statistical_codes(x, 8)
    assert torch.equal(codes, statistical_codes(torch.tensor([6.0, -6.0, 0.0, 6.0]), 8)[0])
    torch.testing.assert_close(look_up(codes, table), torch.tensor([6.0, -6.0, 0.0, 6.0]))


@pytest.mark.parametrize("x", [torch.zeros(2, 3), torch.full((2, 3), -5.0), torch.tensor([[4.0], [-7.0]])])
def test_equal_entries_stay_what_they_are(x: torch.Tensor) -> None:
    for received in (look_up(*statistical_codes(x, 2)), decoded(fp4_codes(x))):
        assert torch.equal(received, x)


def test_precision_in_and_out() -> None:
    x = torch.randn(4, 100, generator=torch.Generator().manual_seed(0))
    for encode in (lambda x: statistical_codes(x, 4), fp4_codes):
        assert encode(x.bfloat16())[1].dtype == torch.float32 and encode(x.double())[1].dtype == torch.float64
        assert torch.equal(encode(x.bfloat16())[0], encode(x.bfloat16().float())[0])
        with pytest.raises(TypeError, match="expected a floating-point tensor"):
            encode(x.long())
    for bits in (0, 9):
        with pytest.raises(ValueError, match=f"bits must be between 1 and 8, got {bits}"):
            statistical_codes(torch.zeros(2), bits)
