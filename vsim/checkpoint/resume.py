"""Between a run and its checkpoints: taking one, resuming from one, and forking another run."""

from __future__ import annotations

import copy
import json
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from vsim.checkpoint.files import Checkpoint
from vsim.checkpoint.fingerprint import HORIZON, differences, steady
from vsim.checkpoint.folder import checkpoint_path, prune
from vsim.checkpoint.restore import Restorer
from vsim.checkpoint.savable import Savable, savable
from vsim.checkpoint.snapshot import Shard, Snapshot, flat_bytes, own_attributes, set_own_attributes
from vsim.checkpoint.start import Saving
from vsim.cluster.optim import torch_optimizers
from vsim.cluster.randomness import set_global_states
from vsim.cluster.replicas import Replicas
from vsim.cluster.state import CheckpointError
from vsim.private_torch import mark_stepped
from vsim.records.history import History


def _roots(run: Savable) -> dict[str, tuple[Any, str | None]]:
    """Return name → object, in the order of saving and restoring, and its placement."""
    replicas, strategy = run.cluster.replicas, run.strategy
    return {
        "weights": (replicas.weights, "stacked"),
        "buffers": (replicas.buffers, "stacked"),
        "generator": (run.cluster.generator, "shared"),
        "streams": (list(run.streams), "stacked"),
        "loss": (run.objective.loss_fn, "shared"),
        "optimizers": (torch_optimizers(strategy.optim), "stacked"),
        "strategy": (strategy, None),
        **{f"callback {name}": (one, "shared") for name, one in savable(run.config.callbacks).items()},
        "model": (own_attributes(replicas.module), "shared"),
    }


def _known(run: Savable) -> dict[str, Any]:
    cluster, replicas = run.cluster, run.cluster.replicas
    names = ("module", "frozen", "layout")
    return {
        "cluster": cluster,
        "collectives": cluster.collectives,
        "ledger": run.ledger,
        "replicas": replicas,
        "stacked model": run.strategy.model,
        **{name: getattr(replicas, name) for name in names},
        **{f"layout[{i}]": columns for i, columns in enumerate(replicas.layout)},
    }


def _memory(run: Savable) -> dict[str, Tensor]:
    return {"weights": run.cluster.replicas.weights, "gradients": run.cluster.replicas.grads}


# Taking a checkpoint --------------------------------------------------------------------------------------------------


class Checkpointer:
    """Saves a run while it trains. Every process calls it; that of node 0, which keeps a history, writes."""

    def __init__(self, saving: Saving) -> None:
        self.saving = saving
        self._saved = -1  # the step
        self._fixed: dict[str, str] = {}

    def begin(self, run: Savable) -> None:
        """Take a snapshot once, so that state which cannot be saved is reported before training."""
        _ = run.fingerprint  # as the run begins, and in all processes
        if self.saving.wanted:
            self._fixed = _snapshot(run).fixed

    def after_step(self, run: Savable) -> None:
        """Save, if it is time to."""
        interval = self.saving.interval
        if self.saving.wanted and (run.done == run.max_steps or (interval and run.done % interval == 0)):
            self._save(run)

    def on_interrupt(self, run: Savable) -> None:
        """Save a run that stops here."""
        try:
            if self._saved != run.done:
                self._save(run)
        except CheckpointError as error:
            if self.saving.wanted:
                raise
            warnings.warn(f"the interrupted run cannot be resumed: {error}", UserWarning, stacklevel=2)

    def _save(self, run: Savable) -> None:
        run.check_weights()
        snapshot = _snapshot(run)
        for path, what in snapshot.fixed.items():
            if self._fixed and self._fixed.get(path) != what:
                raise CheckpointError(
                    f"{path} is a {what} that was made after the setup, and could not be filled in a run that resumes; "
                    "make it in the setup, or hold tensors, numbers, lists and dicts instead"
                )
        shards = _gathered(run, snapshot.shard())
        if shards and run.history is not None:
            _checkpoint(run, shards, run.history).save(checkpoint_path(self.saving.folder, run.done))
            prune(self.saving.folder, run.done)
        if not run.is_alone:  # no process continues before the file is there: it might look into the folder
            with run.cluster.collectives.unbilled():
                run.cluster.collectives.all_gather(torch.zeros(1, 1), label="checkpoint written")
        self._saved = run.done


def captured(run: Savable) -> Checkpoint:
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
    return _checkpoint(run, [_snapshot(run).shard()], history)


def _checkpoint(run: Savable, shards: list[Shard], history: History) -> Checkpoint:
    num_nodes = run.cluster.num_nodes
    return Checkpoint(run.done, num_nodes, history, run.examples, run.seconds, steady(run), shards)


def _snapshot(run: Savable) -> Snapshot:
    roots = {name: value for name, (value, _) in _roots(run).items()}
    return Snapshot({**roots, "process": run.random_states}, _known(run), _memory(run))


