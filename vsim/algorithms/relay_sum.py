"""RelaySum: nodes of a tree relay sums, so that every node's vector reaches every other exactly once, only later."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vsim.algorithms.graph_strategy import GraphStrategy
from vsim.algorithms.graphs import Edges, edges_of, parts_of
from vsim.arguments import one_of
from vsim.cluster import Cluster
from vsim.core.fields import algorithm, state


@algorithm
class RelaySumStrategy(GraphStrategy):
    """Relay sums of weights or gradients along a tree: RelaySGD [Vogels et al. 2021, arXiv:2110.04175].

        message from k to its neighbour j: m_kj ← v_k + Σ_{i ≠ j} m_ik, with the m_ik of the last step, at first 0
        form="model": v_k = y_k = optimizer(x_k, g_k), and x_k ← (y_k + Σ_i m_ik + (n − count_k) x₀) / n
        form="gradient": v_k = g_k, and x_k ← optimizer(x_k, (g_k + Σ_i m_ik) / n)

    n is the number of nodes, and count_k how many vectors the sum has; counts travel with the messages. After as many
    steps as the longest way in the tree, each sum has n vectors, and no vector twice. With SGD and relayed weights,
    nodes with different data reach the optimum of the mean loss at a constant learning rate. With relayed gradients,
    the first steps, in which few gradients have arrived, leave the nodes' weights apart, and the mean off the optimum.

    Args:
        topology: a tree: "chain", "binary_tree", or edges without a cycle; see `GossipStrategy`.
        form: "model", which relays weights, or "gradient", which relays gradients.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights and a count, 4 · (P + 1) bytes, or all gradients, to each neighbour, every step.

    Deviations from the paper: one tree, in place of two that share the load. When nodes come and go, messages start
    again, and each node's own weights then take the place of x₀. Nodes that leave must not cut a tree of given edges.
    """

    family = "graphs"

    topology: Any = "chain"
    form: str = "model"

    received: Tensor = state()  # m_ik, stacked (R, d, P), with a count in form="model" (R, d, P + 1)
    filler: Tensor = state()  # x₀, stacked (R, P); of form="model"

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of("form", self.form, ("model", "gradient"))
        if not (self.graphs in ("chain", "binary_tree") or isinstance(self.graphs, tuple)):
            raise ValueError(
                "topology: RelaySum takes one tree: 'chain', 'binary_tree' or a list of edges; got "
                f"{self.topology!r:.100}"
            )
        if isinstance(self.graphs, tuple) and any(len(edge) == 3 for edge in self.graphs):
            raise ValueError(
                "topology: weights of edges have no effect on RelaySum, whose sums have weights 1; drop them"
            )

    def attend(self, cluster: Cluster) -> None:
        edges = edges_of(self.graphs, cluster.active)  # type: ignore[arg-type]
        if parts_of(self.graphs, cluster.population, cluster.active) > 1:
            raise ValueError(
                f"topology: at step {cluster.step} the nodes {list(cluster.active)} are left, whom the edges {edges} "
                "of the tree do not connect; take 'chain' or 'binary_tree', which are built on the nodes that take part"
            )
        super().attend(cluster)

    def fresh(self, cluster: Cluster) -> dict[str, Tensor]:
        edges = edges_of(self.graphs, cluster.active)  # type: ignore[arg-type]
        if len(edges) != max(0, cluster.num_nodes - 1):
            raise ValueError(
                f"topology: a tree of {cluster.num_nodes} nodes has one edge fewer, got {len(edges)} edges"
            )
        rows, size = cluster.weights.shape
        zeros = cluster.weights.new_zeros(rows, len(_exchanges(edges)), size + (self.form == "model"))
        return {"received": zeros} | ({"filler": cluster.weights.clone()} if self.form == "model" else {})

    def _relayed(self, own: Tensor, cluster: Cluster, label: str) -> Tensor:
        """Return stacked `own` (R, p) plus the sum of the messages that arrive in this step, and keep the messages."""
        nodes, active = cluster.collectives.nodes, np.asarray(cluster.active)
        arriving, total = torch.zeros_like(self.received), own.clone()
        exchanges = _exchanges(edges_of(self.graphs, cluster.active))  # type: ignore[arg-type]
        for number, pairs in enumerate(exchanges):  # in a round, each node exchanges with one neighbour
            message = own.clone()
            for other in range(len(exchanges)):
                if other != number:
                    message.add_(self.received[:, other])
            sent = cluster.collectives.send(message, active[pairs], label=label)
            rows = [place - nodes.start for place in pairs[:, 1].tolist() if place in nodes]
            arriving[rows, number] = sent[rows]
            total.add_(arriving[:, number])
        self.received = arriving
        return total

    def communicate_gradients(self, cluster: Cluster) -> None:
        if self.form == "gradient":
            cluster.grads.copy_(self._relayed(cluster.grads, cluster, "gradients").div_(cluster.num_nodes))

    def sync(self, cluster: Cluster) -> None:
        if self.form == "gradient":
            return
        own = torch.cat([cluster.weights, torch.ones_like(cluster.weights[:, :1])], 1)
        total = self._relayed(own, cluster, "weights and counts")
        missing = cluster.num_nodes - total[:, -1:]
        cluster.weights.copy_(total[:, :-1].add_(missing * self.filler).div_(cluster.num_nodes))


def _exchanges(edges: Edges) -> Sequence[NDArray[np.int64]]:
    """Return the edges of a tree in as few rounds as its largest degree: pairs of places, both ways; see `send`."""
    near: dict[int, list[int]] = defaultdict(list)
    for i, j, *_ in edges:
        near[i].append(j)
        near[j].append(i)
    rounds: dict[int, list[tuple[int, int]]] = defaultdict(list)
    coming = [(0, -1, -1)]  # node, its parent, the round of the edge between them
    while coming:
        node, parent, taken = coming.pop()
        free = (number for number in range(len(near)) if number != taken)
        for child, number in zip((other for other in near[node] if other != parent), free, strict=False):
            rounds[number] += [(node, child), (child, node)]
            coming.append((child, node, number))
    return [np.array(sorted(rounds[number]), dtype=np.int64) for number in sorted(rounds)]
