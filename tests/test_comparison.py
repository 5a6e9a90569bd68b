"""The results of a comparison: a table, figures and files that say what the ledgers say."""

from __future__ import annotations

import base64
import csv
import functools
import math
import re
import statistics
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from comparisons_by_hand import check_refusals, never, run, texts
from comparisons_by_hand import comparison as made
from errors import refused
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.figure import Figure
from shared_comparisons import STEPS, compared, three_strategies

import vsim
from vsim import History
from vsim.analysis.columns import headings
from vsim.analysis.overview import overview
from vsim.analysis.summary import tuning
from vsim.analysis.tables import HOURS, MEGABYTES, Heading, Marks, text_table
from vsim.data import digits, partition
from vsim.figures.looks import COLOURS, looks_of
from vsim.history.curves import X_AXES, bands
from vsim.history.history import COLUMNS
from vsim.models import MLP
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, Strategy


@pytest.fixture(scope="module")
def comparison() -> vsim.Comparison:
    return three_strategies()


def by_hand(**runs: list[Any]) -> vsim.Comparison:
    """name → for each seed the losses at steps 0, 5, 10, …, or the step at which it diverged. 1 kB a step."""
    return made(
        **{
            name: [
                run([2.0 * 9 ** (5 * i) for i in range(3)], 5, seed=seed, payload=1e3, diverged=one)
                if isinstance(one, int)
                else run(one, 5, seed=seed, payload=1e3)
                for seed, one in enumerate(own)
            ]
            for name, own in runs.items()
        }
    )


def rows_of(runs: vsim.Comparison, *given: Any, **options: Any) -> dict[str, dict[str, Any]]:
    return {row["strategy"]: row for row in runs.rows(*given, **options).to_dict("records")}


# Tables and files -----------------------------------------------------------------------------------------------------


def test_rows_by_hand(comparison: vsim.Comparison) -> None:
    rows = rows_of(comparison)
    # 64·16 + 16 + 16·10 + 10 = 1210 parameters of 4 bytes. AllReduce: all of them at each of 20 steps; FedAvg: after
    # steps 5, 10, 15, 20. A ring of 3 sends 2·2/3 of the payload.
    sent = {name: [row[f"{way} MB/node"] * 1e6 for way in ("payload", "wire")] for name, row in rows.items()}
    assert sent["AllReduce"] == pytest.approx([20 * 4840, 20 * 4840 * 4 / 3])
    assert sent["FedAvg"] == pytest.approx([4 * 4840, 4 * 4840 * 4 / 3]) and sent["alone"] == [0, 0]
    less = [row["fewer bytes than AllReduce"] for row in rows.values()]
    assert less == [pytest.approx(1), pytest.approx(5), pytest.approx(math.nan, nan_ok=True)]
    for name, one in comparison.items():
        for column, title in (("global_loss", "loss"), ("global_accuracy", ""), ("validation_seconds", "seconds")):
            shown = f"validation {title}" if title else "accuracy"
            assert rows[name][shown] == one.history[column][-1] > 0
        assert rows[name]["perplexity"] == pytest.approx(math.exp(one.history["global_loss"][-1]))


def test_the_notebook_view_has_table_and_figure(comparison: vsim.Comparison) -> None:
    text, html = comparison.table(), comparison._repr_html_()
    assert all(name in text and name in html for name in comparison) and text in repr(comparison)
    assert "5.0×" in text and "–" in text and "<table>" in html
    encoded = re.search(r"base64,([^\"]+)\"", html)
    assert encoded is not None and base64.b64decode(encoded.group(1)).startswith(b"\x89PNG")
    assert 'alt="loss against step and bytes of a&quot;&lt;b"' in by_hand(**{'a"<b': [[2, 1]]})._repr_html_()


def test_to_pandas_and_to_csv_agree(comparison: vsim.Comparison, tmp_path: Path) -> None:
    frame = comparison.to_pandas()
    assert list(frame.columns) == ["strategy", "seed", *COLUMNS, "MB per accuracy point"]
    assert set(frame["seed"]) == {42} and len(frame) == 3 * (STEPS + 1)
    comparison.to_csv(tmp_path / "c.csv")
    with open(tmp_path / "c.csv", newline="") as file:
        lines = list(csv.DictReader(file))
    assert [line["strategy"] for line in lines] == list(frame["strategy"])
    for column in ("step", "train_loss", "payload_bytes", "global_loss"):
        written = np.array([float(line[column] or "nan") for line in lines])
        assert np.array_equal(written, frame[column].to_numpy(dtype=float), equal_nan=True)


