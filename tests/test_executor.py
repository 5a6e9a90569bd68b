"""Losses and gradients of all nodes equal each node's own model's, in whatever pieces they are computed."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from errors import refused, warned
from reference_cluster import TASKS, Task, small_mlp, vectors
from test_lowering import make
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from vsim import Trainer
from vsim.cluster.randomness import generator
from vsim.engine import (
    AutoExecutor,
    CompiledExecutor,
    Executor,
    LoopExecutor,
    Settings,
    VmapError,
    VmapExecutor,
    batched,
    memory,
    objective,
    vmap,
)
from vsim.engine.executor import minibatches
from vsim.engine.objective import Objective
from vsim.runs.evaluate import Evaluator
from vsim.strategy import SimpleReduceStrategy

COMPILED = pytest.param(
    CompiledExecutor,
    marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")],  # torch itself
)
KINDS: list[Any] = [VmapExecutor, LoopExecutor, AutoExecutor, COMPILED]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def batch_of(task: Task, num_nodes: int = 3, size: int = 6) -> list[Tensor]:
    """A stacked batch [(K, B, …), (K, B, …)]."""
    return [t[: num_nodes * size].view(num_nodes, size, *t.shape[1:]) for t in task.data().tensors]


def test_pieces_of_a_batch() -> None:
    batch = {"x": torch.arange(10).view(2, 5), "weight": torch.ones(2)}
    pieces = list(minibatches(batch, 2))
    assert [p["x"].tolist() for p, _ in pieces] == [[[0, 1], [5, 6]], [[2, 3], [7, 8]], [[4], [9]]]
    assert [share for _, share in pieces] == [0.4, 0.4, 0.2]
    assert all(p["weight"] is batch["weight"] for p, _ in pieces)  # one number a node cannot be cut
    for size in (None, 5, 9):
        assert list(minibatches(batch, size)) == [(batch, 1.0)]
    assert [share for _, share in minibatches([torch.ones(2)], 1)] == [1.0]


def test_a_batch_that_has_something_else_in_front_of_its_examples_is_not_cut() -> None:
    batch = {"x": torch.ones(2, 4, 6, 3), "y": torch.ones(2, 6), "weight": torch.ones(2)}  # time, examples, features
    assert list(minibatches(batch, None)) == [(batch, 1.0)]
    with refused(ValueError, "batch['x']: 4", "batch['y']: 6"):
        list(minibatches(batch, 3))
    engine = make(LoopExecutor, small_mlp())
    evaluator = Evaluator(engine, {"x": torch.ones(4, 6, 3), "y": torch.ones(6)}, 1)
    assert evaluator.pieces(4) == [evaluator.batch]
    with refused(ValueError, "examples first"):
        evaluator.pieces(3)


class Partly(nn.Module):
    """The loss does not reach `spare`; of `table` it reaches one row a time."""

    def __init__(self) -> None:
        super().__init__()
        self.used = nn.Parameter(torch.ones(12))
        self.spare = nn.Parameter(torch.ones(3))
        self.table = nn.Embedding(5, 12)

    def forward(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return (x * self.used * self.table(y)).sum(1).square().mean()


@every_kind
def test_parameters_that_the_loss_does_not_reach_have_gradient_zero(kind: type[Executor]) -> None:
    ours = make(kind, Partly())
    ours.replicas.grads.fill_(torch.nan)
    ours.losses_and_grads(batch_of(TASKS[0]))
    grads = ours.replicas.views(ours.replicas.grads)
    assert not grads["spare"].any() and grads["used"].all()
    y = batch_of(TASKS[0])[1]
    for node in range(3):
        reached = grads["table.weight"][node].any(1)
        assert reached.nonzero().flatten().tolist() == y[node].unique().tolist()


@every_kind
def test_a_loss_without_parameters_is_an_error(kind: type[Executor]) -> None:
    class Constant(Partly):
        def forward(self, batch: list[Tensor]) -> Tensor:
            return batch[0].mean()

    executor = make(kind, Constant())
    # A graph itself has gradients of zero, and its proof finds out.
    step = executor.prove if isinstance(executor, CompiledExecutor) else executor.losses_and_grads
    with refused(ValueError, "does not depend", "trainable parameter"):
        step(batch_of(TASKS[0]))


# In pieces


@pytest.mark.parametrize(("at_once", "task"), [*zip([1, 2, 4], TASKS, strict=True)])
def test_some_nodes_at_a_time_are_all_nodes_at_once(at_once: int, task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = batch_of(task, 5, 5)
    whole = make(VmapExecutor, task.model(), 5)
    monkeypatch.setattr(vmap, "WEIGHTS_AT_ONCE", at_once * whole.replicas.num_parameters)
    pieces = make(VmapExecutor, task.model(), 5)
    assert isinstance(pieces, VmapExecutor) and isinstance(whole, VmapExecutor)
    assert len(whole.pieces) == 1 and len(pieces.pieces) == -(-5 // at_once)
    sizes = [rows.stop - rows.start for rows, *_ in pieces.pieces]
    assert sum(sizes) == 5 and max(sizes) - min(sizes) <= 1
    for size in (None, 2):  # dropout included: a node's draws are its own
        losses = pieces.losses_and_grads(batch, size)
        torch.testing.assert_close(losses, whole.losses_and_grads(batch, size))
        torch.testing.assert_close(pieces.replicas.grads, whole.replicas.grads, rtol=1e-4, atol=1e-6)
        torch.testing.assert_close(pieces.replicas.buffers, whole.replicas.buffers)
    shared = [t[0] for t in batch]
    for ours, theirs in zip(*(evaluated(e, shared) for e in (pieces, whole)), strict=True):
        torch.testing.assert_close(ours, theirs)


def test_on_an_accelerator_pieces_follow_from_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    task = TASKS[1]
    whole = make(VmapExecutor, task.model(), 5)
    weights, of_node = whole.replicas.weights, {}
    for size in (4, 2):
        of_node[size] = memory.node_bytes(whole, [t[0] for t in batch_of(task, 5, size)]) + weights[0].nbytes
    assert of_node[4] > of_node[2]
    room = 2.5 * memory._ALLOWANCE * of_node[4]  # for two nodes with four examples
    monkeypatch.setattr(batched, "is_cache_bound", lambda device: False)
    # In its first step a run keeps room for the state of the optimizer.
    free = memory._WORKSPACES + 2 * weights.nbytes + room
    monkeypatch.setattr(vmap, "available_bytes", lambda device: free)
    pieces = make(VmapExecutor, task.model(), 5)
    assert isinstance(pieces, VmapExecutor) and len(pieces.pieces) == 1
    for size, count in ((4, 3), (2, -(-5 // int(2.5 * of_node[4] / of_node[2]))), (4, 3)):
        batch = batch_of(task, 5, size)
        torch.testing.assert_close(pieces.losses_and_grads(batch), whole.losses_and_grads(batch))
        torch.testing.assert_close(pieces.replicas.grads, whole.replicas.grads, rtol=1e-4, atol=1e-6)
        assert len(pieces.pieces) == count
        free, pieces.settings.position.step = memory._WORKSPACES + room, 2  # with state, less is free
    evaluated(pieces, [t[0][:1] for t in batch_of(task, 5, 4)])  # of one example, which BatchNorm would not train on
    given = VmapExecutor(pieces.replicas, pieces.objective, pieces.generators, Settings(chunk_size=4))
    given.losses_and_grads(batch_of(task, 5, 4))
    assert len(given.pieces) == 2


@pytest.mark.parametrize(("free", "nodes"), [(0, 1), (2**28 + 219, 1), (2**28 + 221, 2), (2**28 + 1101, 10)])
def test_nodes_that_fit_by_hand(free: int, nodes: int) -> None:
    # 256 MiB are the libraries'. A node takes 90 bytes and 10 of weights, and a tenth more: 110.
    assert memory.nodes_that_fit(free, 90, 10) == nodes


def test_bytes_of_a_node_by_hand() -> None:
    # P = 4·3 + 3 = 15. In evaluation, the outputs (B, 3) and their squares are there at once, then the mean.
    model = nn.Linear(4, 3)
    own = make(VmapExecutor, model, 2, loss_fn=lambda outputs, y: outputs.square().mean())
    for size in (1, 7):
        batch = [torch.ones(size, 4), torch.ones(size)]
        evaluating = memory.node_bytes(own, batch, evaluating=True)
        assert evaluating == 4 * 2 * 3 * size + 4
        # Backward ends with the loss and the gradients of the weights; before, outputs and their gradient are there.
        assert memory.node_bytes(own, batch) >= max(4 + 4 * 15, 4 + 4 * 2 * 3 * size)


# Evaluation


def evaluated(ours: Executor, batch: list[Tensor]) -> tuple[Tensor, Tensor | None]:
    """Losses (R,) and accuracies (R,), None if nothing is classified."""
    losses, counts = ours.evaluate(ours.replicas.weights, ours.replicas.buffers, batch, generator(0, 9))
    return losses, None if counts is None else counts[:, 0] / counts[:, 1]


@every_kind
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_evaluation_is_that_of_each_nodes_model(task: Task, kind: type[Executor]) -> None:
    ours, batch = make(kind, task.model()), [t[0] for t in batch_of(task)]
    ours.losses_and_grads(batch_of(task))  # so that statistics differ
    r = ours.replicas
    losses, accuracies = evaluated(ours, batch)
    assert accuracies is not None and not losses.requires_grad
    for node in range(3):
        own = r.as_module(r.weights[node], {n: b[node] for n, b in r.buffers.items()}, task.model()).eval()
        with torch.no_grad():
            torch.testing.assert_close((losses[node], accuracies[node]), own.loss_and_accuracy(batch))


# What vmap cannot do


class Selecting(nn.Module):
    """As many entries as their values say, which vmap cannot allow; draws before it."""

    def __init__(self, in_evaluation_only: bool = False) -> None:
        super().__init__()
        self.mlp, self.norm = small_mlp(0.5), nn.BatchNorm1d(12)
        self.in_evaluation_only = in_evaluation_only

    def forward(self, batch: list[Tensor]) -> Tensor:
        loss: Tensor = self.mlp([self.norm(batch[0]), batch[1]])
        return loss if self.training and self.in_evaluation_only else loss[loss > 0].sum()


def fit(model: nn.Module, kind: str, **options: Any) -> Trainer:
    trainer = Trainer(model, vectors(), vectors(8))
    options = {"num_nodes": 3, "max_steps": 4, "batch_size": 4, "progress": False, **options}
    trainer.fit(strategy=SimpleReduceStrategy(inner_optim="sgd", lr=0.1), executor=kind, **options)
    return trainer


@every_kind
def test_tensors_are_put_back_after_an_error(kind: type[Executor]) -> None:
    class Failing(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            raise RuntimeError("on purpose")

    executor = make(kind, Failing(4, 4))
    before = dict(executor.replicas.module.named_parameters())
    with pytest.raises(RuntimeError, match="on purpose"):
        executor.losses_and_grads(torch.randn(3, 6, 4))
    assert all(p is before[name] for name, p in executor.replicas.module.named_parameters())


def test_the_error_names_the_operation_and_the_way_out() -> None:
    with refused(VmapError, "test_executor.py:", "loss[loss > 0].sum()`", "executor='loop'") as caught:
        fit(Selecting(), "vmap")
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("in_evaluation_only", [False, True])
def test_auto_goes_on_with_the_loop(in_evaluation_only: bool) -> None:
    loop, rounding = fit(Selecting(in_evaluation_only), "loop", val_interval=1), {"rtol": 0.0, "atol": 0.0}
    if in_evaluation_only:  # which does not concern training
        auto, rounding = fit(Selecting(in_evaluation_only), "auto", val_interval=1), {}
        assert auto.history.executor == "vmap" and "went to the loop" in auto.history.executor_reason
    else:
        with warned("executor='auto' continues with 'loop'", "loss > 0") as caught:
            auto = fit(Selecting(in_evaluation_only), "auto", val_interval=1)
        assert len(caught) == 1 and auto.history.executor == "loop"
    assert auto.strategy is not None and loop.strategy is not None
    ours, theirs = auto.strategy.cluster, loop.strategy.cluster
    torch.testing.assert_close(ours.weights, theirs.weights, **rounding)
    torch.testing.assert_close(ours.replicas.buffers, theirs.replicas.buffers, **rounding)


# Indices on an accelerator


def lookups(odd: str) -> TensorDataset:
    """Examples, one of which has an index, or a label, that there is not."""
    stream = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 7, (64, 3), generator=stream), torch.randint(0, 5, (64,), generator=stream)
    (x[41] if odd == "index" else y[41:42])[:] = 9
    y[::7] = -100
    return TensorDataset(x, y)


LOOKUP = nn.Sequential(nn.Embedding(7, 8), nn.Flatten(), nn.Linear(24, 5))


@pytest.mark.parametrize("odd", ["index", "label"])
@pytest.mark.parametrize("kind", ["vmap", "loop"])
def test_an_index_out_of_range_is_clamped_and_its_error_is_that_of_the_cpu(
    odd: str, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(*data: Any) -> str:
        options: dict[str, Any] = {"num_nodes": 4, "max_steps": 6, "batch_size": 4, "executor": kind, "progress": False}
        with pytest.raises(IndexError) as caught:
            Trainer(LOOKUP, *data, loss_fn=F.cross_entropy).fit(strategy=SimpleReduceStrategy(), **options)
        return re.sub(r" on node \d", "", str(caught.value)).partition(" given")[0]

    def checked(self: Objective, *given: Any) -> None:
        with pytest.MonkeyPatch.context() as there:
            there.setattr(objective, "is_off_cpu", lambda batch: False)
            found.append("clamped")
            check(self, *given)

    check, found = Objective.check_indices, list[str]()
    good = TensorDataset(*(t[:40] for t in lookups(odd).tensors))
    expected = said(lookups(odd)), said(good, lookups(odd))
    for place in ("engine.objective", "core.run", "runs.models_measured"):
        monkeypatch.setattr(f"vsim.{place}.is_off_cpu", lambda batch: True)
    monkeypatch.setattr(Objective, "check_indices", checked)
    assert (said(lookups(odd)), said(good, lookups(odd))) == expected and found
