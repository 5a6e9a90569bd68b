"""DiLoCo: train alone for H steps, then step a shared copy of the weights with an outer optimizer."""

from __future__ import annotations

from typing_extensions import Unpack

from vsim.strategy.base import Optim, Strategy, StrategyOptions, with_inner
from vsim.strategy.clipping import MaxNodeNorm
from vsim.strategy.compression import Compressor
from vsim.strategy.mergers import MergerLike
from vsim.strategy.streaming import StreamingDiLoCoCommunicator


class DiLoCoCommunicator(StreamingDiLoCoCommunicator):
    """After every H-th step the mean distance that the nodes have come is the outer optimizer's gradient.

    Args:
        H: steps between syncs.
        outer_optim_spec, outer_optim: the outer optimizer (two spellings; give one). Default SGD with lr 0.7, momentum
            0.9, Nesterov.
        outer_lr: its learning rate.
        compressor: how to send the distances φ − θ_k with fewer bytes; None: as they are.
        error_feedback: β in [0, 1], the share of what a compressor left out that is sent later; see
            `CompressedAverage`.
        merger: how the distances become one, if not by their mean.
        weighting: "uniform", or "examples": by the number of examples that a node has.
        max_node_norm: the 2-norm that a node's distance is scaled to at most, or "median".
    """

    def __init__(
        self,
        H: int = 100,
        outer_optim_spec: Optim = None,
        *,
        outer_optim: Optim = None,
        outer_lr: float | None = None,
        compressor: Compressor | None = None,
        error_feedback: bool | float | None = None,
        merger: MergerLike = "mean",
        weighting: str = "uniform",
        max_node_norm: MaxNodeNorm = None,
    ) -> None:
        super().__init__(
            H,
            outer_optim_spec,
            outer_optim=outer_optim,
            outer_lr=outer_lr,
            fragments=1,
            compressor=compressor,
            error_feedback=error_feedback,
            merger=merger,
            weighting=weighting,
            max_node_norm=max_node_norm,
        )


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
        merger: how the φ − θ_k become one: "mean", "median", trimmed_mean(0.2), krum(faulty=1), "rda", "iso", or a
            function of one's own; see `Merger`.
        weighting: "uniform" or "examples" (a node's share in the mean is its share of the examples); without
            compressor=, whose messages arrive as their plain mean.
        max_node_norm: scale every node's φ − θ_k to at most this 2-norm before it is sent; "median": the median of all
            nodes' norms.
        options: those of every strategy; see `Strategy`. The paper's inner optimizer is
            OptimSpec("adamw", lr=4e-4, weight_decay=0.1).

    Payload: all weights every H steps; with a compressor, its message. The "median" of norms takes 4 bytes more.
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
        merger: MergerLike = "mean",
        weighting: str = "uniform",
        max_node_norm: MaxNodeNorm = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        outer = DiLoCoCommunicator(
            H,
            outer_optim_spec,
            outer_optim=outer_optim,
            outer_lr=outer_lr,
            compressor=compressor,
            error_feedback=error_feedback,
            merger=merger,
            weighting=weighting,
            max_node_norm=max_node_norm,
        )
        super().__init__([outer], **with_inner(optim_spec, options))
