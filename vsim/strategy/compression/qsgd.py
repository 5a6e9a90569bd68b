"""QSGD: stochastic quantization, unbiased."""

from __future__ import annotations

import torch
from torch import Tensor
from vsim_kernels import stochastic_codes

from vsim.arguments import whole_number
from vsim.cluster import Cluster
from vsim.strategy.compression.blocks import BlockQuantizer


class QSGD(BlockQuantizer):
    """Every entry is rounded at random to one of its neighbours on the grid ‖x‖₂ / s of its block, unbiased.

    The expectation of what arrives is the mean, so that no error is fed back. Every node rounds with random numbers of
    its own, whose seed is drawn from the shared generator.

    Args:
        levels: s, steps of the grid from 0 to ‖x‖₂; 1 to 32767.
        block_size: consecutive entries that share ‖x‖₂, d in the paper.
        two_stage: as of `BlockQuantizer`.

    Payload: ceil(P · ceil(log2(2s + 1)) / 8) + 4 · ceil(P / block_size) bytes. One all-gather.

    Source: QSGD [Alistarh et al. 2016, arXiv:1610.02132].

    Deviation from the paper: codes of fixed length, not Elias coding.
    """

    contractive = False
    streams: list[torch.Generator]  # of the nodes held here

    def __init__(self, levels: int = 7, block_size: int = 512, two_stage: bool = False) -> None:
        super().__init__(block_size, two_stage)
        self.levels = whole_number("levels", levels, at_most=32767)
        self.bits = (2 * self.levels).bit_length()

    def setup(self, cluster: Cluster) -> None:
        # All K seeds are drawn wherever, so that node k's stream does not depend on which nodes are held here.
        seeds = torch.randint(2**62, (cluster.num_nodes,), generator=cluster.generator).tolist()
        self.codes = cluster.kernel(stochastic_codes)
        # There is no generator for the meta device; one of the CPU is not drawn from there.
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
