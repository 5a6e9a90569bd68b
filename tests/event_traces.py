"""The named events of runs in their order: what tests of traces compare.

PLACES names the functions of vsim whose calls are events, and is all that has to change when a function moves.
"""

from __future__ import annotations

import functools
import itertools
import pkgutil
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from small_cases import Acts

Told = Iterable[tuple[Any, str]]  # whose event: a ledger, which each run has one of, or ALL; and its text
ALL = "all runs"


def of_runs(event: str) -> Callable[..., Told]:
    return lambda evaluator, runs: [(run.ledger, f"{event} {run.done}") for run in runs]


def row(history: Any, row: Any, *_: Any) -> Told:
    what = [name for name in ("global_loss", "test_loss") if row.get(name, float("nan")) == row.get(name)]
    yield history.ledger, f"row {int(row['step'])}" + f" with {', '.join(what)}" * bool(what)


def amended(history: Any, *given: Any) -> Told:
    return [(ledger, text.replace("row", "amended", 1)) for ledger, text in row(history, *given)]


def attended(strategy: Any, *_: Any) -> Told:
    cluster = strategy.cluster
    yield cluster.collectives.ledger, f"attended {cluster.completed + 1} by {' '.join(map(str, cluster.active))}"


def sent(ledger: Any, event: Any) -> Told:
    named = {"join": "joined", "pull": "pulled", "round": "pushed"}
    yield ledger, f"{named.get(event.label, f'sent {event.label}')} {event.step}"


def set_in_run(run: Any, name: str, value: Any) -> Told:
    if "cluster" not in vars(run):  # it learns how it ended before a resume
        return
    if name == "stopped_at" and value is not None:
        yield run.ledger, f"stopped {run.done}"
    if name == "error" and value is not None:
        yield run.ledger, f"failed {run.done}: {type(value).__name__}"


def shown(watch: Any, *_: Any, **__: Any) -> Told:
    yield ALL, "shown " + " ".join(str(len(entry.history) - 1) for entry in watch.runs)


def rung(kept: Any, step: int, losses: dict[str, float]) -> Told:
    yield ALL, f"rung {step}: {', '.join(losses)}"
    for name, ledger in TRACKS.ledgers.items():
        if name.split(", seed")[0] in losses:
            yield ledger, f"rung {step}"


def message(collectives: Any, *_: Any, label: str = "", **__: Any) -> Told:
    if TRACKS.file is not None and label in ("", "losses", "row", "last step"):
        yield collectives.ledger, f"message {label}".rstrip()


# Function of vsim → what its calls tell, given its arguments; and whether after the call, not before.
PLACES: list[tuple[str, Callable[..., Told], bool]] = [
    ("vsim.runs.evaluate:Evaluator.__call__", of_runs("validated"), False),
    ("vsim.runs.acts.measure:measured_on", lambda of, stack, runs, *_: of_runs(f"measured {of}")(0, runs), False),
    ("vsim.runs.tracked:TrackedRun.check_weights", lambda run: of_runs("checked")(0, [run]), False),
    ("vsim.core.run:Run.__setattr__", set_in_run, True),
    ("vsim.runs.display:Display.show", shown, False),
    ("vsim.history.progress:Recorder._advance", lambda r, n, _: [(r.history.ledger, f"shown {n}")], False),
    ("vsim.search.compare:_lowest", rung, False),
    ("vsim.history.history:History.__init__", lambda history, *_: TRACKS.begin(history), True),
    ("vsim.history.history:History.append", row, False),
    ("vsim.history.history:History.amend", amended, False),
    ("vsim.history.history:History.continue_from", lambda h, old: [(h.ledger, f"resumed {len(old) - 1}")], True),
    ("vsim.checkpoint.files:Checkpoint.save", lambda c, _: [(c.history.ledger, f"saved {c.step}")], True),
    ("vsim.core.algorithm:Algorithm.change_nodes", attended, False),
    ("vsim.cluster.ledger:Ledger.record", sent, False),
    ("vsim.cluster.collectives:Collectives.broadcast", message, False),
    ("vsim.cluster.collectives:Collectives.all_gather", message, False),
    ("vsim.processes.distributed:ProcessCollectives.all_rows", lambda c, *_: message(c, label=_[-1]), False),
    ("vsim.processes.distributed:ProcessCollectives.of_processes", message, False),
    ("vsim.processes.distributed:ProcessCollectives.broadcast_object", message, False),
]


