"""The largest cosine coefficients of every tile: what DeMo sends."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence

from torch import Tensor
from vsim_kernels import dct_tiles, idct_tiles, matrix_shape, scatter_mean, tile_shape, topk_entries

from vsim.arguments import one_of, whole_number
from vsim.cluster import Cluster
from vsim.cluster.replicas import Columns
from vsim.strategy.compression.base import Compressor, by_node
from vsim.strategy.compression.messages import INDEX_BYTES, gather_message, sparse_bytes


class _Tiles:
    """All tiles (h, w) of one shape: parameter by parameter, and those of a parameter row by row."""

    def __init__(self, h: int, w: int, parameters: Sequence[Columns]) -> None:
        self.h, self.w, self.parameters = h, w, parameters
        self.count = sum(c.stop - c.start for c in parameters) // (h * w)

    def views(self, tiles: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield views of every parameter's entries, of equal shape: in `tiles` (…, count, h, w) and `rows` (…, P)."""
        lead, first = rows.shape[:-1], 0
        for c in self.parameters:
            n, m = matrix_shape(c.shape)
            down, across = n // self.h, m // self.w
            own = tiles[..., first : first + down * across, :, :].view(*lead, down, across, self.h, self.w)
            matrix = rows[..., c.start : c.stop].view(*lead, down, self.h, across, self.w)
            yield own, matrix.transpose(-3, -2)
            first += down * across


class DCTTopK(Compressor):
    """Every node sends the k largest cosine coefficients of every tile; the average of a coefficient is over the nodes
    that sent it.

    A parameter is seen as a matrix (out, rest), a vector as one row, and cut into tiles: each dimension into chunks of
    its largest divisor ≤ `chunk`. The transform is the orthonormal DCT-II, two-dimensional on the tiles of a matrix.
    The error that is fed back is kept as coefficients, which is the same up to rounding.

    Args:
        topk: k, the coefficients sent of a tile; of a smaller tile all.
        chunk: upper limit for the sides of a tile.
        index_bytes: an index is billed as "int64" (8 bytes), or "packed" to ceil(log2(h·w)) bits in a tile (h, w).

    Payload: min(k, h·w) · (8 + 4) bytes a tile (h, w); packed 4 bytes a value, and the bits of all indices together,
    rounded up to bytes. One all-gather. Small tiles, of vectors and of dimensions that have no fitting divisor, may
    cost more than 4 bytes an entry: a UserWarning then names the parameters.

    Source: DeMo [Peng et al. 2024, arXiv:2411.19870], with the authors' code.

    Deviation from the authors' code: it takes no tensor of more than two dimensions.
    """

    def __init__(self, topk: int = 32, chunk: int = 64, index_bytes: str = "int64") -> None:
        self.topk = whole_number("topk", topk)
        self.chunk = whole_number("chunk", chunk)
        self.index_bytes = one_of("index_bytes", index_bytes, INDEX_BYTES)

    def setup(self, cluster: Cluster) -> None:
        shapes: dict[tuple[int, int], list[Columns]] = {}
        for columns in cluster.replicas.layout:
            shapes.setdefault(tile_shape(columns.shape, self.chunk), []).append(columns)
        self.groups = [_Tiles(h, w, parameters) for (h, w), parameters in shapes.items()]
        self.size = cluster.replicas.num_parameters
        self.payload_bytes = self._bytes(cluster.weights, self.groups)
        self._warn_of_inflation(cluster.weights)

    def arrange(self, rows: Tensor, cluster: Cluster) -> list[Tensor]:
        """Return the coefficients of all tiles, (R, count, h · w) for each shape of tiles."""
        coefficients = []
        for group in self.groups:
            tiles = rows.new_empty(len(rows), group.count, group.h, group.w)
            for own, matrix in group.views(tiles, rows):
                own.copy_(matrix)
            coefficients.append(by_node(cluster, _coefficients, tiles))
        return coefficients

    def restore(self, arranged: list[Tensor]) -> Tensor:
        lead = arranged[0].shape[:-2]
        rows = arranged[0].new_empty(*lead, self.size)  # (…, P)
        for group, coefficients in zip(self.groups, arranged, strict=True):
            tiles = idct_tiles(coefficients.reshape(-1, group.h, group.w)).view(*lead, -1, group.h, group.w)
            for own, matrix in group.views(tiles, rows):
                matrix.copy_(own)
        return rows

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        indices, values = [], []
        for coefficients in arranged:
            shape = (*coefficients.shape[:2], -1)
            largest = cluster.kernel(topk_entries)(coefficients.flatten(0, 1), self.topk)
            value, index = (t.view(shape) for t in largest)  # (R, count, k)
            coefficients.scatter_(2, index, 0.0)
            indices.append(index)
            values.append(value)
        message = gather_message([*indices, *values], cluster, label, self.payload_bytes)  # (K, count, k) each
        pairs = zip(message[: len(indices)], message[len(indices) :], strict=True)
        return [scatter_mean(*pair, c.shape[2]) for pair, c in zip(pairs, arranged, strict=True)]

    def _bytes(self, weights: Tensor, groups: Sequence[_Tiles]) -> int:
        sizes = [(group, group.h * group.w) for group in groups]
        entries = [(group.count * min(self.topk, size), size) for group, size in sizes]
        return sparse_bytes(entries, self.index_bytes, weights.element_size())

    def _warn_of_inflation(self, weights: Tensor) -> None:
        larger = []
        for group in self.groups:
            for c in group.parameters:
                raw = (c.stop - c.start) * weights.element_size()
                sent = self._bytes(weights, [_Tiles(group.h, group.w, [c])])
                if sent > raw:
                    larger.append(f"{c.name} ({sent} for {raw})")
        if larger:
            shown = ", ".join(larger[:8]) + (f" and {len(larger) - 8} more" if len(larger) > 8 else "")
            warnings.warn(
                f"DCTTopK(topk={self.topk}, chunk={self.chunk}) sends more bytes than the raw parameter has, because "
                f"its tiles are small: {shown}",
                UserWarning,
                stacklevel=2,
            )


def _coefficients(tiles: Tensor) -> Tensor:
    """(R, count, h, w) → (R, count, h · w)."""
    return dct_tiles(tiles.flatten(0, 1)).view(*tiles.shape[:2], -1)
