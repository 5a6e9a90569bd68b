"""Progress that is drawn again and again while runs train: a figure in a notebook's cell, a table in a terminal."""

from __future__ import annotations

import base64
import io
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from comparisons_by_hand import run, texts
from matplotlib.image import imread
from rich.console import Console

from vsim import History
from vsim.history import live, live_table
from vsim.history.live import LiveRace
from vsim.history.live_table import LiveTable

CELL = """
import time
from vsim import Trainer
from vsim.data import digits
from vsim.models import MLP
from vsim.strategy import DiLoCoStrategy

train, val = digits()
trainer = Trainer(MLP(hidden=(16,), seed=0), train, val)
trainer.fit(
    strategy=DiLoCoStrategy(H=5), num_nodes=2, max_steps=60, val_interval=10, progress="plot",
    train_loss_hook=lambda step, loss: time.sleep(0.05),
);
"""


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::PendingDeprecationWarning")
def test_in_a_kernel_one_output_is_updated_in_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    nbformat = pytest.importorskip("nbformat")
    nbclient = pytest.importorskip("nbclient")
    monkeypatch.setenv("JUPYTER_PREFER_ENV_PATH", "1")
    monkeypatch.setenv("IPYTHONDIR", str(tmp_path))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # two threads wait for each other where tests share the cores
    monkeypatch.setenv("PYTHONPATH", ":".join(filter(None, sys.path)))
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    heard: list[str] = []

    class Client(nbclient.NotebookClient):
        def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
            heard.append(msg["msg_type"])
            return super().process_message(msg, cell, cell_index)

    Client(notebook, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}).execute()

    outputs = [output for output in notebook.cells[0].outputs if output.output_type != "stream"]
    assert [output.output_type for output in outputs] == ["display_data"]
    assert base64.b64decode(outputs[0].data["image/png"]).startswith(b"\x89PNG")
    assert heard.count("display_data") == 1
    assert 2 <= heard.count("update_display_data") <= 10  # three seconds, at most two a second, and the last


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The pictures of a notebook in which everything is displayed by one handle."""
    import IPython.display

    pictures: list[bytes] = []
    handle = SimpleNamespace(update=lambda picture: pictures.append(picture.data))

    def display(picture: Any, display_id: bool) -> SimpleNamespace:
        assert display_id
        handle.update(picture)
        return handle

    monkeypatch.setattr(IPython.display, "display", display)
    monkeypatch.setattr(live, "_in_notebook", lambda: True)
    return pictures


def grown(history: History, steps: int) -> History:
    for step in range(len(history), len(history) + steps):
        row = {"step": step, "train_loss": 2 / (1 + step), "wire_bytes": 1e5 * step}
        history.append({**row, "global_loss": 2.1 / (1 + step)} if step % 10 == 0 else row)
    return history


@pytest.mark.parametrize("seconds", [0.1, 0.0])
def test_drawing_costs_a_small_share_of_the_time(
    seconds: float, shown: list[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In twenty seconds of training; and however fast, not more than twice a second."""
    now = [0.0]
    monkeypatch.setattr(live, "time", SimpleNamespace(perf_counter=lambda: now[0]))
    plot = LiveRace({"": [grown(History(), 1)]})

    def draw() -> bytes:
        now[0] += seconds
        return b""

    monkeypatch.setattr(plot, "_png", draw)
    for _ in range(2000):
        now[0] += 0.01
        plot.update(100)
    assert 1 < len(shown) <= 2 * now[0] + 1 and seconds * len(shown) <= 0.04 * now[0] + 0.1


def test_the_last_picture_has_everything(shown: list[bytes]) -> None:
    history = grown(History(), 1)
    plot = LiveRace({"DiLoCo × 4": [history]}, "DiLoCo × 4")
    plot.update(1000)
    grown(history, 1000)
    plot.update(1000)  # too early
    assert len(shown) == 1
    plot.close()
    training, validation = (plot._lines["DiLoCo × 4", "wire", y] for y in ("train_loss", "global_loss"))
    assert len(training.get_xdata()) == 400 and len(validation.get_xdata()) == 101
    assert validation.get_xdata()[-1] == pytest.approx(100)  # MB
    first, last = (imread(io.BytesIO(picture)) for picture in shown)
    assert first.shape == last.shape and not np.array_equal(first, last)


def losses(*values: float) -> History:
    """1e5 bytes a step, between two nodes."""
    return run(list(values), payload=1e5).history


