"""DiLoCo: train alone for H steps, then step a shared copy of the weights with an outer optimizer."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from vsim.arguments import whole_number
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec, resolve_optim
from vsim.strategy.base import CommunicationModule, Optim, Strategy, StrategyOptions, with_inner
from vsim.strategy.compression import CompressedAverage, Compressor


class DiLoCoCommunicator(CommunicationModule):
    """After every H-th step the mean distance that the nodes have come is the outer optimizer's gradient.

    Args:
        H: steps between syncs.
        outer_optim_spec, outer_optim: the outer optimizer (two spellings; give one). Default SGD with lr 0.7, momentum
            0.9, Nesterov.
        outer_lr: its learning rate.
        compressor: how to send the distances φ − θ_k with fewer bytes; None: as they are.
        error_feedback: β in [0, 1], the share of what a compressor left out that is sent later; see
            `CompressedAverage`.
    """

    outer_weights: Tensor  # φ, shared (P,)
    outer_optim: Optimizer
    derived = ("outer_gradient",)

    def __init__(
        self,
        H: int = 100,
        outer_optim_spec: Optim = None,
        *,
        outer_optim: Optim = None,
        outer_lr: float | None = None,
        compressor: Compressor | None = None,
        error_feedback: bool | float | None = None,
    ) -> None:
        self.H = whole_number("H", H)
        self.outer_optim_spec = resolve_optim(
            "DiLoCo",
            {"outer_optim_spec": outer_optim_spec, "outer_optim": outer_optim},
            {"outer_lr": outer_lr},
            default=OptimSpec(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True),
        )
        if not self.outer_optim_spec.elementwise:
            raise ValueError(
                f"the outer optimizer steps all weights as one vector, so it must be elementwise; "
                f"{self.outer_optim_spec.cls.__name__} is not"
            )
        if self.outer_optim_spec.kwargs.get("lr") == 0:
            raise ValueError("outer_lr must be > 0, got 0: the outer weights, which every sync returns to, would stay")
        if compressor is None and error_feedback is not None:
            raise TypeError("DiLoCo: error_feedback has no effect without compressor=")
        self.compressed = None if compressor is None else CompressedAverage(compressor, error_feedback)

    @property
    def first_step(self) -> int:
        return self.H

    def setup(self, cluster: Cluster) -> None:
        weights = cluster.weights[0].clone()
        self.outer_gradient = torch.zeros_like(weights)  # shared (P,)
        outer_optim = self.outer_optim_spec.build_over(weights, self.outer_gradient, cluster.deterministic)
        self.keep_shared(outer_weights=weights, outer_optim=outer_optim)
        if self.compressed is not None:
            self.compressed.setup(cluster)

    def communicate(self, cluster: Cluster) -> None:
        if cluster.step % self.H:
            return
        if self.compressed is None:
            # mean_k (φ − θ_k): φ is equal on all nodes, so that averaging θ_k sends the same bytes.
            mean = cluster.collectives.all_reduce(cluster.weights, "mean", label="outer gradient")
            torch.sub(self.outer_weights, mean, out=self.outer_gradient)
        else:
            distances = self.outer_weights - cluster.weights  # (R, P)
            self.outer_gradient.copy_(self.compressed.average(distances, cluster, "outer gradient"))
        self.outer_optim.step()
        cluster.weights.copy_(self.outer_weights)

    def global_weights(self, cluster: Cluster) -> Tensor:
        return self.outer_weights


class DiLoCoStrategy(Strategy):
    """Distributed low-communication training [Douillard et al. 2023, arXiv:2311.08105].

        θ_k ← inner optimizer(θ_k, g_k)
        after every H-th step:  Δ = mean_k (φ − θ_k);  φ ← outer optimizer(φ, Δ);  θ_k ← φ

    The inner optimizer's state survives the sync. With the default outer optimizer the first move is 0.7 · 1.9 · Δ, as
    torch.optim.SGD's Nesterov momentum has it.

    Args:
        H: inner steps between syncs, at least 1. The paper uses 500.
        outer_optim, outer_optim_spec: the outer optimizer (two spellings): an `OptimSpec`, class or name. Default SGD,
            lr 0.7, momentum 0.9, Nesterov.
        outer_lr: the outer learning rate.
        compressor: how every node sends its φ − θ_k with fewer bytes, such as TopK(0.01); None: as it is.
        error_feedback: β in [0, 1], the share of what the compressor left out that a node adds to its next message.
            Default: 1 where the compressor allows it.
        options: those of every strategy; see `Strategy`. The paper's inner optimizer is
            OptimSpec("adamw", lr=4e-4, weight_decay=0.1).

    Payload: all weights every H steps; with a compressor, its message.
    """

    def __init__(
        self,
        optim_spec: Optim = None,
        /,
        outer_optim_spec: Optim = None,
        H: int = 100,
        *,
        outer_optim: Optim = None,
        outer_lr: float | None = None,
        compressor: Compressor | None = None,
        error_feedback: bool | float | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        outer = DiLoCoCommunicator(
            H,
            outer_optim_spec,
            outer_optim=outer_optim,
            outer_lr=outer_lr,
            compressor=compressor,
            error_feedback=error_feedback,
        )
        super().__init__([outer], **with_inner(optim_spec, options))
