"""The base of algorithms whose nodes send to their neighbours on a graph."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from vsim.algorithms.graphs import (
    MOST_NODES,
    Graph,
    GraphCycle,
    Topology,
    check_fits,
    cycle,
    gap_of,
    graph_at,
    mixing,
    parts_of,
    topology_of,
)
from vsim.arguments import whole_number
from vsim.cluster import Cluster
from vsim.core.algorithm import Algorithm
from vsim.core.fields import algorithm, state


@algorithm
class GraphStrategy(Algorithm):
    """Base of algorithms whose nodes send to their neighbours on a graph.

    Attributes:
        directed: whether edges go one way.
        graphs: the graph, after checks.
    """

    directed: ClassVar[bool] = False
    derived = ("has_warned",)
    resolved = ("topology",)

    topology: Any = "ring"

    graphs: Topology = state()
    mixings: int = state()  # the number of mixings among these nodes so far

    def __post_init__(self) -> None:
        self.graphs = topology_of(self.topology, self.directed)
        super().__post_init__()

    @property
    def is_gossip(self) -> bool:
        return True

    def rounds_repeat(self, num_nodes: int) -> int | None:
        return cycle(self.graphs, num_nodes) or None

    def mixing_matrix(self, num_nodes: int, number: int = 0) -> Tensor:
        """Return W (K, K) of mixing number `number`, counted from 0; it matters on graphs that vary.

        Args:
            num_nodes: K, up to 1024.
        """
        n = whole_number("num_nodes", num_nodes, at_most=MOST_NODES)
        number = whole_number("number", number, at_least=0)
        graph, own = graph_at(self.graphs, n, number, number + 1, self.directed)
        return mixing(graph, tuple(range(n)), own, self.directed).matrix()

    def fresh(self, cluster: Cluster) -> dict[str, Tensor]:
        """Return the stacked state of nodes that begin, or that meet other nodes than before. Default: none."""
        return {}

    def recorded(self, name: str, value: Any) -> Any:
        if name != "topology":
            return super().recorded(name, value)
        return self.graphs.graphs if isinstance(self.graphs, GraphCycle) else self.graphs  # edges, not a file's path

    def setup(self, cluster: Cluster) -> None:
        n = cluster.population
        check_fits(self.graphs, n)
        if parts_of(self.graphs, n, range(n), self.directed) > 1:
            ways = ", along its arrows," if self.directed else ""
            raise ValueError(f"topology: the graph{ways} must connect all {n} nodes")
        self.has_warned = False
        self.keep_shared(mixings=0)
        self.keep_stacked(**self.fresh(cluster))

    def attend(self, cluster: Cluster) -> None:
        vars(self).update(self.fresh(cluster), mixings=0)
        parts = parts_of(self.graphs, cluster.population, cluster.active, self.directed)
        if parts > 1 and not self.has_warned:
            self.has_warned = True
            if cluster.collectives.rank == 0:  # warn once, not once per process
                warnings.warn(
                    f"topology: from step {cluster.step} on, the graph of the {cluster.num_nodes} participating nodes "
                    f"has {parts} parts that no longer exchange with each other; a named graph, such as 'ring', is "
                    "built on the nodes that take part",
                    UserWarning,
                    stacklevel=2,
                )

    def graph(self, cluster: Cluster, number: int) -> tuple[Graph, int]:
        """Return the graph of mixing number `number`, and the mixing's number on it; see `graph_at`."""
        graph, own = graph_at(self.graphs, cluster.population, number, max(1, cluster.step), self.directed)
        return graph, own % cycle(graph, cluster.num_nodes)

    def mixed(self, rows: Tensor, cluster: Cluster, label: str) -> Tensor:
        """Return W times stacked `rows` (R, p), added up entry by entry, in the order of the rounds."""
        active: Sequence[int] = cluster.active
        nodes = cluster.collectives.nodes
        graph, number = self.graph(cluster, self.mixings)
        now = mixing(graph, active, number, self.directed)
        self.mixings += 1
        held = list(nodes) or [0]  # without participating nodes, a process keeps one row that is never sent
        own, *received = torch.cat([now.own[None], now.received])[:, held].to(rows).unbind()
        mixed = rows * own[:, None]
        numbers = np.asarray(active)
        for pairs, counts in zip(now.rounds, received, strict=True):
            named = pairs if isinstance(active, range) else numbers[pairs]  # a range: all nodes
            arriving = cluster.collectives.send(rows, named, label=label)
            mixed.add_(arriving.mul_(counts[:, None]))
        return mixed

    def measured(self, cluster: Cluster) -> dict[str, float]:
        n, last = cluster.num_nodes, max(0, self.mixings - 1)
        numbers = range(cycle(self.graphs, n)) or [last]
        graphs = tuple(self.graph(cluster, number) for number in numbers)
        return {"spectral_gap": gap_of(graphs, cluster.active, self.directed)}
