"""Between steps, let nodes leave and join, assign rows to the clients of a new round, and compact remaining runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vsim.arguments import naming
from vsim.cluster.optimizers import forget, torch_optimizers
from vsim.cluster.plan import Plan
from vsim.cluster.randomness import NODE, DataStates, derive_seed, preserved
from vsim.cluster.stacked import StackedCollectives
from vsim.cluster.state import CheckpointError
from vsim.data.batches import joint_batches
from vsim.training.clients import lasting
from vsim.training.resume import begin, captured
from vsim.training.run import Ensemble, Run, Stack
from vsim.training.setup import assemble, source

# Move the remaining runs once this share of the rows has left; until then the abandoned rows are still computed.
_SHARE = 0.2


def attend(ensemble: Ensemble, step: int) -> None:
    """Switch every run to the nodes that its plan names from step `step` on.

    Staying nodes keep their state. A joining node copies the first staying node, and draws from its own random stream.
    In a round of clients, every row starts from the global weights.

    Raises:
        CheckpointError: a strategy has state whose placement is unknown.
    """
    if not any(run.begins_segment(step) for run in ensemble.runs):
        return
    for stack in list(ensemble.stacks):
        beginning = [run for run in stack.runs if run.begins_segment(step)]
        for run in beginning:
            with naming(run.spec.label if len(ensemble.runs) > 1 else ""):
                if run.clients is not None:
                    _end_round(run)
        if any(_changes(run, step) for run in beginning):
            stacks = _changed(ensemble, stack, step)
            place = ensemble.stacks.index(stack)
            ensemble.stacks[place : place + 1] = stacks
        else:
            stacks = [stack]
        for stack in stacks:
            beginning = [run for run in stack.runs if run.begins_segment(step)]
            for run in beginning:
                run.ledger.position.begin(step, "start")
            renewed = [run for run in beginning if run.clients is not None]
            for run in renewed:
                _begin_round(run, step)
            if renewed:
                fetching: dict[Any, DataStates | None] = {}
                stack.batches = joint_batches([source(m, step - 1, fetching) for m in stack.runs], step - 1)
    for run in ensemble.training:
        if run.begins_segment(step):
            if not run.starts and run.clients is None:
                _join(run, step)
            before, now = (_plan(run).segment(at) for at in (max(1, step - 1), step))
            others = not run.starts and (run.clients is not None or before.nodes != now.nodes)
            for module in run.strategy.communication_modules if others else ():
                module.attend(run.cluster)
            run.ledger.attend(now)


def _plan(run: Run) -> Plan:
    assert run.plan is not None
    return run.plan


def _changes(run: Run, step: int) -> bool:
    """Return whether the run's rows differ from the segment before."""
    now = _plan(run).segment(step).nodes
    if run.clients is None:
        return now != run.cluster.active
    return len(now) != run.cluster.num_nodes


def _changed(ensemble: Ensemble, stack: Stack, step: int) -> list[Stack]:
    """Rebuild a stack from the nodes that take part in `step`; return the stacks that replace it."""
    runs = [run for run in stack.runs if run.is_running]
    copies = [snapshot(run).moved(step) if run.begins_segment(step) else snapshot(run) for run in runs]
    return put_together(ensemble, runs, copies)


def _join(run: Run, step: int) -> None:
    """Bill the state that joining nodes copy, and give each of these nodes its own random stream."""
    plan = _plan(run)
    joining = plan.joining(step)
    if not joining:
        return
    stack = StackedCollectives(run.ledger, [plan.peer(step), *joining])  # only bills: they hold the copy already
    stack.broadcast(torch.zeros(len(joining) + 1, 0), label="join", payload_bytes=_bytes_of_a_node(run))
    _seed(run, joining, step)


