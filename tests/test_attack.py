"""Attacks in closed form, rules against them by hand, and runs with attackers."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import test_strategies_common as common
import torch
from comparisons_by_hand import check_refusals
from hypothesis import given, settings
from hypothesis import strategies as st
from strategies_by_hand import Parameters, driven, normal, same_apart, started
from torch import Tensor, nn
from torch.utils.data import Subset, TensorDataset

import vsim
from vsim import Attack
from vsim.data.flipped import FlippedLabels
from vsim.models import MLP
from vsim.strategy import (
    Algorithm,
    AsyncDiLoCoStrategy,
    Average,
    D2Strategy,
    DeMoStrategy,
    DiLoCoStrategy,
    EDiTStrategy,
    FedAvgStrategy,
    GossipStrategy,
    HierarchicalStrategy,
    OptimSpec,
    PostLocal,
    SimpleReduceStrategy,
    centered_clip,
    clip,
    geometric_median,
    krum,
    mean,
    median,
    trimmed_mean,
)

DOUBLE = torch.float64
SGD = OptimSpec("sgd", lr=1.0)
KINDS = ("sign_flip", "gaussian", "alie", "inner_product", "min_max", "min_sum")


def averaged(attack: Attack, gradients: Tensor, average: Any = "mean") -> Tensor:
    """Return what an AllReduce makes of stacked gradients (K, P)."""
    model = Parameters((gradients.shape[1],), dtype=gradients.dtype)
    run = started(SimpleReduceStrategy(inner_optim=SGD, average=average, attack=attack), model, len(gradients))
    before = run.cluster.weights[0].clone()
    return before - run.step(gradients)[0]


# What attackers send --------------------------------------------------------------------------------------------------


def test_flipped_signs_leave_n_minus_2f_of_n() -> None:
    g = torch.tensor([[1.0, -2.0]], dtype=DOUBLE).expand(10, 2)
    torch.testing.assert_close(averaged(Attack("sign_flip", share=0.3), g), g[0] * (10 - 2 * 3) / 10)
    torch.testing.assert_close(averaged(Attack("sign_flip", nodes=[4], scale=5.0), g), g[0] * (9 - 5) / 10)


def test_weights_are_attacked_as_moves() -> None:
    # FedAvg of 4 nodes that all move by d after two steps: three send d and one −d, so that the mean moves by d / 2.
    g = torch.ones(2, 4, 3, dtype=DOUBLE)
    model = Parameters((3,), dtype=DOUBLE)
    run = driven(FedAvgStrategy(inner_optim=SGD, H=2, attack=Attack("sign_flip", nodes=[2])), model, g)
    torch.testing.assert_close(run.cluster.weights, (model.p0 - 2 / 2).expand(4, 3))


def test_noise_has_the_given_deviation_and_is_each_attackers_own() -> None:
    own = torch.zeros(4, 20_000, dtype=DOUBLE)
    noise = averaged(Attack("gaussian", nodes=[1], scale=8.0), own) * 4
    assert float(noise.std()) == pytest.approx(8.0, rel=0.02)
    two = averaged(Attack("gaussian", nodes=[1, 2], scale=8.0), own) * 4
    assert float(two.std()) == pytest.approx(8.0 * math.sqrt(2), rel=0.02)


def test_a_little_is_enough_by_hand() -> None:
    # n = 50, m = 12: s = 26 − 12 = 14, Φ⁻¹(24 / 38) = .33604; n = 10, m = 2: Φ⁻¹(4 / 8) = 0; of a majority s = 1.
    attack = Attack("alie", share=0.2)
    assert attack.deviations(38, 12) == pytest.approx(0.33604, abs=1e-5)
    assert attack.deviations(8, 2) == 0
    assert attack.deviations(4, 6) == pytest.approx(0.67449, abs=1e-5)  # Φ⁻¹(3 / 4)
    assert attack.deviations(1, 3) == 0
    g = normal(11, 6, dtype=DOUBLE)
    others = g[3:].numpy()
    expected = others.mean(0) - 1.5 * others.std(0)
    found = averaged(Attack("alie", nodes=[0, 1, 2], scale=1.5), g)
    np.testing.assert_allclose(found, (others.sum(0) + 3 * expected) / 11, rtol=1e-12)


def test_an_inner_product_is_turned_round_by_hand() -> None:
    # Of 5 nodes two send −ε μ: the mean is (3 μ − 2 ε μ) / 5, which turns round at ε = 3/2.
    g = normal(5, 4, dtype=DOUBLE)
    mu = g[[0, 2, 3]].mean(0)
    for scale, share in ((None, (3 - 0.2) / 5), (1.5, 0.0), (4.0, -1.0)):
        found = averaged(Attack("inner_product", nodes=[1, 4], scale=scale), g)
        torch.testing.assert_close(found, share * mu)


@pytest.mark.parametrize("kind", ["sign_flip", "alie", "inner_product", "min_max"])
def test_gossip_is_attacked_by_moves(kind: str) -> None:
    """Two local steps between mixings on a ring of five, with two attackers, in NumPy."""
    attack, gradients = Attack(kind, nodes=[1, 2]), normal(6, 5, 4, dtype=DOUBLE)
    model, strategy = Parameters((4,), dtype=DOUBLE), GossipStrategy(inner_optim=SGD, H=2, attack=attack)
    run, W = started(strategy, model, 5), strategy.mixing_matrix(5).numpy()
    theta = origin = run.cluster.weights.numpy().copy()
    for t, g in enumerate(gradients, start=1):
        theta = theta - g.numpy()
        if t % 2 == 0:
            moves = theta - origin
            others = moves[[0, 3, 4]]
            bad = {
                "sign_flip": lambda moves=moves: -moves[[1, 2]],
                "inner_product": lambda others=others: -0.1 * others.mean(0),
            }.get(kind, lambda others=others: attack.vector(torch.from_numpy(others), 2).numpy())()
            sent = theta.copy()
            sent[[1, 2]] = origin[[1, 2]] + bad
            theta = origin = W @ sent
        np.testing.assert_allclose(run.step(g).numpy(), theta, rtol=1e-12, atol=1e-12)


def test_attackers_of_gossip_held_apart_and_what_they_cannot_attack() -> None:
    model, gradients, flip = Parameters((7, 3), (5,)), normal(4, 4, 26), Attack("sign_flip", nodes=[1])
    for kind in ("gaussian", "alie"):
        attacked = same_apart(GossipStrategy(inner_optim="sgd", attack=Attack(kind, nodes=[2])), model, gradients)
        honest = driven(GossipStrategy(inner_optim="sgd"), model, gradients, deterministic=True)
        assert list(attacked.ledger) == list(honest.ledger)
        assert not torch.equal(attacked.cluster.weights, honest.cluster.weights)
    # In a warm-up, attackers act on the averaged gradients.
    warm = [
        driven(GossipStrategy(inner_optim="sgd", H=PostLocal(4, 2), attack=own), model, gradients)
        for own in (None, flip)
    ]
    assert not torch.equal(warm[0].cluster.weights, warm[1].cluster.weights)
    bad = Attack("sign_flip", nodes=[0])
    check_refusals(
        [
            (lambda: GossipStrategy(tracking=True, attack=bad), ValueError, ["tracking=True", "cannot act"]),
            (lambda: D2Strategy(attack=bad), ValueError, ["D2Strategy", "average=", "gossip"]),
        ]
    )
    flipped = Attack("label_flip", nodes=[0], classes=3)
    assert D2Strategy(attack=flipped).attack == flipped


def largest(allowed: Any) -> float:
    """Return the largest γ that is allowed, by bisection."""
    low, high = 0.0, 1.0
    while allowed(high):
        high *= 2
    for _ in range(80):
        middle = (low + high) / 2
        low, high = (middle, high) if allowed(middle) else (low, middle)
    return low


@settings(max_examples=40)
@given(
    st.sampled_from(["min_max", "min_sum"]),
    st.sampled_from([None, "deviation", "sign", "unit"]),
    st.integers(2, 7),
    st.integers(0, 1000),
)
def test_the_largest_gamma_is_that_of_a_bisection(kind: str, direction: str | None, n: int, seed: int) -> None:
    others = normal(n, 5, seed=seed, dtype=DOUBLE) + 0.3
    g, mu = others.numpy(), others.numpy().mean(0)
    p = {"sign": -np.sign(mu), "unit": -mu / np.linalg.norm(mu)}.get(direction or "", -g.std(0))
    squares = ((g[:, None] - g) ** 2).sum(2)

    def allowed(gamma: float) -> bool:
        away = ((mu + gamma * p - g) ** 2).sum(1)
        return bool(away.max() <= squares.max()) if kind == "min_max" else bool(away.sum() <= squares.sum(1).max())

    found = Attack(kind, share=0.5, direction=direction).vector(others, 1)
    np.testing.assert_allclose(found, mu + largest(allowed) * p, rtol=1e-6, atol=1e-8)


def test_others_that_agree_are_repeated() -> None:
    g = torch.ones(5, 3, dtype=DOUBLE)
    for kind in ("min_max", "min_sum", "alie"):
        assert torch.equal(Attack(kind, share=0.2).vector(g, 1), g[0])


# Who attacks ----------------------------------------------------------------------------------------------------------


def test_attackers_are_drawn_by_seed_or_named() -> None:
    assert Attack("sign_flip", nodes=[3, 1, 3]).attackers(5) == (1, 3)
    assert [len(Attack("sign_flip", share=share).attackers(10)) for share in (0.01, 0.2, 0.21, 0.9)] == [1, 2, 3, 9]
    drawn = {Attack("alie", share=0.2, seed=seed).attackers(10) for seed in range(20)}
    assert len(drawn) > 10
    assert Attack("alie", share=0.2).attackers(10) == Attack("gaussian", share=0.2).attackers(10)


FLIP = Attack("sign_flip", share=0.25)


def fitted(own: Attack, /, **options: Any) -> None:
    trainer = vsim.Trainer(MLP(2, (2,), 2, seed=0), TensorDataset(normal(8, 2), torch.arange(8) % 2))
    trainer.fit(strategy=FedAvgStrategy(attack=own), num_nodes=4, max_steps=1, **options)


def test_arguments_are_checked() -> None:
    either = (TypeError, ValueError)
    of_attacks = (
        ("flip", {"share": 0.2}, "kind"),
        ("alie", {}, "share"),
        ("alie", {"share": 0.2, "nodes": [1]}, "share"),
        ("alie", {"share": 1.0}, "share"),
        ("alie", {"nodes": []}, "nodes"),
        ("alie", {"nodes": [-1]}, "node"),
        ("min_max", {"share": 0.2, "scale": 2.0}, "scale"),
        ("sign_flip", {"share": 0.2, "direction": "sign"}, "direction"),
        ("min_max", {"share": 0.2, "direction": "up"}, "direction"),
        ("label_flip", {"share": 0.2}, "classes"),
        ("sign_flip", {"share": 0.2, "classes": 10}, "classes"),
        ("sign_flip", {"nodes": [1], "seed": 3}, "seed"),
    )
    of_strategies = (
        (DeMoStrategy, {}, "average"),
        (EDiTStrategy, {}, "EDiT"),
        (FedAvgStrategy, {"island_size": 2}, "groups"),
        (HierarchicalStrategy, {"levels": {2: 1, 4: 3}}, "groups"),
        (AsyncDiLoCoStrategy, {}, "one by one"),
    )
    check_refusals(
        [
            *((partial(Attack, kind, **own), either, [said]) for kind, own, said in of_attacks),
            *((partial(make, attack=FLIP, **own), ValueError, [said]) for make, own, said in of_strategies),
            (lambda: FedAvgStrategy(attack="sign_flip"), TypeError, ["attack"]),  # type: ignore[arg-type]
            (lambda: fitted(Attack("alie", nodes=[4])), ValueError, ["0 … 3"]),
            (lambda: fitted(Attack("alie", nodes=[0, 1, 2, 3])), ValueError, ["0 … 3"]),
            (lambda: fitted(Attack("label_flip", share=0.2, classes=2)), TypeError, ["partition"]),
            (lambda: fitted(FLIP, attack=FLIP), TypeError, ["one of them"]),
        ]
    )


def test_a_strategys_own_modules_stay_as_they_are() -> None:
    plain = DiLoCoStrategy(H=2)
    DiLoCoStrategy(H=2, attack=Attack("alie", share=0.2))
    assert plain.parts[0].average.attack is None
    own = DiLoCoStrategy(H=2, average=krum(1) | clip(1.0), attack=Attack("min_max", share=0.2, direction="sign"))
    text = "attack=Attack('min_max', share=0.2, direction='sign')"
    assert str(own) == f"DiLoCoStrategy(H=2, average=krum(faulty=1) | clip(norm=1.0), {text})"


# The rules ------------------------------------------------------------------------------------------------------------


def test_geometric_median_by_hand() -> None:
    rows = torch.tensor([[0.0, 0.0], [1.0, 0.0], [0.0, 1.0]], dtype=DOUBLE)
    limit = (3 - math.sqrt(3)) / 6  # Fermat's point: all three sides are seen under 120°
    torch.testing.assert_close(geometric_median(200)(rows), torch.full((2,), limit, dtype=DOUBLE))
    far = torch.tensor([[1.0], [1.1], [0.9], [1e6], [math.nan]], dtype=DOUBLE)
    assert abs(float(geometric_median(100)(far)) - 1) < 0.11


def test_centered_clipping_by_hand() -> None:
    # v = 0, τ = 1, of .5, −.5, 10: (.5 − .5 + 1) / 3. Then from v = 1/3: (1/6 − 5/6 + 1) / 3 = 1/9 more.
    rows = torch.tensor([[0.5], [-0.5], [10.0]], dtype=DOUBLE)
    model = Parameters((1,), dtype=DOUBLE)
    once = started(SimpleReduceStrategy(inner_optim=SGD, average=centered_clip(1.0)), model, 3)
    moved = [model.p0.item(), *(float(once.step(rows)[0]) for _ in range(2))]
    assert np.diff(moved) == pytest.approx([-1 / 3, -4 / 9])
    twice = started(SimpleReduceStrategy(inner_optim=SGD, average=centered_clip(1.0, rounds=2)), model, 3)
    assert model.p0.item() - float(twice.step(rows)[0]) == pytest.approx(4 / 9)
    with pytest.raises(ValueError, match="radius"):
        centered_clip(0)
    with pytest.raises(ValueError, match="share none"):
        FedAvgStrategy(island_size=2, average=centered_clip(1.0))
    with pytest.raises(ValueError, match="centered_clip"):
        AsyncDiLoCoStrategy(average=centered_clip(1.0))


def test_robust_rules_stay_near_the_others() -> None:
    g = 1 + 0.1 * normal(10, 4, dtype=DOUBLE)
    attack = Attack("sign_flip", nodes=[0, 1], scale=100.0)
    assert (averaged(attack, g) - 1).norm() > 30
    for rule in (median(), trimmed_mean(0.3), krum(2), geometric_median(), centered_clip(2.0, 3)):
        assert (averaged(attack, g, rule) - 1).norm() < 1, rule


# Runs -----------------------------------------------------------------------------------------------------------------


def data(rank: int, num_nodes: int, train_dataset: bool) -> Any:
    stream = torch.Generator().manual_seed(rank)
    return TensorDataset(torch.randn(12, 6, generator=stream), torch.randint(3, (12,), generator=stream))


def trained(strategy: Any, **options: Any) -> Tensor:
    trainer = vsim.Trainer(MLP(6, (5,), 3, seed=0), options.pop("data", data))
    given_: dict[str, Any] = {"num_nodes": 4, "max_steps": 6, "batch_size": 4, "progress": False, **options}
    model = trainer.fit(strategy=strategy, **given_)
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def test_labels_are_flipped_where_attackers_learn() -> None:
    def flipped(rank: int, num_nodes: int, train_dataset: bool) -> Any:
        x, y = data(rank, num_nodes, train_dataset).tensors
        return TensorDataset(x, 2 - y if rank in (1, 3) else y)

    attack = Attack("label_flip", nodes=[1, 3], classes=3)
    expected = trained(FedAvgStrategy(inner_optim="sgd", H=2, lr=0.1), data=flipped)
    assert torch.equal(trained(FedAvgStrategy(inner_optim="sgd", H=2, lr=0.1, attack=attack)), expected)
    assert torch.equal(trained(FedAvgStrategy(inner_optim="sgd", H=2, lr=0.1), attack=attack), expected)
    listed = FlippedLabels(lambda *given: [({"x": 1}, 0), ({"x": 2}, 2)], attack.attackers, 3)
    assert list(listed(1, 4, True)) == [({"x": 1}, 2), ({"x": 2}, 0)]
    assert listed(0, 4, True) == listed(1, 4, False) == [({"x": 1}, 0), ({"x": 2}, 2)]
    named = FlippedLabels(lambda *given: [{"input": 1, "label": 2}], attack.attackers, 3)
    assert named(3, 4, True)[0] == {"input": 1, "label": 0}
    part = FlippedLabels(lambda *given: Subset(data(0, 1, True), [3, 4]), attack.attackers, 3)
    assert part(1, 4, True).tensors[1].tolist() == (2 - data(0, 1, True).tensors[1][3:5]).tolist()


@pytest.mark.parametrize("kind", KINDS)
def test_nodes_held_apart_have_the_same_bits_at_the_price_of_no_attack(kind: str) -> None:
    model, own = Parameters((7, 3), (5,)), {"H": 2, "average": centered_clip(0.5)}
    together = same_apart(
        DiLoCoStrategy(inner_optim="sgd", attack=Attack(kind, nodes=[1, 2]), **own), model, normal(6, 4, 26)
    )
    assert list(together.ledger) == list(DiLoCoStrategy(inner_optim="sgd", **own).dry_run(model.to("meta"), 4, 6))


def test_attackers_that_are_away_do_not_attack() -> None:
    attack, plan = Attack("sign_flip", nodes=[1]), vsim.Schedule({0: [0, 2, 3], 100: range(4)})
    away = trained(FedAvgStrategy(inner_optim="sgd", H=2, lr=0.1, average=mean() | clip(1e6)), participation=plan)
    assert torch.equal(trained(FedAvgStrategy(inner_optim="sgd", H=2, lr=0.1, attack=attack), participation=plan), away)
    assert not torch.equal(trained(FedAvgStrategy(inner_optim="sgd", H=2, lr=0.1, attack=attack)), away)
    cohorts: Any = {"participation": vsim.Sample(4, of=9), "max_steps": 12}
    honest, attacked = (
        trained(FedAvgStrategy(inner_optim="sgd", H=2, lr=0.1, attack=own), **cohorts)
        for own in (None, Attack("alie", share=0.3))
    )
    assert not torch.equal(honest, attacked)


def test_a_run_resumes(tmp_path: Path) -> None:
    strategy = FedAvgStrategy(
        inner_optim="sgd", H=2, lr=0.1, average=centered_clip(0.1), attack=Attack("gaussian", share=0.3)
    )
    expected = trained(strategy, max_steps=8)
    trained(strategy, max_steps=5, save_dir=tmp_path)
    assert torch.equal(trained(strategy, max_steps=8, save_dir=tmp_path, resume=True), expected)


@pytest.mark.slow
@pytest.mark.parametrize("row", common.EACH, ids=lambda row: row.name)
def test_every_strategy_is_attacked_or_says_why_not(row: common.Row) -> None:
    attack = Attack("sign_flip", nodes=[1], scale=3.0)
    modules = row.make().parts
    averages = [own for module in modules if isinstance(own := vars(module).get("average"), Average)]
    others = [module for module in modules if type(module).take_attack is not Algorithm.take_attack]
    if not (averages or others) or any(average.refuses_attack for average in averages):
        with pytest.raises(ValueError, match="Attack"):
            row.make(attack=attack)
        return
    assert common.outcome(row.make(attack=attack)).weights != common.of_row(row).weights


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gaussian", "label_flip"])
def test_processes_have_the_same_bits(kind: str) -> None:
    attack = Attack(kind, nodes=[0, 2], classes=3 if kind == "label_flip" else None)
    strategy = FedAvgStrategy(inner_optim="sgd", H=2, lr=0.1, average=geometric_median(3), attack=attack)
    options: Any = {"num_nodes": 4, "num_processes": 2, "max_steps": 4, "progress": False, "batch_size": 4}
    report = vsim.verify(MLP(6, (5,), 3, seed=0), data, strategy, **options)
    assert report.identical, report
