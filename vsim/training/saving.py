"""Between a run and its checkpoints: when it is saved, how it resumes, and how another run forks from it."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vsim.checkpoint.files import Checkpoint, packed, unpacked
from vsim.checkpoint.fingerprint import HORIZON, differences, steady
from vsim.checkpoint.folder import checkpoint_path, prune
from vsim.checkpoint.restore import Restorer
from vsim.checkpoint.snapshot import Snapshot, merged
from vsim.cluster.optim import OptimSpec
from vsim.cluster.optimizers import StackedOptimizer, parts_of, torch_optimizers
from vsim.cluster.randomness import set_global_states
from vsim.cluster.replicas import Replicas
from vsim.cluster.state import CheckpointError
from vsim.private_torch import mark_stepped
from vsim.records.history import History
from vsim.training.run import Run


def savable(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return name → callback, of those with a state: by their class, and a number from the second of a class on."""
    found: dict[str, Any] = {}
    for one in callbacks:
        if all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")):
            name = type(one).__name__
            number = sum(known.split(" ")[0] == name for known in found)
            found[f"{name} {number + 1}" if number else name] = one
    return found


def _roots(run: Run) -> dict[str, tuple[Any, str | None]]:
    """Return name → object, in the order of saving and restoring, and its placement."""
    replicas, strategy = run.cluster.replicas, run.strategy
    return {
        "weights": (replicas.weights, "stacked"),
        "buffers": (replicas.buffers, "stacked"),
        "generator": (run.cluster.generator, "shared"),
        "streams": (list(run.streams), "stacked"),
        "loss": (run.objective.loss_fn, "shared"),
        "optimizer": (strategy.optim, "stacked"),
        "strategy": (strategy, None),
        **({} if run.clients is None else {"clients": (run.clients, "shared")}),
        **{f"callback {name}": (one, "shared") for name, one in savable(run.spec.callbacks).items()},
        "extra state": (run.objective.extra_states(run.rows), "stacked"),
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


# Saving ---------------------------------------------------------------------------------------------------------------


def begin(run: Run) -> None:
    """Take a snapshot once, so that state which cannot be saved is reported before training."""
    if run.spec.saving is not None:
        _ = run.fingerprint  # as the run begins, and in all processes
        run.fixed = _snapshot(run).fixed if run.spec.saving.wanted else {}


def save_if_due(run: Run, stops: bool) -> None:
    """Save a run after a step, if it is time to, or if it stops here. Every process calls this."""
    saving = run.spec.saving
    if saving is None:
        return
    is_due = run.done == run.max_steps or (saving.interval is not None and run.done % saving.interval == 0)
    try:
        if stops or (saving.wanted and is_due):
            _save(run, saving.folder)
    except CheckpointError as error:
        if saving.wanted:
            raise
        warnings.warn(f"the interrupted run cannot be resumed: {error}", UserWarning, stacklevel=2)


def _save(run: Run, folder: Path) -> None:
    run.check_weights()
    checkpoint = captured(run)
    if 0 in run.part.nodes:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)  # only a temporary folder is not there yet
        checkpoint.save(checkpoint_path(folder, run.done))
        prune(folder, run.done)
    if not run.is_alone:  # no process continues before the file is there: it might look into the folder
        with run.cluster.collectives.unbilled():
            run.cluster.collectives.all_gather(torch.zeros(1, 1), label="checkpoint written")


def captured(run: Run, apart: bool = False) -> Checkpoint:
    """Return the checkpoint of a run between two steps; of processes that of all at the first node, or `apart`.

    In the simulator, and apart, its tensors share the memory of the run.

    Raises:
        CheckpointError: the run stopped in the middle of a step, or has a state that cannot be saved.
    """
    if apart:
        run.objective.check_portable()
    history = run.history
    if run.cluster.step != run.done or (history is not None and run.done not in history["step"][-1:]):
        raise CheckpointError(
            f"the last run stopped in the middle of step {run.cluster.step}, so that nothing whole is left of it in "
            "memory; resume from a checkpoint that it saved, or start anew"
        )
    snapshot = _snapshot(run)
    for path, what in snapshot.fixed.items():
        if run.fixed and run.fixed.get(path) != what:
            raise CheckpointError(
                f"{path} is a {what} that was made after the setup, and could not be filled in a run that resumes; "
                "make it in the setup, or hold tensors, numbers, lists and dicts instead"
            )
    state = snapshot.tree if run.is_alone or apart else _gathered(run, snapshot.tree)
    return Checkpoint(run.done, history or History(), {} if apart else steady(run), state, run.is_alone)


def _snapshot(run: Run) -> Snapshot:
    roots = {name: value for name, (value, _) in _roots(run).items()}
    return Snapshot({**roots, "process": run.random_states}, _known(run))


