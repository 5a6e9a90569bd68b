"""Fronts and budgets, against a search through all runs and steps."""

from __future__ import annotations

import math
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import vsim
from vsim.cluster.ledger import Ledger
from vsim.cluster.stacked import StackedCollectives
from vsim.network import Compute
from vsim.records.fronts import amount, dominating, loss_within
from vsim.records.statistics import paired

NETWORK = "8 Mbit/s, 0 ms"  # a byte takes a microsecond
NO_TIME = 1e-12  # of compute, in seconds


def ledger_of(every: int, payload: int, steps: int) -> Ledger:
    """The ledger of two nodes that average `payload` bytes every `every` steps."""
    import torch

    ledger = Ledger(2)
    collectives = StackedCollectives(ledger, range(2))
    for step in range(1, steps + 1):
        collectives.position.step = step
        if step % every == 0:
            collectives.all_reduce(torch.zeros(2, payload // 4), "mean")
    return ledger


def run(losses: list[float], every: int = 2, payload: int = 4000, seed: int = 0) -> vsim.ComparedRun:
    """A run of two nodes with a loss at every other step, that averages `payload` bytes every `every` steps."""
    history = vsim.History("made", 2)
    steps = 2 * (len(losses) - 1)
    sent = 0.0
    for step in range(steps + 1):
        sent += payload if step and step % every == 0 else 0
        row = {"step": step, "examples": 8 * step, "wire_bytes": sent, "payload_bytes": sent}
        row |= {"global_loss": losses[step // 2]} if step % 2 == 0 else {}
        history.append(row | ({"train_loss": 1.0} if step else {}), [1.0, 1.0] if step else None)
    history.ledger = ledger_of(every, payload, steps)
    history.ledger.steps = steps
    return vsim.ComparedRun(history, seed=seed)


def made(**runs: list[vsim.ComparedRun]) -> vsim.Comparison:
    comparison = vsim.Comparison(4000)
    for name, own in runs.items():
        for one in own:
            comparison._add(name, one)
    return comparison


LOSSES = st.lists(st.integers(1, 9).map(float), min_size=3, max_size=5)


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(LOSSES, st.sampled_from([1, 2, 3]), st.sampled_from([400, 4000])), min_size=1, max_size=5))
def test_front_and_best_of_a_budget_are_those_of_a_search(drawn: list[tuple[list[float], int, int]]) -> None:
    comparison = made(**{f"r{i}": [run(*one)] for i, one in enumerate(drawn)})
    frame = comparison.pareto().frame
    ends = [(2 * (len(losses) - 1) // every * payload, losses[-1]) for losses, every, payload in drawn]
    for i, (cost, loss) in enumerate(ends):
        beaten = any(c <= cost and other <= loss and (c, other) != (cost, loss) for c, other in ends)
        assert frame["front"][i] == (not beaten)
        assert (frame["wire MB"][i], frame["loss"][i]) == (cost / 1e6, loss)
    for budget in (0, 400, 4000, 9000, 10**9):
        expected = {}
        for i, (losses, every, payload) in enumerate(drawn):
            last = max(s for s in range(2 * len(losses) - 1) if s // every * payload <= budget)
            expected[f"r{i}"] = losses[last // 2]  # between measurements the last value holds
        best = comparison.best(within={"wire": budget})
        assert best == min(expected, key=expected.__getitem__)
        assert best.loss == pytest.approx(min(expected.values()), abs=1e-12)
        if len(drawn) > 1:
            assert best.runner_up_loss == pytest.approx(sorted(expected.values())[1], abs=1e-12)
            assert best.certain is None  # one seed


def test_budgets_of_time_and_dollars_follow_from_the_network() -> None:
    comparison = made(often=[run([5, 3, 1], 1, 4000)], seldom=[run([5, 4, 3], 4, 4000)])
    compute = Compute(NO_TIME, dollars_per_hour=3600)  # two nodes: two dollars a second
    assert (
        comparison.best({"time": "4.1 ms"}, NETWORK, NO_TIME) == "seldom"
    )  # all of it: one sync of 4 ms, and a loss of 3
    assert comparison.best({"time": "4.1 ms"}, NETWORK, NO_TIME).runner_up_loss == 5.0  # one step, measured after two
    assert comparison.best({"cost": "$0.0081"}, NETWORK, compute) == "seldom"
    assert comparison.best({"cost": 0.0321}, NETWORK, compute) == "often"
    assert comparison.best({"cost": 0.0321, "step": 0}, NETWORK, compute).loss == 5.0
    front = comparison.pareto("cost", network=NETWORK, compute=compute)
    assert front.names == ["seldom", "often"]
    np.testing.assert_allclose(sorted(front.frame["dollars"]), [0.008, 0.032])
    np.testing.assert_allclose(
        sorted(comparison.pareto("time", network=NETWORK, compute=NO_TIME).frame["hours"]), [0.004 / 3600, 0.016 / 3600]
    )


def test_best_says_how_sure_it_is() -> None:
    better, worse = [1.0, 1.2, 1.1, 1.3], [1.5, 1.6, 1.7, 1.8]
    runs = {
        "a": [run([2.0, 2.0, loss], seed=i) for i, loss in enumerate(better)],
        "b": [run([2.0, 2.0, loss], seed=i) for i, loss in enumerate(worse)],
    }
    best = made(**runs).best()
    assert best == "a" and best.runner_up == "b" and best.certain
    assert best.p == paired(np.array(worse) - better).p
    assert repr(best).startswith("a: loss 1.1500; runner-up b: 1.6500 (the difference is certain")
    assert made(a=runs["a"], b=[run([2.0, 2.0, 3.0 - i], seed=i) for i in range(4)]).best().certain is False
    assert repr(made(a=runs["a"][:1]).best()) == "a: loss 1.0000"
    front = made(**runs).pareto().frame
    low, high = front["low"][0], front["high"][0]
    half = 3.182446 * np.std(better, ddof=1) / 2  # t of 3 degrees of freedom
    assert (low, high) == pytest.approx((1.15 - half, 1.15 + half), abs=1e-6)


def test_a_budget_that_runs_left_unused_decides_nothing() -> None:
    """Runs of 4 steps: "often" sends 4 kB at every step, "seldom" 4 kB once. 12 kB end "often", and not "seldom"."""
    runs = {
        "often": [run([5.0, 2.0, 1.0 + 0.01 * i], 1, seed=i) for i in range(4)],
        "seldom": [run([5.0, 4.0, 3.0 + 0.02 * i], 4, seed=i) for i in range(4)],
    }
    best = made(**runs).best({"wire": "12 kB"})
    assert best == "often" and best.loss == 2.0 and best.p < 0.05 and best.certain is None
    assert best.uses["often"] == (1.0, 4, 3, False)
    assert best.uses["seldom"] == (1 / 3, 4, 12, True)
    assert "certain" not in repr(best) and "seldom used 33% of it in 4 steps, where about 12 would" in repr(best)
    spent = made(**runs).best({"wire": "7.9 kB"})  # one more sync of "seldom" would be too much
    assert not spent.uses["seldom"].ended and spent.certain and "certain" in repr(spent)
    alone = made(often=runs["often"], none=[run([5.0, 4.0, 3.5], 9, seed=i) for i in range(4)]).best({"wire": 8000})
    assert math.isinf(alone.uses["none"].steps_needed) and alone.uses["none"].ended
    winner = made(seldom=[run([5.0, 0.5, 0.4], 4, seed=i) for i in range(4)], often=runs["often"])
    assert winner.best({"wire": "12 kB"}).certain  # more steps could but lower the loss of the best
    assert made(**runs).pareto().frame["equal_steps"].tolist() == [4, 16]


def test_a_run_that_diverged_is_on_no_front() -> None:
    lost = run([2.0, 2.0, 2.0])
    lost.failure, lost.diverged_at = "diverged", 3
    comparison = made(lost=[lost], other=[run([2.0, 2.0, 1.9])])
    frame = comparison.pareto().frame
    assert frame["front"].tolist() == [False, True] and math.isnan(frame["loss"][0])
    assert comparison.best({"step": 2}) == "other"


def test_a_front_shows_what_it_cannot_tell() -> None:
    """b costs more than a and is dominated; whether its loss is the higher one is left open by seeds, or decided."""

    def seeds(*finals: float, every: int) -> list[vsim.ComparedRun]:
        return [run([2.0, 2.0, final], every, seed=seed) for seed, final in enumerate(finals)]

    cheap = seeds(1.0, 1.2, 1.1, 1.3, every=4)
    for finals, tied in (((1.1, 1.1, 1.3, 1.2), True), ((1.5, 1.7, 1.6, 1.8), False)):
        comparison = made(a=cheap, b=seeds(*finals, every=2))
        front = comparison.pareto()
        assert front.frame["tied"].tolist() == [False, tied] and front.names == ["a"]
        assert ("†" in comparison.table(columns=["validation loss"])) == tied
        labels = [text.get_text() for text in front.plot().get_legend().get_texts()]  # type: ignore[union-attr]
        assert labels == ["a", "b †" if tied else "b"]
    for error, tied in ((0.06, True), (0.04, False), (math.nan, False)):  # 1.96 of it reach from 1.1 to 1.0, or not
        comparison = made(a=cheap[:1], b=seeds(1.1, every=2))
        comparison["b"].history.amend({"global_loss_se": error})
        assert comparison.pareto().frame["tied"].tolist() == [False, tied]
    plt.close("all")


def test_a_strategy_with_a_run_that_diverged_is_not_the_best_and_costs_a_pair_alone() -> None:
    losses = [[1.0, 1.2, 1.1, 1.3], [0.5, 0.7, 0.6, 0.8], [1.1, 1.0, 1.2, 1.1]]
    runs = [[run([2.0, 2.0, loss], seed=seed) for seed, loss in enumerate(own)] for own in losses]
    lost = runs[1][3]
    lost.failure, lost.diverged_at = "non-finite loss at step 3 on nodes [0]", 3
    comparison = made(a=runs[0], b=runs[1], c=runs[2][:2])
    assert comparison.best() == "c" and comparison.best().loss == pytest.approx(1.05)  # a over seeds 0 and 1: 1.1
    frame = comparison.pareto().frame.set_index("strategy")
    assert not frame.loc["b", "front"] and frame.loc["b", "loss"] == pytest.approx(0.6)
    assert frame["seeds"].tolist() == [2, 3, 2] and frame.loc["a", "dominated_by"] == "c"
    seeds = comparison.differences(to="a").set_index("strategy")["seeds"]
    assert seeds.to_dict() == {"b": 3, "c": 2}
    *_, pairs, notes = comparison.table().splitlines()
    assert "the seeds that all have, 0, 1" in pairs and notes.endswith("cannot be the best: b (3 of 4)")


def test_two_common_seeds_are_not_called_fewer() -> None:
    """Of b one seed of three diverged: two are left, which are tested."""
    runs = {
        name: [run([2.0, 2.0, loss + 0.1 * seed], seed=seed) for seed in range(3)]
        for name, loss in (("a", 1.0), ("b", 1.5))
    }
    runs["b"][1].failure, runs["b"][1].diverged_at = "non-finite loss at step 3 on nodes [0]", 3
    table = made(**runs).table()
    assert "fewer than two" not in table and "†" not in table and "b (2 of 3)" in table
    few = made(a=runs["a"][:1], b=runs["b"][1:])
    assert few.best() == "a" and "fewer than two common seeds: no interval" in few.table()


SEEDS = st.dictionaries(st.integers(0, 2), st.tuples(LOSSES, st.booleans()), min_size=1, max_size=3)


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(SEEDS, st.sampled_from([1, 2, 4])), min_size=1, max_size=4))
@example(
    [({0: ([5, 1, 1], False)}, 4), ({1: ([1], False), 2: ([1], False)}, 1), ({1: ([1], False), 2: ([5, 1], False)}, 1)]
)
@pytest.mark.filterwarnings("ignore:validation is too")
def test_missing_seeds_follow_one_rule_everywhere(drawn: list[tuple[dict[int, tuple[list[float], bool]], int]]) -> None:
    """By a search: who is the best, on the front, first and cheapest, of strategies with missing and diverged seeds."""
    runs: dict[str, list[vsim.ComparedRun]] = {}
    for i, (seeds, every) in enumerate(drawn):
        runs[f"r{i}"] = [run(losses, every, seed=seed) for seed, (losses, _) in seeds.items()]
        for own, (_, diverged) in zip(runs[f"r{i}"], seeds.values(), strict=True):
            if diverged:
                own.failure, own.diverged_at = "non-finite loss", own.ledger.steps
    comparison, target = made(**runs), 4.0

    def least(values: dict[str, dict[int, float]]) -> set[str]:
        """Of strategies with a value for all their seeds, those of the lowest mean over the seeds that all have."""
        known = {name: own for name, own in values.items() if all(map(math.isfinite, own.values()))}
        shared = {seed for seed in range(3) if all(seed in own for own in known.values())}
        means = {
            n: np.mean([value for seed, value in own.items() if seed in (shared or own)]) for n, own in known.items()
        }
        return {name for name, mean in means.items() if mean <= min(means.values()) + 1e-9}

    def by_seed(value: Any) -> dict[str, dict[int, float]]:
        return {name: {one.seed: value(one) for one in own} for name, own in runs.items()}

    lowest = least(by_seed(lambda one: math.nan if one.failed else one.history.last("global_loss")))
    if lowest:
        assert comparison.best() in lowest and set(comparison.pareto().names) & lowest
    else:
        with pytest.raises(ValueError, match="no run got to its end"):
            comparison.best()
        assert not comparison.pareto().names
    whole = {name for name, own in runs.items() if not any(one.failed for one in own)}
    assert set(comparison.pareto().names) <= whole
    assert set(comparison._ranking()[0].best) <= lowest
    fewest = least(
        by_seed(lambda one: one.history.at_step(one.history.crossing(target, "global_loss").step, "wire_bytes"))
    )
    winners = comparison.winners(target, ["8 Mbit/s"], [0], NO_TIME)  # where time is bytes
    if not fewest:
        assert winners.first == [[()]]
        with pytest.raises(ValueError, match="no run reaches"):
            comparison.cheapest(target)
        return
    cheapest = comparison.cheapest(target)
    ahead = set(winners.first[0][0])
    assert cheapest in fewest and ahead and fewest | ahead <= {cheapest, *cheapest.tied}


def test_a_front_shows_itself() -> None:
    front = made(a=[run([3.0, 2.0, 1.0], 1)], b=[run([3.0, 2.5, 2.0], 4)], c=[run([3.0, 3.0, 3.0], 2)]).pareto()
    ax = front.plot()
    labels = [text.get_text() for text in ax.get_legend().get_texts()]  # type: ignore[union-attr]
    assert labels == ["a", "b", "c"] and ax.get_ylabel() == "validation loss"
    (line,) = (line for line in ax.lines if line.get_drawstyle() == "steps-post")
    assert [*line.get_ydata()] == [2.0, 1.0]  # type: ignore[misc]
    low = made(
        **{f"r{i}": [run([3.0, 2.0, 1 + i / 10], i + 1)] for i in range(4)}, poor=[run([9.0, 9.0, 9.0])]
    ).pareto()
    ax = low.plot()
    assert ax.get_ylim()[1] < 2 and "9" in [text.get_text() for text in ax.texts]
    assert "<img" in front._repr_html_() and "dominated_by" in repr(front)
    plt.close("all")


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        (({"bytes": 3},), ValueError, "budget.*bytes"),
        (({"wire": "2 Gbit/s"},), ValueError, "2 Gbit/s"),
        (({"wire": "1.2.3 MB"},), ValueError, r"within\['wire'\] must be .* kB, MB.*'1\.2\.3 MB'"),
        (({"cost": "$.40."},), ValueError, r"within\['cost'\] must be .*'\$40'.*'\$\.40\.'"),
        (({"wire": -1},), ValueError, "wire.*-1"),
        (({"step": "many"},), ValueError, "step.*many"),
        (("wire",), TypeError, "within.*wire"),
        (({},), TypeError, "within"),
        (({"time": "1 h"},), TypeError, "network"),
        (({"wire": 1}, NETWORK, 1.0), TypeError, "no effect"),
        ((None, NETWORK, 1.0), TypeError, "no effect"),
        (({"cost": 1}, NETWORK, 1.0), ValueError, "dollars_per_hour"),
    ],
)
def test_a_budget_that_says_nothing_is_an_error(arguments: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        made(a=[run([3.0, 2.0, 1.0])]).best(*arguments)
    with pytest.raises(ValueError, match=r"cost.*bytes"):
        made(a=[run([3.0, 2.0, 1.0])]).pareto("bytes")


def test_amounts_are_read_as_numbers_or_text() -> None:
    assert amount("wire", "1.5 MB") == 1.5e6 and amount("payload", "20 B") == 20 and amount("wire", 7) == 7
    assert amount("time", "2 min") == 120 and amount("time", 3) == 3 and amount("cost", "40") == 40


def test_no_loss_within_a_budget() -> None:
    steps, losses = np.arange(3.0), np.array([math.nan, 2.0, 1.0])
    assert math.isnan(loss_within(losses, [(steps, 0.0)]))
    assert loss_within(losses, [(steps, 1.5)]) == 2.0
    assert dominating([], []) == []
