"""Decoupled DiLoCo: learners that never wait, and a syncer for each fragment that merges arrived updates."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import torch
from torch import Tensor

from vsim.algorithms.asynchronous import AsynchronousStrategy
from vsim.arguments import one_of, real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec
from vsim.cluster.reductions import shares_of
from vsim.core.algorithm import Optim
from vsim.core.average import COUNTS, Averaging, rda
from vsim.core.fields import algorithm, state
from vsim.core.fragments import PATTERNS, Fragments, checked_fragments, first_step, fragments_of
from vsim.core.outer import outer_optimizer, outer_spec


@algorithm
class DecoupledDiLoCoStrategy(AsynchronousStrategy):
    """AsyncDiLoCo in fragments, merged once a quorum has arrived and a grace period has passed: Decoupled DiLoCo
    [Douillard et al. 2026, arXiv:2604.21428].

        learner k      after every H of its steps, for each fragment:  send θ_k, and continue training
        syncer of a    once `quorum` learners have arrived, and then a share γ of the slack has passed:
        fragment           φ ← outer optimizer(φ, average of φ_k − θ_k weighted by tokens²/steps);  answer with φ
        learner k      τ steps after sending, or when the answer arrives if that is later:  θ_k ← φ

    The slack is the time from the quorum until the first of the arrived learners needs its answer. The syncer waits for
    a share γ of the slack; a learner that arrives later joins the next round. A learner that still awaits a fragment's
    answer does not send the fragment again. With τ > 0, no learner waits.

    Args:
        H: steps of a learner between two syncs of one fragment, at least the number of fragments. The paper uses 24.
        fragments, pattern: see `StreamingDiLoCoStrategy`. The paper has 24 fragments.
        delay: τ, 0 ≤ τ < H. With 0 a learner waits for its answers.
        quorum: the number of learners that a merge needs, from 1 to K.
        grace: γ in [0, 1].
        outer_optim, outer_lr: see `DiLoCoStrategy`.
        average: merges the φ_k − θ_k; see `vsim.strategy.average`. The paper's rda("tokens") keeps lengths where
            directions differ, and weights learners by tokens²/steps since they last sent the fragment (examples² if
            batches hold no token ids). Messages arrive one by one and cannot be compressed.
        inner_optim, lr, …: the options of all strategies; see `Algorithm`.

    Payload: each fragment, to the syncer and back, after every H steps of a learner.

    Deviation from the paper: the slack follows from the run's `compute` and `network`; there is no failure detector.
    """

    family = "asynchronous"
    derived: ClassVar[tuple[str, ...]] = ("outer_gradient", "pieces")
    resolved = ("outer_optim", "outer_lr")

    H: int = 24
    fragments: Fragments = None
    pattern: str = "strided"
    delay: int = 2
    quorum: int = 1
    grace: float = 1.0
    outer_optim: Optim = None
    outer_lr: float | None = None
    average: Averaging = Averaging(rda("tokens"), by=COUNTS, arrivals=True)

    outer_optim_spec: OptimSpec = state()

    outer_gradient: Tensor = state()  # shared (P,)
    # per fragment: node, θ_k (n,), weight, answer's deadline
    came: list[list[tuple[int, Tensor, float, float]]] = state()
    closing: list[float] = state()  # per fragment: the time at which its current round ends
    sent: list[list[list[int]]] = state()  # per learner and fragment: the learner's steps and tokens at the last send
    awaited: list[list[bool]] = state()  # per learner and fragment: whether the learner awaits an answer
    answers: list[dict[int, Tensor]] = state()  # per learner, answers to apply later: fragment → φ (n,)
    timers: dict[int, int] = state()  # number of a timer → fragment

    def __post_init__(self) -> None:
        super().__post_init__()
        self.outer_optim_spec = outer_spec(self.outer_optim, self.outer_lr)
        self.fragments = checked_fragments(self.fragments, self.H)
        one_of("pattern", self.pattern, PATTERNS)
        self.delay = whole_number("delay", self.delay, at_least=0)
        self.quorum = whole_number("quorum", self.quorum)
        self.grace = real_number("grace", self.grace, at_least=0, at_most=1)
        if self.delay >= self.H:
            raise ValueError(
                f"delay must be below H, after which a fragment is sent again; got {self.delay} for H={self.H}"
            )

    def begin(self, cluster: Cluster) -> None:
        super().begin(cluster)
        if self.quorum > cluster.num_nodes:
            raise ValueError(f"quorum must be at most the number of nodes, {cluster.num_nodes}, got {self.quorum}")
        self.pieces = pieces = fragments_of(cluster.replicas.layout, self.fragments, self.pattern)
        if len(pieces) > self.H:
            raise ValueError(f"H must be at least the number of fragments, {len(pieces)}, got {self.H}")
        phi, spec = self.outer_weights, self.outer_optim_spec
        self.outer_gradient = torch.zeros_like(phi)
        optims = [outer_optimizer(spec, cluster, phi, self.outer_gradient, part) for part in pieces]
        nodes = range(cluster.num_nodes)
        self.keep_shared(outer_optims=optims, came=[[] for _ in pieces], closing=[math.inf for _ in pieces], timers={})
        self.keep_stacked(
            sent=[[[0, 0] for _ in pieces] for _ in nodes],
            awaited=[[False for _ in pieces] for _ in nodes],
            answers=[{} for _ in nodes],
        )

    def first_visit(self, node: int) -> int:
        return first_step(0, self.H, len(self.pieces))

    def after_local_step(self, node: int) -> None:
        by = self.average.rule.by
        own, awaited, sent, answers = self.clock.steps[node], self.awaited[node], self.sent[node], self.answers[node]
        due = [i for i in answers if own >= sent[i][0] + self.delay]
        first = [first_step(i, self.H, len(self.pieces)) for i in range(len(self.pieces))]
        sending = [i for i, n in enumerate(first) if (own - n) % self.H == 0 and (i in due or not awaited[i])]
        if due or sending:
            self.catch_up()
        for i in due:
            self._take(node, i, answers.pop(i))
        for i in sending:
            steps, tokens = own - sent[i][0], self.seen[node] - sent[i][1]
            weight = {"tokens": tokens**2 / steps, "examples": float(self.cluster.shard_sizes[node])}.get(by, 1.0)
            label = "outer gradient" if len(self.pieces) == 1 else f"outer gradient of fragment {i}"
            row, wanted = self.pieces[i].of(self.cluster.weights[node]), self.delay * self.clock.step_seconds(node)
            self.push(node, row, label, (i, weight, self.clock.now + wanted))
            awaited[i], sent[i] = True, [own, self.seen[node]]
        if self.delay or not sending:  # with τ = 0 the learner waits for the answers
            self.clock.step(node)

    def _take(self, node: int, i: int, phi: Tensor) -> None:
        """Set fragment i of a learner's weights to φ (n,)."""
        part = self.pieces[i]
        for matrix in (self.cluster.weights, self.taken):
            for view, piece in zip(part.views(matrix[node]), part.cut(phi), strict=True):
                view.copy_(piece)
        self.awaited[node][i] = False

    def arrived(self, node: int, message: tuple[Tensor, Any]) -> None:
        weights, (i, weight, wanted) = message
        came = self.came[i]
        came.append((node, weights, weight, wanted - self.clock.message_seconds(node, weights.nbytes, to_server=False)))
        if len(came) == self.cluster.num_nodes:
            self._merge(i)
        elif len(came) >= self.quorum:
            slack = self.grace * max(0.0, min(wanted for *_, wanted in came) - self.clock.now)
            if self.clock.now + slack < self.closing[i]:
                self._forget_timers(i)
                self.closing[i] = self.clock.now + slack
                self.timers[self.clock.wait(slack)] = i

    def waited(self, number: int) -> None:
        self._merge(self.timers[number])

    def _merge(self, i: int) -> None:
        """Step φ on fragment i with the arrived updates, in node order, and send φ to the learners that sent them."""
        nodes, weights, share, _ = zip(*sorted(self.came[i], key=lambda one: one[0]), strict=True)
        self.came[i], self.closing[i] = [], math.inf
        self._forget_timers(i)
        part = self.pieces[i]
        rows = torch.stack([part.of(self.taken[node]) - row for node, row in zip(nodes, weights, strict=True)])
        shares = (
            None if self.average.rule.by == "nodes" else shares_of(torch.tensor(share), range(len(nodes)), len(nodes))
        )
        merged = self.average.of_arrivals(rows, part.alone(self.cluster).replicas, shares)
        for gradient, piece in zip(part.views(self.outer_gradient), part.cut(merged), strict=True):
            gradient.copy_(piece)
        self.outer_optims[i].step()
        for node in nodes:
            self.pull(node, part.of(self.outer_weights), "outer weights", i)

    def _forget_timers(self, i: int) -> None:
        for number in [number for number, other in self.timers.items() if other == i]:
            del self.timers[number]
            self.clock.cancel(number)

    def returned(self, node: int, message: tuple[Tensor, Any]) -> None:
        phi, i = message
        if self.delay:
            self.answers[node][i] = phi  # arrives during a local step, and is applied after the step
            return
        self._take(node, i, phi)
        if not any(self.awaited[node]):
            self.clock.step(node)
