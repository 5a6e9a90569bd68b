"""Read saved comparisons, checkpoints and logs, also while their runs train.

Reading a run's files writes and locks nothing, and so never disturbs the run.
"""

from __future__ import annotations

import csv
import math
import os
import re
import socket
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from vsim.analysis.cache import Cache
from vsim.analysis.compared import ComparedRun
from vsim.analysis.comparison import Comparison
from vsim.analysis.search import Search
from vsim.analysis.swept import Sweep
from vsim.arguments import a_path, a_text, countable, given, whole_number
from vsim.checkpoint.files import load_checkpoint
from vsim.checkpoint.folder import checkpoints_in
from vsim.cluster.ledger import BYTES_OF_A_STEP
from vsim.cluster.plan import BYTES_OF_A_CLIENT
from vsim.cluster.state import CheckpointError
from vsim.history.formats import holding_a_record, read_json
from vsim.history.history import COLUMNS, History
from vsim.network import Timeline
from vsim.reading import parse_json, read_text

# File names of `vsim compare` and `vsim sweep`.
NAMES = ("comparison.json", "sweep.json")
# Suffixes of the files that runs write, and how many levels below a comparison's path these files can be.
_SUFFIXES, _DEPTH = (".json", ".csv", ".safetensors"), 2
_SEED = re.compile(r"(.+), seed (-?\d+)")


class Log(History):
    """The record of a run that a `CSVLogger` wrote: with the numbers of bytes sent, but without events."""

    def time(self, network: Any = None, compute: Any = None) -> Timeline:
        """Raise a ValueError, because a record without events has no hours."""
        raise ValueError(f"{self.strategy}: a log has no events, and so no hours; a run with save_dir= has them")


@dataclass(eq=False)
class SavedRun(ComparedRun):
    """A run that was read from its files.

    Attributes:
        state: "ended", "running", "interrupted" or "failed".
    """

    state: str = "ended"

    @property
    def note(self) -> str:
        """The state of the run, if it is not complete."""
        return f"{self.state}, step {self.stopped_at}" if self.stopped_at is not None else self.failure


def read_comparison(path: str | Path, cache: Cache | None = None) -> Comparison:
    """Read a comparison from a file of `to_json`, or from checkpoints or CSV logs of runs that may still train.

    Args:
        path: a file that `to_json` wrote; or a folder that `vsim compare`, `vsim sweep` or a `CSVLogger` wrote, or a
            `save_dir`. A log has no events: its runs have losses and bytes, but no hours.
        cache: results of earlier calls; unchanged files are not read again.

    Raises:
        FileNotFoundError: there is no such file, or the folder holds no runs.
        ValueError: the content is not a comparison.
    """
    path = a_path("path", path)
    if not isinstance(cache, Cache | None):
        raise TypeError(f"cache must be a Cache, got {given(cache)}")
    cache = Cache() if cache is None else cache
    found = [path / name for name in NAMES if (path / name).is_file()] if path.is_dir() else [path]
    if len(found) == 1:
        comparison: Comparison = cache.get(_stamp(found[0]), _read_file, found[0])
        return comparison
    if found:
        raise FileNotFoundError(f"{path} holds {' and '.join(NAMES)}: name one of them")
    readers: tuple[Callable[[Path, Cache], SavedRun | None], ...] = (_of_checkpoints, _of_log)
    for read in readers:
        runs = [(folder, run) for folder in [path, *_folders(path)] if (run := read(folder, cache)) is not None]
        if runs:
            return _gathered(path, runs)
    raise FileNotFoundError(f"{path} holds no {', no '.join(NAMES)}, and no run with checkpoints or a CSV log")


def read_comparisons(paths: Sequence[str | Path], cache: Cache | None = None) -> dict[str, Comparison]:
    """Read several comparisons; return name → comparison, with the shortest distinct names.

    Raises:
        ValueError: no path is given, a path is given twice, or a content is not a comparison. FileNotFoundError: a path
            does not exist.
    """
    if not isinstance(paths, Sequence) or isinstance(paths, str | bytes):
        raise TypeError(f"paths must be a list of paths, got {given(paths)}")
    if not paths:
        raise ValueError("paths is empty: name a comparison that was saved, such as vsim-out/comparison.json")
    places = [a_path("one of paths", path).resolve() for path in paths]
    if len(set(places)) < len(places):
        raise ValueError(f"a file is named more than once: {', '.join(map(str, paths))}")
    stems = [place.parent if place.name in NAMES else place.parent / place.stem for place in places]
    if len(set(stems)) < len(stems):  # a comparison and a sweep in one folder
        stems = places
    names = next(
        names
        for depth in range(1, 1 + max(len(one.parts) for one in stems))
        if len(set(names := ["/".join(one.parts[-depth:]) for one in stems])) == len(stems)
    )
    return {name: read_comparison(path, cache) for name, path in zip(names, paths, strict=True)}


