"""FedDyn against a reference in NumPy, and where it comes to, also when nodes leave and join, and for cohorts."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from driven import Parameters, normal, started
from test_scaffold import Quadratic
from torch.utils.data import TensorDataset

from vsim import Dropout, Sample, Schedule, Trainer
from vsim.strategy import FedAvgStrategy, FedDynStrategy, OptimSpec


def test_on_quadratics_it_is_the_paper_s() -> None:
    """g_k = a_k θ − b_k, in NumPy: the local term first, then the server's."""
    run = started(FedDynStrategy(OptimSpec("sgd", lr=0.2), H=3, alpha=0.7), Parameters((5,), dtype=torch.float64), 3)
    a, b = normal(3, 5, seed=1, dtype=torch.float64).abs(), normal(3, 5, seed=2, dtype=torch.float64)
    x, h, h_k = run.cluster.weights[0].numpy().copy(), np.zeros(5), np.zeros((3, 5))
    for _ in range(4):
        y = np.tile(x, (3, 1))
        for _ in range(3):
            y = y - 0.2 * (a.numpy() * y - b.numpy() - h_k + 0.7 * (y - x))
            run.step(a * run.cluster.weights - b)
        h_k, h = h_k - 0.7 * (y - x), h - 0.7 * (y - x).mean(0)
        x = y.mean(0) - h / 0.7
        np.testing.assert_allclose(run.cluster.weights.numpy(), np.tile(x, (3, 1)), rtol=1e-10)


def test_it_comes_to_the_minimum_where_fedavg_comes_to_another_point() -> None:
    a, b = 0.5 + normal(3, 5, seed=1, dtype=torch.float64).abs(), normal(3, 5, seed=2, dtype=torch.float64)
    minimum, distances, sgd = b.sum(0) / a.sum(0), [], OptimSpec("sgd", lr=0.3)
    for strategy in (FedDynStrategy(sgd, H=10, alpha=1.0), FedAvgStrategy(sgd, H=10)):
        run = started(strategy, Parameters((5,), dtype=torch.float64), 3)
        for _ in range(600):
            run.step(a * run.cluster.weights - b)
        distances.append((run.cluster.weights[0] - minimum).abs().max().item())
    assert distances[0] < 1e-5 and distances[1] > 0.05


@pytest.mark.parametrize(
    "plan",
    [
        Schedule({50: [0, 1, 3], 60: [0, 1, 2, 3]}),
        Schedule({33: [0, 1], 42: [0, 3], 58: [0, 1, 2, 3]}),
        Sample(2, of=4),
    ],
    ids=str,
)
def test_it_comes_to_the_minimum_of_all_clients(plan: Any) -> None:
    x, a = normal(4, 3, seed=3), normal(4, 3, seed=4).abs() + 0.2

    def own(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        return TensorDataset(x[rank].expand(8, 3), a[rank].expand(8, 3))

    trainer = Trainer(Quadratic(), own)
    nodes = 2 if isinstance(plan, Sample) else 4
    options: dict[str, Any] = {"num_nodes": nodes, "batch_size": 8, "max_steps": 1500, "progress": False}
    trainer.fit(strategy=FedDynStrategy(OptimSpec("sgd", lr=0.3), H=10, alpha=0.5), participation=plan, **options)
    assert trainer.strategy is not None
    minimum = (a * x).sum(0) / a.sum(0)
    torch.testing.assert_close(trainer.strategy.global_weights()[:3], minimum, rtol=1e-3, atol=1e-4)


def test_h_stays_the_mean_of_all_when_nodes_drop_out() -> None:
    x = normal(4, 3, seed=3)
    trainer = Trainer(Quadratic(), lambda k, n, t: TensorDataset(x[k].expand(8, 3), torch.ones(8, 3)))
    plan = Dropout(0.3)
    strategy = FedDynStrategy(OptimSpec("sgd", lr=0.1), H=5)
    options: dict[str, Any] = {"num_nodes": 4, "batch_size": 8, "max_steps": 40, "progress": False}
    checked = []

    def check(run: Any) -> None:
        module = run.strategy.communication_modules[0]
        if len(run.cluster.active) == 4:
            checked.append(run.cluster.step)
            torch.testing.assert_close(module.corrections.mean(0), module.correction, rtol=1e-4, atol=1e-5)

    trainer.fit(strategy=strategy, participation=plan, callbacks=[check], **options)
    assert checked
