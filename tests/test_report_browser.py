"""The page of a comparison in a real browser, opened from disk without a network."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from comparisons_by_hand import comparison as made
from comparisons_by_hand import run
from shared_comparisons import compared

import vsim
from vsim import Compute, Network
from vsim.analysis.columns import COLUMNS
from vsim.analysis.crossings import never
from vsim.analysis.losses import compare_finals
from vsim.analysis.questions.pareto import within
from vsim.analysis.report.data import _heading
from vsim.analysis.report.page import report
from vsim.analysis.tables import HOURS, MEGABYTES, SECONDS, Heading, Unit, cell, unit_of
from vsim.data import digits
from vsim.figures.paper import PlainLocator
from vsim.history.curves import limits
from vsim.history.reached import crossing
from vsim.models import MLP
from vsim.search.sweep import sweep
from vsim.strategy import AloneStrategy, DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, StreamingDiLoCoStrategy
from vsim.watch import Watch

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The file of axe-core, from `npm pack axe-core`.
AXE = os.environ.get("AXE_CORE")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")]
LIVE = {column.to("target").name: column for column in COLUMNS if column.is_live}
HOSTILE = "</script><img src=x onerror='window.harmed = 1'>\"&<b>"
ON: dict[str, Any] = {"network": "200 Mbit/s, 50 ms", "compute": 0.8}


@pytest.fixture(scope="module")
def comparison() -> vsim.Comparison:
    strategies = {
        "AllReduce": SimpleReduceStrategy(lr=5e-3),
        "DiLoCo": DiLoCoStrategy(H=4, lr=5e-3),
        "Streaming": StreamingDiLoCoStrategy(H=6, delay=2, lr=5e-3),
        "FedAvg": FedAvgStrategy(H=5, lr=5e-3),  # measured at a mean that no node has
        HOSTILE: AloneStrategy(lr=5e-3),
    }
    return compared(strategies, num_nodes=3, max_steps=24, val_interval=3, seeds=[0, 1])


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture
def opened(browser: Any, comparison: vsim.Comparison, tmp_path: Path) -> Iterator[Any]:
    """The page in a browser that is offline; what it says to the console, or wants to load, fails the test."""
    path = comparison.report(tmp_path / "report.html", **ON, title=HOSTILE)
    with watched(browser, path) as page:
        yield page


class watched:
    """Opens a file, and checks at the end that nothing went wrong and nothing was asked of a network."""

    def __init__(self, browser: Any, path: Path, fragment: str = "", **options: Any) -> None:
        self.context = browser.new_context(offline=True, accept_downloads=True, **options)
        self.said: list[str] = []
        self.page = self.context.new_page()
        self.page.on("console", lambda message: self.said.append(message.text))
        self.page.on("pageerror", lambda error: self.said.append(str(error)))
        self.page.on("request", lambda asked: asked.url.startswith(("file:", "blob:")) or self.said.append(asked.url))
        self.page.goto(path.as_uri() + fragment)

    def __enter__(self) -> Any:
        return self.page

    def __exit__(self, *_: object) -> None:
        harmed = self.page.evaluate("window.harmed")
        self.context.close()
        assert harmed is None
        assert self.said == []


def cells(page: Any) -> list[dict[str, float]]:
    """What the table says: for every run, column → number, where it has one."""
    found: list[dict[str, float]] = page.evaluate(
        """() => [...document.querySelectorAll("#table tbody tr")].sort((a, b) => a.dataset.run - b.dataset.run).map(
            (row) => Object.fromEntries([...row.querySelectorAll("td[data-value]")].map(
                (cell) => [cell.dataset.key, Number(cell.dataset.value)])))"""
    )
    return found


def check(page: Any, comparison: vsim.Comparison) -> None:
    """Compare the table with Python's numbers, where the sliders stand."""
    at = page.evaluate("(({bw, lat, sec, size, price, target}) => ({bw, lat, sec, size, price, target}))(vsim.state)")
    network = Network(at["bw"] / at["size"], at["lat"])  # bytes in proportion take as long as on a slower line
    rows = comparison.rows(at["target"], network, Compute(at["sec"], dollars_per_hour=at["price"])).to_dict("records")
    missed = never(comparison, at["target"])
    for name, row, said in zip(comparison, rows, cells(page), strict=True):
        for key, column in LIVE.items():
            if key == "dollars" and not at["price"]:
                continue
            exact = row[column.to(at["target"]).name] * (at["size"] if column.scales else 1)
            if column.is_to_loss and name in missed:
                assert key not in said
            else:
                assert said[key] == pytest.approx(exact, rel=1e-3, abs=1e-12), (name, key, at)


