"""Orders at sizes that were not trained: probabilities against known laws, lines against scipy's, errors."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
from comparisons_by_hand import check_refusals
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from scipy.stats import linregress

from vsim.analysis.size_order import CALLED, FEWEST, Order, order
from vsim.figures.words import in_short

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


# Worlds of which the truth is known -----------------------------------------------------------------------------------

Logs = NDArray[np.float64]
Draw = Callable[[np.random.Generator, Logs], Logs]


def lines(stream: np.random.Generator, x: Logs) -> Logs:
    """Log losses (4, X) at sizes of logarithm x: lines, 2 % apart at 1M, and 1 % per factor of ten."""
    return stream.normal(0, 0.02, (4, 1)) + stream.normal(0, 0.01, (4, 1)) * (x - 6)


def nearly_equal(stream: np.random.Generator, x: Logs) -> Logs:
    """Lines that meet at one size, and differ less than runs do."""
    return stream.normal(0, 0.003, (4, 1)) * (x - stream.uniform(4, 8))


def floors(stream: np.random.Generator, x: Logs) -> Logs:
    """Power laws with floors, 1 % apart at one size."""
    return np.log([[law(10**at) for at in x] for law in crossing(stream, 10 ** stream.uniform(4, 8))])


def shrinking(stream: np.random.Generator, x: Logs) -> Logs:
    """Penalties of 3 % that shrink towards constants; the first strategy has none."""
    penalty = stream.exponential(0.03, (4, 1)) * 10 ** (-stream.uniform(0.1, 0.7, (4, 1)) * (x - x[0]))
    return np.where(np.arange(4)[:, None], penalty + stream.normal(0, 0.003, (4, 1)), 0)


def luck(stream: np.random.Generator, x: Logs) -> Logs:
    """Lines, and at each size a part of each strategy that all its seeds share: tuning, rounding."""
    return lines(stream, x) + 10 ** stream.uniform(-3, -1.7) * stream.standard_normal((4, len(x)))


def walk(stream: np.random.Generator, x: Logs) -> Logs:
    """Random walks over the logarithm of the size."""
    steps = np.sqrt(np.diff(x, prepend=x[0])) * stream.standard_normal((4, len(x)))
    return stream.normal(0, 0.01, (4, 1)) + 10 ** stream.uniform(-2.5, -1.5) * steps.cumsum(1)


def humps(stream: np.random.Generator, x: Logs) -> Logs:
    """Lines, and a bump of 3 % of each strategy, at a size up to 3 times the largest measured one."""
    away = (x - stream.uniform(4.5, 6.5, (4, 1))) / stream.uniform(0.2, 0.6, (4, 1))
    return lines(stream, x) + stream.normal(0, 0.03, (4, 1)) * np.exp(-(away**2) / 2)


def normal(stream: np.random.Generator, shape: tuple[int, ...]) -> Logs:
    """Noise (4, S, seeds) of standard deviation 1."""
    return stream.standard_normal(shape)


def heavy(stream: np.random.Generator, shape: tuple[int, ...]) -> Logs:
    """Student's t with 2 degrees of freedom."""
    return stream.standard_t(2, shape)


def shared(stream: np.random.Generator, shape: tuple[int, ...]) -> Logs:
    """A part of each seed and size, ten times as large, that all strategies share."""
    return normal(stream, shape) + 10 * normal(stream, (1, *shape[1:]))


def lasting(stream: np.random.Generator, shape: tuple[int, ...]) -> Logs:
    """For the most part, a part of each strategy and seed, the same at all sizes."""
    return 0.3 * normal(stream, shape) + normal(stream, (shape[0], 1, shape[2]))


def uneven(stream: np.random.Generator, shape: tuple[int, ...]) -> Logs:
    """A different spread at each size."""
    return normal(stream, shape) * 10 ** stream.uniform(-0.5, 0.5, (1, shape[1], 1))


