"""Top-k: the entries of largest magnitude, each node its own."""

from __future__ import annotations

from torch import Tensor
from vsim_kernels import topk_entries

from vsim.arguments import one_of, real_number
from vsim.cluster import Cluster
from vsim.strategy.compression.base import Compressor
from vsim.strategy.compression.messages import INDEX_BYTES, entry_count, gather_entries, sparse_bytes


class TopK(Compressor):
    """Every node sends its k entries of largest magnitude; the average counts the others as 0.

    Args:
        fraction: k = round(fraction · P), at least 1, of all parameters together; in (0, 1].
        index_bytes: an index is billed as "int64" (8 bytes), or "packed" to ceil(log2 P) bits.

    Payload: k · (8 + 4) bytes; packed 4·k + ceil(k · ceil(log2 P) / 8). One all-gather.

    Source: Aji and Heafield 2017 [arXiv:1704.05021]; Stich et al. 2018 [arXiv:1809.07599].
    """

    def __init__(self, fraction: float = 0.01, index_bytes: str = "int64") -> None:
        self.fraction = real_number("fraction", fraction, above=0, at_most=1)
        self.index_bytes = one_of("index_bytes", index_bytes, INDEX_BYTES)

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        (rows,) = arranged
        size = rows.shape[1]
        count = entry_count(self.fraction, size)
        values, index = cluster.kernel(topk_entries)(rows, count)  # (R, k)
        rows.scatter_(1, index, 0.0)
        payload_bytes = sparse_bytes([(count, size)], self.index_bytes, rows.element_size())
        all_index, (all_values,) = gather_entries(
            [index], [size], [values], self.index_bytes, cluster, label, payload_bytes
        )  # (K, k)
        average = rows.new_zeros(size)
        for node_index, node_values in zip(all_index, all_values, strict=True):
            average.scatter_add_(0, node_index, node_values)
        return [average.div_(cluster.num_nodes)]
