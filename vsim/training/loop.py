"""The one training loop, for every backend and any number of runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, field

from vsim.arguments import naming
from vsim.cluster.randomness import global_states
from vsim.core.group import Group
from vsim.engine.machine import repeating
from vsim.training import resume
from vsim.training.acts.measure import MeasureEnded, Validate
from vsim.training.acts.moment import Moment
from vsim.training.acts.record import Amend, Record
from vsim.training.acts.save import CheckDeclared, CheckWeights, Save
from vsim.training.acts.stop import Ask, Stop
from vsim.training.acts.tell import OnEnd, OnStart, OnStep
from vsim.training.attendance import attend
from vsim.training.interrupt import Interrupt, Interrupted
from vsim.training.tracked import TrackedRun

Act = Callable[[Moment], None]


@dataclass(eq=False)
class Ensemble:
    """Runs that are set up to train together, with everything that the training loop needs.

    Attributes:
        runs: all runs, in the given order. groups: the same runs, in groups that are computed together.
        interrupt: holds the user's request to stop after the current step.
        watch: called as f(ensemble) when a step is reported for all runs.
        stopping: called as f(ensemble) after a step; returns the runs to stop after this step.
    """

    runs: list[TrackedRun]
    groups: list[Group[TrackedRun]]
    max_steps: int
    interrupt: Interrupt = field(default_factory=Interrupt)
    watch: Callable[[Ensemble], None] | None = None
    stopping: Callable[[Ensemble], Collection[TrackedRun]] | None = None

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
    interrupt, several = ensemble.interrupt, len(ensemble.runs) > 1
    on_start = OnStart(interrupt)
    on_step, on_end = OnStep(interrupt, on_start.values), OnEnd(interrupt, on_start.values)
    validate, record, amend = Validate(), Record(), Amend()

    def show(moment: Moment) -> None:
        if ensemble.watch is not None:
            ensemble.watch(ensemble)

    # The order is the contract; each line says what would go wrong elsewhere.
    after: list[Act] = [
        validate,  # before the row that has its columns
        record,  # before callbacks, which get the row
        on_step,
        Validate(again=True),  # a run that a callback has just stopped ends with a validation
        amend,
        CheckWeights(),  # before the end is measured: of weights that are not finite nothing is
        MeasureEnded(),  # after callbacks, one of which may have ended the run
        amend,
        CheckDeclared(several),
        Ask(interrupt),  # once, so that what is saved and what is said agree
        Save(),  # after callbacks, which may have set weights, and after the last amendment
        on_end,  # after the last step is saved: an error there does not lose it
        show,
        Stop(),  # after on_end, which a run that is complete gets, too
    ]
    for run in ensemble.training:
        with naming(run.spec.label if several else ""):
            resume.begin(run)
    everyone = Moment(0, ensemble.groups, ensemble.training)
    on_start(everyone)
    first = min((run.done for run in ensemble.unfinished), default=ensemble.max_steps)
    for run in ensemble.training:
        run.recording.known_events = len(run.ledger)
    attend(ensemble.groups, ensemble.training, first + 1)
    new = [run for run in ensemble.training if run.starts]
    starting = Moment(first, ensemble.groups, new)
    begin: list[Act] = [validate, record, on_step, MeasureEnded(briefly=True)]
    for act in begin:
        act(starting)
    for run in new:
        run.starts = False
    on_end(everyone)
    show(everyone)
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
        interrupt.check()
        moment = Moment(step, ensemble.groups, reached, stops=stops)
        for act in after:
            act(moment)
        if ensemble.stopping is not None:
            for run in ensemble.stopping(ensemble):
                run.stopped = True
        yield step
