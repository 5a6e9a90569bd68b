"""Dion by hand, as one node would have it with the mean gradient, and as one node has it alone."""

from __future__ import annotations

import math

import pytest
import torch
from reference_cluster import small_gpt
from strategies_by_hand import Driven, Parameters, normal, same_apart, started
from torch import Tensor, nn

from vsim.strategy import DionStrategy, OptimSpec

SGD = OptimSpec("sgd")


def dion(x: Tensor, momentum: Tensor, q: Tensor, grad: Tensor, lr: float, decay: float = 0.0) -> tuple[Tensor, ...]:
    """A step of one matrix on one node with μ = 0.95: the paper's algorithm 1."""
    momentum = momentum + grad
    p = torch.linalg.qr(momentum @ q).Q
    r = momentum.T @ p
    momentum = momentum - ((1 - 0.95) * p) @ r.T
    q = r / r.norm(dim=0)
    step = math.sqrt(x.shape[0] / x.shape[1]) * (p @ q.T)
    return (x * (1 - lr * decay) if decay else x).add(step, alpha=-lr), momentum, q


def matrices(run: Driven) -> dict[str, Tensor]:
    """The momentum of the nodes, stacked."""
    momentum: dict[str, Tensor] = vars(run.strategy)["momentum"]
    return momentum


@pytest.mark.parametrize(("dtype", "rtol"), [(torch.float32, 1e-5), (torch.float64, 1e-12)])
def test_it_is_uncompressed_dion_of_the_mean_gradient(dtype: torch.dtype, rtol: float) -> None:
    # Standing, lying and folded matrices, and one that rank 1 makes no smaller. The nodes' gradients differ much.
    model = Parameters((12, 5), (7,), (4, 9), (4, 3, 2, 2), (2, 2), dtype=dtype)
    gradients = normal(12, 4, 155, dtype=dtype) + 5 * normal(1, 4, 155, seed=1, dtype=dtype)
    adamw = OptimSpec("adamw", lr=0.03)
    run = started(
        DionStrategy(inner_optim=adamw, rank_fraction=0.3, weight_decay=0.1, lr=0.1, only=["p0", "p[234]"]), model, 4
    )
    matrix = {name: p.detach().clone().flatten(1) for name, p in model.named_parameters() if name != "p1"}
    momentum, q = {name: torch.zeros_like(x) for name, x in matrix.items()}, dict(vars(run.strategy)["basis"])
    assert [tuple(basis.shape) for basis in q.values()] == [(5, 2), (9, 2), (12, 2), (2, 1)]  # ⌈0.3 · min⌉
    vector = model.p1.detach().clone().requires_grad_()
    plain = torch.optim.AdamW([vector], lr=0.03)
    for given in gradients:
        rows = run.step(given)
        grads = dict(zip(["p0", "p1", "p2", "p3", "p4"], given.mean(0).split([60, 7, 36, 48, 4]), strict=True))
        for name, x in matrix.items():
            matrix[name], momentum[name], q[name] = dion(
                x, momentum[name], q[name], grads[name].view_as(x), lr=0.1, decay=0.1
            )
        vector.grad = grads["p1"]
        plain.step()
        expected = torch.cat([{**matrix, "p1": vector.detach()}[name].flatten() for name in grads])
        torch.testing.assert_close(rows, expected.expand_as(rows), rtol=rtol, atol=rtol)
    for name, mean in momentum.items():
        torch.testing.assert_close(matrices(run)[name].mean(0), mean, rtol=10 * rtol, atol=10 * rtol)
    sent = [("gradients", 7 + 4), ("P", 2 * (12 + 4 + 4)), ("R", 2 * (5 + 9 + 12))]
    assert [(e.label, e.payload_bytes) for e in run.ledger] == [(label, n * dtype.itemsize) for label, n in sent] * 12


def test_one_node_is_plain_torch() -> None:
    model, gradients = Parameters((8, 6), (5,), dtype=torch.float32), normal(6, 1, 53)
    run = started(DionStrategy(inner_optim=SGD, weight_decay=0, lr=0.1), model, 1, deterministic=True)
    x, vector = (p.detach().clone() for p in model.parameters())
    momentum, q = torch.zeros_like(x), vars(run.strategy)["basis"]["p0"].clone()
    for given in gradients:
        run.step(given)
        x, momentum, q = dion(x, momentum, q, given[0, :48].view(8, 6), 0.1)
        vector.add_(given[0, 48:], alpha=-0.1)
        torch.testing.assert_close(run.cluster.weights[0], torch.cat([x.flatten(), vector]))


def test_what_was_stepped_by_leaves_the_momentum_of_every_node() -> None:
    # Of g_k what lies in P decays to μ P Pᵀ g_k, however far the nodes are apart.
    gradients = normal(1, 3, 30)
    run = started(DionStrategy(rank_fraction=0.4, mu=0.25), Parameters((5, 6)), 3)
    each = gradients[0].view(3, 5, 6)
    p = torch.linalg.qr(each.mean(0) @ vars(run.strategy)["basis"]["p0"]).Q
    run.step(gradients[0])
    torch.testing.assert_close(matrices(run)["p0"], each - 0.75 * p @ p.T @ each)


def test_nodes_apart_are_the_nodes_together_also_with_rank_1() -> None:
    # Then products are of a matrix and a vector.
    for rank_fraction in (0.25, 0.4):
        same_apart(DionStrategy(rank_fraction=rank_fraction), Parameters((6, 5), (4,), (4, 9)), normal(6, 3, 70))


def test_only_hidden_matrices_are_of_low_rank() -> None:
    run = started(DionStrategy(), small_gpt(), 2)
    hidden = ("attention_in", "attention_out", "mlp_in", "mlp_out")
    assert set(matrices(run)) == {f"blocks.{i}.{name}.weight" for i in range(2) for name in hidden}
    with pytest.raises(ValueError, match=r"no hidden matrix, .*only="):
        started(DionStrategy(), nn.Linear(3, 2), 2)
    with pytest.raises(ValueError, match=r"only=\['p\*'\] has vectors, \['p1'\]"):
        started(DionStrategy(only="p*"), Parameters((3, 3), (3,)), 2)
