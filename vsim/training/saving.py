"""Between a run and its checkpoints: when it is saved, how it resumes, and how another run forks from it."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from vsim.checkpoint.files import Checkpoint, packed, unpacked
from vsim.checkpoint.fingerprint import HORIZON, differences, steady
from vsim.checkpoint.folder import checkpoint_path, prune
from vsim.checkpoint.restore import Restorer
from vsim.checkpoint.snapshot import Snapshot, merged, own_attributes, set_own_attributes
from vsim.cluster.optim import OptimSpec
from vsim.cluster.optimizers import StackedOptimizer, parts_of, torch_optimizers
from vsim.cluster.randomness import set_global_states
from vsim.cluster.replicas import Replicas
from vsim.cluster.state import CheckpointError
from vsim.private_torch import mark_stepped
from vsim.records.history import History
from vsim.training.member import Member


def savable(callbacks: Sequence[Any]) -> dict[str, Any]:
    """Return name → callback, of those with a state: by their class, and a number from the second of a class on."""
    found: dict[str, Any] = {}
    for one in callbacks:
        if all(callable(getattr(one, method, None)) for method in ("state_dict", "load_state_dict")):
            name = type(one).__name__
            number = sum(known.split(" ")[0] == name for known in found)
            found[f"{name} {number + 1}" if number else name] = one
    return found


def _roots(run: Member) -> dict[str, tuple[Any, str | None]]:
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
        **{f"callback {name}": (one, "shared") for name, one in savable(run.config.callbacks).items()},
        "model": (own_attributes(replicas.module), "shared"),
    }


def _known(run: Member) -> dict[str, Any]:
    cluster, replicas = run.cluster, run.cluster.replicas
    return {
        "cluster": cluster,
        "collectives": cluster.collectives,
        "ledger": run.ledger,
        "replicas": replicas,
        "stacked model": run.strategy.model,
        **{name: getattr(replicas, name) for name in ("module", "frozen", "layout")},
        **{f"layout[{i}]": columns for i, columns in enumerate(replicas.layout)},
    }


def _memory(run: Member) -> dict[str, Tensor]:
    return {"weights": run.cluster.replicas.weights, "gradients": run.cluster.replicas.grads}


# Saving ---------------------------------------------------------------------------------------------------------------


def begin(run: Member) -> None:
    """Take a snapshot once, so that state which cannot be saved is reported before training."""
    if run.config.saving is not None:
        _ = run.fingerprint  # as the run begins, and in all processes
        run.fixed = _snapshot(run).fixed if run.config.saving.wanted else {}


def save_if_due(run: Member, stops: bool) -> None:
    """Save a run after a step, if it is time to, or if it stops here. Every process calls this."""
    saving, is_last = run.config.saving, run.done == run.max_steps
    if saving is None:
        return
    if saving.wanted and (stops or is_last or (saving.interval and run.done % saving.interval == 0)):
        _save(run, saving.folder)
    elif stops:
        try:
            _save(run, saving.folder)
        except CheckpointError as error:
            warnings.warn(f"the interrupted run cannot be resumed: {error}", UserWarning, stacklevel=2)


def _save(run: Member, folder: Path) -> None:
    run.check_weights()
    snapshot = _snapshot(run)
    for path, what in snapshot.fixed.items():
        if run.fixed and run.fixed.get(path) != what:
            raise CheckpointError(
                f"{path} is a {what} that was made after the setup, and could not be filled in a run that resumes; "
                "make it in the setup, or hold tensors, numbers, lists and dicts instead"
            )
    state = snapshot.tree if run.is_alone else _gathered(run, snapshot.tree)
    if run.history is not None:  # in the process of node 0
        _checkpoint(run, state, run.history).save(checkpoint_path(folder, run.done))
        prune(folder, run.done)
    if not run.is_alone:  # no process continues before the file is there: it might look into the folder
        with run.cluster.collectives.unbilled():
            run.cluster.collectives.all_gather(torch.zeros(1, 1), label="checkpoint written")


def captured(run: Member) -> Checkpoint:
    """Return the checkpoint of a run in the simulator that was interrupted or has ended.

    Its tensors share the memory of the run.

    Raises:
        CheckpointError: the run stopped in the middle of a step, or has a state that cannot be saved.
    """
    history = run.history
    if run.cluster.step != run.done or history is None or not len(history) or history["step"][-1] != run.done:
        raise CheckpointError(
            f"the last run stopped in the middle of step {run.cluster.step}, so that nothing whole is left of it in "
            "memory; resume from a checkpoint that it saved, or start anew"
        )
    return _checkpoint(run, _snapshot(run).tree, history)


def _checkpoint(run: Member, state: dict[str, Any], history: History) -> Checkpoint:
    return Checkpoint(run.done, history, steady(run), state, run.is_alone)


def _snapshot(run: Member) -> Snapshot:
    roots = {name: value for name, (value, _) in _roots(run).items()}
    return Snapshot({**roots, "process": run.random_states}, _known(run), _memory(run))


def _gathered(run: Member, tree: dict[str, Any]) -> dict[str, Any]:
    """Return the tree of all processes together, at node 0; the others' is without tensors."""
    collectives, here = run.cluster.collectives, run.cluster.replicas.first_node
    text, contents = packed(tree)
    sizes = {digest: len(flat) for digest, flat in contents.items()}
    own = torch.frombuffer(bytearray(json.dumps([text, sizes]).encode()), dtype=torch.uint8)

    def sent(node: int, count: int, flat: Tensor | None) -> Tensor:
        """Return `flat` (n,) of that node's process."""
        row = torch.zeros(count, dtype=torch.uint8) if flat is None else flat
        return collectives.broadcast(row[None], node, label="checkpoint") if count else row

    with collectives.unbilled():
        counts = collectives.all_gather(torch.tensor([len(own)]), label="checkpoint").tolist()
        told = [
            json.loads(sent(node, n, own if node == here else None).numpy().tobytes()) for node, n in enumerate(counts)
        ]
        # Every content from the first process that has it.
        first = {d: (node, n) for node, (_, sizes) in reversed([*enumerate(told)]) for d, n in sizes.items()}
        for digest, (node, n) in first.items():
            flat = sent(node, n, contents.get(digest) if node == here else None)
            if run.history is not None:
                contents[digest] = flat
    if run.history is None:
        return {}
    trees = [json.loads(text) for text, _ in told]
    return unpacked(json.dumps({name: merged([own[name] for own in trees]) for name in tree}), contents)


