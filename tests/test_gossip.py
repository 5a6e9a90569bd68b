"""Gossip against W by hand, D-PSGD written out for every node, and its bytes edge by edge."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from comparisons_by_hand import check_refusals
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from strategies_by_hand import Parameters, driven, normal, same_apart, started
from torch import Tensor
from torch.utils.data import TensorDataset

import vsim
from vsim.algorithms.graphs import TOPOLOGIES, cycle, edges_of, gap_of, mixing
from vsim.models import MLP
from vsim.strategy import GossipStrategy, OptimSpec, RandomGraph

SGD = OptimSpec("sgd", lr=0.5)
DOUBLE = torch.float64


def W(topology: Any, num_nodes: int, number: int = 0) -> Tensor:
    return GossipStrategy(topology=topology).mixing_matrix(num_nodes, number)


def spectral_gap(topology: str, active: Sequence[int]) -> float:
    return gap_of(tuple((topology, number) for number in range(cycle(topology, len(active)))), active)


def by_hand(rows: list[list[int]], of: int) -> Tensor:
    return torch.tensor(rows, dtype=DOUBLE) / of


# W --------------------------------------------------------------------------------------------------------------------


def test_the_matrices_by_hand() -> None:
    ring = [[1, 1, 0, 0, 1], [1, 1, 1, 0, 0], [0, 1, 1, 1, 0], [0, 0, 1, 1, 1], [1, 0, 0, 1, 1]]
    torch.testing.assert_close(W("ring", 5), by_hand(ring, 3))
    # 2 × 3, row by row with 2 columns: two sides of a column of 3, and one neighbour in a row of 2: three neighbours.
    torus = [[1, 1, 1, 0, 1, 0], [1, 1, 0, 1, 0, 1], [1, 0, 1, 1, 1, 0]]
    torus += [[0, 1, 1, 1, 0, 1], [1, 0, 1, 0, 1, 1], [0, 1, 0, 1, 1, 1]]
    torch.testing.assert_close(W("torus", 6), by_hand(torus, 4))
    # ± 1, ± 2, ± 4 of eight: all but ± 3.
    exponential = [[int((j - i) % 8 not in (3, 5)) for j in range(8)] for i in range(8)]
    torch.testing.assert_close(W("exponential", 8), by_hand(exponential, 6))
    torch.testing.assert_close(W("complete", 4), by_hand([[1] * 4] * 4, 4))
    # A path 0 – 1 – 2 – 3: ends have one neighbour, the others two.
    path = [[2, 1, 0, 0], [1, 1, 1, 0], [0, 1, 1, 1], [0, 0, 1, 2]]
    torch.testing.assert_close(W([(0, 1), (2, 1), (2, 3)], 4), by_hand(path, 3))
    assert W("ring", 2).tolist() == [[0.5, 0.5], [0.5, 0.5]]
    assert W("ring", 1).tolist() == [[1.0]]


@settings(max_examples=60)
@given(st.sampled_from(TOPOLOGIES), st.integers(1, 20), st.integers(0, 9))
def test_rows_and_columns_sum_to_one(topology: str, num_nodes: int, number: int) -> None:
    matrix = W(topology, num_nodes, number)
    ones = torch.ones(num_nodes, dtype=DOUBLE)
    torch.testing.assert_close(matrix.sum(0), ones)
    torch.testing.assert_close(matrix.sum(1), ones)
    assert matrix.min() >= 0
    assert topology == "one_peer_exponential" or torch.equal(matrix, matrix.T)


@settings(max_examples=40)
@given(st.integers(3, 16), st.integers(2, 6), st.integers(0, 5))
def test_random_graphs_are_regular_and_connected(num_nodes: int, degree: int, seed: int) -> None:
    assume(degree < num_nodes and degree * num_nodes % 2 == 0)
    graph = RandomGraph(degree, seed)
    assert {*Counter(itertools.chain(*graph.edges(num_nodes))).values()} == {degree}
    matrix = W(graph, num_nodes)
    torch.testing.assert_close(matrix.sum(1), torch.ones(num_nodes, dtype=DOUBLE))
    assert torch.linalg.matrix_power(matrix, num_nodes).min() > 0
    assert torch.equal(matrix, W(graph, num_nodes))


@settings(max_examples=60)
@given(st.integers(2, 12), st.data())
def test_rounds_are_as_many_as_the_largest_degree(num_nodes: int, data: st.DataObject) -> None:
    pairs = [*itertools.combinations(range(num_nodes), 2)]
    edges = tuple(data.draw(st.lists(st.sampled_from(pairs), unique=True)))
    rounds = [[*map(tuple, pairs.tolist())] for pairs in mixing(edges, tuple(range(num_nodes))).rounds]
    assert len(rounds) == max(Counter(itertools.chain(*edges)).values(), default=0)
    assert sorted(itertools.chain(*rounds)) == sorted([*edges, *((j, i) for i, j in edges)])
    for one in rounds:
        assert all(len({*ends}) == len(ends) for ends in zip(*one, strict=True))


@pytest.mark.parametrize("num_nodes", [2, 8, 16])
def test_one_peer_averages_powers_of_two_exactly(num_nodes: int) -> None:
    x = normal(num_nodes, 3, dtype=DOUBLE)
    for t in range(num_nodes.bit_length() - 1):
        x = W("one_peer_exponential", num_nodes, t) @ x
    torch.testing.assert_close(x, x.mean(0).expand_as(x))


def test_gaps_of_rings_in_closed_form() -> None:
    # Eigenvalues of a ring: 1/3 + 2/3 cos(2πm/n); the others by NumPy's SVD.
    for n in (3, 5, 8):
        assert spectral_gap("ring", tuple(range(n))) == pytest.approx(2 / 3 - 2 / 3 * math.cos(2 * math.pi / n))
    singular = np.linalg.svd(W("torus", 8).numpy(), compute_uv=False)
    assert spectral_gap("torus", tuple(range(8))) == pytest.approx(1 - singular[1])
    assert spectral_gap("complete", tuple(range(6))) == pytest.approx(1)
    assert spectral_gap("one_peer_exponential", tuple(range(8))) == pytest.approx(1)
    assert math.isnan(spectral_gap("torus", tuple(range(2000))))


@settings(max_examples=30)
@given(st.sampled_from(TOPOLOGIES), st.integers(1, 40))
def test_closed_forms_are_those_of_the_edges(topology: str, num_nodes: int) -> None:
    """The mixing and the gap of a named graph against the same graph as a list of edges, and against NumPy's SVD."""
    active = tuple(range(num_nodes))
    if topology != "one_peer_exponential":
        own, listed = mixing(topology, active), mixing(edges_of(topology, active), active)
        assert torch.equal(own.matrix(), listed.matrix())
        for pairs, others in zip(own.rounds, listed.rounds, strict=True):
            np.testing.assert_array_equal(pairs, others)
    cycle = max(1, (num_nodes - 1).bit_length()) if topology == "one_peer_exponential" else 1
    product = np.eye(num_nodes)
    for number in range(cycle):
        product = mixing(topology, active, number).matrix().numpy() @ product
    largest = np.linalg.svd(product - 1 / num_nodes, compute_uv=False)[0]
    assert abs(1 - spectral_gap(topology, active) - largest ** (1 / cycle)) < 1e-6


