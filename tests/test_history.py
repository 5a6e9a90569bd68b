"""The record of a run: columns with one value a step, and NaN where nothing was measured."""

from __future__ import annotations

import copy
import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cluster import small_mlp, vectors

from vsim import History, Trainer
from vsim.history.formats import write_csv
from vsim.history.history import COLUMNS
from vsim.strategy import DiLoCoStrategy


@pytest.fixture(scope="module")
def history() -> History:
    """Three nodes, 5 steps, validated at steps 0, 2, 4 and 5, correlated at 0 and 3."""
    trainer = Trainer(small_mlp(), vectors(), vectors(8))
    options: dict[str, Any] = {"num_nodes": 3, "max_steps": 5, "batch_size": 4, "progress": False}
    trainer.fit(strategy=DiLoCoStrategy(H=2, lr=0.01), val_interval=2, correlation_interval=3, **options)
    return trainer.history


def test_what_is_measured_when(history: History) -> None:
    assert len(history) == 6 and history.node_losses.shape == (5, 3)
    steps = {
        "train_loss lr": [1, 2, 3, 4, 5],
        "examples payload_bytes wire_bytes seconds validation_seconds": [0, 1, 2, 3, 4, 5],
        "local_loss global_loss average_loss node_loss_std global_accuracy": [0, 2, 4, 5],
        "divergence correlation": [0, 3],
    }
    for columns, expected in steps.items():
        for column in columns.split():
            assert history.measured("step", column)[0].tolist() == expected, column
    assert all(history[name].dtype == np.float64 for name in COLUMNS)
    assert [len(part) for part in history.measured("lr", "divergence")] == [1, 1]  # both at step 3 only


def test_columns_agree_with_each_other(history: History) -> None:
    np.testing.assert_allclose(history["train_loss"][1:], history.node_losses.mean(1))
    # 29 examples make shards of 10: batches of 4, 4 and 2, then the next epoch's.
    assert history["examples"].tolist() == [0, 12, 24, 30, 42, 54]
    assert history["payload_bytes"].tolist() == [0, 0, 1172, 1172, 2344, 2344]  # 293 weights at steps 2 and 4
    assert (np.diff(history["seconds"]) > 0).all() and history["seconds"][0] == 0
    assert history["validation_seconds"][0] > 0
    assert (np.diff(history["validation_seconds"]) > 0).tolist() == [False, True, False, True, True]
    low, mid, high = history.measured("node_loss_min", "local_loss", "node_loss_max")
    assert ((low <= mid) & (mid <= high)).all()
    assert history["divergence"][0] == 0 and history["correlation"][0] == pytest.approx(1)
    assert history["divergence"][3] > 0 and history["correlation"][3] < 1


def test_last_unknown_and_empty(history: History) -> None:
    assert history.last("global_loss") == history["global_loss"][5]
    assert history.last("correlation") == history["correlation"][3]
    with pytest.raises(KeyError, match="no column 'loss'; there are step, examples, tokens, train_loss"):
        history["loss"]
    text = repr(history)
    assert text.startswith("History(DiLoCoStrategy: 3 nodes, 5 steps, train loss ")
    assert f"global loss {history.last('global_loss'):.4f}" in text
    empty = History("X", 4)
    assert repr(empty) == "History(X: 4 nodes, 0 steps, train loss nan, global loss nan)"
    empty.append({"step": 0})
    assert len(empty) == 1 and empty.node_losses.shape == (0, 4)


def test_csv_and_pandas_hold_the_columns(history: History, tmp_path: Path) -> None:
    path, frame = tmp_path / "run.csv", history.to_pandas()
    history.to_csv(path)
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == tuple(frame.columns) == COLUMNS and len(rows) == 6
    assert frame["step"].dtype.kind == frame["examples"].dtype.kind == "i"
    for name in COLUMNS:
        written = [float(row[name] or "nan") for row in rows]
        np.testing.assert_array_equal(written, history[name], name)
        np.testing.assert_array_equal(frame[name].to_numpy(dtype=float), history[name], name)
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4", "5"]  # whole numbers without a point


@settings(max_examples=25)
@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=9))
def test_a_csv_file_holds_every_bit(tmp_path_factory: pytest.TempPathFactory, values: list[float]) -> None:
    path = tmp_path_factory.getbasetemp() / "values.csv"
    write_csv(
        path, pd.DataFrame([["text", 7, *values], ["=1+1", 8, *values]], columns=["-name", *range(len(values) + 1)])
    )
    with open(path, newline="", encoding="utf-8") as file:
        header, first, second = csv.reader(file)
    assert [float(field) for field in first[2:]] == [float(field) for field in second[2:]] == values
    assert (header[0], *first[:2], *second[:2]) == ("'-name", "text", "7", "'=1+1", "8")  # a spreadsheet would compute


def test_whole_numbers_lose_their_point_beside_others(tmp_path: Path) -> None:
    write_csv(tmp_path / "a.csv", pd.DataFrame({"rate": [0.4, 1.0, math.nan], "name": ["a", "-b", "c"]}))
    assert (tmp_path / "a.csv").read_text().split() == ["rate,name", "0.4,a", "1,'-b", ",c"]


def test_json_gives_every_bit_back(history: History, tmp_path: Path) -> None:
    path, history = tmp_path / "run.json", copy.deepcopy(history)
    history.append(
        {"step": 6, "train_loss": math.inf, "global_loss": -math.inf, "lr": 0.1 + 0.2}, [math.nan, 1e300, 0.5]
    )
    history.to_json(path)
    again = History.from_json(path)
    for name in COLUMNS:
        assert np.array_equal(again[name], history[name], equal_nan=True), name
    assert np.array_equal(again.node_losses, history.node_losses, equal_nan=True)
    assert repr(again) == repr(history) and again.executor == history.executor
    assert "NaN" not in path.read_text() and "Infinity" not in path.read_text()
    for text, words in (("{", "run.json is not JSON"), ("[1]", "History.to_json … lacks 'columns' or 'node_losses'")):
        path.write_text(text)
        with refused(ValueError, words):
            History.from_json(path)


def test_plot(history: History) -> None:
    ax = history.plot()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "validation loss")
    assert [*ax.lines[0].get_xdata()] == [0, 2, 4, 5]  # type: ignore[misc]
    assert "time" in history.plot("time", network="1 Gbit/s", compute=1).get_xlabel()
    assert history.plot("wire", "train_loss", ax, logy=True) is ax
    for call, words in ((lambda: history.plot("time"), "network"), (lambda: history.plot(compute=1), "x='step'")):
        with refused(TypeError, words):
            call()
