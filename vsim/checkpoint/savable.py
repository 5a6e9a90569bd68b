"""The parts of a member of a run that a checkpoint is made of."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from vsim.cluster.cluster import Cluster
from vsim.cluster.ledger import Ledger
from vsim.engine.objective import Objective
from vsim.records.history import History
from vsim.strategy.base import Strategy


class Savable(Protocol):
    """A member of a run, see `vsim.training.member.Member`, which stands above this package."""

    cluster: Cluster
    strategy: Strategy
    streams: list[torch.Generator]
    objective: Objective
    max_steps: int
    examples: int
    tokens: int
    seconds: float
    validation_seconds: float

    @property
    def part(self) -> Any: ...

    @property
    def config(self) -> Any: ...

    @property
    def fingerprint(self) -> dict[str, Any]: ...

    @property
    def history(self) -> History | None: ...

    @property
    def ledger(self) -> Ledger: ...

    @property
    def random_states(self) -> dict[str, Any]: ...

    @property
    def done(self) -> int: ...

    @property
    def is_alone(self) -> bool: ...

    def check_weights(self) -> None: ...


def savable(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return name → callback, of those with a state: by their class, and a number from the second of a class on."""
    found: dict[str, Any] = {}
    for one in callbacks:
        if all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")):
            name = type(one).__name__
            number = sum(known.split(" ")[0] == name for known in found)
            found[f"{name} {number + 1}" if number else name] = one
    return found
