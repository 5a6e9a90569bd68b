"""SPARTA: take local steps, and after every step average a few entries of the weights over the nodes."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import Tensor
from vsim_kernels import topk_entries, uniform_quantize, write_entries_

from vsim.algorithms.selectors import (
    IndexSelector,
    RandomIndexSelector,
    round_up,
)
from vsim.arguments import one_of, real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.collectives import Pending
from vsim.core.algorithm import Algorithm
from vsim.core.average import mean
from vsim.core.fields import algorithm, state

DEFAULT_RATE = 0.005


@algorithm
class SPARTAStrategy(Algorithm):
    """Average a random share p of the weights at every step: SPARTA [Beton et al. 2025,
    openreview.net/forum?id=stFPf3gzq1].

        θ_k ← optimizer(θ_k, g_k);  after the last step of each round θ_k[S] ← mean_j θ_j[S]

    S is a random share p of the entries of every tensor. Optimizer state stays local.

    Args:
        index_selector: chooses S: `RandomIndexSelector(p)` (the default), `ShuffledSequentialIndexSelector(p)`,
            `PartitionedIndexSelector(p)` or a subclass of `IndexSelector`.
        p_sparta: p, the share of the entries, 0 < p ≤ 1; default 0.005. Give either this rate or an
            `index_selector`.
        sparta_interval: steps of a round, at least 1.
        async_delay: d, rounds until a mean is written: at the end of round r + d, the mean of round r overwrites the
            entries S of round r, and discards all changes since then. Means of a run's last d rounds are never written.
        compression_method: "random": the selector chooses S. "topk": in every tensor of n entries, every node nominates
            the ⌈p·n⌉ entries that have moved furthest since this module last shared them; S is the union.
        quantization_bits: b, 1 to 16: a node rounds its values to b bits, uniformly, with a scale for every tensor (see
            `vsim_kernels.quantize`), and an all-gather sends them. None: an all-reduce averages the exact values.
        mask: "seed": all nodes draw S from the run's seed, at no cost. "broadcast": node 0 sends a mask.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: 4·p·P bytes a round on average. With 4-byte weights and m entries in S:
        the values      4·m; with b bits ⌈m·b / 8⌉ + 4 · (tensors that have an entry in S)
        mask            P, one byte per entry, with mask="broadcast"
        nominations     4 · Σ ⌈p·n⌉ with "topk"; m is then between Σ ⌈p·n⌉ and K · Σ ⌈p·n⌉
    If S is empty, no values are sent.

    Raises:
        TypeError: two arguments contradict each other.

    Deviations from the paper: the authors' code broadcasts a mask every round; mask="broadcast" counts its bytes. Here
    all nodes draw the same mask from a shared seed. "topk" and `quantization_bits` are additions.
    """

    family = "data parallel"
    derived = ("tensor_stops",)
    resolved = ("p_sparta", "index_selector", "sparta_interval")

    p_sparta: float | None = None
    sparta_interval: int = 1
    index_selector: IndexSelector | None = None
    async_delay: int = 0
    compression_method: str = "random"
    quantization_bits: int | None = None
    mask: str = "seed"

    selector: IndexSelector = state()

    pending: list[tuple[Tensor, Pending]] = state()  # shared columns (m,) and their means (m,), the oldest first

    def __post_init__(self) -> None:
        topk = one_of("compression_method", self.compression_method, ("random", "topk")) == "topk"
        one_of("mask", self.mask, ("seed", "broadcast"))
        if topk and self.mask == "broadcast":
            raise TypeError(
                "with compression_method='topk' the nodes nominate the entries, so there is no mask to send; "
                "leave out mask='broadcast' or compression_method='topk'"
            )
        self.selector = _selector(self.index_selector, self.p_sparta, topk)
        self.H = self.sparta_interval = whole_number("sparta_interval", self.sparta_interval)
        self.async_delay = whole_number("async_delay", self.async_delay, at_least=0)
        if self.quantization_bits is not None:
            self.quantization_bits = whole_number("quantization_bits", self.quantization_bits, at_most=16)
        super().__post_init__()

    @property
    def first_step(self) -> int:
        return self.sparta_interval * (1 + self.async_delay)

    def rounds_repeat(self, num_nodes: int) -> int | None:
        return self.selector.rounds_repeat

    def setup(self, cluster: Cluster) -> None:
        self.selector.setup(cluster)
        self.keep_shared(pending=[])
        stops = [c.stop for c in cluster.replicas.layout]
        self.tensor_stops = torch.tensor(stops, device=cluster.weights.device)

    def sync(self, cluster: Cluster) -> None:
        index = self.selector.select(cluster, cluster.step // self.sparta_interval - 1)  # (m,)
        everywhere = index.expand(cluster.replicas.num_held, -1)
        if self.mask == "broadcast":
            size = cluster.replicas.num_parameters
            index = cluster.collectives.broadcast(everywhere, label="mask", payload_bytes=size)
        values = cluster.weights.gather(1, everywhere)  # (R, m)
        self.selector.note_shared(index, values)
        if index.numel():
            self.pending.append((index, self._send(cluster, index, values)))
        if self.pending and self.pending[0][1].due == cluster.step:
            index, pending = self.pending.pop(0)
            averaged = pending.result()
            write_entries_(cluster.weights, index, averaged)
            self.selector.note_shared(index, averaged)

    def _send(self, cluster: Cluster, index: Tensor, values: Tensor) -> Pending:
        """Start averaging the nodes' `values` (R, m), rounded to `quantization_bits` if given, into a mean (m,)."""
        start = partial(
            cluster.collectives.start, delay=self.async_delay * self.sparta_interval, label="sparse weights"
        )
        if self.quantization_bits is None:
            return start("all_reduce", values, "mean")
        stops = torch.searchsorted(index, self.tensor_stops).cpu()  # positions in `index` at which tensors end
        tensors = [part for part in values.tensor_split(stops[:-1], dim=1) if part.numel()]
        scale_bytes = max(4, values.element_size())
        payload = math.ceil(index.numel() * self.quantization_bits / 8) + scale_bytes * len(tensors)
        values = torch.cat([uniform_quantize(part, self.quantization_bits, dim=-1) for part in tensors], dim=1)
        return start("merge", values, mean(), payload_bytes=payload)  # codes of different scales cannot be added up


