"""The page of a comparison in a real browser, opened from disk without a network."""

from __future__ import annotations

import json
import math
import os
import random
import re
import shutil
import threading
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from compared import compared

import vsim
from vsim import Compute, Network
from vsim.figures.paper import PlainLocator
from vsim.records.crossings import never
from vsim.records.fronts import within
from vsim.records.losses import compare_finals
from vsim.records.plots import limits
from vsim.records.report.page import report
from vsim.records.statistics import crossing
from vsim.records.tables import DIGITS, PERCENT, cell
from vsim.strategy import AloneStrategy, DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, StreamingDiLoCoStrategy
from vsim.sweep import sweep
from vsim.watch import Watch

playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# The file of axe-core, from `npm pack axe-core`.
AXE = os.environ.get("AXE_CORE")

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")
LIVE = ("hours", "utilization", "dollars", "steps to target", "wire MB to target", "hours to target")
HOSTILE = "</script><img src=x onerror='window.harmed = 1'>\"&<b>"


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
    path = comparison.report(tmp_path / "report.html", network="200 Mbit/s, 50 ms", compute=0.8, title=HOSTILE)
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
    rows = comparison.rows(at["target"], network, Compute(at["sec"], dollars_per_hour=at["price"]))
    missed = never(comparison, at["target"])
    for name, row, said in zip(comparison, rows, cells(page), strict=True):
        for key in LIVE:
            if key == "dollars" and not at["price"]:
                continue
            exact = row[key.replace("target", f"{at['target']:g}")] * (at["size"] if "MB" in key else 1)
            if "target" in key and name in missed:
                assert key not in said
            else:
                assert said[key] == pytest.approx(exact, rel=1e-3, abs=1e-12), (name, key, at)


def test_opens_from_disk_and_has_the_hours_of_the_table(opened: Any, comparison: vsim.Comparison) -> None:
    check(opened, comparison)
    assert opened.title() == HOSTILE
    assert opened.locator("h1").inner_text() == HOSTILE
    assert opened.locator("#curves svg path").count() > 4
    names = opened.locator("#legend .name").all_inner_texts()
    assert names == list(comparison)


@pytest.mark.slow
def test_random_positions_have_the_numbers_of_python(opened: Any, comparison: vsim.Comparison) -> None:
    check(opened, comparison)
    rng = random.Random(5)
    for _ in range(50):
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


@pytest.mark.slow
def test_a_rule_in_both_languages_is_one_rule(opened: Any) -> None:
    """Cells of tables, crossings of a loss, the losses that a figure shows, and ticks, of the script and of Python."""
    rng = np.random.default_rng(3)
    keys = [*PERCENT, *DIGITS, "times less than AllReduce", "hours", "hours to 1", "wire MB/node", "steps to 2"]
    drawn = [
        (key, float(10 ** rng.uniform(-4, 7)), float(rng.choice([0, 0.01, 0.3]))) for key in keys for _ in range(9)
    ]
    shown = [(key, value, spread * value) for key, value, spread in drawn]
    said = opened.evaluate("(all) => all.map((one) => vsim.rules.cell(...one))", shown)
    exact_cells = [re.sub(r"e\+0?", "e", cell(*one)) for one in shown]  # 1.2e+06 in Python, 1.2e6 on the page
    assert [text.replace("\u00a0", " ") for text in said] == exact_cells

    for _ in range(60):
        losses = rng.uniform(0, 4, rng.integers(1, 9)).round(1).tolist()
        steps, formed, target = [3 * i for i in range(len(losses))], (rng.random(len(losses)) < 0.6).tolist(), 2.0
        seed = {"curves": {"global_loss": [steps, losses]}, "formed": formed, "forming": {"wire": 0}}
        found = opened.evaluate("([seed, target]) => vsim.rules.crossing(seed, target)", [seed, target])
        exact = crossing(steps, losses, target, formed)
        assert (found is None) == math.isnan(exact.step)
        if found is not None:
            assert (found["step"], found["first"]) == (exact.step, exact.first)
            known = [steps[i] for i in found["results"]]  # the first measurement, and the first of a formed model
            assert known == list(dict.fromkeys(own for own in (exact.step, exact.formed) if not math.isnan(own)))

        ends = [(loss - 0.1, loss + float(rng.uniform(0, 3))) for loss in losses]
        all_runs = [{"loss": loss, "ends": own} for loss, own in zip(losses, ends, strict=True)]
        borders = opened.evaluate("(all) => vsim.rules.within(all)", all_runs)
        assert borders == pytest.approx(within(np.array(losses), *np.array(ends).T), abs=1e-8)

        curves = [rng.uniform(0.5, 3, 5) * 10.0 ** np.array([0, 0, 0, 0, rng.integers(0, 3)]) for _ in range(3)]
        ys = [{"ys": own.tolist()} for own in curves]
        _, high = opened.evaluate("(all) => vsim.rules.limits(all, 'global_loss')", ys)
        cut = limits(curves)
        assert high == pytest.approx(np.max(curves) if cut is None else cut[1])

        low = float(10 ** rng.uniform(-3, 6))
        most = low * float(10 ** rng.uniform(0.5, 5))
        ticks = opened.evaluate("([low, high]) => vsim.rules.ticks(low, high, 7, true)", [low, most])
        for own in (ticks, PlainLocator().tick_values(low, most)):
            assert (
                sorted(own) == list(own) and all(0.999 * low <= tick <= 1.001 * most for tick in own) and len(own) > 1
            )
        if most > 1e3 * low:  # then both stand at powers of ten, or at 1, 2 and 5 or 3 of them
            assert {f"{tick:e}"[0] for tick in ticks} <= {"1", "2", "3", "5"}


