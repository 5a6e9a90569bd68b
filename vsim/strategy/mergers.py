"""Mergers: how the vectors of several nodes become one, wherever nodes average."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor
from vsim_kernels import matrix_shape, sort_rows

from vsim.arguments import one_of, real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.collectives import Among, Merge
from vsim.cluster.reductions import reduce_rows
from vsim.cluster.replicas import Replicas
from vsim.strategy.selectors import round_up


class Merger:
    """How the vectors of n nodes become one. A subclass defines `of_rows`, or `of_mean` if the mean is all it needs.

    A function f(rows (n, P), weights (n,) or None) → (P,) serves as well wherever a merger is asked for.

    Attributes:
        by_tensor: whether it is called with the parameters one by one, and not with all of them as one vector (P,).
            Embeddings then take the mean: of a table to look up in, most rows have changed on few nodes. They are the
            parameters of torch.nn's embeddings, and what is tied to them.
        takes_weights: whether some rows may count more than others.
        of_changes: whether rows must be changes, as gradients are, since it takes their lengths or directions.
    """

    by_tensor = False
    takes_weights = True
    of_changes = False

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Merge stacked rows (n, *shape), by weights (n,) that sum to 1, or None: (*shape). Here the mean."""
        return reduce_rows(rows, "mean", weights)

    def of_mean(self, mean: Tensor) -> Tensor:
        """Return what comes of the mean (*shape) in its place. Here itself."""
        return mean

    @property
    def needs_rows(self) -> bool:
        """Whether all rows have to be gathered, since their mean, which an all-reduce has, is not enough."""
        return type(self).of_rows is not Merger.of_rows

    @property
    def is_mean(self) -> bool:
        """Whether it is the mean, and nothing else."""
        return not self.needs_rows and type(self).of_mean is Merger.of_mean

    def __call__(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Merge stacked rows (n, *shape): (*shape)."""
        merged = self.of_mean(self.of_rows(rows, weights))
        given = tuple(merged.shape) if isinstance(merged, Tensor) else type(merged).__name__
        if given != tuple(rows.shape[1:]):
            raise ValueError(
                f"merger={self} must make one row of {tuple(rows.shape)}, {tuple(rows.shape[1:])}; got {given}"
            )
        return merged


@dataclass(frozen=True)
class mean(Merger):
    """Σ_k w_k v_k: an all-reduce."""


@dataclass(frozen=True)
class trimmed_mean(Merger):
    """The mean of every entry without its ⌈share·n⌉ smallest and largest values; one or two in the middle remain.

    Args:
        share: in (0, 0.5].

    Source: Yin et al. 2018 [arXiv:1803.01498].
    """

    share: float = 0.2
    takes_weights = False

    def __post_init__(self) -> None:
        real_number("share", self.share, above=0, at_most=0.5)

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        cut = min(round_up(self.share * len(rows)), (len(rows) - 1) // 2)
        return torch.stack(sort_rows(rows)[cut : len(rows) - cut]).mean(0)


@dataclass(frozen=True)
class median(trimmed_mean):
    """The median of every entry; of an even number of nodes, the mean of the two in the middle."""

    share: float = field(default=0.5, init=False, repr=False)


@dataclass(frozen=True)
class krum(Merger):
    """The vector whose n − faulty − 2 nearest others, at least one, have the least sum of squared distances.

    Ties go to the first node.

    Args:
        faulty: f, the nodes that may send anything, without harm where n ≥ 2·f + 3.

    Source: Blanchard et al. 2017 [arXiv:1703.02757].
    """

    faulty: int = 1
    takes_weights = False

    def __post_init__(self) -> None:
        whole_number("faulty", self.faulty, at_least=0)

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        flat = rows.reshape(len(rows), -1)
        squares = torch.stack([torch.linalg.vector_norm(flat - row, dim=1) ** 2 for row in flat])  # (n, n)
        nearest = squares.sort(dim=1).values[:, 1 : 1 + max(1, len(rows) - self.faulty - 2)]  # a row itself is first
        return rows.index_select(0, nearest.sum(1).argmin(0, keepdim=True))[0]


@dataclass(frozen=True)
class rda(Merger):
    """Mean length and mean direction of every parameter: (Σ w‖v‖) · φ(Σ w φ(v)), φ(v) = v / ‖v‖, φ(0) = 0.

    The mean is the shorter the less the nodes agree; this is not.

    Source: Decoupled DiLoCo [Douillard et al. 2026, arXiv:2604.21428].
    """

    by_tensor = True
    of_changes = True

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        lengths = torch.linalg.vector_norm(rows.reshape(len(rows), -1), dim=1).view(-1, *[1] * (rows.dim() - 1))
        direction = reduce_rows(rows / positive(lengths), "mean", weights)
        return reduce_rows(lengths, "mean", weights) * direction / positive(torch.linalg.vector_norm(direction))


@dataclass(frozen=True)
class iso(Merger):
    """The mean, with the singular values of every matrix replaced by their mean: an all-reduce, and an SVD a matrix.

    A tensor of more than two dimensions is a matrix (out, rest); vectors stay as they are.

    Source: IsoLoCo [arXiv:2607.03011].
    """

    by_tensor = True
    of_changes = True

    def of_mean(self, mean: Tensor) -> Tensor:
        if mean.dim() < 2:
            return mean
        matrix = mean.reshape(matrix_shape(mean.shape)).to(torch.promote_types(mean.dtype, torch.float32))
        u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
        return (s.mean() * (u @ vh)).view_as(mean).to(mean)


@dataclass(frozen=True)
class _Own(Merger):
    """A user's function."""

    function: Merge

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        return self.function(rows, weights)


MERGERS: dict[str, type[Merger]] = {cls.__name__: cls for cls in (mean, median, trimmed_mean, krum, rda, iso)}
MergerLike = Merger | type[Merger] | Merge | str
WEIGHTINGS = ("uniform", "examples")


def resolve_merger(merger: MergerLike, where: str, *, weighted: bool = False, of_weights: bool = False) -> Merger:
    """Return the merger that is given as such, by its name, or as a function f(rows, weights).

    Args:
        where: whose argument it is, for errors.
        weighted: whether it will be given weights. of_weights: whether rows are weights, which are no changes.
    """
    if isinstance(merger, str):
        merger = MERGERS[one_of("merger", merger, MERGERS)]
    made = merger() if isinstance(merger, type) else merger
    if not callable(made):
        raise TypeError(
            f"{where}: merger must be a Merger such as trimmed_mean(0.2), the name of one ({', '.join(MERGERS)}), or a "
            f"function of (rows, weights), got {merger!r}"
        )
    made = made if isinstance(made, Merger) else _Own(made)
    if weighted and not made.takes_weights:
        raise ValueError(f"{where}: merger={made} counts all nodes alike, so that weights would have no effect")
    if of_weights and made.of_changes:
        raise ValueError(
            f"{where}: merger={made} takes lengths or directions of changes, and here weights are merged; "
            "DiLoCoStrategy with outer_optim=OptimSpec('sgd', lr=1.0) merges changes, and is FedAvg otherwise"
        )
    return made


def merge(
    merger: Merger, rows: Tensor, cluster: Cluster, label: str, among: Among = None, weights: Tensor | None = None
) -> Tensor:
    """Merge stacked `rows` (R, P): shared (P,), or with `among` stacked (R, P); see `Collectives.all_reduce`."""
    of_all = partial(_by_tensor, merger, cluster.replicas) if merger.by_tensor else merger
    if merger.needs_rows:
        return cluster.collectives.merge(rows, of_all, label=label, among=among, weights=weights)
    merged = cluster.collectives.all_reduce(rows, "mean", label=label, among=among, weights=weights)
    if merger.is_mean:
        return merged
    return of_all(merged[None], None) if among is None else torch.stack([of_all(row[None], None) for row in merged])


def shares(weighting: str, cluster: Cluster) -> Tensor | None:
    """Return the weights (K,) that one of WEIGHTINGS gives the nodes, None where all count alike."""
    return cluster.shard_sizes if weighting == "examples" else None


def merged_rows(merger: Merger, rows: Tensor, replicas: Replicas, weights: Tensor | None) -> Tensor:
    """Merge stacked rows (n, P) that are here already, by weights (n,) that sum to 1, or None: (P,)."""
    return _by_tensor(merger, replicas, rows, weights) if merger.by_tensor else merger(rows, weights)


def _by_tensor(merger: Merger, replicas: Replicas, rows: Tensor, weights: Tensor | None) -> Tensor:
    """Merge stacked rows (n, P) parameter by parameter: (P,)."""
    views, embeddings = replicas.views(rows).items(), replicas.embeddings
    merged = [(mean() if name in embeddings else merger)(view, weights) for name, view in views]
    return torch.cat([part.reshape(-1) for part in merged])


def positive(lengths: Tensor) -> Tensor:
    """Return lengths to divide by: 0 / positive(0) is 0."""
    return lengths.clamp(min=torch.finfo(lengths.dtype).tiny)
