"""Let losses decide which clients take part in a round: power of choice."""

from __future__ import annotations

import sys
from contextlib import nullcontext

import torch

from vsim.cluster.plan import Nodes
from vsim.engine.machine import using_threads
from vsim.engine.objective import explained
from vsim.runs.models_measured import Models, examples_of, measured_together
from vsim.runs.tracked import TrackedRun


@torch.no_grad()
def choose(run: TrackedRun, step: int) -> Nodes:
    """Decide which clients take part in the round that begins at `step`, if losses decide it.

    The rows hold the global model. Its losses are of all of a candidate's training data, in evaluation mode. With
    several processes, the first node's process measures.

    Returns:
        The candidates; () if the seed alone decides.
    """
    candidates = run.plan.candidates(step)
    if not candidates:
        return ()
    losses = [_loss(run, client) for client in candidates] if run.is_first else []
    run.plan.choose(run.collectives.broadcast_object(losses))
    return candidates


def _loss(run: TrackedRun, client: int) -> float:
    """Return the loss of the global model on a client's training data."""
    group, executor, replicas = run.group, run.group.executor, run.cluster.replicas
    buffers = {name: b[:1] for name, b in replicas.buffers.items()}
    model = Models(replicas.weights[:1], buffers, run.spec.seed, [run.rows.start if executor.objective.differs else 0])
    when = f"in the loss of candidate {client} after step {run.done}"
    batch, pieces = examples_of(run, run.presence.batches.datasets[client], sys.maxsize, when)
    try:
        with using_threads(1) if group.is_small else nullcontext():
            measured, _ = measured_together(executor, [model], pieces, executor.for_evaluation(model.python[0]))
    except Exception as error:
        raise explained(error, executor.objective, batch, 0, when)  # noqa: B904
    return float(measured.losses[0])
