"""Agnostic federated learning: the mixture of clients for which the loss is largest is trained."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.algorithms.qfedavg import RoundLosses
from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.core.fields import algorithm, state


@algorithm
class AFLStrategy(RoundLosses):
    """Average clients by shares that move towards those with large losses: agnostic federated learning, AFL [Mohri et
    al. 2019, arXiv:1902.00146].

        φ ← Σ_k λ_k θ_k / Σ_k λ_k, over the clients of the round;  λ ← projection of λ + γ F on the simplex;  θ_k ← φ

    F_k is the client's loss at φ, before the round, on its first batch. λ begins with equal shares; those of clients
    that are not in the round change by the projection only. If all clients of a round have a share of 0, they count
    alike.

    Args:
        H: steps of a round, at least 1, or a schedule of `vsim.strategy.when`; 1 in the paper.
        gamma: γ, the learning rate of λ, at least 0. 0 is FedAvg.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights every H steps, and 4 bytes in a message of their own.

    Deviations from the paper: the paper steps w and λ by one stochastic gradient; here a round may have several local
    steps, and λ takes the losses of their first batches.
    """

    family = "federated"

    gamma: float = 0.01

    shares: Tensor = state()  # λ, shared (N,)

    def __post_init__(self) -> None:
        self.gamma = real_number("gamma", self.gamma, at_least=0)
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        number = cluster.population
        self.keep_shared(shares=torch.full((number,), 1 / number, dtype=torch.float64))

    def meet(self, cluster: Cluster) -> None:
        active = list(cluster.active)
        own = self.shares[active]
        own = own if float(own.sum()) > 0 else torch.ones_like(own)
        mean = cluster.collectives.all_reduce(cluster.weights, "mean", label="weights", weights=own)
        losses = cluster.collectives.all_gather(self.losses, label="losses")[:, 0]  # (K,)
        self.outer_weights.copy_(mean)
        if not losses.is_meta:
            shares = self.shares.clone()
            shares[active] += self.gamma * losses.cpu().double()
            self.shares = on_simplex(shares)


def on_simplex(point: Tensor) -> Tensor:
    """Return the nearest vector (N,) of shares that are at least 0 and sum to 1 [Duchi et al. 2008, ICML].

    >>> on_simplex(torch.tensor([0.5, 1.0, -1.0])).tolist()
    [0.25, 0.75, 0.0]
    """
    ordered = point.sort(descending=True).values
    excess = (ordered.cumsum(0) - 1) / torch.arange(1, len(point) + 1)  # what the n largest entries must lose
    return (point - excess[ordered > excess][-1]).clamp(min=0)
