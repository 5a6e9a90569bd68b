"""The training loop, once, for every backend and for any number of members."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from vsim.arguments import naming, retold
from vsim.cluster.optimizers import torch_optimizers
from vsim.cluster.randomness import global_states, same_states
from vsim.data.joint import sizes_of
from vsim.engine.allocator import keeping_freed_memory
from vsim.engine.misfit import explained
from vsim.records.report import StepReport
from vsim.training import saving
from vsim.training.attendance import attend
from vsim.training.callbacks import hear
from vsim.training.evaluate import replica_spread, validate
from vsim.training.interrupt import Interrupted
from vsim.training.member import Group, Member, Run
from vsim.training.regroup import regroup


def train(run: Run) -> None:
    """Train to the last step, reporting every step as it is done.

    Raises:
        Interrupted: after a step, when any process of the run was asked to stop.
    """
    try:
        with run.interrupt:
            for member in run.training:
                with naming(member.config.label if len(run.members) > 1 else ""):
                    saving.begin(member)
            for _ in steps(run):
                pass
            if run.is_alone and run.interrupt.requested:
                raise Interrupted(run.max_steps, run.members[0].config.saving)
    finally:
        end(run)


def end(run: Run) -> None:
    """Release what only training needs, and note the states in which training left the process's random generators."""
    for member in run.members:
        device = member.cluster.weights.device
        if member.globals is None:
            member.left_states = global_states(device)
    for group in run.groups:
        group.batches = iter(())  # ends the worker processes of a DataLoader


def steps(run: Run) -> Iterator[int]:
    """Train, and yield the number of every step when it is done and reported.

    Beside `train`, no interrupt is awaited, and `end` is left to the caller.
    """
    with keeping_freed_memory():
        yield from _steps(run)


def _steps(run: Run) -> Iterator[int]:
    for member in run.training:
        with _own(run, member):
            for callback in member.config.callbacks:
                callback.on_start(member)
    first = min((member.done for member in run.unfinished), default=run.max_steps)
    for member in run.training:
        member.known_events = len(member.ledger)
    attend(run, first + 1)
    _report_start(run)
    if run.watch is not None:
        run.watch(run)
    _tell_ends(run, run.training)
    for step in range(first + 1, run.max_steps + 1):
        if step > first + 1:
            attend(run, step)
        stops = False
        for group in run.groups:
            stops |= _take_step(run, group, step)
        _report(run, step)
        stops |= run.is_alone and run.interrupt.requested
        reached = [member for member in run.training if member.done == step]
        for member in reached:
            with _own(run, member):
                saving.save_if_due(member, stops)
        _tell_ends(run, reached)
        if run.watch is not None:
            run.watch(run)
        if stops:
            raise Interrupted(step, run.members[0].config.saving)
        if run.stopping is not None:
            for member in run.stopping(run):
                member.stopped = True
        if step < run.max_steps:
            regroup(run)
        yield step
        if not run.unfinished:
            return


def _take_step(run: Run, group: Group, step: int) -> bool:
    """Take step number `step` with the members of a group; return whether another process wants the run to stop."""
    members = [member for member in group.members if member.trains and member.done < member.max_steps]
    if not members:
        return False
    started = time.perf_counter()
    device = members[0].cluster.replicas.weights.device
    for member in members:
        member.cluster.step = step
        member.keep_resting()
        member.lr = member.strategy.lr
    if group.workers is not None:
        (member,) = members
        with _own(run, member):
            group.workers.take_step()
        member.seconds += time.perf_counter() - started
        return False
    try:
        batch = next(group.batches)
        if any(t.device != device for t in tree_leaves(batch)):
            batch = tree_map(lambda t: t.to(device, non_blocking=True), batch)
    except Exception as error:
        _all_leave(run, members, retold(error, f"the batches of step {step}: {error}"))
        return False
    with group.threads.of(batch):
        try:
            losses = _computed(run, group, batch, device)
        except Exception as error:  # of the model or the data, which all members of the group share
            _all_leave(run, members, explained(error, group.executor.objective, batch, 1, f"at step {step}"))
            return False
        stops = _keep_losses(run, group, losses, step, batch)
        _take_own_steps(run, group)
    members = [member for member in members if member.trains]
    seconds = time.perf_counter() - started
    num_nodes = sum(member.cluster.num_nodes for member in members)
    examples, tokens = sizes_of(batch)
    for member in members:
        nodes = member.cluster.num_nodes
        member.seconds += seconds * nodes / num_nodes
        nodes -= len(member.cluster.resting_nodes)
        member.examples += examples * nodes
        member.tokens += tokens * nodes
    return stops


