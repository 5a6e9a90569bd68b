"""Runs priced on networks: the winner in each place, how sure it is, and the same losses at another size."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import numpy as np
import pytest
from comparisons_by_hand import check_refusals, run
from comparisons_by_hand import comparison as made
from errors import refused
from matplotlib.colors import to_rgb
from matplotlib.text import Text
from matplotlib.transforms import Bbox
from shared_comparisons import compared

import vsim
from vsim.analysis.areas import _roomiest
from vsim.analysis.questions.winners import BANDWIDTHS, LATENCIES, Winners
from vsim.analysis.racing import Race
from vsim.figures.looks import looks_of
from vsim.network import Compute
from vsim.strategy import AloneStrategy, DiLoCoStrategy, OptimSpec, SimpleReduceStrategy, SparseLoCoStrategy

K = 4
HERE: tuple[Any, ...] = ([1e6], [0.1], 1.0)  # bandwidths, latencies and compute of a map of one cell


def reaches(step: int | None, last: int = 40, **options: Any) -> vsim.ComparedRun:
    """A run of K nodes with a loss of 1 from a step on, and 2 before."""
    at = last + 1 if step is None else step
    return run([2.0] * at + [1.0] * (last + 1 - at), nodes=K, **options)


def firsts(winners: Winners) -> list[tuple[str, ...]]:
    return [names for row in winners.first for names in row]


@pytest.fixture
def three() -> vsim.Comparison:
    own: dict[str, list[vsim.ComparedRun]] = {"AllReduce": [], "local": [], "sometimes": []}
    for seed in (0, 1):
        own["AllReduce"].append(reaches(10, payload=1e6, seed=seed))
        own["local"].append(reaches(30, seed=seed))
        own["sometimes"].append(reaches(5 if seed else None, 100, seed=seed))  # 52.5 s in the mean, if it were next
    return made(1_000_000, **own, lost=[reaches(None, payload=1e3)])


def test_who_is_first_by_hand(three: vsim.Comparison) -> None:
    """AllReduce takes 10 · (1 s + p), training alone 30 s: they are equal at p = 2 s.

    Without latency p = 2 · 3/4 · 8 · 10⁶ bit / B, so B = 6 Mbit/s. With 1/3 s a message, 6 messages take the 2 s.
    """
    found = three.winners(1.0, bandwidths=["3 Mbit/s", 12e6, "1 Gbit/s"], latencies=[0, "400 ms"], compute=1.0)
    assert found.first == [[("local",), ("AllReduce",), ("AllReduce",)], [("local",)] * 3]
    np.testing.assert_allclose(found.seconds["AllReduce"][0], [50, 20, 10 + 0.12])
    assert (found.seconds["local"] == 30).all() and found.never == {"sometimes": "1 of 2 runs", "lost": "never"}
    one, two, three_ = found.stretches()
    assert (one.name, two.name, three_.name) == ("local", "AllReduce", "local")
    assert one.high == two.low == pytest.approx(6e6, rel=0.1)  # between 3 and 12 Mbit/s, in logarithms
    assert all(text in found.table() for text in ("never", "1 of 2 runs", "time to loss 1"))
    fine = three.winners(1.0, np.linspace(5e6, 7e6, 100), [0], 1.0)
    assert fine.stretches()[0].high == pytest.approx(6e6, rel=1e-4)


FALLS = {"dense": (0.05, 4e6), "half": (0.043, 1e6), "rare": (0.032, 1e5)}


def of_curves(every: int, order: int = 1) -> Winners:
    """The map of strategies of different bytes and speeds, whose losses fall from 2 in straight lines."""
    own = {
        name: [run([max(0.1, 2.0 - fall * t) for t in range(0, 61, every)], every, nodes=K, payload=payload)]
        for name, (fall, payload) in list(FALLS.items())[::order]
    }
    return made(1, **own).winners(1.0, compute=0.5)


def test_a_coarse_map_is_that_of_every_step_but_for_ties() -> None:
    """Brute force: measured at every step the first is known, and a coarser map names it in every cell."""
    fine = of_curves(1)  # no warning
    assert fine.left_open == 0
    assert {names for names in firsts(fine) if len(names) == 1} == {("dense",), ("half",), ("rare",)}
    with pytest.warns(UserWarning, match=r"validation is too rare.*loss 1 .*val_interval"):
        coarse = of_curves(20)
    assert coarse.left_open > 0.3 > 0.1 > of_curves(2).left_open > 0
    assert all(set(names) <= set(found) for names, found in zip(firsts(fine), firsts(coarse), strict=True))
    assert 0 < sum(len(names) == 1 for names in firsts(coarse)) < len(firsts(coarse))
    other = of_curves(1, -1)  # whatever the order of the strategies
    assert fine.first == other.first and other.left_open == 0


@pytest.mark.parametrize(
    ("offsets", "others", "first"),
    [
        ([1, 1, 1], 0, "a"),
        ([-5, 1, 7], 0, "a b"),
        ([0, 0, 0], 0, "a b"),
        ([3, 4, 5], 0, "a"),  # t is 6.9, and p 0.02 …
        ([3, 4, 5], 1, "a b"),  # … or 0.06 where these are two of three strategies
    ],
)
def test_strategies_that_seeds_cannot_tell_apart_are_tied(offsets: list[int], others: int, first: str) -> None:
    """Steps to the loss: a 10, 12, 14, and b so many more; the others are far behind."""
    base = list(enumerate([10, 12, 14]))
    own = {
        "b": [reaches(step + offsets[seed], 80, seed=seed) for seed, step in base],
        "a": [reaches(step, 80, seed=seed) for seed, step in base],
        **{f"c{i}": [reaches(step + 40, 80, seed=seed) for seed, step in base] for i in range(others)},
    }
    assert made(1, **own).winners(1.0, *HERE).first == [[tuple(first.split())]]


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


@pytest.mark.parametrize(("slow", "first"), [(20, ("fast", "slow")), (13, ("slow",))])
def test_a_seed_that_does_not_reach_the_loss_leaves_open_who_is_first(slow: int, first: tuple[str, ...]) -> None:
    """fast takes 10 s with four seeds of five; the fifth ended after 30 s: at least 14 s in the mean."""
    runs = made(
        1,
        slow=[reaches(slow, 39, seed=seed) for seed in range(5)],
        fast=[reaches(10 if seed else None, 30, seed=seed) for seed in range(5)],
    )
    found, cheapest = runs.winners(1.0, *HERE), runs.cheapest(1.0)
    assert found.first == [[first]] and found.never == {"fast": "4 of 5 runs"} and found.left_open == 0
    assert cheapest == "slow" and cheapest.tied == ("fast",)  # neither sends anything
    runs.runs("fast")[0].failure, runs.runs("fast")[0].diverged_at = "non-finite loss", 30
    assert runs.winners(1.0, *HERE).first == [[("slow",)]]  # it would not have got there
    assert runs[["fast"]].winners(1.0, *HERE).first == [[()]]


def test_where_a_loss_is_reached_and_stays() -> None:
    """Of two curves around one line, the noisier one is at the loss first, and stays there last."""
    rng, line = np.random.default_rng(0), 2.0 - 0.02 * np.arange(81)
    own: dict[str, list[vsim.ComparedRun]] = {"calm": [], "noisy": []}
    for seed in range(4):
        for name, noise in (("calm", 0.01), ("noisy", 0.15)):
            own[name].append(run((line + rng.normal(0, noise, 81)).tolist(), nodes=K, seed=seed, payload=1e3))
    runs, where = made(1, **own), ([1e6], [0.0], 1.0)
    first, stays = (runs.winners(1.0, *where, stays=stays) for stays in (False, True))
    assert first.first == [[("noisy",)]] and stays.first == [[("calm",)]] and first.remarks == []
    assert (runs.cheapest(1.0), runs.cheapest(1.0, stays=True)) == ("noisy", "calm")
    for name, found in runs.steps_to(1.0, stays=True).items():
        for one, step in zip(runs.runs(name), found, strict=True):
            losses = one.history["global_loss"]
            assert (losses[int(step) :] <= 1.0).all() and losses[int(step) - 1] > 1.0
    (row,) = runs[["noisy"]].rows(1.0, stays=True).to_dict("records")
    assert row["steps to 1"] == np.mean(runs.steps_to(1.0, stays=True)["noisy"])
    assert f"{row['steps to 1']:.0f} ±" in runs.table(loss=1.0, stays=True)
    for one in runs.runs("calm") + runs.runs("noisy"):
        one.history.amend({"val_examples": 10, "val_total": 100})
    for stay in (False, True):
        for said in (runs.table(loss=1.0, stays=stay), runs.winners(1.0, *where, stays=stay).table()):
            assert ("\nvalidated on a sample, whose noise" in said) is not stay


@pytest.mark.parametrize(("error", "first"), [(0.1, ("a", "b")), (0.02, ("a",)), (math.nan, ("a",))])
def test_one_seed_is_as_sure_as_its_validation(error: float, first: tuple[str, ...]) -> None:
    """b is at the loss in step 20, and within 1.96 standard errors of 0.1 of it from step 16; a is there in step 17."""
    runs = made(1, a=[reaches(17)], b=[run([2.0 - 0.05 * step for step in range(40)], nodes=K)])
    runs["b"].history.amend({"global_loss_se": error})
    found = runs.winners(1.0, *HERE)
    assert found.first == [[first]] and found.left_open == 0
    (said,) = found.remarks
    how = "are not tested" if math.isnan(error) else "follow from validation's standard errors"
    assert said == f"one seed: ties {how}"
    assert said in found.table() and said in found.plot().texts[0].get_text().replace("\n", " ")


# The map --------------------------------------------------------------------------------------------------------------


def named(winners: Winners, ax: Any = None) -> tuple[set[str], set[str]]:
    """The names of areas inside a map, and in its legend; checks that they and the notes lie where they should."""
    ax = winners.plot(ax)
    figure = ax.get_figure(root=True)
    figure.draw_without_rendering()
    frame, whole, legend = ax.get_window_extent(), figure.bbox, ax.get_legend()
    inside = set()
    for text in ax.texts:
        box, said = Text.get_window_extent(text), text.get_text().replace("\n", " ")
        assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and whole.y0 <= box.y0
        if frame.y0 <= box.y0:
            assert frame.x0 <= box.x0 and box.x1 <= frame.x1 and box.y1 <= frame.y1
            inside.add(said)
        else:  # notes
            assert box.y1 < frame.y0 and (legend is None or not legend.get_window_extent().overlaps(box))
    if legend is None:
        return inside, set()
    box = legend.get_window_extent()
    assert whole.x0 <= box.x0 and box.x1 <= whole.x1 and box.y1 < frame.y0
    return inside, {text.get_text().replace("\n", " ") for text in legend.get_texts()}


@pytest.mark.filterwarnings("ignore:validation is too rare")
@pytest.mark.parametrize("width", [3.3, *(pytest.param(width, marks=pytest.mark.slow) for width in (None, 6.8))])
def test_every_area_of_a_map_is_named(width: float | None) -> None:
    winners = of_curves(10)
    inside, below = named(winners, None if width is None else plt.subplots(figsize=(width, 2.5))[1])
    keys = {names if len(names) < 3 else () for names in firsts(winners)}
    assert inside | below == {" or ".join(names) or "no clear winner" for names in keys} and not inside & below
    assert {"rare", "dense or half"} <= inside | below
    assert winners._repr_html_().startswith('<img alt="which strategy reaches loss 1 first')
    ax = winners.plot()
    assert any(collection.get_hatch() or getattr(collection, "hatches", [None])[0] for collection in ax.collections)


def test_a_name_is_where_most_room_is_around_it() -> None:
    """A wide text fits into the bar above, which is deep enough, but not into the deeper one at the left."""
    columns, rows = np.arange(60.0), np.arange(40.0)
    bar, column = np.zeros((2, 40, 60), dtype=bool)
    bar[30:], column[:, :20] = True, True
    frame = Bbox([[-0.5, -0.5], [59.5, 39.5]])
    i, j = _roomiest(bar | column, columns, rows, frame, 15.0, 2.0) or (0, 0)
    assert i in (34, 35) and j in (29, 30)
    i, j = _roomiest(bar | column, columns, rows, frame, 4.0, 2.0) or (0, 0)
    assert abs(i - 20) < 11 and j in (9, 10)
    assert _roomiest(bar | column, columns, rows, frame, 31.0, 2.0) is None


def test_three_that_tie_are_one_grey_area_and_are_named_below() -> None:
    equal = {name: [reaches(10, seed=seed) for seed in (0, 1)] for name in ("d", "a", "b, c")}
    last = {"late": [reaches(30, seed=seed) for seed in (0, 1)], "lost": [reaches(None, seed=seed) for seed in (0, 1)]}
    winners = made(1, **equal, **last).winners(1.0, [1e6, 1e7], [0.1, 0.2], 1.0)
    assert set(firsts(winners)) == {("a", "b, c", "d")}
    assert named(winners) == ({"no clear winner"}, set())
    (note, _) = sorted(winners.plot().texts, key=lambda text: -len(text.get_text()))
    lines = note.get_text().replace("\n", " ")
    assert "no clear winner: three or more are tied, among them" in lines and '"b, c"' in lines
    assert "nowhere first: late" in lines and "not reached by lost" in lines


def test_areas_of_strategies_with_one_colour_differ() -> None:
    names = ["DiLoCo", "DiLoCo, small", "a", "b", "c", "d", "e", "f"]
    own = {name: [reaches(10 + 5 * i, payload=10.0 ** (7 - i))] for i, name in enumerate(names)}
    winners = made(1, **own).winners(1.0, compute=1.0)
    tints = winners._tints()
    assert len(tints) > 2 and len(set(tints.values())) == len(tints)
    for name, tint in tints.items():  # the colour of its line, mixed with white
        line, area = np.array(to_rgb(winners.looks.by_name[name].colour)), np.array(to_rgb(tint))
        shares = ((1 - area) / np.where(line == 1, np.nan, 1 - line))[line < 0.99]
        np.testing.assert_allclose(shares, shares[0], atol=0.02)


def test_the_map_is_drawn(three: vsim.Comparison) -> None:
    ax = three.winners(1.0, compute=1.0).plot()
    ax.figure.canvas.draw()
    missed = "not reached by lost\nreached by only 1 of 2 runs of sometimes"
    assert sorted(text.get_text() for text in ax.texts) == ["AllReduce", "local", missed]
    assert ax.get_title("left") == "First to reach a validation loss of 1.0"
    assert ax.get_xscale() == ax.get_yscale() == "log"
    assert [t.get_text() for t in ax.get_xticklabels()] == ["1M", "10M", "100M", "1G", "10G", "100G"]
    assert three.winners(1.0, ["1 Mbit/s"], [0.1], 1.0).plot().texts[-1].get_text() == "local"
    nobody = three.winners(0.1, compute=1.0)
    assert set(nobody.never) == set(three) and not nobody.stretches() and nobody.first[0][0] == ()
    empty = nobody.plot()
    assert empty.get_title("left").replace("\n", " ") == "No strategy reaches a validation loss of 0.1"
    assert empty.get_xscale() == empty.get_yscale() == "log"
    (low, high), (bottom, top) = empty.get_xlim(), empty.get_ylim()
    assert 1e5 < low <= 1e6 and 1e11 <= high < 1e12 and 0.01 < bottom <= 0.1 and 1e3 <= top < 1e4  # bit/s, ms
    some = made(1_000_000, **{"A, wide": [reaches(5), reaches(None, seed=1)], "B": [reaches(None)]})
    ax = some.winners(1.0, compute=1.0).plot()
    assert ax.get_title("left").replace("\n", " ") == "No strategy reaches a validation loss of 1.0 with all seeds"
    assert ax.texts[0].get_text() == 'not reached by B\nreached by only 1 of 2 runs of "A, wide"'
    with refused(ValueError, "no strategy reaches loss 1 with all seeds: A, wide (1 of 2 runs)"):
        some.cheapest(1.0)
    lost = {f"run {i}": "never" for i in range(20)}
    (said,) = Winners(0.001, BANDWIDTHS, LATENCIES, {}, lost, looks_of([])).plot().texts
    text = said.get_text().replace("\n", " ")
    assert "run 5 and 14 others" in text and "run 6" not in text


def test_mistakes_are_named(three: vsim.Comparison) -> None:
    ask: Any = three.winners
    check_refusals(
        [
            (lambda: ask(1.0), TypeError, ["compute is missing"]),
            (lambda: ask(1.0, ["10 MB"], compute=1), ValueError, ["bandwidths", "a rate in bits", "'10 MB'"]),
            (lambda: ask(1.0, compute=Compute([1.0, 2.0])), ValueError, ["compute", "2 nodes", "4"]),
            (lambda: three.cheapest(1.0, 0.001, 1e9, 1.0), ValueError, ["loss 1", "0.001 hours", "AllReduce, in 0"]),
            (lambda: three.cheapest(0.5), ValueError, ["no strategy reaches loss 0.5"]),
            (lambda: three.cheapest(1.0, hours=1), TypeError, ["network is missing"]),
            (lambda: three.plot("time", network=1e6), TypeError, ["compute is missing"]),
            (lambda: three.plot("time", compute=1.0), TypeError, ["network is missing"]),
            (lambda: three.plot("time"), TypeError, ["network is missing"]),
            (lambda: three.plot("step", network=1e6), TypeError, ["network and compute have no effect", "x='step'"]),
        ]
    )


# Hours and bytes ------------------------------------------------------------------------------------------------------


def test_hours_in_table_and_figure(three: vsim.Comparison) -> None:
    priced: dict[str, Any] = {"network": "6 Mbit/s", "compute": 1.0}
    rows = {row["strategy"]: row for row in three.rows(1.0, **priced).to_dict("records")}
    assert rows["AllReduce"]["hours"] == pytest.approx(40 * 3 / 3600)  # a step computes for 1 s and sends for 2
    assert rows["AllReduce"]["utilization"] == pytest.approx(1 / 3) and rows["local"]["utilization"] == 1
    assert rows["AllReduce"]["hours to 1"] == pytest.approx(30 / 3600) and math.isnan(rows["lost"]["hours to 1"])
    table = three.table(loss=1.0, columns=["hours", "utilization", "hours to 1"], **priced)
    assert "33.3 %" in table and "2.00" in table and "minutes to 1" in table and "never" in table
    ax = three.plot("time", **priced)
    line = next(line for line in ax.get_lines() if line.get_label() == "AllReduce")
    np.testing.assert_allclose(line.get_xdata(), np.arange(41) * 3 / 60)
    assert ax.get_xlabel() == "time on the network (minutes)"
    assert three.figure(x="time", **priced).axes[0].get_xlabel() == ax.get_xlabel()
    assert three.cheapest(1.0) == "local"
    assert three.cheapest(1.0, hours=15 / 3600, network="1 Gbit/s", compute=1.0) == "AllReduce"


def test_the_cheapest_is_named_with_those_that_validation_cannot_tell_from_it() -> None:
    runs = made(
        1,
        b=[run([2.0, 1.2, 0.4], 20, nodes=K, payload=1.0)],  # at 40
        a=[run([2.0, 0.8, 0.1], 20, nodes=K, payload=1.0)],  # at 20
        c=[run([2.0, 1.2, 0.4], 20, nodes=K, payload=2.0)],
        d=[run([2.0, 0.8], 30, nodes=K, payload=1.0)],  # between steps 1 and 30
    )
    with pytest.warns(UserWarning, match=r"too coarse to tell a, .* from d; "):
        assert runs.cheapest(1.0) == "a"


def test_a_comparison_holds_its_network(tmp_path: Path) -> None:
    strategies = {"AllReduce": SimpleReduceStrategy(), "alone": AloneStrategy()}
    runs = compared(strategies, network="1 Mbit/s, 20 ms", compute=0.5)
    runs.to_json(tmp_path / "c.json")
    again = vsim.Comparison.from_json(tmp_path / "c.json")
    assert again.table() == runs.table() and again.rows().to_dict("records")[1]["utilization"] == 1
    np.testing.assert_array_equal(*(own.plot("time").get_lines()[0].get_xdata() for own in (runs, again)))
    assert again.winners(9.0).first[0][-1] == ("AllReduce", "alone")  # both from the start
    assert again.cheapest(9.0, hours=1) == "AllReduce"
    with refused(TypeError, "compute is missing"):
        compared(strategies, network="1 Mbit/s")
    with refused(ValueError, "compute", "3 nodes", "2"):
        compared(strategies, network="1 Mbit/s", compute=Compute([1, 2, 3]))


def test_at_another_size_losses_stay_and_bytes_are_those_of_that_model(tmp_path: Path) -> None:
    strategies: dict[str, Any] = {"AllReduce": SimpleReduceStrategy(), "DiLoCo": DiLoCoStrategy(H=2)}
    small = compared(strategies, seeds=[0, 1], val_interval=1)
    large = small.at(parameters=1.3e9, layers=24)
    priced: dict[str, Any] = {"network": "1 Gbit/s, 1 ms", "compute": Compute(0.8, layers=24, dollars_per_hour=2)}
    for name, strategy in strategies.items():
        line = vsim.price(strategy, parameters=1.3e9, num_nodes=2, max_steps=5, **priced)
        for before, one in zip(small.runs(name), large.runs(name), strict=True):
            np.testing.assert_array_equal(one.history["global_loss"], before.history["global_loss"])
            assert one.history["wire_bytes"][-1] == line.ledger.wire_bytes
            assert one.history.time(**priced).seconds.tolist() == line.seconds.tolist()
        (row,) = large[[name]].rows(**priced).to_dict("records")
        assert row["dollars"] == pytest.approx(line.dollars) and row["hours"] == pytest.approx(line.seconds[-1] / 3600)
    assert small["DiLoCo"].history["wire_bytes"][-1] < 1e6  # which stay as they were
    assert "5.2 GB (losses of 0.10 MB) of weights each" in repr(large) and large.best() == small.best()
    assert large["AllReduce"].history["wire_bytes"][1] == 5.2e9  # 2 (n - 1) / n of all weights
    loss = float(small["AllReduce"].history["global_loss"][3])
    title = large.winners(loss, [1e9, 1e11], [0.001], 0.8).plot().get_title("left")
    assert title.startswith("First to reach") and "5.2 GB" in title and "0.10 MB" in title
    large.to_json(tmp_path / "large.json")
    assert repr(vsim.Comparison.from_json(tmp_path / "large.json")) == repr(large)  # both sizes in the title
    small.to_json(tmp_path / "small.json")
    again = vsim.Comparison.from_json(tmp_path / "small.json")
    for given in ({}, {"strategies": strategies}):
        assert again.at(parameters=1.3e9, layers=24, **given).table(**priced) == large.table(**priced)
    with refused(TypeError, "parameters=", "model="):
        small.at()


class Own(DiLoCoStrategy):
    pass


def test_strategies_of_ones_own_are_not_in_files(tmp_path: Path) -> None:
    strategies: dict[str, Any] = {"own": Own(H=2), "vsim's": DiLoCoStrategy(H=2, outer_optim=OptimSpec("sgd", lr=0.7))}
    compared(strategies).to_json(tmp_path / "own.json")
    again = vsim.Comparison.from_json(tmp_path / "own.json")
    assert [one.strategy is None for one in again.values()] == [True, False]
    assert repr(again["vsim's"].strategy) == repr(strategies["vsim's"])
    with refused(TypeError, "own", "without strategies", "strategies="):
        again.at(parameters=1e6)
    text = (tmp_path / "own.json").read_text()
    (tmp_path / "own.json").write_text(text.replace('"Own(H=2)"', '"DiLoCoStrategy(H=3)"'))
    assert vsim.Comparison.from_json(tmp_path / "own.json")["own"].strategy is None  # it is another than is described


def test_a_note_names_compression_that_depends_on_the_size(tmp_path: Path) -> None:
    small = compared({"AllReduce": SimpleReduceStrategy(), "SparseLoCo": SparseLoCoStrategy(H=2, topk=8)})
    large = small.at(parameters=1e8)
    measured, priced = (one.rows().to_dict("records")[1]["fewer bytes than AllReduce"] for one in (small, large))
    assert abs(priced / measured - 1) > 0.02
    (note,) = (line for line in large.table().splitlines() if "priced size" in line)
    assert (
        f"SparseLoCo {measured:.3g}× fewer bytes at the trained size, {priced:.3g}× at the priced" in note
        and "AllReduce" not in note
    )
    assert note in repr(large) and "priced size" not in small.table()
    large.to_json(tmp_path / "large.json")
    assert note in vsim.Comparison.from_json(tmp_path / "large.json").at(parameters=1e8).table()
