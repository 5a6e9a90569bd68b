"""EXO Gym's SPARTA between the syncs of DiLoCo."""

from vsim import strategy
from vsim.compat.exogym.spellings import translated

SPARTADiLoCoStrategy = translated(
    strategy.SPARTADiLoCoStrategy, ["inner_optim", "outer_optim", "p_sparta", "sparta_interval", "H"]
)
