"""EXO Gym's DeMo."""

from vsim import strategy
from vsim.compat.exogym.spellings import translated

DeMoStrategy = translated(
    strategy.DeMoStrategy,
    ["inner_optim", "compression_decay", "compression_topk", "compression_chunk", "weight_decay"],
)
