"""Pure tensor functions on stacked tensors: the arithmetic of the communication strategies.

    select     which entries take part           masking    write them into every row
    dct        cosine transform of tiles         topk       largest entries, sum and mean over senders
    quantize   fewer bits a number               lowrank    fewer numbers a matrix
    codebooks  codes that are places in a table  packing    numbers of a few bits in bytes
    orthogonal the direction of a matrix alone   order      every entry's values sorted

*Stacked* means the node dimension in front, *shared* one copy that is equal on all nodes. Beside each kernel
is a plain `<kernel>_reference` that the tests compare it with.
"""

from .codebooks import E3M0, fp4_codes, look_up, statistical_codes
from .compiled import COMPILING_PAYS, compiled
from .dct import dct_matrix, dct_tiles, idct_tiles, largest_divisor, matrix_shape, tile_shape
from .lowrank import left_factor, low_rank, orthogonalize, right_factor
from .masking import write_entries_
from .order import sort_rows
from .orthogonal import newton_schulz
from .packing import pack_bits, unpack_bits
from .quantize import dequantize, majority_vote, quantize, stochastic_codes, uniform_quantize
from .select import bernoulli_indices, chunk_sizes
from .topk import scatter_mean, scatter_sum, topk_entries

__all__ = [
    "COMPILING_PAYS",
    "E3M0",
    "bernoulli_indices",
    "chunk_sizes",
    "compiled",
    "dct_matrix",
    "dct_tiles",
    "dequantize",
    "fp4_codes",
    "idct_tiles",
    "largest_divisor",
    "left_factor",
    "look_up",
    "low_rank",
    "majority_vote",
    "matrix_shape",
    "newton_schulz",
    "orthogonalize",
    "pack_bits",
    "quantize",
    "right_factor",
    "scatter_mean",
    "scatter_sum",
    "sort_rows",
    "statistical_codes",
    "stochastic_codes",
    "tile_shape",
    "topk_entries",
    "uniform_quantize",
    "unpack_bits",
    "write_entries_",
]
