"""Save a run, resume it, or fork another run from its checkpoint."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vsim.checkpoint.files import Checkpoint, packed, unpacked
from vsim.checkpoint.folder import checkpoint_path, prune
from vsim.checkpoint.tree import Encoded, Filler, cut, encoded, first_rows, joined, own_of
from vsim.checkpoint.undeclared import Contents, changed, contents_of, line_for
from vsim.cluster.optim import OptimSpec
from vsim.cluster.optimizers import StackedOptimizer, forget, parts_of, torch_optimizers
from vsim.cluster.randomness import set_global_states
from vsim.cluster.replicas import Replicas
from vsim.cluster.state import CheckpointError, owners
from vsim.engine.objective import listed
from vsim.private_torch import mark_stepped
from vsim.records.describe import CHANGED, HORIZON, VERSIONS, differences, settings_of_run
from vsim.training.lasting import PYTHON, attributes_of, restore, set_python, shared_state, stacked_state
from vsim.training.tracked import TrackedRun


def undeclared(run: TrackedRun) -> Contents:
    """Return the contents of the attributes that the strategy does not declare."""
    cluster, strategy = run.cluster, run.strategy
    replicas = cluster.replicas
    known = (cluster, cluster.collectives, run.ledger, run.presence.plan, replicas, replicas.module, cluster.generator)
    memory = {"weights": replicas.weights, "gradients": replicas.grads, **replicas.buffers}
    return contents_of(strategy, (*known, getattr(strategy, "model", None), strategy.optim), memory)


def check_declared(run: TrackedRun) -> None:
    """Raise a CheckpointError if undeclared attributes have changed, because a checkpoint would not hold them.

    The tensors of modules that PyTorch does not register are such attributes of the model.
    """
    run.objective.check_savable()
    parts, rows = owners(run.strategy), len(run.rows)
    if found := changed(run.keeping.undeclared, undeclared(run)):
        lines = (line_for(name, vars(parts[part]).get(name), rows) for part, name in found)
        raise CheckpointError(
            f"{listed([f'{part}.{name}' for part, name in found])} changed since the setup and is not declared, so "
            "that no checkpoint would hold it, and no node would take it along. Where it is made, write "
            f"{'; '.join(lines)}: keep_stacked for what has a row for each node, keep_shared for what is equal on all. "
            "What follows from other attributes, or is no state, is named in derived"
        )


def _settings(run: TrackedRun) -> dict[str, Any]:
    run.keeping.settings = run.keeping.settings or settings_of_run(run)
    return run.keeping.settings


# Saving ---------------------------------------------------------------------------------------------------------------


def begin(run: TrackedRun) -> None:
    """Record the strategy's undeclared attributes before training, and raise an error if state cannot be saved."""
    run.keeping.undeclared = undeclared(run)
    if run.spec.saving is not None:
        _settings(run)  # in all processes
        if run.spec.saving.wanted:
            _encoded(run)


def save_if_due(run: TrackedRun, stops: bool) -> bool:
    """Save a run after a step if a checkpoint is due, or if the run stops here. Every process has to call this.

    Returns:
        Whether the user's folder is up to date. If saving failed, a warning gives the reason.
    """
    saving = run.spec.saving
    if saving is None:
        return False
    try:
        if stops or run.checkpoint_is_due:
            _save(run, saving.folder)
    except (CheckpointError, OSError) as error:  # for instance, the disk is full; the run itself is intact
        warnings.warn(f"step {run.done} could not be saved, and training continues: {error}", UserWarning, stacklevel=2)
        return False
    return saving.wanted


def _save(run: TrackedRun, folder: Path) -> None:
    run.check_weights()
    if run.is_first and not run.objective.has_warned and (unsaved := run.objective.unsaved()):
        run.objective.has_warned = True
        warnings.warn(
            f"the model changes {listed(unsaved)} in forward, which a checkpoint does not hold: make it a buffer "
            "(register_buffer), or define get_extra_state and set_extra_state",
            UserWarning,
            stacklevel=2,
        )
    checkpoint = captured(run)
    try:
        if run.is_first:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # only a temporary folder may be missing
            checkpoint.save(checkpoint_path(folder, run.done))
            prune(folder, run.done)
    finally:
        if not run.is_alone:  # wait until the file is written, as other processes may read the folder
            run.cluster.collectives.of_processes(None)