def _bytes_of_a_node(run: Run) -> int:
    """Return the bytes of all that one node holds: weights, buffers, and the state of optimizer and strategy."""
    replicas, strategy = run.cluster.replicas, run.strategy
    width = replicas.weights.stride(0)
    gap = (width - replicas.num_parameters) * replicas.weights.element_size()

    def size(t: Tensor) -> int:  # a tensor as wide as the matrix includes its gap, which no node sends
        return t.nbytes - gap * (t.numel() // width if t.shape[-1] == width else 0)

    # All rows may share one optimizer, or each row may have its own.
    states = [own for one in torch_optimizers(strategy.optim) for state in one.state.values() for own in state.values()]
    of_rows = sum(size(t) for t in states if isinstance(t, Tensor) and t.dim()) // len(replicas.weights)
    rows = [replicas.weights, *replicas.buffers.values(), *lasting(strategy, "stacked")]
    return of_rows + sum(size(t) // len(t) for t in rows) + sum(t.nbytes for t in lasting(strategy, "shared"))


def _seed(run: Run, nodes: Iterable[int], step: int) -> None:
    """Reseed the streams of nodes that begin to take part; a node gets a new seed each time that it returns."""
    times, begin, active = _plan(run).times(step), set(nodes), run.cluster.active
    rows = {row: active[i] for row, i in enumerate(run.cluster.replicas.nodes) if active[i] in begin}
    for row, node in rows.items():
        again = [int(times[node])] if times[node] else []
        run.streams[row].manual_seed(derive_seed(run.spec.seed, NODE, node, *again))


@torch.no_grad()
def _end_round(run: Run) -> None:
    """Store the state of the round's clients, and reset all rows to the global weights and buffers.

    Clients push their running statistics to the server. They also push their weights, unless the server has the global
    model already.
    """
    assert run.clients is not None
    replicas, strategy = run.cluster.replicas, run.strategy
    if not run.starts:
        run.objective.check_portable()
        run.clients.leave(run.cluster)
        pushed = _statistics_bytes(run) + (0 if strategy.has_global_model() else _shared_bytes(run))
        if pushed:
            billing = StackedCollectives(run.ledger, run.cluster.active)  # only bills: means are computed below
            billing.push(torch.zeros(len(run.cluster.active), 0), label="round", payload_bytes=pushed)
    with strategy.evaluating():
        weights = strategy.global_weights().clone()
    replicas.weights.copy_(weights)
    for name, mean in run.cluster.mean_buffers().items():
        replicas.buffers[name].copy_(mean)


def _shared_bytes(run: Run) -> int:
    """Return the bytes of the weights that all clients share."""
    modules = run.strategy.communication_modules
    return run.cluster.replicas.weights[0].nbytes - sum(module.personal_bytes for module in modules)


def _statistics_bytes(run: Run) -> int:
    """Return the bytes of a client's running statistics; the server keeps their mean."""
    personal = {name for module in run.strategy.communication_modules for name in module.personal_buffers}
    own = {name: b for name, b in run.cluster.replicas.buffers.items() if name not in personal}
    return sum(b[0].nbytes for b in own.values() if b.is_floating_point() or b.is_complex())


@torch.no_grad()
def _begin_round(run: Run, step: int) -> None:
    """Assign the rows to the clients of the round that begins at `step`."""
    cluster, strategy, plan = run.cluster, run.strategy, _plan(run)
    collectives, replicas, segment = cluster.collectives, cluster.replicas, plan.segment(step)
    nodes = segment.nodes
    collectives.attend(nodes)
    pulled = _shared_bytes(run) + _statistics_bytes(run)
    # Only bills, late clients included: the rows already hold the weights.
    billing = StackedCollectives(run.ledger, sorted((*nodes, *segment.late))) if segment.late else collectives
    billing.pull(replicas.weights[0], label="pull", payload_bytes=pulled)
    forget(strategy.optim)
    assert run.clients is not None
    run.clients.arrive(cluster)
    _seed(run, nodes, step)
    run.batches = run.batches.attended(nodes, plan.missed(step))
    cluster.shard_sizes = run.batches.shard_sizes


# Moves ----------------------------------------------------------------------------------------------------------------


def regroup(ensemble: Ensemble) -> None:
    """Move the unfinished runs of an ensemble to smaller matrices, if that saves enough rows.

    Moved runs resume from a snapshot in memory, bitwise unchanged. No run moves if one of them cannot: if the state of
    its strategy cannot be saved, or cannot be restored in a new strategy, or if worker processes fetch its data.
    """
    remaining = ensemble.unfinished
    if len(remaining) == sum(len(stack.runs) for stack in ensemble.stacks):
        return
    rows = sum(run.cluster.replicas.num_held for stack in ensemble.stacks for run in stack.runs)
    kept = sum(run.cluster.replicas.num_held for run in remaining)
    if not remaining or not ensemble.regroups or rows - kept < _SHARE * rows:
        return
    if (remaining[0].spec.dataloader_kwargs or {}).get("num_workers"):
        return
    try:
        ensemble.stacks = put_together(ensemble, remaining, [snapshot(run) for run in remaining])
    except CheckpointError:
        ensemble.regroups = False


def put_together(ensemble: Ensemble, runs: Sequence[Run], copies: Sequence[Run]) -> list[Stack]:
    """Replace `runs` by `copies` in new matrices; return the new stacks."""
    device = runs[0].cluster.weights.device
    with preserved(device):
        fresh = assemble(copies, ensemble.executor, device, ensemble.interrupt)
    successors = dict(zip(runs, fresh.runs, strict=True))
    for old, new in successors.items():
        for name in ("examples", "tokens", "seconds", "validation_seconds", "row", "known_events"):
            setattr(new, name, getattr(old, name))
        begin(new)
    ensemble.runs = [successors.get(run, run) for run in ensemble.runs]
    return fresh.stacks


def snapshot(run: Run) -> Run:
    """Return a copy of a run that continues from the run's present state once the copy is placed.

    Raises:
        CheckpointError: the run has state that cannot be saved.
    """
    return replace(
        run,
        spec=replace(run.spec, start=captured(run, apart=True), max_memory_usage=None),
        collectives=run.collectives.anew(run.cluster.active),
        starts=True,
        continues=range(len(run.nodes)),
    )