@pytest.mark.slow
def test_every_slider_moves_by_hand_keyboard_and_text(opened: Any, comparison: vsim.Comparison) -> None:
    for key in ("bw", "lat", "sec", "size", "price", "target"):
        before = opened.evaluate(f"vsim.state.{key}")
        opened.locator(f"#slide-{key}").fill("700")
        opened.wait_for_timeout(60)
        moved = opened.evaluate(f"vsim.state.{key}")
        assert moved != before
        check(opened, comparison)
        opened.locator(f"#slide-{key}").press("ArrowLeft")
        opened.wait_for_timeout(60)
        assert opened.evaluate(f"vsim.state.{key}") < moved
        assert opened.locator(f"#slide-{key}").get_attribute("aria-valuetext")
    for key, text, value in (
        ("bw", "1,5 Gbit/s", 1.5e9),
        ("price", "$ 2,5", 2.5),
        ("bw", "3 Gbit/s", 3e9),
        ("lat", "7 ms", 7e-3),
        ("sec", "1.5", 1.5),
        ("size", "× 20", 20),
    ):
        opened.locator(f"#text-{key}").fill(text)
        opened.locator(f"#text-{key}").press("Enter")
        assert opened.evaluate(f"vsim.state.{key}") == pytest.approx(value)
    for text in ("fast", "1,500 Mbit/s", "1.5.2 Gbit/s"):
        opened.locator("#text-bw").fill(text)
        opened.locator("#text-bw").press("Enter")
        assert opened.locator("#text-bw").get_attribute("aria-invalid") == "true"
        assert "3 Gbit/s" in opened.locator("#note-bw").inner_text()
        assert opened.evaluate("vsim.state.bw") == 3e9
    check(opened, comparison)
    opened.locator("#reset").click()
    assert opened.evaluate("vsim.state.bw") == 2e8


@pytest.mark.slow
def test_sorts_hides_and_shows(opened: Any, comparison: vsim.Comparison) -> None:
    for key in ("hours", "validation loss"):
        for direction in ("ascending", "descending"):
            opened.locator(f'th button[data-key="{key}"]').click()
            column = f'#table td[data-key="{key}"]'
            shown = [float(cell.get_attribute("data-value")) for cell in opened.locator(column).all()]
            assert shown == sorted(shown, reverse=direction == "descending")
            assert opened.locator("th[aria-sort]").get_attribute("aria-sort") == direction
    opened.locator('th button[data-key="hours"]').click()
    orders = set()
    for seconds, rate in ((0.8, 2e8), (1e-4, 1e5), (100.0, 1e12)):  # rows move with what they are sorted by
        opened.evaluate("([sec, bw]) => vsim.set({sec, bw, target: sec})", [seconds, rate])
        shown = [float(cell.get_attribute("data-value")) for cell in opened.locator('td[data-key="hours"]').all()]
        assert shown == sorted(shown)
        orders.add(tuple(opened.locator("#table tbody .name").all_inner_texts()))
        assert f"{seconds:g}" in opened.locator('th button[data-key="hours to target"]').inner_text()
    assert len(orders) > 1
    check(opened, comparison)
    opened.evaluate("vsim.set({target: 1})")
    lines = opened.locator("#curves svg path[fill=none]").count()
    opened.locator("#legend button").first.click()
    assert opened.locator("#curves svg path[fill=none]").count() < lines
    assert opened.locator("#legend button").first.get_attribute("aria-pressed") == "false"
    opened.locator("#table tbody input").first.focus()
    opened.keyboard.press("Space")
    for choice in opened.locator("#x option").all():
        opened.locator("#x").select_option(choice.get_attribute("value"))
    for choice in opened.locator("#y option").all():
        opened.locator("#y").select_option(choice.get_attribute("value"))
        assert opened.locator("#curves svg").get_attribute("aria-label")
    for box in ("#logx", "#logy", "#all"):
        opened.locator(box).check()
    for cost in ("wire", "hours", "dollars"):
        opened.locator("#cost").select_option(cost)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:validation is too rare")