def test_a_name_with_a_bar_is_one_cell_of_markdown() -> None:
    runs = by_hand(**{"a|b": [[2, 1]], "c\nd": [[2, 1.5]]})
    for format in ("github", "pipe"):
        for table in (runs.table(format, columns=["validation loss"]), runs.winners(1.2, compute=1.0).table(format)):
            widths = {line.replace("\\|", "").count("|") for line in table.splitlines() if "|" in line}
            assert "a\\|b" in table and len(widths) == 1
    assert "a|b" in runs.table() and "a\\|b" not in runs.table()


def test_a_run_that_diverged_has_no_result() -> None:
    runs = by_hand(good=[[2.0, 1.5, 1.0]], bad=[8], at_once=[2])
    rows = rows_of(runs)
    assert math.isnan(rows["bad"]["validation loss"]) and math.isnan(rows["at_once"]["perplexity"])
    table = {line.split()[0]: line for line in runs.table().splitlines()[2:]}
    assert "diverged at step 8" in table["bad"] and "diverged at step 2" in table["at_once"]
    assert "2.0000" not in table["at_once"] and "1.0000" in table["good"]
    figure = runs.figure()
    assert texts(figure.legends[0]) == ["good", "bad, diverged at step 8", "at_once, diverged at step 2"]
    for ax, unit in zip(figure.axes, (1, 1e-3), strict=True):
        crosses = [line for line in ax.get_lines() if line.get_marker() == "x"]
        assert [line.get_xdata()[0] for line in crosses] == [7 * unit, 1 * unit]  # the last steps that were done
        assert ax.get_ylim()[1] < 2.2  # though the loss of one went to 2 · 9⁵
    # A seed that diverged does not end the curve of the others.
    (line, *_) = by_hand(x=[[2.0, 1.5, 1.0], 3]).plot().get_lines()
    assert list(line.get_ydata()) == [2.0, 1.5, 1.0]


def test_a_table_of_latex_is_whole() -> None:
    rows: list[dict[str, Any]] = [
        {"name": "a_b", "loss": 1.0, "loss std": 0.1, "hours": 12.0, "wire MB": 5e5},
        {"name": "c", "loss": 2.0, "hours": 0.0123, "wire MB": 2.5e6},
    ]
    own = [*headings("hours"), Heading("wire {unit}", MEGABYTES)]
    text = text_table(rows, "latex_booktabs", ["name"], notes=["5 % † of a_b"], caption="A & B", headings=own)
    note = r"{\footnotesize 5 \% $^{\dagger}$ of a\_b\par}"
    for part in (r"\caption{A \& B}", note, r"2.00\phantom{ ± 0.10}", "wire TB", "2.50", "720.00", "0.74"):
        assert part in text
    assert r"\begin{table}" not in text_table(rows, "latex_longtable", ["name"], caption="A")
    runs = by_hand(good=[[2.0, 1.5, 1.0], [2.0, 1.0, 0.5]], late=[[2.0, 2.0, 1.5], [2.0, 1.9, 1.0]], bad=[8])
    text = runs.table("latex_booktabs", columns=["wire MB/node", "validation loss"], digits=2)
    lines = text.splitlines()
    assert lines[0] == r"% needs \usepackage{booktabs}" and lines[1] == r"\begin{table}" and r"\toprule" in text
    assert lines[-1] == r"\end{table}"
    assert lines[3].startswith(r"\caption{") and lines[4].startswith(r"\label{") and lines[5] == r"\begin{tabular}{lrr}"
    header = [cell.strip() for cell in lines[7].rstrip("\\").split("&")]
    assert header == ["strategy", "wire kB/node", "validation loss"]
    assert "0.75 ± 0.35" in text and "diverged at step 8" in text
    assert "0.8 ± 0.4" in runs.table(digits={"validation loss": 1})
    assert "validation loss" not in runs.table(columns=["wire MB/node"])


def test_mistakes_are_named() -> None:
    runs = by_hand(good=[[2.0, 1.5]])
    table: Any = runs.table
    check_refusals(
        [
            (lambda: table(columns=["loss"]), ValueError, ["columns", "'validation loss'", "got 'loss'"]),
            (lambda: table(digits={"lost": 1}), ValueError, ["digits", "'validation loss'", "got 'lost'"]),
            (lambda: table(stays=True), TypeError, ["stays", "loss"]),
            (lambda: runs.plot("tokens"), ValueError, ["x='tokens'", "token ids"]),
            (lambda: runs.plot("round"), ValueError, ["x='round'", "participation"]),
            (lambda: runs.plot(y="loss"), KeyError, ["'loss'", "step"]),
            (lambda: runs.plot(y="divergence"), ValueError, ["y='divergence'", "correlation_interval=", "train_loss"]),
            (lambda: runs["good"].history.plot(y="correlation"), ValueError, ["correlation_interval="]),
            (lambda: runs.plot(y="test_accuracy"), ValueError, ["y='test_accuracy'", "test_dataset="]),
            (lambda: runs.plot(y="global_accuracy"), ValueError, ["y='global_accuracy'", "accuracy="]),
            (lambda: runs.plot(y="node_loss_max"), ValueError, ["y='node_loss_max'", "measured are step"]),
            (lambda: runs["bad"], KeyError, ["'bad'", "good"]),
            (lambda: runs.steps_to(1.0, "round"), ValueError, ["of='round'", "participation"]),
        ]
    )