def test_many_nodes_take_no_time_or_an_error_says_how_many_are_allowed() -> None:
    begun = time.process_time()
    assert len(mixing("complete", range(1000)).rounds) == 999
    # 3 nodes and more differ by 2/3 (1 − cos(2π/n)): for many nodes 4/3 π²/n².
    assert spectral_gap("ring", range(10_000)) == pytest.approx(4 / 3 * (math.pi / 10_000) ** 2, rel=1e-5)
    assert len(RandomGraph(3).edges(4000)) == 6000
    line = vsim.price(
        GossipStrategy(), parameters=1e6, num_nodes=20_000, max_steps=100, network="1 Gbit/s", compute=1.0
    )
    alone = vsim.price(GossipStrategy(), parameters=1e6, num_nodes=5, max_steps=100, network="1 Gbit/s", compute=1.0)
    assert line.seconds.tolist() == pytest.approx(alone.seconds.tolist()) and len(line.ledger) == len(alone.ledger)
    assert time.process_time() - begun < 30  # 10 minutes, if every pair of every step were looked at
    for topology, nodes in (("complete", 2000), ("exponential", 100_000), (RandomGraph(4), 10**6), ("complete", 10**6)):
        with pytest.raises(ValueError, match=r"topology=.*sends [\d,]+ messages, and at most 1,000,000 are simulated"):
            vsim.price(
                GossipStrategy(topology=topology), parameters=10, num_nodes=nodes, max_steps=1, network=1e9, compute=1.0
            )
    with pytest.raises(ValueError, match="num_nodes must be a whole number from 1 to 1024"):
        GossipStrategy().mixing_matrix(10**12)


# Graphs of a user -----------------------------------------------------------------------------------------------------


