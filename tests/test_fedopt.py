"""FedOpt against its servers in NumPy, derivations by hand, and the algorithms that some settings make of it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from driven import Parameters, driven, normal, started
from numpy.typing import NDArray
from torch import nn
from torch.optim import Optimizer

from vsim.strategy import DiLoCoStrategy, FedAdagrad, FedAdam, FedAvgStrategy, FedOptStrategy, FedYogi, OptimSpec

SGD = OptimSpec("sgd", lr=0.5)
MOMENTUM = OptimSpec("sgd", lr=0.5, momentum=0.9)


def test_two_rounds_by_hand() -> None:
    # Gradients 1 and 3, inner lr 0.5, H = 1: Δ = 1 in both rounds. lr 1, β = (0.5, 0.5), τ = 2, so v begins with 4.
    # Round 1: m = 0.5, v = 2.5, φ = −0.5 / (√2.5 + 2). Round 2: m = 0.75, v = 1.75, φ −= 0.75 / (√1.75 + 2).
    model = Parameters((1,))
    nn.init.zeros_(model.p0)
    server = OptimSpec(FedAdam, lr=1.0, betas=(0.5, 0.5), tau=2.0)
    run = started(FedOptStrategy(SGD, H=1, outer_optim=server), model, 2)
    for after in (-0.5 / (2.5**0.5 + 2), -0.5 / (2.5**0.5 + 2) - 0.75 / (1.75**0.5 + 2)):
        run.step(torch.tensor([[1.0], [3.0]]))
        torch.testing.assert_close(run.cluster.weights, torch.full((2, 1), after))
        torch.testing.assert_close(run.strategy.global_weights(), torch.tensor([after]))


Values = NDArray[np.float64]


def adam(v: Values, d: Values) -> Values:
    return 0.99 * v + 0.01 * d**2


def yogi(v: Values, d: Values) -> Values:
    return v - 0.01 * d**2 * np.sign(v - d**2)


@pytest.mark.parametrize(
    ("cls", "moved", "beta"),
    [(FedAdam, adam, 0.9), (FedYogi, yogi, 0.9), (FedAdagrad, lambda v, d: v + d**2, 0.0)],
    ids=lambda x: getattr(x, "__name__", ""),
)
def test_servers_are_as_the_paper_writes_them(
    cls: type[Optimizer], moved: Callable[[Values, Values], Values], beta: float
) -> None:
    p = torch.nn.Parameter(normal(7, dtype=torch.float64))
    server, steps = cls([p], lr=0.1), 0.3 * normal(20, 7, seed=1, dtype=torch.float64)
    x, m, v = p.detach().numpy().copy(), np.zeros(7), np.full(7, 1e-6)
    for step in steps:
        p.grad = step
        server.step()
        delta = -step.numpy()  # the paper's
        m = beta * m + (1 - beta) * delta
        v = moved(v, delta)
        x = x + 0.1 * m / (np.sqrt(v) + 1e-3)
    np.testing.assert_allclose(p.detach().numpy(), x, rtol=1e-12)


@pytest.mark.parametrize("num_nodes", [1, 2, 3])
def test_with_a_plain_server_it_is_fedavg(num_nodes: int) -> None:
    model, gradients = Parameters((5, 3)), normal(8, num_nodes, 15)
    ours = driven(FedOptStrategy(SGD, H=2, outer_optim="sgd"), model, gradients)
    torch.testing.assert_close(ours.cluster.weights, driven(FedAvgStrategy(SGD, H=2), model, gradients).cluster.weights)


@pytest.mark.parametrize("spec", [MOMENTUM, OptimSpec("adamw"), OptimSpec("adafactor", lr=0.1)], ids=repr)
def test_every_round_is_that_of_a_run_which_begins_there(spec: OptimSpec) -> None:
    # The server is plain SGD, which keeps nothing either.
    model, gradients = Parameters((5, 3)), normal(6, 3, 15)
    ours = FedOptStrategy(spec, H=3, outer_optim="sgd")
    whole, first = driven(ours, model, gradients), driven(ours, model, gradients[:3])
    with torch.no_grad():
        model.p0.copy_(first.cluster.weights[0].view(5, 3))
    assert torch.equal(whole.cluster.weights, driven(ours, model, gradients[3:]).cluster.weights)
    diloco = driven(DiLoCoStrategy(spec, OptimSpec("sgd", lr=1.0), 3), Parameters((5, 3)), gradients)
    assert not torch.allclose(whole.cluster.weights, diloco.cluster.weights)


def test_tau_is_checked() -> None:
    with pytest.raises(ValueError, match="tau"):
        FedAdam([torch.zeros(1)], tau=0.0)
