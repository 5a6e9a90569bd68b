"""FP4: a sign and three bits of exponent."""

from __future__ import annotations

from torch import Tensor
from vsim_kernels import E3M0, fp4_codes, look_up

from vsim.cluster import Cluster
from vsim.strategy.compression.blocks import BlockQuantizer


class FP4(BlockQuantizer):
    """Every entry is rounded to the nearest of 0 and ±2^−6, ±2^−5, … ±1 times max|x| of its block: E3M0, which has a
    sign, three bits of exponent, and no mantissa.

    The smallest exponent stands for 0; of two values as near, the larger is taken. What arrives is averaged in the
    precision of the weights.

    Args:
        block_size: consecutive entries that share max|x|.
        two_stage: as of `BlockQuantizer`.

    Payload: ceil(P / 2) + 4 · ceil(P / block_size) bytes. One all-gather.

    Source: Streaming DiLoCo [Douillard et al. 2025, arXiv:2501.18512], which sends outer gradients as E3M0.

    Deviation from the paper: none is known, for it tells neither scale nor rounding; those above are choices.
    """

    bits = 4

    def encode(self, *blocks: Tensor) -> tuple[Tensor, Tensor]:
        (x,) = blocks
        return fp4_codes(x)

    def decode(self, codes: Tensor, scales: Tensor, cluster: Cluster) -> Tensor:
        return look_up(codes, E3M0.to(scales) * scales)
