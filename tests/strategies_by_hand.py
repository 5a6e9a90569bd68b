"""A strategy driven by hand: the gradients of every step are given, so that no rounding of a model is between."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from vsim import Ledger
from vsim.cluster import Cluster
from vsim.cluster.collectives import Collectives, Finish
from vsim.cluster.reductions import reduce_rows
from vsim.cluster.replicas import Replicas
from vsim.cluster.stacked import StackedCollectives
from vsim.core.algorithm import take_step
from vsim.strategy import Algorithm

Result = TypeVar("Result")


@dataclass
class Driven:
    """A run in progress."""

    strategy: Algorithm
    cluster: Cluster
    ledger: Ledger

    def step(self, gradients: Tensor) -> Tensor:
        """Take a step with stacked `gradients` (R, P); return the weights."""
        self.ledger.position.begin(self.cluster.step + 1)
        self.cluster.grads.copy_(gradients)
        with torch.no_grad():
            take_step(self.strategy)
        return self.cluster.weights.clone()


def started(
    strategy: Algorithm, model: nn.Module, num_nodes: int, deterministic: bool = False, max_steps: int = 20
) -> Driven:
    """All nodes together, as in the simulator."""
    return _started(
        strategy,
        Replicas.of(model, num_nodes, torch.device("cpu")),
        StackedCollectives(Ledger(num_nodes)),
        deterministic,
        max_steps,
    )


def _started(
    strategy: Algorithm, replicas: Replicas, collectives: Collectives, deterministic: bool, max_steps: int = 20
) -> Driven:
    generator = torch.Generator().manual_seed(5)
    shard_sizes = torch.ones(collectives.num_nodes)
    cluster = Cluster(replicas, collectives, generator, shard_sizes, max_steps, deterministic)
    run = Driven(copy.deepcopy(strategy), cluster, collectives.ledger)
    run.strategy.begin(cluster)
    return run


def driven(strategy: Algorithm, model: nn.Module, gradients: Tensor, **options: Any) -> Driven:
    """Take a step for each of `gradients` (T, K, P)."""
    run = started(strategy, model, gradients.shape[1], **options)
    for given in gradients:
        run.step(given)
    return run


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """Standard normal numbers."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


class Parameters(nn.Module):
    """Parameters of these shapes, called p0, p1, …"""

    def __init__(self, *shapes: tuple[int, ...], dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        for i, shape in enumerate(shapes):
            self.register_parameter(f"p{i}", nn.Parameter(normal(*shape, seed=i, dtype=dtype)))


def size(model: nn.Module) -> int:
    """P."""
    return sum(p.numel() for p in model.parameters())


# One node at a time --------------------------------------------------------------------------------------------------


class _SplitCollectives(Collectives):
    """The collectives of one of K nodes that hold a row each, in threads that hand in a row and leave with all."""

    def __init__(self, barrier: threading.Barrier, rows: list[Tensor], rank: int) -> None:
        super().__init__(Ledger(len(rows)), [range(node, node + 1) for node in range(len(rows))], rank)
        self.barrier, self.rows = barrier, rows

    def _all(self, row: Tensor) -> Tensor:
        self.rows[self.rank] = row.clone()
        self.barrier.wait()
        stacked = torch.cat(self.rows)
        self.barrier.wait()
        return stacked

    def _all_reduce(self, stacked: Tensor, op: str, shares: Tensor | None) -> Finish:
        rows = self._all(stacked)
        return lambda: reduce_rows(rows, op, shares)

    def _all_gather(self, stacked: Tensor) -> Finish:
        rows = self._all(stacked)
        return lambda: rows

    def _broadcast(self, stacked: Tensor, src: int) -> Finish:
        rows = self._all(stacked)
        return lambda: rows[src]

    def _exchanged(self, stacked: Tensor, group: Sequence[int]) -> Finish:
        rows = self._all(stacked)
        return lambda: rows[list(group), list(group).index(self.rank)]

    def _sent(self, stacked: Tensor, pairs: Sequence[tuple[int, int]]) -> Finish:
        rows = self._all(stacked)
        return lambda: rows[[src for src, dst in pairs if dst == self.rank]]


def apart(num_nodes: int, work: Callable[[Collectives], Result]) -> list[Result]:
    """What `work` returns for every node, each in a thread of its own that holds one row, as processes would."""
    barrier, rows = threading.Barrier(num_nodes, timeout=60), [torch.empty(0)] * num_nodes

    def node(rank: int) -> Result:
        try:
            return work(_SplitCollectives(barrier, rows, rank))
        except BaseException:
            barrier.abort()
            raise

    with ThreadPoolExecutor(num_nodes) as threads:
        return list(threads.map(node, range(num_nodes)))


def driven_apart(strategy: Algorithm, model: nn.Module, gradients: Tensor, deterministic: bool = True) -> list[Driven]:
    """As `driven`, with every node held apart."""

    def node(collectives: Collectives) -> Driven:
        replicas = Replicas.of(model, 1, torch.device("cpu"))
        replicas.first_node = collectives.nodes.start
        run = _started(strategy, replicas, collectives, deterministic)
        for given in gradients:
            run.step(given[collectives.nodes.start : collectives.nodes.stop])
        return run

    return apart(gradients.shape[1], node)


def same_apart(strategy: Algorithm, model: nn.Module, gradients: Tensor) -> Driven:
    """Return the nodes together, after nodes held apart have come to the same bits and sent the same."""
    together = driven(strategy, model, gradients, deterministic=True)
    for row, alone in zip(together.cluster.weights, driven_apart(strategy, model, gradients), strict=True):
        rule = "rows of nodes meet through collectives only (docs/own-strategy.md, Is it right?)"
        assert torch.equal(alone.cluster.weights[0], row), f"a node held alone has other weights: {rule}"
        assert alone.ledger[:] == together.ledger[:]
    return together
