"""The base of compressors with a code for every entry and a scale for every block of entries."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor
from vsim_kernels import dequantize

from vsim.arguments import whole_number
from vsim.cluster import Cluster
from vsim.cluster.reductions import reduce_rows
from vsim.strategy.compression.base import Compressor, by_node
from vsim.strategy.compression.messages import bits_to_bytes, gather_message, swap_message


class BlockQuantizer(Compressor):
    """A code of a few bits for every entry, a scale for every block of them; the average is the mean of code · scale.

    Subclasses set `bits`, those of a code, and define `encode`; and `decode`, with `scales`, where a code is decoded
    with more than one number.

    Args:
        block_size: consecutive entries that share a scale; the last block may be shorter.
        two_stage: every node averages one of K chunks and quantizes its mean again, as an all-reduce is reduce-scatter
            and all-gather, so that a node transmits 2 (K − 1)/K messages in place of K − 1. To its own error it adds K
            times that of the mean, so that nothing is lost. Off by default.

    Payload: ceil(P · bits / 8) + 4 · ceil(P / block_size) bytes, S(P) for short. One all-gather. In two stages
    K · S(ceil(P / K)), all-to-all, then S(ceil(P / K)), all-gather.

    Source of the two stages: 1-bit Adam [Tang et al. 2021, arXiv:2102.02888], section 4.2.
    """

    bits: int
    scales = 1  # the numbers that a block is decoded with

    def __init__(self, block_size: int = 512, two_stage: bool = False) -> None:
        self.block_size = whole_number("block_size", block_size)
        if not isinstance(two_stage, bool):
            raise TypeError(f"two_stage must be True or False, got {two_stage!r}")
        self.two_stage = two_stage

    def operands(self, rows: Tensor) -> list[Tensor]:
        """Return what `encode` takes, each like stacked `rows` (R, …)."""
        return [rows]

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return integer codes (R, …, n) and scales (R, …, `scales`) for the operands as blocks (R, …, n)."""
        raise NotImplementedError(f"{type(self).__name__} defines no encode()")

    def decode(self, codes: Tensor, scales: Tensor, cluster: Cluster) -> Tensor:
        """Return the values (…, n) that codes and scales stand for."""
        return cluster.kernel(dequantize)(codes, scales)

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        (rows,) = arranged
        if self.two_stage:
            return [self._averaged_in_two_stages(rows, cluster, label)]
        message = self.encoded(rows, cluster)
        decoded = self.decoded(gather_message(message, cluster, label, self._bytes(rows)), rows, cluster)  # (K, P)
        nodes = cluster.replicas.nodes
        rows.sub_(decoded[nodes.start : nodes.stop])
        return [reduce_rows(decoded, "mean")]

    def _averaged_in_two_stages(self, rows: Tensor, cluster: Cluster, label: str) -> Tensor:
        num_nodes, size = cluster.num_nodes, rows.shape[1]
        chunks = F.pad(rows, (0, -size % num_nodes)).unflatten(1, (num_nodes, -1))  # (R, K, C)
        message = self.encoded(chunks, cluster)
        errors = chunks - self.decoded(message, chunks, cluster)
        payload_bytes = num_nodes * self._bytes(chunks)
        received = self.decoded(swap_message(message, cluster, f"{label}: chunks", payload_bytes), chunks, cluster)
        means = by_node(cluster, lambda own: own.mean(1), received)  # (R, C)
        gathered = gather_message(self.encoded(means, cluster), cluster, f"{label}: means", self._bytes(means))
        decoded = self.decoded(gathered, means, cluster)  # (K, C)
        nodes = cluster.replicas.nodes
        errors[range(len(rows)), nodes] += num_nodes * (means - decoded[nodes.start : nodes.stop])
        rows.copy_(errors.flatten(1)[:, :size])
        return decoded.flatten()[:size]

    def encoded(self, rows: Tensor, cluster: Cluster) -> list[Tensor]:
        """Return the message of stacked `rows` (R, …, P): codes and scales, of whole blocks and of what is left."""
        message: list[Tensor] = []
        for blocks in zip(*map(self._blocks, self.operands(rows)), strict=True):
            message += by_node(cluster, self.encode, *blocks)
        return message

    def decoded(self, message: list[Tensor], rows: Tensor, cluster: Cluster) -> Tensor:
        """Return what the messages of n nodes stand for, (n, …, P), each like the `rows` (R, …, P) that one is of."""
        decoded = rows.new_empty(len(message[0]), *rows.shape[1:])
        for target, codes, scales in zip(self._blocks(decoded), message[::2], message[1::2], strict=True):
            target.copy_(self.decode(codes, scales, cluster))
        return decoded

    def payload_bytes(self, size: int, value_bytes: int) -> int:
        """Return the bytes of the message of `size` entries, whose scales have `value_bytes` each, or 4 if fewer."""
        blocks = -(-size // self.block_size)
        return bits_to_bytes(size * self.bits) + blocks * self.scales * max(4, value_bytes)

    def _bytes(self, rows: Tensor) -> int:
        return self.payload_bytes(rows.shape[-1], rows.element_size())

    def _blocks(self, rows: Tensor) -> list[Tensor]:
        """Views of (…, P) as (…, blocks, block_size), and as (…, 1, n) of the n entries that are left."""
        whole = rows.shape[-1] // self.block_size * self.block_size
        views = [rows[..., :whole].unflatten(-1, (-1, self.block_size)), rows[..., None, whole:]]
        return [view for view in views if view.numel()]
