"""Gossip: each node averages with its neighbours on a graph, so that the nodes' weights differ."""

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
from vsim.arguments import true_or_false, whole_number
from vsim.cluster import Cluster
from vsim.core.algorithm import Algorithm
from vsim.core.attack import Attack
from vsim.core.fields import algorithm, state
from vsim.core.when import When, sync_interval


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

    @property
    def _repeats(self) -> bool:
        own = type(self).__module__.startswith("vsim.")
        return own and cycle(self.graphs, MOST_NODES) == 1 and self.when.period == 1

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


@algorithm
class GossipStrategy(GraphStrategy):
    """Average with the neighbours on a graph: gossip, decentralized SGD, D-PSGD [Lian et al. 2017,
    arXiv:1705.09056].

        θ_k ← optimizer(θ_k, g_k);  after every H-th step θ_k ← Σ_j W_kj θ_j
        W_kj = 1 / (1 + max(d_k, d_j)) for neighbours of degrees d_k, d_j; W_kk = 1 − Σ_j W_kj [Metropolis weights]

    W is symmetric, and its rows and columns sum to 1. A mixing therefore keeps the nodes' mean, and multiplies the
    nodes' distance from the mean by at most |λ₂(W)|. The history's column `spectral_gap` is 1 − |λ₂(W)|, and
    `consensus_distance` is sqrt(mean_k ‖θ_k − θ̄‖²) at every validation. With tracking [DIGing, Nedić et al. 2017,
    arXiv:1607.03218], the optimizer takes y_k in place of the node's gradient. y_k follows the mean gradient, so that
    nodes with different data reach the optimum of the mean loss at a constant learning rate (`GradientTrackingStrategy`
    has the form that adapts, then combines):

        y ← W y + ∇f(x_new) − ∇f(x_old), at first ∇f(x);  x ← optimizer(W x, y), in the paper W x − α y

    Args:
        topology: the graph: "ring"; "chain"; "binary_tree", where node k hangs on node (k − 1) // 2; "torus", with
            sides as equal as possible, a ring if K is prime; "exponential", k ± 2^m; "one_peer_exponential" [Ying et
            al. 2021, arXiv:2110.13363], where at the t-th mixing node k sends to k + 2^(t mod ⌈log₂ K⌉), and averages
            its row with the row it receives; "complete"; `RandomGraph(degree)`; a list of edges (i, j), or (i, j, W_ij)
            with mixing weights in (0, 1]; a CSV file with one edge per row, as source, target or source, target, type,
            weight; or an undirected networkx graph, whose attributes `weight` are mixing weights unless all are 1. For
            a graph that varies: a list of graphs, which take turns from mixing to mixing; `RandomGraph(degree,
            redrawn=True)`; or a function of the step, counted from 1, that returns a name or edges.
        H: steps between mixings, at least 1, or a schedule of `vsim.strategy.when`.
        tracking: whether to track gradients; needs H = 1.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights (twice with tracking) to each neighbour every H steps, in d rounds of messages for the largest
    degree d. In a round, a node sends at most once and receives at most once. The ledger has the edges of each round,
    so that a network prices each node by this node's links alone.

    An attacker sends its weights of the last mixing plus its attack on its move since then; see `vsim.Attack`.

    Deviations from the paper: weights are averaged after the gradient step, not during it. When nodes come and go, a
    named graph is built on the participating nodes; other graphs keep the edges among these, with a warning if they
    fall apart. Tracking starts again.
    """

    family = "graphs"

    H: int | When = 1
    tracking: bool = False

    correction: Tensor = state()  # W y − g, stacked (R, P); with tracking
    acting: Attack | None = state(default=None)  # acts on the moves that nodes send
    origin: Tensor = state()  # the weights after the last mixing, stacked (R, P); with an attack

    def __post_init__(self) -> None:
        self.H = sync_interval(self.H)
        self.tracking = true_or_false("tracking", self.tracking)
        if self.tracking and self.H != 1:
            raise ValueError(f"tracking=True mixes weights and gradients at every step, H = 1; got H={self.H!r}")
        super().__post_init__()

    def take_attack(self, attack: Attack, name: str) -> bool:
        if self.tracking:
            raise ValueError(f"{name}: {attack} cannot act, as with tracking=True nodes send weights and trackers")
        self.acting = attack
        return True

    def fresh(self, cluster: Cluster) -> dict[str, Tensor]:
        if self.tracking:  # with other nodes, Σ y = Σ g would no longer hold
            return {"correction": torch.zeros_like(cluster.weights)}
        return {} if self.acting is None else {"origin": cluster.weights.clone()}

    def setup_warmup(self, cluster: Cluster) -> None:
        super().setup_warmup(cluster)
        self.warmup.attack = self.acting

    def communicate_gradients(self, cluster: Cluster) -> None:
        if not self.tracking:
            super().communicate_gradients(cluster)
            return
        y = self.correction + cluster.grads  # W y + ∇f(x_new) − ∇f(x_old)
        x, y_mixed = self.mixed(torch.cat([cluster.weights, y], 1), cluster, "weights and trackers").chunk(2, 1)
        cluster.weights.copy_(x)
        self.correction = y_mixed - cluster.grads
        cluster.grads.copy_(y)

    def follow(self, cluster: Cluster) -> None:
        if self.acting is not None:
            self.origin = cluster.weights.clone()

    def sync(self, cluster: Cluster) -> None:
        if self.tracking:
            return
        if self.acting is not None:
            moves = cluster.weights - self.origin
            self.acting(moves, cluster)
            bad = {*self.acting.attackers(cluster.population)}
            for row, place in enumerate(cluster.collectives.nodes):
                if cluster.active[place] in bad:
                    cluster.weights[row] = self.origin[row] + moves[row]
        cluster.weights.copy_(self.mixed(cluster.weights, cluster, "weights"))
        self.follow(cluster)
