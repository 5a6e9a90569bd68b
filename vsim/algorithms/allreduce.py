"""AllReduce, also called DDP: every step averages the gradients, so that all nodes stay equal."""

from __future__ import annotations

from vsim.cluster import Cluster
from vsim.core.algorithm import Algorithm
from vsim.core.average import Averaging
from vsim.core.fields import algorithm


@algorithm
class SimpleReduceStrategy(Algorithm):
    """AllReduce (DDP): average the gradients at every step, so that all nodes stay equal.

        g = average(g_1, …, g_K), by default mean_k g_k;  θ_k ← optimizer(θ_k, clip(g))

    Args:
        average: merges the gradients: "mean", "median", krum(faulty=1), compress(PowerSGD(2)), …; see
            `vsim.strategy.average`. clip() limits each node's gradient; max_norm limits the average.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all gradients, or the messages of `average`, every step.
    """

    family = "data parallel"
    only_once = True  # a second part would find equal gradients

    average: Averaging = Averaging("mean")

    def setup(self, cluster: Cluster) -> None:
        self.average.setup(cluster)

    def communicate_gradients(self, cluster: Cluster) -> None:
        grads = cluster.replicas.grads
        grads.copy_(self.average(grads, cluster, "gradients"))
