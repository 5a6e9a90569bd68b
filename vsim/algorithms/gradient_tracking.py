"""Gradient tracking that adapts, then combines: nodes step along trackers of the mean gradient, and mix the result."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.algorithms.graph_strategy import GraphStrategy
from vsim.cluster import Cluster
from vsim.core.fields import algorithm, state


@algorithm
class GradientTrackingStrategy(GraphStrategy):
    """Step along trackers of the mean gradient, then average with the neighbours: adapt-then-combine gradient tracking
    [Xu et al. 2015; Nedić et al. 2017, arXiv:1609.05713].

        y ← g − c;  x ← W optimizer(x, y), with SGD W (x − η y);  c ← g − W y, at first 0

    The y_k sum to the sum of the gradients, so that nodes with different data reach the optimum of the mean loss at a
    constant learning rate. `GossipStrategy(tracking=True)` is DIGing, which combines before it adapts: x ← W x − η y.

    Args:
        topology: the graph; see `GossipStrategy`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights and trackers, twice all weights, to each neighbour, every step.

    Deviations from the papers: `max_norm` clips the step, not the tracker that is sent. When nodes come and go, c
    starts again at 0.
    """

    family = "graphs"
    derived = ("tracker",)

    correction: Tensor = state()  # W y − g, stacked (R, P)
    tracker: Tensor = state()  # y, stacked (R, P); within a step

    def fresh(self, cluster: Cluster) -> dict[str, Tensor]:
        return {"correction": torch.zeros_like(cluster.weights)}

    def communicate_gradients(self, cluster: Cluster) -> None:
        self.tracker = cluster.grads + self.correction
        self.correction = -cluster.grads
        cluster.grads.copy_(self.tracker)

    def sync(self, cluster: Cluster) -> None:
        both = torch.cat([cluster.weights, self.tracker], 1)
        x, y = self.mixed(both, cluster, "weights and trackers").chunk(2, 1)
        cluster.weights.copy_(x)
        self.correction = self.correction + y  # W y − g
