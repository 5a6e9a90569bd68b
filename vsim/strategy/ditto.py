"""Ditto: federated averaging, and for each client a personal model, kept near the global model by a proximal term."""

from __future__ import annotations

from collections.abc import Mapping

from torch import Tensor

from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.strategy.base import Algorithm, CommunicationModule
from vsim.strategy.fedavg import FEDERATED, AveragingCommunicator
from vsim.strategy.when import When, sync_interval


class PersonalModels(CommunicationModule):
    """v_k ← v_k − η (∇F_k(v_k) + λ (v_k − φ)) at every step; φ: the round's initial weights, equal on all nodes.

    Place this module after the module that makes the weights equal. max_norm clips the gradients at θ_k only.

    Args:
        H: local steps of a round, at least 1, or a schedule of `vsim.strategy.when`.
        lam: λ, at least 0; 0.1 to 2 in the paper.
        personal_lr: η of the personal models, at least 0. Default: the inner learning rate.
    """

    outer_weights: Tensor  # φ, shared (P,)
    personal_models: Tensor  # v_k, stacked (R, P)

    def __init__(self, *, H: int | When = 10, lam: float = 0.1, personal_lr: float | None = None) -> None:
        self.lam = real_number("lam", lam, at_least=0)
        self.personal_lr = None if personal_lr is None else real_number("personal_lr", personal_lr, at_least=0)
        self.H = sync_interval(H)

    def setup(self, cluster: Cluster) -> None:
        self.keep_shared(outer_weights=cluster.weights[0].clone())
        self.keep_client(personal_models=cluster.weights.clone())

    def communicate_gradients(self, cluster: Cluster) -> None:
        models = self.personal_models
        moves = cluster.gradient(models)
        if self.lam:
            moves.add_(models - self.outer_weights, alpha=self.lam)
        moves[cluster.resting] = 0
        models.add_(moves, alpha=-(cluster.lr if self.personal_lr is None else self.personal_lr))

    def personalize(self, weights: Tensor, buffers: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        weights.copy_(own["personal_models"])

    def sync(self, cluster: Cluster) -> None:
        self.outer_weights.copy_(cluster.weights[0])


class DittoStrategy(Algorithm, of=(AveragingCommunicator, PersonalModels), names=FEDERATED):
    """FedAvg, where each client also trains a personal model near the global model: Ditto [Li et al. 2020,
    arXiv:2012.04221].

        v_k ← v_k − η (∇F_k(v_k) + λ (v_k − φ)),  θ_k ← optimizer(θ_k, g_k);  after every H-th step
        φ ← Σ_j w_j θ_j, θ_k ← φ

    Client k uses v_k, which never leaves the client; v_k and θ_k see the same batches. With λ = 0, v_k ignores φ.

    Payload: all weights every H steps.

    Deviations from the paper: with every step of θ_k, v_k takes one step of plain SGD, whatever the inner optimizer is;
    a personal model has the running statistics of the global model.
    """

    family = "federated"
