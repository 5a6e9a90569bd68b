"""Between a run and its checkpoints: taking one, going on from one, and what two runs must share for that."""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from vsim.checkpoint.files import (
    Checkpoint,
    CheckpointError,
    checkpoint_path,
    copy_record,
    differences,
    layout_of,
    prune,
)
from vsim.checkpoint.restore import Restorer, write_rows
from vsim.checkpoint.start import Saving
from vsim.cluster.optim import NodeOptimizers, torch_optimizers
from vsim.cluster.randomness import global_states, set_global_states
from vsim.cluster.replicas import Replicas
from vsim.cluster.state import Shard, Snapshot
from vsim.private_torch import mark_stepped
from vsim.records.history import History

if TYPE_CHECKING:
    from vsim.training.member import Member

# In a fingerprint, what may differ in a run that goes on: its own rule is in `_check_same`.
HORIZON = "steps of the learning-rate schedule"


# Taking a checkpoint -------------------------------------------------------------------------------------------------


class Checkpointer:
    """Saves a run while it trains. Every process calls it; that of node 0 writes.

    Args:
        history: of the run so far; None in the processes that do not write.
    """

    def __init__(self, saving: Saving, history: History | None) -> None:
        self.saving, self.history = saving, history
        self._fixed: dict[str, str] = {}

    def begin(self, run: Member) -> None:
        """Look at everything once, so that what cannot be saved is said before training."""
        if self.saving.wanted:
            self._fixed = _snapshot(run, None).fixed

    def after_step(self, run: Member) -> None:
        """Save, if it is time to."""
        interval = self.saving.interval
        if self.saving.wanted and (run.done == run.max_steps or (interval and run.done % interval == 0)):
            self._save(run)

    def on_interrupt(self, run: Member) -> None:
        """Save a run that stops here."""
        if not self.saving.wanted:
            try:
                self._save(run)
            except CheckpointError as error:
                warnings.warn(f"the interrupted run cannot be resumed: {error}", UserWarning, stacklevel=2)
        elif not checkpoint_path(self.saving.folder, run.done).exists() or self.history is None:
            self._save(run)

    def _save(self, run: Member) -> None:
        run.check_weights()
        snapshot = _snapshot(run, None)
        made = {path: what for path, what in snapshot.fixed.items() if self._fixed.get(path, what) != what}
        made |= {path: what for path, what in snapshot.fixed.items() if self._fixed and path not in self._fixed}
        if made:
            path, what = next(iter(made.items()))
            raise CheckpointError(
                f"{path} is a {what} that was made after the setup, and could not be filled in a run that resumes; "
                "make it in the setup, or hold tensors, numbers, lists and dicts instead"
            )
        shards = _gathered(run, snapshot.shard())
        if shards is not None and self.history is not None:
            checkpoint = _checkpoint(run, shards, self.history)
            checkpoint.save(checkpoint_path(self.saving.folder, run.done))
            prune(self.saving.folder, run.done)
        if not run.is_alone:  # nobody goes on, to look into the folder perhaps, before the file is there
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
    return _checkpoint(run, [_snapshot(run, run.left_states).shard()], history)


def _checkpoint(run: Member, shards: list[Shard], history: History) -> Checkpoint:
    return Checkpoint(
        run.done,
        run.cluster.num_nodes,
        history,
        run.ledger,
        run.examples,
        run.seconds,
        run.fingerprint,
        shards,
    )


def _roots(run: Member) -> dict[str, Any]:
    """Name → what is saved and restored, in the order in which it must be."""
    replicas = run.cluster.replicas
    loss = run.objective.loss_fn
    return {
        "weights": replicas.weights,
        "buffers": replicas.buffers,
        "generator": run.cluster.generator,
        "nodes": list(run.streams),
        "loss": dict(loss.named_buffers()) if isinstance(loss, nn.Module) else {},
        "strategy": run.strategy,
        "model": {name: _own_attributes(module) for name, module in replicas.module.named_modules()},
    }