def test_steps_are_shown_on_demand_where_all_are_equal() -> None:
    runs = by_hand(one=[[2.0, 1.5, 1.0]], other=[[2.0, 1.0, 1.2]])
    assert "steps" not in runs.table() and [row["steps"] for row in runs.rows().to_dict("records")] == [10, 10]
    assert runs.table(columns=["steps"]).splitlines()[0].split() == ["strategy", "steps"]


def test_names_with_commas_are_quoted_where_names_are_listed() -> None:
    names: dict[str, Any] = {"A, H = 5": [[2.0, 1.5], 3], "A, H = 2": [3, [2.0, 1.0]], "B": [[2.0, 1.0], [2.0, 1.1]]}
    runs = by_hand(**names)
    assert 'cannot be the best: "A, H = 5" (1 of 2 runs), "A, H = 2" (1 of 2 runs)' in runs.table()
    runs.tuned["B"] = [None] * 3
    assert tuning(runs) == ['tuned: B (3 settings); not tuned: "A, H = 5", "A, H = 2"']
    assert tuning(runs[["A, H = 5", "B"]]) == ["tuned: B (3 settings); not tuned: A, H = 5"]  # which stands alone


def test_strategies_of_a_file_train_again(tmp_path: Path) -> None:
    given = {"DiLoCo": DiLoCoStrategy(H=2, outer_lr=0.4, lr=1e-2), "FedAvg": FedAvgStrategy(H=3, average="median")}
    first = compared(given, max_steps=4)
    assert first.strategies == given
    first.to_json(tmp_path / "comparison.json")
    read = vsim.Comparison.from_json(tmp_path / "comparison.json")
    again = compared(read.strategies, max_steps=4)
    for name in given:
        np.testing.assert_array_equal(again[name].history["train_loss"], first[name].history["train_loss"])

    class Mine(FedAvgStrategy):
        """A strategy that a file does not hold."""

    compared({**given, "mine, own": Mine(H=2)}, max_steps=1).to_json(tmp_path / "own.json")
    own = vsim.Comparison.from_json(tmp_path / "own.json")
    with pytest.raises(ValueError, match="strategy of mine, own, which is not made of vsim"):
        _ = own.strategies
    assert list(own[["DiLoCo"]].strategies) == ["DiLoCo"]


# Several seeds --------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def repeated() -> vsim.Comparison:
    strategies: dict[str, Strategy] = {"AllReduce": SimpleReduceStrategy(lr=1e-2), "FedAvg": FedAvgStrategy(H=2)}
    return compared(strategies, model=lambda seed: MLP(hidden=(8,), seed=seed), seeds=[3, 1], val_interval=1)


def test_several_seeds_by_hand(repeated: vsim.Comparison) -> None:
    assert [one.seed for one in repeated.runs("FedAvg")] == [3, 1] and repeated["FedAvg"].seed == 3
    row = rows_of(repeated)["FedAvg"]
    a, b = (history.last("global_loss") for history in repeated.histories["FedAvg"])
    assert a != b and row["validation loss"] == pytest.approx((a + b) / 2)
    assert row["validation loss std"] == pytest.approx(abs(a - b) / math.sqrt(2))  # of two, with n − 1
    assert "payload MB/node std" not in row  # alike for every seed
    assert f"{row['validation loss']:.4f} ± {row['validation loss std']:.4f}" in repeated.table()
    assert list(repeated.to_pandas()["seed"].unique()) == [3, 1] and len(repeated.to_pandas()) == 2 * 2 * 6


def test_a_table_fits_a_page(repeated: vsim.Comparison) -> None:
    header, rule, *lines, unformed, note = repeated.table().splitlines()
    assert max(map(len, (header, rule, *lines, unformed, note))) <= 110 and "±" in lines[0]
    assert unformed.startswith("FedAvg: loss of the averaged model")  # of five steps, H = 2
    assert header.startswith("strategy ") and [line.split()[0] for line in lines] == list(repeated)
    assert note.startswith("† not significantly different from the best, ") and sum("†" in line for line in lines) == 1
    asked = ["payload MB/node", "validation seconds", "perplexity"]
    assert not any(name.split()[0] + " " in header.replace("validation loss", "") for name in asked)
    assert all(name in repeated.table(columns=asked) for name in ("payload kB/node", *asked[1:]))