def _gathered(run: Run, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of all processes, at the first node; the others only send what it needs."""
    collectives = run.cluster.collectives
    text, contents = packed(tree)
    own = f"[{text}, {json.dumps({digest: len(flat) for digest, flat in contents.items()})}]".encode()
    with collectives.unbilled():
        longest = int(collectives.all_gather(torch.tensor([len(own)]), label="checkpoint").max())
        row = torch.frombuffer(bytearray(own.ljust(longest)), dtype=torch.uint8)
        told = [json.loads(row.numpy().tobytes()) for row in collectives.all_gather(row[None], label="checkpoint")]
        # Every content comes from the first process that has it.
        first = {d: (node, n) for node, (_, sizes) in reversed([*enumerate(told)]) for d, n in sizes.items()}
        for digest, (node, size) in first.items():
            flat = contents.get(digest, torch.empty(size, dtype=torch.uint8))
            flat = collectives.broadcast(flat[None], node, label="checkpoint")
            if 0 in run.part.nodes:
                contents[digest] = flat
    merged_trees = {name: merged([own[name] for own, _ in told]) for name in tree}
    return {} if 0 not in run.part.nodes else unpacked(json.dumps(merged_trees), contents)


# Resuming -------------------------------------------------------------------------------------------------------------


def resume(run: Run, checkpoint: Checkpoint) -> None:
    """Bring a run that was set up anew to the state of the checkpoint, the global random generators included.

    Raises:
        CheckpointError: the checkpoint is of another run, or beyond this run's last step; the differences are named.
    """
    same = run.part.continues is not None  # the same run, with other nodes
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
    if checkpoint.forks:
        _go_on_as_fork(run, checkpoint)
        return
    run.seconds, run.validation_seconds = last("seconds"), last("validation_seconds")
    _put_back(run, checkpoint)
    if not same:
        run.ledger.continue_from(checkpoint.ledger)


def _put_back(run: Run, checkpoint: Checkpoint) -> None:
    try:
        restorer, state = _restorer(run, checkpoint), checkpoint.state
        restored = {
            name: restorer.restore(state[name], live, name, placement)
            for name, (live, placement) in _roots(run).items()
            if name in state or not name.startswith("callback ")  # which may be given only now
        }
        run.objective.set_extra_states(run.rows, restored["extra state"])
        if not restorer.moves:
            set_global_states(restorer.restore(state["process"], {}, "process"), run.cluster.weights.device)
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"the state in the checkpoint at step {checkpoint.step} cannot be put back: {error!r}"
        ) from error


def _restorer(run: Run, checkpoint: Checkpoint) -> Restorer:
    rows, plan, apart = run.part.continues, run.part.plan, not run.is_alone
    if rows is None:
        rows = run.cluster.replicas.nodes
    else:
        apart = not checkpoint.together
    num_saved = checkpoint.num_nodes if plan is None else len(plan.segment(max(1, checkpoint.step)).nodes)
    return Restorer(checkpoint.together, num_saved, rows, apart, _known(run))


def _check_same(run: Run, checkpoint: Checkpoint) -> None:
    saved, given = dict(checkpoint.fingerprint), dict(run.fingerprint)
    horizons = saved.pop(HORIZON, None), given.pop(HORIZON, None)
    changes = list(differences(saved, given))
    if horizons[0] != horizons[1]:
        changes.append(
            f"the learning-rate schedule was over {horizons[0]} steps and is over {horizons[1]} (max_steps of the run, "
            f"or the strategy's; with max_steps={horizons[0]} given to the strategy it stays as it was)"
        )
    if changes:
        where = f"load_checkpoint({str(checkpoint.path)!r})" if checkpoint.path else "the checkpoint"
        raise CheckpointError(
            f"the checkpoint at step {checkpoint.step} is of another run: {'; '.join(changes)}. To start from its "
            f"weights all the same, fork: resume={where}.fork()"
        )


# Forks ----------------------------------------------------------------------------------------------------------------


def begin_fork(checkpoint: Checkpoint, replicas: Replicas) -> None:
    """Let all nodes start from the mean of the checkpoint's, which is what a strategy is set up with."""
    checkpoint.check_layout(replicas)
    replicas.weights.copy_(checkpoint.mean_weights())
    for name, mean in checkpoint.mean_buffers().items():
        replicas.buffers[name].copy_(mean)


def _go_on_as_fork(run: Run, checkpoint: Checkpoint) -> None:
    replicas = run.cluster.replicas
    for optimizer in torch_optimizers(run.strategy.optim):
        mark_stepped(optimizer)
    for scheduler in checkpoint.step * [*chain(*run.strategy.schedulers)]:
        scheduler.step()
    if len(checkpoint.weights) != run.cluster.num_nodes or run.part.plan is not None:
        return
    restorer, own = _restorer(run, checkpoint), slice(replicas.nodes.start, replicas.nodes.stop)
    alike = [
        name
        for name in ("device", "deterministic", "strategy.optim_spec.cls")
        if checkpoint.fingerprint.get(name) == run.fingerprint.get(name)
    ]
    if "device" in alike:
        restorer.restore(checkpoint.state["streams"], run.streams, "streams", "stacked")
    for name, buffer in checkpoint.buffers.items():
        replicas.buffers[name].copy_(buffer[own])
    if not replicas.shares_weights:
        replicas.weights.copy_(checkpoint.weights[own])
        if checkpoint.keeps_optimizer and len(alike) == 3:
            _keep_state(run, checkpoint, restorer)


def _keep_state(run: Run, checkpoint: Checkpoint, restorer: Restorer) -> None:
    """Let the inner optimizers keep their state, or start anew if it does not fit, such as one row for all nodes."""
    optim = run.strategy.optim
    optimizers = torch_optimizers(optim)
    settings = copy.deepcopy([[{**group, "params": []} for group in o.param_groups] for o in optimizers])
    try:
        restorer.restore(checkpoint.state["optimizer"], optim, "optimizer", "stacked")
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
    """Whether an optimizer has all that its options let it keep and, if it is one for all nodes, keeps it for all."""
    names, for_all = spec.state_names(), isinstance(part, Optimizer)
    for p, own in (pair for optimizer in torch_optimizers(part) for pair in optimizer.state.items()):
        tensors = [value for value in own.values() if isinstance(value, Tensor) and value.dim()]
        if not own.keys() >= names or (for_all and any(value.shape != p.shape for value in tensors)):
            return False
    return True
