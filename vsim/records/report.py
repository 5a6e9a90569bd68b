"""What becomes known at a step, and who wants to hear of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from vsim.cluster.ledger import Event
from vsim.cluster.plan import Segment

Hook = Callable[[int, float], Any]


@dataclass
class StepReport:
    """What became known at a step: the row of the history, the nodes' losses (K,), the events of the ledger.

    `executor`, `max_steps` and `minibatch_size` (None: the whole batch) are the run's. `segment` says who takes part,
    if not all nodes do in all steps; `preparing`, what the next step does beside computing, if that takes long.
    """

    row: Mapping[str, float]
    node_losses: Sequence[float] | None
    events: Sequence[Event]
    executor: str
    max_steps: int
    minibatch_size: int | None = None
    executor_reason: str = ""
    segment: Segment | None = None
    preparing: str = ""


class Reporter(Protocol):
    """Takes the report of every step, step 0 included."""

    def __call__(self, report: StepReport) -> None: ...
