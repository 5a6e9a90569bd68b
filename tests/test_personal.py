"""Personal models: FedRep and Ditto against a population by hand, and the models of clients after a run."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from driven import Parameters, driven, normal, started
from torch import nn
from torch.utils.data import TensorDataset

import vsim
from vsim import Sample, Trainer
from vsim.models import MLP
from vsim.strategy import AloneStrategy, DittoStrategy, FedAvgStrategy, FedRepStrategy, PostLocal

X, Y = normal(7, 6, 4, seed=1, dtype=torch.float64), normal(7, 6, seed=2, dtype=torch.float64)
COHORT: dict[str, Any] = {"num_nodes": 3, "participation": Sample(3, of=7), "batch_size": 6, "progress": False}


def clients(client: int, num_clients: int, train: bool) -> TensorDataset:
    return TensorDataset(X[client], Y[client, :, None])


def linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 1, dtype=torch.float64)


def gradient(k: int, w: Any, bias: float) -> tuple[Any, float]:
    """Return the gradient of client k's mean squared error, by hand."""
    error = 2 / 6 * (X[k].numpy() @ w + bias - Y[k].numpy())
    return X[k].numpy().T @ error, error.sum()


def trained(strategy: Any, **options: Any) -> Trainer:
    trainer = Trainer(linear(), clients, loss_fn=nn.functional.mse_loss)
    trainer.fit(strategy=strategy, **{**COHORT, "max_steps": 15, **options})
    return trainer


@pytest.mark.parametrize("head_steps", [None, 1, 3])
def test_fedrep_trains_heads_then_the_representation(head_steps: int | None) -> None:
    """Rounds of four steps, the last of which is cut off; the bias is the head."""
    trainer = trained(FedRepStrategy("sgd", 4, head_steps, "bias", lr=0.1))
    model = linear()
    w, bias = model.weight.detach().numpy()[0].copy(), np.full(7, model.bias.item())
    for segment in trainer.ledger.attendance:
        own = {k: w.copy() for k in segment.nodes}
        for step in range(min(segment.last, 15) - segment.first + 1):
            for k in own:
                of_w, of_bias = gradient(k, own[k], bias[k])
                if step < (head_steps or 2):
                    bias[k] -= 0.1 * of_bias
                else:
                    own[k] -= 0.1 * of_w
        w = np.mean([*own.values()], 0) if segment.last <= 15 else w
    weights = trainer.strategy.cluster.weights.numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(weights, [[*own[k], bias[k]] for k in segment.nodes], rtol=1e-10)


@pytest.mark.parametrize("options", [{}, {"personal_lr": 0.05}])
@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_ditto_ties_each_clients_model_to_the_global_one(lam: float, options: dict[str, float]) -> None:
    trainer = trained(DittoStrategy("sgd", 4, lam=lam, lr=0.1, **options))
    start = np.array([*linear().weight.detach().numpy()[0], linear().bias.item()])  # type: ignore[operator, union-attr]
    phi, v, eta = start.copy(), np.tile(start, (7, 1)), options.get("personal_lr", 0.1)
    for segment in trainer.ledger.attendance:
        own = {k: phi.copy() for k in segment.nodes}
        for _ in range(segment.first, min(segment.last, 15) + 1):
            for k in own:
                v[k] -= eta * (np.append(*gradient(k, v[k][:4], v[k][4])) + lam * (v[k] - phi))
                own[k] -= 0.1 * np.append(*gradient(k, own[k][:4], own[k][4]))
        phi = np.mean([*own.values()], 0)
    models = trainer.strategy.communication_modules[1].personal_models.numpy()  # type: ignore[union-attr]
    np.testing.assert_allclose(models, v[[*segment.nodes]], rtol=1e-10)


def test_dittos_global_model_is_fedavgs_and_its_own_one_without_a_tie_trains_alone() -> None:
    data, model = TensorDataset(normal(40, 5), torch.arange(40) % 3), MLP(5, (4,), 3, seed=0, dropout=0.2)
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 7, "batch_size": 4, "progress": False}

    def weights(strategy: Any, model: nn.Module = model) -> vsim.Trainer:
        trainer = Trainer(model, data)
        trainer.fit(strategy=strategy, **options)
        return trainer

    ditto, fedavg = (weights(cls(H=3, lr=0.1)) for cls in (DittoStrategy, FedAvgStrategy))
    assert torch.equal(ditto.strategy.cluster.weights, fedavg.strategy.cluster.weights)  # type: ignore[union-attr]
    assert list(ditto.ledger) == list(fedavg.ledger)
    plain = MLP(5, (4,), 3, seed=0)
    ditto, alone = (weights(s, plain) for s in (DittoStrategy("sgd", 3, lam=0, lr=0.1), AloneStrategy("sgd", lr=0.1)))
    models = ditto.strategy.communication_modules[1].personal_models  # type: ignore[union-attr]
    torch.testing.assert_close(models, alone.strategy.cluster.weights)  # type: ignore[union-attr]


def test_what_fedrep_does_not_train_stays_to_the_bit() -> None:
    model, gradients = Parameters((5, 3), (4,), (2, 3)), normal(10, 3, 25)
    run = started(FedRepStrategy("adamw", PostLocal(2, 4), 3, "p2"), model, 3)
    seen = [run.cluster.weights.clone(), *map(run.step, gradients)]
    changed = [
        torch.stack([a[:, own] != b[:, own] for own in (slice(0, 1), slice(19, 20))])
        for a, b in itertools.pairwise(seen)
    ]
    moved = [(bool(shared.any()), bool(head.any())) for shared, head in changed]
    assert moved[:2] == [(True, True)] * 2  # a warm-up trains both
    assert moved[2:] == [(False, True)] * 3 + [(True, False)] + [(False, True)] * 3 + [(True, False)]
    assert torch.equal(seen[6][:, :19], seen[6][:1, :19].expand(3, -1))


def test_arguments_are_checked() -> None:
    for odd, name in (
        ({"H": 1}, "H"),
        ({"H": 3, "head_steps": 3}, "head_steps"),
        ({"H": 3, "head_steps": 0}, "head_steps"),
    ):
        with pytest.raises(ValueError, match=f"{name} must be"):
            FedRepStrategy(**odd)  # type: ignore[arg-type]
    for name in ("lam", "personal_lr"):
        with pytest.raises(ValueError, match=f"{name} must be"):
            DittoStrategy(**{name: -1.0})  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="are all parameters"):
        driven(FedRepStrategy(personal="p*"), Parameters((2,), (3,)), normal(1, 2, 5))
