"""The training loop, once, for every backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from vsim.cluster import Cluster
from vsim.evaluate import Evaluator, replica_spread
from vsim.executor import Executor
from vsim.history import History
from vsim.ledger import Ledger
from vsim.strategy.base import Strategy

Hook = Callable[[int, float], Any]


@dataclass
class Run:
    """A run that is set up: everything that the loop needs.

    Attributes:
        batches: stacked batches (K, B, …) on any device.
        max_steps: steps to train.
        minibatch_size: examples a node whose gradients are computed at once; None for the whole batch.
        evaluator, val_interval: measure at step 0, every `val_interval` steps and at the end; None: never.
        correlation_interval: steps between measurements of how far apart the replicas are; None: never.
        train_loss_hook: called as f(step, mean train loss) after every step; eval_loss_hook as f(step, global loss).
        progress: show a progress bar.
    """

    cluster: Cluster
    strategy: Strategy
    executor: Executor
    batches: Iterator[Any]
    history: History
    ledger: Ledger
    max_steps: int
    minibatch_size: int | None = None
    evaluator: Evaluator | None = None
    val_interval: int | None = None
    correlation_interval: int | None = None
    train_loss_hook: Hook | None = None
    eval_loss_hook: Hook | None = None
    progress: bool = True
    description: str = ""


def train(run: Run) -> None:
    """Train to the last step, filling history and ledger as it goes: what was done stays on an interrupt."""
    cluster, history = run.cluster, run.history
    device = cluster.weights.device
    history.append({"step": 0, "examples": 0, "payload_bytes": 0, "wire_bytes": 0, "seconds": 0})
    _measure(run)
    examples, seconds = 0, 0.0
    with _progress_bar(run) as bar:
        for step in range(1, run.max_steps + 1):
            started = time.perf_counter()
            batch = tree_map(lambda t: t.to(device, non_blocking=True), next(run.batches))
            cluster.step = cluster.collectives.step = step
            lr = run.strategy.lr
            losses = run.executor.losses_and_grads(batch, run.minibatch_size)
            node_losses = _finite(losses, step, cluster)
            run.strategy.take_step()
            seconds += time.perf_counter() - started
            examples += _num_examples(batch)
            train_loss = sum(node_losses) / len(node_losses)
            history.append(
                {
                    "step": step,
                    "examples": examples,
                    "train_loss": train_loss,
                    "lr": lr,
                    "payload_bytes": run.ledger.payload_bytes,
                    "wire_bytes": run.ledger.wire_bytes,
                    "seconds": seconds,
                },
                node_losses,
            )
            if run.train_loss_hook is not None:
                run.train_loss_hook(step, train_loss)
            _measure(run)
            bar.advance(train_loss)
    history.executor = run.executor.name


def _measure(run: Run) -> None:
    """Evaluate what is due at this step, into the last row of the history."""
    step, last = run.cluster.step, run.cluster.step == run.max_steps
    if run.evaluator is not None and (step == 0 or last or (run.val_interval and step % run.val_interval == 0)):
        columns = run.evaluator(run.cluster, run.strategy)
        run.history.update_last(columns)
        if run.eval_loss_hook is not None:
            run.eval_loss_hook(step, columns["global_loss"])
    if run.correlation_interval is not None and step % run.correlation_interval == 0:
        with run.cluster.collectives.unbilled():
            weights = run.cluster.collectives.all_gather(run.cluster.weights)
        run.history.update_last(replica_spread(weights))


def _finite(losses: Tensor, step: int, cluster: Cluster) -> list[float]:
    """Return the losses (K,) as numbers; raise if one is not finite."""
    values: list[float] = losses.tolist()
    if not torch.isfinite(losses).all():
        odd = {node: value for node, value in enumerate(values) if value - value != 0}
        given = ", ".join(f"node {node}: {value}" for node, value in list(odd.items())[:8])
        raise FloatingPointError(
            f"non-finite loss at step {step} on nodes {list(odd)} ({given}); the history up to step {step - 1} is "
            "kept. A lower learning rate, warmup_steps or max_norm usually helps"
        )
    return values


def _num_examples(batch: Any) -> int:
    leaf = max(tree_leaves(batch), key=torch.Tensor.dim)
    return leaf.shape[0] * (leaf.shape[1] if leaf.dim() > 1 else 1)


class _progress_bar:
    """A tqdm bar with the loss and the bytes so far, or nothing at all."""

    def __init__(self, run: Run) -> None:
        self.run = run

    def __enter__(self) -> _progress_bar:
        self.bar = None
        if self.run.progress:
            from tqdm.auto import tqdm

            self.bar = tqdm(
                total=self.run.max_steps,
                desc=self.run.description,
                unit="step",
                dynamic_ncols=True,
                disable=None,  # not into files and pipes
            )
        return self

    def advance(self, train_loss: float) -> None:
        if self.bar is not None:
            megabytes = self.run.ledger.payload_bytes / 1e6
            self.bar.set_postfix_str(f"loss {train_loss:.3f}, {megabytes:.2f} MB sent", refresh=False)
            self.bar.update()

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
