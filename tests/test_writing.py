"""Whole files: a write that fails leaves the old content and nothing else; an output is never an input."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import matplotlib.pyplot as plt
import pytest
from comparisons_by_hand import never, run
from shared_comparisons import compared, three_strategies

from vsim.checkpoint.files import Checkpoint
from vsim.figures.paper import save
from vsim.history.formats import write_json
from vsim.history.history import History
from vsim.runs.race_folder import write_whole
from vsim.strategy import FedAvgStrategy
from vsim.writing import replacing
from vsim_cli import main

posix = pytest.mark.skipif(os.name != "posix", reason="links and permissions of POSIX")
LIMIT = 64  # bytes; every file has more


def history() -> History:
    return run([3.0 - step for step in range(40)]).history


def figure(suffix: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        axes = plt.figure().add_subplot()
        axes.plot(range(9))
        save(axes, path.with_suffix(suffix))

    return write


def checkpoint(path: Path) -> None:
    Checkpoint(39, history(), {}, [1], {}, {}).save(path)


# Every writer of a whole file, and the suffix of its file.
WRITERS: dict[str, tuple[str, Callable[[Path], Any]]] = {
    "history.to_csv": (".csv", lambda path: history().to_csv(path)),
    "history.to_json": (".json", lambda path: history().to_json(path)),
    "comparison.to_csv": (".csv", lambda path: three_strategies().to_csv(path)),
    "comparison.to_json": (".json", lambda path: three_strategies().to_json(path)),
    "comparison.report": (".html", lambda path: three_strategies().report(path)),
    "end.json": (".json", lambda path: write_whole(path, {"history": history().as_plain()})),
    "checkpoint": (".safetensors", checkpoint),
    **{f"figure{suffix}": (suffix, figure(suffix)) for suffix in (".png", ".svg", ".pdf")},
}


@contextmanager
def full() -> Iterator[None]:
    """The disk takes files of at most LIMIT bytes."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (LIMIT, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("name", WRITERS)
def test_a_full_disk_leaves_the_old_file(name: str, tmp_path: Path) -> None:
    suffix, write = WRITERS[name]
    path = tmp_path / f"result{suffix}"
    write(path)
    before = path.read_bytes()
    assert len(before) > LIMIT
    with full(), pytest.raises(OSError, match=f"while writing.*{path.name}"):
        write(path)
    assert path.read_bytes() == before and [one.name for one in tmp_path.iterdir()] == [path.name]
    path.unlink()
    with full(), pytest.raises(OSError, match=path.name):
        write(path)
    assert not [*tmp_path.iterdir()]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError])
def test_a_write_that_is_broken_off_leaves_the_old_file(error: type[BaseException], tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text("old")
    with suppress(error), replacing(path) as part:
        part.write_text("half")
        raise error
    for content in ({"a": float("nan")}, {"a": object()}):
        with pytest.raises((ValueError, TypeError)):
            write_json(path, {"begins": 1, **content})
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.json", "old")]


@posix
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o077, 0o600)])
def test_permissions_are_those_of_open_or_of_the_old_file(umask: int, mode: int, tmp_path: Path) -> None:
    before = os.umask(umask)
    try:
        history().to_json(tmp_path / "new.json")
        (tmp_path / "old.json").touch()
        (tmp_path / "old.json").chmod(0o640)
        history().to_json(tmp_path / "old.json")
    finally:
        os.umask(before)
    found = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
    assert found == {"new.json": mode, "old.json": 0o640}


