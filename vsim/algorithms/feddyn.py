"""FedDyn: federated averaging, where every client's loss is regularized in each round, so that minima agree."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.algorithms.scaffold import share_of_joining
from vsim.arguments import real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec
from vsim.core.fields import algorithm, state
from vsim.core.outer import SharedWeights


@algorithm
class FedDynStrategy(SharedWeights):
    """FedAvg with a linear and a quadratic term that make the clients' minima agree: FedDyn [Acar et al. 2021,
    arXiv:2111.04263].

        θ_k ← optimizer(θ_k, g_k − h_k + α (θ_k − φ))
        after every H-th step, for n nodes of a population of N:
            h_k ← h_k − α (θ_k − φ);  h ← h − α · n/N · mean_k (θ_k − φ);  φ ← mean_k θ_k − h / α;  θ_k ← φ

    The first line is a step on the loss of node k plus α/2 · ‖θ_k − φ‖² − ⟨h_k, θ_k⟩. Once client k reaches the minimum
    of this sum, h_k is the gradient of its loss there, and φ is stationary only where the h_k sum to 0. h / α is the
    sum of all earlier moves: if clients stay far from their minimum in a round (α · lr · H is small), φ may oscillate.

    Args:
        H: local steps of a round, at least 1.
        alpha: α, above 0; 0.01 to 0.1 in the paper, whose rounds are longer.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights every H steps. When nodes join, the h_k are summed once, and N·h minus the sum is divided as in
    `ScaffoldStrategy`.

    Deviations from the paper: H counts steps, not epochs.
    """

    family = "federated"

    H: int = 10
    alpha: float = 0.1

    correction: Tensor = state()  # h, the mean of the h_k of all clients, shared (P,)
    corrections: Tensor = state()  # h_k, stacked (R, P), a row for each client

    def __post_init__(self) -> None:
        self.H = whole_number("H", self.H)
        self.alpha = real_number("alpha", self.alpha, above=0)
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        self.keep_shared(correction=torch.zeros_like(self.outer_weights))
        self.keep_client(corrections=torch.zeros_like(cluster.weights))

    def attend(self, cluster: Cluster) -> None:
        if cluster.plan is not None and not cluster.plan.renews:
            share_of_joining(self.corrections, self.correction, cluster, "corrections")

    def communicate_gradients(self, cluster: Cluster) -> None:
        cluster.grads.add_(cluster.weights - self.outer_weights, alpha=self.alpha).sub_(self.corrections)

    def sync(self, cluster: Cluster) -> None:
        moves = cluster.weights - self.outer_weights  # (R, P)
        mean = cluster.collectives.all_reduce(cluster.weights, "mean", label="weights")  # (P,)
        self.corrections.sub_(moves, alpha=self.alpha)
        share = cluster.num_nodes / cluster.population
        self.correction.sub_(mean - self.outer_weights, alpha=self.alpha * share)
        self.outer_weights.copy_(mean - self.correction / self.alpha)
        cluster.weights.copy_(self.outer_weights)

    @classmethod
    def default_inner_optim(cls) -> OptimSpec:
        return OptimSpec("sgd")
