"""FedPer: federated averaging of all layers but some, which are every client's own."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor
from typing_extensions import Unpack

from vsim.arguments import whole_number
from vsim.cluster import Cluster
from vsim.cluster.optim import matching
from vsim.strategy.base import Optim, Strategy, StrategyOptions, with_inner
from vsim.strategy.clipping import MaxNodeNorm
from vsim.strategy.fedavg import AveragingCommunicator
from vsim.strategy.fragments import Fragment
from vsim.strategy.mergers import MergerLike

Personal = str | Sequence[str] | None


class PersonalAverage(AveragingCommunicator):
    """As `AveragingCommunicator`, but for personal parameters; see `FedPerStrategy`."""

    personal_weights: Tensor  # as clients left them, stacked (R, p)
    derived = ("shared", "own")

    def __init__(
        self,
        every: int = 1,
        personal: Personal = None,
        weighting: str = "uniform",
        merger: MergerLike = "mean",
        max_node_norm: MaxNodeNorm = None,
    ) -> None:
        super().__init__(None, every, weighting, merger, max_node_norm)
        self.personal = [personal] if isinstance(personal, str) else personal
        named = isinstance(self.personal, Sequence) and all(isinstance(name, str) for name in self.personal)
        if personal is not None and not (named and self.personal):
            raise TypeError(f"personal must be a name or names of parameters, got {personal!r}")

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

    @property
    def personal_bytes(self) -> int:
        return self.personal_weights[0].nbytes

    def attend(self, cluster: Cluster) -> None:
        if cluster.plan is not None and cluster.plan.renews:
            for view, kept in zip(self.own.views(cluster.weights), self.own.cut(self.personal_weights), strict=True):
                view.copy_(kept)

    def communicate(self, cluster: Cluster) -> None:
        if cluster.step % self.every:
            return
        self.personal_weights.copy_(self.own.of(cluster.weights))
        part = self.shared.alone(cluster)
        super().communicate(part)
        for view, averaged in zip(self.shared.views(cluster.weights), self.shared.cut(part.weights), strict=True):
            view.copy_(averaged)


class FedPerStrategy(Strategy):
    """Federated learning with personalization layers [Arivazhagan et al. 2019, arXiv:1912.00818].

        θ_k ← optimizer(θ_k, g_k);  after every H-th step θ_k[shared] ← Σ_j w_j θ_j[shared]

    Personal parameters never leave a client. Those of a client which has not taken part yet are the model's. The global
    model that is evaluated has their mean over the nodes, which is nobody's: `local_loss` is that of node 0.

    Args:
        H: local steps between averagings, at least 1.
        personal: names of parameters, or patterns such as "layers.3.*". Default: those of the last layer.
        weighting, merger, max_node_norm: as of `FedAvgStrategy`, for what is shared.
        options: those of every strategy; see `Strategy`.

    Payload: the shared weights every H steps.

    Deviations from the paper: H counts steps, not epochs.
    """

    def __init__(
        self,
        optim_spec: Optim = None,
        /,
        H: int = 10,
        personal: Personal = None,
        *,
        weighting: str = "uniform",
        merger: MergerLike = "mean",
        max_node_norm: MaxNodeNorm = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        average = PersonalAverage(whole_number("H", H), personal, weighting, merger, max_node_norm)
        super().__init__([average], **with_inner(optim_spec, options))
