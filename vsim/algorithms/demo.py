"""DeMo: send the largest components of the momentum every step in a basis such as cosines; keep the rest for later."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from vsim_kernels import matrix_shape

from vsim.algorithms.compression import DCTTopK, TileTopK
from vsim.arguments import one_of, real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.frozen import ranges
from vsim.cluster.optim import OptimSpec
from vsim.core.algorithm import Algorithm
from vsim.core.average import Compress, compress
from vsim.core.compressor import by_node
from vsim.core.fields import algorithm, state


@algorithm
class DeMoStrategy(Algorithm):
    """Send the momentum's largest cosine coefficients, step by sign: DeMo [Peng et al. 2024, arXiv:2411.19870].

    With the defaults, version 1 of the paper, as in its authors' code:

        θ ← (1 − lr·λ) θ;  δ_k ← β δ_k + lr·g_k
        q_k = the largest DCT coefficients of every tile of δ_k;  δ_k ← δ_k − DCT⁻¹(q_k)
        θ ← θ − lr · sign(DCT⁻¹(mean of each coefficient over the nodes that sent it in q_k))

    With version=2, as published at ICLR 2026 [openreview.net/forum?id=U9oewpa7cn], the preset "demo-2":

        θ ← (1 − lr·λ) θ;  δ_k ← β δ_k + (1 − β) g_k
        q_k = the largest coefficients of every tile of T(δ_k);  δ_k ← δ_k − α T⁻¹(q_k)
        θ ← θ − lr · φ(T⁻¹(mean of the q_k over all nodes))

    The weights of all nodes stay bitwise equal; each node has its own momentum δ_k. See `DCTTopK` for tiles, bytes and
    warnings.

    Args:
        compression_decay: β in [0, 1]; below 1 with version=2.
        compression_topk: coefficients that a node sends per tile.
        compression_chunk: upper limit for the sides of a tile.
        weight_decay: λ, decoupled, at least 0.
        index_bytes: "int64", or "packed": as many bits as an index needs.
        alpha: α in [0, 1], the share of what was sent that leaves the momentum. Version 1 of the paper has 1; version 2
            is best with 0.2.
        transform: T of a tile: "dct"; "random", multiplied on both sides by orthogonal matrices, which are drawn in
            every step by all nodes alike; or "none".
        update: φ: "sign"; "identity", for version=2; or "orthogonal", which sets all singular values of a parameter
            above 0 to 1. A parameter is a matrix as for the tiles, so that a vector is scaled to norm 1.
        version: which of the papers' versions scales gradients, and takes the mean.
        lr, …: the options of all strategies, except inner_optim, since the step above takes its place; see `Algorithm`.
            lr is 1e-3 by default; max_norm clips every node's gradient before it enters δ_k.

    Payload: min(k, h·w) · (8 + 4) bytes for each tile (h, w), every step.

    Raises:
        TypeError: an inner optimizer is given.
        ValueError: update="identity" with version=1, in whose δ_k lr is already a factor.
    """

    family = "data parallel"

    compression_decay: float = 0.999
    compression_topk: int = 32
    compression_chunk: int = 64
    weight_decay: float = 0.0
    index_bytes: str = "int64"
    alpha: float = 1.0
    transform: str = "dct"
    update: str = "sign"
    version: int = 1

    momentum: Compress = state()

    def __post_init__(self) -> None:
        if self.inner_optim is not None:
            raise TypeError(
                "DeMoStrategy(): inner_optim has no effect, for the step is by the sign or update=; lr sets its size"
            )
        topk = whole_number("compression_topk", self.compression_topk)
        chunk = whole_number("compression_chunk", self.compression_chunk)
        decay = real_number("compression_decay", self.compression_decay, at_least=0, at_most=1)
        self.version = whole_number("version", self.version, at_most=2)
        self.update = one_of("update", self.update, UPDATES)
        if self.version == 1 and self.update == "identity":
            raise ValueError(
                "update='identity' takes version=2: in version 1, lr is a factor of the momentum and of the step"
            )
        if self.version == 2 and decay == 1:
            raise ValueError(
                f"compression_decay={decay:g} leaves nothing of the gradients with version=2: take less than 1"
            )
        self.transform = one_of("transform", self.transform, TRANSFORMS)
        compressor = TRANSFORMS[self.transform](topk, chunk, self.index_bytes)
        compressor.subtracted = real_number("alpha", self.alpha, at_least=0, at_most=1)
        compressor.over_all_nodes = self.version == 2
        self.momentum = compress(compressor, decay)
        self.weight_decay = real_number("weight_decay", self.weight_decay, at_least=0)
        super().__post_init__()

    @classmethod
    def default_inner_optim(cls) -> OptimSpec:
        return OptimSpec("sgd")

    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        self.momentum.setup(cluster)

    def gradients(self) -> None:
        super().gradients()  # clips now, since the optimizer gets only the updates
        cluster = self.cluster
        if self.weight_decay:
            for frozen, own in ranges(cluster.replicas.layout, lambda name: cluster.frozen.get(name, False)):
                if not frozen:
                    cluster.replicas.weights[:, own].mul_(1 - cluster.lr * self.weight_decay)
        share = cluster.lr if self.version == 1 else 1 - self.momentum.error_feedback
        fast = self.momentum(cluster.grads.mul_(share), cluster, LABELS[self.transform])
        if self.update == "sign":
            fast.sign_()
        elif self.update == "orthogonal":
            for view in cluster.replicas.views(fast).values():
                view.copy_(_orthogonal(view.reshape(matrix_shape(view.shape))).view_as(view))
        cluster.grads.copy_(fast)


class RandomBasisTopK(TileTopK):
    """Apply `TileTopK` to U X V of each tile X, for orthogonal matrices U and V that are drawn in every message.

    All nodes draw the same. The error is kept as entries, since the next message has another basis.
    """

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        (tiles,) = arranged
        sides = sorted({side for group in self.groups for side in (group.h, group.w)})
        basis = {side: _drawn(side, cluster).to(tiles) for side in sides}
        turned = by_node(cluster, partial(self._turned, basis), tiles)
        (average,) = super().exchange([turned], cluster, label)
        back = {side: matrix.T for side, matrix in basis.items()}
        tiles.copy_(by_node(cluster, partial(self._turned, back), turned))
        return [self._turned(back, average[None])[0]]

    def _turned(self, basis: dict[int, Tensor], rows: Tensor) -> Tensor:
        """Return B_h X B_wᵀ of every tile X (h, w) in rows (n, P), arranged as these."""
        parts = []
        for group, own in zip(self.groups, self._by_group(rows), strict=True):
            tiles = own.unflatten(1, (group.count, group.h, group.w))
            parts.append((basis[group.h] @ tiles @ basis[group.w].T).flatten(1))
        return torch.cat(parts, dim=1)


TRANSFORMS: dict[str, type[TileTopK]] = {"dct": DCTTopK, "random": RandomBasisTopK, "none": TileTopK}
LABELS = {"dct": "DCT coefficients", "random": "coefficients", "none": "entries"}
UPDATES = ("sign", "identity", "orthogonal")


def _drawn(side: int, cluster: Cluster) -> Tensor:
    """Draw an orthogonal matrix (side, side), uniformly, in float64 on the CPU."""
    normal = torch.randn(side, side, generator=cluster.generator, dtype=torch.float64)
    q, r = torch.linalg.qr(normal)
    return q * r.diagonal().sign()  # signs of R above 0 make the distribution uniform


def _orthogonal(matrix: Tensor) -> Tensor:
    """Return M (MᵀM)^−½ with the pseudoinverse: a basis of the rows, without those of rounding."""
    if matrix.is_meta or not matrix.numel():
        return matrix
    here = matrix.cpu()  # MPS has no such operator, or in torch 2.14 an inexact one (pytorch issue 196112)
    u, values, vh = torch.linalg.svd(here, full_matrices=False)
    kept = values > values[:1] * max(matrix.shape) * torch.finfo(matrix.dtype).eps
    return ((u * kept) @ vh).to(matrix.device)
