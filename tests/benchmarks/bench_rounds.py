"""Rounds that federated strategies need on clients which differ, each at several learning rates.

    python tests/benchmarks/bench_rounds.py [--rounds 120] [--rates 0.1 0.2 0.4] [--seeds 0 1 2]

The digits in two shards for each of 100 clients, cohorts of ten, ten steps of SGD a round with batches of 7, an MLP
with 32 hidden units. Printed are the rounds until the global model's validation accuracy is 80 and 90 %, seed by seed,
and the validation loss at the end. The runs of a rate train together.
"""

from __future__ import annotations

import argparse

import numpy as np

import vsim
from vsim import Sample
from vsim.data import digits, partition
from vsim.models import MLP
from vsim.strategy import FedAvgStrategy, FedOptStrategy, FedProxStrategy, ScaffoldStrategy, Strategy

CLIENTS, COHORT, H = 100, 10, 10


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=120)
    parser.add_argument("--rates", type=float, nargs="+", default=[0.1, 0.2, 0.4])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    train, val = digits()

    def compared(kind: str, strategies: dict[str, Strategy]) -> None:
        result = vsim.compare(
            lambda seed: MLP(hidden=(32,), seed=seed),
            partition(train, CLIENTS, kind),
            val,
            strategies=strategies,
            seeds=given.seeds,
            num_nodes=COHORT,
            participation=Sample(COHORT, of=CLIENTS),
            max_steps=H * given.rounds,
            batch_size=7,
            val_size=len(val),  # type: ignore[arg-type]
            val_interval=H,
            progress=False,
        )
        for name, histories in result.histories.items():
            needed = [[_rounds_to(level, history) for history in histories] for level in (0.8, 0.9)]
            losses = [history.last("global_loss") for history in histories]
            shown = "   ".join(f"{' '.join(f'{n:4.0f}' for n in own)}  (mean {np.mean(own):5.1f})" for own in needed)
            print(f"{kind:7} {name:20} {shown}   loss {np.mean(losses):.3f} ± {np.std(losses):.3f}", flush=True)

    for lr in given.rates:
        sgd = {"H": H, "inner_optim": "sgd", "lr": lr}
        compared("iid", {f"FedAvg, lr {lr}": FedAvgStrategy(**sgd)})
        strategies = {
            "FedAvg": FedAvgStrategy(**sgd),
            "FedProx, μ 0.1": FedProxStrategy(mu=0.1, **sgd),
            "FedProx, μ 1": FedProxStrategy(mu=1.0, **sgd),
            "SCAFFOLD": ScaffoldStrategy(**sgd),
            "FedAdam": FedOptStrategy(**sgd),
        }
        compared("shards", {f"{name}, lr {lr}": strategy for name, strategy in strategies.items()})


def _rounds_to(accuracy: float, history: vsim.History) -> float:
    steps, measured = history.measured("step", "global_accuracy")
    reached = np.flatnonzero(measured >= accuracy)
    return float(steps[reached[0]] / H) if len(reached) else np.nan


if __name__ == "__main__":
    main()