def test_numbers_of_a_column_have_one_unit() -> None:
    rows: list[dict[str, Any]] = [
        {"strategy": "a", "wire MB/node": 225.6e6, "hours": 100.0, "hours to 2": 0.5, "dollars": 112000.0, "loss": 2.5},
        {"strategy": "b", "wire MB/node": 3.9e6, "hours": 7.25, "hours to 2": "never", "dollars": 7.5, "loss": 1.2e30},
        {"strategy": "c", "wire MB/node": 12e3, "hours": math.nan, "hours to 2": 0.01, "dollars": 0.0, "loss": 2e5},
    ]
    own = [*headings("wire MB/node", "hours", "dollars"), Heading("{unit} to 2", HOURS, unit_of="hours")]
    shown = [re.split(r"  +", line) for line in text_table(rows, "simple", ["strategy"], headings=own).splitlines()]
    assert shown[0] == ["strategy", "wire TB/node", "minutes", "minutes to 2", "dollars", "loss"]
    assert shown[2] == ["a", "225.600", "6000.00", "30.00", "112000", "2.50"]
    assert shown[3] == ["b", "3.900", "435.00", "never", "7.50", "1.2e+30"]
    assert shown[4] == ["c", "0.012", "–", "0.60", "0.00", "200000"]
    columns = ["wire MB/node", "hours to 2"]
    heading, _, first, *_ = text_table(rows[2:], "simple", ["strategy"], columns, headings=own).splitlines()
    assert heading.split("  ")[1:] == ["wire GB/node", "minutes to 2"] and first.split()[1:] == ["12.00", "0.60"]


def test_a_table_fits_a_terminal() -> None:
    names = ["accuracy", "wire MB/node", "seconds to simulate", "hours", "time used"]
    rows: list[dict[str, Any]] = [{"strategy": "DiLoCo", "loss": 1.0, **dict.fromkeys(names, 0.5)}]
    notes = ["a note of many words that is much longer than the table may be"]
    marks = Marks("loss", {0}, set(), "")

    def lines(width: int | None) -> list[str]:
        own = headings("accuracy", "wire MB/node", "seconds to simulate", "hours")
        text = text_table(rows, "simple", ["strategy"], marks=marks, notes=notes, width=width, headings=own)
        return text.splitlines()

    whole = lines(None)
    assert whole == lines(max(map(len, whole))) and len(whole) == 4
    for width in range(20, 90):
        *_, rule, values = (found := lines(width))[: 2 + next(i for i, line in enumerate(found) if line[:2] == "--")]
        assert max(map(len, found)) <= width and values.split()[:2] == ["DiLoCo", "1.00"]
        text = " ".join(found)
        left_out = text.partition(f"not shown in {width} characters: ")[2]
        number = len([one for one in left_out.split(", ") if one])
        assert len(rule.split()) == 7 - number
        assert left_out == "" if not number else left_out.endswith("seconds to simulate")
        assert number < 2 or left_out.endswith("time used, seconds to simulate")


def test_bands_are_mean_and_deviation(repeated: vsim.Comparison) -> None:
    ax = bands(repeated.histories, "payload")
    line, runs = ax.get_lines()[0], repeated.histories["AllReduce"]
    losses = np.stack([history["global_loss"] for history in runs])[:, 1:]  # at step 0 nothing was sent
    np.testing.assert_allclose(line.get_ydata(), losses.mean(0))
    np.testing.assert_allclose(line.get_xdata(), runs[0]["payload_bytes"][1:] / 1e6)
    corners = ax.collections[0].get_paths()[0].vertices[:, 1]
    mean, deviation = losses.mean(0), losses.std(0, ddof=1)
    assert (corners.min(), corners.max()) == pytest.approx(((mean - deviation).min(), (mean + deviation).max()))
    long, short = repeated.histories["FedAvg"][0], run([1.0, 1.0, 1.0]).history
    (line,) = bands({"x": [long, short]}).get_lines()
    assert list(line.get_xdata()) == [0, 1, 2]  # as far as all of them are


