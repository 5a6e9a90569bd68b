"""Set up runs from their configurations, for every backend. Runs of equal shapes become rows of one matrix."""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.data import Dataset

from vsim.arguments import encodable, is_factory, naming
from vsim.checkpoint.files import Checkpoint
from vsim.cluster.cluster import Cluster
from vsim.cluster.collectives import Collectives
from vsim.cluster.ledger import Ledger
from vsim.cluster.participation import Schedule, Trace
from vsim.cluster.plan import Plan, Round
from vsim.cluster.randomness import NODE, SHARED, DataStates, generator
from vsim.cluster.replicas import Replicas, copied
from vsim.cluster.stacked import StackedCollectives
from vsim.cluster.state import check_rows
from vsim.core.group import Group
from vsim.data.batches import (
    Batches,
    BatchSource,
    evened,
    resolve,
    validation_examples,
)
from vsim.data.partition import Partition
from vsim.engine import Executor, Settings, VmapExecutor, batched, executor_of
from vsim.engine.attributes import content_of
from vsim.engine.machine import settle_vector_functions
from vsim.engine.memory import check_room, fitting_minibatch, total_bytes
from vsim.engine.objective import Objective
from vsim.network import Compute, Network
from vsim.network.event_clock import VirtualClock
from vsim.records.describe import settings_of
from vsim.records.history import COLUMNS, History
from vsim.records.progress import Reporter
from vsim.strategy.asynchronous import AsynchronousStrategy
from vsim.strategy.base import Algorithm
from vsim.training.alike import batch_shapes, same_model
from vsim.training.attendance import arrange, feed, rows_at_first
from vsim.training.callbacks import of_callbacks
from vsim.training.clients import Clients
from vsim.training.evaluate import Evaluator
from vsim.training.interrupt import Interrupt
from vsim.training.lasting import PYTHON, declared, of_model, of_nodes, of_strategy
from vsim.training.loop import Ensemble
from vsim.training.resume import begin_fork, resume
from vsim.training.spec import RunSpec
from vsim.training.tracked import Measuring, Presence, Recording, TrackedRun
from vsim.training.workers import Workers, train_on_clock

WAYS_OUT = (
    ". Fewer nodes, or more devices or machines (num_processes=, see docs/scaling.md), take less each; a node's model "
    "has to fit on a device whole"
)


def batches_of(spec: RunSpec, collectives: Collectives) -> BatchSource:
    """Return the batches of this process's nodes; with participation, of all nodes that may take part."""
    everyone = spec.population
    held = collectives.nodes if spec.participation is None else range(everyone)
    datasets = resolve(spec.train_dataset, everyone, held, True, "train_dataset")
    apart = is_factory(spec.train_dataset) and len(held) < everyone

    def of_all(own: list[int]) -> list[int]:
        with collectives.unbilled():
            numbers: list[int] = collectives.all_gather(torch.tensor(own)).tolist()
        return numbers

    noun = "num_nodes" if everyone == spec.num_nodes else "of"
    options = spec.batch_size, spec.shuffle, spec.seed, spec.dataloader_kwargs, noun
    return Batches(datasets, everyone, *options, held=held, of_all=of_all if apart else list)


