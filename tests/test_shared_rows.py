"""Nodes that are equal by construction share one row of weights, and one of gradients where their mean is all."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from separate import TASKS, Task
from test_strategy_base import AverageByHand

from vsim import Trainer
from vsim.cluster import Cluster
from vsim.cluster.optim import OptimSpec
from vsim.cluster.optimizers import torch_optimizers
from vsim.cluster.replicas import with_gaps
from vsim.strategy import DeMoStrategy, DiLoCoStrategy, DionStrategy, SimpleReduceStrategy, Strategy

SGD = OptimSpec("sgd", lr=0.1, momentum=0.9)


def fit(strategy: Strategy, task: Task = TASKS[0], **options: Any) -> tuple[Trainer, Cluster]:
    trainer = Trainer(task.model(), task.data(), task.data(8))
    trainer.fit(strategy=strategy, **{"num_nodes": 4, "max_steps": 6, "batch_size": 4, "progress": False, **options})
    assert trainer.strategy is not None
    return trainer, trainer.strategy.cluster


def state_bytes(trainer: Trainer) -> int:
    assert trainer.strategy is not None
    optimizers = torch_optimizers(trainer.strategy.optim)
    return sum(t.nbytes for o in optimizers for s in o.state.values() for t in s.values() if t.dim())


WAYS: list[dict[str, Any]] = [
    {"executor": "vmap"},
    {"executor": "loop", "minibatch_size": 2},
    {"executor": "vmap", "chunk_size": 3, "minibatch_size": 2},
]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_allreduce_with_one_row_is_allreduce(task: Task, way: dict[str, Any]) -> None:
    (one, ours), (other, theirs) = (
        fit(kind(inner_optim=SGD, max_norm=0.3), task, **way) for kind in (SimpleReduceStrategy, AverageByHand)
    )
    # A bias before BatchNorm has gradients that are rounding alone, and clipping is what sees them.
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-4, atol=1e-5)
    losses = (torch.tensor(trainer.history.node_losses) for trainer in (one, other))
    torch.testing.assert_close(*losses, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours.replicas.buffers, theirs.replicas.buffers)  # statistics are each node's own


def test_weights_gradients_and_optimizer_are_there_once() -> None:
    (shared, own), (exact, other) = (fit(SimpleReduceStrategy(lr=0.01), deterministic=d) for d in (False, True))
    ours, theirs = own.replicas, other.replicas
    size = ours.num_parameters
    assert (ours.weights.shape, ours.grads.shape) == ((1, size), (1, size))
    assert (theirs.weights.shape, theirs.grads.shape) == ((4, size), (4, size))
    assert ours.num_held == theirs.num_held == 4
    assert state_bytes(exact) == 4 * state_bytes(shared) == 2 * with_gaps(theirs.weights).nbytes
    assert list(shared.ledger) == list(exact.ledger)
    assert own.weights.shape[0] == 4 and torch.equal(own.weights[0], own.weights[3])  # all can be read, not written
    with pytest.raises(RuntimeError, match="single memory location"):
        own.weights.add_(1)


@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning")
@pytest.mark.parametrize(
    "strategy", [DeMoStrategy(lr=0.01, compression_topk=5, compression_chunk=16), DionStrategy(lr=0.01)], ids=str
)
def test_weights_are_shared_where_gradients_are_not(strategy: Strategy) -> None:
    (shared, ours), (exact, theirs) = (fit(strategy, deterministic=d) for d in (False, True))
    assert len(ours.replicas.weights) == 1 and len(ours.replicas.grads) == 4
    torch.testing.assert_close(ours.weights, theirs.weights, rtol=1e-5, atol=1e-6)
    assert list(shared.ledger) == list(exact.ledger)


def test_a_subclass_has_to_promise_by_itself() -> None:
    class Noisy(SimpleReduceStrategy):
        def sync(self) -> None:
            super().sync()
            self.cluster.replicas.weights[0].add_(1)

    assert SimpleReduceStrategy.shares_weights and not Noisy.shares_weights and not DiLoCoStrategy.shares_weights
    assert len(fit(Noisy(lr=0.01), max_steps=2)[1].replicas.weights.unique(dim=0)) == 2