@posix
@pytest.mark.parametrize("dangling", [False, True])
def test_the_file_that_a_link_points_to_is_replaced(dangling: bool, tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    link, target = tmp_path / "link.json", tmp_path / "there" / "file.json"
    if not dangling:
        target.write_text("old")
    link.symlink_to("there/file.json")
    history().to_json(link)
    assert link.is_symlink() and len(History.from_json(target)) == len(history())
    assert [one.name for one in target.parent.iterdir()] == ["file.json"]


@posix
def test_what_is_no_regular_file_is_written_directly(tmp_path: Path) -> None:
    pipe, read = tmp_path / "pipe", []
    os.mkfifo(pipe)
    reader = threading.Thread(target=lambda: read.append(pipe.read_text()))
    reader.start()
    write_json(pipe, {"a": 1})
    reader.join()
    assert read == ['{"a": 1}'] and stat.S_ISFIFO(pipe.stat().st_mode)
    history().to_json("/dev/null")
    assert not Path("/dev/null").is_file()
    with pytest.raises(IsADirectoryError):
        write_json(tmp_path, {"a": 1})
    with pytest.raises(FileNotFoundError, match="absent"):
        write_json(tmp_path / "absent" / "a.json", {"a": 1})
    assert [one.name for one in tmp_path.iterdir()] == ["pipe"]


def test_writers_of_one_file_at_the_same_time_leave_one_whole_file(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    with replacing(path) as first, replacing(path) as second:
        first.write_text("first")
        second.write_text("second")
    assert [(one.name, one.read_text()) for one in tmp_path.iterdir()] == [("a.json", "first")]


@posix
@pytest.mark.parametrize(
    ("read", "spelling"),
    [
        ("{out}/comparison.json", "{out}/comparison.json"),
        ("{out}/comparison.json", "{out}/../out/comparison.json"),
        ("{out}", "{soft}"),
        ("{folder}", "{hard}"),
        ("{folder}", "{out}/comparison.json"),
    ],
)
def test_a_page_does_not_replace_what_it_shows(
    read: str, spelling: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    out, soft, hard, folder = (tmp_path / name for name in ("out", "soft.html", "hard.html", "folder"))
    out.mkdir()
    three_strategies().to_json(out / "comparison.json")
    soft.symlink_to(out / "comparison.json")
    hard.hardlink_to(out / "comparison.json")
    folder.symlink_to(out)
    before = (out / "comparison.json").read_bytes()
    read, page = (text.format(out=out, soft=soft, hard=hard, folder=folder) for text in (read, spelling))
    with monkeypatch.context() as patch:
        patch.setattr("vsim.cli.read_comparisons", never)
        assert main(["report", read, "--out", page]) == 2
        error = capsys.readouterr().err
        assert "--out" in error and page in error and error.count("\n") == 1
    assert (out / "comparison.json").read_bytes() == before
    for _ in range(2):  # a page is no input, even next to one
        assert main(["report", read, "--out", str(out / "report.html")]) == 0
    assert (out / "report.html").read_text("utf-8").startswith("<!doctype html>")


def test_a_page_does_not_replace_what_runs_save(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    compared({"FedAvg": FedAvgStrategy(H=2)}, max_steps=2, save_dir=tmp_path)
    for name in ("FedAvg/end.json", "FedAvg/step-00000002.safetensors", "race.json"):
        before = (tmp_path / name).read_bytes()
        assert main(["report", str(tmp_path), "--out", str(tmp_path / name)]) == 2
        assert "--out" in capsys.readouterr().err and (tmp_path / name).read_bytes() == before


@posix
@pytest.mark.parametrize(
    ("command", "name", "option", "link"),
    [
        (["compare"], "comparison.csv", "--text", None),
        (["compare"], "comparison.csv", "--text", os.symlink),
        (["compare"], "comparison.png", "--extend", os.link),
        (["compare"], "winners.png", "--participation", None),
        (["sweep", "--set", "H=2"], "heatmap.png", "--text", os.link),
        (["sweep", "--set", "H=2"], "sweep.png", "--extend", os.symlink),
    ],
)
def test_results_do_not_replace_what_is_read(
    command: list[str],
    name: str,
    option: str,
    link: Any,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    for train in ("compare_strategies", "sweep_settings"):
        monkeypatch.setattr(f"vsim.cli.{train}", never)
    path = tmp_path / name if link is None else tmp_path / "given"
    path.write_text("step,node,event\n" + "1,1,leave\n" * 100 if option == "--participation" else "text " * 500)
    before = path.read_bytes()
    if link is not None:
        link(path, tmp_path / name)
    given = f"trace:file={path}" if option == "--participation" else str(path)
    assert main([*command, option, given, "--out", str(tmp_path), "--quiet"]) == 2
    error = capsys.readouterr().err
    assert f"--out {tmp_path / name}" in error and str(path) in error, error
    assert path.read_bytes() == before