def captured(run: TrackedRun) -> Checkpoint:
    """Return the checkpoint of a run between two steps.

    With several processes, the first one gathers the state of all nodes. In one process, the checkpoint's tensors share
    the run's memory.

    Raises:
        CheckpointError: the run stopped in the middle of a step, or has state that cannot be saved.
    """
    history = run.history
    if run.cluster.step != run.done or run.done not in history["step"][-1:]:
        raise CheckpointError(
            f"the last run stopped in the middle of step {run.cluster.step}, so that nothing whole is left of it in "
            "memory; resume from a checkpoint that it saved, or start again"
        )
    stacked: dict[str, Encoded] = {}
    shared: dict[str, Encoded] = {}
    problem, held = "", [len(run.nodes)]
    try:
        check_declared(run)
        stacked, shared = _encoded(run)
    except CheckpointError as error:
        problem = str(error)
    if not run.is_alone:
        held = [len(nodes) for nodes in run.cluster.collectives.ranges]
        problem, stacked, shared = _gathered(run, problem, stacked, shared)
    if problem:
        raise CheckpointError(problem)
    return Checkpoint(run.done, history, _settings(run), held, stacked, shared)


def _encoded(run: TrackedRun) -> tuple[dict[str, Encoded], dict[str, Encoded]]:
    rows, shared = len(run.rows), {**shared_state(run), "process": run.random_states}
    return (
        {name: encoded(value, name, True, rows) for name, value in stacked_state(run).items()},
        {name: encoded(value, name) for name, value in shared.items()},
    )


def _gathered(
    run: TrackedRun, problem: str, stacked: dict[str, Encoded], shared: dict[str, Encoded]
) -> tuple[str, dict[str, Encoded], dict[str, Encoded]]:
    """Return the first problem of any process. If there is none, the first process also returns the joined state."""
    collectives = run.cluster.collectives
    text, contents = packed([stacked, shared])
    gathered = collectives.of_processes([problem, text, {digest: len(flat) for digest, flat in contents.items()}])
    if problems := [one for one, *_ in gathered if one]:
        return problems[0], {}, {}
    # Each content is sent once, by the first process that has it.
    first = {d: (rank, n) for rank, (*_, sizes) in reversed([*enumerate(gathered)]) for d, n in sizes.items()}
    for digest, (rank, size) in first.items():
        flat = contents.get(digest, torch.empty(size, dtype=torch.uint8))
        flat = collectives.from_process(flat, rank)
        if run.is_first:
            contents[digest] = flat
    if not run.is_first:
        return "", {}, {}
    trees = [unpacked(own, contents) for _, own, _ in gathered]
    held = [len(nodes) for nodes in collectives.ranges]
    whole = ({n: joined([t[i][n] for t in trees], held, i == 0) for n in trees[0][i]} for i in range(2))
    return "", *whole  # type: ignore[return-value]


# Rows that move -------------------------------------------------------------------------------------------------------


def rows_of(
    run: TrackedRun, rows: Sequence[int], matrix: bool = False, sent: Mapping[str, Encoded] | None = None
) -> dict[str, Encoded]:
    """Return the encoded state of these rows of a run.

    Args:
        matrix: whether to include weights and buffers. sent: the state of row −1, which another process holds.
    """
    held, found = [len(run.rows)], {}
    for name, value in stacked_state(run).items():
        if sent and max(rows) < 0:
            found[name] = cut(sent[name], [0] * len(rows), [1])
        elif sent or matrix or not _is_in_matrix(name):
            own = encoded(value, name, True, *held)
            both = joined([own, sent[name]], [*held, 1], True) if sent else own
            found[name] = cut(both, [row % (held[0] + 1) for row in rows], [*held, 1] if sent else held)
    return found


