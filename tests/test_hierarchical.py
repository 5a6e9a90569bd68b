"""Levels of groups: against separate modules, and as AllReduce, FedAvg and DiLoCo where one level does nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from strategies_by_hand import Parameters, driven, normal, size
from test_strategies_common import model, uneven, weights

import vsim
from vsim import Trainer
from vsim.cluster.participation import Dropout, Sample, Schedule
from vsim.network import Compute, Network
from vsim.strategy import QSR, DiLoCoStrategy, FedAvgStrategy, HierarchicalStrategy, SimpleReduceStrategy, When

PLAIN: dict[str, Any] = {"inner_optim": "sgd", "lr": 0.1}
SHAPES = Parameters((5, 3), (7,))


@pytest.mark.parametrize("levels", [{2: 1, 4: 3, 8: 6}, {2: 2, 8: 5}, {2: 2, 4: 4, 8: 8}])
def test_levels_are_those_of_separate_nodes(levels: Mapping[int, int]) -> None:
    gradients = normal(12, 8, size(SHAPES), seed=3)
    ours = driven(HierarchicalStrategy(levels, **PLAIN), SHAPES, gradients, deterministic=True).cluster.weights
    nodes = torch.nn.utils.parameters_to_vector(SHAPES.parameters()).detach().repeat(8, 1)
    for step, own in enumerate(gradients, start=1):
        for n, H in levels.items():
            if H == 1:
                own = own.view(-1, n, 22).mean(1).repeat_interleave(n, 0)
        nodes = nodes - 0.1 * own
        due = [n for n, H in levels.items() if H > 1 and step % H == 0]
        for n in due[-1:]:  # the largest
            nodes = nodes.view(-1, n, 22).mean(1).repeat_interleave(n, 0)
    assert torch.allclose(ours, nodes, rtol=0, atol=1e-6)


def run(strategy: Any, **options: Any) -> Trainer:
    trainer = Trainer(model(), uneven)
    given = {"num_nodes": 4, "max_steps": 6, "batch_size": 8, "progress": False, "deterministic": True, **options}
    trainer.fit(strategy=strategy, **given)
    return trainer


@pytest.mark.parametrize(
    ("levels", "outer", "same"),
    [
        ({4: 1}, {}, SimpleReduceStrategy(**PLAIN)),
        ({4: 3}, {}, FedAvgStrategy(H=3, **PLAIN)),
        ({4: 3}, {"outer": "sgd", "outer_lr": 0.7}, DiLoCoStrategy(outer_optim="sgd", outer_lr=0.7, H=3, **PLAIN)),
        ({4: QSR(0.2)}, {}, FedAvgStrategy(H=QSR(0.2), **PLAIN)),
    ],
)
def test_one_level_is_the_strategy_of_all_nodes(levels: Mapping[int, int | When], outer: Any, same: Any) -> None:
    ours, theirs = run(HierarchicalStrategy(levels, **outer, **PLAIN)), run(same)
    torch.testing.assert_close(weights(ours), weights(theirs))
    assert list(map(str, ours.ledger)) == list(map(str, theirs.ledger))


def test_equal_nodes_in_a_group_are_one_worker_of_diloco() -> None:
    """Two data-parallel machines with one worker's data are that worker."""
    gradients = normal(6, 2, size(SHAPES), seed=5)
    twice = gradients.repeat_interleave(2, 1)
    ours = driven(HierarchicalStrategy({2: 1, 4: 3}, outer_lr=0.5, **PLAIN), SHAPES, twice).cluster.weights
    theirs = driven(DiLoCoStrategy(H=3, outer_lr=0.5, **PLAIN), SHAPES, gradients).cluster.weights
    assert torch.allclose(ours[::2], theirs, rtol=0, atol=1e-6)
    assert torch.equal(ours[::2], ours[1::2])


def test_groups_follow_node_numbers_when_nodes_are_away() -> None:
    gone = run(HierarchicalStrategy({2: 1, 4: 3}, **PLAIN), participation=Schedule({2: [0, 2, 3]}))
    of_groups = [event.groups for event in gone.ledger if "groups of 2" in event.label]
    found = [[tuple(group) for group in groups] for groups in of_groups[:3]]
    assert found == [[(0, 1), (2, 3)], [(0, 1), (2, 3)], [(0,), (2, 3)]]
    run(HierarchicalStrategy({2: 1, 4: 3}, **PLAIN), participation=Dropout(0.3))
    with pytest.raises(ValueError, match="participation"):
        run(HierarchicalStrategy({2: 1, 4: 3}, **PLAIN), participation=Sample(4, of=8))


def test_inner_levels_use_the_links_inside_a_region() -> None:
    network = Network.regions({"eu": 2, "us": 2}, inside="10 Gbit/s, 1 ms", between="100 Mbit/s, 80 ms")
    priced = {
        name: vsim.price(
            strategy, parameters=10_000_000, num_nodes=4, max_steps=50, network=network, compute=Compute(0.1)
        ).seconds[-1]
        for name, strategy in {
            "inside": HierarchicalStrategy({2: 1, 4: 50}),
            "everywhere": SimpleReduceStrategy(),
            "seldom": FedAvgStrategy(H=50),
        }.items()
    }
    assert priced["seldom"] < priced["inside"] < 1.5 * priced["seldom"] < priced["everywhere"] / 10


@pytest.mark.parametrize(
    ("levels", "options", "told"),
    [
        ({}, {}, "levels"),
        ({3: 1, 4: 5}, {}, "groups of 4 cannot be made of groups of 3"),
        ({2: 5, 4: 5}, {}, "less often"),
        ({1: 1, 4: 5}, {}, ">= 2, got 1"),
        ({2: 0, 4: 5}, {}, r"levels\[2\]"),
        ({2: QSR(0.1), 4: 5}, {}, r"levels\[2\]"),
        ({2: 1, 8: 5}, {}, "all 4 nodes"),
        ({2: 1, 4: 5}, {"average": {8: "median"}}, r"average is for groups of \[8\]"),
        ({2: 1, 4: 5}, {"average": "rda"}, "a group of 2"),
    ],
)
def test_levels_that_do_not_fit_are_refused(levels: Any, options: Any, told: str) -> None:
    with pytest.raises((TypeError, ValueError), match=told):
        run(HierarchicalStrategy(levels, **options, **PLAIN))
