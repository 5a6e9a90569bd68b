"""FedNova: federated averaging without a bias towards clients that take more steps."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.cluster import Cluster
from vsim.core.average import Averaging, mean
from vsim.core.fields import algorithm, state
from vsim.core.outer import SharedWeights
from vsim.core.when import When, sync_interval


@algorithm
class FedNovaStrategy(SharedWeights):
    """FedAvg of the clients' moves, each divided by the client's number of steps: FedNova [Wang et al. 2020,
    arXiv:2007.07481].

        θ_k ← optimizer(θ_k, g_k), τ_k times in a round;  φ ← φ + (Σ_k p_k τ_k) · Σ_k p_k (θ_k − φ) / τ_k;  θ_k ← φ

    If all clients take the same number of steps, this is FedAvg. With Sample(n, of=N, epochs=E), each client takes E
    epochs of its own data, so that the τ_k differ. FedAvg would then minimize another loss, which weights clients by
    p_k τ_k.

    Args:
        H: steps of a round, at least 1, or a schedule of `vsim.strategy.when`.
        average: merges the moves per step, and sets p_k; see `vsim.strategy.average`. Default: by examples.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights and 4 bytes every H steps, in one message, or the messages of `average` in place of the
    weights.

    Deviations from the paper: moves are divided by τ_k, as for plain SGD, whatever the inner optimizer is. The paper
    has other divisors for momentum and proximal terms.
    """

    family = "federated"

    H: int | When = 10
    average: Averaging = Averaging(mean("examples"))

    steps: Tensor = state()  # τ_k in the round so far, stacked (R, 1)

    def __post_init__(self) -> None:
        self.H = sync_interval(self.H)
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        self.keep_client(steps=torch.zeros_like(cluster.weights[:, :1]))

    def communicate(self, cluster: Cluster) -> None:
        taken = torch.ones_like(self.steps)
        if cluster.resting:
            taken[cluster.resting] = 0
        self.steps.add_(taken)
        super().communicate(cluster)

    def follow(self, cluster: Cluster) -> None:
        super().follow(cluster)
        self.steps.zero_()

    def sync(self, cluster: Cluster) -> None:
        moves = (cluster.weights - self.outer_weights).div_(self.steps.clamp(min=1))  # (R, P), per step
        shares = self.average.weights(cluster)
        moved = self.average(moves, cluster, "normalized moves")
        with cluster.collectives.joined():
            steps = cluster.collectives.all_reduce(self.steps, "mean", label="steps", weights=shares)  # (1,)
        self.outer_weights.add_(steps * moved)
        cluster.weights.copy_(self.outer_weights)
        self.steps.zero_()
