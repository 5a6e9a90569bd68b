"""Gossip: each node averages with its neighbours on a graph, so that the nodes' weights differ."""

from __future__ import annotations

import csv
import math
import random
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vsim.arguments import a_list, one_of, true_or_false, whole_number
from vsim.cluster import Cluster
from vsim.reading import read_text
from vsim.strategy.base import Algorithm, CommunicationModule
from vsim.strategy.when import When, sync_interval

Pair = tuple[int, int]
TOPOLOGIES = ("ring", "torus", "exponential", "one_peer_exponential", "complete")
_MOST_NODES = 1024  # the most nodes for which the spectral gap is computed from a matrix
_MOST_MESSAGES = 1_000_000  # of one mixing; the ledger names both ends of each


@dataclass(frozen=True)
class RandomGraph:
    """A connected graph in which every node has the same number of neighbours, drawn by random swaps of edges.

    Args:
        degree: the number of neighbours of a node, below the number of nodes; degree · nodes must be even.
        seed: seeds the draw, independently of the run's seed.
    """

    degree: int
    seed: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "degree", whole_number("degree", self.degree))
        object.__setattr__(self, "seed", whole_number("seed", self.seed, at_least=0))

    def edges(self, num_nodes: int) -> tuple[Pair, ...]:
        """Return the edges among `num_nodes` nodes."""
        if self.degree >= num_nodes or self.degree * num_nodes % 2:
            raise ValueError(f"{self}: {num_nodes} nodes cannot have {self.degree} neighbours each")
        hops = [*range(1, self.degree // 2 + 1), *([num_nodes // 2] if self.degree % 2 else [])]
        edges, draws = list(_circulant(num_nodes, hops)), random.Random(self.seed)
        known = set(edges)
        for _ in range(100):
            for _ in range(10 * len(edges)):
                one, two = draws.randrange(len(edges)), draws.randrange(len(edges))
                (a, b), (c, d) = edges[one], edges[two][:: draws.choice([1, -1])]
                new = _undirected([(a, d), (c, b)])
                if len({a, b, c, d}) == 4 and not known & {*new}:
                    known -= {edges[one], edges[two]}
                    known |= {*new}
                    edges[one], edges[two] = new
            if _connected(edges, num_nodes):
                return _undirected(edges)
        raise ValueError(f"{self}: no connected graph of {num_nodes} nodes was found; give a larger degree")


Topology = str | RandomGraph | tuple[Pair, ...]


@dataclass(frozen=True)
class Mixing:
    """One multiplication by W, in rounds of messages; in a round, a node sends at most once and receives at most once.

    Attributes:
        rounds: for each round, the pairs (m, 2) of source and destination, as places in `active`.
        received: (rounds, n), the weight of the message that a node receives in a round.
        own: (n,), the weight of a node's own row.
    """

    rounds: list[NDArray[np.int64]]
    received: Tensor
    own: Tensor

    def matrix(self) -> Tensor:
        """Return W (n, n)."""
        W = torch.diag(self.own)
        for pairs, counts in zip(self.rounds, self.received, strict=True):
            source, destination = torch.from_numpy(pairs.T)
            W[destination, source] = counts[destination]
        return W


@lru_cache(maxsize=64)
def mixing(topology: Topology, active: Sequence[int], number: int = 0) -> Mixing:
    """Return mixing number `number`, counted from 0, of the participating nodes `active`."""
    n, hops = len(active), _hops(topology, len(active), number)
    if hops is not None:  # a round for every hop
        sources = np.arange(n)
        rounds = [np.stack([sources, (sources + hop) % n], 1) for hop in hops]
        received = torch.full((len(hops), n), 1 / (1 + len(hops)), dtype=torch.float64)
        return Mixing(rounds, received, 1 - received.sum(0))
    edges = np.array(edges_of(topology, active), dtype=np.int64).reshape(-1, 2)
    degrees = np.bincount(edges.reshape(-1), minlength=n)
    arcs = np.concatenate([edges, edges[:, ::-1]])
    arcs = arcs[np.lexsort((arcs[:, 1], arcs[:, 0], (arcs[:, 1] - arcs[:, 0]) % n))]
    rounds = [np.array(pairs, dtype=np.int64) for pairs in _matchings(arcs.tolist())]
    received = torch.zeros(len(rounds), n, dtype=torch.float64)
    for counts, pairs in zip(received, rounds, strict=True):
        counts[torch.from_numpy(pairs[:, 1])] = torch.from_numpy(1 / (1 + degrees[pairs].max(1)))
    return Mixing(rounds, received, 1 - received.sum(0))


@lru_cache(maxsize=64)
def spectral_gap(topology: Topology, active: Sequence[int]) -> float:
    """Return 1 − |λ₂(W)|; if the graph repeats after t > 1 mixings, 1 − the mean contraction ‖Wₜ ⋯ W₁ − 1/n‖₂^(1/t).

    NaN for more than 1024 nodes on a graph that does not look alike from all nodes.
    """
    n, cycle = len(active), _cycle(topology, len(active))
    if _hops(topology, n) is not None:  # the Fourier transform has the eigenvalues of a circulant matrix
        product = np.ones(n, dtype=complex)
        for number in range(cycle):
            hops = _hops(topology, n, number) or []
            row = np.zeros(n)
            row[[0, *hops]] = 1 / (1 + len(hops))
            product *= np.fft.fft(row)
        return 1 - float(np.abs(product[1:]).max(initial=0)) ** (1 / cycle)
    if n > _MOST_NODES:
        return math.nan
    return 1 - float(torch.linalg.matrix_norm(mixing(topology, active).matrix() - 1 / n, 2))


def _hops(topology: Topology, n: int, number: int = 0) -> list[int] | None:
    """Return how many places ahead each node sends in each round, on a graph that looks alike from all n nodes.

    None for other graphs.
    """
    if topology == "one_peer_exponential":
        return [2 ** (number % _cycle(topology, n))] if n > 1 else []
    if not isinstance(topology, str) or topology == "torus":
        return None
    ahead = {"ring": [1], "exponential": [2**m for m in range((n - 1).bit_length())]}.get(topology, range(1, n))
    return sorted({hop % n for one in ahead for hop in (one, -one)} - {0})


def check_messages(topology: Topology, n: int) -> None:
    """Raise a ValueError if a mixing of n nodes sends too many messages to simulate."""
    if isinstance(topology, RandomGraph):
        messages = topology.degree * n
    elif isinstance(topology, tuple):
        messages = 2 * len(topology)
    else:  # the hops of a complete graph need not be listed
        messages = n * (
            n - 1 if topology == "complete" else 4 if topology == "torus" else len(_hops(topology, n) or [])
        )
    if messages > _MOST_MESSAGES:
        raise ValueError(
            f"topology={topology!r:.100}: a mixing of {n:,} nodes sends {messages:,} messages, and at most "
            f"{_MOST_MESSAGES:,} are simulated; give fewer nodes, or a graph of fewer edges, such as 'ring'"
        )


def edges_of(topology: Topology, active: Sequence[int]) -> tuple[Pair, ...]:
    """Return the edges among the participating nodes, as pairs of places in `active`.

    A named graph is built on these nodes. Other graphs number all nodes, and keep the edges whose two ends take part.
    """
    n = len(active)
    if topology == "torus":
        width = next(a for a in range(math.isqrt(n), 0, -1) if n % a == 0)
        cells = [divmod(i, width) for i in range(n)]
        right = [(row * width + column, row * width + (column + 1) % width) for row, column in cells]
        return _undirected([*right, *((i, (i + width) % n) for i in range(n))])
    if isinstance(topology, str):
        return _circulant(n, _hops(topology, n) or [])
    assert not isinstance(topology, RandomGraph)
    places = {node: place for place, node in enumerate(active)}
    return tuple((places[i], places[j]) for i, j in topology if i in places and j in places)


def _cycle(topology: Topology, n: int) -> int:
    """Return the number of mixings after which the graph repeats: ⌈log₂ n⌉ for "one_peer_exponential", else 1."""
    return max(1, (n - 1).bit_length()) if topology == "one_peer_exponential" else 1


def _circulant(n: int, hops: Iterable[int]) -> tuple[Pair, ...]:
    return _undirected((i, (i + hop) % n) for hop in hops for i in range(n))


def _undirected(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    return tuple(dict.fromkeys((min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]))


def _connected(edges: Iterable[Pair], num_nodes: int) -> bool:
    near = defaultdict(set)
    for i, j in edges:
        near[i].add(j)
        near[j].add(i)
    reached, coming = {0}, [0]
    while coming:
        new = near[coming.pop()] - reached
        reached |= new
        coming += new
    return len(reached) == num_nodes


def _matchings(arcs: Iterable[Pair]) -> list[list[Pair]]:
    """Split arcs into d rounds, for the largest degree d; in a round, a node sends and receives at most once.

    Rounds are edge colours of the bipartite graph of sources and destinations, by alternating paths [König 1916].
    """
    out: dict[int, dict[int, int]] = defaultdict(dict)  # source → round → destination
    into: dict[int, dict[int, int]] = defaultdict(dict)  # destination → round → source
    least: tuple[dict[int, int], ...] = defaultdict(int), defaultdict(int)  # no round below is free at a node

    def first_free(own: dict[int, int], known: dict[int, int], node: int) -> int:
        while known[node] in own:
            known[node] += 1
        return known[node]

    for source, destination in arcs:
        a, b = first_free(out[source], least[0], source), first_free(into[destination], least[1], destination)
        path, end, now, sides = [], destination, a, (into, out)
        while a != b and now in sides[0][end]:  # follow arcs of rounds a, b, a, …, to exchange a and b
            other = sides[0][end][now]
            path.append((other, end, now) if sides[0] is into else (end, other, now))
            end, now, sides = other, a + b - now, sides[::-1]
        for i, j, c in path:
            del out[i][c], into[j][c]
            least[0][i], least[1][j] = min(least[0][i], a, b), min(least[1][j], a, b)
        for i, j, c in [*((i, j, a + b - c) for i, j, c in path), (source, destination, a)]:
            out[i][c], into[j][c] = j, i
    rounds: dict[int, list[Pair]] = defaultdict(list)
    for i, own in out.items():
        for c, j in own.items():
            rounds[c].append((i, j))
    return [sorted(rounds[c]) for c in sorted(rounds)]


def topology_of(given: Any) -> Topology:
    """Return a user's graph: a name, a `RandomGraph`, or edges after checks."""
    if isinstance(given, RandomGraph):
        return given
    if isinstance(given, str) and not given.endswith(".csv"):
        return one_of("topology", given, TOPOLOGIES)
    if isinstance(given, str | Path):
        rows = [row for row in csv.reader(read_text(Path(given)).splitlines()) if row]
        numbers = [[int(n) if n.strip().isdecimal() else n for n in row] for row in rows]
        given = numbers[1:] if rows and not any(isinstance(n, int) for n in numbers[0]) else numbers  # skips a header
    elif hasattr(given, "edges") and hasattr(given, "nodes"):  # a networkx graph
        if given.is_directed():
            raise ValueError("topology: the edges of a graph go both ways, got a directed graph")
        attributes = [data for *_, data in given.edges(data=True)] if callable(given.edges) else []
        if weights := [own["weight"] for own in attributes if own.get("weight", 1) != 1]:
            raise ValueError(
                f"topology: an edge of the graph has the weight {weights[0]!r}, which would have no effect, as nodes "
                "average by Metropolis weights; remove the edges' attribute 'weight'"
            )
        nodes = list(given.nodes)
        places = {node: node if {*nodes} == {*range(len(nodes))} else place for place, node in enumerate(nodes)}
        given = [(places[i], places[j]) for i, j in given.edges if i != j]
    edges = []
    for pair in a_list("topology", given):
        if not isinstance(pair, list | tuple) or len(pair) != 2:
            raise ValueError(f"topology: an edge must be a pair of nodes, got {pair!r:.100}")
        i, j = (whole_number("topology: a node", node, at_least=0) for node in pair)
        if i == j:
            raise ValueError(f"topology: an edge must join two nodes, got {(i, j)}")
        edges.append((i, j))
    return _undirected(edges)


class GossipCommunicator(CommunicationModule):
    """Average with the neighbours on a graph, after every H-th step.

        θ_k ← optimizer(θ_k, g_k);  after every H-th step θ_k ← Σ_j W_kj θ_j
        W_kj = 1 / (1 + max(d_k, d_j)) for neighbours of degrees d_k, d_j; W_kk = 1 − Σ_j W_kj [Metropolis weights]

    W is symmetric, and its rows and columns sum to 1. A mixing therefore keeps the nodes' mean, and multiplies the
    nodes' distance from the mean by at most |λ₂(W)|. The history's column `spectral_gap` is 1 − |λ₂(W)|. With tracking
    [DIGing, Nedić et al. 2017, arXiv:1607.03218], the optimizer takes y_k in place of the node's gradient. y_k follows
    the mean gradient, so that nodes with different data reach the optimum of the mean loss at a constant learning rate:

        y ← W y + ∇f(x_new) − ∇f(x_old), at first ∇f(x);  x ← optimizer(W x, y), in the paper W x − α y

    Args:
        topology: the graph: "ring"; "torus", with sides as equal as possible, a ring if K is prime; "exponential", k ±
            2^m; "one_peer_exponential" [Ying et al. 2021, arXiv:2110.13363], where at the t-th mixing node k sends to k
            + 2^(t mod ⌈log₂ K⌉), and averages its row with the row it receives; "complete"; `RandomGraph(degree)`; a
            list of edges, a CSV file with one edge per row, or an undirected networkx graph without
            weights of edges.
        H: steps between mixings, at least 1, or a schedule of `vsim.strategy.when`.
        tracking: whether to track gradients; needs H = 1.

    Payload: all weights (twice with tracking) to each neighbour every H steps, in d rounds of messages for the largest
    degree d. In a round, a node sends at most once and receives at most once. The ledger has the edges of each round,
    so that a network prices each node by this node's links alone.

    Deviations from the paper: weights are averaged after the gradient step, not during it. When nodes come and go, a
    named graph is built on the participating nodes; other graphs keep the edges among these. Tracking starts again.
    """

    correction: Tensor  # W y − g, stacked (R, P); with tracking
    mixings: int  # the number of mixings on this graph so far
    derived = ("graph",)

    def __init__(self, *, topology: Any = "ring", H: int | When = 1, tracking: bool = False) -> None:
        self.topology, self.H = topology_of(topology), sync_interval(H)
        self.tracking = true_or_false("tracking", tracking)
        if self.tracking and H != 1:
            raise ValueError(f"tracking=True mixes weights and gradients at every step, H = 1; got H={H!r}")

    def recorded(self, name: str, value: Any) -> Any:
        return self.topology if name == "topology" else super().recorded(name, value)

    def setup(self, cluster: Cluster) -> None:
        n, self.graph = cluster.population, self.topology
        check_messages(self.topology, n)
        if isinstance(self.topology, RandomGraph):
            self.graph = self.topology.edges(n)
        elif isinstance(self.topology, tuple):
            if (most := max(map(max, self.topology), default=0)) >= n:
                raise ValueError(f"topology: nodes are 0 … {n - 1}, got {most}")
            if not _connected(self.topology, n):
                raise ValueError(f"topology: the graph must connect all {n} nodes")
        self.keep_shared(mixings=0)
        if self.tracking:
            self.keep_stacked(correction=torch.zeros_like(cluster.weights))

    def attend(self, cluster: Cluster) -> None:
        self.mixings = 0
        if self.tracking:  # with other nodes, Σ y = Σ g would no longer hold
            self.correction = torch.zeros_like(cluster.weights)

    def communicate_gradients(self, cluster: Cluster) -> None:
        if not self.tracking:
            super().communicate_gradients(cluster)
            return
        y = self.correction + cluster.grads  # W y + ∇f(x_new) − ∇f(x_old)
        x, y_mixed = self._mixed(torch.cat([cluster.weights, y], 1), cluster, "weights and trackers").chunk(2, 1)
        cluster.weights.copy_(x)
        self.correction = y_mixed - cluster.grads
        cluster.grads.copy_(y)

    def sync(self, cluster: Cluster) -> None:
        if not self.tracking:
            cluster.weights.copy_(self._mixed(cluster.weights, cluster, "weights"))

    def _mixed(self, rows: Tensor, cluster: Cluster, label: str) -> Tensor:
        """Return W times stacked `rows` (R, p), added up entry by entry, in the order of the rounds."""
        active: Sequence[int] = cluster.active
        nodes = cluster.collectives.nodes
        now = mixing(self.graph, active, self.mixings % _cycle(self.graph, len(active)))
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
        return {"spectral_gap": spectral_gap(self.graph, cluster.active)}


class GossipStrategy(Algorithm, of=GossipCommunicator):
    """Average with the neighbours on a graph: gossip, decentralized SGD, D-PSGD [Lian et al. 2017,
    arXiv:1705.09056].
    """

    family = "local steps"

    def recorded(self, name: str, value: Any) -> Any:
        (gossip,) = self.communication_modules
        return gossip.recorded(name, value)  # edges, in place of a file or graph

    @property
    def _repeats(self) -> bool:
        (gossip,) = self.communication_modules
        assert isinstance(gossip, GossipCommunicator)
        same_graph = gossip.topology != "one_peer_exponential"
        return type(self) is GossipStrategy and same_graph and (gossip.tracking or gossip.when.period == 1)

    def mixing_matrix(self, num_nodes: int, number: int = 0) -> Tensor:
        """Return W (K, K) of mixing number `number`, counted from 0; "one_peer_exponential" depends on the number.

        Args:
            num_nodes: K, up to 1024.
        """
        (gossip,) = self.communication_modules
        assert isinstance(gossip, GossipCommunicator)
        n, graph = whole_number("num_nodes", num_nodes, at_most=_MOST_NODES), gossip.topology
        graph = graph.edges(n) if isinstance(graph, RandomGraph) else graph
        return mixing(graph, tuple(range(n)), whole_number("number", number, at_least=0)).matrix()
