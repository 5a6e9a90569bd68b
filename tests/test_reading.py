"""Files that are forged, or are no files: every reader says so at once, and names them."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import vsim
from vsim import CSVLogger, Trainer
from vsim.analysis.report.page import report
from vsim.analysis.swept import Sweep
from vsim.data import text_file
from vsim.history.history import History
from vsim.history.loggers import check_run_name
from vsim.models import MLP
from vsim.reading import parse_json
from vsim.saved import read_comparison, read_log
from vsim.strategy import AloneStrategy, FedAvgStrategy
from vsim.training.race_folder import read_whole

STEPS = 3
READERS: dict[str, tuple[str, Callable[[Path], Any]]] = {  # the name of the file, and what reads it
    "History": ("history.json", History.from_json),
    "Comparison": ("comparison.json", vsim.Comparison.from_json),
    "Sweep": ("sweep.json", Sweep.from_json),
    "a comparison": ("comparison.json", read_comparison),
    "an end": ("end.json", read_whole),
    "a log": ("train.csv", lambda path: read_log(path.parent)),
    "a log's validations": ("validation.csv", lambda path: read_log(path.parent)),
    "a checkpoint": ("step-00000003.safetensors", vsim.load_checkpoint),
    "a trace": ("trace.csv", vsim.Trace),
    "a text": ("text.txt", text_file),
}
NO_FILES: dict[str, Callable[[Path], None]] = {
    "a folder": os.mkdir,
    "a pipe": os.mkfifo,
    "a device": lambda path: path.symlink_to("/dev/zero"),
    "larger than the memory": lambda path: sparse(path),
    "nothing": lambda path: None,
    "a loop": lambda path: path.symlink_to(path),
    "not text": lambda path: write(path, b"\xff\x00\n" * 99),
    "deep": lambda path: write(path, b"[" * 10**5 + b"\n"),
}


FINE = [("a log's validations", "nothing"), ("a log's validations", "deep"), ("a log", "deep"), ("a text", "deep")]


def sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 2**42)


def write(path: Path, content: bytes) -> None:
    path.write_bytes(content)


@pytest.mark.parametrize("kind", NO_FILES)
@pytest.mark.parametrize("reader", READERS)
def test_what_is_no_file_is_told_at_once(reader: str, kind: str, tmp_path: Path) -> None:
    name, read = READERS[reader]
    if reader == "a log's validations":
        (tmp_path / "train.csv").write_text("step\n1\n")
    NO_FILES[kind](tmp_path / name)
    if (reader, kind) in FINE:
        read(tmp_path / name)
        return
    with pytest.raises((OSError, ValueError)) as caught:
        read(tmp_path / name)
    assert name in str(caught.value) or str(tmp_path) in str(caught.value)
    if kind in ("a pipe", "a device") and reader != "a text":
        assert f"is {kind}, not a file" in str(caught.value)


# Numbers that count something -----------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with a comparison, whose second run has clients, and a log."""
    folder = tmp_path_factory.mktemp("recorded")
    train, val = vsim.data.digits()
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": STEPS, "progress": False}
    options |= {"participation": vsim.Sample(2, of=5, rounds=2)}
    strategies = {"FedAvg": FedAvgStrategy(H=2, lr=1e-2), "alone": AloneStrategy(lr=1e-2)}
    vsim.compare(MLP(seed=0), train, val, strategies=strategies, **options).to_json(folder / "comparison.json")
    trainer = Trainer(MLP(seed=0), train, val)
    trainer.fit(strategy=AloneStrategy(lr=1e-2), logger=CSVLogger(folder), run_name="log", **options)
    return folder


def put(tree: Any, value: Any, *path: Any) -> None:
    for key in path[:-1]:
        tree = tree[key]
    tree[path[-1]] = value


