"""Figure 2 of RelaySGD: the integers that its notebook printed, each the steps of one run of gossip or relayed sums."""

from __future__ import annotations

import csv
import importlib
import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from vsim.cluster import Cluster
from vsim.strategy import (
    Algorithm,
    D2Strategy,
    GossipStrategy,
    GradientTrackingStrategy,
    PushSumStrategy,
    RelaySumStrategy,
    SimpleReduceStrategy,
)

from .result import HERE, PAGE, Row, Table

# Steps strategies with given gradients, several times as fast as training does. Its package is that of the tests.
driven = importlib.import_module(f"{__name__.rpartition('reproductions')[0]}strategies_by_hand")
D, MOST_STEPS, EPSILON = 10, 20_000, 1e-6
SLACK = 1.3  # a run that goes on for longer than this, times the published steps, has another integer


class Setting(NamedTuple):
    """A row of the notebook's output, and how it was run.

    Attributes:
        lr: the rate that was used. The notebook prints half of it where its search for the fastest rate found it, as
            this search halves a rate before it keeps the rate.
        plateau: whether the run ended when three errors in a row were within 1e-8 of their mean, not below 1e-6.
    """

    algorithm: str
    topology: str
    nodes: int
    heterogeneity: float
    r0: float
    seed: int
    lr: float
    steps: int
    plateau: bool


def settings() -> list[Setting]:
    """Return all rows, of epfml/relaysgd (MIT), commit e1e332b, figure_2_topology_and_scalability.ipynb."""
    with (HERE / "relaysgd_figure2.csv").open(encoding="utf-8") as file:
        return [_setting(row) for row in csv.DictReader(file)]


def _setting(row: dict[str, str]) -> Setting:
    heterogeneity = float(row["heterogeneity"])
    plateau = row["cell"] == "9" and heterogeneity > 0
    lr = float(row["best_lr"]) * (1 if plateau else 2)
    numbers = int(row["num_workers"]), heterogeneity, float(row["r0"]), int(row["seed"])
    return Setting(row["algorithm"], row["topology"], *numbers, lr, int(row["best_time"]), plateau)


class Problem(NamedTuple):
    """f(x) = Σ_i |A_i x − b_i|² / n.

    Attributes:
        A: (n, d, d). b: (n, d). best: f at its minimum.
    """

    A: Tensor
    b: Tensor
    best: float


@cache
def problem(nodes: int, heterogeneity: float, r0: float, seed: int) -> Problem:
    """Draw a problem: singular values from .5 to 1, optima that differ, and their common optimum at distance r0."""
    draw = torch.Generator().manual_seed(seed)

    def normal(*shape: int) -> Tensor:
        return torch.randn(shape, generator=draw, dtype=torch.float64)

    U, _, V = torch.linalg.svd(normal(nodes, D, D))
    A = U @ (torch.linspace(0.5, 1, D, dtype=torch.float64)[:, None] * V)
    offsets, optimum = (A @ normal(nodes, D, 1)).squeeze(2), normal(D, 1)
    stacked = A.reshape(-1, D)

    def centred(b: Tensor) -> Tensor:  # with the common optimum at 0
        return b - A @ torch.linalg.solve(stacked.T @ stacked, stacked.T @ b.reshape(-1))

    b = centred(offsets)
    of_one = float((A.mT @ b[:, :, None]).square().sum((1, 2)).mean())  # at scale 1
    b = b * scale(of_one, heterogeneity)
    b = b + (A @ (optimum * (r0 / optimum.norm()))).squeeze(2)
    x = torch.linalg.solve(stacked.T @ stacked, stacked.T @ b.reshape(-1))
    return Problem(A, b, float((A @ x - b).square().sum()) / nodes)


def scale(of_one: float, heterogeneity: float) -> float:
    """Return the scale of the offsets by the notebook's bisection, which ends within 1e-5 of the heterogeneity."""
    low, high, now, found, used = 0.0, math.inf, 1.0, 0.0, 0.0
    while abs(found - heterogeneity) > 1e-5:
        used, found = now, now**2 * of_one
        if found < heterogeneity:
            low = max(low, now)
        else:
            high = min(high, now)
        now = 2 * now if high == math.inf else (low + high) / 2
    return used


class SGPStrategy(PushSumStrategy):
    """The notebook's SGP mixes twice a step, on a one-peer exponential graph."""

    def mixed(self, rows: Tensor, cluster: Cluster, label: str) -> Tensor:
        return super().mixed(super().mixed(rows, cluster, label), cluster, label)


