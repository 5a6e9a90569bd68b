"""Asynchronous DiLoCo: outer steps with what has arrived, weighted by how stale it is."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from vsim.arguments import one_of, real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.optim import resolve_optim
from vsim.cluster.reductions import reduce_rows
from vsim.strategy.asynchronous import AsynchronousStrategy
from vsim.strategy.base import Optim, StrategyOptions, with_inner
from vsim.strategy.fragments import fragments_of
from vsim.strategy.streaming import DEFAULT_OUTER, outer_optimizers


def none(staleness: int) -> float:
    """Return 1: stale weights count as much as fresh ones."""
    return 1.0


def sqrt(staleness: int) -> float:
    """Return 1 / √(1 + s)."""
    return 1 / math.sqrt(1 + staleness)


STALENESS: dict[str, Callable[[int], float]] = {"none": none, "sqrt": sqrt}


class AsyncDiLoCoStrategy(AsynchronousStrategy):
    """DiLoCo without a common clock: the server steps when `buffer` workers have come, and workers do not wait.

        worker k   takes φ, H inner steps, sends what it has come to; takes φ anew
        server     of every `buffer` arrivals:  φ ← outer optimizer(φ, mean_k w(s_k) (φ_k − θ_k))

    φ_k is what worker k has taken, and s_k how often φ has been stepped since. With buffer=1 it is FedAsync's way, with
    more FedBuff's, both with DiLoCo's optimizers.

    Args:
        H: inner steps of a phase, at least 1.
        outer_optim, outer_optim_spec, outer_lr: as of `DiLoCoStrategy`.
        staleness: w: "sqrt", 1 / √(1 + s); "none", 1; or a function of s, at least 0.
        buffer: arrivals of an outer step, at least 1.
        patience: instead of `buffer`: so many arrivals of an outer step, for which the workers that come before wait;
            K at most. With math.inf all wait for all, and it is DiLoCo, bit for bit if it is deterministic.
        options: those of every strategy; see `Strategy`.

    Payload: all weights, up and down, of a worker after every H of its steps.

    Source: Asynchronous local SGD for language models [Liu et al. 2024, arXiv:2401.09135], whose baseline it is;
    FedAsync [arXiv:1903.03934] and FedBuff [arXiv:2106.06639], which mix weights or take plain outer steps.
    """

    def __init__(
        self,
        optim_spec: Optim = None,
        /,
        outer_optim_spec: Optim = None,
        H: int = 100,
        *,
        outer_optim: Optim = None,
        outer_lr: float | None = None,
        staleness: str | Callable[[int], float] = "sqrt",
        buffer: int | None = None,
        patience: float | None = None,
        **options: Unpack[StrategyOptions],
    ) -> None:
        self.outer_optim_spec = resolve_optim(
            "AsyncDiLoCo",
            {"outer_optim_spec": outer_optim_spec, "outer_optim": outer_optim},
            {"outer_lr": outer_lr},
            default=DEFAULT_OUTER,
        )
        if patience is not None and buffer is not None:
            raise TypeError("AsyncDiLoCo: buffer and patience both say how many arrivals an outer step has; give one")
        self.waits = patience is not None
        if patience == math.inf:
            self.awaited: float = math.inf
        elif patience is not None:
            self.awaited = whole_number("patience", patience)
        else:
            self.awaited = whole_number("buffer", 1 if buffer is None else buffer)
        if not callable(staleness):
            staleness = STALENESS[one_of("staleness", staleness, STALENESS)]
        self.staleness = staleness
        super().__init__(H, **with_inner(optim_spec, options))

    outer_gradient: Tensor  # shared (P,)
    arrivals: list[tuple[int, Tensor, Tensor, int]]  # node, θ_k, φ_k, s_k
    derived = (*AsynchronousStrategy.derived, "outer_gradient")

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        self.outer_gradient = torch.zeros_like(self.outer_weights)
        parts, spec = fragments_of(cluster.replicas.layout, 1, "strided"), self.outer_optim_spec
        optims = outer_optimizers(spec, parts, self.outer_weights, self.outer_gradient, cluster.deterministic)
        self.keep_shared(outer_optims=optims, arrivals=[])

    def receive(self, node: int, weights: Tensor, staleness: int) -> Sequence[int]:
        self.arrivals.append((node, weights, self.taken[node].clone(), staleness))
        came = [one for one, *_ in self.arrivals]
        if len(came) < min(self.awaited, self.cluster.num_nodes if self.waits else math.inf):
            return [] if self.waits else [node]
        self._outer_step()
        self.arrivals = []
        return came if self.waits else [node]

    def _outer_step(self) -> None:
        """Take an outer step with the arrivals, in the order of the nodes, whoever was first."""
        _, weights, taken, staleness = zip(*sorted(self.arrivals, key=lambda arrival: arrival[0]), strict=True)
        share = [real_number("staleness weight", self.staleness(s), at_least=0) for s in staleness]
        if any(staleness) or set(share) != {1.0}:
            moved = [w * (phi - theta) for w, phi, theta in zip(share, taken, weights, strict=True)]
            self.outer_gradient.copy_(reduce_rows(torch.stack(moved), "mean"))
        else:  # in the order of sums of DiLoCo, where φ is equal on all nodes
            torch.sub(self.outer_weights, reduce_rows(torch.stack(weights), "mean"), out=self.outer_gradient)
        self.outer_optims[0].step()
        self.version += 1
