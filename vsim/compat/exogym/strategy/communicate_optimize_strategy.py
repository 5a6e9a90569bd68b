"""EXO Gym's composition of communication modules."""

from __future__ import annotations

from typing import Any

from vsim import strategy
from vsim.compat.exogym.spellings import in_our_names

CommunicationModule = strategy.Algorithm


class CommunicateOptimizeStrategy(strategy.CommunicateOptimizeStrategy):
    """`vsim.strategy.CommunicateOptimizeStrategy` with EXO Gym's arguments."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        positions = ["communication_modules", "inner_optim"]
        super().__init__(**in_our_names(type(self).__name__, args, kwargs, positions))
