"""Decentralized SGD on random isotropic quadratics: its rate on graphs of 32 nodes, by vsim's mixing matrices."""

from __future__ import annotations

from typing import Any

import numpy as np

from vsim.strategy import GossipStrategy

from .result import Row, Table

NODES, ZETA = 32, 50.0
HYPERCUBE = [(k, k ^ (1 << bit)) for k in range(NODES) for bit in range(5) if k < k ^ (1 << bit)]
# Graph → the learning rate, and the share by which the expected squared distance falls a step.
RATES: dict[str, tuple[Any, float, float]] = {
    "ring": ("ring", 0.09, 0.1256),
    "hypercube": (HYPERCUBE, 0.18, 0.2435),
    "complete": ("complete", 0.40, 0.3950),
    "alone": (None, 0.02, 0.0200),
}
TABLE = Table(
    title="Rates of decentralized SGD",
    setting="32 nodes minimize |x|², each with x ← W (x − η H x) and its own random H, E H = I and E |H x|² = ζ |x|², "
    "ζ = 50. The rate is 1 − ρ, with ρ the spectral radius of the step of the nodes' second moments, M ← W (D ∘ M) Wᵀ: "
    "D is (1 − η)², and 1 − 2 η + ζ η² on the diagonal. W is `GossipStrategy.mixing_matrix`.",
    source="Vogels et al. 2022, section 3.1, by the authors' code (commit ecb4dea)",
    url="https://github.com/epfml/topology-in-decentralized-learning",
    rows={name: Row(rate, within=0.0001) for name, (_, _, rate) in RATES.items()},
    digits=".4f",
)


def rate(topology: Any, lr: float) -> float:
    W = np.eye(NODES) if topology is None else GossipStrategy(topology=topology).mixing_matrix(NODES).double().numpy()
    D = np.full((NODES, NODES), (1 - lr) ** 2)
    np.fill_diagonal(D, 1 - 2 * lr + ZETA * lr**2)
    M, radius = np.ones((NODES, NODES)), 0.0
    for _ in range(3000):  # power iteration
        M = W @ (D * M) @ W.T
        radius = float(np.linalg.norm(M))
        M /= radius
    return 1 - radius


def measure(quick: bool) -> dict[str, float]:
    return {name: rate(topology, lr) for name, (topology, lr, _) in RATES.items()}
