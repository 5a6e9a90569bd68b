"""What a user sees of a race while it trains."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from typing import Any

from vsim.race.runner import Runner
from vsim.records.history import History
from vsim.records.progress import LiveRace
from vsim.training.run import Ensemble

_SECONDS_BETWEEN = 0.1  # two updates of a progress bar


class Watch:
    """Shows a race to the user: a bar, or all curves in one figure."""

    def __init__(self, runners: Sequence[Runner], progress: bool | str, title: str) -> None:
        self.runners, self.progress, self.title = runners, progress, title
        self.bar: Any = None
        self.live: LiveRace | None = None
        self.histories: dict[str, list[History]] = {}
        self._next = 0.0
        if progress == "plot":
            self.live = LiveRace(self.histories, title)

    def show(self, ensemble: Ensemble) -> None:
        """Bring the picture or the bar up to date, if the last one is old enough."""
        if self.live is not None:
            for runner in self.runners:
                own = self.histories.setdefault(runner.name, [])
                if runner.has_begun and runner.history not in own:
                    own.append(runner.history)
            self.live.update(ensemble.max_steps)
            return
        now = time.perf_counter()
        if not self.progress or (now < self._next and ensemble.training):
            return
        self._next = now + _SECONDS_BETWEEN
        if self.bar is None:
            from tqdm.auto import tqdm

            self.bar = tqdm(total=0, unit="step", desc=self.title, dynamic_ncols=True, disable=None)
        self.bar.total = ensemble.max_steps * len(self.runners)
        self.bar.n = sum(max(0, len(runner.history) - 1) for runner in self.runners)
        known = [m.row.get("train_loss", math.nan) for m in ensemble.training]
        losses = [loss for loss in known if loss == loss]
        left = sum(not run.trains for run in ensemble.runs)
        preparing = next(filter(None, (stack.executor.preparing for stack in ensemble.stacks)), "")
        best = f"best loss {min(losses):.3f}" if losses else preparing
        self.bar.set_postfix_str(best + (f", {left} not training" if left else ""), refresh=False)
        self.bar.update(0)

    def __enter__(self) -> Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.live is not None:
            self.live.close()
