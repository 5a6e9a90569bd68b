"""The one training loop, for every backend and any number of runs."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vsim.arguments import naming
from vsim.cluster.randomness import global_states
from vsim.core.group import Group, Guard, all_leave
from vsim.engine.machine import repeating
from vsim.engine.memory import Held
from vsim.records.progress import StepReport
from vsim.training import resume
from vsim.training.attendance import attend
from vsim.training.callbacks import notify, notify_row, watching
from vsim.training.evaluate import measured_on, replica_spread, validate
from vsim.training.interrupt import Interrupt, Interrupted
from vsim.training.tracked import TrackedRun
from vsim.training.view import RunView


@dataclass(eq=False)
class Ensemble:
    """Runs that are set up to train together, with everything that the training loop needs.

    Attributes:
        runs: all runs, in the given order. groups: the same runs, in groups that are computed together.
        interrupt: holds the user's request to stop after the current step.
        watch: called as f(ensemble) when a step is reported for all runs.
        stopping: called as f(ensemble) after a step; returns the runs to stop after this step.
        memory: returns how many bytes of a device's memory this process holds.
        values: model that callbacks see → checksums of the model's parameters; see `vsim.training.callbacks.watching`.
    """

    runs: list[TrackedRun]
    groups: list[Group[TrackedRun]]
    max_steps: int
    interrupt: Interrupt = field(default_factory=Interrupt)
    watch: Callable[[Ensemble], None] | None = None
    stopping: Callable[[Ensemble], Collection[TrackedRun]] | None = None
    memory: Held = field(default_factory=Held)
    values: MutableMapping[nn.Module, dict[str, int]] = field(default_factory=WeakKeyDictionary)

    def train(self) -> None:
        """Train to the last step, and report every completed step.

        Raises:
            Interrupted: a process of the run was asked to stop; raised after the current step.
            KeyboardInterrupt: Ctrl-C was pressed again, or an error ended a step in which a stop was requested.
        """
        try:
            with self.interrupt:
                for _ in self.steps():
                    pass
                if self.is_alone and self.interrupt.requested:
                    raise Interrupted(self.max_steps, self.runs[0].spec.saving)
        except Exception as error:
            if self.interrupt.explains(error):
                raise KeyboardInterrupt(f"interrupted in a step that was not completed: {error}") from error
            raise
        finally:
            self.end()

    def steps(self) -> Iterator[int]:
        """Train, and yield the number of every step after it is reported.

        Unlike `train`, this does not handle Ctrl-C, and leaves calling `end` to the caller.
        """
        repeats = any(run.spec.deterministic for run in self.runs)
        device = self.runs[0].cluster.weights.device
        with repeating(device) if repeats else nullcontext():
            yield from _steps(self)

    def end(self) -> None:
        """Release resources that only training needs, and keep the final states of the process's random generators."""
        for run in self.runs:
            if run.presence.data_states is None:
                run.keeping.left_states = global_states(run.cluster.weights.device)
            if run.presence.clients is not None:
                run.presence.clients.release()
            run.cluster.gradient_at = None  # it refers to the group, whose memory would stay in use
        for group in self.groups:
            group.batches = iter(())  # ends the worker processes of a DataLoader

    @property
    def training(self) -> list[TrackedRun]:
        """The runs that have neither failed nor been stopped."""
        return [run for run in self.runs if run.trains]

    @property
    def unfinished(self) -> list[TrackedRun]:
        """The runs that will take another step."""
        return [run for run in self.runs if run.is_running]

    @property
    def is_alone(self) -> bool:
        """Whether this process holds all nodes of all runs; otherwise it holds a part of every run."""
        return self.runs[0].is_alone

    @property
    def only(self) -> tuple[TrackedRun, Group[TrackedRun]]:
        """The run and group of an ensemble with a single run."""
        ((run,), (group,)) = self.runs, self.groups
        return run, group


