"""Callbacks: a user's own code in a run, at its start, after every step and validation, and at its end."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from vsim.arguments import one_of, real_number, whole_number
from vsim.engine.objective import changed, kept_in_python, listed
from vsim.records.progress import Hook
from vsim.training.run import Run
from vsim.training.spec import RunSpec


class Callback:
    """Code of your own in a run: inherit from it, and define the methods that you need.

    Each gets the run, a `vsim.training.run.Run`: `run.done` completed steps, `run.row`, the history's row of the
    last one; `run.model` and `run.loss_fn`, the live ones, whose attributes may be changed; `run.strategy`,
    `run.cluster`; and `run.stop()`, which ends it. An error ends the run.

    A callback need not inherit from this class: any object with `on_step` is one, and a function f(run) is the short
    form of `on_step`. The loss hooks of `fit` and its loggers are callbacks, too.

    A callback with `state_dict()` and `load_state_dict(state)` is saved with the run, under the name of its class, and
    continues when the run resumes. In a comparison every run has copies of its own, see `vsim.ComparedRun`.

    Attributes:
        here: with backend="process", whether the callback works in the process of `fit`, where it gets reports with
            `row`, `max_steps` and `minibatch_size` only, and `on_end` gets None. If not, it works in every node's
            process, and the state of node 0's comes back at the end.
    """

    here = False

    def on_start(self, run: Run) -> None:
        """Before the first step of a new run (`run.starts`), or of one that resumes, with its state."""

    def on_step(self, run: Run) -> None:
        """After every step, when it is in the history, and before it is saved."""

    def on_evaluation(self, run: Run) -> None:
        """After every validation, that before the first step included; after `on_step`."""

    def on_end(self, run: Run) -> None:
        """After the last step; not for a run that was interrupted, or has failed."""

    def on_exit(self, failure: str) -> None:
        """However the run ended, in the process of `fit`; `failure` says why it did not reach its last step, or ""."""


@contextmanager
def telling_exit(callbacks: Sequence[Any]) -> Iterator[None]:
    """Tell callbacks how what runs in this context ends."""
    failure = ""
    try:
        yield
    except BaseException as error:
        failure = f"{type(error).__name__}: {error}"
        raise
    finally:
        for callback in callbacks:
            tell(callback, "on_exit", failure)


def tell(callback: Any, event: str, run: Any) -> None:
    """Call the method `event` of a callback, if there is one; a function f(run) is the short form of `on_step`."""
    method = getattr(callback, event, callback if event == "on_step" and callable(callback) else None)
    if method is not None:
        method(run)


def tell_row(callbacks: Sequence[Any], run: Any) -> None:
    """Tell callbacks of `run.row`, a new row of the history; `run` is a Run, or a report from another process."""
    for callback in callbacks:
        if "train_loss" in run.row:
            tell(callback, "on_step", run)
        if "global_loss" in run.row:
            tell(callback, "on_evaluation", run)


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
        return self  # of a comparison they hear all runs


class Originals(Callback):
    """Warns once if the model or the loss that the user has given is changed: a run trains copies.

    They are looked at after 1, 2, 4, 8, … steps and at the end, so that a step costs nothing.
    """

    here = True

    def __init__(self, model: nn.Module, loss_fn: Any) -> None:
        self.model, self.loss_fn, self.has_warned = model, loss_fn, False
        self.before = self._now()

    def on_step(self, run: Any) -> None:
        step = int(run.row["step"])
        if not step & (step - 1):
            self.on_end(run)

    def on_end(self, run: Any) -> None:
        found = [] if self.has_warned else changed(self.before, self._now())
        if found:
            self.has_warned = True
            warnings.warn(
                f"{listed(found)} changed while the run trained, which has no effect on it: a run "
                "trains copies of the model and the loss. A callback f(run) in fit(callbacks=[f]) gets the run, whose "
                "own are run.model and run.loss_fn",
                UserWarning,
                stacklevel=2,
            )

    def _now(self) -> dict[str, Any]:
        return kept_in_python(self.model, self.loss_fn)

    def __deepcopy__(self, memo: Any) -> Originals:
        return self


class Monitor(Callback):
    """A callback that follows a column of the history.

    Args:
        monitor: the column, a metric of `fit(metrics=…)` included.
        mode: "min" or "max", which is better.
        min_delta: a change that is no larger is no improvement; at least 0.

    Attributes:
        best: the best value so far, NaN before there is one. best_step: where it was.
    """

    def __init__(self, monitor: str = "global_loss", mode: str = "min", min_delta: float = 0.0) -> None:
        self.monitor = monitor
        self.mode = one_of("mode", mode, ("min", "max"))
        self.min_delta = real_number("min_delta", min_delta, at_least=0)
        self.restart()

    def restart(self) -> None:
        """Forget the last run."""
        self.best, self.best_step = math.nan, 0

    def on_start(self, run: Run) -> None:
        if self.monitor not in run.columns:
            there = ", ".join(run.columns)
            raise ValueError(f"{type(self).__name__} monitors {self.monitor!r}, which this run does not have: {there}")
        if run.starts or self.best_step > run.done:
            self.restart()

    def on_step(self, run: Run) -> None:
        value = run.row.get(self.monitor)
        if value is None:
            return
        gain = self.best - value if self.mode == "min" else value - self.best
        better = value == value and (self.best != self.best or gain > self.min_delta)
        if better:
            self.best, self.best_step = value, run.done
        self.measured(run, better)

    def measured(self, run: Run, better: bool) -> None:
        """Take a step at which the column was measured; `better`: it has improved."""
        raise NotImplementedError

    def state_dict(self) -> dict[str, Any]:
        """Return what is saved with a run."""
        return {"best": self.best, "best_step": self.best_step}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take what `state_dict` returned."""
        vars(self).update(state)


