"""Gossip: each node averages with its neighbours on a graph, so that the nodes' weights differ."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.algorithms.graph_strategy import GraphStrategy
from vsim.arguments import true_or_false
from vsim.cluster import Cluster
from vsim.core.attack import Attack
from vsim.core.fields import algorithm, state
from vsim.core.when import When, sync_interval


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
            raise ValueError(
                f"{name}: attack={attack} cannot act, as with tracking=True nodes send weights and trackers"
            )
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
