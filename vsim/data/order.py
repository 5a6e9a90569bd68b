"""The order of examples: positions in datasets for each node, epoch after epoch."""

from __future__ import annotations

import copy
import itertools
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._pytree import SequenceKey, register_pytree_node


def epoch_indices(num_examples: int, num_nodes: int, shuffle: bool, seed: int, epoch: int) -> Tensor:
    """Return (K, L) indices: row k is the output of DistributedSampler(num_replicas=K, rank=k, shuffle, seed).

    As in DistributedSampler, the first indices are repeated at the end, so that every node has
    L = ceil(num_examples / K) indices.
    """
    stream = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(num_examples, generator=stream) if shuffle else torch.arange(num_examples)
    if num_nodes == 1:
        return order[None]
    length = -(-num_examples // num_nodes)
    padded = order.repeat(-(-length * num_nodes // num_examples))[: length * num_nodes]
    return padded.view(length, num_nodes).T  # node k takes every K-th index from k on


# Cached, because nodes with a shared dataset, or with separate datasets of equal length, use the same indices.
_recent_epoch = lru_cache(maxsize=8)(epoch_indices)


@dataclass
class Uneven:
    """The nodes' batches of one step, which differ in size; or the positions (n, b) of these batches' examples.

    Attributes:
        rows: for each part, the rows of its nodes; every row is in one part.
        parts: stacked batches (n, b, …).
    """

    rows: list[list[int]]
    parts: list[Any]


# Register the parts, so that a map over the tensors of a batch, such as a copy to another device, reaches all of them.
register_pytree_node(
    Uneven,
    lambda batch: (batch.parts, batch.rows),
    lambda parts, rows: Uneven(list(rows), list(parts)),
    flatten_with_keys_fn=lambda batch: ([(SequenceKey(i), part) for i, part in enumerate(batch.parts)], batch.rows),
)


@dataclass(eq=False)
class Order:
    """The examples of every step of a run, as positions in the concatenation of all nodes' datasets.

    Each node goes through its examples in epochs, as a DataLoader with a DistributedSampler does: the last batch of an
    epoch may be smaller. A node that missed steps continues where it stopped. The nodes' batches of one step may
    therefore differ in size if nodes have different numbers of examples, or have missed different numbers of steps.

    Args:
        lengths: the number of examples of every dataset: one dataset that the nodes share, or one for each node.
        num_nodes: the number of nodes K.
        batch_size: examples per node and step.
        shuffle, seed: see DistributedSampler.
        drop_last: drop the smaller last batch of an epoch.

    Attributes:
        shard_sizes: (K,) number of examples of every node in an epoch.
        epoch_steps: (K,) number of steps of every node in an epoch.
        steps_per_epoch: the maximum of `epoch_steps`.
    """

    lengths: list[int]
    num_nodes: int
    batch_size: int
    shuffle: bool
    seed: int
    drop_last: bool = False

    def __post_init__(self) -> None:
        self.lengths = lengths = list(self.lengths)
        self.shared = len(lengths) == 1
        self.offsets = [0, *accumulate(lengths[:-1])]
        self.nodes: Sequence[int] = range(self.num_nodes)
        self.missed: Sequence[int] = [0] * self.num_nodes
        own = [-(-lengths[0] // self.num_nodes)] * self.num_nodes if self.shared else lengths
        self.shard_sizes = torch.tensor(own)
        self.epoch_steps = (self.shard_sizes + (0 if self.drop_last else self.batch_size - 1)) // self.batch_size
        self.steps_per_epoch = int(self.epoch_steps.max())

    def check(self, argument: str = "num_nodes") -> None:
        """Raise a ValueError if the shared dataset has fewer examples than nodes, or a node has no batch.

        Args:
            argument: the name of the user's argument that sets the number of nodes, for errors.
        """
        if self.shared and self.lengths[0] < self.num_nodes:
            nodes = "nodes" if argument == "num_nodes" else "clients"
            raise ValueError(
                f"the training dataset has {self.lengths[0]} examples, fewer than the {self.num_nodes} {nodes}; "
                f"lower {argument}, or give more examples"
            )
        odd = (self.epoch_steps == 0).nonzero().flatten().tolist()
        if odd:
            few = ", ".join(f"{node}: {int(self.shard_sizes[node])}" for node in odd[:8])
            raise ValueError(
                f"drop_last leaves {len(odd)} of {self.num_nodes} nodes no batch of batch_size={self.batch_size} "
                f"examples (node: examples: {few}); lower batch_size, or leave drop_last out"
            )

    @property
    def in_step(self) -> bool:
        """Whether all nodes' batches have one size at every step."""
        sizes = {int(self.shard_sizes[node]) for node in set(self.nodes)}
        return len(sizes) == 1 and len(set(self.missed)) == 1

    def examples(self, steps: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return how many examples (n,) all nodes together see in `steps` (n,) steps each, if no node misses one."""
        found = np.zeros(len(steps))
        for size, count in Counter(self.shard_sizes.tolist()).items():
            of_epoch = (size if self.drop_last else size + self.batch_size - 1) // self.batch_size
            epochs, rest = np.divmod(steps, of_epoch)
            found += count * (epochs * min(size, of_epoch * self.batch_size) + rest * self.batch_size)
        return found

    def attended(self, nodes: Sequence[int], missed: Sequence[int]) -> Order:
        """Return the order of n nodes; `missed` holds the number of steps that each of the nodes has missed."""
        order = copy.copy(self)
        order.nodes, order.missed = nodes, missed
        return order

    def of_nodes(self, nodes: range) -> Order:
        """Return the order of a range of nodes, as positions in the concatenation of these nodes' datasets."""
        order = self.attended(nodes, [0] * len(nodes))
        if not self.shared:
            order.offsets = [offset - self.offsets[nodes.start] for offset in self.offsets]
        return order

    def batches(self, start_step: int = 0) -> Iterator[Tensor | Uneven]:
        """Yield the positions (n, b) for every step from the 0-based `start_step` on, endlessly.

        If the batches of a step differ in size, yield an `Uneven` with a part for each size, the largest first.
        """
        return self._together(start_step) if self.in_step else self._apart(start_step)

    def of_node(self, node: int, start_step: int = 0) -> Iterator[Tensor]:
        """Yield one node's positions (b,) for every step of the node from the 0-based `start_step` on."""
        size, steps = self.batch_size, int(self.epoch_steps[node])
        first_epoch, first = divmod(start_step, steps)
        for epoch in itertools.count(first_epoch):
            examples = self._epoch([node], epoch)[0]
            for batch in range(first if epoch == first_epoch else 0, steps):
                yield examples[batch * size : (batch + 1) * size]

    def _together(self, step: int) -> Iterator[Tensor]:
        size, steps = self.batch_size, int(self.epoch_steps[self.nodes[0]])
        first_epoch, first = divmod(step - self.missed[0], steps)
        for epoch in itertools.count(first_epoch):
            examples = self._epoch(self.nodes, epoch)  # (n, L)
            for batch in range(first if epoch == first_epoch else 0, steps):
                yield examples[:, batch * size : (batch + 1) * size]

    def _apart(self, start_step: int) -> Iterator[Tensor | Uneven]:
        alike: dict[tuple[int, int], list[int]] = {}  # (examples, missed steps) → rows of nodes
        sizes = self.shard_sizes.tolist()
        for row, (node, missed) in enumerate(zip(self.nodes, self.missed, strict=True)):
            alike.setdefault((sizes[node], missed), []).append(row)
        streams = [
            (rows, self.attended([self.nodes[row] for row in rows], [missed] * len(rows))._together(start_step))
            for (_, missed), rows in alike.items()
        ]
        while True:
            by_size: dict[int, list[tuple[list[int], Tensor]]] = {}
            for rows, stream in streams:
                own = next(stream)  # (n, b)
                by_size.setdefault(own.shape[1], []).append((rows, own))
            parts = []
            for size in sorted(by_size, reverse=True):
                rows = [row for some, _ in by_size[size] for row in some]
                order = sorted(range(len(rows)), key=rows.__getitem__)
                positions = torch.cat([own for _, own in by_size[size]])[order]
                parts.append(([rows[place] for place in order], positions))
            yield Uneven([rows for rows, _ in parts], [own for _, own in parts]) if len(parts) > 1 else parts[0][1]

    def _epoch(self, nodes: Sequence[int], epoch: int) -> Tensor:
        """Return the positions (n, L) of nodes that have the same number of examples."""
        if self.shared:
            order = _recent_epoch(self.lengths[0], self.num_nodes, self.shuffle, self.seed, epoch)
            return order if [*nodes] == [*range(self.num_nodes)] else order[list(nodes)]
        # Separate DistributedSamplers give nodes with the same number of examples the same order.
        own = _recent_epoch(self.lengths[nodes[0]], 1, self.shuffle, self.seed, epoch)
        return own + torch.tensor([self.offsets[node] for node in nodes])[:, None]
