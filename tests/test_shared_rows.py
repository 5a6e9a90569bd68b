"""Nodes that are equal by construction share one row of weights, and one of gradients where their mean is all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from separate import TASKS, Task
from test_strategy_base import AverageByHand

from vsim import Trainer
from vsim.cluster.optim import OptimSpec
from vsim.cluster.optimizers import torch_optimizers
from vsim.cluster.replicas import with_gaps
from vsim.strategy import DeMoStrategy, DiLoCoStrategy, DionStrategy, SimpleReduceStrategy, Strategy

SGD = OptimSpec("sgd", lr=0.1, momentum=0.9)


def fit(strategy: Strategy, task: Task = TASKS[0], **options: Any) -> Trainer:
    trainer = Trainer(task.model(), task.data(), task.data(8))
    trainer.fit(strategy=strategy, **{"num_nodes": 4, "max_steps": 6, "batch_size": 4, "progress": False, **options})
    return trainer


def state_bytes(trainer: Trainer) -> int:
    assert trainer.strategy is not None
    optimizers = torch_optimizers(trainer.strategy.optim)
    return sum(t.nbytes for o in optimizers for s in o.state.values() for t in s.values() if t.dim())


WAYS: list[dict[str, Any]] = [
    *({"executor": executor, **extra} for executor in ("vmap", "loop") for extra in ({}, {"minibatch_size": 2})),
    {"executor": "vmap", "chunk_size": 3},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_allreduce_with_one_row_is_allreduce(task: Task, way: dict[str, Any]) -> None:
    ours = fit(SimpleReduceStrategy(inner_optim=SGD, max_norm=0.3), task, **way)
    theirs = fit(AverageByHand(inner_optim=SGD, max_norm=0.3), task, **way)
    assert ours.strategy is not None and theirs.strategy is not None
    # A bias before BatchNorm has gradients that are rounding alone, and clipping is what sees them.
    torch.testing.assert_close(ours.strategy.cluster.weights, theirs.strategy.cluster.weights, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(
        torch.tensor(ours.history.node_losses), torch.tensor(theirs.history.node_losses), rtol=1e-4, atol=1e-5
    )
    for name, buffer in ours.strategy.cluster.replicas.buffers.items():  # statistics are each node's own
        torch.testing.assert_close(buffer, theirs.strategy.cluster.replicas.buffers[name])


def test_weights_gradients_and_optimizer_are_there_once() -> None:
    shared, exact = (fit(SimpleReduceStrategy(lr=0.01), deterministic=d) for d in (False, True))
    assert shared.strategy is not None and exact.strategy is not None
    ours, theirs = shared.strategy.cluster.replicas, exact.strategy.cluster.replicas
    size = ours.num_parameters
    assert (ours.weights.shape, ours.grads.shape) == ((1, size), (1, size))
    assert (theirs.weights.shape, theirs.grads.shape) == ((4, size), (4, size))
    assert ours.num_held == theirs.num_held == 4
    assert state_bytes(exact) == 4 * state_bytes(shared) == 2 * with_gaps(theirs.weights).nbytes
    assert list(shared.ledger) == list(exact.ledger)


@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")
@pytest.mark.parametrize(
    "strategy", [DeMoStrategy(lr=0.01, compression_topk=5, compression_chunk=16), DionStrategy(lr=0.01)], ids=str
)
def test_weights_are_shared_where_gradients_are_not(strategy: Strategy) -> None:
    shared, exact = (fit(strategy, deterministic=d) for d in (False, True))
    assert shared.strategy is not None and exact.strategy is not None
    replicas = shared.strategy.cluster.replicas
    assert len(replicas.weights) == 1 and len(replicas.grads) == 4
    torch.testing.assert_close(shared.strategy.cluster.weights, exact.strategy.cluster.weights, rtol=1e-5, atol=1e-6)
    assert list(shared.ledger) == list(exact.ledger)


def test_all_rows_can_be_read_and_not_written() -> None:
    trainer = fit(SimpleReduceStrategy(lr=0.01))
    assert trainer.strategy is not None
    weights = trainer.strategy.cluster.weights
    assert weights.shape[0] == 4 and torch.equal(weights[0], weights[3])
    with pytest.raises(RuntimeError, match="single memory location"):
        weights.add_(1)


def test_a_subclass_has_to_promise_by_itself() -> None:
    class Noisy(SimpleReduceStrategy):
        def sync(self) -> None:
            super().sync()
            self.cluster.replicas.weights[0].add_(1)

    assert SimpleReduceStrategy.shares_weights and not Noisy.shares_weights and not DiLoCoStrategy.shares_weights
    trainer = fit(Noisy(lr=0.01), max_steps=2)
    assert trainer.strategy is not None
    assert len(trainer.strategy.cluster.replicas.weights.unique(dim=0)) == 2
