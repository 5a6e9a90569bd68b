"""A search over compositions against brute force: how much of the front do 60 trials find, of that of 200 settings?

    python tests/benchmarks/bench_designs.py [--trials 60] [--samplers 5] [--steps 150] [--seeds 5]

The task is strokes of the atlas (MLP on MNIST-1D, 20 clients by Dirichlet(0.1), SGD), with half of its steps and one
inner learning rate. A design is: H × outer optimizer and its rate × how moves are averaged or compressed × fragments.
Brute force trains a grid of 200; a search asks for trials in ranges that contain the grid. All train with one seed, and
validation data decide. Then the designs of every front train again with new seeds on test data, which choose nothing.

The area of a front is between it and a corner, in loss × log10(bytes): the bytes of H = 2, and the loss of guessing.
It prints the tables of docs/designs.md and draws its figure; about five minutes of one core.
"""

from __future__ import annotations

import argparse
import math
import statistics
import sys
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import optuna
import torch

import vsim
from vsim.atlas.tasks import TASKS
from vsim.figures.looks import COLOURS
from vsim.strategy import FP4, Algorithm, OptimSpec, StreamingDiLoCoStrategy, TopK, compress, mean

TASK, LR = TASKS["strokes"], 0.3
BUDGETS = ("30 kB", "100 kB", "300 kB")
SYNC, GUESSING = 2 * 19 / 20 * 4 * TASK.parameters / 1e6, math.log(10)  # MB of an all-reduce of all weights; the loss
IMAGE = Path(__file__).parents[2] / "docs" / "images" / "designs.png"
KINDS = {"grid": ("grid of 200", COLOURS[0], "o"), "search": ("search, 60", COLOURS[5], "s")}
KINDS |= {"random": ("at random, 60", COLOURS[4], "^")}
AVERAGES = ["mean", "by examples", "median", "top-k", "4 bits"]


def design(H: int, outer: str, outer_lr: float, average: str, fragments: int, share: float = 0.03) -> Algorithm:
    """Return local SGD with this composition. With 1 fragment it is DiLoCo; with outer "SGD" of rate 1, FedAvg."""
    outers = {
        "SGD": OptimSpec("sgd", lr=outer_lr),
        "Nesterov": OptimSpec("sgd", lr=outer_lr, momentum=0.9, nesterov=True),
        "Adam": OptimSpec("adam", lr=outer_lr),
    }
    averages: dict[str, Any] = {
        "by examples": mean("examples"),
        "top-k": compress(TopK(share, index_bytes="packed")),
        "4 bits": compress(FP4()),
    }
    return StreamingDiLoCoStrategy(
        H=H, outer_optim=outers[outer], average=averages.get(average, average), fragments=fragments,
        inner_optim="sgd", lr=LR,
    )  # fmt: skip


def of_grid(H: int, outer: tuple[str, float], average: str, fragments: int) -> Algorithm:
    return design(H, *outer, average, fragments)


GRID = {
    "H": [2, 5, 10, 25, 50],
    "outer": [("SGD", 1.0), ("Nesterov", 0.4), ("Nesterov", 0.7), ("Adam", 0.01)],
    "average": AVERAGES,
    "fragments": [1, 2],
}
RATES = {"SGD": (0.5, 1.5), "Nesterov": (0.2, 1.0), "Adam": (1e-3, 1e-1)}


def space(trial: optuna.Trial) -> Algorithm:
    outer = trial.suggest_categorical("outer", [*RATES])
    average = trial.suggest_categorical("average", AVERAGES)
    return design(
        H=trial.suggest_int("H", 2, 50, log=True),
        outer=outer,
        outer_lr=trial.suggest_float(f"rate of {outer}", *RATES[outer], log=True),
        average=average,
        fragments=trial.suggest_categorical("fragments", [1, 2]),
        **({"share": trial.suggest_float("share", 0.01, 0.3, log=True)} if average == "top-k" else {}),
    )


def area(points: Sequence[tuple[float, float]], steps: int) -> float:
    """Return the area between points (MB, loss) and the corner, in loss × log10 of bytes."""
    most = SYNC * steps / 2
    found, lowest = 0.0, GUESSING
    ends = [*sorted(point for point in points if point[0] < most), (most, 0.0)]
    for (cost, loss), (following, _) in pairwise(ends):
        lowest = min(lowest, loss)
        found += (GUESSING - lowest) * math.log10(following / cost)
    return found


@dataclass(frozen=True)
class Searched:
    """A set of designs that was trained.

    Attributes:
        points: all (MB, loss). front: those on the front, and tested: with their mean test loss over new seeds.
        within: the loss within each of BUDGETS. chosen: the strategies of the front, by name. said: their settings.
    """

    points: list[tuple[float, float]]
    front: list[tuple[float, float]]
    within: list[float]
    chosen: dict[str, Algorithm]
    said: dict[str, str]
    tested: list[tuple[float, float]]


def searched(comparison: vsim.Comparison, strategies: Mapping[str, Algorithm], said: Mapping[str, str]) -> Searched:
    front = comparison.pareto("wire")
    sent = front.frame[front.frame["wire MB"] > 0].set_index("strategy")
    names = [name for name in front.names if name in sent.index]

    def points(of: Any) -> list[tuple[float, float]]:
        return list(zip(of["wire MB"], of["loss"], strict=True))

    return Searched(
        points(sent),
        points(sent.loc[names]),
        [comparison.best(within={"wire": budget}).loss for budget in BUDGETS],
        {name: strategies[name] for name in names},
        {name: said[name] for name in names},
        [],
    )