def _known(run: Member) -> dict[str, Any]:
    cluster, replicas = run.cluster, run.cluster.replicas
    return {
        "cluster": cluster,
        "collectives": cluster.collectives,
        "ledger": run.ledger,
        "replicas": replicas,
        "module": replicas.module,
        "frozen": replicas.frozen,
        "model": run.strategy.model,
        "layout": replicas.layout,
        **{f"layout[{i}]": columns for i, columns in enumerate(replicas.layout)},
    }


def _own_attributes(module: nn.Module) -> dict[str, Any]:
    """What a module of the user's model keeps beside parameters and buffers: numbers, tensors, random generators."""
    kinds = (bool, int, float, str, type(None), Tensor, torch.Generator)
    common = vars(nn.Module()).keys()
    return {name: value for name, value in vars(module).items() if name not in common and isinstance(value, kinds)}


def _snapshot(run: Member, random_states: dict[str, Any] | None) -> Snapshot:
    random = global_states(run.cluster.weights.device) if random_states is None else random_states
    roots = {**_roots(run), "process": random}
    return Snapshot(roots, _known(run), {"gradients": run.cluster.grads})


def _gathered(run: Member, own: Shard) -> list[Shard] | None:
    """Return the shards of all processes, at node 0; None at the others."""
    cluster = run.cluster
    if run.is_alone:
        return [own]
    device = cluster.weights.device
    sizes: list[Any] = [[str(t.dtype).removeprefix("torch."), t.numel()] for t in own.storages]
    with cluster.collectives.unbilled():

        def gather(contents: Tensor, counts: list[int] | None = None) -> list[Tensor]:
            """All processes' bytes (n,), which need not be equally many."""
            if counts is None:
                there = cluster.collectives.all_gather(torch.tensor([[len(contents)]]), label="checkpoint")
                counts = there.flatten().tolist()
            padded = torch.zeros(1, max(counts), dtype=torch.uint8, device=device)
            padded[0, : len(contents)] = contents
            rows = cluster.collectives.all_gather(padded, label="checkpoint").cpu()
            return [row[:count] for row, count in zip(rows, counts, strict=True)]

        text = json.dumps([own.tree, own.starts, sizes]).encode()
        described_all = [
            json.loads(row.numpy().tobytes()) for row in gather(torch.frombuffer(bytearray(text), dtype=torch.uint8))
        ]
        writes = cluster.replicas.first_node == 0
        storages: list[list[Tensor]] = [[] for _ in described_all]
        for number in range(max(len(sizes) for _, _, sizes in described_all)):
            held: list[Any] = [sizes[number] if number < len(sizes) else ["uint8", 0] for _, _, sizes in described_all]
            counts = [count * getattr(torch, dtype).itemsize for dtype, count in held]
            contents = own.storages[number].view(torch.uint8) if number < len(own.storages) else torch.empty(0)
            rows = gather(contents, counts)
            if writes:
                for into, row, (dtype, _) in zip(storages, rows, held, strict=True):
                    into.append(row.clone().view(getattr(torch, dtype)))
    if not writes:
        return None
    return [
        Shard(tree, starts, own[: len(sizes)])
        for (tree, starts, sizes), own in zip(described_all, storages, strict=True)
    ]


# Going on ------------------------------------------------------------------------------------------------------------