def graph(nodes: list[Any], edges: list[Any], directed: bool = False) -> Any:
    """What networkx has, as far as vsim asks for it."""
    return SimpleNamespace(nodes=nodes, edges=edges, is_directed=lambda: directed)


def test_graphs_as_edges_files_and_objects(tmp_path: Path) -> None:
    expected = W([(0, 1), (1, 2)], 3)
    for name, text in (("rows.csv", "0,1\n1,2\n"), ("named.csv", "source,target\n1,0\n1,2\n\n2,1\n")):
        (tmp_path / name).write_text(text, encoding="utf-8")
        assert torch.equal(W(tmp_path / name, 3), expected)
    assert torch.equal(W(str(tmp_path / name), 3), expected)
    assert torch.equal(W(torch.tensor([[1, 0], [2, 1]]), 3), expected)
    assert torch.equal(W(graph([2, 1, 0], [(0, 1), (1, 1), (1, 2)]), 3), expected)
    assert torch.equal(W(graph(["a", "b", "c"], [("a", "b"), ("c", "b")]), 3), expected)


class Edges(list[Any]):
    """What networkx has for `graph.edges`: pairs, and with data=True triples with the attributes of every edge."""

    def __call__(self, data: bool) -> list[Any]:
        assert data
        return [(i, j, own) for (i, j), own in zip(self, self.attributes, strict=True)]

    attributes: list[dict[str, Any]]


def test_weights_of_a_graphs_edges_are_mixing_weights(tmp_path: Path) -> None:
    edges = Edges([(0, 1), (1, 2)])
    edges.attributes = [{"weight": 1.0, "colour": "red"}, {}]
    assert torch.equal(W(graph([0, 1, 2], edges), 3), W([(0, 1), (1, 2)], 3))
    edges.attributes = [{"weight": 0.25}, {"weight": 0.5}]
    expected = by_hand([[3, 1, 0], [1, 1, 2], [0, 2, 2]], 4)
    (tmp_path / "weighted.csv").write_text("Source,Target,Type,Weight\n0,1,Undirected,0.25\n2,1,Undirected,0.5\n")
    for weighted in (graph([0, 1, 2], edges), [(0, 1, 0.25), (1, 2, 0.5)], tmp_path / "weighted.csv"):
        torch.testing.assert_close(W(weighted, 3), expected)
    # When node 0 leaves, node 1 keeps what it gave to node 0.
    torch.testing.assert_close(mixing(((0, 1, 0.25), (1, 2, 0.5)), (1, 2)).matrix(), by_hand([[1, 1], [1, 1]], 2))
    remade = eval(repr(GossipStrategy(topology=weighted)), {"GossipStrategy": GossipStrategy})
    torch.testing.assert_close(remade.mixing_matrix(3), expected)
    edges.attributes = [{}, {"weight": 0.1}]
    (tmp_path / "bad.csv").write_text("0,1,Undirected,much\n")
    check_refusals(
        [
            (lambda: W(graph([0, 1, 2], edges), 3), ValueError, ["topology", "all of them"]),
            (lambda: W([(0, 1, 0.6), (1, 2, 0.5)], 3), ValueError, ["weights of node 1", "1.1", "at most 1"]),
            (lambda: W([(0, 1, 0.6), (1, 0, 0.5)], 3), ValueError, ["(0, 1)", "0.6", "0.5"]),
            (lambda: W([(0, 1, 0)], 3), ValueError, ["weight", "> 0"]),
            (lambda: W(tmp_path / "bad.csv", 3), ValueError, ["bad.csv", "fourth column", "much"]),
        ]
    )


def test_graphs_are_checked() -> None:
    def among_four(topology: Any) -> None:
        started(GossipStrategy(topology=topology), Parameters((2,)), 4)

    check_refusals(
        [
            (lambda: GossipStrategy(topology="star"), ValueError, ["ring"]),
            (lambda: GossipStrategy(topology=[(0, 0)]), ValueError, ["two nodes"]),
            (lambda: GossipStrategy(topology=[(0, 1, 2)]), ValueError, ["a weight", "<= 1", "got 2"]),
            (lambda: GossipStrategy(topology=[(0, 1, 0.5, 2)]), ValueError, ["pair"]),
            (lambda: GossipStrategy(topology=[(0, -1)]), ValueError, ["a node"]),
            (lambda: GossipStrategy(topology=graph([0, 1], [(0, 1)], directed=True)), ValueError, ["directed"]),
            *(
                (lambda odd=odd: GossipStrategy(topology=odd), (TypeError, ValueError), ["topology"])
                for odd in ([("a", "b")], 3, [])
            ),
            (lambda: among_four([(0, 1), (2, 3)]), ValueError, ["connect all 4"]),
            (lambda: among_four([(0, 1), (1, 2)]), ValueError, ["connect all 4"]),
            (lambda: among_four([(0, 4)]), ValueError, ["0 … 3", "got 4"]),
            (lambda: among_four(RandomGraph(4)), ValueError, ["4 nodes cannot have 4"]),
            (lambda: among_four(RandomGraph(1)), ValueError, ["no connected graph"]),
            (lambda: GossipStrategy(H=2, tracking=True), ValueError, ["H=2"]),
            (lambda: RandomGraph(0), ValueError, ["degree"]),
        ]
    )


