"""Push-sum: gossip on a directed graph, where a node sends to nodes that need not send back."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from vsim.algorithms.graph_strategy import GraphStrategy
from vsim.cluster import Cluster
from vsim.core.fields import algorithm, state


@algorithm
class PushSumStrategy(GraphStrategy):
    """Send shares of the weights along the arrows of a directed graph: push-sum, stochastic gradient push, SGP [Assran
    et al. 2018, arXiv:1811.10792].

        x ← P (x + optimizer(z, g) − z), with SGD P (x − η g(z));  w ← P w, at first 1;  z ← x / w
        P_jk = 1 / (1 + d_k) for an arrow from k to one of the d_k nodes that k sends to; P_kk = 1 − Σ_j P_jk

    The columns of P sum to 1, so that the sum of x is kept; its rows need not, and w undoes the nodes' different
    shares. On a graph with equal numbers of arrows in and out, w stays 1, and this is gossip.

    Args:
        topology: a directed graph that connects every node with every other along its arrows: "ring", k to k + 1;
            "exponential", k to all k + 2^m; "one_peer_exponential", k to k + 2^(t mod ⌈log₂ K⌉) at the t-th step;
            "complete", "chain", "binary_tree", "torus" and `RandomGraph(degree)`, both ways; a list of arrows (k, j) or
            (k, j, P_jk), a CSV file of such rows, or a networkx graph; or a graph that varies. See `GossipStrategy`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights and the mass, 4 · (P + 1) bytes, along each arrow, every step.

    Deviations from the paper: messages are not overlapped with computing. When nodes come and go, x starts again at z,
    and w at 1.
    """

    family = "graphs"
    directed = True

    topology: Any = "one_peer_exponential"

    pushed: Tensor = state()  # x, stacked (R, P)
    mass: Tensor = state()  # w, stacked (R, 1)

    def fresh(self, cluster: Cluster) -> dict[str, Tensor]:
        return {"pushed": cluster.weights.clone(), "mass": torch.ones_like(cluster.weights[:, :1])}

    def sync(self, cluster: Cluster) -> None:
        stepped = self.pushed + (cluster.weights - self.pushed / self.mass)  # x + (z½ − z)
        mixed = self.mixed(torch.cat([stepped, self.mass], 1), cluster, "weights and mass")
        self.pushed, self.mass = mixed[:, :-1], mixed[:, -1:]
        cluster.weights.copy_(self.pushed / self.mass)