def prepare(
    specs: Sequence[RunSpec],
    reports: Sequence[Reporter],
    histories: Sequence[History],
    device: torch.device,
    connect: Callable[[Ledger, RunSpec], Collectives] | None = None,
    interrupt: Interrupt | None = None,
    batches: Callable[[RunSpec, Collectives], BatchSource] = batches_of,
    executor: Callable[..., Executor] | None = None,
) -> Ensemble:
    """Set up runs that train together.

    Args:
        specs, reports, histories: one per run; reports and histories receive the outcomes.
        connect: makes the collectives of a run, which know the nodes of this process; None: this process has all nodes.
        interrupt: holds the user's request to stop, for all runs.
        batches: makes the batches of a run. executor: makes executors; default: the executors that the specs name.

    Raises:
        CheckpointError: a run does not fit the checkpoint that it starts from.
        TypeError, ValueError: a spec is invalid; with several runs, the message names the run.
    """
    runs = []
    for spec, report, history in zip(specs, reports, histories, strict=True):
        ledger = history.ledger
        collectives = StackedCollectives(ledger, range(spec.num_nodes)) if connect is None else connect(ledger, spec)
        check_room(min(spec.num_nodes, len(collectives.nodes)), bytes_of_node(spec), device, advice=WAYS_OUT)
        own = None if len(specs) == 1 else DataStates(spec.seed, device)
        with nullcontext() if own is None else own.here():
            own_batches = batches(spec, collectives)
            client_data, test_data = _measured_at_the_end(spec)
        with naming(spec.label if len(specs) > 1 else ""):
            plan = _plan_of(spec, own_batches)
        if spec.participation is not None and spec.participation.needs_compute and isinstance(spec.compute, Compute):
            history.ledger.clock = {"compute": spec.compute.as_plain()}  # compute times decide which nodes are late
        presence, recording = Presence(own_batches, plan, own), Recording(report, history)
        measuring = Measuring(client_data, test_data)
        runs.append(TrackedRun(spec, collectives, presence=presence, recording=recording, measuring=measuring))
    return assemble(runs, executor or executor_of(specs[0].executor), device, interrupt)


def bytes_of_node(spec: RunSpec) -> int:
    """Return a lower bound on the bytes that a node takes: weights, gradients, buffers and optimizer state."""
    row = sum(p.nbytes for p in spec.model.parameters() if p.requires_grad)
    optim = spec.strategy.optim_spec
    moments = len(optim.state_names() - {"step"}) if optim.elementwise else 0  # else states may be smaller than rows
    of_generator = generator(spec.seed, NODE).get_state().nbytes
    return of_generator + row * (2 + moments) + sum(b.nbytes for b in spec.model.buffers())


def _measured_at_the_end(spec: RunSpec) -> tuple[list[Dataset[Any]], list[Dataset[Any]]]:
    """Return the validation data of every node or client, and a list of the test data; either may be empty."""
    clients, test, everyone = spec.client_val_dataset, spec.test_dataset, range(spec.population)
    train = isinstance(clients, Partition)  # it divides a dataset, the training data or another, among clients
    return (
        [] if clients is None else resolve(clients, len(everyone), everyone, train, "client_val_dataset"),
        [] if test is None else resolve(test, spec.num_nodes, range(1), False, "test_dataset"),
    )


def _plan_of(spec: RunSpec, batches: BatchSource) -> Plan | None:
    """Return which nodes take part in which steps of a run; None: all nodes in all steps."""
    if spec.participation is None:
        return None
    seconds = spec.compute.totals(spec.population) if isinstance(spec.compute, Compute) else None
    epochs = batches.epoch_steps.numpy().astype(np.float64)
    syncs = spec.strategy.syncs(spec.max_steps, seconds)
    period = min((b - a for a, b in itertools.pairwise((0, *syncs))), default=spec.strategy.period)
    return spec.participation.plan(Round(spec.num_nodes, spec.seed, period, seconds, epochs, syncs))


def assemble(
    runs: Sequence[TrackedRun],
    executor: Callable[..., Executor],
    device: torch.device,
    interrupt: Interrupt | None = None,
) -> Ensemble:
    """Place runs in matrices on `device`.

    Args:
        executor: makes an executor from (replicas, objective, generators, settings).
        interrupt: holds the user's request to stop, for all runs.
    """
    settle_vector_functions()
    interrupt = interrupt or Interrupt()
    try:
        groups = [_stacked([runs[i] for i in own], executor, device, interrupt) for own in _grouped(runs)]
    except BaseException:
        for run in runs:
            if run.presence.plan is not None and run.presence.plan.store is not None:
                run.presence.plan.store.release()  # for other runs
        raise
    for group in groups:
        group.several = group.tolerant = len(runs) > 1
    return Ensemble(list(runs), groups, max(run.steps for run in runs), interrupt=interrupt)


