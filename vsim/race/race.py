"""Runs that train together: in groups that fit into memory, saved and resumed as one, the best of them to the end."""

from __future__ import annotations

import statistics
import warnings
from collections.abc import Collection, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from vsim.arguments import naming
from vsim.checkpoint.files import load_checkpoint
from vsim.checkpoint.folder import Saving, checkpoint_path, checkpoints_in, folder_at, held, step_of
from vsim.cluster.randomness import isolated
from vsim.cluster.state import CheckpointError
from vsim.engine.memory import available_bytes
from vsim.race.runner import Runner, ended_by, read_end, take_end, write_end, write_whole
from vsim.race.watch import Watch
from vsim.records.history import History, read_json
from vsim.records.progress import Recorder
from vsim.training.assemble import prepare
from vsim.training.config import RunConfig
from vsim.training.interrupt import Interrupted
from vsim.training.loop import train
from vsim.training.member import Member, Run

# The share of a device's free memory for the matrices of members that train together; the rest is for activations.
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
            self._prepared([replace(runner.config, start=None, saving=None) for runner in heat])
        with Watch(self.runners, self.progress, self.title) as watch:
            for heat in heats:
                self._run_heat(heat, watch)

    def _prepared(self, configs: Sequence[RunConfig], runners: Sequence[tuple[Recorder, Runner]] = ()) -> Run:
        """Return the run of these configurations, which reports to `runners`."""
        if runners:
            recorders, own = [recorder for recorder, _ in runners], [runner for _, runner in runners]
            return prepare(configs, recorders, [r.history for r in own], self.device)
        alone = configs[0].label if len(configs) == 1 else ""  # which nobody else names
        with isolated(configs[0].seed, self.device), naming(alone):
            histories = [History(config.label, config.num_nodes, config.population) for config in configs]
            return prepare(configs, [Recorder(history) for history in histories], histories, self.device)

    def _run_heat(self, heat: Sequence[Runner], watch: Watch) -> None:
        running = self._resumed(heat)
        if not running:
            return
        with ExitStack() as stack:
            recorders = {r: Recorder(r.history, False, r.config.label, r.log) for r in running}
            # Every log is told the end of its own run.
            for runner, recorder in recorders.items():
                stack.push(lambda kind, error, trace, own=runner, recorder=recorder: _finish(recorder, own, error))
            seed = running[0].config.seed
            with isolated(seed, self.device):
                configs = [runner.config for runner in running]
                run = self._prepared(configs, [(recorders[runner], runner) for runner in running])
                for runner in running:
                    runner.config = replace(runner.config, start=None)  # which holds memory
                del configs
                run.tolerant = True
                run.ends_early = not any(r.has_begun for r in self.runners if r not in running)
                run.extra_validations = [step for step, _ in self.rungs]
                run.stopping = lambda run: self._stopped(run, running)
                run.watch = lambda run: self._collect(run, running, watch)
                for member in self._stopped(run, running):  # at a rung, where it was saved
                    member.stopped = True
                for member, runner in zip(run.members, running, strict=True):
                    if runner.finished_at is not None:
                        member.stop()
                try:
                    train(run)
                except KeyboardInterrupt as interrupt:
                    for member, runner in zip(run.members, running, strict=True):
                        if member.trains and member.done < member.max_steps:
                            runner.interrupted_at = member.done
                    step = max(member.done for member in run.members)
                    raise Interrupted(step, running[0].config.saving) from interrupt
                finally:
                    self._collect(run, running, watch)
                for member, runner in zip(run.members, running, strict=True):
                    if member.trains:
                        runner.model = member.mean_model()

    def _collect(self, run: Run, running: Sequence[Runner], watch: Watch) -> None:
        """Note which members have left, and show the progress of all."""
        for member, runner in zip(run.members, running, strict=True):
            runner.error = member.error
            if member.stopped and runner.stopped_at is None:
                runner.stopped_at = member.done
            if member.trains and member.done == member.max_steps < member.part.steps:
                runner.finished_at = member.done
            is_over = not member.trains or member.done == member.max_steps
            if is_over and runner.folder is not None and not (runner.folder / "end.json").exists():
                write_end(runner)
        watch.show(run)

    def _stopped(self, run: Run, running: Sequence[Runner]) -> Collection[Member]:
        """Return the members whose names are not among the best at a rung."""
        step = max((member.done for member in run.training), default=0)
        keep = dict(self.rungs).get(step)
        if keep is None:
            return []
        pairs = list(zip(run.members, running, strict=True))
        scores: dict[str, list[float]] = {}
        for member, runner in pairs:
            if not member.stopped:
                scores.setdefault(runner.name, []).append(_score(runner) if member.trains else float("inf"))
        best = sorted(scores, key=lambda name: statistics.fmean(scores[name]))[:keep]
        return [member for member, runner in pairs if member in run.unfinished and runner.name not in best]

    # Memory ----------------------------------------------------------------------------------------------------------

    def _heats(self) -> list[list[Runner]]:
        """Cut the runners into groups whose matrices fit into memory."""
        if not self.together:
            return [[runner] for runner in self.runners]
        room = _SHARE_OF_MATRICES * available_bytes(self.device, self.memory_share)
        heats: list[list[Runner]] = []
        taken = 0.0
        for runner in self.runners:
            own = matrix_bytes(runner.config)
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
        about = {"runs": [runner.config.label for runner in self.runners], "rungs": [list(r) for r in self.rungs]}
        path = self.folder / "race.json"
        if not self.resume:
            if path.exists() or any(checkpoints_in(folder) for folder in self._folders()):
                raise CheckpointError(
                    f"save_dir {str(self.folder)!r} holds the checkpoints of a comparison; give resume=True to "
                    "resume it, or another save_dir"
                )
            write_whole(path, about)
            return
        if not path.exists():
            raise CheckpointError(f"there is no comparison to resume in the folder {str(self.folder)!r}")
        saved = read_json(path, "compare", about)
        for what, now in about.items():
            if saved[what] != now:
                raise CheckpointError(
                    f"the comparison in {str(self.folder)!r} is another: its {what} were {saved[what]} and are {now}"
                )

    def _folders(self) -> Iterator[Path]:
        return (runner.folder for runner in self.runners if runner.folder is not None)

    def _resumed(self, heat: Sequence[Runner]) -> list[Runner]:
        """Bring runners back to the last step at which all of them were saved; return those that train on."""
        if self.folder is None or not self.resume:
            return list(heat)
        ends = {runner: read_end(runner) for runner in heat}
        saved = {r: {step_of(path) for path in checkpoints_in(r.folder)} for r in heat if r.folder is not None}
        steps = sorted(set().union(*saved.values()), reverse=True)
        common = next((s for s in steps if all(s in saved[r] or ended_by(ends[r], s) for r in heat)), 0)
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
                start = load_checkpoint(checkpoint_path(runner.folder, common if end is None else end["step"]))
                runner.finished_at = end["step"] if end is not None and end["early"] else None
                start.fill(runner.history)
                runner.config = replace(runner.config, start=start)
            running.append(runner)
        return running


