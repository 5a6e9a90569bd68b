"""FedNova: by hand where clients take unequal numbers of steps, and FedAvg where they do not."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driven import Parameters, driven, normal
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vsim import Sample, Trainer
from vsim.strategy import FedAvgStrategy, FedNovaStrategy, OptimSpec, PostLocal, Strategy, mean

PLAIN = OptimSpec("sgd", lr=1.0)


class Constant(nn.Module):
    """The loss x · w, whose gradient is x."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, batch: Any) -> Tensor:
        return (batch[0] * self.w).sum(1).mean()


def own(rank: int, num_nodes: int, train: bool) -> TensorDataset:
    """Client 0 has two batches of gradient 1, client 1 four of gradient −2."""
    return TensorDataset(torch.full((8, 1), 1.0) if rank == 0 else torch.full((16, 1), -2.0))


def round_of(strategy: Strategy) -> float:
    options: dict[str, Any] = {"num_nodes": 2, "batch_size": 4, "max_steps": 4, "progress": False}
    trainer = Trainer(Constant(), own)
    trainer.fit(strategy=strategy, participation=Sample(2, of=2, epochs=1, rounds=4), **options)
    assert trainer.strategy is not None
    return float(trainer.strategy.global_weights()[0])


def test_a_round_by_hand() -> None:
    # One epoch is τ = (2, 4) steps: moves −2 and 8, normalized −1 and 2.
    # Equal weights: mean τ 3, mean move of a step 1/2. By examples, 1 : 2: mean τ 10/3, mean move of a step 1.
    assert round_of(FedNovaStrategy(PLAIN, H=4, average="mean")) == pytest.approx(1.5)
    assert round_of(FedNovaStrategy(PLAIN, H=4)) == pytest.approx(10 / 3)
    assert round_of(FedAvgStrategy(PLAIN, H=4)) == pytest.approx(3.0)


@pytest.mark.parametrize("H", [2, PostLocal(3, then=2)], ids=str)
def test_with_equal_steps_it_is_fedavg(H: Any) -> None:
    model, gradients = Parameters((3, 2), (4,)), normal(9, 3, 10)
    adamw = OptimSpec("adamw", lr=0.1)
    ours, plain = (
        driven(strategy, model, gradients).cluster.weights
        for strategy in (FedNovaStrategy(adamw, H=H), FedAvgStrategy(adamw, H=H, average=mean("examples")))
    )
    torch.testing.assert_close(ours, plain, rtol=1e-5, atol=1e-6)
