"""FedRep: clients train their own heads and a common representation in turn, and average the representation."""

from __future__ import annotations

from torch import Tensor

from vsim.algorithms.fedper import FedPerStrategy
from vsim.arguments import whole_number
from vsim.cluster import Cluster
from vsim.core.fields import algorithm, state
from vsim.core.fragments import Fragment
from vsim.core.when import When


@algorithm
class FedRepStrategy(FedPerStrategy):
    """FedPer that trains each client's head first, and then the representation under it: FedRep [Collins et al. 2021,
    arXiv:2102.07078].

        steps 1 to a of a round: θ_k[head] ← optimizer(θ_k[head], g_k); later steps: θ_k[shared] ← optimizer(…);
        after every H-th step θ_k[shared] ← Σ_j w_j θ_j[shared]

    The part that a step does not train stays unchanged. See `FedPerStrategy` for personal parameters.

    Args:
        H: local steps of a round, at least 2, or a schedule of `vsim.strategy.when`.
        head_steps: a, the number of steps at the start of a round that train the head; at least 1, and below H.
            Default: half of the round.
        personal: the head: names of parameters, or patterns such as "layers.3.*". Default: the last layer's parameters.
        average: merges the shared parameters; see `FedAvgStrategy`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: the shared weights every H steps.

    Deviations from the paper: H counts steps, not epochs. An optimizer with momentum sees a gradient of zero for the
    part that is not trained.
    """

    family = "federated"
    derived = ("resting",)

    head_steps: int | None = None

    begun: int = state()  # the step after which the round began
    length: int = state()  # the number of steps of the round
    # during a step: the untrained part, and its weights (R, p)
    resting: tuple[Fragment, Tensor] | None = state(default=None)

    def __post_init__(self) -> None:
        most = None
        if not isinstance(self.H, When):
            most = whole_number("H", self.H, at_least=2) - 1  # leaves a step for the representation
        if self.head_steps is not None:
            self.head_steps = whole_number("head_steps", self.head_steps, at_most=most)
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        self.keep_shared(begun=0, length=self.when.until_next(cluster))

    def communicate_gradients(self, cluster: Cluster) -> None:
        super().communicate_gradients(cluster)
        if not self.when.is_warmup(cluster.step):
            of_head = self.length // 2 if self.head_steps is None else min(self.head_steps, self.length - 1)
            part = self.shared if cluster.step - self.begun <= of_head else self.own
            self.resting = part, part.of(cluster.weights).clone()
            for view in part.views(cluster.grads):
                view.zero_()

    def communicate(self, cluster: Cluster) -> None:
        if self.resting is not None:  # undo changes by momentum and weight decay
            part, kept = self.resting
            for view, own in zip(part.views(cluster.weights), part.cut(kept), strict=True):
                view.copy_(own)
            self.resting = None
        super().communicate(cluster)

    def follow(self, cluster: Cluster) -> None:
        super().follow(cluster)
        self._begin_round(cluster)

    def sync(self, cluster: Cluster) -> None:
        super().sync(cluster)
        self._begin_round(cluster)

    def _begin_round(self, cluster: Cluster) -> None:
        self.begun, self.length = cluster.step, self.when.until_next(cluster)
