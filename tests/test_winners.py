"""Runs priced on networks: the same for many networks as for one, the winner in each place, and how sure it is."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from compared import compared
from hypothesis import given, settings
from hypothesis import strategies as st

import vsim
from vsim.cluster.ledger import Event
from vsim.network import Compute, Network, timeline
from vsim.network.timeline import seconds_on
from vsim.records.plots import looks_of
from vsim.records.winners import BANDWIDTHS, LATENCIES, Race, Winners
from vsim.strategy import AloneStrategy, DiLoCoStrategy, OptimSpec, SimpleReduceStrategy, SparseLoCoStrategy

K = 4
NOT_REACHED = "not reached by sometimes (1 of 2 runs), lost (never)"


@st.composite
def ledgers(draw: Any) -> vsim.Ledger:
    """Of K nodes and up to 8 steps; half of them with groups, pairs, servers or delays, which not all nodes share."""
    ledger = vsim.Ledger(K)
    ledger.steps = draw(st.integers(1, 8))
    odd = draw(st.booleans())
    everyone: tuple[Any, ...] = (range(K),)
    groups = st.sampled_from([everyone, ((0, 1), (2, 3)), ((0, 1, 2), (3,)), ((0,), (1,), (2,), (3,))])
    for step in sorted(draw(st.lists(st.integers(0, ledger.steps), max_size=8))):
        moment, size = draw(st.sampled_from(["gradients", "weights"])), draw(st.sampled_from([0, 100, 1e4, 3e6]))
        collective, own, due = (
            draw(st.sampled_from(["all_reduce", "all_gather", "all_to_all", "broadcast"])),
            everyone,
            step,
        )
        if odd:
            own, due = draw(groups), step + draw(st.integers(0, 2))
        if odd and draw(st.booleans()):
            collective, own = draw(st.sampled_from([("push", everyone), ("pull", everyone), ("send", ((0, 1),))]))
        ledger.record(Event(step, due, moment, collective, "x", size, own))
    return ledger


algorithms = st.sampled_from(["ring", "tree", "halving-doubling", "server"])
speeds = st.sampled_from([1e5, 1e7, 1e9, math.inf]), st.sampled_from([0, 0.001, 0.2])
networks = st.builds(Network, *speeds, collective=algorithms)
computes = st.builds(
    Compute,
    st.sampled_from([0.5, "20 ms", [0.1, 0.2, 0.1, 0.3]]),
    layers=st.sampled_from([None, 1, 5]),
    jitter=st.sampled_from([None, 0.3]),
)


@settings(max_examples=40)
@given(ledgers(), st.lists(st.tuples(*speeds), min_size=1, max_size=3), algorithms, computes)
def test_many_networks_at_once_are_each_by_itself(
    ledger: vsim.Ledger, many: list[tuple[float, float]], algorithm: str, compute: Compute
) -> None:
    steps = [ledger.steps, 0, ledger.steps // 2]
    bits, delays = np.array(many).T
    found = seconds_on(ledger, bits, delays, algorithm, compute, steps)
    for (bandwidth, latency), own in zip(many, found, strict=True):
        line = timeline(ledger, Network(bandwidth, latency, collective=algorithm), compute)
        np.testing.assert_allclose(own, line.seconds[steps], rtol=1e-12, atol=1e-12)


@settings(max_examples=40)
@given(ledgers(), st.sampled_from([0.1, 3.0, 50.0]), algorithms)
def test_a_timeline_scales(ledger: vsim.Ledger, c: float, algorithm: str) -> None:
    """T(c · seconds, B, a) = c · T(seconds, c · B, a / c)."""
    slow = timeline(ledger, Network(2e6, 0.03, collective=algorithm), Compute(0.2 * c, layers=3, jitter=0.2))
    fast = timeline(ledger, Network(2e6 * c, 0.03 / c, collective=algorithm), Compute(0.2, layers=3, jitter=0.2))
    np.testing.assert_allclose(slow.seconds, c * fast.seconds, rtol=1e-9)


@given(networks, computes)
def test_networks_and_compute_come_back_from_files(network: Network, compute: Compute) -> None:
    ledger = vsim.Ledger(K)
    ledger.steps = 2
    ledger.record(Event(1, 1, "weights", "all_reduce", "x", 1e6, (range(K),)))
    again = Network.from_plain(network.as_plain()), Compute.from_plain(compute.as_plain())
    assert timeline(ledger, *again).seconds.tolist() == timeline(ledger, network, compute).seconds.tolist()
    assert repr(again) == repr((network, compute))


def run(steps: int, reached: int | None, payload: float, seed: int = 0) -> vsim.ComparedRun:
    """A run of K nodes that all-reduces at every step, and has loss 1 from step `reached` on."""
    history = vsim.History("", K)
    for step in range(steps + 1):
        loss = 1.0 if reached is not None and step >= reached else 2.0
        row = {"step": step, "examples": step, "global_loss": loss, "wire_bytes": 1.5 * payload * step}
        history.append({**row, "payload_bytes": payload * step})
        if step and payload:
            history.ledger.record(Event(step, step, "weights", "all_reduce", "x", payload, (range(K),)))
    return vsim.ComparedRun(history, seed=seed)


@pytest.fixture
def three() -> vsim.Comparison:
    made = vsim.Comparison(1_000_000)
    for seed in (0, 1):
        made._add("AllReduce", run(40, 10, 1e6, seed))
        made._add("local", run(40, 30, 0, seed))
        made._add("sometimes", run(100, 5 if seed else None, 0, seed))  # 52.5 s in the mean, if it were next
    made._add("lost", run(40, None, 1e3))
    return made


def test_who_is_first_by_hand(three: vsim.Comparison) -> None:
    """AllReduce takes 10 · (1 s + p), training alone 30 s: they are equal at p = 2 s.

    Without latency p = 2 · 3/4 · 8 · 10⁶ bit / B, so B = 6 Mbit/s. With 1/3 s a message, 6 messages take the 2 s.
    """
    found = three.winners(1.0, bandwidths=["3 Mbit/s", 12e6, "1 Gbit/s"], latencies=[0, "400 ms"], compute=1.0)
    assert found.first == [[("local",), ("AllReduce",), ("AllReduce",)], [("local",)] * 3]
    np.testing.assert_allclose(found.seconds["AllReduce"][0], [50, 20, 10 + 0.12])
    assert (found.seconds["local"] == 30).all()
    assert found.never == {"sometimes": "1 of 2 runs", "lost": "never"}
    one, two, three_ = found.stretches()
    assert (one.name, two.name, three_.name) == ("local", "AllReduce", "local")
    assert one.high == two.low == pytest.approx(6e6, rel=0.1)  # between 3 and 12 Mbit/s, in logarithms
    table = found.table()
    assert "never" in table and "1 of 2 runs" in table and "time to loss 1" in table
    fine = three.winners(1.0, np.linspace(5e6, 7e6, 100), [0], 1.0)
    assert fine.stretches()[0].high == pytest.approx(6e6, rel=1e-4)


def curve(losses: list[float], every: int, seed: int = 0, payload: float = 0.0) -> vsim.ComparedRun:
    """A run with these losses at every step, measured at every `every`-th."""
    history = vsim.History("", K)
    for step, loss in enumerate(losses):
        row = {"step": step, "examples": step, "wire_bytes": 1.5 * payload * step}
        history.append(row | ({} if step % every else {"global_loss": loss}))
        if step and payload:
            history.ledger.record(Event(step, step, "weights", "all_reduce", "x", payload, (range(K),)))
    return vsim.ComparedRun(history, seed=seed)


def of_curves(every: int, order: int = 1, seeds: int = 1) -> vsim.Comparison:
    """Three strategies of different bytes and speeds, straight lines from 2 down, in one order or the other."""
    made = vsim.Comparison(1)
    falls = {"dense": (0.05, 4e6), "half": (0.043, 1e6), "rare": (0.032, 1e5)}
    for name in list(falls)[::order]:
        for seed in range(seeds):
            fall, payload = falls[name]
            losses = [max(0.1, 2.0 - (fall + 0.0004 * seed) * step) for step in range(61)]
            made._add(name, curve(losses, every, seed, payload))
    return made


@pytest.mark.filterwarnings("ignore:validation is too rare")
def test_a_coarse_map_is_that_of_every_step_but_for_ties() -> None:
    """Brute force: measured at every step the first is known, and a coarser map names it in every cell."""
    fine = of_curves(1).winners(1.0, compute=0.5)
    assert fine.left_open == 0
    known = [cell for row in fine.first for cell in row]
    assert {names for names in known if len(names) == 1} == {("dense",), ("half",), ("rare",)}
    for every in (4, 20):
        coarse = [cell for row in of_curves(every).winners(1.0, compute=0.5).first for cell in row]
        assert all(set(names) <= set(found) for names, found in zip(known, coarse, strict=True))
        decided = sum(len(names) == 1 for names in coarse)
        assert 0 < decided < len(coarse)


@pytest.mark.filterwarnings("ignore:validation is too rare")
def test_a_map_does_not_depend_on_the_order_of_strategies() -> None:
    for every in (1, 10):
        one, other = (of_curves(every, order).winners(1.0, compute=0.5) for order in (1, -1))
        assert one.first == other.first and one.left_open == other.left_open
    same = vsim.Comparison(1)
    for name in ("b", "a"):
        same._add(name, curve([2.0, 1.5, 1.0], 1))
    assert {cell for row in same.winners(1.2, compute=1.0).first for cell in row} == {("a", "b")}


def test_more_measurements_settle_the_map() -> None:
    with pytest.warns(UserWarning, match="validation is too rare to tell .* first to loss 1 .* smaller val_interval"):
        coarse = of_curves(20).winners(1.0, compute=0.5)
    fine = of_curves(2).winners(1.0, compute=0.5)  # no warning
    assert coarse.left_open > 0.3 > 0.1 > fine.left_open > 0 == of_curves(1).winners(1.0, compute=0.5).left_open


def test_strategies_that_seeds_cannot_tell_apart_are_tied_by_hand() -> None:
    """Steps to the loss: a 10, 12, 14, and b in the mean 1 more: by the same each time, or by −5, 1 and 7."""
    for offsets, first in ([1, 1, 1], ("a",)), ([-5, 1, 7], ("a", "b")):
        made = vsim.Comparison(1)
        for seed, (step, offset) in enumerate(zip([10, 12, 14], offsets, strict=True)):
            made._add("a", curve([2.0] * step + [1.0] * 20, 1, seed))
            made._add("b", curve([2.0] * (step + offset) + [1.0] * 20, 1, seed))
        assert made.winners(1.0, [1e6], [0.1], 1.0).first == [[first]]


def test_of_many_strategies_more_seeds_are_needed() -> None:
    """b takes 3, 4 and 5 steps more than a: t is 6.9, and p 0.02, or 0.06 where these are two of three strategies."""
    for others, first in ((0, ("a",)), (1, ("a", "b"))):
        made = vsim.Comparison(1)
        for seed, (step, offset) in enumerate(zip([10, 12, 14], [3, 4, 5], strict=True)):
            made._add("a", curve([2.0] * step + [1.0] * 60, 1, seed))
            made._add("b", curve([2.0] * (step + offset) + [1.0] * 60, 1, seed))
            for i in range(others):
                made._add(f"c{i}", curve([2.0] * (step + 40) + [1.0] * 60, 1, seed))
        assert made.winners(1.0, [1e6], [0.1], 1.0).first == [[first]]


@pytest.mark.slow
@pytest.mark.parametrize("strategies", [3, 8])
def test_a_first_is_told_from_equals_in_5_percent_of_cells(strategies: int) -> None:
    """Of 4000 independent cells, five seeds of strategies whose costs do not differ, a third with another spread."""
    rng, noise = np.random.default_rng(strategies), np.ones(strategies)
    noise[-(strategies // 3) :] = 8.0
    costs = 1e3 + rng.normal(size=(1, 5, 4000)) + noise[:, None, None] * rng.normal(size=(strategies, 5, 4000))
    race = Race(
        {str(i): {seed: np.stack([cells] * 3) for seed, cells in enumerate(own)} for i, own in enumerate(costs)}
    )
    assert (~race.ahead).any(0).mean() < 0.05 + 3 * math.sqrt(0.05 * 0.95 / 4000)


def test_a_seed_that_does_not_reach_the_loss_leaves_open_who_is_first() -> None:
    """fast takes 10 s with four seeds of five; the fifth ended after 30 s: at least 14 s in the mean."""
    for slow, first in ((20, ("fast", "slow")), (13, ("slow",))):
        made = vsim.Comparison(1)
        for seed in range(5):
            made._add("slow", curve([2.0] * slow + [1.0] * 20, 1, seed))
            made._add("fast", curve([2.0] * 10 + [1.0] * 21 if seed else [2.0] * 31, 1, seed))
        found = made.winners(1.0, [1e6], [0.1], 1.0)
        assert found.first == [[first]] and found.never == {"fast": "4 of 5 runs"} and found.left_open == 0
        cheapest = made.cheapest(1.0)
        assert cheapest == "slow" and cheapest.tied == ("fast",)  # neither sends anything
        made.runs("fast")[0].failure, made.runs("fast")[0].diverged_at = "non-finite loss", 30
        assert made.winners(1.0, [1e6], [0.1], 1.0).first == [[("slow",)]]  # it would not have got there
        assert not made[["fast"]].winners(1.0, [1e6], [0.1], 1.0).first[0][0]


def test_seeds_that_not_all_have_decide_nothing() -> None:
    """With seed 0, which both have, a takes 10 steps and b 12; b has seeds in which it is faster."""
    made = vsim.Comparison(1)
    made._add("a", curve([2.0] * 10 + [1.0] * 20, 1, 0))
    for seed, step in enumerate([12, 2, 2]):
        made._add("b", curve([2.0] * step + [1.0] * 20, 1, seed, payload=1e3))
    assert made.winners(1.0, [1e9], [0], 1.0).first == [[("a",)]]
    assert made.best() == "a" and made.best().runner_up == "b"


def test_where_a_loss_is_reached_and_stays() -> None:
    """Of two curves around one line, the noisier one is at the loss first, and stays there last."""
    rng, made = np.random.default_rng(0), vsim.Comparison(1)
    line = 2.0 - 0.02 * np.arange(81)
    for seed in range(4):
        for name, noise in (("calm", 0.01), ("noisy", 0.15)):
            made._add(name, curve((line + rng.normal(0, noise, 81)).tolist(), 1, seed, payload=1e3))
    first, stays = (made.winners(1.0, [1e6], [0.0], 1.0, stays=stays) for stays in (False, True))
    assert first.first == [[("noisy",)]] and stays.first == [[("calm",)]]
    assert (made.cheapest(1.0), made.cheapest(1.0, stays=True)) == ("noisy", "calm")
    for name, own in made.steps_to(1.0, stays=True).items():
        for run, step in zip(made.runs(name), own, strict=True):
            losses = run.history["global_loss"]
            assert (losses[int(step) :] <= 1.0).all() and losses[int(step) - 1] > 1.0
    (row,) = made[["noisy"]].rows(1.0, stays=True)
    assert row["steps to 1"] == np.mean(made.steps_to(1.0, stays=True)["noisy"])
    assert f"{row['steps to 1']:.0f} ±" in made.table(loss=1.0, stays=True)
    assert made.winners(1.0, [1e6], [0.0], 1.0).remarks == []
    for run in made.runs("calm") + made.runs("noisy"):
        run.history.amend({"val_examples": 10, "val_total": 100})
    for said in (made.table(loss=1.0), made.winners(1.0, [1e6], [0.0], 1.0).table()):
        assert "\nvalidated on a sample: noise" in said
    for said in (made.table(loss=1.0, stays=True), made.winners(1.0, [1e6], [0.0], 1.0, stays=True).table()):
        assert "noise" not in said


def test_one_seed_is_as_sure_as_its_validation() -> None:
    """b is at the loss in step 20, and within 1.96 standard errors of 0.1 of it from step 16; a is there in step 17."""
    for error, first in ((0.1, ("a", "b")), (0.02, ("a",)), (math.nan, ("a",))):
        made = vsim.Comparison(1)
        made._add("a", curve([2.0] * 17 + [1.0] * 20, 1))
        made._add("b", curve([2.0 - 0.05 * step for step in range(40)], 1))
        made.runs("b")[0].history.amend({"global_loss_se": error})
        found = made.winners(1.0, [1e6], [0.1], 1.0)
        assert found.first == [[first]] and found.left_open == 0
        (said,) = found.remarks
        assert (
            said == f"one seed: {'no intervals' if math.isnan(error) else 'ties by the standard errors of validation'}"
        )
        assert said in found.table() and said in found.plot().texts[0].get_text().replace("\n", " ")


def test_a_map_shows_itself_with_ties_and_leader_lines() -> None:
    import matplotlib.pyplot as plt
    from matplotlib.text import Text

    with pytest.warns(UserWarning, match="validation is too rare"):
        winners = of_curves(10).winners(1.0, compute=0.5)
    assert winners._repr_html_().startswith('<img alt="which strategy reaches loss 1 first')
    ax = winners.plot()
    figure = ax.get_figure(root=True)
    figure.draw_without_rendering()
    frame, whole = ax.get_window_extent(), figure.bbox
    boxes = {text.get_text().replace("\n", " "): Text.get_window_extent(text) for text in ax.texts}
    assert {"rare", "dense or half"} <= boxes.keys()
    for box in boxes.values():  # inside the map, or next to it on the figure
        inside = frame.x0 <= box.x0 and box.x1 <= frame.x1
        assert inside or (box.x0 > frame.x1 and box.x1 <= whole.x1)
    assert any(collection.get_hatch() or getattr(collection, "hatches", [None])[0] for collection in ax.collections)
    plt.close("all")


def test_the_map_is_drawn(three: vsim.Comparison) -> None:
    import matplotlib.pyplot as plt

    ax = three.winners(1.0, compute=1.0).plot()
    ax.figure.canvas.draw()
    assert [text.get_text() for text in ax.texts] == [NOT_REACHED, "AllReduce", "local"]
    assert ax.get_title("left") == "first to loss 1" and ax.get_xscale() == ax.get_yscale() == "log"
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1M", "10M", "100M", "1G", "10G", "100G"]
    nobody = three.winners(0.1, compute=1.0)
    assert set(nobody.never) == set(three) and not nobody.stretches() and nobody.first[0][0] == ()
    assert nobody.plot().get_title("left") == "no strategy reaches 0.1"
    alone = three.winners(1.0, ["1 Mbit/s"], [0.1], 1.0).plot()
    assert alone.texts[-1].get_text() == "local"
    plt.close("all")


def test_a_map_that_nobody_is_on_has_the_axes_of_the_others(three: vsim.Comparison) -> None:
    ax = three.winners(loss=0.001, compute=1.0).plot()
    assert ax.get_title("left") == "no strategy reaches 0.001" and ax.get_xscale() == ax.get_yscale() == "log"
    (low, high), (bottom, top) = ax.get_xlim(), ax.get_ylim()
    assert 1e5 < low <= 1e6 and 1e11 <= high < 1e12  # bit/s
    assert 0.01 < bottom <= 0.1 and 1e3 <= top < 1e4  # ms
    lost = {f"run {i}": "never" for i in range(20)}
    (said,) = Winners(0.001, BANDWIDTHS, LATENCIES, {}, lost, looks_of([])).plot().texts
    text = said.get_text().replace("\n", " ")
    assert "run 5 (never) and 14 others" in text and "run 6" not in text


def test_bad_maps(three: vsim.Comparison) -> None:
    with pytest.raises(TypeError, match="compute is missing"):
        three.winners(1.0)
    with pytest.raises(ValueError, match=r"bandwidths must be a rate in bits, .* got '10 MB'"):
        three.winners(1.0, ["10 MB"], compute=1)
    with pytest.raises(TypeError, match="latencies must be a list, got '5 ms'"):
        three.winners(1.0, latencies="5 ms", compute=1)
    with pytest.raises(ValueError, match="bandwidths must have at least one value"):
        three.winners(1.0, [], compute=1)
    with pytest.raises(ValueError, match="compute has 2 nodes, and the run 4"):
        three.winners(1.0, compute=Compute([1.0, 2.0]))


def test_hours_in_table_and_figure(three: vsim.Comparison) -> None:
    priced = {"network": "6 Mbit/s", "compute": 1.0}
    rows = {row["strategy"]: row for row in three.rows(1.0, **priced)}
    assert rows["AllReduce"]["hours"] == pytest.approx(40 * 3 / 3600)  # a step computes for 1 s and sends for 2
    assert rows["AllReduce"]["utilization"] == pytest.approx(1 / 3) and rows["local"]["utilization"] == 1
    assert rows["AllReduce"]["hours to 1"] == pytest.approx(30 / 3600) and math.isnan(rows["lost"]["hours to 1"])
    table = three.table(loss=1.0, columns=["hours", "utilization", "hours to 1"], **priced)
    assert "33.3 %" in table and "0.033" in table and "never" in table
    ax = three.plot("time", **priced)
    line = next(line for line in ax.get_lines() if line.get_label() == "AllReduce")
    np.testing.assert_allclose(line.get_xdata(), np.arange(41) * 3 / 60)
    assert ax.get_xlabel() == "time on the network (minutes)"
    assert three.figure(x="time", **priced).axes[0].get_xlabel() == ax.get_xlabel()
    for missing in ({"network": 1e6}, {"compute": 1.0}, {}):
        with pytest.raises(TypeError, match=r"(network|compute) is missing"):
            three.plot("time", **missing)
    with pytest.raises(TypeError, match="network and compute have no effect with x='step'"):
        three.plot("step", **priced)


def test_the_cheapest_within_a_time(three: vsim.Comparison) -> None:
    assert three.cheapest(1.0) == "local"
    assert three.cheapest(1.0, hours=15 / 3600, network="1 Gbit/s", compute=1.0) == "AllReduce"
    with pytest.raises(ValueError, match=r"no run reaches loss 1 within 0.001 hours; the first is AllReduce, in 0"):
        three.cheapest(1.0, hours=0.001, network="1 Gbit/s", compute=1.0)
    with pytest.raises(ValueError, match=r"no run reaches loss 0.5$"):
        three.cheapest(0.5)
    with pytest.raises(TypeError, match="network is missing"):
        three.cheapest(1.0, hours=1)
    with pytest.raises(TypeError, match="hours must be a number, got 'x'"):
        three.cheapest(1.0, hours="x", network=1e6, compute=1.0)  # type: ignore[arg-type]


def test_the_cheapest_is_named_with_those_that_validation_cannot_tell_from_it() -> None:
    made = vsim.Comparison(1)
    made._add("b", curve([2.0 - 0.04 * step for step in range(41)], 20, payload=1.0))  # 25 steps to loss 1
    made._add("a", curve([2.0 - 0.06 * step for step in range(41)], 20, payload=1.0))  # 17, measured at 20
    made._add("c", curve([2.0 - 0.04 * step for step in range(41)], 20, payload=2.0))
    made._add("d", curve([2.0 - 0.04 * step for step in range(41)], 30, payload=1.0))
    with pytest.warns(UserWarning, match="too coarse to tell a, .* from d; "):  # between steps 1 and 30
        assert made.cheapest(1.0) == "a"


def test_a_comparison_holds_its_network(tmp_path: Path) -> None:
    strategies = {"AllReduce": SimpleReduceStrategy(), "alone": AloneStrategy()}
    runs = compared(strategies, network="1 Mbit/s, 20 ms", compute=0.5)
    runs.to_json(tmp_path / "c.json")
    again = vsim.Comparison.from_json(tmp_path / "c.json")
    assert again.table() == runs.table() and again.rows()[1]["utilization"] == 1
    np.testing.assert_array_equal(*(own.plot("time").get_lines()[0].get_xdata() for own in (runs, again)))
    assert again.winners(9.0).first[0][-1] == ("AllReduce", "alone")  # both from the start
    with pytest.raises(TypeError, match="compute is missing"):
        compared(strategies, network="1 Mbit/s")
    with pytest.raises(ValueError, match="compute has 3 nodes, and the run 2"):
        compared(strategies, network="1 Mbit/s", compute=Compute([1, 2, 3]))
    train, val = vsim.data.digits()
    swept = vsim.sweep(
        vsim.models.MLP(hidden=(8,)),
        train,
        val,
        strategy=DiLoCoStrategy,
        settings={"H": [1, 2]},
        num_nodes=2,
        max_steps=4,
        network="1 Mbit/s",
        compute=0.1,
        progress=False,
    )
    assert swept.cheapest(9.0, hours=1) in swept and "hours" in swept.table()
    swept.to_json(tmp_path / "s.json")
    assert vsim.Sweep.from_json(tmp_path / "s.json").table() == swept.table()


def test_at_another_size_losses_stay_and_bytes_are_those_of_that_model(tmp_path: Path) -> None:
    strategies: dict[str, Any] = {"AllReduce": SimpleReduceStrategy(), "DiLoCo": DiLoCoStrategy(H=2)}
    small = compared(strategies, seeds=[0, 1], val_interval=1)
    large = small.at(parameters=1.3e9, layers=24)
    priced: dict[str, Any] = {"network": "1 Gbit/s, 1 ms", "compute": Compute(0.8, layers=24, dollars_per_hour=2)}
    for name, strategy in strategies.items():
        line = vsim.price(strategy, parameters=1.3e9, num_nodes=2, max_steps=5, **priced)
        for before, run in zip(small.runs(name), large.runs(name), strict=True):
            history = run.history
            np.testing.assert_array_equal(history["global_loss"], before.history["global_loss"])
            assert history["wire_bytes"][-1] == line.ledger.wire_bytes
            assert history.time(**priced).seconds.tolist() == line.seconds.tolist()
        (row,) = large[[name]].rows(**priced)
        assert row["dollars"] == pytest.approx(line.dollars) and row["hours"] == pytest.approx(line.seconds[-1] / 3600)
    assert small["DiLoCo"].history["wire_bytes"][-1] < 1e6  # which stay as they were
    assert "5.2 GB (losses of 0.10 MB) of weights each" in repr(large) and large.best() == small.best()
    assert large["AllReduce"].history["wire_bytes"][1] == 5.2e9  # 2 (n - 1) / n of all weights
    loss = float(small["AllReduce"].history["global_loss"][3])
    title = large.winners(loss, [1e9, 1e11], [0.001], 0.8).plot().get_title("left")
    assert title.startswith("first to loss") and "5.2 GB" in title and "0.10 MB" in title
    large.to_json(tmp_path / "large.json")
    assert repr(vsim.Comparison.from_json(tmp_path / "large.json")) == repr(large)  # both sizes in the title
    small.to_json(tmp_path / "small.json")
    again = vsim.Comparison.from_json(tmp_path / "small.json")
    assert again.at(parameters=1.3e9, layers=24).table(**priced) == large.table(**priced)
    assert again.at(parameters=1.3e9, layers=24, strategies=strategies).table(**priced) == large.table(**priced)
    with pytest.raises(TypeError, match="give either parameters=, how many there are, or a model="):
        small.at()


class Own(DiLoCoStrategy):
    pass


def test_strategies_of_ones_own_are_not_in_files(tmp_path: Path) -> None:
    strategies: dict[str, Any] = {"own": Own(H=2), "vsim's": DiLoCoStrategy(H=2, outer_optim=OptimSpec("sgd", lr=0.7))}
    compared(strategies).to_json(tmp_path / "own.json")
    again = vsim.Comparison.from_json(tmp_path / "own.json")
    assert [run.strategy is None for run in again.values()] == [True, False]
    assert repr(again["vsim's"].strategy) == repr(strategies["vsim's"])
    with pytest.raises(TypeError, match="own was read from a file without strategies"):
        again.at(parameters=1e6)
    text = (tmp_path / "own.json").read_text()
    (tmp_path / "own.json").write_text(text.replace('"Own(H=2)"', '"DiLoCoStrategy(H=3)"'))
    assert vsim.Comparison.from_json(tmp_path / "own.json")["own"].strategy is None  # it is another than is described


def test_a_note_names_compression_that_depends_on_the_size(tmp_path: Path) -> None:
    small = compared({"AllReduce": SimpleReduceStrategy(), "SparseLoCo": SparseLoCoStrategy(H=2, topk=8)})
    large = small.at(parameters=1e8)
    measured, priced = (one.rows()[1]["times less than AllReduce"] for one in (small, large))
    assert abs(priced / measured - 1) > 0.02
    (note,) = (line for line in large.table().splitlines() if "as measured" in line)
    assert f"SparseLoCo {measured:.3g}× as measured, {priced:.3g}× as priced" in note and "AllReduce" not in note
    assert note in repr(large) and "as measured" not in small.table()
    large.to_json(tmp_path / "large.json")
    assert note in vsim.Comparison.from_json(tmp_path / "large.json").at(parameters=1e8).table()
