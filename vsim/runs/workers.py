"""Defer the local steps of asynchronous workers, and compute them together.

Virtual time decides which local steps workers have taken. The simulator may compute these steps later, because workers
do not depend on each other within a phase. Local steps are deferred until a worker's weights are read. Then all
deferred steps are computed: each call takes one step of every worker that still has deferred steps. Other workers draw
no random numbers and fetch no data in this call, so that the result does not depend on the grouping.

For example, two workers take H = 2 local steps before they push, and worker 1 is half as fast. Worker 0 pushes first,
so that its weights are read: it owes two steps, and worker 1 the one that it has taken by then. `step([2, 1])`
computes both rows in one call, then row 0 alone. When worker 1 pushes, it owes its second step, and worker 0 what it
has taken since. The strategy's clock counts the local steps that each worker has taken (`steps`), and all together
(`taken`): K of them are a step of the run.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map

from vsim.algorithms.asynchronous import AsynchronousStrategy
from vsim.arguments import retold
from vsim.cluster.frozen import clear_gradients, skipping
from vsim.core.failing import Guard
from vsim.core.few_rows import SubsetExecutor
from vsim.core.group import Step
from vsim.data.batches import Batches, one_in_memory, sizes_of
from vsim.engine import Executor
from vsim.engine.machine import moved
from vsim.engine.objective import explained
from vsim.runs.tracked import TrackedRun


def train_on_clock(workers: Workers) -> Iterator[Step]:
    """Take the steps of an asynchronous run, each of which is K local steps of all workers together."""
    run = workers.run
    while run.is_running:
        started, step = time.perf_counter(), Step(run.done + 1, torch.empty(0))
        run.ledger.position.begin(step.number)
        run.lr = run.cluster.lr
        with Guard(run.group, run):
            workers.take_step()
        run.seconds += time.perf_counter() - started
        yield step


class Workers:
    """The workers of a run; each call computes only the rows of the workers that step.

    Args:
        run: a run that is set up, and restored if it resumes.
        engine: computes all rows of the run. few: computes some rows of the run.
        minibatch_size: examples per node at once; None: the whole batch.
    """

    def __init__(self, run: TrackedRun, engine: Executor, few: SubsetExecutor, minibatch_size: int | None) -> None:
        strategy, batches = run.strategy, run.presence.batches
        assert isinstance(strategy, AsynchronousStrategy) and isinstance(batches, Batches)
        self.run, self.strategy, self.engine, self.minibatch_size = run, strategy, engine, minibatch_size
        self._few = few
        self._here = nullcontext if one_in_memory(batches) is not None else run.fetching
        # A fork begins after the steps of another run, which its own clock has not counted: skip their batches.
        skipped = run.done - strategy.clock.taken // run.cluster.num_nodes
        self._feeds = [batches.of_node(node, skipped + own) for node, own in enumerate(strategy.clock.steps)]
        strategy.step_workers = self.step

    def take_step(self) -> None:
        """Take the next step of the run."""
        with skipping(self.run.cluster):
            self.strategy.take_step()
            self.run.cluster.complete_step()
        self.run.node_losses = self.strategy.losses.tolist()

    def step(self, owed: Sequence[int]) -> None:
        """Take `owed[i]` local steps for worker i."""
        for taken in range(max(owed)):
            shapes: dict[Any, dict[int, Any]] = {}  # the last batch of a worker's epoch may be smaller
            for node in (node for node, steps in enumerate(owed) if steps > taken):
                batch = self._fetched(node)
                shapes.setdefault(tuple(t.shape for t in tree_leaves(batch)), {})[node] = batch
            for own in shapes.values():
                self._step([*own], tree_map(lambda *rows: torch.cat(rows), *own.values()))

    def _fetched(self, node: int) -> Any:
        try:
            with self._here():
                return next(self._feeds[node])
        except Exception as error:
            raise retold(error, f"the batches of node {node} at step {self.run.cluster.step}: {error}")  # noqa: B904

    def _step(self, nodes: list[int], batch: Any) -> None:
        """Take a local step for some workers, on their stacked batch (n, B, …)."""
        replicas, run = self.engine.replicas, self.run
        batch = moved(batch, replicas.weights.device)
        try:
            with run.computing(), torch.enable_grad():  # strategies run without gradients
                if len(nodes) == replicas.num_held:
                    losses = self.engine.losses_and_grads(batch, self.minibatch_size)
                else:
                    losses = self._few.losses_and_grads(nodes, batch, self.minibatch_size)
        except Exception as error:
            raise explained(error, self.engine.objective, batch, 1, f"at step {run.cluster.step}")  # noqa: B904
        run.check_losses(dict(zip(nodes, losses.tolist(), strict=True)), batch)
        clear_gradients(run.cluster)
        self.strategy.losses[nodes] = losses.to(self.strategy.losses)
        examples, tokens = sizes_of(batch)
        for node in nodes:
            self.strategy.step_worker(node)
            self.strategy.seen[node] += tokens or examples
        run.examples += len(nodes) * examples
        run.tokens += len(nodes) * tokens
