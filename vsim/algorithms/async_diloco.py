"""Asynchronous DiLoCo: outer steps with the updates that have arrived, weighted by staleness."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar

import torch
from torch import Tensor

from vsim.algorithms.asynchronous import AsynchronousStrategy
from vsim.arguments import a_function, one_of, real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec
from vsim.cluster.reductions import reduce_rows, shares_of
from vsim.core.algorithm import Optim
from vsim.core.average import Averaging
from vsim.core.fields import algorithm, state
from vsim.core.outer import outer_optimizer, outer_spec


def none(staleness: int) -> float:
    """Return 1: stale weights count as much as fresh weights."""
    return 1.0


def sqrt(staleness: int) -> float:
    """Return 1 / √(1 + s)."""
    return 1 / math.sqrt(1 + staleness)


STALENESS: dict[str, Callable[[int], float]] = {"none": none, "sqrt": sqrt}


@algorithm
class AsyncDiLoCoStrategy(AsynchronousStrategy):
    """DiLoCo whose server steps after every `buffer` arrivals, and whose workers do not wait [Liu et al. 2024,
    arXiv:2401.09135].

        worker k   pulls φ, takes H inner steps, sends θ_k; pulls φ again
        server     after every `buffer` arrivals:  φ ← outer optimizer(φ, mean_k w(s_k) (φ_k − θ_k))

    φ_k is the φ that worker k pulled last. The staleness s_k is the number of outer steps since that pull. With
    DiLoCo's optimizers, buffer=1 is FedAsync's scheme, and a larger buffer is FedBuff's.

    Args:
        H: inner steps from pulling φ to sending θ_k, at least 1.
        outer_optim, outer_lr: see `DiLoCoStrategy`.
        staleness: the weight w(s): "sqrt" for 1 / √(1 + s), "none" for 1, or a function of s with values of at least 0.
        buffer: arrivals per outer step, at least 1. Default: 1.
        patience: arrivals per outer step, at most K, in place of `buffer`: workers then wait for the outer step. With
            math.inf, all workers wait for each other: this is DiLoCo, up to rounding.
        average: merges the w(s_k) (φ_k − θ_k); see `vsim.strategy.average`. Messages arrive one by one and cannot be
            compressed.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights, to the server and back, after every H steps of a worker.

    Deviations from the paper: none; the strategy is the paper's baseline. In contrast, FedAsync [arXiv:1903.03934]
    mixes weights, and FedBuff [arXiv:2106.06639] takes plain outer steps.
    """

    family = "asynchronous"
    derived: ClassVar[tuple[str, ...]] = ("outer_gradient",)
    resolved = ("outer_optim", "outer_lr", "staleness", "buffer", "patience")

    outer_optim: Optim = None
    outer_lr: float | None = None
    staleness: str | Callable[[int], float] = "sqrt"
    buffer: int | None = None
    patience: float | None = None
    average: Averaging = Averaging("mean", arrivals=True)

    outer_optim_spec: OptimSpec = state()

    outer_gradient: Tensor = state()  # shared (P,)
    arrivals: list[tuple[int, Tensor, Tensor, int]] = state()  # node, θ_k, φ_k, s_k

    def __post_init__(self) -> None:
        self.outer_optim_spec = outer_spec(self.outer_optim, self.outer_lr)
        if self.patience is not None and self.buffer is not None:
            raise TypeError("AsyncDiLoCo: buffer and patience both say how many arrivals an outer step has; give one")
        self.waits = self.patience is not None
        self.awaited = 1.0 if self.buffer is None else whole_number("buffer", self.buffer)
        if self.patience is not None:
            no_limit = isinstance(self.patience, float) and self.patience == math.inf
            self.awaited = math.inf if no_limit else whole_number("patience", self.patience)
        weight = self.staleness
        self.weight = STALENESS[one_of("staleness", weight, STALENESS)] if isinstance(weight, str) else weight
        a_function("staleness", self.weight, "staleness")
        super().__post_init__()

    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        self.outer_gradient = torch.zeros_like(self.outer_weights)
        optim = outer_optimizer(self.outer_optim_spec, cluster, self.outer_weights, self.outer_gradient)
        self.keep_shared(outer_optims=[optim], arrivals=[])

    def receive(self, node: int, weights: Tensor, staleness: int) -> Sequence[int]:
        self.arrivals.append((node, weights, self.taken[node].clone(), staleness))
        came = [one for one, *_ in self.arrivals]
        if len(came) < min(self.awaited, self.cluster.num_nodes if self.waits else math.inf):
            return [] if self.waits else [node]
        self._outer_step()
        self.arrivals = []
        return came if self.waits else [node]

    def _outer_step(self) -> None:
        """Take an outer step with the arrived updates, summed in node order, not in order of arrival."""
        nodes, weights, taken, staleness = zip(*sorted(self.arrivals, key=lambda arrival: arrival[0]), strict=True)
        share = [real_number("staleness weight", self.weight(s), at_least=0) for s in staleness]
        if self.average.is_mean and self.average.rule.by == "nodes" and not any(staleness) and set(share) == {1.0}:
            # All nodes pulled the same φ: take the mean first, as DiLoCo does, so that both round alike.
            torch.sub(self.outer_weights, reduce_rows(torch.stack(weights), "mean"), out=self.outer_gradient)
        else:
            moved = torch.stack([w * (phi - theta) for w, phi, theta in zip(share, taken, weights, strict=True)])
            counts = self.average.weights(self.cluster)
            if counts is not None:
                counts = shares_of(counts[list(nodes)], range(len(nodes)), len(nodes))
            self.outer_gradient.copy_(self.average.of_arrivals(moved, self.cluster.replicas, counts))
        self.outer_optims[0].step()
        self.version += 1
