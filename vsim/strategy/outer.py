"""The outer optimizer: steps weights φ that all nodes share by what the nodes have moved."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer

from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec, resolve_optim
from vsim.strategy.base import Optim
from vsim.strategy.fragments import Fragment

NESTEROV = OptimSpec(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def outer_spec(outer_optim: Optim, outer_lr: float | None, default: OptimSpec = NESTEROV) -> OptimSpec:
    """Return the outer optimizer that is given as an `OptimSpec`, a class or a name, with its rate if that is given.

    Raises:
        ValueError: its learning rate is 0.
    """
    spec = resolve_optim("outer optimizer", {"outer_optim": outer_optim}, {"outer_lr": outer_lr}, default)
    if spec.kwargs.get("lr") == 0:
        raise ValueError("outer_lr must be > 0, got 0: the outer weights, which every sync returns to, would stay")
    return spec


def outer_optimizer(
    spec: OptimSpec, cluster: Cluster, weights: Tensor, gradient: Tensor, part: Fragment | None = None
) -> Optimizer:
    """Build the optimizer that steps shared `weights` (P,), or a part of them, in place by `gradient` (P,)."""
    part = part or Fragment(cluster.replicas.layout)
    tensors = part.views if spec.elementwise else part.tensors
    return spec.build_shared(tensors(weights), tensors(gradient), cluster.deterministic)
