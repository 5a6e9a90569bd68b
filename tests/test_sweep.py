"""Grids and sweeps: the product of the settings, refused before anything trains; sorted, drawn and kept."""

from __future__ import annotations

import csv
import itertools
import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from comparisons_by_hand import check_refusals, never, run, texts
from errors import refused
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import vsim
from vsim import ComparedRun, History, Sweep
from vsim.analysis.swept import Point
from vsim.data import digits
from vsim.figures.looks import COLOURS
from vsim.models import MLP
from vsim.search.compare import rungs
from vsim.search.grid import points
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, OptimSpec, Strategy, TopK, compress

# grid


class Anything(Strategy):
    """Takes any settings and remembers them."""

    def __init__(self, **kept: Any) -> None:
        super().__init__()
        self.kept = kept


VALUES = st.none() | st.booleans() | st.integers(-3, 3) | st.floats(allow_nan=False) | st.text(max_size=3)
SETTINGS = st.dictionaries(
    st.sampled_from(["a", "b", "c", "d"]), VALUES | st.lists(VALUES, min_size=1, max_size=4, unique=True), max_size=4
)


@given(SETTINGS)
@settings(suppress_health_check=[HealthCheck.too_slow])
def test_a_grid_is_the_product_of_its_lists(varied: dict[str, Any]) -> None:
    lists = {key: value if isinstance(value, list) else [value] for key, value in varied.items()}
    found = vsim.grid(Anything, **varied)
    wanted = [dict(zip(lists, values, strict=True)) for values in itertools.product(*lists.values())]
    assert [strategy.kept for strategy in found.values()] == wanted  # type: ignore[attr-defined]
    for name, point in points(Anything, varied).items():  # the names are keys, so that they are unique
        assert set(point.labels) == {key for key, values in lists.items() if len(values) > 1}
        assert all(f"{key}={label}" in name for key, label in point.labels.items())


def test_names_are_short() -> None:
    found = vsim.grid(DiLoCoStrategy, H=[5, 10], outer_lr=(0.4, 1.0), lr=1e-3, warmup_steps=[3])
    assert list(found) == [
        "DiLoCo H=5, outer_lr=0.4",
        "DiLoCo H=5, outer_lr=1",
        "DiLoCo H=10, outer_lr=0.4",
        "DiLoCo H=10, outer_lr=1",
    ]
    assert list(vsim.grid(Strategy)) == ["Strategy"] and list(vsim.grid(DiLoCoStrategy, H=3)) == ["DiLoCo"]
    assert list(vsim.grid(Strategy, lr=np.logspace(-3, -2, 2))) == ["Strategy lr=0.001", "Strategy lr=0.01"]


def test_names_of_objects_say_what_differs() -> None:
    specs = [OptimSpec("sgd", lr=0.1, momentum=0.9), OptimSpec("sgd", lr=0.3, momentum=0.9), "adamw", torch.optim.Adam]
    names = [name.split(" ", 1)[1] for name in vsim.grid(DiLoCoStrategy, inner_optim=specs)]
    assert names == [f"inner_optim={text}" for text in ("SGD(lr=0.1)", "SGD(lr=0.3)", "adamw", "Adam")]
    averages = ["mean", compress(TopK(0.1)), compress(TopK(0.01))]
    names = [name.split("=", 1)[1] for name in vsim.grid(DiLoCoStrategy, average=averages)]
    assert names == ["mean", *(f"compress(compressor=TopK(fraction={fraction}))" for fraction in (0.1, 0.01))]
    # A list that is a value stands in a list; two objects that look alike are numbered.
    assert list(vsim.grid(Anything, pair=[(1, 2)])) == ["Anything"]
    assert list(vsim.grid(Anything, pair=[(1, 2), (1, 3)])) == ["Anything pair=(1, 2)", "Anything pair=(1, 3)"]
    assert list(vsim.grid(Anything, o=[Anything(), Anything()])) == ["Anything o=Anything", "Anything o=Anything #2"]


