"""What a step costs under each strategy, beside a step of AllReduce.

The two models of a small and a large step: a GPT of 2 layers × 128 on 64 characters at K = 4, and an MLP 64-128-128-10
at K = 16; batch 16 a node. All strategies take turns in one run, a few steps each, so that the ratios hold where the
machine's speed drifts. The time is that of the training loop as history records it, median over the rounds.

    python tests/benchmarks/bench_strategies.py [--rounds 9]
"""

from __future__ import annotations

import argparse
import statistics
import warnings
from collections.abc import Callable

import numpy as np
import torch
from tabulate import tabulate
from torch import nn
from torch.utils.data import TensorDataset

from vsim import Trainer
from vsim.models import GPT, MLP
from vsim.strategy import (
    DeMoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    SimpleReduceStrategy,
    SPARTADiLoCoStrategy,
    SPARTAStrategy,
    Strategy,
)

STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "AllReduce": SimpleReduceStrategy,
    "no communication": Strategy,
    "FedAvg H = 10": lambda: FedAvgStrategy(H=10),
    "DiLoCo H = 10": lambda: DiLoCoStrategy(H=10),
    "SPARTA": SPARTAStrategy,
    "SPARTA + DiLoCo": lambda: SPARTADiLoCoStrategy(H=10),
    "DeMo": DeMoStrategy,
}


def text(num_nodes: int, steps: int) -> TensorDataset:
    ids = torch.randint(0, 96, (num_nodes * 16 * steps, 65), generator=torch.Generator().manual_seed(0))
    return TensorDataset(ids[:, :-1], ids[:, 1:])


def vectors(num_nodes: int, steps: int) -> TensorDataset:
    stream = torch.Generator().manual_seed(0)
    count = num_nodes * 16 * steps
    return TensorDataset(torch.randn(count, 64, generator=stream), torch.randint(0, 10, (count,), generator=stream))


def step_seconds(strategy: Strategy, model: nn.Module, data: TensorDataset, num_nodes: int, steps: int) -> float:
    """Seconds a step, without the first two, whose set-up others do not repeat."""
    trainer = Trainer(model, data)
    trainer.fit(strategy=strategy, num_nodes=num_nodes, max_steps=steps, progress=False)
    seconds = np.diff(trainer.history["seconds"])[2:]
    return float(seconds.mean())


def measure(name: str, model: nn.Module, data: TensorDataset, num_nodes: int, steps: int, rounds: int) -> None:
    times: dict[str, list[float]] = {strategy: [] for strategy in STRATEGIES}
    for _ in range(rounds):
        for strategy, make in STRATEGIES.items():
            times[strategy].append(step_seconds(make(), model, data, num_nodes, steps))
    rows = []
    for strategy, seconds in times.items():
        ratios = [own / base for own, base in zip(seconds, times["AllReduce"], strict=True)]
        rows.append([strategy, statistics.median(seconds) * 1e3, statistics.median(ratios), min(ratios), max(ratios)])
    print(f"\n{name}, K = {num_nodes}, batch 16 a node")
    print(tabulate(rows, ["strategy", "ms/step", "ratio to AllReduce", "min", "max"], floatfmt=".2f"))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore", UserWarning)  # DeMo's, of small tensors
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    gpt = GPT(96, block_size=64, layers=2, width=128, seed=0)
    measure("GPT 2 × 128, 64 characters", gpt, text(4, 12), 4, 12, arguments.rounds)
    measure("MLP 64-128-128-10", MLP(seed=0), vectors(16, 102), 16, 102, arguments.rounds)


if __name__ == "__main__":
    main()
