"""Members that remain are put together anew, in a matrix without the rows of those that have left."""

from __future__ import annotations

from dataclasses import replace

from vsim.cluster.stacked import StackedCollectives
from vsim.cluster.state import CheckpointError
from vsim.engine import executor_class
from vsim.training.assemble import assemble
from vsim.training.member import Member, Part, Run
from vsim.training.saving import begin, captured

# Members are moved when this share of the rows has left; until then those rows are computed for nothing.
_SHARE = 0.2


def regroup(run: Run) -> None:
    """Put the members of a run that still train into matrices of their own, if enough rows would be saved.

    They resume from a snapshot in memory, bitwise unchanged. All stay where they are if one cannot: a strategy whose
    state cannot be saved, or filled in a strategy that is set up anew, or worker processes that fetch its data.
    """
    remaining = run.unfinished
    rows = sum(member.cluster.replicas.num_held for group in run.groups for member in group.members)
    kept = sum(member.cluster.replicas.num_held for member in remaining)
    if not remaining or not run.regroups or rows - kept < _SHARE * rows:
        return
    device = remaining[0].cluster.weights.device
    config = remaining[0].config
    if config.dataloader_kwargs.get("num_workers"):
        return
    try:
        parts = [_snapshot(member) for member in remaining]
        fresh = assemble(parts, executor_class(config.executor, config.compile), device, run.interrupt)
    except CheckpointError:
        run.regroups = False
        return
    successors = dict(zip(remaining, fresh.members, strict=True))
    for old, new in successors.items():
        new.seconds, new.validation_seconds = old.seconds, old.validation_seconds
        new.draws, new.row = old.draws, old.row
        begin(new)
    run.members = [successors.get(member, member) for member in run.members]
    run.groups = fresh.groups


def _snapshot(member: Member) -> Part:
    """Return the parts of a member in its present state, to be assembled again."""
    part = member.part
    config = replace(part.config, start=captured(member), memory_share=None)
    return replace(
        part,
        config=config,
        collectives=StackedCollectives(member.ledger),
        globals=None if part.globals is None else part.globals.anew(),
        minibatch_size=member.minibatch_size,
    )
