"""EDiT: weights, the gate and the limit by hand, and A-EDiT's clock."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from driven import Parameters, driven, normal, started
from test_strategies_common import run

from vsim.network import Compute
from vsim.strategy import DiLoCoStrategy, EDiTStrategy, OptimSpec, PostLocal, Seconds, Strategy, clip, edit, mean

SGD = OptimSpec("sgd", lr=1.0)


def scalar(*gradients: tuple[float, ...], **options: Any) -> list[float]:
    """φ after each sync, of one weight from 0 whose nodes have these gradients, with all rates 1 and H = 1."""
    net = Parameters((1,))
    torch.nn.init.zeros_(net.p0)
    strategy = EDiTStrategy(SGD, outer_optim=SGD, H=1, **{"outer_max_norm": None, "gate_after": 4, **options})
    course = started(strategy, net, len(gradients[0]), deterministic=True, max_steps=len(gradients))
    return [float(course.step(torch.tensor(given)[:, None])[0]) for given in gradients]


def test_nodes_count_less_the_further_they_moved() -> None:
    # softmax(−1, −2) = (0.73106, 0.26894), with temperature 2 softmax(−½, −1) = (0.62246, 0.37754).
    assert scalar((1, 2)) == pytest.approx([-(0.73106 + 2 * 0.26894)], abs=1e-4)
    assert scalar((1, 2), average=edit(2.0)) == pytest.approx([-(0.62246 + 2 * 0.37754)], abs=1e-4)


PAST = [(1.0, 1.0), (1.1, 1.1), (1.0, 1.0), (1.1, 1.1)]  # norms of mean 1.05, standard deviation 0.05


@pytest.mark.parametrize(
    ("last", "moved"),
    [
        ((1.0, 1.19), None),  # z = 2.8
        ((1.0, 1.21), 1.0),  # z = 3.2
        ((1.0, 100.0), 1.0),
        ((1.0, 0.01), None),  # too near is no fault
        ((1.0, math.inf), 1.0),
        ((math.nan, 1.1), 1.1),
        ((100.0, 200.0), 0.0),
    ],
)
def test_an_anomalous_node_is_left_out(last: tuple[float, float], moved: float | None) -> None:
    *_, before, after = scalar(*PAST, last)
    if moved is None:
        shares = torch.softmax(-torch.tensor(last), 0)
        moved = float(shares @ torch.tensor(last))
    assert before - after == pytest.approx(moved, abs=1e-5)


def test_an_anomaly_does_not_move_its_threshold() -> None:
    # Were 100 in the average, 1.5 would be no anomaly after it.
    *_, before, after = scalar(*PAST, (1.0, 100.0), (1.0, 1.5))
    assert before - after == pytest.approx(1.0, abs=1e-5)


def test_nothing_is_judged_before_the_gate_opens() -> None:
    *_, before, after = scalar(*PAST, (1.0, 1.5), gate_after=5)
    assert before - after == pytest.approx(
        float(torch.softmax(torch.tensor([-1.0, -1.5]), 0) @ torch.tensor([1.0, 1.5]))
    )


def test_a_tensor_stays_where_all_are_anomalous_whatever_the_momentum() -> None:
    net, gradients = Parameters((3,), (2,)), torch.ones(6, 2, 5)
    gradients[::2] += 0.1
    gradients[5, :, :3] = 50.0
    outer = OptimSpec("sgd", lr=0.5, momentum=0.9, nesterov=True)
    course = driven(EDiTStrategy(SGD, outer_optim=outer, H=1, gate_after=4), net, gradients[:5])
    before = course.cluster.weights[0].clone()
    moved = before - course.step(gradients[5])[0]
    assert torch.equal(moved[:3], torch.zeros(3)) and bool((moved[3:] > 0.5).all())


def test_the_sum_is_limited() -> None:
    net, gradients = Parameters((3,), (4,)), normal(1, 3, 7)
    (free, limited) = (
        driven(EDiTStrategy(SGD, outer_optim=SGD, H=1, outer_max_norm=norm), net, gradients).cluster.weights[0]
        for norm in (None, 0.1)
    )
    start = torch.cat([p.detach().flatten() for p in net.parameters()])
    assert float((limited - start).norm()) == pytest.approx(0.1, rel=1e-4)
    torch.testing.assert_close((limited - start) / 0.1, (free - start) / (free - start).norm(), rtol=1e-4, atol=1e-5)


def test_without_gate_and_limit_it_is_diloco_with_its_average() -> None:
    net, gradients = Parameters((3, 4), (4,)), normal(6, 3, 16)
    plain: Strategy = DiLoCoStrategy(SGD, H=2, average=edit())
    default = OptimSpec("sgd", lr=0.7, momentum=0.9, nesterov=True)
    ours = EDiTStrategy(SGD, outer_optim=default, H=2, gate_after=100, outer_max_norm=None)
    assert torch.equal(driven(ours, net, gradients).cluster.weights, driven(plain, net, gradients).cluster.weights)


def test_by_the_clock() -> None:
    # The slower node takes a step in 2 s: two of them fit in 5 s.
    trainer = run(EDiTStrategy(H=Seconds(5)), num_nodes=2, max_steps=6, compute=Compute(1.0, speeds=[1, 0.5]))
    assert sorted({e.step for e in trainer.ledger}) == [2, 4, 6]


def test_gradients_are_averaged_first() -> None:
    ledger = run(EDiTStrategy(H=PostLocal(2, then=2))).ledger
    assert [(e.step, e.label) for e in ledger if "norms" not in e.label] == [
        (1, "gradients"),
        (2, "gradients"),
        (4, "outer gradient"),
        (6, "outer gradient"),
    ]


@pytest.mark.parametrize("average", ["median", mean(), edit() | clip(1.0)], ids=str)
def test_other_averages_are_refused(average: Any) -> None:
    with pytest.raises(TypeError, match=r"average must be edit\(temperature\)"):
        EDiTStrategy(average=average)
