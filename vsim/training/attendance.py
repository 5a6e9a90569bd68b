"""Before a step: nodes leave and join, or the rows get the clients of a new round."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from vsim.arguments import naming
from vsim.cluster.optimizers import forget, torch_optimizers
from vsim.cluster.plan import Plan
from vsim.cluster.randomness import NODE, derive_seeds
from vsim.cluster.stacked import StackedCollectives
from vsim.data.joint import joint_batches
from vsim.training.assemble import source
from vsim.training.clients import lasting
from vsim.training.member import Group, Member, Run
from vsim.training.part import Part
from vsim.training.regroup import put_together, snapshot


def attend(run: Run, step: int) -> None:
    """Let those take part in step number `step`, and those after it, who do by the members' plans.

    Nodes that stay keep all that they have. One that joins copies the first of them, and draws from a stream of random
    numbers of its own. In a round of clients every row starts anew, from the global weights.

    Raises:
        CheckpointError: a strategy has a state of which it cannot be told whose it is.
    """
    if not any(_begins(member, step) for member in run.members):
        return
    for group in list(run.groups):
        beginning = [member for member in group.members if _begins(member, step)]
        for member in beginning:
            with naming(member.config.label if len(run.members) > 1 else ""):
                if member.clients is not None:
                    _end_round(member)
        if any(_changes(member, step) for member in beginning):
            groups = _changed(run, group, step)
            place = run.groups.index(group)
            run.groups[place : place + 1] = groups
        else:
            groups = [group]
        for group in groups:
            renewed = [member for member in group.members if member.clients is not None and _begins(member, step)]
            for member in renewed:
                _begin_round(member, step)
            if renewed:
                fetching: dict[Any, Part] = {}
                group.batches = joint_batches([source(m.part, step - 1, fetching) for m in group.members], step - 1)
    for member in run.training:
        if _begins(member, step):
            collectives = member.cluster.collectives
            collectives.step, collectives.moment = step, "start"
            if not member.starts and member.clients is None:
                _join(member, step)
            before, now = (_plan(member).segment(at) for at in (max(1, step - 1), step))
            others = not member.starts and (member.clients is not None or before.nodes != now.nodes)
            for module in member.strategy.communication_modules if others else ():
                module.attend(member.cluster)
            member.ledger.attend(now)


def _plan(member: Member) -> Plan:
    assert member.part.plan is not None
    return member.part.plan


def _begins(member: Member, step: int) -> bool:
    """Whether a segment of the member's plan begins with `step`, or, in the midst of one, a fork."""
    there = member.trains and member.part.plan is not None and member.done == step - 1 < member.max_steps
    return there and (member.starts or _plan(member).segment(step).first == step)


def _changes(member: Member, step: int) -> bool:
    """Whether its rows are other ones than in the segment before."""
    now = _plan(member).segment(step).nodes
    if member.clients is None:
        return now != member.cluster.active
    return len(now) != member.cluster.num_nodes


def _changed(run: Run, group: Group, step: int) -> list[Group]:
    """Put a group together anew with the nodes that take part in `step`; return the groups in its place."""
    members = [member for member in group.members if member.trains and member.done < member.max_steps]
    parts = [snapshot(member).moved(step) if _begins(member, step) else snapshot(member) for member in members]
    return put_together(run, members, parts)


def _join(member: Member, step: int) -> None:
    """Bill what nodes that join have copied, and give them random streams of their own."""
    plan = _plan(member)
    joining = plan.joining(step)
    if not joining:
        return
    group = StackedCollectives(member.ledger, [plan.peer(step), *joining])  # only bills: they have it already
    group.step, group.moment = step, "start"
    group.broadcast(torch.zeros(len(joining) + 1, 0), label="join", payload_bytes=_bytes_of_a_node(member))
    _seed(member, joining, step)


def _bytes_of_a_node(member: Member) -> int:
    """Return the bytes of all that one node holds: weights, buffers, and the state of optimizer and strategy."""
    replicas, strategy = member.cluster.replicas, member.strategy
    width = replicas.weights.stride(0)
    gap = (width - replicas.num_parameters) * replicas.weights.element_size()

    def size(t: Tensor) -> int:  # what is as wide as the matrix has its gaps, too, which nobody sends
        return t.nbytes - gap * (t.numel() // width if t.shape[-1] == width else 0)

    # There may be one optimizer for all rows, or one for each.
    states = [own for one in torch_optimizers(strategy.optim) for state in one.state.values() for own in state.values()]
    of_rows = sum(size(t) for t in states if isinstance(t, Tensor) and t.dim()) // len(replicas.weights)
    rows = [replicas.weights, *replicas.buffers.values(), *lasting(strategy, "stacked")]
    return of_rows + sum(size(t) // len(t) for t in rows) + sum(t.nbytes for t in lasting(strategy, "shared"))


def _seed(member: Member, nodes: Iterable[int], step: int) -> None:
    """Let nodes draw from a stream that is new each time that they begin to take part."""
    times, begin, active = _plan(member).times(step), set(nodes), member.cluster.active
    rows = {row: active[i] for row, i in enumerate(member.cluster.replicas.nodes) if active[i] in begin}
    keys = [(NODE, node, *([int(times[node])] if times[node] else [])) for node in rows.values()]
    for row, own in zip(rows, derive_seeds(member.config.seed, keys), strict=True):
        member.streams[row].manual_seed(own)


@torch.no_grad()
def _end_round(member: Member) -> None:
    """Keep what belongs to the clients that have been here, and give all rows the global weights and buffers."""
    assert member.clients is not None
    if not member.starts:
        member.clients.leave(member.cluster)
    replicas, strategy = member.cluster.replicas, member.strategy
    with strategy.evaluating():
        weights = strategy.global_weights().clone()
    replicas.weights.copy_(weights)
    for name, mean in member.cluster.mean_buffers().items():
        replicas.buffers[name].copy_(mean)


@torch.no_grad()
def _begin_round(member: Member, step: int) -> None:
    """Let the rows be those of the clients of the round that begins with `step`."""
    cluster, strategy, plan = member.cluster, member.strategy, _plan(member)
    collectives, replicas, nodes = cluster.collectives, cluster.replicas, plan.segment(step).nodes
    collectives.attend(nodes)
    collectives.step, collectives.moment = step, "start"
    pulled = replicas.weights[0].nbytes - sum(module.personal_bytes for module in strategy.communication_modules)
    collectives.pull(replicas.weights[0], label="pull", payload_bytes=pulled)  # only bills: the rows have them already
    forget(strategy.optim)
    assert member.clients is not None
    member.clients.arrive(cluster)
    _seed(member, nodes, step)
    member.part = replace(member.part, batches=member.part.batches.attended(nodes, plan.missed(step)))
    cluster.shard_sizes = member.part.batches.shard_sizes
