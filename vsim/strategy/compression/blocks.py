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

    Subclasses set `bits`, those of a code, and define `encode`.

    Args:
        block_size: consecutive entries that share a scale; the last block may be shorter.

    Payload: ceil(P · bits / 8) + 4 · ceil(P / block_size) bytes. One all-gather.
    """

    bits: int

    def __init__(self, block_size: int = 512) -> None:
        self.block_size = whole_number("block_size", block_size)

    def operands(self, rows: Tensor) -> list[Tensor]:
        """Return what `encode` takes, each like stacked `rows` (R, P)."""
        return [rows]

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return integer codes (R, B, n) and scales (R, B, 1) for the operands as blocks (R, B, n)."""
        raise NotImplementedError(f"{type(self).__name__} defines no encode()")

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        (rows,) = arranged
        size = rows.shape[1]
        message: list[Tensor] = []
        for blocks in zip(*map(self._blocks, self.operands(rows)), strict=True):
            message += by_node(cluster, self.encode, *blocks)
        scale_bytes = -(-size // self.block_size) * message[1].element_size()
        gathered = gather_message(message, cluster, label, bits_to_bytes(size * self.bits) + scale_bytes)
        decoded = rows.new_empty(cluster.num_nodes, size)  # (K, P)
        for target, codes, scale in zip(self._blocks(decoded), gathered[::2], gathered[1::2], strict=True):
            target.copy_(cluster.kernel(dequantize)(codes, scale))
        nodes = cluster.replicas.nodes
        rows.sub_(decoded[nodes.start : nodes.stop])
        return [reduce_rows(decoded, "mean")]

    def _blocks(self, rows: Tensor) -> list[Tensor]:
        """Views of (R, P) as (R, blocks, block_size), and as (R, 1, n) of the n entries that are left."""
        whole = rows.shape[1] // self.block_size * self.block_size
        views = [rows[:, :whole].unflatten(1, (-1, self.block_size)), rows[:, None, whole:]]
        return [view for view in views if view.numel()]