def test_map_and_front_name_those_of_python(opened: Any, comparison: vsim.Comparison) -> None:
    rng, bandwidths, latencies = random.Random(7), [1e5, 3e6, 7e7, 2e9, 1e11], [1e-4, 0.003, 0.05, 1.0]
    for target in (1.2, 1.7, 2.1, rng.uniform(0.8, 2.2)):
        compute = 10 ** rng.uniform(-3, 0.5)
        opened.evaluate("(at) => vsim.set(at)", {"target": target, "sec": compute})
        exact = comparison.winners(target, bandwidths, latencies, compute).first
        for i, latency in enumerate(latencies):
            for j, bandwidth in enumerate(bandwidths):
                said = opened.evaluate("([bw, lat]) => vsim.first(bw, lat)", [bandwidth, latency])
                assert sorted(said) == sorted(exact[i][j]), (target, compute, bandwidth, latency)
    for cost, own in (("wire", "wire"), ("hours", "time")):
        opened.evaluate("(at) => vsim.set(at)", {"cost": cost, "bw": 2e8, "lat": 0.05, "sec": 0.8})
        priced = {} if cost == "wire" else {"network": "200 Mbit/s, 50 ms", "compute": 0.8}
        front = set(comparison.pareto(own, **priced).names)  # type: ignore[arg-type]
        label = opened.locator("#front svg").get_attribute("aria-label").partition("On the front: ")[2]
        assert {name for name in comparison if name in label} == front


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:validation is too rare")
@pytest.mark.parametrize("case", ["one seed", "some are missing"])
def test_runs_that_are_missing_count_as_in_python(
    case: str, browser: Any, comparison: vsim.Comparison, tmp_path: Path
) -> None:
    cut = comparison[list(comparison)]
    runs = {name: comparison.runs(name)[: 1 if case == "one seed" or name == "Streaming" else 2] for name in comparison}
    if case == "some are missing":
        diverged = replace(runs["DiLoCo"][1], failure="non-finite loss at step 24 on nodes [0]", diverged_at=24)
        late = comparison.runs("FedAvg")[1].history  # a seed that only some targets are reached by
        short = vsim.History.from_plain(late.as_plain())
        short._columns["global_loss"][10:] = [math.nan] * (len(short) - 10)
        runs |= {
            "DiLoCo": [runs["DiLoCo"][0], diverged],
            "FedAvg": [runs["FedAvg"][0], replace(diverged, history=short)],
        }
        runs["FedAvg"][1] = replace(runs["FedAvg"][1], failure="", diverged_at=None)
    cut._runs = runs
    path = cut.report(tmp_path / "report.html", network="200 Mbit/s, 50 ms", compute=0.8)
    bandwidths, latencies, ties = [1e5, 3e6, 7e7, 1e11], [1e-4, 0.05, 1.0], 0
    with watched(browser, path) as page:
        marks = page.evaluate(
            "[...document.querySelectorAll('#table tbody tr')].map((row) => row.innerText.includes('†'))"
        )
        assert marks == ["†" in line for line in cut.table().splitlines()[2 : 2 + len(cut)]]
        for remark in compare_finals(cut)[1]:
            assert remark in page.locator("#marks").inner_text()
        for target in (0.9, 1.2, 1.5, 1.8, 2.1):
            page.evaluate("(target) => vsim.set({target})", target)
            check(page, cut)
            winners = cut.winners(target, bandwidths, latencies, 0.8)
            for i, latency in enumerate(latencies):
                for j, bandwidth in enumerate(bandwidths):
                    said = page.evaluate("([bw, lat]) => vsim.first(bw, lat)", [bandwidth, latency])
                    assert sorted(said) == sorted(winners.first[i][j]), (target, bandwidth, latency)
                    ties += len(said) > 1
            never = page.locator("#never").inner_text()
            assert all(remark[1:] in never for remark in winners.remarks)
            assert all(f"{name} ({text})" in never for name, text in winners.never.items())
        label = page.locator("#front svg").get_attribute("aria-label").partition("On the front: ")[2]
        assert {name for name in cut if name in label} == set(cut.pareto().names)
    assert ties