def _computed(run: Run, group: Group, batch: Any, device: torch.device) -> Tensor:
    """Return the losses of a group; the gradients are where they belong then."""
    first = len(run.members) > 1 and not group.has_stepped
    before = global_states(device) if first else {}
    losses = group.losses_and_grads(batch)
    if first and not same_states(before, global_states(device)):
        _warn_of_global_draws()
    group.has_stepped = True
    return losses


def _warn_of_global_draws() -> None:
    warnings.warn(
        "the model draws from the global generators of torch, numpy or Python in forward, and all runs that train "
        "together draw from the same ones: reproducible, but not the numbers of a Trainer.fit. Give together=False, or "
        "draw by torch's functions, such as torch.rand or dropout, which take every node's own generator",
        UserWarning,
        stacklevel=2,
    )


def _keep_losses(run: Run, group: Group, losses: Tensor, step: int, batch: Any) -> bool:
    """Give every member the losses of its nodes (K,); a member with a non-finite loss leaves.

    Returns:
        Whether a process of the run has been asked to stop after this step.
    """
    stops = False
    values = losses.tolist() if run.is_alone else []
    for member, rows in group.rows:
        if not member.trains or member.cluster.step != step:
            continue
        if run.is_alone:
            member.node_losses = values[rows]
        else:
            member.node_losses, stops = _of_all_nodes(losses, run, member)
        try:
            member.check_losses(dict(zip(member.cluster.active, member.node_losses, strict=True)), batch, rows)
        except FloatingPointError as error:
            _leave(run, member, error)
        for node in member.cluster.resting_nodes:
            member.node_losses[node] = math.nan
    return stops


@torch.no_grad()
def _take_own_steps(run: Run, group: Group) -> None:
    """Let every member communicate and step. Members without a `step` of their own share calls of optimizers."""
    stepping = [member for member in group.members if member.trains and member.cluster.step > member.done]
    plain = [member for member in stepping if not member.strategy.is_per_node]
    for member in plain:
        with _own(run, member):
            member.strategy.begin_step()
    alone = group.optimizers.step({member.strategy for member in plain if member.trains})
    for member in stepping:
        if member.trains:
            with _own(run, member):
                if member.strategy in alone:
                    member.strategy.optim.step()
                member.put_back_resting()
                (member.strategy.take_step if member.strategy.is_per_node else member.strategy.finish_step)()
                if member.done != member.cluster.step:
                    raise TypeError(f"{type(member.strategy).__name__}.step() must end with super().step()")


class _own(AbstractContextManager[None]):
    """The context for code of one member: with its own random state; an error is that member's alone."""

    def __init__(self, run: Run, member: Member) -> None:
        self.run, self.member = run, member
        self.globals = member.globals.here() if member.globals is not None and member.draws else nullcontext()

    def __enter__(self) -> None:
        self.globals.__enter__()

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> bool:
        self.globals.__exit__(kind, error, trace)
        if isinstance(error, KeyboardInterrupt) and self.run.tolerant:  # in a hook: all other members finish this step
            self.run.interrupt.request()
            return True
        if not isinstance(error, Exception) or not self.run.tolerant:
            return False
        _leave(self.run, self.member, error)
        return True


def _leave(run: Run, member: Member, error: Exception) -> None:
    """Let a member leave while the others continue; raise the error if it is alone, or if nothing would be lost."""
    nothing_lost = run.ends_early and member.done == 0
    if not run.tolerant or (nothing_lost and not isinstance(error, FloatingPointError)):
        raise error
    member.error = error
    # Its rows are still computed until the others are regrouped: with harmless numbers.
    replicas = member.cluster.replicas
    for tensor in (replicas.weights, replicas.grads):
        tensor.zero_()
    for state in (s for o in torch_optimizers(member.strategy.optim) for s in o.state.values()):
        for value in state.values():
            if isinstance(value, Tensor) and value.dim():
                value.zero_()


def _all_leave(run: Run, members: Sequence[Member], error: Exception) -> None:
    for member in members:
        _leave(run, member, error)


def _report_start(run: Run) -> None:
    starting = [member for member in run.training if member.starts]
    found = _measurements(run, starting, first=True)
    for group in run.groups:
        for member in [m for m in group.members if m in starting and m.trains]:
            with _own(run, member):
                row: dict[str, float] = {"step": member.done, "examples": member.examples}
                row |= {"payload_bytes": 0, "wire_bytes": 0, "seconds": 0}
                row |= {"validation_seconds": member.validation_seconds, **found[member], **member.strategy.measured()}
                executor = group.executor
                report = StepReport(row, None, [], executor.name, member.max_steps, member.minibatch_size)
                report.preparing = executor.preparing
                _tell(run, member, report)
            member.starts = False


