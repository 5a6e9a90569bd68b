"""Pure tensor functions on stacked tensors: the arithmetic of the communication strategies.

    select     choice of entries                 masking    writes of entries into every row
    dct        cosine transform of tiles         topk       largest entries, sum and mean over senders
    quantize   fewer bits per number             lowrank    fewer numbers per matrix
    codebooks  codes that index a table          packing    numbers of a few bits in bytes
    orthogonal orthogonal factors of matrices    order      sorted values of every entry

*Stacked* tensors have the node dimension in front; *shared* tensors are equal on all nodes. Tests compare each kernel
with a plain `<kernel>_reference` in the same file.
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