def laid_out(runs: Sequence[TrackedRun], device: torch.device) -> tuple[Replicas, list[Replicas]]:
    """Return all rows of a group, and the rows of each run, in the runs' order."""
    models, counts = [run.spec.model for run in runs], [len(run.nodes) for run in runs]
    whole = Replicas.of_several(models, counts, device)
    stops = [*itertools.accumulate(counts)]
    rows = zip(runs, counts, stops, strict=True)
    return whole, [whole.rows(stop - count, stop, run.nodes.start) for run, count, stop in rows]


def _grouped(runs: Sequence[TrackedRun]) -> list[list[int]]:
    """Group the indices of runs that are computed together."""
    if len(runs) == 1:
        return [[0]]
    groups: list[list[int]] = []
    for i, run in enumerate(runs):
        for group in groups:
            if _are_alike(runs[group[0]], run):
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _are_alike(first: TrackedRun, other: TrackedRun) -> bool:
    """Return whether one call can compute the losses and gradients of both runs."""
    one, two = first.spec, other.spec
    if one.strategy.is_asynchronous or two.strategy.is_asynchronous:
        return False
    if (first.presence.plan is None) != (
        other.presence.plan is None
    ):  # a plan changes which steps have smaller batches
        return False
    longest = max(first.steps, other.steps)  # the shorter run gives up its rows when it ends
    return (
        first.start == other.start
        and one.minibatch_size == two.minibatch_size
        and first.minibatch_size == other.minibatch_size
        and batch_shapes(first.presence.batches, one, longest) == batch_shapes(other.presence.batches, two, longest)
        and same_model(one.model, two.model)
        and _same_python(one.start, two.start)
    )


def _same_python(one: Checkpoint | None, two: Checkpoint | None) -> bool:
    """Return whether one Python object can compute the rows of two runs, or each row has its own in both."""
    if one is None or two is None:
        return True
    distinct = []
    for start in (one, two):
        states = [start.stacked[name]["nodes"] for name in PYTHON if name in start.stacked]
        distinct.append({content_of(state) for state in zip(*states, strict=True)})
    return any(len(own) > 1 for own in distinct) or distinct[0] == distinct[1]


def _stacked(
    runs: Sequence[TrackedRun], executor: Callable[..., Executor], device: torch.device, interrupt: Interrupt
) -> Group[TrackedRun]:
    spec, steps = runs[0].spec, max(run.steps for run in runs)
    whole, parts = laid_out(runs, device)
    kept = [module for module in whole.module.modules() if whole.module.training and not module.training]
    whole.module.train()  # which a model may override
    for module in kept:
        module.training = False
    loss_fn, accuracy = copied(spec.loss_fn, "loss_fn"), copied(spec.accuracy, "accuracy")
    objective = Objective(whole.module, loss_fn, accuracy).to(device)
    objective.originals = tuple(run.spec.model for run in runs)
    objective.begin()
    # A deterministic run on an accelerator computes all nodes at once, because pieces would depend on free memory.
    repeats = spec.deterministic and not batched.favors_loops(device)
    chunk_size = spec.chunk_size or (whole.num_held if repeats else None)
    settings = Settings(spec.autocast, spec.deterministic, chunk_size, spec.compile, runs[0].collectives.position)
    first = 0
    for run, replicas in zip(runs, parts, strict=True):
        run.rows, run.objective = range(first, first + len(run.nodes)), objective
        first = run.rows.stop
        with naming(run.spec.label if len(runs) > 1 else ""):
            _place(run, replicas)
    make = lambda own, streams: executor(own, objective, streams, settings)  # noqa: E731
    group = Group[TrackedRun](list(runs), whole, make, interrupt)
    for run in (run for run in runs if not run.spec.strategy.is_asynchronous):
        run.cluster.gradient_at = partial(group.gradient_at, run)
    group.compute_first(runs)
    engine = group.executor  # of all rows, so that validation makes the same calls whoever is present after a resume
    if spec.participation is not None:  # all runs of the group then have a plan, and start at the same step
        arrange(group, spec.first_step, {run: (rows_at_first(run, spec.first_step), {}) for run in runs})
    _find_validation_examples(runs, device)
    evaluators: dict[int, Evaluator] = {}
    for run in runs:
        if run.spec.start is not None:
            with run.fetching(), naming(run.spec.label if len(runs) > 1 else ""):
                resume(run, run.spec.start)
            run.spec = replace(run.spec, start=None)  # free the checkpoint's memory
    if len({run.done for run in runs}) > 1:
        raise ValueError(f"runs that train together are at different steps: {[run.done for run in runs]}")
    feed(group)
    minibatch_size = spec.minibatch_size
    if spec.max_memory_usage is not None and runs[0].done < steps:
        minibatch_size = _fitting_minibatch(spec, runs, group.executor, group.coming_batch())
    for run in runs:
        run.minibatch_size = minibatch_size
    # Evaluation keeps no activations, so more examples fit at once than in training.
    batch_size = 4 * (minibatch_size or spec.batch_size)
    at_once = VmapExecutor.nodes_at_once(whole, settings)
    for run in runs:
        if (own := run.measuring.examples) is not None:
            evaluator = Evaluator(engine, own.batch, batch_size, at_once, own.total)
            run.measuring.evaluator = evaluators.setdefault(id(own), evaluator)
    if spec.strategy.is_asynchronous:
        group.steps = train_on_clock(Workers(runs[0], engine, group.few, minibatch_size))
    return group


