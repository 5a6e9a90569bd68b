"""The batches of runs that train together, below each other; those of one data order are fetched once."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from vsim.data.batches import Batches, in_memory


class BatchSource(Protocol):
    """The source of a run's batches: `vsim.data.batches.Batches`, or one node's own loader."""

    lengths: list[int]
    steps_per_epoch: int
    shard_sizes: Tensor

    @property
    def digests(self) -> list[int]: ...

    def attended(self, nodes: Sequence[int], missed: Sequence[int]) -> BatchSource: ...

    def from_step(self, start_step: int = 0) -> Iterator[Any]: ...


@dataclass
class Source:
    """The batches of one run.

    Attributes:
        key: equal for runs that see the same examples in the same order.
        context: creates the context in which examples are fetched.
    """

    batches: BatchSource
    key: Hashable
    context: Callable[[], AbstractContextManager[None]] = nullcontext


def joint_batches(sources: Sequence[Source], start_step: int) -> Iterator[Any]:
    """Yield stacked batches (R, B, …) of all runs from the 0-based `start_step` on, endlessly.

    Args:
        sources: one per run, in the order of their rows.
    """
    if len(sources) == 1:
        return _fetched(sources[0], start_step)
    distinct = {source.key: source for source in reversed(sources)}
    keys = [source.key for source in sources]
    datasets = {id(one_in_memory(source.batches)): one_in_memory(source.batches) for source in distinct.values()}
    fields = in_memory(next(iter(datasets.values()))) if len(datasets) == 1 else None
    if fields is not None:
        return _gathered(fields, {key: source.batches for key, source in distinct.items()}, keys, start_step)
    return _concatenated(distinct, keys, start_step)


def one_in_memory(batches: BatchSource) -> Any:
    """Return the dataset that all nodes share, if it is held in tensors, so that fetching runs no code of the user."""
    return batches.shared_in_memory if isinstance(batches, Batches) else None


def _fetched(source: Source, start_step: int) -> Iterator[Any]:
    batches = source.batches.from_step(start_step)
    while True:
        with source.context():
            batch = next(batches)
        yield batch


def _gathered(
    fields: Callable[[Tensor], list[Tensor]], sources: dict[Hashable, Any], keys: Sequence[Hashable], start_step: int
) -> Iterator[Any]:
    """Yield batches of one dataset that is held in tensors: those of all runs are one gather."""
    orders = {key: batches.order.batches(start_step) for key, batches in sources.items()}
    while True:
        positions = {key: next(order) for key, order in orders.items()}
        yield fields(torch.cat([positions[key] for key in keys]))


def _concatenated(distinct: dict[Hashable, Source], keys: Sequence[Hashable], start_step: int) -> Iterator[Any]:
    fetched = {key: _fetched(source, start_step) for key, source in distinct.items()}
    while True:
        batches = {key: next(own) for key, own in fetched.items()}
        yield tree_map(lambda *parts: torch.cat(parts), *(batches[key] for key in keys))


def sizes_of(batch: Any) -> tuple[int, int]:
    """Return the examples and the token ids per node in a stacked batch (K, B, …), 0 if it holds no token ids.

    Inputs (`batch["input_ids"]`, or the first tensor) are token ids if they are whole numbers of shape (K, B, T); all
    of them count, padding too.

    >>> sizes_of([torch.zeros(4, 8, 64, dtype=torch.long), torch.zeros(4, 8, 64, dtype=torch.long)])
    (8, 512)
    >>> sizes_of([torch.zeros(4, 8, 1, 28, 28), torch.zeros(4, 8, dtype=torch.long)])
    (8, 0)
    """
    leaves = tree_leaves(batch)
    largest = max(leaves, key=Tensor.dim)
    named = isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor)
    inputs = batch["input_ids"] if named else leaves[0]
    whole = not (inputs.is_floating_point() or inputs.is_complex() or inputs.dtype is torch.bool)
    tokens = math.prod(inputs.shape[1:]) if whole and inputs.dim() == 3 else 0
    return largest.shape[1] if largest.dim() > 1 else 1, tokens
