"""Local SGD and FedAvg: train alone for H steps, then average the weights."""

from __future__ import annotations

import torch
from torch import Tensor
from typing_extensions import Unpack

from vsim.arguments import one_of, whole_number
from vsim.cluster import Cluster
from vsim.strategy.base import CommunicationModule, Optim, Strategy, StrategyOptions, with_inner
from vsim.strategy.clipping import MaxNodeNorm, checked_node_norm, clip_rows_
from vsim.strategy.mergers import WEIGHTINGS, MergerLike, merge, resolve_merger, shares


class AveragingCommunicator(CommunicationModule):
    """θ_k = Σ_j w_j θ_j after every `every`-th step, over all nodes or inside of islands; or as another merger has it.

    Args:
        island_size: nodes that average together. At every sync the nodes are shuffled anew and cut into islands of
            this size; the last may be smaller. None: all nodes.
        every: steps between syncs, H.
        weighting: "uniform", or "examples": by the number of examples that a node has.
        merger: the mean, or another of `vsim.strategy.mergers` that merges weights.
        max_node_norm: merge what the nodes have moved since the last sync, every node's scaled to at most this 2-norm;
            "median": the median of all nodes' norms.
    """

    outer_weights: Tensor  # φ, which the nodes have moved from, shared (P,); with max_node_norm

    def __init__(
        self,
        island_size: int | None = None,
        every: int = 1,
        weighting: str = "uniform",
        merger: MergerLike = "mean",
        max_node_norm: MaxNodeNorm = None,
    ) -> None:
        self.island_size = None if island_size is None else whole_number("island_size", island_size)
        self.every = whole_number("every", every)
        self.weighting = one_of("weighting", weighting, WEIGHTINGS)
        clips = max_node_norm is not None
        self.merger = resolve_merger(merger, "FedAvg", weighted=weighting == "examples", of_weights=not clips)
        self.max_node_norm = checked_node_norm(max_node_norm)
        if clips and island_size is not None:
            raise TypeError(
                f"FedAvg: max_node_norm={max_node_norm!r} is of moves from weights that all nodes shared, and with "
                f"island_size={island_size} they share none; give one of them"
            )

    @property
    def first_step(self) -> int:
        return self.every

    def setup(self, cluster: Cluster) -> None:
        if self.island_size is not None:
            whole_number("island_size", self.island_size, at_most=cluster.population)
        if self.max_node_norm is not None:
            self.keep_shared(outer_weights=cluster.weights[0].clone())

    def communicate(self, cluster: Cluster) -> None:
        if cluster.step % self.every:
            return
        weights = shares(self.weighting, cluster)
        if self.max_node_norm is None:
            merged = merge(self.merger, cluster.weights, cluster, "weights", self._islands(cluster), weights)
        else:
            moves = cluster.weights - self.outer_weights  # (R, P)
            clip_rows_(moves, self.max_node_norm, cluster, "weights")
            merged = self.outer_weights.add_(merge(self.merger, moves, cluster, "weights", weights=weights))
        cluster.weights.copy_(merged)

    def _islands(self, cluster: Cluster) -> list[list[int]] | None:
        if self.island_size is None or self.island_size >= cluster.num_nodes:
            return None
        shuffled = torch.randperm(cluster.num_nodes, generator=cluster.generator)
        return [sorted(island.tolist()) for island in shuffled.split(self.island_size)]


class FedAvgStrategy(Strategy):
    """Federated averaging [McMahan et al. 2016, arXiv:1602.05629]; with equal shards local SGD [Stich 2018,
    arXiv:1805.09767].

        θ_k ← optimizer(θ_k, g_k);  after every H-th step θ_k ← Σ_j w_j θ_j

    Args:
        H: local steps between averagings, at least 1.
        island_size: average only inside of random islands of this many nodes, drawn anew at every sync.
        weighting: "uniform" (w_j = 1/K) or "examples" (w_j in proportion to node j's number of examples).
        merger: how weights become one: "mean", "median", trimmed_mean(0.2), krum(faulty=1) or a function of one's own;
            see `Merger`. All but the mean gather the weights of all nodes.
        max_node_norm: scale what every node has moved since the last averaging to at most this 2-norm; "median": the
            median of all nodes' norms. The moves are merged then, also by "rda" or "iso".
        options: those of every strategy; see `Strategy`.

    Payload: all weights every H steps. The "median" of norms takes 4 bytes more.

    Deviations from the paper: all nodes take part in every round, and H counts steps, not epochs.
    """

    def __init__(
        self,
        optim_spec: Optim = None,
        /,
        island_size: int | None = None,
        H: int = 1,
        weighting: str = "uniform",
        merger: MergerLike = "mean",
        max_node_norm: MaxNodeNorm = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        every = whole_number("H", H)
        average = AveragingCommunicator(island_size, every, weighting, merger, max_node_norm)
        super().__init__([average], **with_inner(optim_spec, options))
