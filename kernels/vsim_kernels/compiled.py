"""The kernels that `torch.compile` was measured to make faster, and their compiled forms.

Eager time / compiled time, measured on 2 AVX-512 cores with torch 2.13, 1 thread, K = 4 and 460,000 parameters
(tests/benchmarks/bench_kernels.py); above 1, the compiled kernel is faster:

    topk_entries       1.9 – 2.0    compiled
    stochastic_codes   1.9 – 2.2    compiled
    dequantize         1.6 – 2.0    compiled
    majority_vote      1.3          eager: takes only half a millisecond
    dct_tiles          1.1 – 1.8    eager: matrix products in either form
    uniform_quantize   0.9 – 1.2    eager
    quantize           0.7 – 0.9    eager
    scatter_mean       0.4          eager
    left_factor, right_factor, orthogonalize, low_rank   0.3 – 0.8    eager
    write_entries_     0.1 – 0.3    eager: the compiled scatter copies the whole matrix

Kernels in `select` always run eagerly, because the number of chosen entries is random.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, TypeVar

import torch

from vsim_kernels.quantize import dequantize, stochastic_codes
from vsim_kernels.topk import topk_entries

Kernel = TypeVar("Kernel", bound=Callable[..., Any])

COMPILING_PAYS: frozenset[Callable[..., Any]] = frozenset({topk_entries, stochastic_codes, dequantize})


def compiled(kernel: Kernel) -> Kernel:
    """Return the compiled form of a kernel in `COMPILING_PAYS`; return other kernels unchanged.

    >>> compiled(sum) is sum
    True
    """
    return _compile(kernel) if kernel in COMPILING_PAYS else kernel


@functools.cache
def _compile(kernel: Kernel) -> Kernel:
    # Compile once per shape, because top-k computes its groups from the sizes. Beyond torch's limit of shapes, a kernel
    # runs eagerly.
    return torch.compile(kernel, dynamic=False)  # type: ignore[return-value]
