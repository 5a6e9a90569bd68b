"""The base of compressors with a code for every entry and a scale for every block of entries."""

from __future__ import annotations

from torch import Tensor
from vsim_kernels import dequantize

from vsim.arguments import whole_number
from vsim.cluster import Cluster
from vsim.cluster.collectives import reduce_rows
from vsim.strategy.compression.base import Compressor, by_node
from vsim.strategy.compression.messages import bits_to_bytes, gather_message


class BlockQuantizer(Compressor):
    """A code of a few bits for every entry, a scale for every block of them; the average is the mean of code · scale.

    Subclasses set `bits`, those of a code, and define `encode`; and `decode`, with `scales`, where a code is decoded
    with more than one number.

    Args:
        block_size: consecutive entries that share a scale; the last block may be shorter.

    Payload: ceil(P · bits / 8) + 4 · ceil(P / block_size) bytes. One all-gather.
    """

    bits: int
    scales = 1  # the numbers that a block is decoded with

    def __init__(self, block_size: int = 512) -> None:
        self.block_size = whole_number("block_size", block_size)

    def operands(self, rows: Tensor) -> list[Tensor]:
        """Return what `encode` takes, each like stacked `rows` (R, P)."""
        return [rows]

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return integer codes (R, B, n) and scales (R, B, `scales`) for the operands as blocks (R, B, n)."""
        raise NotImplementedError(f"{type(self).__name__} defines no encode()")

    def decode(self, codes: Tensor, scales: Tensor, cluster: Cluster) -> Tensor:
        """Return the values (…, B, n) that codes and scales stand for."""
        return cluster.kernel(dequantize)(codes, scales)

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        (rows,) = arranged
        message = self.encoded(rows, cluster)
        payload_bytes = self.payload_bytes(rows.shape[1], rows.element_size())
        decoded = self.decoded(gather_message(message, cluster, label, payload_bytes), rows, cluster)  # (K, P)
        nodes = cluster.replicas.nodes
        rows.sub_(decoded[nodes.start : nodes.stop])
        return [reduce_rows(decoded, "mean")]

    def encoded(self, rows: Tensor, cluster: Cluster) -> list[Tensor]:
        """Return the message of stacked `rows` (R, P): codes and scales, of whole blocks and of what is left."""
        message: list[Tensor] = []
        for blocks in zip(*map(self._blocks, self.operands(rows)), strict=True):
            message += by_node(cluster, self.encode, *blocks)
        return message

    def decoded(self, message: list[Tensor], rows: Tensor, cluster: Cluster) -> Tensor:
        """Return what the messages of n nodes stand for, (n, P), each like the `rows` (R, P) that one is made of."""
        decoded = rows.new_empty(len(message[0]), rows.shape[1])
        for target, codes, scales in zip(self._blocks(decoded), message[::2], message[1::2], strict=True):
            target.copy_(self.decode(codes, scales, cluster))
        return decoded

    def payload_bytes(self, size: int, value_bytes: int) -> int:
        """Return the bytes of the message of `size` entries, whose scales have `value_bytes` each, or 4 if fewer."""
        blocks = -(-size // self.block_size)
        return bits_to_bytes(size * self.bits) + blocks * self.scales * max(4, value_bytes)

    def _blocks(self, rows: Tensor) -> list[Tensor]:
        """Views of (R, P) as (R, blocks, block_size), and as (R, 1, n) of the n entries that are left."""
        whole = rows.shape[1] // self.block_size * self.block_size
        views = [rows[:, :whole].unflatten(1, (-1, self.block_size)), rows[:, None, whole:]]
        return [view for view in views if view.numel()]
