"""Kernels against their references: writing columns, sorting over nodes, packing bits, and orthogonal factors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from strategies_by_hand import normal
from vsim_kernels import newton_schulz, pack_bits, sort_rows, unpack_bits, write_entries_
from vsim_kernels.masking import write_entries_reference_
from vsim_kernels.order import sort_rows_reference
from vsim_kernels.orthogonal import newton_schulz_reference
from vsim_kernels.packing import pack_bits_reference, unpack_bits_reference

seeds = st.integers(0, 2**31)


# Writing columns of the matrix of replicas


@st.composite
def columns(draw: Any) -> Any:
    """A stacked matrix that is a slice of a larger one, and distinct columns of it in any order."""
    nodes, numel = draw(st.integers(1, 6)), draw(st.integers(1, 40))
    dtype = draw(st.sampled_from([torch.float32, torch.float64, torch.bfloat16]))
    generator = torch.Generator().manual_seed(draw(seeds))
    whole = torch.randn(nodes + 2, numel + 5, generator=generator).to(dtype)
    index = torch.randperm(numel, generator=generator)[: draw(st.integers(0, numel))]
    return whole, slice(1, nodes + 1), slice(2, numel + 2), index


@settings(max_examples=40)
@given(columns())
def test_writing_touches_the_chosen_columns_of_the_slice_only(case: Any) -> None:
    whole, rows, cols, index = case
    values = torch.arange(len(index)).to(whole.dtype)
    expected = whole.clone()
    write_entries_reference_(expected[rows, cols], index, values)
    x = whole[rows, cols]
    assert write_entries_(x, index, values) is x
    assert torch.equal(whole, expected)


def test_writing_by_hand() -> None:
    x = torch.tensor([[1.0, 10.0, 3.0], [2.0, 20.0, 6.0], [6.0, 30.0, 9.0]])
    write_entries_(x, torch.tensor([2, 0]), torch.tensor([6.0, 3.0]))
    assert torch.equal(x, torch.tensor([[3.0, 10.0, 6.0], [3.0, 20.0, 6.0], [3.0, 30.0, 6.0]]))


# Sorting over the nodes


@given(st.integers(1, 40), seeds)
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


# Numbers of a few bits in bytes


@st.composite
def messages(draw: Any) -> tuple[list[torch.Tensor], list[int]]:
    nodes, widths = draw(st.integers(1, 4)), draw(st.lists(st.integers(0, 40), min_size=1, max_size=4))
    stream = torch.Generator().manual_seed(draw(seeds))
    return [torch.randint(2**w, (nodes, draw(st.integers(0, 9))), generator=stream) for w in widths], widths


@settings(max_examples=40)
@given(messages())
@example(([torch.zeros(2, 0, dtype=torch.int64)], [12]))
def test_there_and_back_and_against_the_reference(message: tuple[list[torch.Tensor], list[int]]) -> None:
    parts, widths = message
    counts = [part.shape[1] for part in parts]
    packed = pack_bits(parts, widths)
    bits = sum(count * width for count, width in zip(counts, widths, strict=True))
    assert packed.dtype == torch.uint8 and packed.shape == (len(parts[0]), -(-bits // 8))
    assert torch.equal(packed, pack_bits_reference(parts, widths))
    for unpack in (unpack_bits, unpack_bits_reference):
        for part, back in zip(parts, unpack(packed, counts, widths), strict=True):
            assert torch.equal(part, back)


def test_packing_by_hand() -> None:
    # Two indices of twelve bits are three bytes; four codes of 2 bits are one, the lowest first: 0b11_10_01_00.
    assert pack_bits([torch.tensor([[0xABC, 0xDEF]])], [12]).tolist() == [[0xBC, 0xFA, 0xDE]]
    assert pack_bits([torch.tensor([[0, 1, 2, 3]], dtype=torch.uint8)], [2]).tolist() == [[0b11100100]]
    # Parts follow each other bit by bit, 5 bits and then 3: 0b110_10001.
    assert pack_bits([torch.tensor([[0b10001]]), torch.tensor([[0b110]])], [5, 3]).tolist() == [[0b11010001]]


# Orthogonal factors

MUON = ((3.4445, -4.7750, 2.0315), 5, 1e-7)
sizes = st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40))


@given(shapes=st.lists(sizes, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_factors_against_reference(shapes: list[tuple[int, int, int]], seed: int) -> None:
    matrices = [normal(*shape, seed=seed + i) for i, shape in enumerate(shapes)]
    kept = [m.clone() for m in matrices]
    for factors, matrix in zip(newton_schulz(matrices, *MUON), matrices, strict=True):
        assert factors.shape == matrix.shape
        expected = torch.stack([newton_schulz_reference(m, *MUON) for m in matrix])
        # bfloat16 has 8 bits, and the iteration multiplies small values, with their rounding, by 3.4 up to five times.
        assert (factors.double() - expected).norm() <= 0.1 * expected.norm()
    assert all(map(torch.equal, matrices, kept))


@given(nodes=st.integers(1, 9), n=st.integers(1, 40), m=st.integers(1, 40), seed=st.integers(0, 99))
def test_equal_matrices_have_bitwise_equal_factors(nodes: int, n: int, m: int, seed: int) -> None:
    matrix = normal(1, n, m, seed=seed).expand(nodes, n, m)
    first, _, upright = newton_schulz([matrix, normal(2, n, m, seed=seed + 1), matrix.mT], *MUON)
    assert torch.equal(first, first[:1].expand_as(first))
    assert n == m or torch.equal(upright.mT, first)


@pytest.mark.parametrize("values", [[2.0, 2.0], [5.0, 1.0], [1.0, 0.0]])
def test_factors_of_a_diagonal_by_hand(values: list[float]) -> None:
    # Of diag(s) the iteration is that of its entries: after division by the norm, s ← a·s + b·s³ + c·s⁵.
    a, b, c = MUON[0]
    expected = torch.tensor(values) / torch.tensor(values).norm()
    for _ in range(2):
        expected = a * expected + b * expected**3 + c * expected**5
    (factor,) = newton_schulz([torch.tensor(values).diag()[None]], (a, b, c), 2, 1e-7)
    torch.testing.assert_close(factor[0].float(), expected.diag(), rtol=0.02, atol=0.02)
    assert not newton_schulz([torch.zeros(2, 3, 4)], *MUON)[0].any()
