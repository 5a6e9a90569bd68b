"""Members are put together anew: without the rows of those that have left, or with other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vsim.cluster.randomness import preserved
from vsim.cluster.state import CheckpointError
from vsim.training.assemble import assemble
from vsim.training.member import Group, Member, Run
from vsim.training.part import Part
from vsim.training.saving import begin, captured

# Members are moved when this share of the rows has left; until then those rows are computed for nothing.
_SHARE = 0.2


def regroup(run: Run) -> None:
    """Put the members of a run that still train into matrices of their own, if enough rows would be saved.

    They resume from a snapshot in memory, bitwise unchanged. All stay where they are if one cannot: a strategy whose
    state cannot be saved, or filled in a strategy that is set up anew, or worker processes that fetch its data.
    """
    remaining = run.unfinished
    if len(remaining) == sum(len(group.members) for group in run.groups):
        return
    rows = sum(member.cluster.replicas.num_held for group in run.groups for member in group.members)
    kept = sum(member.cluster.replicas.num_held for member in remaining)
    if not remaining or not run.regroups or rows - kept < _SHARE * rows:
        return
    if remaining[0].config.dataloader_kwargs.get("num_workers"):
        return
    try:
        run.groups = put_together(run, remaining, [snapshot(member) for member in remaining])
    except CheckpointError:
        run.regroups = False


def put_together(run: Run, members: Sequence[Member], parts: Sequence[Part]) -> list[Group]:
    """Set up members of a run anew, each from its part; they take the places of the old ones. Return their groups."""
    device = members[0].cluster.weights.device
    with preserved(device):
        fresh = assemble(parts, run.executor, device, run.interrupt)
    successors = dict(zip(members, fresh.members, strict=True))
    for old, new in successors.items():
        for name in ("examples", "tokens", "seconds", "validation_seconds", "draws", "row", "known_events"):
            setattr(new, name, getattr(old, name))
        if old.globals is not None and new.globals is not None:
            new.globals.states = old.globals.states
        begin(new)
    run.members = [successors.get(member, member) for member in run.members]
    return fresh.groups


def snapshot(member: Member) -> Part:
    """Return the parts of a member in its present state, to be assembled again.

    Raises:
        CheckpointError: it has a state that cannot be saved.
    """
    part = member.part
    return replace(
        part,
        config=replace(part.config, start=captured(member, apart=True), memory_share=None),
        collectives=part.collectives.anew(member.cluster.active),
        globals=None if part.globals is None else part.globals.anew(),
        minibatch_size=member.minibatch_size,
        continues=part.nodes,
    )
