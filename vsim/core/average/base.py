"""An average: a rule, after an optional limit and compressor of the vectors."""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass, fields
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor

from vsim.arguments import one_of
from vsim.cluster import Cluster
from vsim.cluster.collectives import Among, Merge, Pending
from vsim.cluster.reductions import reduce_rows
from vsim.cluster.replicas import Replicas
from vsim.cluster.state import Stateful
from vsim.core.attack import Attack

COUNTS = ("nodes", "examples", "tokens")


class Part:
    """A part of an average; `|` joins parts.

    Attributes:
        role: the part's place in an average: "rule", "limit" or "message".
        made_by: the name of the function that makes the part, shown by `repr`; see `function_of`.
    """

    role: ClassVar[str] = ""
    made_by: ClassVar[str] = ""

    def __or__(self, other: Part) -> Average:
        return Average(self, other)

    def __repr__(self) -> str:
        if "made_by" not in vars(type(self)):
            return super().__repr__()
        own = ", ".join(f"{field.name}={getattr(self, field.name)!r}" for field in fields(self) if field.init)  # type: ignore[arg-type]
        return f"{self.made_by}({own})"


class Rule(Part):
    """Merge the vectors of n nodes into one. A subclass defines `of_rows`, or `of_mean` if it needs only the mean.

    A function f(rows (n, P), weights (n,) or None) → (P,) is accepted wherever an average is.

    Attributes:
        by: a node's weight: 1 ("nodes"), or its number of examples ("examples") or of tokens ("tokens").
        by_tensor: whether the rule is called once per parameter, not with all parameters as one vector (P,).
            Embeddings then take the mean, since most rows of a lookup table change on few nodes only.
        of_moves: whether the rule uses lengths or directions, so that the vectors must be moves (changes of the
            weights since the last sync) or gradients, not weights.
    """

    role = "rule"
    by = "nodes"
    by_tensor = False
    of_moves = False

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Merge rows (n, *shape) into (*shape); `weights` (n,) sum to 1 or are None (equal). Default: the mean."""
        return reduce_rows(rows, "mean", weights)

    def of_mean(self, mean: Tensor) -> Tensor:
        """Return the tensor that replaces the mean (*shape). Default: the mean itself."""
        return mean

    def check(self, num_nodes: int) -> None:
        """Raise a ValueError if the rule cannot merge this number of nodes."""

    @property
    def needs_rows(self) -> bool:
        """Whether the rule needs all rows gathered, not only their mean from an all-reduce."""
        return type(self).of_rows is not Rule.of_rows

    @property
    def is_mean(self) -> bool:
        """Whether the rule is the plain mean."""
        return not self.needs_rows and type(self).of_mean is Rule.of_mean

    def __call__(self, rows: Tensor, weights: Tensor | None = None) -> Tensor:
        """Merge stacked rows (n, *shape) into (*shape)."""
        merged = self.of_mean(self.of_rows(rows, weights))
        given = tuple(merged.shape) if isinstance(merged, Tensor) else type(merged).__name__
        if given != tuple(rows.shape[1:]):
            raise ValueError(f"average={self} must make {tuple(rows.shape[1:])} of {tuple(rows.shape)}, got {given}")
        return merged

    def of_parameters(self, replicas: Replicas, rows: Tensor, weights: Tensor | None) -> Tensor:
        """Merge stacked rows (n, P), all held by this process, into a shared tensor (P,)."""
        if not self.by_tensor:
            return self(rows, weights)
        views, embeddings = replicas.views(rows).items(), replicas.embeddings
        merged = [(Mean() if name in embeddings else self)(view, weights) for name, view in views]
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


@dataclass(frozen=True, repr=False)
class Own(Rule):
    """A rule that calls a user's function of (rows, weights)."""

    function: Merge

    def __repr__(self) -> str:
        return getattr(self.function, "__qualname__", repr(self.function))

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        return self.function(rows, weights)


@dataclass(frozen=True, repr=False)
class Mean(Rule):
    """Σ_k w_k v_k, by an all-reduce. w_k is 1/K; with "examples", it is proportional to node k's number of examples."""

    by: str = "nodes"

    def __post_init__(self) -> None:
        one_of("by", self.by, COUNTS)


