"""Train groups of runs: what happens before the first step and after every step, in which order, and why there.

runs ─► prepare ─► groups ─► steps ─► Moment, Moment, …    one after each step; `fit` takes all steps
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vsim.cluster.randomness import global_states
from vsim.core.group import Group
from vsim.engine.machine import repeating
from vsim.runs.acts.attend import Attend
from vsim.runs.acts.conclude import Conclude
from vsim.runs.acts.feed import Feed
from vsim.runs.acts.halve import Halve
from vsim.runs.acts.measure import MeasureEnded, Validate
from vsim.runs.acts.moment import Moment, Send
from vsim.runs.acts.place import Place
from vsim.runs.acts.record import Amend, Record
from vsim.runs.acts.restore import Resume
from vsim.runs.acts.save import CheckDeclared, CheckSavable, CheckWeights, Save
from vsim.runs.acts.show import Show
from vsim.runs.acts.stop import Ask, Stop
from vsim.runs.acts.tell import OnEnd, OnStart, OnStep
from vsim.runs.interrupt import Interrupt, Interrupted
from vsim.runs.setup import build
from vsim.runs.tracked import TrackedRun

Act = Callable[[Moment], None]


class Orders:
    """The acts, in their orders.

    Args:
        interrupt: holds the user's request to stop.
        conclude, show, halve: what the runs of a comparison have in common.
        send: sends reports and outcomes to another process, see `Record`.
    """

    def __init__(
        self,
        interrupt: Interrupt,
        conclude: Conclude | None = None,
        show: Show | None = None,
        halve: Halve | None = None,
        send: Send | None = None,
    ) -> None:
        self.interrupt = interrupt
        conclude, show, halve = conclude or Conclude(send=send), show or Show(), halve or Halve()
        record, amend = Record(send), Amend(send)
        values: WeakKeyDictionary[nn.Module, dict[str, int]] = WeakKeyDictionary()  # what callbacks have seen of models
        told = interrupt, values
        self.begin: list[Act] = [
            CheckSavable(),  # after the setup, which changes what strategies do not declare
            OnStart(*told),  # before nodes attend: a callback that fails has joined nobody
            Attend(),
        ]
        self.begin_new: list[Act] = [
            Validate(),
            record,
            OnStep(*told),  # on_evaluation
            MeasureEnded(briefly=True),  # raises before training what would fail after it
        ]
        self.begin_over: list[Act] = [Validate(again=True), MeasureEnded(), amend, Save()]  # new runs without a step
        self.begin_ended: list[Act] = [OnEnd(*told), conclude, show]  # also runs that resume after their last step
        self.after_a_step: list[Act] = [
            Validate(),  # before the row that has its columns
            record,  # before callbacks, which get the row
            OnStep(*told),  # before the run is saved or ends: a callback may set weights, or end it
            Validate(again=True),  # a run that a callback has just stopped ends with a validation
            amend,  # before the run is saved with its last row
            CheckWeights(),  # before the end is measured: of weights that are not finite nothing is
            MeasureEnded(),  # after callbacks, one of which may have ended the run
            amend,
            CheckDeclared(),  # before the state is saved, or moves
            Ask(interrupt),  # once and before saving, so that what is saved and what is said agree
            Save(),  # before on_end, so that an error there does not lose the last step
            OnEnd(*told),
            conclude,  # of what on_end has left; before the end is shown
            show,
            Stop(),  # after on_end, which a complete run gets also where training stops
            halve,  # after Stop: a run that was interrupted at a rung is not beaten
            Attend(),  # last: what the next step's nodes join, pull and send is billed in the next step
        ]

    def perform(self, acts: Sequence[Act], moment: Moment) -> None:
        """Call acts one after the other.

        Raises:
            KeyboardInterrupt: Ctrl-C was pressed twice, and the code that was interrupted has swallowed that. What the
                act has computed may be incomplete, and the acts that follow must neither record nor save it.
        """
        for act in acts:
            act(moment)
            if self.interrupt.insisted:  # `Interrupt.check`, without a call for every act of every step
                raise KeyboardInterrupt


def prepare(
    runs: Sequence[TrackedRun], device: torch.device, interrupt: Interrupt | None = None, **given: Any
) -> list[Group[TrackedRun]]:
    """Set up runs that train together, up to their first step.

    Args:
        interrupt: holds the user's request to stop, for all runs. given: see `vsim.runs.setup.build`.

    Raises:
        CheckpointError: a run does not fit the checkpoint that it starts from.
        TypeError, ValueError: an option is invalid; with several runs, the message names the run.
    """
    try:
        groups = build(runs, device, interrupt or Interrupt(), **given)
        moment = Moment(0, groups, runs)
        for act in (Place(), Resume(), Feed()):  # a checkpoint fills what is placed, and says which batch comes next
            act(moment)
    except BaseException:
        for run in runs:
            run.release_clients()  # for other runs
        raise
    return groups


def fit(groups: Sequence[Group[TrackedRun]], orders: Orders | None = None) -> None:
    """Train to the last step. Ctrl-C stops after the current step; a second one acts at once.

    With several processes, a request travels with the losses of the next step, after which all processes stop.

    Raises:
        Interrupted: a process of the run was asked to stop; raised after the current step.
        KeyboardInterrupt: Ctrl-C was pressed again, or an error ended a step in which a stop was requested.
    """
    interrupt, run = _interrupt(groups), groups[0].runs[0]
    try:
        with interrupt:
            moment = Moment(0, groups, [])
            for moment in steps(groups, orders):  # noqa: B007
                pass
            if run.is_alone and interrupt.requested:
                step = max(r.done for group in groups for r in group.runs)
                raise Interrupted(step, run.spec.saving if moment.saved else None)
    except Exception as error:
        if interrupt.explains(error):
            raise KeyboardInterrupt(f"interrupted in a step that was not completed: {error}") from error
        raise
    finally:
        release(groups)


def steps(groups: Sequence[Group[TrackedRun]], orders: Orders | None = None) -> Iterator[Moment]:
    """Take the steps of prepared groups, and yield each one's moment after all acts.

    Unlike `fit`, this does not handle Ctrl-C, and leaves `release` to the caller.
    """
    orders = orders or Orders(_interrupt(groups))
    repeats = any(r.spec.deterministic for group in groups for r in group.runs)
    device = groups[0].whole.weights.device
    with repeating(device) if repeats else nullcontext():
        begin(groups, orders)
    while unfinished := [run for group in groups for run in group.running]:
        steps_done = [run.done for run in unfinished]
        done = min(steps_done)  # other runs resumed from a later step
        behind = [run for run, own in zip(unfinished, steps_done, strict=True) if own == done]
        with repeating(device) if repeats else nullcontext():
            stops = False
            for group in dict.fromkeys([run.group for run in behind]):
                stops |= next(group.steps).stops
            orders.interrupt.check()
            reached = [run for run in behind if run.trains and run.done == done + 1]
            moment = Moment(done + 1, groups, reached, stops=stops)
            orders.perform(orders.after_a_step, moment)
        yield moment


def begin(groups: Sequence[Group[TrackedRun]], orders: Orders) -> None:
    """Do what precedes the first step."""
    runs = [run for group in groups for run in group.runs]
    all_runs = Moment(0, groups, [run for run in runs if run.trains])
    orders.perform(orders.begin, all_runs)
    new_runs = Moment(0, groups, [run for run in runs if run.trains and run.starts])
    orders.perform(orders.begin_new, new_runs)
    without_step = [run for run in new_runs.reached if run.is_over]
    orders.perform(orders.begin_over, Moment(0, groups, without_step, reports=new_runs.reports))
    orders.perform(orders.begin_ended, Moment(0, groups, all_runs.reached, reports=new_runs.reports))


def release(groups: Sequence[Group[TrackedRun]]) -> None:
    """Release what only training needs, and keep the final states of the process's random generators."""
    for group in groups:
        for run in group.runs:
            if run.presence.data_states is None:
                run.keeping.final_rng_states = global_states(run.cluster.weights.device)
            run.release_clients()
            run.cluster.gradient_at = None  # it refers to the group, whose memory would stay in use
        group.batches = iter(())  # ends the worker processes of a DataLoader


def _interrupt(groups: Sequence[Group[TrackedRun]]) -> Interrupt:
    interrupt = groups[0].requests
    assert isinstance(interrupt, Interrupt)
    return interrupt
