"""Strategies of federated learning where their formulas in reproductions/ do not reach.

Those are rates that change, unequal numbers of steps, populations, and nodes that leave and join.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from strategies_by_hand import Parameters, driven, normal, size, started
from torch import Tensor, nn
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import TensorDataset

from vsim import Dropout, Sample, Schedule, Trainer
from vsim.models import MLP
from vsim.strategy import (
    DiLoCoStrategy,
    FedAvgStrategy,
    FedBNStrategy,
    FedDynStrategy,
    FedNovaStrategy,
    FedOptStrategy,
    FedProxStrategy,
    OptimSpec,
    PostLocal,
    ScaffoldStrategy,
    SlowMoStrategy,
    Strategy,
    clip,
    krum,
    mean,
)

SGD = OptimSpec("sgd", lr=0.5)
DOUBLE = torch.float64


def after(strategy: Strategy, num_nodes: int = 3) -> Tensor:
    """The weights after eight steps."""
    return driven(strategy, Parameters((5, 3), (4,)), normal(8, num_nodes, 19)).cluster.weights


# Rates that change ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "expected"),
    [
        # Gradients 1 and 3, inner lr 0.5, H = 1, α = β = 0.5. Round 1: θ = −0.5, −1.5, φ − mean = 1, u = 1 / 0.5 = 2,
        # φ = −0.5 · 0.5 · 2 = −0.5. Round 2 at lr 0.25: φ − mean = 0.5, u = 1 + 0.5 / 0.25 = 3,
        # φ = −0.5 − 0.5 · 0.25 · 3 = −0.875.
        ({"lr_scheduler": StepLR, "lr_scheduler_kwargs": {"step_size": 1, "gamma": 0.5}}, -0.875),
        # Warm-up: lr 0, then 0.25. Step 1 leaves φ = u = 0; in step 2 φ − mean = 0.5, u = 2, φ = −0.5 · 0.25 · 2.
        ({"warmup_steps": 2}, -0.25),
    ],
)
def test_slowmo_divides_by_the_rate_of_the_round(schedule: dict[str, Any], expected: float) -> None:
    model = Parameters((1,))
    nn.init.zeros_(model.p0)
    strategy = SlowMoStrategy(inner_optim=SGD, H=1, alpha=0.5, beta=0.5, **schedule)
    run = driven(strategy, model, torch.tensor([[1.0], [3.0]]).expand(2, 2, 1))
    assert run.cluster.weights.tolist() == [[expected]] * 2 and run.strategy.model_weights().item() == expected


@pytest.mark.parametrize("decay", [0.0, 0.1])
def test_scaffold_on_quadratics_is_the_paper_s(decay: float) -> None:
    """g_k = a_k θ − b_k, learning rates that halve every three steps, and a server rate of 0.7."""
    spec = OptimSpec("sgd", lr=0.4, weight_decay=decay)
    halves = {"lr_scheduler": StepLR, "lr_scheduler_kwargs": {"step_size": 3, "gamma": 0.5}}
    run = started(ScaffoldStrategy(inner_optim=spec, H=2, outer_lr=0.7, **halves), Parameters((5,), dtype=DOUBLE), 3)
    a, b = normal(3, 5, seed=1, dtype=DOUBLE).abs(), normal(3, 5, seed=2, dtype=DOUBLE)
    x = run.cluster.weights[0].numpy().copy()
    c, c_k = np.zeros(5), np.zeros((3, 5))
    for round in range(5):
        rates = [0.4 * 0.5 ** (step // 3) for step in (2 * round, 2 * round + 1)]
        y = np.tile(x, (3, 1))
        for lr in rates:
            y = y - lr * (a.numpy() * y - b.numpy() + decay * y - c_k + c)
            run.step(a * run.cluster.weights - b)
        new = c_k - c + (x - y) / sum(rates)
        x, c, c_k = x + 0.7 * (y - x).mean(0), c + (new - c_k).mean(0), new
        np.testing.assert_allclose(run.cluster.weights.numpy(), np.tile(x, (3, 1)), rtol=1e-10)


def test_at_a_learning_rate_of_zero_scaffolds_control_variates_stay() -> None:
    # A warm-up over 2 steps: lr 0, then 0.25.
    run = driven(ScaffoldStrategy(inner_optim=SGD, H=1, warmup_steps=2), Parameters((2,)), torch.ones(2, 2, 2))
    (module,) = run.strategy.parts
    assert torch.equal(module.variates, torch.ones(2, 2)) and run.cluster.weights.isfinite().all()  # type: ignore[attr-defined]


def test_scaffold_refuses_other_optimizers() -> None:
    for spec in (OptimSpec("sgd", maximize=True), OptimSpec("muon", rest="sgd")):
        with pytest.raises(TypeError, match="the inner optimizer must be plain SGD, got OptimSpec"):
            ScaffoldStrategy(inner_optim=spec)


# As FedAvg ------------------------------------------------------------------------------------------------------------

ADAMW = OptimSpec("adamw", lr=0.1)
FEDAVG: list[tuple[Strategy, dict[str, Any]]] = [
    *(
        (FedProxStrategy(inner_optim=ADAMW, H=2, mu=0.0, average=one), {"average": one})
        for one in ("median", clip(0.5), krum(0))
    ),
    (FedOptStrategy(inner_optim=SGD, H=2, outer_optim="sgd"), {"inner_optim": SGD}),
    *(
        (FedNovaStrategy(inner_optim=ADAMW, H=H), {"H": H, "average": mean("examples")})
        for H in (2, PostLocal(3, then=2))
    ),
]


@pytest.mark.parametrize(("strategy", "options"), FEDAVG, ids=lambda x: type(x).__name__)
def test_without_what_is_its_own_it_is_fedavg(strategy: Strategy, options: dict[str, Any]) -> None:
    plain = after(FedAvgStrategy(**{"inner_optim": ADAMW, "H": 2, **options}))
    torch.testing.assert_close(after(strategy), plain, rtol=1e-5, atol=1e-6)


def test_the_inner_optimizer_of_fedopt_begins_every_round_afresh() -> None:
    # The server is plain SGD, which keeps nothing either.
    model, gradients = Parameters((5, 3)), normal(6, 3, 15)
    for spec in (OptimSpec("sgd", lr=0.5, momentum=0.9), OptimSpec("adafactor", lr=0.1)):
        ours = FedOptStrategy(inner_optim=spec, H=3, outer_optim="sgd")
        whole, first = driven(ours, model, gradients).cluster, driven(ours, model, gradients[:3]).cluster
        between = Parameters((5, 3))
        nn.utils.vector_to_parameters(first.weights[0], between.parameters())
        torch.testing.assert_close(whole.weights, driven(ours, between, gradients[3:]).cluster.weights)
        diloco = driven(
            DiLoCoStrategy(inner_optim=spec, outer_optim=OptimSpec("sgd", lr=1.0), H=3), model, gradients
        ).cluster
        assert not torch.allclose(whole.weights, diloco.weights)
    momentum, spelled = (
        after(FedOptStrategy(inner_optim=SGD, H=2, outer_optim=o))
        for o in ("momentum", OptimSpec("sgd", lr=1.0, momentum=0.9))
    )
    torch.testing.assert_close(momentum, spelled)  # FedAvgM


class Constant(nn.Module):
    """The loss x · w, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Any) -> Tensor:
        return (batch[0] * self.w).sum(1).mean()


