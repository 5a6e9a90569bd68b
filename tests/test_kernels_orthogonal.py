"""The orthogonal factors that Muon steps by."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from vsim_kernels import newton_schulz
from vsim_kernels.orthogonal import newton_schulz_reference

MUON = ((3.4445, -4.7750, 2.0315), 5, 1e-7)
sizes = st.tuples(st.integers(1, 4), st.integers(1, 40), st.integers(1, 40))


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@given(shapes=st.lists(sizes, min_size=1, max_size=4), seed=st.integers(0, 99))
def test_against_reference(shapes: list[tuple[int, int, int]], seed: int) -> None:
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
def test_by_hand_on_a_diagonal(values: list[float]) -> None:
    # Of diag(s) the iteration is that of its entries: after division by the norm, s ← a·s + b·s³ + c·s⁵.
    a, b, c = MUON[0]
    expected = torch.tensor(values) / torch.tensor(values).norm()
    for _ in range(2):
        expected = a * expected + b * expected**3 + c * expected**5
    (factor,) = newton_schulz([torch.tensor(values).diag()[None]], (a, b, c), 2, 1e-7)
    torch.testing.assert_close(factor[0].float(), expected.diag(), rtol=0.02, atol=0.02)


def test_nothing_comes_of_nothing() -> None:
    (factor,) = newton_schulz([torch.zeros(2, 3, 4)], *MUON)
    assert not factor.any()
