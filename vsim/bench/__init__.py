"""`vsim bench`: the time of a step against K, beside K separate modules and beside its floor, and by strategy.

The floor of a step is the sum of what it cannot do without: its matrix products, convolutions, attention, norms,
activations, losses and its optimizer, each timed alone, over and over on the same data, in the same run. The operations
are those that the vectorized step calls; what is left above the floor is Python, autograd, copies and memory that has
to be fetched.

All candidates of a line take turns, in another order every round, so that a machine whose speed drifts is the same for
all. What is reported are medians, and medians of ratios.
"""

from vsim.bench.measure import bench, bench_strategies
from vsim.bench.show import figure, save, strategy_table, table
from vsim.bench.workloads import MODELS

__all__ = ["MODELS", "bench", "bench_strategies", "figure", "save", "strategy_table", "table"]
