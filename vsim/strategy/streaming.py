"""Streaming DiLoCo: the outer step fragment by fragment, with communication that overlaps training."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from contextlib import AbstractContextManager

import torch
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import Unpack

from vsim.arguments import one_of, real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.collectives import Pending
from vsim.cluster.optim import OptimSpec, resolve_optim
from vsim.cluster.optimizers import JointOptimizers, evaluating
from vsim.strategy.base import CommunicationModule, Optim, Strategy, StrategyOptions, with_inner
from vsim.strategy.clipping import MaxNodeNorm, checked_node_norm, clip_rows_
from vsim.strategy.compression import CompressedAverage, Compressor
from vsim.strategy.fragments import PATTERNS, Fragment, Fragments, fragments_of
from vsim.strategy.mergers import WEIGHTINGS, MergerLike, merge, resolve_merger, shares

DEFAULT_OUTER = OptimSpec(torch.optim.SGD, lr=0.7, momentum=0.9, nesterov=True)


def outer_optimizers(
    spec: OptimSpec, parts: Sequence[Fragment], weights: Tensor, gradient: Tensor, exact: bool
) -> list[Optimizer]:
    """Return an outer optimizer for each fragment, which steps its columns of shared `weights` (P,) by `gradient`."""
    tensors = [part.views if spec.elementwise else part.tensors for part in parts]
    return [spec.build_shared(of(weights), of(gradient), exact) for of in tensors]


class StreamingDiLoCoCommunicator(CommunicationModule):
    """The mean distance that the nodes have come is the outer optimizer's gradient, one fragment at a time.

    `StreamingDiLoCoStrategy` says what its arguments are; one fragment without a delay is DiLoCo.
    """

    outer_weights: Tensor  # φ, shared (P,)
    outer_optims: list[Optimizer]  # one for each fragment
    pending: list[tuple[int, Pending]]  # fragment, and what has become of its θ_k, or of its φ − θ_k
    derived = ("outer_gradient", "parts")

    def __init__(
        self,
        H: int = 100,
        outer_optim_spec: Optim = None,
        *,
        outer_optim: Optim = None,
        outer_lr: float | None = None,
        fragments: Fragments = None,
        pattern: str = "strided",
        delay: int = 0,
        mixing: float = 0.0,
        outer_step: str | None = None,
        compressor: Compressor | None = None,
        error_feedback: bool | float | None = None,
        merger: MergerLike = "mean",
        weighting: str = "uniform",
        max_node_norm: MaxNodeNorm = None,
    ) -> None:
        self.H = whole_number("H", H)
        self.outer_optim_spec = resolve_optim(
            "DiLoCo",
            {"outer_optim_spec": outer_optim_spec, "outer_optim": outer_optim},
            {"outer_lr": outer_lr},
            default=DEFAULT_OUTER,
        )
        if self.outer_optim_spec.kwargs.get("lr") == 0:
            raise ValueError("outer_lr must be > 0, got 0: the outer weights, which every sync returns to, would stay")
        self.fragments = fragments
        if fragments is not None:
            number = len(fragments) if isinstance(fragments, list | tuple) else fragments
            whole_number("fragments", number, at_most=self.H)
        self.pattern = one_of("pattern", pattern, PATTERNS)
        self.delay = whole_number("delay", delay, at_least=0)
        if self.delay >= self.H:
            raise ValueError(f"delay must be below H, after which a fragment is sent again; got {delay} for H={self.H}")
        if outer_step is not None and not self.delay:
            raise TypeError(f"outer_step={outer_step!r} has no effect without delay=")
        self.outer_step = one_of("outer_step", outer_step or "due", ("due", "send"))
        self.mixing = real_number("mixing", mixing, at_least=0, at_most=1)
        if compressor is None and error_feedback is not None:
            raise TypeError("DiLoCo: error_feedback has no effect without compressor=")
        self.compressed = None if compressor is None else CompressedAverage(compressor, error_feedback)
        self.weighting = one_of("weighting", weighting, WEIGHTINGS)
        self.merger = resolve_merger(merger, "DiLoCo", weighted=weighting == "examples")
        if compressor is not None and not (self.merger.is_mean and weighting == "uniform"):
            raise TypeError(
                f"DiLoCo: merger={self.merger}, weighting={weighting!r} with compressor=: what is compressed arrives "
                "averaged, and uniformly; give one of them"
            )
        self.max_node_norm = checked_node_norm(max_node_norm)
        # mean_k (φ − θ_k): φ is equal on all nodes, so that averaging θ_k sends the same bytes.
        self.sends_weights = compressor is None and self.merger.is_mean and self.max_node_norm is None

    @property
    def first_step(self) -> int:
        return self.delay + (self.H // self.fragments if isinstance(self.fragments, int) else 1)

    def setup(self, cluster: Cluster) -> None:
        self.parts = fragments_of(cluster.replicas.layout, self.fragments, self.pattern)
        if len(self.parts) > self.H:
            raise ValueError(f"H must be at least the number of fragments, {len(self.parts)}, got {self.H}")
        weights = cluster.weights[0].clone()
        self.outer_gradient = torch.zeros_like(weights)  # shared (P,)
        spec = self.outer_optim_spec
        optims = outer_optimizers(spec, self.parts, weights, self.outer_gradient, cluster.deterministic)
        self.keep_shared(outer_weights=weights, outer_optims=optims, pending=[])
        if self.compressed is not None:
            self.compressed_parts = [copy.deepcopy(self.compressed) for _ in self.parts]
            for part, compressed in zip(self.parts, self.compressed_parts, strict=True):
                compressed.setup(part.alone(cluster))

    def communicate(self, cluster: Cluster) -> None:
        for i in range(len(self.parts)):
            first = (i + 1) * self.H // len(self.parts)
            if (cluster.step - first) % self.H == 0:
                self.pending.append((i, self._send(cluster, i)))
                if self.outer_step == "send":
                    self._step(i, self.pending[-1][1].arrived())
        while self.pending and self.pending[0][1].due == cluster.step:
            i, pending = self.pending.pop(0)
            merged = pending.result()
            if self.outer_step == "due":
                self._step(i, merged)
            self._mix(cluster, i)

    def _send(self, cluster: Cluster, i: int) -> Pending:
        """Start merging a fragment over the nodes."""
        rows = self.parts[i].of(cluster.weights)  # (R, n)
        label = "outer gradient" if len(self.parts) == 1 else f"outer gradient of fragment {i}"
        start = cluster.collectives.start
        if self.sends_weights:
            weights = shares(self.weighting, cluster)
            return start("all_reduce", rows, "mean", weights=weights, label=label, delay=self.delay)
        return start(self._merge, self.parts[i].of(self.outer_weights) - rows, cluster, i, label, delay=self.delay)

    def _merge(self, distances: Tensor, cluster: Cluster, i: int, label: str) -> Tensor:
        """Merge what the nodes have moved on a fragment, stacked (R, n): shared (n,)."""
        clip_rows_(distances, self.max_node_norm, cluster, label)
        if self.compressed is not None:
            return self.compressed_parts[i].average(distances, cluster, label)
        part = self.parts[i].alone(cluster)
        return merge(self.merger, distances, part, label, weights=shares(self.weighting, part))

    def _step(self, i: int, merged: Tensor) -> None:
        """Take a fragment's outer step with what has arrived, shared (n,)."""
        part = self.parts[i]
        outer, gradient = part.views(self.outer_weights), part.views(self.outer_gradient)
        for phi, delta, arrived in zip(outer, gradient, part.cut(merged), strict=True):
            delta.copy_(phi - arrived if self.sends_weights else arrived)
        self.outer_optims[i].step()

    def _mix(self, cluster: Cluster, i: int) -> None:
        """θ_k ← α θ_k + (1 − α) φ on a fragment."""
        part = self.parts[i]
        for own, outer in zip(part.views(cluster.weights), part.views(self.outer_weights), strict=True):
            if self.mixing:
                own.mul_(self.mixing).add_(outer * (1 - self.mixing))
            else:
                own.copy_(outer)

    def global_weights(self, cluster: Cluster) -> Tensor:
        return self.outer_weights

    def evaluating(self) -> AbstractContextManager[None]:
        return evaluating(JointOptimizers(self.outer_optims), self.outer_weights)


