"""Uniform quantization: int8, int4 and their like."""

from __future__ import annotations

from torch import Tensor
from vsim_kernels import quantize

from vsim.arguments import whole_number
from vsim.strategy.compression.blocks import BlockQuantizer


class UniformQuantizer(BlockQuantizer):
    """Every entry is rounded to the nearest of 2^bits − 1 evenly spaced values from −max|x| to max|x| of its block.

    Args:
        bits: 2 to 16; 8 is int8, 4 is int4.
        block_size: consecutive entries that share max|x|.
        two_stage: as of `BlockQuantizer`.

    Payload: ceil(P · bits / 8) + 4 · ceil(P / block_size) bytes. One all-gather.
    """

    def __init__(self, bits: int = 8, block_size: int = 512, two_stage: bool = False) -> None:
        super().__init__(block_size, two_stage)
        self.bits = whole_number("bits", bits, at_least=2, at_most=16)

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = blocks
        return quantize(x, self.bits, dim=-1)
