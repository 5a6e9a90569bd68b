"""Where FedAvg and SCAFFOLD end on quadratics that differ between nodes, and the variance of averaged weights."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
from vsim.strategy import FedAvgStrategy, ScaffoldStrategy, mean

from .formulas import Array
from .quadratics import train
from .recursion import Quadratics
from .result import Row, Table

K, SIZE, H, LR = 4, 3, 5, 0.1
EXAMPLES = (1, 2, 3, 4)  # of each node, which weigh its weights under average="examples"
ALIKE, RATE = Quadratics(a=(1.0,) * K, b=(0.0,) * K, start=0.0), 0.2
VARIANCE = ALIKE.sigma**2 * RATE / (K * ALIKE.a[0] * (2 - RATE * ALIKE.a[0]))
INTERVALS = (1, 4, 16)  # H
TABLE = Table(
    title="Limits on quadratics",
    setting="*Fixed points*: f_k(w) = (w − b_k)ᵀ A_k (w − b_k) / 2 in three dimensions, A_k and b_k drawn for each of"
    " four nodes, SGD of rate η = .1, H = 5, no noise, 200 rounds. FedAvg ends at (Σ p_k (I − M_k))⁻¹ Σ p_k "
    "(I − M_k) b_k with M_k = (I − η A_k)^H, which is not the optimum (Σ p_k A_k)⁻¹ Σ p_k A_k b_k; SCAFFOLD "
    "ends there. Rows are the largest distance of an entry. *Variance*: four nodes with a = 1 and noise of "
    "variance σ² = 1, η = .2: at a sync the averaged weights of local SGD have variance σ² η / (K a (2 − η "
    "a)), whatever H is; measured over coordinates, in 20 groups.",
    source="Charles and Konečný 2021, surrogate losses of local updates on quadratics",
    url="https://arxiv.org/abs/2103.05032",
    rows={
        "FedAvg, from its fixed point": Row(0.0, within=1e-6),
        "FedAvg weighted by examples, from its fixed point": Row(0.0, within=1e-6),
        "SCAFFOLD, from the optimum": Row(0.0, within=1e-6),
        **{f"variance at syncs, H = {H}": Row(VARIANCE) for H in INTERVALS},
    },
    note="Both formulas are derived from the steps of SGD. The paper, of which only the abstract was available, treats "
    "such fixed points as minima of a surrogate loss.",
    digits=".3g",
    expected_is="derived",
)


class Form(nn.Module):
    """(w − b)ᵀ A (w − b) / 2."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(SIZE, dtype=torch.float64))

    def forward(self, batch: list[Tensor]) -> Tensor:
        A, b = (t[0] for t in batch)
        return (self.w - b) @ A @ (self.w - b) / 2


def forms() -> tuple[Array, Array]:
    """A (K, n, n), symmetric with eigenvalues from 0.5 to 5, and b (K, n)."""
    draw = np.random.default_rng(0)
    bases = np.linalg.qr(draw.normal(size=(K, SIZE, SIZE)))[0]
    return np.einsum("kij,kj,klj->kil", bases, draw.uniform(0.5, 5, (K, SIZE)), bases), draw.normal(size=(K, SIZE))


def fedavg_limit(A: Array, b: Array, p: Array) -> Array:
    """(Σ p_k (I − M_k))⁻¹ Σ p_k (I − M_k) b_k."""
    moved = [
        weight * (np.eye(SIZE) - np.linalg.matrix_power(np.eye(SIZE) - LR * a, H))
        for weight, a in zip(p, A, strict=True)
    ]
    return np.linalg.solve(sum(moved), sum(m @ own for m, own in zip(moved, b, strict=True)))


def end(strategy: Any, A: Array, b: Array, rounds: int) -> Array:
    """The weights after so many rounds."""

    def data(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        return TensorDataset(*(torch.tensor(np.stack([values[rank]] * EXAMPLES[rank])) for values in (A, b)))

    options: Any = {"max_steps": rounds * H, "batch_size": 1, "val_interval": None, "progress": False}
    model: Any = vsim.Trainer(Form(), data).fit(strategy=strategy, num_nodes=K, **options)
    return model.w.detach().numpy()


def measure(quick: bool) -> dict[str, float | list[float]]:
    A, b = forms()
    rounds, size = (100, 400) if quick else (200, 20_000)
    equal, by_examples = np.full(K, 1 / K), np.array(EXAMPLES) / sum(EXAMPLES)
    optimum = np.linalg.solve(A.sum(0), np.einsum("kij,kj->i", A, b))
    limits = [fedavg_limit(A, b, p) for p in (equal, by_examples)]
    assert all(abs(limit - optimum).max() > 0.01 for limit in limits)  # else the rows below would say little
    sgd: Any = {"inner_optim": "sgd", "lr": LR, "H": H}
    ends = [
        end(FedAvgStrategy(**sgd), A, b, rounds),
        end(FedAvgStrategy(**sgd, average=mean("examples")), A, b, rounds),
        end(ScaffoldStrategy(**sgd), A, b, rounds),
    ]
    distances = [float(abs(found - limit).max()) for found, limit in zip(ends, [*limits, optimum], strict=True)]
    found: dict[str, float | list[float]] = dict(zip(TABLE.rows, distances, strict=False))
    generator = torch.Generator().manual_seed(0)
    for interval in INTERVALS:
        noise = torch.randn(K, 48, size, generator=generator, dtype=torch.float64)
        weights = train(FedAvgStrategy(inner_optim="sgd", lr=RATE, H=interval), ALIKE, noise)[-1, 0]
        found[f"variance at syncs, H = {interval}"] = [float(group.var(ddof=1)) for group in np.split(weights, 20)]
    return found