TOO_MUCH = [10**9 * 10**6, 1e15, -1, "1e999999999", 10**400, True, None]
COUNTS: dict[str, tuple[Any, ...]] = {
    "num_nodes": ("num_nodes",),
    "population": ("population",),
    "steps": ("ledger", "steps"),
    "the last step": ("columns", "step", -1),
    "the step of an event": ("ledger", "events", -1, 0),
    "when it is due": ("ledger", "events", -1, 1),
    "payload": ("ledger", "kinds", 0, 3),
    "a node of a group": ("ledger", "kinds", 0, 4, 0, 0),
}


POSSIBLE = [("payload", 10**15), ("payload", 1e15), ("a node of a group", True)]


@pytest.mark.parametrize("value", TOO_MUCH, ids=lambda value: f"{value!s:.10} {type(value).__name__}")
@pytest.mark.parametrize("count", COUNTS)
def test_counts_are_not_believed(count: str, value: Any, recorded: Path, tmp_path: Path) -> None:
    content = json.loads((recorded / "comparison.json").read_text())
    put(content["runs"][0]["history"], value, *COUNTS[count])
    path = tmp_path / "comparison.json"
    path.write_text(json.dumps(content))
    if (count, value) in POSSIBLE:
        report({"forged": read_comparison(path)}, "1 Gbit/s", 1)
        return
    with pytest.raises(ValueError, match=r"comparison\.json does not hold what"):
        read_comparison(path)


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("train.csv", "\n3,", "\n1000000000000000,", "step=1,000,000,000,000,000 steps"),
        ("train.csv", "\n3,", "\ninf,", "infinity"),
        ("train.csv", "\n3,", "\n-3,", "step"),
        ("train.csv", "\n3,", f"\n{'9' * 200_000},", "field larger"),
        ("config.json", '"num_nodes": 2', '"num_nodes": 1000000000000000', "num_nodes=1,000,000,000,000,000 nodes"),
    ],
)
def test_a_logs_numbers_are_not_believed(
    name: str, old: str, new: str, message: str, recorded: Path, tmp_path: Path
) -> None:
    for file in (recorded / "log").iterdir():
        text = file.read_bytes().decode()
        (tmp_path / file.name).write_bytes(text.replace(old, new, 1 if file.name == name else 0).encode())
    with pytest.raises(ValueError, match=f"{tmp_path.name} does not hold.*{message}"):
        report({"log": read_comparison(tmp_path)})


# Text that UTF-8 cannot encode ----------------------------------------------------------------------------------------

LONE = "a\ud800"


class Measures(AloneStrategy):
    def columns(self) -> dict[str, float]:
        return {LONE: 1.0}


def test_names_that_no_file_holds_are_refused() -> None:
    train, val = vsim.data.digits()
    run: dict[str, Any] = {"num_nodes": 2, "max_steps": 1, "progress": False}
    trainer, alone = Trainer(MLP(seed=0), train, val), AloneStrategy()
    refused: list[Callable[[], Any]] = [
        lambda: check_run_name(LONE),
        lambda: vsim.compare(MLP(seed=0), train, val, strategies={LONE: alone}, **run),
        lambda: trainer.fit(strategy=alone, metrics={LONE: lambda *_: 1.0}, **run),
        lambda: trainer.fit(strategy=Measures(), **run),
    ]
    for call in refused:
        with pytest.raises(ValueError, match=r"UTF-8 .*'a\\ud800'"):
            call()


def test_names_in_files_are_replaced(recorded: Path, tmp_path: Path) -> None:
    path = tmp_path / "comparison.json"
    path.write_text((recorded / "comparison.json").read_text().replace("FedAvg", r"Fed\ud800Avg"))
    comparison = read_comparison(path)
    assert list(comparison) == ["Fed?Avg", "alone"]
    with pytest.raises(ValueError, match=r"UTF-8 .*'a\\ud800'"):
        comparison.renamed({"alone": LONE})
    report({"forged": comparison}).save(tmp_path / "page.html")
    comparison.to_csv(tmp_path / "comparison.csv")
    assert parse_json(r'["\ud83d\ude00", "\\ud800", "\ud800"]') == ["😀", r"\ud800", "?"]
