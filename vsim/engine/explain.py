"""Explain how a run computes on this machine: executor, form of every operation, memory, speed relative to peak."""

from __future__ import annotations

import html
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from tabulate import tabulate
from torch.utils._pytree import tree_map
from torch.utils.flop_counter import FlopCounterMode

from vsim.cluster.optimizers import StackedOptimizer
from vsim.engine.choose import AutoExecutor
from vsim.engine.executor import Executor
from vsim.engine.machine import synchronize
from vsim.engine.memory import activation_bytes, optimizer_bytes
from vsim.engine.vmap import VmapExecutor

# Side of the matrices whose product measures the machine's peak: large enough to reach the peak, and still quick.
_PEAK_SIDE = 1024
_FORMS = {"batched": "one call for all nodes", "node by node": "one call a node", "functorch": "functorch's own rule"}


@dataclass(frozen=True)
class Operation:
    """An operation of the forward pass: name, calls per step, and form."""

    name: str
    calls: int
    form: str


@dataclass(frozen=True)
class Explanation:
    """How a run computes its steps; prints as text, and in a notebook as HTML.

    Attributes:
        executor: the executor that computes the gradients. reason: why this executor was chosen.
        operations: the operations of the forward pass, the most frequent first; empty for the executors loop and
            compiled, which do not count them.
        memory: bytes per node of weights, gradients, optimizer and activations.
        num_nodes: the number of nodes K.
        step_seconds: median duration of a step. gradient_flops: multiplications and additions in a step for the losses
            and gradients of all nodes. peak_flops: multiplications and additions per second in a large product.
    """

    executor: str
    reason: str
    operations: Sequence[Operation]
    memory: dict[str, float]
    num_nodes: int
    step_seconds: float
    gradient_flops: int
    peak_flops: float

    @property
    def share_of_peak(self) -> float:
        """The share of `peak_flops` that a whole step achieves."""
        return self.gradient_flops / self.step_seconds / self.peak_flops

    def __str__(self) -> str:
        lines = [f"executor: {self.executor}" + (f" ({self.reason})" if self.reason else "")]
        if self.operations:
            forms = [[o.name, o.calls, _FORMS[o.form]] for o in self.operations]
            lines += ["", tabulate(forms, ["operation", "calls", "form"])]
        rows = [[name, _megabytes(count), _megabytes(count * self.num_nodes)] for name, count in self.memory.items()]
        lines += [
            "",
            tabulate(rows, ["memory", "a node", f"{self.num_nodes} nodes"], colalign=("left", "right", "right")),
        ]
        lines += [
            "",
            f"a step: {1e3 * self.step_seconds:.3g} ms, {self.gradient_flops / 1e9:.3g} GFLOP of matrix products, "
            f"{self.gradient_flops / self.step_seconds / 1e9:.3g} GFLOP/s: {self.share_of_peak:.0%} of the "
            f"{self.peak_flops / 1e9:.3g} GFLOP/s of a large product",
        ]
        return "\n".join(lines)

    def _repr_html_(self) -> str:
        return f"<pre>{html.escape(str(self))}</pre>"


def explain(
    executor: Executor, steps: Iterator[Any], batch: Any, optimizer: StackedOptimizer, minibatch_size: int | None
) -> Explanation:
    """Take the steps of a run, and explain how these steps were computed.

    Args:
        executor: computes the steps. steps: an iterator that takes one step per item.
        batch: a stacked batch (K, B, …) of the run. optimizer: the nodes' optimizer. minibatch_size: as in the run.
    """
    replicas, seconds = executor.replicas, []
    started = time.perf_counter()
    for _ in steps:
        synchronize(replicas.weights.device)
        seconds.append(time.perf_counter() - started)
        started = time.perf_counter()
    batch = tree_map(lambda t: t.to(replicas.weights.device), batch)
    with FlopCounterMode(display=False) as flops:
        executor.losses_and_grads(batch, minibatch_size)
    engine = executor.chosen if isinstance(executor, AutoExecutor) else executor
    calls = engine.calls if isinstance(engine, VmapExecutor) else Counter()
    operations = [Operation(name, count, form) for (name, form), count in calls.most_common()]
    nodes = replicas.num_held
    memory = {
        "weights": replicas.weights.nbytes / nodes,
        "gradients": replicas.grads.nbytes / nodes,
        "optimizer": optimizer_bytes(optimizer) / nodes,
        "activations": activation_bytes(engine, tree_map(lambda t: t[0], batch)),
    }
    return Explanation(
        executor.name,
        executor.reason,
        operations,
        memory,
        nodes,
        statistics.median(seconds),
        flops.get_total_flops(),
        peak_flops(replicas.weights.device, replicas.weights.dtype),
    )


def peak_flops(device: torch.device, dtype: torch.dtype = torch.float32) -> float:
    """Measure the multiplications and additions per second of a large matrix product."""
    a = torch.ones(_PEAK_SIDE, _PEAK_SIDE, device=device, dtype=dtype)
    best = float("inf")
    for _ in range(5):
        synchronize(device)
        started = time.perf_counter()
        a @ a
        synchronize(device)
        best = min(best, time.perf_counter() - started)
    return 2 * _PEAK_SIDE**3 / best


def _megabytes(count: float) -> str:
    return f"{count / 1e6:.3g} MB"
