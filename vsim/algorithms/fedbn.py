"""FedBN: federated averaging of all layers but the normalization layers, which stay with their client."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor, nn

from vsim.algorithms.fedper import FedPerStrategy, Personal
from vsim.cluster import Cluster
from vsim.core.fields import algorithm, state

NORMS = (nn.modules.batchnorm._BatchNorm, nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)


@algorithm
class FedBNStrategy(FedPerStrategy):
    """FedAvg of all but the normalization layers, which stay with their client: FedBN [Li et al. 2021,
    arXiv:2102.07623].

        θ_k ← optimizer(θ_k, g_k);  after every H-th step θ_k[all but norms] ← Σ_j w_j θ_j[all but norms]

    The parameters and running statistics of batch, group, layer and RMS norms never leave a client.

    Args:
        H: local steps between averagings, at least 1, or a schedule of `vsim.strategy.when`.
        average: merges the shared parameters; see `FedAvgStrategy`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: the shared weights every H steps.

    Deviations from the paper: H counts steps, not epochs; normalization layers other than batch norm stay local, too.
    """

    family = "federated"

    personal: Personal = state(default=None)

    buffers: tuple[str, ...] = state(default=())

    def setup(self, cluster: Cluster) -> None:
        modules = cluster.replicas.module.named_modules()
        prefixes = [name for name, module in modules if isinstance(module, NORMS)]
        names = [c.name for c in cluster.replicas.layout]
        self.personal = [name for name in names if any(name.rpartition(".")[0] == p for p in prefixes)]
        if not self.personal:
            raise ValueError("FedBN: the model has no normalization layer with parameters, which clients would keep")
        super().setup(cluster)
        buffers = cluster.replicas.buffers
        self.buffers = tuple(name for name in buffers if any(name.rpartition(".")[0] == p for p in prefixes))
        self.keep_client(**{f"buffer_{i}": buffers[name].clone() for i, name in enumerate(self.buffers)})

    @property
    def personal_buffers(self) -> tuple[str, ...]:
        return self.buffers

    def attend(self, cluster: Cluster) -> None:
        super().attend(cluster)
        if cluster.plan is not None and cluster.plan.renews:
            for i, name in enumerate(self.buffers):
                cluster.replicas.buffers[name].copy_(getattr(self, f"buffer_{i}"))

    def remember(self, cluster: Cluster) -> None:
        super().remember(cluster)
        for i, name in enumerate(self.buffers):
            getattr(self, f"buffer_{i}").copy_(cluster.replicas.buffers[name])

    def personalize(self, weights: Tensor, buffers: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        super().personalize(weights, buffers, own)
        for i, name in enumerate(self.buffers):
            buffers[name].copy_(own[f"buffer_{i}"])