def strategy(algorithm: str, topology: str, nodes: int) -> Algorithm:
    """Return the strategy of a row; gradients are scaled by the row's rate."""
    # The notebook's tree: node 0 hangs on node 1, and node k on node k // 2.
    graph: Any = [(k // 2, k) for k in range(1, nodes)] if topology == "tree" else topology
    make: dict[str, Callable[[], Algorithm]] = {
        "All-reduce": lambda: SimpleReduceStrategy(inner_optim="sgd", lr=1.0),
        "D2": lambda: D2Strategy(inner_optim="sgd", lr=1.0, topology=graph),
        "Gossip": lambda: GossipStrategy(inner_optim="sgd", lr=1.0, topology=graph),
        "Gradient tracking": lambda: GradientTrackingStrategy(inner_optim="sgd", lr=1.0, topology=graph),
        "RelaySum/Grad": lambda: RelaySumStrategy(inner_optim="sgd", lr=1.0, topology=graph, form="gradient"),
        "RelaySum/Model": lambda: RelaySumStrategy(inner_optim="sgd", lr=1.0, topology=graph),
        "SGP": lambda: SGPStrategy(inner_optim="sgd", lr=1.0, topology="one_peer_exponential"),
    }
    return make[algorithm]()


@cache
def tested() -> frozenset[int]:
    """The steps after which the notebook tested the error."""
    ends = math.log2(1), math.log2(MOST_STEPS)
    return frozenset(torch.logspace(*ends, 1000, base=2, dtype=torch.float64).round().int().tolist())


class Given(nn.Module):
    """Weights that begin at 0."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.x = nn.Parameter(torch.zeros(size, dtype=torch.float64))


def batches(rows: Sequence[Setting]) -> Iterator[list[Setting]]:
    """Yield settings that train as one matrix, alike but for their problems and rates."""
    found = defaultdict(list)
    for row in rows:
        found[row.algorithm, row.topology, row.nodes].append(row)
    yield from found.values()


def steps_of(rows: Sequence[Setting]) -> list[int]:
    """Return the steps of settings of one batch: a row of the matrix is a node, d columns are a setting."""
    first, n, size = rows[0], rows[0].nodes, len(rows)
    problems = [problem(n, row.heterogeneity, row.r0, row.seed) for row in rows]
    A = torch.stack([own.A for own in problems], 1)  # (n, S, d, d)
    b = torch.stack([own.b for own in problems], 1)[..., None]  # (n, S, d, 1)
    best = torch.tensor([own.best for own in problems], dtype=torch.float64)
    rate = torch.tensor([row.lr for row in rows], dtype=torch.float64)[:, None, None]
    H, c = rate * A.mT @ A, rate * A.mT @ b  # the gradient times the rate is H x − c
    last = min(MOST_STEPS, math.ceil(SLACK * max(row.steps for row in rows)) + 5)
    run = driven.started(strategy(first.algorithm, first.topology, n), Given(size * D), n, max_steps=last)
    found, errors = [0] * size, [[0.0] * 0 for _ in rows]
    for step in range(1, last + 1):
        x = run.cluster.weights.view(n, size, D, 1)
        with run.cluster.collectives.unbilled():
            run.step((H @ x - c).view(n, -1))
        if step not in tested():
            continue
        mean = run.cluster.weights.view(n, size, D, 1).mean(0)
        values = (A @ mean - b).square().sum((0, 2, 3)) / n - best
        for i, error in enumerate(values.tolist()):
            errors[i] = [*errors[i][-2:], error]
            if not found[i] and _ends(errors[i], rows[i].plateau):
                found[i] = step
        if all(found):
            break
    return found


def _ends(errors: Sequence[float], plateau: bool) -> bool:
    if not plateau:
        return errors[-1] < EPSILON
    mean = sum(errors) / 3
    return len(errors) == 3 and all(abs(error - mean) < EPSILON / 100 for error in errors)


def count(rows: Sequence[Setting]) -> dict[Setting, int]:
    """Return setting → the steps of its run; 0 if it has not ended long after the published steps."""
    found: dict[Setting, int] = {}
    for batch in batches(rows):
        found.update(zip(batch, steps_of(batch), strict=True))
    return found


def name_of(row: Setting) -> str:
    return f"{row.algorithm}, {row.topology}, ζ² {'= 0' if row.heterogeneity == 0 else '> 0'}"


# Of an algorithm each, in the order of their names: the palette of Okabe and Ito, AllReduce in black.
COLOURS = ("#000000", "#E69F00", "#56B4E9", "#009E73", "#0072B2", "#D55E00", "#CC79A7")


def quick_settings() -> list[Setting]:
    """Return settings whose runs are short, of every algorithm and graph."""
    return [row for row in settings() if row.nodes in (6, 12) and row.steps <= 50]


def measure(quick: bool) -> dict[str, float]:
    rows = quick_settings() if quick else settings()
    found = count(rows)
    equal = dict.fromkeys(map(name_of, rows), 0.0)
    for row in rows:
        equal[name_of(row)] += found[row] == row.steps
    if not quick:
        for row in (own for own in rows if found[own] != own.steps):
            at = f"n = {row.nodes}, ζ² = {row.heterogeneity:g}, seed {row.seed}"
            print(f"{name_of(row)}: {at}: published {row.steps}, measured {found[row]}")
        draw(found, PAGE.parent / TABLE.figure)
    return equal | {"all integers": sum(equal.values())}


def draw(found: dict[Setting, int], path: Path) -> None:
    """Draw the mean steps over seeds against the number of nodes: published as lines, measured as points."""
    import matplotlib.pyplot as plt

    lines = defaultdict(lambda: defaultdict(list))  # type: ignore[var-annotated]
    for row, steps in found.items():
        lines[row.r0, row.heterogeneity][row.algorithm, row.topology].append((row.nodes, row.steps, steps))
    figure, axes = plt.subplots(1, len(lines), figsize=(9.6, 3.0), sharey=True, layout="constrained")
    looks = dict(zip(sorted({row.algorithm for row in found}), COLOURS, strict=True))
    for ax, (r0, zeta), own in zip(axes, sorted(lines), [lines[key] for key in sorted(lines)], strict=True):
        for (algorithm, topology), points in sorted(own.items()):
            table = np.array(sorted(points), dtype=float)
            nodes = np.unique(table[:, 0])
            published, measured = ([table[table[:, 0] == n][:, column].mean() for n in nodes] for column in (1, 2))
            dash = "--" if topology == "tree" else "-"
            label = f"{algorithm}, {topology}"
            ax.plot(nodes, published, dash, color=looks[algorithm], linewidth=1.1, label=label)
            ax.plot(nodes, measured, "o", color=looks[algorithm], markersize=3, label="_")
        ax.set_title(f"ζ² = {zeta:g}, r₀ = {r0:g}", fontsize=8.5)
        ax.set_yscale("log")
    figure.supxlabel("nodes", fontsize=8.5)
    figure.supylabel("steps to 1e-6", fontsize=8.5)
    handles = {label: line for ax in axes for line, label in zip(*ax.get_legend_handles_labels(), strict=True)}
    figure.legend([*handles.values()], [*handles], loc="outside right center", fontsize=7, frameon=False)
    figure.savefig(path, dpi=200, metadata={"Software": None})
    plt.close(figure)


TABLE = Table(
    title="Steps of gossip and RelaySGD on quadratics",
    setting="Each integer is the number of steps of one run: n nodes, f_k(x) = |A_k x − b_k|² in ten dimensions, "
    "optima that differ by ζ², a graph, a learning rate that the authors had tuned, float64. A row of this table is "
    "the number of runs whose steps are equal to the printed ones. SGP is `PushSumStrategy` with two mixings a "
    "step. Settings that differ in problem and rate train as columns of one matrix.",
    source="Vogels et al. 2021, RelaySum, figure 2: the outputs that its notebook printed (MIT), commit e1e332b",
    url="https://github.com/epfml/relaysgd/blob/e1e332b/paper-figures/figure_2_topology_and_scalability.ipynb",
    rows={
        **{name: Row(number) for name, number in Counter(map(name_of, settings())).items()},
        "all integers": Row(len(settings())),
    },
    digits=".0f",
    quick_agrees=False,
    figure="images/relaysgd_figure.png",
    note="In the figure, lines are the means of the published steps over seeds, and points are vsim's. The notebook's "
    "search for the fastest rate halves a rate before it prints it, so that vsim takes twice the printed rate there; "
    "its search for a plateau prints the rate itself.",
)
