"""Save a run, resume it, or fork another run from its checkpoint."""

from __future__ import annotations

import copy
import json
import warnings
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vsim.checkpoint.files import Checkpoint, packed, unpacked
from vsim.checkpoint.folder import checkpoint_path, prune
from vsim.checkpoint.settings import HORIZON, VERSIONS, differences, settings_of_run
from vsim.checkpoint.tree import Restorer, Snapshot, cut, merged, objects_in
from vsim.cluster.optim import OptimSpec
from vsim.cluster.optimizers import StackedOptimizer, parts_of, torch_optimizers
from vsim.cluster.randomness import set_global_states
from vsim.cluster.replicas import Replicas
from vsim.cluster.state import CheckpointError, name_of
from vsim.engine.objective import listed
from vsim.private_torch import mark_stepped
from vsim.records.history import History
from vsim.training.callbacks import savable
from vsim.training.clients import owners
from vsim.training.run import Run


def _roots(run: Run) -> dict[str, tuple[Any, str | None]]:
    """Return name → (object, placement), in the order in which they are saved and restored."""
    replicas, strategy = run.cluster.replicas, run.strategy
    return {
        "weights": (replicas.weights, "stacked"),
        "buffers": (replicas.buffers, "stacked"),
        "generator": (run.cluster.generator, "shared"),
        "streams": (list(run.streams), "rows"),
        "loss": (run.objective.loss_fn, "shared"),
        "frozen": (run.cluster.frozen, "shared"),
        "optimizer": (strategy.optim, "stacked"),
        # If nodes have separate optimizers, their schedules are equal: save the first node's.
        "schedules": ([own[0] for own in strategy.schedulers if own], "shared"),
        "strategy": (strategy, None),
        **({} if run.clients is None else {"clients": (run.clients, "shared")}),
        **{f"callback {name}": (one, "shared") for name, one in savable(run.spec.callbacks).items()},
        "extra state": (run.objective.extra_states(run.rows), "rows"),
    }


def _known(run: Run) -> dict[str, Any]:
    cluster, replicas = run.cluster, run.cluster.replicas
    return {
        "cluster": cluster,
        "collectives": cluster.collectives,
        "ledger": run.ledger,
        "replicas": replicas,
        "stacked model": run.strategy.model,
        **{name: getattr(replicas, name) for name in ("module", "frozen", "layout")},
        **{f"layout[{i}]": columns for i, columns in enumerate(replicas.layout)},
        "weights": replicas.weights,
        "gradients": replicas.grads,
    }


def _settings(run: Run) -> dict[str, Any]:
    run.settings = run.settings or settings_of_run(run)
    return run.settings


# Saving ---------------------------------------------------------------------------------------------------------------


def begin(run: Run) -> None:
    """Take a snapshot before training, to report state that cannot be saved."""
    if run.spec.saving is not None:
        _settings(run)  # in all processes
        run.fixed = _snapshot(run).fixed if run.spec.saving.wanted else {}


def save_if_due(run: Run, stops: bool) -> bool:
    """Save a run after a step if a checkpoint is due, or if the run stops here. Every process calls this.

    Returns:
        Whether the user's folder is up to date; if saving failed, a warning says why.
    """
    saving = run.spec.saving
    if saving is None:
        return False
    try:
        if stops or run.is_saved:
            _save(run, saving.folder)
    except CheckpointError as error:
        if saving.wanted:
            raise
        warnings.warn(f"the interrupted run cannot be resumed: {error}", UserWarning, stacklevel=2)
    except OSError as error:  # for instance, the disk is full; the run's state is intact
        warnings.warn(f"step {run.done} could not be saved, and training continues: {error}", UserWarning, stacklevel=2)
        return False
    return saving.wanted


def _save(run: Run, folder: Path) -> None:
    run.check_weights()
    if 0 in run.nodes and not run.objective.has_warned and (unsaved := run.objective.unsaved()):
        run.objective.has_warned = True
        warnings.warn(
            f"the model changes {listed(unsaved)} in forward, which a checkpoint does not hold: make it a buffer "
            "(register_buffer), or define get_extra_state and set_extra_state",
            UserWarning,
            stacklevel=2,
        )
    checkpoint = captured(run)
    try:
        if 0 in run.nodes:
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # only a temporary folder may not exist yet
            checkpoint.save(checkpoint_path(folder, run.done))
            prune(folder, run.done)
    finally:
        if not run.is_alone:  # wait until the file is written, as other processes may read the folder
            run.cluster.collectives.of_processes(None)


