"""A strategy driven by hand: the gradients of every step are given, so that no rounding of a model is between."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Sequence
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
            self.strategy.gradients()
            self.strategy.optimize()
            self.strategy.sync()
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
    run.strategy.setup(cluster)
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


class _Meeting:
    """Where K threads hand in a row each, and leave with all rows in the order of the ranks."""

    def __init__(self, num_nodes: int) -> None:
        self.barrier = threading.Barrier(num_nodes, timeout=60)
        self.rows: list[Tensor | None] = [None] * num_nodes

    def all_rows(self, rank: int, row: Tensor) -> Tensor:
        self.rows[rank] = row.clone()
        self.barrier.wait()
        stacked = torch.cat([row for row in self.rows if row is not None])
        self.barrier.wait()
        return stacked


class _SplitCollectives(Collectives):
    """The collectives of one of K nodes that hold a row each."""

    def __init__(self, meeting: _Meeting, rank: int, num_nodes: int) -> None:
        super().__init__(Ledger(num_nodes), [range(node, node + 1) for node in range(num_nodes)], rank)
        self.meeting = meeting

    def _all_reduce(self, stacked: Tensor, op: str, shares: Tensor | None) -> Finish:
        rows = self.meeting.all_rows(self.rank, stacked)
        return lambda: reduce_rows(rows, op, shares)

    def _all_gather(self, stacked: Tensor) -> Finish:
        rows = self.meeting.all_rows(self.rank, stacked)
        return lambda: rows

    def _broadcast(self, stacked: Tensor, src: int) -> Finish:
        rows = self.meeting.all_rows(self.rank, stacked)
        return lambda: rows[src]

    def _exchanged(self, stacked: Tensor, group: Sequence[int]) -> Finish:
        rows = self.meeting.all_rows(self.rank, stacked)
        return lambda: rows[list(group), list(group).index(self.rank)]

    def _sent(self, stacked: Tensor, pairs: Sequence[tuple[int, int]]) -> Finish:
        rows = self.meeting.all_rows(self.rank, stacked)
        return lambda: rows[[src for src, dst in pairs if dst == self.rank]]


def apart(num_nodes: int, work: Callable[[Collectives], Result]) -> list[Result]:
    """What `work` returns for every node, each in a thread of its own that holds one row, as processes would."""
    meeting = _Meeting(num_nodes)
    results: dict[int, Result] = {}

    def node(rank: int) -> None:
        try:
            results[rank] = work(_SplitCollectives(meeting, rank, num_nodes))
        except BaseException:
            meeting.barrier.abort()
            raise

    threads = [threading.Thread(target=node, args=(rank,)) for rank in range(num_nodes)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [results[rank] for rank in range(num_nodes)]


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
        assert torch.equal(alone.cluster.weights[0], row)
        assert alone.ledger[:] == together.ledger[:]
    return together
