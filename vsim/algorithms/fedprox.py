"""FedProx: federated averaging, where a proximal term pulls every node towards its round's initial weights."""

from __future__ import annotations

from vsim.algorithms.fedavg import RoundAverage
from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.core.fields import algorithm
from vsim.core.when import When


@algorithm
class FedProxStrategy(RoundAverage):
    """FedAvg with a penalty on each node's distance from the round's first weights: FedProx [Li et al. 2018,
    arXiv:1812.06127].

        θ_k ← optimizer(θ_k, g_k + μ (θ_k − φ));  after every H-th step φ ← Σ_j w_j θ_j, θ_k ← φ

    The optimizer steps on the loss of node k plus μ/2 · ‖θ_k − φ‖². With μ = 0, this is FedAvg.

    Args:
        H: local steps of a round, at least 1, or a schedule of `vsim.strategy.when`.
        average: merges the weights; see `FedAvgStrategy`.
        mu: μ, at least 0; 0.001 to 1 in the paper.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights every H steps.

    Deviations from the paper: every node takes H steps, where in the paper it takes as many as it has time for; clients
    of Sample(n, of=N, stragglers=Partial(share)) take fewer.
    """

    family = "federated"

    H: int | When = 10
    mu: float = 0.01

    def __post_init__(self) -> None:
        self.mu = real_number("mu", self.mu, at_least=0)
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        self.keep_shared(outer_weights=cluster.weights[0].clone())

    def communicate_gradients(self, cluster: Cluster) -> None:
        super().communicate_gradients(cluster)
        if self.mu:
            cluster.grads.add_(cluster.weights - self.outer_weights, alpha=self.mu)

    def sync(self, cluster: Cluster) -> None:
        super().sync(cluster)
        self.outer_weights.copy_(cluster.weights[0])