WORLDS: dict[str, tuple[Draw, Callable[[np.random.Generator, tuple[int, ...]], Logs]]] = {
    "lines": (lines, normal),
    "lines, nearly equal": (nearly_equal, normal),
    "power laws with floors": (floors, normal),
    "penalties that shrink to constants": (shrinking, normal),
    "luck of a size": (luck, normal),
    "luck of a size, little noise": (luck, lambda stream, shape: 0.1 * normal(stream, shape)),
    "random walks": (walk, normal),
    "humps": (humps, normal),
    "heavy tails": (lines, heavy),
    "noise that strategies share": (lines, shared),
    "noise that a seed keeps": (lines, lasting),
    "noise that differs by size": (lines, uneven),
}


def calls(name: str, factor: float, seeds: int, draws: int) -> tuple[int, list[bool]]:
    """The number of pairs in drawn ladders of a world, and whether each pair is right that is called at a target.

    At a measured size, the truth has the luck of that size; at any other size, another luck is drawn.
    """
    stream = np.random.default_rng([sum(map(ord, name)), int(10 * factor), seeds])
    law, noise = WORLDS[name]
    target, number, right = factor * SIZES[-1], 0, []
    x = np.log10(sorted({*SIZES, target}))
    for _ in range(draws):
        truth = law(stream, x)
        spread = 10 ** stream.uniform(-3, -1.7)
        drawn = truth[:, : len(SIZES), None] + spread * noise(stream, (4, len(SIZES), seeds))
        places = np.indices(drawn.shape).reshape(3, -1)
        found = order(
            {
                "strategy": [f"strategy {i}" for i in places[0]],
                "parameters": [SIZES[i] for i in places[1]],
                "seed": places[2].tolist(),
                "loss": (2.5 * np.exp(drawn)).ravel().tolist(),
            },
            target,
        )
        at_target = dict(
            zip((f"strategy {i}" for i in range(4)), truth[:, x.searchsorted(math.log10(target))], strict=True)
        )
        number += len(found.pairs)
        right += [bool(at_target[pair.ahead] < at_target[pair.behind]) for pair in found.pairs if pair.decided]
        for pair in found.pairs:
            assert pair.measured or not (pair.decided and (pair.flips or not math.isnan(pair.turn)))
    return number, right


@pytest.mark.parametrize("name", WORLDS)
def test_nine_of_ten_calls_are_right_in_every_world(name: str) -> None:
    """At the largest size, at twice it and at ten times it; few pairs are called there."""
    right = [own for factor, draws in ((1, 15), (2, 15), (10, 20)) for own in calls(name, factor, 3, draws)[1]]
    assert len(right) > 20 and np.mean(right) >= 0.9


EACH = [
    (name, factor, (2, 3, 10)[(i + j) % 3])  # each pair of two
    for i, name in enumerate(WORLDS)
    for j, factor in enumerate((1, 2, 10))
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "factor", "seeds"), EACH)
def test_nine_of_ten_calls_are_right_at_each_distance(name: str, factor: float, seeds: int) -> None:
    number, right = calls(name, factor, seeds, 400)
    assert len(right) > {1: 0.15, 2: 0.1, 10: 0.005}[factor] * number and np.mean(right) >= 0.9


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
    assert "?: which of the two is ahead is not decided" in repr(far)
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


def made(**losses: dict[float, Sequence[float]]) -> Frame:
    """Name → size → the loss of each seed, as a frame."""
    rows = [
        (name, size, seed, loss)
        for name, own in losses.items()
        for size, values in own.items()
        for seed, loss in enumerate(values)
    ]
    columns = ("strategy", "parameters", "seed", "loss")
    return {name: list(own) for name, own in zip(columns, zip(*rows, strict=True), strict=True)}


