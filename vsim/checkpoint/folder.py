"""Folders of checkpoints: file names, and a lock for the run that writes there."""

from __future__ import annotations

import errno
import importlib
import os
import re
import shutil
import socket
import stat
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

from vsim.arguments import a_path
from vsim.cluster.state import CheckpointError
from vsim.writing import PART

fcntl: Any = importlib.import_module("fcntl") if os.name == "posix" else None
# Number of checkpoints kept in a folder: the newest, and one in case the newest is damaged.
KEPT = 2
_TRIES = 100  # attempts to lock a file that other processes may remove
_NAME = re.compile(r"step-(\d{8,})\.safetensors")
_held: dict[Path, object] = {}  # folders that runs of this process use; the kernel's locks exclude only other processes


@dataclass(frozen=True)
class Saving:
    """Where a run is saved, and when.

    Attributes:
        folder: gets one file for each checkpoint.
        interval: steps between checkpoints; None: only at the end, and when the run is interrupted.
        wanted: whether the user asked to save the run. If not, the run is saved only when interrupted, so that this
            process can resume the run.
    """

    folder: Path
    interval: int | None
    wanted: bool = True


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the files of checkpoints in a folder, sorted by step; empty if there is no folder."""
    return sorted(filter(is_checkpoint, folder.iterdir()), key=step_of) if os.path.isdir(folder) else []


def is_checkpoint(path: Path) -> bool:
    """Return whether a file is named like a checkpoint in a folder."""
    return _NAME.fullmatch(path.name) is not None


def checkpoint_path(folder: Path, step: int) -> Path:
    """Return the path of the checkpoint of a step in a folder."""
    return folder / f"step-{step:08d}.safetensors"


def step_of(path: Path) -> int:
    """Return the step in the name of a checkpoint."""
    return int(path.stem.removeprefix("step-"))


def prune(folder: Path, step: int) -> None:
    """Remove all checkpoints up to `step` except the newest `KEPT`."""
    for old in [path for path in checkpoints_in(folder) if step_of(path) <= step][:-KEPT]:
        old.unlink(missing_ok=True)


def folder_at(path: Any) -> Path:
    """Return the absolute path of a folder, which need not exist.

    Raises:
        TypeError, ValueError: `path` is not a path. CheckpointError: `path` is a file.
    """
    folder = a_path("save_dir", path).absolute()
    if os.path.exists(folder) and not folder.is_dir():
        raise CheckpointError(f"save_dir {str(path)!r} is not a folder")
    return folder


@contextmanager
def locked(path: str | Path | None, within: Iterable[Path] = ()) -> Iterator[None]:
    """Lock the folder at `path` for one run within this context, and make the folder if needed. A no-op for None.

    The kernel releases the lock however the process ends. On file systems without locks, the folder is not locked.
    Partial files from killed processes are removed from this folder and from the folders `within`.

    Raises:
        CheckpointError: another run holds the folder, or the folder cannot be written to.
    """
    if path is None:
        yield
        return
    folder, own = Path(os.path.realpath(folder_at(path))), object()
    if _held.setdefault(folder, own) is not own:
        raise _in_use(path, "this process")
    try:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            lock, holds = _lock(folder / ".lock", path)
        except OSError as error:
            raise CheckpointError(f"save_dir {str(path)!r} cannot be written to: {error}") from error
        with lock:
            try:
                for own_folder in (folder, *within) if holds else ():
                    _remove_parts(own_folder)
                yield
            finally:
                with suppress(OSError):  # still locked: a process that waits to lock the file sees the removal
                    (folder / ".lock").unlink()
    finally:
        del _held[folder]


def _lock(path: Path, given: str | Path) -> tuple[IO[bytes], bool]:
    """Return the open lock file, and whether it is locked."""
    for _ in range(_TRIES):
        file = _lock_file(path)
        try:
            if fcntl is None:
                return file, False
            fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            with file:
                file.seek(0)
                raise _in_use(given, file.read().decode(errors="replace") or "another process") from None
        except OSError:  # for instance, a network file system without locks
            return file, False
        with suppress(OSError):
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):  # else the last holder has just removed the file
                with suppress(OSError):  # the disk may be full
                    file.truncate(0)
                    file.write(f"process {os.getpid()} on {socket.gethostname()}".encode())
                return file, True
        file.close()
    return _lock_file(path), False  # a file system without stable inode numbers


def _lock_file(path: Path) -> IO[bytes]:
    """Open the lock file without following links, so that no other file is ever locked or written to."""
    handle = os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_NOFOLLOW", 0), 0o666)
    file = os.fdopen(handle, "rb+", buffering=0)
    found = os.fstat(handle)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        file.close()
        raise OSError(errno.EEXIST, f"{path.name} is not a file of its own")
    return file


def _in_use(path: str | Path, who: str) -> CheckpointError:
    return CheckpointError(
        f"save_dir {str(path)!r} is in use: another run, in {who}, saves there; wait until it ends, or give another "
        "save_dir"
    )


def _remove_parts(folder: Path) -> None:
    for left in [path for path in folder.iterdir() if PART.fullmatch(path.name)] if os.path.isdir(folder) else []:
        shutil.rmtree(left, ignore_errors=True) if left.is_dir() else left.unlink(missing_ok=True)
