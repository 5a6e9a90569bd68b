"""Averaging with fewer bytes: what a compressor is, error feedback, and the two that send a few entries.

    e_k ← β·e_k + x_k;  send C(e_k);  e_k ← e_k − C(e_k);  everyone gets the average of the C(e_k)

A `Compressor` is C and the way its messages are averaged; `CompressedAverage` keeps e_k, the error that is fed back. It
averages gradients as a module of a strategy, and DiLoCo's outer gradient as `DiLoCoStrategy(compressor=…)`.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from vsim_kernels import topk_entries
from vsim_kernels.alignment import rows_apart

from vsim.arguments import one_of, real_number
from vsim.cluster import Cluster
from vsim.cluster.state import Stateful
from vsim.strategy.base import CommunicationModule

INDEX_BYTES = ("int64", "packed")
Result = TypeVar("Result", Tensor, tuple[Tensor, ...])


class Compressor(Stateful):
    """How nodes average vectors with fewer bytes. A subclass defines `exchange`.

    Attributes:
        contractive: whether a message is nearer to the vector than nothing is. Only then does what it lacks die away
            when it is sent later: error feedback.
    """

    contractive = True

    def setup(self, cluster: Cluster) -> None:
        """Prepare for a run on `cluster`: make the state that lasts from step to step."""

    def arrange(self, rows: Tensor, cluster: Cluster) -> list[Tensor]:
        """Return stacked `rows` (R, P) in the form that this compressor works on, and the error is kept in.

        Returns:
            Stacked tensors (R, …), with P entries a node together; they may share the memory of `rows`.
        """
        return [rows]

    def restore(self, arranged: list[Tensor]) -> Tensor:
        """The inverse of `arrange`, for stacked tensors or shared ones: (R, P) or (P,)."""
        (rows,) = arranged
        return rows

    def exchange(self, arranged: list[Tensor], cluster: Cluster, label: str) -> list[Tensor]:
        """Send what the nodes hold, and return the average of what arrives.

        Args:
            arranged: from `arrange`. It is overwritten: if contractive, by what the messages lack.
            cluster: the nodes.
            label: what this is, for the ledger.

        Returns:
            Shared tensors (…), arranged alike.
        """
        raise NotImplementedError(f"{type(self).__name__} defines no exchange()")


class CompressedAverage(CommunicationModule):
    """Average the gradients with compression before every optimizer step.

    Args:
        compressor: what is sent, and how it is averaged. A copy is used, so that one may be given to several modules.
        error_feedback: β in [0, 1], the share of what a node has not sent that it adds to its next message. True is 1,
            False 0. Default: 1 for a contractive compressor, 0 for the others, with which it would diverge.

    Raises:
        ValueError: error feedback with a compressor that is not contractive.

    Source: error feedback [Seide et al. 2014; Karimireddy et al. 2019, arXiv:1901.09847].

    Payload: the compressor's, every step.
    """

    def __init__(self, compressor: Compressor, error_feedback: bool | float | None = None) -> None:
        if not isinstance(compressor, Compressor):
            raise TypeError(f"compressor must be a Compressor object, got {compressor!r}")
        if error_feedback is None:
            error_feedback = compressor.contractive
        if isinstance(error_feedback, bool):
            error_feedback = float(error_feedback)
        self.error_feedback = real_number("error_feedback", error_feedback, at_least=0, at_most=1)
        if self.error_feedback and not compressor.contractive:
            raise ValueError(
                f"error_feedback={self.error_feedback:g} with {type(compressor).__name__}: its messages may be further "
                "from a vector than nothing is, so that the errors would grow; leave error_feedback out"
            )
        self.compressor = copy.deepcopy(compressor)

    def setup(self, cluster: Cluster) -> None:
        self.compressor.setup(cluster)
        self.residual: list[Tensor] = []  # e_k, stacked, as the compressor arranges it
        if self.error_feedback:
            self.residual = self.compressor.arrange(torch.zeros_like(cluster.grads), cluster)

    def communicate_gradients(self, cluster: Cluster) -> None:
        cluster.grads.copy_(self.average(cluster.grads, cluster, "gradients"))

    def average(self, rows: Tensor, cluster: Cluster, label: str) -> Tensor:
        """Return the average of stacked `rows` (R, P), which are overwritten, as a shared tensor (P,)."""
        arranged = self.compressor.arrange(rows, cluster)
        if self.error_feedback:
            for residual, new in zip(self.residual, arranged, strict=True):
                residual.mul_(self.error_feedback).add_(new)
            arranged = self.residual
        return self.compressor.restore(self.compressor.exchange(arranged, cluster, label))


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
        all_index, all_values = gather_message([index, values], cluster, label, payload_bytes)  # (K, k)
        average = rows.new_zeros(size)
        for node_index, node_values in zip(all_index, all_values, strict=True):
            average.scatter_add_(0, node_index, node_values)
        return [average.div_(cluster.num_nodes)]


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
        index = random_subset(size, count, cluster.generator).to(rows.device)  # (k,)
        mean = cluster.collectives.all_reduce(rows.gather(1, index.expand(len(rows), -1)), "mean", label=label)
        rows.index_fill_(1, index, 0.0)
        return [rows.new_zeros(size).index_copy_(0, index, mean * (size / count) if self.unbiased else mean)]


# For compressors -----------------------------------------------------------------------------------------------------


def gather_message(parts: Sequence[Tensor], cluster: Cluster, label: str, payload_bytes: int) -> list[Tensor]:
    """All-gather stacked tensors (R, …) that travel as one message: shared tensors (K, …), one event."""
    first = cluster.collectives.all_gather(parts[0], label=label, payload_bytes=payload_bytes)
    with cluster.collectives.unbilled():
        return [first, *(cluster.collectives.all_gather(part, label=label) for part in parts[1:])]


def by_node(cluster: Cluster, function: Callable[..., Result], *stacked: Tensor) -> Result:
    """Return function(*stacked), a stacked tensor or a tuple of them.

    In a deterministic run it is called node by node, on tensors that begin where a node's own would: matrix products
    and sums may round a row differently when there are more of them or when it lies elsewhere, and results must not
    depend on how many nodes are held here.
    """
    if not cluster.deterministic:
        return function(*stacked)
    results = [function(*rows) for rows in zip(*(rows_apart(t).split(1) for t in stacked), strict=True)]
    return tree_map(lambda *rows: torch.cat(rows), *results)


def sparse_bytes(entries: Sequence[tuple[int, int]], index_bytes: str, value_bytes: int) -> int:
    """Return the bytes of (index, value) pairs.

    Args:
        entries: (count, size): so many values, each one of `size` entries.
        index_bytes: "int64", or "packed": ceil(log2 size) bits an index, all together rounded up to bytes.
        value_bytes: of one value.
    """
    bits = sum(count * (64 if index_bytes == "int64" else (size - 1).bit_length()) for count, size in entries)
    return sum(count for count, _ in entries) * value_bytes + bits_to_bytes(bits)


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return a parameter's shape seen as a matrix (out, rest); a vector or scalar is one row."""
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (1, math.prod(shape))


def bits_to_bytes(bits: int) -> int:
    """Return the bytes that hold so many bits."""
    return -(-bits // 8)


def entry_count(fraction: float, size: int) -> int:
    """Return the number of entries that a fraction of `size` means, at least 1."""
    return max(1, round(fraction * size))


def random_subset(size: int, count: int, generator: torch.Generator) -> Tensor:
    """Draw `count` of the numbers 0 … size − 1 without replacement, ascending, with about `count` draws."""
    if 2 * count > size:  # the ones that are left out are fewer
        kept = torch.ones(size, dtype=torch.bool)
        kept[random_subset(size, size - count, generator)] = False
        return kept.nonzero().flatten()
    chosen = torch.empty(0, dtype=torch.int64)
    while len(chosen) < count:  # a number that was drawn already is drawn again
        more = torch.randint(size, (count - len(chosen),), generator=generator)
        chosen = torch.cat([chosen, more]).unique()
    return chosen
