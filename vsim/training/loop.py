"""The one training loop, for every backend and any number of runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field
from weakref import WeakKeyDictionary

from torch import nn

from vsim.arguments import naming
from vsim.cluster.randomness import global_states
from vsim.core.group import Group
from vsim.engine.machine import repeating
from vsim.training import resume
from vsim.training.acts.attend import Attend
from vsim.training.acts.compete import Halve, Show
from vsim.training.acts.measure import MeasureEnded, Validate
from vsim.training.acts.moment import Moment
from vsim.training.acts.record import Amend, Record
from vsim.training.acts.save import CheckDeclared, CheckWeights, Save
from vsim.training.acts.stop import Ask, Stop
from vsim.training.acts.tell import OnEnd, OnStart, OnStep
from vsim.training.interrupt import Interrupt, Interrupted
from vsim.training.tracked import TrackedRun

Act = Callable[[Moment], None]
Told = tuple[Interrupt, WeakKeyDictionary[nn.Module, dict[str, int]]]


@dataclass(eq=False)
class Ensemble:
    """Runs that are set up to train together, with everything that the training loop needs.

    Attributes:
        runs: all runs, in the given order. groups: the same runs, in groups that are computed together.
        interrupt: holds the user's request to stop after the current step.
        watch: called when a step is reported for all runs.
        stopping: called after a step; returns the runs to stop after this step.
        record: makes the rows of all runs.
    """

    runs: list[TrackedRun]
    groups: list[Group[TrackedRun]]
    max_steps: int
    interrupt: Interrupt = field(default_factory=Interrupt)
    watch: Callable[[], None] | None = None
    stopping: Callable[[], Collection[TrackedRun]] | None = None
    record: Record = field(default_factory=Record)

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


def acts_after_a_step(ensemble: Ensemble, told: Told) -> list[Act]:
    """Return what happens after every step, in this order, with the reason for each place.

    Args:
        told: the interrupt, and what callbacks have seen of models.
    """
    amend = Amend()
    return [
        Validate(),  # before the row that has its columns
        ensemble.record,  # before callbacks, which get the row
        OnStep(*told),  # before the run is saved or ends: a callback may set weights, or end it
        Validate(again=True),  # a run that a callback has just stopped ends with a validation
        amend,  # before the run is saved with its last row
        CheckWeights(),  # before the end is measured: of weights that are not finite nothing is
        MeasureEnded(),  # after callbacks, one of which may have ended the run
        amend,
        CheckDeclared(len(ensemble.runs) > 1),  # before the state is saved, or moves
        Ask(ensemble.interrupt),  # once and before saving, so that what is saved and what is said agree
        Save(),  # before on_end, so that an error there does not lose the last step
        OnEnd(*told),
        Show(ensemble.watch),
        Stop(),  # after on_end, which a complete run gets also where training stops
        Halve(ensemble.stopping),  # after Stop: a run that was interrupted at a rung is not beaten
        Attend(),  # last: what the next step's nodes join, pull and send is billed in the next step
    ]


def _steps(ensemble: Ensemble) -> Iterator[int]:
    told: Told = (ensemble.interrupt, WeakKeyDictionary())
    after, runs = acts_after_a_step(ensemble, told), ensemble.training
    for run in runs:
        with naming(run.spec.label if len(ensemble.runs) > 1 else ""):
            resume.begin(run)
    all_runs = Moment(0, ensemble.groups, runs)
    OnStart(*told)(all_runs)
    for run in ensemble.training:
        run.recording.known_events = len(run.ledger)
    Attend()(all_runs)
    new_runs = Moment(0, ensemble.groups, [run for run in ensemble.training if run.starts])
    of_new: list[Act] = [Validate(), ensemble.record, OnStep(*told), MeasureEnded(briefly=True)]
    for act in of_new:
        act(new_runs)
    for run in new_runs.reached:
        run.starts = False
    all_runs.over = [run for run in runs if run.is_over]
    for act in (OnEnd(*told), Show(ensemble.watch)):
        act(all_runs)
    while unfinished := ensemble.unfinished:
        step = min([run.done for run in unfinished]) + 1
        taking = [run for run in unfinished if run.done == step - 1]  # other runs resumed from a later step
        stops = False
        for group in dict.fromkeys([run.group for run in taking]):
            stops |= next(group.steps).stops
        ensemble.interrupt.check()
        reached = [run for run in taking if run.trains and run.done == step]
        moment = Moment(step, ensemble.groups, reached, stops=stops)
        for act in after:
            act(moment)
        yield step
