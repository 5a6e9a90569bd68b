"""Averaging with fewer bytes: a file for every compressor.

    e_k ← β·e_k + x_k;  send C(e_k);  e_k ← e_k − C(e_k);  everyone gets the average of the C(e_k)

A `Compressor` is C and the way its messages are averaged; `CompressedAverage` keeps e_k, the error that is fed back. It
averages gradients as a module of a strategy, and DiLoCo's outer gradient as `DiLoCoStrategy(compressor=…)`.
"""

from vsim.strategy.compression.base import CompressedAverage, Compressor, by_node
from vsim.strategy.compression.blocks import BlockQuantizer
from vsim.strategy.compression.dct import DCTTopK
from vsim.strategy.compression.fp4 import FP4
from vsim.strategy.compression.messages import gather_message, sparse_bytes
from vsim.strategy.compression.powersgd import PowerSGD
from vsim.strategy.compression.qsgd import QSGD
from vsim.strategy.compression.randomk import RandomK
from vsim.strategy.compression.scaled_sign import ScaledSign
from vsim.strategy.compression.sign_vote import SignVote
from vsim.strategy.compression.statistical import StatisticalQuantizer
from vsim.strategy.compression.tiles import TileTopK
from vsim.strategy.compression.topk import TopK
from vsim.strategy.compression.uniform import UniformQuantizer

__all__ = [
    "FP4",
    "QSGD",
    "BlockQuantizer",
    "CompressedAverage",
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
