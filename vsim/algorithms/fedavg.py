"""Local SGD and FedAvg: take H local steps, then average the weights."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.arguments import whole_number
from vsim.cluster import Cluster
from vsim.core.algorithm import Algorithm
from vsim.core.average import Averaging, average_of
from vsim.core.fields import algorithm, state
from vsim.core.when import When, sync_interval


@algorithm
class RoundAverage(Algorithm):
    """Base of algorithms that average the nodes' weights after every H-th step."""

    H: int | When = 1
    average: Averaging = Averaging("mean")

    outer_weights: Tensor = state()  # φ, the start of the moves, shared (P,); only if moves are averaged

    def __post_init__(self) -> None:
        self.H = sync_interval(self.H)
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        self.check_nodes(cluster)
        if self.average.of_moves:
            self.keep_shared(outer_weights=cluster.weights[0].clone())
        self.average.setup(cluster)

    def sync(self, cluster: Cluster) -> None:
        if self.average.of_moves:
            moves = cluster.weights - self.outer_weights  # (R, P)
            averaged = self.outer_weights.add_(self.average(moves, cluster, "weights"))
        else:
            averaged = self.average(cluster.weights, cluster, "weights", self.islands(cluster))
        cluster.weights.copy_(averaged)

    def islands(self, cluster: Cluster) -> list[list[int]] | None:
        """Return the groups of nodes that average among themselves; None if all nodes do."""
        return None


@algorithm
class FedAvgStrategy(RoundAverage):
    """Take H local steps, then average the weights: FedAvg [McMahan et al. 2016, arXiv:1602.05629], local SGD
    [Stich 2018, arXiv:1805.09767].

        θ_k ← optimizer(θ_k, g_k);  after every H-th step θ_k ← Σ_j w_j θ_j

    Args:
        island_size: average only within random islands of this many nodes, drawn again at every sync; the last island
            may be smaller. Default: all nodes.
        H: local steps between averagings, at least 1, or a schedule of `vsim.strategy.when`: PostLocal(w, H) is
            post-local SGD, QSR(…) the quadratic synchronization rule.
        average: merges the weights: "mean", mean("examples"), "median", mean() | clip("median"), …; see
            `vsim.strategy.average`. An average that needs moves gets the moves since the last sync, which must have
            made all nodes equal; such an average cannot be used with islands.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights, or the messages of `average`, every H steps.

    Deviations from the paper: all nodes take part in every round, and H counts steps, not epochs.
    """

    family = "local steps"

    island_size: int | None = None

    def __post_init__(self) -> None:
        if self.island_size is not None:
            self.island_size = whole_number("island_size", self.island_size)
            self.average = average_of(self.average, "FedAvgStrategy", origin=False)
        super().__post_init__()

    def setup(self, cluster: Cluster) -> None:
        if self.island_size is not None:
            whole_number("island_size", self.island_size, at_most=cluster.population)
        super().setup(cluster)

    def rounds_repeat(self, num_nodes: int) -> int | None:
        return 1 if self.island_size is None or self.island_size >= num_nodes else None  # islands are drawn

    def check_nodes(self, cluster: Cluster) -> None:
        size = self.island_size or cluster.num_nodes
        self.average.rule.check(cluster.num_nodes % size or size)  # the smallest island's size

    def islands(self, cluster: Cluster) -> list[list[int]] | None:
        if self.island_size is None or self.island_size >= cluster.num_nodes:
            return None
        active = torch.tensor(cluster.active)
        shuffled = active[torch.randperm(cluster.num_nodes, generator=cluster.generator)]
        return [sorted(island.tolist()) for island in shuffled.split(self.island_size)]
