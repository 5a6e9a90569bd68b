"""DiLoCo: take H local steps, then step a shared copy of the weights with an outer optimizer."""

from __future__ import annotations

from vsim.cluster import Cluster
from vsim.core.fields import algorithm
from vsim.core.outer import OuterStep


@algorithm
class DiLoCoStrategy(OuterStep):
    """Take H local steps, then step shared weights with an outer optimizer: DiLoCo [Douillard et al. 2023,
    arXiv:2311.08105].

    The paper's inner optimizer is OptimSpec("adamw", lr=4e-4, weight_decay=0.1).

        θ_k ← inner optimizer(θ_k, g_k)
        after every H-th step:  Δ = average_k (φ − θ_k);  φ ← outer optimizer(φ, Δ);  θ_k ← φ

    The inner optimizer's state survives the sync. With the default outer optimizer, the first sync moves φ by
    0.7 · 1.9 · Δ, because of torch.optim.SGD's definition of Nesterov momentum.

    Args:
        H: inner steps between syncs, at least 1, or a schedule of `vsim.strategy.when`. The paper uses 500.
        outer_optim: the outer optimizer: an `OptimSpec`, class or name. Default SGD, lr 0.7, momentum 0.9, Nesterov.
        outer_lr: the outer learning rate.
        average: merges the φ − θ_k: "mean", "median", trimmed_mean(0.2), mean("examples") | clip("median"),
            compress(TopK(0.01)), …; see `vsim.strategy.average`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights, or the messages of `average`, every H steps.
    """

    family = "local steps"

    def sync(self, cluster: Cluster) -> None:
        phi, delta = self.outer_weights, self.outer_gradient
        delta.copy_(self.average.of_distances(phi, cluster.weights, cluster, "outer gradient"))
        self.outer.step()
        cluster.weights.copy_(phi)
