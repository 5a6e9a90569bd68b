"""AllReduce, also called DDP: every step averages the gradients, so that all nodes stay equal."""

from __future__ import annotations

from typing_extensions import Unpack

from vsim.cluster import Cluster
from vsim.strategy.base import CommunicationModule, Optim, Strategy, StrategyOptions, with_inner
from vsim.strategy.clipping import MaxNodeNorm, checked_node_norm, clip_rows_
from vsim.strategy.mergers import MergerLike, merge, resolve_merger


class GradientAverage(CommunicationModule):
    """g = merger(g_1, …, g_K) before every optimizer step.

    Args:
        merger: the mean, or another of `vsim.strategy.mergers`.
        max_node_norm: scale every node's gradient to at most this 2-norm first; "median": the median of all nodes'.

    Payload: all gradients, every step; 4 bytes more for the "median" of norms.
    """

    only_once = True  # the nodes' gradients are equal then

    def __init__(self, merger: MergerLike = "mean", max_node_norm: MaxNodeNorm = None) -> None:
        self.merger = resolve_merger(merger, "GradientAverage")
        self.max_node_norm = checked_node_norm(max_node_norm)

    def communicate_gradients(self, cluster: Cluster) -> None:
        grads = cluster.replicas.grads  # one row, and the mean already, where the nodes share it
        clip_rows_(grads, self.max_node_norm, cluster, "gradients")
        grads.copy_(merge(self.merger, grads, cluster, "gradients"))


class SimpleReduceStrategy(Strategy):
    """AllReduce: the averaged gradient is clipped and stepped with on every node.

        g = merger(g_1, …, g_K), by default mean_k g_k;  θ_k ← optimizer(θ_k, clip(g))

    Args:
        merger: how gradients become one: "mean", "median", trimmed_mean(0.2), krum(faulty=1), "rda", "iso", or a
            function of one's own; see `Merger`. All but the mean and iso gather the gradients of all nodes.
        max_node_norm: scale every node's gradient to at most this 2-norm before; "median": the median of all nodes'
            norms. `max_norm` clips what comes out.
        options: those of every strategy; see `Strategy`.
    """

    shares_weights = True
    shares_grads = True

    def __init__(
        self,
        optim_spec: Optim = None,
        /,
        merger: MergerLike = "mean",
        max_node_norm: MaxNodeNorm = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        average = GradientAverage(merger, max_node_norm)
        super().__init__([average], **with_inner(optim_spec, options))
        if average.merger.needs_rows or average.max_node_norm is not None:
            self.shares_grads = False  # every node's own is needed, not only their mean
