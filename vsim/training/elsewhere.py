"""The side of the caller, when runs train in other processes: it has the records, the display and the user's loggers.

    this process                              the processes that train, of which the first sends
    Trainer.fit, train_elsewhere       ──►    options of the runs, without what works here
    Relay, Display                     ◄──    (number of a run, its `StepReport` or `Outcome`), …

Under torchrun every process is both: it trains, and receives from itself.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

from vsim.cluster.state import CheckpointError
from vsim.history.history import History
from vsim.training.callbacks import Relay
from vsim.training.display import Display
from vsim.training.interrupt import Interrupted
from vsim.training.outcome import Outcome
from vsim.training.race import Messages, Race, finish
from vsim.training.spec import RunSpec
from vsim.training.tracked import TrackedRun

Receive = Callable[[int, Any], None]  # f(number of a run, message)


def train_elsewhere(race: Race, launch: Callable[[Race, Receive], object]) -> None:
    """Train the runs of a race in several other processes, and keep the records in this process.

    If the processes fail after their first step, the runs keep their records and the error.

    Args:
        launch: called with the race to train there, and what receives the first process's messages here.
    """
    relays = [Relay(run.recorder, run.spec.callbacks) for run in race.runs]
    with Display(race.runs, race.progress, race.title) as display, ExitStack() as ending:
        for run in race.runs:
            ending.push(partial(finish, run))

        def receive(number: int, message: Any) -> None:
            run = race.runs[number]
            if isinstance(message, Outcome):
                run.error, run.stopped_at, run.finished_at = message.error, message.stopped_at, message.finished_at
                if message.record is not None:
                    run.history.continue_from(History.from_plain(message.record[0]))
                if message.weights is not None:
                    run.model, run.client_models = message.model(like=run.spec.model), message.client_models
                    relays[number].end(message.callbacks)
            else:
                relays[number](message)
                display.hear(run, message)
                display.show()

        runs = [
            TrackedRun.of(for_elsewhere(run.spec, relay), run.name)
            for run, relay in zip(race.runs, relays, strict=True)
        ]
        try:
            launch(replace(race, runs=runs), receive)
        except Interrupted:
            raise
        except (Exception, KeyboardInterrupt) as error:  # the latter after a second Ctrl-C
            if isinstance(error, KeyboardInterrupt) or race.interrupt.explains(error):
                raise Interrupted(max(run.recorded for run in race.runs), runs[0].spec.saving) from error
            little = isinstance(error, CheckpointError) and all(len(run.history) <= 2 for run in race.runs)
            if not display.losses or little:  # an error of the first step
                raise
            for run in race.runs:
                if not run.has_outcome:
                    run.error = error


def each(receive: Receive) -> Messages:
    """Return a function that receives a list of messages one by one."""

    def receive_all(messages: Sequence[tuple[int, Any]]) -> None:
        for number, message in messages:
            receive(number, message)

    return receive_all


def for_elsewhere(spec: RunSpec, relay: Relay) -> RunSpec:
    """Return a run's options for the processes that train it: without loggers and hooks, which stay in this process."""
    spec = replace(spec, callbacks=relay.remote, train_loss_hook=None, eval_loss_hook=None)
    return replace(spec, logger=None, run_name=None, wandb_project=None, log_x_axis="step", log_interval=1)
