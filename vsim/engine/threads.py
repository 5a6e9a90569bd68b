"""Threads: the operations of a small step are computed by one, whatever else the machine does.

An operation that two threads share ends when the slower one does. Where another program keeps a core busy that is after
a slice of its time: a step of four small MLPs then takes seven times as long as with one thread, which on a quiet
machine needs no longer than two for it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from vsim.cluster.randomness import preserved
from vsim.engine.base import Executor, cloned, undone
from vsim.private_torch import unwatched

# Multiplications and additions of a step below which one thread computes it: 4 MLPs of 26,000 weights with 16 examples
# have 10 million, 16 of them 40.
SMALL = 20_000_000


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Let PyTorch's operations on the CPU use so many threads within a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Threads:
    """Chooses the threads of an executor's steps, by their shapes alone.

    Args:
        executor: whose choice it is. With `settings.exact` there is none, as the last bits may depend on it, and where
            the threads are given, as to the processes of a run.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._small: dict[Any, bool] = {}  # by the shapes of a batch

    def of(self, batch: Any) -> AbstractContextManager[None]:
        """Make a context to take a step with this stacked batch (R, B, …) in: with one thread if the step is small."""
        alone = torch.get_num_threads() > 1 and self._is_small(batch)
        return using_threads(1) if alone else nullcontext()

    def _is_small(self, batch: Any) -> bool:
        replicas = self.executor.replicas
        settled = self.executor.settings.exact or self.executor.has_given_threads
        if settled or replicas.weights.device.type != "cpu":
            return False
        shapes = tuple(t.shape for t in tree_leaves(batch))
        if shapes not in self._small:
            # Optimizers and communication go over all weights, even where a batch reaches few of them.
            self._small[shapes] = replicas.num_held * replicas.num_parameters < SMALL / 50 and (
                replicas.num_held * self._flops_of_node(tree_map(lambda t: t[0], batch)) < SMALL
            )
        return self._small[shapes]

    @torch.no_grad()
    def _flops_of_node(self, batch: Any) -> int:
        """Return the multiplications and additions of one node's step: its forward pass, and twice that backward."""
        executor, node = self.executor, self.executor.replicas.rows(0, 1)
        weights = {name: w[0] for name, w in node.views(node.weights).items()}
        buffers = {name: b[0].clone() for name, b in node.buffers.items()}
        device = node.weights.device
        with unwatched(), preserved(device), undone(executor), FlopCounterMode(display=False) as counter:
            try:
                executor._outcome(weights, buffers, cloned(batch), False)
            except Exception:  # which the step itself is going to raise, and say more of
                return SMALL
        return 3 * counter.get_total_flops()
