"""Train the runs of a comparison in ensembles that fit into memory; save and resume all runs together."""

from __future__ import annotations

import copy
import json
import math
import re
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vsim.arguments import naming, whole_number
from vsim.checkpoint.files import load_checkpoint
from vsim.checkpoint.folder import Saving, checkpoints_in, folder_at, locked
from vsim.cluster.collectives import Collectives
from vsim.cluster.ledger import Ledger
from vsim.cluster.randomness import fingerprints, isolated
from vsim.cluster.replicas import Replicas, Views
from vsim.cluster.state import CheckpointError
from vsim.engine.memory import available_bytes
from vsim.network.timeline import duration
from vsim.reading import read_text
from vsim.records.history import History, checksum, write_json
from vsim.records.progress import LiveRace, LiveTable, Recorder, Reporter, StepReport
from vsim.training.callbacks import Relay, notify, savable
from vsim.training.interrupt import Interrupt, Interrupted
from vsim.training.loop import DRAW_FROM_NODES, Ensemble
from vsim.training.run import Diverged, Run
from vsim.training.setup import prepare
from vsim.training.spec import RunSpec

# Share of a device's free memory for the matrices of runs that train together; the rest is for activations.
_SHARE_OF_MATRICES = 0.5
_SECONDS_BETWEEN = 0.1  # updates of a progress bar
Keep = Callable[[int, Mapping[str, float]], Collection[str]]


@dataclass(eq=False)
class Entry:
    """One run of a comparison: its options and its outcome.

    Attributes:
        name: the name of the run's strategy or setting, the same for all seeds.
        spec: the run's options.
        history: the run's record. model: the mean of the nodes' final models, once the run is complete.
        error: the error that ended the run. stopped_at: the step after which `Entries.keep` stopped the run.
        finished_at: the step after which a callback ended the run early.
    """

    name: str
    spec: RunSpec
    history: History = field(init=False)
    model: nn.Module | None = None
    error: Exception | None = None
    stopped_at: int | None = None
    finished_at: int | None = None

    def __post_init__(self) -> None:
        self.history = History(self.spec.label, self.spec.num_nodes, self.spec.population)

    @property
    def has_begun(self) -> bool:
        """Whether the history has a row."""
        return len(self.history) > 0

    @property
    def has_outcome(self) -> bool:
        """Whether the run is complete, has failed, or was stopped by `keep`; an interrupted run has no outcome."""
        return any(one is not None for one in (self.model, self.error, self.stopped_at))

    @property
    def diverged_at(self) -> int | None:
        """The first step with a loss or weights that are not finite."""
        if not isinstance(self.error, Diverged):
            return None
        at = re.search(r"step (\d+)", str(self.error))
        return int(at[1]) if at else len(self.history)

    @property
    def folder(self) -> Path | None:
        """The folder of the run's checkpoints; None if the run is not saved."""
        return None if self.spec.saving is None else self.spec.saving.folder


class Processes:
    """The processes that compute a comparison. This base class stands for a single process."""

    @property
    def is_first(self) -> bool:
        """Whether this is the first process, which writes files."""
        return True

    connect: Callable[[Ledger, RunSpec], Collectives] | None = None  # makes the collectives of a run

    def agreed(self, value: Any) -> Any:
        """Return the first process's value in every process; every process has to call this."""
        return value


@dataclass
class Outcome:
    """A message from the first process about the start or end of a run; steps are sent as `StepReport`.

    Attributes:
        error, stopped_at, finished_at: see `Entry`.
        record: at the start of a resumed run, its history as plain values, and the history's last step.
        weights (P,), buffers: the mean model of a complete run. callbacks: the states of its callbacks.
    """

    error: Exception | None = None
    stopped_at: int | None = None
    finished_at: int | None = None
    record: tuple[dict[str, Any], int] | None = None
    weights: Tensor | None = None
    buffers: Views = field(default_factory=dict)
    callbacks: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, model: nn.Module, callbacks: Sequence[Any]) -> Outcome:
        """Return the outcome of a complete run with this mean model."""
        weights = torch.cat([p.detach().reshape(-1) for p in model.parameters() if p.requires_grad]).cpu()
        buffers = {name: b.cpu() for name, b in model.named_buffers()}
        states = {name: one.state_dict() for name, one in savable(callbacks).items()}
        return cls(weights=weights, buffers=buffers, callbacks=states)

    def model(self, like: nn.Module) -> nn.Module:
        """Return the mean model, as a copy of the model that was trained."""
        assert self.weights is not None
        return Replicas.of(like, 1, torch.device("cpu")).as_module(self.weights, self.buffers, like=like)


