"""The user's arguments on checkpoints: where a run starts, and where and when it is saved."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vsim.checkpoint.files import Checkpoint, load_checkpoint
from vsim.checkpoint.folder import checkpoint_path, checkpoints_in, folder_at, step_of
from vsim.cluster.state import CheckpointError
from vsim.records.history import History


@dataclass(frozen=True)
class Start:
    """Where a run starts: a checkpoint, or the file of one, under its usual name, which every process reads itself."""

    checkpoint: Checkpoint | Path
    forks: bool = False
    keeps_optimizer: bool = True

    def open(self) -> Checkpoint:
        """Return the checkpoint."""
        if isinstance(self.checkpoint, Checkpoint):
            return self.checkpoint
        return replace(load_checkpoint(self.checkpoint), forks=self.forks, keeps_optimizer=self.keeps_optimizer)

    @property
    def step(self) -> int:
        """The completed steps of the checkpoint."""
        return self.checkpoint.step if isinstance(self.checkpoint, Checkpoint) else step_of(self.checkpoint)

    def fill(self, history: History) -> None:
        """Fill an empty history with the record so far, unless this is a fork."""
        checkpoint = self.open()
        if not checkpoint.forks:
            history.continue_from(checkpoint.history)

    def shipped(self, folder: Path) -> Start:
        """Return it as a file, which is written to `folder` if there is none."""
        checkpoint = self.open()
        path = checkpoint.path
        if path is None:
            path = checkpoint_path(folder, checkpoint.step)
            checkpoint.save(path)
        return Start(path, checkpoint.forks, checkpoint.keeps_optimizer)


@dataclass(frozen=True)
class Saving:
    """Where a run is saved, and when.

    Attributes:
        folder: gets a file a checkpoint.
        interval: steps between checkpoints; None: only at the end, and when the run is interrupted.
        wanted: whether the user asked for it. If not, only an interrupted run is saved, to be resumed in this process.
    """

    folder: Path
    interval: int | None
    wanted: bool = True


def start_of(resume: Any, save_dir: str | Path | None, last: Any) -> Start | None:
    """Return where a run starts that is given `resume`; None: at the beginning.

    Args:
        resume: True (from `save_dir`, or without one from the `last` run of this trainer), a file, a folder, or a
            Checkpoint; False or None for a new run.
    """
    if resume is None or resume is False:
        return None
    if isinstance(resume, Checkpoint):
        return Start(resume)
    if resume is True and save_dir is None:
        if last is None:
            raise CheckpointError(
                "resume=True without save_dir resumes this trainer's last run, and there is none in memory; give "
                "save_dir, or the path of a checkpoint"
            )
        return Start(last)
    if resume is not True and not isinstance(resume, str | Path):
        raise TypeError(f"resume must be True, a path or a Checkpoint, got {resume!r}")
    return Start(load_checkpoint(save_dir if resume is True else resume))  # type: ignore[arg-type]


def saving_of(checkpoint_interval: int | None, save_dir: str | Path | None, start: Start | None) -> Saving | None:
    """Return where a run is saved; None: nowhere.

    Raises:
        CheckpointError: it is no folder, or what is in it is of another run, or of later steps.
        TypeError, ValueError: checkpoint_interval without save_dir, or save_dir is no path.
    """
    if save_dir is None:
        if checkpoint_interval is not None:
            raise ValueError("checkpoint_interval has no effect without save_dir, the folder to save to")
        return None
    folder = folder_at(save_dir)
    found = checkpoints_in(folder)
    at = None if start is None else start.open()
    if found and (at is None or at.forks or not (at.path in found or step_of(found[-1]) <= at.step)):
        raise CheckpointError(
            f"save_dir {str(save_dir)!r} holds the checkpoints of a run, up to {found[-1].name}; give resume=True to "
            "resume it, or another save_dir"
        )
    return Saving(folder, checkpoint_interval)


def kept_in_memory(saving: Saving) -> Checkpoint | None:
    """Return the checkpoint that processes saved of an interrupted run, to resume when their folder may be gone."""
    if not checkpoints_in(saving.folder):
        return None
    checkpoint = load_checkpoint(saving.folder)
    return checkpoint if saving.wanted else replace(checkpoint, path=None)
