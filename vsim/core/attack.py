"""Attackers: nodes that do not send the vector that they computed, or train on wrong labels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields
from statistics import NormalDist
from typing import Any

import torch
from torch import Tensor

from vsim.arguments import a_list, one_of, real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.randomness import derive_seed, generator
from vsim.cluster.reductions import round_up

KINDS = ("sign_flip", "gaussian", "alie", "inner_product", "min_max", "min_sum", "label_flip")
DIRECTIONS = ("deviation", "sign", "unit")


@dataclass(frozen=True, repr=False)
class Attack:
    """Make a share of the nodes send another vector in place of their gradient or move g, or train on wrong labels.

    Attackers know the elementwise mean μ and standard deviation σ of the other nodes' vectors g_i, and send:

    - "sign_flip": −scale · g.
    - "gaussian": Gaussian noise of standard deviation `scale`.
    - "alie": μ − z σ, "a little is enough" [Baruch et al. 2019, arXiv:1902.06156]; z is `scale`, by default
      Φ⁻¹((n − m − s) / (n − m)) for n nodes and m attackers, with s = max(1, ⌊n / 2 + 1⌋ − m).
    - "inner_product": −ε μ, inner-product manipulation [Xie et al. 2019, arXiv:1903.03936]; ε is `scale`, by default
      0.1. The plain mean keeps its direction unless ε > (n − m) / m; a small ε misleads rules that choose vectors.
    - "min_max", "min_sum": a = μ + γ p, with the largest γ for which a is no farther from the g_i than the g_i from
      each other: max_i ‖a − g_i‖ ≤ max_ij ‖g_i − g_j‖ for "min_max", Σ_i ‖a − g_i‖² ≤ max_i Σ_j ‖g_i − g_j‖² for
      "min_sum" [Shejwalkar and Houmansadr 2021, NDSS].
    - "label_flip": the vector computed from data with labels C − 1 − y in place of y.

    Args:
        kind: one of the above.
        share: fraction of the nodes that attack, in (0, 1), rounded up to whole nodes; `seed` draws the attackers.
        nodes: numbers of the attackers, in place of `share`.
        scale: see "sign_flip", "gaussian" (default 1 in both), "alie" and "inner_product" above.
        direction: p of "min_max" and "min_sum": "deviation" (−σ), "sign" (−sign μ) or "unit" (−μ / ‖μ‖).
        classes: C, for "label_flip". This attack needs a dataset for each node, such as a `vsim.data.partition`, with
            examples (inputs, label), or dicts with a "label" or "labels".
        seed: seeds the draw of attackers.

    Attackers receive the same average as other nodes. How they learn the other nodes' vectors is not billed. In gossip,
    g is a node's move since the last mixing, and attackers send their weights of that time plus the vector above.
    """

    kind: str
    share: float | None = None
    nodes: Sequence[int] | None = None
    scale: float | None = None
    direction: str | None = None
    classes: int | None = None
    seed: int = 0

    def __post_init__(self) -> None:
        one_of("attack: kind", self.kind, KINDS)
        if (self.share is None) == (self.nodes is None):
            raise TypeError(f"attack: give share or nodes, got share={self.share!r} and nodes={self.nodes!r}")
        kept: dict[str, Any] = {"seed": whole_number("attack: seed", self.seed, at_least=0)}
        if self.share is not None:
            kept["share"] = real_number("attack: share", self.share, above=0, below=1)
        else:
            nodes = [whole_number("attack: a node", node, at_least=0) for node in a_list("attack: nodes", self.nodes)]
            kept["nodes"] = tuple(sorted({*nodes}))
        if self.scale is not None:
            kept["scale"] = real_number("attack: scale", self.scale)
        if self.direction is not None:
            one_of("attack: direction", self.direction, DIRECTIONS)
        if self.kind == "label_flip" or self.classes is not None:
            kept["classes"] = whole_number("attack: classes", self.classes, at_least=2)
        for name, value in kept.items():
            object.__setattr__(self, name, value)
        takers = {
            "scale": KINDS[:4],
            "direction": KINDS[4:6],
            "classes": KINDS[6:],
            "seed": KINDS if self.nodes is None else (),
        }
        for name, kinds in takers.items():
            is_given = self.seed != 0 if name == "seed" else getattr(self, name) is not None
            if is_given and self.kind not in kinds:
                raise TypeError(f"attack: {name} has no effect in {self}")

    def attackers(self, population: int) -> tuple[int, ...]:
        """Return the numbers of the nodes or clients that attack, in ascending order.

        Raises:
            ValueError: all nodes would attack, or a number belongs to no node.
        """
        nodes = self.nodes
        if nodes is None:
            assert self.share is not None
            order = torch.randperm(population, generator=torch.Generator().manual_seed(self.seed)).tolist()
            nodes = sorted(order[: round_up(self.share * population)])
        if nodes[-1] >= population or len(nodes) == population:
            allowed = f"0 … {population - 1}, and one at least must be left"
            raise ValueError(f"{self}: nodes are {allowed}; got {list(nodes)}")
        return tuple(nodes)

    def __call__(self, rows: Tensor, cluster: Cluster) -> None:
        """Overwrite the attackers' rows of stacked `rows` (R, P), which hold the vectors that the nodes would send."""
        if self.kind == "label_flip":
            return
        bad = set(self.attackers(cluster.population))
        places = [place for place, node in enumerate(cluster.active) if node in bad]
        nodes = cluster.collectives.nodes
        held = [place - nodes.start for place in places if place in nodes]
        draw = int(torch.randint(2**62, (), generator=cluster.generator)) if self.kind == "gaussian" else 0
        scale = 1.0 if self.scale is None else self.scale
        if not places or rows.is_meta:
            return
        if self.kind == "sign_flip":
            for row in held:
                rows[row].mul_(-scale)
        elif self.kind == "gaussian":
            for row in held:
                stream = generator(derive_seed(draw, cluster.active[row + nodes.start]))
                rows[row].copy_(torch.randn(rows.shape[1], generator=stream).mul_(scale))
        elif len(places) < cluster.num_nodes:
            with cluster.collectives.unbilled():
                everyone = cluster.collectives.all_gather(rows)  # (n, P)
            others = [place for place in range(cluster.num_nodes) if place not in set(places)]
            vector = self.vector(everyone[others], len(places))
            for row in held:
                rows[row].copy_(vector)

    def vector(self, others: Tensor, attackers: int) -> Tensor:
        """Return the vector (P,) that all attackers send, given the other nodes' rows (n − m, P).

        γ has a closed form, since the squared distances are quadratic in γ.
        """
        others = others.to(torch.promote_types(others.dtype, torch.float32))
        mean, deviation = others.mean(0), others.std(0, unbiased=False)
        if self.kind == "inner_product":
            return mean * -(0.1 if self.scale is None else self.scale)
        if self.kind == "alie":
            return mean - self.deviations(len(others), attackers) * deviation
        toward = {
            "deviation": lambda: -deviation,
            "sign": lambda: -mean.sign(),
            "unit": lambda: -mean / torch.linalg.vector_norm(mean).clamp(min=torch.finfo(mean.dtype).tiny),
        }[self.direction or "deviation"]()
        squares = torch.stack([torch.linalg.vector_norm(others - row, dim=1) for row in others]).double() ** 2
        away = mean - others  # ‖γ p + away_i‖² = γ² ‖p‖² + 2 γ ⟨p, away_i⟩ + ‖away_i‖²
        length = torch.linalg.vector_norm(toward).double() ** 2
        if not length > 0:
            return mean
        near = torch.linalg.vector_norm(away, dim=1).double() ** 2
        if self.kind == "min_sum":  # the ⟨p, away_i⟩ sum to 0
            gamma = ((squares.sum(1).max() - near.sum()).clamp(min=0) / (len(others) * length)).sqrt()
        else:
            along = (away * toward).sum(1).double() / length
            gamma = ((along**2 + (squares.max() - near).clamp(min=0) / length).sqrt() - along).min()
        return mean + gamma.to(mean) * toward

    def deviations(self, others: int, attackers: int) -> float:
        """Return z of "alie", given the numbers of other nodes and of attackers; 0 if there are too few other nodes."""
        if self.scale is not None:
            return self.scale
        supporters = max(1, (others + attackers) // 2 + 1 - attackers)
        return NormalDist().inv_cdf((others - supporters) / others) if supporters < others else 0.0

    def __repr__(self) -> str:
        given = [f"{f.name}={getattr(self, f.name)!r}" for f in fields(self)[1:] if getattr(self, f.name) != f.default]
        return f"Attack({', '.join([repr(self.kind), *given])})"
