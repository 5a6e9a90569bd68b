"""Asynchronous strategies: workers train at their own speeds, and a server steps the outer weights as their results
arrive.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from vsim.arguments import whole_number
from vsim.cluster import Cluster
from vsim.cluster.optim import clip_by_node
from vsim.cluster.optimizers import JointOptimizers, evaluating, torch_optimizers
from vsim.core.algorithm import Algorithm
from vsim.core.fields import algorithm, state
from vsim.network.event_clock import ARRIVAL, RETURN, STEP, VirtualClock
from vsim.private_torch import mark_stepped


class OwnOptimizers(JointOptimizers):
    """One stacked optimizer for the row of each node."""

    placement = "rows"


@algorithm
class AsynchronousStrategy(Algorithm):
    """Base class of a server with outer weights φ, and workers that take local steps between two visits to the server.

        worker k   pulls φ, takes H_k local steps, pushes θ_k, and waits until `receive` lets it pull φ again
        server     at every arrival, in the order of virtual time: `receive`

    Events happen in the order of virtual time, and simultaneous events in the order of the nodes. The run reaches step
    s after s·K local steps of all workers together: as many examples as after s synchronous steps. Events before the
    end of the next local step belong to step s, too. All workers have the learning rate of the run's current step.

    Args:
        H: local steps from pulling to pushing, at least 1.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`. Every worker keeps its inner optimizer's
            state for the whole run.

    Attributes, besides `Algorithm`'s:
        clock: the workers in virtual time; set before `begin`.
        step_workers: a function, set by the training loop, that computes the local steps in `owed`.

    Payload: all weights, from a worker to the server and back, once per visit.
    """

    is_asynchronous = True
    derived: ClassVar[tuple[str, ...]] = ("step_workers",)

    H: int = 100

    clock: VirtualClock = state()
    outer_weights: Tensor = state()  # φ, shared (P,)
    taken: Tensor = state()  # the φ that each worker pulled last, stacked (K, P)
    messages: dict[int, tuple[Tensor, Any]] = state()  # messages in flight: number → (shared row, facts about the row)
    version: int = state()  # the number of outer steps of φ so far
    versions: list[int] = state()  # (K,) the version of φ that each worker pulled last
    waiting: list[int] = state()  # workers that wait at the server for a new φ
    owed: list[int] = state()  # for each worker, the local steps done in virtual time but not computed yet
    until: list[int] = state()  # for each worker, the local step that ends its phase (from pulling φ to pushing θ_k)
    seen: list[int] = state()  # examples that each worker has trained on, or tokens if batches hold token ids
    outer_optims: list[Optimizer] = state()  # the optimizers that step φ, if any
    losses: Tensor = state()  # the loss of each worker's last local step, stacked (K,); NaN before the first step
    step_workers: Callable[[Sequence[int]], None] = state()

    def __post_init__(self) -> None:
        self.H = whole_number("H", self.H)
        super().__post_init__()

    @torch.no_grad()
    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        cluster.collectives.ledger.clock = self.clock.facts
        nodes = range(cluster.num_nodes)
        self.keep_shared(outer_weights=cluster.weights[0].clone(), outer_optims=[], messages={}, version=0, waiting=[])
        self.keep_shared(clock=self.clock)
        self.keep_stacked(
            taken=cluster.weights.clone(),
            losses=torch.full((len(nodes),), torch.nan, dtype=torch.float64),
            versions=[0 for _ in nodes],
            owed=[0 for _ in nodes],
            until=[self.phase(node) for node in nodes],
            seen=[0 for _ in nodes],
        )
        for node in nodes:
            self.clock.step(node)

    def inner_optimizer(self) -> OwnOptimizers:
        replicas, exact = self.cluster.replicas, self.cluster.deterministic
        rows = [replicas.rows(node, node + 1) for node in range(self.cluster.num_nodes)]
        return OwnOptimizers([self.optim_spec.build_for(row, exact) for row in rows])

    def phase(self, node: int) -> int:
        """Return the number of local steps from a worker's next pull to its push. Default: H."""
        return self.H

    def receive(self, node: int, weights: Tensor, staleness: int) -> Sequence[int]:
        """Process a worker's weights at the server; return the waiting workers that pull φ now.

        Args:
            weights: θ_k, shared (P,), trained from φ = `taken[node]`. staleness: outer steps since φ was pulled.
        """
        raise NotImplementedError(f"{type(self).__name__} must define receive")

    def first_visit(self, node: int) -> int:
        """Return the number of local steps before a worker's first message, known after `begin`. Default: one phase."""
        return self.until[node]

    @property
    def first_step(self) -> int:
        """The step of the run in which the first message is sent, if local steps take mean seconds."""
        own, nodes = self.clock.compute.node_seconds, range(self.cluster.num_nodes)
        seconds = [float(own[node % len(own)]) for node in nodes]
        first = min(self.first_visit(node) * seconds[node] for node in nodes)
        taken = sum(math.floor(first / each * (1 + 1e-9)) for each in seconds)
        return math.ceil(taken / len(seconds))

    @torch.no_grad()
    def take_step(self) -> None:
        """Take the run's next step, which is K local steps of all workers together."""
        clock, self.cluster.collectives.position.moment = self.clock, "weights"
        end = clock.taken + self.cluster.num_nodes
        while clock.taken < end or not clock.is_between_steps:
            what, node, number = clock.next()
            if what == STEP:
                self.owed[node] += 1
                self.after_local_step(node)
            elif what == ARRIVAL:
                self.arrived(node, self.messages.pop(number))
            elif what == RETURN:
                self.returned(node, self.messages.pop(number))
            else:
                self.waited(number)
        self.catch_up()
        self.cluster.collectives.ledger.seconds.append((clock.now, clock.computed_seconds))
        for optimizer in torch_optimizers(self.optim):  # also optimizers of workers that have not stepped yet
            mark_stepped(optimizer)
        self.advance()

    def catch_up(self) -> None:
        """Compute all owed local steps in one batch: workers do not depend on each other between visits."""
        if any(self.owed):
            self.step_workers(self.owed)
            self.owed = [0] * len(self.owed)

    def step_worker(self, node: int) -> None:
        """Clip a worker's gradient and step its inner optimizer."""
        if self.max_norm is not None:
            clip_by_node(self.cluster.replicas.rows(node, node + 1), self.max_norm, self.cluster.deterministic)
        self.optim.optimizers[node].step()  # type: ignore[union-attr]

    def after_local_step(self, node: int) -> None:
        """Continue a worker's phase, or end it."""
        if self.clock.steps[node] < self.until[node]:
            self.clock.step(node)
        else:
            self.catch_up()
            self.push(node, self.cluster.weights[node])

    def push(self, node: int, row: Tensor, label: str = "outer gradient", facts: Any = None) -> None:
        """Send `row` (n,) from a worker to the server, with `facts` about the row."""
        collectives = self.cluster.collectives
        (sent,) = collectives.push(row.expand(collectives.num_nodes, -1), among=[node], label=label)
        self.messages[self.clock.send(node, sent.nbytes, to_server=True)] = sent, facts

    def pull(self, node: int, row: Tensor, label: str = "outer weights", facts: Any = None) -> None:
        """Send `row` (n,) from the server to a worker, with `facts` about the row."""
        sent = self.cluster.collectives.pull(row, among=[node], label=label)
        self.messages[self.clock.send(node, sent.nbytes, to_server=False)] = sent, facts

    def arrived(self, node: int, message: tuple[Tensor, Any]) -> None:
        """Process a worker's message at the server."""
        self.waiting.append(node)
        ready = self.receive(node, message[0], self.version - self.versions[node])
        # A worker that does not wait is training: if it pulled φ now, two of its phases would run at once.
        if not isinstance(ready, Sequence) or len({*ready}) < len(ready) or not {*self.waiting}.issuperset(ready):
            raise ValueError(
                f"receive must return a list of some of the workers that wait, {sorted(self.waiting)}, each once; "
                f"{type(self).__name__}'s returned {ready!r}"
            )
        self.waiting = [one for one in self.waiting if one not in ready]
        for one in ready:
            self.pull(one, self.outer_weights, facts=self.version)

    def returned(self, node: int, message: tuple[Tensor, Any]) -> None:
        """Give a worker the φ that it has pulled, and begin its next phase."""
        weights, self.versions[node] = message
        self.taken[node] = weights
        self.cluster.weights[node] = weights
        self.until[node] += self.phase(node)
        self.clock.step(node)

    def waited(self, number: int) -> None:
        """Called when a timer of the server ends. Default: no-op."""

    def columns(self) -> Mapping[str, float]:
        return {"clock_seconds": self.clock.now, "compute_seconds": self.clock.computed_seconds}

    @contextmanager
    def evaluation(self) -> Iterator[None]:
        with super().evaluation(), evaluating(JointOptimizers(self.outer_optims), self.outer_weights):
            yield

    def model_weights(self) -> Tensor:
        return self.outer_weights
