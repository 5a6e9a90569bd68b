"""Under the name that EXO Gym has it: SPARTA with DiLoCo, which lives in `vsim.strategy.sparta`."""

from vsim.strategy.sparta import SPARTADiLoCoStrategy

__all__ = ["SPARTADiLoCoStrategy"]