def saving_in(save_dir: str | Path, name: str, interval: int | None) -> Saving:
    """Return where a runner is saved: a folder of its own in that of the race."""
    return Saving(folder_at(save_dir) / name, interval)


def matrix_bytes(config: RunConfig) -> float:
    """Return an estimate of the bytes that weights, gradients, optimizer and strategy of a run take."""
    trainable = [p for p in config.model.parameters() if p.requires_grad]
    row = sum(p.nbytes for p in trainable)
    buffers = sum(b.nbytes for b in config.model.buffers())
    in_one = not config.deterministic
    weights = 1 if in_one and config.strategy.shares_weights else config.num_nodes
    grads = 1 if in_one and config.strategy.shares_grads else config.num_nodes
    moments = len(config.strategy.optim_spec.state_names() - {"step"})
    # The state of strategies: outer weights and momentum, a residual per node.
    return float(row * (weights * (1 + moments) + grads + config.num_nodes + 3) + buffers * config.num_nodes)


def _score(runner: Runner) -> float:
    """Return the last validation loss, or without one the mean training loss of the last tenth."""
    loss = runner.history.last("global_loss")
    if loss == loss:
        return loss
    (losses,) = runner.history.measured("train_loss")
    return float(losses[-max(1, len(losses) // 10) :].mean())


def _finish(recorder: Recorder, runner: Runner, error: BaseException | None) -> bool:
    own = error if runner.error is None else runner.error
    if own is None and runner.stopped_at is not None and recorder.log is not None:
        recorder.log.finish(f"stopped after step {runner.stopped_at}")
        recorder.log = None
    recorder.__exit__(None if own is None else type(own), own, None)
    return False
