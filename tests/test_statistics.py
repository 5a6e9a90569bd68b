"""What measurements can tell: crossings by their properties, tests against scipy, and effects found at their power."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from comparisons_by_hand import check_refusals
from comparisons_by_hand import of_finals as comparison
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy import stats

from vsim.analysis.statistics import contenders, differences, holm, paired, power, ranking, seeds_needed
from vsim.history.reached import crossing

losses = st.lists(st.floats(0.01, 10), min_size=1, max_size=12)


@given(st.floats(0.05, 200), st.integers(2, 12), st.sampled_from([0.95, 0.99, 0.9975, 1 - 0.05 / 136]))
def test_more_seeds_find_more(effect: float, seeds: int, level: float) -> None:
    """Also far from 0, where scipy has no number for one of the tails."""
    few, more = power(effect, seeds, level), power(effect, seeds + 1, level)
    assert 0 <= few <= more + 1e-9 <= 1 + 1e-6


@given(losses, st.integers(1, 30), st.floats(0, 10), st.data())
def test_a_crossing_is_where_the_loss_is_measured(curve: list[float], every: int, target: float, data: Any) -> None:
    steps = [every * i for i in range(len(curve))]
    formed = data.draw(st.lists(st.booleans(), min_size=len(curve), max_size=len(curve)))
    found = crossing(steps, curve, target, formed)
    below = [i for i, loss in enumerate(curve) if loss <= target]
    if not below:
        assert all(math.isnan(value) for value in found)
        return
    i = below[0]
    assert found.step == steps[i] and found.first == (steps[i - 1] + 1 if i else 0)
    exists = [steps[j] for j in below if formed[j]]
    assert found.formed == exists[0] if exists else math.isnan(found.formed)
    assert crossing(steps, curve, target) == (found.step, found.step, found.first)


ONE, TWO, THREE = [1.0, 1.2, 0.9, 1.1], [1.3, 1.4, 1.25, 1.45], [1.1, 1.05, 1.0, 1.12]


def test_differences_are_those_of_scipy_by_hand() -> None:
    frame = comparison(one=ONE, two=TWO, three=THREE).differences(to="one", level=0.9).set_index("strategy")
    tests = {name: stats.ttest_rel(own, ONE) for name, own in (("two", TWO), ("three", THREE))}
    least, most = sorted(float(test.pvalue) for test in tests.values())
    for name, test in tests.items():
        row = frame.loc[name]
        number = 2 if test.pvalue == least else max(1, 2 * least / most)  # of tests that this one stands for
        interval = test.confidence_interval(1 - 0.1 / number)
        assert row["difference"] == pytest.approx(np.mean({"two": TWO, "three": THREE}[name]) - np.mean(ONE))
        assert (row["low"], row["high"]) == pytest.approx((interval.low, interval.high))
        assert row["p"] == pytest.approx(2 * least if test.pvalue == least else max(2 * least, most))  # Holm
        assert row["seeds"] == 4
    assert frame.columns.tolist() == ["to", "difference", "low", "high", "p", "seeds", "seeds_needed"]
    assert set(comparison(one=ONE, two=TWO).differences().strategy) == {"two"}  # to the best


def test_identical_strategies_do_not_differ() -> None:
    made = comparison(a=ONE, b=list(ONE), c=TWO)
    row = made.differences(to="a").set_index("strategy").loc["b"]
    assert row["difference"] == row["low"] == row["high"] == 0 and row["p"] == 1 and row["seeds_needed"] == math.inf
    found = ranking({name: dict(enumerate(own)) for name, own in (("b", ONE), ("a", ONE), ("c", TWO))})
    assert found == (("a", "b"), (), True)
    assert "†" not in made.table()
    bold = made.table("latex_booktabs", columns=["validation loss"])
    assert bold.count("\\textbf{1.05") == 2 and "\\textbf{1.35" not in bold


def test_a_table_marks_what_cannot_be_told_from_the_best() -> None:
    table = comparison(one=ONE, two=TWO, three=THREE).table(columns=["validation loss"])
    marked = {line.split()[0] for line in table.splitlines() if line.endswith("†")}
    assert marked == {"three"} and "p > 0.05" in table.splitlines()[-1]
    latex = comparison(one=ONE, three=THREE).table("latex", columns=["validation loss"])
    assert "\\rlap{$^{\\dagger}$}" in latex and latex.splitlines()[-2].startswith(
        "{\\footnotesize $^{\\dagger}$ not significantly different"
    )
    html = comparison(one=ONE, three=THREE).table("html", columns=["validation loss"])
    assert html.endswith("</p>") and "†" in html


def test_seeds_are_paired_and_what_diverged_is_left_out() -> None:
    made = comparison(a=[1.0, 2.0, 3.0], b=[1.1, 2.1, 3.1, 9.0])
    row = made.differences(to="a").iloc[0]
    assert row["difference"] == pytest.approx(0.1) and row["seeds"] == 3 and row["p"] == pytest.approx(0, abs=1e-12)
    made.runs("b")[1].diverged_at = 4
    assert made.differences(to="a").iloc[0]["seeds"] == 2
    alone = comparison(a=[1.0], b=[1.1])
    row = alone.differences(to="a").iloc[0]
    assert row["difference"] == pytest.approx(0.1) and row[["low", "high", "p", "seeds_needed"]].isna().all()
    assert "one seed: differences are not tested" in alone.table().splitlines()[-1]
    check_refusals(
        [
            (lambda: made.differences(to="AllReduce"), ValueError, ["to must be one of", "'a', 'b'", "'AllReduce'"]),
        ]
    )


@pytest.mark.parametrize(("effect", "seeds"), [(1.2, 5), (0.0, 4)])
def test_an_effect_of_known_size_is_found_at_its_power(effect: float, seeds: int) -> None:
    """Of 500 comparisons with differences N(effect, 1) the share that is found is that of the noncentral t."""
    draws = np.random.default_rng(3).normal(effect, 1, (500, seeds))
    found = np.mean([paired(own).p < 0.05 for own in draws])
    expected = power(effect, seeds) if effect else 0.05
    assert abs(found - expected) < 3 * math.sqrt(expected * (1 - expected) / 500)
    covered = [paired(own) for own in draws]
    assert abs(np.mean([one.low <= effect <= one.high for one in covered]) - 0.95) < 0.03


def test_the_seeds_that_it_takes_reach_the_power() -> None:
    for effect, seeds in ((3.0, 4), (1.0, 10), (0.5, 34)):  # G*Power: two-sided paired t-test, 0.05, 0.8
        pairs = effect + np.array([-1.0, 1.0]) / math.sqrt(2)  # of standard deviation 1
        assert seeds_needed(pairs) == seeds
        assert power(effect, seeds) >= 0.8 > power(effect, seeds - 1)


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8))
def test_holm_never_lowers_a_p_and_keeps_their_order(p: list[float]) -> None:
    adjusted, tests = holm(p)
    assert all(own <= new <= 1 for own, new in zip(p, adjusted, strict=True))
    assert [adjusted[i] for i in np.argsort(p, kind="stable")] == sorted(adjusted)
    np.testing.assert_allclose(np.minimum(1, tests * p), adjusted)
    assert min(adjusted) == pytest.approx(min(1, len(p) * min(p)))


VALUES = st.lists(st.lists(st.floats(0, 4), min_size=4, max_size=4), min_size=2, max_size=6)


@given(VALUES, st.sampled_from([0.5, 0.9, 0.95]), st.booleans())
def test_interval_p_and_seeds_say_the_same(drawn: list[list[float]], level: float, chosen: bool) -> None:
    values = {f"r{i}": dict(enumerate(own)) for i, own in enumerate(drawn)}
    for row in differences(values, "r0", level, chosen):
        if abs(row["p"] - (1 - level)) < 1e-9:
            continue  # on the edge
        assert (row["low"] <= 0 <= row["high"]) == (row["p"] > 1 - level)
        assert row["seeds_needed"] == math.inf or isinstance(row["seeds_needed"], int)
        assert row["p"] <= 1 - level or row["seeds_needed"] > row["seeds"]


def told(values: NDArray[np.float64]) -> bool:
    """Whether any strategy of (seeds, strategies) is told from the best."""
    found = ranking({str(i): dict(enumerate(own.tolist())) for i, own in enumerate(values.T)})
    return len(found.best) + len(found.undecided) < values.shape[1]


@pytest.mark.slow
@pytest.mark.parametrize(("strategies", "seeds", "spread"), [(3, 5, 8.0), (8, 5, 8.0), (17, 5, 1.0), (8, 10, 1.0)])
def test_the_best_that_the_data_chose_is_told_from_equals_in_5_percent(
    strategies: int, seeds: int, spread: float
) -> None:
    """Of 1000 comparisons of strategies that do not differ, a third of them with another spread over the seeds."""
    rng, noise = np.random.default_rng(strategies + seeds), np.ones(strategies)
    noise[-(strategies // 3) :] = spread
    draws = rng.normal(size=(1000, seeds, 1)) + noise * rng.normal(size=(1000, seeds, strategies))
    assert np.mean([told(own) for own in draws]) < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 1000)


def test_a_best_that_the_data_chose_is_tested_among_all_pairs() -> None:
    rng = np.random.default_rng(5)
    runs = {f"r{i}": list(rng.normal(i, 0.3, 5)) for i in range(4)}
    made = comparison(**runs)
    assert made.best() == "r0"
    chosen, given = (made.differences(to=to).set_index("strategy") for to in (made.best(), str(made.best())))
    names = list(runs)
    raw = [stats.ttest_rel(runs[a], runs[b]).pvalue for i, a in enumerate(names) for b in names[i + 1 :]]
    np.testing.assert_allclose(chosen["p"], holm(raw)[0][:3])
    np.testing.assert_allclose(given["p"], holm(raw[:3])[0])
    assert made.differences().set_index("strategy").equals(chosen)
    assert made.best().p == pytest.approx(chosen.loc["r1", "p"])
    assert (chosen["p"] >= given["p"]).all() and (chosen["high"] - chosen["low"] >= given["high"] - given["low"]).all()
    marked = {line.split()[0] for line in made.table(columns=["validation loss"]).splitlines() if line.endswith("†")}
    assert marked == set(chosen.index[chosen["p"] > 0.05])


SEEDS = st.dictionaries(st.integers(0, 4), st.floats(0, 9) | st.just(math.nan), max_size=5)


@given(st.lists(SEEDS, min_size=1, max_size=5))
def test_who_can_be_the_best_by_a_search(drawn: list[dict[int, float]]) -> None:
    """A run without a result is worse than any other; the rest is compared over the seeds that all of it has."""
    values = {f"r{i}": own for i, own in enumerate(drawn)}
    found = contenders(values)
    sound = [name for name, own in values.items() if own and not any(map(math.isnan, own.values()))]
    assert sorted(found) == sound and list(found.values()) == sorted(found.values())
    common = [seed for seed in range(5) if all(seed in values[name] for name in sound)]
    for name, mean in found.items():
        own = [values[name][seed] for seed in common or values[name]]
        assert min(own) - 1e-12 <= mean <= max(own) + 1e-12 and mean == pytest.approx(sum(own) / len(own))
    ranked = ranking(values)
    assert set(ranked.best) <= set(sound) and (not sound or ranked.best)
    for name in ranked.undecided:  # also with a seed that diverged
        assert name in sound or sum(map(math.isfinite, values[name].values())) > 1
    if sound:
        for row in differences(values, sound[0]):
            both = [
                s for s, own in values[str(row["strategy"])].items() if math.isfinite(own) and s in values[sound[0]]
            ]
            assert row["seeds"] == len(both)
