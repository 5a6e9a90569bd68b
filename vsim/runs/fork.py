"""Start a run from another run's checkpoint: its mean weights, and the state that fits."""

from __future__ import annotations

import copy
from itertools import chain

from torch import Tensor
from torch.optim import Optimizer

from vsim.checkpoint.files import Checkpoint
from vsim.checkpoint.tree import Encoded, Filler, cut
from vsim.cluster.optim import OptimSpec
from vsim.cluster.optimizers import StackedOptimizer, parts_of, torch_optimizers
from vsim.cluster.replicas import Replicas
from vsim.cluster.state import CheckpointError
from vsim.private_torch import mark_stepped
from vsim.runs.lasting import PYTHON, attributes_of, set_python
from vsim.runs.saving import kept_settings
from vsim.runs.tracked import TrackedRun


def begin_fork(checkpoint: Checkpoint, replicas: Replicas) -> None:
    """Set all nodes to the mean of the checkpoint's nodes, before the strategy is set up."""
    checkpoint.check_layout(replicas)
    replicas.weights.copy_(checkpoint.mean_weights())
    for name, mean in checkpoint.mean_buffers().items():
        replicas.buffers[name].copy_(mean)


def continue_as_fork(run: TrackedRun, checkpoint: Checkpoint) -> None:
    """Give a run that is set up what it takes over from a checkpoint of another run.

    Always: the position of the learning-rate schedule, what strategies carry over, and the models' Python. If there are
    as many nodes, each node's weights and buffers; on the same device, random streams; and the inner optimizer's state,
    if optimizer and `deterministic` are the same, too.
    """
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
        for s in (checkpoint.settings, kept_settings(run))
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
