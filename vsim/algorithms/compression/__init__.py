"""Compressors: averaging with fewer bytes, by `vsim.strategy.average.compress`.

    e_k ← β·e_k + x_k;  send C(e_k);  e_k ← e_k − C(e_k);  every node gets the average of the C(e_k)

A `Compressor` defines C and how messages are averaged; `compress` keeps e_k, the error that is fed back.
"""

from vsim.algorithms.compression.powersgd import PowerSGD
from vsim.algorithms.compression.quantizers import (
    FP4,
    QSGD,
    BlockQuantizer,
    ScaledSign,
    SignVote,
    StatisticalQuantizer,
    UniformQuantizer,
)
from vsim.algorithms.compression.sparse import RandomK, TopK
from vsim.algorithms.compression.tiles import DCTTopK, TileTopK
from vsim.core.compressor import Compressor, by_node, gather_message, sparse_bytes

__all__ = [
    "FP4",
    "QSGD",
    "BlockQuantizer",
    "Compressor",
    "DCTTopK",
    "PowerSGD",
    "RandomK",
    "ScaledSign",
    "SignVote",
    "StatisticalQuantizer",
    "TileTopK",
    "TopK",
    "UniformQuantizer",
    "by_node",
    "gather_message",
    "sparse_bytes",
]
