"""EDiT: DiLoCo that leaves out nodes with unusually long moves, and weights all others by the length of their moves."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.arguments import real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec
from vsim.core.average import Average, Averaging, edit
from vsim.core.average.base import positive
from vsim.core.average.merging import Edit, tensor_norms, weighted_by_tensor
from vsim.core.fields import algorithm, state
from vsim.core.outer import OuterStep

ALPHA = 0.02  # the weight of a new norm in the moving averages


@algorithm
class EDiTStrategy(OuterStep):
    """DiLoCo that leaves out anomalous nodes, and weights all others by the length of their moves: EDiT [Cheng et al.
    2024, arXiv:2412.07210].

        θ_k ← inner optimizer(θ_k, g_k)
        after every H-th step, for each parameter tensor:
            D_k = φ − θ_k;  w_k = softmax_k(−‖D_k‖ / temperature), 0 where ‖D_k‖ is anomalous;  Δ = Σ_k w_k D_k
        Δ ← Δ · min(1, outer_max_norm / ‖Δ‖);  φ ← outer optimizer(φ, Δ);  θ_k ← φ

    ‖D_k‖ is anomalous if it is not finite, or if z > threshold · max(1, σ), where z is ‖D_k‖ minus the moving average
    of the node's past norms, in standard deviations, and σ the standard deviation of the last `gate_after` z. Anomalous
    norms do not enter the moving average. A tensor whose moves are all anomalous does not change.

    Args:
        H: inner steps between syncs, at least 1, or a schedule of `vsim.strategy.when`: PostLocal(w, H) averages
            gradients during a warm-up, as the paper does; Seconds(T) syncs by the clock, which is A-EDiT.
        outer_optim: see `DiLoCoStrategy`. Default SGD, lr 0.8, momentum 0.85, Nesterov.
        outer_lr: the outer learning rate.
        average: edit(temperature), with a temperature above 0; see `vsim.strategy.average.edit`.
        threshold: see above; above 0.
        gate_after: syncs of a node before any norm is judged, at least 1.
        outer_max_norm: the largest 2-norm of Δ, above 0; None for no limit.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights and 4 bytes for each parameter tensor every H steps.

    Deviations from the paper: tensors, not modules, are judged and weighted. In a node's first 50 syncs, the moving
    average is a plain mean, so that 10 syncs suffice to judge a norm. The outer momentum of an unchanged tensor decays.
    """

    family = "local steps"
    default_outer = OptimSpec(torch.optim.SGD, lr=0.8, momentum=0.85, nesterov=True)

    average: Averaging = Averaging(edit)
    threshold: float = 3.0
    gate_after: int = 10
    outer_max_norm: float | None = 10.0

    mean: Tensor = state()  # moving average of the norms of a client's moves, per parameter tensor, stacked (R, L)
    variance: Tensor = state()  # variance of these norms, stacked (R, L)
    count: Tensor = state()  # number of norms in mean and variance, stacked (R, L)
    scores: Tensor = state()  # z of the last syncs, stacked (R, L, gate_after)

    def __post_init__(self) -> None:
        if len(self.average.parts) > 1 or not isinstance(self.average.rule, Edit):
            raise TypeError(
                f"EDiT: average must be edit(temperature), got {self.average!r}; DiLoCoStrategy takes the others"
            )
        self.average.refuses_attack = "EDiT weighs moves by their norms itself"
        self.threshold = real_number("threshold", self.threshold, above=0)
        self.gate_after = whole_number("gate_after", self.gate_after)
        if self.outer_max_norm is not None:
            self.outer_max_norm = real_number("outer_max_norm", self.outer_max_norm, above=0)
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        zeros = cluster.weights.new_zeros(len(cluster.weights), len(cluster.replicas.layout))
        scores = zeros.new_zeros(*zeros.shape, self.gate_after)
        self.keep_client(mean=zeros, variance=zeros.clone(), count=zeros.clone(), scores=scores)

    def setup_warmup(self, cluster: Cluster) -> None:
        self.warmup = Average()  # the plain mean, as in the paper

    def sync(self, cluster: Cluster) -> None:
        phi, delta = self.outer_weights, self.outer_gradient
        moves, rule = phi - cluster.weights, self.average.rule  # (R, P)
        assert isinstance(rule, Edit)
        norms = self.gate(tensor_norms(moves, cluster))  # (R, L), infinite where a node is left out
        norms = cluster.collectives.all_gather(norms, label="outer gradient: norms")  # (K, L)
        delta.copy_(weighted_by_tensor(moves, rule.shares(norms), cluster, "outer gradient"))
        if self.outer_max_norm is not None:
            delta.mul_((self.outer_max_norm / positive(torch.linalg.vector_norm(delta))).clamp(max=1.0))
        before = phi.clone()
        self.outer.step()
        views = zip(*(cluster.replicas.views(row[None]).values() for row in (phi, before)), strict=True)
        for (now, then), counted in zip(views, norms.isfinite().any(0), strict=True):
            now.copy_(torch.where(counted, now, then))  # a tensor whose moves are all left out does not change
        cluster.weights.copy_(phi)

    def gate(self, norms: Tensor) -> Tensor:
        """Return `norms` (R, L), infinite where anomalous; update the moving averages with all other norms."""
        away = norms - self.mean
        judged = (self.count >= self.gate_after) & (self.variance > 0)
        z = torch.where(judged, away / positive(self.variance).sqrt(), 0.0)
        anomalous = ~norms.isfinite() | (z > self.threshold * self.scores.std(2, correction=0).clamp(min=1.0))
        share = (1 / (self.count + 1)).clamp(min=ALPHA)  # in the first syncs, this gives the plain mean and variance
        self.variance = torch.where(anomalous, self.variance, (1 - share) * (self.variance + share * away.square()))
        self.mean = torch.where(anomalous, self.mean, self.mean + share * away)
        self.count = self.count + (~anomalous).to(self.count)
        later = torch.cat([self.scores[:, :, 1:], z[:, :, None]], dim=2)
        self.scores = torch.where(anomalous[:, :, None], self.scores, later)
        return norms.masked_fill(anomalous, torch.inf)
