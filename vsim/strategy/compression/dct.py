"""The largest cosine coefficients of every tile: what DeMo sends."""

from __future__ import annotations

from torch import Tensor
from vsim_kernels import dct_tiles, idct_tiles

from vsim.cluster import Cluster
from vsim.strategy.compression.base import by_node
from vsim.strategy.compression.blocks import BlockQuantizer
from vsim.strategy.compression.tiles import TileTopK


class DCTTopK(TileTopK):
    """`TileTopK` of the cosine coefficients of the tiles.

    The transform is the orthonormal DCT-II, two-dimensional on the tiles of a matrix. The error that is fed back is
    kept as coefficients, which is the same up to rounding.

    Args:
        topk, chunk, index_bytes, quantizer: as of `TileTopK`, with DeMo's values by default.

    Payload: that of `TileTopK`. One all-gather.

    Source: DeMo [Peng et al. 2024, arXiv:2411.19870], with the authors' code.

    Deviation from the authors' code: it takes no tensor of more than two dimensions.
    """

    def __init__(
        self, topk: int = 32, chunk: int = 64, index_bytes: str = "int64", quantizer: BlockQuantizer | None = None
    ) -> None:
        super().__init__(topk, chunk, index_bytes, quantizer)

    def transformed(self, tiles: Tensor, cluster: Cluster) -> Tensor:
        return by_node(cluster, _coefficients, tiles)

    def inverse(self, tiles: Tensor) -> Tensor:
        return idct_tiles(tiles.flatten(0, -3)).view_as(tiles)


def _coefficients(tiles: Tensor) -> Tensor:
    """(R, count, h, w) → alike."""
    return dct_tiles(tiles.flatten(0, 1)).view_as(tiles)