def resume(run: Member, checkpoint: Checkpoint) -> None:
    """Bring a run that was set up anew to where the checkpoint's was.

    Raises:
        CheckpointError: it was another run, or has gone further than this one shall; what differs is named.
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
    try:
        _restore(run, checkpoint)
    except CheckpointError:
        raise
    except (LookupError, TypeError, AttributeError, ValueError, ArithmeticError, RuntimeError) as error:
        raise CheckpointError(
            f"the state in the checkpoint at step {checkpoint.step} cannot be put back: {error!r}"
        ) from error
    copy_record(checkpoint, None, run.ledger)


def _restore(run: Member, checkpoint: Checkpoint) -> None:
    restorer = _restorer(run, checkpoint, checkpoint.shards)
    for name, live in _roots(run).items():
        restored = restorer.restore(name, live)
        if name == "model":
            for path, module in run.cluster.replicas.module.named_modules():
                vars(module).update(restored[path])
    if restorer.node is None and not restorer.joins:
        set_global_states(restorer.restore("process", {}), run.cluster.weights.device)


def _restorer(run: Member, checkpoint: Checkpoint, shards: list[Shard]) -> Restorer:
    nodes, num_nodes = run.cluster.replicas.nodes, run.cluster.num_nodes
    together_here = len(nodes) == num_nodes
    if not checkpoint.together and not together_here:
        shards = [shards[nodes.start]]
    cut = nodes.start if checkpoint.together and not together_here else None
    memory = {"gradients": run.cluster.grads}
    return Restorer(shards, cut, num_nodes, _known(run), memory, run.cluster.weights.device)


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
            f"the checkpoint at step {checkpoint.step} is of another run: {'; '.join(changes)}. To go on from its "
            f"weights all the same, fork: resume={where}.fork()"
        )


def begin_fork(checkpoint: Checkpoint, replicas: Replicas) -> None:
    """Let all nodes start from the mean of the checkpoint's, which is what a strategy is set up with."""
    checkpoint.check_layout(layout_of(replicas))
    write_rows(replicas.weights, checkpoint.mean_weights().to(replicas.weights).expand_as(replicas.weights))
    for name, mean in checkpoint.mean_buffers().items():
        buffer = replicas.buffers[name]
        write_rows(buffer, mean.to(buffer).expand_as(buffer)) if buffer.dim() > 1 else buffer.copy_(mean)


def _go_on_as_fork(run: Member, checkpoint: Checkpoint) -> None:
    cluster, strategy = run.cluster, run.strategy
    replicas = cluster.replicas
    for optimizer in torch_optimizers(strategy.optim):
        mark_stepped(optimizer)
    for _ in range(checkpoint.step):
        for scheduler in strategy.schedulers:
            scheduler.step()
    streams = _node_streams(checkpoint)
    same_device = checkpoint.fingerprint["device"] == run.fingerprint["device"]
    for node, stream in zip(replicas.nodes, run.streams, strict=True):
        if node < len(streams) and same_device:
            stream.set_state(streams[node])
    if checkpoint.num_nodes != cluster.num_nodes:
        return
    own = slice(replicas.nodes.start, replicas.nodes.stop)
    weights, buffers = checkpoint.weights, checkpoint.buffers
    one_row_for_all = len(replicas.weights) < len(replicas.nodes)
    if not one_row_for_all:
        write_rows(replicas.weights, weights[own].to(replicas.weights))
    for name, b in buffers.items():
        replicas.buffers[name].copy_(b[own])
    alike = ("strategy.optim_spec.cls", "deterministic", "device")
    fits = all(checkpoint.fingerprint.get(key) == run.fingerprint.get(key) for key in alike)
    if checkpoint.keeps_optimizer and fits and not one_row_for_all:
        shards = []
        for shard in checkpoint.shards:
            items = shard.tree["strategy"]["items"]
            shards.append(Shard({"optimizer": items["optim"]}, shard.starts, shard.storages))
        restorer = _restorer(run, checkpoint, shards)
        restorer.only_state = True
        # A list, for it is filled with as many as the checkpoint has: one, if all nodes had the same.
        of_nodes = list(strategy.optim.optimizers) if isinstance(strategy.optim, NodeOptimizers) else None
        try:
            restorer.restore("optimizer", strategy.optim)
            states = [state for optimizer in torch_optimizers(strategy.optim) for state in optimizer.state.values()]
            names = strategy.optim_spec.state_names()  # by its options
            fits = all(state.keys() >= names for state in states)
        except CheckpointError:  # such as one row of state for all nodes, where each has its own now
            fits = False
        if isinstance(strategy.optim, NodeOptimizers) and of_nodes is not None:
            fits = fits and len(strategy.optim.optimizers) == len(of_nodes)
            strategy.optim.optimizers[:] = of_nodes
        if not fits:
            for optimizer in torch_optimizers(strategy.optim):
                optimizer.state.clear()


def _node_streams(checkpoint: Checkpoint) -> list[Tensor]:
    return [shard.tensor(node["state"]) for shard in checkpoint.shards for node in shard.tree["nodes"]["items"]]
