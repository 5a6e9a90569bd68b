"""Train the runs of a comparison in ensembles that fit into memory; save and resume all runs together."""

from __future__ import annotations

import copy
import math
import statistics
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from vsim.arguments import naming
from vsim.checkpoint.folder import locked
from vsim.cluster.collectives import Collectives
from vsim.cluster.ledger import Ledger
from vsim.cluster.randomness import fingerprints, isolated
from vsim.cluster.state import CheckpointError
from vsim.core.group import DRAW_FROM_NODES
from vsim.records.history import History
from vsim.records.progress import Recorder, Reporter, StepReport
from vsim.training.callbacks import Relay, notify
from vsim.training.display import Display
from vsim.training.entry import Entry, Outcome, end_of
from vsim.training.groups import fitting_groups
from vsim.training.interrupt import Interrupt, Interrupted
from vsim.training.loop import Ensemble
from vsim.training.race_folder import RaceFolder, write_end
from vsim.training.setup import prepare
from vsim.training.spec import RunSpec
from vsim.training.tracked import TrackedRun

Keep = Callable[[int, Mapping[str, float]], Collection[str]]


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
                files = self._files
                holding.enter_context(locked(self.folder, files.folders()))
                self.resume = files.prepare(self.resume)
            self.resume = self.processes.agreed(self.resume)  # after the first process has checked the folder
            (train or self.train_here)()

    @property
    def _files(self) -> RaceFolder:
        return RaceFolder(self.folder, self.entries, self.rungs, self.configs)

    def train_here(self) -> None:
        """Train all entries; with several processes, train this process's rows of all entries."""
        ensembles = [[entry] for entry in self.entries]
        if self.together:
            limits = self.device, self.memory_share, self.portion
            ensembles = fitting_groups(self.entries, *limits, self.processes.agreed)
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
        with self.interrupt, Display(self.entries, self.progress, self.title) as display:
            for entries in ensembles:
                interrupted: BaseException | None = None
                try:
                    self._train(entries, display)
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
        with Display(self.entries, self.progress, self.title) as display, ExitStack() as ending:
            for recorder, entry in zip(recorders, self.entries, strict=True):
                ending.push(lambda kind, error, trace, own=entry, recorder=recorder: _finish(recorder, own, error))

            def receive(number: int, message: Any) -> None:
                entry = self.entries[number]
                if isinstance(message, Outcome):
                    entry.error, entry.stopped_at, entry.finished_at = end_of(message)
                    if message.record is not None:
                        entry.history.continue_from(History.from_plain(message.record[0]))
                    if message.weights is not None:
                        entry.model = message.model(like=entry.spec.model)
                        relays[number].end(message.callbacks)
                else:
                    relays[number](message)
                    display.hear(entry, message)
                    display.show()

            entries = [
                Entry(e.name, for_elsewhere(e.spec, relay)) for e, relay in zip(self.entries, relays, strict=True)
            ]
            try:
                launch(replace(self, entries=entries), receive)
            except Exception as error:
                if self.interrupt.explains(error):
                    raise Interrupted(max(len(e.history) for e in self.entries) - 1, entries[0].spec.saving) from error
                little = isinstance(error, CheckpointError) and all(len(e.history) <= 2 for e in self.entries)
                if not display.losses or little:  # an error of the first step
                    raise
                for entry in self.entries:
                    if not entry.has_outcome:
                        entry.error = error

    def _prepared(
        self,
        configs: Sequence[RunSpec],
        entries: Sequence[tuple[Recorder, Entry]] = (),
        display: Display | None = None,
    ) -> Ensemble:
        """Set up an ensemble of these configurations that reports to `entries` and `display`."""
        if display is not None:
            own = [entry for _, entry in entries]
            reporters = [self._reporter(recorder, entry, display) for recorder, entry in entries]
            histories = [entry.history for entry in own]
            return prepare(configs, reporters, histories, self.device, self.processes.connect, self.interrupt)
        alone = configs[0].label if len(configs) == 1 else ""  # with several runs, `prepare` names the run in errors
        with isolated(configs[0].seed, self.device), naming(alone):
            histories = [History(spec.label, spec.num_nodes, spec.population) for spec in configs]
            recorders = [Recorder(history) for history in histories]
            return prepare(configs, recorders, histories, self.device, self.processes.connect)

    def _reporter(self, recorder: Recorder, entry: Entry, display: Display) -> Reporter:
        number = self.entries.index(entry)

        def report(report: StepReport) -> None:
            recorder(report)
            self.notify(number, report)
            display.hear(entry, report)

        return report

    def _train(self, entries: Sequence[Entry], display: Display) -> None:
        running, outdated = list(entries), list[Path]()
        if self.folder is not None and self.resume:
            running, outdated = self._files.restored(entries)
            self.processes.agreed(None)  # all have read the folders
        for path in outdated if self.processes.is_first else ():
            path.unlink(missing_ok=True)
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
                ensemble = self._prepared(configs, [(recorders[entry], entry) for entry in running], display)
                if len(running) > 1:
                    ensemble.groups[0].check_draws(untouched, ensemble.runs[0], "the setup of a strategy")
                for entry in running:
                    entry.spec = replace(entry.spec, start=None)  # free the checkpoint's memory
                del configs
                for group in ensemble.groups:
                    group.tolerant, group.apart = True, "" if self.rungs else group.apart
                    group.ends_early = not any(r.has_begun for r in self.entries if r not in running)
                ensemble.stopping = lambda: self._stopped(ensemble, running)
                ensemble.watch = lambda: self._collect(ensemble, running, display)
                for run in self._stopped(ensemble, running):  # the checkpoint may be from a rung's step
                    run.stopped = True
                for run, entry in zip(ensemble.runs, running, strict=True):
                    run.measuring.rungs = self.rungs
                    if entry.finished_at is not None:
                        run.stop()
                preparing = next(filter(None, (group.executor.preparing for group in ensemble.groups)), "")
                display.expect({entry: run.steps for run, entry in zip(ensemble.runs, running, strict=True)}, preparing)
                self._collect(ensemble, running, display)  # shows what will train while the first step is prepared
                try:
                    ensemble.train()
                finally:
                    self._collect(ensemble, running, display, last=True)
                if len(running) > 1 and fingerprints(self.device) != untouched:
                    warnings.warn(
                        "a model, strategy or callback draws from the global random generators, but not in its first "
                        f"steps: runs differ from their own Trainer.fit; give together=False, or {DRAW_FROM_NODES}",
                        UserWarning,
                        stacklevel=4,
                    )

    def _collect(self, ensemble: Ensemble, running: Sequence[Entry], display: Display, last: bool = False) -> None:
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
        display.show(last)

    def _notify_outcome(self, entry: Entry, outcome: Outcome | None = None) -> None:
        """Send an outcome. If none is given, send how the run ended, unless that was sent before."""
        known = end_of(entry)
        if outcome is not None or known != self._sent.get(entry, (None, None, None)):
            self._sent[entry] = known
            outcome = outcome or Outcome()
            outcome.error, outcome.stopped_at, outcome.finished_at = known
            self.notify(self.entries.index(entry), outcome)

    def _stopped(self, ensemble: Ensemble, running: Sequence[Entry]) -> Collection[TrackedRun]:
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


def copied_callbacks(spec: RunSpec) -> list[Any]:
    """Return copies of a run's callbacks; model, data and loss function stay shared."""
    data = spec.train_dataset, spec.val_dataset, spec.test_dataset
    shared = {id(one): one for one in (spec.model, *data, spec.loss_fn)}
    return copy.deepcopy(list(spec.callbacks), shared)


def for_elsewhere(spec: RunSpec, relay: Relay) -> RunSpec:
    """Return a run's options for the processes that train it: without loggers and hooks, which stay in this process."""
    spec = replace(spec, callbacks=relay.remote, train_loss_hook=None, eval_loss_hook=None)
    return replace(spec, logger=None, run_name=None, wandb_project=None, log_x_axis="step", log_interval=1)


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
