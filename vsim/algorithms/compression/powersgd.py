"""PowerSGD: send the gradient of a matrix as the product of two thin matrices."""

from __future__ import annotations

import warnings
from functools import partial

import torch
from torch import Tensor
from vsim_kernels import left_factor, low_rank, matrix_shape, orthogonalize, right_factor

from vsim.arguments import whole_number
from vsim.cluster import Cluster
from vsim.cluster.replicas import Columns
from vsim.core.compressor import Compressor, average_message, by_node


class PowerSGD(Compressor):
    """Take one step of power iteration per round, on every parameter of at least two dimensions, folded to a matrix
    (out, rest): M_k (n, m) on node k.

        P = orthogonalize(mean_k M_k Q);  Q ← mean_k M_kᵀ P;  the average is P Qᵀ

    Q (m, r) is random at the start, equal on all nodes, and kept from round to round.

    Args:
        rank: r, at least 1.

    Payload: 4·r·(n + m) bytes per matrix, and 4 bytes per entry of vectors and of matrices with r·(n + m) ≥ n·m, which
    are averaged uncompressed. Two all-reduces: P with the vectors, then Q.

    Source: PowerSGD [Vogels et al. 2019, arXiv:1905.13727], algorithms 1 and 2.

    Deviation from the authors' code: the error is M_k − P (M_kᵀ P)ᵀ, with the node's own right factor in place of the
    mean over nodes. The mean of the errors, which alone enters later rounds, is the same, but a node's error does not
    grow with the distance between the nodes.
    """

    q: list[Tensor]  # shared (L, m, r), for the L matrices of each shape

    def __init__(self, rank: int = 2) -> None:
        self.rank = whole_number("rank", rank)

    def setup(self, cluster: Cluster) -> None:
        shapes: dict[tuple[int, int], list[Columns]] = {}  # all matrices of one shape are multiplied in one call
        self.vectors: list[Columns] = []  # vectors, and matrices that are averaged uncompressed
        for columns in cluster.replicas.layout:
            n, m = matrix_shape(columns.shape)
            smaller = self.rank * (n + m) < n * m
            (shapes.setdefault((n, m), []) if smaller else self.vectors).append(columns)
        self.matrices = list(shapes.values())
        if not shapes:
            warnings.warn(
                f"PowerSGD(rank={self.rank}) would make no tensor of this model smaller, so all are averaged as they "
                "are; a matrix (n, m) needs rank · (n + m) < n · m",
                UserWarning,
                stacklevel=2,
            )
        self.size = cluster.replicas.num_parameters
        self.keep_shared(
            q=[
                torch.randn(len(group), m, self.rank, generator=cluster.generator).to(cluster.weights)
                for (_, m), group in shapes.items()
            ]
        )

    def arrange(self, rows: Tensor, cluster: Cluster) -> list[Tensor]:
        """Return the matrices, (R, L, n, m) for each shape, then all vectors in one tensor (R, …)."""
        matrices = [
            torch.stack([rows[:, c.start : c.stop].unflatten(1, matrix_shape(c.shape)) for c in group], dim=1)
            for group in self.matrices
        ]
        return [*matrices, torch.cat([rows[:, :0], *(rows[:, c.start : c.stop] for c in self.vectors)], dim=1)]

    def restore(self, arranged: list[Tensor]) -> Tensor:
        *matrices, vectors = arranged
        rows = vectors.new_empty(*vectors.shape[:-1], self.size)  # (…, P)
        for group, stack in zip(self.matrices, matrices, strict=True):
            for c, matrix in zip(group, stack.unbind(-3), strict=True):
                rows[..., c.start : c.stop] = matrix.flatten(-2)
        for c, vector in zip(self.vectors, vectors.split([c.stop - c.start for c in self.vectors], -1), strict=True):
            rows[..., c.start : c.stop] = vector
        return rows

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        *matrices, vectors = arranged
        left = [by_node(cluster, partial(left_factor, q=q), m) for m, q in zip(matrices, self.q, strict=True)]
        *left, mean_vectors = average_message([*left, vectors], cluster, f"{label}: P and vectors")
        p = [orthogonalize(factor) for factor in left]  # (L, n, r)
        right = [by_node(cluster, partial(right_factor, p=x), m) for m, x in zip(matrices, p, strict=True)]
        self.q = average_message(right, cluster, f"{label}: Q")
        for m, x, own_q in zip(matrices, p, right, strict=True):
            m.sub_(by_node(cluster, partial(low_rank, x), own_q))
        vectors.zero_()
        return [*map(low_rank, p, self.q), mean_vectors]
