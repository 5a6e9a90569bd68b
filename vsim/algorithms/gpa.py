"""GPA: DiLoCo on one worker, smoothed: the optimizer's iterates are averaged at every step, not at every H-th step."""

from __future__ import annotations

from torch import Tensor

from vsim.algorithms.allreduce import SimpleReduceStrategy
from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.core.average import Averaging
from vsim.core.fields import algorithm, state


@algorithm
class GPAStrategy(SimpleReduceStrategy):
    """Average gradients taken at an average of the iterates, as a smooth outer step: generalized primal averaging
    [Defazio et al. 2025, arXiv:2512.17131].

        g = mean_k ∇f_k(y);  z ← inner optimizer(z, clip(g));  x ← μ_x x + (1 − μ_x) z;  y = μ_y x + (1 − μ_y) z

    All nodes compute with the same y; x is the global model that is evaluated. Weight decay applies to z. In the paper
    GPA is an optimizer of one worker: it smooths DiLoCo's outer step over all inner steps, but does not communicate
    less often. On K nodes the worker is data parallel, which the authors' code supports as well, and GPA sends the same
    bytes as AllReduce.

    Args:
        mu_x: μ_x in [0, 1): the share of x that remains. 0.9^(1/H) corresponds to DiLoCo on one worker with H steps;
            the default, 0.9967, to H = 32. With 0, GPA is the inner optimizer.
        mu_y: μ_y in [0, 1]: the share of x in y. With 0, gradients are taken at z, and x does not influence training.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all gradients, every step.

    Deviations from the paper: none in the update. `Trainer.fit` returns the mean replica as always: y.
    """

    family = "data parallel"

    mu_x: float = 0.9967
    mu_y: float = 0.7
    average: Averaging = state(default=Averaging("mean"))

    averaged: Tensor = state()  # x, shared (P,)
    stepped: Tensor = state()  # z, shared (P,)

    def __post_init__(self) -> None:
        self.mu_x = real_number("mu_x", self.mu_x, at_least=0, at_most=1)
        if self.mu_x == 1:
            raise ValueError("mu_x must be < 1, got 1: the averaged weights would stay where they begin")
        self.mu_y = real_number("mu_y", self.mu_y, at_least=0, at_most=1)
        super().__post_init__()

    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        weights = cluster.weights[0]
        self.keep_shared(averaged=weights.clone(), stepped=weights.clone())

    def gradients(self) -> None:
        super().gradients()
        self.cluster.replicas.weights.copy_(self.stepped)  # the optimizer steps z by the gradient at y

    def advance(self) -> None:
        weights = self.cluster.replicas.weights
        self.stepped.copy_(weights[0])  # equal on all nodes
        # Only the distances of x and y from z are scaled, so that with μ_x = 0 both are bitwise equal to z.
        distance = (self.averaged - self.stepped).mul_(self.mu_x)
        self.averaged.copy_(self.stepped + distance)
        weights.copy_(self.stepped + distance.mul_(self.mu_y))
        super().advance()

    def model_weights(self) -> Tensor:
        return self.averaged
