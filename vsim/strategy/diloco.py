"""DiLoCo: train alone for H steps, then step a shared copy of the weights with an outer optimizer."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from vsim.cluster import Cluster
from vsim.cluster.optimizers import evaluating
from vsim.strategy.average import AverageLike, average_of
from vsim.strategy.base import CommunicationModule, Optim, Strategy, StrategyOptions
from vsim.strategy.outer import outer_optimizer, outer_spec
from vsim.strategy.when import When, interval


class DiLoCoCommunicator(CommunicationModule):
    """φ ← outer(φ, Δ),  Δ = average_k(φ − θ_k),  θ_k ← φ,  after every H-th step; see `DiLoCoStrategy`."""

    outer_weights: Tensor  # φ, shared (P,)
    outer_optim: Optimizer
    derived = ("outer_gradient",)

    def __init__(
        self,
        H: int | When = 100,
        outer_optim: Optim = None,
        *,
        outer_lr: float | None = None,
        average: AverageLike = "mean",
    ) -> None:
        self.H = interval(H)
        self.outer_optim_spec = outer_spec(outer_optim, outer_lr)
        self.average = average_of(average, "DiLoCo")

    def setup(self, cluster: Cluster) -> None:
        phi = cluster.weights[0].clone()
        self.outer_gradient = torch.zeros_like(phi)  # Δ, shared (P,)
        optim = outer_optimizer(self.outer_optim_spec, cluster, phi, self.outer_gradient)
        self.keep_shared(outer_weights=phi, outer_optim=optim)
        self.average.setup(cluster)

    def sync(self, cluster: Cluster) -> None:
        phi = self.outer_weights
        self.outer_gradient.copy_(self.average.of_distances(phi, cluster.weights, cluster, "outer gradient"))
        self.outer_optim.step()
        cluster.weights.copy_(phi)

    def global_weights(self, cluster: Cluster) -> Tensor:
        return self.outer_weights

    def evaluating(self) -> AbstractContextManager[None]:
        return evaluating(self.outer_optim, self.outer_weights)


class DiLoCoStrategy(Strategy):
    """Distributed low-communication training [Douillard et al. 2023, arXiv:2311.08105].

        θ_k ← inner optimizer(θ_k, g_k)
        after every H-th step:  Δ = mean_k (φ − θ_k);  φ ← outer optimizer(φ, Δ);  θ_k ← φ

    The inner optimizer's state survives the sync. With the default outer optimizer the first move is 0.7 · 1.9 · Δ, as
    torch.optim.SGD's Nesterov momentum has it.

    Args:
        H: inner steps between syncs, at least 1, or a schedule of `vsim.strategy.when`. The paper uses 500.
        outer_optim: the outer optimizer: an `OptimSpec`, class or name. Default SGD, lr 0.7, momentum 0.9, Nesterov.
        outer_lr: the outer learning rate.
        average: how the φ − θ_k become one: "mean", "median", trimmed_mean(0.2), mean("examples") | clip("median"),
            compress(TopK(0.01)), …; see `vsim.strategy.average`.
        options: see `Strategy`. The paper's inner optimizer is
            OptimSpec("adamw", lr=4e-4, weight_decay=0.1).

    Payload: all weights every H steps, or what `average` sends in their place.
    """

    def __init__(
        self,
        inner_optim: Optim = None,
        outer_optim: Optim = None,
        H: int | When = 100,
        *,
        outer_lr: float | None = None,
        average: AverageLike = "mean",
        **options: Unpack[StrategyOptions],
    ) -> None:
        outer = DiLoCoCommunicator(H, outer_optim, outer_lr=outer_lr, average=average)
        super().__init__([outer], inner_optim=inner_optim, **options)
