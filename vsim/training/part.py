"""The parts of a run before it is set up; where nodes come and go, it is set up anew."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace

from vsim.cluster.collectives import Collectives
from vsim.cluster.plan import Plan
from vsim.cluster.randomness import OwnGlobals
from vsim.data.batches import BatchSource
from vsim.records.history import History
from vsim.records.progress import Reporter
from vsim.training.spec import RunSpec


@dataclass
class Part:
    """The parts of a run before it is set up: its configuration, and those that its backend provides.

    Attributes:
        report: gets the outcome of every step. history: the record of these outcomes, where this process keeps one.
        nodes: those held in this process. collectives: how they communicate with each other and with the other nodes.
        batches: stacked batches (R, B, …) for these nodes.
        globals: its own global random generators, if it trains beside others; None: the process's.
        minibatch_size: examples per node whose gradients are computed at once, if that is known already.
        plan: who takes part in which steps; None: all nodes in all.
        continues: the rows of its start that its nodes continue from; None: each its own.
    """

    spec: RunSpec
    report: Reporter
    history: History | None
    nodes: range
    collectives: Collectives
    batches: BatchSource
    globals: OwnGlobals | None = None
    minibatch_size: int | None = None
    plan: Plan | None = None
    continues: Sequence[int] | None = None

    @property
    def steps(self) -> int:
        """The steps of the run."""
        spec = self.spec
        return spec.num_epochs * self.batches.steps_per_epoch if spec.max_steps is None else spec.max_steps

    @property
    def start(self) -> int:
        """The completed steps that it starts with."""
        return 0 if self.spec.start is None else self.spec.start.step

    @property
    def shares(self) -> tuple[bool, bool]:
        """Whether its nodes share one row of weights, and one of gradients."""
        # Separate processes have a row each; so has an exact run, whose sums have the order of theirs.
        in_one = not self.spec.deterministic and len(self.nodes) == self.collectives.num_nodes > 1
        strategy = self.spec.strategy
        return in_one and strategy.shares_weights, in_one and strategy.shares_grads

    def attended(self, step: int) -> Part:
        """Return it with the nodes that take part in step number `step`."""
        assert self.plan is not None
        nodes = self.plan.segment(step).nodes
        collectives, batches = self.collectives.anew(nodes), self.batches.attended(nodes, self.plan.missed(step))
        return replace(self, nodes=collectives.nodes, collectives=collectives, batches=batches)

    def moved(self, step: int) -> Part:
        """Return it with the nodes that take part in `step`, and what they continue from: its start, of those before.

        A node that joins copies the first of those before that stays, or else the first of those that leave.
        """
        assert self.plan is not None
        part, before, peer = self.attended(step), list(self.collectives.active), self.plan.peer(step)
        rows = [before.index(node if node in before else peer) for node in part.collectives.active]
        return replace(part, continues=rows)

    def here(self) -> AbstractContextManager[None]:
        """Make the context in which it draws from the global generators as if it were alone."""
        return nullcontext() if self.globals is None else self.globals.here()
