"""Between steps, let nodes leave and join, assign rows to the clients of a new round, and drop runs that have ended.

A group's rows are permuted so that the present nodes of running runs have the first rows of the matrix. Every other
object with rows is then a view of these first rows, or is cut to them.
"""

from __future__ import annotations

import copy
from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from vsim.arguments import naming
from vsim.checkpoint.files import packed, unpacked
from vsim.checkpoint.tree import Filler
from vsim.cluster.optimizers import forget, torch_optimizers
from vsim.cluster.plan import Plan
from vsim.cluster.randomness import NODE, DataStates, derive_seed
from vsim.cluster.stacked import StackedCollectives
from vsim.cluster.state import CheckpointError, owners
from vsim.core.group import Group
from vsim.data.batches import Source, joint_batches, one_in_memory
from vsim.private_torch import storage_key
from vsim.training.clients import lasting
from vsim.training.lasting import python_of, set_python
from vsim.training.resume import check_declared, fill_rows, rows_of, undeclared
from vsim.training.tracked import TrackedRun

# A compiled executor is compiled again for another number of rows. Therefore rows of ended runs are still computed
# until they reach this share of all rows.
_SHARE = 0.2


def attend(groups: Sequence[Group[TrackedRun]], runs: Sequence[TrackedRun], step: int) -> None:
    """Switch every run to its plan's nodes from step `step` on, and drop the rows of runs that have ended.

    Staying nodes keep their state. A joining node copies the first staying node, and draws from its own random stream.
    In a round of clients, every row starts from the global weights.

    Raises:
        CheckpointError: the model or a strategy has state that cannot move with the rows.
    """
    for group in groups:
        beginning = [run for run in group.runs if run.begins_segment(step)]
        if not beginning and all(run.is_running for run in group.taking):
            continue
        moving = {}
        for run in beginning:
            with naming(run.spec.label if len(runs) > 1 else ""):
                if run.presence.clients is not None:
                    _end_round(run)
                if _changes(run, step):
                    moving[run] = _rows_from(run, step)
        if is_new := bool(moving) or _are_to_go(group):
            arrange(group, step, moving)
        for run in beginning:
            run.ledger.position.begin(step, "start")
            if run.presence.clients is not None:
                _begin_round(run, step)
        if is_new or any(run.presence.clients is not None and not run.starts for run in beginning):
            feed(group)
    for run in runs:
        if run.begins_segment(step):
            if not run.starts and run.presence.clients is None:
                _join(run, step)
            before, now = (_plan(run).segment(at) for at in (max(1, step - 1), step))
            if run.starts:  # the setup gave all nodes the same state, so that no node has to send it
                with run.collectives.unbilled():
                    run.strategy.change_nodes(len(now.nodes) < run.spec.num_nodes)
            else:
                run.strategy.change_nodes(run.presence.clients is not None or before.nodes != now.nodes)
            run.ledger.attend(now)


def _are_to_go(group: Group[TrackedRun]) -> bool:
    """Return whether to stop computing the rows of runs that have ended."""
    left = [len(run.nodes) for run in group.taking if not run.is_running]
    if len(left) in (0, len(group.taking)):
        return False
    run, computed = group.runs[0], sum(len(run.nodes) for run in group.taking)
    bound = (run.spec.dataloader_kwargs or {}).get("num_workers") or run.objective.unsaved()
    bound = bound or any(map(_kept_view, group.runs))
    return not bound and (not run.spec.compile or sum(left) >= _SHARE * computed)


def _plan(run: TrackedRun) -> Plan:
    assert run.presence.plan is not None
    return run.presence.plan


def _changes(run: TrackedRun, step: int) -> bool:
    """Return whether the segment from `step` on needs other rows than the segment before."""
    now = _plan(run).segment(step).nodes
    if run.presence.clients is None:
        return now != run.cluster.active
    return len(now) != run.cluster.num_nodes


# Rows -----------------------------------------------------------------------------------------------------------------


def rows_at_first(run: TrackedRun, step: int) -> list[int]:
    """Return the rows of this process's nodes that take part in `step`, right after the setup with all nodes."""
    own = run.collectives.machines[run.collectives.rank]
    return [machine - own.start for machine in _plan(run).machines(step) if machine in own] or [0]


