"""NoLoCo: DiLoCo without an all-reduce. In every round, nodes exchange in random pairs; the nodes' weights differ."""

from __future__ import annotations

import sys

import torch
from torch import Tensor

from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.cluster.collectives import Pending
from vsim.core.algorithm import Algorithm
from vsim.core.fields import algorithm, state
from vsim.core.when import When, sync_interval


@algorithm
class NoLoCoStrategy(Algorithm):
    """DiLoCo in random pairs, with separate outer weights on each node: NoLoCo [Kolehmainen et al. 2025,
    arXiv:2506.10911].

        θ_k ← inner optimizer(θ_k, g_k)
        after every H-th step, node k is paired with a random node j:
            Δ_k = θ_k − φ_k;  m_k ← α m_k + β (Δ_k + Δ_j) / 2 + γ ((φ_k + φ_j) / 2 − φ_k);  φ_k ← φ_k + m_k;  θ_k ← φ_k

    Each node has its own φ_k. γ pulls the φ_k of a pair together, and thereby all φ_k, since pairs change. If the
    number of nodes is odd, one node has no partner, and takes the step with j = k.

    Args:
        H: inner steps between rounds, at least 1, or a schedule of `vsim.strategy.when`.
        alpha: α, the outer momentum, in [0, 1].
        beta: β, the outer learning rate, above 0.
        gamma: γ, at least 0; default β. 0 lets the φ_k drift apart.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: Δ_k and φ_k, each as large as all weights, from each node of a pair to the other, every H steps. Pairs are
    drawn a round ahead, so that φ_k travels while the nodes train, and nodes wait for Δ_k only. In the first round, all
    φ_k are equal and are not sent; the φ_k sent last are not used. The evaluated global model is the mean replica.

    Deviations from the paper: random routing through pipelines is left out. With γ = β the mean of θ_k and θ_j would be
    enough; Δ_k and φ_k are sent nevertheless.
    """

    family = "local steps"

    H: int | When = 50
    alpha: float = 0.5
    beta: float = 0.7
    gamma: float | None = None

    outer_weights: Tensor = state()  # φ_k, stacked (R, P)
    momentum: Tensor = state()  # m_k, stacked (R, P)
    pairs: Tensor = state()  # pairs (src, dst) of the next round, in both directions, shared (2 · ⌊K / 2⌋, 2)
    arriving: Pending | None = state()  # φ_j, stacked (R, P); None before the first round, when all φ_k are equal

    def __post_init__(self) -> None:
        self.H = sync_interval(self.H)
        self.alpha = real_number("alpha", self.alpha, at_least=0, at_most=1)
        self.beta = real_number("beta", self.beta, above=0)
        if self.gamma is not None:
            self.gamma = real_number("gamma", self.gamma, at_least=0)
        super().__post_init__()

    @property
    def is_gossip(self) -> bool:
        return True

    def rounds_repeat(self, num_nodes: int) -> int | None:
        return None  # pairs are drawn

    def setup(self, cluster: Cluster) -> None:
        weights = cluster.weights.clone()
        self.keep_stacked(outer_weights=weights, momentum=torch.zeros_like(weights), arriving=None)
        self.keep_shared(pairs=self._drawn(cluster))

    def _drawn(self, cluster: Cluster) -> Tensor:
        active = torch.tensor(cluster.active)
        shuffled = active[torch.randperm(cluster.num_nodes, generator=cluster.generator)]
        pairs = shuffled[: cluster.num_nodes // 2 * 2].view(-1, 2)  # if K is odd, one node has no partner
        return torch.cat([pairs, pairs.flip(1)])

    def attend(self, cluster: Cluster) -> None:
        self.pairs = self._drawn(cluster)
        if self.arriving is not None:  # the new partners have not sent φ_j yet
            message = (self.outer_weights, self.pairs)
            until = self.when.until_next(cluster) % (self.when.period or sys.maxsize)
            self.arriving = cluster.collectives.start("send", *message, delay=until, label="outer weights")

    def sync(self, cluster: Cluster) -> None:
        # A node without a partner gets its own rows: Δ_j = Δ_k, and φ_j = φ_k.
        own = cluster.weights - self.outer_weights  # Δ_k, stacked (R, P)
        others = cluster.collectives.send(own, self.pairs, label="outer gradient")
        self.momentum.mul_(self.alpha).add_((own + others).mul_(self.beta / 2))
        if self.arriving is not None:
            gamma = self.beta if self.gamma is None else self.gamma
            self.momentum.add_((self.arriving.result() - self.outer_weights).mul_(gamma / 2))
        self.outer_weights.add_(self.momentum)
        cluster.weights.copy_(self.outer_weights)
        self.pairs = self._drawn(cluster)
        message, delay = (self.outer_weights, self.pairs), self.when.until_next(cluster)
        self.arriving = cluster.collectives.start("send", *message, delay=delay, label="outer weights")
