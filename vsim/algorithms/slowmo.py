"""SlowMo: take local steps, average, and step a shared copy of the weights with a slow momentum."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.core.average import Averaging
from vsim.core.fields import algorithm, state
from vsim.core.outer import SharedWeights
from vsim.core.when import When, sync_interval


@algorithm
class SlowMoStrategy(SharedWeights):
    """Take H local steps, then step shared weights with a slow momentum: SlowMo [Wang et al. 2019,
    arXiv:1910.00643].

        θ_k ← inner optimizer(θ_k, g_k)
        after every H-th step:  u ← β u + (φ − mean_k θ_k) / lr;  φ ← φ − α·lr·u;  θ_k ← φ

    lr is the inner learning rate of the H-th step, so that a schedule of lr scales the slow momentum's steps as well.
    The inner optimizer's state survives the sync. With α = 1 and β = 0, this is FedAvg.

    Args:
        H: inner steps between syncs, at least 1, or a schedule of `vsim.strategy.when`.
        alpha: α, the slow learning rate, above 0; 1 in the paper's experiments.
        beta: β, the slow momentum, in [0, 1].
        average: merges the φ − θ_k; see `vsim.strategy.average`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights, or the messages of `average`, every H steps.

    Deviations from the paper: the nodes do not communicate between syncs; in the paper, they may, by gossip or
    all-reduce. Of the paper's three options for the inner optimizer's buffers, only "maintain" is implemented. At a
    learning rate of 0, such as at the first step of a warm-up, u only decays.
    """

    family = "local steps"

    H: int | When = 12
    alpha: float = 1.0
    beta: float = 0.5
    average: Averaging = Averaging("mean")

    momentum: Tensor = state()  # u, shared (P,)

    def __post_init__(self) -> None:
        self.H = sync_interval(self.H)
        self.alpha = real_number("alpha", self.alpha, above=0)
        self.beta = real_number("beta", self.beta, at_least=0, at_most=1)
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        self.keep_shared(momentum=torch.zeros_like(self.outer_weights))

    def sync(self, cluster: Cluster) -> None:
        delta = self.average.of_distances(self.outer_weights, cluster.weights, cluster, "weights")
        self.momentum.mul_(self.beta)
        move = self.momentum * cluster.lr + delta  # lr·u, computed without a division by lr
        if cluster.lr:  # if lr is 0, as at the start of a warm-up, no node has moved
            torch.div(move, cluster.lr, out=self.momentum)
        self.outer_weights.sub_(move.mul_(self.alpha))
        cluster.weights.copy_(self.outer_weights)