def files_at(path: Path, depth: int = _DEPTH) -> Iterator[Path]:
    """Yield the files that `read_comparison` may read at a path."""
    if not path.is_dir():
        yield path
        return
    try:
        entries = sorted(path.iterdir())
    except OSError:
        return
    for entry in entries:
        if entry.is_dir():
            if depth and not entry.name.startswith("."):
                yield from files_at(entry, depth - 1)
        elif entry.suffix in _SUFFIXES or entry.name == ".lock":
            yield entry


def select(comparisons: Mapping[str, Comparison], only: Sequence[str]) -> dict[str, Comparison]:
    """Keep the runs whose names contain all words of one of the texts in `only`; without texts, keep all runs.

    Args:
        only: texts such as "fedavg", "diloco H=10" or "*diloco"; case is ignored, and * is any number of letters.

    Raises:
        ValueError: no run matches.
    """
    if not isinstance(comparisons, Mapping) or not all(isinstance(one, Comparison) for one in comparisons.values()):
        raise TypeError(f"comparisons must be a dict of name → vsim.Comparison, got {given(comparisons)}")
    if not isinstance(only, Sequence) or isinstance(only, str | bytes):
        raise TypeError(f"only must be a list of texts, got {given(only)}")
    if not only:
        return dict(comparisons)
    for text in only:
        a_text("one of only", text)
        if not any(_has_words(name, text) for one in comparisons.values() for name in one):
            names = ", ".join(dict.fromkeys(repr(name) for one in comparisons.values() for name in one))
            raise ValueError(f"no run has the words {text!r} in its name; there are {names}")
    chosen = {
        key: [name for name in one if any(_has_words(name, text) for text in only)] for key, one in comparisons.items()
    }
    return {key: comparisons[key][names] for key, names in chosen.items() if names}


def _has_words(name: str, text: str) -> bool:
    own, asked = (re.split(r"[,\s]+", re.sub(r"\s*=\s*", "=", one.strip()).lower()) for one in (name, text))
    return all(any(fnmatchcase(word, one) for word in own) for one in asked)


def _stamp(*files: Path) -> tuple[Any, ...]:
    """Return a key that changes when the files change: the path, modification time and size of each."""
    found: list[Any] = []
    for file in files:
        found.append(str(file))
        with suppress(OSError):  # there is no such file
            stat = file.stat()
            found.append((stat.st_mtime_ns, stat.st_size))
    return tuple(found)


def read_log(folder: str | Path) -> History:
    """Read the record that a `CSVLogger` has written of a run so far; its ledger has no events.

    Raises:
        FileNotFoundError: there is no train.csv. ValueError: a file is not a log.
    """
    folder = a_path("folder", folder)
    with holding_a_record(folder, "CSVLogger"):
        rows: dict[int, dict[str, float]] = {}
        for name in ("validation.csv", "train.csv"):
            for line in _lines(folder / name, must=name == "train.csv"):
                rows.setdefault(int(line["step"]), {}).update(line)
        config = {}
        with suppress(OSError, ValueError):
            config = parse_json(read_text(folder / "config.json"))
        nodes = config.get("num_nodes") if isinstance(config, dict) else None
        history = Log(folder.name, countable("num_nodes", 1 if nodes is None else nodes, "nodes", BYTES_OF_A_CLIENT))
        history.config = config if isinstance(config, dict) else {}
        for step in (min(rows, default=0), max(rows, default=0)):
            countable("step", step, "steps", BYTES_OF_A_STEP, at_least=0)
        for step in sorted(rows):
            row = {"examples" if key == "examples_trained" else key: value for key, value in rows[step].items()}
            history.append({key: value for key, value in row.items() if key in COLUMNS})
        return history


def _lines(path: Path, must: bool) -> Iterator[dict[str, float]]:
    """Yield the complete lines of a CSV file as numbers; skip a last line that is still being written."""
    try:
        text = read_text(path)
    except FileNotFoundError:
        if must:
            raise
        return
    for line in csv.DictReader(text[: text.rfind("\n") + 1].splitlines()):
        if None in line or None in line.values():
            raise ValueError(f"a line of {path.name} has another number of fields than its header")
        yield {key: float(value) if value else math.nan for key, value in line.items()}


