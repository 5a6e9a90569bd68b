"""Matrix products of K models at once, on stacked tensors (K, …), each bitwise equal to the product alone.

A library's batched product computes every matrix as its single product does, mostly. Where it does not (very small
ones, sums so long that threads divide them, operands at odd places in memory, some processors with several threads)
the products of an exact run are computed one by one, without leaving the one call if there is a way.
"""

from __future__ import annotations

import functools
import itertools
import math
from typing import Any

import torch
from torch import Tensor
from vsim_kernels.alignment import ALIGNMENT, are_apart, is_aligned, rows_apart

from vsim.engine.stacked import Stacked, each_node, may_fold, node_by_node
from vsim.private_torch import unwatched


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    weight_grad: Tensor | None = None,
    bias_grad: Tensor | None = None,
    exact: bool = True,
) -> Tensor:
    """x (K, …, in), weight (K, out, in), bias (K, out) → (K, …, out): one product for all nodes.

    weight_grad, bias_grad: where the gradients are written, if they are wanted in a place of their own: rows of the
    nodes' gradient matrix, for instance. The gradients of autograd are then these tensors. exact: bitwise equal
    to one node alone, even where that takes a call for each, see `agree`.
    """
    if x.dim() == 2:  # one example a node, without a batch dimension
        return linear(x[:, None], weight, bias, weight_grad, bias_grad, exact)[:, 0]
    place = None if weight_grad is None else weight_grad.transpose(1, 2)
    out: Tensor = _Product.apply(x.flatten(1, -2), weight.transpose(1, 2), bias, exact, place, bias_grad)
    return out.view(*x.shape[:-1], weight.shape[1]) if x.dim() != 3 else out


def matmul(a: Tensor, b: Tensor, exact: bool = True) -> Tensor:
    """a (K, …, n, m), b (K, m, p) or (K, …, m, p) → (K, …, n, p); exact: as in `linear`."""
    if b.dim() == 3 and a.dim() >= 3:
        return _Product.apply(a.flatten(1, -2), b, None, exact, None, None).unflatten(1, a.shape[1:-1])
    if (batches_agree() or not exact) and may_fold(a, b, (*a.shape[1:-1], b.shape[-1])):
        return torch.matmul(a, b)
    product: Stacked = node_by_node(torch.matmul, len(a), (Stacked(a), Stacked(b)), {})
    return product.tensor


class _Product(torch.autograd.Function):
    """a (K, n, m) · b (K, m, p) + bias (K, p), forward and backward as torch.mm on one node computes it.

    The gradient of a matrix that lies in memory by columns is computed as the transpose of that of its transpose; the
    other way round the last bits differ.
    """

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, bias: Tensor | None, exact: bool, *places: Tensor | None) -> Tensor:
        ctx.save_for_backward(a, b)
        ctx.exact, ctx.places = exact, places
        return _products(a, b, bias, exact)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        b_place, bias_place = ctx.places
        for_a, for_b, for_bias = ctx.needs_input_grad[:3]
        a_grad = b_grad = None
        if for_a and _by_columns(a):
            a_grad = _products(b, grad.transpose(1, 2), None, ctx.exact).transpose(1, 2)
        elif for_a:
            a_grad = _products(grad, b.transpose(1, 2), None, ctx.exact)
        if for_b and _by_columns(b):
            place = None if b_place is None else b_place.transpose(1, 2)
            b_grad = _products_over_examples(grad.transpose(1, 2), a, place, ctx.exact).transpose(1, 2)
        elif for_b:
            b_grad = _products_over_examples(a.transpose(1, 2), grad, b_place, ctx.exact)
        return a_grad, b_grad, torch.sum(grad, 1, out=bias_place) if for_bias else None, None, None, None


def _by_columns(matrices: Tensor) -> bool:
    return matrices.stride(1) == 1 and matrices.stride(2) == matrices.shape[1]


def agree(a: Tensor, b: Tensor, bias: Tensor | None = None) -> bool:
    """Whether one call computes the matrices of a (K, n, m) · b (K, m, p) + bias (K, p) bitwise as a call for each.

    Several threads may divide a batch in another way than one matrix, and on some CPUs that shows in the last bits. The
    library decides by shapes, places in memory and the number of threads. On a CPU where a sample of products shows a
    difference, each kind of product is tried, on random numbers; on other CPUs none is.
    """
    if a.device.type != "cpu" or batches_agree():
        return True
    return _agree(_lie(a), _lie(b), bias is not None, a.dtype, torch.get_num_threads())


def batches_agree() -> bool:
    """Whether all products of a sample are bitwise equal in a batch and alone, on this CPU with its threads."""
    return _sample_agrees(torch.get_num_threads())


# Where a single column is computed in another way, the sums of one trial may be rounded alike by chance: in one of ten.
_TRIALS = 8
_Lie = tuple[torch.Size, tuple[int, ...], int]  # shape, strides, and the bytes from a multiple of 64 to the beginning


