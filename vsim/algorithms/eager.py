"""Overlapped DiLoCo: outer gradients travel during the next round; eager updates apply a node's own part at once."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from vsim.arguments import true_or_false
from vsim.cluster import Cluster
from vsim.cluster.collectives import Pending
from vsim.cluster.optim import OptimSpec
from vsim.cluster.replicas import matrix
from vsim.core.algorithm import Algorithm, Optim
from vsim.core.fields import algorithm, state
from vsim.core.outer import outer_spec
from vsim.core.when import When, sync_interval


@algorithm
class EagerDiLoCoStrategy(Algorithm):
    """DiLoCo with the outer gradient a round late, except for a node's own part [Kale et al. 2025,
    arXiv:2502.12996].

        θ_k ← inner optimizer(θ_k, g_k)
        after step t·H, t = 1, 2, …:  d_k(t) = φ_k − θ_k;  its mean D(t) = mean_j d_j(t) is due H steps later
            g_k = D(t−1) + (d_k(t) − d_k(t−1)) / K        (eager=False: g_k = D(t−1))
            φ_k ← outer optimizer(φ_k, g_k);  θ_k ← φ_k

    with D(0) = d_k(0) = 0. In the mean that arrives, each node replaces its own old d_k by its new d_k, so that the
    nodes' outer weights differ. With one node, this is DiLoCo. The global model is the mean of the φ_k.

    Args:
        H: inner steps of a round, at least 1, or a schedule of `vsim.strategy.when`.
        outer_optim, outer_lr: see `DiLoCoStrategy`; the optimizer must be elementwise.
        eager: whether each node replaces its own part of the mean; if False, the φ_k are equal.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights every H steps, due H steps later; the last messages of a run are never applied.
    """

    family = "local steps"
    derived = ("outer_gradient",)
    resolved = ("outer_optim", "outer_lr")

    outer_optim: Optim = None
    H: int | When = 100
    outer_lr: float | None = None
    eager: bool = True

    outer_weights: Tensor = state()  # φ_k, stacked (R, P)
    outer_optim_spec: OptimSpec = state()
    outer: Optimizer = state()
    distances: Tensor = state()  # d_k of the previous round, stacked (R, P)
    pending: list[Pending] = state()  # D of the previous round, shared (P,)

    def __post_init__(self) -> None:
        self.H = sync_interval(self.H)
        self.outer_optim_spec = outer_spec(self.outer_optim, self.outer_lr)
        if not self.outer_optim_spec.elementwise:
            raise ValueError(
                "the outer optimizer steps the nodes' outer weights as one matrix, so it must be elementwise; "
                f"{self.outer_optim_spec.cls.__name__} is not"
            )
        self.eager = true_or_false("eager", self.eager)
        super().__post_init__()

    @property
    def first_step(self) -> int:
        return super().first_step * (1 if self.eager else 2)

    def setup(self, cluster: Cluster) -> None:
        weights = cluster.weights
        rows, columns = weights.shape
        phi, self.outer_gradient = (matrix(rows, columns, weights.dtype, weights.device) for _ in range(2))
        phi.copy_(weights)
        outer = self.outer_optim_spec.build_over(phi, self.outer_gradient, cluster.deterministic)
        self.keep_stacked(outer_weights=phi, outer=outer, distances=torch.zeros_like(weights))
        self.keep_shared(pending=[])

    def sync(self, cluster: Cluster) -> None:
        distances = self.outer_weights - cluster.weights  # d_k(t), (R, P)
        gradient = self.outer_gradient[: len(distances)].zero_()
        if self.eager:
            torch.sub(distances, self.distances, out=gradient).div_(cluster.num_nodes)
        for pending in self.pending:
            gradient.add_(pending.result())
        start, delay = cluster.collectives.start, self.when.until_next(cluster)
        self.pending = [start("all_reduce", distances, "mean", label="outer gradient", delay=delay)]
        self.distances.copy_(distances)
        self.outer.step()
        cluster.weights.copy_(self.outer_weights)

    def global_weights(self, cluster: Cluster) -> Tensor:
        with cluster.collectives.unbilled():
            return cluster.collectives.all_reduce(self.outer_weights, "mean")
