"""Streaming DiLoCo: the outer step fragment by fragment, with communication that overlaps training."""

from __future__ import annotations

import copy
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.optim import Optimizer

from vsim.arguments import one_of, real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.collectives import Pending
from vsim.cluster.optim import OptimSpec
from vsim.cluster.optimizers import JointOptimizers, evaluating
from vsim.core.algorithm import Algorithm, Optim
from vsim.core.average import Averaging
from vsim.core.fields import algorithm, state
from vsim.core.fragments import PATTERNS, Fragments, checked_fragments, first_step, fragments_of
from vsim.core.outer import outer_optimizer, outer_spec


@algorithm
class StreamingDiLoCoStrategy(Algorithm):
    """DiLoCo, one fragment of the layers at a time, while training continues: Streaming DiLoCo [Douillard et al. 2025,
    arXiv:2501.18512].

        θ_k ← inner optimizer(θ_k, g_k)
        fragment i of P, after step ⌊(i+1)·H/P⌋ and every H steps from there:  send Δ_k = φ − θ_k
        τ steps later:  φ ← outer optimizer(φ, mean_k Δ_k);  θ_k ← α θ_k + (1 − α) φ

    Each fragment has its own outer optimizer. Sending overlaps with τ steps of training. With one fragment, τ = 0 and α
    = 0, this is DiLoCo.

    Args:
        H: inner steps between two syncs of one fragment, at least P. The paper uses 100.
        outer_optim, outer_lr: see `DiLoCoStrategy`.
        fragments: P; or P lists of names of parameters or of modules (with all their parameters). Default: a fragment
            for each layer. Layers are the numbered modules, such as blocks.3; parameters of no layer (embedding, final
            norm, head) are in the first fragment. With more fragments than layers, modules inside the layers take the
            layers' place.
        pattern: "strided" (layer l is in fragment l mod P) or "sequential" (a fragment has neighbouring layers).
        delay: τ, steps from sending to applying, 0 ≤ τ < H.
        mixing: α in [0, 1], the share of a node's own weights that stays. The paper uses 0.5.
        outer_step: "due" steps φ when the mean is due, as in the paper; "send" steps φ when the mean is sent. The
            nodes' weights are the same either way; only the global model φ differs, from sending until due.
        average: merges the Δ_k of each fragment, such as "mean" or, in the paper, compress(FP4()); see
            `vsim.strategy.average`.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: each fragment's weights, or the messages of `average`, every H steps.

    Deviations from the paper: H and τ count steps of the run, not of a fragment.
    """

    family = "local steps"
    derived = ("outer_gradient", "pieces")
    resolved = ("outer_optim", "outer_lr")

    outer_optim: Optim = None
    H: int = 100
    outer_lr: float | None = None
    fragments: Fragments = None
    pattern: str = "strided"
    delay: int = 0
    mixing: float = 0.0
    outer_step: str = "due"
    average: Averaging = Averaging("mean")

    outer_weights: Tensor = state()  # φ, shared (P,)
    outer_optim_spec: OptimSpec = state()
    outer_optims: list[Optimizer] = state()  # one for each fragment
    pending: list[tuple[int, Pending]] = state()  # (number of a fragment, its Δ (n,)), the oldest first

    def __post_init__(self) -> None:
        self.H = whole_number("H", self.H)
        self.outer_optim_spec = outer_spec(self.outer_optim, self.outer_lr)
        self.fragments = checked_fragments(self.fragments, self.H)
        one_of("pattern", self.pattern, PATTERNS)
        self.delay = whole_number("delay", self.delay, at_least=0)
        if self.delay >= self.H:
            raise ValueError(
                f"delay must be below H, after which a fragment is sent again; got {self.delay} for H={self.H}"
            )
        one_of("outer_step", self.outer_step, ("due", "send"))
        if self.outer_step == "send" and not self.delay:
            raise TypeError("outer_step='send' has no effect without delay=")
        self.mixing = real_number("mixing", self.mixing, at_least=0, at_most=1)
        super().__post_init__()

    @property
    def first_step(self) -> int:
        return first_step(0, self.H, len(self.pieces)) + self.delay

    def setup(self, cluster: Cluster) -> None:
        self.pieces = fragments_of(cluster.replicas.layout, self.fragments, self.pattern)
        if len(self.pieces) > self.H:
            raise ValueError(f"H must be at least the number of fragments, {len(self.pieces)}, got {self.H}")
        phi = cluster.weights[0].clone()
        self.outer_gradient = torch.zeros_like(phi)  # Δ, shared (P,)
        spec, gradient = self.outer_optim_spec, self.outer_gradient
        optims = [outer_optimizer(spec, cluster, phi, gradient, part) for part in self.pieces]
        self.keep_shared(outer_weights=phi, outer_optims=optims, pending=[])
        self.averages = [copy.deepcopy(self.average) for _ in self.pieces]
        for part, average in zip(self.pieces, self.averages, strict=True):
            average.setup(part.alone(cluster))

    def communicate(self, cluster: Cluster) -> None:
        for i in range(len(self.pieces)):
            if (cluster.step - first_step(i, self.H, len(self.pieces))) % self.H == 0:
                self.pending.append((i, self._send(cluster, i)))
                if self.outer_step == "send":
                    self._step(i, self.pending[-1][1].arrived())
        while self.pending and self.pending[0][1].due == cluster.step:
            i, pending = self.pending.pop(0)
            delta = pending.result()
            if self.outer_step == "due":
                self._step(i, delta)
            self._mix(cluster, i)

    def syncs_now(self, step: int) -> bool:
        first = (first_step(i, self.H, len(self.pieces)) + self.delay for i in range(len(self.pieces)))
        return any(step >= one and (step - one) % self.H == 0 for one in first)

    def _send(self, cluster: Cluster, i: int) -> Pending:
        """Start averaging φ − θ_k on fragment i."""
        part = self.pieces[i]
        label = "outer gradient" if len(self.pieces) == 1 else f"outer gradient of fragment {i}"
        phi, rows = part.of(self.outer_weights), part.of(cluster.weights)  # (n,), (R, n)
        return self.averages[i].start_of_distances(phi, rows, part.alone(cluster), label, self.delay)

    def _step(self, i: int, delta: Tensor) -> None:
        """φ ← outer optimizer(φ, Δ) on fragment i, with Δ (n,)."""
        for own, piece in zip(self.pieces[i].views(self.outer_gradient), self.pieces[i].cut(delta), strict=True):
            own.copy_(piece)
        self.outer_optims[i].step()

    def _mix(self, cluster: Cluster, i: int) -> None:
        """θ_k ← α θ_k + (1 − α) φ on fragment i."""
        part = self.pieces[i]
        for own, phi in zip(part.views(cluster.weights), part.views(self.outer_weights), strict=True):
            if self.mixing:
                own.mul_(self.mixing).add_(phi * (1 - self.mixing))
            else:
                own.copy_(phi)

    def global_weights(self, cluster: Cluster) -> Tensor:
        return self.outer_weights

    def evaluating(self) -> AbstractContextManager[None]:
        return evaluating(JointOptimizers(self.outer_optims), self.outer_weights)
