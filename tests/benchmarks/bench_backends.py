"""The simulator against real processes: the same strategy, model and data, in seconds a step and in start-up.

The processes run the same loop over torch.distributed (gloo) in eager PyTorch, the cores shared out among them. Both
alternate in one run.

    python tests/benchmarks/bench_backends.py [--rounds 3] (about five minutes a round)
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
import torch
from tabulate import tabulate
from torch import nn
from torch.utils.data import TensorDataset

from vsim import Trainer
from vsim.models import CNN, GPT, MLP
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy, Strategy

STRATEGIES: dict[str, Strategy] = {"AllReduce": SimpleReduceStrategy(), "DiLoCo H = 10": DiLoCoStrategy(H=10)}
NODES = (4, 16)


def tasks() -> dict[str, tuple[nn.Module, TensorDataset, int]]:
    """Name → model, data, steps."""
    stream = torch.Generator().manual_seed(0)
    count = 16 * 16 * 4
    vectors, labels = torch.randn(count, 64, generator=stream), torch.randint(0, 10, (count,), generator=stream)
    ids = torch.randint(0, 96, (count, 65), generator=stream)
    return {
        "MLP 64-128-128-10": (MLP(seed=0), TensorDataset(vectors, labels), 100),
        "CNN 8×8, 32-64 channels": (CNN(seed=0), TensorDataset(vectors.view(-1, 1, 8, 8), labels), 50),
        "GPT 2 × 128, 64 characters": (
            GPT(96, block_size=64, layers=2, width=128, seed=0),
            TensorDataset(ids[:, :-1], ids[:, 1:]),
            10,
        ),
    }


def run(
    model: nn.Module, data: TensorDataset, steps: int, num_nodes: int, strategy: Strategy, backend: str
) -> tuple[float, float]:
    """Return (seconds a step, seconds of start-up and everything else)."""
    trainer = Trainer(model, data)
    started = time.perf_counter()
    trainer.fit(strategy=strategy, num_nodes=num_nodes, max_steps=steps, backend=backend, progress=False)
    whole = time.perf_counter() - started
    seconds = np.diff(trainer.history["seconds"])
    return float(np.median(seconds)), whole - float(seconds.sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=1)
    rounds = parser.parse_args().rounds
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    rows = []
    for task, (model, data, steps) in tasks().items():
        for num_nodes in NODES:
            for name, strategy in STRATEGIES.items():
                pairs = [
                    [run(model, data, steps, num_nodes, strategy, backend) for backend in ("stacked", "process")]
                    for _ in range(rounds)
                ]
                row: list[object] = [task, num_nodes, name]
                for backend in (0, 1):
                    row += [statistics.median(p[backend][0] for p in pairs) * 1e3]
                row += [statistics.median(p[1][0] / p[0][0] for p in pairs)]
                row += [statistics.median(p[backend][1] for p in pairs) for backend in (0, 1)]
                rows.append(row)
    headers = ["model", "K", "strategy", "simulator ms/step", "processes ms/step", "ratio", "start-up s", "start-up s "]
    print(tabulate(rows, headers, floatfmt=".2f", tablefmt="github"))


if __name__ == "__main__":
    main()
