"""SCAFFOLD against a reference in NumPy, and FedAvg, which it is where data are equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from driven import Parameters, driven, normal, started
from torch import nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from vsim import Dropout, Sample, Schedule, Trainer
from vsim.strategy import FedAvgStrategy, OptimSpec, ScaffoldStrategy

SGD = OptimSpec("sgd", lr=0.5)


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_on_quadratics_it_is_the_paper_s(decay: float) -> None:
    """g_k = a_k θ − b_k, learning rates that halve every three steps, and a server rate of 0.7."""
    spec = OptimSpec("sgd", lr=0.4, weight_decay=decay)
    halves = {"lr_scheduler": StepLR, "lr_scheduler_kwargs": {"step_size": 3, "gamma": 0.5}}
    run = started(ScaffoldStrategy(spec, H=2, outer_lr=0.7, **halves), Parameters((5,), dtype=torch.float64), 3)
    a, b = normal(3, 5, seed=1, dtype=torch.float64).abs(), normal(3, 5, seed=2, dtype=torch.float64)
    x = run.cluster.weights[0].numpy().copy()
    c, c_k = np.zeros(5), np.zeros((3, 5))
    for round in range(5):
        rates = [0.4 * 0.5 ** (step // 3) for step in (2 * round, 2 * round + 1)]
        moved, new = np.zeros((3, 5)), np.zeros((3, 5))
        for k in range(3):
            y = x.copy()
            for lr in rates:
                y = y - lr * (a[k].numpy() * y - b[k].numpy() + decay * y - c_k[k] + c)
            moved[k], new[k] = y - x, c_k[k] - c + (x - y) / sum(rates)
        x, c, c_k = x + 0.7 * moved.mean(0), c + (new - c_k).mean(0), new
        for _ in rates:
            run.step(a * run.cluster.weights - b)
        np.testing.assert_allclose(run.cluster.weights.numpy(), np.tile(x, (3, 1)), rtol=1e-10)


def test_the_control_variates_of_a_population_are_the_paper_s() -> None:
    """Linear regression: 3 of 7 clients a round, who take steps with all of their data; N and n as in option II."""
    x, y = normal(7, 6, 4, seed=1, dtype=torch.float64), normal(7, 6, seed=2, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False, dtype=torch.float64)
    trainer = Trainer(
        model,
        lambda client, num_clients, train: TensorDataset(x[client], y[client, :, None]),
        loss_fn=nn.functional.mse_loss,
    )
    options: dict[str, Any] = {"num_nodes": 3, "participation": Sample(3, of=7), "max_steps": 24, "batch_size": 6}
    trainer.fit(strategy=ScaffoldStrategy(H=2, outer_lr=0.7, lr=0.1), progress=False, **options)
    w, c, c_k = model.weight.detach().numpy()[0].copy(), np.zeros(4), np.zeros((7, 4))
    for cohort in (segment.nodes for segment in trainer.ledger.attendance):
        moved, changes = [], []
        for k in cohort:
            own, a, b = w.copy(), x[k].numpy(), y[k].numpy()
            for _ in range(2):
                own = own - 0.1 * (2 / 6 * a.T @ (a @ own - b) - c_k[k] + c)
            moved.append(own - w)
            changes.append((w - own) / (2 * 0.1) - c)
            c_k[k] += changes[-1]
        w, c = w + 0.7 * np.mean(moved, 0), c + 3 / 7 * np.mean(changes, 0)
    assert trainer.strategy is not None
    np.testing.assert_allclose(trainer.strategy.global_weights().numpy(), w, rtol=1e-10)
    rounds = [(2 * r, name) for r in range(1, 13) for name in ("weights", "control variates")]
    pulls = [(2 * r + 1, "pull" + name) for r in range(12) for name in ("", " of control variates")[: 1 + (r > 0)]]
    assert sorted((event.step, event.label) for event in trainer.ledger) == sorted([*rounds, *pulls])
    assert {event.payload_bytes for event in trainer.ledger} == {8 * 4}
    module: Any = trainer.strategy.communication_modules[0]
    np.testing.assert_allclose(module.variate.numpy(), c, rtol=1e-9)
    np.testing.assert_allclose(module.variates.numpy(), c_k[list(cohort)], rtol=1e-9)


def test_it_comes_to_the_minimum_where_fedavg_comes_to_another_point() -> None:
    a, b = 0.5 + normal(3, 5, seed=1, dtype=torch.float64).abs(), normal(3, 5, seed=2, dtype=torch.float64)
    minimum, distances = b.sum(0) / a.sum(0), []
    for strategy in (ScaffoldStrategy(SGD, H=5), FedAvgStrategy(SGD, H=5)):
        run = started(strategy, Parameters((5,), dtype=torch.float64), 3)
        for _ in range(150):
            run.step(a * run.cluster.weights - b)
        distances.append((run.cluster.weights[0] - minimum).abs().max().item())
    assert distances[0] < 1e-5 and distances[1] > 0.05


class Quadratic(nn.Module):
    """The loss a / 2 · (w − x)² of a batch (x, a)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        x, a = batch
        return (a * (self.w - x) ** 2).sum(1).mean() / 2


