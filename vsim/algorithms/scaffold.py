"""SCAFFOLD: federated averaging, where control variates correct the drift of each client towards its own data."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.arguments import real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec
from vsim.core.fields import algorithm, state
from vsim.core.outer import SharedWeights


def share_of_joining(own: Tensor, mean: Tensor, cluster: Cluster, label: str) -> None:
    """Set the rows of joining nodes, so that shared `mean` (P,) stays the mean of all N rows.

    A joining node starts with a copy of a peer's row of stacked `own` (R, P). N·mean minus the rows of staying nodes is
    the sum of the rows of joining and absent nodes; each joining node gets an equal part of this sum.
    """
    if cluster.plan is None or not (joining := cluster.plan.joining(cluster.step)):
        return
    joins = torch.tensor([[node in joining] for node in cluster.active])[cluster.replicas.nodes]
    staying = own.masked_fill(joins.to(own.device), 0)
    here = cluster.collectives.all_reduce(staying, "mean", label=label)
    missing = cluster.population * mean - len(cluster.active) * here
    own[joins[:, 0]] = missing / (cluster.population - len(cluster.active) + len(joining))


@algorithm
class ScaffoldStrategy(SharedWeights):
    """FedAvg with control variates against the drift of clients towards their data: SCAFFOLD, with option II
    [Karimireddy et al. 2019, arXiv:1910.06378].

        θ_k ← θ_k − lr · (g_k − c_k + c)
        after every H-th step, for n nodes of a population of N:
            Δ_k = (φ − θ_k) / (H·lr) − c;  c_k ← c_k + Δ_k;  c ← c + n/N · mean_k Δ_k
            φ ← φ + η_g · mean_k (θ_k − φ);  θ_k ← φ

    (φ − θ_k) / (H·lr) + c_k − c is the mean gradient of node k in the round, and becomes the new c_k. With equal data,
    c_k and c are equal, and this is FedAvg.

    Args:
        H: local steps of a round, at least 1.
        outer_lr: η_g, above 0.

    N·c minus the c_k of nodes that stay is divided equally among joining and absent nodes. If a joining node copied a
    peer's c_k instead, c would no longer be the mean of the c_k.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights, and changes of control variates of the same size, in one message every H steps. A newly drawn
    cohort pulls c with the weights; when nodes join, the c_k are summed once.

    Raises:
        TypeError: the inner optimizer is not plain SGD: with momentum, for instance, a node's move is not its mean
            gradient.

    Deviations from the paper: under a learning-rate schedule, H·lr is the sum of the round's learning rates; if the sum
    is 0, as in the first step of a warm-up, the control variates do not change.
    """

    family = "federated"

    H: int = 10
    outer_lr: float = 1.0

    variate: Tensor = state()  # c, shared (P,)
    variates: Tensor = state()  # c_k, stacked (R, P), a row for each client
    rates: Tensor = state()  # each node's sum of learning rates over its steps of the round so far, stacked (R, 1)

    def __post_init__(self) -> None:
        self.H = whole_number("H", self.H)
        self.outer_lr = real_number("outer_lr", self.outer_lr, above=0)
        super().__post_init__()

    def check_optim(self, optim: OptimSpec) -> None:
        if (
            optim.cls is not torch.optim.SGD
            or not optim.is_single
            or optim.kwargs.get("momentum")
            or optim.kwargs.get("maximize")
        ):
            raise TypeError(
                f"the inner optimizer must be plain SGD, got {optim}; with any other, a node's move over a round is "
                "not its mean gradient"
            )

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        self.keep_shared(variate=torch.zeros_like(self.outer_weights))
        self.keep_client(variates=torch.zeros_like(cluster.weights), rates=torch.zeros_like(cluster.weights[:, :1]))

    def attend(self, cluster: Cluster) -> None:
        if cluster.plan is not None and cluster.plan.renews:  # the clients have pulled φ, but not c
            with cluster.collectives.joined():
                cluster.collectives.pull(self.variate, cluster.weights, label="pull of control variates")
        else:
            share_of_joining(self.variates, self.variate, cluster, "control variates")

    def communicate_gradients(self, cluster: Cluster) -> None:
        cluster.grads.add_(self.variate - self.variates)

    def communicate(self, cluster: Cluster) -> None:
        steps = torch.ones_like(self.rates)
        if cluster.resting:
            steps[cluster.resting] = 0
        self.rates.add_(steps, alpha=cluster.lr)
        super().communicate(cluster)

    def sync(self, cluster: Cluster) -> None:
        known = self.rates > 0  # at a rate of 0, no weight has moved
        moved = (self.outer_weights - cluster.weights).div_(torch.where(known, self.rates, 1.0))  # (R, P)
        changes = moved.sub_(self.variate * known)
        mean = cluster.collectives.all_reduce(cluster.weights, "mean", label="weights")
        with cluster.collectives.joined():
            mean_change = cluster.collectives.all_reduce(changes, "mean", label="control variates")
        self.variates.add_(changes)
        self.variate.add_(mean_change, alpha=cluster.num_nodes / cluster.population)
        self.outer_weights.lerp_(mean, self.outer_lr)
        cluster.weights.copy_(self.outer_weights)
        self.rates.zero_()

    @classmethod
    def default_inner_optim(cls) -> OptimSpec:
        return OptimSpec("sgd")
