"""SparseLoCo: DiLoCo that sends the largest entries of every tile with two bits each, and keeps the rest for later."""

from __future__ import annotations

from vsim.algorithms.compression import StatisticalQuantizer, TileTopK
from vsim.arguments import naming, real_number
from vsim.cluster import Cluster
from vsim.core.average import compress
from vsim.core.fields import algorithm
from vsim.core.outer import SharedWeights
from vsim.core.when import When, sync_interval


@algorithm
class SparseLoCoStrategy(SharedWeights):
    """DiLoCo that sends the largest entries of every tile, with two bits each: SparseLoCo [Sarfi et al. 2025,
    arXiv:2508.15706].

        θ_k ← inner optimizer(θ_k, g_k)
        after every H-th step:  e_k ← β·e_k + (φ − θ_k);  q_k = Q(the k largest entries of every tile of e_k)
                                e_k ← e_k − q_k;  φ ← φ − α · mean(q_k);  θ_k ← φ

    The mean of an entry is over the nodes that sent it, so that an entry sent by one node alone moves φ as far as an
    entry sent by all. e_k takes the place of an outer momentum. See `TileTopK` for tiles and warnings, and
    `StatisticalQuantizer` for Q.

    Args:
        H: inner steps between syncs, at least 1, or a schedule of `vsim.strategy.when`.
        topk: k, the entries that a node sends per tile, at least 1.
        chunk: upper limit for the sides of a tile.
        quantization_bits: bits per value, 1 to 8; None: values are sent as they are.
        error_feedback: β in [0, 1].
        outer_lr: α, the outer learning rate.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: 14 bits for each of 64 entries of a tile of 4096, every H steps. In general, with n = min(k, h·w) values
    per tile (h, w), V values in all tiles and b bits per value, the payload is

        ceil(Σ n · ceil(log2(h·w)) / 8) + ceil(V · b / 8) + 4 · 2^b · ceil(V / (256 · 2^b))

    bytes: the indices, the codes, and the tables that decode them (an eighth of a bit per value).

    Deviation from the authors' code: one table for every 1024 values, not for every tensor.
    """

    family = "local steps"

    H: int | When = 30
    topk: int = 64
    chunk: int = 64
    quantization_bits: int | None = 2
    error_feedback: float = 0.95
    outer_lr: float = 1.0

    def __post_init__(self) -> None:
        self.H = sync_interval(self.H)
        with naming("quantization_bits"):
            quantizer = None if self.quantization_bits is None else StatisticalQuantizer(self.quantization_bits)
        self.average = compress(TileTopK(self.topk, self.chunk, "packed", quantizer), self.error_feedback)
        self.outer_lr = real_number("outer_lr", self.outer_lr, above=0)
        super().__post_init__()

    def sync(self, cluster: Cluster) -> None:
        phi = self.outer_weights
        mean = self.average(phi - cluster.weights, cluster, "outer gradient")  # mean_k q_k, shared (P,)
        phi.sub_(mean, alpha=self.outer_lr)
        cluster.weights.copy_(phi)