def test_json_gives_everything_back(repeated: vsim.Comparison, tmp_path: Path) -> None:
    repeated.to_json(tmp_path / "c.json")
    again = vsim.Comparison.from_json(tmp_path / "c.json")
    assert again.rows().to_dict("records") == repeated.rows().to_dict("records") and repr(again) == repr(repeated)
    for name in repeated:
        for ours, theirs in zip(again.runs(name), repeated.runs(name), strict=True):
            assert ours.seed == theirs.seed and ours.history.as_plain() == theirs.history.as_plain()
    again.runs("FedAvg")[0].failure = "non-finite loss"  # left out of the mean, and noted
    rows = rows_of(again)
    assert rows["FedAvg"]["validation loss"] == again.runs("FedAvg")[1].history.last("global_loss")
    assert rows["FedAvg"]["note"] == "seed 3: non-finite loss" and rows["AllReduce"]["note"] == ""
    repeated["FedAvg"].history.to_json(tmp_path / "h.json")
    with refused(ValueError, "h.json", "Comparison.to_json", "'allreduce_bytes'"):
        vsim.Comparison.from_json(tmp_path / "h.json")


def test_best_and_steps_to_by_hand() -> None:
    runs = by_hand(a=[[2, 1, 0.8], [2, 0.9, 0.6]], b=[[2, 0.5, 0.75], [2, 1.5, 0.5]], c=[[2, 0.1, 0.1], 3])
    assert runs.best() == "b"  # 0.625 on average, a 0.7; of c a seed diverged
    # The first step at which a loss that low was measured, every five steps, though it was higher later.
    assert runs.steps_to(0.8) == {"a": [10, 10], "b": [5, 10], "c": [5, pytest.approx(math.nan, nan_ok=True)]}
    assert all(math.isnan(step) for steps in runs.steps_to(0.05).values() for step in steps)
    interrupted = by_hand(a=[[2, 1]], b=[[2, 1.5]])
    for name in interrupted:
        interrupted[name].failure = "interrupted after step 5"
    assert interrupted.best() == "a"
    with refused(ValueError, "no run got to its end", "c: seed 1: non-finite loss at step 3"):
        by_hand(c=[[2, 0.1], 3]).best()
    with pytest.raises(ValueError, match=r"no run got to its end$"):
        vsim.Comparison(1).best()


def test_what_a_loss_takes() -> None:
    runs = by_hand(
        good=[[2.0, 1.5, 1.0], [2.0, 1.0, 0.5]], late=[[2.0, 2.0, 1.5], [2.0, 1.9, 1.0]], bad=[8], no=[[2.0, 2.0]]
    )
    assert runs.steps_to(1.0, of="wire_bytes")["good"] == [1e4, 5e3]
    good, *others = runs.rows(loss=1.0).to_dict("records")
    assert good["steps to 1"] == 7.5 and good["steps to 1 std"] == pytest.approx(12.5**0.5)
    assert good["wire MB to 1"] == pytest.approx(7.5e-3)
    assert all(math.isnan(row["steps to 1"]) for row in others)  # of late one seed does
    table = {line.split()[0]: line for line in runs.table(loss=1.0).splitlines()[2:]}
    assert "8 ± 4" in table["good"] and table["late"].count("1 of 2 runs") == 2 and table["no"].count("never") == 2


# Figures --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("x", [x for x in X_AXES if x not in ("tokens", "round")])  # images have none
def test_plot_draws_the_columns(comparison: vsim.Comparison, x: str) -> None:
    ax = comparison.plot(x=x)
    unit, is_bytes = X_AXES[x].unit, X_AXES[x].is_bytes
    lines = {line.get_label(): line for line in ax.get_lines() if line.get_label() != "_"}
    assert set(lines) == set(comparison) and ax.get_xscale() == ("log" if is_bytes else "linear")
    if is_bytes:  # who sends nothing has no place on a logarithmic axis
        assert ax.get_title("right") == "alone sends nothing (horizontal line)"
        assert set(lines["alone"].get_ydata()) == {comparison["alone"].history.last("global_loss")}
    xs, ys = comparison["FedAvg"].history.measured(f"{x}_bytes" if is_bytes else x, "global_loss")
    shown = xs > 0 if is_bytes else xs >= 0
    assert np.array_equal(lines["FedAvg"].get_xdata(), xs[shown] / unit)
    assert np.array_equal(lines["FedAvg"].get_ydata(), ys[shown])
    # Only the model of `alone` is not the mean of the replicas.
    means = [line.get_ydata().tolist() for line in ax.get_lines() if line.get_label() == "_"]
    assert means == ([] if is_bytes else [comparison["alone"].history.measured("average_loss")[0].tolist()])


