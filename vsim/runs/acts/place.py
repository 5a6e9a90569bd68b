"""Give every run its nodes: their rows, cluster, strategy, random streams, and what measures them."""

from __future__ import annotations

import copy
import sys
import warnings
from functools import partial
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from vsim.algorithms.asynchronous import AsynchronousStrategy
from vsim.arguments import encodable, naming
from vsim.cluster.cluster import Cluster
from vsim.cluster.participation import Schedule, Trace
from vsim.cluster.randomness import NODE, SHARED, generator
from vsim.cluster.replicas import Replicas
from vsim.cluster.state import check_rows
from vsim.core.algorithm import Algorithm
from vsim.core.group import Group
from vsim.data.batches import resolve, validation_examples
from vsim.engine import Executor, VmapExecutor
from vsim.history.agreement import settings_of
from vsim.history.history import COLUMNS
from vsim.network import Compute, Network
from vsim.network.event_clock import VirtualClock
from vsim.runs.acts.moment import Moment
from vsim.runs.callbacks import of_callbacks
from vsim.runs.clients import Clients
from vsim.runs.evaluate import Evaluator
from vsim.runs.fork import begin_fork
from vsim.runs.lasting import declared, of_model, of_nodes, of_strategy
from vsim.runs.moving import arrange, move_at_first
from vsim.runs.tracked import TrackedRun


class Place:
    """Sets up the nodes of every run on its rows, as new ones: a run that resumes gets its state later."""

    def __call__(self, moment: Moment) -> None:
        for group in moment.groups:
            for run in group.runs:
                first = min(
                    run.presence.collectives.nodes.start, run.spec.num_nodes - 1
                )  # a process without a node has one row
                with naming(run.spec.label if group.several else ""):
                    _place(run, group.whole.rows(run.rows.start, run.rows.stop, first))
            for run in (run for run in group.runs if not run.strategy.is_asynchronous):
                run.cluster.gradient_at = partial(group.gradient_at, run)
            group.compute_first(group.runs)
            engine = (
                group.executor
            )  # of all rows, so that validation makes the same calls whichever nodes are present later
            step = group.runs[0].spec.first_step
            if group.runs[0].presence.plan is not None:  # all have a plan then, and start at the same step
                arrange(group, step, {run: move_at_first(run, step) for run in group.runs})
            known: list[Evaluator] = []
            for run in (run for run in group.runs if run.spec.val_dataset is not None):
                run.measuring.evaluator = _evaluator(group, run, engine, known)


def _place(run: TrackedRun, replicas: Replicas) -> None:
    """Set up the cluster and strategy of a run whose nodes have these rows."""
    spec, plan, collectives = run.spec, run.presence.plan, run.presence.collectives
    # 1. The weights, before the strategy is set up, which may copy them.
    if spec.start is not None and spec.start.forks:
        begin_fork(spec.start, replicas)
    # 2. Cluster and strategy, which sends and draws here, before the first step.
    collectives.position.begin(0, "end")  # the ledger may be from an earlier start of the run
    cluster = Cluster(
        replicas,
        collectives,
        generator(spec.seed, SHARED),
        run.presence.batches.shard_sizes[: collectives.num_nodes],
        run.steps,
        spec.deterministic,
        spec.compile,
        plan,
    )
    if spec.strategy.needs_compute and isinstance(spec.compute, Compute):
        cluster.seconds = spec.compute.totals(spec.population)
    strategy = copy.deepcopy(spec.strategy)
    strategy.settings = settings_of(spec.strategy)
    if isinstance(strategy, AsynchronousStrategy):
        assert isinstance(spec.network, Network) and isinstance(spec.compute, Compute)
        strategy.clock = VirtualClock(spec.num_nodes, spec.network, spec.compute)
    strategy.begin(cluster)
    # 3. Checks of what the strategy has set up.
    for own in (strategy, *(part for part in strategy.parts if part is not strategy)):
        check_rows(own, cluster.weights)
    measured = [encodable(f"{type(strategy).__name__}: a name in columns()", name) for name in strategy.columns()]
    if taken := [name for name in measured if name in (*COLUMNS, *(spec.metrics or ()))]:
        raise ValueError(f"{type(strategy).__name__} measures {taken}, which name columns of the history already")
    if spec.start is None and 0 in collectives.nodes and run.steps > 0:  # in one process
        _warn_of_what_comes_late(strategy, run)
    if run.measuring.client_data and strategy.is_personal and plan is not None and not plan.renews:
        raise ValueError(
            f"client_val_dataset measures every node's own model with {type(strategy).__name__}, and with "
            f"participation={spec.participation!r} a node that is absent at the end has none: leave it out, or take "
            "Sample(…), which keeps the state of absent clients"
        )
    # 4. What lasts from step to step. `made` is what a node has that was never present: it is kept before rows move.
    device = replicas.weights.device
    run.cluster, run.strategy = cluster, strategy
    run.generators = [generator(spec.seed, NODE, collectives.active[n], device=device) for n in collectives.nodes]
    if plan is not None:
        run.presence.made = declared(strategy, "stacked")
    run.keeping.lasting = [of_nodes(run), of_strategy(run), of_model(run), of_callbacks(spec.callbacks)]
    if plan is not None and plan.renews:
        run.presence.clients = Clients(strategy, cluster, plan.store, claims=run.is_first)
        run.keeping.lasting.append(run.presence.clients.lasting)


