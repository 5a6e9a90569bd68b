"""Fronts and budgets, against a search through all runs and steps."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from comparisons_by_hand import check_refusals, run, texts
from comparisons_by_hand import comparison as made
from errors import refused
from hypothesis import example, given, settings
from hypothesis import strategies as st

import vsim
from vsim.analysis.losses import compare_finals
from vsim.analysis.questions.pareto import dominating
from vsim.analysis.spent import amount
from vsim.analysis.statistics import paired
from vsim.network import Compute

NETWORK = "8 Mbit/s, 0 ms"  # a byte takes a microsecond
NO_TIME = 1e-12  # of compute, in seconds


def of(losses: list[float], syncs: int = 2, seed: int = 0, payload: int = 4000) -> vsim.ComparedRun:
    """Two nodes with a loss at every other step, that average `payload` bytes every `syncs` steps."""
    return run(losses, 2, seed=seed, syncs=syncs, payload=payload)


def seeds(*finals: float, syncs: int = 2) -> list[vsim.ComparedRun]:
    return [of([2.0, 2.0, final], syncs, seed) for seed, final in enumerate(finals)]


def diverge(one: vsim.ComparedRun, step: int = 3) -> None:
    one.failure, one.diverged_at = f"non-finite loss at step {step} on nodes [0]", step


LOSSES = st.lists(st.integers(1, 9).map(float), min_size=3, max_size=5)


@settings(max_examples=20)
@given(st.lists(st.tuples(LOSSES, st.sampled_from([1, 2, 3]), st.sampled_from([400, 4000])), min_size=1, max_size=5))
def test_front_and_best_of_a_budget_are_those_of_a_search(drawn: list[tuple[list[float], int, int]]) -> None:
    runs = made(**{f"r{i}": [of(one, every, 0, size)] for i, (one, every, size) in enumerate(drawn)})
    frame = runs.pareto().frame
    ends = [(2 * (len(losses) - 1) // every * size, losses[-1]) for losses, every, size in drawn]
    for i, (cost, loss) in enumerate(ends):
        beaten = any(c <= cost and other <= loss and (c, other) != (cost, loss) for c, other in ends)
        assert frame["front"][i] == (not beaten)
        assert (frame["wire MB"][i], frame["loss"][i]) == (cost / 1e6, loss)
    for budget in (0, 400, 4000, 9000, 10**9):
        expected = {}
        for i, (losses, every, size) in enumerate(drawn):
            last = max(s for s in range(2 * len(losses) - 1) if s // every * size <= budget)
            expected[f"r{i}"] = losses[last // 2]  # between measurements the last value holds
        best = runs.best(within={"wire": budget})
        assert best == min(expected, key=expected.__getitem__)
        assert best.loss == pytest.approx(min(expected.values()), abs=1e-12)
        if len(drawn) > 1:
            assert best.runner_up_loss == pytest.approx(sorted(expected.values())[1], abs=1e-12)
            assert best.certain is None  # one seed


def test_budgets_of_time_and_dollars_follow_from_the_network() -> None:
    runs = made(often=[of([5, 3, 1], 1)], seldom=[of([5, 4, 3], 4)])
    compute = Compute(NO_TIME, dollars_per_hour=3600)  # two nodes: two dollars a second
    in_time = runs.best({"time": "4.1 ms"}, NETWORK, NO_TIME)
    assert in_time == "seldom"  # all of it: one sync of 4 ms, and a loss of 3
    assert in_time.runner_up_loss == 5.0  # one step, measured after two
    assert runs.best({"cost": "$0.0081"}, NETWORK, compute) == "seldom"
    assert runs.best({"cost": 0.0321}, NETWORK, compute) == "often"
    assert runs.best({"cost": 0.0321, "step": 0}, NETWORK, compute).loss == 5.0
    front = runs.pareto("cost", network=NETWORK, compute=compute)
    assert front.names == ["seldom", "often"]
    np.testing.assert_allclose(sorted(front.frame["dollars"]), [0.008, 0.032])
    hours = runs.pareto("time", network=NETWORK, compute=NO_TIME).frame["hours"]
    np.testing.assert_allclose(sorted(hours), [0.004 / 3600, 0.016 / 3600])


def test_best_says_how_sure_it_is() -> None:
    better, worse = [1.0, 1.2, 1.1, 1.3], [1.5, 1.6, 1.7, 1.8]
    runs = made(a=seeds(*better), b=seeds(*worse))
    best = runs.best()
    assert best == "a" and best.runner_up == "b" and best.certain
    assert best.p == paired(np.array(worse) - better).p
    assert repr(best).startswith("a: loss 1.1500; runner-up b: 1.6500 (the difference is certain")
    assert made(a=seeds(*better), b=seeds(3.0, 2.0, 1.0, 0.0)).best().certain is False
    assert repr(made(a=seeds(1.0)).best()) == "a: loss 1.0000"
    one = made(a=seeds(1.0), b=seeds(1.1)).best()
    assert one.certain is None and not one.undecided and "fewer than two common seeds" in repr(one)
    alike = made(a=seeds(*better), b=seeds(*better), c=seeds(*worse)).best()
    assert alike.undecided == {"b": 1.0} and alike.certain is False
    half = 3.182446 * np.std(better, ddof=1) / 2  # t of 3 degrees of freedom
    assert runs.pareto().frame.loc[0, ["low", "high"]].tolist() == pytest.approx([1.15 - half, 1.15 + half], abs=1e-6)


def test_the_best_is_certain_only_if_told_from_every_other() -> None:
    """ "wide" comes third and differs from seed to seed; the runner-up is told, and a table marks "wide" by a †."""
    runs = made(
        a=seeds(1.0, 1.01, 0.99, 1.0, 1.005),
        b=seeds(1.1, 1.11, 1.09, 1.1, 1.107),
        wide=seeds(0.2, 2.9, 0.6, 1.9, 0.9),
        bad=seeds(4.0, 4.01, 4.0, 4.03, 4.0),
    )
    best = runs.best()
    assert best == "a" and best.runner_up == "b" and best.p < 0.001
    assert list(best.undecided) == ["wide"] and best.undecided["wide"] > 0.05 and best.certain is False
    assert "(not significantly different from wide (p = " in repr(best) and "certain" not in repr(best)
    marked = {line.split()[0] for line in runs.table(columns=["validation loss"]).splitlines() if line.endswith("†")}
    assert marked == set(best.undecided)
    unpaired = made(a=seeds(1.0, 1.1, 1.05), b=seeds(2.0, 2.1, 2.05))
    unpaired.add("other", of([9.0, 1.5], seed=7))
    assert list(unpaired.best().undecided) == ["other"] and unpaired.best().certain is False
    assert repr(unpaired.best()).endswith("(not significantly different from other)")


def test_a_budget_that_runs_left_unused_decides_nothing() -> None:
    """Runs of 4 steps: "often" sends 4 kB at every step, "seldom" 4 kB once. 12 kB end "often", and not "seldom"."""
    often = [of([5.0, 2.0, 1.0 + 0.01 * i], 1, i) for i in range(4)]
    seldom = [of([5.0, 4.0, 3.0 + 0.02 * i], 4, i) for i in range(4)]
    runs = made(often=often, seldom=seldom)
    best = runs.best({"wire": "12 kB"})
    assert best == "often" and best.loss == 2.0 and best.p < 0.05 and best.certain is None
    assert best.uses == {"often": (1.0, 4, 3, False), "seldom": (1 / 3, 4, 12, True)}
    assert "certain" not in repr(best) and "seldom used 33% of it in 4 steps, where about 12 would" in repr(best)
    spent = runs.best({"wire": "7.9 kB"})  # one more sync of "seldom" would be too much
    assert not spent.uses["seldom"].ended and spent.certain and "certain" in repr(spent)
    none = made(often=often, none=[of([5.0, 4.0, 3.5], 9, i) for i in range(4)]).best({"wire": 8000}).uses["none"]
    assert math.isinf(none.steps_needed) and none.ended
    winner = made(seldom=[of([5.0, 0.5, 0.4], 4, i) for i in range(4)], often=often)
    assert winner.best({"wire": "12 kB"}).certain  # more steps could but lower the loss of the best
    assert runs.pareto().frame["equal_steps"].tolist() == [4, 16]


def test_a_front_shows_what_it_cannot_tell() -> None:
    """b costs more than a and is dominated; whether its loss is the higher one is left open by seeds, or decided."""
    cheap = (1.0, 1.2, 1.1, 1.3)
    for finals, tied in (((1.1, 1.1, 1.3, 1.2), True), ((1.5, 1.7, 1.6, 1.8), False)):
        runs = made(a=seeds(*cheap, syncs=4), b=seeds(*finals))
        front = runs.pareto()
        assert front.frame["tied"].tolist() == [False, tied] and front.names == ["a"]
        assert ("†" in runs.table(columns=["validation loss"])) == tied
        assert texts(front.plot().get_legend()) == ["a", "b †" if tied else "b"]
    for error, tied in ((0.06, True), (0.04, False), (math.nan, False)):  # 1.96 of it reach from 1.1 to 1.0, or not
        runs = made(a=seeds(1.0, syncs=4), b=seeds(1.1))
        runs["b"].history.amend({"global_loss_se": error})
        assert runs.pareto().frame["tied"].tolist() == [False, tied]


def test_a_strategy_with_a_run_that_diverged_is_not_the_best_and_costs_a_pair_alone() -> None:
    runs = made(a=seeds(1.0, 1.2, 1.1, 1.3), b=seeds(0.5, 0.7, 0.6, 0.8), c=seeds(1.1, 1.0))
    diverge(runs.runs("b")[3])
    assert runs.best() == "c" and runs.best().loss == pytest.approx(1.05)  # a over seeds 0 and 1: 1.1
    assert runs.best({"step": 2}).loss == 2.0
    frame = runs.pareto().frame.set_index("strategy")
    assert not frame.loc["b", "front"] and frame.loc["b", "loss"] == pytest.approx(0.6)
    assert frame["seeds"].tolist() == [2, 3, 2] and frame.loc["a", "dominated_by"] == "c"
    assert runs.differences(to="a").set_index("strategy")["seeds"].to_dict() == {"b": 3, "c": 2}
    *_, pairs, notes = runs.table().splitlines()
    assert "the common seeds 0, 1" in pairs and notes.endswith("cannot be the best: b (3 of 4 runs)")
    few = made(a=seeds(1.0, 1.1, 1.2), b=seeds(1.5, 1.6, 1.7))  # of b one seed of three: two are left to be tested
    diverge(few.runs("b")[1])
    assert "fewer than two" not in few.table() and "†" not in few.table() and "b (2 of 3 runs)" in few.table()
    fewer = made(a=few.runs("a")[:1], b=few.runs("b")[1:])
    assert fewer.best() == "a" and "fewer than two common seeds: differences are not tested" in fewer.table()
    lost = made(lost=seeds(2.0), other=seeds(1.9))
    diverge(lost["lost"])
    frame = lost.pareto().frame
    assert frame["front"].tolist() == [False, True] and math.isnan(frame["loss"][0])
    assert lost.best({"step": 2}) == "other"


SEEDS = st.dictionaries(st.integers(0, 2), st.tuples(LOSSES, st.booleans()), min_size=1, max_size=3)


@settings(max_examples=25)
@given(st.lists(st.tuples(SEEDS, st.sampled_from([1, 2, 4])), min_size=1, max_size=4))
@example(
    [({0: ([5, 1, 1], False)}, 4), ({1: ([1], False), 2: ([1], False)}, 1), ({1: ([1], False), 2: ([5, 1], False)}, 1)]
)
@pytest.mark.filterwarnings("ignore:validation is too")
def test_missing_seeds_follow_one_rule_everywhere(drawn: list[tuple[dict[int, tuple[list[float], bool]], int]]) -> None:
    """By a search: who is the best, on the front, first and cheapest, of strategies with missing and diverged seeds."""
    runs: dict[str, list[vsim.ComparedRun]] = {}
    for i, (own_seeds, every) in enumerate(drawn):
        runs[f"r{i}"] = [of(losses, every, seed) for seed, (losses, _) in own_seeds.items()]
        for own, (_, diverged) in zip(runs[f"r{i}"], own_seeds.values(), strict=True):
            if diverged:
                diverge(own, own.ledger.steps)
    comparison, target = made(**runs), 4.0

    def least(value: Any) -> set[str]:
        """Of strategies with a value for all their seeds, those of the lowest mean over the seeds that all have."""
        values = {name: {one.seed: value(one) for one in own} for name, own in runs.items()}
        known = {name: own for name, own in values.items() if all(map(math.isfinite, own.values()))}
        shared = {seed for seed in range(3) if all(seed in own for own in known.values())}
        means = {
            n: np.mean([value for seed, value in own.items() if seed in (shared or own)]) for n, own in known.items()
        }
        return {name for name, mean in means.items() if mean <= min(means.values()) + 1e-9}

    lowest = least(lambda one: math.nan if one.failed else one.history.last("global_loss"))
    if lowest:
        assert comparison.best() in lowest and set(comparison.pareto().names) & lowest
    else:
        with refused(ValueError, "no run got to its end"):
            comparison.best()
        assert not comparison.pareto().names
    whole = {name for name, own in runs.items() if not any(one.failed for one in own)}
    assert set(comparison.pareto().names) <= whole and set(compare_finals(comparison)[0].best) <= lowest
    fewest = least(lambda one: one.history.at_step(one.history.crossing(target, "global_loss").step, "wire_bytes"))
    winners = comparison.winners(target, ["8 Mbit/s"], [0], NO_TIME)  # where time is bytes
    if not fewest:
        assert winners.first == [[()]]
        with refused(ValueError, "no strategy reaches"):
            comparison.cheapest(target)
        return
    cheapest = comparison.cheapest(target)
    ahead = set(winners.first[0][0])
    assert cheapest in fewest and ahead and fewest | ahead <= {cheapest, *cheapest.tied}


def test_a_front_shows_itself() -> None:
    front = made(a=[of([3.0, 2.0, 1.0], 1)], b=[of([3.0, 2.5, 2.0], 4)], c=[of([3.0, 3.0, 3.0])]).pareto()
    ax = front.plot()
    assert texts(ax.get_legend()) == ["a", "b", "c"] and ax.get_ylabel() == "validation loss"
    (line,) = (line for line in ax.lines if line.get_drawstyle() == "steps-post")
    assert [*line.get_ydata()] == [2.0, 1.0]  # type: ignore[misc]
    low = made(**{f"r{i}": [of([3.0, 2.0, 1 + i / 10], i + 1)] for i in range(4)}, poor=[of([9.0, 9.0, 9.0])]).pareto()
    ax = low.plot()
    assert ax.get_ylim()[1] < 2 and "9" in [text.get_text() for text in ax.texts]
    assert "<img" in front._repr_html_() and "dominated_by" in repr(front)
    assert dominating([], []) == []


def test_mistakes_are_named() -> None:
    best: Any = made(a=[of([3.0, 2.0, 1.0])]).best
    pareto = made(a=[of([3.0, 2.0, 1.0])]).pareto
    check_refusals(
        [
            (lambda: best({"bytes": 3}), ValueError, ["within", "'wire'", "'bytes'"]),
            (lambda: best({"wire": "2 Gbit/s"}), ValueError, ["within['wire']", "MB", "'2 Gbit/s'"]),
            (lambda: best({"wire": "1.2.3 MB"}), ValueError, ["within['wire']", "kB, MB", "'1.2.3 MB'"]),
            (lambda: best({"cost": "$.40."}), ValueError, ["within['cost']", "'$40'", "'$.40.'"]),
            (lambda: best({"time": "1 h"}), TypeError, ["network is missing"]),
            (lambda: best({"wire": 1}, NETWORK, 1.0), TypeError, ["network and compute", "no effect on wire"]),
            (lambda: best(None, NETWORK, 1.0), TypeError, ["network and compute", "no effect", "time and cost"]),
            (lambda: best({"cost": 1}, NETWORK, 1.0), ValueError, ["cost", "dollars_per_hour"]),
            (lambda: best({"tokens": 0}), ValueError, ["no strategy has a loss", "0 tokens"]),
            (lambda: pareto("wire", network=NETWORK), TypeError, ["network and compute", "no effect on wire"]),
        ]
    )


@pytest.mark.parametrize(
    ("of", "given", "number"),
    [("wire", "1.5 MB", 1.5e6), ("payload", "20 B", 20), ("time", "2 min", 120), ("time", 3, 3), ("cost", "40", 40)],
)
def test_amounts_are_read_as_numbers_or_text(of: Any, given: Any, number: float) -> None:
    assert amount(of, given) == number
