"""Quantizers: a code of a few bits for every entry (uniform, sign, exponent, bin or random)."""

from __future__ import annotations

import functools

import torch
import torch.nn.functional as F
from torch import Tensor
from vsim_kernels import (
    E3M0,
    dequantize,
    fp4_codes,
    look_up,
    majority_vote,
    quantize,
    statistical_codes,
    stochastic_codes,
)

from vsim.arguments import true_or_false, whole_number
from vsim.cluster import Cluster
from vsim.cluster.reductions import reduce_rows
from vsim.core.compressor import Compressor, bits_to_bytes, by_node, gather_message, swap_message


class BlockQuantizer(Compressor):
    """Send a code of a few bits for every entry, and a scale for every block of entries; average code · scale.

    Subclasses set `bits`, the bits of a code, and define `encode`. If a block is decoded with more than one number,
    they also set `scales`, and define `decode`.

    Args:
        block_size: consecutive entries that share a scale; the last block may be shorter.
        two_stage: as in an all-reduce of reduce-scatter and all-gather, every node averages one of K chunks and
            quantizes the mean again, so that a node transmits 2 (K − 1)/K messages in place of K − 1. A node adds K
            times the error of its mean to its own error, so that nothing is lost. Off by default.

    Payload: S(P) = ceil(P · bits / 8) + 4 · ceil(P / block_size) bytes. One all-gather. In two stages:
    K · S(ceil(P / K)) bytes in an all-to-all, then S(ceil(P / K)) bytes in an all-gather.

    Source of the two stages: 1-bit Adam [Tang et al. 2021, arXiv:2102.02888], section 4.2.
    """

    bits: int
    scales = 1  # numbers per block that decode its codes

    def __init__(self, block_size: int = 512, two_stage: bool = False) -> None:
        self.block_size = whole_number("block_size", block_size)
        self.two_stage = true_or_false("two_stage", two_stage)

    def operands(self, rows: Tensor) -> list[Tensor]:
        """Return the arguments of `encode`, each of the shape of stacked `rows` (R, …)."""
        return [rows]

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        """Return integer codes (R, …, n) and scales (R, …, `scales`) of operands given as blocks (R, …, n)."""
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
        own = errors.diagonal(nodes.start, 0, 1).T  # (R, C): errors of the chunk that each node averages
        own += num_nodes * (means - decoded[nodes.start : nodes.stop])
        rows.copy_(errors.flatten(1)[:, :size])
        return decoded.flatten()[:size]

    def encoded(self, rows: Tensor, cluster: Cluster) -> list[Tensor]:
        """Return the message of stacked `rows` (R, …, P): codes and scales of whole blocks, then of the rest."""
        message: list[Tensor] = []
        for blocks in zip(*map(self._blocks, self.operands(rows)), strict=True):
            message += by_node(cluster, self.encode, *blocks)
        return message

    def decoded(self, message: list[Tensor], rows: Tensor, cluster: Cluster) -> Tensor:
        """Return the decoded messages of n nodes, (n, …, P), each of the shape of a row of `rows` (R, …, P)."""
        decoded = rows.new_empty(len(message[0]), *rows.shape[1:])
        for target, codes, scales in zip(self._blocks(decoded), message[::2], message[1::2], strict=True):
            target.copy_(self.decode(codes, scales, cluster))
        return decoded

    def payload_bytes(self, size: int, value_bytes: int) -> int:
        """Return the bytes of a message of `size` entries; a scale has `value_bytes` bytes, but at least 4."""
        blocks = -(-size // self.block_size)
        return bits_to_bytes(size * self.bits) + blocks * self.scales * max(4, value_bytes)

    def _bytes(self, rows: Tensor) -> int:
        return self.payload_bytes(rows.shape[-1], rows.element_size())

    def _blocks(self, rows: Tensor) -> list[Tensor]:
        """Return views of (…, P) as (…, blocks, block_size), and of the n remaining entries as (…, 1, n)."""
        whole = rows.shape[-1] // self.block_size * self.block_size
        views = [rows[..., :whole].unflatten(-1, (-1, self.block_size)), rows[..., None, whole:]]
        return [view for view in views if view.numel()]


class UniformQuantizer(BlockQuantizer):
    """Round every entry to the nearest of 2^bits − 1 evenly spaced values from −max|x| to max|x| of its block.

    Args:
        bits: 2 to 16; 8 is int8, 4 is int4.
        block_size: consecutive entries that share max|x|.
        two_stage: see `BlockQuantizer`.

    Payload: ceil(P · bits / 8) + 4 · ceil(P / block_size) bytes. One all-gather.
    """

    def __init__(self, bits: int = 8, block_size: int = 512, two_stage: bool = False) -> None:
        super().__init__(block_size, two_stage)
        self.bits = whole_number("bits", bits, at_least=2, at_most=16)

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = blocks
        return quantize(x, self.bits, dim=-1)


class ScaledSign(BlockQuantizer):
    """Send every entry as its sign times the mean of |x| over its block: (‖x‖₁ / n) · sign(x).

    One bit has no third value: a 0 is sent as +.

    Args:
        block_size: n, consecutive entries that share a mean.
        two_stage: see `BlockQuantizer`.

    Payload: ceil(P / 8) + 4 · ceil(P / block_size) bytes. One all-gather.

    Source: EF-signSGD [Karimireddy et al. 2019, arXiv:1901.09847], algorithm 1.

    Deviation from the paper: a block has `block_size` entries; in the paper, a block is a layer.
    """

    bits = 1

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = blocks
        return quantize(x, 1, dim=-1)


class FP4(BlockQuantizer):
    """Round every entry to the nearest of 0 and ±2^−6, ±2^−5, … ±1 times max|x| of its block: E3M0, which has a sign,
    three bits of exponent, and no mantissa.

    The smallest exponent stands for 0; ties round to the larger magnitude. Decoded values are averaged in the precision
    of the weights.

    Args:
        block_size: consecutive entries that share max|x|.
        two_stage: see `BlockQuantizer`.

    Payload: ceil(P / 2) + 4 · ceil(P / block_size) bytes. One all-gather.

    Source: Streaming DiLoCo [Douillard et al. 2025, arXiv:2501.18512], which sends outer gradients as E3M0.

    Deviation from the paper: none is known, since the paper specifies neither scale nor rounding.
    """

    bits = 4

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = blocks
        return fp4_codes(x)

    def decode(self, codes: Tensor, scales: Tensor, cluster: Cluster) -> Tensor:
        return look_up(codes, _e3m0(scales.device, scales.dtype) * scales)


@functools.cache
def _e3m0(device: torch.device, dtype: torch.dtype) -> Tensor:
    return E3M0.to(device, dtype)


class StatisticalQuantizer(BlockQuantizer):
    """Send every entry as one of 2^bits bins around the mean of its block, each 6 / 2^bits standard deviations wide:

        shift = mean(x);  scale = 6 · std(x) / 2^bits
        code = round((x − shift) / scale + 2^bits / 2) in 0 … 2^bits − 1;  value = the mean of the x with this code

    Args:
        bits: 1 to 8. 2 is SparseLoCo's choice, 8 is INTELLECT-1's int8.
        block_size: consecutive entries that share a table of values, at least 1. Default: 256 · 2^bits, so that tables
            add an eighth of a bit per entry.
        two_stage: see `BlockQuantizer`.

    Payload: ceil(P · bits / 8) + 4 · 2^bits · ceil(P / block_size) bytes. One all-gather. The shift is not sent, since
    the table holds the values themselves.

    Source: SparseLoCo [Sarfi et al. 2025, arXiv:2508.15706]; INTELLECT-1 [Jaghouar et al. 2024, arXiv:2412.01152].

    Deviation from the authors' codes: one table of values for every block, not for every tensor.
    """

    def __init__(self, bits: int = 8, block_size: int | None = None, two_stage: bool = False) -> None:
        self.bits = whole_number("bits", bits, at_most=8)
        super().__init__(256 * 2**self.bits if block_size is None else block_size, two_stage)
        self.scales = 2**self.bits

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = blocks
        return statistical_codes(x, self.bits)

    def decode(self, codes: Tensor, scales: Tensor, cluster: Cluster) -> Tensor:
        return look_up(codes, scales)


class QSGD(BlockQuantizer):
    """Round every entry at random, without bias, to one of the two nearest multiples of ‖x‖₂ / s, where x is its block.

    The expectation of the result is the mean, so that no error feedback is needed. Every node has its own random
    numbers for rounding, with a seed from the shared generator.

    Args:
        levels: s, steps of the grid from 0 to ‖x‖₂; 1 to 32767.
        block_size: consecutive entries that share ‖x‖₂, d in the paper.
        two_stage: see `BlockQuantizer`.

    Payload: ceil(P · ceil(log2(2s + 1)) / 8) + 4 · ceil(P / block_size) bytes. One all-gather.

    Source: QSGD [Alistarh et al. 2016, arXiv:1610.02132].

    Deviation from the paper: codes of fixed length, not Elias coding.
    """

    contractive = False
    streams: list[torch.Generator]  # one for each node held here

    def __init__(self, levels: int = 7, block_size: int = 512, two_stage: bool = False) -> None:
        super().__init__(block_size, two_stage)
        self.levels = whole_number("levels", levels, at_most=32767)
        self.bits = (2 * self.levels).bit_length()

    def setup(self, cluster: Cluster) -> None:
        # Every process draws all K seeds, so that node k's stream does not depend on which nodes are held here.
        seeds = torch.randint(2**62, (cluster.num_nodes,), generator=cluster.generator).tolist()
        self.codes = cluster.kernel(stochastic_codes)
        # The meta device has no generators: a CPU generator takes their place, and is never used.
        device = "cpu" if cluster.weights.is_meta else cluster.weights.device
        streams = [torch.Generator(device).manual_seed(seeds[node]) for node in cluster.replicas.nodes]
        self.keep_stacked(streams=streams)

    def operands(self, rows: Tensor) -> list[Tensor]:
        shape, dtype = rows.shape[1:], torch.promote_types(rows.dtype, torch.float32)
        return [
            rows,
            torch.stack([torch.rand(shape, generator=g, device=rows.device, dtype=dtype) for g in self.streams]),
        ]

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        x, uniform = blocks
        return self.codes(x, self.levels, uniform)


class SignVote(Compressor):
    """Send every node's signs; the average is the sign of the majority, 0 for a tie.

    One bit has no third value: a 0 is sent as +1. There is no error feedback, since a sign has no magnitude.

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
