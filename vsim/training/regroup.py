"""Runs move to other matrices: without the rows of those that have left, or with other nodes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from vsim.cluster.randomness import preserved
from vsim.cluster.state import CheckpointError
from vsim.training.resume import begin, captured
from vsim.training.run import Ensemble, Run, Stack
from vsim.training.setup import assemble

# Runs are moved when this share of the rows has left; until then those rows are computed for nothing.
_SHARE = 0.2


def regroup(ensemble: Ensemble) -> None:
    """Put the runs of a run that still train into matrices of their own, if enough rows would be saved.

    They resume from a snapshot in memory, bitwise unchanged. All stay where they are if one cannot: a strategy whose
    state cannot be saved, or restored in a newly set up strategy, or worker processes that fetch its data.
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
    """Place copies of runs, which take the places of the runs; return their stacks."""
    device = runs[0].cluster.weights.device
    with preserved(device):
        fresh = assemble(copies, ensemble.executor, device, ensemble.interrupt)
    successors = dict(zip(runs, fresh.runs, strict=True))
    for old, new in successors.items():
        for name in ("examples", "tokens", "seconds", "validation_seconds", "draws", "row", "known_events"):
            setattr(new, name, getattr(old, name))
        if old.globals is not None and new.globals is not None:
            new.globals.states = old.globals.states
        begin(new)
    ensemble.runs = [successors.get(run, run) for run in ensemble.runs]
    return fresh.stacks


def snapshot(run: Run) -> Run:
    """Return a copy of a run that continues from its present state once it is placed.

    Raises:
        CheckpointError: it has a state that cannot be saved.
    """
    return replace(
        run,
        spec=replace(run.spec, start=captured(run, apart=True), max_memory_usage=None),
        collectives=run.collectives.anew(run.cluster.active),
        globals=None if run.globals is None else run.globals.anew(),
        starts=True,
        continues=run.nodes,
    )
