"""Set up runs from their configurations, for every backend. Runs of equal shapes become rows of one matrix."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch
from torch.utils.data import Dataset

from vsim.arguments import is_factory, naming
from vsim.checkpoint.files import Checkpoint
from vsim.cluster.collectives import Collectives
from vsim.cluster.ledger import Ledger
from vsim.cluster.plan import Plan, Round
from vsim.cluster.randomness import NODE, DataStates, generator
from vsim.cluster.replicas import Replicas, copied
from vsim.cluster.stacked import StackedCollectives
from vsim.core.group import Group
from vsim.data.batches import (
    Batches,
    BatchSource,
    resolve,
)
from vsim.data.partition import Partition
from vsim.engine import Executor, Settings, batched, executor_of
from vsim.engine.attributes import content_of
from vsim.engine.machine import settle_vector_functions
from vsim.engine.memory import check_room
from vsim.engine.objective import Objective
from vsim.network import Compute
from vsim.runs.alike import batch_shapes, same_model
from vsim.runs.interrupt import Interrupt
from vsim.runs.lasting import PYTHON
from vsim.runs.spec import RunSpec
from vsim.runs.tracked import Measuring, Presence, TrackedRun

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


def build(
    runs: Sequence[TrackedRun],
    device: torch.device,
    interrupt: Interrupt,
    connect: Callable[[Ledger, RunSpec], Collectives] | None = None,
    batches: Callable[[RunSpec, Collectives], BatchSource] = batches_of,
    executor: Callable[..., Executor] | None = None,
) -> list[Group[TrackedRun]]:
    """Give runs that train together their data, and put their nodes as rows into the matrices of groups.

    Args:
        interrupt: holds the user's request to stop, for all runs.
        connect: makes the collectives of a run, which know the nodes of this process; None: this process has all nodes.
        batches: makes the batches of a run. executor: makes executors from (replicas, objective, generators, settings);
            default: the executors that the options name.

    Raises:
        TypeError, ValueError: an option is invalid; with several runs, the message names the run.
    """
    for run in runs:
        spec, ledger = run.spec, run.history.ledger
        collectives = StackedCollectives(ledger, range(spec.num_nodes)) if connect is None else connect(ledger, spec)
        check_room(min(spec.num_nodes, len(collectives.nodes)), bytes_of_node(spec), device, advice=WAYS_OUT)
        own = None if len(runs) == 1 else DataStates(spec.seed, device)
        with nullcontext() if own is None else own.here():
            own_batches = batches(spec, collectives)
            run.measuring = Measuring(*_measured_at_the_end(spec))
        with naming(spec.label if len(runs) > 1 else ""):
            run.presence = Presence(collectives, own_batches, _plan_of(spec, own_batches), own)
        if spec.participation is not None and spec.participation.needs_compute and isinstance(spec.compute, Compute):
            ledger.clock = {"compute": spec.compute.as_plain()}  # compute times decide which nodes are late
        run.max_steps = run.steps
    settle_vector_functions()
    executor = executor or executor_of(runs[0].spec.executor)
    groups = [_group(own, executor, device, interrupt) for own in _grouped(runs)]
    for group in groups:
        group.several = group.isolates_failures = len(runs) > 1
    return groups


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
    sizes = batches.shard_sizes.numpy().astype(np.float64)
    plan = spec.participation.plan(Round(spec.num_nodes, spec.seed, period, seconds, epochs, syncs, sizes))
    if not plan.candidates(1):
        return plan
    if not is_factory(spec.train_dataset):
        raise TypeError(
            f"{spec.participation} compares losses on clients' own data: give a partition(…) or a function f(client, "
            "num_clients, train_dataset) as train_dataset, not a dataset that is dealt anew in each epoch"
        )
    if spec.start is not None and spec.start.forks and spec.steps_before:
        raise ValueError(
            f"{spec.participation} cannot begin at step {spec.steps_before + 1} of a fork, as losses decide all of its "
            "rounds: start a new run with model=checkpoint.model(like=…)"
        )
    if spec.start is not None:
        plan.repeat(spec.start.ledger.attendance, spec.steps_before)
    return plan


def _grouped(runs: Sequence[TrackedRun]) -> list[list[TrackedRun]]:
    """Group the runs that are computed together."""
    groups: list[list[TrackedRun]] = []
    for run in runs:
        for group in groups:
            if _are_alike(group[0], run):
                group.append(run)
                break
        else:
            groups.append([run])
    return groups


def _are_alike(first: TrackedRun, other: TrackedRun) -> bool:
    """Return whether one call can compute the losses and gradients of both runs."""
    one, two = first.spec, other.spec
    if one.strategy.is_asynchronous or two.strategy.is_asynchronous:
        return False
    if (first.presence.plan is None) != (other.presence.plan is None):
        return False  # a plan changes which steps have smaller batches
    longest = max(first.steps, other.steps)  # the shorter run gives up its rows when it ends
    return (
        one.steps_before == two.steps_before
        and one.minibatch_size == two.minibatch_size
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


def _group(
    runs: Sequence[TrackedRun], executor: Callable[..., Executor], device: torch.device, interrupt: Interrupt
) -> Group[TrackedRun]:
    spec = runs[0].spec
    whole = Replicas.of_several(
        [run.spec.model for run in runs], [len(run.presence.collectives.nodes) for run in runs], device
    )
    kept = [module for module in whole.module.modules() if whole.module.training and not module.training]
    whole.module.train()  # which a model may override
    for module in kept:
        module.training = False
    loss_fn, accuracy = copied(spec.loss_fn, "loss_fn"), copied(spec.accuracy, "accuracy")
    objective = Objective(whole.module, loss_fn, accuracy).to(device)
    objective.originals = tuple(run.spec.model for run in runs)
    objective.begin()
    # A deterministic run on an accelerator computes all nodes at once, because pieces would depend on free memory.
    repeats = spec.deterministic and not batched.is_cache_bound(device)
    chunk_size = spec.chunk_size or (whole.num_held if repeats else None)
    settings = Settings(
        spec.autocast, spec.deterministic, chunk_size, spec.compile, runs[0].presence.collectives.position
    )
    first = 0
    for run in runs:
        run.rows = range(first, first + len(run.presence.collectives.nodes))
        first = run.rows.stop
    make = lambda own, streams: executor(own, objective, streams, settings)  # noqa: E731
    return Group(list(runs), whole, objective, make, interrupt)
