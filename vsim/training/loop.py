"""The one training loop, for every backend and any number of runs."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, MutableMapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn

from vsim.arguments import naming, retold
from vsim.cluster.randomness import fingerprints, global_states
from vsim.cluster.state import CheckpointError
from vsim.data.batches import Uneven, sizes_of
from vsim.engine.machine import moved, repeating, synchronize, using_threads
from vsim.engine.memory import Held
from vsim.engine.objective import explained
from vsim.records.progress import StepReport
from vsim.strategy.base import take_step
from vsim.training import resume
from vsim.training.attendance import attend
from vsim.training.callbacks import notify, notify_row, watching
from vsim.training.evaluate import measured_on, replica_spread, validate
from vsim.training.interrupt import Interrupt, Interrupted
from vsim.training.run import Diverged, Run
from vsim.training.stack import Stack
from vsim.training.view import RunView
from vsim.trees import tensors_of

DRAW_FROM_NODES = "draw from cluster.generator in a strategy, or by torch's functions in a model"


@dataclass(eq=False)
class Ensemble:
    """Runs that are set up to train together, with everything that the training loop needs.

    Attributes:
        runs: all runs, in the given order. stacks: the same runs, in groups that are computed together.
        interrupt: holds the user's request to stop after the current step.
        tolerant: whether the other runs continue when a run fails; if False, the error is raised.
        ends_early: whether an error in a run's first step is raised even if `tolerant`, because no progress is lost.
        watch: called as f(ensemble) when a step is reported for all runs.
        stopping: called as f(ensemble) after a step; returns the runs to stop after this step.
        memory: returns how many bytes of a device's memory this process holds.
        values: model that callbacks see → checksums of the model's parameters; see `vsim.training.callbacks.watching`.
    """

    runs: list[Run]
    stacks: list[Stack]
    max_steps: int
    interrupt: Interrupt = field(default_factory=Interrupt)
    tolerant: bool = False
    ends_early: bool = True
    watch: Callable[[Ensemble], None] | None = None
    stopping: Callable[[Ensemble], Collection[Run]] | None = None
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
            run.cluster.gradient_at = None  # it refers to the stack, whose memory would stay in use
        for stack in self.stacks:
            stack.batches = iter(())  # ends the worker processes of a DataLoader

    def states_for_trial(self, run: Run) -> dict[str, bytes]:
        """Return the states of the global random generators, if `run` is one of several and in its first steps."""
        return fingerprints(run.cluster.weights.device) if run.trial_steps > 0 and len(self.runs) > 1 else {}

    def check_draws(self, before: Mapping[str, bytes], run: Run, who: str) -> None:
        """Raise a ValueError if `who` has drawn from global random generators since `states_for_trial` gave `before`.

        Runs that train together share these generators, so that the numbers of one run would depend on the others.
        """
        now = self.states_for_trial(run) if before else {}
        if found := [name for name, state in before.items() if state != now[name]]:
            apart = (
                "" if run.measuring.rungs else "give together=False, or "
            )  # halving compares runs that train together
            raise ValueError(
                f"{who} draws from the global random generators ({', '.join(found)}), which runs that train together "
                f"would share: {apart}{DRAW_FROM_NODES}"
            )

    @property
    def training(self) -> list[Run]:
        """The runs that have neither failed nor been stopped."""
        return [run for run in self.runs if run.trains]

    @property
    def unfinished(self) -> list[Run]:
        """The runs that will take another step."""
        return [run for run in self.runs if run.is_running]

    @property
    def is_alone(self) -> bool:
        """Whether this process holds all nodes of all runs; otherwise it holds a part of every run."""
        return self.runs[0].is_alone

    @property
    def only(self) -> tuple[Run, Stack]:
        """The run and stack of an ensemble with a single run."""
        ((run,), (stack,)) = self.runs, self.stacks
        return run, stack


def _steps(ensemble: Ensemble) -> Iterator[int]:
    for run in ensemble.training:
        with naming(run.spec.label if len(ensemble.runs) > 1 else ""):
            resume.begin(run)
    for run in (run for run in ensemble.training if run.spec.callbacks):
        with _own(ensemble, run), watching(run, ensemble.values):
            for callback in run.spec.callbacks:
                with ensemble.interrupt.requested_inside():
                    notify(callback, "on_start", RunView(run))
    first = min((run.done for run in ensemble.unfinished), default=ensemble.max_steps)
    for run in ensemble.training:
        run.recording.known_events = len(run.ledger)
    attend(ensemble.stacks, ensemble.training, first + 1)
    _report_start(ensemble)
    _notify_ends(ensemble, ensemble.training)
    if ensemble.watch is not None:
        ensemble.watch(ensemble)
    while ensemble.unfinished:
        step = min(run.done for run in ensemble.unfinished) + 1
        if step > first + 1:
            attend(ensemble.stacks, ensemble.training, step)
        taking = {run for run in ensemble.unfinished if run.done == step - 1}  # other runs resumed from a later step
        stops = False
        for stack in ensemble.stacks:
            if taking.intersection(stack.runs):
                stops |= _take_step(ensemble, stack, step)
        reached = [run for run in ensemble.training if run in taking and run.done == step]
        ensemble.interrupt.check()
        _report(ensemble, reached, step)
        ensemble.interrupt.check()
        stops |= ensemble.is_alone and ensemble.interrupt.requested
        reached = [run for run in reached if run.trains]
        saved = True
        for run in reached:
            run.trial_steps -= 1
            with _own(ensemble, run):
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


def _take_step(ensemble: Ensemble, stack: Stack, step: int) -> bool:
    """Take step number `step` with the runs of a stack; return whether any process was asked to stop after it."""
    runs = [run for run in stack.runs if run.is_running]
    started = time.perf_counter()
    device = runs[0].cluster.replicas.weights.device
    steps = {run.done + 1 for run in runs}
    for run in runs:
        run.ledger.position.begin(step)
        run.lr = run.strategy.lr
    for run in stack.taking:
        if run.presence.plan is not None or not run.is_running:
            run.keep_resting()
    if stack.take_own_step is not None:
        (run,) = runs
        with _own(ensemble, run):
            stack.take_own_step()
        run.seconds += time.perf_counter() - started
        return False
    try:
        of_step, batch = next(stack.batches) if stack.taking else (step, [])
        if any(t.device != device for t in tensors_of(batch)):
            batch = moved(batch, device)
    except Exception as error:
        _all_leave(ensemble, runs, retold(error, f"the batches of step {step}: {error}"))
        return False
    if {of_step, *steps} != {step}:  # would train on wrong examples without a sign of it
        raise RuntimeError(f"step {step} got the batch of step {of_step} for runs whose next steps are {steps}")
    before = ensemble.states_for_trial(runs[0])
    with using_threads(1) if stack.is_small else nullcontext():
        try:
            with runs[0].computing():
                losses = stack.losses_and_grads(batch) if stack.taking else torch.empty(0)
        except Exception as error:  # an error of the model or the data, which all runs of the stack share
            given = stack.few.batch if isinstance(batch, Uneven) else batch
            _all_leave(ensemble, runs, explained(error, stack.executor.objective, given, 1, f"at step {step}"))
            return False
        ensemble.check_draws(before, runs[0], "the model")
        stops = _keep_losses(ensemble, stack, losses, step, batch)
        _take_own_steps(ensemble, stack)
    runs = [run for run in runs if run.trains]
    if any(run.is_over or run.is_validated for run in runs):
        synchronize(device)  # otherwise the measured time of the validation would include work of this step
    seconds = time.perf_counter() - started
    num_nodes = sum(run.cluster.num_nodes for run in runs)
    for run in runs:
        run.seconds += seconds * run.cluster.num_nodes / num_nodes
    return stops


def _keep_losses(ensemble: Ensemble, stack: Stack, losses: Tensor, step: int, batch: Any) -> bool:
    """Give every run the losses of its nodes (K,), and count their examples; remove runs with a non-finite loss.

    Returns:
        Whether a process of the run has been asked to stop after this step.
    """
    stops = False
    stepping = [(run, run.taking) for run in stack.runs if run.trains and run.cluster.step == step]
    # The only copy from the device in a step, for which the host waits. Copying the losses of several steps at once
    # would let the host run ahead, but a run with a non-finite loss must end with the weights of its last good step,
    # and callbacks, loggers and early stopping need each step's losses in that step.
    values = losses.tolist() if ensemble.is_alone else []
    others = {} if ensemble.is_alone else _of_all_nodes(losses, batch, stepping, ensemble.interrupt.requested)
    for run, rows in stepping:
        resting = run.cluster.resting_nodes
        if ensemble.is_alone:
            run.node_losses = values[rows]
            taking = (row for row in range(rows.start, rows.stop) if row - rows.start not in resting)
            sizes = sizes_of(batch, taking)
        else:
            run.node_losses, requests, *of_nodes = others[run].T.tolist()
            stops = any(requests)
            examples, tokens = (sum(n for node, n in enumerate(own) if node not in resting) for own in of_nodes)
            sizes = int(examples), int(tokens)
        run.examples, run.tokens = run.examples + sizes[0], run.tokens + sizes[1]
        try:
            run.check_losses(dict(zip(run.cluster.active, run.node_losses, strict=True)), batch, rows)
        except (Diverged, IndexError) as error:
            _leave(ensemble, run, error)
        for node in resting:
            run.node_losses[node] = math.nan
    return stops


@torch.no_grad()
def _take_own_steps(ensemble: Ensemble, stack: Stack) -> None:
    """Take the communication and optimizer step of every run."""
    for run in stack.taking:
        if not run.is_running:
            run.put_back_resting()
    stepping = [run for run in stack.runs if run.trains and run.cluster.step > run.done]
    for run in stepping:
        with _own(ensemble, run):
            take_step(run.strategy, run.put_back_resting)


class _own(AbstractContextManager[None]):
    """Context for the code of one run: an error in this context ends only this run."""

    def __init__(self, ensemble: Ensemble, run: Run) -> None:
        self.ensemble, self.run = ensemble, run

    def __enter__(self) -> None:
        self.before = self.ensemble.states_for_trial(self.run)

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        if error is None and self.before:
            who = f"{self.run.spec.label}: its strategy or a callback"
            self.ensemble.check_draws(self.before, self.run, who)
        if not isinstance(error, Exception) or not self.ensemble.tolerant:
            return False
        _leave(self.ensemble, self.run, error)
        return True


def _leave(ensemble: Ensemble, run: Run, error: Exception) -> None:
    """Remove a failed run so that the others continue; raise the error if they cannot, or if this loses no progress.

    After a request to stop, a run that fails has no outcome: the others complete the step, and all can be resumed.
    """
    if ensemble.interrupt.explains(error):
        if ensemble.interrupt.insisted or not (ensemble.tolerant and ensemble.is_alone):
            raise error
        warnings.warn(
            f"{run.spec.label}: interrupted in step {run.cluster.step}, which was not completed: {error!r}",
            UserWarning,
            stacklevel=2,
        )
        run.cut = True
        return
    nothing_lost = ensemble.ends_early and (run.done == 0 or isinstance(error, CheckpointError))
    if not ensemble.tolerant or not (isinstance(error, Diverged) or (ensemble.is_alone and not nothing_lost)):
        raise error  # with several processes, the other processes may not have this error
    run.error = error


def _all_leave(ensemble: Ensemble, runs: Sequence[Run], error: Exception) -> None:
    for run in runs:
        _leave(ensemble, run, error)


def _report_start(ensemble: Ensemble) -> None:
    starting = [run for run in ensemble.training if run.starts]
    found = _measurements(ensemble, starting)
    for stack in ensemble.stacks:
        for run in [m for m in stack.runs if m in starting and m.trains]:
            with _own(ensemble, run):
                row: dict[str, float] = {"step": run.done, "examples": run.examples}
                row |= {"payload_bytes": 0, "wire_bytes": 0, "seconds": 0}
                row |= {"validation_seconds": run.measuring.seconds, **found[run], **run.strategy.columns()}
                executor = stack.executor
                report = StepReport(row, None, [], executor.name, run.max_steps, run.minibatch_size)
                report.preparing = executor.preparing
                _notify(ensemble, run, report)
                if run.measuring.client_data or run.measuring.test_data:
                    _of_ended(stack, [run], briefly=True)  # raises before training if a client cannot be measured
            run.starts = False


def _report(ensemble: Ensemble, runs: Sequence[Run], step: int) -> None:
    if not runs:
        return
    found = _measurements(ensemble, runs)
    memory = ensemble.memory(runs[0].cluster.replicas.weights.device)
    for stack in ensemble.stacks:
        name, reason = stack.executor.name, stack.executor.reason
        ended: dict[Run, StepReport] = {}
        for run in stack.runs:
            if run not in runs or not run.trains:
                continue
            with _own(ensemble, run):
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
        _report_end(ensemble, stack, ended)


def _report_end(ensemble: Ensemble, stack: Stack, ended: Mapping[Run, StepReport]) -> None:
    """Measure the global models of ended runs on their clients' and test data, and amend their last reports."""
    runs = [run for run in ended if run.trains and (run.measuring.client_data or run.measuring.test_data)]
    if not runs:
        return
    try:
        found = _of_ended(stack, runs)
    except Exception as error:  # an error of the model or the data, which all these runs share
        _all_leave(ensemble, runs, error)
        return
    for run, (own, tested) in found.items():
        with _own(ensemble, run):
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