def _lie(t: Tensor) -> _Lie:
    return t.shape, t.stride(), t.data_ptr() % ALIGNMENT


@functools.cache
@unwatched()
def _sample_agrees(threads: int) -> bool:
    for rows, inner, columns in itertools.product((5, 10, 24, 48, 100), (8, 24, 64), (24, 48, 64, 128)):
        a, b = (rows_apart(torch.empty(3, *shape)) for shape in ((rows, inner), (inner, columns)))
        if not _agree(_lie(a), _lie(b), False, a.dtype, threads):
            return False
    return True


@functools.cache
@torch.no_grad()
def _agree(a: _Lie, b: _Lie, with_bias: bool, dtype: torch.dtype, threads: int) -> bool:
    stream = torch.Generator().manual_seed(0)
    with unwatched(), torch.autocast("cpu", enabled=False):  # nobody watches, nothing is cast
        return all(_agrees_once(a, b, with_bias, dtype, stream) for _ in range(_TRIALS))


def _agrees_once(a: _Lie, b: _Lie, with_bias: bool, dtype: torch.dtype, stream: torch.Generator) -> bool:
    left, right = (_filled(lie, dtype, stream) for lie in (a, b))
    if not with_bias:
        return _all_are(torch.bmm(left, right), torch.mm(left[0], right[0]))
    bias = torch.randn(right.shape[2], dtype=dtype, generator=stream)
    biases = bias.expand(len(left), 1, -1)
    return _all_are(torch.baddbmm(biases, left, right), torch.addmm(bias, left[0], right[0]))


def _filled(lie: _Lie, dtype: torch.dtype, stream: torch.Generator) -> Tensor:
    """Return the same random matrix for all nodes, lying in memory as told."""
    shape, strides, begin = lie
    start = begin // dtype.itemsize
    size = start + 1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True))
    matrices = torch.empty(size, dtype=dtype).as_strided(shape, strides, start)
    return matrices.copy_(torch.randn(shape[1:], dtype=dtype, generator=stream))


def _all_are(matrices: Tensor, matrix: Tensor) -> bool:
    return torch.equal(matrices, matrix.expand_as(matrices))


def _products(a: Tensor, b: Tensor, bias: Tensor | None, exact: bool) -> Tensor:
    """a (K, n, m), b (K, m, p), bias (K, p) → a · b + bias, (K, n, p); exact: each bitwise equal to one product."""
    (nodes, rows, inner), columns = a.shape, b.shape[2]
    if nodes == 1:
        alone = a.new_empty(1, rows, columns)
        torch.mm(a[0], b[0], out=alone[0]) if bias is None else torch.addmm(bias[0], a[0], b[0], out=alone[0])
        return alone
    a, b = rows_apart(a), rows_apart(b)
    if rows * inner * columns < _TINY_PRODUCT or 1 in (rows, inner, columns):
        each = each_node(a, b, bias)
        return torch.stack([x @ y if z is None else torch.addmm(z, x, y) for x, y, z in each])
    dense_rows_are_apart = rows * columns * a.element_size() % ALIGNMENT == 0
    out = None if dense_rows_are_apart and (not exact or agree(a, b, bias)) else _with_gaps(a, (rows, columns))
    return torch.bmm(a, b, out=out) if bias is None else torch.baddbmm(bias[:, None], a, b, out=out)


def _products_over_examples(a: Tensor, b: Tensor, out: Tensor | None, exact: bool) -> Tensor:
    """a (K, n, m) · b (K, m, p) as `_products`, where m may be so large that the sum is divided among threads.

    It is divided otherwise in a batch, so that these are computed one by one.
    """
    (nodes, rows, inner), columns = a.shape, b.shape[2]
    if 1 in (nodes, rows, inner, columns) or rows * inner * columns <= _SMALL_PRODUCT:
        product = _products(a, b, None, exact)
        return product if out is None else out.copy_(product)
    a, b = rows_apart(a), rows_apart(b)
    if out is not None and is_aligned(out) and are_apart(out) and not out.is_contiguous():
        return torch.bmm(a, b, out=out)
    product = torch.bmm(a, b, out=_with_gaps(a, (rows, columns)))
    return product if out is None else out.copy_(product)


def _with_gaps(like: Tensor, shape: tuple[int, int]) -> Tensor:
    """Return room for (K, *shape) with gaps between the matrices: torch.bmm then computes them one by one."""
    unit = ALIGNMENT // like.element_size()
    pitch = math.prod(shape) // unit * unit + unit
    return like.new_empty_strided((len(like), *shape), (pitch, shape[1], 1))  # no view: it may be written to in place


# Multiplications in a matrix product below which torch.bmm has a kernel of its own that adds up in another order
# (at::native, bmm_out_or_baddbmm_), and up to which it is not shared among threads. A vector times a matrix has another
# kernel than a product, too.
_TINY_PRODUCT, _SMALL_PRODUCT = 400, 2**16