def test_an_order_that_was_seen_at_no_size_is_not_called() -> None:
    """A penalty that shrinks to a constant: a line through it turns, and more seeds make it more sure."""
    laws = {
        "A": lambda n: 0.03 * (n / 3e4) ** -0.5 + 0.001,
        "B": lambda n: 0.0,
        "C": lambda n: 0.05,
        "D": lambda n: 0.1,
    }
    parallel = [lambda n, law=law: 2.5 * (n / 1e6) ** -0.1 * math.exp(law(n)) for law in laws.values()]  # type: ignore[misc]
    found = order(losses(parallel, 0.001, np.random.default_rng(1), seeds=10), 1e7)
    pair = found.pair("strategy 0", "strategy 1")
    assert pair.ahead == "strategy 0" and pair.by_trend > 0.9 and all(at.difference > 0 for at in pair.sizes)
    assert not pair.decided and math.isnan(pair.probability) and 1e6 < pair.turn < 1e7
    assert pair.why == f"the trend turns at about {in_short(pair.turn)}" and pair.why in repr(found)
    assert math.isnan(found.probability("strategy 1", "strategy 0")) and found.pair("strategy 2", "strategy 3").decided
    below = order(losses([lambda n: 2.0, lambda n: 2.0 * (n / 2e4) ** -0.1], 0.001, np.random.default_rng(4)), 1e3)
    assert 1e3 < below.pairs[0].turn < 3e4 and not below.decided  # also towards smaller sizes


def test_at_a_measured_size_the_measurement_answers() -> None:
    """Seeds share the luck of a size: the line through four sizes, each with ten seeds, is not as sure as 40 points."""
    sizes = dict(zip((1e4, 1e5, 1e6, 1e7), (-0.005, 0.01, 0.012, -0.004), strict=True))
    noise = {size: 0.0003 * np.sin(7 * np.arange(10) + size) for size in sizes}
    frame = made(
        **{
            n: {s: 2 * np.exp(sign * z + noise[s] * sign) for s, z in sizes.items()}
            for n, sign in (("A", 0.5), ("B", -0.5))
        }
    )
    (pair,) = order(frame, 1e7).pairs
    assert pair.ahead == "A" and pair.decided and pair.measured  # although the line has B ahead
    assert pair.difference == pytest.approx(-0.004, abs=1e-3) and pair.probability > 0.99
    assert pair.low < pair.difference < pair.high < 0
    text = repr(order(frame, 1e7))
    assert "a measured size: A < B" in text and "measured; flips between 10k and 100k, flips between 1M and 10M" in text
    assert "holds" not in text and "measured at 10M: decided where two strategies differ significantly" in text
    (near,) = order(frame, 9e6).pairs
    assert not near.decided and not near.measured and near.why.startswith("flips between 10k and 100k")
    alike = made(A={1e4: [2.0, 2.1], 1e5: [1.0, 1.1]}, B={1e4: [2.2, 2.3], 1e5: [1.1, 1.0]})
    assert order(alike, 1e5).pairs[0].why == "seeds do not tell them apart there (p > 0.05)"


def test_seeds_of_a_size_are_one_point_where_sizes_scatter_about_the_line() -> None:
    x, seeds = np.log10(SIZES), np.array([-0.001, 0.0, 0.001])
    scattered = -0.02 + np.array([0.0, 0.01, 0.0, 0.01])

    def only(apart: Any) -> Any:
        differences = {size: np.exp(own + seeds) for size, own in zip(SIZES, apart, strict=True)}
        return order(made(A=differences, B={size: [1.0, 1.0, 1.0] for size in SIZES}), 2e6).pairs[0]

    line = linregress(x, scattered)
    at = line.intercept + line.slope * math.log10(2e6)
    away = math.log10(2e6) - x.mean()
    error = math.sqrt(
        np.square(scattered - line.intercept - line.slope * x).sum()
        / 2
        * (1 / 4 + away**2 / np.square(x - x.mean()).sum())
    )
    pair = only(scattered)
    assert (pair.low, pair.high) == pytest.approx((at - 4.302653 * error, at + 4.302653 * error), abs=1e-6)  # 2 degrees
    straight = only(-0.02 + 0.001 * (x - 6))
    error = 0.001 * math.sqrt(1 / 12 + away**2 / np.square(x - x.mean()).sum() / 3)  # of 12 points, as seeds scatter
    assert straight.high - straight.low == pytest.approx(2 * 2.228139 * error, rel=1e-6)  # 10 degrees