def _place(run: TrackedRun, replicas: Replicas) -> None:
    """Set up the cluster and strategy of a run whose nodes have these rows."""
    spec = run.spec
    if spec.start is not None and spec.start.forks:
        begin_fork(spec.start, replicas)
    run.collectives.position.begin(0, "end")  # the ledger may be from an earlier start of the run
    cluster = Cluster(
        replicas,
        run.collectives,
        generator(spec.seed, SHARED),
        run.presence.batches.shard_sizes[: run.collectives.num_nodes],
        run.steps,
        spec.deterministic,
        spec.compile,
        run.presence.plan,
    )
    if spec.strategy.needs_compute and isinstance(spec.compute, Compute):
        cluster.seconds = spec.compute.totals(spec.population)
    strategy = copy.deepcopy(spec.strategy)
    strategy.settings = settings_of(spec.strategy)
    if isinstance(strategy, AsynchronousStrategy):
        assert isinstance(spec.network, Network) and isinstance(spec.compute, Compute)
        strategy.clock = VirtualClock(spec.num_nodes, spec.network, spec.compute)
    strategy.begin(cluster)
    for own in (strategy, *strategy.communication_modules):
        check_rows(own, cluster.weights)
    measured = [encodable(f"{type(strategy).__name__}: a name in columns()", name) for name in strategy.columns()]
    if taken := [name for name in measured if name in (*COLUMNS, *(spec.metrics or ()))]:
        raise ValueError(f"{type(strategy).__name__} measures {taken}, which name columns of the history already")
    if spec.start is None and 0 in run.nodes:  # in one process
        _warn_of_what_comes_late(strategy, run)
    if (
        run.measuring.client_data
        and strategy.is_personal
        and run.presence.plan is not None
        and not run.presence.plan.renews
    ):
        raise ValueError(
            f"client_val_dataset measures every node's own model with {type(strategy).__name__}, and with "
            f"participation={spec.participation!r} a node that is absent at the end has none: leave it out, or take "
            "Sample(…), which keeps the state of absent clients"
        )
    device = replicas.weights.device
    run.cluster, run.strategy, run.max_steps = cluster, strategy, run.steps
    run.generators = [generator(spec.seed, NODE, run.collectives.active[n], device=device) for n in run.nodes]
    if run.presence.plan is not None:
        run.presence.made = declared(strategy, "stacked")
    run.lasting = [of_nodes(run), of_strategy(run), of_model(run), of_callbacks(spec.callbacks)]
    if run.presence.plan is not None and run.presence.plan.renews:
        run.presence.clients = Clients(strategy, cluster, run.presence.plan.store, claims=run.is_first)
        run.lasting.append(run.presence.clients.lasting)


