"""Decoupled DiLoCo: learners that never wait, and a syncer for each fragment that merges what has come."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from typing_extensions import Unpack

from vsim.arguments import one_of, real_number, whole_number
from vsim.cluster import Cluster
from vsim.cluster.groups import shares_of
from vsim.cluster.optim import resolve_optim
from vsim.strategy.asynchronous import AsynchronousStrategy
from vsim.strategy.base import Optim, StrategyOptions
from vsim.strategy.fragments import PATTERNS, Fragments, fragments_of
from vsim.strategy.mergers import MergerLike, merged_rows, resolve_merger
from vsim.strategy.streaming import DEFAULT_OUTER, outer_optimizers


class DecoupledDiLoCoStrategy(AsynchronousStrategy):
    """Decoupled DiLoCo [Douillard et al. 2026, arXiv:2604.21428].

        learner k      after every H of its steps, fragment by fragment:  send θ_k; train on
        syncer of a    once `quorum` learners have come, and others have had a share γ of the slack:
        fragment           φ ← outer optimizer(φ, merger of φ_k − θ_k, weighted by tokens²/steps);  send it to them
        learner k      τ of its steps after sending, or when the answer is there:  θ_k ← φ

    The slack is the time until the first of those that have come wants its answer. A learner that comes too late is in
    the next round; a fragment whose answer a learner still awaits is not sent again. Nobody waits for anybody.

    Args:
        H: steps of a learner between two syncs of one fragment, at least the number of fragments. The paper uses 24.
        fragments: as of `StreamingDiLoCoStrategy`; None: one for each layer. The paper has 24.
        pattern: likewise.
        delay: τ, 0 ≤ τ < H.
        quorum: learners that a merge needs, from 1 to K.
        grace: γ in [0, 1].
        outer_optim, outer_lr: as of `DiLoCoStrategy`.
        merger: as of `DiLoCoStrategy`; "rda", the paper's, keeps lengths where directions differ.
        weighting: "tokens": tokens²/steps since the fragment was last sent (examples², where batches hold no token
            ids); "nodes": all alike.
        options: those of every strategy; see `Strategy`.

    Payload: each fragment, up and down, of a learner after every H of its steps.

    Deviation from the paper: the slack follows from the run's `compute` and `network`; there is no failure detector.
    """

    def __init__(
        self,
        H: int = 24,
        *,
        fragments: Fragments = None,
        pattern: str = "strided",
        delay: int = 2,
        quorum: int = 1,
        grace: float = 1.0,
        outer_optim: Optim = None,
        outer_lr: float | None = None,
        merger: MergerLike = "rda",
        weighting: str = "tokens",
        **options: Unpack[StrategyOptions],
    ) -> None:
        self.outer_optim_spec = resolve_optim(
            "DecoupledDiLoCo", {"outer_optim": outer_optim}, {"outer_lr": outer_lr}, default=DEFAULT_OUTER
        )
        self.fragments = fragments
        self.pattern = one_of("pattern", pattern, PATTERNS)
        self.delay = whole_number("delay", delay, at_least=0)
        self.quorum = whole_number("quorum", quorum)
        self.grace = real_number("grace", grace, at_least=0, at_most=1)
        self.weighting = one_of("weighting", weighting, ("tokens", "nodes"))
        self.merger = resolve_merger(merger, "DecoupledDiLoCo", weighted=weighting == "tokens")
        super().__init__(H, **options)
        if self.delay >= self.H:
            raise ValueError(f"delay must be below H, after which a fragment is sent again; got {delay} for H={H}")

    outer_gradient: Tensor  # shared (P,)
    came: list[list[tuple[int, Tensor, float, float]]]  # of each fragment: node, θ_k (n,), weight, when it is wanted
    closing: list[float]  # of each fragment: when the round that it is in ends
    sent: list[list[list[int]]]  # of each learner and fragment: when it was last sent, its steps and tokens
    awaited: list[list[bool]]  # likewise: whether an answer is on its way
    answers: list[dict[int, Tensor]]  # of each learner: fragment → φ (n,)
    timers: dict[int, int]  # number → fragment
    derived = (*AsynchronousStrategy.derived, "outer_gradient", "parts")

    def setup(self, cluster: Cluster) -> None:
        super().setup(cluster)
        if self.quorum > cluster.num_nodes:
            raise ValueError(f"quorum must be at most the number of nodes, {cluster.num_nodes}, got {self.quorum}")
        self.parts = parts = fragments_of(cluster.replicas.layout, self.fragments, self.pattern)
        if len(parts) > self.H:
            raise ValueError(f"H must be at least the number of fragments, {len(parts)}, got {self.H}")
        self.outer_gradient, spec = torch.zeros_like(self.outer_weights), self.outer_optim_spec
        optims = outer_optimizers(spec, parts, self.outer_weights, self.outer_gradient, cluster.deterministic)
        nodes = range(cluster.num_nodes)
        self.keep_shared(outer_optims=optims, came=[[] for _ in parts], closing=[math.inf for _ in parts], timers={})
        self.keep_stacked(
            sent=[[[0, 0] for _ in parts] for _ in nodes],
            awaited=[[False for _ in parts] for _ in nodes],
            answers=[{} for _ in nodes],
        )

    def after_local_step(self, node: int) -> None:
        own, awaited, sent, answers = self.clock.steps[node], self.awaited[node], self.sent[node], self.answers[node]
        due = [i for i in answers if own >= sent[i][0] + self.delay]
        first = [(i + 1) * self.H // len(self.parts) for i in range(len(self.parts))]
        sending = [i for i, n in enumerate(first) if (own - n) % self.H == 0 and (i in due or not awaited[i])]
        if due or sending:
            self.catch_up()
        for i in due:
            part, fresh = self.parts[i], answers.pop(i)
            for matrix in (self.cluster.weights, self.taken):
                for view, piece in zip(part.views(matrix[node]), part.cut(fresh), strict=True):
                    view.copy_(piece)
            awaited[i] = False
        for i in sending:
            steps, tokens = own - sent[i][0], self.seen[node] - sent[i][1]
            weight = tokens**2 / steps if self.weighting == "tokens" else 1.0
            label = "outer gradient" if len(self.parts) == 1 else f"outer gradient of fragment {i}"
            row, wanted = self.parts[i].of(self.cluster.weights[node]), self.delay * self.clock.step_seconds(node)
            self.push(node, row, label, (i, weight, self.clock.now + wanted))
            awaited[i], sent[i] = True, [own, self.seen[node]]
        self.clock.step(node)

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
        """Step a fragment with what has come, in the order of the nodes, and answer."""
        nodes, weights, share, _ = zip(*sorted(self.came[i], key=lambda one: one[0]), strict=True)
        self.came[i], self.closing[i] = [], math.inf
        self._forget_timers(i)
        part = self.parts[i]
        rows = torch.stack([part.of(self.taken[node]) - row for node, row in zip(nodes, weights, strict=True)])
        shares = shares_of(torch.tensor(share), range(len(nodes)), len(nodes)) if self.weighting == "tokens" else None
        merged = merged_rows(self.merger, rows, part.alone(self.cluster).replicas, shares)
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
        answer, i = message
        self.answers[node][i] = answer  # in the middle of a step: taken after it
