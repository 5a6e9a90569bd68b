"""One run of a race: its configuration, its outcome, and the file that says how it ended."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import nn

from vsim.checkpoint.folder import replacing
from vsim.cluster.state import CheckpointError
from vsim.records.history import History, write_json
from vsim.training.spec import RunSpec


@dataclass(eq=False)
class Runner:
    """One run of a race, and its outcome.

    Attributes:
        name: of its strategy or setting, the same for all seeds.
        config: its checked arguments.
        history, model: its record, and the mean of its nodes' final models if it reached its end.
        error: why it left. stopped_at: the step after which a rung took it out. interrupted_at: the last step before an
            interrupt. finished_at: the step after which a callback stopped it, before the others.
    """

    name: str
    spec: RunSpec
    history: History = field(init=False)
    model: nn.Module | None = None
    error: Exception | None = None
    stopped_at: int | None = None
    interrupted_at: int | None = None
    finished_at: int | None = None

    def __post_init__(self) -> None:
        self.history = History(self.spec.label, self.spec.num_nodes, self.spec.population)

    @property
    def has_begun(self) -> bool:
        """Whether there is a record."""
        return len(self.history) > 0

    @property
    def diverged_at(self) -> int | None:
        """The first step with a loss or weights that are not finite."""
        if not isinstance(self.error, FloatingPointError):
            return None
        at = re.search(r"step (\d+)", str(self.error))
        return int(at[1]) if at else len(self.history)

    @property
    def folder(self) -> Path | None:
        """The folder of its checkpoints; None: it is not saved."""
        return None if self.spec.saving is None else self.spec.saving.folder


def write_end(runner: Runner) -> None:
    """Write how a run ended to its folder, which must be there."""
    assert runner.folder is not None
    content = {
        "step": int(runner.history["step"][-1]),
        "finished": _length(runner) if runner.error is None and runner.stopped_at is None else None,
        "stopped": runner.stopped_at is not None,
        "early": runner.finished_at is not None,
        "diverged": isinstance(runner.error, FloatingPointError),
        "error": "" if runner.error is None else str(runner.error),
        "history": runner.history.as_plain(),
    }
    write_whole(runner.folder / "end.json", content)


def _length(runner: Runner) -> list[int | None]:
    """Return what decides how many steps a run has; a longer one goes on where this one ended."""
    return [runner.spec.max_steps, runner.spec.num_epochs]


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write a file that is whole or not there at all, whenever the process is killed, and that has a checksum."""
    with replacing(path) as part:
        write_json(part, {**content, "sha256": _checksum(content)})


def read_whole(path: Path) -> dict[str, Any]:
    """Read what `write_whole` wrote.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        known = content.pop("sha256")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a file of a comparison, or is torn: {error!r}") from error
    if known != _checksum(content):
        raise CheckpointError(f"{path} is damaged: its contents do not have their checksum")
    return content


def _checksum(content: dict[str, Any]) -> str:
    as_read = json.loads(json.dumps(content))
    return hashlib.sha256(json.dumps(as_read, sort_keys=True).encode()).hexdigest()


def read_end(runner: Runner) -> dict[str, Any] | None:
    """Return how a run of this length ended, None if it did not."""
    assert runner.folder is not None
    path = runner.folder / "end.json"
    end = read_whole(path) if path.exists() else None
    return None if end is None or not (end["early"] or end["finished"] in (None, _length(runner))) else end


def ended_by(end: dict[str, Any] | None, step: int) -> bool:
    """Whether a run had ended when the others were at a step."""
    return end is not None and end["step"] <= step


def take_end(runner: Runner, end: dict[str, Any]) -> None:
    """Give a runner the record of a run that left before the others."""
    runner.history = History.from_plain(end["history"])
    if end["stopped"]:
        runner.stopped_at = int(end["step"])
    elif end["error"]:
        runner.error = (FloatingPointError if end["diverged"] else RuntimeError)(end["error"])