def test_equal_bytes_are_drawn_once() -> None:
    """FedAvg syncs at steps 5, 10, … and is validated at 2, 4, …: against bytes there is no vertical piece."""
    runs = compared({"FedAvg": FedAvgStrategy(H=5), "DiLoCo": DiLoCoStrategy(H=5)}, max_steps=20, val_interval=2)
    steps, losses = runs["FedAvg"].history.measured("step", "global_loss")
    for x in ("wire", "payload"):
        line = next(line for line in runs.plot(x).get_lines() if line.get_label() == "FedAvg")
        assert (np.diff(line.get_xdata()) > 0).all()
        # The last measurement before the next sync, and that of the end.
        assert line.get_ydata().tolist() == [losses[steps == step][0] for step in (8, 14, 18, 20)]
    assert texts(runs.plot().get_legend()) == ["FedAvg", "DiLoCo", "thin: mean replica"]


def test_other_axes_and_columns(comparison: vsim.Comparison) -> None:
    history = History()
    for step in range(3):
        history.append({"step": step, "tokens": 64 * step, "global_loss": 1.0})
    (line,) = bands({"a": history}, "tokens").get_lines()
    assert list(line.get_xdata()) == [0, 64, 128]
    ax = Figure().subplots()
    assert comparison.plot(y="train_loss", ax=ax) is ax and ax.get_ylabel() == "training loss"
    good, bad = (run(losses).history for losses in ([3.0, 2.0, 1.0], [3.0, 50.0, 900.0]))
    assert overview({"good": good, "bad": bad}).axes[0].get_ylim()[1] < 4  # one that diverges flattens no other
    assert overview({"empty": History(), "x": []}).axes[0].get_lines()[0].get_xdata().size == 0
    assert bands({}, ax=overview({}).axes[0]).get_lines() == []


def test_some_of_them_keep_their_looks() -> None:
    runs = by_hand(a=[[2, 1]], b=[[2, 1.2]], c=[[2, 1.4]])
    few = runs[["c", "a"]]
    assert list(few) == ["c", "a"] and few["c"] is runs["c"] and len(runs) == 3
    every, some = ({line.get_label(): line.get_color() for line in own.plot().get_lines()} for own in (runs, few))
    assert some == {name: every[name] for name in ("c", "a")} and len(set(every.values())) == 3
    assert texts(runs.figure(strategies=["c", "a"]).legends[0]) == ["c", "a"]
    assert set(rows_of(few)) == {"a", "c"} and few.best() == "a"
    many = by_hand(**{f"run{letter}": [[2, 1]] for letter in "abcdefghijklmn"})
    assert texts(many[["runc", "rund"]].plot().get_legend()) == ["runc", "rund"]


def test_of_many_runs_the_legend_names_families() -> None:
    runs = by_hand(**{f"DiLoCo H={H}": [[2, 1 / H]] for H in range(1, 21)}, AllReduce=[[2, 0.1]])
    figure = runs.figure()
    assert texts(figure.legends[0]) == ["DiLoCo (20)", "AllReduce"]
    lines = {line.get_label(): line.get_color() for line in figure.axes[0].get_lines()}
    assert len(set(lines.values())) == 21 and lines["AllReduce"] == COLOURS[0] and lines["DiLoCo H=1"] == COLOURS[2]
    lost = by_hand(**{f"DiLoCo H={H}": [3] if H == 1 else [[2, 1 / H]] for H in range(1, 21)})
    assert "diverged" in texts(lost.figure().legends[0])
    assert len({look.colour for look in looks_of(["DiLoCo H=1", "DiLoCo H=2"]).by_name.values()}) == 2
    # Of one family the settings are read from the names.
    names = [f"DiLoCo H={H}, inner_optim=SGD(lr={rate}, momentum=0.9)" for H in (1, 2, 3) for rate in range(5)]
    looks = looks_of(names)
    assert {look.colour for look in looks.by_name.values()} == set(COLOURS[:3])
    assert list(looks.key) == ["H", "inner_optim"]
    assert [text for text, _ in looks.key["inner_optim"]] == [f"SGD(lr={rate}, momentum=0.9)" for rate in range(5)]
    few = looks_of(["AllReduce", "DiLoCo, H = 5", "DiLoCo, H = 50"]).by_name
    assert few["DiLoCo, H = 5"].colour == looks_of(["DiLoCo"]).by_name["DiLoCo"].colour
    assert len({look.dash for look in few.values()}) == len({look.marker for look in few.values()}) == 3


NAMES = ["AllReduce", "DiLoCo", "FedAvg, H = 10", "SPARTA, p = 0.5 %", "SPARTA + DiLoCo", "DeMo", "alone", "mine", "b"]


