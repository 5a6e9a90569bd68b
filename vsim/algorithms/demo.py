"""DeMo: send the largest cosine components of the momentum every step, and keep the rest for later."""

from __future__ import annotations

from vsim.algorithms.compression import DCTTopK
from vsim.arguments import real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.frozen import ranges
from vsim.cluster.optim import OptimSpec
from vsim.core.algorithm import Algorithm
from vsim.core.average import Compress, compress
from vsim.core.fields import algorithm, state


@algorithm
class DeMoStrategy(Algorithm):
    """Send the momentum's largest cosine coefficients, step by sign: DeMo [Peng et al. 2024, arXiv:2411.19870].

    As in the authors' code:

        θ ← (1 − lr·λ) θ;  δ_k ← β δ_k + lr·g_k
        q_k = the largest DCT coefficients of every tile of δ_k;  δ_k ← δ_k − DCT⁻¹(q_k)
        θ ← θ − lr · sign(DCT⁻¹(mean of each coefficient over the nodes that sent it in q_k))

    The weights of all nodes stay bitwise equal; each node has its own momentum δ_k. See `DCTTopK` for tiles, bytes and
    warnings.

    Args:
        compression_decay: β in [0, 1].
        compression_topk: coefficients that a node sends per tile.
        compression_chunk: upper limit for the sides of a tile.
        weight_decay: λ, decoupled, at least 0.
        index_bytes: "int64", or "packed": as many bits as an index needs.
        lr, …: the options of all strategies, except inner_optim, since the sign step above takes its place; see
            `Algorithm`. lr is 1e-3 by default; max_norm clips every node's gradient before it enters δ_k.

    Payload: min(k, h·w) · (8 + 4) bytes for each tile (h, w), every step.

    Raises:
        TypeError: an inner optimizer is given.
    """

    family = "data parallel"

    compression_decay: float = 0.999
    compression_topk: int = 32
    compression_chunk: int = 64
    weight_decay: float = 0.0
    index_bytes: str = "int64"

    momentum: Compress = state()

    def __post_init__(self) -> None:
        if self.inner_optim is not None:
            raise TypeError("DeMoStrategy(): inner_optim has no effect, for the step is by the sign; lr sets its size")
        topk = whole_number("compression_topk", self.compression_topk)
        chunk = whole_number("compression_chunk", self.compression_chunk)
        decay = real_number("compression_decay", self.compression_decay, at_least=0, at_most=1)
        self.momentum = compress(DCTTopK(topk, chunk, self.index_bytes), decay)
        self.weight_decay = real_number("weight_decay", self.weight_decay, at_least=0)
        super().__post_init__()

    @classmethod
    def default_inner_optim(cls) -> OptimSpec:
        return OptimSpec("sgd")

    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        self.momentum.setup(cluster)

    @property
    def _repeats(self) -> bool:
        return type(self) is DeMoStrategy

    def gradients(self) -> None:
        super().gradients()  # clips now, since the optimizer gets only signs
        cluster = self.cluster
        if self.weight_decay:
            for frozen, own in ranges(cluster.replicas.layout, lambda name: cluster.frozen.get(name, False)):
                if not frozen:
                    cluster.replicas.weights[:, own].mul_(1 - cluster.lr * self.weight_decay)
        fast = self.momentum(cluster.grads.mul_(cluster.lr), cluster, "DCT coefficients")
        cluster.grads.copy_(fast.sign_())
