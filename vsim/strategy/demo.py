"""DeMo: send the largest cosine components of the momentum every step, and keep the rest for later."""

from __future__ import annotations

import torch
from typing_extensions import Unpack

from vsim.arguments import real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec
from vsim.strategy.base import Optim, Strategy, StrategyOptions, with_inner
from vsim.strategy.compression import CompressedAverage, DCTTopK


class DeMoStrategy(Strategy):
    """Decoupled momentum optimization [Peng et al. 2024, arXiv:2411.19870], as the authors' code has it:

        θ ← (1 − lr·λ) θ;  δ_k ← β δ_k + lr·g_k
        q_k = the largest DCT coefficients of every tile of δ_k;  δ_k ← δ_k − DCT⁻¹(q_k)
        θ ← θ − lr · sign(DCT⁻¹(mean of the q_k, of each coefficient over the nodes that sent it))

    The weights of all nodes stay bitwise equal; the momentum δ_k is each node's own. See `DCTTopK` for tiles, bytes
    and warnings.

    Args:
        compression_decay: β in [0, 1].
        compression_topk: coefficients that a node sends of a tile.
        compression_chunk: upper limit for the sides of a tile.
        weight_decay: λ, decoupled, at least 0.
        index_bytes: "int64", or "packed" to the bits that an index needs.
        options: those of every strategy, see `Strategy`, but for the inner optimizer: it is the sign step above. lr is
            1e-3 by default; max_norm clips every node's gradient before it enters δ_k.

    Payload: min(k, h·w) · (8 + 4) bytes for each tile (h, w), every step.

    Raises:
        TypeError: an inner optimizer is given.
    """

    shares_weights = True

    def __init__(
        self,
        optim_spec: Optim = None,
        /,
        compression_decay: float = 0.999,
        compression_topk: int = 32,
        compression_chunk: int = 64,
        weight_decay: float = 0.0,
        index_bytes: str = "int64",
        **options: Unpack[StrategyOptions],
    ) -> None:
        options = with_inner(optim_spec, options)
        for name in ("optim_spec", "inner_optim"):
            if options.get(name) is not None:
                raise TypeError(f"DeMoStrategy(): {name} has no effect, for the step is by the sign; lr sets its size")
        options["optim_spec"] = OptimSpec(torch.optim.SGD)
        super().__init__(**options)
        self.momentum = CompressedAverage(
            DCTTopK(
                whole_number("compression_topk", compression_topk),
                whole_number("compression_chunk", compression_chunk),
                index_bytes,
            ),
            real_number("compression_decay", compression_decay, at_least=0, at_most=1),
        )
        self.weight_decay = real_number("weight_decay", weight_decay, at_least=0)

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        self.momentum.setup(cluster)

    def before_optimizer(self) -> None:
        super().before_optimizer()  # clips: what the optimizer sees are signs
        cluster = self.cluster
        if self.weight_decay:
            cluster.replicas.weights.mul_(1 - self.lr * self.weight_decay)
        fast = self.momentum.average(cluster.grads.mul_(self.lr), cluster, "DCT coefficients")
        cluster.replicas.grads[: len(cluster.replicas.weights)] = fast.sign_()  # the rows that are stepped
