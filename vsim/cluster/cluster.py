"""The cluster that a strategy works on: the nodes of this process, their collectives, and their shared decisions."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler
from vsim_kernels import compiled

from vsim.cluster.collectives import Collectives
from vsim.cluster.optimizers import StackedOptimizer
from vsim.cluster.plan import ComputeSeconds, Plan
from vsim.cluster.replicas import Replicas, Views
from vsim.cluster.schedule import rate_after

Kernel = TypeVar("Kernel", bound=Callable[..., Any])


@dataclass
class Cluster:
    """K nodes in the middle of a run.

    Attributes:
        replicas: the weights, gradients and buffers of the nodes that this process holds (all K in the simulator).
        collectives: the only way for nodes to communicate.
        generator: draws the random decisions that all nodes share (masks, islands, cohorts). It is on the CPU, so that
            the decisions do not depend on the device.
        shard_sizes: (K,) the number of examples that each node has.
        max_steps: the number of steps of the whole run.
        deterministic: whether results must be bitwise equal to the multi-process run.
        compile: whether to use compiled kernels where they are faster.
        plan: which nodes take part in which steps; None: all nodes in all steps.
        seconds: a function for the nodes' compute seconds, if a schedule of syncs needs them.
        gradient_at: computes gradients of the nodes held here at given weights; None outside of a run, see `gradient`.
        losses: the losses of the nodes (K,) on the current step's batches, before the step; empty outside of a run. A
            strategy that uses other nodes' losses sends them, so that they are billed.
        frozen: parameter name → whether it is frozen now; lists every parameter that was ever frozen.
        optim, schedulers: the inner optimizer, which the strategy steps, and its learning-rate schedulers, which
            `complete_step` advances; known once the strategy has built them.
    """

    replicas: Replicas
    collectives: Collectives
    generator: torch.Generator
    shard_sizes: Tensor
    max_steps: int
    deterministic: bool = False
    compile: bool = False
    plan: Plan | None = None
    seconds: ComputeSeconds | None = None
    gradient_at: Callable[[Tensor, Any], Tensor] | None = None
    losses: Sequence[float] = ()
    frozen: dict[str, bool] = field(default_factory=dict)
    optim: StackedOptimizer = field(init=False)
    schedulers: Sequence[LRScheduler] = field(default=(), init=False)

    @property
    def step(self) -> int:
        """The number of the current step, from 1; between two steps, the number of completed steps."""
        return self.collectives.position.step

    @property
    def completed(self) -> int:
        """t, the number of completed optimizer steps."""
        position = self.collectives.position
        return position.step - (position.moment != "end")

    @property
    def lr(self) -> float:
        """The inner learning rate of the current step or, between two steps, of the next step."""
        return float(self.optim.param_groups[0]["lr"])

    @property
    def next_lr(self) -> float:
        """The inner learning rate of the next step: within a step, of the step after the current one."""
        if self.completed == self.step or not self.schedulers:
            return self.lr
        return rate_after(self.schedulers[0])

    @property
    def num_nodes(self) -> int:
        """K, the number of nodes that take part now."""
        return self.collectives.num_nodes

    @property
    def active(self) -> tuple[int, ...]:
        """(K,) the ledger's numbers of the nodes or clients that take part now."""
        return tuple(self.collectives.active)

    @property
    def population(self) -> int:
        """The number of nodes, or of clients, that may take part."""
        return self.collectives.ledger.num_nodes

    @property
    def clock(self) -> tuple[int, ...]:
        """(K,) the number of steps that each node has completed."""
        if self.plan is None:
            return (self.completed,) * self.num_nodes
        step = max(1, self.completed)
        here, before = self.plan.segment(step), self.plan.clock(step)
        done = self.completed - here.first + 1
        steps = here.steps or (done,) * self.num_nodes
        return tuple(int(before[node]) + min(done, own) for node, own in zip(self.active, steps, strict=True))

    @property
    def resting_nodes(self) -> list[int]:
        """The places in `active` of the clients that rest in this step, having completed their epochs of the round."""
        segment = None if self.plan is None else self.plan.segment(max(1, self.step))
        if segment is None or not segment.steps:
            return []
        return [node for node, steps in enumerate(segment.steps) if steps <= self.step - segment.first]

    @property
    def resting(self) -> list[int]:
        """The row numbers of the resting nodes that are held here."""
        held = self.replicas.nodes
        return [node - held.start for node in self.resting_nodes if node in held]

    @property
    def weights(self) -> Tensor:
        """The weights, stacked (R, P): a row for each node held here.

        Each row is contiguous; gaps between rows are possible.
        """
        return self.replicas.weights

    @property
    def grads(self) -> Tensor:
        """The gradients, stacked (R, P)."""
        return self.replicas.grads

    def complete_step(self) -> None:
        """Advance the learning-rate schedules, and count the step. Called by whoever trains, at the end of a step."""
        for scheduler in self.schedulers:
            scheduler.step()
        self.collectives.position.begin(self.step, "end")

    def gradient(self, at: Tensor, batch: Any = None) -> Tensor:
        """Return every node's gradient (R, P) at its weights in `at` (R, P), as in a second backward pass.

        The model draws the random numbers (dropout masks) that it has drawn for the gradients of the current step. The
        nodes' weights, gradients, buffers and random streams stay unchanged. Frozen parameters have a gradient of zero.

        Args:
            batch: stacked batch (R, B, …) of the nodes held here; default: the batch of the current step.

        Raises:
            ValueError: `at` has another shape, or no step is being computed (outside of a run, or on a virtual clock);
                or, in a comparison with compile=True, a `batch` is given for a model that draws random numbers.
        """
        if at.shape != self.weights.shape:
            raise ValueError(f"gradient(at=…) takes stacked weights {[*self.weights.shape]}, got {[*at.shape]}")
        if at.is_meta:
            return torch.zeros_like(at)
        if self.gradient_at is None:
            raise ValueError(
                "gradient(…) needs the step of a run, which asynchronous strategies and bare clusters lack"
            )
        grads = self.gradient_at(at, batch)
        for own in (c for c in self.replicas.layout if self.frozen.get(c.name)):
            grads[:, own.start : own.stop] = 0
        return grads

    def kernel(self, function: Kernel) -> Kernel:
        """Return the compiled form of a kernel if this run compiles, else the kernel itself."""
        return compiled(function) if self.compile else function

    def mean_weights(self) -> Tensor:
        """Return the mean replica, shared (P,), unbilled. A weight that is equal on all nodes is not rounded."""
        weights, reduce = self.replicas.weights, self.collectives.all_reduce
        with self.collectives.unbilled():
            low, high = reduce(weights, "min"), reduce(weights, "max")
            return low if torch.equal(low, high) else torch.where(low == high, low, reduce(weights, "mean"))

    def mean_buffers(self) -> Views:
        """Return name → shared buffer, for evaluation: the mean over nodes if floating-point, else node 0's buffer."""
        with self.collectives.unbilled():
            return {
                name: self.collectives.all_reduce(b, "mean")
                if b.is_floating_point() or b.is_complex()
                else self.collectives.broadcast(b)
                for name, b in self.replicas.buffers.items()
            }
