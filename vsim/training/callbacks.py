"""Callbacks: a user's code that a run calls at its start, after every step and validation, and at its end."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from vsim.arguments import a_text, one_of, real_number, whole_number
from vsim.cluster.state import Lasting
from vsim.engine.executor import bits_of
from vsim.engine.objective import listed
from vsim.history.history import ACCURACIES
from vsim.history.progress import Hook, Recorder, StepReport
from vsim.private_torch import version
from vsim.training.alike import is_vsims
from vsim.training.spec import RunSpec
from vsim.training.tracked import TrackedRun
from vsim.training.view import RunView


class Callback:
    """Base class for your code in a run: inherit from it, and define the methods that you need.

    Every method except `on_exit` gets the run as a `vsim.training.view.RunView`. `run.done` is the number of completed
    steps, and `run.row` is the history's row of the last step. `run.strategy` and `run.cluster` are the run's strategy
    and nodes. `run.stop()` ends the run. An error in a callback ends the run as well.

    A run trains copies of the model and the loss. `run.set_weights(state)` changes the weights of all nodes;
    `run.freeze(names)` and `run.unfreeze(names)` choose which weights train; `run.each_model(f)` changes attributes of
    the copies, such as a temperature. `run.loss_fn` may have such attributes, too. A callback that changes a parameter
    or buffer of `run.model`, which belongs to no node, ends the run with a ValueError; see `watching`.

    A callback need not inherit from this class: any object with `on_step` is a callback, and a function f(run) is the
    short form of `on_step`. The loss hooks and the loggers of `fit` are callbacks, too.

    A callback with `state_dict()` and `load_state_dict(state)` is saved with the run, under the name of its class, and
    restored when the run resumes. In a comparison every run has its own copies, see `vsim.ComparedRun`.

    Attributes:
        here: with backend="process", whether the callback works in the process of `fit`.
            True: the callback gets reports with only `row`, `max_steps` and `minibatch_size`, and `on_end` gets None.
            False: a copy works in every node's process, and the state of node 0's copy is returned at the end.
    """

    here = False

    def on_start(self, run: RunView) -> None:
        """Called before the first step of a new run (`run.starts`), or after the state of a resumed run is restored."""

    def on_step(self, run: RunView) -> None:
        """Called after every step, when the step is in the history, and before it is saved."""

    def on_sync(self, run: RunView, step: int) -> None:
        """Called after `on_step` of the steps in which nodes have communicated; copies of joining nodes do not count.

        `run.ledger` has the events: of which collective, of whom, how many bytes.
        """

    def on_evaluation(self, run: RunView) -> None:
        """Called after every validation: before the first step, and then after `on_step` of the steps that validate."""

    def on_end(self, run: RunView) -> None:
        """Called after the last step; not called if the run was interrupted or has failed."""

    def on_exit(self, failure: str) -> None:
        """Called in the process of `fit`, however the run ended; `failure` says why it did not finish, "" if it did."""


@contextmanager
def telling_exit(callbacks: Sequence[Any]) -> Iterator[None]:
    """Call `on_exit` of all callbacks when this context ends, with the error that ended the context, if any."""
    failure = ""
    try:
        yield
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        for callback in callbacks:
            notify(callback, "on_exit", failure)


def notify(callback: Any, event: str, *given: Any) -> None:
    """Call the method `event` of a callback, if there is one; a function f(run) is the short form of `on_step`."""
    method = getattr(callback, event, callback if event == "on_step" and callable(callback) else None)
    if method is not None:
        method(*given)


def notify_row(callbacks: Sequence[Any], run: Any, has_sent: bool) -> None:
    """Call callbacks for `run.row`, a new row of the history; `run` is a RunView, or a report from another process."""
    for callback in callbacks:
        if "train_loss" in run.row:
            notify(callback, "on_step", run)
            if has_sent:
                notify(callback, "on_sync", run, int(run.row["step"]))
        if "global_loss" in run.row:
            notify(callback, "on_evaluation", run)


@contextmanager
def watching(run: TrackedRun, values: MutableMapping[nn.Module, dict[str, int]]) -> Iterator[None]:
    """Check that callbacks that are called in this context change no parameter and no buffer of `run.model`.

    Every call is checked for replaced tensors, writes that torch counts, and assignments to `requires_grad` and
    `.data`. To find writes through `.data`, which torch does not count, values are compared after steps 0, 1, 2, 4, 8,
    … and the last; not with a process for each node, nor of whole-numbered buffers. Writes through `.data` that are
    undone before the next comparison are not detected.

    Warns if a callback changes `requires_grad` in the model that was given, which has no effect.

    Args:
        values: model → checksums of its parameters and buffers; updated by this function.

    Raises:
        ValueError: a parameter or buffer has changed.
    """
    given = _trained(run.spec.model)
    if all(is_vsims(type(callback)) for callback in run.spec.callbacks):
        yield
        _warn_of_given(run, given)
        return
    model = run.objective.model
    if model not in values:
        values[model] = _values(run)
    before = _tensors(run)
    marks = _marks(before)
    yield
    _warn_of_given(run, given)
    now = _tensors(run)
    new_marks = _marks(now)
    found = {n for n in {**before, **now} if before.get(n) is not now.get(n) or marks[n] != new_marks[n]}
    if found or run.is_over or not run.done & (run.done - 1):
        known, values[model] = values[model], _values(run)
        found |= {name for name, value in values[model].items() if known.get(name, value) != value}
    if found:
        raise ValueError(
            f"a callback has changed {', '.join(sorted(found))} of run.model, which is no node's: call "
            "run.set_weights(state) to set weights and buffers on all nodes, run.freeze(names) or run.unfreeze(names) "
            "to stop or continue training them, and run.global_model() for a model to compute with"
        )


def _tensors(run: TrackedRun) -> dict[str, Tensor]:
    """Return name → tensor, for the parameters of `run.model` and the buffers of which each node has its own."""
    model, own = run.objective.model, run.cluster.replicas.buffers
    return dict(model.named_parameters()) | {n: b for n, b in model.named_buffers() if n in own}


def _marks(tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    return {name: (version(t), t.data_ptr(), t.requires_grad) for name, t in tensors.items()}


def _trained(model: nn.Module) -> dict[str, bool]:
    return {name: p.requires_grad for name, p in model.named_parameters()}


def _warn_of_given(run: TrackedRun, before: Mapping[str, bool]) -> None:
    """Warn if `requires_grad` in the model that was given is no longer as `before`."""
    now = _trained(run.spec.model)
    found = [name for name, trained in before.items() if now.get(name, trained) != trained]
    if found and run.is_first:
        calls = {f"run.{'unfreeze' if now[name] else 'freeze'}(names)" for name in found}
        warnings.warn(
            f"a callback has set requires_grad of {listed(found)} in the model that was given, which has no effect: "
            f"the run trains copies of the model; call {' and '.join(sorted(calls))}",
            UserWarning,
            stacklevel=4,
        )


def _values(run: TrackedRun) -> dict[str, int]:
    """Return name → checksum for tensors of `run.model`; {} in a node's own process, where they train."""
    if run.spec.backend == "process" and run.spec.num_processes is None:
        return {}
    named = {n: t for n, t in _tensors(run).items() if t.is_floating_point() and not t.is_meta}
    sums = [bits_of(p).sum() for p in named.values()]
    return dict(zip(named, torch.stack(sums).tolist(), strict=True))  # one read of the device