class Average(Stateful, Part):
    """A rule, after an optional limit and compressor of the vectors, joined by `|`; see `vsim.strategy.average`.

    Raises:
        TypeError: two rules, two limits or two compressors; or a compressor with a rule other than the plain mean,
            since compressed vectors arrive already averaged.
    """

    def __init__(self, *parts: Part) -> None:
        self.attack: Attack | None = next((part.attack for part in parts if isinstance(part, Average)), None)
        self.refuses_attack = ""  # why attackers cannot replace the averaged vectors; "" if they can
        self.rule: Rule = Mean()
        self.limit: Any = None  # a `Clip`, or None
        self.message: Any = None  # a `Compress`, or None
        seen: list[str] = []
        for part in (one for given in parts for one in (given.parts if isinstance(given, Average) else [given])):
            name = getattr(part, "role", "")
            if not name:
                raise TypeError(f"an average consists of a rule, clip() and compress(), joined by |; got {part!r}")
            if name in seen:
                raise TypeError(f"an average takes one of each: got {getattr(self, name)!r} and {part!r}")
            seen.append(name)
            setattr(self, name, copy.deepcopy(part))
        if "message" in seen and not (self.rule.is_mean and self.rule.by == "nodes"):
            raise TypeError(f"{self.rule!r} | {self.message!r}: compressed messages only have a plain mean, mean()")

    @property
    def parts(self) -> list[Part]:
        """The parts, the rule first."""
        return [part for part in (self.rule, self.limit, self.message) if part is not None]

    @property
    def is_mean(self) -> bool:
        """Whether the average is the plain mean of unchanged vectors, which may then be weights in place of moves."""
        return self.rule.is_mean and self.limit is None and self.message is None and self.attack is None

    @property
    def of_moves(self) -> bool:
        """Whether vectors must be moves or gradients, since the length of weights has no meaning."""
        parts = (self.limit, self.message, self.attack)
        return self.rule.of_moves or any(part is not None for part in parts)

    def setup(self, cluster: Cluster) -> None:
        self.rule.check(cluster.num_nodes)
        if isinstance(self.rule, Stateful):
            self.rule.setup(cluster)  # type: ignore[attr-defined]
        if self.attack is not None:
            self.attack.attackers(cluster.population)
        if self.message is not None:
            self.message.setup(cluster)

    def weights(self, cluster: Cluster) -> Tensor | None:
        """Return each node's weight in the average, (K,); None if the weights are equal."""
        return cluster.shard_sizes if self.rule.by == "examples" else None

    def __call__(self, rows: Tensor, cluster: Cluster, label: str, among: Among = None) -> Tensor:
        """Average stacked `rows` (R, P), which may be overwritten.

        Returns:
            The average, shared (P,); or stacked (R, P) if `among` is given: see `Collectives.all_reduce`.
        """
        if self.attack is not None:
            self.attack(rows, cluster)
        if self.limit is not None:
            self.limit(rows, cluster, label)
        if self.message is not None:
            return self.message(rows, cluster, label)
        return self.rule.over_nodes(rows, cluster, label, among, self.weights(cluster))

    def of_distances(self, origin: Tensor, rows: Tensor, cluster: Cluster, label: str) -> Tensor:
        """Return the average over nodes, shared (P,), of shared `origin` (P,) minus stacked `rows` (R, P).

        A plain mean averages the rows themselves, and subtracts the result from `origin`, which all nodes have.
        """
        if self.is_mean:
            return origin - self(rows, cluster, label)
        return self(origin - rows, cluster, label)

    def start_of_distances(self, origin: Tensor, rows: Tensor, cluster: Cluster, label: str, delay: int) -> Pending:
        """Start `of_distances`, whose result is due in `delay` steps; `origin` must not change until then."""
        start = cluster.collectives.start
        if not self.is_mean:
            return start(self, origin - rows, cluster, label, delay=delay)
        arriving = start("all_reduce", rows, "mean", weights=self.weights(cluster), label=label, delay=delay)
        return arriving.then(lambda mean: origin - mean)

    def of_arrivals(self, rows: Tensor, replicas: Replicas, weights: Tensor | None) -> Tensor:
        """Average the rows (n, P) that arrived at a server into (P,); `weights` (n,) sum to 1 or are None (equal)."""
        if self.limit is not None:
            norms = norms_of(rows)
            self.limit.scale(rows, norms, norms)
        return self.rule.of_parameters(replicas, rows, weights)

    def __repr__(self) -> str:
        return " | ".join(map(repr, self.parts))


def finite_rows(rows: Tensor) -> Tensor:
    """Return the rows of (n, …) whose values are all finite; all rows if no row is finite."""
    if rows.is_meta or not rows.is_floating_point() or bool(rows.sum().isfinite()):
        return rows
    finite = rows.reshape(len(rows), -1).isfinite().all(1)
    return rows[finite] if bool(finite.any()) else rows


def positive(lengths: Tensor) -> Tensor:
    """Return lengths that are safe to divide by: 0 / positive(0) is 0."""
    return lengths.clamp(min=torch.finfo(lengths.dtype).tiny)


def norms_of(rows: Tensor) -> Tensor:
    """Return the 2-norms (n, 1) of rows (n, P), in float32 at least, since norms in float16 overflow early."""
    return torch.linalg.vector_norm(rows, dim=1, keepdim=True, dtype=torch.promote_types(rows.dtype, torch.float32))


def scale_(rows: Tensor) -> Tensor:
    """Divide rows (n, P) by their largest magnitudes, which are returned (n, 1).

    Then the squares of their entries do not overflow, as those of 1e19 do in float32.
    """
    largest = torch.linalg.vector_norm(rows, math.inf, dim=1, keepdim=True)
    rows.div_(positive(largest))
    return largest
