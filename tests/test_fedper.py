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
from vsim.strategy import AloneStrategy, FedAvgStrategy, FedPerStrategy, PostLocal, TopK, clip, compress, mean


@pytest.mark.parametrize("options", [{}, {"average": "median"}, {"average": mean("examples")}])
@pytest.mark.parametrize("personal", ["p1", ["p0", "p2"], None])
@pytest.mark.parametrize("H", [2, PostLocal(3, 2)], ids=str)
def test_what_is_shared_is_averaged_and_what_is_not_is_alone(personal: Any, options: Any, H: Any) -> None:
    # Gradients are given, so that no parameter depends on another.
    model, gradients = Parameters((5, 3), (4,), (2, 3)), normal(8, 3, 25)
    run = driven(FedPerStrategy("adamw", H=H, personal=personal, **options), model, gradients)
    fedavg = driven(FedAvgStrategy("adamw", H=H, **options), model, gradients)
    ours, average = run.cluster, fedavg.cluster
    own = {"p1": 4, "p0": 15 + 6, None: 6}[personal if isinstance(personal, str | None) else personal[0]]
    assert list(run.ledger) == [event._replace(payload_bytes=4 * (25 - own)) for event in fedavg.ledger]
    alone = driven(AloneStrategy(optim_spec="adamw"), model, gradients).cluster
    for name, rows in ours.replicas.views(ours.weights).items():
        like = alone if name in (personal or ["p2"]) else average
        assert torch.equal(rows, like.replicas.views(like.weights)[name]), name


@pytest.mark.parametrize("average", [clip(0.3), compress(TopK(0.2))], ids=str)
@pytest.mark.parametrize("H", [2, PostLocal(3, 2)], ids=str)
def test_an_average_sees_what_is_shared_alone(average: Any, H: Any) -> None:
    gradients = normal(8, 3, 25)
    ours = driven(
        FedPerStrategy("adamw", H=H, personal="p2", average=average), Parameters((5, 3), (4,), (2, 3)), gradients
    )
    shared = driven(FedAvgStrategy("adamw", H=H, average=average), Parameters((5, 3), (4,)), gradients[:, :, :19])
    assert torch.equal(ours.cluster.weights[:, :19], shared.cluster.weights)
    assert list(ours.ledger) == list(shared.ledger)


@pytest.mark.parametrize("warmup", [0, 5])
def test_the_heads_of_a_population_are_their_clients_own(warmup: int) -> None:
    """Linear regression with a bias for each of 7 clients, 3 of which take part in a round with all of their data.

    In a warm-up every step is a round, and the mean of the gradients moves weights as the mean of the weights does.
    """
    x, y = normal(7, 6, 4, seed=1, dtype=torch.float64), normal(7, 6, seed=2, dtype=torch.float64)
    torch.manual_seed(0)
    model = nn.Linear(4, 1, dtype=torch.float64)
    trainer = Trainer(
        model,
        lambda client, num_clients, train: TensorDataset(x[client], y[client, :, None]),
        loss_fn=nn.functional.mse_loss,
    )
    strategy = FedPerStrategy("sgd", H=PostLocal(warmup, 2) if warmup else 2, personal="bias", lr=0.1)
    options: dict[str, Any] = {
        "num_nodes": 3,
        "participation": Sample(3, of=7),
        "max_steps": 24 + warmup,
        "batch_size": 6,
    }
    trainer.fit(strategy=strategy, progress=False, **options)
    w, bias = model.weight.detach().numpy()[0].copy(), np.full(7, model.bias.item())
    for segment in trainer.ledger.attendance:
        cohort = segment.nodes
        own = {k: w.copy() for k in cohort}
        for k in cohort:
            for _ in range(segment.first, segment.last + 1):
                error = 2 / 6 * (x[k].numpy() @ own[k] + bias[k] - y[k].numpy())
                own[k], bias[k] = own[k] - 0.1 * x[k].numpy().T @ error, bias[k] - 0.1 * error.sum()
        w = np.mean([*own.values()], 0)
    assert trainer.strategy is not None
    weights = trainer.strategy.cluster.weights.numpy()
    np.testing.assert_allclose(weights, [[*w, bias[k]] for k in cohort], rtol=1e-10)
    labels = ["pull", "weights", *["gradients"][:warmup]]
    assert {(event.label, event.payload_bytes) for event in trainer.ledger} == {(label, 32) for label in labels}
    assert len(trainer.ledger.attendance) == 12 + warmup


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