def _steps(ensemble: Ensemble) -> Iterator[int]:
    for run in ensemble.training:
        with naming(run.spec.label if len(ensemble.runs) > 1 else ""):
            resume.begin(run)
    for run in (run for run in ensemble.training if run.spec.callbacks):
        with Guard(run.group, run), watching(run, ensemble.values):
            for callback in run.spec.callbacks:
                with ensemble.interrupt.requested_inside():
                    notify(callback, "on_start", RunView(run))
    first = min((run.done for run in ensemble.unfinished), default=ensemble.max_steps)
    for run in ensemble.training:
        run.recording.known_events = len(run.ledger)
    attend(ensemble.groups, ensemble.training, first + 1)
    _report_start(ensemble)
    _notify_ends(ensemble, ensemble.training)
    if ensemble.watch is not None:
        ensemble.watch(ensemble)
    while ensemble.unfinished:
        step = min(run.done for run in ensemble.unfinished) + 1
        if step > first + 1:
            attend(ensemble.groups, ensemble.training, step)
        taking = {run for run in ensemble.unfinished if run.done == step - 1}  # other runs resumed from a later step
        stops = False
        for group in ensemble.groups:
            if taking.intersection(group.runs):
                stops |= next(group.steps).stops
        reached = [run for run in ensemble.training if run in taking and run.done == step]
        ensemble.interrupt.check()
        _report(ensemble, reached, step)
        ensemble.interrupt.check()
        stops |= ensemble.is_alone and ensemble.interrupt.requested
        reached = [run for run in reached if run.trains]
        saved = True
        for run in reached:
            run.trial_steps -= 1
            with Guard(run.group, run):
                if run.trial_steps in (0, 1) and run.is_to_be_moved:
                    with naming(run.spec.label if len(ensemble.runs) > 1 else ""):
                        resume.check_declared(run)
                saved &= resume.save_if_due(run, stops)
        _notify_ends(ensemble, reached)
        if ensemble.watch is not None:
            ensemble.watch(ensemble)
        if stops:
            raise Interrupted(step, ensemble.runs[0].spec.saving if saved else None)
        if ensemble.stopping is not None:
            for run in ensemble.stopping(ensemble):
                run.stopped = True
        yield step


def _report_start(ensemble: Ensemble) -> None:
    starting = [run for run in ensemble.training if run.starts]
    found = _measurements(ensemble, starting)
    for group in ensemble.groups:
        for run in [m for m in group.runs if m in starting and m.trains]:
            with Guard(run.group, run):
                row: dict[str, float] = {"step": run.done, "examples": run.examples}
                row |= {"payload_bytes": 0, "wire_bytes": 0, "seconds": 0}
                row |= {"validation_seconds": run.measuring.seconds, **found[run], **run.strategy.columns()}
                executor = group.executor
                report = StepReport(row, None, [], executor.name, run.max_steps, run.minibatch_size)
                report.preparing = executor.preparing
                _notify(ensemble, run, report)
                if run.measuring.client_data or run.measuring.test_data:
                    _of_ended(group, [run], briefly=True)  # raises before training if a client cannot be measured
            run.starts = False


def _report(ensemble: Ensemble, runs: Sequence[TrackedRun], step: int) -> None:
    if not runs:
        return
    found = _measurements(ensemble, runs)
    memory = ensemble.memory(runs[0].cluster.replicas.weights.device)
    for group in ensemble.groups:
        name, reason = group.executor.name, group.executor.reason
        ended: dict[TrackedRun, StepReport] = {}
        for run in group.runs:
            if run not in runs or not run.trains:
                continue
            with Guard(run.group, run):
                ledger, losses = run.ledger, run.node_losses
                row = {
                    "step": step,
                    "examples": run.examples,
                    "tokens": run.tokens or math.nan,
                    "train_loss": _mean_of_known(losses),
                    "lr": run.lr,
                    "payload_bytes": ledger.payload_bytes,
                    "wire_bytes": ledger.wire_bytes,
                    "seconds": run.seconds,
                    "validation_seconds": run.measuring.seconds,
                    "memory_bytes": memory,
                    **run.strategy.columns(),
                    **found[run],
                }
                events, run.recording.known_events = ledger[run.recording.known_events :], len(ledger)
                report = StepReport(row, run.losses_of_all, events, name, run.max_steps, run.minibatch_size, reason)
                _notify(ensemble, run, report)
                if run.is_over:
                    if (
                        step < report.max_steps and run.measuring.evaluator is not None
                    ):  # a callback has stopped the run
                        run.recording.row = {**run.recording.row, **_measurements(ensemble, [run])[run]}
                        run.recording.report(
                            replace(report, row=run.recording.row, events=[], segment=None, amends=True)
                        )
                    run.check_weights()
                    ended[run] = report
        _report_end(ensemble, group, ended)


def _report_end(ensemble: Ensemble, group: Group[TrackedRun], ended: Mapping[TrackedRun, StepReport]) -> None:
    """Measure the global models of ended runs on their clients' and test data, and amend their last reports."""
    runs = [run for run in ended if run.trains and (run.measuring.client_data or run.measuring.test_data)]
    if not runs:
        return
    try:
        found = _of_ended(group, runs)
    except Exception as error:  # an error of the model or the data, which all these runs share
        all_leave(group, runs, error)
        return
    for run, (own, tested) in found.items():
        with Guard(run.group, run):
            run.recording.row = {**run.recording.row, **tested, "validation_seconds": run.measuring.seconds}
            report = replace(ended[run], row=run.recording.row, events=[], segment=None, amends=True)
            run.recording.report(replace(report, client_val=own))


