"""Matrix products of K models at once, on stacked tensors (K, …), with the bits that each has alone.

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

from vsim.batched import Stacked, each_node, may_fold, node_by_node


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
    nodes' gradient matrix, for instance. The gradients of autograd are then these tensors. exact: with the bits of one
    node alone also where that takes a call for each, see `batches_agree`.
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
        ctx.places = places
        ctx.together = batches_agree() or not exact
        return _products(a, b, bias, ctx.together)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        b_place, bias_place = ctx.places
        for_a, for_b, for_bias = ctx.needs_input_grad[:3]
        a_grad = b_grad = None
        if for_a and _by_columns(a):
            a_grad = _products(b, grad.transpose(1, 2), None, ctx.together).transpose(1, 2)
        elif for_a:
            a_grad = _products(grad, b.transpose(1, 2), None, ctx.together)
        if for_b and _by_columns(b):
            place = None if b_place is None else b_place.transpose(1, 2)
            b_grad = _products_over_examples(grad.transpose(1, 2), a, place, ctx.together).transpose(1, 2)
        elif for_b:
            b_grad = _products_over_examples(a.transpose(1, 2), grad, b_place, ctx.together)
        return a_grad, b_grad, torch.sum(grad, 1, out=bias_place) if for_bias else None, None, None, None


def _by_columns(matrices: Tensor) -> bool:
    return matrices.stride(1) == 1 and matrices.stride(2) == matrices.shape[1]


@functools.lru_cache
@torch.no_grad()
@torch.autocast("cpu", enabled=False)
def _batches_agree(threads: int) -> bool:
    stream = torch.Generator().manual_seed(0)
    for rows, inner, columns in itertools.product((5, 10, 24, 48, 100), (8, 24, 64), (24, 48, 64, 128)):
        a, b = (torch.randn(3, *shape, generator=stream) for shape in ((rows, inner), (inner, columns)))
        a, b = rows_apart(a), rows_apart(b)
        if not torch.equal(
            _products(a, b, None, together=True), torch.stack([x @ y for x, y in zip(a, b, strict=True)])
        ):
            return False
    return True


def batches_agree() -> bool:
    """Whether the matrices of a batched product have the bits that they have alone, on this CPU and its threads.

    Several threads may divide a batch in another way than one matrix, and on some CPUs that shows in the last bits. It
    is tried, once for each number of threads, on shapes that do not divide evenly.
    """
    return _batches_agree(torch.get_num_threads())


def _products(a: Tensor, b: Tensor, bias: Tensor | None, together: bool) -> Tensor:
    """a (K, n, m), b (K, m, p), bias (K, p) → a · b + bias, (K, n, p), with the bits of one matrix product each.

    together: in one call for all, which has these bits where `batches_agree`.
    """
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
    out = None if together and dense_rows_are_apart else _with_gaps(a, (rows, columns))
    return torch.bmm(a, b, out=out) if bias is None else torch.baddbmm(bias[:, None], a, b, out=out)


def _products_over_examples(a: Tensor, b: Tensor, out: Tensor | None, together: bool) -> Tensor:
    """a (K, n, m) · b (K, m, p) as `_products`, where m may be so large that the sum is divided among threads.

    It is divided otherwise in a batch, so that these are computed one by one.
    """
    (nodes, rows, inner), columns = a.shape, b.shape[2]
    if 1 in (nodes, rows, inner, columns) or (together and rows * inner * columns <= _SMALL_PRODUCT):
        product = _products(a, b, None, together)
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