def _gathered(run: Savable, own: Shard) -> list[Shard]:
    """Return the shards of all processes at node 0, and none at the others."""
    cluster = run.cluster
    if run.is_alone:
        return [own]

    def gather(contents: Tensor) -> list[Tensor]:
        """All processes' bytes (n,), which need not be equally many."""
        counts = cluster.collectives.all_gather(torch.tensor([[len(contents)]]), label="checkpoint").flatten().tolist()
        padded = torch.zeros(1, max(counts), dtype=torch.uint8, device=cluster.weights.device)
        padded[0, : len(contents)] = contents
        rows = cluster.collectives.all_gather(padded, label="checkpoint").cpu()
        return [row[:count].clone() for row, count in zip(rows, counts, strict=True)]

    flat = {path: flat_bytes(t) for path, t in own.tensors.items()}
    kinds: list[Any] = [[path, str(t.dtype).removeprefix("torch."), list(t.shape)] for path, t in own.tensors.items()]
    with cluster.collectives.unbilled():
        text = bytearray(json.dumps([own.tree, kinds]).encode())
        told = [json.loads(row.numpy().tobytes()) for row in gather(torch.frombuffer(text, dtype=torch.uint8))]
        shards = [Shard(tree, {}) for tree, _ in told]
        for i in range(max(len(kinds) for _, kinds in told)):
            rows = gather(flat[kinds[i][0]] if i < len(kinds) else torch.empty(0, dtype=torch.uint8))
            for shard, row, (_, of_shard) in zip(shards, rows, told, strict=True):
                if run.history is not None and i < len(of_shard):
                    path, dtype, shape = of_shard[i]
                    shard.tensors[path] = row.view(getattr(torch, dtype)).view(shape)
    return shards if run.history is not None else []


# Resuming -------------------------------------------------------------------------------------------------------------


def resume(run: Savable, checkpoint: Checkpoint) -> None:
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
    run.cluster.completed = run.cluster.step = checkpoint.step
    run.examples = checkpoint.examples
    run.tokens = int(tokens) if (tokens := checkpoint.history.last("tokens")) == tokens else 0  # NaN: no tokens
    if checkpoint.forks:
        _go_on_as_fork(run, checkpoint)
        return
    run.seconds = checkpoint.seconds
    run.validation_seconds = max(0.0, checkpoint.history.last("validation_seconds"))
    try:
        restorer = _restorer(run, checkpoint)
        for name, (live, placement) in _roots(run).items():
            if name.startswith("callback ") and name not in checkpoint.shards[0].tree:
                continue  # given only now
            restored = restorer.restore(name, live, placement)
        set_own_attributes(run.cluster.replicas.module, restored)  # of the last, the model
        if not restorer.moves:
            set_global_states(restorer.restore("process", {}), run.cluster.weights.device)
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"the state in the checkpoint at step {checkpoint.step} cannot be put back: {error!r}"
        ) from error
    run.ledger.continue_from(checkpoint.ledger)


def _restorer(run: Savable, checkpoint: Checkpoint) -> Restorer:
    nodes, shards = run.cluster.replicas.nodes, checkpoint.shards
    if not checkpoint.together and not run.is_alone:
        shards = [shards[nodes.start]]
    cut = nodes.start if checkpoint.together and not run.is_alone else None
    return Restorer(shards, cut, run.cluster.num_nodes, _known(run), _memory(run), run.cluster.weights.device)


def _check_same(run: Savable, checkpoint: Checkpoint) -> None:
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


def _go_on_as_fork(run: Savable, checkpoint: Checkpoint) -> None:
    cluster, strategy, replicas = run.cluster, run.strategy, run.cluster.replicas
    optimizers = torch_optimizers(strategy.optim)
    for optimizer in optimizers:
        mark_stepped(optimizer)
    for _ in range(checkpoint.step):
        for scheduler in strategy.schedulers:
            scheduler.step()
    streams = [t for shard in checkpoint.shards for path, t in shard.tensors.items() if path.startswith("streams[")]
    same_device = checkpoint.fingerprint["device"] == run.fingerprint["device"]
    for node, stream in zip(replicas.nodes, run.streams, strict=True):
        if node < len(streams) and same_device:
            stream.set_state(streams[node])
    if checkpoint.num_nodes != cluster.num_nodes:
        return
    own = slice(replicas.nodes.start, replicas.nodes.stop)
    for name, buffer in checkpoint.buffers.items():
        replicas.buffers[name].copy_(buffer[own])
    if replicas.shares_weights:
        return
    replicas.weights.copy_(checkpoint.weights[own])
    alike = ("strategy.optim_spec.cls", "deterministic", "device")
    if checkpoint.keeps_optimizer and all(checkpoint.fingerprint.get(k) == run.fingerprint.get(k) for k in alike):
        _keep_state(run, checkpoint, optimizers)


def _keep_state(run: Savable, checkpoint: Checkpoint, optimizers: Sequence[Any]) -> None:
    """Let the inner optimizers keep their state, or start anew if it does not fit, such as one row for all nodes."""
    settings = [[{k: v for k, v in group.items() if k != "params"} for group in o.param_groups] for o in optimizers]
    try:
        restored = _restorer(run, checkpoint).restore("optimizers", list(optimizers), "stacked")
        names = run.strategy.optim_spec.state_names()  # by its options
        fits = len(restored) == len(optimizers)
        fits = fits and all(own.keys() >= names for optimizer in optimizers for own in optimizer.state.values())
    except CheckpointError:
        fits = False
    for optimizer, groups in zip(optimizers, copy.deepcopy(settings), strict=True):
        for group, own in zip(optimizer.param_groups, groups, strict=True):
            group.update(own)
        if not fits:
            optimizer.state.clear()
