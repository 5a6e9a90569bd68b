"""Ditto: federated averaging, and for each client a personal model, kept near the global model by a proximal term."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vsim.algorithms.fedavg import RoundAverage
from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.core.fields import algorithm, state
from vsim.core.when import When


@algorithm
class DittoStrategy(RoundAverage):
    """FedAvg, where each client also trains a personal model near the global model: Ditto [Li et al. 2020,
    arXiv:2012.04221].

        v_k ← v_k − η (∇F_k(v_k) + λ (v_k − φ)),  θ_k ← optimizer(θ_k, g_k);  after every H-th step
        φ ← Σ_j w_j θ_j, θ_k ← φ

    Client k uses v_k, which never leaves the client; v_k and θ_k see the same batches. With λ = 0, v_k ignores φ.

    Args:
        H: local steps of a round, at least 1, or a schedule of `vsim.strategy.when`.
        average: merges the weights; see `FedAvgStrategy`.
        lam: λ, at least 0; 0.1 to 2 in the paper.
        personal_lr: η of the personal models, at least 0. Default: the inner learning rate.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights every H steps.

    Deviations from the paper: with every step of θ_k, v_k takes one step of plain SGD, whatever the inner optimizer is;
    a personal model has the running statistics of the global model.
    """

    family = "federated"

    H: int | When = 10
    lam: float = 0.1
    personal_lr: float | None = None

    personal_models: Tensor = state()  # v_k, stacked (R, P)

    def __post_init__(self) -> None:
        self.lam = real_number("lam", self.lam, at_least=0)
        if self.personal_lr is not None:
            self.personal_lr = real_number("personal_lr", self.personal_lr, at_least=0)
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        self.keep_shared(outer_weights=cluster.weights[0].clone())
        self.keep_client(personal_models=cluster.weights.clone())

    def communicate_gradients(self, cluster: Cluster) -> None:
        super().communicate_gradients(cluster)
        models = self.personal_models
        moves = cluster.gradient(models)
        if self.lam:
            moves.add_(models - self.outer_weights, alpha=self.lam)
        moves[cluster.resting] = 0
        models.add_(moves, alpha=-(cluster.lr if self.personal_lr is None else self.personal_lr))

    def personalize(self, weights: Tensor, buffers: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        weights.copy_(own["personal_models"])

    def sync(self, cluster: Cluster) -> None:
        super().sync(cluster)
        self.outer_weights.copy_(cluster.weights[0])
