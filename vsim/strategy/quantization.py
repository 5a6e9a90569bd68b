"""Compressors that send every entry with fewer bits: signs, uniform and stochastic quantization."""

from __future__ import annotations

import torch
from torch import Tensor
from vsim_kernels import dequantize, majority_vote, quantize, stochastic_codes

from vsim.arguments import whole_number
from vsim.cluster import Cluster
from vsim.cluster.collectives import reduce_rows
from vsim.strategy.compression import Compressor, bits_to_bytes, by_node, gather_message


class SignVote(Compressor):
    """Every node sends its signs; the average is the sign that most of them have, 0 for a tie.

    One bit has no third value: a 0 is sent as +1. There is no error feedback, for a sign says nothing of size.

    Payload: ceil(P / 8) bytes. One all-gather.

    Source: signSGD with majority vote [Bernstein et al. 2018, arXiv:1810.05291].

    Deviation from the paper: every node counts the votes itself; there is no server.
    """

    contractive = False

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        (rows,) = arranged
        signs = (rows < 0).to(torch.int8).mul_(-2).add_(1)  # (R, P); torch.where takes ten times as long
        (votes,) = gather_message([signs], cluster, label, bits_to_bytes(rows.shape[1]))  # (K, P)
        return [majority_vote(votes).to(rows.dtype)]


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


class UniformQuantizer(BlockQuantizer):
    """Every entry is rounded to the nearest of 2^bits − 1 evenly spaced values from −max|x| to max|x| of its block.

    Args:
        bits: 2 to 16; 8 is int8, 4 is int4.
        block_size: consecutive entries that share max|x|.

    Payload: ceil(P · bits / 8) + 4 · ceil(P / block_size) bytes. One all-gather.
    """

    def __init__(self, bits: int = 8, block_size: int = 512) -> None:
        super().__init__(block_size)
        self.bits = whole_number("bits", bits, at_least=2, at_most=16)

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = blocks
        return quantize(x, self.bits, dim=-1)


class ScaledSign(BlockQuantizer):
    """Every entry is sent as its sign times the mean of |x| over its block: (‖x‖₁ / n) · sign(x).

    One bit has no third value: a 0 is sent as +.

    Args:
        block_size: n, consecutive entries that share a mean.

    Payload: ceil(P / 8) + 4 · ceil(P / block_size) bytes. One all-gather.

    Source: EF-signSGD [Karimireddy et al. 2019, arXiv:1901.09847], algorithm 1.

    Deviation from the paper: it compresses layer by layer in place of block by block.
    """

    bits = 1

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = blocks
        return quantize(x, 1, dim=-1)


class QSGD(BlockQuantizer):
    """Every entry is rounded at random to one of its neighbours on the grid ‖x‖₂ / s of its block, unbiased.

    The expectation of what arrives is the mean, so that no error is fed back. Every node rounds with random numbers of
    its own, whose seed is drawn from the shared generator.

    Args:
        levels: s, steps of the grid from 0 to ‖x‖₂; 1 to 32767.
        block_size: consecutive entries that share ‖x‖₂, d in the paper.

    Payload: ceil(P · ceil(log2(2s + 1)) / 8) + 4 · ceil(P / block_size) bytes. One all-gather.

    Source: QSGD [Alistarh et al. 2016, arXiv:1610.02132].

    Deviation from the paper: codes of fixed length, not Elias coding.
    """

    contractive = False

    def __init__(self, levels: int = 7, block_size: int = 512) -> None:
        super().__init__(block_size)
        self.levels = whole_number("levels", levels, at_most=32767)
        self.bits = (2 * self.levels).bit_length()

    def setup(self, cluster: Cluster) -> None:
        # All K seeds are drawn wherever, so that node k's stream does not depend on which nodes are held here.
        seeds = torch.randint(2**62, (cluster.num_nodes,), generator=cluster.generator).tolist()
        self.codes = cluster.kernel(stochastic_codes)
        device = cluster.weights.device
        self.streams = [torch.Generator(device).manual_seed(seeds[node]) for node in cluster.replicas.nodes]

    def operands(self, rows: Tensor) -> list[Tensor]:
        size, dtype = rows.shape[1], torch.promote_types(rows.dtype, torch.float32)
        return [rows, torch.stack([torch.rand(size, generator=g, device=g.device, dtype=dtype) for g in self.streams])]

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        x, uniform = blocks
        return self.codes(x, self.levels, uniform)
