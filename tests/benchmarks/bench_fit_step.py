"""What a step of `fit` costs beside a bare hand-written vmap loop that does the same training.

MLP 64-128-128-10, batch 16 a node, AllReduce, AdamW, history on. The two alternate in one run, so that the ratio
holds where the machine's speed drifts.

    python tests/benchmarks/bench_fit_step.py
"""

from __future__ import annotations

import statistics
import time

import torch
from tabulate import tabulate
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.utils.data import TensorDataset

from vsim import Trainer
from vsim.models import MLP
from vsim.strategy import SimpleReduceStrategy

BATCH, STEPS, ROUNDS = 16, 100, 9


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


def main() -> None:
    rows = []
    for num_nodes in (4, 16, 64):
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(num_nodes * 320, 64, generator=generator)
        y = torch.randint(0, 10, (num_nodes * 320,), generator=generator)
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
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads")
    print(tabulate(rows, ["K", "fit ms/step", "bare ms/step", "ratio (median)", "min", "max"], floatfmt=".2f"))


if __name__ == "__main__":
    main()