@dataclass
class Entries:
    """The runs of a comparison, which train together.

    Args:
        entries: the runs, which start under identical conditions.
        device: computes the runs.
        together: whether the runs train at the same time, as rows of one matrix; if not, one after the other.
        memory_share: the share of the device's memory that this process may hold; None: half of the free memory.
        portion: the share of every run's nodes that the device holds.
        rungs: steps after which `keep` decides which runs continue, see `vsim.sweep` and `vsim.tune`.
        keep: called at a rung as keep(step, scores), scores being name → mean loss over the seeds (inf after a
            failure); returns the names whose runs continue.
        progress: True for a bar, "plot" for a figure, "table" for a table in a terminal, or False.
        title: title of the progress display.
        folder: the comparison's folder, with a folder in it for each entry; None: nothing is saved.
        resume: whether to resume from `folder`; "auto": resume if `folder` holds a comparison.
        configs: the configuration of each run, saved in the folder.
        processes: the processes that compute the comparison, and this process's place among them.
        notify: called as notify(number of an entry, its `StepReport` or `Outcome`).
        interrupt: holds the user's request to stop after the current step.
    """

    entries: Sequence[Entry]
    device: torch.device
    together: bool = True
    memory_share: float | None = None
    portion: float = 1.0
    rungs: Sequence[int] = ()
    keep: Keep | None = None
    progress: bool | str = True
    title: str = ""
    folder: Path | None = None
    resume: bool | str = False
    configs: Sequence[dict[str, Any]] = ()
    processes: Processes = field(default_factory=Processes)
    notify: Callable[[int, Any], None] = lambda number, message: None
    interrupt: Interrupt = field(default_factory=Interrupt)
    _sent: dict[Entry, tuple[Any, ...]] = field(default_factory=dict, init=False)

    def run(self, train: Callable[[], None] | None = None) -> None:
        """Train all entries to their last steps.

        Args:
            train: trains the entries; default `train_here`.

        Raises:
            Interrupted: on Ctrl-C; the entries hold their steps so far and, if they have ended, their outcomes.
            Exception: an entry fails in its first step, when no progress is lost. A non-finite loss only ends its run.
        """
        with ExitStack() as holding:
            if self.processes.is_first:
                holding.enter_context(locked(self.folder, self._folders()))
                self._check_folder()
            self.resume = self.processes.agreed(self.resume)  # after the first process has checked the folder
            (train or self.train_here)()

    def train_here(self) -> None:
        """Train all entries; with several processes, train this process's rows of all entries."""
        ensembles = self._ensembles()
        if len(ensembles) > 1 and self.together and self.rungs:
            raise ValueError(
                f"halving and pruners compare all runs at every rung, and {len(self.entries)} do not fit into memory "
                "together: take fewer settings, trials or nodes, or a smaller model"
            )
        if len(ensembles) > 1 and self.together:
            sizes = ", ".join(str(len(entries)) for entries in ensembles)
            warnings.warn(f"trained in groups that fit into memory: {sizes} runs", UserWarning, stacklevel=3)
        for entries in ensembles[1:]:  # find errors before the first ensemble trains
            self._prepared([replace(entry.spec, start=None, saving=None) for entry in entries]).end()
        with self.interrupt, _Watch(self.entries, self.progress, self.title) as watch:
            for entries in ensembles:
                interrupted: BaseException | None = None
                try:
                    self._train(entries, watch)
                except KeyboardInterrupt as error:
                    interrupted = error
                if interrupted is not None or self.processes.agreed(self.interrupt.requested):
                    step = max(len(entry.history) - 1 for entry in entries)
                    raise Interrupted(max(step, 0), entries[0].spec.saving) from interrupted

    def train_elsewhere(self, launch: Callable[[Entries, Callable[[int, Any], None]], Any]) -> None:
        """Train all entries in several other processes, and keep the records in this process.

        If the processes fail after their first step, the entries keep their records and the error.

        Args:
            launch: called with the entries to train and a function for the first process's messages, see `notify`.
        """
        recorders = [Recorder(entry.history, False, entry.spec.label) for entry in self.entries]
        relays = [
            Relay(recorder, entry.spec.callbacks) for recorder, entry in zip(recorders, self.entries, strict=True)
        ]
        losses: dict[int, float] = {}  # number of an entry → last training loss
        with _Watch(self.entries, self.progress, self.title) as watch, ExitStack() as ending:
            for recorder, entry in zip(recorders, self.entries, strict=True):
                ending.push(lambda kind, error, trace, own=entry, recorder=recorder: _finish(recorder, own, error))

            def receive(number: int, message: Any) -> None:
                entry = self.entries[number]
                if isinstance(message, Outcome):
                    entry.error, entry.stopped_at, entry.finished_at = _end_of(message)
                    if message.record is not None:
                        entry.history.continue_from(History.from_plain(message.record[0]))
                    if message.weights is not None:
                        entry.model = message.model(like=entry.spec.model)
                        relays[number].end(message.callbacks)
                else:
                    relays[number](message)
                    if "train_loss" in message.row:
                        losses[number] = message.row["train_loss"]
                    known = [loss for loss in losses.values() if math.isfinite(loss)]
                    watch.steps[entry] = message.max_steps
                    watch.show(min(known, default=None), message.preparing)

            entries = [
                Entry(e.name, for_elsewhere(e.spec, relay)) for e, relay in zip(self.entries, relays, strict=True)
            ]
            try:
                launch(replace(self, entries=entries), receive)
            except Exception as error:
                if self.interrupt.explains(error):
                    raise Interrupted(max(len(e.history) for e in self.entries) - 1, entries[0].spec.saving) from error
                little = isinstance(error, CheckpointError) and all(len(e.history) <= 2 for e in self.entries)
                if not losses or little:  # an error of the first step
                    raise
                for entry in self.entries:
                    if not entry.has_outcome:
                        entry.error = error

    def _prepared(self, configs: Sequence[RunSpec], entries: Sequence[tuple[Recorder, Entry]] = ()) -> Ensemble:
        """Set up an ensemble of these configurations that reports to `entries`."""
        if entries:
            own = [entry for _, entry in entries]
            reporters = [self._reporter(recorder, entry) for recorder, entry in entries]
            histories = [entry.history for entry in own]
            return prepare(configs, reporters, histories, self.device, self.processes.connect, self.interrupt)
        alone = configs[0].label if len(configs) == 1 else ""  # with several runs, `prepare` names the run in errors
        with isolated(configs[0].seed, self.device), naming(alone):
            histories = [History(spec.label, spec.num_nodes, spec.population) for spec in configs]
            recorders = [Recorder(history) for history in histories]
            return prepare(configs, recorders, histories, self.device, self.processes.connect)

    def _reporter(self, recorder: Recorder, entry: Entry) -> Reporter:
        number = self.entries.index(entry)

        def report(report: StepReport) -> None:
            recorder(report)
            self.notify(number, report)

        return report

    def _train(self, entries: Sequence[Entry], watch: _Watch) -> None:
        running = self._resumed(entries)
        for entry in entries:
            if entry.has_begun:
                self._notify_outcome(entry, Outcome(record=(entry.history.as_plain(), int(entry.history["step"][-1]))))
        if not running:
            return
        with ExitStack() as ending:
            recorders = {r: Recorder(r.history, False, r.spec.label) for r in running}
            for recorder in recorders.values():
                recorder.has_warned = not self.processes.is_first
            # Call `on_exit` of every run's callbacks. With several processes, `train_elsewhere` calls it.
            for entry, recorder in recorders.items() if self.processes.connect is None else ():
                ending.push(lambda kind, error, trace, own=entry, recorder=recorder: _finish(recorder, own, error))
            seed = running[0].spec.seed
            with isolated(seed, self.device):
                configs = [entry.spec for entry in running]
                untouched = fingerprints(self.device)
                ensemble = self._prepared(configs, [(recorders[entry], entry) for entry in running])
                if len(running) > 1:
                    ensemble.check_draws(untouched, ensemble.runs[0], "the setup of a strategy")
                for entry in running:
                    entry.spec = replace(entry.spec, start=None)  # free the checkpoint's memory
                del configs
                ensemble.tolerant = True
                ensemble.ends_early = not any(r.has_begun for r in self.entries if r not in running)
                ensemble.stopping = lambda ensemble: self._stopped(ensemble, running)
                ensemble.watch = lambda ensemble: self._collect(ensemble, running, watch)
                for run in self._stopped(ensemble, running):  # the checkpoint may be from a rung's step
                    run.stopped = True
                for run, entry in zip(ensemble.runs, running, strict=True):
                    run.rungs = self.rungs
                    if entry.finished_at is not None:
                        run.stop()
                self._collect(ensemble, running, watch)  # shows what will train while the first step is prepared
                try:
                    ensemble.train()
                finally:
                    self._collect(ensemble, running, watch, last=True)
                if len(running) > 1 and fingerprints(self.device) != untouched:
                    warnings.warn(
                        "a model, strategy or callback draws from the global random generators, but not in its first "
                        f"steps: runs differ from their own Trainer.fit; give together=False, or {DRAW_FROM_NODES}",
                        UserWarning,
                        stacklevel=4,
                    )

    def _collect(self, ensemble: Ensemble, running: Sequence[Entry], watch: _Watch, last: bool = False) -> None:
        """Keep the models of complete runs, note which runs stopped early, and show the progress of all runs.

        Args:
            last: whether training is over; after an error, other processes may not make this call.
        """
        alone = self.processes.connect is None
        for run, entry in zip(ensemble.runs, running, strict=True):
            entry.error = run.error
            if run.stopped and entry.stopped_at is None:
                entry.stopped_at = run.done
            if run.concluded and run.done < run.steps:
                entry.finished_at = run.done
            outcome = None
            if run.concluded and entry.model is None and (alone or not last):
                entry.model = run.mean_model()
                outcome = None if alone else Outcome.of(entry.model, entry.spec.callbacks)
            self._notify_outcome(entry, outcome)
            if not self.processes.is_first:
                continue
            if entry.has_outcome and entry.folder is not None and not (entry.folder / "end.json").exists():
                try:
                    write_end(entry)
                except OSError as error:  # for instance, the disk is full; the record is still in memory
                    warnings.warn(f"how {entry.spec.label} ended is not saved: {error}", UserWarning, stacklevel=2)
        best = [loss for run in ensemble.training if (loss := run.row.get("train_loss", math.nan)) == loss]
        preparing = next(filter(None, (stack.executor.preparing for stack in ensemble.stacks)), "")
        watch.steps |= {entry: run.steps for run, entry in zip(ensemble.runs, running, strict=True)}
        watch.show(min(best, default=None), preparing, last)

    def _notify_outcome(self, entry: Entry, outcome: Outcome | None = None) -> None:
        """Send an outcome. If none is given, send how the run ended, unless that was sent before."""
        known = _end_of(entry)
        if outcome is not None or known != self._sent.get(entry, (None, None, None)):
            self._sent[entry] = known
            outcome = outcome or Outcome()
            outcome.error, outcome.stopped_at, outcome.finished_at = known
            self.notify(self.entries.index(entry), outcome)

    def _stopped(self, ensemble: Ensemble, running: Sequence[Entry]) -> Collection[Run]:
        """Return the runs to stop: those that `keep` does not name, once all unfinished runs have reached a rung."""
        step = min((run.done for run in ensemble.unfinished), default=0)
        if self.keep is None or step not in self.rungs:
            return []
        scores: dict[str, list[float]] = {}
        for entry in self.entries:  # also those that ended before a resume: the decision must not depend on it
            if entry.stopped_at is None or entry.stopped_at >= step:
                scores.setdefault(entry.name, []).append(_score(entry, step))
        kept = self.processes.agreed(self.keep(step, {name: statistics.fmean(own) for name, own in scores.items()}))
        pairs = zip(ensemble.runs, running, strict=True)
        return [run for run, entry in pairs if run in ensemble.unfinished and entry.name not in kept]

    # Memory ----------------------------------------------------------------------------------------------------------

    def _ensembles(self) -> list[list[Entry]]:
        """Cut the entries into groups whose matrices fit into memory."""
        if not self.together:
            return [[entry] for entry in self.entries]
        room = self.processes.agreed(_SHARE_OF_MATRICES * available_bytes(self.device, self.memory_share))
        ensembles: list[list[Entry]] = []
        taken = 0.0
        for entry in self.entries:
            own = self.portion * matrix_bytes(entry.spec)
            if not ensembles or taken + own > room:
                ensembles.append([])
                taken = 0.0
            ensembles[-1].append(entry)
            taken += own
        return ensembles

    # Saved together --------------------------------------------------------------------------------------------------

    def _check_folder(self) -> None:
        """Raise a CheckpointError unless the folder is empty, or holds this comparison and `resume` is set.

        The file race.json describes the comparison, and is written before any checkpoint.
        """
        if self.folder is None:
            return
        about = {"runs": [entry.spec.label for entry in self.entries], "rungs": list(self.rungs)}
        path = self.folder / "race.json"
        self.resume = path.exists() if self.resume == "auto" else self.resume
        if not self.resume:
            if path.exists():
                raise CheckpointError(
                    f"save_dir {str(self.folder)!r} holds the checkpoints of a comparison; give resume=True to "
                    "resume it, or another save_dir"
                )
            self._check_orphans(path)
            self._make_folders()
            write_whole(path, {**about, "configs": self.configs})
            return
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

    def _check_orphans(self, path: Path) -> None:
        """Raise a CheckpointError if the folder holds checkpoints without the file that describes them."""
        if any(checkpoints_in(folder) for folder in self._folders()):
            raise CheckpointError(
                f"save_dir {str(self.folder)!r} holds checkpoints, and {path.name}, which describes their comparison, "
                "is missing: restore the file, or give another save_dir"
            )

    def _make_folders(self) -> None:
        """Make the folders of all runs, so that a name that cannot be a folder fails before training."""
        for entry in self.entries:
            folder = entry.folder
            if folder is None:
                continue
            try:
                if folder.name.lower() in ("race.json", ".lock", "tuning"):
                    raise OSError("the name is taken")
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise CheckpointError(f"{entry.spec.label!r} cannot be saved to a folder: {error}") from error

    def _folders(self) -> Iterator[Path]:
        return (entry.folder for entry in self.entries if entry.folder is not None)

    def _resumed(self, entries: Sequence[Entry]) -> list[Entry]:
        """Restore each entry from its newest readable checkpoint; return the entries left to train."""
        if self.folder is None or not self.resume:
            return list(entries)
        running, outdated = [], []
        for entry in entries:
            assert entry.folder is not None
            end = read_end(entry)
            if end is not None and not end["finished"]:
                take_end(entry, end)
                continue
            running.append(entry)
            start = load_checkpoint(entry.folder) if checkpoints_in(entry.folder) else None
            if start is not None:
                start.fill(entry.history)
                entry.spec = replace(entry.spec, start=start)
            if end is None or start is None or end["step"] != start.step:
                outdated.append(entry.folder / "end.json")
            elif end["early"]:
                entry.finished_at = start.step
        self.processes.agreed(None)  # all have read the folders
        for path in outdated if self.processes.is_first else ():
            path.unlink(missing_ok=True)
        return running