def _read_file(path: Path) -> Comparison:
    content = read_json(path, "Comparison", Comparison._keys)
    kind = next(kind for kind in (Search, Sweep, Comparison) if all(key in content for key in kind._keys))
    with holding_a_record(path, kind.__name__):
        comparison = kind._from_plain(content)
        comparison.table()  # raises an error for a damaged file
        str(comparison.describe())
        for name in comparison:
            for run in comparison.runs(name):
                if type(name) is not str or type(run.seed) is not int or not len(run.history):
                    raise ValueError(f"run {name!r} has no name, no seed or no steps")
        return comparison


def _folders(path: Path) -> list[Path]:
    return sorted(one for one in path.iterdir() if one.is_dir() and not one.name.startswith("."))


def _of_checkpoints(folder: Path, cache: Cache) -> SavedRun | None:
    """Return the run saved in a folder, from end.json or else the newest readable checkpoint; None without either."""
    end = folder / "end.json"
    if end.is_file():
        ended: SavedRun = cache.get(_stamp(end), _ended, end)
        return ended
    for path in reversed(checkpoints_in(folder)):
        with suppress(CheckpointError):  # the file is gone: the run continues, and removes old checkpoints
            history, step = cache.get(_stamp(path), _reached, path)
            state = "running" if _is_held(folder) or _is_held(folder.parent) else "interrupted"
            return SavedRun(history, stopped_at=step, state=state)
    return None


def _ended(end: Path) -> SavedRun:
    content = read_json(end, "a comparison's run", ("step", "history"))
    with holding_a_record(end, "a comparison"):
        history = History.from_plain(content["history"])
        stopped = int(content["step"]) if content.get("stopped") else None
        diverged = history.ledger.steps if content.get("diverged") else None
        failure = str(content.get("error") or "")
        state = "failed" if failure else "stopped" if stopped is not None else "ended"
        return SavedRun(history, failure=failure, diverged_at=diverged, stopped_at=stopped, state=state)


def _reached(checkpoint: Path) -> tuple[History, int]:
    found = load_checkpoint(checkpoint)
    return found.history, found.step


def _of_log(folder: Path, cache: Cache) -> SavedRun | None:
    files = [folder / name for name in ("train.csv", "validation.csv", "config.json")]
    if not files[0].is_file():
        return None
    run: SavedRun = cache.get(_stamp(*files), _logged, folder)
    return run


def _logged(folder: Path) -> SavedRun:
    return SavedRun(read_log(folder))


def _is_held(folder: Path) -> bool:
    """Return whether a running process saves in a folder: read its id from the lock file, without taking the lock."""
    try:
        said = read_text(folder / ".lock", errors="replace")
    except OSError:
        return False
    match = re.fullmatch(r"process (\d{1,9}) on (.+)", said)
    if match is None or match[2] != socket.gethostname():
        return True
    try:
        os.kill(int(match[1]), 0)
    except ProcessLookupError:
        return False
    except (OSError, OverflowError):
        pass  # another user's process
    return True


def _gathered(path: Path, runs: Sequence[tuple[Path, SavedRun]]) -> Comparison:
    """Make a comparison of runs; a label of the form "name, seed 1" gives the run's name and seed."""
    sent = [float(run.history["payload_bytes"][1]) for _, run in runs if len(run.history) > 1]
    comparison = Comparison(int(max(sent, default=0)))  # the bytes of AllReduce, if it is among the runs
    holders: dict[str, Path] = {}
    configs: dict[str, Any] = {}
    with suppress(OSError, ValueError, LookupError, TypeError):
        about = parse_json(read_text(path / "race.json"))
        configs = dict(zip(about["runs"], about["configs"], strict=True))
    for folder, run in runs:
        label = run.history.strategy or folder.name
        if (path / "race.json").is_file() and holders.setdefault(label, folder) is not folder:
            raise ValueError(f"{holders[label]} and {folder} hold the record of one run, {label!r}: remove the copy")
        _describe(run, configs.get(label, run.history.config))
        match = _SEED.fullmatch(label) or _SEED.fullmatch(label.replace("_", " "))
        name, run.seed = (match[1], int(match[2])) if match else (label, run.seed)
        comparison.add(name, run)
    return comparison


def _describe(run: SavedRun, config: Any) -> None:
    """Set a run's configuration, seed and strategy from `config`; set no configuration if `config` is invalid."""
    own = Comparison(0)
    own.add("", run)
    try:
        run.history.config = config
        str(own.describe())
        _ = run.strategy  # raises here if the configuration describes none
        run.seed = whole_number("seed", config.get("seed", run.seed), at_least=0)
    except Exception:  # a file may hold anything
        run.history.config = {}