def test_compare_takes_dicts_of_dicts() -> None:
    strategies = {"DiLoCo": vsim.grid(DiLoCoStrategy, H=[1, 2]), "warm": vsim.grid(FedAvgStrategy), "one": Strategy()}
    model, data = MLP(hidden=(4,), seed=0), digits()[0]
    result = vsim.compare(model, data, strategies=strategies, num_nodes=2, max_steps=1, progress=False)
    assert list(result) == ["DiLoCo H=1", "DiLoCo H=2", "warm, FedAvg", "one"]
    with refused(ValueError, "two strategies have one name: a, b"):
        vsim.compare(model, data, strategies={"a": {"b": Strategy()}, "a, b": Strategy()}, num_nodes=2)


@pytest.fixture(scope="module")
def swept() -> Sweep:
    train, val = digits()
    return vsim.sweep(
        lambda seed: MLP(hidden=(8,), seed=seed),
        train,
        val,
        strategy=DiLoCoStrategy,
        settings={"H": [2, 5], "outer_lr": [0.4, 0.7, 1.0], "lr": [1e-2, 1e-3], "inner_optim": "sgd"},
        num_nodes=2,
        max_steps=10,
        val_interval=5,
        seeds=[0, 1],
        progress=False,
    )


def final(sweep: Sweep, **settings: Any) -> float:
    """The mean of the final losses of a setting, from the histories."""
    (name,) = (n for n, own in sweep.settings.items() if all(own[key] == value for key, value in settings.items()))
    return float(np.mean([run.history["global_loss"][-1] for run in sweep.runs(name)]))


def test_settings_and_order(swept: Sweep) -> None:
    assert len(swept) == 12 and swept.varied == ["H", "outer_lr", "lr"]
    name = "DiLoCo H=5, outer_lr=0.7, lr=0.01"
    assert swept.settings[name] == {"H": 5, "outer_lr": 0.7, "lr": 0.01, "inner_optim": "sgd"}
    losses = {n: float(np.mean([h.last("global_loss") for h in own])) for n, own in swept.histories.items()}
    assert swept.best() == min(losses, key=losses.__getitem__)
    assert [row["validation loss"] for row in swept.rows().to_dict("records")] == pytest.approx(sorted(losses.values()))
    best = swept.settings[swept.best()]
    first = swept.rows().to_dict("records")[0]
    assert [first[key] for key in ("H", "outer_lr", "lr")] == [f"{best[key]:g}" for key in ("H", "outer_lr", "lr")]
    line = swept.table().splitlines()[2]
    assert f"{first['validation loss']:.4f} ± {first['validation loss std']:.4f}" in line


