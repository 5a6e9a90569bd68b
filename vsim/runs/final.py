"""Measure global models at the end: on the data of every client, and on the test data."""

from __future__ import annotations

import math
import sys
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any

import torch

from vsim.core.group import Group
from vsim.engine import VmapExecutor
from vsim.engine.machine import using_threads
from vsim.engine.objective import explained
from vsim.runs.clients import OwnModels
from vsim.runs.finetune import fine_tuned
from vsim.runs.models_measured import (
    Models,
    examples_at_once,
    examples_of,
    measured_together,
    of_cluster,
)
from vsim.runs.tracked import TrackedRun


def measured_on(
    of: str, group: Group[TrackedRun], runs: Sequence[TrackedRun], briefly: bool = False
) -> dict[TrackedRun, dict[str, list[float]]]:
    """Return for each run the "losses" (N,) of its global model on N datasets, and the "accuracies" if known.

    On a client's data, the client's model replaces the global model if the strategy has personal layers, or if
    `client_val_steps` is given. Runs with the same data are measured together. With several processes, only the first
    node's process measures.

    Args:
        of: "client" for the data of every client, or "test" for the test data.
        briefly: whether to measure only the first client, or one batch of the test data.
    """
    at_once = VmapExecutor.nodes_at_once(group.whole, group.executor.settings)
    own_python, alike = group.executor.objective.differs, dict[Any, list[TrackedRun]]()
    for run in runs:
        data = run.spec.client_val_dataset if of == "client" else run.spec.test_dataset
        key = id(data), run.spec.seed, run if own_python else None
        alike.setdefault(key, []).append(run)
    found: dict[TrackedRun, dict[str, list[float]]] = {}
    for same in alike.values():
        for own in (same[i : i + at_once] for i in range(0, len(same), at_once)):
            found.update(zip(own, _measured_on(of, group, own, briefly), strict=True))
    return found


@torch.no_grad()
def _measured_on(
    of: str, group: Group[TrackedRun], runs: Sequence[TrackedRun], briefly: bool
) -> list[dict[str, list[float]]]:
    (run, *_), executor = runs, group.executor
    batch_size = examples_at_once(run)
    if of == "client":
        datasets, most = run.measuring.client_data[: 1 if briefly else None], run.spec.val_size
    else:
        datasets, most = run.measuring.test_data, batch_size if briefly else sys.maxsize
    own_python = executor.objective.differs
    candidates = [of_cluster(own, own_python) for own in runs]
    models = [Models(m.weights[:1], {n: b[:1] for n, b in m.buffers.items()}, m.seed, m.python[:1]) for m in candidates]
    objective = executor.for_evaluation(models[0].python[0])
    own_models = {
        row: OwnModels(own.strategy, own.cluster, own.presence.clients)
        for row, own in enumerate(runs)
        if of == "client" and (own.strategy.is_personal or own.spec.client_val_steps)
    }
    found = torch.full((2, len(runs), len(datasets)), math.nan, dtype=torch.float64)  # losses, accuracies where known
    for number, dataset in enumerate(datasets if 0 in run.nodes else ()):
        data = f"data of client {number}" if of == "client" else "test data"
        when = f"in the validation on the {data} after step {run.done}"
        batch, pieces = examples_of(run, dataset, most, when)
        try:
            for row, own_model in own_models.items():
                _, buffers, *_ = candidates[row]
                own = own_model(number, candidates[row].weights[0], {name: b[0] for name, b in buffers.items()})
                weights, tuned = fine_tuned(runs[row], number, *own) if runs[row].spec.client_val_steps else own
                own_buffers = {name: b[None] for name, b in tuned.items()}
                models[row] = models[row]._replace(weights=weights[None], buffers=own_buffers)
            with using_threads(1) if group.is_small else nullcontext():
                measured, _ = measured_together(executor, models, pieces, objective)
        except Exception as error:
            raise explained(error, executor.objective, batch, 0, when)  # noqa: B904
        found[0, :, number] = measured.losses
        if measured.accuracies is not None:
            found[1, :, number] = measured.accuracies
    if not run.is_alone:
        collectives, held = run.cluster.collectives, run.cluster.replicas.num_held
        with collectives.unbilled():
            found = collectives.broadcast(found.expand(held, -1, -1, -1), label=f"losses of {of}")
    named = {"losses": found[0]} if found[1].isnan().all() else {"losses": found[0], "accuracies": found[1]}
    return [{name: values[row].tolist() for name, values in named.items()} for row in range(len(runs))]
