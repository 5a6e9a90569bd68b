"""Quasi-global momentum: gossip whose momentum follows the moves of the mixed weights, not the node's gradients."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.algorithms.graph_strategy import GraphStrategy
from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec
from vsim.core.fields import algorithm, state


@algorithm
class QuasiGlobalMomentumStrategy(GraphStrategy):
    """Average with the neighbours, with a momentum of the mixed moves: quasi-global momentum [Lin et al. 2021,
    arXiv:2102.04761].

        x' ← W optimizer(x, (μ m + g) / (1 + μ)), with SGD W (x − η (μ m + g) / (1 + μ))
        m ← μ m + (1 − μ) (x − x') / η, at first 0

    η is the inner learning rate of the step. m estimates the direction in which all nodes move, where a momentum of
    the node's own gradients would pull nodes with different data apart. With μ = 0 this is gossip.

    Args:
        topology: the graph; see `GossipStrategy`.
        momentum: μ in [0, 1).
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights to each neighbour, every step.

    Raises:
        TypeError: the inner optimizer is not plain SGD.

    Deviations from the paper: the step is divided by 1 + μ, as in the code of its authors' later RelaySGD; in the paper
    it is μ m + g. At a learning rate of 0, m only decays. When nodes come and go, m starts again at 0.
    """

    family = "graphs"
    derived = ("before",)

    momentum: float = 0.9

    momentum_buffer: Tensor = state()  # m, stacked (R, P)
    before: Tensor = state()  # x, stacked (R, P); within a step

    def __post_init__(self) -> None:
        self.momentum = real_number("momentum", self.momentum, at_least=0, below=1)
        super().__post_init__()

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

    @classmethod
    def default_inner_optim(cls) -> OptimSpec:
        return OptimSpec("sgd")
