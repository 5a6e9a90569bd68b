"""Two nodes of a vmapped step, computed by the loop as well: functorch's rule for an operation may be wrong."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from vsim.cluster.replicas import Replicas, matrix
from vsim.engine.base import Before, Executor, Settings
from vsim.engine.loop import LoopExecutor
from vsim.engine.stacked import VmapError
from vsim.private_torch import unwatched

# Of the norm of a parameter's gradients, or of that share of all gradients' norm. Where functorch's rule is wrong they
# are off by about as much as they are. Gradients that cancel out to nothing are all rounding.
_MOST_ROUNDING, _MOST_ROUNDING_OF_BFLOAT16, _LEAST_SHARE = 0.1, 0.5, 0.05


def check_pair(executor: Executor, vmap: type[Executor], unproven: set[str], batch: Any) -> None:
    """Compare the losses and gradients of the first and the last node with those of the loop, up to rounding.

    Nothing changes. Random numbers are the same in both.

    Args:
        executor: has taken a step. vmap: how the pair is computed, beside the loop.
        unproven: the operations that are in question.
        batch: stacked (K, B, …), as a step computes it at once.

    Raises:
        VmapError: they differ by more than rounding explains.
    """
    replicas, objective = executor.replicas, executor.objective
    rows = [0, replicas.num_held - 1] if replicas.num_held > 1 else [0]
    streams = [_copied(executor.generators[row]) for row in rows]
    callers, nodes = objective.callers, objective.callers or range(replicas.num_held)
    objective.callers = [nodes[row] for row in rows]
    pair = _rows_of(replicas, rows)
    try:
        with unwatched():  # a mode that counts operations must not see this
            found = []
            before = Before(LoopExecutor(pair, objective, streams, executor.settings))
            for kind in (LoopExecutor, vmap):
                own = kind(pair, objective, streams, executor.settings)
                losses = own._backward(own._laid_out(tree_map(lambda t: t[rows], batch)), 1.0, True)
                found.append((losses, pair.grads.clone()))
                before.restore()
    finally:
        objective.callers = callers
    (expected, theirs), (losses, ours) = found
    odd = gradient_off(ours, theirs, replicas, executor.settings)
    most = _most(losses, executor.settings)
    if not odd and not torch.allclose(losses, expected, rtol=most, atol=most, equal_nan=True):
        odd = f"the losses {losses.tolist()} differ from those of the nodes alone, {expected.tolist()}"
    if odd:
        raise VmapError(
            f"the model cannot be vectorised over nodes: {odd}; functorch's rule is wrong for one of its operations "
            f"({', '.join(sorted(unproven))}), or its own — executor='loop' runs it node by node"
        )


def gradient_off(ours: Tensor, theirs: Tensor, replicas: Replicas, settings: Settings) -> str:
    """Return which gradient (R, P) differs from the loop's by more than rounding explains; nothing if none does."""
    most, least = _most(ours, settings), max(_LEAST_SHARE * theirs.norm(), 100 * torch.finfo(ours.dtype).eps)
    of_loop: Mapping[str, Tensor] = replicas.views(theirs)
    for name, own in replicas.views(ours).items():
        error, norm = (own - of_loop[name]).norm(), of_loop[name].norm()
        if error > most * max(norm, least):
            off = f"by {error:.2g} where its norm is {norm:.2g}"
            return f"the gradient of {name} differs from that of eager PyTorch, {off}"
    return ""


def _most(values: Tensor, settings: Settings) -> float:
    is_precise = values.dtype in (torch.float32, torch.float64) and not settings.autocast
    return _MOST_ROUNDING if is_precise else _MOST_ROUNDING_OF_BFLOAT16


def _rows_of(replicas: Replicas, rows: list[int]) -> Replicas:
    """Return copies of some rows, which share a row of weights or gradients where all do."""

    def of(values: Tensor) -> Tensor:
        kept = values[rows] if len(values) == replicas.num_held else values
        return matrix(len(kept), replicas.num_parameters, values.dtype, values.device).copy_(kept)

    buffers = {name: b[rows].clone() for name, b in replicas.buffers.items()}
    weights, grads = of(replicas.weights), of(replicas.grads)
    return replace(replicas, weights=weights, grads=grads, buffers=buffers, num_held=len(rows))


def _copied(stream: torch.Generator) -> torch.Generator:
    return torch.Generator(stream.device).set_state(stream.get_state())
