"""AllReduce, also called DDP: every step averages the gradients, so that all nodes stay equal."""

from __future__ import annotations

from vsim.cluster import Cluster
from vsim.strategy.average import AverageLike, average_of
from vsim.strategy.base import Algorithm, CommunicationModule


class GradientAverage(CommunicationModule):
    """Average the gradients before every optimizer step.

        g = average(g_1, …, g_K), by default mean_k g_k;  θ_k ← optimizer(θ_k, clip(g))

    Args:
        average: merges the gradients: "mean", "median", krum(faulty=1), compress(PowerSGD(2)), …; see
            `vsim.strategy.average`. clip() limits each node's gradient; max_norm limits the average.

    Payload: all gradients, or the messages of `average`, every step.
    """

    only_once = True  # a second module would find equal gradients

    def __init__(self, average: AverageLike = "mean") -> None:
        self.average = average_of(average, "GradientAverage")

    def setup(self, cluster: Cluster) -> None:
        self.average.setup(cluster)

    def communicate_gradients(self, cluster: Cluster) -> None:
        grads = cluster.replicas.grads
        grads.copy_(self.average(grads, cluster, "gradients"))


class SimpleReduceStrategy(Algorithm, of=GradientAverage):
    """AllReduce (DDP): average the gradients at every step, so that all nodes stay equal."""

    family = "data parallel"
