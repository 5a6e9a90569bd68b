"""AllReduce, also called DDP: every step averages the gradients, so that all nodes stay equal."""

from __future__ import annotations

from typing_extensions import Unpack

from vsim.cluster import Cluster
from vsim.strategy.base import CommunicationModule, Optim, Strategy, StrategyOptions, with_inner


class GradientAverage(CommunicationModule):
    """g = mean_k g_k before every optimizer step. Payload: all gradients, every step."""

    def communicate_gradients(self, cluster: Cluster) -> None:
        grads = cluster.replicas.grads  # one row, and the mean already, where the nodes share it
        grads.copy_(cluster.collectives.all_reduce(grads, "mean", label="gradients"))


class SimpleReduceStrategy(Strategy):
    """AllReduce: the averaged gradient is clipped and stepped with on every node.

        g = mean_k g_k;  θ_k ← optimizer(θ_k, clip(g))

    Args:
        options: those of every strategy; see `Strategy`.
    """

    shares_weights = True
    shares_grads = True

    def __init__(self, optim_spec: Optim = None, /, **options: Unpack[StrategyOptions]) -> None:
        super().__init__([GradientAverage()], **with_inner(optim_spec, options))
