"""Send the largest entries of every tile, as in SparseLoCo, or the largest cosine coefficients, as in DeMo."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from itertools import accumulate

import torch
from torch import Tensor
from vsim_kernels import dct_tiles, idct_tiles, matrix_shape, scatter_mean, scatter_sum, tile_shape, topk_entries

from vsim.algorithms.compression.quantizers import BlockQuantizer
from vsim.arguments import one_of, whole_number
from vsim.cluster import Cluster
from vsim.cluster.replicas import Columns
from vsim.core.compressor import INDEX_BYTES, Compressor, by_node, gather_entries, sparse_bytes


class Tiles:
    """All tiles of one shape (h, w), in the order of the parameters, and row by row within a parameter."""

    def __init__(self, h: int, w: int, parameters: Sequence[Columns]) -> None:
        self.h, self.w, self.size, self.parameters = h, w, h * w, parameters
        self.count = sum(c.stop - c.start for c in parameters) // self.size
        matrices = [(c, *matrix_shape(c.shape)) for c in parameters]
        self._cuts = [(slice(c.start, c.stop), (n // h, h, m // w, w)) for c, n, m in matrices]

    def views(self, tiles: Tensor, rows: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield each parameter's entries in `tiles` (…, count, h, w) and `rows` (…, P), as two views of equal shape."""
        lead, first = rows.shape[:-1], 0
        for columns, (down, h, across, w) in self._cuts:
            own = tiles[..., first : first + down * across, :, :].view(*lead, down, across, h, w)
            yield own, rows[..., columns].view(*lead, down, h, across, w).transpose(-3, -2)
            first += down * across


