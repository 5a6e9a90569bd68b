"""Orders at sizes that were not trained: probabilities against known laws, lines against scipy's, errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from made import check_refusals
from scipy.stats import linregress

from vsim.records.size_order import CALLED, FEWEST, Order, in_short, order

SIZES = (3e4, 1e5, 3e5, 1e6)
Law = Callable[[float], float]
Frame = dict[str, list[Any]]


def losses(laws: Sequence[Law], noise: float, stream: np.random.Generator, sizes: Any = SIZES, seeds: int = 3) -> Frame:
    """Losses of laws, with noise of their logarithms."""
    rows = [
        (f"strategy {i}", size, seed, law(size) * math.exp(noise * stream.standard_normal()))
        for i, law in enumerate(laws)
        for size in sizes
        for seed in range(seeds)
    ]
    columns = zip(*rows, strict=True)
    return {name: list(own) for name, own in zip(("strategy", "parameters", "seed", "loss"), columns, strict=True)}


def crossing(stream: np.random.Generator, at: float, apart: float = 0.01, number: int = 4) -> list[Law]:
    """Laws with floors, which are some per cent apart at one size, and fall at their own rates."""

    def law(rate: float, floor: float, there: float) -> Law:
        return lambda size: (there - floor) * (size / at) ** -rate + floor

    rates = 0.1 * np.exp(0.1 * stream.standard_normal(number))
    losses_there = 2.5 * np.exp(apart * stream.standard_normal(number))
    return [law(*own) for own in zip(rates, stream.uniform(0, 0.5, number), losses_there, strict=True)]


def apart_by(gap: float, number: int = 4) -> list[Law]:
    """Parallel laws, each so much above the one before."""
    return [lambda size, i=i: 2.5 * (size / 1e6) ** -0.1 * math.exp(gap * i) for i in range(number)]  # type: ignore[misc]


def called(found: Order, laws: Sequence[Law]) -> list[bool]:
    """Whether each pair that is called is right."""
    truth = {f"strategy {i}": law(found.to) for i, law in enumerate(laws)}
    return [truth[pair.ahead] < truth[pair.behind] for pair in found.pairs if pair.decided]


def test_of_the_pairs_that_are_called_enough_are_right() -> None:
    """300 draws of laws with floors, which no line fits; they cross below, among or beyond the sizes."""
    stream = np.random.default_rng(0)
    right, pairs, crossed = [], 0, 0
    for draw in range(300):
        laws = crossing(stream, at=10 ** stream.uniform(4, 8))
        target = 1e6 * (3, 10, 100)[draw % 3]
        found = order(losses(laws, 0.005, stream), target)
        right += called(found, laws)
        pairs += len(found.pairs)
        crossed += sum(
            (one(SIZES[0]) < other(SIZES[0])) != (one(target) < other(target)) for one in laws for other in laws
        )
    assert crossed > 300  # laws do cross
    assert len(right) > 0.15 * pairs and np.mean(right) >= 0.9  # P is at least 90 % for each of them


@pytest.mark.parametrize("noise", [0.003, 0.02])
def test_pairs_whose_laws_meet_at_the_target_are_not_decided(noise: float) -> None:
    """Without shrinking, P would be at least 90 % for 20 % of such pairs, and for more where floors bend the lines."""
    stream = np.random.default_rng(1)
    found = [order(losses(crossing(stream, 3e6, apart=0.0), noise, stream), 3e6) for _ in range(60)]
    assert np.mean([pair.decided for one in found for pair in one.pairs]) <= 0.15


@pytest.mark.parametrize("factor", [1, 3, 10])
def test_a_gap_of_three_times_the_noise_is_called(factor: float) -> None:
    stream, laws = np.random.default_rng(2), apart_by(3 * math.sqrt(2) * 0.01)  # of the difference of two runs
    found = [order(losses(laws, 0.01, stream), factor * 1e6) for _ in range(50)]
    assert np.mean([pair.decided for one in found for pair in one.pairs]) >= 0.8
    assert all(all(called(one, laws)) for one in found)


def test_probabilities_shrink_with_distance_and_with_orders_that_did_not_hold() -> None:
    stream = np.random.default_rng(3)
    frame = losses(apart_by(0.2), 0.001, stream)
    chances = [order(frame, to).probability("strategy 0", "strategy 1") for to in (1e6, 1e7, 1e8, 1e9, 1e12)]
    assert chances == sorted(chances, reverse=True) and chances[0] > 0.99 > CALLED > chances[-1] > 0.5
    flipping = losses(crossing(stream, 2e5, apart=0.001), 0.001, stream)
    assert order(flipping, 1e7).kept < 0.8 * order(frame, 1e7).kept
    assert order(flipping, 1e7).held < order(flipping, 1e7).cases == 36 == order(frame, 1e7).held


def test_what_is_said() -> None:
    stream = np.random.default_rng(4)
    near, far = (order(losses(apart_by(0.2), 0.001, stream), to) for to in (1e7, 1.3e9))
    assert repr(near).startswith("order at 10M parameters, 10 × the largest measured size: strategy 0 < strategy 1")
    assert repr(far).startswith("extrapolated: order at 1.3B parameters, 1,300 × ")
    assert "not decided" in repr(far) and "of 36 orders of two strategies at one size, 36 held" in repr(far)
    assert repr(near).count("holds") == 7 and near.decided and not far.decided
    assert "<table" in near._repr_html_() and len(near.to_pandas()) == 6
    flat, falling = lambda size: 2.0, lambda size: 2.0 * (size / 2e5) ** -0.1
    (pair,) = order(losses([flat, falling], 0.001, stream), 3e6).pairs
    assert pair.flips == [(1e5, 3e5)] and "flips between 100k and 300k" in str(pair) and math.isnan(pair.turn)
    later = order(losses([flat, lambda size: 2.0 * (size / 1e7) ** -0.1], 0.001, stream), 1e8).pairs[0]
    assert not later.flips and later.turn == pytest.approx(1e7, rel=0.1) and "the trend turns at about" in str(later)


def test_fewer_than_twenty_orders_give_no_percentage() -> None:
    frame = losses(apart_by(0.5, number=3), 0.001, np.random.default_rng(5))
    found = order(frame, 1e7)
    assert found.cases == 18 < FEWEST and all(math.isnan(pair.probability) for pair in found.pairs)
    assert not found.decided and "%" not in str(found.pairs[0]) and "not decided" in str(found.pairs[0])
    assert "too few for a probability, which takes 20" in repr(found)
    assert order(frame, 5e5).decided  # nothing is extrapolated


def test_sizes_without_all_losses_are_left_out_and_named() -> None:
    frame = losses(apart_by(0.2), 0.001, np.random.default_rng(6))
    frame["loss"][frame["parameters"].index(3e5)] = math.nan
    found = order(frame, 1e7)
    assert found.left_out == {"strategy 0": [3e5]} and "runs without a loss at 300k" in repr(found)
    assert [at.parameters for at in found.pair("strategy 0", "strategy 2").sizes] == [3e4, 1e5, 1e6]
    assert len(found.pair("strategy 1", "strategy 2").sizes) == 4
    lost = [
        name == "strategy 0" and size > 3e4 for name, size in zip(frame["strategy"], frame["parameters"], strict=True)
    ]
    one_size = frame | {"loss": np.where(lost, math.nan, frame["loss"]).tolist()}
    assert math.isnan(order(one_size, 1e7).probability("strategy 0", "strategy 1"))


@given(st.integers(0, 10**6), st.integers(1, 4), st.sampled_from([1e5, 1e6, 1e8]))
@settings(max_examples=25, deadline=None)
def test_the_line_is_scipys_and_nothing_depends_on_order_or_unit(seed: int, seeds: int, to: float) -> None:
    stream = np.random.default_rng(seed)
    frame = losses(crossing(stream, 1e6), 0.01, stream, seeds=seeds)
    found = order(frame, to)
    for pair in found.pairs:
        chosen = [
            {(s, k): v for n, s, k, v in zip(*frame.values(), strict=True) if n == name}
            for name in (pair.ahead, pair.behind)
        ]
        x = np.log10([size for size, _ in chosen[0]])
        line = linregress(x, np.log([*chosen[0].values()]) - np.log([*chosen[1].values()]))
        assert pair.slope == pytest.approx(line.slope, abs=1e-12)
        assert pair.difference == pytest.approx(line.intercept + line.slope * math.log10(to), abs=1e-12)
        assert pair.difference <= 0 and pair.low <= pair.difference <= pair.high
        assert pair.slope_high - pair.slope >= line.stderr * (1 - 1e-9)
        assert 0.5 <= pair.probability <= pair.by_trend <= 1
        assert found.probability(pair.ahead, pair.behind) == 1 - found.probability(pair.behind, pair.ahead)
    places = stream.permutation(len(frame["loss"]))
    again = {name: [own[i] for i in places] for name, own in frame.items()}
    again["loss"] = [7 * loss for loss in again["loss"]]
    other = order(again, to)
    assert list(other.names) == list(found.names) and other.kept == pytest.approx(found.kept)
    for name in found.names[1:]:
        both = (one.probability(found.names[0], name) for one in (found, other))
        assert next(both) == pytest.approx(next(both))


def test_what_is_refused() -> None:
    frame = losses(apart_by(0.1), 0.01, np.random.default_rng(7))
    one_size = losses(apart_by(0.1), 0.01, np.random.default_rng(7), sizes=[1e5])
    found = order(frame, 1e6)
    check_refusals(
        [
            (lambda: order({name: own for name, own in frame.items() if name != "seed"}, 1e6), ValueError, ["'seed'"]),
            (lambda: order(frame | {"loss": [-1.0, *frame["loss"][1:]]}, 1e6), ValueError, ["loss must be", "0"]),
            (
                lambda: order(frame | {"parameters": [0, *frame["parameters"][1:]]}, 1e6),
                ValueError,
                ["parameters must be", "0"],
            ),
            (lambda: order(one_size, 1e6), ValueError, ["two sizes, got 4 and 1"]),
            (lambda: order(frame, 0), ValueError, ["to must be", "0"]),
            (lambda: found.pair("strategy 0", "strategy 9"), ValueError, ["strategy 0", "'strategy 9'"]),
            (lambda: found.probability("strategy 0", "strategy 0"), ValueError, ["twice"]),
        ]
    )


def test_sizes_in_short() -> None:
    sizes = {7: "7", 999: "999", 1000: "1k", 36_480: "36.5k", 1.25e5: "125k", 9.9996e5: "1M", 1.3e9: "1.3B"}
    assert {n: in_short(n) for n in sizes} == sizes
