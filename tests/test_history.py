"""The record of a run: columns with one value a step, and NaN where nothing was measured."""

from __future__ import annotations

import copy
import csv
import math
import os
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st
from separate import small_mlp, vectors

import vsim
from vsim import History, Trainer
from vsim.records.history import COLUMNS, write_csv
from vsim.strategy import DiLoCoStrategy


@pytest.fixture(scope="module")
def history() -> History:
    """Three nodes, 5 steps, validated at steps 0, 2, 4 and 5, correlated at 0 and 3."""
    trainer = Trainer(small_mlp(), vectors(), vectors(8))
    trainer.fit(
        strategy=DiLoCoStrategy(H=2, lr=0.01),
        num_nodes=3,
        max_steps=5,
        batch_size=4,
        val_interval=2,
        correlation_interval=3,
        progress=False,
    )
    return trainer.history


def measured_at(history: History, column: str) -> list[int]:
    return [int(step) for step in history.measured("step", column)[0]]


def test_what_is_measured_when(history: History) -> None:
    assert len(history) == 6 and history["step"].tolist() == [0, 1, 2, 3, 4, 5]
    assert history.node_losses.shape == (5, 3)
    for column in ("train_loss", "lr"):
        assert measured_at(history, column) == [1, 2, 3, 4, 5]
    for column in ("examples", "payload_bytes", "wire_bytes", "seconds", "validation_seconds"):
        assert measured_at(history, column) == [0, 1, 2, 3, 4, 5]
    for column in ("local_loss", "global_loss", "average_loss", "node_loss_std", "global_accuracy"):
        assert measured_at(history, column) == [0, 2, 4, 5]
    for column in ("divergence", "correlation"):
        assert measured_at(history, column) == [0, 3]
    assert all(history[name].dtype == np.float64 for name in COLUMNS)


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


def test_last_and_unknown(history: History) -> None:
    assert history.last("global_loss") == history["global_loss"][5]
    assert history.last("correlation") == history["correlation"][3]
    assert math.isnan(History().last("train_loss"))
    with pytest.raises(KeyError, match="no column 'loss'; there are step, examples, tokens, train_loss"):
        history["loss"]
    assert [len(part) for part in history.measured("lr", "divergence")] == [1, 1]  # both at step 3 only


def test_repr(history: History) -> None:
    text = repr(history)
    assert text.startswith("History(DiLoCoStrategy: 3 nodes, 5 steps, train loss ")
    assert f"global loss {history.last('global_loss'):.4f}" in text
    assert repr(History()) == "History(run: 1 nodes, 0 steps, train loss nan, global loss nan)"


def test_an_empty_history() -> None:
    empty = History("X", 4)
    assert len(empty) == 0 and empty.node_losses.shape == (0, 4)
    empty.append({"step": 0})
    assert len(empty) == 1 and empty.node_losses.shape == (0, 4)


def test_csv(history: History, tmp_path: Path) -> None:
    path = tmp_path / "run.csv"
    history.to_csv(path)
    with open(path, newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    assert tuple(rows[0]) == COLUMNS and len(rows) == 6
    for name in COLUMNS:
        for row, value in zip(rows, history[name], strict=True):
            assert row[name] == "" if math.isnan(value) else float(row[name]) == value
    assert [row["step"] for row in rows] == ["0", "1", "2", "3", "4", "5"]  # whole numbers without a point
    assert rows[5]["payload_bytes"] == "2344"


@given(st.lists(st.floats(allow_nan=False, allow_infinity=False), min_size=1, max_size=5))
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


def test_files_are_named_by_paths_alone(history: History) -> None:
    reader, writer = os.pipe()
    for act in (History.from_json, vsim.Comparison.from_json, history.to_json, history.to_csv):
        for number in (reader, writer, True, None):
            with pytest.raises(TypeError, match="path must be a path, got"):
                act(number)  # type: ignore[operator]
    os.close(reader), os.close(writer)  # still open


def test_json_gives_every_bit_back(history: History, tmp_path: Path) -> None:
    history = copy.deepcopy(history)
    history.append(
        {"step": 6, "train_loss": math.inf, "global_loss": -math.inf, "lr": 0.1 + 0.2}, [math.nan, 1e300, 0.5]
    )
    history.to_json(tmp_path / "run.json")
    again = History.from_json(tmp_path / "run.json")
    for name in COLUMNS:
        assert np.array_equal(again[name], history[name], equal_nan=True), name
    assert np.array_equal(again.node_losses, history.node_losses, equal_nan=True)
    assert repr(again) == repr(history) and again.executor == history.executor
    text = (tmp_path / "run.json").read_text()
    assert "NaN" not in text and "Infinity" not in text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", r"run.json is not JSON"),
        ("[1]", r"was not written by History.to_json: it lacks 'columns' or 'node_losses'"),
    ],
)
def test_other_files_are_refused(text: str, message: str, tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ValueError, match=message):
        History.from_json(tmp_path / "run.json")


def test_plot(history: History) -> None:
    ax = history.plot()
    assert (ax.get_xlabel(), ax.get_ylabel()) == ("step", "validation loss")
    assert [*ax.lines[0].get_xdata()] == [0, 2, 4, 5]  # type: ignore[misc]
    assert "time" in history.plot("time", network="1 Gbit/s", compute=1).get_xlabel()
    assert history.plot("wire", "train_loss", ax, logy=True) is ax
    with pytest.raises(TypeError, match="network"):
        history.plot("time")
    with pytest.raises(TypeError, match="x='step'"):
        history.plot(compute=1)


def test_pandas(history: History) -> None:
    frame = history.to_pandas()
    assert tuple(frame.columns) == COLUMNS
    assert frame["step"].dtype.kind == frame["examples"].dtype.kind == "i"
    for name in COLUMNS:
        np.testing.assert_array_equal(frame[name].to_numpy(dtype=float), history[name])
