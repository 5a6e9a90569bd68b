"""q-FedAvg: federated averaging that gives clients with large losses more weight."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec
from vsim.core.average.base import norms_of
from vsim.core.fields import algorithm, state
from vsim.core.outer import SharedWeights
from vsim.core.when import When, sync_interval


@algorithm
class RoundLosses(SharedWeights):
    """Base of algorithms that use F_k, a client's loss at the shared weights, on its first batch of a round."""

    H: int | When = 10

    losses: Tensor = state()  # F_k of the round, stacked (R, 1)
    begins: bool = state()  # whether the next step is the first of a round

    def __post_init__(self) -> None:
        self.H = sync_interval(self.H)
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        self.keep_client(losses=torch.ones_like(cluster.weights[:, :1]))
        self.keep_shared(begins=True)

    def communicate_gradients(self, cluster: Cluster) -> None:
        if self.begins and cluster.losses:  # a price without training has none, and does not depend on them
            own = [cluster.losses[node] for node in cluster.collectives.nodes] or [1.0]
            now = torch.tensor(own, dtype=torch.float64).to(cluster.weights)[:, None]
            self.losses = torch.where(now.isnan(), self.losses, now)  # a client that rests has none
        self.begins = False
        super().communicate_gradients(cluster)

    def attend(self, cluster: Cluster) -> None:
        self.begins = True

    def follow(self, cluster: Cluster) -> None:
        super().follow(cluster)
        self.begins = True

    def sync(self, cluster: Cluster) -> None:
        self.meet(cluster)
        cluster.weights.copy_(self.outer_weights)
        self.begins = True

    def meet(self, cluster: Cluster) -> None:
        """Step the shared weights by the clients' weights and `losses`."""
        raise NotImplementedError


@algorithm
class QFedAvgStrategy(RoundLosses):
    """FedAvg with moves weighted by powers of the clients' losses: q-FedAvg, q-FFL [Li et al. 2019,
    arXiv:1905.10497].

        Δ_k = L (φ − θ_k), L = 1 / η;  h_k = q F_k^(q−1) ‖Δ_k‖² + L F_k^q;  φ ← φ − Σ_k F_k^q Δ_k / Σ_k h_k;  θ_k ← φ

    η is the inner learning rate of the H-th step. F_k is the client's loss at φ, before the round, on its first batch.
    The larger q, the more alike are the clients' losses. With q = 0 this is FedAvg.

    Args:
        H: steps of a round, at least 1, or a schedule of `vsim.strategy.when`.
        q: at least 0.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights and 4 bytes every H steps, in one message.

    Deviations from the paper: F_k is of a batch, not of all of a client's data; with batches of all data, they are
    equal. All clients of a cohort count alike, where the paper draws cohorts in proportion to the clients' sizes.
    """

    family = "federated"

    q: float = 1.0

    def __post_init__(self) -> None:
        self.q = real_number("q", self.q, at_least=0)
        super().__post_init__()

    def rounds_repeat(self, num_nodes: int) -> int | None:
        return 1 if self.schedule.is_constant else None  # after a step with a rate of 0, nothing is sent

    def meet(self, cluster: Cluster) -> None:
        if not cluster.lr:  # no client has moved
            return
        moves, F = (self.outer_weights - cluster.weights).div_(cluster.lr), self.losses.clamp(min=1e-10)
        h = self.q * F ** (self.q - 1) * norms_of(moves) ** 2 + F**self.q / cluster.lr
        message = torch.cat([F**self.q * moves, h.to(moves)], 1)
        total = cluster.collectives.all_reduce(message, "sum", label="weighted moves")  # (P + 1,)
        self.outer_weights.sub_(total[:-1] / total[-1])

    @classmethod
    def default_inner_optim(cls) -> OptimSpec:
        return OptimSpec("sgd")  # of whose moves L = 1 / η is the scale
