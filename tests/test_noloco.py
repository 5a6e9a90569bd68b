"""NoLoCo against the update rule written out for every node, its bytes node by node, and what pairs conserve."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from driven import Parameters, driven, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from vsim.strategy import DiLoCoStrategy, NoLoCoStrategy, OptimSpec

INNER = 0.1
SGD = OptimSpec("sgd", lr=INNER)


def partners(num_nodes: int, shared: torch.Generator) -> list[int]:
    """Return each node's partner in a round; itself if it has none."""
    order = torch.randperm(num_nodes, generator=shared).tolist()
    met = list(range(num_nodes))
    for one, other in zip(order[::2], order[1::2], strict=False):
        met[one], met[other] = other, one
    return met


def by_hand(start: Tensor, gradients: Tensor, H: int, alpha: float, beta: float, gamma: float) -> NDArray[np.float64]:
    shared = torch.Generator().manual_seed(5)  # that of a driven run
    nodes = range(gradients.shape[1])
    theta, phi = ([start.numpy().copy() for _ in nodes] for _ in range(2))
    m = [np.zeros_like(start) for _ in nodes]
    for t, gradient in enumerate(gradients.numpy(), start=1):
        theta = [theta[k] - INNER * gradient[k] for k in nodes]
        if t % H == 0:
            met = partners(len(nodes), shared)
            distance = [theta[k] - phi[k] for k in nodes]
            for k in nodes:
                m[k] = alpha * m[k] + beta * (distance[k] + distance[met[k]]) / 2
                m[k] = m[k] + gamma * ((phi[k] + phi[met[k]]) / 2 - phi[k])
            phi = [phi[k] + m[k] for k in nodes]
            theta = list(phi)
    return np.stack(theta)


@settings(max_examples=20)
@given(
    H=st.integers(1, 3), num_nodes=st.integers(1, 6), beta=st.floats(0.1, 1.0), gamma=st.none() | st.floats(0.0, 1.0)
)
def test_every_round_has_the_update_rule(H: int, num_nodes: int, beta: float, gamma: float | None) -> None:
    model, gradients = Parameters((3,), dtype=torch.float64), normal(8, num_nodes, 3, dtype=torch.float64)
    run = driven(NoLoCoStrategy(SGD, H=H, beta=beta, gamma=gamma), model, gradients)
    expected = by_hand(model.p0.detach(), gradients, H, 0.5, beta, beta if gamma is None else gamma)
    np.testing.assert_allclose(run.cluster.weights.numpy(), expected, rtol=1e-10, atol=1e-12)


def test_two_nodes_are_diloco_with_plain_momentum() -> None:
    # The pair is always the same, so that φ is too, and m the buffer of an outer SGD times its learning rate.
    model, gradients = Parameters((5, 3), dtype=torch.float64), normal(8, 2, 15, dtype=torch.float64)
    pair = driven(NoLoCoStrategy(SGD, H=2, alpha=0.5, beta=0.7), model, gradients)
    outer = driven(DiLoCoStrategy(SGD, OptimSpec("sgd", lr=0.7, momentum=0.5), 2), model, gradients)
    torch.testing.assert_close(pair.cluster.weights, outer.cluster.weights)


@pytest.mark.parametrize("num_nodes", [4, 5])
def test_gamma_pulls_nodes_together_and_leaves_their_mean(num_nodes: int) -> None:
    # Pairs share what they add, so that the mean moves by αm + βΔ whatever γ is.
    model, gradients = Parameters((20,)), normal(12, num_nodes, 20)
    drifting, pulled = (
        driven(NoLoCoStrategy(SGD, H=1, gamma=gamma), model, gradients).cluster.weights for gamma in (0, 0.7)
    )
    torch.testing.assert_close(drifting.mean(0), pulled.mean(0))
    assert pulled.std(0).mean() < 0.8 * drifting.std(0).mean()


@pytest.mark.parametrize("num_nodes", [1, 2, 5])
def test_pairs_pay_for_both_messages_and_wait_for_one(num_nodes: int) -> None:
    # The distances of a round are waited for; outer weights are due at the next, where those meet who sent them.
    run = driven(NoLoCoStrategy(SGD, H=2), Parameters((3, 2)), normal(4, num_nodes, 6))
    shared = torch.Generator().manual_seed(5)
    now, then, after = ({(k, j) for k, j in enumerate(partners(num_nodes, shared)) if k != j} for _ in range(3))
    sent = [(2, 2, now), (2, 4, then), (4, 4, then), (4, 6, after)] if num_nodes > 1 else []
    assert [(e.step, e.due, {*e.groups}) for e in run.ledger] == sent
    paid = [6 * 4 * sum(k in {src for src, _ in pairs} for _, _, pairs in sent) for k in range(num_nodes)]
    assert run.ledger.node_payload_bytes.tolist() == paid
