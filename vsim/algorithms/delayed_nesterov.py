"""Delayed Nesterov: a server that steps at every arrival, and updates its momentum at every N-th arrival."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from vsim.algorithms.asynchronous import AsynchronousStrategy
from vsim.arguments import real_number, true_or_false, whole_number
from vsim.cluster import Cluster
from vsim.core.fields import algorithm, state


@algorithm
class DelayedNesterovStrategy(AsynchronousStrategy):
    """AsyncDiLoCo with a momentum updated at every N-th arrival; slow workers may take fewer steps [Liu et al. 2024,
    arXiv:2401.09135].

        worker k   pulls φ_k = φ, takes H_k inner steps, sends g = φ_k − θ_k; pulls φ again
        server     at every arrival:    Δ ← Δ + g
                   if it is the N-th:   m ← β m + Δ/N;  φ ← φ − ε ((1 − cN + c) β m + g/N);  Δ ← 0
                   else:                φ ← φ − ε (c β m + g/N)

    A momentum that decayed at every arrival would forget K times as fast as in DiLoCo, and amplify stale directions.

    Args:
        H: inner steps from pulling φ to sending g, at least 1: H_k of every worker or, with `dylu`, of the fastest.
        buffer: N, arrivals from one update of the momentum to the next. Default K.
        c: the share of the momentum that each step between two updates applies, in [0, 1/N].
        outer_lr: ε, above 0.
        momentum: β in [0, 1].
        dylu: dynamic local updates: H_k = ⌊H v_k / v_max⌋, at least 1, where `compute` sets the speed v_k of worker k,
            so that all workers send about equally often.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: all weights, to the server and back, after every H_k steps of worker k.

    With equal speeds, N = K, c = 0 and equal g, N arrivals are one step of torch's Nesterov SGD with gradient g.
    """

    family = "asynchronous"

    H: int = 50
    buffer: int | None = None
    c: float = 0.0
    outer_lr: float = 0.7
    momentum: float = 0.9
    dylu: bool = False

    m: Tensor = state()  # the momentum, shared (P,)
    gathered: Tensor = state()  # Δ, shared (P,)

    def __post_init__(self) -> None:
        self.buffer = None if self.buffer is None else whole_number("buffer", self.buffer)
        self.c = real_number("c", self.c, at_least=0, at_most=1)
        self.outer_lr = real_number("outer_lr", self.outer_lr, above=0)
        self.momentum = real_number("momentum", self.momentum, at_least=0, at_most=1)
        self.dylu = true_or_false("dylu", self.dylu)
        super().__post_init__()

    def begin(self, cluster: Cluster) -> None:
        self.N = self.buffer or cluster.num_nodes
        if self.c * self.N > 1:
            raise ValueError(f"c must be at most 1/N, {1 / self.N:g}, got {self.c:g}: it is spent N − 1 times")
        super().begin(cluster)
        m, gathered = (torch.zeros_like(self.outer_weights) for _ in range(2))
        self.keep_shared(m=m, gathered=gathered)

    def phase(self, node: int) -> int:
        if not self.dylu:
            return self.H
        seconds = self.clock.compute.node_seconds
        own = self.H * float(seconds.min() / seconds[node % len(seconds)])
        return max(1, math.floor(own + 1e-9))  # 1e-9: rounding errors may turn a whole number into one just below

    def receive(self, node: int, weights: Tensor, staleness: int) -> Sequence[int]:
        N, c, g = self.N, self.c, self.taken[node] - weights
        self.gathered += g
        self.version += 1
        share = c
        if self.version % N == 0:
            self.m.mul_(self.momentum).add_(self.gathered / N)
            self.gathered.zero_()
            share = 1 - c * N + c
        self.outer_weights -= self.outer_lr * (share * self.momentum * self.m + g / N)
        return [node]