def test_a_race_draws_all_and_names_those_in_front(shown: list[bytes]) -> None:
    runs = {f"run {i}": [losses(2, 1.5, 1 + i / 100)] for i in range(60)}
    race = LiveRace(runs, "sweep")
    race.update(10)
    assert len(race._lines) == 60 * 2 * 2  # training and validation, against steps and bytes
    assert texts(race.figure.legends[0]) == [f"run {i}: {1 + i / 100:#.4g}" for i in range(8)]
    assert race.figure.get_suptitle() == "sweep: all 60 at step 2 of 10; the 8 in front are named below"
    for name, (history,) in runs.items():
        if name != "run 0":
            loss = 0.5 if name == "run 59" else 0.9
            history.append({"step": 3, "train_loss": loss, "global_loss": loss, "wire_bytes": 3e5})
    race.close()
    named = texts(race.figure.legends[0])
    assert named[0] == "run 59: 0.5000" and not any("run 0" in name for name in named)
    assert race.figure.get_suptitle().startswith("sweep: 59 of 60 at step 3 of 10")
    boxes = [race.figure.legends[0].get_window_extent(), *(ax.get_tightbbox() for ax in race._axes)]
    assert not any(boxes[0].overlaps(box) for box in boxes[1:])


def test_a_race_draws_the_mean_and_who_stopped_does_not_hold_it_up(shown: list[bytes]) -> None:
    runs: dict[str, list[History]] = {"a": [losses(3, 2, 1), losses(3, 4, 2)]}
    race = LiveRace(runs)
    race.update(4)
    assert list(race._lines["a", "step", "global_loss"].get_ydata()) == [3, 3, 1.5]
    runs["b"] = [losses(3, 1e6), losses(3, 2.5, 2)]  # joins later; its first seed diverged
    race.close()
    line = race._lines["b", "wire", "global_loss"]
    assert list(line.get_ydata()) == [3, 2.5, 2] and list(line.get_xdata()) == pytest.approx([0, 0.1, 0.2])
    runs["c"] = [losses(3, 1e6)]
    race.close()
    assert race._axes[0].get_ylim()[1] < 4  # the others are not pressed flat
    assert "c: 1.000e+06, step 1" in texts(race.figure.legends[0])


def test_a_run_that_never_began_shows_nothing(shown: list[bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    LiveRace({"": [History()]}).close()
    assert shown == []
    monkeypatch.setattr(live, "_in_notebook", lambda: False)
    with pytest.raises(ValueError, match="progress='plot' draws in a notebook, and this is not one"):
        LiveRace({"": [History()]})


def table_in(file: io.StringIO, title: str = "a race", terminal: bool = True) -> LiveTable:
    return LiveTable(title, Console(file=file, force_terminal=terminal, width=100))


def test_a_table_follows_the_runs_in_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(live_table, "time", SimpleNamespace(perf_counter=lambda: 1.0))  # a loaded machine may take long
    terminal = io.StringIO()
    table = table_in(terminal)
    histories = {"a[b]": [losses(3.0, 2.0)], "lost": [losses(3.0, math.nan)], "slow": [losses(2.5)]}
    steps = {"a[b]": 8, "lost": 8, "slow": 12}
    table.update(histories, steps, last=True)
    histories["a[b]"][0].append({"step": 2, "train_loss": 1.5, "global_loss": 1.25, "wire_bytes": 2e6}, [1.5, 1.5])
    table.update(histories, steps)  # too early
    assert "1.2500" not in terminal.getvalue()
    table.update(histories, steps, last=True)
    table.close()
    last = terminal.getvalue()[terminal.getvalue().rindex("a race") :]
    assert "2 / 8" in last and "0 / 12" in last and "1.2500" in last and "2.00" in last and "nan" not in last
    front = next(line for line in last.splitlines() if "a[b]" in line)
    assert "\x1b[1;32m" in front and "\x1b[1;32m" not in next(line for line in last.splitlines() if "slow" in line)


def test_a_table_names_the_runs_that_have_not_begun_and_fills_no_more_than_a_screen() -> None:
    terminal = io.StringIO()
    table = table_in(terminal)
    table.update({"first": [losses(3.0, 2.0)], "second": []}, {"first": 8, "second": 9}, caption="about 7 s left")
    table.close()
    assert "0 / 9" in terminal.getvalue() and "about 7 s left" in terminal.getvalue()
    runs = {f"run{i}.": [losses(3.0, 1.0 + i)] for i in range(40)}
    for is_terminal in (True, False):  # none is written into a file
        file = io.StringIO()
        table = table_in(file, "", is_terminal)
        table.update(runs, dict.fromkeys(runs, 8), last=True)
        table.close()
        shown = ["run19." in file.getvalue(), "the 20 in front, of 40" in file.getvalue(), file.getvalue() != ""]
        assert shown == [is_terminal] * 3 and "run20." not in file.getvalue()