# Resuming -------------------------------------------------------------------------------------------------------------


def resume(run: Member, checkpoint: Checkpoint) -> None:
    """Bring a run that was set up anew to the state of the checkpoint, the global random generators included.

    Raises:
        CheckpointError: the checkpoint is of another run, or beyond this run's last step; the differences are named.
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
    run.cluster.completed = run.cluster.step = checkpoint.step
    run.examples = int(last("examples"))
    run.tokens = int(tokens) if (tokens := last("tokens")) == tokens else 0  # NaN: no tokens
    if checkpoint.forks:
        _go_on_as_fork(run, checkpoint)
        return
    run.seconds, run.validation_seconds = last("seconds"), last("validation_seconds")
    try:
        restorer, state = _restorer(run, checkpoint), checkpoint.state
        for name, (live, placement) in _roots(run).items():
            if name in state or not name.startswith("callback "):  # which may be given only now
                restored = restorer.restore(state[name], live, name, placement)
        set_own_attributes(run.cluster.replicas.module, restored)  # of the last, the model
        if not restorer.moves:
            set_global_states(restorer.restore(state["process"], {}, "process"), run.cluster.weights.device)
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"the state in the checkpoint at step {checkpoint.step} cannot be put back: {error!r}"
        ) from error
    run.ledger.continue_from(checkpoint.ledger)


def _restorer(run: Member, checkpoint: Checkpoint) -> Restorer:
    cluster = run.cluster
    node = None if run.is_alone else cluster.replicas.first_node
    return Restorer(checkpoint.together, node, cluster.num_nodes, _known(run), _memory(run), cluster.weights.device)


def _check_same(run: Member, checkpoint: Checkpoint) -> None:
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


def _go_on_as_fork(run: Member, checkpoint: Checkpoint) -> None:
    cluster, strategy, replicas = run.cluster, run.strategy, run.cluster.replicas
    for optimizer in torch_optimizers(strategy.optim):
        mark_stepped(optimizer)
    for _ in range(checkpoint.step):
        for scheduler in strategy.schedulers:
            scheduler.step()
    if checkpoint.num_nodes != cluster.num_nodes:
        return
    restorer = _restorer(run, checkpoint)
    if checkpoint.fingerprint["device"] == run.fingerprint["device"]:
        restorer.restore(checkpoint.state["streams"], run.streams, "streams", "stacked")
    own = slice(replicas.nodes.start, replicas.nodes.stop)
    for name, buffer in checkpoint.buffers.items():
        replicas.buffers[name].copy_(buffer[own])
    if replicas.shares_weights:
        return
    replicas.weights.copy_(checkpoint.weights[own])
    alike = ("strategy.optim_spec.cls", "deterministic", "device")
    if checkpoint.keeps_optimizer and all(checkpoint.fingerprint.get(k) == run.fingerprint.get(k) for k in alike):
        _keep_state(run, checkpoint, restorer)


def _keep_state(run: Member, checkpoint: Checkpoint, restorer: Restorer) -> None:
    """Let the inner optimizers keep their state, or start anew if it does not fit, such as one row for all nodes."""
    optim = run.strategy.optim
    optimizers = torch_optimizers(optim)
    settings = [[{k: v for k, v in group.items() if k != "params"} for group in o.param_groups] for o in optimizers]
    try:
        restorer.restore(checkpoint.state["optimizer"], optim, "optimizer", "stacked")
        specs = run.strategy.optim_spec.parts(run.cluster.replicas.module)
        fits = all(_fits(part, spec) for part, (spec, _) in zip(parts_of(optim), specs, strict=False))
    except CheckpointError:
        fits = False
    for optimizer, groups in zip(optimizers, copy.deepcopy(settings), strict=True):
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group.update(own)
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
