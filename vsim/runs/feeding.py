"""What a group is fed: the batches of its present rows, from any step on."""

from __future__ import annotations

import copy
from collections.abc import Hashable
from contextlib import nullcontext
from typing import Any

from vsim.cluster.randomness import DataStates
from vsim.core.group import Group
from vsim.data.batches import Source, joint_batches, one_in_memory
from vsim.runs.tracked import TrackedRun


def feed(group: Group[TrackedRun]) -> None:
    """Give a group the batches of its present rows, from the next step of its running runs on."""
    # The step that this group is at: after a resume, another group may be further. Ended runs have fewer steps.
    done = max(run.done for run in group.runs)
    fetching: dict[Hashable, DataStates | None] = {}
    sources = [_source(run, done, fetching) for run in group.present]
    group.batches = enumerate(joint_batches(sources, done), done + 1) if sources else iter(())


def _source(run: TrackedRun, done: int, fetching: dict[Hashable, DataStates | None]) -> Source:
    """Return the batches of a run after `done` steps.

    Args:
        fetching: key → random states that the data draw from. Runs with equal keys have equal batches and draws, so
            that batches are fetched once, from states that they share: whatever changes a run's examples or their order
            must be in the key, and if it is not, one run trains on the other's. Filled here.
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