def test_the_page_has_the_numbers_of_python_wherever_its_sliders_stand(
    opened: Any, comparison: vsim.Comparison
) -> None:
    check(opened, comparison)
    assert opened.title() == opened.locator("h1").inner_text() == HOSTILE
    assert opened.locator("#curves svg path").count() > 4
    assert opened.locator("#legend .name").all_inner_texts() == list(comparison)
    rng = random.Random(5)
    for _ in range(30):
        at = {
            "bw": 10 ** rng.uniform(4, 12),
            "lat": rng.choice([0, 10 ** rng.uniform(-6, 1)]),
            "sec": 10 ** rng.uniform(-4, 3),
            "size": 10 ** rng.uniform(-2, 6),
            "price": rng.choice([0, 10 ** rng.uniform(-2, 3)]),
            "target": rng.uniform(0.5, 2.4),
        }
        opened.evaluate("(at) => vsim.set(at)", at)
        check(opened, comparison)


def test_a_rule_in_both_languages_is_one_rule(opened: Any) -> None:
    """Cells of tables, crossings of a loss, the losses that a figure shows, and ticks, of the script and of Python."""
    rng = np.random.default_rng(3)

    def each(rule: str, arguments: list[Any]) -> list[Any]:
        """What the script answers to each list of arguments."""
        found: list[Any] = opened.evaluate(f"(all) => all.map((given) => vsim.rules.{rule}(...given))", arguments)
        return found

    own, shown_as = np.random.default_rng(4), [column.to(1.0) for column in COLUMNS]
    shown_as += [Heading("{unit}", measure) for measure in (MEGABYTES, HOURS, SECONDS)]
    columns = [(one, (10 ** own.uniform(-7, 10, own.integers(0, 5))).tolist()) for one in shown_as for _ in range(5)]
    units = [unit_of(one, values) for one, values in columns]
    asked_units = [[_heading(one) | {"title": one.title}, values] for one, values in columns]
    found = [
        Unit(name, factor, n, sign.replace("\u00a0", " "), exact)
        for name, factor, n, sign, exact in each("unitOf", asked_units)
    ]
    assert [one._replace(factor=1.0) for one in found] == [one._replace(factor=1.0) for one in units]
    assert [one.factor for one in found] == pytest.approx([one.factor for one in units])
    shown = [
        (value, float(own.choice([0, 0.01, 0.3])) * value, unit)
        for (_, values), unit in zip(columns, units, strict=True)
        for value in values
    ]
    exact_cells = [re.sub(r"e\+0?", "e", cell(*one)) for one in shown]  # 1.2e+09 in Python, 1.2e9 on the page
    assert [text.replace("\u00a0", " ") for text in each("cell", shown)] == exact_cells

    curves = [rng.uniform(0, 4, rng.integers(1, 9)).round(1).tolist() for _ in range(60)]
    steps = [[3 * i for i in range(len(losses))] for losses in curves]
    formed = [(rng.random(len(losses)) < 0.6).tolist() for losses in curves]
    seeds = [
        {"curves": {"global_loss": [at, losses]}, "formed": own, "forming": {"wire": 0}}
        for at, losses, own in zip(steps, curves, formed, strict=True)
    ]
    for found, at, losses, own in zip(each("crossing", [[s, 2.0] for s in seeds]), steps, curves, formed, strict=True):
        exact = crossing(at, losses, 2.0, own)
        assert (found is None) == math.isnan(exact.step)
        if found is not None:
            assert (found["step"], found["first"]) == (exact.step, exact.first)
            known = [at[i] for i in found["results"]]  # the first measurement, and the first of a formed model
            assert known == list(dict.fromkeys(own for own in (exact.step, exact.formed) if not math.isnan(own)))

    ends = [[(loss - 0.1, loss + float(rng.uniform(0, 3))) for loss in losses] for losses in curves]
    runs = [
        [{"loss": loss, "ends": own} for loss, own in zip(*both, strict=True)]
        for both in zip(curves, ends, strict=True)
    ]
    for found, losses, own in zip(each("within", [[one] for one in runs]), curves, ends, strict=True):
        assert found == pytest.approx(within(np.array(losses), *np.array(own).T), abs=1e-8)

    drawn = [rng.uniform(0.5, 3, (3, 5)) * 10.0 ** np.array([0, 0, 0, 0, rng.integers(0, 3)]) for _ in range(60)]
    asked = [[[{"ys": ys.tolist()} for ys in own], "global_loss"] for own in drawn]
    for (_, high), own in zip(each("limits", asked), drawn, strict=True):
        cut = limits([*own])
        assert high == pytest.approx(np.max(own) if cut is None else cut[1])

    ranges = [(low, low * float(10 ** rng.uniform(0.01, 5))) for low in (10 ** rng.uniform(-3, 6, 2000)).tolist()]
    for count in (3, 4, 7):
        for log in (False, True):
            assert min(map(len, each("ticks", [[*own, count, log] for own in ranges]))) > 1
    ranges = [own for own in ranges if own[1] > 3.2 * own[0]][:60]
    for ticks, (low, most) in zip(each("ticks", [[*own, 7, True] for own in ranges]), ranges, strict=True):
        for own in (ticks, PlainLocator().tick_values(low, most)):
            assert len(own) > 1 and sorted(own) == list(own)
            assert all(0.999 * low <= tick <= 1.001 * most for tick in own)
        if most > 1e3 * low:  # then both stand at powers of ten, or at 1, 2 and 5 or 3 of them
            assert {f"{tick:e}"[0] for tick in ticks} <= {"1", "2", "3", "5"}


