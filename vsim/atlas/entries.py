"""An entry: twelve trials of a strategy on a task; and for each score the best trial, with new seeds on test data."""

from __future__ import annotations

import hashlib
import json
import math
import platform
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from vsim.analysis.compared import ComparedRun
from vsim.analysis.spent import spent
from vsim.arguments import naming
from vsim.atlas.spaces import Row, point
from vsim.atlas.tasks import ASYNCHRONOUS_ON, NETWORKS, VERSION, Task
from vsim.search.compare import compare
from vsim.strategy import Algorithm, OptimSpec
from vsim.version import __version__

TRIALS, TUNED_WITH, SEEDS = 12, (101, 102), (1, 2, 3, 4, 5)
VALIDATIONS = 50  # in a run
SHARES = {"2 %": 1 / 50, "10 %": 1 / 10, "50 %": 1 / 2}  # of the bytes that AllReduce sends in all steps
NO_LIMIT = "any"
# A score is the last result within a number of bytes, or a time on a network, or both; (any, any): after all steps.
SCORES = [(share, network) for share in (*SHARES, NO_LIMIT) for network in (*NETWORKS, NO_LIMIT)]
Settings = dict[str, Any]


def settings(row: Row, task: Task) -> list[Settings]:
    """Return the trials' arguments: the same points of Halton's sequence for all strategies."""
    from scipy.stats import qmc

    low, high = task.lr_of_signs if row.own_step else task.lr
    space = {"lr": (low * row.lr, high * row.lr), **row.space}
    points = qmc.Halton(len(space), scramble=False).random(TRIALS + 1)[1:]  # the first is 0 in all dimensions
    return [{name: point(own, u) for (name, own), u in zip(space.items(), at, strict=True)} for at in points.tolist()]


def made(row: Row, task: Task, own: Settings) -> Algorithm:
    inner = {} if row.own_step else {"inner_optim": OptimSpec(task.optimizer)}
    return row.make(**inner, **own)


def entry(name: str, row: Row, task_name: str, task: Task, deterministic: bool = False) -> dict[str, Any]:
    """Train a strategy's trials and its final runs; return the entry, which JSON can hold."""
    train, val, test = task.data()
    given = settings(row, task)
    with naming(f"{name} on {task_name}"):
        strategies = {f"{i}": made(row, task, own) for i, own in enumerate(given)}
    is_asynchronous = row.kind == "asynchronous"
    shared: dict[str, Any] = {
        **{"num_nodes": task.num_nodes, "batch_size": task.batch_size, "max_steps": task.max_steps},
        **{"val_interval": task.max_steps // VALIDATIONS, "val_nodes": False, "progress": False},
        **{"deterministic": deterministic},
        **({"network": task.network(ASYNCHRONOUS_ON), "compute": task.compute} if is_asynchronous else {}),
    }

    def trained(own: Mapping[str, Algorithm], on: Any, seeds: tuple[int, ...]) -> dict[str, list[ComparedRun]]:
        runs = compare(task.model, train, on, strategies=own, seeds=seeds, **shared)
        if any(run.failure.startswith("interrupted") for key in own for run in runs.runs(key)):
            raise KeyboardInterrupt
        return {key: runs.runs(key) for key in own}

    tuned = trained(strategies, val, TUNED_WITH)
    of_seeds = [[scores(run, task, is_asynchronous) for run in tuned[f"{i}"]] for i in range(TRIALS)]
    trials = [{score: sum(own[score][0] for own in runs) / len(runs) for score in runs[0]} for runs in of_seeds]
    if not any(math.isfinite(own[NO_LIMIT, NO_LIMIT]) for own in trials):
        raise ValueError(f"all {TRIALS} trials diverged")
    best = _best(trials)
    chosen = sorted({*best.values()})
    final = trained({f"{i}": made(row, task, given[i]) for i in chosen}, test, SEEDS)
    finals = {i: [scores(run, task, is_asynchronous) for run in final[f"{i}"]] for i in chosen}
    found = {
        key(score): {
            "trial": i,
            **{
                what: [finals[i][seed][score][place] for seed in range(len(SEEDS))]
                for place, what in enumerate(("loss", "accuracy", "steps"))
            },
        }
        for score, i in best.items()
    }
    exact = json.dumps([[trial[NO_LIMIT, NO_LIMIT] for trial in trials], found])
    return {
        "atlas": VERSION,
        "task": task_name,
        "strategy": name,
        "settings": given,
        "tuning": {key(score): [_short(trial[score]) for trial in trials] for score in best if NO_LIMIT in score},
        "scores": _short(found),
        "seeds": {"tuning": TUNED_WITH, "final": SEEDS},
        "data": task.digest(),
        **({"code": row.code} if row.code else {}),
        "digest": hashlib.sha256(exact.encode()).hexdigest()[:16],
        "deterministic": deterministic,
        "made with": {
            "vsim": __version__,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        },
    }


def key(score: tuple[str, str]) -> str:
    return " | ".join(score)


def scores(run: ComparedRun, task: Task, is_asynchronous: bool) -> dict[tuple[str, str], tuple[float, float, float]]:
    """Return the loss, accuracy and steps of a run within each score's limits; infinite losses if it diverged.

    Between validations, the last value holds. A mean of nodes that differ is a result once one more all-reduce has
    formed it, and pays for it.
    """
    history, size = run.history, 4 * task.parameters
    if run.failed:
        return dict.fromkeys(SCORES, (math.inf, 0.0, 0.0))
    clock = task.compute
    known = ~np.isnan(history["global_loss"])
    steps, losses = history["step"][known], history["global_loss"][known]
    accuracies = history.column("global_accuracy")[known]
    n = task.num_nodes
    most = 2 * (n - 1) / n * size * task.max_steps  # wire bytes of AllReduce, by ring
    budget = task.max_steps * float(clock.node_seconds.max())
    within = {NO_LIMIT: np.full(len(steps), True)}
    sent = spent(history, "wire", size)[known]
    within |= {name: (sent <= share * most * (1 + 1e-9)) | (steps == 0) for name, share in SHARES.items()}
    for name in NETWORKS:
        if is_asynchronous and name != ASYNCHRONOUS_ON:
            continue
        taken = spent(history, "time", size, (task.network(name), clock))[known]
        within[name] = (taken <= budget * (1 + 1e-9)) | (steps == 0)
    found = {}
    for share, network in SCORES:
        if network in within:
            last = np.flatnonzero(within[share] & within[network])[-1]
            found[share, network] = (float(losses[last]), float(accuracies[last]), float(steps[last]))
    return found


def _best(trials: list[dict[tuple[str, str], float]]) -> dict[tuple[str, str], int]:
    """Return for each score the trial with the lowest validation loss; for scores with two limits, among the trials
    that are best for one."""
    found: dict[tuple[str, str], int] = {}
    for score in sorted(trials[0], key=lambda score: NO_LIMIT not in score):
        among = range(TRIALS) if NO_LIMIT in score else sorted({*found.values()})
        found[score] = min(among, key=lambda i: trials[i][score])
    return found


def _short(value: Any) -> Any:
    """Return plain data with numbers of six digits; numbers that are not finite become None."""
    if isinstance(value, Mapping):
        return {name: _short(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [_short(own) for own in value]
    if isinstance(value, float):
        return float(f"{value:.6g}") if math.isfinite(value) else None
    return value
