"""Train the runs of a comparison together, as many at a time as fit into memory; save and resume all of them.

    train ─► lock and check the folder ─► train_here ─► parts that fit into memory, one after the other ─► _train each

With several processes, each calls `train_here` with its rows of all runs, and the caller's process `train_elsewhere`.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from vsim.arguments import naming
from vsim.checkpoint.folder import locked
from vsim.cluster.collectives import Collectives
from vsim.cluster.ledger import Ledger
from vsim.cluster.randomness import fingerprints, isolated
from vsim.core.failing import DRAW_FROM_NODES, check_draws
from vsim.core.group import Group
from vsim.runs.acts.conclude import Conclude
from vsim.runs.acts.halve import Halve, Keep
from vsim.runs.acts.moment import Moment
from vsim.runs.acts.show import Show
from vsim.runs.callbacks import notify
from vsim.runs.display import Display
from vsim.runs.fit import Orders, fit, prepare, release
from vsim.runs.interrupt import Interrupt, Interrupted
from vsim.runs.outcome import Outcome
from vsim.runs.parts import fitting_parts
from vsim.runs.race_folder import RaceFolder
from vsim.runs.spec import RunSpec
from vsim.runs.tracked import TrackedRun

Messages = Callable[[Sequence[tuple[int, Any]]], None]


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
class Race:
    """The runs of a comparison, and how they train.

    Args:
        runs: the runs, which start under identical conditions.
        device: computes the runs.
        together: whether the runs train at the same time, as rows of one matrix; if not, one after the other.
        memory_share: the share of the device's memory that this process may hold; None: half of the free memory.
        portion: the share of every run's nodes that the device holds.
        rungs, keep: steps after which runs may stop, and what decides it: see `Halve`.
        progress: True for a bar, "plot" for a figure, "table" for a table in a terminal, or False.
        title: title of the progress display.
        folder: the comparison's folder, with a folder in it for each run; None: nothing is saved.
        resume: whether to resume from `folder`; "auto": resume if `folder` holds a comparison.
        configs: the configuration of each run, saved in the folder.
        processes: the processes that compute the comparison, and this process's place among them.
        send: called with a list of (number of a run, its `StepReport` or `Outcome`); None: this process shows the runs.
        interrupt: holds the user's request to stop after the current step.
    """

    runs: Sequence[TrackedRun]
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
    send: Messages | None = None
    interrupt: Interrupt = field(default_factory=Interrupt)

    def train(self, here: Callable[[], None] | None = None) -> None:
        """Train all runs to their last steps.

        Args:
            here: trains the runs; default `train_here`.

        Raises:
            Interrupted: on Ctrl-C; the runs hold their records so far and, if they have ended, their outcomes.
            Exception: a run fails in its first step, when no progress is lost. A non-finite loss only ends its run.
        """
        with ExitStack() as holding:
            if self.processes.is_first:
                files = self._files
                holding.enter_context(locked(self.folder, files.folders()))
                self.resume = files.prepare(self.resume)
            self.resume = self.processes.agreed(self.resume)  # after the first process has checked the folder
            (here or self.train_here)()

    @property
    def _files(self) -> RaceFolder:
        return RaceFolder(self.folder, self.runs, self.rungs, self.configs)

    def train_here(self) -> None:
        """Train all runs; with several processes, train this process's rows of all runs."""
        parts = [[run] for run in self.runs]
        if self.together:
            parts = fitting_parts(self.runs, self.device, self.memory_share, self.portion, self.processes.agreed)
        if len(parts) > 1 and self.together and self.rungs:
            raise ValueError(
                f"halving and pruners compare all runs at every rung, and {len(self.runs)} do not fit into memory "
                "together: take fewer settings, trials or nodes, or a smaller model"
            )
        if len(parts) > 1 and self.together:
            sizes = ", ".join(str(len(runs)) for runs in parts)
            warnings.warn(f"trained in parts that fit into memory: {sizes} runs", UserWarning, stacklevel=3)
        for runs in parts[1:]:  # find errors before the first part trains
            alone = runs[0].spec.label if len(runs) == 1 else ""  # with several runs, `prepare` names the run in errors
            with isolated(runs[0].spec.seed, self.device), naming(alone):
                tried = [TrackedRun.of(replace(run.spec, start=None, saving=None)) for run in runs]
                release(prepare(tried, self.device, connect=self.processes.connect))
        with self.interrupt, Display(self.runs, self.progress, self.title) as display:
            for runs in parts:
                interrupted: BaseException | None = None
                try:
                    self._train(runs, display)
                except KeyboardInterrupt as error:
                    interrupted = error
                if interrupted is not None or self.processes.agreed(self.interrupt.requested):
                    raise Interrupted(max(run.recorded for run in runs), runs[0].spec.saving) from interrupted

    def _train(self, runs: Sequence[TrackedRun], display: Display) -> None:
        """Train runs at the same time."""
        processes, device, running, outdated = self.processes, self.device, list(runs), list[Path]()
        if self.folder is not None and self.resume:
            running, outdated = self._files.restored(runs)
        for path in outdated if processes.is_first else ():
            path.unlink(missing_ok=True)  # a process that reads it later decides alike without it
        send = None if self.send is None else self._send
        conclude = Conclude(processes.is_first, send)
        for run in runs:
            if run.has_begun:
                conclude.tell(run, Outcome(record=(run.history.as_plain(), run.recorded)))
        if not running:
            return
        with ExitStack() as ending:
            for run in running:
                run.recorder.has_warned = not processes.is_first
                if send is None:  # otherwise `train_elsewhere` calls `on_exit` of the callbacks
                    ending.push(partial(finish, run))
            with isolated(running[0].spec.seed, device):
                untouched = fingerprints(device)
                groups = self._prepared(running)
                if len(running) > 1:
                    check_draws(groups[0], untouched, running[0], "the setup of a strategy")
                show, halve = Show(display), Halve(self.runs, self.rungs, self.keep, processes.agreed)
                moment = Moment(0, groups, running)
                # In this order: runs that had ended, before rungs are decided; then beaten runs, before the display.
                for run in running:
                    run.measuring.rungs = self.rungs
                    if run.finished_at is not None:  # a callback had ended it, and no rung waits for it
                        run.stop()
                halve(moment)  # the checkpoint may be from a rung's step
                preparing = next(filter(None, (group.executor.preparing for group in groups)), "")
                display.expect({run: run.steps for run in running}, preparing)
                conclude(moment)
                show(moment)  # what will train while the first step is prepared
                try:
                    fit(groups, Orders(self.interrupt, conclude, show, halve, send))
                finally:
                    conclude(moment, last=True)
                    show(moment, last=True)
                    for run in running:
                        run.free()
                if len(running) > 1 and fingerprints(device) != untouched:
                    warnings.warn(
                        "a model, strategy or callback draws from the global random generators, but not in its first "
                        f"steps: runs differ from their own Trainer.fit; give together=False, or {DRAW_FROM_NODES}",
                        UserWarning,
                        stacklevel=4,
                    )

    def _prepared(self, runs: Sequence[TrackedRun]) -> list[Group[TrackedRun]]:
        """Set up runs of which an error ends only one, unless it comes before any run has made progress."""
        groups = prepare(runs, self.device, self.interrupt, connect=self.processes.connect)
        for group in groups:
            group.isolates_failures, group.apart = True, "" if self.rungs else group.apart
            group.raises_first = not any(run.has_begun for run in self.runs if run not in runs)
        return groups

    def _send(self, messages: Sequence[tuple[TrackedRun, Any]]) -> None:
        assert self.send is not None
        self.send([(self.runs.index(run), message) for run, message in messages])


def copied_callbacks(spec: RunSpec) -> list[Any]:
    """Return copies of a run's callbacks; model, data and loss function stay shared."""
    data = spec.train_dataset, spec.val_dataset, spec.test_dataset
    shared = {id(one): one for one in (spec.model, *data, spec.loss_fn)}
    return copy.deepcopy(list(spec.callbacks), shared)


def finish(run: TrackedRun, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> bool:
    own = run.error if run.has_outcome else error
    failure = "" if own is None else f"{type(own).__name__}: {own}"
    if own is None and run.stopped_at is not None:
        failure = f"stopped after step {run.stopped_at}"
    run.recorder.__exit__(None if own is None else type(own), own, None)
    for callback in run.spec.callbacks:
        notify(callback, "on_exit", failure)
    return False