def _warn_of_what_comes_late(strategy: Algorithm, run: TrackedRun) -> None:
    name, plan = type(strategy).__name__, run.presence.plan
    parts = [(name if part is strategy else f"{name}: {type(part).__name__}", part) for part in strategy.parts]
    first_steps = [(who, part.first_step) for who, part in parts]
    if isinstance(strategy, AsynchronousStrategy):
        first_steps.append((name, strategy.first_step))
    late = [f"{who} first acts after step {first}" for who, first in first_steps if first > run.steps]
    if plan is not None and isinstance(run.spec.participation, Schedule | Trace):
        first = plan.segment(1)
        if len(first.nodes) == run.spec.num_nodes and run.steps <= first.last < sys.maxsize:
            late.append(f"{type(run.spec.participation).__name__}: nodes first leave after step {first.last}")
    attack = strategy.attack
    if plan is not None and attack is not None and not plan.candidates(1):
        attackers = {*attack.attackers(plan.population)}
        if all(attackers.isdisjoint(segment.nodes) for segment in plan.segments(run.steps)):
            late.append(f"{attack}: none of its nodes takes part with participation={run.spec.participation}")
    warmups = [(f"{name}: H={own.H!r}", getattr(own.H, "warmup_steps", 0)) for own in strategy.parts]
    if strategy.schedule.named:
        warmups.append((f"{name}: lr_scheduler", strategy.schedule.kwargs["warmup_steps"]))
    late += [f"{who}, whose warm-up takes {warmup} steps" for who, warmup in warmups if warmup >= run.steps]
    for one in late:
        warnings.warn(f"too few steps: {one}, and the run ends after {run.steps}", UserWarning, stacklevel=2)


def _evaluator(group: Group[TrackedRun], run: TrackedRun, engine: Executor, known: list[Evaluator]) -> Evaluator:
    """Return what measures a run on its validation examples: one of `known`, which has equal ones, or a new one."""
    spec = run.spec
    with run.fetching():
        (dataset,) = resolve(spec.val_dataset, spec.num_nodes, range(1), False, "val_dataset")
        collate = (spec.dataloader_kwargs or {}).get("collate_fn")
        examples = validation_examples(dataset, spec.val_size, collate)
    for own in known:
        if _are_equal(own.batch, examples.batch):
            return own
    device, at_once = group.whole.weights.device, VmapExecutor.nodes_at_once(group.whole, engine.settings)
    known.append(Evaluator(engine, tree_map(lambda t: t.to(device), examples.batch), at_once, examples.total))
    return known[-1]


def _are_equal(one: Any, other: Any) -> bool:
    ours, theirs = tree_leaves(one), tree_leaves(other)
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True)
    )