class StreamingDiLoCoStrategy(Strategy):
    """Streaming DiLoCo with overlapping communication [Douillard et al. 2025, arXiv:2501.18512].

        θ_k ← inner optimizer(θ_k, g_k)
        fragment i of P, after step (i+1)·H/P and every H steps from there:  send Δ_k = φ − θ_k
        τ steps later:  φ ← outer optimizer(φ, mean_k Δ_k);  θ_k ← α θ_k + (1 − α) φ

    Each fragment has an outer optimizer of its own. What is sent overlaps τ steps of training. With one fragment,
    τ = 0 and α = 0 it is DiLoCo.

    Args:
        H: inner steps between two syncs of one fragment, at least P. The paper uses 100.
        outer_optim, outer_optim_spec, outer_lr: as of `DiLoCoStrategy`.
        fragments: P; or P lists of names of parameters, or of modules for all parameters in them. None: a fragment for
            each layer. Layers are the numbered modules, such as blocks.3; parameters of none (embedding, final norm,
            head) are in the first fragment. For more fragments than layers the modules in them are dealt out.
        pattern: "strided" (layer l is in fragment l mod P) or "sequential" (neighbouring layers).
        delay: τ, steps from sending to applying, 0 ≤ τ < H.
        mixing: α in [0, 1], the share of a node's own weights that stays. The paper uses 0.5.
        outer_step: "due": φ is stepped when the mean is due, as the paper has it; "send": when it is sent, and only
            the nodes' weights wait. The nodes' weights are equal either way; the global model is not, meanwhile.
        compressor: how every node sends its Δ_k, such as FP4(), which the paper uses; None: as it is. The mean of what
            arrives is taken in float32.
        error_feedback, merger, weighting, max_node_norm: as of `DiLoCoStrategy`, for each fragment.
        options: those of every strategy; see `Strategy`.

    Payload: each fragment's weights every H steps, or the compressor's message.

    Deviations from the paper: H/P is rounded down; steps are those of a run, not of a fragment.
    """

    def __init__(
        self,
        optim_spec: Optim = None,
        /,
        outer_optim_spec: Optim = None,
        H: int = 100,
        *,
        outer_optim: Optim = None,
        outer_lr: float | None = None,
        fragments: Fragments = None,
        pattern: str = "strided",
        delay: int = 0,
        mixing: float = 0.0,
        outer_step: str | None = None,
        compressor: Compressor | None = None,
        error_feedback: bool | float | None = None,
        merger: MergerLike = "mean",
        weighting: str = "uniform",
        max_node_norm: MaxNodeNorm = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        outer = StreamingDiLoCoCommunicator(
            H,
            outer_optim_spec,
            outer_optim=outer_optim,
            outer_lr=outer_lr,
            fragments=fragments,
            pattern=pattern,
            delay=delay,
            mixing=mixing,
            outer_step=outer_step,
            compressor=compressor,
            error_feedback=error_feedback,
            merger=merger,
            weighting=weighting,
            max_node_norm=max_node_norm,
        )
        super().__init__([outer], **with_inner(optim_spec, options))