def _rows_from(run: TrackedRun, step: int) -> tuple[list[int], dict[str, Any]]:
    """Return the rows that this process's nodes in `step` continue from, and the state that row −1 stands for.

    A joining node continues from its peer's row. Row −1 stands for a peer's row that another process holds and sends.
    """
    plan, collectives = _plan(run), run.collectives
    own = collectives.machines[collectives.rank]
    if run.presence.clients is not None:  # all rows hold the global weights
        return [0] * max(1, sum(machine in own for machine in plan.machines(step))), {}
    run.objective.check_portable()
    check_declared(run)
    before, sent = [*collectives.active], {}
    place = before.index(plan.peer(step))
    if plan.joining(step) and not collectives.is_alone:
        (rank,) = (rank for rank, places in enumerate(collectives.ranges) if place in places)
        row = rows_of(run, [place - run.nodes.start], True) if place in run.nodes else {}
        sent = unpacked(*collectives.broadcast_object(packed(row), rank))
    places = [before.index(node) if node in before else place for node in plan.segment(step).nodes if node in own]
    return [at - run.nodes.start if at in run.nodes else -1 for at in places] or [0], sent


@torch.no_grad()
def arrange(
    group: Group[TrackedRun], step: int, moving: Mapping[TrackedRun, tuple[Sequence[int], Mapping[str, Any]]]
) -> None:
    """Permute a group's rows, and all state that has rows, so that the rows of nodes present in `step` come first.

    Args:
        moving: run → the rows that its nodes continue from, see `_rows_from`.
    """
    states = {run: rows_of(run, rows, sent=sent) for run, (rows, sent) in moving.items()}
    python = {run: copy.deepcopy(python_of(run)) for run in group.runs if run not in moving}
    for run in moving:
        run.collectives.attend(_plan(run).segment(step).nodes, _plan(run).machines(step))
    present = [run for run in group.runs if run.is_running and run.nodes]
    whole, first = group.whole, 0
    sources, places = list[int](), {}
    for run in [*present, *(run for run in group.runs if run not in present)]:
        rows = [max(0, row) for row in moving[run][0]] if run in moving else range(len(run.rows))
        sources += [run.rows.start + row for row in rows]
        places[run] = range(len(sources) - len(rows), len(sources))
    while first < len(sources) and sources[first] == first:
        first += 1
    moved = sources[first:]
    for matrix in (whole.weights, *whole.buffers.values()):
        matrix[first : len(sources)] = matrix[moved]
    for run, rows in places.items():
        if rows != run.rows or run in moving:
            group.place(run, rows)
    for run, own in python.items():
        set_python(run, own)
    for run, state in states.items():
        if kept := _kept_view(run):
            raise CheckpointError(
                f"{kept} keeps a part of the weights or gradients, whose rows change when nodes leave and join: take "
                "cluster.weights or cluster.grads where they are used, or keep a clone()"
            )
        fill_rows(run, state, Filler(run.collectives, run.cluster.weights.device))
        run.cluster.shard_sizes = run.presence.batches.shard_sizes[list(run.cluster.active)]
        run.keeping.undeclared = undeclared(run)
    group.compute_first(present)


def _kept_view(run: TrackedRun) -> str:
    """Return the name of an attribute in which a strategy keeps a view of its weights or gradients, or "".

    When rows move, such a view would show other nodes. An attribute named in `derived` may hold a collection of views,
    because the strategy makes the collection again when rows move.
    """
    matrices = {storage_key(matrix) for matrix in (run.cluster.replicas.weights, run.cluster.replicas.grads)}
    for part, owner in owners(run.strategy).items():
        for name, value in vars(owner).items():
            leaves = [value] if name in getattr(owner, "derived", ()) else tree_leaves(value)
            if any(isinstance(leaf, Tensor) and storage_key(leaf) in matrices for leaf in leaves):
                return f"{part}.{name}"
    return ""


def feed(group: Group[TrackedRun]) -> None:
    """Give a group the batches of its present rows, from the next step of its running runs on."""
    # Not the step that other groups are at: after a resume, a group may wait for another one. Ended runs are behind.
    done = max(run.done for run in group.runs)
    fetching: dict[Hashable, DataStates | None] = {}
    sources = [_source(run, done, fetching) for run in group.taking]
    group.batches = enumerate(joint_batches(sources, done), done + 1) if sources else iter(())


