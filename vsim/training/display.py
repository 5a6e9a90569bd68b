"""What a user sees while the runs of a comparison train: a bar, a table, or all curves in one figure."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

from vsim.history.history import History
from vsim.history.live import LiveRace
from vsim.history.live_table import LiveTable
from vsim.history.progress import StepReport
from vsim.network.timeline import duration
from vsim.training.tracked import TrackedRun

_SECONDS_BETWEEN = 0.1  # updates of a progress bar


class Display:
    """Shows the progress of the runs: a bar, a table, or all curves in one figure."""

    def __init__(self, runs: Sequence[TrackedRun], progress: bool | str, title: str) -> None:
        self.runs, self.progress, self.title = runs, progress, title
        self.bar: Any = None
        self.live: LiveRace | LiveTable | None = None
        self.histories: dict[str, list[History]] = {}
        self.steps: dict[TrackedRun, int] = {}  # the last step of every run that is known to begin
        self.losses: dict[TrackedRun, float] = {}  # the last training loss
        self.preparing = ""
        self._next = 0.0
        self._began = (0.0, -1)  # the time before the first step, and the steps taken until then
        if progress == "plot":
            self.live = LiveRace(self.histories, title)
        elif progress == "table":
            self.live = LiveTable(title)

    def expect(self, steps: Mapping[TrackedRun, int], preparing: str = "") -> None:
        """Note the numbers of steps of runs that will begin, and a text about long work before the first step."""
        self.steps |= steps
        self.preparing = preparing

    def hear(self, run: TrackedRun, report: StepReport) -> None:
        """Note a report of a run. Nothing is shown before `show`."""
        self.steps[run], self.preparing = report.max_steps, report.preparing
        if "train_loss" in report.row:
            self.losses[run] = report.row["train_loss"]

    def show(self, last: bool = False) -> None:
        """Update the figure, table or bar, unless the last update was a moment ago.

        Args:
            last: whether this update is the last, which is always shown.
        """
        longest = max(self.steps.values())
        steps = {run: self.steps.get(run) or run.spec.max_steps or longest for run in self.runs}
        over = last or all(run.has_outcome or len(run.history) > steps[run] for run in self.runs)
        if self.live is not None:
            for run in self.runs:
                own = self.histories.setdefault(run.name, [])
                if run.has_begun and run.history not in own:
                    own.append(run.history)
            if isinstance(self.live, LiveTable):
                caption = self.preparing or self._time_left(steps)
                self.live.update(self.histories, {run.name: own for run, own in steps.items()}, over, caption)
            elif any(self.histories.values()):
                self.live.update(max(steps.values()))
            return
        now = time.perf_counter()
        if not self.progress or (now < self._next and not over):
            return
        self._next = now + _SECONDS_BETWEEN
        if self.bar is None:
            from tqdm.auto import tqdm

            self.bar = tqdm(total=0, unit="step", desc=self.title, dynamic_ncols=True, disable=None)
        self.bar.total = sum(steps.values())
        self.bar.n = sum(max(0, len(run.history) - 1) for run in self.runs)
        gone = {run for run in self.runs if run.error is not None or run.stopped_at is not None}
        left, known = len(gone), (loss for run, loss in self.losses.items() if run not in gone)
        best = min(filter(math.isfinite, known), default=None)
        shown = self.preparing if best is None else f"best loss {best:.3f}"
        more = f", {left} not training" if left else ""
        self.bar.set_postfix_str(shown + more, refresh=best is None and bool(self.preparing))
        self.bar.update(0)

    def _time_left(self, steps: Mapping[TrackedRun, int]) -> str:
        """Estimate the time for the remaining steps from the mean time of a step since the first."""
        taken = {run: max(0, len(run.history) - 1) for run in self.runs}
        missing = sum(steps[run] - own for run, own in taken.items() if not run.has_outcome)
        now, done = time.perf_counter(), sum(taken.values())
        since, before = self._began
        if before < 0 or done == before:
            self._began = (now, done)
            return ""
        seconds = round((now - since) / (done - before) * missing)
        return f"about {duration(seconds)} left" if seconds > 0 else ""

    def __enter__(self) -> Display:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.live is not None:
            self.live.close()
