"""A run as the columns of a table read it."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from vsim.analysis.asked import Asked
from vsim.analysis.compared import ComparedRun
from vsim.analysis.crossings import crossing_of
from vsim.analysis.losses import final_loss
from vsim.analysis.spent import amount, until
from vsim.history.reached import Crossing
from vsim.network import Timeline


@dataclass(frozen=True, eq=False)
class Result:
    """A run as columns read it; what several of them need is computed once."""

    asked: Asked
    run: ComparedRun

    def last(self, column: str) -> float:
        """Return the last value of a column of the run's `History`; NaN if there is none."""
        return self.run.history.last(column)

    @cached_property
    def loss(self) -> float:
        """The final loss; NaN for a run that diverged."""
        return final_loss(self.asked.runs, self.run)

    @property
    def accuracy(self) -> float:
        """The last accuracy of a run with a final loss."""
        return math.nan if math.isnan(self.loss) else self.last("global_accuracy")

    @property
    def steps(self) -> int:
        """The completed steps."""
        return int(self.last("step")) if len(self.run.history) else 0

    @property
    def wire_bytes(self) -> float:
        """The bytes on the wire of the busiest node; for cohorts, of a client on average, whatever was drawn."""
        if self.asked.of_clients:
            return self.run.ledger.total_wire_bytes / self.run.ledger.num_nodes
        return self.last("wire_bytes")

    @cached_property
    def at_loss(self) -> Crossing:
        """Where the run reaches the loss that was asked for."""
        assert self.asked.loss is not None
        return crossing_of(self.asked.runs, self.run, self.asked.loss, self.asked.stays)

    def to_loss(self, of: str) -> float:
        """Return the cost of the loss that was asked for, see `vsim.analysis.spent.spent`."""
        return until(self.run.history, self.at_loss, self.asked.runs.spent(self.run, of, self.asked.priced))

    @cached_property
    def timeline(self) -> Timeline | None:
        """The times of the steps on the network; None for a run that was interrupted before the first."""
        assert self.asked.priced is not None
        return self.run.history.time(*self.asked.priced) if self.steps else None

    @property
    def seconds(self) -> float:
        """The time on the network."""
        return float(self.timeline.seconds[-1]) if self.timeline else math.nan

    @property
    def dollars(self) -> float:
        """The cost of all nodes."""
        return self.timeline.dollars if self.timeline else math.nan

    def used(self, of: str) -> float:
        """Return the share of a budget that the run used."""
        ledger = self.run.ledger
        costs: dict[str, Callable[[], float]] = {
            "wire": lambda: ledger.total_wire_bytes if self.asked.of_clients else self.wire_bytes,
            "examples": lambda: self.last("examples"),
            "time": lambda: self.seconds,
            "cost": lambda: self.dollars,
        }
        return costs[of]() / amount(of, self.asked.runs.budget[of], "budget")
