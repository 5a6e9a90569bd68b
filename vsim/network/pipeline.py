"""Parallelism inside a node: the seconds of a step whose node is several machines with links of their own."""

from __future__ import annotations

import copy
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import real_number, whole_number
from vsim.network.compute import Compute
from vsim.network.links import Network

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Pipeline:
    """A node of several machines: stages of layers, and in each stage machines that hold its experts.

    Each microbatch passes all stages forward, then all microbatches pass them backward: GPipe [Huang et al. 2018,
    arXiv:1811.06965]. A boundary carries tokens · width · bytes / compression in each direction for every microbatch,
    while stages compute others. In a layer with experts, each token goes to one expert and back by two all-to-alls,
    forward and again backward, for which the stage waits.

    Args:
        stages: S. microbatches: M, of equal size. experts: E, machines of a stage that hold a layer's experts.
        tokens: tokens of a node's step: batch · sequence. layers, width: of the model.
        bytes: of a number in an activation. compression: how many times smaller activations travel, at least 1.
    """

    stages: int
    microbatches: int
    experts: int
    tokens: int
    layers: int
    width: int
    bytes: int
    compression: float = 1.0

    def __post_init__(self) -> None:
        whole_number("stages", self.stages, at_most=self.layers)
        for name in ("microbatches", "experts", "tokens"):
            whole_number(name, getattr(self, name))
        whole_number("microbatches", self.microbatches, at_most=self.tokens)
        real_number("compression", self.compression, at_least=1)

    @property
    def boundary_bytes(self) -> float:
        """Bytes that a boundary between two stages carries in a step, forward and backward."""
        return 2 * self.tokens * self.width * self.bytes / self.compression

    def seconds(self, computed: Floats, within: Network) -> Floats:
        """Return the seconds of a step from the seconds (K,) that each machine of a node computes in it."""
        S, M = self.stages, self.microbatches
        send, exchange = 0.0, 0.0
        if S > 1:
            send = float(within.seconds("send", 2, self.boundary_bytes / 2 / M)[0])
        if self.experts > 1:
            payload = self.tokens / M / self.experts * self.width * self.bytes / self.compression
            exchange = 2 * self.layers / S * float(within.seconds("all_to_all", self.experts, payload)[0])
        total = np.zeros_like(computed)
        for share in (1 / 3, 2 / 3):  # forward, backward
            own = computed * share / M + exchange  # a stage's seconds for a microbatch
            total += S * own + (S - 1) * send + (M - 1) * np.maximum(own, send)
        return total

    def padded(self, compute: Compute, within: Network) -> Compute:
        """Return a Compute whose steps include the waits inside a node."""
        found = copy.copy(compute)
        found.node_seconds = self.seconds(compute.node_seconds, within)
        return found