@given(st.integers(1, 200), st.integers(1, 5000), st.integers(2, 6))
def test_rungs(count: int, steps: int, factor: int) -> None:
    found = rungs(count, steps, factor)
    at, left = [step for step, _ in found], [kept for _, kept in found]
    assert at == sorted(set(at)) and all(steps / 10 <= step < steps for step in at)
    for before, after in itertools.pairwise([count, *left]):
        assert after == math.ceil(before / factor) < before
    # Another rung would be too early, or nothing would be left to choose from.
    assert 10 * (steps // factor ** (len(at) + 1)) < max(steps, 10) or factor ** len(at) >= count


# What is drawn and written


def drawn(settings: dict[str, Any], losses: dict[tuple[str, ...], Any]) -> Sweep:
    """A sweep whose runs have these final losses; ("diverged", step) and ("stopped", step, loss) for those."""
    sweep = Sweep(4000, points(DiLoCoStrategy, settings), "DiLoCo")
    for name, point in sweep.points.items():
        given = losses[tuple(point.labels.values())]
        for seed, one in enumerate(given if isinstance(given, list) else [given]):
            what, *rest = one if isinstance(one, tuple) else ("", one)
            steps, options = (rest[0] if what else 20), {what: rest[0]} if what else {}
            sweep.add(name, run([2.3, rest[-1]], steps, seed=seed, payload=100.0, **options))
    return sweep


@pytest.fixture(scope="module")
def mixed() -> Sweep:
    losses = {
        ("5", "0.4"): [0.5, 0.7],
        ("5", "1"): [0.2, 0.4],
        ("10", "0.4"): [("stopped", 7, 0.1), ("stopped", 7, 0.2)],
        ("10", "1"): [0.1, ("diverged", 9)],
        ("50", "0.4"): [1.0, 1.0],
        ("50", "1"): [("diverged", 3), ("diverged", 5)],
    }
    return drawn({"H": [5, 10, 50], "outer_lr": [0.4, 1.0]}, losses)


def cells(ax: Any) -> dict[tuple[float, float], str]:
    return {text.get_position(): text.get_text() for text in ax.texts}


def test_a_heat_map_is_the_pivot_of_the_histories(swept: Sweep) -> None:
    ax = swept.heatmap("H", "outer_lr", lr=0.001)
    values = np.array([[final(swept, H=H, outer_lr=rate, lr=0.001) for H in (2, 5)] for rate in (0.4, 0.7, 1.0)])
    written = np.array([[float(cells(ax)[x, y]) for x in range(2)] for y in range(3)])
    np.testing.assert_allclose(written, values, rtol=1e-3)
    assert [label.get_text() for label in ax.get_xticklabels()] == ["2", "5"]
    assert [label.get_text() for label in ax.get_yticklabels()] == ["0.4", "0.7", "1"]
    assert (ax.get_xlabel(), ax.get_ylabel(), ax.get_title("left")) == ("H", "outer_lr", "lr = 0.001")
    (bar,) = (other for other in ax.figure.axes if other is not ax)
    assert bar.get_ylabel() == "validation loss" and bar.get_ylim() == pytest.approx((values.min(), values.max()))
    y, x = np.unravel_index(values.argmin(), values.shape)
    assert {text.get_position() for text in ax.texts if text.get_weight() == "bold"} == {(x, y)}
    best = swept.heatmap("outer_lr", "lr")
    assert best.get_title("left") == "best of H"
    for (x, y), text in cells(best).items():
        fixed = {"outer_lr": (0.4, 0.7, 1.0)[int(x)], "lr": (1e-2, 1e-3)[int(y)]}
        assert float(text) == pytest.approx(min(final(swept, H=H, **fixed) for H in (2, 5)), rel=1e-3)


def test_cells_that_diverged_are_hatched_and_say_so(mixed: Sweep) -> None:
    ax = mixed.heatmap("H", "outer_lr")
    assert cells(ax) == {
        (0, 0): "0.600",
        (0, 1): "0.300",
        (1, 0): "0.150\nstep 7",
        (1, 1): "1 of 2\ndiverged",
        (2, 0): "1.00",
        (2, 1): "diverged",
    }
    hatched = {(p.get_x() + 0.5, p.get_y() + 0.5) for p in ax.patches if p.get_hatch()}
    assert hatched == {(1, 1), (2, 1)} and texts(ax.get_legend()) == ["hatched: diverged"]
    assert ax.figure.get_size_inches()[0] == pytest.approx(3.3)  # a column of a paper
    ax.figure.draw_without_rendering()
    for text in ax.texts:  # within its cell
        box, (x, y) = text.get_window_extent(), text.get_position()
        (left, low), (right, high) = ax.transData.transform([(x - 0.5, y - 0.5), (x + 0.5, y + 0.5)])
        assert left <= box.x0 and box.x1 <= right and low <= box.y0 and box.y1 <= high


def test_the_order_is_ended_stopped_failed(mixed: Sweep) -> None:
    assert mixed.best() == "DiLoCo H=5, outer_lr=1"
    assert [(row["H"], row["outer_lr"]) for row in mixed.rows().to_dict("records")] == [
        ("5", "1"),
        ("5", "0.4"),
        ("50", "0.4"),
        ("10", "0.4"),  # stopped, whatever its loss
        ("10", "1"),
        ("50", "1"),
    ]
    # Of a table that would be wider than a page, the notes stand below.
    lines = mixed.table().splitlines()
    *_, tie, stopped, half, whole = lines[: 2 + len(mixed)]
    notes = lines[2 + len(mixed) :]
    assert max(map(len, lines[: 2 + len(mixed)])) <= 110
    assert "1.0000 †" in tie and "†" not in stopped + half + whole
    assert "0.1500 ±" in stopped and "0.1000" in half
    assert "diverged at steps 3 to 5" in whole and "2.3" not in whole  # no loss of step 0 as a result
    assert notes[0] == "10, 0.4: stopped after step 7"
    assert notes[1] == "10, 1: seed 1: non-finite loss at step 9 on nodes [0]"
    assert notes[2].startswith("50, 1: seed 0: non-finite") and notes[3].startswith(
        "† not significantly different from the best, "
    )
    assert mixed.table("github").splitlines()[0].split("|")[-2].strip() == "note"
    failed = mixed[["DiLoCo H=50, outer_lr=1"]]
    with pytest.raises(ValueError, match="no run got to its end; DiLoCo H=50, outer_lr=1: seed 0: non-finite"):
        failed.best()
    assert math.isnan(failed.rows().to_dict("records")[0]["validation loss"])


def test_colours_are_the_first_setting_and_dashes_the_second(swept: Sweep) -> None:
    ax = swept.plot()
    looks = {line.get_label(): (line.get_color(), line._unscaled_dash_pattern, line.get_marker()) for line in ax.lines}
    assert set(looks) == set(swept) and len(set(looks.values())) == 12
    for position, key in enumerate(swept.varied):
        pairs = {(swept.settings[name][key], str(look[position])) for name, look in looks.items()}
        assert len(pairs) == len({value for value, _ in pairs}) == len({look for _, look in pairs})
    assert texts(ax.get_legend()) == ["H", "2", "5", "outer_lr", "0.4", "0.7", "1", "lr", "0.01", "0.001"]
    # Of some of them, with the same looks; the legend says what is left to say.
    other = swept[[name for name in swept if "outer_lr=0.7" in name]].plot("payload")
    assert all(looks[line.get_label()][0] == line.get_color() for line in other.lines) and len(other.lines) == 4
    assert texts(other.get_legend()) == ["H", "2", "5", "lr", "0.01", "0.001"]
    by_rate = swept.plot(colour="outer_lr")
    assert len({line.get_color() for line in by_rate.lines}) == 3


def test_many_values_have_colours_in_order_and_a_short_legend() -> None:
    values = list(range(1, 21))
    ax = drawn({"H": values}, {(str(H),): 1 / H for H in values}).plot()
    assert len({line.get_color() for line in ax.lines}) == 20 and len(texts(ax.get_legend())) <= 9
    brightness = [sum(int(line.get_color()[i : i + 2], 16) for i in (1, 3, 5)) for line in ax.lines]
    assert brightness == sorted(brightness)
    ax = drawn({"H": values[:2]}, {("1",): 1.0, ("2",): 2.0}).plot()
    assert [line.get_color() for line in ax.lines] == list(COLOURS[:2])


def test_files_hold_the_settings(swept: Sweep, mixed: Sweep, tmp_path: Path) -> None:
    for sweep in (swept, mixed):
        sweep.to_json(tmp_path / "s.json")
        again = Sweep.from_json(tmp_path / "s.json")
        assert again.settings == sweep.settings and again.table() == sweep.table() and repr(again) == repr(sweep)
    swept.to_csv(tmp_path / "s.csv")
    frame = swept.to_pandas()
    # The rate that is set stands next to the rate of the step; numbers of numpy stay numbers.
    assert list(frame.columns[:6]) == ["strategy", "seed", "H", "outer_lr", "lr_setting", "step"]
    with open(tmp_path / "s.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [float(line["lr_setting"]) for line in lines] == frame["lr_setting"].tolist()
    last = frame[frame["step"] == 10].groupby(["H", "outer_lr", "lr_setting"])["global_loss"].mean()
    assert last[5, 0.7, 0.01] == pytest.approx(final(swept, H=5, outer_lr=0.7, lr=0.01))
    values = {"H": np.int64(2), "lr": np.float32(0.5), "flag": np.bool_(True)}
    sweep = Sweep(4, {"H=2": Point(values, {"H": "2"})}, "DiLoCo")
    sweep.add("H=2", ComparedRun(History()))
    sweep.to_json(tmp_path / "n.json")
    assert json.loads((tmp_path / "n.json").read_text())["settings"] == {"H=2": {"H": 2, "lr": 0.5, "flag": True}}


@pytest.mark.slow
def test_a_notebook_shows_all_of_it(swept: Sweep) -> None:
    html = swept._repr_html_()
    assert "<table>" in html and html.count("<img") == 2  # curves, and the map of the first two settings
    assert "DiLoCo, 12 settings; 2 nodes" in repr(swept)
    one = drawn({"lr": 0.1}, {(): 1.0})
    assert list(one) == ["DiLoCo"] and one.varied == [] and one._repr_html_().count("<img") == 1
    assert one.rows().to_dict("records")[0]["strategy"] == "DiLoCo" and one.settings == {"DiLoCo": {"lr": 0.1}}


def test_mistakes_are_named_and_nothing_trains(swept: Sweep) -> None:
    grid: Any = vsim.grid
    alone = Sweep(4000, points(DiLoCoStrategy, {"lr": [1e-3, 1e-2]}), "DiLoCo")
    check_refusals(
        [
            (lambda: grid(DiLoCoStrategy, H=[5, 0], lr=[1, 2]), ValueError, ["DiLoCo H=0, lr=1", "H must be", ">= 1"]),
            (lambda: grid(DiLoCoStrategy, h=[5]), TypeError, ["'h'", "did you mean 'H'", "outer_lr"]),
            (lambda: grid(DiLoCoStrategy, inner_lr=[0.1, 0.2]), TypeError, ["inner_lr", "lr"]),
            (lambda: grid(DiLoCoStrategy, H=[5, 10, 5]), ValueError, ["H has 5 twice"]),
            (lambda: grid(DiLoCoStrategy(), H=[5]), TypeError, ["strategy must be a class", "DiLoCoStrategy"]),
            (lambda: alone.heatmap("lr", "H"), ValueError, ["two settings", "lr"]),
            (lambda: swept.heatmap("h", "lr"), ValueError, ["x must be one of", "'H'", "'h'"]),
            (lambda: swept.heatmap("H", "H"), ValueError, ["y must be one of", "'outer_lr'", "'H'"]),
            (lambda: swept.heatmap("H", "inner_optim"), ValueError, ["y must be one of", "'inner_optim'"]),
            (lambda: swept.heatmap("H", "outer_lr", l_r=1), ValueError, ["a setting to fix", "'lr'", "'l_r'"]),
            (lambda: swept.heatmap("H", "outer_lr", lr=0.5), ValueError, ["no run with lr=0.5"]),
        ]
    )
    (made,) = vsim.grid(lambda H: FedAvgStrategy(H=H, lr=0.5), H=[7]).values()
    assert isinstance(made, FedAvgStrategy) and made.optim_spec.kwargs == {"lr": 0.5}

    asked: list[tuple[dict[str, Any], type[Exception], list[str]]] = [
        ({"settings": {"H": [5, 0]}}, ValueError, ["FedAvg H=0", "H must be"]),
        ({"settings": {"island_size": [2, 3]}}, ValueError, ["FedAvg island_size=3", "island_size must be"]),
        ({"settings": {"num_nodes": [2, 0]}, "num_nodes": None}, ValueError, ["FedAvg num_nodes=0", "num_nodes must"]),
        ({"settings": {"num_node": [2]}}, TypeError, ["'num_node'", "did you mean 'num_nodes'"]),
        ({"settings": {"num_node": 2}, "strategy": Anything}, TypeError, ["did you mean 'num_nodes'"]),
        ({"settings": {"num_nodes": [2, 3]}}, TypeError, ["num_nodes", "twice"]),
        ({"settings": {"batch_size": [2]}, "batch_size": 3}, TypeError, ["batch_size", "twice"]),
        ({"settings": {"H": [2]}, "num_nodes": None}, TypeError, ["num_nodes", "in settings"]),
    ]
    for options, kind, words in asked:
        defaults = {"strategy": FedAvgStrategy, "num_nodes": 2, "train_loss_hook": never, "progress": False}
        with refused(kind, *words):
            vsim.sweep(MLP(hidden=(4,), seed=0), digits()[0], **{**defaults, **options})
