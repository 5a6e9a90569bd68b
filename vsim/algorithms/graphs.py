"""The graphs on which nodes meet their neighbours: edges, mixing weights, rounds of messages, spectral gaps."""

from __future__ import annotations

import csv
import math
import random
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from vsim.arguments import a_list, one_of, real_number, true_or_false, whole_number
from vsim.cluster.randomness import derive_seed
from vsim.reading import read_text

Pair = tuple[int, int]
Edge = Pair | tuple[int, int, float]  # with a mixing weight
Edges = tuple[Edge, ...]
TOPOLOGIES = ("ring", "chain", "binary_tree", "torus", "exponential", "one_peer_exponential", "complete")
MOST_NODES = 1024  # the most nodes for which the spectral gap is computed from a matrix
_MOST_MESSAGES = 1_000_000  # of one mixing; the ledger names both ends of each


@dataclass(frozen=True)
class RandomGraph:
    """A connected graph in which every node has the same number of neighbours, drawn by random swaps of edges.

    Args:
        degree: the number of neighbours of a node, below the number of nodes; degree · nodes must be even.
        seed: seeds the draw, independently of the run's seed.
        redrawn: whether another graph is drawn for every mixing.
    """

    degree: int
    seed: int = 0
    redrawn: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "degree", whole_number("degree", self.degree))
        object.__setattr__(self, "seed", whole_number("seed", self.seed, at_least=0))
        true_or_false("redrawn", self.redrawn)

    def edges(self, num_nodes: int, number: int = 0) -> tuple[Pair, ...]:
        """Return the edges among `num_nodes` nodes, with `redrawn` those of mixing number `number`."""
        if self.degree >= num_nodes or self.degree * num_nodes % 2:
            raise ValueError(f"{self}: {num_nodes} nodes cannot have {self.degree} neighbours each")
        hops = [*range(1, self.degree // 2 + 1), *([num_nodes // 2] if self.degree % 2 else [])]
        edges = list(_circulant(num_nodes, hops))
        draws = random.Random(derive_seed(self.seed, number) if self.redrawn else self.seed)
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
            if num_parts(edges, num_nodes) == 1:
                return _undirected(edges)
        raise ValueError(f"{self}: no connected graph of {num_nodes} nodes was found; give a larger degree")


@dataclass(frozen=True)
class GraphCycle:
    """Graphs that take turns: mixing number t is on graph t mod m of m."""

    graphs: tuple[str | RandomGraph | Edges, ...]


Graph = str | Edges  # of one mixing
Topology = Graph | RandomGraph | GraphCycle | Callable[[int], Any]  # step, from 1 → a graph


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


def graph_at(topology: Topology, population: int, number: int, step: int, directed: bool = False) -> tuple[Graph, int]:
    """Return the graph of mixing number `number`, counted from 0, after step `step`, and the mixing's number on it.

    Args:
        population: the number of nodes that may take part.
    """
    if isinstance(topology, GraphCycle):
        turn, place = divmod(number, len(topology.graphs))
        return graph_at(topology.graphs[place], population, turn, step, directed)
    if isinstance(topology, RandomGraph):
        edges = _drawn(topology, population, number if topology.redrawn else 0)
        return (*edges, *((j, i) for i, j in edges)) if directed else edges, 0
    if isinstance(topology, str | tuple):
        return topology, number
    found = topology_of(topology(step), directed)
    if not isinstance(found, str | tuple):
        raise TypeError(f"topology at step {step}: a function must return a name or edges, got {found!r:.100}")
    check_fits(found, population)
    return found, number


_drawn = lru_cache(maxsize=64)(RandomGraph.edges)


def mixing(graph: Graph, active: Sequence[int], number: int = 0, directed: bool = False) -> Mixing:
    """Return mixing number `number`, counted from 0, of the participating nodes `active`.

    On an undirected graph, rows and columns of W sum to 1; on a directed one, columns only.
    """
    return _mixing(graph, active, number % cycle(graph, len(active)), directed)


@lru_cache(maxsize=64)
def _mixing(graph: Graph, active: Sequence[int], number: int, directed: bool) -> Mixing:
    n, hops = len(active), _hops(graph, len(active), number, directed)
    if hops is not None:  # a round for every hop
        sources = np.arange(n)
        rounds = [np.stack([sources, (sources + hop) % n], 1) for hop in hops]
        received = torch.full((len(hops), n), 1 / (1 + len(hops)), dtype=torch.float64)
        return Mixing(rounds, received, 1 - received.sum(0))
    edges = edges_of(graph, active, directed)
    ends = np.array([edge[:2] for edge in edges], dtype=np.int64).reshape(-1, 2)
    degrees = np.bincount(ends[:, 0] if directed else ends.reshape(-1), minlength=n)
    shares = [edge[2] if len(edge) == 3 else 1 / (1 + max(degrees[[*edge[: 2 - directed]]])) for edge in edges]
    share = {(i, j): w for (i, j), w in zip(ends.tolist(), shares, strict=True)}
    arcs = ends
    if not directed:
        share |= {(j, i): w for (i, j), w in share.items()}
        arcs = np.concatenate([ends, ends[:, ::-1]])
    arcs = arcs[np.lexsort((arcs[:, 1], arcs[:, 0], (arcs[:, 1] - arcs[:, 0]) % n))]
    rounds = [np.array(pairs, dtype=np.int64) for pairs in _matchings((i, j) for i, j in arcs.tolist())]
    received, sent = torch.zeros(len(rounds), n, dtype=torch.float64), torch.zeros(n, dtype=torch.float64)
    for counts, pairs in zip(received, rounds, strict=True):
        own = torch.tensor([share[i, j] for i, j in pairs.tolist()], dtype=torch.float64)
        counts[torch.from_numpy(pairs[:, 1])] = own
        sent[torch.from_numpy(pairs[:, 0])] += own
    return Mixing(rounds, received, (1 - (sent if directed else received.sum(0))).clamp(min=0))


@lru_cache(maxsize=64)
def gap_of(graphs: Sequence[tuple[Graph, int]], active: Sequence[int], directed: bool = False) -> float:
    """Return 1 − |λ₂(W)|; for t > 1 graphs, which take turns, 1 − the mean contraction ‖Wₜ ⋯ W₁ − 1/n‖₂^(1/t).

    NaN for more than 1024 nodes on a graph that does not look alike from all nodes.

    Args:
        graphs: each with the number of the mixing on it.
    """
    n, hops = len(active), [_hops(graph, len(active), number, directed) for graph, number in graphs]
    if None not in hops:  # the Fourier transform has the eigenvalues of a circulant matrix
        product = np.ones(n, dtype=complex)
        for own in hops:
            row = np.zeros(n)
            row[[0, *(own or [])]] = 1 / (1 + len(own or []))
            product *= np.fft.fft(row)
        return 1 - float(np.abs(product[1:]).max(initial=0)) ** (1 / len(graphs))
    if n > MOST_NODES:
        return math.nan
    matrix = torch.eye(n, dtype=torch.float64)
    for graph, number in graphs:
        matrix = mixing(graph, active, number, directed).matrix() @ matrix
    if directed:  # W is not normal: the second largest of the eigenvalues' magnitudes
        sizes = torch.linalg.eigvals(matrix).abs().sort(descending=True).values
        return 1 - float(sizes[1]) ** (1 / len(graphs)) if n > 1 else 1.0
    return 1 - float(torch.linalg.matrix_norm(matrix - 1 / n, 2)) ** (1 / len(graphs))


def _hops(graph: Topology, n: int, number: int = 0, directed: bool = False) -> list[int] | None:
    """Return how many places ahead each node sends in each round, on a graph that looks alike from all n nodes.

    None for other graphs.
    """
    if graph == "one_peer_exponential":
        return [2 ** (number % cycle(graph, n))] if n > 1 else []
    if not isinstance(graph, str) or graph in ("torus", "chain", "binary_tree"):
        return None
    ahead = {"ring": [1], "exponential": [2**m for m in range((n - 1).bit_length())]}.get(graph, range(1, n))
    return sorted({hop % n for one in ahead for hop in ((one,) if directed else (one, -one))} - {0})


def check_fits(topology: Topology, n: int) -> None:
    """Raise a ValueError if edges do not fit n nodes, or if a mixing sends too many messages to simulate."""
    if isinstance(topology, GraphCycle):
        for graph in topology.graphs:
            check_fits(graph, n)
    messages = 0
    if isinstance(topology, RandomGraph):
        messages = topology.degree * n
    elif isinstance(topology, tuple):
        messages = 2 * len(topology)
        if (most := max((max(edge[:2]) for edge in topology), default=0)) >= n:
            raise ValueError(f"topology: nodes are 0 … {n - 1}, got {most}")
    elif isinstance(topology, str):  # the hops of a complete graph need not be listed
        each = {"complete": n - 1, "torus": 4, "chain": 2, "binary_tree": 2}
        messages = n * (each[topology] if topology in each else len(_hops(topology, n) or []))
    if messages > _MOST_MESSAGES:
        raise ValueError(
            f"topology={topology!r:.100}: a mixing of {n:,} nodes sends {messages:,} messages, and at most "
            f"{_MOST_MESSAGES:,} are simulated; give fewer nodes, or a graph of fewer edges, such as 'ring'"
        )


def parts_of(topology: Topology, population: int, active: Sequence[int], directed: bool = False) -> int:
    """Return the number of parts among `active` between which no message travels; 1 if the graph connects the nodes.

    Graphs that take turns connect nodes together, as do graphs that are redrawn. Names always connect. A function of
    the step is not checked.
    """
    graphs = topology.graphs if isinstance(topology, GraphCycle) else (topology,)
    if not all(isinstance(own, tuple) or (isinstance(own, RandomGraph) and not own.redrawn) for own in graphs):
        return 1
    known = [graph_at(graph, population, 0, 1, directed)[0] for graph in graphs]
    edges = [(edge[0], edge[1]) for graph in known for edge in edges_of(graph, active, directed)]
    return num_parts(edges, len(active), directed)


def edges_of(graph: Graph, active: Sequence[int], directed: bool = False) -> Edges:
    """Return the edges among the participating nodes, as pairs of places in `active`, with weights if they have any.

    A named graph is built on these nodes. Other graphs number all nodes, and keep the edges whose two ends take part.
    """
    n = len(active)
    if not isinstance(graph, str):
        places = {node: place for place, node in enumerate(active)}
        return tuple((places[e[0]], places[e[1]], *e[2:]) for e in graph if e[0] in places and e[1] in places)
    if graph == "torus":
        width = next(a for a in range(math.isqrt(n), 0, -1) if n % a == 0)
        cells = [divmod(i, width) for i in range(n)]
        right = [(row * width + column, row * width + (column + 1) % width) for row, column in cells]
        edges = _undirected([*right, *((i, (i + width) % n) for i in range(n))])
    elif graph in ("chain", "binary_tree"):
        edges = tuple((k - 1 if graph == "chain" else (k - 1) // 2, k) for k in range(1, n))
    elif directed:
        return tuple((i, (i + hop) % n) for hop in _hops(graph, n, 0, True) or [] for i in range(n))
    else:
        return _circulant(n, _hops(graph, n) or [])
    return (*edges, *((j, i) for i, j in edges)) if directed else edges


def cycle(topology: Topology, n: int) -> int:
    """Return the number of mixings after which the graph repeats; 0 if it never does.

    ⌈log₂ n⌉ for "one_peer_exponential".
    """
    if isinstance(topology, GraphCycle):
        inner = [cycle(graph, n) for graph in topology.graphs]
        return len(inner) * max(inner) if all(inner) else 0
    if callable(topology) or (isinstance(topology, RandomGraph) and topology.redrawn):
        return 0
    return max(1, (n - 1).bit_length()) if topology == "one_peer_exponential" else 1


def _circulant(n: int, hops: Iterable[int]) -> tuple[Pair, ...]:
    return _undirected((i, (i + hop) % n) for hop in hops for i in range(n))


def _undirected(pairs: Iterable[Pair]) -> tuple[Pair, ...]:
    return tuple(dict.fromkeys((min(pair), max(pair)) for pair in pairs if pair[0] != pair[1]))


def num_parts(edges: Iterable[Pair], num_nodes: int, directed: bool = False) -> int:
    """Return the number of connected parts; of a directed graph, of parts within which messages go both ways."""
    from scipy.sparse import csr_array  # imported here, since scipy takes long to load
    from scipy.sparse.csgraph import connected_components

    pairs = [*edges]
    matrix = csr_array(([1] * len(pairs), ([i for i, _ in pairs], [j for _, j in pairs])), (num_nodes, num_nodes))
    return int(connected_components(matrix, directed, "strong", return_labels=False))


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


def topology_of(given: Any, directed: bool = False) -> Topology:
    """Return a user's graph after checks; a graph that varies as a `GraphCycle` or as the function itself."""
    if isinstance(given, RandomGraph | GraphCycle):
        return given
    if isinstance(given, str) and not given.endswith(".csv"):
        return one_of("topology", given, TOPOLOGIES)
    if isinstance(given, str | Path):
        given = _rows_of(Path(given))
    elif hasattr(given, "edges") and hasattr(given, "nodes"):
        given = _networkx(given, directed)
    elif callable(given) and not isinstance(given, type):
        try:
            topology_of(given(1), directed)
        except Exception as error:
            raise type(error)(f"topology: the function of the step failed at step 1: {error}") from error
        return given
    listed = a_list("topology", given)
    if listed and _is_graph(listed[0]):
        graphs = tuple(topology_of(graph, directed) for graph in listed)
        if odd := [graph for graph in graphs if not isinstance(graph, str | RandomGraph | tuple)]:
            raise TypeError(f"topology: a list of graphs takes names, RandomGraphs and edges, got {odd[0]!r:.100}")
        return GraphCycle(graphs)  # type: ignore[arg-type]
    return _edges(listed, directed)


def _is_graph(item: Any) -> bool:
    """Return whether an item of a list is a graph, and not an edge."""
    listed = isinstance(item, list | tuple) and any(isinstance(end, list | tuple) for end in item)
    return listed or isinstance(item, str | Path | RandomGraph) or hasattr(item, "edges")


def _edges(listed: Sequence[Any], directed: bool) -> Edges:
    """Return edges after checks: pairs of nodes or triples with a mixing weight, all alike, without repetitions."""
    edges: dict[Pair, float | None] = {}
    for pair in listed:
        if not isinstance(pair, list | tuple) or len(pair) not in (2, 3):
            raise ValueError(
                f"topology: an edge must be a pair of nodes, with a weight if it has any, got {pair!r:.100}"
            )
        i, j = (whole_number("topology: a node", node, at_least=0) for node in pair[:2])
        if i == j:
            raise ValueError(f"topology: an edge must join two nodes, got {(i, j)}")
        weight = real_number("topology: a weight", pair[2], above=0, at_most=1) if len(pair) == 3 else None
        ends = (i, j) if directed else (min(i, j), max(i, j))
        if edges.setdefault(ends, weight) != weight:
            raise ValueError(f"topology: the edge {ends} has the weights {edges[ends]} and {weight}; give one")
    if weighted := {weight is not None for weight in edges.values()} == {True}:
        totals: dict[int, float] = defaultdict(float)
        for (i, j), weight in edges.items():
            for end in (i,) if directed else (i, j):
                totals[end] += weight or 0.0
        if totals[most := max(totals, key=totals.__getitem__)] > 1 + 1e-9:
            raise ValueError(
                f"topology: the weights of node {most} sum to {totals[most]:g}, and at most 1, as the node's own "
                "weight is what they leave; divide the weights"
            )
    elif len({weight is None for weight in edges.values()}) == 2:
        raise ValueError("topology: some edges have a weight and others have none; give all of them a weight, or none")
    return tuple((*ends, weight) if weighted and weight is not None else ends for ends, weight in edges.items())


def _rows_of(path: Path) -> list[list[Any]]:
    """Return the edges of a CSV file: source, target; or source, target, type, weight. A header is skipped."""
    rows = [[cell.strip() for cell in row] for row in csv.reader(read_text(path).splitlines()) if row]
    if rows and not any(cell.isdecimal() for cell in rows[0]):
        rows = rows[1:]
    ends = [[int(cell) if cell.isdecimal() else cell for cell in row[:2]] for row in rows]
    try:
        return [[*own, *([float(row[3])] if len(row) == 4 else row[2:])] for own, row in zip(ends, rows, strict=True)]
    except ValueError as error:
        raise ValueError(f"topology: {path.name}: the fourth column is an edge's weight, a number: {error}") from None


def _networkx(graph: Any, directed: bool) -> list[tuple[Any, ...]]:
    """Return the edges of a networkx graph, with the attribute `weight` unless all weights are 1."""
    if graph.is_directed() and not directed:
        raise ValueError("topology: the edges of a graph go both ways, got a directed graph; PushSumStrategy takes it")
    pairs = [(i, j) for i, j in graph.edges]
    weights = (
        [own.get("weight") for *_, own in graph.edges(data=True)] if callable(graph.edges) else [None] * len(pairs)
    )
    if all(weight in (None, 1) for weight in weights):
        weights = [None] * len(pairs)
    nodes = list(graph.nodes)
    places = {node: node if {*nodes} == {*range(len(nodes))} else place for place, node in enumerate(nodes)}
    edges = [
        (places[i], places[j], *([] if weight is None else [weight]))
        for (i, j), weight in zip(pairs, weights, strict=True)
        if i != j
    ]
    return [*edges, *((j, i, *w) for i, j, *w in edges)] if directed and not graph.is_directed() else edges
