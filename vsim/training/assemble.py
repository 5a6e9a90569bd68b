"""From configurations to a run, for every backend: members that are alike in shape become rows of one matrix."""

from __future__ import annotations

import copy
import itertools
import sys
import warnings
from collections.abc import Callable, Hashable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from vsim.arguments import naming
from vsim.checkpoint.fingerprint import settings_of
from vsim.cluster.cluster import Cluster
from vsim.cluster.participation import Schedule, Trace
from vsim.cluster.plan import Plan, Round
from vsim.cluster.randomness import NODE, SHARED, OwnGlobals, generator
from vsim.cluster.replicas import Replicas
from vsim.cluster.stacked import StackedCollectives
from vsim.cluster.state import check_rows
from vsim.data.batches import Batches, first_examples, resolve
from vsim.data.joint import BatchSource, Source, joint_batches, one_in_memory
from vsim.engine import Executor, Settings, VmapExecutor, executor_class, first_calls
from vsim.engine.memory import check_room, fitting_minibatch, total_bytes
from vsim.engine.objective import Objective
from vsim.network.virtual import VirtualClock
from vsim.records.history import COLUMNS, History
from vsim.records.report import Reporter
from vsim.strategy.asynchronous import AsynchronousStrategy
from vsim.strategy.base import Strategy
from vsim.training.alike import batch_shapes, is_vsims_own, same_model, settings_order
from vsim.training.asynchronous import Workers
from vsim.training.clients import Clients
from vsim.training.config import RunConfig
from vsim.training.evaluate import Evaluator
from vsim.training.interrupt import Interrupt
from vsim.training.member import Group, Member, Run
from vsim.training.optimizers import Optimizers
from vsim.training.part import Part
from vsim.training.rows import can_join, rows_of
from vsim.training.saving import begin_fork, resume


def prepare(
    configs: Sequence[RunConfig],
    reports: Sequence[Reporter],
    histories: Sequence[History],
    device: torch.device,
) -> Run:
    """Set up members that train together, all their nodes in this process.

    Args:
        configs: one per member. reports, histories: likewise; they receive the outcomes.

    Raises:
        CheckpointError: a member does not fit the checkpoint that it starts from.
        TypeError, ValueError: a configuration is refused; with several members, the member is named.
    """
    parts = []
    for config, report, history in zip(configs, reports, histories, strict=True):
        weights = [p.nbytes for p in config.model.parameters() if p.requires_grad]
        of_node = generator(config.seed, NODE).get_state().nbytes
        check_room(config.num_nodes, of_node + (0 if config.strategy.shares_weights else sum(weights)), device)
        own = None if len(configs) == 1 else OwnGlobals(config.seed, device)
        everyone = config.population
        with nullcontext() if own is None else own.here():
            datasets = resolve(config.train_dataset, everyone, range(everyone), True, "train_dataset")
            batches = Batches(
                datasets, everyone, config.batch_size, config.shuffle, config.seed, config.dataloader_kwargs
            )
        if own is not None:
            own.at_setup = own.states
        with naming(config.label if len(configs) > 1 else ""):
            plan = plan_of(config, batches)
        collectives = StackedCollectives(history.ledger, range(everyone))  # the ledger may be of another run
        part = Part(config, report, history, range(everyone), collectives, batches, own, plan=plan)
        parts.append(part if plan is None else part.attended(config.first_step))
    return assemble(parts, executor_class(configs[0].executor, configs[0].compile), device)


def plan_of(config: RunConfig, batches: BatchSource | None) -> Plan | None:
    """Return who takes part in which steps of a run, None for all nodes in all.

    Without batches it is not known how long a client takes to go through its own.
    """
    if config.participation is None:
        return None
    seconds = None if config.compute is None else config.compute.totals(config.population)
    sizes = torch.zeros(config.population) if batches is None else batches.shard_sizes
    epochs = sizes.numpy() / config.batch_size
    return config.participation.plan(Round(config.num_nodes, config.seed, config.strategy.period, seconds, epochs))


def assemble(
    parts: Sequence[Part], executor: Callable[..., Executor], device: torch.device, interrupt: Interrupt | None = None
) -> Run:
    """Set up the run of `parts`, whose nodes are rows on `device`.

    Args:
        executor: called with (replicas, objective, generators, settings).
        interrupt: asks the run to stop.
    """
    first_calls.settle()
    interrupt = interrupt or Interrupt()
    members: dict[int, Member] = {}
    groups = []
    for own in _grouped(parts):
        group, made = _assemble_group([parts[i] for i in own], executor, device, interrupt)
        groups.append(group)
        members.update(zip(own, made, strict=True))
    config = parts[0].config
    return Run(
        [members[i] for i in range(len(parts))],
        groups,
        max(part.steps for part in parts),
        executor,
        config.val_interval,
        correlation_interval=config.correlation_interval,
        interrupt=interrupt,
        tolerant=len(parts) > 1,
    )


