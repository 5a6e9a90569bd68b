"""The outer optimizer: steps shared weights φ by the nodes' moves."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec, resolve_optim
from vsim.cluster.optimizers import evaluating
from vsim.core.algorithm import Algorithm, Optim
from vsim.core.average import Averaging
from vsim.core.fields import algorithm, state
from vsim.core.fragments import Fragment
from vsim.core.when import When, sync_interval

NESTEROV = OptimSpec(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


@algorithm
class SharedWeights(Algorithm):
    """Base of algorithms with shared weights φ, which are the global model."""

    outer_weights: Tensor = state()  # φ, shared (P,)

    def setup(self, cluster: Cluster) -> None:
        self.keep_shared(outer_weights=cluster.weights[0].clone())
        self.average.setup(cluster)

    def global_weights(self, cluster: Cluster) -> Tensor:
        return self.outer_weights


@algorithm
class OuterStep(SharedWeights):
    """Base of algorithms with shared weights φ, and an outer optimizer that steps φ by a gradient Δ.

    A subclass defines `sync`: it writes Δ to `outer_gradient`, calls `outer.step()`, and copies φ to the nodes.

    Attributes:
        default_outer: the default outer optimizer.
    """

    default_outer: ClassVar[OptimSpec] = NESTEROV
    derived = ("outer_gradient",)
    resolved = ("outer_optim", "outer_lr")

    outer_optim: Optim = None
    H: int | When = 100
    outer_lr: float | None = None
    average: Averaging = Averaging("mean")

    outer_optim_spec: OptimSpec = state()
    outer_gradient: Tensor = state()  # Δ, shared (P,)
    outer: Optimizer = state()

    def __post_init__(self) -> None:
        self.H = sync_interval(self.H)
        self.outer_optim_spec = self.outer_spec()
        super().__post_init__()

    def outer_spec(self) -> OptimSpec:
        """Return the specification of the outer optimizer."""
        return outer_spec(self.outer_optim, self.outer_lr, self.default_outer)

    def setup(self, cluster: Cluster) -> None:
        phi = cluster.weights[0].clone()
        self.outer_gradient = torch.zeros_like(phi)
        outer = outer_optimizer(self.outer_optim_spec, cluster, phi, self.outer_gradient)
        self.keep_shared(outer_weights=phi, outer=outer)
        self.average.setup(cluster)

    def evaluating(self) -> AbstractContextManager[None]:
        return evaluating(self.outer, self.outer_weights)


def outer_spec(outer_optim: Optim, outer_lr: float | None, default: OptimSpec = NESTEROV) -> OptimSpec:
    """Return the specification of an outer optimizer: an `OptimSpec`, a class or a name, with `outer_lr` if given.

    Raises:
        ValueError: the learning rate is 0.
    """
    spec = resolve_optim("outer optimizer", "outer_optim", outer_optim, "outer_lr", outer_lr, default)
    if spec.kwargs.get("lr") == 0:
        raise ValueError("outer_lr must be > 0, got 0: the outer weights, which every sync returns to, would stay")
    return spec


def outer_optimizer(
    spec: OptimSpec, cluster: Cluster, weights: Tensor, gradient: Tensor, part: Fragment | None = None
) -> Optimizer:
    """Build the optimizer that steps shared `weights` (P,), or only the columns of `part`, by `gradient` (P,)."""
    part = part or Fragment(cluster.replicas.layout)
    tensors = part.views if spec.elementwise else part.tensors
    return spec.build_shared(tensors(weights), tensors(gradient), cluster.deterministic)