def fill_rows(run: TrackedRun, state: Mapping[str, Encoded], filler: Filler) -> None:
    """Fill the rows of a run, whose number may have changed, with the state that `rows_of` returned.

    Raises:
        ValueError: weights or buffers have other shapes than in this run.
    """
    forget(run.strategy.optim)
    live = stacked_state(run)
    if lost := [name for name in live if name not in state and not _is_in_matrix(name) and name not in PYTHON]:
        raise LookupError(f"no state of {', '.join(lost)}")
    live |= {name: first_rows(live[name], made, len(run.rows)) for name, made in run.presence.made.items()}
    filled = {name: filler.fill(own, live[name], name) for name, own in state.items()}
    if any(own is not live[name] for name, own in filled.items() if _is_in_matrix(name)):
        raise ValueError("weights or buffers have other shapes")
    restore(run, filled)


def _is_in_matrix(name: str) -> bool:
    return name == "weights" or name.startswith("buffer ")


# Resuming -------------------------------------------------------------------------------------------------------------


def resume(run: TrackedRun, checkpoint: Checkpoint) -> None:
    """Restore the checkpoint's state in a newly set up run, including the global random generators.

    Raises:
        CheckpointError: the checkpoint is from another run (the message names the differences), or from a step beyond
            this run's last step.
    """
    if not checkpoint.forks:
        _check_same(run, checkpoint)
    if checkpoint.step > run.max_steps or (checkpoint.forks and checkpoint.step == run.max_steps):
        raise CheckpointError(
            f"the checkpoint is at step {checkpoint.step}, and max_steps={run.max_steps} is not beyond it; give a "
            "larger max_steps"
        )
    last = checkpoint.history.last
    run.starts = checkpoint.forks
    run.ledger.position.begin(checkpoint.step, "end")
    run.examples = int(last("examples"))
    run.tokens = int(tokens) if (tokens := last("tokens")) == tokens else 0  # NaN: no tokens
    try:
        if checkpoint.forks:
            _continue_as_fork(run, checkpoint)
            return
        run.seconds, run.measuring.seconds = last("seconds"), last("validation_seconds")
        _restore(run, checkpoint)
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"the state in the checkpoint at step {checkpoint.step} cannot be restored: {error!r}"
        ) from error
    run.ledger.continue_from(checkpoint.ledger)


def _restore(run: TrackedRun, checkpoint: Checkpoint) -> None:
    cluster, rows, held = run.cluster, [*run.cluster.replicas.nodes], checkpoint.held
    filler = Filler(cluster.collectives, cluster.weights.device)
    fill_rows(run, {name: cut(own, rows, held) for name, own in checkpoint.stacked.items()}, filler)
    filled = {
        name: filler.fill(own_of(checkpoint.shared[name], rows, held), live, name)
        for own in run.keeping.lasting
        for name, live in own.shared().items()
        if name in checkpoint.shared or not own.may_be_new
    }
    filler.check()
    restore(run, filled)
    if held == [len(nodes) for nodes in cluster.collectives.ranges]:  # every process holds as many nodes as before
        states = own_of(checkpoint.shared["process"], [*run.nodes], held)
        set_global_states(
            Filler(cluster.collectives, torch.device("cpu")).fill(states, None, "process"), cluster.weights.device
        )


def _check_same(run: TrackedRun, checkpoint: Checkpoint) -> None:
    saved, given = dict(checkpoint.settings), dict(_settings(run))
    (before, now), versions = ([side.pop(name, None) for side in (saved, given)] for name in (HORIZON, VERSIONS))
    changes = list(differences(saved, given, CHANGED))
    if before != now:
        changes.append(
            f"the learning-rate schedule was over {before} steps and is over {now} (max_steps of the run, or the "
            f"strategy's; with max_steps={before} given to the strategy it stays as it was)"
        )
    if changes:
        where = f"load_checkpoint({str(checkpoint.path)!r})" if checkpoint.path else "the checkpoint"
        raise CheckpointError(
            f"the checkpoint at step {checkpoint.step} is of another run: {'; '.join(changes)}. To start from its "
            f"weights all the same, fork: resume={where}.fork()"
        )
    if versions[0] != versions[1] and run.is_first:
        warnings.warn(f"saved with {versions[0]}, resumed with {versions[1]}: bits may differ", UserWarning, 2)