@pytest.mark.slow
def test_plots_are_read_by_pointer_and_by_keyboard(opened: Any) -> None:
    tip = opened.locator("#tip")
    opened.locator("#curves").hover(position={"x": 300, "y": 150})
    assert "DiLoCo" in tip.inner_text()
    assert "wire" in tip.inner_text()
    for plot in ("#curves", "#map", "#front"):
        opened.locator(plot).focus()
        opened.keyboard.press("ArrowRight")
        assert tip.inner_text()
        opened.keyboard.press("Escape")
        assert tip.is_hidden()
    assert opened.evaluate("vsim.state.bw") != 2e8  # the map moves the network
    opened.locator("#map").click(position={"x": 200, "y": 100})
    assert opened.evaluate("vsim.state.lat") != 0.05


@pytest.mark.slow
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


@pytest.mark.slow
def test_an_address_restores_what_was_set(
    browser: Any, opened: Any, comparison: vsim.Comparison, tmp_path: Path
) -> None:
    opened.evaluate(
        "vsim.set({bw: 5e7, lat: 0, price: 2.5, x: 'wire', sort: '-hours', hide: new Set([1, 2]), logy: '1'})"
    )
    opened.wait_for_timeout(400)
    fragment = "#" + opened.url.partition("#")[2]
    with watched(browser, tmp_path / "report.html", fragment) as again:
        state = again.evaluate("({...vsim.state, hide: [...vsim.state.hide]})")
        assert (state["bw"], state["lat"], state["price"], state["x"]) == (5e7, 0, 2.5, "wire")
        assert (state["sort"], state["hide"], state["logy"]) == ("-hours", [1, 2], "1")
        check(again, comparison)
    nonsense = "#bw=-1&lat=x&sec=NaN&size=1e999&x=<b>&sort=__proto__&hide=9999.a&run=77&of=-3&heatx=constructor"
    with watched(browser, tmp_path / "report.html", nonsense) as again:
        assert again.evaluate("vsim.state.bw") == 2e8
        check(again, comparison)


@pytest.mark.slow
def test_without_a_network_there_are_no_hours_until_a_slider_moves(
    browser: Any, comparison: vsim.Comparison, tmp_path: Path
) -> None:
    with watched(browser, comparison.report(tmp_path / "report.html")) as page:
        for plot in ("#assumed", "#map"):
            assert "No network and no compute given" in page.locator(plot).inner_text()
        assert page.evaluate("vsim.state.x") == "step"
        assert page.locator("#text-bw").input_value() == ""
        assert all("hours" not in row for row in cells(page))
        steps = [sum(own) / len(own) for own in comparison.steps_to(page.evaluate("vsim.state.target")).values()]
        assert sum(math.isfinite(own) for own in steps) >= len(comparison) / 2  # the median run reaches the target
        page.locator("#text-bw").fill("200 Mbit/s")
        page.locator("#text-bw").press("Enter")
        page.wait_for_timeout(60)
        assert page.locator("#text-lat").input_value() == "20 ms"
        check(page, comparison)


