"""Selectors of the entries that a round of sparse averaging shares: columns of the node matrix, equal on all nodes."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from vsim_kernels import bernoulli_indices, chunk_sizes

from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.cluster.reductions import round_up
from vsim.cluster.replicas import Columns
from vsim.core.fields import Given


class IndexSelector(Given):
    """Base of selectors: in every round, choose about a share p of the entries of every tensor.

    The choice depends only on the round, the layout of the matrix (`cluster.replicas.layout`: the columns of every
    tensor) and draws from `cluster.generator`. It is therefore equal on all nodes, and no indices are sent.

    Args:
        p: share of the entries, 0 < p ≤ 1.
    """

    def __init__(self, p: float) -> None:
        self.p = real_number("p", p, above=0, at_most=1)

    def setup(self, cluster: Cluster) -> None:
        """Prepare for a run on `cluster`: create and declare the state that lasts from round to round."""

    @property
    def rounds_repeat(self) -> int | None:
        """Rounds after which as many entries are chosen again, known after `setup`; None if their number may vary."""
        return None

    def select(self, cluster: Cluster, round: int) -> Tensor:
        """Return the entries of a round, counted from 0: distinct columns (m,), ascending, int64, shared."""
        raise NotImplementedError(f"{type(self).__name__} must define select(cluster, round)")

    def note_shared(self, index: Tensor, values: Tensor) -> None:
        """Called when columns `index` (m,) are shared; `values`: the nodes' values, stacked (R, m) or shared (m,)."""


class RandomIndexSelector(IndexSelector):
    """Choose every entry independently with probability p: m ~ Binomial(P, p) entries, without P draws."""

    @property
    def rounds_repeat(self) -> int:
        return 1  # by expectation

    def select(self, cluster: Cluster, round: int) -> Tensor:
        # Drawing every tensor's entries independently is the same as drawing the whole row's entries independently.
        return bernoulli_indices(cluster.replicas.num_parameters, self.p, cluster.generator, cluster.weights.device)


class ShuffledSequentialIndexSelector(IndexSelector):
    """Shuffle every tensor once and cut it into c = ⌈1/p⌉ chunks; round r takes chunk r mod c.

    If c does not divide a tensor's n entries, its first chunks are one entry larger. Every entry is shared once in c
    rounds: at a rate of 1/c, which is p if 1/p is whole. If n < c, the tensor shares nothing in c − n of c rounds.
    """

    order: Tensor  # columns, chunk after chunk, shared (P,)
    bounds: Tensor

    def setup(self, cluster: Cluster) -> None:
        self.count = round_up(1 / self.p)
        order, bounds = _shuffled_chunks(cluster, cluster.replicas.layout, self.count)
        self.keep_shared(order=order, bounds=bounds)

    @property
    def rounds_repeat(self) -> int:
        return self.count

    def select(self, cluster: Cluster, round: int) -> Tensor:
        return _chunk(self.order, self.bounds, round % self.count)


class PartitionedIndexSelector(IndexSelector):
    """Cut every tensor of n entries at random into c = min(⌈1/p⌉, n) parts, one per round; cut again after c rounds.

    Every entry is shared once in every c rounds; the sizes of the parts differ by at most one entry.
    """

    orders: list[Tensor]  # columns, chunk after chunk, shared (n,), for tensors of equal c
    bounds: list[Tensor]

    def setup(self, cluster: Cluster) -> None:
        most = round_up(1 / self.p)
        # Tensors of equal c are cut together. c is ⌈1/p⌉ for a tensor of at least ⌈1/p⌉ entries, and otherwise n.
        counts = [min(most, max(1, c.stop - c.start)) for c in cluster.replicas.layout]
        self.counts = sorted(set(counts))
        self.members = [
            [c for c, own in zip(cluster.replicas.layout, counts, strict=True) if own == count] for count in self.counts
        ]
        cuts = [_shuffled_chunks(cluster, members, c) for members, c in zip(self.members, self.counts, strict=True)]
        self.keep_shared(orders=[order for order, _ in cuts], bounds=[bounds for _, bounds in cuts])

    @property
    def rounds_repeat(self) -> int:
        return math.lcm(*self.counts)

    def select(self, cluster: Cluster, round: int) -> Tensor:
        for i, count in enumerate(self.counts):
            if count > 1 and round > 0 and round % count == 0:
                self.orders[i], self.bounds[i] = _shuffled_chunks(cluster, self.members[i], count)
        chunks = [
            _chunk(order, bounds, round % count)
            for order, bounds, count in zip(self.orders, self.bounds, self.counts, strict=True)
        ]
        return torch.cat(chunks).sort().values if len(chunks) > 1 else chunks[0]


def _shuffled_chunks(cluster: Cluster, tensors: Sequence[Columns], count: int) -> tuple[Tensor, Tensor]:
    """Cut every tensor at random into `count` chunks; a tensor of fewer entries gets empty chunks.

    Returns:
        The columns (n,) of all tensors, chunk after chunk, ascending within a chunk, on the weights' device; and the
        chunks' starts and stops in these columns, on the CPU, without empty chunks at the end.
    """
    cuts = [chunk_sizes(t.stop - t.start, min(count, max(1, t.stop - t.start))) for t in tensors]
    sizes = torch.zeros(max(map(len, cuts)), dtype=torch.int64)
    for own in cuts:
        sizes[: len(own)] += torch.tensor(own)
    bounds = torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])
    if cluster.weights.is_meta:  # without values, only sizes matter
        return cluster.weights.new_empty(int(bounds[-1]), dtype=torch.int64), bounds
    columns, chunk_of = [], []
    for tensor, own in zip(tensors, cuts, strict=True):
        # Sort by the chunks' numbers, not by random numbers: a few small integers sort fastest.
        numbers = torch.arange(len(own), dtype=torch.int16 if count < 2**15 else torch.int64)
        shuffled = torch.empty(tensor.stop - tensor.start, dtype=numbers.dtype)
        shuffled[torch.randperm(len(shuffled), generator=cluster.generator)] = numbers.repeat_interleave(
            torch.tensor(own)
        )
        chunk_of.append(shuffled)
        columns.append(torch.arange(tensor.start, tensor.stop))
    order = torch.cat(columns)[torch.cat(chunk_of).argsort(stable=True)]
    return order.to(cluster.weights.device), bounds


def _chunk(order: Tensor, bounds: Tensor, number: int) -> Tensor:
    last = len(bounds) - 1
    return order[int(bounds[min(number, last)]) : int(bounds[min(number + 1, last)])]