def _grouped(parts: Sequence[Part]) -> list[list[int]]:
    """Return the numbers of the parts that are computed together, those with equal optimizers next to each other."""
    groups: list[list[int]] = []
    for i, part in enumerate(parts):
        for group in groups:
            if can_join(part) and can_join(parts[group[0]]) and _are_alike(parts[group[0]], part):
                group.append(i)
                break
        else:
            groups.append([i])
    return [sorted(group, key=lambda i: settings_order(parts[i].config.strategy)) for group in groups]


def _are_alike(first: Part, other: Part) -> bool:
    """Whether losses and gradients of two parts can be computed in one call."""
    one, two = first.config, other.config
    if (first.plan is None) != (other.plan is None):  # with a plan all batches are full
        return False
    return (
        (first.steps, first.start) == (other.steps, other.start)
        and one.minibatch_size == two.minibatch_size
        and first.minibatch_size == other.minibatch_size
        and batch_shapes(first.batches, one, first.steps) == batch_shapes(other.batches, two, other.steps)
        and same_model(one.model, two.model)
    )


def _assemble_group(
    parts: Sequence[Part], executor: Callable[..., Executor], device: torch.device, interrupt: Interrupt
) -> tuple[Group, list[Member]]:
    config, steps = parts[0].config, parts[0].steps
    rows = rows_of(parts, device)
    whole = rows.whole
    whole.module.train()
    objective = Objective(whole.module, copy.deepcopy(config.loss_fn)).to(device)
    objective.originals = tuple(part.config.model for part in parts)
    settings = Settings(config.autocast, config.deterministic, config.chunk_size, config.compile, steps)
    members: list[Member] = []
    for part, replicas in zip(parts, rows.parts, strict=True):
        first = members[-1].rows.stop if members else 0
        with part.here(), naming(part.config.label if len(parts) > 1 else ""):
            members.append(_member(part, range(first, first + len(part.nodes)), replicas, objective, interrupt))
    streams = [stream for member in members for stream in member.streams]
    engine = executor(whole, objective, streams, settings)
    examples = _validation_examples(parts, device)
    evaluators: dict[int, Evaluator] = {}
    for part, member in zip(parts, members, strict=True):
        if part.config.start is not None:
            with part.here(), naming(part.config.label if len(parts) > 1 else ""):
                resume(member, part.config.start)
            part.config = replace(part.config, start=None)  # which holds memory
    if len({member.done for member in members}) > 1:
        raise ValueError(f"members that train together are at different steps: {[member.done for member in members]}")
    engine.step = members[0].done
    fetching: dict[Hashable, Part] = {}
    batches = joint_batches([source(part, members[0].done, fetching) for part in parts], members[0].done)
    minibatch_size = parts[0].minibatch_size or config.minibatch_size
    if config.memory_share is not None and members[0].done < steps:
        first = next(batches)
        batches = itertools.chain([first], batches)
        minibatch_size = _fitting_minibatch(config, members, engine, first)
    for member in members:
        member.minibatch_size = minibatch_size
    # Without gradients no activations are kept, so that more examples fit at once than in training.
    batch_size = 4 * (minibatch_size or config.batch_size)
    at_once = VmapExecutor.nodes_at_once(whole, settings)
    for member, own in zip(members, examples, strict=True):
        if own is not None:
            member.evaluator = evaluators.setdefault(id(own), Evaluator(engine, own, batch_size, at_once))
    optimizers = Optimizers([member.strategy for member in members])
    workers = None
    if config.strategy.is_asynchronous:
        workers = Workers(members[0], engine, lambda few, own: executor(few, objective, own, settings), minibatch_size)
    return Group(members, rows, engine, batches, minibatch_size, optimizers, workers), members


