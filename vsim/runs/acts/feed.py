"""Give every group its batches, and find how many examples fit into memory at once."""

from __future__ import annotations

import torch
from torch.utils._pytree import tree_map

from vsim.core.group import Group
from vsim.data.batches import evened
from vsim.engine.memory import fitting_minibatch, total_bytes
from vsim.runs.acts.moment import Moment
from vsim.runs.feeding import feed
from vsim.runs.tracked import TrackedRun
from vsim.runs.workers import Workers, train_on_clock


class Feed:
    """Gives groups the batches from their next step on. Workers of an asynchronous run fetch their own."""

    def __call__(self, moment: Moment) -> None:
        for group in moment.groups:
            feed(group)
            spec = group.runs[0].spec
            group.minibatch_size = spec.minibatch_size
            if spec.max_memory_usage is not None and group.running:
                group.minibatch_size = _fitting_minibatch(group, spec.max_memory_usage)
            if spec.strategy.is_asynchronous:
                group.steps = train_on_clock(Workers(group.runs[0], group.executor, group.few, group.minibatch_size))


def _fitting_minibatch(group: Group[TrackedRun], share: float) -> int | None:
    """Return the largest minibatch that fits into this share of every process's memory; None: the whole batch."""
    cluster, batch_size = group.runs[0].cluster, group.runs[0].spec.batch_size
    device = cluster.weights.device
    total = total_bytes(device)
    size = batch_size
    if group.present:  # otherwise this process computes nothing in the first step
        batch = tree_map(lambda t: t.to(device), evened(group.coming_batch()))
        optimizers = [run.strategy.optim for run in group.runs]
        size = fitting_minibatch(group.executor, optimizers, batch, batch_size, share * total)
    with cluster.collectives.unbilled():
        rows = torch.full((cluster.replicas.num_held,), size, device=device)
        size = int(cluster.collectives.all_gather(rows, label="minibatch sizes").min())
    if size == 0:
        raise ValueError(
            f"max_memory_usage leaves this process {share * total / 1e9:.3g} GB of the "
            f"{total / 1e9:.3g} GB of {device.type}, and a minibatch of one example a node does not fit: "
            "raise it, or take fewer nodes or a smaller model"
        )
    return None if size == batch_size else size
