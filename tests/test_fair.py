"""q-FedAvg and AFL against their formulas in NumPy, and what they do to clients that differ."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from comparisons_by_hand import check_refusals
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_by_hand import Parameters, normal, started
from torch.utils.data import TensorDataset

import vsim
from vsim.algorithms.afl import on_simplex
from vsim.models import MLP
from vsim.strategy import AFLStrategy, Algorithm, FedAvgStrategy, QFedAvgStrategy

DOUBLE = torch.float64
LR = 0.2
LOSSES = (0.5, 2.0, 1.0, 0.1)


def rounds(strategy: Algorithm, resting: int | None = None) -> tuple[np.ndarray, list[np.ndarray]]:
    """Return φ before two rounds of three steps, and θ (K, P) before and after each sync.

    Node `resting` has no loss in the second round.
    """
    gradients = normal(6, 4, 5, dtype=DOUBLE)
    run = started(strategy, Parameters((5,), dtype=DOUBLE), 4)
    phi = run.cluster.weights[0].numpy().copy()
    found, theta = [], np.tile(phi, (4, 1))
    for t, g in enumerate(gradients, start=1):
        # Only the losses of a round's first step count.
        run.cluster.losses = [(1 + t // 3) * loss if t in (1, 4) else 99.0 for loss in LOSSES]
        if resting is not None and t > 3:
            run.cluster.losses[resting] = math.nan
        theta = theta - LR * g.numpy()
        after = run.step(g).numpy()
        if t % 3 == 0:
            found += [theta, after]
            theta = after
    return phi, found


@pytest.mark.parametrize("resting", [None, 1])
@pytest.mark.parametrize("q", [0.0, 0.5, 1.0, 3.0])
def test_q_fedavg_by_its_formula(q: float, resting: int | None) -> None:
    phi, (first, one, second, two) = rounds(QFedAvgStrategy(inner_optim="sgd", lr=LR, H=3, q=q), resting)
    for theta, after, factor in ((first, one, 1), (second, two, 2)):
        F, L = factor * np.array(LOSSES), 1 / LR
        if resting is not None:
            F[resting] = LOSSES[resting]  # the last that it had
        moves = L * (phi - theta)
        h = q * F ** (q - 1) * (moves**2).sum(1) + L * F**q
        phi = phi - (F[:, None] ** q * moves).sum(0) / h.sum()
        np.testing.assert_allclose(after, np.tile(phi, (4, 1)), rtol=1e-12)


def test_without_fairness_both_are_fedavg() -> None:
    _, expected = rounds(FedAvgStrategy(inner_optim="sgd", lr=LR, H=3))
    for strategy in (
        QFedAvgStrategy(inner_optim="sgd", lr=LR, H=3, q=0),
        AFLStrategy(inner_optim="sgd", lr=LR, H=3, gamma=0),
    ):
        _, found = rounds(strategy)
        np.testing.assert_allclose(found, expected, rtol=1e-12)


def test_afl_by_its_formula() -> None:
    _, (first, one, second, two) = rounds(AFLStrategy(inner_optim="sgd", lr=LR, H=3, gamma=0.2))
    np.testing.assert_allclose(one[0], first.mean(0), rtol=1e-12)
    # λ + γ F = .25 + (.1, .4, .2, .02) = (.35, .65, .45, .27), which sum to 1.72: each loses .18.
    share = np.array([0.17, 0.47, 0.27, 0.09])
    np.testing.assert_allclose(two[0], share @ second, rtol=1e-12)


@settings(max_examples=50)
@given(st.lists(st.floats(-3, 3), min_size=1, max_size=6))
def test_the_projection_is_on_the_simplex_and_nearest(point: list[float]) -> None:
    given_ = torch.tensor(point, dtype=DOUBLE)
    found = on_simplex(given_)
    assert float(found.sum()) == pytest.approx(1) and float(found.min()) >= 0
    # Of the nearest point, the differences are equal where it is positive, and no smaller elsewhere.
    lost = given_ - found
    inside = lost[found > 1e-12]
    assert float(inside.max() - inside.min()) < 1e-9 and bool((lost <= inside.max() + 1e-9).all())


def hard_and_easy(rank: int, num_nodes: int, train: bool) -> TensorDataset:
    """Client 0's labels are the others' turned round."""
    x = normal(40, 6, seed=rank)
    y = (x[:, 0] > 0).long()
    return TensorDataset(x, 1 - y if rank == 0 else y)


@pytest.mark.parametrize(
    "strategy",
    [QFedAvgStrategy(inner_optim="sgd", lr=0.2, H=2, q=4.0), AFLStrategy(inner_optim="sgd", lr=0.2, H=2, gamma=0.1)],
)
def test_the_worst_client_does_better_than_by_fedavg(strategy: Algorithm) -> None:
    def losses(own: Algorithm, **options: Any) -> np.ndarray:
        trainer = vsim.Trainer(MLP(6, (8,), 2, seed=0), hard_and_easy)
        given: Any = {"num_nodes": 4, "max_steps": 60, "batch_size": 40, "progress": False, "val_interval": None}
        trainer.fit(strategy=own, client_val_dataset=hard_and_easy, **given, **options)
        return trainer.history.client_val_losses

    fair, plain = losses(strategy), losses(FedAvgStrategy(inner_optim="sgd", lr=0.2, H=2))
    assert fair.max() < 0.8 * plain.max() and fair.std() < plain.std()


def test_bad_arguments() -> None:
    check_refusals(
        [
            (lambda: QFedAvgStrategy(q=-1), ValueError, ["q", ">= 0", "-1"]),
            (lambda: AFLStrategy(gamma=-0.1), ValueError, ["gamma", ">= 0"]),
        ]
    )
