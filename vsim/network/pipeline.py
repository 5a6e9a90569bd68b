"""Parallelism inside a node: the seconds of a step whose node is several machines with links of their own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from vsim.arguments import naming, real_number, whole_number
from vsim.network.links import Network

Floats = NDArray[np.float64]
# What a model of known size fills in.
SIZES = ("layers", "width", "bytes_per_activation")


@dataclass(frozen=True, kw_only=True, eq=False)
class Pipeline:
    """A node of several machines: stages of layers, and in each stage machines that hold its experts.

    Each microbatch passes all stages forward, then all microbatches pass them backward: GPipe [Huang et al. 2018,
    arXiv:1811.06965]. A boundary carries tokens · width · bytes / compression in each direction for every microbatch,
    while stages compute others. In a layer with experts, each token goes to one expert and back by two all-to-alls,
    forward and again backward, for which the stage waits.

    Args:
        tokens: tokens of a node's step: batch · sequence.
        within: the network inside a node, whose links are alike: a `Network`, text, or bit/s.
        stages: S. microbatches: M, of equal size. experts: E, machines of a stage that hold a layer's experts.
        compression: how many times smaller activations travel, at least 1.
        layers, width: of the model. bytes_per_activation: of a number in an activation. Default: those of the model
            whose time is asked for, where vsim knows them: `vsim.price`, `Comparison.at` and `Ladder.decide` with
            `parameters` from 20 million on.

    Raises:
        TypeError: `within` has different links, or microbatches has no effect. ValueError: a value is out of range.
    """

    tokens: int
    within: Network | str | float
    stages: int = 1
    microbatches: int = 1
    experts: int = 1
    compression: float = 1.0
    layers: int | None = None
    width: int | None = None
    bytes_per_activation: int | None = None

    def __post_init__(self) -> None:
        with naming("within"):
            object.__setattr__(self, "within", Network.of(self.within))
        if self.network.num_nodes is not None:
            raise TypeError(f"within must be a network of equal links, got {self.within!r}")
        for name in ("tokens", "stages", "microbatches", "experts", *SIZES):
            if getattr(self, name) is not None or name not in SIZES:
                whole_number(name, getattr(self, name))
        if self.layers is not None:
            whole_number("stages", self.stages, at_most=self.layers)
        whole_number("microbatches", self.microbatches, at_most=self.tokens)
        if self.microbatches > 1 and self.stages == 1:
            raise TypeError(f"microbatches={self.microbatches} has no effect without stages=")
        real_number("compression", self.compression, at_least=1)

    @property
    def network(self) -> Network:
        """`within`, as a Network."""
        assert isinstance(self.within, Network)
        return self.within

    @property
    def machines(self) -> int:
        """The number of machines of a node."""
        return self.stages * self.experts

    @property
    def unknown(self) -> list[str]:
        """Names of the sizes that neither the arguments nor a model give."""
        return [name for name in SIZES if getattr(self, name) is None]

    def of_model(self, sizes: Mapping[str, int]) -> Pipeline:
        """Return this pipeline with the sizes of a model, by name, in place of those that were not given."""
        return replace(self, **{name: sizes[name] for name in self.unknown if name in sizes})

    @property
    def boundary_bytes(self) -> float:
        """Bytes that a boundary between two stages carries in a step, forward and backward; needs all sizes."""
        return 2 * self._activation_bytes

    @property
    def _activation_bytes(self) -> float:
        assert self.width is not None and self.bytes_per_activation is not None
        return self.tokens * self.width * self.bytes_per_activation / self.compression

    def seconds(self, computed: Floats) -> Floats:
        """Return the seconds of a step from the seconds (K,) that each machine of a node computes; needs all sizes."""
        assert self.layers is not None
        S, M = self.stages, self.microbatches
        send, exchange = 0.0, 0.0
        if S > 1:
            send = float(self.network.seconds("send", 2, self._activation_bytes / M)[0])
        if self.experts > 1:
            payload = self._activation_bytes / M / self.experts
            exchange = 2 * self.layers / S * float(self.network.seconds("all_to_all", self.experts, payload)[0])
        total = np.zeros_like(computed)
        for share in (1 / 3, 2 / 3):  # forward, backward
            own = computed * share / M + exchange  # a stage's seconds for a microbatch
            total += S * own + (S - 1) * send + (M - 1) * np.maximum(own, send)
        return total

    def as_plain(self) -> dict[str, Any]:
        """Return the pipeline as numbers and text for JSON."""
        return vars(self) | {"within": self.network.as_plain()}

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any]) -> Pipeline:
        """Make a Pipeline from the result of `as_plain`."""
        return cls(**{**plain, "within": Network.from_plain(plain["within"])})