# A run ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("topology", [*TOPOLOGIES, RandomGraph(3)], ids=str)
def test_every_step_has_the_update_rule(topology: Any) -> None:
    n, gradients = 6, normal(6, 6, 4, dtype=DOUBLE)
    model = Parameters((4,), dtype=DOUBLE)
    run = driven(GossipStrategy(inner_optim=SGD, topology=topology, H=2), model, gradients)
    theta = np.tile(model.p0.detach().numpy(), (n, 1))  # type: ignore[union-attr]
    for t, g in enumerate(gradients.numpy(), start=1):
        theta = theta - 0.5 * g
        if t % 2 == 0:
            theta = W(topology, n, t // 2 - 1).numpy() @ theta
    np.testing.assert_allclose(run.cluster.weights.numpy(), theta, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("tracking", [False, True])
@pytest.mark.parametrize("topology", [*TOPOLOGIES, [(0, 1), (1, 2)]], ids=str)
def test_nodes_held_apart_and_without_values_send_the_same(topology: Any, tracking: bool) -> None:
    model, strategy = Parameters((7, 3), (5,)), GossipStrategy(inner_optim=SGD, topology=topology, tracking=tracking)
    together = same_apart(strategy, model, normal(6, 3, 26))
    assert list(strategy.dry_run(model.to("meta"), 3, 6)) == list(together.ledger)


# What it costs --------------------------------------------------------------------------------------------------------


def test_bytes_by_edge() -> None:
    # A path 0 – 1 – 2: node 1 sends to both, in two rounds; the others once.
    run = driven(GossipStrategy(inner_optim=SGD, topology=[(0, 1), (1, 2)], H=2), Parameters((3, 2)), normal(4, 3, 6))
    edges: Counter[tuple[int, ...]] = Counter()
    for event in run.ledger:
        assert (event.collective, event.label, event.payload_bytes, event.due) == ("send", "weights", 24, event.step)
        edges.update(map(tuple, event.groups))
    assert edges == {(0, 1): 2, (1, 0): 2, (1, 2): 2, (2, 1): 2}
    assert [e.step for e in run.ledger] == [2, 2, 4, 4]
    assert run.ledger.node_wire_bytes.tolist() == [48, 96, 48]


def test_graphs_of_those_that_take_part() -> None:
    assert {*edges_of("ring", (1, 3, 4))} == {(0, 1), (1, 2), (0, 2)}
    assert edges_of(((0, 1), (1, 3), (3, 4)), (1, 3, 4)) == ((0, 1), (1, 2))


@pytest.mark.parametrize("options", [{}, {"tracking": True}, {"topology": "one_peer_exponential"}], ids=str)
def test_a_run_in_which_nodes_leave_and_return(options: dict[str, Any]) -> None:
    data = TensorDataset(normal(64, 6), torch.arange(64) % 3)
    trainer = vsim.Trainer(MLP(6, (8,), 3, seed=0), data)
    given_: Any = {"num_nodes": 4, "max_steps": 9, "val_interval": None, "progress": False}
    plan = vsim.Schedule({3: [0, 2, 3], 6: [0, 1, 2, 3]})
    trainer.fit(strategy=GossipStrategy(inner_optim="sgd", lr=0.1, **options), participation=plan, **given_)
    sent = [e.groups for e in trainer.ledger if "weights" in e.label]
    if "topology" in options:  # begins again with a hop of 1 when nodes change
        first = [next(dst for src, dst in pairs if src == 0) for pairs in sent]
        assert first == [1, 2, 1, 2, 3, 2, 1, 2, 1]
        return
    assert [{*itertools.chain(*pairs)} for pairs in sent] == [{0, 1, 2, 3}] * 6 + [{0, 2, 3}] * 6 + [{0, 1, 2, 3}] * 6
    gaps = trainer.history.to_pandas()["spectral_gap"].dropna()
    assert gaps.round(6).unique().tolist() == [pytest.approx(2 / 3), pytest.approx(1)]