def state(page: Any, key: str) -> Any:
    return page.evaluate(f"vsim.state.{key}")


def enter(page: Any, key: str, text: str) -> None:
    page.locator(f"#text-{key}").fill(text)
    page.locator(f"#text-{key}").press("Enter")
    page.wait_for_timeout(60)


def test_every_slider_moves_by_hand_keyboard_and_text(opened: Any, comparison: vsim.Comparison) -> None:
    for key in ("bw", "lat", "sec", "size", "price", "target"):
        before, slider = state(opened, key), opened.locator(f"#slide-{key}")
        slider.fill("700")
        opened.wait_for_timeout(60)
        moved = state(opened, key)
        assert moved != before
        check(opened, comparison)
        slider.press("ArrowLeft")
        opened.wait_for_timeout(60)
        assert state(opened, key) < moved and slider.get_attribute("aria-valuetext")
    texts = {"bw": ("1,5 Gbit/s", 1.5e9), "price": ("$ 2,5", 2.5), "lat": ("7 ms", 7e-3), "sec": ("1.5", 1.5)}
    for key, (text, value) in (texts | {"size": ("× 20", 20)}).items():
        enter(opened, key, text)
        assert state(opened, key) == pytest.approx(value)
    for text in ("fast", "1,500 Mbit/s", "1.5.2 Gbit/s"):
        enter(opened, "bw", text)
        assert opened.locator("#text-bw").get_attribute("aria-invalid") == "true"
        assert "1.5 Gbit/s" in opened.locator("#note-bw").inner_text() and state(opened, "bw") == 1.5e9
    check(opened, comparison)
    opened.locator("#reset").click()
    assert state(opened, "bw") == 2e8


def test_sorts_hides_and_shows(opened: Any, comparison: vsim.Comparison) -> None:
    def column(key: str) -> list[float]:
        return [
            float(cell.get_attribute("data-value")) for cell in opened.locator(f'#table td[data-key="{key}"]').all()
        ]

    def curves() -> int:
        count: int = opened.locator("#curves svg path[fill=none]").count()
        return count

    for key in ("hours", "validation loss"):
        for direction in ("ascending", "descending"):
            opened.locator(f'th button[data-key="{key}"]').click()
            assert column(key) == sorted(column(key), reverse=direction == "descending")
            assert opened.locator("th[aria-sort]").get_attribute("aria-sort") == direction
    opened.locator('th button[data-key="hours"]').click()
    orders = set()
    for seconds, rate in ((0.8, 2e8), (1e-4, 1e5), (100.0, 1e12)):  # rows move with what they are sorted by
        opened.evaluate("([sec, bw]) => vsim.set({sec, bw, target: sec})", [seconds, rate])
        assert column("hours") == sorted(column("hours"))
        orders.add(tuple(opened.locator("#table tbody .name").all_inner_texts()))
        assert f"{seconds:g}" in opened.locator('th button[data-key="hours to target"]').inner_text()
    assert len(orders) > 1
    check(opened, comparison)
    opened.evaluate("vsim.set({target: 1})")
    lines = curves()
    opened.locator("#legend button").first.click()
    assert curves() < lines and opened.locator("#legend button").first.get_attribute("aria-pressed") == "false"
    opened.locator("#table tbody input").first.focus()
    opened.keyboard.press("Space")
    for axis in ("x", "y"):
        for choice in opened.locator(f"#{axis} option").all():
            opened.locator(f"#{axis}").select_option(choice.get_attribute("value"))
            assert opened.locator("#curves svg").get_attribute("aria-label")
    for box in ("#logx", "#logy", "#all"):
        opened.locator(box).check()
    for cost in ("wire", "hours", "dollars"):
        opened.locator("#cost").select_option(cost)


