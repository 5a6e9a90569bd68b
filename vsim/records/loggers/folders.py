"""The folders that runs are logged to: their names, and one that is free."""

from __future__ import annotations

import itertools
import re
import warnings
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any


def check_run_name(run_name: str) -> str:
    """Return `run_name` if it can name a folder within the log folder; "a/b" is one within another."""
    if not isinstance(run_name, str):
        raise TypeError(f"run_name must be a string, got {run_name!r} of type {type(run_name).__name__}")
    parts = Path(run_name).parts
    too_long = any(len(part.encode()) > 200 for part in parts)  # file systems take 255 bytes; a number may be added
    if not parts or Path(run_name).is_absolute() or ".." in parts or "\0" in run_name or too_long:
        allowed = "with names of at most 200 bytes" if too_long else "such as 'diloco' or 'a/b'"
        raise ValueError(f"run_name must name a folder within the log folder, {allowed}; got {run_name!r}")
    return run_name


def log_folder(log_dir: Any) -> Path:
    """Return the folder of all runs; raise a TypeError or ValueError for anything but a path."""
    if not isinstance(log_dir, str | Path):
        raise TypeError(f"log_dir must be the path of a folder, got {log_dir!r}")
    if isinstance(log_dir, str) and not log_dir.strip():
        raise ValueError(f"log_dir must be the path of a folder, got {log_dir!r}; '.' is the current one")
    return Path(log_dir)


def date_and_time() -> str:
    """Return the name of a run without one: date and time."""
    return datetime.now().strftime("%Y%m%d_%H%M%S")


def folder_name(label: str) -> str:
    """Return a label as every file system takes it for a name.

    >>> folder_name("diloco:H=50,outer_lr=0.7")
    'diloco_H=50,outer_lr=0.7'
    """
    return re.sub(r"[^\w.,=+-]", "_", label).strip(".") or "_"


def free_folders(log_dir: Path, run_name: str | None, *patterns: str) -> Iterator[Path]:
    """Yield folders for a run, made if need be: `<log_dir>/<run_name>`, then those with a number.

    Args:
        log_dir: the folder of all runs. run_name: None for the date and time.
        patterns: a folder with a file that fits one of them holds a run already and is left out.
    """
    name = date_and_time() if run_name is None else run_name
    for number in itertools.count(1):
        folder = log_dir / (name if number == 1 else f"{name}-{number}")
        folder.mkdir(parents=True, exist_ok=True)
        if any(next(folder.glob(pattern), None) for pattern in patterns):
            continue
        if number > 1 and run_name is not None:
            warnings.warn(f"{log_dir / name} holds a run already; this one is in {folder}", UserWarning, stacklevel=2)
        yield folder