def captured(run: Run, apart: bool = False) -> Checkpoint:
    """Return the checkpoint of a run between two steps.

    With several processes, the first node's process gathers the state of all nodes. In one process, or with `apart`,
    the checkpoint's tensors share the run's memory.

    Args:
        apart: take only this process's nodes.

    Raises:
        CheckpointError: the run stopped in the middle of a step, or has state that cannot be saved.
    """
    if apart:
        run.objective.check_portable()
    history = run.history
    if run.cluster.step != run.done or (history is not None and run.done not in history["step"][-1:]):
        raise CheckpointError(
            f"the last run stopped in the middle of step {run.cluster.step}, so that nothing whole is left of it in "
            "memory; resume from a checkpoint that it saved, or start again"
        )
    snapshot = _snapshot(run)
    for path, what in snapshot.fixed.items():
        if run.fixed and run.fixed.get(path) != what:
            raise CheckpointError(
                f"{path} is a {what} that was made after the setup, and could not be filled in a run that resumes; "
                "make it in the setup, or hold tensors, numbers, lists and dicts instead"
            )
    state = snapshot.tree if run.is_alone or apart else _gathered(run, snapshot.tree)
    return Checkpoint(run.done, history or History(), {} if apart else _settings(run), state)


def _snapshot(run: Run) -> Snapshot:
    roots = {**_roots(run), "process": (run.random_states, "shared")}
    if not run.is_alone:  # one row for each node, so that the checkpoint tells which process held how many
        roots["weights"] = run.cluster.weights, "stacked"
    return Snapshot(roots, _known(run), len(run.streams))


def _gathered(run: Run, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of all processes, in the first node's process. The other processes send their parts."""
    collectives = run.cluster.collectives
    text, contents = packed(tree)
    own = [json.loads(text), {digest: len(flat) for digest, flat in contents.items()}]
    told = collectives.of_processes(own)
    # Each content is sent once, by the first process that has it.
    first = {d: (rank, n) for rank, (_, sizes) in reversed([*enumerate(told)]) for d, n in sizes.items()}
    for digest, (rank, size) in first.items():
        flat = contents.get(digest, torch.empty(size, dtype=torch.uint8))
        flat = collectives.from_process(flat, rank)
        if 0 in run.nodes:
            contents[digest] = flat
    if 0 not in run.nodes:
        return {}
    return dict(unpacked(json.dumps({name: merged([own[name] for own, _ in told]) for name in tree}), contents))


# Resuming -------------------------------------------------------------------------------------------------------------


def resume(run: Run, checkpoint: Checkpoint) -> None:
    """Restore the checkpoint's state in a newly set up run, including the global random generators.

    Raises:
        CheckpointError: the checkpoint is of another run (the message names the differences), or is beyond this run's
            last step.
    """
    same = run.continues is not None  # the same run, with other nodes
    if not checkpoint.forks and not same:
        _check_same(run, checkpoint)
    if checkpoint.step > run.max_steps or (checkpoint.forks and checkpoint.step == run.max_steps):
        raise CheckpointError(
            f"the checkpoint is at step {checkpoint.step}, and max_steps={run.max_steps} is not beyond it; give a "
            "larger max_steps"
        )
    last = checkpoint.history.last
    run.starts = checkpoint.forks
    run.cluster.completed = run.cluster.step = checkpoint.step
    run.examples = int(last("examples"))
    run.tokens = int(tokens) if (tokens := last("tokens")) == tokens else 0  # NaN: no tokens
    try:
        if checkpoint.forks:
            _continue_as_fork(run, checkpoint)
            return
        run.seconds, run.validation_seconds = last("seconds"), last("validation_seconds")
        _restore(run, checkpoint)
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"the state in the checkpoint at step {checkpoint.step} cannot be restored: {error!r}"
        ) from error
    if not same:
        run.ledger.continue_from(checkpoint.ledger)


def _restore(run: Run, checkpoint: Checkpoint) -> None:
    restorer, rows, moved = _restorer(run, checkpoint)
    state, held, replicas = checkpoint.state, checkpoint.held, run.cluster.replicas
    restored = {
        name: restorer.root(cut(state[name], rows, held), live, name, placement)
        for name, (live, placement) in _roots(run).items()
        if name in state or not name.startswith(("callback ", "frozen"))  # new here, or not in an older checkpoint
    }
    run.cluster.frozen = restored.get("frozen", {})
    pairs = [(replicas.weights, restored["weights"])]
    pairs += [(buffer, restored["buffers"].get(name)) for name, buffer in replicas.buffers.items()]
    if any(live is not found for live, found in pairs):
        raise ValueError("weights or buffers have other shapes")
    for own in run.strategy.schedulers:
        for other in own[1:]:
            other.load_state_dict(copy.deepcopy(own[0].state_dict()))
    run.objective.set_extra_states(run.rows, restored["extra state"])
    if not moved:
        states = restorer.root(cut(state["process"], rows, held), {}, "process", "shared")
        set_global_states(states, replicas.weights.device)