@given(st.lists(st.sampled_from(NAMES), min_size=1, max_size=8, unique=True), st.randoms(use_true_random=False))
def test_a_colour_belongs_to_a_name(names: list[str], random: Any) -> None:
    looks = looks_of(names).by_name
    assert looks_of(random.sample(names, len(names))).by_name == looks
    assert len({look.colour for look in looks.values()}) == len(names)
    alone = {name: looks_of([name]).by_name[name] for name in names}
    known = [name for name in names if name not in ("mine", "b")]
    assert all(alone[name] == looks[name] for name in known)
    # Another name gives its colour up only for one that has the same.
    colours = [look.colour for look in alone.values()]
    assert all(alone[name].colour == looks[name].colour for name in names if colours.count(alone[name].colour) == 1)
    assert all(look.colour in COLOURS for look in looks.values())


def test_colours_are_distinct_while_there_are_enough() -> None:
    names = [
        "ring",
        "exponential",
        "random pairs",
        "all-reduce",
        "torus",
        "star",
        "line",
        "hypercube",
    ]  # three hash alike
    assert len({looks_of([name]).by_name[name].colour for name in names}) < len(names)
    looks = looks_of(names).by_name
    assert len({look.colour for look in looks.values()}) == len(names) == len(COLOURS)
    more = looks_of([*names, "grid"]).by_name
    assert len({look.colour for look in more.values()}) == len(COLOURS)
    assert len({(look.colour, look.dash) for look in more.values()}) == len(more)
    (first, second), *_ = [(a, b) for a in more for b in more if a < b and more[a].colour == more[b].colour]
    drawn = looks_of([*names, "grid"], [first, second, "star"]).by_name  # of a selection
    assert drawn[first].colour == more[first].colour != drawn[second].colour != drawn["star"].colour


def test_names_that_begin_with_a_strategy_have_its_colour() -> None:
    pairs = {
        "AllReduce, all": "AllReduce",
        "sparta_diloco:H=10,outer_lr=0.4": "SPARTA + DiLoCo",
        "DiLoCo (small)": "DiLoCo",
    }
    looks, alone = looks_of([*pairs, "majority vote"]).by_name, looks_of([*pairs.values(), "mine"]).by_name
    assert {name: looks[name].colour for name in pairs} == {name: alone[own].colour for name, own in pairs.items()}
    two = looks_of(["AllReduce, all", "AllReduce, adapters", "mine"]).by_name  # tints of black
    first, second = (two[f"AllReduce, {of}"] for of in ("all", "adapters"))
    assert first.colour == COLOURS[0] and second.colour == "#535353" and first.dash != second.dash


# Cohorts --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def cohorts() -> vsim.Comparison:
    """Cohorts of 6 out of 60 clients, 8 rounds of 5 steps."""
    train, val = digits()
    return vsim.compare(
        MLP(hidden=(16,), seed=0),  # 1210 parameters, 4840 bytes
        partition(train, 60, "iid", seed=0),
        val,
        strategies={"FedAvg": FedAvgStrategy(H=5, lr=1e-2)},
        participation=vsim.Sample(6, of=60),
        seeds=[0, 1],
        **{"num_nodes": 6, "max_steps": 40, "val_interval": 5, "val_size": 32, "progress": False},
    )


def test_bytes_of_cohorts_are_means_over_all_clients(cohorts: vsim.Comparison) -> None:
    (row,) = cohorts.rows().to_dict("records")
    size, rounds = 4840, 8
    sent = 6 * size * rounds  # the clients of a cohort send their weights to the server
    assert row["wire MB/client"] == pytest.approx(sent / 60 / 1e6)
    assert row["payload MB/client"] == pytest.approx(6 * size * rounds / 60 / 1e6)
    # Every client of a cohort fetches the weights at the start of a round, and the result at its end.
    assert row["server MB"] == pytest.approx(2 * 6 * size * rounds / 1e6)
    busiest = [one.ledger.node_wire_bytes.max() / 1e6 for one in cohorts.runs("FedAvg")]
    assert row["busiest client MB"] == pytest.approx(statistics.fmean(busiest)) and min(busiest) > row["wire MB/client"]
    assert row["fewer bytes than AllReduce"] == pytest.approx(5)
    # None of them is a matter of which clients were drawn.
    assert not {"wire MB/client std", "server MB std", "fewer bytes than AllReduce std"} & row.keys()
    assert "server kB" in cohorts.table() and "busiest" not in cohorts.table()
    first = cohorts["FedAvg"].history
    (target,) = (loss for step, loss in zip(*first.measured("step", "global_loss"), strict=True) if step == 20)
    (own,) = made(size, FedAvg=[cohorts["FedAvg"]]).rows(float(target)).to_dict("records")
    assert own[f"wire MB to {target:g}"] == pytest.approx(sent / 2 / 60 / 1e6)