def _end_of(run: Entry | Outcome) -> tuple[Exception | None, int | None, int | None]:
    return run.error, run.stopped_at, run.finished_at


def copied_callbacks(spec: RunSpec) -> list[Any]:
    """Return copies of a run's callbacks; model, data and loss function stay shared."""
    data = spec.train_dataset, spec.val_dataset, spec.test_dataset
    shared = {id(one): one for one in (spec.model, *data, spec.loss_fn)}
    return copy.deepcopy(list(spec.callbacks), shared)


def for_elsewhere(spec: RunSpec, relay: Relay) -> RunSpec:
    """Return a run's options for the processes that train it: without loggers and hooks, which stay in this process."""
    spec = replace(spec, callbacks=relay.remote, train_loss_hook=None, eval_loss_hook=None)
    return replace(spec, logger=None, run_name=None, wandb_project=None, log_x_axis="step", log_interval=1)


def saving_in(save_dir: str | Path, name: str, interval: int | None) -> Saving:
    """Return where to save an entry: in a folder of its name within the comparison's folder."""
    return Saving(folder_at(save_dir) / name, interval)


def matrix_bytes(spec: RunSpec) -> float:
    """Estimate the bytes of a run's weights, gradients, optimizer state and strategy state."""
    trainable = [p for p in spec.model.parameters() if p.requires_grad]
    row = sum(p.nbytes for p in trainable)
    buffers = sum(b.nbytes for b in spec.model.buffers())
    moments = len(spec.strategy.optim_spec.state_names() - {"step"})
    # Assume that a strategy keeps outer weights, momentum, and one residual per node.
    return float(row * (spec.num_nodes * (3 + moments) + 3) + buffers * spec.num_nodes)


