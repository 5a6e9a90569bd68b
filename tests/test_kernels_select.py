"""Choosing entries: the distribution of `bernoulli_indices`, and cutting in chunks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from vsim_kernels import bernoulli_indices, chunk_sizes, select

# With fixed seeds these tests always give the same answer; the level says how bad it may look.
LEVEL = 1e-3


def seeded(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def draws(draw, numel: int, p: float, repeats: int, seed: int = 0) -> np.ndarray:
    """(repeats, numel) of 0 and 1."""
    generator = seeded(seed)
    out = np.zeros((repeats, numel), dtype=np.int64)
    for row in out:
        row[draw(numel, p, generator).numpy()] = 1
    return out


def check_distribution(ones: np.ndarray, p: float) -> None:
    repeats, numel = ones.shape
    # The number of ones is Binomial(numel, p). Rare numbers count as the nearest that is expected 5 times.
    expected = repeats * stats.binom.pmf(np.arange(numel + 1), numel, p)
    usual = np.flatnonzero(expected >= 5)
    cell = np.arange(numel + 1).clip(usual[0], usual[-1])
    observed = np.bincount(cell[ones.sum(1)], minlength=usual[-1] + 1)[usual]
    assert stats.chisquare(observed, np.bincount(cell, expected)[usual]).pvalue > LEVEL
    # Every entry is chosen with probability p: each number of hits is an independent Binomial(repeats, p).
    z = (ones.sum(0) - repeats * p) / np.sqrt(repeats * p * (1 - p))
    assert LEVEL < stats.chi2.cdf((z**2).sum(), numel) < 1 - LEVEL
    # Neighbours are independent: both are chosen with p². Pairs that share an entry are correlated, p³ − p⁴.
    pairs, both = numel - 1, (ones[:, 1:] * ones[:, :-1]).sum()
    variance = repeats * (pairs * (p**2 - p**4) + 2 * (pairs - 1) * (p**3 - p**4))
    assert abs(both - repeats * pairs * p**2) < 4 * np.sqrt(variance)


@pytest.mark.parametrize(
    ("p", "numel", "piece"), [(0.02, 150, None), (0.7, 150, None), (0.97, 150, None), (0.3, 150, 7), (0.5, 4, None)]
)
def test_the_distribution_is_that_of_independent_coins(p, numel, piece, monkeypatch):
    monkeypatch.setattr(select, "_PIECE", piece or select._PIECE)  # resumed between pieces
    check_distribution(draws(bernoulli_indices, numel, p, 3000), p)


def test_the_checks_accept_the_reference_and_reject_a_wrong_p():
    reference = draws(select.bernoulli_indices_reference, 30, 0.3, 3000)
    check_distribution(reference, 0.3)
    with pytest.raises(AssertionError):
        check_distribution(reference, 0.28)


@settings(max_examples=40)
@given(
    numel=st.integers(0, 3000),
    p=st.floats(0, 1) | st.sampled_from([0.0, 1.0, 5e-324, 1e-300, 1 - 2**-53]),
    seed=st.integers(0, 2**31),
)
def test_indices_are_ascending_distinct_and_in_range(numel, p, seed):
    before = torch.get_rng_state()
    index = bernoulli_indices(numel, p, seeded(seed))
    assert index.dtype == torch.int64 and index.dim() == 1
    assert (index.diff() > 0).all()
    assert len(index) == 0 or (index[0] >= 0 and index[-1] < numel)
    generator = seeded(seed)
    assert torch.equal(index, bernoulli_indices(numel, p, generator))
    again = bernoulli_indices(numel, p, generator)  # the generator has moved on
    assert numel * p * (1 - p) < 100 or not torch.equal(index, again)
    assert torch.equal(before, torch.get_rng_state())
    if p == 0:
        assert len(index) == 0
    if p == 1:
        assert torch.equal(index, torch.arange(numel))


def test_the_cost_is_that_of_the_chosen_entries():
    # A mask of 10^13 entries would be 10 TB. Binomial(1e13, 1e-10): mean 1000, standard deviation 31.6.
    index = bernoulli_indices(10**13, 1e-10, seeded(0))
    assert 1000 - 5 * 32 < len(index) < 1000 + 5 * 32
    # Uniform over the whole range, also beyond 32-bit integers.
    assert stats.kstest(index.double().numpy() / 1e13, "uniform").pvalue > LEVEL


def test_many_entries():
    # Standard deviation sqrt(1e7 · 0.3 · 0.7) = 1449; more than one piece.
    index = bernoulli_indices(10_000_000, 0.3, seeded(0))
    assert len(index) > select._PIECE and abs(len(index) - 3_000_000) < 5 * 1449
    assert bernoulli_indices(10, 0.5, seeded(0), device="meta").device.type == "meta"


def test_refused():
    class OnAccelerator:
        device = torch.device("cuda", 0)

    for said, call in (
        ("numel … at least 0 … -1", lambda: bernoulli_indices(-1, 0.5, seeded(0))),
        ("p … [0, 1]", lambda: bernoulli_indices(10, 1.1, seeded(0))),
        ("p … [0, 1]", lambda: bernoulli_indices(10, float("nan"), seeded(0))),
        ("CPU … cuda:0", lambda: bernoulli_indices(10, 0.5, OnAccelerator())),
        ("numel >= 0", lambda: chunk_sizes(-1, 2)),
        ("count >= 1", lambda: chunk_sizes(5, 0)),
    ):
        with refused(ValueError, said):
            call()


@given(numel=st.integers(0, 200), count=st.integers(1, 60))
def test_chunks_are_those_of_tensor_split(numel, count):
    chunks = torch.arange(numel).tensor_split(count)
    assert chunk_sizes(numel, count) == [len(chunk) for chunk in chunks]
