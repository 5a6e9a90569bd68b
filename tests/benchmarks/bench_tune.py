"""A search in batches against optuna one by one: the same trials, the same version, in turn, everything included.

    python tests/benchmarks/bench_tune.py [--rounds 3] [--trials 60] [--together 12] [--steps 200]

Trials of DiLoCo with K = 4 on digits with the MLP, drawn by optuna's RandomSampler with one seed, so that both searches
have the same trials. One by one: `study.optimize`, whose objective trains by `Trainer.fit`. Seconds are of whole
searches, with set-up and validation; the median of ratios, round by round.

Losses must be equal to rounding, after ten steps. In longer runs rounding may decide whether a ReLU is on: in the 42nd
trial, at step 27, one unit of one node is off for an example in one of the two searches, and the runs then part.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from typing import Any

import numpy as np
import optuna
import torch

import vsim
from vsim.data import digits
from vsim.models import MLP
from vsim.strategy import DiLoCoStrategy


def space(trial: optuna.Trial) -> DiLoCoStrategy:
    return DiLoCoStrategy(
        H=trial.suggest_categorical("H", [5, 10, 20, 50]),
        outer_lr=trial.suggest_float("outer_lr", 0.1, 1.0),
        lr=trial.suggest_float("lr", 1e-4, 1e-2, log=True),
    )


def one_by_one(trials: int, **options: Any) -> list[float]:
    train, val = digits()

    def objective(trial: optuna.Trial) -> float:
        trainer = vsim.Trainer(MLP(seed=0), train, val)
        trainer.fit(strategy=space(trial), **options)
        return float(trainer.history.last("global_loss"))

    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    study.optimize(objective, n_trials=trials)
    return [trial.value or 0.0 for trial in study.trials]


def in_batches(trials: int, together: int, **options: Any) -> list[float]:
    train, val = digits()
    sampler = optuna.samplers.RandomSampler(seed=0)
    search = vsim.tune(
        MLP(seed=0), train, val, space=space, trials=trials, together=together, sampler=sampler, **options
    )
    return [trial.value or 0.0 for trial in search.study.trials]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--trials", type=int, default=60)
    parser.add_argument("--together", type=int, default=12)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    warnings.simplefilter("ignore")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    options: dict[str, Any] = {"num_nodes": 4, "max_steps": arguments.steps, "progress": False}
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads, optuna {optuna.__version__}")
    short = {**options, "max_steps": min(10, arguments.steps)}
    batches = in_batches(arguments.trials, arguments.together, **short)
    np.testing.assert_allclose(one_by_one(arguments.trials, **short), batches, rtol=1e-4)
    print(f"{'one by one s':>14}{'in batches s':>14}{'times':>8}")
    ratios = []
    for number in range(arguments.rounds):
        seconds = {}
        for side in ("alone", "batches") if number % 2 else ("batches", "alone"):
            started = time.perf_counter()
            if side == "alone":
                one_by_one(arguments.trials, **options)
            else:
                in_batches(arguments.trials, arguments.together, **options)
            seconds[side] = time.perf_counter() - started
        ratios.append(seconds["alone"] / seconds["batches"])
        print(f"{seconds['alone']:14.2f}{seconds['batches']:14.2f}{ratios[-1]:8.2f}", flush=True)
    print(f"median {statistics.median(ratios):.2f}")


if __name__ == "__main__":
    main()
