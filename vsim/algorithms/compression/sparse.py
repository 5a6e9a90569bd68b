"""Send some entries: each node's largest entries, or the same random entries on all nodes."""

from __future__ import annotations

import torch
from torch import Tensor
from vsim_kernels import scatter_sum, topk_entries

from vsim.arguments import one_of, real_number, true_or_false
from vsim.cluster import Cluster
from vsim.core.compressor import INDEX_BYTES, Compressor, entry_count, gather_entries, sparse_bytes


class TopK(Compressor):
    """Send every node's k entries of largest magnitude; the average counts all other entries as 0.

    Args:
        fraction: in (0, 1]: k = round(fraction · P), at least 1, for all parameters together.
        index_bytes: "int64", 8 bytes per index; or "packed", ceil(log2 P) bits per index.

    Payload: k · (8 + 4) bytes; with "packed", 4·k + ceil(k · ceil(log2 P) / 8). One all-gather.

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
        return [scatter_sum(all_index, all_values, size).div_(cluster.num_nodes)]


class RandomK(Compressor):
    """Average the same k random entries on all nodes, drawn at every call from the shared generator.

    Args:
        fraction: in (0, 1]: k = round(fraction · P), at least 1, for all parameters together.
        unbiased: multiply the result by P / k, so that its expectation is the mean. Not to be combined with error
            feedback.

    Payload: 4·k bytes; the indices follow from the seed. One all-reduce.

    Source: Stich et al. 2018 [arXiv:1809.07599].
    """

    def __init__(self, fraction: float = 0.01, unbiased: bool = False) -> None:
        self.fraction = real_number("fraction", fraction, above=0, at_most=1)
        self.unbiased = true_or_false("unbiased", unbiased)
        self.contractive = not unbiased

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        (rows,) = arranged
        size = rows.shape[1]
        count = entry_count(self.fraction, size)
        index = random_subset(size, count, cluster.generator, rows.device)  # (k,)
        mean = cluster.collectives.all_reduce(rows.gather(1, index.expand(len(rows), -1)), "mean", label=label)
        rows.index_fill_(1, index, 0.0)
        return [rows.new_zeros(size).index_copy_(0, index, mean * (size / count) if self.unbiased else mean)]


def random_subset(size: int, count: int, generator: torch.Generator, device: torch.device | str = "cpu") -> Tensor:
    """Draw `count` distinct numbers from 0 … size − 1, in ascending order, with about `count` draws on the CPU.

    On the meta device, where tensors have no values, draw nothing.
    """
    if torch.device(device).type == "meta":
        return torch.empty(count, dtype=torch.int64, device=device)
    if 2 * count > size:  # fewer numbers are left out than chosen: draw those left out
        kept = torch.ones(size, dtype=torch.bool)
        kept[random_subset(size, size - count, generator)] = False
        return kept.nonzero().flatten().to(device)
    chosen = torch.empty(0, dtype=torch.int64)
    while len(chosen) < count:  # draw again for duplicates
        more = torch.randint(size, (count - len(chosen),), generator=generator)
        chosen = torch.cat([chosen, more]).unique()
    return chosen.to(device)
