"""The training loop, once, for every backend."""

from __future__ import annotations

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map

from vsim.cluster.cluster import Cluster
from vsim.cluster.ledger import Event, Ledger
from vsim.cluster.randomness import global_states
from vsim.engine import Executor
from vsim.engine.allocator import keeping_freed_memory
from vsim.engine.memory import held_bytes
from vsim.records.history import History
from vsim.records.live import LiveRace
from vsim.strategy.base import Strategy
from vsim.training.evaluate import Evaluator, replica_spread
from vsim.training.interrupt import Interrupt, Interrupted

Hook = Callable[[int, float], Any]


@dataclass
class StepReport:
    """What became known at a step: the row of the history, the nodes' losses (K,), the events of the ledger.

    `executor`, `max_steps` and `minibatch_size` (None: the whole batch) are the run's.
    """

    row: Mapping[str, float]
    node_losses: Sequence[float] | None
    events: Sequence[Event]
    executor: str
    max_steps: int
    minibatch_size: int | None = None
    executor_reason: str = ""


class Log(Protocol):
    """Takes the reports of a run for its loggers, and hears of its end; `failure` is empty if it got there."""

    def __call__(self, report: StepReport) -> None: ...

    def finish(self, failure: str) -> None: ...


class Reporter(Protocol):
    """Takes the report of every step, step 0 included."""

    def __call__(self, report: StepReport) -> None: ...


class Saver(Protocol):
    """Saves a run while it trains."""

    def begin(self, run: Run) -> None: ...

    def after_step(self, run: Run) -> None: ...

    def on_interrupt(self, run: Run) -> None: ...


