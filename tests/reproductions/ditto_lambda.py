"""The best λ of Ditto for the estimation of means, from vsim's personal models in a thousand draws."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset, TensorDataset

import vsim
from vsim.strategy import DittoStrategy

from .result import Row, Table

DRAWS, SIGMA, POINTS, TAU = 1000, 0.8, 30, 0.1
LAMBDAS = (0.5, 1.0, 2.0, 4.0)


class Case(NamedTuple):
    clients: int
    malicious: int
    tau: float  # deviation of the malicious clients' means


CASES = {"clean, 8 clients": Case(8, 0, TAU), "16 clients, 8 of them malicious": Case(16, 8, 0.5)}


def best(case: Case) -> float:
    """Return the paper's λ* = σ²/n · K / (K τ² + m (τ_a² − τ²) / (K − 1))."""
    K, m, tau_a = case
    return SIGMA**2 / POINTS * K / (K * TAU**2 + m * (tau_a**2 - TAU**2) / (K - 1))


TABLE = Table(
    title="The best λ of Ditto",
    setting=f"Clients estimate their own means, which are normal with deviation τ = {TAU} (0.5 for malicious clients), "
    f"from {POINTS} points with noise σ = {SIGMA}. {DRAWS:,} draws are the coordinates of one model. Measured is the "
    f"λ at which the squared error of the benign clients' personal models is least: vsim trains with λ = 0.5, 1, 2 "
    f"and 4, and the error is quadratic in 1 / (1 + λ). Ten seeds; the published values are those of the formula.",
    source="Li et al. 2020, theorem for point estimation, and the authors' point_estimation.ipynb (commit 26d9b29)",
    url="https://github.com/litian96/ditto",
    rows={name: Row(best(case)) for name, case in CASES.items()},
    digits=".4f",
    quick_agrees=False,  # one seed
)


class Estimate(nn.Module):
    """A mean for each draw: half the squared distance from the client's empirical means."""

    def __init__(self) -> None:
        super().__init__()
        self.means = nn.Parameter(torch.zeros(DRAWS))

    def forward(self, batch: tuple[Tensor]) -> Tensor:
        (observed,) = batch
        return 0.5 * (self.means - observed).square().sum(1).mean()


def own(
    data: Dataset[tuple[Tensor, ...]], rank: int, num_nodes: int, train_dataset: bool
) -> Subset[tuple[Tensor, ...]]:
    return Subset(data, [rank])


def estimates(observed: NDArray[np.float64], lam: float) -> NDArray[np.float64]:
    """Return the clients' personal models (K, draws), for their empirical means (K, draws)."""
    data = TensorDataset(torch.tensor(observed, dtype=torch.float32))
    trainer = vsim.Trainer(Estimate(), lambda *asked: own(data, *asked))
    # In the first step the global model becomes the clients' mean; a step of 1 / (1 + λ) then ends at the optimum.
    strategy = DittoStrategy(inner_optim="sgd", lr=1.0, H=1, lam=lam, personal_lr=1 / (1 + lam))
    K = len(observed)
    trainer.fit(strategy=strategy, num_nodes=K, max_steps=3, batch_size=1, progress=False)
    return np.stack([trainer.client_model(k).means.detach().double().numpy() for k in range(K)])


def found(case: Case, seed: int) -> float:
    """Return the λ with the least squared error."""
    stream = np.random.default_rng(seed)
    deviations = np.where(np.arange(case.clients) < case.malicious, case.tau, TAU)
    means = deviations[:, None] * stream.standard_normal((case.clients, DRAWS))
    observed = means + SIGMA / POINTS**0.5 * stream.standard_normal(means.shape)
    benign = slice(case.malicious, None)
    errors = [float(np.square(estimates(observed, lam)[benign] - means[benign]).mean()) for lam in LAMBDAS]
    curve = np.polynomial.Polynomial.fit([1 / (1 + lam) for lam in LAMBDAS], errors, 2).convert()
    return float(-2 * curve.coef[2] / curve.coef[1] - 1)


def measure(quick: bool) -> dict[str, list[float]]:
    return {name: [found(case, seed) for seed in range(1 if quick else 10)] for name, case in CASES.items()}
