"""The base of compressors: how vectors are averaged with fewer bytes, and what their messages cost."""

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
from vsim.strategy.configured import Configured

Result = TypeVar("Result", Tensor, tuple[Tensor, ...])
INDEX_BYTES = ("int64", "packed")


class Compressor(Configured):
    """How nodes average vectors with fewer bytes. A subclass defines `exchange`.

    Attributes:
        contractive: whether sending a message loses less than sending nothing. Error feedback converges only then.
    """

    contractive = True

    def setup(self, cluster: Cluster) -> None:
        """Prepare for a run on `cluster`: create and declare the state that lasts from step to step."""

    def arrange(self, rows: Tensor, cluster: Cluster) -> list[Tensor]:
        """Return stacked `rows` (R, P) in the form that this compressor works on, and the error is kept in.

        Returns:
            Stacked tensors (R, …), with P entries a node together; they may share the memory of `rows`.
        """
        return [rows]

    def restore(self, arranged: list[Tensor]) -> Tensor:
        """The inverse of `arrange`, for stacked tensors or shared ones: (R, P) or (P,)."""
        (rows,) = arranged
        return rows

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        """Send what the nodes hold, and return the average of what arrives.

        Args:
            arranged: from `arrange`. It is overwritten: if contractive, by the errors of the messages.
            cluster: the nodes.
            label: its name in the ledger.

        Returns:
            Shared tensors (…), arranged alike.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no exchange()")


def by_node(cluster: Cluster, function: Callable[..., Result], *stacked: Tensor) -> Result:
    """Return function(*stacked), a stacked tensor or a tuple of them.

    In a deterministic run it is called node by node, on tensors that begin where a node's own would: matrix products
    and sums may round a row differently when there are more of them or when it lies elsewhere, and results must not
    depend on how many nodes are held here.
    """
    if not cluster.deterministic:
        return function(*stacked)
    # row[None] has the strides of a tensor of one row, by which torch chooses among kernels; split(1) has the stack's.
    each = ([row[None] for row in rows_apart(t)] for t in stacked)
    results = [function(*rows) for rows in zip(*each, strict=True)]
    return tree_map(lambda *rows: torch.cat(rows), *results)


def average_message(parts: Sequence[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
    """Average stacked tensors (R, …) that travel as one message, in one all-reduce: shared tensors (…)."""
    if not parts:
        return []
    mean = cluster.collectives.all_reduce(torch.cat([part.flatten(1) for part in parts], dim=1), "mean", label=label)
    pieces = mean.split([part[0].numel() for part in parts])
    return [piece.view(part.shape[1:]) for piece, part in zip(pieces, parts, strict=True)]


def gather_message(parts: Sequence[Tensor], cluster: Cluster, label: str, payload_bytes: int) -> list[Tensor]:
    """All-gather stacked tensors (R, …) that travel as one message: shared tensors (K, …), one event."""
    return _as_one(cluster.collectives.all_gather, parts, cluster, label, payload_bytes)


def swap_message(parts: Sequence[Tensor], cluster: Cluster, label: str, payload_bytes: int) -> list[Tensor]:
    """Give every node its part of stacked tensors (R, K, …), which travel as one message: alike, one event."""
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
    """All-gather the places of entries with the message of their values: (R, …) each, and (K, …) in return.

    The places return in one tensor.

    Args:
        index: several (R, n), each of places among `sizes` entries.
        index_bytes: "int64"; or "packed", so that they travel as bits.
    """
    counts, widths = [places.shape[1] for places in index], [(size - 1).bit_length() for size in sizes]
    packed = index_bytes == "packed"
    places = pack_bits(index, widths) if packed else torch.cat([*index], dim=1)
    gathered, *received = gather_message([places, *message], cluster, label, payload_bytes)
    return torch.cat(unpack_bits(gathered, counts, widths), dim=1) if packed else gathered, received


def sparse_bytes(entries: Sequence[tuple[int, int]], index_bytes: str, value_bytes: float) -> int:
    """Return the bytes of (index, value) pairs.

    Args:
        entries: (count, size): `count` values, each of which is one of `size` entries.
        index_bytes: "int64", or "packed": ceil(log2 size) bits an index, all together rounded up to bytes.
        value_bytes: of one value.
    """
    bits = sum(count * (64 if index_bytes == "int64" else (size - 1).bit_length()) for count, size in entries)
    return math.ceil(sum(count for count, _ in entries) * value_bytes) + bits_to_bytes(bits)


def bits_to_bytes(bits: int) -> int:
    """Return the number of bytes that hold these bits."""
    return -(-bits // 8)


def entry_count(fraction: float, size: int) -> int:
    """Return the number of entries that a fraction of `size` means, at least 1."""
    return max(1, round(fraction * size))