def _warn_of_what_comes_late(strategy: Algorithm, run: TrackedRun) -> None:
    name = type(strategy).__name__
    first_steps = [(f"{name}: {type(module).__name__}", module.first_step) for module in strategy.communication_modules]
    if isinstance(strategy, AsynchronousStrategy):
        first_steps.append((name, strategy.first_step))
    late = [f"{who} first acts after step {first}" for who, first in first_steps if first > run.steps]
    if run.presence.plan is not None and isinstance(run.spec.participation, Schedule | Trace):
        first = run.presence.plan.segment(1)
        if len(first.nodes) == run.spec.num_nodes and run.steps <= first.last < sys.maxsize:
            late.append(f"{type(run.spec.participation).__name__}: nodes first leave after step {first.last}")
    attack = strategy.attack
    if run.presence.plan is not None and attack is not None:
        attackers = {*attack.attackers(run.presence.plan.population)}
        if all(attackers.isdisjoint(segment.nodes) for segment in run.presence.plan.segments(run.steps)):
            late.append(f"{attack}: none of its nodes takes part with participation={run.spec.participation}")
    warmups = [(f"{name}: H={own.H!r}", getattr(own.H, "warmup_steps", 0)) for own in strategy.communication_modules]
    if strategy.schedule.named:
        warmups.append((f"{name}: lr_scheduler", strategy.schedule.kwargs["warmup_steps"]))
    late += [f"{who}, whose warm-up takes {warmup} steps" for who, warmup in warmups if warmup >= run.steps]
    for one in late:
        warnings.warn(f"too few steps for {one}, and the run ends after {run.steps}", UserWarning, stacklevel=2)


def _find_validation_examples(runs: Sequence[TrackedRun], device: torch.device) -> None:
    """For every run with validation data, put the validation examples on `device`.

    Runs with equal examples get the same object, and are measured together.
    """
    for run in runs:
        spec = run.spec
        if spec.val_dataset is None or run.measuring.examples is not None:
            continue
        with run.fetching():
            (dataset,) = resolve(spec.val_dataset, spec.num_nodes, range(1), False, "val_dataset")
            collate = (spec.dataloader_kwargs or {}).get("collate_fn")
            examples = validation_examples(dataset, spec.val_size, collate)
        known = (own for own in (other.measuring.examples for other in runs) if own is not None)
        equal = (own for own in known if _equal_examples(own.batch, examples.batch))
        on_device = tree_map(lambda t: t.to(device), examples.batch)
        run.measuring.examples = next(equal, None) or examples._replace(batch=on_device)


def _equal_examples(one: Any, other: Any) -> bool:
    ours, theirs = tree_leaves(one), tree_leaves(other)
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True)
    )


def _fitting_minibatch(spec: RunSpec, runs: Sequence[TrackedRun], engine: Executor, batch: Any) -> int | None:
    """Return the largest minibatch that fits into the memory of every process; None: the whole batch."""
    assert spec.max_memory_usage is not None
    cluster = runs[0].cluster
    device = cluster.weights.device
    total = total_bytes(device)
    batch = tree_map(lambda t: t.to(device), evened(batch))
    optimizers = [run.strategy.optim for run in runs]
    size = fitting_minibatch(engine, optimizers, batch, spec.batch_size, spec.max_memory_usage * total)
    with cluster.collectives.unbilled():
        rows = torch.full((cluster.replicas.num_held,), size, device=device)
        size = int(cluster.collectives.all_gather(rows, label="minibatch sizes").min())
    if size == 0:
        raise ValueError(
            f"max_memory_usage leaves this process {spec.max_memory_usage * total / 1e9:.3g} GB of the "
            f"{total / 1e9:.3g} GB of {device.type}, and a minibatch of one example a node does not fit: "
            "raise it, or take fewer nodes or a smaller model"
        )
    return None if size == spec.batch_size else size
