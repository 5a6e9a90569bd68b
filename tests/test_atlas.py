"""The atlas: trials, scores and ties by hand, its stored results, and its command."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused

import vsim
from vsim.atlas import enter, entries, pages, scores, spaces, tasks
from vsim.atlas.entries import NO_LIMIT, SEEDS, key
from vsim.atlas.tasks import TASKS
from vsim.figures.looks import COLOURS
from vsim_cli import main

ALL = (NO_LIMIT, NO_LIMIT)
PAIRS = [(task, name) for task in TASKS for name, row in spaces.ROWS.items() if row.enters(TASKS[task].kinds)]


@pytest.fixture
def short(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make quadratics short, without stored results."""
    monkeypatch.setitem(TASKS, "quadratics", replace(TASKS["quadratics"], max_steps=50))
    monkeypatch.setattr(enter, "STORED", Path("nowhere"))


def test_trials_are_the_same_points_for_all() -> None:
    row = spaces.Row(vsim.strategy.FedAvgStrategy, {"H": (1, 81)})
    low, high = TASKS["strokes"].lr
    found = entries.settings(row, TASKS["strokes"])
    assert [own["H"] for own in found[:3]] == [round(81 ** (i / 9)) for i in (3, 6, 1)]  # Halton: 1/3, 2/3, 1/9
    expected = [low * (high / low) ** u for u in (1 / 2, 1 / 4, 3 / 4, 1 / 8)]
    np.testing.assert_allclose([own["lr"] for own in found[:4]], expected, rtol=1e-3)
    assert len(found) == 12


@pytest.mark.parametrize("task", TASKS)
def test_every_strategy_can_be_made_with_all_trials(task: str) -> None:
    for name in (name for of, name in PAIRS if of == task):
        for own in entries.settings(spaces.ROWS[name], TASKS[task]):
            assert isinstance(entries.made(spaces.ROWS[name], TASKS[task], own), vsim.strategy.Algorithm)


def test_the_quadratic_has_its_minimum_where_it_is_measured() -> None:
    train, val, _ = TASKS["quadratics"].data()
    (points, nodes), (minimum, all_nodes) = train.dataset.tensors, val.tensors
    model, away = tasks.Quadratic().double(), tasks.Quadratic().double()
    model.weights.data = minimum[0].double()
    model((points.double(), nodes)).backward()
    assert model.weights.grad is not None and float(model.weights.grad.abs().max()) < 1e-6
    with torch.no_grad():
        excess = away((points.double(), nodes)) - model((points.double(), nodes))
        assert float(away((minimum.double(), all_nodes))) == pytest.approx(float(excess), rel=1e-5)


def test_scores_are_the_last_results_within_their_limits() -> None:
    """AllReduce, K = 8, on links of 1 / 8 of its time: by hand."""
    task = replace(TASKS["quadratics"], max_steps=50, priced_as=40, computing=1.0)
    train, val, _ = task.data()
    options: dict[str, Any] = {"num_nodes": 8, "batch_size": 4, "max_steps": 50, "val_interval": 1, "progress": False}
    strategies = {"a": vsim.strategy.SimpleReduceStrategy(lr=0.01)}
    result = vsim.compare(task.model, train, val, strategies=strategies, **options)
    losses = result["a"].history["global_loss"]
    found = entries.scores(result["a"], task, is_asynchronous=False)
    # 14 messages of 50 ms in a step of 1 s: 29 steps take 49.3 s of 50; the 20 bytes of a message take no time.
    for score, steps in {
        ALL: 50,
        ("2 %", NO_LIMIT): 1,
        ("10 %", NO_LIMIT): 5,
        ("50 %", NO_LIMIT): 25,
        (NO_LIMIT, "100 Gbit/s"): 49,
        (NO_LIMIT, "1 Gbit/s, 10 ms"): 43,
        (NO_LIMIT, "100 Mbit/s, 50 ms"): 29,
        ("10 %", "100 Mbit/s, 50 ms"): 5,
    }.items():
        assert found[score][0] == losses[steps] and found[score][2] == steps, score


def entry(losses: list[float | None], more: list[float | None] | None = None) -> dict[str, Any]:
    own = {"loss": losses, "accuracy": [None] * len(SEEDS), "steps": [50.0] * len(SEEDS), "trial": 0}
    return {"scores": {key(ALL): own}, "tuning": {key(ALL): more or [1.0] * 12}}


def test_ties_and_diverged_runs_by_hand() -> None:
    shared = {
        "best": entry([1.0, 1.1, 1.2, 1.3, 1.4]),
        "tied": entry([1.1, 1.0, 1.3, 1.2, 1.5]),  # 0.02 ± 0.136, paired
        "behind": entry([1.15, 1.2, 1.3, 1.4, 1.5]),  # 0.11 ± 0.028
        "diverged": entry([9.1, None, 9.3, 9.4, 9.5]),
    }
    places = scores.standings(shared, ALL)
    assert [own.strategy for own in places] == ["best", "tied", "behind", "diverged"]
    assert [own.is_tied for own in places] == [True, True, False, False]
    assert places[3].diverged == 1 and places[3].loss == pytest.approx((9.1 + 9.5 + 9.3 + 9.4 + 9.5) / 5)
    said = scores.standing(shared, "tied", ALL)
    assert said == "2 of 4; ahead of 1, behind 0, not decided against 2 (best, behind)"
    ratio = scores.ratios({"one": shared}, ALL)["behind"]
    np.testing.assert_allclose(ratio, [1.31 / 1.2])
    assert scores.tuning(entry([1.0], [1.0, 3.0, None, *[2.0] * 9])) == (2.0, 1)