class TileTopK(Compressor):
    """Send the k largest entries of every tile; average an entry over the nodes that sent it.

    A parameter is cut into tiles as a matrix (out, rest), a vector as a matrix of one row. A side of a tile is the
    largest divisor ≤ `chunk` of the matrix's dimension.

    Args:
        topk: k, the entries sent per tile; a smaller tile is sent whole.
        chunk: upper limit for the sides of a tile.
        index_bytes: "int64", 8 bytes per index; or "packed", ceil(log2(h·w)) bits per index in a tile (h, w): for 64 ×
            64 entries, two indices in three bytes.
        quantizer: sends the values with fewer bits, such as StatisticalQuantizer(2). Its blocks run over the values of
            all tiles, one tile after another. None: send values as they are.

    Payload: min(k, h·w) · (8 + 4) bytes per tile (h, w); with "packed", 4 bytes per value, and the bits of all indices,
    rounded up to bytes. A quantizer's payload for all values replaces the 4 bytes per value. One all-gather. Small
    tiles, from vectors and dimensions without a large divisor, may cost more than 4 bytes per entry: a UserWarning then
    names the parameters.

    Source: SparseLoCo [Sarfi et al. 2025, arXiv:2508.15706].
    """

    first: Tensor  # shared (V,): where the tile of each sent value starts, among all tiles' entries
    derived = ("first",)
    subtracted = 1.0  # the share of a sent value that leaves the error; with less, part of the value is sent again
    over_all_nodes = False  # whether the mean of an entry counts nodes that did not send the entry, with 0

    def __init__(
        self, topk: int = 64, chunk: int = 64, index_bytes: str = "packed", quantizer: BlockQuantizer | None = None
    ) -> None:
        self.topk = whole_number("topk", topk)
        self.chunk = whole_number("chunk", chunk)
        self.index_bytes = one_of("index_bytes", index_bytes, INDEX_BYTES)
        if not isinstance(quantizer, BlockQuantizer | None):
            raise TypeError(f"quantizer must be a quantizer such as StatisticalQuantizer(2), got {quantizer!r}")
        if quantizer is not None and quantizer.two_stage:
            raise ValueError("two_stage has no effect on a quantizer of tiles, whose nodes send different entries")
        self.quantizer = quantizer
        self.contractive = quantizer is None or quantizer.contractive

    def setup(self, cluster: Cluster) -> None:
        shapes: dict[tuple[int, int], list[Columns]] = {}
        for columns in cluster.replicas.layout:
            if columns.stop > columns.start:
                shapes.setdefault(tile_shape(columns.shape, self.chunk), []).append(columns)
        self.groups = [Tiles(h, w, parameters) for (h, w), parameters in shapes.items()]
        begins = accumulate((group.count * group.size for group in self.groups), initial=0)
        first = [
            torch.arange(begin, begin + group.count * group.size, group.size, device=cluster.weights.device)
            for begin, group in zip(begins, self.groups, strict=False)
        ]
        sent = [min(self.topk, group.size) for group in self.groups]
        self.first = torch.cat([places.repeat_interleave(k) for places, k in zip(first, sent, strict=True)])
        if self.quantizer is not None:
            self.quantizer.setup(cluster)
        self._warn_of_inflation(cluster.weights.element_size())

    def transformed(self, tiles: Tensor, cluster: Cluster) -> Tensor:
        """Return stacked tiles (R, count, h, w) in the basis whose largest coordinates are chosen and sent."""
        return tiles

    def inverse(self, tiles: Tensor) -> Tensor:
        """Invert `transformed`: turn tiles (…, h, w) of coordinates into tiles of entries."""
        return tiles

    def arrange(self, rows: Tensor, cluster: Cluster) -> list[Tensor]:
        """Return the coordinates (R, P) of all tiles, one tile after another, grouped by the tiles' shape."""
        arranged = []
        for group in self.groups:
            tiles = rows.new_empty(len(rows), group.count, group.h, group.w)
            for own, matrix in group.views(tiles, rows):
                own.copy_(matrix)
            arranged.append(self.transformed(tiles, cluster).flatten(1))
        return [torch.cat(arranged, dim=1)]

    def restore(self, arranged: list[Tensor]) -> Tensor:
        rows = torch.empty_like(arranged[0])  # (…, P)
        for group, own in zip(self.groups, self._by_group(arranged[0]), strict=True):
            tiles = self.inverse(own.unflatten(-1, (group.count, group.h, group.w)))
            for entries, matrix in group.views(tiles, rows):
                matrix.copy_(entries)
        return rows

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        (tiles,) = arranged
        index, values = [], []
        for group, own in zip(self.groups, self._by_group(tiles), strict=True):
            value, place = cluster.kernel(topk_entries)(own.unflatten(1, (group.count, -1)), self.topk)
            index.append(place.flatten(1))  # (R, count · k)
            values.append(value.flatten(1))
        sent = torch.cat(values, dim=1)  # (R, V)
        message = [sent] if self.quantizer is None else self.quantizer.encoded(sent, cluster)
        sizes = [group.size for group in self.groups]
        payload_bytes = self._payload_bytes(sent.shape[1], sent.element_size())
        all_index, message = gather_entries(index, sizes, message, self.index_bytes, cluster, label, payload_bytes)
        received = message[0] if self.quantizer is None else self.quantizer.decoded(message, sent, cluster)  # (K, V)
        all_index = all_index + self.first  # places among all tiles' entries
        nodes = slice(cluster.replicas.nodes.start, cluster.replicas.nodes.stop)
        tiles.scatter_(1, all_index[nodes], torch.sub(sent, received[nodes], alpha=self.subtracted))
        if self.over_all_nodes:
            return [scatter_sum(all_index, received, tiles.shape[1]).div_(len(received))]
        return [scatter_mean(all_index, received, tiles.shape[1])]

    def _by_group(self, tiles: Tensor) -> Sequence[Tensor]:
        return tiles.split([group.count * group.size for group in self.groups], dim=-1)

    def _payload_bytes(self, num_values: int, value_bytes: int) -> int:
        if self.quantizer is None:
            return self._bytes(self.groups, value_bytes)
        return self._bytes(self.groups, 0) + self.quantizer.payload_bytes(num_values, value_bytes)

    def _bytes(self, groups: Sequence[Tiles], value_bytes: float) -> int:
        entries = [(group.count * min(self.topk, group.size), group.size) for group in groups]
        return sparse_bytes(entries, self.index_bytes, value_bytes)

    def _warn_of_inflation(self, value_bytes: int) -> None:
        sent_bytes = value_bytes if self.quantizer is None else self.quantizer.bits / 8
        larger = []
        for group in self.groups:
            for c in group.parameters:
                raw, sent = (c.stop - c.start) * value_bytes, self._bytes([Tiles(group.h, group.w, [c])], sent_bytes)
                if sent > raw:
                    larger.append(f"{c.name} ({sent} for {raw})")
        if larger:
            shown = ", ".join(larger[:8]) + (f" and {len(larger) - 8} more" if len(larger) > 8 else "")
            warnings.warn(
                f"{type(self).__name__}(topk={self.topk}, chunk={self.chunk}) sends more bytes than the raw parameter "
                f"has, because its tiles are small: {shown}",
                UserWarning,
                stacklevel=2,
            )


class DCTTopK(TileTopK):
    """Apply `TileTopK` to the cosine coefficients of the tiles.

    The transform is the orthonormal DCT-II, two-dimensional on the tiles of a matrix. The error that is fed back is
    kept as coefficients; up to rounding, this equals keeping entries.

    Args:
        topk, chunk, index_bytes, quantizer: see `TileTopK`, with DeMo's values by default.

    Payload: that of `TileTopK`. One all-gather.

    Source: DeMo [Peng et al. 2024, arXiv:2411.19870], with the authors' code.

    Deviation from the authors' code: tensors of more than two dimensions are allowed.
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
    """Return the cosine coefficients of tiles (R, count, h, w), in the same shape."""
    return dct_tiles(tiles.flatten(0, 1)).view_as(tiles)