def brute(options: Mapping[str, Any]) -> Searched:
    train, val, _ = TASK.data()
    grid = vsim.grid(of_grid, **GRID)
    return searched(
        vsim.compare(TASK.model, train, val, strategies=grid, seed=0, **options), grid, {n: n for n in grid}
    )


def found_by(sampler: Any, trials: int, options: Mapping[str, Any]) -> Searched:
    train, val, _ = TASK.data()
    search = vsim.tune(
        TASK.model, train, val, space=space, trials=trials, sampler=sampler, objectives=["loss", "wire"], seed=0,
        **options,
    )  # fmt: skip
    own = {name: {key: value for key, value in search.settings[name].items() if value is not None} for name in search}
    strategies = {name: space(optuna.trial.FixedTrial(settings)) for name, settings in own.items()}
    return searched(search, strategies, {name: str(settings) for name, settings in own.items()})


def tested(sets: Mapping[str, Searched], seeds: Sequence[int], options: Mapping[str, Any]) -> dict[str, Searched]:
    """Train the designs of all fronts with new seeds on test data."""
    train, _, test = TASK.data()
    result = {}
    for name, one in sets.items():
        runs = vsim.compare(TASK.model, train, test, strategies=one.chosen, seeds=seeds, **options)
        frame = runs.pareto("wire").frame.set_index("strategy")
        own = [(float(frame.loc[n, "wire MB"]), float(frame.loc[n, "loss"])) for n in one.chosen]
        result[name] = replace(one, tested=own)
    return result


def table(sets: Mapping[str, Searched], steps: int) -> str:
    """Return areas as shares of the grid's, and losses within budgets: of each kind, the median (and the range)."""
    whole, on_test = area(sets["grid"].front, steps), area(sets["grid"].tested, steps)
    heads = ["", "trained", "area", "area on test data", *(f"loss within {budget}" for budget in BUDGETS)]
    lines = [heads, ["---"] * len(heads)]
    for kind in KINDS:
        own = of_kind(sets, kind)
        shares = [[100 * area(one.front, steps) / whole for one in own]]
        shares += [[100 * area(one.tested, steps) / on_test for one in own]]
        cells = [f"{spread(values, '.0f')} %" for values in shares]
        cells += [spread([one.within[i] for one in own], ".2f") for i in range(len(BUDGETS))]
        lines.append([f"{kind} × {len(own)}", f"{len(own[0].points)}", *cells])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def of_kind(sets: Mapping[str, Searched], kind: str) -> list[Searched]:
    return [one for name, one in sets.items() if name.startswith(kind)]


def spread(values: Sequence[float], form: str) -> str:
    """Return the median as text, with the range if there are several values."""
    text = f"{statistics.median(values):{form}}"
    return text if len(values) == 1 else f"{text} ({min(values):{form}}–{max(values):{form}})"


def draw(sets: Mapping[str, Searched], steps: int, path: Path) -> None:
    """Draw the designs of the grid and of the middle search of each kind, with their fronts."""
    from vsim.figures.paper import axes_of, plain_ticks
    from vsim.figures.style import styled

    sys.path.insert(0, str(Path(__file__).parents[1]))
    from pictures import write

    ax = axes_of(None, 3.3, 2.9)
    for kind, (label, colour, marker) in KINDS.items():
        own = sorted(of_kind(sets, kind), key=lambda one: area(one.front, steps))
        one = own[len(own) // 2]
        ax.plot(*zip(*one.points, strict=True), marker, color=colour, markersize=3, alpha=0.4, markeredgewidth=0)
        line = [*one.front, (SYNC * steps / 2, one.front[-1][1])]
        ax.plot(*zip(*line, strict=True), drawstyle="steps-post", color=colour, linewidth=1.5, label=label)
    ax.set(xscale="log", xlabel="sent on the wire per node (MB)", ylabel="validation loss")
    ax.set_ylim(min(loss for one in sets.values() for _, loss in one.front) - 0.05, GUESSING + 0.1)
    styled(ax)
    plain_ticks(ax.xaxis)
    ax.legend(frameon=False, fontsize=8)
    write(ax, path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--samplers", type=int, default=5, help="seeds of each sampler")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--seeds", type=int, default=5, help="new seeds on test data")
    given = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    torch.set_num_threads(1)
    options: dict[str, Any] = {"num_nodes": TASK.num_nodes, "batch_size": TASK.batch_size, "max_steps": given.steps}
    options |= {"val_interval": given.steps // 10, "val_nodes": False, "progress": False}
    sets = {"grid": brute(options)}
    for seed in range(given.samplers):
        sampler = optuna.samplers.TPESampler(seed=seed, constant_liar=True)
        sets[f"search {seed}"] = found_by(sampler, given.trials, options)
    for seed in range(given.samplers):
        sets[f"random {seed}"] = found_by(optuna.samplers.RandomSampler(seed=seed), given.trials, options)
    sets = tested(sets, range(1, given.seeds + 1), options)
    print(table(sets, given.steps))
    whole = area(sets["grid"].front, given.steps)
    for name, one in sets.items():
        print(f"\n{name}: {area(one.front, given.steps) / whole:.1%}")
        for (cost, loss), (_, on_test), said in zip(one.front, one.tested, one.said.values(), strict=True):
            print(f"  {cost:.4f} MB  {loss:.3f}  {on_test:.3f}  {said}")
    draw(sets, given.steps, IMAGE)
    print(f"\n{time.process_time():.0f} s of CPU")


if __name__ == "__main__":
    main()
