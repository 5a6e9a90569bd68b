"""PowerSGD's steps."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_by_hand import normal
from vsim_kernels import left_factor, low_rank, lowrank, orthogonalize, right_factor

seeds = st.integers(0, 2**31)


def doubles(*shape: int, seed: int = 0) -> torch.Tensor:
    return normal(*shape, seed=seed, dtype=torch.float64)


def power_iteration(matrices: torch.Tensor, q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A whole round, with plain means in place of the collectives."""
    p = orthogonalize(left_factor(matrices, q).mean(0))
    return p, right_factor(matrices, p).mean(0)


@settings(max_examples=40)
@given(
    nodes=st.integers(1, 4),
    n=st.integers(1, 12),
    m=st.integers(1, 12),
    r=st.integers(1, 4),
    seed=seeds,
)
def test_steps_against_reference(nodes, n, m, r, seed):
    r = min(r, n, m)
    matrices, q = doubles(nodes, n, m, seed=seed), doubles(m, r, seed=seed + 1)
    torch.testing.assert_close(left_factor(matrices, q), lowrank.left_factor_reference(matrices, q))
    p = doubles(n, r, seed=seed + 2)
    torch.testing.assert_close(right_factor(matrices, p), lowrank.right_factor_reference(matrices, p))
    torch.testing.assert_close(low_rank(p, q), lowrank.low_rank_reference(p, q))
    p, q = power_iteration(matrices, q)
    assert p.shape == (n, r) and q.shape == (m, r)
    torch.testing.assert_close(p.T @ p, torch.eye(r, dtype=p.dtype))


@settings(max_examples=40)
@given(extra=st.integers(0, 20), r=st.integers(1, 5), seed=seeds)
def test_orthogonalize_is_gram_schmidt(extra, r, seed):
    p = doubles(r + extra, r, seed=seed)
    torch.testing.assert_close(orthogonalize(p), lowrank.orthogonalize_reference(p), rtol=1e-5, atol=1e-7)


def test_orthogonalize_by_hand():
    # (3, 4)/5 first; then (1, 2) minus its part along it, (1·3 + 2·4)/25 · (3, 4) = (1.32, 1.76), leaves
    # (−0.32, 0.24), of length 0.4.
    p = torch.tensor([[3.0, 1.0], [4.0, 2.0]])
    torch.testing.assert_close(orthogonalize(p), torch.tensor([[0.6, -0.8], [0.8, 0.6]]))


@pytest.mark.parametrize(
    "p",
    [
        *(torch.zeros(6, 3), torch.ones(6, 3), torch.eye(6)[:, [0, 0, 1]], 1e-30 * torch.ones(6, 2)),
        torch.ones(100, 4) + 1e-4 * normal(100, 4),  # nearly dependent
    ],
)
def test_dependent_columns_still_give_orthonormal_ones(p):
    q = orthogonalize(p)
    torch.testing.assert_close(q.T @ q, torch.eye(p.shape[1]), rtol=0, atol=1e-5)
    torch.testing.assert_close(q @ (q.T @ p), p)  # and they span what p spans


def test_batches_are_one_by_one():
    p = doubles(2, 3, 8, 4)
    one_by_one = torch.stack([torch.stack([orthogonalize(x) for x in row]) for row in p])
    torch.testing.assert_close(orthogonalize(p), one_by_one)
    matrices, q = doubles(4, 3, 8, 5), doubles(3, 5, 2)  # three parameters on four nodes
    p, q_next = power_iteration(matrices, q)
    for i in range(3):
        p_i, q_i = power_iteration(matrices[:, i], q[i])
        torch.testing.assert_close(p[i], p_i)
        torch.testing.assert_close(q_next[i], q_i)


def test_a_mean_of_low_rank_is_found_in_one_round():
    # mean_k M_k = A Bᵀ of rank 2, so its range is that of P and the projection changes nothing.
    a, b, noise = doubles(9, 2), doubles(7, 2, seed=1), doubles(9, 7, seed=2)
    matrices = torch.stack([a @ b.T + noise, a @ b.T - noise])
    torch.testing.assert_close(low_rank(*power_iteration(matrices, doubles(7, 2, seed=3))), a @ b.T)


def test_rounds_converge_to_the_best_approximation():
    # Singular values 1, 1/2, 1/4, …: each round halves what is missing.
    u, _, v = torch.linalg.svd(doubles(12, 10), full_matrices=False)
    s = 0.5 ** torch.arange(10, dtype=u.dtype)
    matrix = (u * s) @ v
    q = doubles(10, 3, seed=1)
    for _ in range(60):
        p, q = power_iteration(matrix[None], q)
    torch.testing.assert_close(low_rank(p, q), (u[:, :3] * s[:3]) @ v[:3])


def test_half_precision():
    p = doubles(20, 3).bfloat16()
    assert torch.equal(orthogonalize(p), orthogonalize(p.float()).bfloat16())


def test_devices_without_qr_take_the_cpu(monkeypatch):
    p = doubles(8, 2)
    expected = orthogonalize(p)
    monkeypatch.setattr(lowrank, "_WITHOUT_QR", frozenset({"cpu"}))
    assert torch.equal(orthogonalize(p), expected)


def test_rank_above_the_rows():
    with pytest.raises(ValueError, match="rank 4 is more than the 3 rows allow"):
        orthogonalize(torch.zeros(3, 4))
