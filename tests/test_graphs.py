"""Strategies on graphs: exact fixed points, identities, graphs that vary, and graphs that fall apart."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparisons_by_hand import check_refusals
from errors import refused
from strategies_by_hand import Parameters, normal, same_apart, started
from torch import Tensor
from torch.utils.data import TensorDataset

import vsim
from vsim.algorithms.graphs import num_parts
from vsim.core.fields import shown
from vsim.models import MLP
from vsim.strategy import (
    Algorithm,
    D2Strategy,
    ExactDiffusionStrategy,
    GossipStrategy,
    GradientTrackingStrategy,
    OptimSpec,
    PushSumStrategy,
    QuasiGlobalMomentumStrategy,
    RandomGraph,
    RelaySumStrategy,
)

DOUBLE = torch.float64
LR = 0.2
TREE = [(0, 1), (1, 2), (1, 3), (3, 4)]
ARROWS = [(0, 1), (1, 2), (2, 3), (3, 4), (4, 0), (1, 3), (0, 2)]
Make = Callable[..., Algorithm]


def distances(make: Make, steps: int, **options: Any) -> float:
    """The largest distance of a node from the optimum, after steps of SGD on |a_k (x − b_k)|² / 2."""
    a, b = 0.5 + normal(5, 3, seed=1, dtype=DOUBLE).sigmoid(), normal(5, 3, seed=2, dtype=DOUBLE)
    run = started(make(inner_optim="sgd", lr=LR, **options), Parameters((3,), dtype=DOUBLE), 5, max_steps=steps)
    for _ in range(steps):
        run.step(a * (run.cluster.weights - b))
    best = (a * b).sum(0) / a.sum(0)
    return float((run.cluster.weights - best).abs().max())


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (GossipStrategy, {"tracking": True}),
        (D2Strategy, {}),
        (ExactDiffusionStrategy, {"topology": TREE}),
        (GradientTrackingStrategy, {}),
        (GradientTrackingStrategy, {"topology": ["ring", TREE]}),
        (RelaySumStrategy, {}),
        (RelaySumStrategy, {"topology": TREE}),
    ],
    ids=shown,
)
def test_nodes_with_different_data_reach_the_optimum_at_a_constant_rate(make: Make, options: dict[str, Any]) -> None:
    assert distances(make, 250, **options) < 1e-9


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (GossipStrategy, {}),
        (QuasiGlobalMomentumStrategy, {}),
        (PushSumStrategy, {}),
        (RelaySumStrategy, {"form": "gradient"}),
    ],
)
def test_others_end_at_a_distance(make: Make, options: dict[str, Any]) -> None:
    assert 1e-3 < distances(make, 250, **options) < 1


def test_on_a_complete_graph_all_are_allreduce_or_gossip() -> None:
    """W = 1 1ᵀ / n: corrections and trackers have no effect on the mean, and momentum 0 is none."""
    gradients, model = normal(5, 4, 6, dtype=DOUBLE), Parameters((6,), dtype=DOUBLE)

    def weights(strategy: Algorithm) -> Tensor:
        run = started(strategy, model, 4)
        return torch.stack([run.step(own) for own in gradients])

    expected = weights(vsim.strategy.SimpleReduceStrategy(inner_optim="sgd", lr=LR))
    for make in (D2Strategy, GradientTrackingStrategy, PushSumStrategy, GossipStrategy):
        torch.testing.assert_close(weights(make(inner_optim="sgd", lr=LR, topology="complete")), expected)
    torch.testing.assert_close(
        weights(QuasiGlobalMomentumStrategy(inner_optim="sgd", lr=LR, momentum=0)),
        weights(GossipStrategy(inner_optim="sgd", lr=LR)),
    )
    # Two nodes of a tree hear of each other at once.
    for form in ("model", "gradient"):
        run = started(RelaySumStrategy(inner_optim="sgd", lr=LR, form=form), model, 2)
        other = started(vsim.strategy.SimpleReduceStrategy(inner_optim="sgd", lr=LR), model, 2)
        for own in gradients[:, :2]:
            torch.testing.assert_close(run.step(own), other.step(own))


def test_push_sum_reaches_the_mean_where_shares_alone_do_not() -> None:
    run = started(
        PushSumStrategy(inner_optim="sgd", lr=1.0, topology=ARROWS), Parameters((4,), dtype=DOUBLE), 5, max_steps=60
    )
    first = normal(5, 4, seed=3, dtype=DOUBLE)
    run.step(first)
    for _ in range(59):
        run.step(torch.zeros(5, 4, dtype=DOUBLE))
    start = started(PushSumStrategy(inner_optim="sgd"), Parameters((4,), dtype=DOUBLE), 5).cluster.weights
    torch.testing.assert_close(run.cluster.weights, (start - first).mean(0).expand(5, 4))
    (module,) = run.strategy.parts
    assert float(module.mass.std()) > 0.1  # the arrows in and out are not as many
    P = PushSumStrategy(topology=ARROWS).mixing_matrix(5)
    torch.testing.assert_close(P.sum(0), torch.ones(5, dtype=DOUBLE))
    assert P[:, 0].tolist() == pytest.approx([1 / 3, 1 / 3, 1 / 3, 0, 0])
    both = PushSumStrategy(topology=RandomGraph(3)).mixing_matrix(6)
    torch.testing.assert_close(both, GossipStrategy(topology=RandomGraph(3)).mixing_matrix(6))
    assert PushSumStrategy(topology="exponential").mixing_matrix(8)[:, 0].nonzero().flatten().tolist() == [0, 1, 2, 4]


def test_graphs_of_networkx() -> None:
    networkx = pytest.importorskip("networkx")
    weighted = networkx.Graph()
    weighted.add_weighted_edges_from([(0, 1, 0.25), (1, 2, 0.5)])
    expected = GossipStrategy(topology=[(0, 1, 0.25), (1, 2, 0.5)]).mixing_matrix(3)
    assert torch.equal(GossipStrategy(topology=weighted).mixing_matrix(3), expected)
    arrows = PushSumStrategy(topology=ARROWS).mixing_matrix(5)
    assert torch.equal(PushSumStrategy(topology=networkx.DiGraph(ARROWS)).mixing_matrix(5), arrows)
    both = PushSumStrategy(topology=networkx.path_graph(4)).mixing_matrix(4)
    assert torch.equal(both, PushSumStrategy(topology="chain").mixing_matrix(4))
    turns = GossipStrategy(topology=[networkx.cycle_graph(4), networkx.path_graph(4)])
    assert torch.equal(turns.mixing_matrix(4, 1), GossipStrategy(topology="chain").mixing_matrix(4))
    with refused(ValueError, "directed graph", "PushSumStrategy"):
        GossipStrategy(topology=networkx.DiGraph(ARROWS))


VARYING: dict[str, Any] = {
    "list": ["ring", [(0, 1), (2, 3)], RandomGraph(2)],
    "redrawn": RandomGraph(2, redrawn=True),
    "function": lambda step: "ring" if step % 2 else [(0, 2, 0.25), (1, 3)][: step % 4 - 1] or [(0, 3)],
    "function of edges": lambda step: [(step % 4, (step + 1) % 4)],
}


@pytest.mark.parametrize("name", VARYING)
def test_the_t_th_mixing_is_on_the_t_th_graph(name: str) -> None:
    strategy = GossipStrategy(inner_optim="sgd", lr=LR, topology=VARYING[name])
    model, gradients = Parameters((5,), dtype=DOUBLE), normal(7, 4, 5, dtype=DOUBLE)
    run = started(strategy, model, 4)
    theta = run.cluster.weights.numpy().copy()
    for t, g in enumerate(gradients):
        theta = strategy.mixing_matrix(4, t).numpy() @ (theta - LR * g.numpy())
        np.testing.assert_allclose(run.step(g).numpy(), theta, rtol=1e-12, atol=1e-12)
    matrices = [strategy.mixing_matrix(4, t) for t in range(6)]
    assert any(not torch.equal(one, other) for one, other in itertools.pairwise(matrices))
    together = same_apart(GossipStrategy(inner_optim="sgd", topology=VARYING[name]), Parameters((5,)), normal(6, 4, 5))
    assert list(strategy.dry_run(Parameters((5,)).to("meta"), 4, 6)) == list(together.ledger)


def test_the_gap_of_graphs_that_take_turns_is_that_of_their_product() -> None:
    halves = [[(0, 1), (2, 3)], [(1, 2), (3, 0)]]  # neither connects, together they average exactly
    run = started(GossipStrategy(inner_optim="sgd", topology=halves), Parameters((2,)), 4)
    assert dict(run.strategy.columns()) == {"spectral_gap": pytest.approx(1)}
    pair = [[(0, 1)], [(1, 2)]]
    product = GossipStrategy(topology=pair).mixing_matrix(3, 1) @ GossipStrategy(topology=pair).mixing_matrix(3, 0)
    expected = 1 - float(np.linalg.svd(product.numpy() - 1 / 3, compute_uv=False)[0]) ** 0.5
    assert started(GossipStrategy(inner_optim="sgd", topology=pair), Parameters((2,)), 3).strategy.columns() == {
        "spectral_gap": pytest.approx(expected)
    }


MADE: list[tuple[Make, dict[str, Any]]] = [
    (D2Strategy, {}),
    (ExactDiffusionStrategy, {"topology": "torus"}),
    (GradientTrackingStrategy, {"topology": "one_peer_exponential"}),
    (QuasiGlobalMomentumStrategy, {}),
    (PushSumStrategy, {}),
    (PushSumStrategy, {"topology": ARROWS}),
    (PushSumStrategy, {"topology": RandomGraph(2)}),
    (RelaySumStrategy, {"topology": TREE}),
    (RelaySumStrategy, {"topology": "binary_tree", "form": "gradient"}),
]


def adam(make: Make, lr: float) -> OptimSpec:
    """Adam, but for the one that needs plain SGD."""
    return OptimSpec("sgd" if make is QuasiGlobalMomentumStrategy else "adam", lr=lr)


@pytest.mark.parametrize(("make", "options"), MADE, ids=shown)
def test_nodes_held_apart_and_without_values_send_the_same(make: Make, options: dict[str, Any]) -> None:
    model, strategy = Parameters((7, 3), (5,)), make(inner_optim=adam(make, 0.1), **options)
    together = same_apart(strategy, model, normal(6, 5, 26))
    assert list(strategy.dry_run(Parameters((7, 3), (5,)).to("meta"), 5, 6)) == list(together.ledger)
    assert together.ledger[0].collective == "send"
    alone = make(inner_optim="sgd", **{**options, "topology": "chain" if make is RelaySumStrategy else "ring"})
    run = started(alone, model, 1)
    assert torch.isfinite(run.step(normal(1, 26))).all() and not len(run.ledger)


def trained(strategy: Algorithm, nodes: int = 5, **options: Any) -> vsim.Trainer:
    data = TensorDataset(normal(64, 6), torch.arange(64) % 3)
    trainer = vsim.Trainer(MLP(6, (8,), 3, seed=0), data)
    given: dict[str, Any] = {"num_nodes": nodes, "max_steps": 8, "val_interval": None, "progress": False}
    trainer.fit(strategy=strategy, **{**given, **options})
    return trainer


def leaving(node: int) -> vsim.Schedule:
    return vsim.Schedule({3: [other for other in range(5) if other != node], 6: range(5)})


def test_a_graph_that_falls_apart_warns_once() -> None:
    chain = [(0, 1), (1, 2), (2, 3), (3, 4)]
    plan = vsim.Schedule({2: [0, 1, 3, 4], 4: range(5), 5: [0, 2, 3, 4]})
    with pytest.warns(UserWarning, match="step 3 on, the graph of the 4 participating nodes has 2") as caught:
        trained(GossipStrategy(inner_optim="sgd", topology=chain), participation=plan)
    assert len([one for one in caught if "parts" in str(one.message)]) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trained(GossipStrategy(inner_optim="sgd", topology=chain), participation=leaving(4))
        trained(GossipStrategy(inner_optim="sgd"), participation=plan)
    with pytest.warns(UserWarning, match="has 4 parts"):  # no arrow leads back to node 0
        trained(PushSumStrategy(inner_optim="sgd", topology=ARROWS), participation=leaving(4))
    with refused(ValueError, "step 3", "[0, 1, 3, 4]", "do not connect", "chain"):
        trained(RelaySumStrategy(inner_optim="sgd", topology=chain), participation=plan)
    assert num_parts([(0, 1), (1, 0), (1, 2)], 4, directed=True) == 3


def test_graphs_that_do_not_suit_are_refused() -> None:
    def begun(make: Make, nodes: int, **options: Any) -> None:
        started(make(inner_optim="sgd", **options), Parameters((2,)), nodes)

    check_refusals(
        [
            (lambda: begun(D2Strategy, 16, topology="torus"), ValueError, ["-0.600", "−1/3", "ExactDiffusionStrategy"]),
            (lambda: D2Strategy(topology="one_peer_exponential"), ValueError, ["symmetric", "one_peer_exponential"]),
            (lambda: ExactDiffusionStrategy(topology=["ring", "torus"]), ValueError, ["symmetric"]),
            (lambda: RelaySumStrategy(topology="ring"), ValueError, ["tree", "ring"]),
            (lambda: RelaySumStrategy(topology=[(0, 1, 0.5)]), ValueError, ["weights of edges"]),
            (lambda: begun(RelaySumStrategy, 3, topology=[(0, 1), (1, 2), (2, 0)]), ValueError, ["3 nodes", "3 edges"]),
            (lambda: RelaySumStrategy(form="both"), ValueError, ["form", "model", "gradient"]),
            (lambda: QuasiGlobalMomentumStrategy(inner_optim="adam"), TypeError, ["plain SGD", "Adam"]),
            (lambda: QuasiGlobalMomentumStrategy(momentum=1), ValueError, ["momentum", "< 1"]),
            (lambda: begun(PushSumStrategy, 3, topology=[(0, 1), (1, 2)]), ValueError, ["arrows", "connect all 3"]),
            (lambda: begun(GossipStrategy, 4, topology=[[(0, 1)], [(2, 3)]]), ValueError, ["connect all 4"]),
            (lambda: GossipStrategy(topology=lambda step: "star"), ValueError, ["step 1", "star"]),
            (lambda: GossipStrategy(topology=lambda: "ring"), TypeError, ["step 1"]),
            (lambda: GossipStrategy(topology=["ring", ["ring"]]), TypeError, ["a list of graphs"]),
            (lambda: RandomGraph(2, redrawn=1), (TypeError, ValueError), ["redrawn"]),  # type: ignore[arg-type]
        ]
    )


@pytest.mark.parametrize(
    ("make", "options"),
    [
        *MADE,
        (
            GossipStrategy,
            {"topology": ["ring", RandomGraph(2, redrawn=True)], "attack": vsim.Attack("alie", nodes=[1])},
        ),
        (GossipStrategy, {"topology": VARYING["function"]}),
    ],
    ids=shown,
)
def test_a_resumed_run_is_the_whole_run(make: Make, options: dict[str, Any], tmp_path: Path) -> None:
    strategy = make(inner_optim=adam(make, 1e-2), **options)
    # A leaf of the tree leaves and returns. Of the arrows, none leads back to node 0 without node 4.
    plan = None if options.get("topology") == ARROWS else leaving(4)
    whole = trained(strategy, participation=plan)
    assert np.isfinite(whole.history["train_loss"][1:]).all()
    trained(strategy, participation=plan, max_steps=4, save_dir=tmp_path)
    resumed = trained(strategy, participation=plan, save_dir=tmp_path, resume=True)
    assert resumed.history["train_loss"].tolist() == pytest.approx(
        whole.history["train_loss"].tolist(), nan_ok=True, abs=0
    )
    np.testing.assert_array_equal(resumed.history.node_losses, whole.history.node_losses)
    assert list(resumed.ledger) == list(whole.ledger)


# How far the nodes are apart ------------------------------------------------------------------------------------------


def test_the_consensus_distance_at_every_validation() -> None:
    seen: list[float] = []

    def note(run: Any) -> None:
        rows = run.cluster.weights.double()
        seen.append(float((rows - rows.mean(0)).square().sum(1).mean().sqrt()))
        assert "consensus_distance" in run.columns

    examples = TensorDataset(normal(64, 6), torch.arange(64) % 3)
    options: Any = {"num_nodes": 4, "max_steps": 6, "val_interval": 2, "progress": False}
    trainer = vsim.Trainer(MLP(6, (8,), 3, seed=0), examples, examples)
    trainer.fit(strategy=GossipStrategy(inner_optim="sgd", lr=0.1), callbacks=[note], **options)
    found = trainer.history["consensus_distance"]
    assert found[::2].tolist() == pytest.approx([0.0, *seen[1::2]], rel=1e-5) and np.isnan(found[1::2]).all()
    assert seen[-1] > 1e-4 and all(event.collective == "send" for event in trainer.ledger)

    names = {
        "ring": GossipStrategy(inner_optim="sgd", lr=0.1),
        "DDP": vsim.strategy.SimpleReduceStrategy(inner_optim="sgd", lr=0.1),
    }
    compared = vsim.compare(MLP(6, (8,), 3, seed=0), examples, strategies=names, val_dataset=examples, **options)
    assert [row["consensus distance"] for row in compared.rows().to_dict("records")] == pytest.approx(
        [seen[-1], np.nan], nan_ok=True
    )
    assert "consensus distance" in compared.table(columns=["consensus distance"])
    (line, *_), axes = compared.plot(y="consensus_distance").get_lines(), compared.plot(y="consensus_distance")
    assert axes.get_yscale() == "log" and line.get_xdata().tolist() == [2, 4, 6]
    with refused(ValueError, "consensus_distance", "a strategy on a graph"):
        vsim.compare(MLP(6, (8,), 3), examples, strategies={"DDP": names["DDP"]}, val_dataset=examples, **options).plot(
            y="consensus_distance"
        )