def _source(run: TrackedRun, done: int, fetching: dict[Hashable, DataStates | None]) -> Source:
    """Return the batches of a run after `done` steps.

    Args:
        fetching: key → random states that the data draw from; runs with equal keys have equal batches. Filled here.
    """
    spec, batches, when = run.spec, run.presence.batches, tuple[Any, ...]()
    runs_code = one_in_memory(batches) is None
    if run.presence.plan is not None:
        # The rows of an ended run, whose losses nobody reads, keep the nodes of its last step.
        at = done + 1 if run.is_running else max(1, run.cluster.step)
        segment, missed = run.presence.plan.segment(at), run.presence.plan.missed(at)
        own = slice(run.nodes.start, run.nodes.stop)
        when, batches = (segment, *missed), batches.attended(segment.nodes[own], missed[own])
    key: Hashable = (spec.seed, spec.num_nodes, spec.batch_size, id(spec.train_dataset), when)
    run.presence.data_states = fetching.setdefault(key, copy.copy(run.presence.data_states))
    return Source(batches, key, run.fetching if runs_code else nullcontext)


# Joining, and rounds of clients ---------------------------------------------------------------------------------------


def _join(run: TrackedRun, step: int) -> None:
    """Bill the state that joining nodes copy, and give each of these nodes its own random stream."""
    plan = _plan(run)
    joining = plan.joining(step)
    if not joining:
        return
    stack = StackedCollectives(run.ledger, [plan.peer(step), *joining])  # only bills the copies of `arrange`
    stack.broadcast(torch.zeros(len(joining) + 1, 0), label="join", payload_bytes=_bytes_of_a_node(run))
    _seed(run, joining, step)


def _bytes_of_a_node(run: TrackedRun) -> int:
    """Return the bytes of one node's weights, buffers, optimizer state and strategy state."""
    replicas, strategy = run.cluster.replicas, run.strategy
    width = replicas.weights.stride(0)
    gap = (width - replicas.num_parameters) * replicas.weights.element_size()

    def size(t: Tensor) -> int:  # rows as wide as the matrix's end in a gap that no node sends
        return t.nbytes - gap * (t.numel() // width if t.shape[-1] == width else 0)

    # All rows may share one optimizer, or each row may have its own.
    states = [own for one in torch_optimizers(strategy.optim) for state in one.state.values() for own in state.values()]
    of_rows = sum(size(t) for t in states if isinstance(t, Tensor) and t.dim()) // len(replicas.weights)
    rows = [replicas.weights, *replicas.buffers.values(), *lasting(strategy, "stacked")]
    return of_rows + sum(size(t) // len(t) for t in rows) + sum(t.nbytes for t in lasting(strategy, "shared"))


def _seed(run: TrackedRun, nodes: Iterable[int], step: int) -> None:
    """Reseed the streams of nodes that begin to take part; a node gets a new seed each time it returns."""
    times, begin, active = _plan(run).times(step), set(nodes), run.cluster.active
    rows = {row: active[i] for row, i in enumerate(run.nodes) if active[i] in begin}
    for row, node in rows.items():
        again = [int(times[node])] if times[node] else []
        run.generators[row].manual_seed(derive_seed(run.spec.seed, NODE, node, *again))


@torch.no_grad()
def _end_round(run: TrackedRun) -> None:
    """Store the state of the round's clients, and reset all rows to the global weights and buffers.

    Clients push their running statistics to the server. They also push their weights, unless the server has the global
    model already.
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
    modules = run.strategy.communication_modules
    return run.cluster.replicas.weights[0].nbytes - sum(module.personal_bytes for module in modules)


def _statistics_bytes(run: TrackedRun) -> int:
    """Return the bytes of a client's running statistics, whose mean over clients the server keeps."""
    personal = {name for module in run.strategy.communication_modules for name in module.personal_buffers}
    own = {name: b for name, b in run.cluster.replicas.buffers.items() if name not in personal}
    return sum(b[0].nbytes for b in own.values() if b.is_floating_point() or b.is_complex())


@torch.no_grad()
def _begin_round(run: TrackedRun, step: int) -> None:
    """Assign the rows to the clients of the round that begins at `step`."""
    cluster, strategy, plan = run.cluster, run.strategy, _plan(run)
    collectives, replicas, segment = cluster.collectives, cluster.replicas, plan.segment(step)
    nodes = segment.nodes
    collectives.attend(nodes, plan.machines(step))
    pulled = _shared_bytes(run) + _statistics_bytes(run)
    # This only bills the pull, also of late clients: the rows already hold the weights.
    billing = StackedCollectives(run.ledger, sorted((*nodes, *segment.late))) if segment.late else collectives
    billing.pull(replicas.weights[0], label="pull", payload_bytes=pulled)
    forget(strategy.optim)
    assert run.presence.clients is not None
    run.presence.clients.arrive(cluster)
    _seed(run, nodes, step)
    cluster.shard_sizes = run.presence.batches.shard_sizes[list(nodes)]
