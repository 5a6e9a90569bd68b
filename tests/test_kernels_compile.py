"""Each kernel under `torch.compile(fullgraph=True)`: no graph break, and the results of eager."""

from __future__ import annotations

import pytest
import torch
import vsim_kernels as vk

pytestmark = [
    pytest.mark.slow,
    # torch itself, while compiling
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),
]

G = torch.Generator().manual_seed(0)
X = torch.randn(4, 1000, generator=G)
INDEX = torch.arange(0, 1000, 7)
SENT = torch.rand(3, 5, 64, generator=G).topk(7).indices

KERNELS = {
    "write_entries_": (vk.write_entries_, X, INDEX, torch.randn(len(INDEX), generator=G)),
    # Sizes no other test uses, so that the matrix is built while tracing.
    "dct_tiles": (vk.dct_tiles, torch.randn(8, 23, 29, generator=G)),
    "idct_tiles": (vk.idct_tiles, torch.randn(8, 1, 31, generator=G).bfloat16()),
    "topk_entries": (lambda x: vk.topk_entries(x, 4), torch.randn(8, 256, generator=G)),
    "topk_entries, prime": (lambda x: vk.topk_entries(x, 4), torch.randn(8, 257, generator=G)),
    "topk_entries, all": (lambda x: vk.topk_entries(x, 40), torch.randn(8, 32, generator=G)),
    "scatter_mean": (lambda i, v: vk.scatter_mean(i, v, 64), SENT[:, 0], torch.randn(3, 7, generator=G)),
    "sort_rows": (lambda x: tuple(vk.sort_rows(x)), X),
    "quantize": (lambda x: vk.quantize(x, 8, -1), X),
    "quantize, 1 bit": (lambda x: vk.quantize(x, 1), X),
    "dequantize": (vk.dequantize, X.sign().to(torch.int8), X[:, :1].abs()),
    "uniform_quantize": (lambda x: vk.uniform_quantize(x, 4), X.bfloat16()),
    "stochastic_codes": (
        lambda x, u: vk.stochastic_codes(x, 7, u),
        X,
        torch.rand(X.shape, generator=G),
    ),
    "statistical_codes": (lambda x: vk.statistical_codes(x, 2), X),
    "fp4_codes": (vk.fp4_codes, X),
    "look_up": (vk.look_up, SENT.to(torch.uint8), torch.randn(3, 5, 64, generator=G)),
    "pack_bits": (lambda x: vk.pack_bits([x], [6]), SENT.flatten(1)),
    "unpack_bits": (lambda x: vk.unpack_bits(x, [8], [6])[0], SENT.flatten(1).to(torch.uint8)),
    "majority_vote": (vk.majority_vote, X.sign()),
    "left_factor": (vk.left_factor, torch.randn(4, 32, 16, generator=G), torch.randn(16, 2, generator=G)),
    "right_factor": (vk.right_factor, torch.randn(4, 32, 16, generator=G), torch.randn(32, 2, generator=G)),
    "low_rank": (vk.low_rank, torch.randn(32, 2, generator=G), torch.randn(16, 2, generator=G)),
    "orthogonalize": (vk.orthogonalize, torch.randn(32, 4, generator=G)),
}


@pytest.mark.parametrize("name", KERNELS)
def test_compiled_is_eager(name):
    kernel, *arguments = KERNELS[name]
    compiled_arguments, eager_arguments = ([x.clone() for x in arguments] for _ in range(2))
    torch.compiler.reset()
    ours = torch.compile(kernel, fullgraph=True)(*compiled_arguments)
    theirs = kernel(*eager_arguments)
    # Results, and arguments that were changed in place.
    for a, b in zip(
        [*(ours if isinstance(ours, tuple) else [ours]), *compiled_arguments],
        [*(theirs if isinstance(theirs, tuple) else [theirs]), *eager_arguments],
        strict=True,
    ):
        assert a.dtype == b.dtype
        torch.testing.assert_close(a, b)


def test_a_matrix_built_while_compiling_is_a_real_one():
    x = torch.randn(2, 37, generator=G)
    torch.compiler.reset()
    compiled = torch.compile(vk.dct_tiles, fullgraph=True)(x)
    assert type(vk.dct_matrix(37)) is torch.Tensor
    torch.testing.assert_close(vk.idct_tiles(compiled), x)