def _member(part: Part, rows: range, replicas: Replicas, objective: Objective, interrupt: Interrupt) -> Member:
    config = part.config
    if config.start is not None and config.start.forks:
        begin_fork(config.start, replicas)
    cluster = Cluster(
        replicas,
        part.collectives,
        generator(config.seed, SHARED),
        part.batches.shard_sizes,
        part.steps,
        config.deterministic,
        config.compile is True,
        part.plan,
    )
    strategy = copy.deepcopy(config.strategy)
    strategy.settings = settings_of(config.strategy)
    if isinstance(strategy, AsynchronousStrategy):
        assert config.network is not None and config.compute is not None
        strategy.clock = VirtualClock(config.num_nodes, config.network, config.compute)
    strategy.setup(cluster)
    for own in (strategy, *strategy.communication_modules):
        check_rows(own, cluster.replicas.num_held)
    taken = [name for name in strategy.measured() if name in (*COLUMNS, *config.metrics)]
    if taken:
        raise ValueError(f"{type(strategy).__name__} measures {taken}, which name columns of the history already")
    if config.start is None and 0 in part.nodes:  # once a run
        _warn_of_what_comes_late(strategy, part)
    device = replicas.weights.device
    return Member(
        part,
        rows,
        cluster,
        strategy,
        [generator(config.seed, NODE, part.collectives.active[node], device=device) for node in part.nodes],
        objective,
        part.steps,
        draws=bool(config.callbacks) or not is_vsims_own(config.strategy),
        clients=Clients(strategy, cluster, part.plan.store) if part.plan is not None and part.plan.renews else None,
        interrupt=interrupt,
    )


def _warn_of_what_comes_late(strategy: Strategy, part: Part) -> None:
    late = [
        f"{type(strategy).__name__}: {type(module).__name__} first acts after step {module.first_step}"
        for module in strategy.communication_modules
        if module.first_step > part.steps
    ]
    if part.plan is not None and isinstance(part.config.participation, Schedule | Trace):
        first = part.plan.segment(1)
        if len(first.nodes) == part.config.num_nodes and part.steps <= first.last < sys.maxsize:
            late.append(f"{type(part.config.participation).__name__}: nodes first leave after step {first.last}")
    for one in late:
        warnings.warn(f"too few steps for {one}, and the run ends after {part.steps}", UserWarning, stacklevel=2)


def source(part: Part, done: int, fetching: dict[Hashable, Part]) -> Source:
    """Return the batches of a part after so many steps.

    Args:
        fetching: the first part of every order, which fetches for the others.
    """
    config = part.config
    runs_code, shared = one_in_memory(part.batches) is None, is_vsims_own(config.strategy)
    when = () if part.plan is None else (part.plan.segment(done + 1), *part.plan.missed(done + 1))
    same = (config.seed, config.num_nodes, config.batch_size, id(config.train_dataset), when)
    key: Hashable = same if shared or not runs_code else id(part)
    if runs_code:  # what is drawn where one fetches is drawn for all, who draw nothing else
        part.globals = fetching.setdefault(key, part).globals
    return Source(part.batches, key, part.here if runs_code else nullcontext)


def _validation_examples(parts: Sequence[Part], device: torch.device) -> list[Any]:
    """Return each part's batch (N, …) of validation examples on `device`, None without validation data.

    Parts with equal examples get one batch, on which they are measured together.
    """
    found: list[Any] = []
    for part in parts:
        config, examples = part.config, None
        if config.val_dataset is not None:
            with part.here():  # a dataset may draw from the global generators
                (dataset,) = resolve(config.val_dataset, config.num_nodes, range(1), False, "val_dataset")
                examples = first_examples(dataset, config.val_size, config.dataloader_kwargs.get("collate_fn"))
            known = next((other for other in found if _equal_examples(other, examples)), None)
            examples = tree_map(lambda t: t.to(device), examples) if known is None else known
        found.append(examples)
    return found


def _equal_examples(one: Any, other: Any) -> bool:
    ours, theirs = tree_leaves(one), tree_leaves(other)
    return len(ours) == len(theirs) and all(
        a.shape == b.shape and a.dtype == b.dtype and torch.equal(a.cpu(), b) for a, b in zip(ours, theirs, strict=True)
    )


def _fitting_minibatch(config: RunConfig, members: Sequence[Member], engine: Executor, batch: Any) -> int | None:
    """Return the largest minibatch that fits on all nodes into their share of memory, None for the whole batch."""
    assert config.memory_share is not None
    cluster = members[0].cluster
    device = cluster.weights.device
    total = total_bytes(device)
    batch = tree_map(lambda t: t.to(device), batch)
    optimizers = [member.strategy.optim for member in members]
    size = fitting_minibatch(engine, optimizers, batch, config.batch_size, config.memory_share * total)
    with cluster.collectives.unbilled():
        rows = torch.full((cluster.replicas.num_held,), size, device=device)
        size = int(cluster.collectives.all_gather(rows, label="minibatch sizes").min())
    if size == 0:
        raise ValueError(
            f"max_memory_usage leaves this process {config.memory_share * total / 1e9:.3g} GB of the {total / 1e9:.3g} "
            f"GB of {device.type}, and a minibatch of one example a node does not fit: raise it, or take fewer nodes "
            "or a smaller model"
        )
    return None if size == config.batch_size else size
