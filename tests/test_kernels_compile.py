"""Each kernel under `torch.compile(fullgraph=True)`: no graph break, and the results of eager."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import vsim_kernels as vk
from torch import Tensor

G = torch.Generator().manual_seed(0)
X = torch.randn(4, 1000, generator=G)
INDEX = torch.arange(0, 1000, 7)
HALF = X.bfloat16()  # not within a kernel, where the compiler would keep float32
VALUES, UNIFORM = torch.randn(len(INDEX), generator=G), torch.rand(X.shape, generator=G)
SENT = torch.rand(3, 5, 64, generator=G).topk(7).indices
MATRICES, Q, P = (torch.randn(shape, generator=G) for shape in ((4, 32, 16), (16, 2), (32, 4)))

# A function of several kernels is one compilation, which takes seconds.
KERNELS: dict[str, Callable[[], tuple[Any, ...]]] = {
    # Sizes no other test uses, so that the matrix is built while tracing.
    "transforms": lambda: (
        vk.dct_tiles(X[:, :667].view(4, 23, 29)),
        vk.idct_tiles(HALF[:, :31].view(4, 1, 31)),
    ),
    "entries": lambda: (
        vk.write_entries_(X.clone(), INDEX, VALUES),
        *(vk.topk_entries(X[:, :size], k) for size, k in ((256, 4), (257, 4), (32, 40))),  # the second is prime
        vk.scatter_mean(SENT[:, 0], X[:3, :7], 64),
        tuple(vk.sort_rows(X)),
    ),
    "quantizers": lambda: (
        *(vk.quantize(X, 8, -1), vk.quantize(X, 1), vk.dequantize(X.sign().to(torch.int8), X[:, :1].abs())),
        *(vk.uniform_quantize(HALF, 4), vk.stochastic_codes(X, 7, UNIFORM), vk.majority_vote(X.sign())),
    ),
    "codes": lambda: (
        *(vk.statistical_codes(X, 2), vk.fp4_codes(X), vk.look_up(SENT.to(torch.uint8), X[:1, :960].view(3, 5, 64))),
        *(vk.pack_bits([SENT.flatten(1)], [6]), vk.unpack_bits(SENT.flatten(1).to(torch.uint8), [8], [6])[0]),
    ),
    "factors": lambda: (
        *(vk.left_factor(MATRICES, Q), vk.right_factor(MATRICES, P), vk.low_rank(P[:, :2], Q), vk.orthogonalize(P)),
    ),
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")  # torch itself, while compiling
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_is_eager(name: str) -> None:
    torch.compiler.reset()
    ours = torch.compile(KERNELS[name], fullgraph=True)()
    torch.testing.assert_close(ours, KERNELS[name]())
    if name == "transforms":
        assert type(vk.dct_matrix(29)) is Tensor  # a real one, though it was built while compiling