class Tracks:
    """The events of each run in their order, and in processes the events of each process.

    Attributes:
        found: name of a run → its events. file: where a process of several writes its events; None in the simulator.
    """

    def __init__(self, file: Path | None = None) -> None:
        self.found: dict[str, list[str]] = {}
        self.ledgers: dict[str, Any] = {}  # by name of a run
        self.names: dict[int, str] = {}  # by id of a ledger
        self.held: list[Any] = []  # all ledgers, so that their ids stay theirs
        self.file = file

    def begin(self, history: Any) -> Told:
        if history.strategy:
            self.held.append(history.ledger)
            self.ledgers[history.strategy] = history.ledger
            self.names[id(history.ledger)] = history.strategy
        return ()

    def tell(self, whose: Any, text: str) -> None:
        if self.file is not None:
            with open(self.file, "a", encoding="utf-8") as file:
                file.write(f"{text}\n")
        elif (name := ALL if whose is ALL else self.names.get(id(whose))) is not None:
            self.found.setdefault(name, []).append(text)


TRACKS = Tracks()


def telling(function: Callable[..., Any], tell: Callable[..., Told], after: bool) -> Callable[..., Any]:
    @functools.wraps(function)
    def told(*args: Any, **kwargs: Any) -> Any:
        result = function(*args, **kwargs) if after else None
        for whose, text in tell(*args, **kwargs):
            TRACKS.tell(whose, text)
        return result if after else function(*args, **kwargs)

    return told


def install(patch: pytest.MonkeyPatch) -> None:
    for place, tell, after in PLACES:
        module, _, name = place.partition(":")
        owner = pkgutil.resolve_name(f"{module}:{name.rpartition('.')[0]}" if "." in name else module)
        attribute = name.rpartition(".")[2]
        patch.setattr(owner, attribute, telling(getattr(owner, attribute), tell, after))


@contextmanager
def tracing() -> Iterator[dict[str, list[str]]]:
    """Note the events of the runs in this context."""
    global TRACKS
    TRACKS = Tracks()
    with pytest.MonkeyPatch.context() as patch:
        install(patch)
        yield TRACKS.found


class Tells(Acts):
    """Tells its own calls. In processes of several, it also begins the trace there, in a file of each process.

    Args:
        folder: the folder of these files; None in the simulator.
        rank: the process in which to act; None: all.
    """

    name = ""

    def __init__(self, *act: Any, folder: Path | None = None, rank: int | None = None, **acts: Any) -> None:
        super().__init__(*act, **acts)
        self.folder, self.rank = folder, rank

    def _hear(self, event: str, run: Any) -> None:
        global TRACKS
        if self.folder is not None and TRACKS.file is None:
            TRACKS = Tracks(self.folder / f"rank {dist.get_rank()}")
            install(pytest.MonkeyPatch())
        TRACKS.tell(run.ledger, f"{event} {run.done}")
        self.name = TRACKS.names.get(id(run.ledger), "")
        if self.rank is None or self.rank == dist.get_rank():
            super()._hear(event, run)

    def on_exit(self, failure: str) -> None:
        if self.name:
            TRACKS.found[self.name].append(f"on_exit {failure.partition(':')[0]}".rstrip())


def of_processes(folder: Path) -> dict[str, list[str]]:
    """Return the traces that processes have written."""
    return {path.name: path.read_text(encoding="utf-8").splitlines() for path in sorted(folder.glob("rank *"))}


def by_step(events: Sequence[str]) -> list[str]:
    """Return the events in lines, one for each step; equal ones in a row are one."""
    lines: list[list[str]] = []
    step = ""
    for event in (event for event, _ in itertools.groupby(events)):
        now = next(iter(re.findall(r"\d+", event)), step)
        if now != step or not lines:
            lines.append([])
            step = now
        lines[-1].append(event)
    return [" | ".join(line) for line in lines]
