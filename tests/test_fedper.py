"""FedPer against a population by hand: shared parameters follow FedAvg, personal ones stay with a client."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from driven import Parameters, driven, normal, started
from torch import nn
from torch.utils.data import TensorDataset

from vsim import Sample, Trainer
from vsim.strategy import AloneStrategy, FedAvgStrategy, FedPerStrategy, mean


@pytest.mark.parametrize("options", [{}, {"average": "median"}, {"average": mean("examples")}])
@pytest.mark.parametrize("personal", ["p1", ["p0", "p2"], None])
def test_what_is_shared_is_averaged_and_what_is_not_is_alone(personal: Any, options: dict[str, Any]) -> None:
    # Gradients are given, so that no parameter depends on another.
    model, gradients = Parameters((5, 3), (4,), (2, 3)), normal(8, 3, 25)
    ours = driven(FedPerStrategy("adamw", 2, personal, **options), model, gradients).cluster
    average = driven(FedAvgStrategy("adamw", H=2, **options), model, gradients).cluster
    alone = driven(AloneStrategy(optim_spec="adamw"), model, gradients).cluster
    for name, rows in ours.replicas.views(ours.weights).items():
        like = alone if name in (personal or ["p2"]) else average
        assert torch.equal(rows, like.replicas.views(like.weights)[name]), name


def test_the_heads_of_a_population_are_their_clients_own() -> None:
    """Linear regression with a bias for each of 7 clients, 3 of which take part in a round with all of their data."""
    x, y = normal(7, 6, 4, seed=1, dtype=torch.float64), normal(7, 6, seed=2, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Linear(4, 1, dtype=torch.float64)
    trainer = Trainer(
        model,
        lambda client, num_clients, train: TensorDataset(x[client], y[client, :, None]),
        loss_fn=nn.functional.mse_loss,
    )
    strategy = FedPerStrategy("sgd", 2, "bias", lr=0.1)
    options: dict[str, Any] = {"num_nodes": 3, "participation": Sample(3, of=7), "max_steps": 24, "batch_size": 6}
    trainer.fit(strategy=strategy, progress=False, **options)
    w, bias = model.weight.detach().numpy()[0].copy(), np.full(7, model.bias.item())
    for cohort in (segment.nodes for segment in trainer.ledger.attendance):
        own = {k: w.copy() for k in cohort}
        for k in cohort:
            for _ in range(2):
                error = 2 / 6 * (x[k].numpy() @ own[k] + bias[k] - y[k].numpy())
                own[k], bias[k] = own[k] - 0.1 * x[k].numpy().T @ error, bias[k] - 0.1 * error.sum()
        w = np.mean([*own.values()], 0)
    assert trainer.strategy is not None
    weights = trainer.strategy.cluster.weights.numpy()
    np.testing.assert_allclose(weights, [[*w, bias[k]] for k in cohort], rtol=1e-10)
    assert {(event.label, event.payload_bytes) for event in trainer.ledger} == {("pull", 32), ("weights", 32)}


def test_arguments_are_checked() -> None:
    for personal, message in (
        ("p9", "personal='p9' is no trainable"),
        ("p*", r"personal=\['p\*'\] are all parameters"),
    ):
        with pytest.raises(ValueError, match=message):
            started(FedPerStrategy(personal=personal), Parameters((2,), (3,)), 2)
    for odd in ([], 3, [3]):
        with pytest.raises(TypeError, match="personal must be a name or names of parameters, got"):
            FedPerStrategy(personal=odd)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="H must be"):
        FedPerStrategy(H=0)
