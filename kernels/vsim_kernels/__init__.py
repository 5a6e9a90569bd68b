"""Pure tensor functions on stacked tensors: the arithmetic of the communication strategies.

    select     which entries take part           masking    average them over the nodes
    dct        tiles and their cosine transform  topk       largest entries, mean over senders
    quantize   fewer bits a number               lowrank    fewer numbers a matrix

*Stacked* means the node dimension in front, *shared* one copy that is equal on all nodes. Beside each kernel
is a plain `<kernel>_reference` that the tests compare it with.
"""

from vsim_kernels.compiled import COMPILING_PAYS, compiled

from .dct import dct_matrix, dct_tiles, from_tiles, idct_tiles, largest_divisor, tile_shape, to_tiles
from .lowrank import left_factor, low_rank, orthogonalize, power_iteration, right_factor
from .masking import average_entries_, mean_entries, write_entries_
from .quantize import (
    dequantize,
    majority_vote,
    quantize,
    scaled_sign,
    sign_compress,
    stochastic_codes,
    stochastic_quantize,
    uniform_quantize,
)
from .select import bernoulli_indices, chunk_bounds, chunk_sizes
from .topk import scatter_mean, topk_entries

__all__ = [
    "COMPILING_PAYS",
    "average_entries_",
    "bernoulli_indices",
    "chunk_bounds",
    "chunk_sizes",
    "compiled",
    "dct_matrix",
    "dct_tiles",
    "dequantize",
    "from_tiles",
    "idct_tiles",
    "largest_divisor",
    "left_factor",
    "low_rank",
    "majority_vote",
    "mean_entries",
    "orthogonalize",
    "power_iteration",
    "quantize",
    "right_factor",
    "scaled_sign",
    "scatter_mean",
    "sign_compress",
    "stochastic_codes",
    "stochastic_quantize",
    "tile_shape",
    "to_tiles",
    "topk_entries",
    "uniform_quantize",
    "write_entries_",
]
