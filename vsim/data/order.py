"""Which example each node sees when: index matrices (K, L), one row a node."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

import torch
from torch import Tensor


def epoch_indices(num_examples: int, num_nodes: int, shuffle: bool, seed: int, epoch: int) -> Tensor:
    """Return (K, L) indices: row k is what DistributedSampler(num_replicas=K, rank=k, shuffle, seed) yields.

    Padded, as by DistributedSampler, by starting over, so that every node has L = ceil(num_examples / K).
    """
    stream = torch.Generator().manual_seed(seed + epoch)
    order = torch.randperm(num_examples, generator=stream) if shuffle else torch.arange(num_examples)
    if num_nodes == 1:
        return order[None]
    length = -(-num_examples // num_nodes)
    padded = order.repeat(-(-length * num_nodes // num_examples))[: length * num_nodes]
    return padded.view(length, num_nodes).T  # node k takes every K-th, from k on


# All nodes that share a dataset ask for the same epochs, and so do those whose own ones are of one length.
_recent_epoch = lru_cache(maxsize=8)(epoch_indices)

_AT_ONCE = 64  # batches of which the nodes' own positions are stacked in one call


@dataclass(eq=False)
class Order:
    """The examples of every step of a run, as positions in the concatenation of all nodes' datasets.

    Nodes with equally many examples iterate over them in epochs, whose last batch may be smaller. Where the numbers
    differ, each node runs through its own epochs without a break, so that all batches are full; an epoch of the cluster
    is then that of the node with the most examples.

    Args:
        lengths: the number of examples of every dataset: one dataset that the nodes share, or one for each node.
        num_nodes: K.
        batch_size: examples per node and step.
        shuffle, seed: as of DistributedSampler.
        drop_last: drop the smaller last batch of an epoch.
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
        self.even = len(set(lengths)) == 1
        self.nodes: Sequence[int] = range(self.num_nodes)
        self.missed: Sequence[int] = [0] * self.num_nodes
        own = [-(-lengths[0] // self.num_nodes)] * self.num_nodes if self.shared else lengths
        self.shard_sizes = torch.tensor(own)
        self.steps_per_epoch = max(own) // self.batch_size if self.drop_last else -(-max(own) // self.batch_size)

    def check(self) -> None:
        """Raise a ValueError if the shared dataset has fewer examples than nodes, or `drop_last` leaves no batch."""
        if self.shared and self.lengths[0] < self.num_nodes:
            raise ValueError(
                f"the training dataset has {self.lengths[0]} examples, fewer than the {self.num_nodes} nodes; "
                "lower num_nodes, or give more examples"
            )
        if self.steps_per_epoch == 0:
            longest = int(self.shard_sizes.max())
            raise ValueError(f"drop_last leaves no batch: {longest} examples a node, batch_size {self.batch_size}")

    def attended(self, nodes: Sequence[int], missed: Sequence[int]) -> Order:
        """Return the order of n of the nodes that have missed so many of the run's steps.

        Each goes through its own epochs without a break, so that all batches are full.
        """
        order = copy.copy(self)
        order.nodes, order.missed, order.even = nodes, missed, False
        return order

    def batches(self, start_step: int = 0) -> Iterator[Tensor]:
        """Yield (n, b) positions for every step from the 0-based `start_step` on, without end; n = K if all attend."""
        return self._in_epochs(start_step) if self.even else self._in_streams(start_step)

    def of_node(self, node: int, start_step: int = 0) -> Iterator[Tensor]:
        """Yield the (b,) positions of one node for every step of its own from the 0-based `start_step` on."""
        if self.even:
            return (positions[node] for positions in self._in_epochs(start_step))
        return (positions[0] for positions in self.attended([node], [0])._in_streams(start_step))

    def _in_epochs(self, step: int) -> Iterator[Tensor]:
        while True:
            epoch, first = divmod(step, self.steps_per_epoch)
            order = self._epoch(epoch)  # (K, L)
            for position in range(first, self.steps_per_epoch):
                yield order[:, position * self.batch_size : (position + 1) * self.batch_size]
                step += 1

    def _in_streams(self, step: int) -> Iterator[Tensor]:
        """Yield (n, B) positions: of every node its epochs end to end, from its own share of `step` on."""
        size = self.batch_size
        starts = torch.tensor([0 if self.shared else self.offsets[node] for node in self.nodes])[:, None, None]
        # Nodes whose own datasets are of one length see them in the same order: those that are as far share a stream.
        skips = [size * (step - missed) for missed in self.missed]
        keys = [(node if self.shared else self.lengths[node], s) for node, s in zip(self.nodes, skips, strict=True)]
        streams = dict(zip(keys, self.nodes, strict=True))  # a node of each
        places = {key: place for place, key in enumerate(streams)}
        stream_of = torch.tensor([places[key] for key in keys])
        begun = [(node, *divmod(skip, int(self.shard_sizes[node]))) for (_, skip), node in streams.items()]
        epochs = [epoch for _, epoch, _ in begun]
        rests = [self._own_epoch(node, epoch)[skip:] for node, epoch, skip in begun]
        while True:
            for place, (node, _, _) in enumerate(begun):
                while len(rests[place]) < size:
                    epochs[place] += 1
                    rests[place] = torch.cat([rests[place], self._own_epoch(node, epochs[place])])
            full = min(_AT_ONCE, *(len(rest) // size for rest in rests))
            positions = torch.stack([rest[: full * size] for rest in rests]).unflatten(1, (full, size))
            yield from (positions[stream_of] + starts).unbind(1)
            rests = [rest[full * size :] for rest in rests]

    def _epoch(self, epoch: int) -> Tensor:
        if self.shared:
            return _recent_epoch(self.lengths[0], self.num_nodes, self.shuffle, self.seed, epoch)
        return torch.stack([self._own_epoch(node, epoch) + self.offsets[node] for node in range(self.num_nodes)])

    def _own_epoch(self, node: int, epoch: int) -> Tensor:
        """Return one node's positions (L,) in its own dataset, or in the shared one."""
        if self.shared:
            return self._epoch(epoch)[node]
        # Nodes with equally many examples see theirs in the same order, as each its own DistributedSampler's.
        return _recent_epoch(self.lengths[node], 1, self.shuffle, self.seed, epoch)[0]