# Forks ----------------------------------------------------------------------------------------------------------------


def begin_fork(checkpoint: Checkpoint, replicas: Replicas) -> None:
    """Set all nodes to the mean of the checkpoint's nodes, before the strategy is set up."""
    checkpoint.check_layout(replicas)
    replicas.weights.copy_(checkpoint.mean_weights())
    for name, mean in checkpoint.mean_buffers().items():
        replicas.buffers[name].copy_(mean)


def _continue_as_fork(run: TrackedRun, checkpoint: Checkpoint) -> None:
    replicas = run.cluster.replicas
    for optimizer in torch_optimizers(run.strategy.optim):
        mark_stepped(optimizer)
    for scheduler in checkpoint.step * [*chain(*run.strategy.schedulers)]:
        scheduler.step()
    filler, rows = Filler(run.cluster.collectives, replicas.weights.device), [*replicas.nodes]
    for name, owner, attribute, _ in attributes_of(run.strategy):
        if attribute in owner.carried and name in checkpoint.shared:
            setattr(owner, attribute, filler.fill(checkpoint.shared[name], getattr(owner, attribute), name))
    is_alike = len(checkpoint.weights) == run.cluster.num_nodes and run.presence.plan is None
    own_rows = rows if is_alike else [0] * len(run.rows)  # otherwise all nodes start from the first one's attributes
    saved = {
        name: cut(checkpoint.stacked[name], own_rows, checkpoint.held) for name in PYTHON if name in checkpoint.stacked
    }
    set_python(run, {name: filler.fill(own, None, name) for name, own in saved.items()})
    if not is_alike:
        return
    own = slice(replicas.nodes.start, replicas.nodes.stop)
    before, now = (
        {"device": s["device"], "deterministic": s["deterministic"], "optimizer": s["strategy"]["optim_spec"]["class"]}
        for s in (checkpoint.settings, _settings(run))
    )
    alike = [name for name in now if before[name] == now[name]]
    if "device" in alike:
        filler.fill(
            cut(checkpoint.stacked["streams"], rows, checkpoint.held), run.generators[: len(run.rows)], "streams"
        )
    for name, buffer in checkpoint.buffers.items():
        replicas.buffers[name].copy_(buffer[own])
    replicas.weights.copy_(checkpoint.weights[own])
    if checkpoint.keeps_optimizer and len(alike) == 3:
        _keep_optimizer(run, cut(checkpoint.stacked["optimizer"], rows, checkpoint.held), filler)


def _keep_optimizer(run: TrackedRun, saved: Encoded, filler: Filler) -> None:
    """Restore the inner optimizers' state; clear it if the saved state does not fit."""
    optim = run.strategy.optim
    optimizers = torch_optimizers(optim)
    settings = copy.deepcopy([[{**group, "params": []} for group in o.param_groups] for o in optimizers])
    try:
        filler.fill(saved, optim, "optimizer")
        specs = run.strategy.optim_spec.parts(run.cluster.replicas.module)
        fits = all(_fits(part, spec) for part, (spec, _) in zip(parts_of(optim), specs, strict=False))
    except CheckpointError:
        fits = False
    for optimizer, groups in zip(optimizers, settings, strict=True):
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group.update({**own, "params": group["params"]})
        if not fits:
            optimizer.state.clear()


def _fits(part: StackedOptimizer, spec: OptimSpec) -> bool:
    """Return whether an optimizer has all state that its options need, for each node if it steps all nodes."""
    names, for_all = spec.state_names(), isinstance(part, Optimizer)
    for p, own in (pair for optimizer in torch_optimizers(part) for pair in optimizer.state.items()):
        tensors = [value for value in own.values() if isinstance(value, Tensor) and value.dim()]
        if not own.keys() >= names or (for_all and any(value.shape != p.shape for value in tensors)):
            return False
    return True
