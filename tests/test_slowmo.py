"""SlowMo against its derivation by hand, and the algorithms that some settings make of it."""

from __future__ import annotations

import pytest
import torch
from driven import Parameters, driven, normal
from torch import nn
from torch.optim.lr_scheduler import StepLR

from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec, SlowMoStrategy

SGD = OptimSpec("sgd", lr=0.5)
HALVES = {"lr_scheduler": StepLR, "lr_scheduler_kwargs": {"step_size": 1, "gamma": 0.5}}


def one_weight() -> Parameters:
    """A weight that is 0 at first."""
    model = Parameters((1,))
    nn.init.zeros_(model.p0)
    return model


def test_two_rounds_by_hand() -> None:
    # Gradients 1 and 3, inner lr 0.5, H = 1, α = β = 0.5. Round 1: θ = −0.5, −1.5, so φ − mean = 1, u = 1 / 0.5 = 2,
    # φ = −0.5 · 0.5 · 2 = −0.5. Round 2 at lr 0.5: φ − mean = 1, u = 0.5 · 2 + 2 = 3, φ = −0.5 − 0.5 · 0.5 · 3 = −1.25.
    # At lr 0.25 instead: φ − mean = 0.5, u = 1 + 0.5 / 0.25 = 3 as well, φ = −0.5 − 0.5 · 0.25 · 3 = −0.875.
    gradients = torch.tensor([[1.0], [3.0]]).expand(2, 2, 1)
    strategies = [SlowMoStrategy(SGD, H=1, alpha=0.5, beta=0.5, **more) for more in ({}, HALVES)]
    for strategy, after in zip(strategies, (-1.25, -0.875), strict=True):
        run = driven(strategy, one_weight(), gradients)
        assert run.cluster.weights.tolist() == [[after], [after]] and run.strategy.global_weights().item() == after


def test_a_learning_rate_of_zero_moves_nothing() -> None:
    # Warm-up over 2 steps: lr 0, then 0.25. Step 1 leaves φ = u = 0; in step 2 φ − mean = 0.5 = lr · u, and φ = −0.5.
    gradients = torch.tensor([[1.0], [3.0]]).expand(2, 2, 1)
    run = driven(SlowMoStrategy(SGD, H=1, warmup_steps=2), one_weight(), gradients)
    assert run.cluster.weights.tolist() == [[-0.5], [-0.5]]


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_without_momentum_it_is_fedavg(num_nodes: int) -> None:
    model, gradients = Parameters((5, 3)), normal(8, num_nodes, 15)
    slow = driven(SlowMoStrategy(SGD, H=2, alpha=1.0, beta=0.0), model, gradients)
    torch.testing.assert_close(slow.cluster.weights, driven(FedAvgStrategy(SGD, H=2), model, gradients).cluster.weights)


def test_at_a_constant_learning_rate_it_is_diloco_with_plain_momentum() -> None:
    # lr·u ← β lr·u + (φ − mean): the buffer of an outer SGD, whose learning rate is α.
    model, gradients = Parameters((5, 3), dtype=torch.float64), normal(12, 3, 15, dtype=torch.float64)
    slow = driven(SlowMoStrategy(SGD, H=3, alpha=0.8, beta=0.6), model, gradients)
    outer = driven(DiLoCoStrategy(SGD, OptimSpec("sgd", lr=0.8, momentum=0.6), 3), model, gradients)
    torch.testing.assert_close(slow.cluster.weights, outer.cluster.weights)
