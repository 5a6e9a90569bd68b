"""Sorting over the nodes against torch's."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vsim_kernels import sort_rows
from vsim_kernels.order import sort_rows_reference


@given(st.integers(1, 40), st.integers(0, 2**31))
def test_as_torch_sorts(n: int, seed: int) -> None:
    rows = torch.randint(-9, 9, (n, 2, 7), generator=torch.Generator().manual_seed(seed)).float()
    before = rows.clone()
    ours, theirs = sort_rows(rows), sort_rows_reference(rows)
    assert len(ours) == n and all(map(torch.equal, ours, theirs)) and torch.equal(rows, before)


@pytest.mark.parametrize("n", range(1, 13))
def test_every_row_of_zeros_and_ones(n: int) -> None:
    # Compare-exchanges sort every sequence if they sort every sequence of zeros and ones: all 2ⁿ of them are columns.
    rows = (torch.arange(2**n) >> torch.arange(n)[:, None]) & 1
    assert torch.equal(torch.stack(sort_rows(rows)), rows.sort(dim=0).values)