def _restorer(run: Run, checkpoint: Checkpoint) -> tuple[Restorer, list[int], bool]:
    """Return a Restorer, the checkpoint's rows for the nodes of this process, and whether the rows have moved."""
    held = checkpoint.held
    if run.continues is None:
        rows = list(run.cluster.replicas.nodes)
        moved = held != [len(nodes) for nodes in run.cluster.collectives.ranges]
    else:
        rows = list(run.continues)
        moved = rows != list(range(sum(held)))
    return Restorer(_known(run), moved), rows, moved


def _check_same(run: Run, checkpoint: Checkpoint) -> None:
    saved, given = dict(checkpoint.settings), dict(_settings(run))
    (before, now), versions = ([side.pop(name, None) for side in (saved, given)] for name in (HORIZON, VERSIONS))
    changes = list(differences(saved, given))
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
    if versions[0] != versions[1] and 0 in run.nodes:
        warnings.warn(f"saved with {versions[0]}, resumed with {versions[1]}: bits may differ", UserWarning, 2)


# Forks ----------------------------------------------------------------------------------------------------------------


def begin_fork(checkpoint: Checkpoint, replicas: Replicas) -> None:
    """Set all nodes to the mean of the checkpoint's nodes, before the strategy is set up."""
    checkpoint.check_layout(replicas)
    replicas.weights.copy_(checkpoint.mean_weights())
    for name, mean in checkpoint.mean_buffers().items():
        replicas.buffers[name].copy_(mean)


def _continue_as_fork(run: Run, checkpoint: Checkpoint) -> None:
    replicas = run.cluster.replicas
    for optimizer in torch_optimizers(run.strategy.optim):
        mark_stepped(optimizer)
    for scheduler in checkpoint.step * [*chain(*run.strategy.schedulers)]:
        scheduler.step()
    restorer, rows, _ = _restorer(run, checkpoint)
    _carry(run, checkpoint, restorer)
    if len(checkpoint.weights) != run.cluster.num_nodes or run.plan is not None:
        return
    own = slice(replicas.nodes.start, replicas.nodes.stop)
    alike = [
        name
        for name in ("device", "deterministic", "strategy.optim_spec.cls")
        if checkpoint.settings.get(name) == _settings(run).get(name)
    ]
    if "device" in alike:
        restorer.root(cut(checkpoint.state["streams"], rows, checkpoint.held), run.streams, "streams", "rows")
    for name, buffer in checkpoint.buffers.items():
        replicas.buffers[name].copy_(buffer[own])
    if not replicas.shares_weights:
        replicas.weights.copy_(checkpoint.weights[own])
        if checkpoint.keeps_optimizer and len(alike) == 3:
            _keep_state(run, cut(checkpoint.state["optimizer"], rows, checkpoint.held), restorer)


def _carry(run: Run, checkpoint: Checkpoint, restorer: Restorer) -> None:
    """Restore attributes that a strategy's parts declare as `carried`, if the checkpoint has a part of that class."""
    for owner in owners(run.strategy):
        alike = [o for o in objects_in(checkpoint.state["strategy"]) if o["class"] == name_of(type(owner))]
        for name in owner.carried if alike else ():
            saved = dict(alike[0]["items"])[name]
            setattr(owner, name, restorer.root(saved, getattr(owner, name), name, "shared"))


def _keep_state(run: Run, state: Any, restorer: Restorer) -> None:
    """Restore the inner optimizers' state, or clear it if it does not fit, such as one row for all nodes."""
    optim = run.strategy.optim
    optimizers = torch_optimizers(optim)
    settings = copy.deepcopy([[{**group, "params": []} for group in o.param_groups] for o in optimizers])
    try:
        restorer.root(state, optim, "optimizer", "stacked")
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
    """Return whether an optimizer has all state that its options imply, and for all nodes if the nodes share it."""
    names, for_all = spec.state_names(), isinstance(part, Optimizer)
    for p, own in (pair for optimizer in torch_optimizers(part) for pair in optimizer.state.items()):
        tensors = [value for value in own.values() if isinstance(value, Tensor) and value.dim()]
        if not own.keys() >= names or (for_all and any(value.shape != p.shape for value in tensors)):
            return False
    return True
