"""SlowMo: train alone, average, and let a slow momentum step a shared copy of the weights."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from vsim.arguments import real_number, whole_number
from vsim.cluster import Cluster
from vsim.strategy.base import CommunicationModule, Optim, Strategy, StrategyOptions, with_inner


class SlowMomentum(CommunicationModule):
    """After every H-th step the mean of the nodes is a step of slow momentum; see `SlowMoStrategy`.

    Args:
        H: steps between syncs. alpha: α. beta: β.
    """

    outer_weights: Tensor  # φ, shared (P,)
    momentum: Tensor  # u, shared (P,)

    def __init__(self, H: int = 12, alpha: float = 1.0, beta: float = 0.5) -> None:
        self.H = whole_number("H", H)
        self.alpha = real_number("alpha", alpha, above=0)
        self.beta = real_number("beta", beta, at_least=0, at_most=1)

    @property
    def first_step(self) -> int:
        return self.H

    def setup(self, cluster: Cluster) -> None:
        weights = cluster.weights[0].clone()
        self.keep_shared(outer_weights=weights, momentum=torch.zeros_like(weights))

    def communicate(self, cluster: Cluster) -> None:
        if cluster.step % self.H:
            return
        mean = cluster.collectives.all_reduce(cluster.weights, "mean", label="weights")
        self.momentum.mul_(self.beta)
        move = self.momentum * cluster.lr + (self.outer_weights - mean)  # lr·u: of the two the one without a division
        if cluster.lr:  # a warm-up begins at 0, where no node has moved
            torch.div(move, cluster.lr, out=self.momentum)
        self.outer_weights.sub_(move.mul_(self.alpha))
        cluster.weights.copy_(self.outer_weights)

    def global_weights(self, cluster: Cluster) -> Tensor:
        return self.outer_weights


class SlowMoStrategy(Strategy):
    """Slow momentum [Wang et al. 2019, arXiv:1910.00643].

        θ_k ← inner optimizer(θ_k, g_k)
        after every H-th step:  u ← β u + (φ − mean_k θ_k) / lr;  φ ← φ − α·lr·u;  θ_k ← φ

    with lr the inner learning rate of that step, so that a schedule of it moves the slow momentum's steps as well. The
    inner optimizer's state survives the sync. α = 1 and β = 0 are FedAvg.

    Args:
        H: inner steps between syncs, at least 1.
        alpha: α, the slow learning rate, above 0; 1 in the paper's experiments.
        beta: β, the slow momentum, in [0, 1].
        options: those of every strategy; see `Strategy`.

    Payload: all weights every H steps.

    Deviations from the paper: its inner optimizer may communicate as well, by gossip or all-reduce; here the nodes
    train alone between syncs. Of its three ways with that optimizer's buffers this is the one that maintains them. At a
    learning rate of 0, such as at the first step of a warm-up, u only decays.
    """

    def __init__(
        self,
        optim_spec: Optim = None,
        /,
        H: int = 12,
        *,
        alpha: float = 1.0,
        beta: float = 0.5,
        **options: Unpack[StrategyOptions],
    ) -> None:
        super().__init__([SlowMomentum(H, alpha, beta)], **with_inner(optim_spec, options))
