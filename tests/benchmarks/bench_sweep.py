"""Members together against one after the other: the same runs, the same version, in turn, everything included.

    python tests/benchmarks/bench_sweep.py [--rounds 3] [--compile] [--only mlp cnn strategies gpt]

Sweeps of DiLoCo over 9 settings × 3 seeds with K = 4 on digits (MLP 200 steps, CNN 60 steps), the default strategies of
`vsim compare` on digits with the MLP (200 steps), and four strategies on a small GPT (20 steps). Seconds are of whole
calls of `sweep` and `compare`, with set-up and validation; of a compiled run also of the steps alone, as compiling is
paid once per shape. Medians of ratios, round by round.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from typing import Any

import torch

import vsim
from vsim.cli import COMPARED, parse_strategy
from vsim.data import digits, docs_text
from vsim.models import CNN, GPT, MLP
from vsim.strategy import DiLoCoStrategy

SETTINGS: dict[str, Any] = {"H": [5, 10, 50], "outer_lr": [0.4, 0.7, 1.0], "lr": 1e-3}


def sweep_of(model: Any, steps: int) -> Callable[..., vsim.Comparison]:
    train, val = digits()
    options: dict[str, Any] = {"num_nodes": 4, "max_steps": steps, "progress": False}

    def run(of: int | None = None, **more: Any) -> vsim.Comparison:
        settings, seeds = (SETTINGS, [1, 2, 3]) if of is None else ({"H": [10], "lr": 1e-3}, [1])
        return vsim.sweep(model, train, val, strategy=DiLoCoStrategy, settings=settings, seeds=seeds, **options, **more)

    return run


def comparison_of(model: Any, data: Any, names: list[str], steps: int, batch_size: int) -> Callable[..., Any]:
    train, val = data
    strategies = {name: parse_strategy(name, 1e-3) for name in names}
    options: dict[str, Any] = {"num_nodes": 4, "max_steps": steps, "batch_size": batch_size, "progress": False}

    def run(**more: Any) -> vsim.Comparison:
        return vsim.compare(model, train, val, strategies=strategies, **options, **more)

    return run


def workloads() -> dict[str, Callable[..., vsim.Comparison]]:
    text = docs_text(block_size=64)
    return {
        "mlp": sweep_of(MLP(seed=0), 200),
        "cnn": sweep_of(CNN(seed=0), 60),
        "strategies": comparison_of(MLP(seed=0), digits(), COMPARED, 200, 16),
        "gpt": comparison_of(
            GPT(text[0].vocabulary.size, block_size=64, layers=2, width=64, heads=4, seed=0),
            text,
            ["fedavg", "diloco", "sparta", "sparta_diloco"],
            20,
            8,
        ),
    }


def timed(run: Callable[..., Any], **options: Any) -> tuple[float, float]:
    """Return the seconds of the whole call, and the seconds of its training steps after the first."""
    started = time.perf_counter()
    comparison = run(**options)
    whole = time.perf_counter() - started
    histories = [own.history for name in comparison for own in comparison.runs(name)]
    return whole, sum(float(h["seconds"][-1] - h["seconds"][1]) for h in histories)


def compiled(name: str, run: Callable[..., Any], rounds: int) -> None:
    """Compare the steps alone, of one member 27 times and of all: compiling is paid once per shape."""
    options: dict[str, Any] = {"executor": "vmap", "compile": True}
    timed(run, **options), timed(run, of=1, **options)
    pairs = [(timed(run, of=1, **options)[1], timed(run, **options)[1]) for _ in range(rounds)]
    apart, together = (statistics.median(side) for side in zip(*pairs, strict=True))
    ratio = statistics.median(27 * one / all_of_them for one, all_of_them in pairs)
    print(f"{name:12}{'full':8}{27 * apart:9.2f}{together:12.2f}{'–':>7}{ratio:10.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--compile", action="store_true", help="of sweeps")
    parser.add_argument("--only", nargs="+")
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(f"{'workload':12}{'mode':8}{'apart s':>9}{'together s':>12}{'times':>7}{'per step':>10}")
    for name, run in workloads().items():
        if arguments.only and name not in arguments.only:
            continue
        if arguments.compile and name in ("mlp", "cnn"):
            compiled(name, run, arguments.rounds)
        options: dict[str, Any] = {"executor": "vmap", "compile": False}
        timed(run, **options)  # what is loaded once
        orders = [(False, True), (True, False)] * arguments.rounds
        apart, together = [], []
        for order in orders[: arguments.rounds]:
            both = {side: timed(run, together=side, **options) for side in order}
            apart.append(both[False])
            together.append(both[True])
        whole, steps = (statistics.median(a[i] / t[i] for a, t in zip(apart, together, strict=True)) for i in (0, 1))
        seconds = [statistics.median(s for s, _ in side) for side in (apart, together)]
        mode = "eager"
        print(f"{name:12}{mode:8}{seconds[0]:9.2f}{seconds[1]:12.2f}{whole:7.2f}{steps:10.2f}", flush=True)


if __name__ == "__main__":
    main()