class _FurthestMoved(IndexSelector):
    """The union of the nodes' nominations: per tensor, the ⌈p·n⌉ entries that moved furthest since last shared."""

    last_shared: Tensor  # each entry's value when it was last shared, stacked (R, P)

    def setup(self, cluster: Cluster) -> None:
        self.keep_stacked(last_shared=cluster.weights.clone())  # all nodes start equal

    def select(self, cluster: Cluster, round: int) -> Tensor:
        moved = cluster.weights - self.last_shared  # (R, P)
        nominated = [
            topk_entries(moved[:, c.start : c.stop], round_up(self.p * (c.stop - c.start)))[1] + c.start
            for c in cluster.replicas.layout
            if c.stop > c.start
        ]
        dtype = torch.int32 if moved.shape[1] <= 2**31 else torch.int64
        own = torch.cat(nominated, dim=1).to(dtype)  # (R, Σ ⌈p·n⌉)
        return cluster.collectives.all_gather(own, label="nominations").unique().long()

    def note_shared(self, index: Tensor, values: Tensor) -> None:
        write_entries_(self.last_shared, index, values)


def _selector(given: IndexSelector | None, rate: float | None, topk: bool) -> IndexSelector:
    """Return the given selector, or a new one with this rate."""
    if given is None:
        rate = real_number("p_sparta", DEFAULT_RATE if rate is None else rate, above=0, at_most=1)
        return _FurthestMoved(rate) if topk else RandomIndexSelector(rate)
    if not isinstance(given, IndexSelector):
        raise TypeError(
            f"index_selector must be an IndexSelector, such as RandomIndexSelector({DEFAULT_RATE}); got {given!r}"
        )
    if rate is not None:
        raise TypeError(
            f"the rate p_sparta is given twice, as {rate} and in index_selector={given!r}; give one of them"
        )
    if topk:
        raise TypeError(
            f"with compression_method='topk' the nodes nominate the entries, so index_selector={given!r} has no "
            "effect; give one of them"
        )
    return given
