"""The training loop, once, for every backend."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from vsim.cluster import Cluster
from vsim.evaluate import Evaluator, replica_spread
from vsim.executor import Executor
from vsim.history import History
from vsim.ledger import Event, Ledger
from vsim.strategy.base import Strategy

Hook = Callable[[int, float], Any]


@dataclass
class StepReport:
    """What became known at a step: the row of the history, the nodes' losses (K,), the events of the ledger."""

    row: Mapping[str, float]
    node_losses: Sequence[float] | None
    events: Sequence[Event]
    executor: str
    max_steps: int


class Reporter(Protocol):
    """Takes the report of every step, step 0 included."""

    def __call__(self, report: StepReport) -> None: ...


@dataclass
class Run:
    """A run that is set up: everything that the loop needs.

    Attributes:
        batches: stacked batches (R, B, …) on any device.
        ledger: where the cluster's collectives write.
        report: where every step's outcome goes.
        max_steps: steps to train.
        minibatch_size: examples a node whose gradients are computed at once; None for the whole batch.
        evaluator, val_interval: measure at step 0, every `val_interval` steps and at the end; None: never.
        correlation_interval: steps between measurements of how far apart the replicas are; None: never.
        after_step: called when a step is done, before it is reported.
    """

    cluster: Cluster
    strategy: Strategy
    executor: Executor
    batches: Iterator[Any]
    ledger: Ledger
    report: Reporter
    max_steps: int
    minibatch_size: int | None = None
    evaluator: Evaluator | None = None
    val_interval: int | None = None
    correlation_interval: int | None = None
    after_step: Callable[[Run], None] | None = None


def train(run: Run) -> None:
    """Train to the last step, reporting every step as it is done."""
    cluster, ledger = run.cluster, run.ledger
    device = cluster.weights.device
    examples, seconds = 0, 0.0
    row: dict[str, float] = {"step": 0, "examples": 0, "payload_bytes": 0, "wire_bytes": 0, "seconds": 0}
    run.report(StepReport({**row, **_measurements(run)}, None, [], run.executor.name, run.max_steps))
    for step in range(1, run.max_steps + 1):
        started = time.perf_counter()
        batch = tree_map(lambda t: t.to(device, non_blocking=True), next(run.batches))
        cluster.step = cluster.collectives.step = step
        known_events, lr = len(ledger), run.strategy.lr
        node_losses = _finite(_of_all_nodes(run.executor.losses_and_grads(batch, run.minibatch_size), cluster), step)
        run.strategy.take_step()
        if run.after_step is not None:
            run.after_step(run)
        seconds += time.perf_counter() - started
        examples += _examples_per_node(batch) * cluster.num_nodes
        row = {
            "step": step,
            "examples": examples,
            "train_loss": sum(node_losses) / len(node_losses),
            "lr": lr,
            "payload_bytes": ledger.payload_bytes,
            "wire_bytes": ledger.wire_bytes,
            "seconds": seconds,
        }
        events = ledger[known_events:]
        run.report(StepReport({**row, **_measurements(run)}, node_losses, events, run.executor.name, run.max_steps))


class Recorder:
    """Keeps what is reported: history, hooks, progress bar. What was done stays on an interrupt.

    Args:
        history: gets a row a step.
        progress: show a progress bar; description: what it says.
        train_loss_hook: called as f(step, mean train loss) after every step; eval_loss_hook as f(step, global loss).
    """

    def __init__(
        self,
        history: History,
        progress: bool = False,
        description: str = "",
        train_loss_hook: Hook | None = None,
        eval_loss_hook: Hook | None = None,
    ) -> None:
        self.history = history
        self.progress = progress
        self.description = description
        self.train_loss_hook = train_loss_hook
        self.eval_loss_hook = eval_loss_hook
        self.bar: Any = None

    def __call__(self, report: StepReport) -> None:
        row = report.row
        self.history.executor = report.executor
        self.history.append(row, report.node_losses)
        step = int(row["step"])
        if self.train_loss_hook is not None and step > 0:
            self.train_loss_hook(step, row["train_loss"])
        if self.eval_loss_hook is not None and "global_loss" in row:
            self.eval_loss_hook(step, row["global_loss"])
        self._advance(step, report)

    def _advance(self, step: int, report: StepReport) -> None:
        if not self.progress:
            return
        if self.bar is None:
            from tqdm.auto import tqdm

            self.bar = tqdm(
                total=report.max_steps,
                desc=self.description,
                unit="step",
                dynamic_ncols=True,
                disable=None,  # not into files and pipes
            )
        if step > 0:
            megabytes = report.row["payload_bytes"] / 1e6
            self.bar.set_postfix_str(f"loss {report.row['train_loss']:.3f}, {megabytes:.2f} MB sent", refresh=False)
            self.bar.update()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()


def _measurements(run: Run) -> dict[str, float]:
    """Return the validation and divergence columns that are due at this step."""
    step, last = run.cluster.step, run.cluster.step == run.max_steps
    columns: dict[str, float] = {}
    if run.evaluator is not None and (step == 0 or last or (run.val_interval and step % run.val_interval == 0)):
        columns.update(run.evaluator(run.cluster, run.strategy))
    if run.correlation_interval is not None and step % run.correlation_interval == 0:
        with run.cluster.collectives.unbilled():
            weights = run.cluster.collectives.all_gather(run.cluster.weights)
        columns.update(replica_spread(weights))
    return columns


def _of_all_nodes(losses: Tensor, cluster: Cluster) -> list[float]:
    """Return the losses of all nodes (K,) as numbers."""
    with cluster.collectives.unbilled():
        values: list[float] = cluster.collectives.all_gather(losses, label="losses").tolist()
    return values


def _finite(losses: list[float], step: int) -> list[float]:
    """Return the losses; raise if one is not finite."""
    odd = {node: value for node, value in enumerate(losses) if value - value != 0}
    if odd:
        given = ", ".join(f"node {node}: {value}" for node, value in list(odd.items())[:8])
        raise FloatingPointError(
            f"non-finite loss at step {step} on nodes {list(odd)} ({given}); the history up to step {step - 1} is "
            "kept. A lower learning rate, warmup_steps or max_norm usually helps"
        )
    return losses


def _examples_per_node(batch: Any) -> int:
    leaf = max(tree_leaves(batch), key=torch.Tensor.dim)
    return leaf.shape[1] if leaf.dim() > 1 else 1
