"""FedProx: federated averaging, where a proximal term pulls every node towards its round's initial weights."""

from __future__ import annotations

from torch import Tensor

from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.strategy.base import Algorithm, CommunicationModule
from vsim.strategy.fedavg import FEDERATED, AveragingCommunicator
from vsim.strategy.when import When, sync_interval


class ProximalTerm(CommunicationModule):
    """g_k ← g_k + μ (θ_k − φ) before every optimizer step; φ: the round's initial weights, equal on all nodes.

    Place this module after the module that makes the weights equal. max_norm clips the sum of gradient and term.

    Args:
        H: local steps of a round, at least 1, or a schedule of `vsim.strategy.when`.
        mu: μ, at least 0; 0.001 to 1 in the paper.
    """

    outer_weights: Tensor  # φ, shared (P,)

    def __init__(self, *, H: int | When = 10, mu: float = 0.01) -> None:
        self.mu = real_number("mu", mu, at_least=0)
        self.H = sync_interval(H)

    def setup(self, cluster: Cluster) -> None:
        self.keep_shared(outer_weights=cluster.weights[0].clone())

    def communicate_gradients(self, cluster: Cluster) -> None:
        if self.mu:
            cluster.grads.add_(cluster.weights - self.outer_weights, alpha=self.mu)

    def sync(self, cluster: Cluster) -> None:
        self.outer_weights.copy_(cluster.weights[0])


class FedProxStrategy(Algorithm, of=(AveragingCommunicator, ProximalTerm), names=FEDERATED):
    """FedAvg with a penalty on each node's distance from the round's first weights: FedProx [Li et al. 2018,
    arXiv:1812.06127].

        θ_k ← optimizer(θ_k, g_k + μ (θ_k − φ));  after every H-th step φ ← Σ_j w_j θ_j, θ_k ← φ

    The optimizer steps on the loss of node k plus μ/2 · ‖θ_k − φ‖². With μ = 0, this is FedAvg.

    Payload: all weights every H steps.

    Deviations from the paper: every node takes H steps, where in the paper it takes as many as it has time for; clients
    of Sample(n, of=N, stragglers=Partial(share)) take fewer.
    """

    family = "federated"