@pytest.mark.parametrize(
    "plan",
    [
        Schedule({50: [0, 1, 3], 60: [0, 1, 2, 3]}),
        Schedule({33: [0, 1], 42: [0, 3], 58: [0, 1, 2, 3]}),  # in the midst of rounds
        Schedule({50: [0], 60: [1, 2], 70: [0, 1, 2, 3]}),
        Dropout(0.3),
    ],
    ids=str,
)
def test_the_mean_of_the_control_variates_stays_c_when_nodes_leave_and_join(plan: Any) -> None:
    """So that it comes to the minimum once all are there: copies of a peer's control variate would stay in c."""
    x, a = normal(4, 3, seed=3), normal(4, 3, seed=4).abs() + 0.2

    def own(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        return TensorDataset(x[rank].expand(8, 3), a[rank].expand(8, 3))

    trainer = Trainer(Quadratic(), own)
    options: dict[str, Any] = {"num_nodes": 4, "batch_size": 8, "max_steps": 400, "progress": False}
    strategy = ScaffoldStrategy(OptimSpec("sgd", lr=0.1), H=5)
    model = trainer.fit(strategy=strategy, participation=plan, **options)
    assert trainer.strategy is not None
    if isinstance(plan, Schedule):  # all have been there for long
        torch.testing.assert_close(model.w.detach(), (a * x).sum(0) / a.sum(0), rtol=1e-4, atol=1e-5)
    module: Any = trainer.strategy.communication_modules[0]
    if len(trainer.strategy.cluster.active) == 4:
        torch.testing.assert_close(module.variates[:, :3].mean(0), module.variate[:3], rtol=1e-4, atol=1e-5)
    assert model.w.detach().abs().max() < 3
    joins = [event for event in trainer.ledger if event.label == "control variates" and event.moment == "start"]
    assert joins and all(event.payload_bytes == 4 * 3 for event in joins)


def test_on_equal_data_it_is_fedavg() -> None:
    model, gradients = Parameters((5, 3)), normal(8, 1, 15).expand(8, 3, 15)
    ours = driven(ScaffoldStrategy(SGD, H=2), model, gradients)
    torch.testing.assert_close(ours.cluster.weights, driven(FedAvgStrategy(SGD, H=2), model, gradients).cluster.weights)


def test_at_a_learning_rate_of_zero_the_control_variates_stay() -> None:
    # A warm-up over 2 steps: lr 0, then 0.25.
    run = driven(ScaffoldStrategy(SGD, H=1, warmup_steps=2), Parameters((2,)), torch.ones(2, 2, 2))
    (module,) = run.strategy.communication_modules
    assert torch.equal(module.variates, torch.ones(2, 2)) and run.cluster.weights.isfinite().all()  # type: ignore[attr-defined]


def test_other_optimizers_are_refused() -> None:
    others = OptimSpec("sgd", momentum=0.9), OptimSpec("sgd", maximize=True), OptimSpec("muon", rest="sgd")
    for spec in ("adamw", *others):
        with pytest.raises(TypeError, match="the inner optimizer must be plain SGD, got OptimSpec"):
            ScaffoldStrategy(spec)
