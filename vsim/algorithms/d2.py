"""D²: gossip that remembers what the last mixing moved, so that different data no longer matter."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.algorithms.graph_strategy import GraphStrategy
from vsim.algorithms.graphs import MOST_NODES, cycle, mixing
from vsim.cluster import Cluster
from vsim.core.fields import algorithm, state


@algorithm
class D2Strategy(GraphStrategy):
    """Average corrected weights with the neighbours: D² [Tang et al. 2018, arXiv:1803.07068].

        x½ ← optimizer(x, g), with SGD x − η g;  x ← W (x½ + c);  c ← x − x½, at first 0

    With SGD and exact gradients, nodes with different data reach the optimum of the mean loss at a constant learning
    rate, where gossip ends at a distance that grows with the rate. Without communication, c stays 0. W must have no
    eigenvalue below −1/3, where the corrections would grow; at −1/3, which a ring of an even number of nodes has, the
    loss's curvature alone damps them.

    Args:
        topology: a graph that does not vary; see `GossipStrategy`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights to each neighbour, every step.

    Deviations from the paper: the paper's inner optimizer is SGD. When nodes come and go, c starts again at 0.
    """

    family = "graphs"
    least = -1 / 3  # the smallest allowed eigenvalue of W

    correction: Tensor = state()  # c, stacked (R, P)

    def __post_init__(self) -> None:
        super().__post_init__()
        if cycle(self.graphs, MOST_NODES) != 1:
            raise ValueError(
                f"topology: D² and exact diffusion need one symmetric W; got {self.topology!r:.100}, which varies"
            )

    def fresh(self, cluster: Cluster) -> dict[str, Tensor]:
        n, smallest = cluster.num_nodes, 0.0
        if n <= MOST_NODES:
            matrix = mixing(self.graph(cluster, 0)[0], cluster.active).matrix()
            smallest = float(torch.linalg.eigvalsh(matrix)[0])
        if smallest < self.least - 1e-9:
            raise ValueError(
                f"topology: W of the {n} nodes has the eigenvalue {smallest:.3f}, and D² diverges "
                "below −1/3; take ExactDiffusionStrategy, a ring, or smaller weights of edges"
            )
        return {"correction": torch.zeros_like(cluster.weights)}

    def sync(self, cluster: Cluster) -> None:
        mixed = self.combined(cluster.weights + self.correction, cluster)
        self.correction = mixed - cluster.weights
        cluster.weights.copy_(mixed)

    def combined(self, rows: Tensor, cluster: Cluster) -> Tensor:
        """Return W times stacked `rows` (R, P)."""
        return self.mixed(rows, cluster, "weights")
