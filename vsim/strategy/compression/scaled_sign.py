"""EF-signSGD: signs, and the mean magnitude of a block."""

from __future__ import annotations

from torch import Tensor
from vsim_kernels import quantize

from vsim.strategy.compression.blocks import BlockQuantizer


class ScaledSign(BlockQuantizer):
    """Every entry is sent as its sign times the mean of |x| over its block: (‖x‖₁ / n) · sign(x).

    One bit has no third value: a 0 is sent as +.

    Args:
        block_size: n, consecutive entries that share a mean.
        two_stage: as of `BlockQuantizer`.

    Payload: ceil(P / 8) + 4 · ceil(P / block_size) bytes. One all-gather.

    Source: EF-signSGD [Karimireddy et al. 2019, arXiv:1901.09847], algorithm 1.

    Deviation from the paper: it compresses layer by layer in place of block by block.
    """

    bits = 1

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = blocks
        return quantize(x, 1, dim=-1)