@pytest.mark.slow
def test_long_and_foreign_names_a_tie_and_an_outlier(browser: Any, tmp_path: Path) -> None:
    foreign, lost = "\u05d3\u05d9\u05dc\u05d5\u05e7\u05d5 (H=8)", "many letters " * 9
    names = ["first", "as cheap and as good", foreign, "other", lost]
    comparison = vsim.Comparison(100)
    for name, loss, sent in zip(names, (1.0, 1.0, 1.1, 1.2, 9.0), (2e6, 2e6, 1e6, 3e6, 4e6), strict=True):
        history = vsim.History(name, 2)
        for step, own in enumerate((9.0, loss)):
            row = {"step": step, "examples": step, "wire_bytes": step * sent, "payload_bytes": 0, "seconds": 0}
            history.append({**row, "global_loss": own, "train_loss": own}, [own, own] if step else None)
        comparison.add(name, vsim.ComparedRun(history))
    with watched(browser, comparison.report(tmp_path / "report.html"), viewport={"width": 1280, "height": 900}) as page:
        front = page.locator("#front svg").get_attribute("aria-label").partition("On the front: ")[2]
        assert {name for name in names if name in front} == set(comparison.pareto().names) == set(names[:3])
        assert "9 ↑" in page.locator("#front svg").inner_html()
        assert page.locator("#legend bdi").all_inner_texts() == [name.strip() for name in names]
        page.emulate_media(media="print")
        table = page.evaluate(
            "(({scrollWidth, clientWidth}) => [scrollWidth, clientWidth])(document.querySelector('.scroll'))"
        )
        assert table[0] <= table[1]


@pytest.mark.slow
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1400, 1280, 390])
def test_fits_a_screen_and_a_phone(
    browser: Any, comparison: vsim.Comparison, tmp_path: Path, width: int, scheme: str
) -> None:
    path = comparison.report(tmp_path / "report.html", network="200 Mbit/s, 50 ms", compute=0.8)
    with watched(browser, path, viewport={"width": width, "height": 900}, color_scheme=scheme) as page:
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        table = page.evaluate(
            "(({scrollWidth, clientWidth}) => scrollWidth - clientWidth)(document.querySelector('.scroll'))"
        )
        assert width < 1280 or table == 0
    if AXE is not None:  # which adds a script, against the page's policy
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme, bypass_csp=True)
        page = context.new_page()
        page.goto(path.as_uri())
        page.add_script_tag(path=AXE)
        found = page.evaluate("axe.run().then((found) => found.violations)")
        grave = [(one["id"], [node["html"] for node in one["nodes"]]) for one in found if one["impact"] != "minor"]
        context.close()
        assert grave == []


@pytest.mark.slow
def test_several_comparisons_and_a_sweep_share_a_page(
    browser: Any, comparison: vsim.Comparison, tmp_path: Path
) -> None:
    from vsim.data import digits
    from vsim.models import MLP

    train, val = digits()
    settings = {"H": [1, 2, 4], "outer_lr": [0.4, 0.7], "lr": [1e-3, 5e-3, 2e-2]}
    swept = sweep(
        MLP(hidden=(8,), seed=0), train, val, strategy=DiLoCoStrategy, settings=settings, num_nodes=2, max_steps=8,
        val_interval=2, progress=False,
    )  # fmt: skip
    path = report({"one": comparison, "two": swept}, "200 Mbit/s, 50 ms", 0.8, "Two").save(tmp_path / "report.html")
    with watched(browser, path) as page:
        assert page.locator("#sweep").is_hidden()
        page.locator("#comparison").select_option("1")
        page.wait_for_timeout(200)
        assert page.locator("#table tbody tr").count() == 18
        assert page.locator("#heat svg rect").count() == 6
        assert page.locator("#parallel svg path").count() == 18
        order = swept.order
        exact = [row["hours"] for row in swept.rows(network="200 Mbit/s, 50 ms", compute=0.8)]
        assert [row["hours"] for row in cells(page)] == pytest.approx(exact, rel=1e-3)
        assert page.evaluate("vsim.page.runs.map((run) => run.name)") == order
        page.locator("#heatx").select_option("lr")
        page.locator("#shade").select_option("hours")
        assert page.locator("#heat svg rect").count() == 6
        assert math.isfinite(page.evaluate("Number(document.body.dataset.took)"))


@pytest.mark.slow
def test_a_watched_page_follows_its_files(browser: Any, comparison: vsim.Comparison, tmp_path: Path) -> None:
    comparison[["AllReduce", "DiLoCo"]].to_json(tmp_path / "comparison.json")
    watch = Watch([tmp_path], every=0.2, network="200 Mbit/s, 50 ms", compute=0.8)
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
        assert page.evaluate("vsim.state.bw") == 5e6
        check(page, comparison)
        assert said == []
    finally:
        watch.close()
        thread.join()
