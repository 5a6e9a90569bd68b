"""Under the name that EXO Gym has them: the base of strategies (`vsim.strategy.base`) and AllReduce (`reduce`)."""

from vsim.strategy.base import Strategy
from vsim.strategy.reduce import SimpleReduceStrategy

__all__ = ["SimpleReduceStrategy", "Strategy"]
