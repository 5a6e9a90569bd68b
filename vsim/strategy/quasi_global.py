"""Quasi-global momentum: gossip whose momentum follows the moves of the mixed weights, not the node's gradients."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec
from vsim.strategy.gossip import GraphStrategy, OnGraph


class QuasiGlobalMomentum(OnGraph):
    """Step along a momentum m of the node's moves with mixing, then mix with the neighbours, at every step.

        x' ← W optimizer(x, (μ m + g) / (1 + μ)), with SGD W (x − η (μ m + g) / (1 + μ))
        m ← μ m + (1 − μ) (x − x') / η, at first 0

    η is the inner learning rate of the step. m estimates the direction in which all nodes move, where a momentum of
    the node's own gradients would pull nodes with different data apart. With μ = 0 this is gossip.

    Args:
        topology: the graph; see `GossipStrategy`.
        momentum: μ in [0, 1).

    Payload: all weights to each neighbour, every step.

    Raises:
        TypeError: the inner optimizer is not plain SGD.

    Deviations from the paper: the step is divided by 1 + μ, as in the code of its authors' later RelaySGD; in the paper
    it is μ m + g. At a learning rate of 0, m only decays. When nodes come and go, m starts again at 0.
    """

    momentum_buffer: Tensor  # m, stacked (R, P)
    before: Tensor  # x, stacked (R, P); within a step
    derived = ("before",)

    def __init__(self, *, topology: Any = "ring", momentum: float = 0.9) -> None:
        super().__init__(topology=topology)
        self.momentum = real_number("momentum", momentum, at_least=0, below=1)

    def check_optim(self, optim: OptimSpec) -> None:
        if optim.cls is not torch.optim.SGD or not optim.is_single or optim.kwargs.get("momentum"):
            raise TypeError(
                f"the inner optimizer must be plain SGD, got {optim}; with any other, a node's move divided by the "
                "learning rate is no gradient, and the momentum grows beyond all gradients"
            )

    def fresh(self, cluster: Cluster) -> dict[str, Tensor]:
        return {"momentum_buffer": torch.zeros_like(cluster.weights)}

    def communicate_gradients(self, cluster: Cluster) -> None:
        self.before = cluster.weights.clone()
        cluster.grads.add_(self.momentum * self.momentum_buffer).div_(1 + self.momentum)

    def sync(self, cluster: Cluster) -> None:
        cluster.weights.copy_(self.mixed(cluster.weights, cluster, "weights"))
        self.momentum_buffer.mul_(self.momentum)
        if cluster.lr:
            moved = (self.before - cluster.weights).mul_((1 - self.momentum) / cluster.lr)
            self.momentum_buffer.add_(moved)


class QuasiGlobalMomentumStrategy(GraphStrategy, of=QuasiGlobalMomentum):
    """Average with the neighbours, with a momentum of the mixed moves: quasi-global momentum [Lin et al. 2021,
    arXiv:2102.04761].
    """

    family = "graphs"

    @classmethod
    def default_inner_optim(cls) -> OptimSpec:
        return OptimSpec("sgd")