def _report(run: Run, step: int) -> None:
    members = [member for member in run.training if member.done == step]
    if not members:
        return
    found = _measurements(run, members)
    memory = run.memory(members[0].cluster.replicas.weights.device)
    for group in run.groups:
        name, reason = group.executor.name, group.executor.reason
        for member in group.members:
            if not member.trains or member.done != step:
                continue
            with _own(run, member):
                ledger, losses = member.ledger, member.node_losses
                row = {
                    "step": step,
                    "examples": member.examples,
                    "tokens": member.tokens or math.nan,
                    "train_loss": _mean_of_known(losses),
                    "lr": member.lr,
                    "payload_bytes": ledger.payload_bytes,
                    "wire_bytes": ledger.wire_bytes,
                    "seconds": member.seconds,
                    "validation_seconds": member.validation_seconds,
                    "memory_bytes": memory,
                    **member.strategy.measured(),
                    **found[member],
                }
                events, member.known_events = ledger[member.known_events :], len(ledger)
                report = StepReport(
                    row, member.losses_of_all, events, name, member.max_steps, member.minibatch_size, reason
                )
                _tell(run, member, report)
                if step == member.max_steps:
                    member.check_weights()


def _mean_of_known(losses: Sequence[float]) -> float:
    """Return the mean over those who have taken a step, NaN if nobody has; the others' are NaN."""
    total = sum(losses)
    if math.isnan(total):
        known = [loss for loss in losses if loss == loss]
        return sum(known) / len(known) if known else total
    return total / len(losses)


def _tell(run: Run, member: Member, report: StepReport) -> None:
    """Report a step, and let the callbacks hear of it. Of several processes that of the first node is right."""
    collectives, held = member.cluster.collectives, member.cluster.replicas.num_held
    attendance = member.ledger.attendance
    member.row, report.segment = report.row, attendance[-1] if attendance else None
    if not run.is_alone and (member.config.callbacks or member.part.plan is not None):
        values = torch.tensor([list(report.row.values())], dtype=torch.float64).expand(held, -1)
        with collectives.unbilled():
            member.row = dict(zip(report.row, collectives.broadcast(values, label="row").tolist(), strict=True))
    member.report(report if 0 in member.part.nodes else replace(report, row=member.row))
    if not member.config.callbacks:
        return
    hear(member.config.callbacks, member)
    if not run.is_alone:  # a callback may stop the run in one process alone
        with collectives.unbilled():
            last = collectives.all_gather(torch.full((held, 1), member.max_steps), label="last step")
        member.max_steps = int(last.min())


def _tell_ends(run: Run, members: Sequence[Member]) -> None:
    for member in members:
        if member.trains and member.done == member.max_steps:
            with _own(run, member):
                for callback in member.config.callbacks:
                    callback.on_end(member)


def _measurements(run: Run, members: Sequence[Member], first: bool = False) -> Mapping[Member, dict[str, float]]:
    """Return the validation and divergence columns that are due; validation always is in the first and last row."""
    found: dict[Member, dict[str, float]] = {member: {} for member in members}
    if not members:
        return found
    step = members[0].done
    on_time = first or bool(run.val_interval and step % run.val_interval == 0) or step in run.extra_validations
    due = {m for m in members if m.evaluator and (on_time or step == m.max_steps)}
    for group in run.groups if due else ():
        own = [member for member in group.members if member in due]
        started = time.perf_counter()
        for member in own:
            with _own(run, member), torch.no_grad(), member.strategy.evaluating():
                member.global_weights = member.evaluated_weights()
        own = [member for member in own if member.trains]
        try:
            with ExitStack() as evaluating, torch.no_grad():
                for member in own:
                    evaluating.enter_context(member.strategy.evaluating())
                found.update(validate(own))
        except Exception as error:  # of the model or the data: nobody's own
            _all_leave(run, own, error)
        seconds, num_nodes = time.perf_counter() - started, sum(member.cluster.num_nodes for member in own)
        for member in own:
            member.global_weights = None
            member.validation_seconds += seconds * member.cluster.num_nodes / num_nodes
    if run.correlation_interval is not None and step % run.correlation_interval == 0:
        for member in members:
            with member.cluster.collectives.unbilled():
                weights = member.cluster.collectives.all_gather(member.cluster.weights)
            found[member].update(replica_spread(weights))
    return found


def _of_all_nodes(losses: Tensor, run: Run, member: Member) -> tuple[list[float], bool]:
    """Return the losses of all nodes (K,) as numbers, and whether all stop after this step because one was asked to."""
    asked = torch.full((len(losses),), run.interrupt.requested, dtype=torch.float64)
    both = torch.stack([losses.cpu().double(), asked], dim=1)  # (R, 2): one message
    with member.cluster.collectives.unbilled():
        values, requests = member.cluster.collectives.all_gather(both, label="losses").T.tolist()
    return values, any(requests)