class EarlyStopping(Monitor):
    """Ends a run when a column of the history has not improved for a while. It ends as if that were its last step.

    Args:
        monitor: the column. min_delta: a change that is no larger is no improvement. mode: "min" or "max".
        patience: measurements in a row without an improvement after which the run ends.

    Attributes:
        best, best_step: the best value, and where it was. waited: measurements since.
    """

    def __init__(
        self, monitor: str = "global_loss", patience: int = 3, min_delta: float = 0.0, mode: str = "min"
    ) -> None:
        self.patience = whole_number("patience", patience)
        super().__init__(monitor, mode, min_delta)

    def restart(self) -> None:
        super().restart()
        self.waited = 0

    def on_start(self, run: Run) -> None:
        super().on_start(run)
        self._decide(run)

    def measured(self, run: Run, better: bool) -> None:
        self.waited = 0 if better else self.waited + 1
        self._decide(run)

    def _decide(self, run: Run) -> None:
        if self.waited >= self.patience:
            run.stop()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "waited": self.waited}


class KeepBest(Monitor):
    """Keeps the global model of the step at which a column of the history was best.

    Args:
        monitor: the column. mode: "min" or "max".

    Attributes:
        weights: its `state_dict`, for `model.load_state_dict(best.weights)`; empty before the first measurement.
        best, best_step: the value, and where it was.
    """

    def __init__(self, monitor: str = "global_loss", mode: str = "min") -> None:
        super().__init__(monitor, mode)

    def restart(self) -> None:
        super().restart()
        self.weights: dict[str, Tensor] = {}

    def measured(self, run: Run, better: bool) -> None:
        if better:
            self.weights = dict(run.global_model().state_dict())

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "weights": self.weights}


def with_hooks(spec: RunSpec) -> list[Any]:
    """Return a run's callbacks: the given ones, its hooks, and a guard of the user's objects."""
    callbacks = list(spec.callbacks or ())
    if spec.train_loss_hook or spec.eval_loss_hook:
        callbacks.append(LossHooks(spec.train_loss_hook, spec.eval_loss_hook))
    return [*callbacks, Originals(spec.model, spec.loss_fn)] if callbacks else []


def by_place(callbacks: Sequence[Any]) -> tuple[list[Any], list[Any]]:
    """With backend="process", return the callbacks that work in the process of `fit`, and in the nodes' processes."""
    here = [one for one in callbacks if getattr(one, "here", False)]
    # Of a node's copies of model and loss, a callback there may change the wrong ones, too.
    return here, [one for one in callbacks if one not in here or isinstance(one, Originals)]