def test_cohorts_are_priced_with_a_server_and_drawn_against_rounds_and_bytes(cohorts: vsim.Comparison) -> None:
    link = "100 Mbit/s, 20 ms"
    server = vsim.Network("100 Mbit/s", "20 ms", collective="server")
    (row,), (ring,), (own,) = (
        cohorts.rows(network=one, compute=0.1).to_dict("records") for one in (link, f"{link}, ring", server)
    )
    assert row["hours"] == own["hours"] != ring["hours"]
    (line, *_) = cohorts.plot(x="round").get_lines()
    np.testing.assert_array_equal(np.asarray(line.get_xdata()), range(9))
    for way in ("wire", "payload"):
        axes = cohorts.plot(x=way)
        (line, *_) = axes.get_lines()
        # As much in each of 8 rounds.
        assert np.asarray(line.get_xdata()) == pytest.approx(row[f"{way} MB/client"] * np.arange(1, 9) / 8)
        assert axes.get_xlabel().endswith("per client (MB)")


# compare --------------------------------------------------------------------------------------------------------------


def test_without_validation_the_training_loss_is_shown() -> None:
    runs = vsim.compare(
        MLP(seed=0), digits()[0], strategies={"one": SimpleReduceStrategy()}, num_nodes=2, max_steps=20, progress=False
    )
    (row,) = runs.rows().to_dict("records")
    assert row["training loss"] == pytest.approx(runs["one"].history["train_loss"][-2:].mean())
    assert "validation loss" not in row and "accuracy" not in row
    assert runs.figure().axes[0].get_ylabel() == "training loss"


def test_prepare_raises_what_fit_would_and_trains_nothing() -> None:
    trainer = vsim.Trainer(MLP(seed=0), digits()[0])
    prepare: Any = functools.partial(trainer.prepare, strategy=FedAvgStrategy(island_size=2), num_nodes=2)
    prepare()
    assert len(trainer.history) == 0 and len(trainer.ledger) == 0
    process = {"backend": "process", "progress": False}
    check_refusals(
        [
            (lambda: prepare(strategy=FedAvgStrategy(island_size=3)), ValueError, ["island_size", 3]),
            (lambda: prepare(num_node=2), TypeError, ["did you mean 'num_nodes'"]),
            (lambda: prepare(**process), ValueError, ["only the simulator"]),
            (lambda: prepare(**process, executor="loop"), ValueError, ["executor='loop' has no effect"]),
        ]
    )


def test_a_run_that_fails_later_is_kept_and_loses_no_other() -> None:
    def fail(run: Any) -> None:
        if run.done == 4 and run.label == "bad":
            raise RuntimeError("out of ideas\nat length")

    strategies: dict[str, Strategy] = {"good": Strategy(), "bad": Strategy(), "also good": SimpleReduceStrategy()}
    with pytest.warns(UserWarning, match="bad: out of ideas"):
        runs = compared(strategies, callbacks=[fail])
    bad = runs["bad"]
    assert bad.failure == "RuntimeError: out of ideas" and isinstance(bad.error, RuntimeError)
    assert bad.model is None and bad.failure in runs.table()
    assert [len(runs[name].history) for name in runs if runs[name].model is not None] == [6, 6]


@pytest.mark.parametrize(
    ("options", "kind", "words"),
    [
        ({"seeds": [1, 1]}, ValueError, ["seeds", "different", "[1, 1]"]),
        ({"seeds": [1], "seed": 2}, TypeError, ["seed and seeds"]),
        ({"model": MLP}, TypeError, ["model", "f(seed)", "<class"]),
        ({"model": lambda seed: seed}, TypeError, ["model(42)", "torch.nn.Module", "int"]),
        ({"progress": "plot"}, ValueError, ["progress='plot'", "notebook"]),
        ({"max_step": 3}, TypeError, ["'max_step'", "did you mean 'max_steps'"]),
        ({"strategies": {"a": "diloco"}}, TypeError, ["Strategy objects", "a: 'diloco'"]),
        ({"strategies": {1: Strategy(), "b": Strategy()}}, TypeError, ["names of strategies", "strings", "1"]),
        (
            {"strategies": {"a": Strategy(), "bad": FedAvgStrategy(island_size=3)}},
            ValueError,
            ["bad", "island_size", "3"],
        ),
    ],
)
def test_mistakes_are_named_before_the_first_run(
    options: dict[str, Any], kind: type[Exception], words: list[str]
) -> None:
    with refused(kind, *words):
        compared(**{"strategies": {"a": Strategy()}, "train_loss_hook": never, **options})
