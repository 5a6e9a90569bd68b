"""Save a run between two steps. With several processes, the first one gathers the state of all nodes and writes."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import torch

from vsim.checkpoint.files import Checkpoint, packed, unpacked
from vsim.checkpoint.folder import checkpoint_path, prune
from vsim.checkpoint.tree import Encoded, encoded, joined
from vsim.checkpoint.undeclared import Contents, changed, contents_of, line_for
from vsim.cluster.state import CheckpointError, owners
from vsim.engine.objective import listed
from vsim.history.agreement import settings_of_run
from vsim.runs.lasting import shared_state, stacked_state
from vsim.runs.tracked import TrackedRun


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
            "checkpoints and moving nodes lose it. Where it is made, write "
            f"{'; '.join(lines)}: keep_stacked for what has a row for each node, keep_shared for what is equal on all. "
            "What follows from other attributes, or is no state, is named in derived"
        )


def kept_settings(run: TrackedRun) -> dict[str, Any]:
    """Return the settings that must be equal in a resumed run; the first call has to be made by every process."""
    run.keeping.settings = run.keeping.settings or settings_of_run(run)
    return run.keeping.settings


def begin(run: TrackedRun) -> None:
    """Record the strategy's undeclared attributes before training, and raise an error if state cannot be saved."""
    run.keeping.undeclared = undeclared(run)
    if run.spec.saving is not None:
        kept_settings(run)  # in all processes
        if run.spec.saving.wanted:
            _encoded(run)


def save_if_due(run: TrackedRun, stops: bool) -> bool:
    """Save a run after a step if a checkpoint is due, or if the run stops here. Every process has to call this.

    Returns:
        Whether the run is saved in the user's folder as often as asked. If saving failed, a warning gives the reason.
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
    return Checkpoint(run.done, history, kept_settings(run), held, stacked, shared)


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
