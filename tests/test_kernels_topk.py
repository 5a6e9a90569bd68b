"""The largest entries of every row, and the mean over the nodes that sent an entry."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from vsim_kernels import scatter_mean, scatter_sum, topk_entries
from vsim_kernels.topk import scatter_mean_reference, scatter_sum_reference, topk_entries_reference

seeds = st.integers(0, 2**31)
dtypes = st.sampled_from([torch.float32, torch.float64, torch.bfloat16])


def check_topk(x: torch.Tensor, k: int) -> None:
    values, index = topk_entries(x, k)
    assert index.dtype == torch.int64 and values.dtype == x.dtype
    assert values.shape == index.shape == (x.shape[0], min(k, x.shape[1]))
    assert torch.equal(values, x.gather(1, index))
    assert (index.sort(1).values.diff(dim=1) > 0).all()  # distinct
    expected, _ = topk_entries_reference(x, k)
    assert torch.equal(values.abs().sort(1).values, expected.abs().sort(1).values)
    again, index_again = topk_entries(x.clone(), k)
    assert torch.equal(values, again) and torch.equal(index, index_again)


@settings(max_examples=40)
@given(rows=st.integers(1, 4), n=st.integers(1, 200), k=st.integers(1, 40), seed=seeds, dtype=dtypes)
@example(rows=2, n=197, k=2, seed=0, dtype=torch.float32)  # prime: one stage
@example(rows=2, n=192, k=2, seed=0, dtype=torch.float32)  # two stages, groups of 8
@example(rows=2, n=8, k=8, seed=0, dtype=torch.float32)
def test_topk_against_sorting(rows, n, k, seed, dtype):
    check_topk(torch.randn(rows, n, generator=torch.Generator().manual_seed(seed)).to(dtype), k)


@settings(max_examples=40)
@given(rows=st.integers(1, 3), n=st.integers(1, 200), k=st.integers(1, 20), seed=seeds)
def test_topk_with_ties(rows, n, k, seed):
    x = torch.randint(-2, 3, (rows, n), generator=torch.Generator().manual_seed(seed))
    check_topk(x.float(), k)


def test_topk_by_hand():
    values, index = topk_entries(torch.tensor([[1.0, -5.0, 0.0, 3.0]]), 2)
    assert dict(zip(index[0].tolist(), values[0].tolist(), strict=True)) == {1: -5.0, 3: 3.0}


def test_rows_in_any_number_of_dimensions():
    columns = torch.randn(3, 500, generator=torch.Generator().manual_seed(0))[:, 20:420].unflatten(
        1, (2, 200)
    )  # a view
    values, index = topk_entries(columns, 5)
    flat_values, flat_index = topk_entries(columns.flatten(0, 1), 5)
    assert torch.equal(values.flatten(0, 1), flat_values) and torch.equal(index.flatten(0, 1), flat_index)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_nothing_is_larger_than_nan_and_then_infinity(dtype):
    x = torch.tensor([[1.0, float("nan"), 0.0, -float("inf"), 9.0, -2.0]], dtype=dtype)
    assert [set(topk_entries(x, k)[1][0].tolist()) for k in (1, 2, 3)] == [{1}, {1, 3}, {1, 3, 4}]


def test_keeping_everything_keeps_the_order():
    x = torch.tensor([[3.0, -1.0, 0.0]])
    values, index = topk_entries(x, 7)
    assert torch.equal(values, x) and index.tolist() == [[0, 1, 2]]
    assert values.data_ptr() != x.data_ptr()
    with pytest.raises(ValueError, match="k must be at least 1, got 0"):
        topk_entries(x, 0)


@st.composite
def sent(draw):
    nodes, n = draw(st.integers(1, 5)), draw(st.integers(1, 12))
    generator = torch.Generator().manual_seed(draw(seeds))
    index = torch.rand(nodes, n, generator=generator).argsort(-1)[..., : draw(st.integers(1, n))]
    return index, torch.randn(index.shape, generator=generator).to(draw(dtypes)), n


@settings(max_examples=40)
@given(sent())
def test_scatter_against_reference(case):
    index, values, n = case
    eps = 8 * torch.finfo(values.dtype).eps  # a rounding for each of five nodes
    for ours, theirs in ((scatter_mean, scatter_mean_reference), (scatter_sum, scatter_sum_reference)):
        assert ours(index, values, n).dtype == values.dtype
        torch.testing.assert_close(ours(index, values, n), theirs(index, values, n), rtol=eps, atol=eps)


def test_scatter_mean_by_hand():
    # Entry 0 comes from both nodes: (1 + 3) / 2. Entry 1 from the first alone: 8, not 8 / 2. Entry 3 is sent
    # as 0 by the second and as 6 by no other: 0. Entry 2 by no node: 0.
    index = torch.tensor([[0, 1], [3, 0]])
    values = torch.tensor([[1.0, 8.0], [0.0, 3.0]])
    assert scatter_mean(index, values, 4).tolist() == [2.0, 8.0, 0.0, 0.0]
    assert scatter_mean(torch.zeros(2, 1).long(), torch.tensor([[4.0], [0.0]]), 2).tolist() == [2.0, 0.0]


def test_many_nodes_add_up_in_rank_order():
    generator = torch.Generator().manual_seed(0)
    index = torch.rand(16, 5000, generator=generator).argsort(1)[:, :3000]
    values = torch.randn(16, 3000, generator=generator)
    total, senders = torch.zeros(5000), torch.zeros(5000)
    for places, numbers in zip(index, values, strict=True):
        total[places] += numbers
        senders[places] += 1
    assert torch.equal(scatter_mean(index, values, 5000), total / senders.clamp(min=1))
