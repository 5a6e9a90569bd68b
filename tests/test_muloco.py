"""MuLoCo by hand, and as DiLoCo with another optimizer inside."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from resumed import fit, trainer_of
from separate import small_gpt, small_mlp, tokens, vectors
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vsim import Trainer
from vsim.cluster.optimizers import torch_optimizers
from vsim.strategy import DiLoCoStrategy, MuLoCoStrategy, OptimSpec, TopK, compress
from vsim.strategy.muloco import MuLoCoCommunicator

OUTER = OptimSpec("sgd", lr=0.8, momentum=0.9, nesterov=True)
PLAIN = OptimSpec("muon", adjust_lr_fn="match_rms_adamw", weight_decay=0.0, rest=OptimSpec("adamw", weight_decay=0.0))


def weights(trainer: Trainer) -> Tensor:
    assert trainer.strategy is not None
    return trainer.strategy.cluster.weights


class Constant(nn.Module):
    """Its gradient is always diag(3, 3) for the matrix and (2, −2) for the vector."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = nn.Parameter(torch.zeros(2, 2))
        self.vector = nn.Parameter(torch.zeros(2))

    def forward(self, batch: list[Tensor]) -> Tensor:
        slopes = torch.tensor([2.0, -2.0])
        return 3 * self.matrix.trace() + (slopes * self.vector).sum() + 0 * batch[0].mean()


@pytest.mark.parametrize(("num_nodes", "lr", "momentum"), [(1, 0.7, 0.6), (2, 0.8, 0.9)])
def test_two_rounds_by_hand(num_nodes: int, lr: float, momentum: float) -> None:
    # Muon. A constant gradient has momentum in its own direction, so that every step is along the factor of diag(1, 1),
    # which is diag(s, s): s = 1/√2 after division by the norm, then five times s ← a·s + b·s³ + c·s⁵. The step is
    # 0.01 · 0.2·√2 · s. AdamW steps by 0.01 · sign. After H = 3 steps: matrix −Δ = −3 · 0.01 · 0.2·√2 · s on the
    # diagonal, vector −Δ = −0.03, +0.03. Outer momentum: b₁ = Δ, the move lr·(Δ + μ·b₁); b₂ = μ·Δ + Δ, the move
    # lr·(Δ + μ·b₂): together lr·Δ·(2 + 2μ + μ²).
    s = 1 / math.sqrt(2)
    for _ in range(5):
        s = 3.4445 * s - 4.7750 * s**3 + 2.0315 * s**5
    total = lr * (2 + 2 * momentum + momentum**2)
    trainer = Trainer(Constant(), TensorDataset(torch.zeros(12, 1)))
    strategy = MuLoCoStrategy(H=3, inner_optim=PLAIN, lr=0.01)
    trainer.fit(strategy=strategy, num_nodes=num_nodes, max_steps=6, batch_size=2, progress=False)
    matrix, vector = weights(trainer)[0].split([4, 2])
    moved = -total * 0.03 * 0.2 * math.sqrt(2) * s
    torch.testing.assert_close(matrix.view(2, 2), torch.diag(torch.full((2,), moved)), rtol=0.03, atol=1e-4)  # bfloat16
    torch.testing.assert_close(vector, total * 0.03 * torch.tensor([-1.0, 1.0]), rtol=1e-4, atol=0)


@pytest.mark.parametrize("compressor", [None, TopK(0.1)], ids=["as it is", "top-k"])
@pytest.mark.parametrize("inner", [OptimSpec("sgd", lr=0.1), OptimSpec("muon", lr=0.02, rest="sgd")], ids=repr)
def test_it_is_diloco_with_that_optimizer_inside(inner: OptimSpec, compressor: Any) -> None:
    average = "mean" if compressor is None else compress(compressor, error_feedback=0.9)
    ours, theirs = (
        fit(strategy, trainer_of(small_mlp, vectors), max_steps=8)
        for strategy in (
            MuLoCoStrategy(H=3, inner_optim=inner, average=average),
            DiLoCoStrategy(H=3, inner_optim=inner, outer_optim=OUTER, average=average),
        )
    )
    assert torch.equal(weights(ours), weights(theirs))


def test_its_optimizers() -> None:
    trainer = fit(MuLoCoStrategy(lr=5e-3), trainer_of(small_gpt, tokens), max_steps=4)
    assert trainer.strategy is not None
    muon, adamw = torch_optimizers(trainer.strategy.optim)
    assert isinstance(muon, torch.optim.Muon) and isinstance(adamw, torch.optim.AdamW)
    assert muon.param_groups[0]["lr"] == adamw.param_groups[0]["lr"] == 5e-3
    assert muon.param_groups[0]["adjust_lr_fn"] == "match_rms_adamw" and adamw.param_groups[0]["betas"] == (0.9, 0.95)


def test_an_outer_rate_keeps_the_momentum() -> None:
    (outer,) = MuLoCoStrategy(outer_lr=0.5).communication_modules
    assert isinstance(outer, MuLoCoCommunicator)
    assert [spec.kwargs for spec in (outer.outer_optim_spec, outer.spec_of_one_node)] == [
        {"lr": 0.5, "momentum": 0.9, "nesterov": True},
        {"lr": 0.5, "momentum": 0.6, "nesterov": True},
    ]
