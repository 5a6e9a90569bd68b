"""Runs that train together: in groups that fit into memory, saved and resumed as one, the best of them to the end."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from vsim.arguments import naming
from vsim.checkpoint.files import Checkpoint, load_checkpoint
from vsim.checkpoint.folder import Saving, checkpoint_path, checkpoints_in, folder_at, held, step_of
from vsim.cluster.randomness import isolated
from vsim.cluster.state import CheckpointError
from vsim.engine.memory import available_bytes
from vsim.race.runner import Runner, ended_by, read_end, read_whole, take_end, write_end, write_whole
from vsim.race.watch import Watch
from vsim.records.history import History
from vsim.records.progress import Recorder
from vsim.training.callbacks import tell
from vsim.training.interrupt import Interrupted
from vsim.training.loop import train
from vsim.training.run import Ensemble, Run
from vsim.training.setup import prepare
from vsim.training.spec import RunSpec

# The share of a device's free memory for the matrices of runs that train together; the rest is for activations.
_SHARE_OF_MATRICES = 0.5


@dataclass
class Race:
    """Trains runners together.

    Args:
        runners: the runs, which start under identical conditions.
        device: where they are computed.
        together: whether they train at the same time, as rows of one matrix; if not, one after the other.
        memory_share: the share of the device's memory that this process may hold; None: half of the free memory.
        rungs: (step, number of names that continue): after these steps the other names are taken out; see `vsim.sweep`.
        progress: a bar, "plot" for a figure, or False. title: of the bar or figure.
        folder: where all runners are saved together, each in a folder of its own. resume: whether to resume the race in
            that folder.
    """

    runners: Sequence[Runner]
    device: torch.device
    together: bool = True
    memory_share: float | None = None
    rungs: Sequence[tuple[int, int]] = ()
    progress: bool | str = True
    title: str = ""
    folder: Path | None = None
    resume: bool = False

    def run(self) -> None:
        """Train all runners to their ends.

        Raises:
            Interrupted: by Ctrl-C; the runners hold their steps so far.
            Exception: an error of a runner in its first step, when nothing is lost yet; but not a non-finite loss.
        """
        with held(self.folder, self._folders()):
            self._check_folder()
            self._run()

    def _run(self) -> None:
        heats = self._heats()
        if len(heats) > 1 and self.together and self.rungs:
            raise ValueError(
                f"halving compares all runs at every rung, and {len(self.runners)} do not fit into memory together: "
                "take fewer settings or nodes, or a smaller model"
            )
        if len(heats) > 1 and self.together:
            sizes = ", ".join(str(len(heat)) for heat in heats)
            warnings.warn(f"trained in groups that fit into memory: {sizes} runs", UserWarning, stacklevel=3)
        for heat in heats[1:]:  # what is refused is refused before the first one trains, which says so for itself
            self._prepared([replace(runner.spec, start=None, saving=None) for runner in heat])
        with Watch(self.runners, self.progress, self.title) as watch:
            for heat in heats:
                self._run_heat(heat, watch)

    def _prepared(self, configs: Sequence[RunSpec], runners: Sequence[tuple[Recorder, Runner]] = ()) -> Ensemble:
        """Return the run of these configurations, which reports to `runners`."""
        if runners:
            recorders, own = [recorder for recorder, _ in runners], [runner for _, runner in runners]
            return prepare(configs, recorders, [r.history for r in own], self.device)
        alone = configs[0].label if len(configs) == 1 else ""  # which nobody else names
        with isolated(configs[0].seed, self.device), naming(alone):
            histories = [History(spec.label, spec.num_nodes, spec.population) for spec in configs]
            return prepare(configs, [Recorder(history) for history in histories], histories, self.device)

    def _run_heat(self, heat: Sequence[Runner], watch: Watch) -> None:
        running = self._resumed(heat)
        if not running:
            return
        with ExitStack() as stack:
            recorders = {r: Recorder(r.history, False, r.spec.label) for r in running}
            # Every callback is told the end of its own run.
            for runner, recorder in recorders.items():
                stack.push(lambda kind, error, trace, own=runner, recorder=recorder: _finish(recorder, own, error))
            seed = running[0].spec.seed
            with isolated(seed, self.device):
                configs = [runner.spec for runner in running]
                ensemble = self._prepared(configs, [(recorders[runner], runner) for runner in running])
                for runner in running:
                    runner.spec = replace(runner.spec, start=None)  # which holds memory
                del configs
                ensemble.tolerant = True
                ensemble.ends_early = not any(r.has_begun for r in self.runners if r not in running)
                ensemble.extra_validations = [step for step, _ in self.rungs]
                ensemble.stopping = lambda ensemble: self._stopped(ensemble, running)
                ensemble.watch = lambda ensemble: self._collect(ensemble, running, watch)
                for run in self._stopped(ensemble, running):  # at a rung, where it was saved
                    run.stopped = True
                for run, runner in zip(ensemble.runs, running, strict=True):
                    if runner.finished_at is not None:
                        run.stop()
                try:
                    train(ensemble)
                except KeyboardInterrupt as interrupt:
                    for run, runner in zip(ensemble.runs, running, strict=True):
                        if run.trains and run.done < run.max_steps:
                            runner.interrupted_at = run.done
                    step = max(run.done for run in ensemble.runs)
                    raise Interrupted(step, running[0].spec.saving) from interrupt
                finally:
                    self._collect(ensemble, running, watch)
                for run, runner in zip(ensemble.runs, running, strict=True):
                    if run.trains:
                        runner.model = run.mean_model()

    def _collect(self, ensemble: Ensemble, running: Sequence[Runner], watch: Watch) -> None:
        """Note which runs have left, and show the progress of all."""
        for run, runner in zip(ensemble.runs, running, strict=True):
            runner.error = run.error
            if run.stopped and runner.stopped_at is None:
                runner.stopped_at = run.done
            if run.trains and run.done == run.max_steps < run.part.steps:
                runner.finished_at = run.done
            is_over = not run.trains or run.done == run.max_steps
            if is_over and runner.folder is not None and not (runner.folder / "end.json").exists():
                try:
                    write_end(runner)
                except OSError as error:  # such as a full disk: the record is in memory
                    warnings.warn(f"how {runner.spec.label} ended is not saved: {error}", UserWarning, stacklevel=2)
        watch.show(ensemble)

    def _stopped(self, ensemble: Ensemble, running: Sequence[Runner]) -> Collection[Run]:
        """Return the runs whose names are not among the best at a rung."""
        step = max((run.done for run in ensemble.training), default=0)
        keep = dict(self.rungs).get(step)
        if keep is None:
            return []
        pairs = list(zip(ensemble.runs, running, strict=True))
        scores: dict[str, list[float]] = {}
        for run, runner in pairs:
            if not run.stopped:
                scores.setdefault(runner.name, []).append(_score(runner) if run.trains else float("inf"))
        best = sorted(scores, key=lambda name: statistics.fmean(scores[name]))[:keep]
        return [run for run, runner in pairs if run in ensemble.unfinished and runner.name not in best]

    # Memory ----------------------------------------------------------------------------------------------------------

    def _heats(self) -> list[list[Runner]]:
        """Cut the runners into groups whose matrices fit into memory."""
        if not self.together:
            return [[runner] for runner in self.runners]
        room = _SHARE_OF_MATRICES * available_bytes(self.device, self.memory_share)
        heats: list[list[Runner]] = []
        taken = 0.0
        for runner in self.runners:
            own = matrix_bytes(runner.spec)
            if not heats or taken + own > room:
                heats.append([])
                taken = 0.0
            heats[-1].append(runner)
            taken += own
        return heats

    # Saved together --------------------------------------------------------------------------------------------------

    def _check_folder(self) -> None:
        """Raise a CheckpointError unless the folder is empty, or holds this very race, which resumes.

        race.json describes the race; it is written before anything is saved.
        """
        if self.folder is None:
            return
        about = {"runs": [runner.spec.label for runner in self.runners], "rungs": [list(r) for r in self.rungs]}
        path = self.folder / "race.json"
        if not self.resume:
            if path.exists() or any(checkpoints_in(folder) for folder in self._folders()):
                raise CheckpointError(
                    f"save_dir {str(self.folder)!r} holds the checkpoints of a comparison; give resume=True to "
                    "resume it, or another save_dir"
                )
            self._make_folders()
            write_whole(path, about)
            return
        if not path.exists():
            raise CheckpointError(f"there is no comparison to resume in the folder {str(self.folder)!r}")
        saved = read_whole(path)
        for what, now in about.items():
            if saved.get(what) != now:
                raise CheckpointError(
                    f"the comparison in {str(self.folder)!r} is another: its {what} were {saved.get(what)} and are "
                    f"{now}"
                )

    def _make_folders(self) -> None:
        """Make the folders of all runs, so that a name which cannot be one is an error before training."""
        for runner in self.runners:
            folder = runner.folder
            if folder is None:
                continue
            try:
                if folder.name.lower() in ("race.json", ".lock"):
                    raise OSError("the name is taken")
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"{runner.spec.label!r} cannot be saved to a folder: {error}") from error

    def _folders(self) -> Iterator[Path]:
        return (runner.folder for runner in self.runners if runner.folder is not None)

    def _resumed(self, heat: Sequence[Runner]) -> list[Runner]:
        """Bring runners back to the last step at which all of them were saved; return those that train on."""
        if self.folder is None or not self.resume:
            return list(heat)
        ends = {runner: read_end(runner) for runner in heat}
        saved = {r: {step_of(path) for path in checkpoints_in(r.folder)} for r in heat if r.folder is not None}
        steps = sorted(set().union(*saved.values()), reverse=True)
        shared = [step for step in steps if all(step in saved[r] or ended_by(ends[r], step) for r in heat)]
        common, starts = self._starts(shared, ends)
        running = []
        for runner in heat:
            assert runner.folder is not None
            for path in checkpoints_in(runner.folder):
                if step_of(path) > common:
                    path.unlink()
            end = ends[runner] if ended_by(ends[runner], common) else None
            if common and end is not None and not end["finished"]:
                take_end(runner, end)
                continue
            if not common or end is None:
                (runner.folder / "end.json").unlink(missing_ok=True)
            if common:
                runner.finished_at = end["step"] if end is not None and end["early"] else None
                starts[runner].fill(runner.history)
                runner.spec = replace(runner.spec, start=starts[runner])
            running.append(runner)
        return running

    def _starts(
        self, steps: Sequence[int], ends: Mapping[Runner, dict[str, Any] | None]
    ) -> tuple[int, dict[Runner, Checkpoint]]:
        """Return the first of `steps` at which the checkpoints of all runs can be read, and these; without any, step 0.

        Raises:
            CheckpointError: all of them are damaged.
        """
        problem: CheckpointError | None = None
        for step in steps:
            try:
                starts = {}
                for runner, end in ends.items():
                    ended = end if ended_by(end, step) else None
                    assert runner.folder is not None
                    if ended is None or ended["finished"]:
                        at = step if ended is None else ended["step"]
                        starts[runner] = load_checkpoint(checkpoint_path(runner.folder, at))
            except CheckpointError as error:
                problem = problem or error
                continue
            if problem is not None:
                warnings.warn(f"{problem}; all runs resume from step {step} instead", UserWarning, stacklevel=2)
            return step, starts
        if problem is not None:
            raise problem
        return 0, {}


def saving_in(save_dir: str | Path, name: str, interval: int | None) -> Saving:
    """Return where a runner is saved: a folder of its own in that of the race."""
    return Saving(folder_at(save_dir) / name, interval)


def matrix_bytes(spec: RunSpec) -> float:
    """Return an estimate of the bytes that weights, gradients, optimizer and strategy of a run take."""
    trainable = [p for p in spec.model.parameters() if p.requires_grad]
    row = sum(p.nbytes for p in trainable)
    buffers = sum(b.nbytes for b in spec.model.buffers())
    in_one = not spec.deterministic
    weights = 1 if in_one and spec.strategy.shares_weights else spec.num_nodes
    grads = 1 if in_one and spec.strategy.shares_grads else spec.num_nodes
    moments = len(spec.strategy.optim_spec.state_names() - {"step"})
    # The state of strategies: outer weights and momentum, a residual per node.
    return float(row * (weights * (1 + moments) + grads + spec.num_nodes + 3) + buffers * spec.num_nodes)


def _score(runner: Runner) -> float:
    """Return the last validation loss, or without one the mean training loss of the last tenth."""
    loss = runner.history.last("global_loss")
    if loss == loss:
        return loss
    (losses,) = runner.history.measured("train_loss")
    return float(losses[-max(1, len(losses) // 10) :].mean())


def _finish(recorder: Recorder, runner: Runner, error: BaseException | None) -> bool:
    own = error if runner.error is None else runner.error
    failure = "" if own is None else f"{type(own).__name__}: {own}"
    if own is None and runner.stopped_at is not None:
        failure = f"stopped after step {runner.stopped_at}"
    recorder.__exit__(None if own is None else type(own), own, None)
    for callback in runner.spec.callbacks:
        tell(callback, "on_exit", failure)
    return False