def _score(entry: Entry, step: int) -> float:
    """Return the last validation loss up to a step, or else the mean training loss of the last tenth of steps.

    Infinite if the run had failed by then.
    """
    if entry.error is not None and (entry.diverged_at or int(entry.history["step"][-1])) <= step:
        return math.inf
    known = entry.history["step"] <= step
    validated = entry.history["global_loss"][known]
    if len(validated := validated[~np.isnan(validated)]):
        return float(validated[-1])
    losses = entry.history["train_loss"][known]
    losses = losses[~np.isnan(losses)]
    return float(losses[-max(1, len(losses) // 10) :].mean())


def _finish(recorder: Recorder, entry: Entry, error: BaseException | None) -> bool:
    own = entry.error if entry.has_outcome else error
    failure = "" if own is None else f"{type(own).__name__}: {own}"
    if own is None and entry.stopped_at is not None:
        failure = f"stopped after step {entry.stopped_at}"
    recorder.__exit__(None if own is None else type(own), own, None)
    for callback in entry.spec.callbacks:
        notify(callback, "on_exit", failure)
    return False


# How a run ended, in a file -------------------------------------------------------------------------------------------


def write_end(entry: Entry) -> None:
    """Write how a run ended to end.json in its folder, which must exist."""
    assert entry.folder is not None
    content = {
        "step": int(entry.history["step"][-1]),
        "finished": _length(entry) if entry.error is None and entry.stopped_at is None else None,
        "stopped": entry.stopped_at is not None,
        "early": entry.finished_at is not None,
        "diverged": isinstance(entry.error, Diverged),
        "error": "" if entry.error is None else str(entry.error),
        "history": entry.history.as_plain(),
    }
    write_whole(entry.folder / "end.json", content)


def _length(entry: Entry) -> list[int | None]:
    """Return the options that decide the number of steps; a finished run continues if they change."""
    return [entry.spec.max_steps, entry.spec.num_epochs or 1]


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


def read_end(entry: Entry) -> dict[str, Any] | None:
    """Return the content of end.json; None if the run has not ended, or had another number of steps than asked for."""
    assert entry.folder is not None
    path = entry.folder / "end.json"
    if not path.exists():
        return None
    end = read_whole(path)
    try:
        history = History.from_plain(end["history"])
        whole_number("step", end["step"], at_least=0)
        of_this_length = end["early"] or end["finished"] in (None, _length(entry))
    except Exception as error:
        raise CheckpointError(f"{path} does not hold the end of a run: {error!r}") from error
    if history.strategy != entry.spec.label:
        raise CheckpointError(
            f"{path} is of the run {history.strategy!r}, not of {entry.spec.label!r}; remove it to train this run again"
        )
    return end if of_this_length else None


def take_end(entry: Entry, end: dict[str, Any]) -> None:
    """Give an entry the record of a run that ended before the others."""
    entry.history = History.from_plain(end["history"])
    if end["stopped"]:
        entry.stopped_at = int(end["step"])
    elif end["error"]:
        entry.error = (Diverged if end["diverged"] else RuntimeError)(end["error"])


# Progress shown during training ---------------------------------------------------------------------------------------


class _Watch:
    """Shows the progress of the runs: a bar, a table, or all curves in one figure."""

    def __init__(self, entries: Sequence[Entry], progress: bool | str, title: str) -> None:
        self.entries, self.progress, self.title = entries, progress, title
        self.bar: Any = None
        self.live: LiveRace | LiveTable | None = None
        self.histories: dict[str, list[History]] = {}
        self.steps: dict[Entry, int] = {}  # the last step of every run that has begun
        self._next = 0.0
        self._began = (0.0, -1)  # the time before the first step, and the steps taken until then
        if progress == "plot":
            self.live = LiveRace(self.histories, title)
        elif progress == "table":
            self.live = LiveTable(title)

    def show(self, best: float | None = None, preparing: str = "", last: bool = False) -> None:
        """Update the figure, table or bar, unless the last update was a moment ago.

        Args:
            best: the lowest training loss. preparing: text about long work before the next step.
            last: whether this update is the last, which is always shown.
        """
        longest = max(self.steps.values())
        steps = {entry: self.steps.get(entry) or entry.spec.max_steps or longest for entry in self.entries}
        over = last or all(entry.has_outcome or len(entry.history) > steps[entry] for entry in self.entries)
        if self.live is not None:
            for entry in self.entries:
                own = self.histories.setdefault(entry.name, [])
                if entry.has_begun and entry.history not in own:
                    own.append(entry.history)
            if isinstance(self.live, LiveTable):
                caption = preparing or self._time_left(steps)
                self.live.update(self.histories, {entry.name: own for entry, own in steps.items()}, over, caption)
            elif any(self.histories.values()):
                self.live.update(max(steps.values()))
            return
        now = time.perf_counter()
        if not self.progress or (now < self._next and not over):
            return
        self._next = now + _SECONDS_BETWEEN
        if self.bar is None:
            from tqdm.auto import tqdm

            self.bar = tqdm(total=0, unit="step", desc=self.title, dynamic_ncols=True, disable=None)
        self.bar.total = sum(steps.values())
        self.bar.n = sum(max(0, len(entry.history) - 1) for entry in self.entries)
        left = sum(entry.error is not None or entry.stopped_at is not None for entry in self.entries)
        shown = preparing if best is None else f"best loss {best:.3f}"
        more = f", {left} not training" if left else ""
        self.bar.set_postfix_str(shown + more, refresh=best is None and bool(preparing))
        self.bar.update(0)

    def _time_left(self, steps: Mapping[Entry, int]) -> str:
        """Estimate the time for the remaining steps from the mean time of a step since the first."""
        taken = {entry: max(0, len(entry.history) - 1) for entry in self.entries}
        missing = sum(steps[entry] - own for entry, own in taken.items() if not entry.has_outcome)
        now, done = time.perf_counter(), sum(taken.values())
        since, before = self._began
        if before < 0 or done == before:
            self._began = (now, done)
            return ""
        seconds = round((now - since) / (done - before) * missing)
        return f"about {duration(seconds)} left" if seconds > 0 else ""

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.live is not None:
            self.live.close()
