"""FedProx against its derivation by hand, and against FedAvg, which it is without the term."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from driven import Parameters, driven, normal, started
from torch import nn

from vsim.strategy import FedAvgStrategy, FedProxStrategy, OptimSpec, clip, krum, mean

SGD = OptimSpec("sgd", lr=1.0)


def test_a_round_by_hand() -> None:
    # Loss x·w, μ = 0.01, lr 1, φ = 4. Client 0, mean x 5 then 2: w = −1, then −1 − (2 + 0.01 · (−1 − 4)) = −2.95, so it
    # has come 6.95. Client 1, mean x 9, then nothing more: its second gradient is what the term takes back, 0.01 · 9.
    # It has come 9. Of 3 and 2 examples: 4 − (3 · 6.95 + 2 · 9) / 5 = −3.77.
    model = Parameters((1,))
    nn.init.constant_(model.p0, 4.0)
    run = started(FedProxStrategy(SGD, H=2, mu=0.01, average=mean("examples")), model, 2)
    run.cluster.shard_sizes = torch.tensor([3.0, 2.0])
    for gradients in ([[5.0], [9.0]], [[2.0], [0.09]]):
        run.step(torch.tensor(gradients))
    torch.testing.assert_close(run.cluster.weights, torch.full((2, 1), -3.77))


@pytest.mark.parametrize("options", [{}, {"average": "median"}, {"average": clip(0.5)}, {"average": krum(0)}])
def test_without_the_term_it_is_fedavg(options: dict[str, Any]) -> None:
    model, gradients = Parameters((5, 3)), normal(8, 3, 15)
    prox = driven(FedProxStrategy("adamw", H=2, mu=0.0, **options), model, gradients)
    average = driven(FedAvgStrategy("adamw", H=2, **options), model, gradients)
    assert torch.equal(prox.cluster.weights, average.cluster.weights)


def test_the_term_pulls_towards_the_weights_of_the_round() -> None:
    # Without gradients of its own, lr 1 and μ = 1, a step goes all the way back to φ, which moves with every round.
    model, first = Parameters((4,)), normal(1, 3, 4)
    run = started(FedProxStrategy(SGD, H=3, mu=1.0), model, 3)
    for _ in range(2):
        before = run.cluster.weights.clone()
        assert not torch.equal(run.step(first[0]), before)
        torch.testing.assert_close(run.step(torch.zeros(3, 4)), before)
        run.step(first[0])


def test_arguments_are_checked() -> None:
    for name, value in (("H", 0), ("mu", -1), ("average", "size")):
        with pytest.raises(ValueError, match=name):
            FedProxStrategy(**{name: value})
