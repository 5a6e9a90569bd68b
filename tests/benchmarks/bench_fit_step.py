"""The cost of a step of `fit` against a hand-written vmap loop that trains the same, and where its time goes.

MLP 64-128-128-10, batch 16 a node, AllReduce, AdamW, history on. The two alternate in one run, so that the ratio
holds where the machine's speed drifts.

A step's time is then divided among losses and gradients, the optimizer, and bookkeeping, which is all else: batches,
communication, ledger, history. Bookkeeping is also timed alone, with losses that are given and an optimizer that does
nothing: the rest of it is what the caches lose to the arithmetic in between.

    python tests/benchmarks/bench_fit_step.py [--compile]

With --calls, only the calls of Python functions in a step are counted, which a busy machine does not change.
"""

from __future__ import annotations

import argparse
import cProfile
import pstats
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from tabulate import tabulate
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.utils.data import TensorDataset

from vsim import Trainer
from vsim.core.group import Group
from vsim.models import MLP
from vsim.runs.fit import steps
from vsim.runs.tracked import TrackedRun
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy, SPARTAStrategy, Strategy

BATCH, STEPS, ROUNDS = 16, 100, 9


def data(num_nodes: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(num_nodes * 320, 64, generator=generator)
    return x, torch.randint(0, 10, (num_nodes * 320,), generator=generator)


def bare_seconds(num_nodes: int, x: torch.Tensor, y: torch.Tensor) -> float:
    """Seconds a step of the loop that one would write by hand."""
    model = MLP(seed=0)
    params, _ = stack_module_state([MLP(seed=0) for _ in range(num_nodes)])
    optimizer = torch.optim.AdamW(params.values(), lr=1e-3)
    gradients = vmap(grad_and_value(lambda p, batch: functional_call(model, p, (batch,))))
    losses = []
    order = torch.randperm(len(x)).view(num_nodes, -1)
    started = time.perf_counter()
    for step in range(STEPS):
        start = step * BATCH % (order.shape[1] - BATCH + 1)
        index = order[:, start : start + BATCH]
        grads, loss = gradients(params, (x[index], y[index]))
        for name, p in params.items():
            p.grad = grads[name].mean(0, keepdim=True).expand_as(p)
        optimizer.step()
        losses.append(loss.tolist())
    return (time.perf_counter() - started) / STEPS


def fit_seconds(num_nodes: int, x: torch.Tensor, y: torch.Tensor) -> float:
    """Seconds a step of `fit`, history and ledger included; the set-up, which is made once, is not."""
    marks: list[float] = []
    Trainer(MLP(seed=0), TensorDataset(x, y)).fit(
        strategy=SimpleReduceStrategy(lr=1e-3),
        num_nodes=num_nodes,
        max_steps=STEPS + 1,
        batch_size=BATCH,
        progress=False,
        train_loss_hook=lambda step, loss: marks.append(time.perf_counter()),
    )
    return (marks[-1] - marks[0]) / STEPS


def run_of(num_nodes: int, x: torch.Tensor, y: torch.Tensor, compile: bool, strategy: Any = None) -> Group[TrackedRun]:
    options = {"num_nodes": num_nodes, "batch_size": BATCH, "progress": False, "executor": "vmap", "compile": compile}
    strategy = strategy or Strategy(lr=1e-3)
    return Trainer(MLP(seed=0), TensorDataset(x, y)).prepare(strategy=strategy, max_steps=100_000, **options)


def calls(strategy: Any, x: torch.Tensor, y: torch.Tensor, compile: bool) -> float:
    """The calls of functions, Python's own included, in a step of 4 nodes."""
    taking = steps([run_of(4, x, y, compile, strategy)])
    for _ in range(STEPS):
        next(taking)
    with cProfile.Profile() as profile:
        for _ in range(6 * STEPS):
            next(taking)
    return float(pstats.Stats(profile).total_calls) / (6 * STEPS)


def parts(num_nodes: int, x: torch.Tensor, y: torch.Tensor, compile: bool) -> list[float]:
    """Microseconds of a step: all of it, losses and gradients, optimizer, bookkeeping, and bookkeeping alone."""
    group = run_of(num_nodes, x, y, compile)
    (run,) = group.runs
    spent = [0.0, 0.0]
    losses = torch.ones(num_nodes)

    def timed(call: Callable[..., Any], which: int) -> Callable[..., Any]:
        def wrapped(*given: Any) -> Any:
            started = time.perf_counter()
            result = call(*given)
            spent[which] += time.perf_counter() - started
            return result

        return wrapped

    group.losses_and_grads = timed(group.losses_and_grads, 0)  # type: ignore[method-assign]
    run.strategy.optim.step = timed(run.strategy.optim.step, 1)  # type: ignore[method-assign]
    taking, wholes = steps([group]), []
    divided = []
    for _ in range(ROUNDS):
        spent[:] = 0.0, 0.0
        started = time.perf_counter()
        for _ in range(STEPS):
            next(taking)
        wholes.append((time.perf_counter() - started) / STEPS)
        divided.append([seconds / STEPS for seconds in spent])
    group.losses_and_grads = lambda batch: losses  # type: ignore[method-assign]
    run.strategy.optim.step = lambda: None  # type: ignore[method-assign]
    alone = []
    for _ in range(ROUNDS):
        started = time.perf_counter()
        for _ in range(STEPS):
            next(taking)
        alone.append((time.perf_counter() - started) / STEPS)
    whole, gradients, optimizer = (statistics.median(v) for v in (wholes, *zip(*divided, strict=True)))
    return [1e6 * t for t in (whole, gradients, optimizer, whole - gradients - optimizer, statistics.median(alone))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--compile", action="store_true", help="divide a compiled step, too")
    parser.add_argument("--calls", action="store_true", help="count calls of functions in a step of K = 4, and no more")
    options = parser.parse_args()
    compiled = [False, True] if options.compile else [False]
    if options.calls:
        kinds = SimpleReduceStrategy(lr=1e-3), DiLoCoStrategy(H=10, lr=1e-3), SPARTAStrategy(lr=1e-3)
        counts = [[type(kind).__name__, *(calls(kind, *data(4), c) for c in compiled)] for kind in kinds]
        print(tabulate(counts, ["calls a step", "vmap", "compiled"][: 1 + len(compiled)], floatfmt=".0f"))
        return
    rows, divided = [], []
    for num_nodes in (4, 16, 64):
        x, y = data(num_nodes)
        pairs = [(fit_seconds(num_nodes, x, y), bare_seconds(num_nodes, x, y)) for _ in range(ROUNDS)]
        ratios = [fit / bare for fit, bare in pairs]
        rows.append(
            [
                num_nodes,
                statistics.median(fit for fit, _ in pairs) * 1e3,
                statistics.median(bare for _, bare in pairs) * 1e3,
                statistics.median(ratios),
                min(ratios),
                max(ratios),
            ]
        )
        divided += [["compiled" if c else "vmap", num_nodes, *parts(num_nodes, x, y, c)] for c in compiled]
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(tabulate(rows, ["K", "fit ms/step", "bare ms/step", "ratio (median)", "min", "max"], floatfmt=".2f"))
    header = ["step", "K", "µs", "losses, gradients", "optimizer", "bookkeeping", "bookkeeping alone"]
    print("\n" + tabulate(divided, header, floatfmt=".0f"))


if __name__ == "__main__":
    main()
