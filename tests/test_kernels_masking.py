"""Averaging columns of the matrix of replicas."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vsim_kernels import average_entries_, mean_entries, write_entries_
from vsim_kernels.masking import (
    average_entries_reference_,
    mean_entries_reference,
    write_entries_reference_,
)


@st.composite
def columns(draw):
    """A stacked matrix that is a slice of a larger one, and distinct columns of it in any order."""
    nodes, numel = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    whole = torch.randn(nodes + 2, numel + 5, generator=generator).to(dtype)
    index = torch.randperm(numel, generator=generator)[: draw(st.integers(0, numel))]
    return whole, slice(1, nodes + 1), slice(2, numel + 2), index


def tolerance(dtype: torch.dtype) -> float:
    return 4 * torch.finfo(dtype).eps


@settings(max_examples=60, deadline=None)
@given(columns())
def test_mean_against_reference(case):
    whole, rows, cols, index = case
    x = whole[rows, cols]
    mean = mean_entries(x, index)
    assert mean.dtype == x.dtype and mean.shape == index.shape
    eps = tolerance(x.dtype)
    torch.testing.assert_close(mean, mean_entries_reference(x, index), rtol=eps, atol=eps)


@settings(max_examples=60, deadline=None)
@given(columns())
def test_writing_touches_the_chosen_columns_of_the_slice_only(case):
    whole, rows, cols, index = case
    values = torch.arange(len(index)).to(whole.dtype)
    expected = whole.clone()
    write_entries_reference_(expected[rows, cols], index, values)
    x = whole[rows, cols]
    assert write_entries_(x, index, values) is x
    assert torch.equal(whole, expected)


@settings(max_examples=60, deadline=None)
@given(columns())
def test_averaging_against_reference(case):
    whole, rows, cols, index = case
    expected = whole.clone()
    average_entries_reference_(expected[rows, cols], index)
    x = whole[rows, cols]
    assert average_entries_(x, index) is x
    eps = tolerance(x.dtype)
    torch.testing.assert_close(whole, expected, rtol=eps, atol=eps)
    # Afterwards all nodes agree there, to the bit.
    assert (x[:, index] == x[:1, index]).all()


def test_three_nodes_by_hand():
    # Columns 2 and 0: means (3 + 6 + 9) / 3 = 6 and (1 + 2 + 6) / 3 = 3. Column 1 stays.
    x = torch.tensor([[1.0, 10.0, 3.0], [2.0, 20.0, 6.0], [6.0, 30.0, 9.0]])
    index = torch.tensor([2, 0])
    assert torch.equal(mean_entries(x, index), torch.tensor([6.0, 3.0]))
    average_entries_(x, index)
    assert torch.equal(x, torch.tensor([[3.0, 10.0, 6.0], [3.0, 20.0, 6.0], [3.0, 30.0, 6.0]]))


def test_all_columns_is_the_mean_of_the_rows_bit_for_bit():
    x = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    assert torch.equal(mean_entries(x, torch.arange(1000)), x.mean(0))


@pytest.mark.parametrize("kernel", [mean_entries, average_entries_])
def test_the_model_of_one_node_is_left_alone(kernel):
    x = torch.randn(1, 50, generator=torch.Generator().manual_seed(0))
    before = x.clone()
    kernel(x, torch.arange(0, 50, 3))
    assert torch.equal(x, before)
