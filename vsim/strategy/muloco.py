"""MuLoCo: DiLoCo whose nodes train with Muon."""

from __future__ import annotations

from typing_extensions import Unpack

from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec
from vsim.strategy.average import AverageLike
from vsim.strategy.base import Algorithm, Optim, StrategyOptions
from vsim.strategy.outer import OuterStep, outer_spec
from vsim.strategy.when import When

OF_ONE_NODE = OptimSpec("sgd", lr=0.7, momentum=0.6, nesterov=True)


class MuLoCoCommunicator(OuterStep):
    """φ ← outer(φ, Δ),  Δ = average_k(φ − θ_k),  θ_k ← φ,  after every H-th step; see `MuLoCoStrategy`."""

    default_optim = OptimSpec("sgd", lr=0.8, momentum=0.9, nesterov=True)

    def __init__(
        self, H: int | When, outer_optim: Optim = None, *, outer_lr: float | None = None, average: AverageLike = "mean"
    ) -> None:
        super().__init__(H, outer_optim, outer_lr=outer_lr, average=average)
        self.spec_of_one_node = outer_spec(outer_optim, outer_lr, OF_ONE_NODE)

    def setup(self, cluster: Cluster) -> None:
        if cluster.population == 1:
            self.outer_optim_spec = self.spec_of_one_node
        super().setup(cluster)

    def sync(self, cluster: Cluster) -> None:
        phi, delta = self.outer_weights, self.outer_gradient
        delta.copy_(self.average.of_distances(phi, cluster.weights, cluster, "outer gradient"))
        self.outer_optim.step()
        cluster.weights.copy_(phi)


class MuLoCoStrategy(Algorithm):
    """DiLoCo with Muon on the hidden matrices: MuLoCo [Thérien et al. 2025, arXiv:2505.23725].

        θ_k ← Muon(θ_k, g_k) on the hidden matrices, AdamW(θ_k, g_k) on all other parameters
        after every H-th step:  Δ = mean_k (φ − θ_k);  φ ← outer optimizer(φ, Δ);  θ_k ← φ
        or, with compress(C, β):  e_k ← β e_k + (φ − θ_k);  q_k = C(e_k);  e_k ← e_k − q_k;  Δ = mean_k q_k

    Args:
        H: inner steps between syncs, at least 1, or a schedule of `vsim.strategy.when`.
        outer_optim: the outer optimizer. Default SGD with Nesterov momentum, lr 0.8 and momentum 0.9; for a single node
            lr 0.7 and momentum 0.6.
        outer_lr: the outer learning rate.
        average: how the φ − θ_k become one; with fewer bytes compress(StatisticalQuantizer(4), error_feedback=0.9). See
            `vsim.strategy.average`.
        options: see `Algorithm`. The default inner optimizer is OptimSpec("muon",
            adjust_lr_fn="match_rms_adamw", rest=OptimSpec("adamw", betas=(0.9, 0.95))), and lr is the rate of both.
            `OptimSpec` says which matrices are hidden, and how to choose others.

    Payload: all weights every H steps, or what `average` sends in their place.

    Deviations from the paper: weight decay is that of the inner optimizers, as torch has it. The authors' code divides
    it by the nodes and the steps of the run, which neither an optimizer nor its user needs to know here; for the same
    give OptimSpec("muon", weight_decay=λ/(K·T), …).
    """

    family = "local steps"

    def __init__(
        self,
        inner_optim: Optim = None,
        outer_optim: Optim = None,
        H: int | When = 30,
        *,
        outer_lr: float | None = None,
        average: AverageLike = "mean",
        **options: Unpack[StrategyOptions],
    ) -> None:
        # One learning rate for both: the steps of Muon are scaled to the size that AdamW's have. It is made here, since
        # its check multiplies matrices, and an import must start no thread of OpenMP.
        if inner_optim is None:
            adamw = OptimSpec("adamw", betas=(0.9, 0.95))
            inner_optim = OptimSpec("muon", adjust_lr_fn="match_rms_adamw", rest=adamw)
        outer = MuLoCoCommunicator(H, outer_optim, outer_lr=outer_lr, average=average)
        super().__init__([outer], inner_optim=inner_optim, **options)
