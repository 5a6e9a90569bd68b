"""Rules that tolerate nodes that send arbitrary vectors."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor
from vsim_kernels import sort_rows

from vsim.arguments import real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.reductions import reduce_rows, round_up
from vsim.cluster.state import Stateful
from vsim.core.average.base import Rule, finite_rows, norms_of, positive, scale_

_NEAREST = 1e-6  # the least distance in Weiszfeld's iterations, in units of the vectors' spread
_MOST_ROUNDS = 10_000  # far more than are needed: every round is a pass over the rows


@dataclass(frozen=True, repr=False)
class TrimmedMean(Rule):
    """The mean of every entry without its ⌈share·n⌉ smallest and ⌈share·n⌉ largest values; the middle 1 or 2 stay.

    Vectors that are not finite are left out first.

    Args:
        share: the share of values to leave out on each side, in (0, 0.5]; as many nodes may send arbitrary vectors.

    Source: Yin et al. 2018 [arXiv:1803.01498].
    """

    share: float = 0.2

    def __post_init__(self) -> None:
        object.__setattr__(self, "share", real_number("share", self.share, above=0, at_most=0.5))

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        rows = finite_rows(rows)
        cut = min(round_up(self.share * len(rows)), (len(rows) - 1) // 2)
        return torch.stack(sort_rows(rows)[cut : len(rows) - cut]).mean(0)


@dataclass(frozen=True, repr=False)
class Median(TrimmedMean):
    """The median of every entry, over the finite vectors; for an even number, the mean of the middle two."""

    share: float = field(default=0.5, init=False, repr=False)


@dataclass(frozen=True, repr=False)
class Krum(Rule):
    """The vector with the least sum of squared distances to its n − faulty − 2 nearest vectors; in a tie, the first.

    A vector that is not finite is never chosen.

    Args:
        faulty: f, the number of nodes that may send arbitrary vectors; a run needs n ≥ 2·f + 3 nodes.

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
        squares = torch.cat([norms_of(flat - row) ** 2 for row in flat], dim=1)  # (n, n)
        nearest = squares.sort(dim=1).values[:, 1 : 1 + near]  # without the row itself, at distance 0
        return rows.index_select(0, nearest.sum(1).argmin(0, keepdim=True))[0]


@dataclass(frozen=True, repr=False)
class GeometricMedian(Rule):
    """The vector with the least sum of distances from all vectors, by Weiszfeld's iterations from the entries' medians:

        v ← v + Σ_k β_k (v_k − v) / Σ_k β_k,  β_k = 1 / max(10⁻⁶ d, ‖v − v_k‖)

    d is the median, over the vectors, of an entry's largest distance from the start. Vectors that are not finite are
    left out first.

    Args:
        rounds: the number of iterations, 1 to 10,000. With honest vectors that differ in 100 directions or more, 8 end
            within 1 % of their spread from the limit if up to 40 % of at least 4 vectors are faulty, at any distance;
            20 do if just less than half are. In fewer directions more are needed: 100 in ten, 200 in two.

    Source: RFA [Pillutla et al. 2019, arXiv:1912.13445], with equal weights of the nodes. There, the iterations start
    from the mean, which a faulty vector moves as far as it likes, and d is 1.
    """

    rounds: int = 8

    def __post_init__(self) -> None:
        object.__setattr__(self, "rounds", whole_number("rounds", self.rounds, at_most=_MOST_ROUNDS))

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        flat = finite_rows(rows).reshape(-1, rows[0].numel())
        flat = flat.to(torch.promote_types(rows.dtype, torch.float32))
        center = Median()(flat)
        unit = positive(_middle(scale_(flat - center)))
        for _ in range(self.rounds):
            largest = scale_(away := flat - center)
            lengths = norms_of(away)
            distances = largest / unit * lengths  # of honest vectors some 1, whatever their size; of far ones perhaps ∞
            near = 1 / distances.clamp(min=_NEAREST)
            pulls = (distances / _NEAREST).clamp(max=1.0) / positive(lengths)
            center = center + reduce_rows(away, "mean", pulls[:, 0]) / near.sum() * unit
        return center.to(rows).view(rows.shape[1:])


class CenteredClip(Stateful, Rule):
    """Move from the last average v by clipped distances:  v ← v + 1/n Σ_k (v_k − v) min(1, radius / ‖v_k − v‖)

    v starts at 0. Vectors that are not finite are left out.

    Args:
        radius: the largest distance that is not clipped, above 0. rounds: iterations in one average, 1 to 10,000.

    Source: Karimireddy et al. 2021 [arXiv:2012.10333], where nodes send momentum.
    """

    of_moves = True
    center: Tensor  # v, shared (P,)

    def __init__(self, radius: float, rounds: int = 1) -> None:
        self.radius = real_number("radius", radius, above=0)
        self.rounds = whole_number("rounds", rounds, at_most=_MOST_ROUNDS)

    def setup(self, cluster: Cluster) -> None:
        self.keep_shared(center=torch.zeros_like(cluster.weights[0]))

    def of_rows(self, rows: Tensor, weights: Tensor | None) -> Tensor:
        rows = finite_rows(rows)
        for _ in range(self.rounds):
            largest = scale_(away := rows - self.center)
            clipped = away * torch.minimum(largest, self.radius / positive(norms_of(away)))
            self.center = (self.center + clipped.mean(0)).to(rows)
        return self.center.clone()

    def __repr__(self) -> str:
        return f"centered_clip(radius={self.radius:g}, rounds={self.rounds})"


def _middle(numbers: Tensor) -> Tensor:
    """Return the median (1,) of numbers (n, 1); the lower one of the middle two."""
    return sort_rows(numbers)[(len(numbers) - 1) // 2]
