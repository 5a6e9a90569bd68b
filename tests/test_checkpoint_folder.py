"""A folder of checkpoints belongs to one run at a time, and what is wrong with a path is said before training."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cut_runs import assert_same_run, fit, trainer_of
from errors import refused, warned
from reference_cluster import small_mlp, vectors

import vsim
from vsim import CheckpointError, load_checkpoint
from vsim.checkpoint import folder as folders
from vsim.checkpoint.folder import locked
from vsim.runs.interrupt import Interrupted
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, Strategy
from vsim.writing import replacing

# What `locked` does, without a second's imports.
HOLDER = """
import fcntl, os, sys, time
file = open(os.path.join(sys.argv[1], ".lock"), "w")
fcntl.lockf(file, fcntl.LOCK_EX)
print("process", os.getpid(), file=file, flush=True)
print("held", flush=True)
time.sleep(60)
"""
posix = pytest.mark.skipif(os.name != "posix", reason="the lock is POSIX's")


def compared(**options: Any) -> Any:
    strategies = {"FedAvg": FedAvgStrategy(H=2), "DiLoCo": DiLoCoStrategy(H=2)}
    given: dict[str, Any] = {"num_nodes": 2, "max_steps": 4, "progress": False, "strategies": strategies}
    return vsim.compare(small_mlp(), vectors(), **{**given, **options})


@posix
def test_a_folder_is_one_process_own_until_it_dies(tmp_path: Path) -> None:
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None and other.stdout.readline() == "held\n"
        for train in (lambda: fit(Strategy(), save_dir=tmp_path), lambda: compared(save_dir=tmp_path)):
            with refused(CheckpointError, f"save_dir '{tmp_path}'", "in use", f"process {other.pid}"):
                train()
        other.kill()
    fit(Strategy(), max_steps=2, save_dir=tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000002.safetensors"]


def test_a_folder_is_one_runs_own_within_a_process(tmp_path: Path) -> None:
    seen: list[BaseException] = []
    second = trainer_of()  # here: one thread at a time seeds the global generators

    def beside(step: int, loss: float) -> None:
        def other() -> None:
            try:
                fit(Strategy(), second, save_dir=tmp_path / "a" / ".." / "a", resume=True)
            except CheckpointError as error:
                seen.append(error)

        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    fit(Strategy(), max_steps=1, save_dir=tmp_path / "a", train_loss_hook=beside)
    assert "is in use: another run, in this process" in str(seen)
    fit(Strategy(), max_steps=2, save_dir=tmp_path / "a", resume=True)


def test_a_run_that_fails_lets_its_folder_go(tmp_path: Path) -> None:
    def fail(step: int, loss: float) -> None:
        raise ZeroDivisionError

    for _ in range(2):
        with pytest.raises(ZeroDivisionError):
            fit(Strategy(), save_dir=tmp_path, train_loss_hook=fail)
    assert list(tmp_path.iterdir()) == []


@posix
@pytest.mark.parametrize("link", [os.symlink, os.link], ids=lambda link: link.__name__)
def test_a_lock_that_is_a_link_is_refused_and_its_target_left_alone(link: Any, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("mine")
    (tmp_path / "run").mkdir()
    link(target, tmp_path / "run" / ".lock")
    with refused(CheckpointError, "save_dir", str(tmp_path / "run")):
        fit(Strategy(), max_steps=2, save_dir=tmp_path / "run")
    assert target.read_text() == "mine"


@posix
def test_a_file_system_without_locks_has_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def lockf(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(folders.fcntl, "lockf", lockf)
    (tmp_path / ".step-00000003.123.part").mkdir()
    fit(Strategy(), max_steps=2, save_dir=tmp_path)
    left = {".step-00000003.123.part", "step-00000002.safetensors"}  # the part may be that of a run which writes
    assert {path.name for path in tmp_path.iterdir()} == left


@posix
def test_a_lock_that_its_holder_has_removed_meanwhile_is_taken_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tried: list[int] = []

    def lockf(*_: object) -> None:
        tried.append(1)
        if len(tried) == 1:  # the other run ends between our opening of the file and our lock
            (tmp_path / ".lock").unlink()

    monkeypatch.setattr(folders.fcntl, "lockf", lockf)
    with locked(tmp_path):
        assert len(tried) == 2 and (tmp_path / ".lock").read_text().startswith(f"process {os.getpid()} on ")
    assert not (tmp_path / ".lock").exists()


@posix
def test_a_file_system_whose_files_have_no_lasting_numbers_has_no_locks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os.path, "samestat", lambda *_: False)
    with locked(tmp_path):
        pass
    assert not (tmp_path / ".lock").exists()


def test_what_killed_runs_left_half_written_is_removed_when_a_comparison_resumes(tmp_path: Path) -> None:
    compared(save_dir=tmp_path)
    part = tmp_path / "FedAvg" / ".step-00000003.123.part"
    part.mkdir()
    (part / ".tmpX").write_bytes(b"half")
    (tmp_path / "FedAvg" / ".mine.part").touch()  # a user's own
    compared(save_dir=tmp_path, resume=True, max_steps=6)
    assert not part.exists() and (tmp_path / "FedAvg" / ".mine.part").exists()


@pytest.mark.parametrize("name", ["a" * 300, "race.json", "Race.json"])
def test_names_that_cannot_be_folders_are_told_before_training(name: str, tmp_path: Path) -> None:
    steps: list[int] = []
    with refused(CheckpointError, f"'{name}'", "folder"):
        compared(strategies={name: FedAvgStrategy()}, save_dir=tmp_path, train_loss_hook=lambda *_: steps.append(1))
    (tmp_path / "b").symlink_to("nowhere")
    with refused(CheckpointError, "'b'", "folder"):
        compared(strategies={"b": FedAvgStrategy()}, save_dir=tmp_path, train_loss_hook=lambda *_: steps.append(1))
    assert not steps
    with refused(ValueError, "two of them are the same"):  # on a disk that knows no case
        compared(strategies={"a": FedAvgStrategy(), "A": FedAvgStrategy()}, save_dir=tmp_path / "c")


def test_each_run_of_a_comparison_resumes_from_its_own_newest_checkpoint(tmp_path: Path) -> None:
    straight = compared(max_steps=8)
    compared(save_dir=tmp_path, checkpoint_interval=2, resume="auto")  # there is nothing yet
    damaged = tmp_path / "FedAvg" / "step-00000004.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:1000])
    steps: list[tuple[str, int]] = []
    callback = [lambda run: steps.append((run.label, run.done))]
    with warned("step-00000004.safetensors", "torn", "using step-00000002.safetensors"):
        resumed = compared(save_dir=tmp_path, resume="auto", max_steps=8, callbacks=callback)
    for name, run in straight.items():
        # Steps 3 and 4 of FedAvg were computed without the others' rows.
        np.testing.assert_allclose(run.history.node_losses, resumed[name].history.node_losses, rtol=1e-5)
    alone, together = [("FedAvg", 3), ("FedAvg", 4)], [(name, step) for step in range(5, 9) for name in straight]
    assert steps[:2] == alone and sorted(steps[2:]) == sorted(together)
    for path in (tmp_path / "DiLoCo").glob("step-*"):
        path.write_bytes(b"")
    with refused(CheckpointError, "DiLoCo/step-00000008.safetensors", "empty"):
        compared(save_dir=tmp_path, resume=True, max_steps=9)


@pytest.mark.parametrize(
    ("name", "old", "new"), [("race.json", '"FedAvg', '"FedAvh'), ("FedAvg/end.json", '"step": 4', '"step": 3')]
)
def test_a_change_in_the_files_of_a_comparison_is_noticed(name: str, old: str, new: str, tmp_path: Path) -> None:
    compared(save_dir=tmp_path)
    path = tmp_path / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with refused(CheckpointError, name, "checksum"):
        compared(save_dir=tmp_path, resume=True, max_steps=6)
    path.write_text(text[:-3])
    with refused(CheckpointError, name, "torn"):
        compared(save_dir=tmp_path, resume=True, max_steps=6)


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError(None, "I/O error: 28")])
def test_a_file_that_cannot_be_written_is_named(error: OSError, tmp_path: Path) -> None:
    path = tmp_path / "end.json"
    path.write_text("old")

    def write() -> None:
        with replacing(path) as part:
            part.write_text("half")
            raise error

    with refused(OSError, str(error.strerror), str(path)) as caught:
        write()
    assert caught.value.errno == error.errno
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("end.json", "old")]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="/dev/full is Linux's")
def test_a_full_disk_is_a_warning_and_the_results_are_returned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import safetensors
    import safetensors.numpy

    def full(*_: object) -> None:
        raise safetensors.SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr(safetensors.numpy, "save_file", full)
    with warned("step 2 could not be saved", "No space left on device", "step-00000002.safetensors"):
        trainer = fit(Strategy(), max_steps=2, save_dir=tmp_path)
    assert trainer.history["step"][-1] == 2


PATHS: list[tuple[Any, Any, tuple[Any, ...]]] = [
    ("", ValueError, ("save_dir", "")),
    ("a\0b", ValueError, ("save_dir", "a\0b")),
    ("a" * 300, CheckpointError, ("File name too long",)),
    (3, TypeError, ("save_dir", 3)),
]


@pytest.mark.parametrize(("path", "kind", "parts"), PATHS, ids=["empty", "nul", "long", "number"])
@pytest.mark.parametrize("train", [lambda **given: fit(Strategy(), **given), compared], ids=["fit", "compare"])
def test_paths_that_are_none(train: Callable[..., Any], path: Any, kind: Any, parts: tuple[Any, ...]) -> None:
    with refused(kind, *(repr(part) if part in ("", "a\0b") else part for part in parts)):
        train(save_dir=path)


def test_an_interrupt_says_where_the_run_is(tmp_path: Path) -> None:
    def press(step: int, loss: float) -> None:
        if step == 3:
            os.kill(os.getpid(), signal.SIGINT)

    def interrupt(step: int, loss: float) -> None:  # a hook that raises it
        if step == 3:
            raise KeyboardInterrupt

    with refused(Interrupted, "after step 3", "memory", "fit(resume=True)"):
        fit(Strategy(), train_loss_hook=press)
    for folder, hook in ((tmp_path / "pressed", press), (tmp_path / "raised", interrupt)):
        with refused(Interrupted, "after step 3", f"saved in '{folder}'", "resume=True", "--save-dir … --resume"):
            fit(Strategy(), train_loss_hook=hook, save_dir=folder)
        assert load_checkpoint(folder).step == 3
        assert_same_run(fit(Strategy(), save_dir=folder, resume=True), fit(Strategy()))
    both = tmp_path / "both"
    with warned("interrupted after step 3", "resume=True (--resume)", f"'{both}"):
        compared(save_dir=both, train_loss_hook=press)
