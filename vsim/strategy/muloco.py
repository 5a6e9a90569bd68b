"""MuLoCo: DiLoCo whose nodes train with Muon."""

from __future__ import annotations

from typing_extensions import Unpack

from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec, resolve_optim
from vsim.strategy.base import Optim, Strategy, StrategyOptions, with_inner
from vsim.strategy.compression import Compressor
from vsim.strategy.diloco import DiLoCoCommunicator

OUTER = OptimSpec("sgd", lr=0.8, momentum=0.9, nesterov=True)
OUTER_OF_ONE_NODE = OptimSpec("sgd", lr=0.7, momentum=0.6, nesterov=True)


class MuLoCoStrategy(Strategy):
    """DiLoCo with Muon inside [Thérien et al. 2025, arXiv:2505.23725].

        θ_k ← Muon(θ_k, g_k) on the hidden matrices, AdamW(θ_k, g_k) on all other parameters
        after every H-th step:  Δ = mean_k (φ − θ_k);  φ ← outer optimizer(φ, Δ);  θ_k ← φ
        or, with a compressor C:  e_k ← β e_k + (φ − θ_k);  q_k = C(e_k);  e_k ← e_k − q_k;  Δ = mean_k q_k

    Args:
        H: inner steps between syncs, at least 1.
        outer_optim, outer_optim_spec: the outer optimizer (two spellings). Default SGD with Nesterov momentum, lr 0.8
            and momentum 0.9; for a single node lr 0.7 and momentum 0.6.
        outer_lr: the outer learning rate.
        compressor: how every node sends its φ − θ_k with fewer bytes, such as StatisticalQuantizer(4); None: as it is.
        error_feedback: β in [0, 1]. Default: 0.9 where the compressor allows it.
        options: those of every strategy; see `Strategy`. The default inner optimizer is OptimSpec("muon",
            adjust_lr_fn="match_rms_adamw", rest=OptimSpec("adamw", betas=(0.9, 0.95))), and lr is the rate of both.
            `OptimSpec` says which matrices are hidden, and how to choose others.

    Payload: all weights every H steps; with a compressor, its message.

    Deviations from the paper: weight decay is that of the inner optimizers, as torch has it. The authors' code divides
    it by the nodes and the steps of the run, which neither an optimizer nor its user needs to know here; for the same
    give OptimSpec("muon", weight_decay=λ/(K·T), …).
    """

    def __init__(
        self,
        optim_spec: Optim = None,
        /,
        outer_optim_spec: Optim = None,
        H: int = 30,
        *,
        outer_optim: Optim = None,
        outer_lr: float | None = None,
        compressor: Compressor | None = None,
        error_feedback: bool | float | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        options = with_inner(optim_spec, options)
        if options.get("optim_spec") is None and options.get("inner_optim") is None:
            # One learning rate for both: the steps of Muon are scaled to the size that AdamW's have.
            options["optim_spec"] = OptimSpec(
                "muon", adjust_lr_fn="match_rms_adamw", rest=OptimSpec("adamw", betas=(0.9, 0.95))
            )
        if error_feedback is None and getattr(compressor, "contractive", False):
            error_feedback = 0.9
        spellings = {"outer_optim_spec": outer_optim_spec, "outer_optim": outer_optim}
        self.outer_specs = [
            resolve_optim("MuLoCoStrategy()", spellings, {"outer_lr": outer_lr}, default)
            for default in (OUTER, OUTER_OF_ONE_NODE)
        ]
        self.outer = DiLoCoCommunicator(H, self.outer_specs[0], compressor=compressor, error_feedback=error_feedback)
        super().__init__([self.outer], **options)

    def setup(self, cluster: Cluster) -> None:
        self.outer.outer_optim_spec = self.outer_specs[cluster.num_nodes == 1]
        super().setup(cluster)