def firsts(page: Any, comparison: vsim.Comparison, target: float, compute: float = 0.8) -> vsim.Winners:
    """Check that the page names those of Python in the cells of a map."""
    bandwidths, latencies = [1e5, 3e6, 7e7, 1e11], [1e-4, 0.05, 1.0]
    page.evaluate("(at) => vsim.set(at)", {"target": target, "sec": compute})
    winners = comparison.winners(target, bandwidths, latencies, compute)
    for i, latency in enumerate(latencies):
        said = [page.evaluate("([bw, lat]) => vsim.first(bw, lat)", [bandwidth, latency]) for bandwidth in bandwidths]
        assert [sorted(names) for names in said] == [sorted(names) for names in winners.first[i]], (target, latency)
    return winners


def on_front(page: Any, names: Iterable[str]) -> set[str]:
    label = page.locator("#front svg").get_attribute("aria-label").partition("On the front: ")[2]
    return {name for name in names if name in label}


@pytest.mark.filterwarnings("ignore:validation is too rare")
def test_map_and_front_name_those_of_python(opened: Any, comparison: vsim.Comparison) -> None:
    rng = random.Random(7)
    for target in (1.2, 1.7, 2.1, rng.uniform(0.8, 2.2)):
        firsts(opened, comparison, target, compute=10 ** rng.uniform(-3, 0.5))
    for cost, own in (("wire", "wire"), ("hours", "time")):
        opened.evaluate("(at) => vsim.set(at)", {"cost": cost, "bw": 2e8, "lat": 0.05, "sec": 0.8})
        priced = {} if cost == "wire" else ON
        assert on_front(opened, comparison) == set(comparison.pareto(own, **priced).names)  # type: ignore[arg-type]


@pytest.mark.filterwarnings("ignore:validation is too rare")
@pytest.mark.parametrize("case", ["one seed", "some are missing"])
def test_runs_that_are_missing_count_as_in_python(
    case: str, browser: Any, comparison: vsim.Comparison, tmp_path: Path
) -> None:
    cut = comparison[list(comparison)]
    runs = {name: comparison.runs(name)[: 1 if case == "one seed" or name == "Streaming" else 2] for name in comparison}
    if case == "some are missing":
        diverged = replace(runs["DiLoCo"][1], failure="non-finite loss at step 24 on nodes [0]", diverged_at=24)
        late = comparison.runs("FedAvg")[1]  # a seed that only some targets are reached by
        short = vsim.History.from_plain(late.history.as_plain())
        short._columns["global_loss"][10:] = [math.nan] * (len(short) - 10)
        runs |= {
            "DiLoCo": [runs["DiLoCo"][0], diverged],
            "FedAvg": [runs["FedAvg"][0], replace(late, history=short)],
        }
    cut._runs, ties = runs, 0
    with watched(browser, cut.report(tmp_path / "report.html", **ON)) as page:
        marks = page.evaluate(
            "[...document.querySelectorAll('#table tbody tr')].map((row) => row.innerText.includes('†'))"
        )
        assert marks == ["†" in line for line in cut.table().splitlines()[2 : 2 + len(cut)]]
        for remark in compare_finals(cut)[1]:
            assert remark in page.locator("#marks").inner_text()
        for target in (0.9, 1.2, 1.5, 1.8, 2.1):
            winners = firsts(page, cut, target)
            check(page, cut)
            ties += sum(len(names) > 1 for row in winners.first for names in row)
            said = page.locator("#never").inner_text()
            assert all(remark[1:] in said for remark in winners.remarks)
            for name, text in winners.never.items():
                assert (name if text == "never" else f"{text} of {name}") in said
            assert ("ot reached by" in said) == ("never" in winners.never.values())
        assert on_front(page, cut) == set(cut.pareto().names)
    assert ties


