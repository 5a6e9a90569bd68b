"""The import path of compressors for users; they are defined in `vsim.algorithms.compression`."""

from vsim.algorithms.compression import (
    FP4,
    QSGD,
    BlockQuantizer,
    Compressor,
    DCTTopK,
    PowerSGD,
    RandomK,
    ScaledSign,
    SignVote,
    StatisticalQuantizer,
    TileTopK,
    TopK,
    UniformQuantizer,
    by_node,
    gather_message,
    sparse_bytes,
)

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
