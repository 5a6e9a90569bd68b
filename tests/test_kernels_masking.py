"""Writing columns of the matrix of replicas."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from vsim_kernels import write_entries_
from vsim_kernels.masking import write_entries_reference_


@st.composite
def columns(draw):
    """A stacked matrix that is a slice of a larger one, and distinct columns of it in any order."""
    nodes, numel = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    whole = torch.randn(nodes + 2, numel + 5, generator=generator).to(dtype)
    index = torch.randperm(numel, generator=generator)[: draw(st.integers(0, numel))]
    return whole, slice(1, nodes + 1), slice(2, numel + 2), index


@settings(max_examples=40)
@given(columns())
def test_writing_touches_the_chosen_columns_of_the_slice_only(case):
    whole, rows, cols, index = case
    values = torch.arange(len(index)).to(whole.dtype)
    expected = whole.clone()
    write_entries_reference_(expected[rows, cols], index, values)
    x = whole[rows, cols]
    assert write_entries_(x, index, values) is x
    assert torch.equal(whole, expected)


def test_three_nodes_by_hand():
    x = torch.tensor([[1.0, 10.0, 3.0], [2.0, 20.0, 6.0], [6.0, 30.0, 9.0]])
    write_entries_(x, torch.tensor([2, 0]), torch.tensor([6.0, 3.0]))
    assert torch.equal(x, torch.tensor([[3.0, 10.0, 6.0], [3.0, 20.0, 6.0], [3.0, 30.0, 6.0]]))