class LossHooks(Callback):
    """`train_loss_hook` and `eval_loss_hook` of `fit`: functions of (step, loss), called in the process of `fit`."""

    here = True

    def __init__(self, train: Hook | None, evaluation: Hook | None) -> None:
        self.train, self.evaluation = train, evaluation

    def on_step(self, run: Any) -> None:
        if self.train is not None:
            self.train(int(run.row["step"]), run.row["train_loss"])

    def on_evaluation(self, run: Any) -> None:
        if self.evaluation is not None:
            self.evaluation(int(run.row["step"]), run.row["global_loss"])

    def __deepcopy__(self, memo: Any) -> LossHooks:
        return self  # the runs of a comparison share the hooks


class Monitor(Callback):
    """A callback that follows a column of the history.

    Args:
        monitor: the column; may be a metric of `fit(metrics=…)`.
        mode: "min" if lower is better, or "max".
        min_delta: a change counts as an improvement only if it is larger than this; at least 0.

    Attributes:
        best: the best value so far, NaN before the first value. best_step: the step of the best value.
    """

    def __init__(self, monitor: str = "global_loss", mode: str = "min", min_delta: float = 0.0) -> None:
        self.monitor = a_text("monitor", monitor)
        self.mode = one_of("mode", mode, ("min", "max"))
        self.min_delta = real_number("min_delta", min_delta, at_least=0)
        self.restart()

    def restart(self) -> None:
        """Forget the last run."""
        self.best, self.best_step = math.nan, 0

    def on_start(self, run: RunView) -> None:
        if self.monitor not in run.columns:
            names = ", ".join(run.columns)
            raise ValueError(f"{type(self).__name__} monitors {self.monitor!r}, which this run does not have: {names}")
        if run.starts or self.best_step > run.done:
            self.restart()

    def on_step(self, run: RunView) -> None:
        value = run.row.get(self.monitor)
        if value is None:
            return
        gain = self.best - value if self.mode == "min" else value - self.best
        better = value == value and (self.best != self.best or gain > self.min_delta)
        if better:
            self.best, self.best_step = value, run.done
        self.measured(run, better)

    def on_evaluation(self, run: RunView) -> None:
        if self.monitor in ACCURACIES and self.monitor not in run.row:
            raise ValueError(
                f"{type(self).__name__} monitors {self.monitor!r}, which is not known for this model and loss: give "
                "accuracy= a function of (outputs, targets)"
            )

    def measured(self, run: RunView, better: bool) -> None:
        """Called at every step at which the column is measured; `better`: whether the column has improved."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return the state that is saved with a run."""
        return {"best": self.best, "best_step": self.best_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state that `state_dict` returned."""
        vars(self).update(state)


class EarlyStopping(Monitor):
    """Ends a run when a column of the history has stopped improving. The current step becomes the run's last step.

    Args:
        monitor: the column. mode: "min" or "max".
        min_delta: a change counts as an improvement only if it is larger than this.
        patience: the run ends after this many consecutive measurements without an improvement.

    Attributes:
        best, best_step: the best value, and its step. waited: the number of measurements since then.
    """

    def __init__(
        self, monitor: str = "global_loss", patience: int = 3, min_delta: float = 0.0, mode: str = "min"
    ) -> None:
        self.patience = whole_number("patience", patience)
        super().__init__(monitor, mode, min_delta)

    def restart(self) -> None:
        super().restart()
        self.waited = 0

    def on_start(self, run: RunView) -> None:
        super().on_start(run)
        self._decide(run)

    def measured(self, run: RunView, better: bool) -> None:
        self.waited = 0 if better else self.waited + 1
        self._decide(run)

    def _decide(self, run: RunView) -> None:
        if self.waited >= self.patience:
            run.stop()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "waited": self.waited}


class KeepBest(Monitor):
    """Keeps the global model of the step at which a column of the history was best.

    Args:
        monitor: the column. mode: "min" or "max".

    Attributes:
        weights: the model's `state_dict`, for `model.load_state_dict(best.weights)`; empty before the first
            measurement.
        best, best_step: the best value, and its step.
    """

    def __init__(self, monitor: str = "global_loss", mode: str = "min") -> None:
        super().__init__(monitor, mode)

    def restart(self) -> None:
        super().restart()
        self.weights: dict[str, Tensor] = {}

    def measured(self, run: RunView, better: bool) -> None:
        if better:
            self.weights = dict(run.global_model().state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "weights": self.weights}


def with_hooks(spec: RunSpec) -> list[Any]:
    """Return a run's callbacks: the given ones and the loss hooks."""
    callbacks = list(spec.callbacks or ())
    if spec.train_loss_hook or spec.eval_loss_hook:
        callbacks.append(LossHooks(spec.train_loss_hook, spec.eval_loss_hook))
    return callbacks


class Relay:
    """Passes a run's reports from other processes to its record and callbacks in this process.

    Args:
        recorder: keeps the record.
        callbacks: all callbacks of the run.

    Attributes:
        here: callbacks that work in the process of `fit`, such as loggers.
        remote: callbacks that work in the processes where the run trains.
    """

    def __init__(self, recorder: Recorder, callbacks: Sequence[Any]) -> None:
        self.recorder, self._has_begun = recorder, False
        self.here = [one for one in callbacks if getattr(one, "here", False)]
        self.remote = [one for one in callbacks if one not in self.here]

    def __call__(self, report: StepReport) -> None:
        history = self.recorder.history
        for event in report.events:
            history.ledger.record(event)
        if report.segment is not None:
            history.ledger.attend(report.segment)
        self.recorder(report)
        for callback in () if self._has_begun else self.here:
            notify(callback, "on_start", report)
        self._has_begun = True
        if not report.amends:
            notify_row(self.here, report, report.has_sent)

    def end(self, states: Mapping[str, Any]) -> None:
        """Call `on_end` of the callbacks in `here`, and load `states` into those in `remote`."""
        for callback in self.here:
            notify(callback, "on_end", None)
        for name, callback in savable(self.remote).items():
            callback.load_state_dict(states[name])


def savable(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return name → callback, for callbacks with a state; names are class names, numbered from the second on."""
    found: dict[str, Any] = {}
    for one in callbacks:
        if all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")):
            name = type(one).__name__
            number = sum(known.split(" ")[0] == name for known in found)
            found[f"{name} {number + 1}" if number else name] = one
    return found


def of_callbacks(callbacks: Sequence[Any]) -> Lasting:
    """Return the declaration of the callbacks' states; a run may resume with callbacks that its file lacks."""
    states = {f"callback {name}": one for name, one in savable(callbacks).items()}
    return Lasting(shared=lambda: states, may_be_new=True)