def test_a_round_of_fednova_by_hand() -> None:
    # Client 0 has two batches of gradient 1, client 1 four of gradient −2. One epoch is τ = (2, 4) steps: moves −2 and
    # 8, normalized −1 and 2. Equal weights: mean τ 3, mean move of a step 1/2. By examples, 1 : 2: mean τ 10/3, mean
    # move of a step 1.
    def own(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        return TensorDataset(torch.full((8, 1), 1.0) if rank == 0 else torch.full((16, 1), -2.0))

    plain, participation = OptimSpec("sgd", lr=1.0), Sample(2, of=2, epochs=1, rounds=4)
    for strategy, expected in (
        (FedNovaStrategy(inner_optim=plain, H=4, average="mean"), 1.5),
        (FedNovaStrategy(inner_optim=plain, H=4), 10 / 3),
        (FedAvgStrategy(inner_optim=plain, H=4), 3.0),
    ):
        trainer, options = Trainer(Constant(), own), {"num_nodes": 2, "batch_size": 4, "max_steps": 4}
        trainer.fit(strategy=strategy, participation=participation, progress=False, **options)
        assert trainer.strategy is not None
        assert float(trainer.strategy.model_weights()[0]) == pytest.approx(expected)


# Populations, and nodes that leave and join ---------------------------------------------------------------------------


def test_scaffolds_control_variates_of_a_population_are_the_paper_s() -> None:
    """Linear regression: 3 of 7 clients a round, who take steps with all of their data; N and n as in option II."""
    x, y = normal(7, 6, 4, seed=1, dtype=DOUBLE), normal(7, 6, seed=2, dtype=DOUBLE)
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False, dtype=DOUBLE)
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
    np.testing.assert_allclose(trainer.strategy.model_weights().numpy(), w, rtol=1e-10)
    rounds = [(2 * r, name) for r in range(1, 13) for name in ("weights", "control variates")]
    pulls = [(2 * r + 1, "pull" + name) for r in range(12) for name in ("", " of control variates")[: 1 + (r > 0)]]
    assert sorted((event.step, event.label) for event in trainer.ledger) == sorted([*rounds, *pulls])
    assert {event.payload_bytes for event in trainer.ledger} == {8 * 4}
    module: Any = trainer.strategy.parts[0]
    np.testing.assert_allclose(module.variate.numpy(), c, rtol=1e-9)
    np.testing.assert_allclose(module.variates.numpy(), c_k[list(cohort)], rtol=1e-9)


