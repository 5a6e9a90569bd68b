"""Each kernel eager, compiled, and as fast as it could be: does `torch.compile` pay on this machine?

    python tests/benchmarks/bench_kernels.py [--repeats 30] [--threads 2] [--nodes 4] [--only topk]

The sizes come from a GPT of 460,000 parameters. The *floor* is the time in which the bytes a kernel must
read and write are copied by one `copy_`, or its multiplications are done in one large matrix product,
whichever is longer; both are measured in the same run. A small copy stays in the caches, as the kernel's data
does. Eager and compiled calls alternate, so that what else the machine does falls on both; times are medians.
Rows in parentheses are other ways to the same result, kept here for the reasons behind the choice.
"""

from __future__ import annotations

import argparse
import statistics
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import vsim_kernels as vk
from tabulate import tabulate
from torch import Tensor

PARAMETERS = 460_000
TILES, TILE, KEPT = 110, 64, 32  # tiles a node, side of a tile, entries kept of it


@dataclass(frozen=True)
class Case:
    """One line of the table; `flops` counts a multiplication and an addition as two."""

    name: str
    kernel: Callable[..., Any]
    arguments: tuple[Any, ...]
    moved_bytes: int
    flops: int = 0
    compilable: bool = True


def seconds(call: Callable[[], Any]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def copy_seconds(moved_bytes: int, repeats: int) -> float:
    """Time of a plain copy that reads and writes this many bytes together, in the same caches."""
    source = torch.ones(max(moved_bytes // 8, 1))
    target = torch.empty_like(source)
    return statistics.median(seconds(lambda: target.copy_(source)) for _ in range(repeats))


def product_speed(repeats: int) -> float:
    """Operations a second of a large matrix product."""
    n = 1024
    a, b, out = torch.ones(n, n), torch.ones(n, n), torch.empty(n, n)
    times = [seconds(lambda: torch.mm(a, b, out=out)) for _ in range(repeats)]
    return 2 * n**3 / statistics.median(times)


def dense_mask(numel: int, p: float, generator: torch.Generator) -> Tensor:
    return (torch.rand(numel, generator=generator) < p).nonzero().flatten()


def advanced_write_(x: Tensor, index: Tensor, values: Tensor) -> Tensor:
    x[:, index] = values
    return x


def one_stage_topk(x: Tensor, k: int) -> tuple[Tensor, Tensor]:
    index = x.abs().topk(k, dim=1, sorted=False).indices
    return x.gather(1, index), index


def scatter_reduce_mean(index: Tensor, values: Tensor, n: int) -> Tensor:
    flat_index, flat_values = (t.transpose(0, 1).reshape(t.shape[1], -1) for t in (index, values))
    out = values.new_zeros(values.shape[1], n)
    return out.scatter_reduce_(1, flat_index, flat_values, "mean", include_self=False)


def cases(nodes: int) -> list[Case]:
    g = torch.Generator().manual_seed(0)
    # Columns of a wider matrix, as a parameter's are: contiguous rows, but not one block.
    x = torch.randn(nodes, PARAMETERS + 64, generator=g)[:, :PARAMETERS]
    n = TILE * TILE
    x_bytes = 4 * x.numel()
    out: list[Case] = []
    for numel, p in ((PARAMETERS, 0.005), (PARAMETERS, 0.1), (100_000_000, 0.005)):
        written = int(8 * p * numel)
        label = f"N={numel:.0e} p={p}"
        out.append(Case(f"bernoulli_indices {label}", vk.bernoulli_indices, (numel, p, g), written, compilable=False))
        if numel == PARAMETERS:
            out.append(Case(f"(dense mask {label})", dense_mask, (numel, p, g), written, compilable=False))
    for p in (0.005, 0.1):
        index = vk.bernoulli_indices(PARAMETERS, p, g)
        m = len(index)
        values = torch.randn(m, generator=g)
        read, label = 4 * m * nodes + 8 * m, f"p={p}"
        out += [
            Case(f"write_entries_ {label}", vk.write_entries_, (x, index, values), read + 4 * m),
            Case(f"(x[:, index] = {label})", advanced_write_, (x, index, values), read + 4 * m),
        ]
    tiles = torch.randn(nodes * TILES, TILE, TILE, generator=g)
    rows = tiles.reshape(-1, n)
    values, index = (t.reshape(nodes, TILES, KEPT) for t in vk.topk_entries(rows, KEPT))
    index, values = index.flatten(1) + torch.arange(TILES).repeat_interleave(KEPT) * n, values.flatten(1)
    topk_bytes, mean_bytes = rows.nbytes + 12 * KEPT * len(rows), index.nbytes + values.nbytes + 4 * TILES * n
    product_flops = 2 * 2 * tiles.numel() * TILE
    out += [
        Case("dct_tiles", vk.dct_tiles, (tiles,), 2 * tiles.nbytes, product_flops),
        Case("idct_tiles", vk.idct_tiles, (tiles,), 2 * tiles.nbytes, product_flops),
        Case("topk_entries", vk.topk_entries, (rows, KEPT), topk_bytes),
        Case("(one-stage topk)", one_stage_topk, (rows, KEPT), topk_bytes),
        Case("scatter_mean", vk.scatter_mean, (index, values, TILES * n), mean_bytes),
        Case("(scatter_reduce mean)", scatter_reduce_mean, (index, values, TILES * n), mean_bytes),
    ]
    uniform = torch.rand(x.shape, generator=g)
    codes, scale = vk.quantize(x, 8, -1)
    out += [
        Case("quantize 8 bits", vk.quantize, (x, 8, -1), x_bytes + codes.nbytes),
        Case("dequantize", vk.dequantize, (codes, scale), x_bytes + codes.nbytes),
        Case("uniform_quantize 8 bits", vk.uniform_quantize, (x, 8, -1), 2 * x_bytes),
        Case("stochastic_codes", vk.stochastic_codes, (x, 7, uniform), 2 * x_bytes + codes.nbytes),
        Case("majority_vote", vk.majority_vote, (x.sign(),), x_bytes + x_bytes // nodes),
    ]
    blocks = x[:, : PARAMETERS // 1024 * 1024].unflatten(1, (-1, 1024))
    bins, table = vk.statistical_codes(blocks, 2)
    kept = index.flatten(1)  # 12 bits each
    packed = vk.pack_bits([kept], [12])
    out += [
        Case("statistical_codes 2 bits", vk.statistical_codes, (blocks, 2), x_bytes + bins.nbytes),
        Case("fp4_codes", vk.fp4_codes, (blocks,), x_bytes + bins.nbytes),
        Case("look_up", vk.look_up, (bins, table), x_bytes + bins.nbytes),
        Case("pack_bits", lambda x: vk.pack_bits([x], [12]), (kept,), kept.nbytes + packed.nbytes),
        Case(
            "unpack_bits", lambda x: vk.unpack_bits(x, [kept.shape[1]], [12])[0], (packed,), kept.nbytes + packed.nbytes
        ),
    ]
    matrices, rank = torch.randn(nodes, 512, 128, generator=g), 4
    q, p_hat = torch.randn(128, rank, generator=g), torch.randn(512, rank, generator=g)
    step = 2 * matrices.numel() * rank
    out += [
        Case("left_factor", vk.left_factor, (matrices, q), matrices.nbytes, step),
        Case("right_factor", vk.right_factor, (matrices, p_hat), matrices.nbytes, step),
        Case("low_rank", vk.low_rank, (p_hat, q), matrices.nbytes // nodes, step // nodes),
        Case("orthogonalize", vk.orthogonalize, (p_hat,), 2 * p_hat.nbytes, 4 * p_hat.numel() * rank),
    ]
    return out


def measure(case: Case, repeats: int) -> tuple[float, float | None, float | None]:
    """Median seconds eager and compiled, and seconds of the first compiled call."""
    calls = [lambda: case.kernel(*case.arguments)]
    first = None
    if case.compilable:
        torch.compiler.reset()
        compiled = torch.compile(case.kernel, fullgraph=True, dynamic=False)
        calls.append(lambda: compiled(*case.arguments))
        first = seconds(calls[1])
    times: list[list[float]] = [[] for _ in calls]
    for repeat in range(repeats + 3):
        for call, record in zip(calls, times, strict=True):
            elapsed = seconds(call)
            if repeat >= 3:  # the rest is warming up
                record.append(elapsed)
    medians = [statistics.median(record) for record in times]
    return medians[0], medians[1] if case.compilable else None, first


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=DeprecationWarning, module="torch")
    torch.set_num_threads(options.threads)
    speed = product_speed(options.repeats)
    large = 2**28
    bandwidth = large / copy_seconds(large, options.repeats)
    print(f"torch {torch.__version__}, {options.threads} threads, {options.nodes} nodes", end=": ")
    print(f"copies {bandwidth / 1e9:.1f} GB/s from memory, multiplies {speed / 1e9:.0f} GFLOP/s")
    table = []
    for case in cases(options.nodes):
        if options.only not in case.name:
            continue
        eager, compiled, first = measure(case, options.repeats)
        floor = max(copy_seconds(case.moved_bytes, options.repeats), case.flops / speed)
        table.append(
            [
                case.name,
                eager * 1e3,
                None if compiled is None else compiled * 1e3,
                None if compiled is None else eager / compiled,
                first,
                floor * 1e3,
                eager / floor,
            ]
        )
    headers = [
        "kernel",
        "eager ms",
        "compiled ms",
        "eager/compiled",
        "first call s",
        "floor ms",
        "eager/floor",
    ]
    print(tabulate(table, headers, floatfmt=("", ".3f", ".3f", ".2f", ".1f", ".3f", ".1f"), missingval="–"))


if __name__ == "__main__":
    main()
