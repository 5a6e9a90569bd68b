"""Cut the runs of a comparison into parts that train one after the other, because all do not fit into memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from vsim.engine.memory import available_bytes
from vsim.runs.spec import RunSpec
from vsim.runs.tracked import TrackedRun

# Share of a device's free memory for the matrices of runs that train together; the rest is for activations.
SHARE_OF_MATRICES = 0.5


def fitting_parts(
    runs: Sequence[TrackedRun],
    device: torch.device,
    memory_share: float | None,
    portion: float,
    agreed: Callable[[float], float],
) -> list[list[TrackedRun]]:
    """Cut the runs into parts, in their order, whose matrices fit into memory.

    Args:
        memory_share: the share of the device's memory that this process may hold; None: of the free memory.
        portion: the share of every run's nodes that the device holds.
        agreed: returns the first process's value in every process.
    """
    room = agreed(SHARE_OF_MATRICES * available_bytes(device, memory_share))
    parts: list[list[TrackedRun]] = []
    taken = 0.0
    for run in runs:
        own = portion * matrix_bytes(run.spec)
        if not parts or taken + own > room:
            parts.append([])
            taken = 0.0
        parts[-1].append(run)
        taken += own
    return parts


def matrix_bytes(spec: RunSpec) -> float:
    """Estimate the bytes of a run's weights, gradients, optimizer state and strategy state."""
    trainable = [p for p in spec.model.parameters() if p.requires_grad]
    row = sum(p.nbytes for p in trainable)
    buffers = sum(b.nbytes for b in spec.model.buffers())
    moments = len(spec.strategy.optim_spec.state_names() - {"step"})
    # Assume that a strategy keeps outer weights, momentum, and one residual per node.
    return float(row * (spec.num_nodes * (3 + moments) + 3) + buffers * spec.num_nodes)