def test_plots_are_read_by_pointer_and_by_keyboard(opened: Any) -> None:
    tip = opened.locator("#tip")
    opened.locator("#curves").hover(position={"x": 300, "y": 150})
    assert "DiLoCo" in tip.inner_text() and "wire" in tip.inner_text()
    for plot in ("#curves", "#map", "#front"):
        opened.locator(plot).focus()
        opened.keyboard.press("ArrowRight")
        assert tip.inner_text()
        opened.keyboard.press("Escape")
        assert tip.is_hidden()
    assert state(opened, "bw") != 2e8  # the map moves the network
    opened.locator("#map").click(position={"x": 200, "y": 100})
    assert state(opened, "lat") != 0.05


def test_names_times_and_ties_are_in_words(browser: Any, tmp_path: Path) -> None:
    """One unit for all times; a tie of three is no clear winner; runs that reach the loss are not said to miss it."""
    own = {
        "lost": [run([3.0, 2.5, 2.4], 20, seed=seed) for seed in range(3)],
        "sometimes": [run([3.0, 2.0, 1.0 if seed else 1.9], 20, seed=seed) for seed in range(3)],
        **{name: [run([3.0, 2.0, 1.0], 20, seed=seed) for seed in range(3)] for name in ("a", "b", "c")},
    }
    path = made(1000, **own).report(tmp_path / "report.html", network="1 Gbit/s, 1 ms", compute=0.25, title="Mine")
    with watched(browser, path) as page:
        page.evaluate("vsim.set({target: 1.5})")
        said = page.locator("#never").inner_text()
        assert "Not reached by lost." in said and "Reached by only 2 of 3 runs of sometimes." in said
        assert page.locator("#map .key").all_inner_texts()[0].startswith("no clear winner")
        assert page.locator("#map svg[role=img] text.halo").all_text_contents() == ["no clear winner"]
        assert "time on the network (seconds)" in page.locator("#curves").text_content()
        (head,) = page.locator('th button[data-key="hours"]').all_inner_texts()
        assert head.startswith("seconds on the network")
        assert page.locator('td[data-key="hours"]').all_inner_texts() == ["10.00"] * 5  # 40 steps of 0.25 s
        assert "half of the strategies" in page.locator("#note-target").inner_text() or state(page, "target") == 1.5
        page.evaluate("vsim.set({sec: 900})")
        assert "(hours)" in page.locator("#curves").text_content()
        assert page.locator('td[data-key="hours"]').all_inner_texts() == ["10.00"] * 5
        assert "a, b and c end with the lowest validation loss, 1.0000." in page.locator("#answer").inner_text()


def test_conditions_and_names_with_commas_are_in_words(browser: Any, tmp_path: Path) -> None:
    own = {"a, H = 1": (3e9, 1.0), "b, H = 2": (2e6, 1.9), "c": (1e6, 2.4)}
    runs = made(100, **{name: [run([3.0, loss], 60, payload=sent)] for name, (sent, loss) in own.items()})
    with watched(browser, runs.report(tmp_path / "report.html", network="1 Gbit/s, 1 ms", compute=0.25)) as page:
        page.evaluate("vsim.set({target: 1.5})")
        assert 'Not reached by "b, H = 2", c.' in page.locator("#never").inner_text()
        assert page.locator("#front .remark").inner_text() == (
            'Points mark the end of each run. "a, H = 1", the dearest, trains 60 steps. '
            'For its cost, c trains about 180,000 steps, "b, H = 2" about 90,000.'
        )
        about = page.locator("#about").inner_text()
        for words in ("1 Gbit/s, 1 ms, all-reduce as a ring", "0.25 s a step"):
            assert words in about
        assert not re.search(r"Network\(|Compute\(|vmap", page.locator("body").inner_text())
        assert "simulate" not in page.locator("#table thead").inner_text()
        page.locator("#all").check()
        assert "simulate" in page.locator("#table thead").inner_text()


