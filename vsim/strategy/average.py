"""Averages: how the vectors of several nodes become one, wherever nodes average gradients, weights or moves.

    mean("examples") | clip("median") | compress(TopK(0.01), error_feedback=0.9)

A rule (`mean`, `median`, `krum`, …) says how vectors become one. `clip` scales every node's vector before, `compress`
sends it with fewer bytes. Without them: the mean, no limit, and vectors as they are.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor
from vsim_kernels import matrix_shape, sort_rows, topk_entries

from vsim.arguments import a_function, one_of, real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.collectives import Among, Merge, Pending
from vsim.cluster.reductions import reduce_rows
from vsim.cluster.replicas import Replicas
from vsim.cluster.state import Stateful
from vsim.strategy.attack import Attack
from vsim.strategy.compression.base import Compressor, by_node
from vsim.strategy.selectors import round_up

COUNTS = ("nodes", "examples", "tokens")


class Part:
    """A part of an average, which `|` joins to others."""

    def __or__(self, other: Part) -> Average:
        return Average(self, other)


# Rules ---------------------------------------------------------------------------------------------------------------


class Rule(Part):
    """How the vectors of n nodes become one. A subclass defines `of_rows`, or `of_mean` if the mean is all it needs.

    A function f(rows (n, P), weights (n,) or None) → (P,) serves as well wherever an average is asked for.

    Attributes:
        by: what a node counts by: "nodes" (all alike), "examples" (its number of examples) or "tokens".
        by_tensor: whether it is called with the parameters one by one, and not with all of them as one vector (P,).
            Embeddings then take the mean: most rows of a lookup table have changed on few nodes.
        of_moves: whether it takes lengths or directions, so that the vectors must be moves or gradients, not weights.
    """

    by = "nodes"
    by_tensor = False
    of_moves = False

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Merge stacked rows (n, *shape), by weights (n,) that sum to 1, or None: (*shape). Default: the mean."""
        return reduce_rows(rows, "mean", weights)

    def of_mean(self, mean: Tensor) -> Tensor:
        """Return what replaces the mean (*shape). Default: the mean itself."""
        return mean

    def check(self, num_nodes: int) -> None:
        """Raise a ValueError if the rule is not for this number of nodes."""

    @property
    def needs_rows(self) -> bool:
        """Whether all rows have to be gathered, since their mean, which an all-reduce has, is not enough."""
        return type(self).of_rows is not Rule.of_rows

    @property
    def is_mean(self) -> bool:
        """Whether it is the mean, and nothing else."""
        return not self.needs_rows and type(self).of_mean is Rule.of_mean

    def __call__(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Merge stacked rows (n, *shape): (*shape)."""
        merged = self.of_mean(self.of_rows(rows, weights))
        given = tuple(merged.shape) if isinstance(merged, Tensor) else type(merged).__name__
        if given != tuple(rows.shape[1:]):
            raise ValueError(f"average={self} must make {tuple(rows.shape[1:])} of {tuple(rows.shape)}, got {given}")
        return merged

    def of_parameters(self, replicas: Replicas, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Merge stacked rows (n, P) that are here already: shared (P,)."""
        if not self.by_tensor:
            return self(rows, weights)
        views, embeddings = replicas.views(rows).items(), replicas.embeddings
        merged = [(mean() if name in embeddings else self)(view, weights) for name, view in views]
        return torch.cat([part.reshape(-1) for part in merged])

    def over_nodes(self, rows: Tensor, cluster: Cluster, label: str, among: Among, weights: Tensor | None) -> Tensor:
        """Merge stacked rows (R, P) over the nodes; see `Average.__call__`."""
        of_all = partial(self.of_parameters, cluster.replicas)
        if self.needs_rows:
            return cluster.collectives.merge(rows, of_all, label=label, among=among, weights=weights)
        merged = cluster.collectives.all_reduce(rows, "mean", label=label, among=among, weights=weights)
        if self.is_mean:
            return merged
        return of_all(merged[None], None) if among is None else torch.stack([of_all(row[None], None) for row in merged])


@dataclass(frozen=True)
class mean(Rule):
    """Σ_k w_k v_k, by an all-reduce: w_k = 1/K, or with "examples" in proportion to the node's number of examples."""

    by: str = "nodes"

    def __post_init__(self) -> None:
        one_of("by", self.by, COUNTS)


@dataclass(frozen=True)
class trimmed_mean(Rule):
    """The mean of every entry without its ⌈share·n⌉ smallest and largest values; one or two in the middle remain.

    Vectors that are not finite are left out first.

    Args:
        share: in (0, 0.5].

    Source: Yin et al. 2018 [arXiv:1803.01498].
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        real_number("share", self.share, above=0, at_most=0.5)

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        rows = finite_rows(rows)
        cut = min(round_up(self.share * len(rows)), (len(rows) - 1) // 2)
        return torch.stack(sort_rows(rows)[cut : len(rows) - cut]).mean(0)


@dataclass(frozen=True)
class median(trimmed_mean):
    """The median of every entry, over the finite vectors; of an even number, the mean of the two in the middle."""

    share: float = field(default=0.5, init=False, repr=False)


@dataclass(frozen=True)
class krum(Rule):
    """The vector whose n − faulty − 2 nearest others have the least sum of squared distances; ties go to the first.

    A vector that is not finite is never chosen.

    Args:
        faulty: f, the nodes that may send anything; a run needs n ≥ 2·f + 3 nodes.

    Source: Blanchard et al. 2017 [arXiv:1703.02757].
    """

    faulty: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "faulty", whole_number("faulty", self.faulty, at_least=0))

    def check(self, num_nodes: int) -> None:
        if num_nodes < 2 * self.faulty + 3:
            raise ValueError(
                f"krum(faulty={self.faulty}) needs at least 2·faulty + 3 = {2 * self.faulty + 3} nodes, got {num_nodes}"
            )

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        self.check(len(rows))
        near, rows = len(rows) - self.faulty - 2, finite_rows(rows)
        flat = rows.reshape(len(rows), -1)
        squares = torch.stack([torch.linalg.vector_norm(flat - row, dim=1) ** 2 for row in flat])  # (n, n)
        nearest = squares.sort(dim=1).values[:, 1 : 1 + near]  # a row itself is first
        return rows.index_select(0, nearest.sum(1).argmin(0, keepdim=True))[0]


@dataclass(frozen=True)
class geometric_median(Rule):
    """The vector with the least sum of distances from all vectors, by Weiszfeld's rounds from their mean:

        v ← Σ_k β_k v_k / Σ_k β_k,  β_k = 1 / max(10⁻⁶, ‖v − v_k‖)

    Vectors that are not finite are left out first.

    Args:
        rounds: at least 1.

    Source: RFA [Pillutla et al. 2019, arXiv:1912.13445], with the mean of nodes that count alike.
    """

    rounds: int = 8

    def __post_init__(self) -> None:
        whole_number("rounds", self.rounds)

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        flat = finite_rows(rows).reshape(-1, rows[0].numel())
        center = flat.mean(0)
        for _ in range(self.rounds):
            near = 1 / torch.linalg.vector_norm(flat - center, dim=1).clamp(min=1e-6)
            center = reduce_rows(flat, "mean", near / near.sum())
        return center.view(rows.shape[1:])


class centered_clip(Stateful, Rule):
    """Move from the last average v by clipped distances:  v ← v + 1/n Σ_k (v_k − v) min(1, radius / ‖v_k − v‖)

    At first v = 0. Vectors that are not finite are left out.

    Args:
        radius: above 0. rounds: of this rule in one average, at least 1.

    Source: Karimireddy et al. 2021 [arXiv:2012.10333], whose nodes send momentum.
    """

    of_moves = True
    center: Tensor  # v, shared (P,)

    def __init__(self, radius: float, rounds: int = 1) -> None:
        self.radius, self.rounds = real_number("radius", radius, above=0), whole_number("rounds", rounds)

    def setup(self, cluster: Cluster) -> None:
        """Prepare for a run on `cluster`."""
        self.keep_shared(center=torch.zeros_like(cluster.weights[0]))

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        rows = finite_rows(rows)
        for _ in range(self.rounds):
            away = rows - self.center
            self.center = self.center + (away * (self.radius / positive(_norms(away))).clamp(max=1.0)).mean(0)
        return self.center.clone()

    def __repr__(self) -> str:
        return f"centered_clip(radius={self.radius:g}, rounds={self.rounds})"


@dataclass(frozen=True)
class rda(Rule):
    """Of every parameter the mean length, in the mean direction: (Σ w‖v‖ / Σ w) · φ(Σ w·φ(v)), φ(v) = v / ‖v‖.

    The mean of vectors that point apart is short; this one is not. φ(0) = 0.

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


@dataclass(frozen=True)
class iso(Rule):
    """The mean, with the singular values of every matrix replaced by their mean: an all-reduce, and an SVD a matrix.

    A tensor of more than two dimensions is a matrix (out, rest); vectors stay as they are.

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


@dataclass(frozen=True)
class ties(Rule):
    """Of each node the largest entries; then the mean over the nodes that agree with the sign of their sum.

    Args:
        share: of the entries of all parameters that a node keeps, in (0, 1].

    Source: TIES-Merging [Yadav et al. 2023, arXiv:2306.01708]; for moves arXiv:2607.03011.
    """

    share: float = 0.2
    of_moves = True

    def __post_init__(self) -> None:
        real_number("share", self.share, above=0, at_most=1)

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        flat = rows.reshape(len(rows), -1)
        values, index = topk_entries(flat, round_up(self.share * flat.shape[1]))
        kept = torch.zeros_like(flat).scatter_(1, index, values)
        agrees = kept.sign() == kept.sum(0).sign()
        counts = (agrees & (kept != 0)).sum(0)
        return ((kept * agrees).sum(0) / counts.clamp(min=1)).view(rows.shape[1:])


@dataclass(frozen=True)
class tsv(Rule):
    """Of every matrix the top 1/n singular parts of each of n nodes, joined, with orthogonal factors: U Σ Vᵀ, where
    U = P_U Q_Uᵀ for the joined left vectors P_U D Q_Uᵀ, and V alike. Vectors take the mean.

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


@dataclass(frozen=True)
class edit(Rule):
    """Of every parameter Σ_k w_k v_k with w = softmax(−‖v_k‖ / temperature): nodes that moved far count less.

    The nodes gather their norms, 4 bytes a parameter tensor, and add up what they have weighted.

    Args:
        temperature: above 0.

    Source: EDiT [Cheng et al. 2024, arXiv:2412.07210]; its gate for anomalous nodes is `EDiTStrategy`'s.
    """

    temperature: float = 1.0
    by_tensor = True
    of_moves = True

    def __post_init__(self) -> None:
        real_number("temperature", self.temperature, above=0)

    def shares(self, norms: Tensor) -> Tensor:
        """Return the weights (K, …) of nodes by the norms of their moves; an infinite norm has the weight 0."""
        return torch.softmax(-norms / self.temperature, dim=0).nan_to_num(0.0)

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        norms = torch.linalg.vector_norm(rows.reshape(len(rows), -1), dim=1)
        return reduce_rows(rows, "mean", self.shares(norms))

    def over_nodes(self, rows: Tensor, cluster: Cluster, label: str, among: Among, weights: Tensor | None) -> Tensor:
        norms = cluster.collectives.all_gather(tensor_norms(rows, cluster), label=f"{label}: norms")  # (K, L)
        return weighted_by_tensor(rows, self.shares(norms), cluster, label)


def tensor_norms(rows: Tensor, cluster: Cluster) -> Tensor:
    """Return the 2-norms of every parameter tensor of stacked `rows` (R, P): (R, L)."""
    views = list(cluster.replicas.views(rows).values())

    def norms(*tensors: Tensor) -> Tensor:
        return torch.stack([torch.linalg.vector_norm(t.reshape(len(t), -1), dim=1) for t in tensors], dim=1)

    return by_node(cluster, norms, *views)


def weighted_by_tensor(rows: Tensor, shares: Tensor, cluster: Cluster, label: str) -> Tensor:
    """Add up stacked rows (R, P), each tensor weighted by `shares` (K, L): shared (P,). `rows` is overwritten."""
    nodes = cluster.replicas.nodes
    for view, weight in zip(cluster.replicas.views(rows).values(), shares[nodes.start : nodes.stop].T, strict=True):
        view.mul_(weight.view(-1, *[1] * (view.dim() - 1)))
    return cluster.collectives.all_reduce(rows, "sum", label=label)


@dataclass(frozen=True)
class _Own(Rule):
    """A user's function."""

    function: Merge

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        return self.function(rows, weights)


RULES: dict[str, type[Rule]] = {
    cls.__name__: cls for cls in (mean, median, trimmed_mean, krum, geometric_median, rda, iso, ties, tsv, edit)
}

# Before the rule -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class clip(Part):
    """Scale every node's vector to at most a 2-norm.

    Args:
        norm: above 0; or "median": the median of all nodes' norms, which they gather, 4 bytes each.
    """

    norm: float | str

    def __post_init__(self) -> None:
        if isinstance(self.norm, str):
            one_of("clip: norm", self.norm, ["median"])
        else:
            real_number("clip: norm", self.norm, above=0)

    def __call__(self, rows: Tensor, cluster: Cluster, label: str) -> None:
        """Scale stacked `rows` (R, P) in place."""
        norms = by_node(cluster, _norms, rows)  # (R, 1)
        gathers = isinstance(self.norm, str)
        self.scale(rows, norms, cluster.collectives.all_gather(norms, label=f"{label}: norms") if gathers else norms)

    def scale(self, rows: Tensor, norms: Tensor, of_all: Tensor) -> None:
        """Scale stacked `rows` (n, P) with `norms` (n, 1) in place, where all nodes have the norms `of_all` (K, 1)."""
        limit = median()(of_all) if isinstance(self.norm, str) else self.norm
        rows.mul_((limit / positive(norms)).clamp(max=1.0))


class compress(Stateful, Part):
    """Send vectors with fewer bytes, and what a message leaves out with the next one.

        e_k ← β·e_k + v_k;  send C(e_k);  e_k ← e_k − C(e_k);  every node gets the average of the C(e_k)

    Args:
        compressor: C, and how its messages are averaged. A copy is used.
        error_feedback: β in [0, 1]. True is 1, False 0. Default: 1 for a contractive compressor; 0 for the others, with
            which errors would grow.

    Payload: the compressor's.

    Raises:
        ValueError: error feedback with a compressor that is not contractive.

    Source: error feedback [Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847].
    """

    residual: list[Tensor]  # e_k, stacked, as the compressor arranges it

    def __init__(self, compressor: Compressor, error_feedback: bool | float | None = None) -> None:
        if not isinstance(compressor, Compressor):
            raise TypeError(f"compressor must be a Compressor object, got {compressor!r}")
        if error_feedback is None:
            error_feedback = compressor.contractive
        if isinstance(error_feedback, bool):
            error_feedback = float(error_feedback)
        self.error_feedback = real_number("error_feedback", error_feedback, at_least=0, at_most=1)
        if self.error_feedback and not compressor.contractive:
            raise ValueError(
                f"error_feedback={self.error_feedback:g} with {type(compressor).__name__}: its messages may be further "
                "from a vector than nothing is, so that the errors would grow; leave error_feedback out"
            )
        self.compressor = copy.deepcopy(compressor)

    def setup(self, cluster: Cluster) -> None:
        """Prepare for a run on `cluster`."""
        self.compressor.setup(cluster)
        zeros = torch.zeros_like(cluster.grads)
        self.keep_stacked(residual=self.compressor.arrange(zeros, cluster) if self.error_feedback else [])

    def __call__(self, rows: Tensor, cluster: Cluster, label: str) -> Tensor:
        """Return the average of stacked `rows` (R, P), which are overwritten, as a shared tensor (P,)."""
        arranged = self.compressor.arrange(rows, cluster)
        if self.error_feedback:
            for residual, new in zip(self.residual, arranged, strict=True):
                residual.mul_(self.error_feedback).add_(new)
            arranged = self.residual
        averages = self.compressor.exchange(arranged, cluster, label)
        name = type(self.compressor).__name__
        if not isinstance(averages, list | tuple) or len(averages) != len(arranged):
            given = type(averages).__name__ + (f" of {len(averages)}" if isinstance(averages, list | tuple) else "")
            raise TypeError(
                f"{name}.exchange() must return the averages of what it is given, a list of {len(arranged)} tensors; "
                f"got {given}"
            )
        average = self.compressor.restore([*averages])
        if average.shape != rows.shape[1:]:
            own, given = tuple(rows.shape[1:]), str(tuple(average.shape))
            raise ValueError(
                f"{name}.exchange() must return the average of the nodes, a shared tensor {own}; got {given}"
            )
        return average

    def __repr__(self) -> str:
        return f"compress({self.compressor!r}, error_feedback={self.error_feedback:g})"


# The whole -----------------------------------------------------------------------------------------------------------


class Average(Stateful, Part):
    """A rule, and what happens to the vectors before: see the module. Made by `|`.

    Raises:
        TypeError: two rules, limits or compressors; or a compressor and a rule that is not the plain mean, for what is
            compressed arrives averaged already.
    """

    def __init__(self, *parts: Part) -> None:
        self.attack: Attack | None = next((part.attack for part in parts if isinstance(part, Average)), None)
        self.refuses_attack = ""  # why its vectors cannot be an attacker's
        self.rule: Rule = mean()
        self.limit: clip | None = None
        self.message: compress | None = None
        seen: list[str] = []
        for part in (one for given in parts for one in (given.parts if isinstance(given, Average) else [given])):
            kinds = {"rule": Rule, "limit": clip, "message": compress}
            name = next((name for name, kind in kinds.items() if isinstance(part, kind)), None)
            if name is None:
                raise TypeError(f"an average consists of a rule, clip() and compress(), joined by |; got {part!r}")
            if name in seen:
                raise TypeError(f"an average takes one of each: got {getattr(self, name)!r} and {part!r}")
            seen.append(name)
            setattr(self, name, copy.deepcopy(part))
        if "message" in seen and not (self.rule.is_mean and self.rule.by == "nodes"):
            raise TypeError(f"{self.rule!r} | {self.message!r}: what is compressed arrives as its plain mean")

    @property
    def parts(self) -> list[Part]:
        """The parts, the rule first."""
        return [part for part in (self.rule, self.limit, self.message) if part is not None]

    @property
    def is_mean(self) -> bool:
        """Whether vectors travel as they are and become their mean, which may then be of weights in place of moves."""
        return self.rule.is_mean and self.limit is None and self.message is None and self.attack is None

    @property
    def takes_mean(self) -> bool:
        """Whether the plain mean of the nodes' vectors is all that it needs."""
        own = self.rule
        return not (own.needs_rows or own.by != "nodes" or self.limit or self.message or self.attack)

    @property
    def of_moves(self) -> bool:
        """Whether vectors must be moves or gradients: weights have no length that says anything."""
        parts = (self.limit, self.message, self.attack)
        return self.rule.of_moves or any(part is not None for part in parts)

    def setup(self, cluster: Cluster) -> None:
        """Prepare for a run on `cluster`."""
        self.rule.check(cluster.num_nodes)
        if isinstance(self.rule, centered_clip):
            self.rule.setup(cluster)
        if self.attack is not None:
            self.attack.attackers(cluster.population)
        if self.message is not None:
            self.message.setup(cluster)

    def weights(self, cluster: Cluster) -> Tensor | None:
        """Return what the nodes count (K,); None where all count alike."""
        return cluster.shard_sizes if self.rule.by == "examples" else None

    def __call__(self, rows: Tensor, cluster: Cluster, label: str, among: Among = None) -> Tensor:
        """Average stacked `rows` (R, P), which may be overwritten.

        Returns:
            Shared (P,); with `among` stacked (R, P), see `Collectives.all_reduce`.
        """
        if self.attack is not None:
            self.attack(rows, cluster)
        if self.limit is not None:
            self.limit(rows, cluster, label)
        if self.message is not None:
            return self.message(rows, cluster, label)
        return self.rule.over_nodes(rows, cluster, label, among, self.weights(cluster))

    def of_distances(self, origin: Tensor, rows: Tensor, cluster: Cluster, label: str) -> Tensor:
        """Average origin − rows, of shared (P,) and stacked (R, P): shared (P,).

        `origin` is equal on all nodes, so that for a mean the rows are sent as they are.
        """
        if self.is_mean:
            return origin - self(rows, cluster, label)
        return self(origin - rows, cluster, label)

    def start_of_distances(self, origin: Tensor, rows: Tensor, cluster: Cluster, label: str, delay: int) -> Pending:
        """As `of_distances`, on its way for `delay` steps; `origin` must not change until then."""
        start = cluster.collectives.start
        if not self.is_mean:
            return start(self, origin - rows, cluster, label, delay=delay)
        arriving = start("all_reduce", rows, "mean", weights=self.weights(cluster), label=label, delay=delay)
        return arriving.then(lambda mean: origin - mean)

    def of_arrivals(self, rows: Tensor, replicas: Replicas, weights: Tensor | None) -> Tensor:
        """Average stacked rows (n, P) that have arrived at a server, by weights (n,) that sum to 1, or None: (P,)."""
        if self.limit is not None:
            norms = _norms(rows)
            self.limit.scale(rows, norms, norms)
        return self.rule.of_parameters(replicas, rows, weights)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


AverageLike = Part | type[Part] | Merge | str


def average_of(
    average: AverageLike, where: str, *, by: tuple[str, ...] = COUNTS[:2], origin: bool = True, arrivals: bool = False
) -> Average:
    """Return an average of its own that is given as such, as a part of one, by a rule's name, or as a function.

    Args:
        where: whose argument it is, for errors.
        by: what nodes may count by.
        origin: whether the vectors are gradients or moves from an origin that all nodes share.
        arrivals: whether vectors arrive one by one at a server, and are no collective.
    """
    if isinstance(average, str):
        average = RULES[one_of("average", average, RULES)]
    made: Any = average() if isinstance(average, type) and issubclass(average, Rule) else average
    if not isinstance(made, Part):
        if not callable(made) or isinstance(made, type):
            raise TypeError(
                f"{where}: average must be an average such as trimmed_mean(0.2) or mean() | clip(1.0), the name of a "
                f"rule ({', '.join(RULES)}), or a function of (rows, weights), got {average!r}"
            )
        a_function(f"{where}: average", made, "rows, weights")
        made = _Own(made)
    result = Average(made)
    if result.rule.by not in by:
        raise ValueError(f"{where}: average={result} counts by {result.rule.by!r}, and here it may be one of {by}")
    if result.of_moves and not origin:
        raise ValueError(
            f"{where}: average={result} takes lengths or directions of moves from weights that all nodes shared, and "
            "here they share none"
        )
    if isinstance(result.rule, centered_clip) and arrivals:
        raise ValueError(f"{where}: average={result} begins at the last average of all nodes, and here one arrives")
    if arrivals or not origin:
        result.refuses_attack = f"{where} averages " + ("what arrives one by one" if arrivals else "in groups")
    if result.message is not None and arrivals:
        raise ValueError(f"{where}: average={result}: messages arrive one by one here; leave out compress()")
    return result


def finite_rows(rows: Tensor) -> Tensor:
    """Return the rows of (n, …) whose values all are finite; all rows if there is none."""
    if rows.is_meta or not rows.is_floating_point() or bool(rows.sum().isfinite()):
        return rows
    finite = rows.reshape(len(rows), -1).isfinite().all(1)
    return rows[finite] if bool(finite.any()) else rows


def positive(lengths: Tensor) -> Tensor:
    """Return lengths to divide by: 0 / positive(0) is 0."""
    return lengths.clamp(min=torch.finfo(lengths.dtype).tiny)


def _norms(rows: Tensor) -> Tensor:
    return torch.linalg.vector_norm(rows, dim=1, keepdim=True)


def _orthogonal(matrix: Tensor) -> Tensor:
    p, _, qt = torch.linalg.svd(matrix, full_matrices=False)
    return p @ qt