def test_the_interval_is_that_of_student() -> None:
    values = np.array([0.1, 0.5, 0.2, 0.9, 0.4])
    half = 2.776445105 * np.std(values, ddof=1) / 5**0.5
    np.testing.assert_allclose(scores.interval(values), [values.mean() - half, values.mean() + half], rtol=1e-8)


@pytest.mark.slow
def test_a_strategy_of_ones_own_enters_and_resumes(
    short: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    Path("own_strategies.py").write_text(
        "from vsim.strategy import FedAvgStrategy\n"
        "class Mine(FedAvgStrategy):\n    space = {'H': (1, 10)}\n"
        "class NoSpace(FedAvgStrategy):\n    pass\n"
        "class Odd(FedAvgStrategy):\n    space = {'H': (5, 1)}\n"
        "class Broken(FedAvgStrategy):\n    space = {}\n    def sync(self):\n        raise RuntimeError('no way')\n"
    )
    line = ["atlas", "--tasks", "quadratics", "--quiet"]
    assert main([*line, "--mine", "own_strategies:Mine"]) == 0
    assert "1 of 1; ahead of 0, behind 0" in capsys.readouterr().out
    path = Path("vsim-atlas/quadratics/mine.json")
    first = path.read_text()
    made = json.loads(first)
    best = {name: own["trial"] for name, own in made["scores"].items() if NO_LIMIT in name}
    assert best == {name: int(np.argmin(made["tuning"][name])) for name in best}
    assert main([*line, "--mine", "own_strategies:Mine"]) == 0
    assert path.read_text() == first
    code = Path("own_strategies.py").read_text()
    Path("own_strategies.py").write_text(f"{code}# changed\n")
    assert main([*line, "--mine", "own_strategies:Mine"]) == 0
    assert json.loads(path.read_text())["code"] != made["code"]
    for name, words in {"NoSpace": "NoSpace.space must be a dict", "Odd": "Odd.space['H']", "Other": "Other"}.items():
        assert main([*line, "--mine", f"own_strategies:{name}"]) == 2
        assert words in capsys.readouterr().err
    assert main([*line, "--mine", "own_strategies:Broken"]) == 1
    assert "not trained: Broken on quadratics: " in capsys.readouterr().err
    assert main([*line[:2], "digit"]) == 2
    assert "--tasks must be one of 'characters'" in capsys.readouterr().err


def test_what_is_no_entry_of_this_atlas_is_refused(tmp_path: Path) -> None:
    (tmp_path / "digits").mkdir()
    whole = {"strategy": "AllReduce", "atlas": tasks.VERSION}
    texts = {"other data": json.dumps({**whole, "data": "0"}), "atlas/9": json.dumps({**whole, "atlas": "atlas/9"})}
    for words, text in {**texts, "'data'": json.dumps(whole), "indices": "[]", "Expecting": "{"}.items():
        (tmp_path / "digits" / "allreduce.json").write_text(text)
        with refused(ValueError, "allreduce.json", words):
            enter.read(tmp_path, "digits")
        if words != "other data":  # which takes a while to make
            with refused(ValueError, "allreduce.json", words):
                [*enter.missing(tmp_path, ["digits"], {"AllReduce": spaces.ROWS["AllReduce"]})]


def test_all_results_are_stored_with_the_present_settings() -> None:
    size, found = 0, []
    for path in enter.STORED.rglob("*.json"):
        own = json.loads(path.read_text(encoding="utf-8"))
        size += path.stat().st_size
        found.append((own["task"], own["strategy"]))
        task, row = TASKS[own["task"]], spaces.ROWS[own["strategy"]]
        assert own["settings"] == json.loads(json.dumps(entries.settings(row, task))), path
        assert own["seeds"] == {"tuning": [*entries.TUNED_WITH], "final": [*SEEDS]}
        for name, losses in own["tuning"].items():
            known = [math.inf if one is None else one for one in losses]
            assert known[own["scores"][name]["trial"]] == min(known), (path, name)
    assert sorted(found) == sorted(PAIRS)
    assert size < 3e6


def test_the_page_is_of_the_stored_results() -> None:
    by_task = {task: enter.read(enter.STORED, task) for task in TASKS}
    text = (Path(__file__).parents[1] / "docs/atlas.md").read_text(encoding="utf-8")
    assert pages.results(by_task) in text


def test_a_strategy_has_one_look_in_all_panels_of_the_profiles() -> None:
    looks: dict[str, set[Any]] = {}
    for ax in pages.figure({task: enter.read(enter.STORED, task) for task in TASKS}).axes:
        for line in ax.get_lines():
            looks.setdefault(line.get_label(), set()).add((line.get_color(), line.get_linestyle(), line.get_marker()))
    assert all(len(own) == 1 for own in looks.values()) and len(set.union(*looks.values())) == len(looks)
    assert looks["AllReduce"] == {("#000000", "-", "o")} and {own[0] for (own,) in looks.values()} <= {*COLOURS}


@pytest.mark.slow
def test_two_entries_are_made_again(tmp_path: Path) -> None:
    torch_threads = torch.get_num_threads()
    rows = {name: spaces.ROWS[name] for name in ("AllReduce", "FedAvg")}
    for folder in ("one", "two"):
        assert not enter.train(tmp_path / folder, ["quadratics"], rows, deterministic=False, quiet=True)
    assert torch.get_num_threads() == torch_threads
    one, two, stored = (
        enter.read(folder, "quadratics") for folder in (tmp_path / "one", tmp_path / "two", enter.STORED)
    )
    for name in rows:
        assert one[name]["digest"] == two[name]["digest"]
        for score, own in one[name]["scores"].items():
            np.testing.assert_allclose(own["loss"], stored[name]["scores"][score]["loss"], rtol=1e-3, err_msg=score)
