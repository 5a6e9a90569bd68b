"""One process against several that hold ranges of the nodes: milliseconds a step, alternating in one run.

The simulator has all threads of the machine; G processes have its cores divided by G, at least one each. Then the model
of docs/scaling.md is compared: T(G) = (K / G) · row + messages(G), where `row` is a node's share of a step of one
process with one thread, and messages are measured with a model that computes next to nothing.

    python tests/benchmarks/bench_processes.py [--rounds 5] [--only GPT] (about eight minutes)
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from bench_backends import tasks
from tabulate import tabulate
from torch import nn
from torch.utils.data import TensorDataset

from vsim import Trainer
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy, Strategy

STRATEGIES: dict[str, Strategy] = {"AllReduce": SimpleReduceStrategy(), "DiLoCo H = 10": DiLoCoStrategy(H=10)}
LINES = [("MLP", 64, 60), ("CNN", 16, 30), ("GPT", 16, 10)]  # model, K, steps
TABLE = ("MLP", "GPT")  # with K = 64
PROCESSES = (1, 2, 4)


def seconds_a_step(
    model: nn.Module, data: TensorDataset, steps: int, num_nodes: int, strategy: Strategy, number: int
) -> float:
    trainer = Trainer(model, data)
    options = {} if number == 1 else {"backend": "process", "num_processes": number}
    trainer.fit(strategy=strategy, num_nodes=num_nodes, max_steps=steps, batch_size=16, progress=False, **options)
    return float(np.median(np.diff(trainer.history["seconds"])))


def in_turn(candidates: dict[int, Callable[[], float]], rounds: int) -> dict[int, list[float]]:
    """Return number of processes → its times, one a round."""
    found: dict[int, list[float]] = {number: [] for number in candidates}
    for _ in range(rounds):
        for number, candidate in candidates.items():
            found[number].append(candidate())
    return found


def with_one_thread(candidate: Callable[[], float]) -> float:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return candidate()
    finally:
        torch.set_num_threads(before)


def messages(num_parameters: int, number: int, steps: int = 60) -> float:
    """Return the seconds of a step's messages: an all-reduce of this many numbers, and the losses."""
    model = nn.Linear(num_parameters, 1, bias=False)
    data = TensorDataset(torch.zeros(number * 4, 1))
    trainer = Trainer(_Sparse(model), data)
    strategy = SimpleReduceStrategy(inner_optim="sgd")
    options = {"backend": "process", "num_processes": number} if number > 1 else {}
    trainer.fit(strategy=strategy, num_nodes=number, max_steps=steps, batch_size=1, progress=False, **options)
    return float(np.median(np.diff(trainer.history["seconds"])))


class _Sparse(nn.Module):
    """Computes next to nothing with all of its weights."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, batch: list[torch.Tensor]) -> torch.Tensor:
        return next(self.layer.parameters()).sum() * batch[0].mean()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", help="a model")
    given = parser.parse_args()
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, {time.strftime('%Y-%m-%d')}")
    known = {name.split()[0]: task for name, task in tasks().items()}
    wanted = [line for line in LINES if given.only in (None, line[0])]
    rows: list[list[object]] = []
    for model_name, num_nodes, steps in wanted:
        model, data, _ = known[model_name]
        for name, strategy in STRATEGIES.items():
            run = partial(seconds_a_step, model, data, steps, num_nodes, strategy)
            found = in_turn({number: partial(run, number) for number in (1, 2)}, given.rounds)
            ratio = statistics.median(two / one for one, two in zip(found[1], found[2], strict=True))
            rows.append([model_name, num_nodes, name, *(1e3 * statistics.median(own) for own in found.values()), ratio])
    headers = ["model", "K", "strategy", "1 process ms", "2 processes ms", "ratio"]
    print(tabulate(rows, headers, floatfmt=".2f", tablefmt="github"), end="\n\n")
    rows = []
    for model_name in (name for name in TABLE if given.only in (None, name)):
        model, data, _ = known[model_name]
        num_parameters = sum(p.numel() for p in model.parameters())
        for name, strategy in STRATEGIES.items():
            run = partial(seconds_a_step, model, data, 30 if model_name == "MLP" else 5, 64, strategy)
            row = with_one_thread(partial(run, 1)) / 64
            every = 10 if isinstance(strategy, DiLoCoStrategy) else 1
            for number in PROCESSES:
                measured = statistics.median(run(number) for _ in range(given.rounds))
                own = messages(num_parameters, number) / every + messages(1, number) * (1 - 1 / every)
                cores = min(number, torch.get_num_threads())
                predicted = 64 / cores * row + (own if number > 1 else 0)
                rows.append([model_name, name, number, 1e3 * measured, 1e3 * predicted, 1e3 * row, 1e3 * own])
    headers = ["model", "strategy", "G", "ms/step", "by the model", "ms a row", "messages ms"]
    print(tabulate(rows, headers, floatfmt=".2f", tablefmt="github"))


if __name__ == "__main__":
    main()
