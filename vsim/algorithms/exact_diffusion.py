"""Exact diffusion: D² with (W + I) / 2, which works on every connected graph."""

from __future__ import annotations

from torch import Tensor

from vsim.algorithms.d2 import D2Strategy
from vsim.cluster import Cluster
from vsim.core.fields import algorithm


@algorithm
class ExactDiffusionStrategy(D2Strategy):
    """Average corrected weights with the neighbours, by (W + I) / 2: exact diffusion [Yuan et al. 2017,
    arXiv:1702.05122].

        x½ ← optimizer(x, g), with SGD x − η g;  x ← (W + I) (x½ + c) / 2;  c ← x − x½, at first 0

    W + I has no negative eigenvalue, so that W may be that of any connected graph. With SGD and exact gradients, nodes
    with different data reach the optimum of the mean loss at a constant learning rate.

    Args:
        topology: a graph that does not vary; see `GossipStrategy`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights to each neighbour, every step.

    Deviations from the paper: the paper's inner optimizer is SGD, and its W may be left-stochastic; vsim's is
    symmetric. When nodes come and go, c starts again at 0.
    """

    family = "graphs"
    least = -1.0

    def combined(self, rows: Tensor, cluster: Cluster) -> Tensor:
        return super().combined(rows, cluster).add_(rows).div_(2)
