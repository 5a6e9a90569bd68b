"""Before a step: nodes leave and join, or the rows get the clients of a new round."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from vsim.arguments import naming
from vsim.cluster.optimizers import forget, torch_optimizers
from vsim.cluster.plan import Plan
from vsim.cluster.randomness import NODE, derive_seeds
from vsim.cluster.stacked import StackedCollectives
from vsim.data.batches import joint_batches
from vsim.training.clients import lasting
from vsim.training.regroup import put_together, snapshot
from vsim.training.run import Ensemble, Run, Stack
from vsim.training.setup import source


def attend(ensemble: Ensemble, step: int) -> None:
    """Make the nodes of the runs' plans take part from step `step` on.

    Staying nodes keep their state. A joining node copies the first of them, and draws from its own random stream. In a
    round of clients every row starts from the global weights.

    Raises:
        CheckpointError: a strategy has state whose placement is unknown.
    """
    if not any(_begins(run, step) for run in ensemble.runs):
        return
    for stack in list(ensemble.stacks):
        beginning = [run for run in stack.runs if _begins(run, step)]
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
            renewed = [run for run in stack.runs if run.clients is not None and _begins(run, step)]
            for run in renewed:
                _begin_round(run, step)
            if renewed:
                fetching: dict[Any, Run] = {}
                stack.batches = joint_batches([source(m, step - 1, fetching) for m in stack.runs], step - 1)
    for run in ensemble.training:
        if _begins(run, step):
            collectives = run.cluster.collectives
            collectives.step, collectives.moment = step, "start"
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


def _begins(run: Run, step: int) -> bool:
    """Whether a segment of the run's plan begins with `step`, or, in the midst of one, a fork."""
    there = run.trains and run.plan is not None and run.done == step - 1 < run.max_steps
    return there and (run.starts or _plan(run).segment(step).first == step)


def _changes(run: Run, step: int) -> bool:
    """Whether its rows are other ones than in the segment before."""
    now = _plan(run).segment(step).nodes
    if run.clients is None:
        return now != run.cluster.active
    return len(now) != run.cluster.num_nodes


def _changed(ensemble: Ensemble, stack: Stack, step: int) -> list[Stack]:
    """Form a group again from the nodes that take part in `step`; return the groups in its place."""
    runs = [run for run in stack.runs if run.trains and run.done < run.max_steps]
    copies = [snapshot(run).moved(step) if _begins(run, step) else snapshot(run) for run in runs]
    return put_together(ensemble, runs, copies)


def _join(run: Run, step: int) -> None:
    """Bill what nodes that join have copied, and give them random streams of their own."""
    plan = _plan(run)
    joining = plan.joining(step)
    if not joining:
        return
    stack = StackedCollectives(run.ledger, [plan.peer(step), *joining])  # only bills: they have it already
    stack.step, stack.moment = step, "start"
    stack.broadcast(torch.zeros(len(joining) + 1, 0), label="join", payload_bytes=_bytes_of_a_node(run))
    _seed(run, joining, step)


def _bytes_of_a_node(run: Run) -> int:
    """Return the bytes of all that one node holds: weights, buffers, and the state of optimizer and strategy."""
    replicas, strategy = run.cluster.replicas, run.strategy
    width = replicas.weights.stride(0)
    gap = (width - replicas.num_parameters) * replicas.weights.element_size()

    def size(t: Tensor) -> int:  # what is as wide as the matrix has its gaps, too, which no node sends
        return t.nbytes - gap * (t.numel() // width if t.shape[-1] == width else 0)

    # There may be one optimizer for all rows, or one for each.
    states = [own for one in torch_optimizers(strategy.optim) for state in one.state.values() for own in state.values()]
    of_rows = sum(size(t) for t in states if isinstance(t, Tensor) and t.dim()) // len(replicas.weights)
    rows = [replicas.weights, *replicas.buffers.values(), *lasting(strategy, "stacked")]
    return of_rows + sum(size(t) // len(t) for t in rows) + sum(t.nbytes for t in lasting(strategy, "shared"))


def _seed(run: Run, nodes: Iterable[int], step: int) -> None:
    """Let nodes draw from a stream that is new each time that they begin to take part."""
    times, begin, active = _plan(run).times(step), set(nodes), run.cluster.active
    rows = {row: active[i] for row, i in enumerate(run.cluster.replicas.nodes) if active[i] in begin}
    keys = [(NODE, node, *([int(times[node])] if times[node] else [])) for node in rows.values()]
    for row, own in zip(rows, derive_seeds(run.spec.seed, keys), strict=True):
        run.streams[row].manual_seed(own)


@torch.no_grad()
def _end_round(run: Run) -> None:
    """Keep what belongs to the clients that have been here, and give all rows the global weights and buffers."""
    assert run.clients is not None
    if not run.starts:
        run.objective.check_portable()
        run.clients.leave(run.cluster)
    replicas, strategy = run.cluster.replicas, run.strategy
    with strategy.evaluating():
        weights = strategy.global_weights().clone()
    replicas.weights.copy_(weights)
    for name, mean in run.cluster.mean_buffers().items():
        replicas.buffers[name].copy_(mean)


@torch.no_grad()
def _begin_round(run: Run, step: int) -> None:
    """Give the rows to the clients of the round that begins with `step`."""
    cluster, strategy, plan = run.cluster, run.strategy, _plan(run)
    collectives, replicas, segment = cluster.collectives, cluster.replicas, plan.segment(step)
    nodes = segment.nodes
    collectives.attend(nodes)
    collectives.step, collectives.moment = step, "start"
    pulled = replicas.weights[0].nbytes - sum(module.personal_bytes for module in strategy.communication_modules)
    # Only bills, clients that will be late included: the rows have the weights already.
    billing = StackedCollectives(run.ledger, sorted((*nodes, *segment.late))) if segment.late else collectives
    billing.step, billing.moment = step, "start"
    billing.pull(replicas.weights[0], label="pull", payload_bytes=pulled)
    forget(strategy.optim)
    assert run.clients is not None
    run.clients.arrive(cluster)
    _seed(run, nodes, step)
    run.batches = run.batches.attended(nodes, plan.missed(step))
    cluster.shard_sizes = run.batches.shard_sizes
