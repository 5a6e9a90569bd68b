"""Random-k: the same random entries of all nodes."""

from __future__ import annotations

import torch
from torch import Tensor

from vsim.arguments import real_number
from vsim.cluster import Cluster
from vsim.strategy.compression.base import Compressor
from vsim.strategy.compression.messages import entry_count


class RandomK(Compressor):
    """All nodes average the same k random entries, drawn anew every time from the shared generator.

    Args:
        fraction: k = round(fraction · P), at least 1, of all parameters together; in (0, 1].
        unbiased: multiply what arrives by P / k, so that its expectation is the mean. This is instead of error
            feedback, with which it must not be combined.

    Payload: 4·k bytes; the indices follow from the seed. One all-reduce.

    Source: Stich et al. 2018 [arXiv:1809.07599].
    """

    def __init__(self, fraction: float = 0.01, unbiased: bool = False) -> None:
        self.fraction = real_number("fraction", fraction, above=0, at_most=1)
        if not isinstance(unbiased, bool):
            raise TypeError(f"unbiased must be True or False, got {unbiased!r}")
        self.unbiased = unbiased
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
    """Draw `count` of the numbers 0 … size − 1 without replacement, ascending, with about `count` draws on the CPU.

    On the meta device, where nothing has values, none.
    """
    if torch.device(device).type == "meta":
        return torch.empty(count, dtype=torch.int64, device=device)
    if 2 * count > size:  # the ones that are left out are fewer
        kept = torch.ones(size, dtype=torch.bool)
        kept[random_subset(size, size - count, generator)] = False
        return kept.nonzero().flatten().to(device)
    chosen = torch.empty(0, dtype=torch.int64)
    while len(chosen) < count:  # a number that was drawn already is drawn again
        more = torch.randint(size, (count - len(chosen),), generator=generator)
        chosen = torch.cat([chosen, more]).unique()
    return chosen.to(device)