def _mean_of_known(losses: Sequence[float]) -> float:
    """Return the mean of the losses that are not NaN, those of nodes that took a step; NaN if no node took one."""
    total = sum(losses)
    if math.isnan(total):
        known = [loss for loss in losses if loss == loss]
        return sum(known) / len(known) if known else total
    return total / len(losses)


def _notify(ensemble: Ensemble, run: TrackedRun, report: StepReport) -> None:
    """Report a step, and call the callbacks; with several processes, they get the row of the first node's process."""
    collectives, held = run.cluster.collectives, run.cluster.replicas.num_held
    attendance = run.ledger.attendance
    run.recording.row, report.segment = report.row, attendance[-1] if attendance else None
    if not ensemble.is_alone and (run.spec.callbacks or run.presence.plan is not None):
        values = torch.tensor([list(report.row.values())], dtype=torch.float64).expand(held, -1)
        with collectives.unbilled():
            run.recording.row = dict(zip(report.row, collectives.broadcast(values, label="row").tolist(), strict=True))
    run.recording.report(report if 0 in run.nodes else replace(report, row=run.recording.row))
    if not run.spec.callbacks:
        return
    with watching(run, ensemble.values), ensemble.interrupt.requested_inside():
        notify_row(run.spec.callbacks, RunView(run))
    if not ensemble.is_alone:  # a callback may have stopped the run in one process only
        with collectives.unbilled():
            last = collectives.all_gather(torch.full((held, 1), run.max_steps), label="last step")
        run.max_steps = int(last.min())


def _notify_ends(ensemble: Ensemble, runs: Sequence[TrackedRun]) -> None:
    for run in runs:
        if run.trains and run.is_over:
            with Guard(run.group, run), watching(run, ensemble.values):
                for callback in run.spec.callbacks:
                    # With several processes, an interrupt raises: a request could no longer reach the other processes.
                    with ensemble.interrupt.requested_inside() if ensemble.is_alone else nullcontext():
                        notify(callback, "on_end", RunView(run))
                run.concluded = True


def _measurements(ensemble: Ensemble, runs: Sequence[TrackedRun]) -> Mapping[TrackedRun, dict[str, float]]:
    """Return the validation and divergence columns that are due."""
    found: dict[TrackedRun, dict[str, float]] = {run: {} for run in runs}
    due = {run for run in runs if run.is_validated}
    for group in ensemble.groups if due else ():
        own = [run for run in group.runs if run in due]
        if own:
            group.settle(own)
        started = time.perf_counter()
        for run in own:
            with Guard(run.group, run), torch.no_grad(), run.strategy.evaluation():
                run.measuring.weights = run.evaluated_weights()
        own = [run for run in own if run.trains]
        try:
            with ExitStack() as evaluating, torch.no_grad():
                for run in own:
                    evaluating.enter_context(run.strategy.evaluation())
                before = group.states_for_trial(runs[0])
                found.update(validate(own))
        except Exception as error:  # an error of the model or the data, which all these runs share
            all_leave(group, own, error)
        else:
            group.check_draws(before, runs[0], "the model or a metric")
        seconds, num_nodes = time.perf_counter() - started, sum(run.cluster.num_nodes for run in own)
        for run in own:
            run.measuring.weights = None
            run.measuring.seconds += seconds * run.cluster.num_nodes / num_nodes
    for run in runs:
        if run.is_spread_measured:
            with run.cluster.collectives.unbilled():
                weights = run.cluster.collectives.all_gather(run.cluster.weights)
            found[run].update(replica_spread(weights))
    return found


def _of_ended(
    group: Group[TrackedRun], runs: Sequence[TrackedRun], briefly: bool = False
) -> dict[TrackedRun, tuple[dict[str, list[float]], dict[str, float]]]:
    """Return run → (result of `measured_on` for its clients' data, columns of the history for its test data)."""
    started = time.perf_counter()
    with ExitStack() as evaluating, torch.no_grad():
        for run in runs:
            evaluating.enter_context(run.strategy.evaluation())
            run.measuring.weights = run.evaluated_weights()
        of_clients = measured_on("client", group, [run for run in runs if run.measuring.client_data], briefly)
        of_tests = measured_on("test", group, [run for run in runs if run.measuring.test_data], briefly)
    for run in runs:
        run.measuring.weights = None
        run.measuring.seconds += (time.perf_counter() - started) / len(runs)
    names = {"losses": "test_loss", "accuracies": "test_accuracy"}
    tested = {run: {names[name]: value for name, (value,) in own.items()} for run, own in of_tests.items()}
    return {run: (of_clients.get(run, {}), tested.get(run, {})) for run in runs}
