"""EXO Gym's base of strategies, and its AllReduce."""

from __future__ import annotations

from typing import Any

from vsim import strategy
from vsim.compat.exogym.spellings import in_our_names, translated

SimpleReduceStrategy = translated(strategy.SimpleReduceStrategy, ["inner_optim"])


class Strategy(strategy.Strategy):
    """`vsim.strategy.Strategy` with EXO Gym's arguments. A subclass may set `self.optim_spec` in its `__init__`."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(**in_our_names(type(self).__name__, args, kwargs, ["inner_optim"]))
