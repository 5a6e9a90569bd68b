"""The generated data of clients: what their definitions say of points, labels, sizes and distributions."""

import random

import numpy as np
import pytest
import torch
from errors import refused

from vsim.data import fcube, synthetic_federated
from vsim.data.federated import _client


def test_fcube_is_four_pairs_of_opposite_octants() -> None:
    train, val = fcube()
    x, y = train.dataset.tensors
    assert x.shape == (4000, 3) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert train.num_nodes == 4 and train.counts.tolist() == [[500, 500]] * 4
    assert torch.equal(y, (x[:, 0] < 0).long())
    octants = [(1, 1, 1), (1, 1, -1), (1, -1, 1), (1, -1, -1)]
    for client, octant in enumerate(octants):
        own = train.indices(client)
        signs = x[own].sign() * (1 - 2 * y[own])[:, None]
        assert (signs == torch.tensor(octant)).all()
    # Uniform: the mean of |x| is 1/2, and each tenth has a tenth of the numbers.
    assert np.histogram(x.abs().numpy(), 10, (0, 1))[0] / x.numel() == pytest.approx(np.full(10, 0.1), abs=0.01)
    tested, labels = val.tensors
    assert tested.shape == (1000, 3) and torch.equal(labels, (tested[:, 0] <= 0).long())
    assert np.histogram(tested.numpy(), 8, (-1, 1))[0] / 3000 == pytest.approx(np.full(8, 0.125), abs=0.025)


def test_the_seed_decides_and_no_global_generator_is_used() -> None:
    before = torch.get_rng_state(), np.random.get_state()[1].copy(), random.getstate()  # noqa: NPY002
    for make in (fcube, lambda seed=0: synthetic_federated(1, 1, seed=seed)):
        first, again, other = (make(seed)[0].dataset.tensors[0] for seed in (0, 0, 1))
        assert torch.equal(first, again) and not torch.equal(first[:9], other[:9])
    assert torch.equal(before[0], torch.get_rng_state()) and before[2] == random.getstate()
    assert np.array_equal(before[1], np.random.get_state()[1])  # noqa: NPY002


def test_a_client_of_synthetic_by_its_definition() -> None:
    stream = np.random.default_rng(0)
    clients = [_client(stream, 200, shift=3.0, center=-2.0) for _ in range(200)]
    weights, biases, x, _ = (np.stack(part) for part in zip(*clients, strict=True))
    assert weights.shape == (200, 60, 10) and biases.shape == (200, 10) and x.shape == (200, 200, 60)
    # W_k, b_k ~ N(u_k, 1): errors of means and deviations are within 5 standard errors.
    for drawn in (weights, biases):
        assert drawn.mean() == pytest.approx(3, abs=5 / drawn.size**0.5)
        assert drawn.std() == pytest.approx(1, abs=5 / (2 * drawn.size) ** 0.5)
    # x ~ N(v_k, Σ), Σ_jj = j^(−1.2) and 0 elsewhere, v_k ~ N(B_k, 1).
    means = x.mean(1, keepdims=True)
    assert means.mean() == pytest.approx(-2, abs=0.05)
    spread = np.arange(1, 61) ** -1.2
    assert means.var(0)[0] == pytest.approx(1 + spread / 200, rel=0.6)
    rest = (x - means).reshape(-1, 60) / spread**0.5
    covariance = rest.T @ rest / (len(rest) - 200)
    assert np.abs(covariance - np.eye(60)).max() < 5 * (2 / len(rest)) ** 0.5
    for w, b, own, labels in clients:
        assert [int(np.argmax(w.T @ example + b)) for example in own[:20]] == labels[:20].tolist()


def test_synthetic_has_sizes_of_a_power_law_and_a_tenth_for_validation() -> None:
    train, val = synthetic_federated(1, 1, num_clients=600)
    sizes = (train.sizes + val.sizes).numpy()
    assert train.num_nodes == val.num_nodes == 600
    assert (sizes * 9 // 10 == train.sizes.numpy()).all() and len(train.dataset) == train.sizes.sum()
    logs = np.log(sizes - 50 + 0.5)  # ⌊exp N(4, 2)⌋
    assert np.median(logs) == pytest.approx(4, abs=0.4) and sizes.min() >= 50
    assert np.quantile(logs, [0.159, 0.841]) == pytest.approx([2, 6], abs=0.5)
    x, y = (torch.cat(both) for both in zip(train.dataset.tensors, val.dataset.tensors, strict=True))
    assert x.shape[1:] == (60,) and x.dtype == torch.float32 and y.dtype == torch.int64
    assert set(y.tolist()) == set(range(10))


@pytest.mark.parametrize("beta", [0, 3])
def test_beta_spreads_the_clients_and_alpha_changes_no_label(beta: float) -> None:
    train, _ = synthetic_federated(0, beta, num_clients=100)
    x, y = train.dataset.tensors
    centers = torch.stack([x[train.indices(k)].mean() for k in range(100)])  # B_k + the mean of 60 N(0, 1)
    assert centers.std().item() == pytest.approx((beta**2 + 1 / 60) ** 0.5, rel=0.3)
    shifted = synthetic_federated(5, beta, num_clients=100)[0].dataset.tensors
    assert torch.equal(shifted[0], x) and torch.equal(shifted[1], y)


def test_many_clients_need_memory() -> None:
    with refused(ValueError, "num_clients=1,000,000,000"):
        synthetic_federated(1, 1, num_clients=10**9)
