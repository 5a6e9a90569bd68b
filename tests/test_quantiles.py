"""Hours as a distribution: a synchronous step waits for the slowest of K, whose mean has a closed form."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from reference_cluster import small_mlp, vectors
from torch.nn import functional as F

import vsim
from vsim import Compute, Timeline
from vsim.strategy import AsyncDiLoCoStrategy, DiLoCoStrategy, SimpleReduceStrategy

STEPS = 100


def synchronous(num_nodes: int, compute: Compute, steps: int = STEPS, **options: Any) -> Timeline:
    """AllReduce whose messages take no time."""
    setting: dict[str, Any] = {"num_nodes": num_nodes, "max_steps": steps, "network": math.inf, "compute": compute}
    line = vsim.price(SimpleReduceStrategy(), parameters=1e6, **setting)
    return vsim.timeline(line, line.network, compute, **options)


def slowest_log_normal(num_nodes: int, sigma: float) -> float:
    """E[max of K] = ∫ 1 − F(x)^K dx, of exp(σ z − σ²/2), by the midpoint rule."""
    x = (np.arange(20_000) + 0.5) * 1e-3
    below = np.vectorize(NormalDist().cdf)((np.log(x) + sigma**2 / 2) / sigma)
    return float((1 - below**num_nodes).sum() * 1e-3)


@pytest.mark.parametrize(("num_nodes", "sigma"), [(2, 0.3), (8, 0.3), (8, 0.8)])
def test_with_jitter_a_step_takes_the_mean_of_the_slowest(num_nodes: int, sigma: float) -> None:
    line = synchronous(num_nodes, Compute(1.0, jitter=sigma), quantiles=[0.1, 0.5, 0.9], draws=40)
    expected = STEPS * slowest_log_normal(num_nodes, sigma)
    low, middle, high = (line.quantiles[share][-1] for share in (0.1, 0.5, 0.9))
    assert low < middle < high and middle == pytest.approx(expected, rel=0.02)
    assert expected == pytest.approx(middle, abs=high - low)


def test_of_measured_factors_the_slowest_has_the_mean_of_the_order_statistic() -> None:
    """Of n equally likely values x₁ ≤ … ≤ xₙ, the largest of K draws is xᵢ with probability (i/n)^K − ((i − 1)/n)^K."""
    factors, K = np.random.default_rng(0).exponential(size=60), 5
    i = np.arange(61) / 60
    expected = float(np.sort(factors) @ np.diff(i**K))
    line = synchronous(K, Compute(2.0, factors=factors.tolist()), quantiles=[0.5], draws=40)
    assert line.quantiles[0.5][-1] == pytest.approx(2 * STEPS * expected, rel=0.02)


def test_exponential_steps_wait_for_the_harmonic_number() -> None:
    """The largest of K exponential variables has the mean 1 + 1/2 + … + 1/K."""
    factors = (-np.log1p(-(np.arange(5000) + 0.5) / 5000)).tolist()
    line = synchronous(4, Compute(1.0, factors=factors), quantiles=[0.5], draws=40)
    assert line.quantiles[0.5][-1] == pytest.approx(STEPS * (1 + 1 / 2 + 1 / 3 + 1 / 4), rel=0.02)


def test_quantiles_are_those_of_a_simulation() -> None:
    """Of 20 steps of 3 nodes: the sum of 20 largest of 3, in 20,000 plain simulations."""
    line = synchronous(3, Compute(1.0, jitter=0.5), 20, quantiles=[0.1, 0.5, 0.9], draws=300)
    z = np.random.default_rng(1).standard_normal((20_000, 20, 3))
    simulated = np.exp(0.5 * z - 0.125).max(2).sum(1)
    for share, own in line.quantiles.items():
        assert own[-1] == pytest.approx(np.quantile(simulated, share), rel=0.02)
    assert len(line.quantiles[0.1]) == 21 and line.quantiles[0.1][0] == 0
    frame = line.to_pandas()
    assert [*frame.columns] == [
        *("step", "seconds", "compute_seconds", "stalls"),
        *(f"seconds {n} %" for n in (10, 50, 90)),
    ]
    assert frame["seconds 90 %"].iloc[-1] == line.quantiles[0.9][-1] and "quantiles 0.1: " in repr(line)


def test_rare_syncs_wait_less() -> None:
    """Over H steps a node's seconds average out: between two syncs the slowest of K is closer to the mean."""
    compute = Compute(1.0, jitter=0.5)
    setting: dict[str, Any] = {"parameters": 1e6, "num_nodes": 8, "max_steps": 200, "network": math.inf}
    rare = vsim.price(DiLoCoStrategy(H=20), compute=compute, **setting).seconds[-1]
    assert 200 < rare < 0.8 * synchronous(8, compute, 200).seconds[-1]


def test_mistakes_are_errors() -> None:
    line = synchronous(2, Compute(1.0, jitter=0.1), 4)
    with pytest.raises(TypeError, match="quantiles have no effect with Compute"):
        vsim.timeline(line, line.network, 1.0, quantiles=[0.5])
    for quantiles in ([1.5], [-0.1], ["half"]):
        with pytest.raises((TypeError, ValueError), match="quantiles must be"):
            vsim.timeline(line, line.network, line.compute, quantiles=quantiles)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="draws must be"):
        vsim.timeline(line, line.network, line.compute, quantiles=[0.5], draws=1)


def test_a_table_has_the_median_and_the_range() -> None:
    compute = Compute(3600.0, jitter=0.5)
    strategies = {"all": SimpleReduceStrategy(lr=0.1), "async": AsyncDiLoCoStrategy(H=2, lr=0.1)}
    comparison = vsim.compare(
        small_mlp(),
        vectors(),
        vectors(8),
        loss_fn=F.cross_entropy,
        strategies=strategies,
        num_nodes=3,
        max_steps=6,
        batch_size=2,
        network=math.inf,
        compute=compute,
        progress=False,
    )
    row = next(own for own in comparison.rows().to_dict("records") if own["strategy"] == "all")
    history = comparison.histories["all"][0]
    ends = vsim.timeline(history, math.inf, compute, quantiles=[0.1, 0.5, 0.9]).quantiles
    assert [row[f"hours{own}"] for own in (" low", "", " high")] == [own[-1] / 3600 for own in ends.values()]
    table = comparison.table()
    assert f"{row['hours']:.2f} ({row['hours low']:.2f} to {row['hours high']:.2f})" in table
    assert "median and 10th to 90th percentile of 32 draws of Compute" in " ".join(table.split())


def test_the_map_of_winners_takes_the_median_draw() -> None:
    strategies = {"all": SimpleReduceStrategy(lr=0.01), "rare": DiLoCoStrategy(H=5, lr=0.01)}
    comparison = vsim.compare(
        small_mlp(),
        vectors(),
        vectors(),
        strategies=strategies,
        num_nodes=3,
        max_steps=20,
        batch_size=2,
        val_interval=20,
        progress=False,
    )
    history, compute = comparison.histories["all"][0], Compute(1.0, jitter=0.8)
    loss = float(max(comparison.histories[name][0].last("global_loss") for name in strategies))
    assert loss < history["global_loss"][0]
    with pytest.warns(UserWarning, match="validation is too rare"):  # so that the loss is reached at the last step
        found = comparison.winners(loss, bandwidths=[1e15], latencies=[1e-9], compute=compute)
    drawn = [vsim.timeline(history, math.inf, compute.drawn(draw)).seconds[-1] for draw in range(32)]
    (own,) = found.times["all"].values()
    assert own[0].item() == pytest.approx(np.sort(drawn)[16], rel=1e-6) and np.std(drawn) > 0.5
