"""Dion: send orthonormal low-rank factors of the momentum every step, and keep the remainder for later."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import normalize
from vsim_kernels import left_factor, low_rank, matrix_shape, orthogonalize, right_factor

from vsim.arguments import naming, real_number
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec
from vsim.cluster.reductions import round_up
from vsim.core.algorithm import Algorithm
from vsim.core.compressor import average_message, by_node
from vsim.core.fields import algorithm, state


@algorithm
class DionStrategy(Algorithm):
    """Send low-rank factors of the momentum, step by their orthonormal product: Dion [Ahn et al. 2025,
    arXiv:2504.05295].

    For every hidden matrix X (n, m):

        M_k ← M_k + g_k
        P = orthogonalize(mean_k M_k Q);  R_k = M_kᵀ P;  Q ← the mean of the R_k, its columns normalized
        M_k ← M_k − (1 − μ) P R_kᵀ
        X ← (1 − lr·λ) X − lr √(n/m) P Qᵀ

    and for every other parameter: X ← inner optimizer(X, mean_k g_k). The weights of all nodes stay equal; each node
    has its own momentum M_k. Only the mean of the M_k matters: one node with the mean gradient takes the same steps.

    Args:
        inner_optim: the optimizer of the other parameters: vectors, embeddings and the last linear layer. Default AdamW
            with betas (0.9, 0.95).
        rank_fraction: in (0, 1]; the rank r of P (n, r) and Q (m, r) is this share of min(n, m), rounded up.
        mu: μ in [0, 1], the share of an applied step that remains in the momentum.
        weight_decay: λ of the matrices, decoupled, at least 0.
        only: names of the matrices, or patterns such as "blocks.*.weight". Default: hidden matrices; see `OptimSpec`.
        lr, …: the options of all strategies; see `Algorithm`. lr, default 1e-3 (authors' configurations: 0.02), is the
            rate of the matrices, and of other parameters unless `inner_optim` has an lr. max_norm clips a node's
            gradient before it enters M_k.

    Payload: 4·r·(n + m) bytes per matrix, 4 bytes per entry of other parameters, every step. If r·(n + m) ≥ n·m, a
    matrix's gradient is sent in place of factors; the steps are the same.

    Raises:
        ValueError: at setup, the model has no hidden matrix, or `only` names a vector.

    Deviations from the paper: the node's own R_k is subtracted from M_k; the authors' code uses the mean of all R_k.
    The mean of the M_k is the same, but the M_k do not drift apart.
    """

    family = "data parallel"

    rank_fraction: float = 0.25
    mu: float = 0.95
    weight_decay: float = 0.01
    only: str | Sequence[str] | None = None

    momentum: dict[str, Tensor] = state()  # M_k of every matrix, stacked (R, n, m)
    basis: dict[str, Tensor] = state()  # Q of every matrix, shared (m, r)

    def __post_init__(self) -> None:
        self.rank_fraction = real_number("rank_fraction", self.rank_fraction, above=0, at_most=1)
        self.mu = real_number("mu", self.mu, at_least=0, at_most=1)
        decay = real_number("weight_decay", self.weight_decay, at_least=0)
        rest = OptimSpec("adamw", betas=(0.9, 0.95)) if self.inner_optim is None else self.inner_optim
        # The step of a matrix replaces its gradient; SGD then applies it.
        with naming("inner_optim"):
            self.inner_optim = OptimSpec("sgd", weight_decay=decay, rest=rest, only=self.only)
        super().__post_init__()

    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        replicas = cluster.replicas
        names = self.optim_spec.parts(replicas.module)[0][1]
        shapes = {c.name: c.shape for c in replicas.layout if c.name in names}
        if vectors := [name for name, shape in shapes.items() if len(shape) < 2]:
            raise ValueError(
                f"DionStrategy: only={self.optim_spec.only} has vectors, {vectors}, and must have matrices"
            )
        momentum, basis = {}, {}
        self.averaged = [c.name for c in replicas.layout if c.name not in names]  # parameters sent uncompressed
        for name, shape in shapes.items():
            n, m = matrix_shape(shape)
            rank = round_up(self.rank_fraction * min(n, m))
            if rank * (n + m) >= n * m:
                self.averaged.append(name)
            momentum[name] = cluster.weights.new_zeros(replicas.num_held, n, m)
            basis[name] = torch.randn(m, rank, generator=cluster.generator).to(cluster.weights)
        self.keep_stacked(momentum=momentum)
        self.keep_shared(basis=basis)

    def gradients(self) -> None:
        super().gradients()  # clips now, since the optimizer gets the matrices' steps
        cluster = self.cluster
        grads = cluster.replicas.views(cluster.replicas.grads)  # name → (R, *shape)
        means = average_message([grads[name] for name in self.averaged], cluster, "gradients")
        for name, mean in zip(self.averaged, means, strict=True):
            grads[name].copy_(mean)

        left, right = {}, {}
        for name, q in self.basis.items():
            momentum = self.momentum[name].add_(grads[name].flatten(2))  # (R, n, m)
            left[name] = by_node(cluster, partial(left_factor, q=q), momentum)  # (R, n, r)
        p = {name: orthogonalize(mean) for name, mean in self._means(left, "P").items()}  # (n, r)
        for name, momentum in self.momentum.items():
            right[name] = by_node(cluster, partial(right_factor, p=p[name]), momentum)  # (R, m, r)
        for name, mean in self._means(right, "R").items():
            taken = by_node(cluster, partial(low_rank, (1 - self.mu) * p[name]), right[name])  # (R, n, m)
            self.momentum[name].sub_(taken)
            q = self.basis[name] = normalize(mean, dim=0)  # (m, r)
            step = math.sqrt(len(p[name]) / len(q)) * low_rank(p[name], q)
            grads[name].copy_(step.view(grads[name].shape[1:]))

    def _means(self, factors: dict[str, Tensor], label: str) -> dict[str, Tensor]:
        """Average stacked factors (R, …) over the nodes: name → shared (…). Factors in `averaged` are already equal."""
        sent = [name for name in factors if name not in self.averaged]
        means = average_message([factors[name] for name in sent], self.cluster, label)
        return {name: rows[0] for name, rows in factors.items()} | dict(zip(sent, means, strict=True))
