"""FedPer: federated averaging of all but some layers, which stay with their client."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import ClassVar

from torch import Tensor

from vsim.algorithms.fedavg import RoundAverage
from vsim.cluster import Cluster
from vsim.cluster.optim import matching
from vsim.core.fields import algorithm, state
from vsim.core.fragments import Fragment
from vsim.core.when import When

Personal = str | Sequence[str] | None


@algorithm
class FedPerStrategy(RoundAverage):
    """FedAvg of all but the last layer, or other parameters, which stay with their client: FedPer
    [Arivazhagan et al. 2019, arXiv:1912.00818].

        θ_k ← optimizer(θ_k, g_k);  after every H-th step θ_k[shared] ← Σ_j w_j θ_j[shared]

    Personal parameters never leave a client. Until a client first takes part, they have initial values. The validated
    global model has the mean of the nodes' personal parameters, which no client uses. `local_loss` is the loss of node
    0's own model; give `client_val_dataset` to measure every client's own model.

    Args:
        H: local steps between averagings, at least 1.
        personal: names of parameters, or patterns such as "layers.3.*". Default: the last layer's parameters.
        average: merges the shared parameters; see `FedAvgStrategy`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: the shared weights every H steps.

    Deviations from the paper: H counts steps, not epochs.
    """

    family = "federated"
    derived: ClassVar[tuple[str, ...]] = ("shared", "own")

    H: int | When = 10
    personal: Personal = None

    personal_weights: Tensor = state()  # each client's personal parameters, as last recorded, stacked (R, p)

    def __post_init__(self) -> None:
        self.personal = [self.personal] if isinstance(self.personal, str) else self.personal
        if self.personal is not None:
            named = isinstance(self.personal, Sequence) and all(isinstance(name, str) for name in self.personal)
            if not (named and self.personal):
                raise TypeError(f"personal must be a name or names of parameters, got {self.personal!r}")
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        layout = cluster.replicas.layout
        names = [c.name for c in layout]
        last, dot, _ = names[-1].rpartition(".")
        chosen = self.personal or [f"{last}.*" if dot else names[-1]]
        own = matching("personal", chosen, names)
        if len(own) == len(names):
            raise ValueError(f"personal={chosen} are all parameters of the model, and nothing is left to average")
        self.own = Fragment([c for c in layout if c.name in own])
        self.shared = Fragment([c for c in layout if c.name not in own])
        self.keep_client(personal_weights=self.own.of(cluster.weights).clone())
        super().setup(self.shared.alone(cluster))

    def setup_warmup(self, cluster: Cluster) -> None:
        super().setup_warmup(self.shared.alone(cluster))

    @property
    def personal_bytes(self) -> int:
        return self.personal_weights[0].nbytes

    def shared_weights(self, weights: Tensor) -> Tensor:
        return self.shared.of(weights)

    def attend(self, cluster: Cluster) -> None:
        if cluster.plan is not None and cluster.plan.renews:
            for view, kept in zip(self.own.views(cluster.weights), self.own.cut(self.personal_weights), strict=True):
                view.copy_(kept)

    def communicate_gradients(self, cluster: Cluster) -> None:
        if self.when.is_warmup(cluster.step):
            part = self.shared.alone(cluster)
            super().communicate_gradients(part)
            self._write(cluster.grads, part.grads)

    def follow(self, cluster: Cluster) -> None:
        self.remember(cluster)
        super().follow(cluster)

    def sync(self, cluster: Cluster) -> None:
        self.remember(cluster)
        part = self.shared.alone(cluster)
        super().sync(part)
        self._write(cluster.weights, part.weights)

    def remember(self, cluster: Cluster) -> None:
        self.personal_weights.copy_(self.own.of(cluster.weights))

    def personalize(self, weights: Tensor, buffers: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> None:
        for view, kept in zip(self.own.views(weights), self.own.cut(own["personal_weights"]), strict=True):
            view.copy_(kept)

    def _write(self, rows: Tensor, averaged: Tensor) -> None:
        for view, own in zip(self.shared.views(rows), self.shared.cut(averaged), strict=True):
            view.copy_(own)
