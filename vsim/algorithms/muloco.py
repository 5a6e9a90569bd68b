"""MuLoCo: DiLoCo whose nodes train with Muon."""

from __future__ import annotations

from vsim.algorithms.diloco import DiLoCoStrategy
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec
from vsim.core.fields import algorithm
from vsim.core.outer import outer_spec
from vsim.core.when import When

OF_ONE_NODE = OptimSpec("sgd", lr=0.7, momentum=0.6, nesterov=True)


@algorithm
class MuLoCoStrategy(DiLoCoStrategy):
    """DiLoCo with Muon on the hidden matrices: MuLoCo [Thérien et al. 2025, arXiv:2505.23725].

    The default inner optimizer is OptimSpec("muon", adjust_lr_fn="match_rms_adamw", rest=OptimSpec("adamw", betas=(0.9,
    0.95))), and lr is the rate of both. `OptimSpec` says which matrices are hidden, and how to choose others.

        θ_k ← Muon(θ_k, g_k) on the hidden matrices, AdamW(θ_k, g_k) on all other parameters
        after every H-th step:  Δ = mean_k (φ − θ_k);  φ ← outer optimizer(φ, Δ);  θ_k ← φ
        or, with compress(C, β):  e_k ← β e_k + (φ − θ_k);  q_k = C(e_k);  e_k ← e_k − q_k;  Δ = mean_k q_k

    Args:
        H: inner steps between syncs, at least 1, or a schedule of `vsim.strategy.when`.
        outer_optim: the outer optimizer. Default SGD with Nesterov momentum, lr 0.8 and momentum 0.9; for a single node
            lr 0.7 and momentum 0.6.
        outer_lr: the outer learning rate.
        average: merges the φ − θ_k; to send fewer bytes, compress(StatisticalQuantizer(4), error_feedback=0.9). See
            `vsim.strategy.average`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights, or the messages of `average`, every H steps.

    Deviations from the paper: weight decay is defined as in torch. The authors' code divides weight decay by the number
    of nodes and the steps of the run; for the same effect, give OptimSpec("muon", weight_decay=λ/(K·T), …).
    """

    family = "local steps"
    default_outer = OptimSpec("sgd", lr=0.8, momentum=0.9, nesterov=True)

    H: int | When = 30

    def __post_init__(self) -> None:
        self.spec_of_one_node = outer_spec(self.outer_optim, self.outer_lr, OF_ONE_NODE)
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        if cluster.population == 1:
            self.outer_optim_spec = self.spec_of_one_node
        super().setup(cluster)

    @classmethod
    def default_inner_optim(cls) -> OptimSpec:
        # One learning rate serves both: Muon's steps are scaled to the size of AdamW's. The spec is made here, since
        # its check multiplies matrices, and an import must not start OpenMP's threads.
        adamw = OptimSpec("adamw", betas=(0.9, 0.95))
        return OptimSpec("muon", adjust_lr_fn="match_rms_adamw", rest=adamw)
