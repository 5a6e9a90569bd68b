"""SparseLoCo: DiLoCo that sends the largest entries of every tile with two bits each, and keeps the rest for later."""

from __future__ import annotations

from typing_extensions import Unpack

from vsim.cluster.optim import OptimSpec
from vsim.strategy.average import compress
from vsim.strategy.base import Optim, Strategy, StrategyOptions
from vsim.strategy.compression import StatisticalQuantizer, TileTopK
from vsim.strategy.diloco import DiLoCoCommunicator
from vsim.strategy.when import When


class SparseLoCoStrategy(Strategy):
    """Sparse low-communication training [Sarfi et al. 2025, arXiv:2508.15706].

        θ_k ← inner optimizer(θ_k, g_k)
        after every H-th step:  e_k ← β·e_k + (φ − θ_k);  q_k = Q(the k largest entries of every tile of e_k)
                                e_k ← e_k − q_k;  φ ← φ − α · mean(q_k);  θ_k ← φ

    The mean of an entry is over the nodes that sent it, so that an entry which one node alone sends moves φ as far as
    one that all send. There is no outer momentum: that is what e_k is. See `TileTopK` for tiles and warnings, and
    `StatisticalQuantizer` for Q.

    Args:
        H: inner steps between syncs, at least 1, or a schedule of `vsim.strategy.when`.
        topk: k, the entries that a node sends of a tile, at least 1.
        chunk: upper limit for the sides of a tile.
        quantization_bits: of a value, 1 to 8; None: values are sent as they are.
        error_feedback: β in [0, 1].
        outer_lr: α, the outer learning rate.
        options: see `Strategy`.

    Payload: for n = min(k, h·w) values of every tile (h, w), V of all tiles together, with b bits each, every H steps

        ceil(Σ n · ceil(log2(h·w)) / 8) + ceil(V · b / 8) + 4 · 2^b · ceil(V / (256 · 2^b))

    bytes: in tiles of 64 × 64 (12 + 2) · 64 / 4096 bits a parameter, and for the tables an eighth of a bit a value.

    Deviation from the authors' code: a table of values for every 1024 of them, not for every tensor.
    """

    def __init__(
        self,
        inner_optim: Optim = None,
        H: int | When = 30,
        topk: int = 64,
        chunk: int = 64,
        quantization_bits: int | None = 2,
        error_feedback: float = 0.95,
        outer_lr: float = 1.0,
        **options: Unpack[StrategyOptions],
    ) -> None:
        quantizer = None if quantization_bits is None else StatisticalQuantizer(quantization_bits)
        moves = compress(TileTopK(topk, chunk, "packed", quantizer), error_feedback)
        outer = DiLoCoCommunicator(H, OptimSpec("sgd", lr=outer_lr), average=moves)
        super().__init__([outer], inner_optim=inner_optim, **options)