def test_sizes_at_which_a_strategy_never_communicated_are_left_out_and_named() -> None:
    frame = losses(apart_by(0.2), 0.001, np.random.default_rng(6))
    sent = [
        0.0 if name == "strategy 3" or (name == "strategy 1" and size < 2e5) else 100.0
        for name, size in zip(frame["strategy"], frame["parameters"], strict=True)
    ]
    found = order(frame | {"wire_bytes": sent}, 1e7)
    assert found.silent == {"strategy 1": [3e4, 1e5]} and not found.left_out  # strategy 3 never does
    assert [at.parameters for at in found.pair("strategy 1", "strategy 0").sizes] == [3e5, 1e6]
    assert len(found.pair("strategy 0", "strategy 3").sizes) == 4 and not order(frame, 1e7).silent
    assert "strategy 1: left out at 30k, 100k, where it never communicated" in repr(found)


def test_why_an_order_is_not_decided() -> None:
    three = losses(apart_by(0.5, number=3), 0.001, np.random.default_rng(5))
    assert {pair.why for pair in order(three, 1e7).pairs} == {"18 orders are too few for a probability"}
    assert "not decided: 18 orders are too few" in repr(order(three, 1e7))
    unpaired = losses(apart_by(0.2), 0.001, np.random.default_rng(6))
    unpaired["seed"] = [
        seed + 10 * (name == "strategy 0") for name, seed in zip(unpaired["strategy"], unpaired["seed"], strict=True)
    ]
    found = order(unpaired, 2e6)
    assert found.pair("strategy 0", "strategy 1").why == "no size at which both have a loss with the same seed"
    assert math.isnan(found.probability("strategy 0", "strategy 1")) and found.cases == 18
    assert order(unpaired, 1e6).pair("strategy 1", "strategy 2").decided
    one = losses(apart_by(0.2), 0.001, np.random.default_rng(6), sizes=[1e5, 1e6], seeds=1)
    assert order(one, 2e6).pairs[0].why == "too few sizes and seeds for the error of a trend"
    far = order(losses(apart_by(0.2), 0.001, np.random.default_rng(3)), 1e12)
    assert {pair.why for pair in far.pairs} == {"P is below 90%"} == set(far.to_pandas()["why"])


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
        there = [at.difference for at in pair.sizes if at.parameters == to and seeds > 1]
        expected = there or [line.intercept + line.slope * math.log10(to)]
        assert pair.measured == bool(there) and pair.difference == pytest.approx(expected[0], abs=1e-12)
        assert pair.difference <= 0 and pair.low <= pair.difference <= pair.high
        assert pair.slope_high - pair.slope >= line.stderr * (1 - 1e-9)
        assert 0.5 <= pair.by_trend <= 1 and pair.decided == (not pair.why)
        if not math.isnan(pair.probability):
            assert 0.5 <= pair.probability <= pair.by_trend
            assert found.probability(pair.ahead, pair.behind) == 1 - found.probability(pair.behind, pair.ahead)
    places = stream.permutation(len(frame["loss"]))
    again = {name: [own[i] for i in places] for name, own in frame.items()}
    again["loss"] = [7 * loss for loss in again["loss"]]
    other = order(again, to)
    assert list(other.names) == list(found.names) and other.kept == pytest.approx(found.kept)
    for name in found.names[1:]:
        both = (one.probability(found.names[0], name) for one in (found, other))
        assert next(both) == pytest.approx(next(both), nan_ok=True)


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
