"""Rules that use lengths and directions of moves, most of them parameter by parameter."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from vsim_kernels import matrix_shape, topk_entries

from vsim.arguments import one_of, real_number
from vsim.cluster import Cluster
from vsim.cluster.collectives import Among
from vsim.cluster.reductions import reduce_rows, round_up
from vsim.core.average.base import COUNTS, Rule, positive
from vsim.core.compressor import by_node


@dataclass(frozen=True, repr=False)
class RDA(Rule):
    """For every parameter, the mean length in the mean direction: (Σ w‖v‖ / Σ w) · φ(Σ w·φ(v)), φ(v) = v / ‖v‖.

    The mean of vectors in different directions is short; this rule keeps the vectors' length. φ(0) = 0.

    Source: Decoupled DiLoCo [arXiv:2604.21428].
    """

    by: str = "nodes"
    by_tensor = True
    of_moves = True

    def __post_init__(self) -> None:
        one_of("by", self.by, COUNTS)

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        lengths = torch.linalg.vector_norm(rows.reshape(len(rows), -1), dim=1).view(-1, *[1] * (rows.dim() - 1))
        direction = reduce_rows(rows / positive(lengths), "mean", weights)
        return reduce_rows(lengths, "mean", weights) * direction / positive(torch.linalg.vector_norm(direction))


@dataclass(frozen=True, repr=False)
class Iso(Rule):
    """The mean, with the singular values of every matrix replaced by their mean: an all-reduce, and an SVD per matrix.

    A tensor of more than two dimensions counts as a matrix (out, rest); vectors take the plain mean.

    Source: IsoLoCo [arXiv:2607.03011].
    """

    by: str = "nodes"
    by_tensor = True
    of_moves = True

    def __post_init__(self) -> None:
        one_of("by", self.by, COUNTS)

    def of_mean(self, mean: Tensor) -> Tensor:
        if mean.dim() < 2:
            return mean
        matrix = mean.reshape(matrix_shape(mean.shape)).to(torch.promote_types(mean.dtype, torch.float32))
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return (s.mean() * (u @ vh)).view_as(mean).to(mean)


@dataclass(frozen=True, repr=False)
class TIES(Rule):
    """Keep each node's largest entries, then average every entry over the nodes that agree with the sign of its sum.

    Args:
        share: the share of all parameters' entries that each node keeps, in (0, 1].

    Source: TIES-Merging [Yadav et al. 2023, arXiv:2306.01708]; for moves arXiv:2607.03011.
    """

    share: float = 0.2
    of_moves = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", real_number("share", self.share, above=0, at_most=1))

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        flat = rows.reshape(len(rows), -1)
        values, index = topk_entries(flat, round_up(self.share * flat.shape[1]))
        kept = torch.zeros_like(flat).scatter_(1, index, values)
        agrees = kept.sign() == kept.sum(0).sign()
        counts = (agrees & (kept != 0)).sum(0)
        return ((kept * agrees).sum(0) / counts.clamp(min=1)).view(rows.shape[1:])


@dataclass(frozen=True, repr=False)
class TSV(Rule):
    """For every matrix, join the top 1/n singular vectors of each of n nodes, and orthogonalize them: U Σ Vᵀ, with U =
    P Qᵀ for the SVD P D Qᵀ of the joined left vectors, and V from the right vectors. A vector takes the mean.

    Source: task singular vectors [Gargiulo et al. 2024, arXiv:2412.00081]; for moves arXiv:2607.03011.
    """

    by_tensor = True
    of_moves = True

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        if rows.dim() < 3:
            return reduce_rows(rows, "mean")
        matrices = rows.reshape(len(rows), *matrix_shape(rows.shape[1:]))
        u, s, vh = torch.linalg.svd(matrices.to(torch.promote_types(rows.dtype, torch.float32)), full_matrices=False)
        k = max(1, s.shape[1] // len(rows))
        left, values = torch.cat([*u[:, :, :k]], dim=1), s[:, :k].flatten()  # (out, n·k), (n·k,)
        right = torch.cat([*vh[:, :k]], dim=0)  # (n·k, rest)
        return (_orthogonal(left) * values @ _orthogonal(right)).view(rows.shape[1:]).to(rows)


@dataclass(frozen=True, repr=False)
class Edit(Rule):
    """For every parameter, Σ_k w_k v_k with w = softmax(−‖v_k‖ / temperature): nodes that moved far count less.

    The nodes gather their norms, 4 bytes per parameter tensor, then add up their weighted vectors. A vector that is not
    finite has the weight 0; if none is finite, the result is 0.

    Args:
        temperature: above 0.

    Source: EDiT [Cheng et al. 2024, arXiv:2412.07210]; `EDiTStrategy` also has the paper's gate for anomalous nodes.
    """

    temperature: float = 1.0
    by_tensor = True
    of_moves = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "temperature", real_number("temperature", self.temperature, above=0))

    def shares(self, norms: Tensor) -> Tensor:
        """Return the nodes' weights (K, …), given the norms of their moves; 0 for a norm that is not finite."""
        norms = norms.masked_fill(~norms.isfinite(), torch.inf)
        return torch.softmax(-norms / self.temperature, dim=0).nan_to_num(0.0)

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        shares = self.shares(torch.linalg.vector_norm(rows.reshape(len(rows), -1), dim=1))
        left_out = (shares == 0).view(-1, *[1] * (rows.dim() - 1))
        return reduce_rows(rows.masked_fill(left_out, 0), "mean", shares)  # since 0 · ∞ is NaN

    def over_nodes(self, rows: Tensor, cluster: Cluster, label: str, among: Among, weights: Tensor | None) -> Tensor:
        norms = cluster.collectives.all_gather(tensor_norms(rows, cluster), label=f"{label}: norms")  # (K, L)
        return weighted_by_tensor(rows, self.shares(norms), cluster, label)


def tensor_norms(rows: Tensor, cluster: Cluster) -> Tensor:
    """Return the 2-norms (R, L) of the L parameter tensors in stacked `rows` (R, P)."""
    views = list(cluster.replicas.views(rows).values())

    def norms(*tensors: Tensor) -> Tensor:
        return torch.stack([torch.linalg.vector_norm(t.reshape(len(t), -1), dim=1) for t in tensors], dim=1)

    return by_node(cluster, norms, *views)


def weighted_by_tensor(rows: Tensor, shares: Tensor, cluster: Cluster, label: str) -> Tensor:
    """Sum `rows` (R, P) over the nodes, each parameter tensor weighted by `shares` (K, L); `rows` is overwritten.

    A tensor with the weight 0 may have any values.
    """
    nodes = cluster.replicas.nodes
    for view, weight in zip(cluster.replicas.views(rows).values(), shares[nodes.start : nodes.stop].T, strict=True):
        weight = weight.view(-1, *[1] * (view.dim() - 1))
        view.mul_(weight).masked_fill_(weight == 0, 0)
    return cluster.collectives.all_reduce(rows, "sum", label=label)


def _orthogonal(matrix: Tensor) -> Tensor:
    p, _, qt = torch.linalg.svd(matrix, full_matrices=False)
    return p @ qt