@dataclass
class Run:
    """A run that is set up: everything that the loop needs.

    Attributes:
        batches: stacked batches (R, B, …) on any device.
        ledger: where the cluster's collectives write.
        report: where every step's outcome goes.
        max_steps: steps to train.
        minibatch_size: examples a node whose gradients are computed at once; None for the whole batch.
        evaluator, val_interval: measure at the start, every `val_interval` steps and at the end; None: never.
        correlation_interval: steps between measurements of how far apart the replicas are; None: never.
        after_step: called when a step is done, before it is reported.
        checkpointer: saves the run; None: nobody does.
        interrupt: asks the run to stop after a step.
        done: completed steps. examples, tokens, seconds: that it has trained on, and for, before a resume as well.
        starts: whether its first row is still to be reported: not if it goes on with what was reported.
        history: the record of it, where this process keeps one.
        fingerprint: what the run is; see `vsim.checkpoint.fingerprint`.
        random_states: of the process's generators as training left them.
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
    checkpointer: Saver | None = None
    interrupt: Interrupt = field(default_factory=Interrupt)
    done: int = 0
    examples: int = 0
    tokens: int = 0
    seconds: float = 0.0
    history: History | None = None
    fingerprint: dict[str, Any] = field(default_factory=dict)
    random_states: dict[str, Any] | None = None
    starts: bool = True

    @property
    def is_alone(self) -> bool:
        """Whether all nodes are held in this process."""
        return len(self.cluster.replicas.nodes) == self.cluster.num_nodes


def train(run: Run) -> None:
    """Train to the last step, reporting every step as it is done.

    Raises:
        Interrupted: after a step, when any process of the run was asked to stop.
    """
    try:
        with run.interrupt:
            if run.checkpointer is not None:
                run.checkpointer.begin(run)
            for _ in steps(run):
                pass
            if run.is_alone and run.interrupt.requested:
                raise Interrupted
    finally:
        run.random_states = global_states(run.cluster.weights.device)
        run.batches = iter(())  # ends the worker processes of a DataLoader; what is kept of the run has no use for them


def steps(run: Run) -> Iterator[int]:
    """Train, and yield the number of every step when it is done and reported."""
    with keeping_freed_memory():
        yield from _steps(run)


def _steps(run: Run) -> Iterator[int]:
    cluster, ledger = run.cluster, run.ledger
    device = cluster.weights.device
    if run.starts:
        row: dict[str, float] = {"step": run.done, "examples": run.examples}
        row |= {"payload_bytes": 0, "wire_bytes": 0, "seconds": 0}
        row.update(_measurements(run, first=True))
        run.report(StepReport(row, None, [], run.executor.name, run.max_steps, run.minibatch_size))
    for step in range(run.done + 1, run.max_steps + 1):
        started = time.perf_counter()
        batch = tree_map(lambda t: t.to(device, non_blocking=True), next(run.batches))
        cluster.step = cluster.collectives.step = step
        known_events, lr = len(ledger), run.strategy.lr
        losses, stops = _of_all_nodes(run.executor.losses_and_grads(batch, run.minibatch_size), run)
        node_losses = _finite(losses, step)
        run.strategy.take_step()
        if run.after_step is not None:
            run.after_step(run)
        run.done = step
        run.seconds += time.perf_counter() - started
        run.examples += _examples_per_node(batch) * cluster.num_nodes
        run.tokens += tokens_in(batch) * cluster.num_nodes
        row = {
            "step": step,
            "examples": run.examples,
            "tokens": run.tokens or math.nan,
            "train_loss": sum(node_losses) / len(node_losses),
            "lr": lr,
            "payload_bytes": ledger.payload_bytes,
            "wire_bytes": ledger.wire_bytes,
            "seconds": run.seconds,
            "memory_bytes": held_bytes(device),
        }
        events = ledger[known_events:]
        row.update(_measurements(run))
        engine = run.executor
        report = StepReport(row, node_losses, events, engine.name, run.max_steps, run.minibatch_size, engine.reason)
        run.report(report)
        if step == run.max_steps:
            check_weights(run)
        if run.checkpointer is not None:
            run.checkpointer.after_step(run)
        if stops or (run.is_alone and run.interrupt.requested):
            if run.checkpointer is not None:
                run.checkpointer.on_interrupt(run)
            raise Interrupted
        yield step


class Recorder:
    """Keeps what is reported: history, logs, hooks, progress. What was done stays on an interrupt.

    Args:
        history: gets a row a step.
        progress: show a progress bar, or with "plot" a figure in the notebook; description: what it says.
        train_loss_hook: called as f(step, mean train loss) after every step; eval_loss_hook as f(step, global loss).
        log: gets every report, before the hooks.
    """

    def __init__(
        self,
        history: History,
        progress: bool | str = False,
        description: str = "",
        train_loss_hook: Hook | None = None,
        eval_loss_hook: Hook | None = None,
        log: Log | None = None,
    ) -> None:
        self.history = history
        self.progress = progress
        self.description = description
        self.train_loss_hook = train_loss_hook
        self.eval_loss_hook = eval_loss_hook
        self.log = log
        self.odd_validation: int | None = None  # the first step whose validation loss was not finite
        self.has_warned = False
        self.bar: Any = None
        self.live = LiveRace({description: [history]}, description) if progress == "plot" else None

    def __call__(self, report: StepReport) -> None:
        row = report.row
        self._note_validation(row)
        self.history.executor, self.history.executor_reason = report.executor, report.executor_reason
        self.history.minibatch_size = report.minibatch_size
        self.history.append(row, report.node_losses)
        if self.log is not None:
            self.log(report)
        step = int(row["step"])
        if self.train_loss_hook is not None and "train_loss" in row:
            self.train_loss_hook(step, row["train_loss"])
        if self.eval_loss_hook is not None and "global_loss" in row:
            self.eval_loss_hook(step, row["global_loss"])
        self._advance(step, report)

    def _note_validation(self, row: Mapping[str, float]) -> None:
        """Warn of a validation loss that is not finite, unless the training loss of the next step is not either."""
        self._warn_of_validation()
        losses = [row[name] for name in ("local_loss", "global_loss", "average_loss") if name in row]
        if not all(map(math.isfinite, losses)) and self.odd_validation is None:
            self.odd_validation = int(row["step"])

    def _warn_of_validation(self) -> None:
        if self.odd_validation is not None and not self.has_warned:
            self.has_warned = True
            warnings.warn(
                f"non-finite validation loss at step {self.odd_validation}, where the training loss is finite: look at "
                "the validation data, and at what the model does in evaluation mode",
                UserWarning,
                stacklevel=2,
            )

    def _advance(self, step: int, report: StepReport) -> None:
        if not self.progress:
            return
        if self.live is not None:
            self.live.update(report.max_steps)
            return
        if self.bar is None:
            from tqdm.auto import tqdm

            self.bar = tqdm(
                total=report.max_steps,
                initial=step - ("train_loss" in report.row),
                desc=self.description,
                unit="step",
                dynamic_ncols=True,
                disable=None,  # not into files and pipes
            )
        if "train_loss" in report.row:
            megabytes = report.row["payload_bytes"] / 1e6
            self.bar.set_postfix_str(f"loss {report.row['train_loss']:.3f}, {megabytes:.2f} MB sent", refresh=False)
            self.bar.update()

    def __enter__(self) -> Recorder:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, *_: object) -> None:
        if self.bar is not None:
            self.bar.close()
        if self.live is not None:
            self.live.close()
        if kind is None:
            self._warn_of_validation()
        if self.log is not None:
            self.log.finish("" if kind is None else f"{kind.__name__}: {error}")


def _measurements(run: Run, first: bool = False) -> dict[str, float]:
    """Return the validation and divergence columns that are due at this step; at the first and last row they are."""
    step, last = run.cluster.step, run.cluster.step == run.max_steps
    columns: dict[str, float] = {}
    if run.evaluator is not None and (first or last or (run.val_interval and step % run.val_interval == 0)):
        columns.update(run.evaluator(run.cluster, run.strategy))
    if run.correlation_interval is not None and step % run.correlation_interval == 0:
        with run.cluster.collectives.unbilled():
            weights = run.cluster.collectives.all_gather(run.cluster.weights)
        columns.update(replica_spread(weights))
    return columns


def _of_all_nodes(losses: Tensor, run: Run) -> tuple[list[float], bool]:
    """Return the losses of all nodes (K,) as numbers, and whether all stop after this step: one has been asked to."""
    if run.is_alone:
        return losses.tolist(), False
    asked = torch.full((len(losses),), run.interrupt.requested, dtype=torch.float64)
    both = torch.stack([losses.cpu().double(), asked], dim=1)  # (R, 2): one message
    with run.cluster.collectives.unbilled():
        values, requests = run.cluster.collectives.all_gather(both, label="losses").T.tolist()
    return values, any(requests)


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


def check_weights(run: Run) -> None:
    """Raise a FloatingPointError if weights are not finite: no loss of a later step is going to tell."""
    cluster = run.cluster
    if bool(cluster.mean_weights().isfinite().all()):
        return
    with cluster.collectives.unbilled():
        finite = cluster.collectives.all_gather(cluster.weights.isfinite().all(1).long()[:, None], label="finite")
    odd = [node for node, is_finite in enumerate(finite.flatten().tolist()) if not is_finite]
    where = (
        f"weights after step {run.done} on nodes {odd}" if odd else f"mean of the nodes' weights after step {run.done}"
    )
    raise FloatingPointError(f"non-finite {where}. A lower learning rate, warmup_steps or max_norm usually helps")


def tokens_in(batch: Any) -> int:
    """Return the number of token ids of one node in a stacked batch, 0 if it does not hold token ids.

    It does if its inputs (`batch["input_ids"]`, or the first tensor) are whole numbers of shape (K, B, T); all of them
    count, padding too.

    >>> tokens_in([torch.zeros(4, 8, 64, dtype=torch.long), torch.zeros(4, 8, 64, dtype=torch.long)])
    512
    >>> tokens_in([torch.zeros(4, 8, 1, 28, 28), torch.zeros(4, 8, dtype=torch.long)])
    0
    """
    named = isinstance(batch, Mapping) and isinstance(batch.get("input_ids"), Tensor)
    inputs = batch["input_ids"] if named else tree_leaves(batch)[0]
    whole = not (inputs.is_floating_point() or inputs.is_complex() or inputs.dtype is torch.bool)
    return inputs[0].numel() if whole and inputs.dim() == 3 else 0


def _examples_per_node(batch: Any) -> int:
    leaf = max(tree_leaves(batch), key=torch.Tensor.dim)
    return leaf.shape[1] if leaf.dim() > 1 else 1
