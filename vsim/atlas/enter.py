"""The command `vsim atlas`: train the entries that are missing, and show what they say."""

from __future__ import annotations

import importlib
import json
import re
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from vsim.analysis.tables import text_table
from vsim.arguments import one_of
from vsim.atlas.entries import entry, settings
from vsim.atlas.pages import write
from vsim.atlas.scores import SINGLE, Entries, label, standing, standings
from vsim.atlas.spaces import ROWS, Row, row_of
from vsim.atlas.tasks import TASKS, VERSION
from vsim.network.timeline import duration
from vsim.writing import replacing
from vsim_cli.commands import Atlas

_PLACES = ("first", "second", "third")
STORED = Path(__file__).parent / "results"  # the entries of vsim's strategies


def command(given: Atlas) -> int:
    """Carry out the command; return its exit status."""
    tasks = chosen("--tasks", given.tasks, list(TASKS))
    folder = Path(given.out)
    names = chosen("--strategies", given.strategies, list(ROWS))
    rows = {name: ROWS[name] for name in names if given.strategies or given.mine is None}
    own = ""
    if given.mine is not None:
        own, row = mine(given.mine)
        rows[own] = row
    failed = train(folder, tasks, rows, given.deterministic, given.quiet)
    # One's own folder goes before what is stored.
    by_task = {task: {**read(STORED, task), **read(folder, task)} for task in tasks}
    by_task = {task: entries for task, entries in by_task.items() if entries}
    for task, entries in by_task.items():
        print(f"\n{task}: {TASKS[task].about}")
        if not own:
            print(_firsts(entries))
        elif own in entries:
            for score in SINGLE:
                print(f"  {label(score):32} {standing(entries, own, score)}")
    for line in failed:
        print(f"vsim atlas: not trained: {line}", file=sys.stderr)
    if given.page is not None:
        write({task: {**read(STORED, task), **read(folder, task)} for task in TASKS}, Path(given.page))
    return 1 if failed else 0


def _firsts(entries: Entries) -> str:
    """Return the first three strategies of each score, as a table."""
    rows = []
    for score in SINGLE:
        places = standings(entries, score)
        shown = [f"{own.strategy} {own.loss:.3g}" for own in places[:3]]
        tied = f"{sum(own.is_tied for own in places[1:])}"
        rows.append({"within": label(score), **dict(zip(_PLACES, shown, strict=False)), "tied with the first": tied})
    return text_table(rows, "simple", ["within"])


def path_of(folder: Path, task: str, strategy: str) -> Path:
    return folder / task / f"{re.sub(r'[^a-z0-9]+', '-', strategy.lower().replace('²', '2')).strip('-')}.json"


def read(folder: Path, task: str) -> dict[str, dict[str, Any]]:
    """Return the entries of a task in a folder, by strategy, in the order of the table of strategies.

    Raises:
        ValueError: an entry is of another version of the atlas, or was made with other data.
    """
    found, paths = {}, sorted((folder / task).glob("*.json"))
    data = TASKS[task].digest() if paths else ""
    for path in paths:
        own = _loaded(path)
        if own["data"] != data:
            raise ValueError(f"{path} was made with other data of {task}: give another folder")
        found[own["strategy"]] = own
    order = list(ROWS)
    return dict(sorted(found.items(), key=lambda own: order.index(own[0]) if own[0] in order else len(order)))


def _loaded(path: Path) -> dict[str, Any]:
    """Return the entry in a file of this version of the atlas."""
    try:
        own = json.loads(path.read_text(encoding="utf-8"))
        version = own["atlas"]
        of_this = version == VERSION and own["strategy"] and own["data"]
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(f"{path} is not an entry of the atlas ({error}): remove it, or give another folder") from error
    if not of_this:
        raise ValueError(f"{path} is of {version}, and this is {VERSION}: give another folder")
    return own


def mine(text: str) -> tuple[str, Row]:
    """Return the name and row of a class of one's own, from text "module:Class"; the module may be in this folder."""
    module, _, name = text.partition(":")
    if not module or not name:
        raise ValueError(f"--mine must be module:Class, such as my_strategies:MyStrategy, got {text!r}")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        cls = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise ValueError(f"--mine {text}: {error}") from error
    if name in ROWS:
        raise ValueError(f"--mine {text}: {name!r} is a strategy of the atlas; give the class another name")
    return name, row_of(cls)


def missing(folder: Path, tasks: Sequence[str], rows: dict[str, Row]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of task and strategy that enter, and have no file yet or one of other ranges or other code."""
    for task in tasks:
        for name, row in rows.items():
            if row.enters(TASKS[task].kinds):
                path = path_of(folder, task, name)
                own = _loaded(path) if path.exists() else {}
                if (own.get("settings"), own.get("code", "")) != (settings(row, TASKS[task]), row.code):
                    yield task, name


def train(folder: Path, tasks: Sequence[str], rows: dict[str, Row], deterministic: bool, quiet: bool) -> list[str]:
    """Train what is missing, with one thread, a file for each entry; return a line for each that could not be trained.

    A call that is stopped loses the entry that it was training, and the next call continues with it.
    """
    from tqdm.auto import tqdm

    todo, failed, before = list(missing(folder, tasks, rows)), [], torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with warnings.catch_warnings():  # of trials that diverge, which the entry says
            warnings.simplefilter("ignore", UserWarning)
            bar = tqdm(todo, desc="entries", unit="entry", dynamic_ncols=True, disable=quiet or not todo)
            for task, name in bar:
                bar.set_postfix_str(f"{name} on {task}")
                start = time.perf_counter()
                try:
                    made = entry(name, rows[name], task, TASKS[task], deterministic)
                except Exception as error:  # of a strategy that does not fit the task, or of a user's code
                    told = str(error).removeprefix(f"{name} on {task}: ") or type(error).__name__
                    failed.append(f"{name} on {task}: {told}")
                    continue
                made["made with"]["took"] = duration(time.perf_counter() - start)
                path = path_of(folder, task, name)
                path.parent.mkdir(parents=True, exist_ok=True)
                with replacing(path) as file:
                    file.write_text(json.dumps(made, indent=None, separators=(",", ":")) + "\n", encoding="utf-8")
    finally:
        torch.set_num_threads(before)
    return failed


def chosen(option: str, given: Sequence[str], known: Sequence[str]) -> list[str]:
    """Return the given names, or all of them."""
    return [one_of(option, name, known) for name in given] or list(known)