def test_the_line_of_the_front_goes_through_no_name(browser: Any, tmp_path: Path) -> None:
    losses = {"a long name": 2.0, "another name": 1.5, "a third name": 1.2, "last": 1.0}
    runs = made(100, **{name: [run([3.0, loss], payload=1e6 * 4**i)] for i, (name, loss) in enumerate(losses.items())})
    crossed = """() => {
        const path = document.querySelector("#front path[stroke-dasharray]"), found = [];
        for (const text of document.querySelectorAll("#front text.halo")) {
            const {x, y, width, height} = text.getBBox();
            for (let i = 0; i < path.getTotalLength(); i += 1) {
                const at = path.getPointAtLength(i);
                if (at.x > x && at.x < x + width && at.y > y && at.y < y + height) found.push(text.textContent);
            }
        }
        return [document.querySelectorAll("#front text.halo").length, [...new Set(found)]];
    }"""
    for width in (1200, 420):
        options = {"viewport": {"width": width, "height": 900}}
        with watched(browser, runs.report(tmp_path / "report.html"), **options) as page:
            assert page.evaluate(crossed) == [4, []]
            panel = page.locator("section", has=page.locator("#map"))
            assert panel.bounding_box()["height"] < 200  # without a network there is no map


def test_downloads_have_the_data_and_the_hours(opened: Any, comparison: vsim.Comparison, tmp_path: Path) -> None:
    opened.evaluate("vsim.set({bw: 3e6, lat: 0.2})")
    files = {}
    for kind in ("csv", "json"):
        with opened.expect_download() as asked:
            opened.locator(f"#{kind}").click()
        files[kind] = tmp_path / kind
        asked.value.save_as(files[kind])
    frame = pd.read_csv(files["csv"])
    assert set(frame["run"]) == set(comparison)
    last = frame[(frame["run"] == "Streaming") & (frame["seed"] == 1)].iloc[-1]
    exact = comparison.runs("Streaming")[1].history.time(Network(3e6, 0.2), 0.8).seconds[-1] / 3600
    assert last["hours"] == pytest.approx(exact, rel=1e-3)
    assert last["global_loss"] == pytest.approx(comparison.runs("Streaming")[1].history.last("global_loss"), rel=1e-5)
    content = json.loads(files["json"].read_text())
    assert content["sliders"]["bw"] == 3e6
    assert len(content["data"]["runs"]) == len(comparison)


def test_an_address_restores_what_was_set(
    browser: Any, opened: Any, comparison: vsim.Comparison, tmp_path: Path
) -> None:
    opened.evaluate(
        "vsim.set({bw: 5e7, lat: 0, price: 2.5, x: 'wire', sort: '-hours', hide: new Set([1, 2]), logy: '1'})"
    )
    opened.wait_for_timeout(400)
    fragment = "#" + opened.url.partition("#")[2]
    with watched(browser, tmp_path / "report.html", fragment) as again:
        found = again.evaluate("({...vsim.state, hide: [...vsim.state.hide]})")
        restored = {"bw": 5e7, "lat": 0, "price": 2.5, "x": "wire", "sort": "-hours", "hide": [1, 2], "logy": "1"}
        assert found.items() >= restored.items()
        check(again, comparison)
    nonsense = "#bw=-1&lat=x&sec=NaN&size=1e999&x=<b>&sort=__proto__&hide=9999.a&run=77&of=-3&heatx=constructor"
    with watched(browser, tmp_path / "report.html", nonsense) as again:
        assert state(again, "bw") == 2e8
        check(again, comparison)


def test_without_a_network_there_are_no_hours_until_a_slider_moves(
    browser: Any, comparison: vsim.Comparison, tmp_path: Path
) -> None:
    with watched(browser, comparison.report(tmp_path / "report.html")) as page:
        for plot in ("#assumed", "#map"):
            assert "No network and no compute given" in page.locator(plot).inner_text()
        assert state(page, "x") == "step"
        assert page.locator("#text-bw").input_value() == ""
        assert all("hours" not in row for row in cells(page))
        steps = [sum(own) / len(own) for own in comparison.steps_to(state(page, "target")).values()]
        assert sum(math.isfinite(own) for own in steps) >= len(comparison) / 2  # the median run reaches the target
        enter(page, "bw", "200 Mbit/s")
        assert page.locator("#text-lat").input_value() == "20 ms"
        check(page, comparison)


