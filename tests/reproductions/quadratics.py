"""Each linear strategy on noisy quadratics: mean and covariance of the weights, as its recursion has them."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from scipy import stats
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
from vsim.strategy import (
    Algorithm,
    DelayedNesterovStrategy,
    DiLoCoStrategy,
    EagerDiLoCoStrategy,
    FedAvgStrategy,
    HierarchicalStrategy,
    NoLoCoStrategy,
    OptimSpec,
    SimpleReduceStrategy,
    SlowMoStrategy,
    SPARTAStrategy,
    StreamingDiLoCoStrategy,
)

from . import formulas
from .formulas import Array, Formula
from .recursion import Quadratics, moments
from .result import PAGE, Row, Table

PROBLEM, LR, STEPS = Quadratics(), 0.2, 48
HEAVY_BALL = OptimSpec(torch.optim.SGD, lr=0.5, momentum=0.6)
NESTEROV = OptimSpec(torch.optim.SGD, lr=0.5, momentum=0.6, nesterov=True)
OUTER = {"outer_lr": 0.5, "momentum": 0.6}


class Case(NamedTuple):
    strategy: Algorithm
    formulas: list[Formula]  # of the first half of the coordinates, and of the second if it differs
    seeds: int = 1  # runs, where one draw is of all coordinates


def sgd(cls: type[Algorithm], *args: Any, **kwargs: Any) -> Algorithm:
    return cls(*args, inner_optim="sgd", lr=LR, **kwargs)


FRAGMENTS = [["parts.0"], ["parts.1"]]
HALVES = [formulas.Streaming(LR, 6, **OUTER, fragment=i, delay=2, mixing=0.5) for i in range(2)]
CASES = {
    "AllReduce": Case(sgd(SimpleReduceStrategy), [formulas.AllReduce(LR)]),
    "FedAvg, local SGD": Case(sgd(FedAvgStrategy, H=6), [formulas.FedAvg(LR, 6)]),
    "DiLoCo, heavy ball": Case(
        sgd(DiLoCoStrategy, H=6, outer_optim=HEAVY_BALL), [formulas.DiLoCo(LR, 6, **OUTER, nesterov=False)]
    ),
    "DiLoCo, Nesterov": Case(sgd(DiLoCoStrategy, H=6, outer_optim=NESTEROV), [formulas.DiLoCo(LR, 6, **OUTER)]),
    "SlowMo": Case(sgd(SlowMoStrategy, H=6, alpha=0.8, beta=0.5), [formulas.SlowMo(LR, 6, alpha=0.8, beta=0.5)]),
    "Streaming DiLoCo": Case(
        sgd(StreamingDiLoCoStrategy, H=6, outer_optim=NESTEROV, fragments=FRAGMENTS, delay=2, mixing=0.5), HALVES
    ),
    "Eager DiLoCo": Case(sgd(EagerDiLoCoStrategy, H=6, outer_optim=NESTEROV), [formulas.Eager(LR, 6, **OUTER)]),
    "Delayed DiLoCo": Case(
        sgd(EagerDiLoCoStrategy, H=6, outer_optim=NESTEROV, eager=False),
        [formulas.Eager(LR, 6, **OUTER, eager=False)],
    ),
    "Delayed Nesterov": Case(
        sgd(DelayedNesterovStrategy, H=6, c=0.1, outer_lr=0.5, momentum=0.6),
        [formulas.DelayedNesterov(LR, 6, **OUTER, c=0.1)],
    ),
    "Hierarchical": Case(sgd(HierarchicalStrategy, {2: 2, 4: 6}), [formulas.Hierarchical(LR, ((2, 2), (4, 6)))]),
    "NoLoCo": Case(sgd(NoLoCoStrategy, H=6, alpha=0.5, beta=0.7), [formulas.NoLoCo(LR, 6, 0.5, 0.7)], seeds=40),
    "SPARTA": Case(sgd(SPARTAStrategy, p_sparta=0.25), [formulas.Sparta(LR)]),
}
EXACT = [name for name, case in CASES.items() if case.formulas[0].choices == 1]
MOST = 5.0  # standard errors, of the largest of about 700 moments
TABLE = Table(
    title="Linear strategies on quadratics",
    setting=f"Four nodes, f_k(w) = a_k (w − b_k)² / 2 with a = {PROBLEM.a}, b = {PROBLEM.b}; gradients have normal "
    f"noise of deviation {PROBLEM.sigma}; SGD of rate {LR} for {STEPS} steps, H = 6, from w = {PROBLEM.start}."
    " *Exact*: the largest difference between the nodes' mean and covariance in vsim and those of the "
    "recursion, over all steps, where vsim's covariance is made of its responses to a unit of noise in each "
    "step of each node. *Drawn*: the largest difference of a first or second moment over coordinates with "
    "normal noise, in standard errors; for NoLoCo over seeds, as a pairing is of all coordinates.",
    source="Recursions of the papers' formulas",
    url="../tests/reproductions/formulas.py",
    rows={
        **{f"{name}, exact": Row(0.0, within=1e-12) for name in EXACT},
        **{f"{name}, drawn": Row((0.0, MOST), unit="standard errors") for name in CASES},
    },
    digits=".2g",
    expected_is="expected",
    figure="images/quadratics.png",
    note="In the figure, lines are the predicted mean over the nodes, and that mean ± two standard deviations. The "
    "band is vsim's coordinates, from the 2.3rd to the 97.7th percentile.",
)


class Quadratic(nn.Module):
    """Σ_j a (w_j − b)² / 2 + ξ_j w_j, in two parameters."""

    def __init__(self, size: int, start: float) -> None:
        super().__init__()
        half = torch.full((size // 2,), start, dtype=torch.float64)
        self.parts = nn.ParameterList([half.clone(), half.clone()])

    def forward(self, batch: list[Tensor]) -> Tensor:
        a, b, noise = (t[0] for t in batch)
        w = torch.cat([*self.parts])
        return (a / 2 * (w - b) ** 2 + noise * w).sum()


def train(strategy: Algorithm, problem: Quadratics, noise: Tensor, seed: int = 0) -> Array:
    """Return the weights (steps + 1, K, P) of a run in which node k has noise[k] (steps, P) in its gradients."""
    K, steps, P = noise.shape
    weights: list[Tensor] = [torch.full((K, P), problem.start, dtype=torch.float64)]

    def data(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        a, b = (torch.full((steps, 1), values[rank], dtype=torch.float64) for values in (problem.a, problem.b))
        return TensorDataset(a, b, noise[rank])

    trainer = vsim.Trainer(Quadratic(P, problem.start), data)
    options: Any = {"compute": 1} if isinstance(strategy, DelayedNesterovStrategy) else {}
    options |= {"batch_size": 1, "shuffle": False, "val_interval": None, "progress": False, "seed": seed}
    look = [lambda run: weights.append(run.cluster.weights.expand(K, P).clone())]
    trainer.fit(strategy=strategy, num_nodes=K, max_steps=steps, callbacks=look, **options)
    return torch.stack(weights).numpy()


def impulses(K: int, steps: int) -> Tensor:
    """Noise (K, steps, 1 + K · steps): none in coordinate 0, and one unit, in one step of one node, in each other."""
    units = torch.eye(K * steps, dtype=torch.float64).unflatten(0, (K, steps))
    return torch.cat([torch.zeros(K, steps, 1, dtype=torch.float64), units], 2)


def exact(weights: Array, predicted: list[tuple[Array, Array]], sigma: float) -> float:
    """Return the largest error of mean and covariance; weights (steps + 1, K, P) of `impulses`."""
    worst = 0.0
    for rows, (mean, covariance) in zip(weights, predicted, strict=True):
        response = rows[:, 1:] - rows[:, :1]
        found = sigma**2 * response @ response.T
        worst = max(worst, abs(rows[:, 0] - mean).max(), abs(found - covariance).max())
    return worst


def drawn(samples: Array, predicted: list[tuple[Array, Array]]) -> float:
    """Return the largest difference of a moment in standard errors; samples (runs, steps + 1, K, P).

    One run: its coordinates are independent. Several runs: they are, and their coordinates are averaged. As there may
    be few, Student's t becomes the normal number that is as improbable.
    """
    worst = 0.0
    for t, (mean, covariance) in enumerate(predicted[1:], 1):
        w = samples[:, t] - mean[:, None]  # (runs, K, P)
        products = w[:, :, None] * w[:, None]  # (runs, K, K, P)
        for found, expected in ((w, np.zeros_like(mean)), (products, covariance)):
            each = np.moveaxis(found[0], -1, 0) if len(found) == 1 else found.mean(-1)
            error = each.std(0, ddof=1) / len(each) ** 0.5
            difference = abs(each.mean(0) - expected)
            error[difference < 1e-12] = 1.0  # weights without noise, as they are before the first outer step
            worst = max(worst, (difference / error).max())
    return float(stats.norm.isf(stats.t.sf(worst, len(each) - 1)))


def measure(quick: bool) -> dict[str, float]:
    steps, coordinates = (12, 200) if quick else (STEPS, 2000)
    K, found, curves = len(PROBLEM.a), {}, {}
    unit = impulses(K, steps)
    generator = torch.Generator().manual_seed(0)
    for name, case in CASES.items():
        predicted = [[*moments(formula, PROBLEM, steps)] for formula in case.formulas]
        number = coordinates // (1 if case.seeds == 1 else 20)
        runs = []
        for seed in range(min(case.seeds, 10) if quick else case.seeds):
            normal = torch.randn(K, steps, number, generator=generator, dtype=torch.float64) * PROBLEM.sigma
            half = torch.cat([unit, normal], 2)
            runs.append(train(case.strategy, PROBLEM, torch.cat([half, half], 2), seed))
        samples = np.stack(runs)  # (runs, steps + 1, K, 2 halves)
        size, units = samples.shape[-1] // 2, unit.shape[-1]
        halves = [samples[..., i * size :][..., :size] for i in range(len(case.formulas))]
        if name in EXACT:
            pairs = zip(halves, predicted, strict=True)
            found[f"{name}, exact"] = max(exact(half[0, ..., :units], p, PROBLEM.sigma) for half, p in pairs)
        pairs = zip(halves, predicted, strict=True)
        found[f"{name}, drawn"] = max(drawn(half[..., units:], p) for half, p in pairs)
        curves[name] = (halves[0][..., units:], predicted[0])
    if not quick:
        draw(curves, PAGE.parent / TABLE.figure)
    return found


def draw(curves: dict[str, tuple[Array, list[tuple[Array, Array]]]], path: Path, width: float = 6.6) -> None:
    """Draw the predicted mean replica, ± two deviations, through the measured band, a panel for each strategy."""
    import matplotlib.pyplot as plt

    columns = 3 if width > 5 else 2
    rows = -(-len(curves) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(width, 1.35 * rows + 0.3), sharex=True, sharey=True, layout="constrained", squeeze=False
    )
    for ax, (name, (samples, predicted)) in zip(axes.flat, curves.items(), strict=False):
        replica = np.moveaxis(samples.mean(2), 1, 0).reshape(len(predicted), -1)  # (steps + 1, runs · coordinates)
        low, high = np.percentile(replica, [2.275, 97.725], axis=1)
        centre = np.array([mean.mean() for mean, _ in predicted])
        spread = 2 * np.sqrt([max(covariance.mean(), 0.0) for _, covariance in predicted])
        step = np.arange(len(centre))
        ax.fill_between(step, low, high, color="#56b4e9", alpha=0.45, linewidth=0, label="vsim")
        ax.plot(step, centre, color="black", linewidth=1.1, label="predicted mean")
        for edge in (centre - spread, centre + spread):
            ax.plot(step, edge, color="black", linewidth=0.7, linestyle=(0, (3, 2)))
        ax.lines[-1].set_label("± 2 deviations")
        ax.set_title(name, fontsize=8.5, pad=3)
        ax.tick_params(labelsize=8)
        ax.spines[["top", "right"]].set_visible(False)
    figure.supxlabel("step", fontsize=8.5)
    figure.supylabel("weight, mean over the nodes", fontsize=8.5)
    legend: Any = {"loc": "outside upper center", "ncols": 3, "columnspacing": 1.2, "handlelength": 1.6}
    figure.legend(*ax.get_legend_handles_labels(), **legend, fontsize=8, frameon=False)
    figure.savefig(path, dpi=200, metadata={"Software": None})
    plt.close(figure)
