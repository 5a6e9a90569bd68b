"""Move the rows of a group when nodes come and go.

The rows are permuted so that the present nodes of running runs have the first rows of the matrix. Every other object
with rows is then a view of these first rows, or is cut to them. Four numbers name the same node:

    node      its number in the plan and the ledger, 0 to N − 1
    place     its place among the nodes that take part, in all processes: an index of `collectives.active`
    row       its place among those that this process holds: an index of the run's tensors
    row of the group: `run.rows.start` + row, an index of the matrix, where the rows of several runs follow each other

For example, one process has run A with nodes 0, 1, 2 in rows 0 to 2 of the group, and run B with node 0 in row 3.
Node 0 of A leaves: A has Move([1, 2]), and `arrange` copies rows 1, 2, 3 of the matrix to rows 0, 1, 2; row 3 is idle.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from vsim.checkpoint.files import packed, unpacked
from vsim.checkpoint.tree import Encoded, Filler
from vsim.cluster.optimizers import torch_optimizers
from vsim.cluster.randomness import NODE, derive_seed
from vsim.cluster.stacked import StackedCollectives
from vsim.cluster.state import CheckpointError, owners
from vsim.core.group import Group
from vsim.private_torch import storage_key
from vsim.runs.clients import lasting
from vsim.runs.lasting import python_of, set_python
from vsim.runs.row_state import SENT, fill_rows, rows_of
from vsim.runs.saving import check_declared, undeclared
from vsim.runs.tracked import TrackedRun


class Move(NamedTuple):
    """Which rows the rows of a run continue from, in this process. A joining node continues from its peer's row.

    For example, process 0 holds nodes 0 and 1, process 1 node 2; then node 0 leaves, and node 3 joins on process 1 with
    node 1 as its peer. Process 0 has Move([1]): its row, of node 1, was row 1. Process 1 has Move([0, SENT], …): node 2
    stays in row 0, and node 3 continues from a row that process 0 has sent.

    Attributes:
        rows: for each coming row, the row held until now, or SENT. A process that will have no node keeps row 0, which
            takes no part in anything.
        sent: the encoded state that SENT stands for; {} if nothing is sent.
    """

    rows: Sequence[int]
    sent: Mapping[str, Encoded] = MappingProxyType({})


def move_at_first(run: TrackedRun, step: int) -> Move:
    """Return the move to the nodes that take part in `step`, right after the setup with all nodes."""
    own = run.collectives.machines[run.collectives.rank]
    return Move([machine - own.start for machine in run.plan.machines(step) if machine in own] or [0])


def move_to(run: TrackedRun, step: int) -> Move:
    """Return the move to the nodes that take part in `step`.

    Every process has to call this, as one of them may send a peer's row.
    """
    plan, collectives = run.plan, run.collectives
    own = collectives.machines[collectives.rank]
    if run.presence.clients is not None:  # all rows hold the global weights
        return Move([0] * max(1, sum(machine in own for machine in plan.machines(step))))
    run.objective.check_portable()
    check_declared(run)
    before, sent = [*collectives.active], {}
    place = before.index(plan.peer(step))
    if plan.joining(step) and not collectives.is_alone:
        (rank,) = (rank for rank, places in enumerate(collectives.ranges) if place in places)
        row = rows_of(run, [place - run.nodes.start], True) if place in run.nodes else {}
        sent = unpacked(*collectives.broadcast_object(packed(row), rank))
    places = [before.index(node) if node in before else place for node in plan.segment(step).nodes if node in own]
    return Move([at - run.nodes.start if at in run.nodes else SENT for at in places] or [0], sent)


@torch.no_grad()
def arrange(group: Group[TrackedRun], step: int, moving: Mapping[TrackedRun, Move]) -> None:
    """Permute a group's rows, and all state that has rows, so that the rows of nodes present in `step` come first.

    Other runs of the group may get other rows, too, as the rows of running runs come first.
    """
    # 1. Keep all state that has rows, while the rows are where they were; weights and buffers only if they are sent.
    states = {run: rows_of(run, move.rows, sent=move.sent) for run, move in moving.items()}
    python = {run: copy.deepcopy(python_of(run)) for run in group.runs if run not in moving}
    # 2. Tell the collectives which nodes are present, from which the number of rows follows.
    for run in moving:
        run.collectives.attend(run.plan.segment(step).nodes, run.plan.machines(step))
    # 3. Permute the matrix: `sources` has, for each coming row of the group, the row that it continues from.
    present = [run for run in group.runs if run.is_running and run.nodes]
    whole, first = group.whole, 0
    sources, places = list[int](), {}
    for run in [*present, *(run for run in group.runs if run not in present)]:
        rows: Sequence[int] = range(len(run.rows))
        if run in moving:  # what is sent is filled in below
            rows = [0 if row == SENT else row for row in moving[run].rows]
        sources += [run.rows.start + row for row in rows]
        places[run] = range(len(sources) - len(rows), len(sources))
    while first < len(sources) and sources[first] == first:
        first += 1
    moved = sources[first:]
    for matrix in (whole.weights, *whole.buffers.values()):
        matrix[first : len(sources)] = matrix[moved]
    # 4. Give the runs views of their rows, and fill what has rows besides the matrix.
    for run, place in places.items():
        if place != run.rows or run in moving:
            group.place(run, place)
    for run, own in python.items():
        set_python(run, own)
    for run, state in states.items():
        if kept := kept_view(run):
            raise CheckpointError(
                f"{kept} keeps a part of the weights or gradients, whose rows change when nodes leave and join: take "
                "cluster.weights or cluster.grads where they are used, or keep a clone()"
            )
        fill_rows(run, state, Filler(run.collectives, run.cluster.weights.device))
        run.cluster.shard_sizes = run.presence.batches.shard_sizes[list(run.cluster.active)]
        run.keeping.undeclared = undeclared(run)
    # 5. Compute only the present rows.
    group.compute_first(present)


def kept_view(run: TrackedRun) -> str:
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


def join(run: TrackedRun, step: int) -> None:
    """Bill the state that joining nodes copy, and give each of these nodes its own random stream."""
    plan = run.plan
    joining = plan.joining(step)
    if not joining:
        return
    stack = StackedCollectives(run.ledger, [plan.peer(step), *joining])  # only bills the copies of `arrange`
    stack.broadcast(torch.zeros(len(joining) + 1, 0), label="join", payload_bytes=_bytes_of_a_node(run))
    seed_streams(run, joining, step)


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


def seed_streams(run: TrackedRun, nodes: Iterable[int], step: int) -> None:
    """Reseed the streams of nodes that begin to take part; a node gets a new seed each time it returns."""
    times, begin, active = run.plan.times(step), set(nodes), run.cluster.active
    rows = {row: active[i] for row, i in enumerate(run.nodes) if active[i] in begin}
    for row, node in rows.items():
        again = [int(times[node])] if times[node] else []
        run.generators[row].manual_seed(derive_seed(run.spec.seed, NODE, node, *again))