def test_long_and_foreign_names_a_tie_and_an_outlier(browser: Any, tmp_path: Path) -> None:
    foreign, lost = "\u05d3\u05d9\u05dc\u05d5\u05e7\u05d5 (H=8)", "many letters " * 9
    names = ["first", "as cheap and as good", foreign, "other", lost]
    finals = zip(names, (1.0, 1.0, 1.1, 1.2, 9.0), (2e6, 2e6, 1e6, 3e6, 4e6), strict=True)
    runs = made(100, **{name: [run([9.0, loss], payload=sent)] for name, loss, sent in finals})
    with watched(browser, runs.report(tmp_path / "report.html"), viewport={"width": 1280, "height": 900}) as page:
        assert on_front(page, names) == set(runs.pareto().names) == set(names[:3])
        assert "9 ↑" in page.locator("#front svg").inner_html()
        assert page.locator("#legend bdi").all_inner_texts() == [name.strip() for name in names]
        page.emulate_media(media="print")
        assert too_wide(page) <= 0


def too_wide(page: Any) -> float:
    """How much of a table must be scrolled to."""
    more: float = page.evaluate(
        "(({scrollWidth, clientWidth}) => scrollWidth - clientWidth)(document.querySelector('.scroll'))"
    )
    return more


@pytest.mark.parametrize(
    ("width", "scheme"), [(1400, "light"), (1280, "dark"), (1200, "light"), (390, "light"), (390, "dark")]
)
def test_fits_a_screen_and_a_phone(
    browser: Any, comparison: vsim.Comparison, tmp_path: Path, width: int, scheme: str
) -> None:
    path = comparison.report(tmp_path / "report.html", **ON)
    screen = {"viewport": {"width": width, "height": 900}, "color_scheme": scheme}
    with watched(browser, path, **screen) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        assert width < 1200 or too_wide(page) == 0
    if AXE is not None:  # which adds a script, against the page's policy
        context = browser.new_context(**screen, bypass_csp=True)
        page = context.new_page()
        page.goto(path.as_uri())
        page.add_script_tag(path=AXE)
        found = page.evaluate("axe.run().then((found) => found.violations)")
        grave = [(one["id"], [node["html"] for node in one["nodes"]]) for one in found if one["impact"] != "minor"]
        context.close()
        assert grave == []


def test_several_comparisons_and_a_sweep_share_a_page(
    browser: Any, comparison: vsim.Comparison, tmp_path: Path
) -> None:
    settings = {"H": [1, 2, 4], "outer_lr": [0.4, 0.7], "lr": [1e-3, 5e-3]}
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 4, "val_interval": 2, "progress": False}
    model = MLP(hidden=(8,), seed=0)
    swept = sweep(model, *digits(), strategy=DiLoCoStrategy, settings=settings, **options)
    path = report({"one": comparison, "two": swept}, **ON, title="Two").save(tmp_path / "report.html")
    with watched(browser, path) as page:
        assert page.locator("#sweep").is_hidden()
        page.locator("#comparison").select_option("1")
        page.locator("#heat svg rect").nth(5).wait_for()
        assert page.locator("#table tbody tr").count() == page.locator("#parallel svg path").count() == 12
        assert page.locator("#heat svg rect").count() == 6
        exact = [row["hours"] for row in swept.rows(**ON).to_dict("records")]
        assert [row["hours"] for row in cells(page)] == pytest.approx(exact, rel=1e-3)
        assert page.evaluate("vsim.page.runs.map((run) => run.name)") == swept.order
        page.locator("#heatx").select_option("lr")
        page.locator("#shade").select_option("hours")
        assert page.locator("#heat svg rect").count() == 4
        assert math.isfinite(page.evaluate("Number(document.body.dataset.took)"))


def test_a_watched_page_follows_its_files(browser: Any, comparison: vsim.Comparison, tmp_path: Path) -> None:
    comparison[["AllReduce", "DiLoCo"]].to_json(tmp_path / "comparison.json")
    watch = Watch([tmp_path], every=0.2, **ON)
    thread = threading.Thread(target=watch.serve)
    thread.start()
    try:
        page = browser.new_page()
        said: list[str] = []
        page.on("console", lambda message: said.append(message.text))
        page.on("pageerror", lambda error: said.append(str(error)))
        page.goto(watch.url)
        page.locator("#table tbody tr").nth(1).wait_for(timeout=10_000)
        page.evaluate("vsim.set({bw: 5e6})")
        page.wait_for_timeout(1000)  # looks at files that have not changed
        comparison.to_json(tmp_path / "comparison.json")
        page.locator("#table tbody tr").nth(3).wait_for(timeout=10_000)
        assert state(page, "bw") == 5e6
        check(page, comparison)
        assert said == []
    finally:
        watch.close()
        thread.join()
