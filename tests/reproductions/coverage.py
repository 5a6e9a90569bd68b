"""How often intervals and tests of comparisons are right, where the true differences are known: 20,000 runs."""

from __future__ import annotations

import math
import statistics

import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
from vsim.cluster import Cluster
from vsim.strategy import Algorithm

from .result import Row, Table

COMPARISONS, AT_ONCE, SEEDS, NODES, STEPS = 1000, 50, 5, 2, 2
START, RATE, BIAS = 30.0, 0.1, -1.2
EQUAL = ("a", "b", "c")  # strategies that do not differ; "worse" has a biased gradient

# The loss is w² / 2, with two independent noises N(0, 1) in the gradient of each node, of which one is the same for all
# strategies of a comparison. After two steps the mean weight is normal.
LEFT = 1 - RATE
MEAN = START * LEFT**STEPS
WORSE = MEAN - RATE * BIAS * sum(LEFT**i for i in range(STEPS))
VARIANCE = RATE**2 / NODES * sum(LEFT ** (2 * i) for i in range(STEPS))  # of one of the two noises
DIFFERENCE = (WORSE**2 - MEAN**2) / 2  # the variances, of equal size, drop out
# Of a difference of losses, first order in the noise: own noises of both, and what remains of the shared one.
DEVIATION = math.sqrt(VARIANCE * (MEAN**2 + WORSE**2 + (WORSE - MEAN) ** 2))


def power(seeds: int) -> float:
    """The chance that a two-sided paired t-test at 5 % finds the difference."""
    shift, limit = DIFFERENCE / DEVIATION * math.sqrt(seeds), stats.t.ppf(0.975, seeds - 1)
    return float(stats.nct.sf(limit, seeds - 1, shift) + stats.nct.cdf(-limit, seeds - 1, shift))


NEEDED = next(n for n in range(2, 100) if power(n) >= 0.8)
TWO_ERRORS = 100 * 2 * math.sqrt(0.05 * 0.95 / COMPARISONS)
TABLE = Table(
    title="Intervals and tests of comparisons",
    setting=f"Shares of 1,000 comparisons with {SEEDS} seeds of strategies whose true difference is known: SGD on w² "
    "/ 2 with noise in the gradients, part of which is the same for all. Three strategies are equal in distribution, "
    "with noises of their own; a fourth is worse by a biased gradient.",
    source="definitions of a 95 % interval and of a family's error at 5 %; power of the paired t-test",
    url="significance.md",
    rows={
        "the 95 % interval of `differences` holds a true difference of 0": Row((93, 97), unit="%"),
        f"the 95 % interval holds a true difference of {DIFFERENCE / DEVIATION:.2f} deviations": Row(
            (93, 97), unit="%"
        ),
        "`differences(to=…)` tells any of three equal strategies apart": Row((0, 5), within=TWO_ERRORS, unit="%"),
        "`differences()` tells any of three equal ones from the best": Row((0, 5), within=TWO_ERRORS, unit="%"),
        "a table has no † at one of three equal strategies": Row((0, 5), within=TWO_ERRORS, unit="%"),
        "`differences` finds the worse strategy": Row(
            100 * power(SEEDS), within=200 * math.sqrt(power(SEEDS) * (1 - power(SEEDS)) / COMPARISONS), unit="%"
        ),
        "`seeds_needed` for it, median": Row(NEEDED, within=1),
    },
    digits=".3g",
    quick_agrees=False,  # too few comparisons
    expected_is="nominal",
)


class Quadratic(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.tensor([START]))

    def forward(self, batch: tuple[Tensor, ...]) -> Tensor:
        return self.w.square().sum() / 2


class NoisySGD(Algorithm):
    """Add noise to the nodes' gradients: of a comparison, and of strategy number `own` in it; then average them."""

    noise: Tensor  # of each step (T, K, 1)

    def __init__(self, comparison: int, own: int, bias: float = 0.0) -> None:
        self.numbers, self.bias = (100 * comparison, 100 * comparison + own + 1), bias
        super().__init__(inner_optim="sgd", lr=RATE)

    def setup(self, cluster: Cluster) -> None:
        seed = int(torch.randint(2**40, (), generator=cluster.generator))  # of the run
        streams = [torch.Generator().manual_seed(seed + number) for number in self.numbers]
        noises = [torch.randn(STEPS, NODES, 1, generator=stream) for stream in streams]
        self.keep_shared(noise=sum(noises, torch.tensor(self.bias)))

    def communicate_gradients(self, cluster: Cluster) -> None:
        noisy = cluster.grads + self.noise[cluster.step - 1]
        cluster.grads.copy_(cluster.collectives.all_reduce(noisy, "mean", label="gradients"))


def compared(numbers: range) -> vsim.Comparison:
    """Several comparisons in one; their names begin with their numbers."""
    strategies = {f"{n} {name}": NoisySGD(n, own) for n in numbers for own, name in enumerate(EQUAL)}
    strategies |= {f"{n} worse": NoisySGD(n, len(EQUAL), BIAS) for n in numbers}
    nothing = TensorDataset(torch.zeros(NODES * STEPS, 1))
    options = {"num_nodes": NODES, "max_steps": STEPS, "batch_size": 1, "val_interval": None, "progress": False}
    return vsim.compare(Quadratic(), nothing, nothing, strategies=strategies, seeds=range(SEEDS), **options)


def measure(quick: bool) -> dict[str, float]:
    held, held_worse, apart, apart_from_best, unmarked, found, needed = ([] for _ in range(7))
    number = 10 if quick else COMPARISONS
    for first in range(0, number, AT_ONCE):
        numbers = range(first, min(first + AT_ONCE, number))
        whole = compared(numbers)
        for n in numbers:
            a, b, c, worse = (f"{n} {name}" for name in (*EQUAL, "worse"))
            (row,) = whole[[a, b]].differences(to=a).itertuples()
            held.append(row.low <= 0 <= row.high)
            (row,) = whole[[a, worse]].differences(to=a).itertuples()
            held_worse.append(row.low <= DIFFERENCE <= row.high)
            found.append(row.p <= 0.05)
            needed.append(row.seeds_needed)
            equal = whole[[a, b, c]]
            apart.append((equal.differences(to=a).p <= 0.05).any())
            apart_from_best.append((equal.differences().p <= 0.05).any())
            marked = [line for line in equal.table(columns=["validation loss"]).splitlines() if line.endswith("†")]
            unmarked.append(len(marked) < len(EQUAL) - 1)
    shares = [100 * statistics.fmean(one) for one in (held, held_worse, apart, apart_from_best, unmarked, found)]
    return dict(zip(TABLE.rows, [*shares, statistics.median(needed)], strict=True))
