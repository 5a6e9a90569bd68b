"""Rounds of clients: rows are dealt to other clients, and all start from the global model.

end_round     clients leave: their state is stored (unbilled), what they push is billed, rows become the global model
choose        losses decide which clients take part, if so asked: see `vsim.runs.choosing`
move_to       only if the next round has more or fewer rows: see `vsim.runs.moving`
begin_round   clients arrive: what they pull is billed, their state is loaded, their streams are seeded
feed          their batches: see `vsim.runs.feeding`
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from vsim.cluster.optimizers import forget
from vsim.cluster.stacked import StackedCollectives
from vsim.runs.moving import seed_streams
from vsim.runs.tracked import TrackedRun


@torch.no_grad()
def end_round(run: TrackedRun) -> None:
    """Store the state of the round's clients, and reset all rows to the global weights and buffers.

    Clients push their running statistics to the server. They also push their weights, unless the server has the global
    model already. The pushes are events of the round's last step; as its row is recorded, their bytes are in the next.
    """
    assert run.presence.clients is not None
    replicas, strategy = run.cluster.replicas, run.strategy
    if not run.starts:
        run.objective.check_portable(movable=False)  # clients take turns in a row
        run.presence.clients.leave(run.cluster)
        pushed = _statistics_bytes(run) + (0 if strategy.has_global_model() else _shared_bytes(run))
        if pushed:
            billing = StackedCollectives(run.ledger, run.cluster.active)  # only bills: the means are computed below
            billing.push(torch.zeros(len(run.cluster.active), 0), label="round", payload_bytes=pushed)
    with strategy.evaluation():
        weights = strategy.model_weights().clone()
    replicas.weights.copy_(weights)
    for name, mean in run.cluster.mean_buffers().items():
        replicas.buffers[name].copy_(mean)


def _shared_bytes(run: TrackedRun) -> int:
    """Return the bytes of the weights that all clients share."""
    modules = run.strategy.parts
    return run.cluster.replicas.weights[0].nbytes - sum(module.personal_bytes for module in modules)


def _statistics_bytes(run: TrackedRun) -> int:
    """Return the bytes of a client's running statistics, whose mean over clients the server keeps."""
    personal = {name for module in run.strategy.parts for name in module.personal_buffers}
    own = {name: b for name, b in run.cluster.replicas.buffers.items() if name not in personal}
    return sum(b[0].nbytes for b in own.values() if b.is_floating_point() or b.is_complex())


@torch.no_grad()
def begin_round(run: TrackedRun, step: int, candidates: Sequence[int] = ()) -> None:
    """Assign the rows to the clients of the round that begins at `step`, whose pulls are events of this step.

    Args:
        candidates: the clients that reported their losses, for which those that do not take part pulled, too.
    """
    cluster, strategy, plan = run.cluster, run.strategy, run.plan
    collectives, replicas, segment = cluster.collectives, cluster.replicas, plan.segment(step)
    nodes = segment.nodes
    collectives.attend(nodes, plan.machines(step))
    pulled = _shared_bytes(run) + _statistics_bytes(run)
    # This only bills the pull, also of late clients: the rows already hold the weights.
    billing = StackedCollectives(run.ledger, sorted((*nodes, *segment.late))) if segment.late else collectives
    billing.pull(replicas.weights[0], label="pull", payload_bytes=pulled)
    if candidates:
        if others := sorted({*candidates} - {*nodes, *segment.late}):
            stack = StackedCollectives(run.ledger, others)
            stack.pull(replicas.weights[0], label="pull of candidates", payload_bytes=pulled)
        reports = torch.zeros(len(candidates), 1)
        StackedCollectives(run.ledger, sorted(candidates)).push(reports, label="losses of candidates")
    forget(strategy.optim)
    assert run.presence.clients is not None
    run.presence.clients.arrive(cluster)
    seed_streams(run, nodes, step)
    cluster.shard_sizes = run.presence.batches.shard_sizes[list(nodes)]
