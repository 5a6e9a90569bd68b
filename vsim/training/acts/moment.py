"""What acts see between two steps, and where one leaves for another what does not outlast the moment."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from vsim.core.failing import Guard
from vsim.core.group import Group
from vsim.history.progress import StepReport
from vsim.training.tracked import TrackedRun

Send = Callable[[Sequence[tuple[TrackedRun, Any]]], None]  # (run, its `StepReport` or `Outcome`), …


@dataclass
class Moment:
    """The time after a step of all groups that took it; before the first step, that of the runs that begin.

    Attributes:
        number: the step. groups: all groups, also those that did not take this step.
        reached: the runs that have completed this step.
        columns: run → what has been measured and is not in its row yet.
        client_val: run → the global model's "losses" (N,) on the clients' data, and "accuracies" (N,) if known.
        reports: run → the report of its row.
        stops: whether training ends here.
        saved: whether every run that still trains is saved where the user asked for it.
    """

    number: int
    groups: Sequence[Group[TrackedRun]]
    reached: Sequence[TrackedRun]
    columns: dict[TrackedRun, dict[str, float]] = field(default_factory=dict)
    client_val: dict[TrackedRun, dict[str, list[float]]] = field(default_factory=dict)
    reports: dict[TrackedRun, StepReport] = field(default_factory=dict)
    stops: bool = False
    saved: bool = True

    @property
    def training(self) -> list[TrackedRun]:
        """The runs that still train: an act that ends a run hides it from the acts that follow."""
        return [run for run in self.reached if run.trains]

    @cached_property
    def over(self) -> list[TrackedRun]:
        """The runs that have completed their last step; to be asked after callbacks, which may end runs at this one."""
        return [run for run in self.reached if run.is_over]

    def each(self, act: Callable[[TrackedRun], object], runs: Sequence[TrackedRun] | None = None) -> None:
        """Call act(run) for every run, or for these, that still trains; an error ends that run only."""
        for run in self.reached if runs is None else runs:
            if run.trains:
                with Guard(run.group, run):
                    act(run)

    def by_group(self, runs: Sequence[TrackedRun]) -> list[tuple[Group[TrackedRun], list[TrackedRun]]]:
        """Return those of these runs that still train, by group, in the groups' order."""
        found: dict[Group[TrackedRun], list[TrackedRun]] = {}
        for run in runs:
            if run.trains:
                found.setdefault(run.group, []).append(run)
        return [(group, found[group]) for group in self.groups if group in found]