def _notify(ensemble: Ensemble, run: Run, report: StepReport) -> None:
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


def _notify_ends(ensemble: Ensemble, runs: Sequence[Run]) -> None:
    for run in runs:
        if run.trains and run.is_over:
            with _own(ensemble, run), watching(run, ensemble.values):
                for callback in run.spec.callbacks:
                    # With several processes, an interrupt raises: a request could no longer reach the other processes.
                    with ensemble.interrupt.requested_inside() if ensemble.is_alone else nullcontext():
                        notify(callback, "on_end", RunView(run))
                run.concluded = True


def _measurements(ensemble: Ensemble, runs: Sequence[Run]) -> Mapping[Run, dict[str, float]]:
    """Return the validation and divergence columns that are due."""
    found: dict[Run, dict[str, float]] = {run: {} for run in runs}
    due = {run for run in runs if run.is_validated}
    for stack in ensemble.stacks if due else ():
        own = [run for run in stack.runs if run in due]
        started = time.perf_counter()
        for run in own:
            with _own(ensemble, run), torch.no_grad(), run.strategy.evaluation():
                run.measuring.weights = run.evaluated_weights()
        own = [run for run in own if run.trains]
        try:
            with ExitStack() as evaluating, torch.no_grad():
                for run in own:
                    evaluating.enter_context(run.strategy.evaluation())
                before = ensemble.states_for_trial(runs[0])
                found.update(validate(own))
        except Exception as error:  # an error of the model or the data, which all these runs share
            _all_leave(ensemble, own, error)
        else:
            ensemble.check_draws(before, runs[0], "the model or a metric")
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
    stack: Stack, runs: Sequence[Run], briefly: bool = False
) -> dict[Run, tuple[dict[str, list[float]], dict[str, float]]]:
    """Return run → (result of `measured_on` for its clients' data, columns of the history for its test data)."""
    started = time.perf_counter()
    with ExitStack() as evaluating, torch.no_grad():
        for run in runs:
            evaluating.enter_context(run.strategy.evaluation())
            run.measuring.weights = run.evaluated_weights()
        of_clients = measured_on("client", stack, [run for run in runs if run.measuring.client_data], briefly)
        of_tests = measured_on("test", stack, [run for run in runs if run.measuring.test_data], briefly)
    for run in runs:
        run.measuring.weights = None
        run.measuring.seconds += (time.perf_counter() - started) / len(runs)
    names = {"losses": "test_loss", "accuracies": "test_accuracy"}
    tested = {run: {names[name]: value for name, (value,) in own.items()} for run, own in of_tests.items()}
    return {run: (of_clients.get(run, {}), tested.get(run, {})) for run in runs}


