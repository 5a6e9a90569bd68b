"""The base of compressors: averaging vectors with fewer bytes, and the bytes of messages."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from vsim_kernels import pack_bits, unpack_bits
from vsim_kernels.alignment import rows_apart

from vsim.cluster import Cluster
from vsim.core.fields import Given

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])
INDEX_BYTES = ("int64", "packed")


class Compressor(Given):
    """Average the nodes' vectors with fewer bytes. A subclass defines `exchange`.

    Attributes:
        contractive: whether sending a message loses less than sending nothing; otherwise error feedback does not
            converge.
    """

    contractive = True

    def __init__(self) -> None:
        """Take no arguments; a subclass may."""

    def setup(self, cluster: Cluster) -> None:
        """Prepare for a run on `cluster`: create and declare the state that lasts from step to step."""

    def arrange(self, rows: Tensor, cluster: Cluster) -> list[Tensor]:
        """Return stacked `rows` (R, P) in the form in which this compressor works and keeps the error.

        Returns:
            Stacked tensors (R, …), with P entries per node in total; they may share the memory of `rows`.
        """
        return [rows]

    def restore(self, arranged: list[Tensor]) -> Tensor:
        """Undo `arrange`: turn stacked tensors into (R, P), shared tensors into (P,)."""
        (rows,) = arranged
        return rows

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        """Send the nodes' tensors, and return the average of the messages.

        Args:
            arranged: from `arrange`; a contractive compressor overwrites these tensors with the messages' errors.
            cluster: the nodes.
            label: the name of the messages in the ledger.

        Returns:
            Shared tensors (…), arranged in the same way.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no exchange()")


def by_node(cluster: Cluster, function: Callable[..., Result], *stacked: Tensor) -> Result:
    """Return function(*stacked), a stacked tensor or a tuple of stacked tensors.

    A deterministic run calls the function node by node, on tensors placed in memory as in a run with one node. Results
    could otherwise depend on the number of nodes held here, because products and sums may round a row differently with
    more rows or with another alignment.
    """
    if not cluster.deterministic:
        return function(*stacked)
    # torch chooses a kernel by strides: row[None] has the strides of a one-row tensor, split(1) keeps the stack's
    # strides.
    each = ([row[None] for row in rows_apart(t)] for t in stacked)
    results = [function(*rows) for rows in zip(*each, strict=True)]
    return tree_map(lambda *rows: torch.cat(rows), *results)


def average_message(parts: Sequence[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
    """Average stacked tensors (R, …) as one message, in one all-reduce; return shared tensors (…)."""
    if not parts:
        return []
    mean = cluster.collectives.all_reduce(torch.cat([part.flatten(1) for part in parts], dim=1), "mean", label=label)
    pieces = mean.split([part[0].numel() for part in parts])
    return [piece.view(part.shape[1:]) for piece, part in zip(pieces, parts, strict=True)]


def gather_message(parts: Sequence[Tensor], cluster: Cluster, label: str, payload_bytes: int) -> list[Tensor]:
    """All-gather stacked tensors (R, …) as one message, with one event; return shared tensors (K, …)."""
    return _as_one(cluster.collectives.all_gather, parts, cluster, label, payload_bytes)


def swap_message(parts: Sequence[Tensor], cluster: Cluster, label: str, payload_bytes: int) -> list[Tensor]:
    """Exchange stacked tensors (R, K, …) all-to-all as one message, with one event; shapes do not change."""
    return _as_one(cluster.collectives.all_to_all, parts, cluster, label, payload_bytes)


def _as_one(
    collective: Callable[..., Tensor], parts: Sequence[Tensor], cluster: Cluster, label: str, payload_bytes: int
) -> list[Tensor]:
    first = collective(parts[0], label=label, payload_bytes=payload_bytes)
    with cluster.collectives.unbilled():
        return [first, *(collective(part, label=label) for part in parts[1:])]


def gather_entries(
    index: Sequence[Tensor],
    sizes: Sequence[int],
    message: Sequence[Tensor],
    index_bytes: str,
    cluster: Cluster,
    label: str,
    payload_bytes: int,
) -> tuple[Tensor, list[Tensor]]:
    """All-gather sparse entries in one message, (R, …) → (K, …): the places of all entries as one tensor, and values.

    Args:
        index: tensors (R, n) of places. sizes: for each tensor, the number of entries that its places index.
        message: the tensors of the values.
        index_bytes: "int64"; or "packed", to send places as bits.
    """
    counts, widths = [places.shape[1] for places in index], [(size - 1).bit_length() for size in sizes]
    packed = index_bytes == "packed"
    places = pack_bits(index, widths) if packed else torch.cat([*index], dim=1)
    gathered, *received = gather_message([places, *message], cluster, label, payload_bytes)
    return torch.cat(unpack_bits(gathered, counts, widths), dim=1) if packed else gathered, received


def sparse_bytes(entries: Sequence[tuple[int, int]], index_bytes: str, value_bytes: float) -> int:
    """Return the bytes of (index, value) pairs.

    Args:
        entries: pairs (count, size): `count` values, chosen from `size` entries.
        index_bytes: "int64", or "packed": ceil(log2 size) bits per index, rounded up to bytes in total.
        value_bytes: the bytes of one value.
    """
    bits = sum(count * (64 if index_bytes == "int64" else (size - 1).bit_length()) for count, size in entries)
    return math.ceil(sum(count for count, _ in entries) * value_bytes) + bits_to_bytes(bits)


def bits_to_bytes(bits: int) -> int:
    """Return the number of bytes that hold `bits` bits."""
    return -(-bits // 8)


def entry_count(fraction: float, size: int) -> int:
    """Return `fraction` · `size` as a number of entries: rounded, and at least 1."""
    return max(1, round(fraction * size))
