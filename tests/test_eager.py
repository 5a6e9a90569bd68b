"""Eager and delayed DiLoCo against the update rule written out for every node in NumPy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from driven import Parameters, driven, normal
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from vsim.strategy import DiLoCoStrategy, EagerDiLoCoStrategy, OptimSpec

INNER, OUTER = 0.1, OptimSpec("sgd", lr=0.5, momentum=0.9, nesterov=True)


def by_hand(start: NDArray[np.float64], gradients: NDArray[np.float64], H: int, eager: bool) -> NDArray[np.float64]:
    num_nodes = gradients.shape[1]
    theta = phi = np.stack([start] * num_nodes)
    old, arrived, buffer = np.zeros_like(phi), np.zeros_like(start), None
    for t, gradient in enumerate(gradients, start=1):
        theta = theta - INNER * gradient
        if t % H == 0:
            fresh = phi - theta
            own = arrived + ((fresh - old) / num_nodes if eager else 0 * fresh)
            old, arrived = fresh, fresh.mean(0)
            buffer = own if buffer is None else 0.9 * buffer + own
            phi = phi - 0.5 * (own + 0.9 * buffer)
            theta = phi
    return theta


@settings(max_examples=20)
@given(H=st.integers(1, 4), num_nodes=st.integers(1, 4), eager=st.booleans())
def test_every_round_has_the_update_rule(H: int, num_nodes: int, eager: bool) -> None:
    model, gradients = Parameters((3,), dtype=torch.float64), normal(9, num_nodes, 3, dtype=torch.float64)
    run = driven(EagerDiLoCoStrategy(OptimSpec("sgd", lr=INNER), outer_optim=OUTER, H=H, eager=eager), model, gradients)
    start = model.p0.detach().numpy()
    np.testing.assert_allclose(run.cluster.weights.numpy(), by_hand(start, gradients.numpy(), H, eager), rtol=1e-12)


@pytest.mark.parametrize(
    ("eager", "after_two", "after_four"),
    [(True, [[0.9], [0.7]], [[0.5], [0.3]]), (False, [[1.0], [1.0]], [[0.6], [0.6]])],
)
def test_two_rounds_by_hand(eager: bool, after_two: list[list[float]], after_four: list[list[float]]) -> None:
    # One weight, 1 at first; gradients 1 and 3, inner lr 0.1, H = 2, outer SGD lr 1, so d = 0.2 and 0.6 in each round,
    # whatever φ_k is. Eager: g_k(1) = d_k / 2 = 0.1 and 0.3. Then D(1) = 0.4 has arrived, and d_k has not changed:
    # g_k(2) = 0.4, so that 0.9 → 0.5 and 0.7 → 0.3. Delayed: g(1) = 0, g(2) = 0.4.
    model = Parameters((1,))
    torch.nn.init.ones_(model.p0)
    gradients = torch.tensor([[1.0], [3.0]]).expand(4, 2, 1)
    strategy = EagerDiLoCoStrategy(OptimSpec("sgd", lr=0.1), outer_optim=OptimSpec("sgd", lr=1.0), H=2, eager=eager)
    torch.testing.assert_close(driven(strategy, model, gradients[:2]).cluster.weights, torch.tensor(after_two))
    run = driven(strategy, model, gradients)
    torch.testing.assert_close(run.cluster.weights, torch.tensor(after_four))
    assert [(e.step, e.due) for e in run.ledger] == [(2, 4), (4, 6)]


@pytest.mark.parametrize("deterministic", [False, True])
def test_eager_with_one_node_is_diloco(deterministic: bool) -> None:
    model, gradients = Parameters((5, 3), (5,)), normal(9, 1, 20)
    eager, diloco = (
        driven(
            strategy(OptimSpec("sgd", lr=INNER), outer_optim=OUTER, H=3), model, gradients, deterministic=deterministic
        )
        for strategy in (EagerDiLoCoStrategy, DiLoCoStrategy)
    )
    # d(t−1) + (d(t) − d(t−1)) is rounded twice.
    torch.testing.assert_close(eager.cluster.weights, diloco.cluster.weights, rtol=1e-6, atol=1e-7)


def test_an_outer_optimizer_that_mixes_is_refused() -> None:
    with pytest.raises(ValueError, match="must be elementwise; Muon is not"):
        EagerDiLoCoStrategy(outer_optim="muon")
