"""`vsim bench`: the time of a step against K, beside K separate modules and what else there is, and by strategy.

What a step is measured by:

- `separate`: K modules with an optimizer each, in a loop, in plain PyTorch.
- `floor`: the products, convolutions, attention, norms, activations, losses and optimizer of the vectorized step,
  each timed alone, over and over on the same data. What is left above is Python, autograd, copies and memory that has
  to be fetched. A compiler, which fuses operations, can get below.
- `bare`, beside a compiled step: the vmapped gradients compiled by torch.compile, one fused AdamW over the stacked
  weights, and the losses read. A researcher who needs no strategy, record or checkpoint would write that.
- `jax`, on demand: the same model, batch and AdamW in JAX, under its own jit.

All candidates of a line take turns, in another order every round, so that a machine whose speed drifts is the same for
all. What is reported are medians of seconds a step, and medians of ratios round by round.
"""

from vsim.bench.measure import bench, bench_strategies
from vsim.bench.show import figure, save, strategy_table, table
from vsim.bench.workloads import MODELS

__all__ = ["MODELS", "bench", "bench_strategies", "figure", "save", "strategy_table", "table"]
