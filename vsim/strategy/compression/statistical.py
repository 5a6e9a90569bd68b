"""Statistical quantization: bins around the mean, each decoded as the mean of what fell in."""

from __future__ import annotations

from torch import Tensor
from vsim_kernels import look_up, statistical_codes

from vsim.arguments import whole_number
from vsim.cluster import Cluster
from vsim.strategy.compression.blocks import BlockQuantizer


class StatisticalQuantizer(BlockQuantizer):
    """Every entry is sent as its bin, of 2^bits that are 6 / 2^bits deviations wide and lie around the mean of a block:

        shift = mean(x);  scale = 6 · std(x) / 2^bits
        code = round((x − shift) / scale + 2^bits / 2) in 0 … 2^bits − 1;  value = the mean of the x with this code

    Args:
        bits: 1 to 8. With 2 it quantizes what SparseLoCo sends, with 8 it is INTELLECT-1's int8.
        block_size: consecutive entries that share a table of values, from 1. Default: 256 · 2^bits, so that tables add
            an eighth of a bit to an entry.
        two_stage: as of `BlockQuantizer`.

    Payload: ceil(P · bits / 8) + 4 · 2^bits · ceil(P / block_size) bytes. One all-gather. No shift travels: the table
    holds values, not their distances to it.

    Source: SparseLoCo [Sarfi et al. 2025, arXiv:2508.15706]; INTELLECT-1 [Jaghouar et al. 2024, arXiv:2412.01152].

    Deviation from the authors' codes: a table for every block in place of every tensor.
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
