"""The files of a comparison: race.json describes it; each run has a folder, where end.json says how it ended."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from vsim.arguments import whole_number
from vsim.checkpoint.files import load_checkpoint
from vsim.checkpoint.folder import Saving, checkpoints_in, folder_at
from vsim.cluster.state import CheckpointError
from vsim.core.run import Diverged
from vsim.history.formats import checksum, write_json
from vsim.history.history import History
from vsim.reading import read_text
from vsim.training.tracked import TrackedRun


@dataclass
class RaceFolder:
    """The folder of a comparison.

    Args:
        folder: None: nothing is saved. runs: the runs, whose folders are in it. rungs: the steps of `halving`.
        configs: the configuration of each run.
    """

    folder: Path | None
    runs: Sequence[TrackedRun]
    rungs: Sequence[int] = ()
    configs: Sequence[dict[str, Any]] = ()

    def prepare(self, resume: bool | str) -> bool:
        """Return whether to resume, after making the folders of a new comparison.

        The file race.json describes the comparison, and is written before any checkpoint.

        Args:
            resume: whether to resume; "auto": if the folder holds a comparison.

        Raises:
            CheckpointError: the folder holds a comparison, and `resume` is False; or there is no such comparison.
        """
        if self.folder is None:
            return resume is True
        about = {"runs": [run.spec.label for run in self.runs], "rungs": list(self.rungs)}
        path = self.folder / "race.json"
        resumes = path.exists() if resume == "auto" else resume is True
        if not resumes:
            if path.exists():
                raise CheckpointError(
                    f"save_dir {str(self.folder)!r} holds the checkpoints of a comparison; give resume=True to "
                    "resume it, or another save_dir"
                )
            self._check_orphans(path)
            self._make()
            write_whole(path, {**about, "configs": self.configs})
            return False
        if not path.exists():
            self._check_orphans(path)
            raise CheckpointError(f"there is no comparison to resume in the folder {str(self.folder)!r}")
        saved = read_whole(path)
        if lacking := [what for what in about if what not in saved]:
            raise CheckpointError(f"{path} does not describe a comparison: it lacks {' and '.join(lacking)}")
        for what, now in about.items():
            if saved[what] != now:
                raise CheckpointError(
                    f"the comparison in {str(self.folder)!r} is another: its {what} were {saved[what]} and are {now}"
                )
        write_whole(path, {**about, "configs": self.configs})
        return True

    def _check_orphans(self, path: Path) -> None:
        """Raise a CheckpointError if the folder holds checkpoints without the file that describes them."""
        if any(checkpoints_in(folder) for folder in self.folders()):
            raise CheckpointError(
                f"save_dir {str(self.folder)!r} holds checkpoints, and {path.name}, which describes their comparison, "
                "is missing: restore the file, or give another save_dir"
            )

    def _make(self) -> None:
        """Make the folders of all runs, so that a name that cannot be a folder fails before training."""
        for run in self.runs:
            folder = run.folder
            if folder is None:
                continue
            try:
                if folder.name.lower() in ("race.json", ".lock", "tuning"):
                    raise OSError("the name is taken")
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"{run.spec.label!r} cannot be saved to a folder: {error}") from error

    def folders(self) -> Iterator[Path]:
        """Return the folders of the runs that are saved."""
        return (run.folder for run in self.runs if run.folder is not None)

    def restored(self, runs: Sequence[TrackedRun]) -> tuple[list[TrackedRun], list[Path]]:
        """Restore each run from its newest readable checkpoint.

        Returns:
            The runs left to train, and the files about earlier ends that no longer hold.
        """
        running, outdated = list[TrackedRun](), list[Path]()
        for run in runs:
            assert run.folder is not None
            end = read_end(run)
            if end is not None and not end["finished"]:
                take_end(run, end)
                continue
            running.append(run)
            start = load_checkpoint(run.folder) if checkpoints_in(run.folder) else None
            if start is not None:
                start.fill(run.history)
                run.spec = replace(run.spec, start=start)
            if end is None or start is None or end["step"] != start.step:
                outdated.append(run.folder / "end.json")
            elif end["early"]:
                run.finished_at = start.step
        return running, outdated


def saving_in(save_dir: str | Path, name: str, interval: int | None) -> Saving:
    """Return where to save a run: in a folder of its name within the comparison's folder."""
    return Saving(folder_at(save_dir) / name, interval)


def write_end(run: TrackedRun) -> None:
    """Write how a run ended to end.json in its folder, which must exist."""
    assert run.folder is not None
    content = {
        "step": run.recorded,
        "finished": _length(run) if run.error is None and run.stopped_at is None else None,
        "stopped": run.stopped_at is not None,
        "early": run.finished_at is not None,
        "diverged": run.diverged_at,
        "error": "" if run.error is None else str(run.error) or type(run.error).__name__,
        "history": run.history.as_plain(),
    }
    write_whole(run.folder / "end.json", content)


def _length(run: TrackedRun) -> list[int | None]:
    """Return the options that decide the number of steps; a finished run continues if they change."""
    return [run.spec.max_steps, run.spec.num_epochs or 1]


def write_whole(path: Path, content: dict[str, Any]) -> None:
    """Write a file with a checksum atomically, so that a killed process leaves no partial file."""
    write_json(path, {**content, "sha256": checksum(content)})


def read_whole(path: Path) -> dict[str, Any]:
    """Read a file that `write_whole` wrote.

    Raises:
        CheckpointError: the file is damaged.
    """
    try:
        content: dict[str, Any] = json.loads(read_text(path))
        known = content.pop("sha256")
    except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(f"{path} is not a file of a comparison, or is torn: {error!r}") from error
    if known != checksum(content):
        raise CheckpointError(f"{path} is damaged: its contents do not have their checksum")
    return content


def read_end(run: TrackedRun) -> dict[str, Any] | None:
    """Return the content of end.json; None if the run has not ended, or had another number of steps than asked for."""
    assert run.folder is not None
    path = run.folder / "end.json"
    if not path.exists():
        return None
    end = read_whole(path)
    try:
        history = History.from_plain(end["history"])
        whole_number("step", end["step"], at_least=0)
        of_this_length = end["early"] or end["finished"] in (None, _length(run))
    except Exception as error:
        raise CheckpointError(f"{path} does not hold the end of a run: {error!r}") from error
    if history.strategy != run.spec.label:
        raise CheckpointError(
            f"{path} is of the run {history.strategy!r}, not of {run.spec.label!r}; remove it to train this run again"
        )
    return end if of_this_length else None


def take_end(run: TrackedRun, end: dict[str, Any]) -> None:
    """Give a run the record of a run that ended before the others."""
    run.recorder.history = History.from_plain(end["history"])
    if end["stopped"]:
        run.stopped_at = int(end["step"])
    elif end["error"]:
        at = end["step"] + 1 if end["diverged"] is True else end["diverged"]  # True in files of 0.2.0
        run.error = RuntimeError(end["error"]) if not end["diverged"] else Diverged(end["error"], at)