class Quadratic(nn.Module):
    """The loss a / 2 · (w − x)² of a batch (x, a)."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(3))

    def forward(self, batch: list[Tensor]) -> Tensor:
        x, a = batch
        return (a * (self.w - x) ** 2).sum(1).mean() / 2


X, A = normal(4, 3, seed=3), normal(4, 3, seed=4).abs() + 0.2
ODD = Schedule({33: [0, 1], 42: [0, 3], 58: [0, 1, 2, 3]})  # in the midst of rounds


@pytest.mark.parametrize(
    ("strategy", "plan", "steps"),
    [
        (scaffold := ScaffoldStrategy(inner_optim=OptimSpec("sgd", lr=0.3), H=5), ODD, 250),
        pytest.param(scaffold, Schedule({50: [0], 60: [1, 2], 70: [0, 1, 2, 3]}), 250, marks=pytest.mark.slow),
        pytest.param(scaffold, Dropout(0.3), 100, marks=pytest.mark.slow),
        (feddyn := FedDynStrategy(inner_optim=OptimSpec("sgd", lr=0.3), H=10, alpha=0.5), ODD, 300),
        (feddyn, Sample(2, of=4), 200),
        (FedDynStrategy(inner_optim=OptimSpec("sgd", lr=0.1), H=5), Dropout(0.3), 40),
    ],
    ids=lambda x: type(x).__name__,
)
def test_it_comes_to_the_minimum_of_all_clients_for_its_shared_state_is_their_mean(
    strategy: Any, plan: Any, steps: int
) -> None:
    """Where FedAvg comes to another point. Copies of a peer's control variate would stay in SCAFFOLD's c."""
    checked, kept = [], torch.zeros(4, 3)
    names = ("variates", "variate") if isinstance(strategy, ScaffoldStrategy) else ("corrections", "correction")

    def check(run: Any) -> None:
        nodes = run.cluster.collectives.ledger.attendance[-1].nodes if isinstance(plan, Sample) else run.cluster.active
        if run.done % 10 == 0 and (isinstance(plan, Sample) or len(nodes) == 4):  # after a round
            own, shared = (getattr(run.strategy.parts[0], name) for name in names)
            kept[list(nodes)] = own[:, :3]
            torch.testing.assert_close(kept.mean(0), shared[:3], rtol=1e-4, atol=1e-5)
            checked.append(run.done)

    trainer = Trainer(Quadratic(), lambda k, n, train: TensorDataset(X[k].expand(8, 3), A[k].expand(8, 3)))
    options: Any = {"num_nodes": 2 if isinstance(plan, Sample) else 4, "batch_size": 8, "max_steps": steps}
    trainer.fit(strategy=strategy, participation=plan, callbacks=[check], progress=False, **options)
    assert trainer.strategy is not None
    weights = trainer.strategy.model_weights()[:3]
    assert weights.abs().max() < 3 and checked
    if isinstance(plan, Schedule):
        torch.testing.assert_close(weights, (A * X).sum(0) / A.sum(0), rtol=1e-3, atol=1e-4)
    joins = [event for event in trainer.ledger if event.label == "control variates" and event.moment == "start"]
    assert all(event.payload_bytes == 4 * 3 for event in joins)
    assert bool(joins) == isinstance(strategy, ScaffoldStrategy)


# FedBN ----------------------------------------------------------------------------------------------------------------


def test_norms_stay_and_all_else_is_averaged() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2), nn.LayerNorm(2))
    gradients = normal(4, 3, size(model))
    ours, plain = (driven(cls(inner_optim=SGD, H=2), model, gradients) for cls in (FedBNStrategy, FedAvgStrategy))
    views, averaged = (run.cluster.replicas.views(run.cluster.weights) for run in (ours, plain))
    given = ours.cluster.replicas.views(gradients.sum(0))
    for name, rows in views.items():
        alone = dict(model.named_parameters())[name].detach() - 0.5 * given[name]
        torch.testing.assert_close(rows, alone if name.startswith(("1.", "3.")) else averaged[name])
    # 3 · 4 + 4 + 4 · 2 + 2 = 26 entries of 4 bytes.
    assert [(e.step, e.payload_bytes) for e in ours.ledger] == [(2, 104), (4, 104)]
    model = MLP(hidden=(4,), seed=0)
    with pytest.raises(ValueError, match="no normalization layer"):
        driven(FedBNStrategy(inner_optim=SGD), model, normal(1, 2, size(model)))


def test_a_warm_up_leaves_norms_and_statistics_with_their_clients() -> None:
    # With plain SGD the mean of the gradients moves weights as the mean of the weights does after every step.
    x = normal(5, 12, 3) * torch.arange(1.0, 6)[:, None, None]
    clusters = []
    for H in (1, PostLocal(6, 1)):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
        trainer = Trainer(
            model,
            lambda client, n, train: TensorDataset(x[client], torch.arange(12) % 2),
            loss_fn=nn.functional.cross_entropy,
        )
        options: Any = {"num_nodes": 2, "participation": Sample(2, of=5), "max_steps": 9, "batch_size": 6}
        trainer.fit(strategy=FedBNStrategy(inner_optim=OptimSpec("sgd", lr=0.1), H=H), progress=False, **options)
        assert trainer.strategy is not None
        clusters.append(trainer.strategy.cluster)
        labels = {event.label for event in trainer.ledger if event.step <= 6}
        assert labels == {"pull", "weights" if H == 1 else "gradients"}
    plain, warm = clusters
    torch.testing.assert_close(warm.weights, plain.weights)
    assert (plain.weights[0] - plain.weights[1]).abs().max() > 1e-3
    for name, rows in plain.replicas.buffers.items():
        torch.testing.assert_close(warm.replicas.buffers[name], rows)