def _of_all_nodes(
    losses: Tensor, batch: Any, stepping: Sequence[tuple[Run, slice]], requested: bool
) -> dict[Run, Tensor]:
    """Return run → (K, 4), a row for each of its nodes in all processes; all runs of a stack share one message.

    The columns are the loss, whether the node's process was asked to stop after this step, and the numbers of examples
    and of tokens in the node's batch.
    """
    rows = [row for _, own in stepping for row in range(own.start, own.stop)]
    alike = [sizes_of(batch)] * len(rows) if rows and not isinstance(batch, Uneven) else []
    sizes = alike or [sizes_of(batch, [row]) for row in rows]
    of_rows = torch.tensor([[requested, *own] for own in sizes], dtype=torch.float64).view(-1, 3)
    own = torch.cat([losses[rows].cpu().double()[:, None], of_rows], 1)
    ranges = [run.cluster.collectives.ranges for run, _ in stepping]
    counts = [[len(nodes) for nodes in column] for column in zip(*ranges, strict=True)]  # by process, then run
    found = stepping[0][0].cluster.collectives.all_rows(own, [sum(of_process) for of_process in counts], "losses")
    parts = iter(found.split([count for of_process in counts for count in of_process]))
    by_process = [[next(parts) for _ in of_process] for of_process in counts]
    return {run: torch.cat(own) for (run, _), *own in zip(stepping, *by_process, strict=True)}
