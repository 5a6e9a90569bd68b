"""Losses and gradients of all nodes equal each node's own model's, in whatever pieces they are computed."""

from __future__ import annotations

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from separate import TASKS, Task, small_cnn, small_gpt, small_mlp, vectors
from torch import Tensor, nn
from torch.func import functional_call

from vsim import Trainer
from vsim.cluster.randomness import NODE, generator
from vsim.cluster.replicas import Replicas
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
    vmap,
)
from vsim.engine.executor import minibatches
from vsim.engine.objective import Objective
from vsim.strategy import SimpleReduceStrategy, Strategy
from vsim.training.evaluate import Evaluator

CPU = torch.device("cpu")
COMPILED = pytest.param(
    CompiledExecutor,
    marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")],  # torch itself
)
KINDS: list[Any] = [VmapExecutor, LoopExecutor, AutoExecutor, COMPILED]
every_kind = pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.__name__)


def make(
    kind: type[Executor], model: nn.Module, num_nodes: int = 3, loss_fn: Any = None, autocast: bool = False
) -> Executor:
    """An executor of replicas that have drifted apart, as they do in training."""
    replicas = Replicas.of(model, num_nodes, CPU)
    replicas.module.train()
    drift = torch.randn(replicas.weights.shape, generator=torch.Generator().manual_seed(5))
    replicas.weights.add_(drift, alpha=0.05)
    streams = [generator(0, NODE, node) for node in range(num_nodes)]
    return kind(replicas, Objective(replicas.module, loss_fn), streams, Settings(autocast=autocast))


def batch_of(task: Task, num_nodes: int = 3, size: int = 6) -> list[Tensor]:
    """A stacked batch [(K, B, …), (K, B, …)]."""
    return [t[: num_nodes * size].view(num_nodes, size, *t.shape[1:]) for t in task.data().tensors]


@pytest.mark.parametrize("kind", [VmapExecutor, LoopExecutor, COMPILED])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_every_node_has_the_loss_and_gradient_of_its_own_model(task: Task, kind: type[Executor]) -> None:
    model = {"mlp": small_mlp, "cnn": small_cnn, "gpt": small_gpt}[task.name](0.0)
    ours, batch = make(kind, model), batch_of(task)
    r = ours.replicas
    own = [r.as_module(r.weights[k], dict(model.named_buffers()), model).train() for k in range(3)]
    losses = ours.losses_and_grads(batch)
    for node, module in enumerate(own):
        loss = module([t[node] for t in batch])
        loss.backward()
        torch.testing.assert_close(losses[node], loss.detach())
        for name, p in module.named_parameters():
            torch.testing.assert_close(r.views(r.grads)[name][node], p.grad, rtol=1e-4, atol=1e-6)
        for name, b in module.named_buffers():
            torch.testing.assert_close(r.buffers[name][node], b)


@every_kind
@settings(max_examples=15)
@given(size=st.integers(1, 7))
def test_accumulated_gradients_are_those_of_the_whole_batch(kind: type[Executor], size: int) -> None:
    # 6 examples in pieces of 4 are 4 and 2: weighted by 4/6 and 2/6, the mean of the means is the mean.
    whole, pieces = make(kind, small_mlp()), make(kind, small_mlp())
    losses = whole.losses_and_grads(batch_of(TASKS[0]))
    torch.testing.assert_close(pieces.losses_and_grads(batch_of(TASKS[0]), size), losses)
    torch.testing.assert_close(pieces.replicas.grads, whole.replicas.grads, rtol=1e-4, atol=1e-6)
    # A second batch starts from zero again.
    pieces.losses_and_grads(batch_of(TASKS[0]), size)
    torch.testing.assert_close(pieces.replicas.grads, whole.replicas.grads, rtol=1e-4, atol=1e-6)


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
    with pytest.raises(ValueError, match=r"batch\['x'\]: 4, batch\['y'\]: 6; put the examples first"):
        list(minibatches(batch, 3))
    engine = make(LoopExecutor, small_mlp())
    Evaluator(engine, {"x": torch.ones(4, 6, 3), "y": torch.ones(6)}, 4, 1)
    with pytest.raises(ValueError, match="put the examples first"):
        Evaluator(engine, {"x": torch.ones(4, 6, 3), "y": torch.ones(6)}, 3, 1)


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
    with pytest.raises(ValueError, match="does not depend on any trainable parameter"):
        step(batch_of(TASKS[0]))


@every_kind
def test_frozen_and_tied_parameters_train_as_they_should(kind: type[Executor]) -> None:
    model = small_gpt(0.0)
    model.positions.weight.requires_grad_(False)
    ours, batch = make(kind, model), batch_of(TASKS[2])
    ours.losses_and_grads(batch)
    r = ours.replicas
    own = r.as_module(r.weights[1], {}, model)
    own([t[1] for t in batch]).backward()
    assert own.positions.weight.grad is None
    assert own.lm_head.weight.grad is own.tokens.weight.grad
    torch.testing.assert_close(r.views(r.grads)["tokens.weight"][1], own.tokens.weight.grad)


# In pieces


@pytest.mark.parametrize("at_once", [1, 2, 3, 4])
@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_some_nodes_at_a_time_are_all_nodes_at_once(task: Task, at_once: int, monkeypatch: pytest.MonkeyPatch) -> None:
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


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_on_an_accelerator_pieces_follow_from_free_memory(task: Task, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = make(VmapExecutor, task.model(), 5)
    weights, of_node = whole.replicas.weights, {}
    for size in (4, 2):
        of_node[size] = memory.node_bytes(whole, [t[0] for t in batch_of(task, 5, size)]) + weights[0].nbytes
    assert of_node[4] > of_node[2]
    room = 2.5 * memory._ALLOWANCE * of_node[4]  # for two nodes with four examples
    monkeypatch.setattr(batched, "favors_loops", lambda device: False)
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
    shared = [t[0].repeat(8, *[1] * (t.dim() - 2)) for t in batch_of(task, 5, 4)]  # 32 examples, as in evaluation
    calls = []
    vmapped = pieces._vmapped
    monkeypatch.setattr(pieces, "_vmapped", lambda *args, **options: calls.append(args) or vmapped(*args, **options))
    for ours, theirs in zip(*(evaluated(e, shared) for e in (pieces, whole)), strict=True):
        torch.testing.assert_close(ours, theirs)
    of_row = 4 * memory.node_bytes(whole, [t[:8] for t in shared], evaluating=True) + weights[0].nbytes
    assert len(calls) == -(-5 // max(1, int(2.5 * of_node[4] / of_row)))  # of eight examples, which are measured
    evaluated(pieces, [t[:1] for t in shared])  # of one example, which BatchNorm would not train on
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


@every_kind
def test_accuracy_with_a_loss_function(kind: type[Executor]) -> None:
    linear = nn.Linear(12, 5)
    batch = [t[0] for t in batch_of(TASKS[0])]
    ours = make(kind, linear, loss_fn=F.cross_entropy)
    losses, accuracies = evaluated(ours, batch)
    for node, views in enumerate(zip(*ours.replicas.views(ours.replicas.weights).values(), strict=True)):
        outputs = F.linear(batch[0], *views)
        torch.testing.assert_close(losses[node], F.cross_entropy(outputs, batch[1]))
        assert accuracies is not None
        assert accuracies[node] == (outputs.argmax(1) == batch[1]).float().mean()


@every_kind
def test_no_accuracy_where_nothing_is_classified(kind: type[Executor]) -> None:
    ours = make(kind, nn.Linear(12, 5), loss_fn=F.mse_loss)
    batch = [torch.ones(4, 12), torch.zeros(4, 5)]
    assert evaluated(ours, batch)[1] is None
    assert evaluated(make(kind, Partly()), [t[0] for t in batch_of(TASKS[0])])[1] is None
    dense = nn.Sequential(nn.Linear(12, 10), nn.Unflatten(1, (5, 2)))  # a class for each of two positions
    accuracy = evaluated(make(kind, dense, loss_fn=F.cross_entropy), [batch[0], torch.zeros(4, 2).long()])[1]
    assert accuracy is not None and accuracy.shape == (3,)


# What vmap cannot do


class Selecting(nn.Module):
    """As many entries as their values say, which vmap cannot allow; draws before it."""

    def __init__(self, in_evaluation_only: bool = False) -> None:
        super().__init__()
        self.mlp = small_mlp(0.5)
        self.norm = nn.BatchNorm1d(12)
        self.in_evaluation_only = in_evaluation_only

    def forward(self, batch: list[Tensor]) -> Tensor:
        loss = self.mlp([self.norm(batch[0]), batch[1]])
        if self.training and self.in_evaluation_only:
            return loss
        return loss[loss > 0].sum()


def fit(model: nn.Module, kind: str, **options: Any) -> Trainer:
    trainer = Trainer(model, vectors(), vectors(8))
    options = {"num_nodes": 3, "max_steps": 4, "batch_size": 4, "progress": False, **options}
    trainer.fit(strategy=SimpleReduceStrategy(inner_optim="sgd", lr=0.1), executor=kind, **options)
    return trainer


class Shared(nn.Module):
    """A layer in two places, tied weights, one more parameter that is a buffer's neighbour, and a nested module."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.again = self.first
        self.tied = nn.Linear(4, 4)
        self.tied.weight = self.first.weight
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("seen", torch.zeros(4))
        self.nested = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4)))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = self.seen + x.detach().mean(0)  # assigned, not written in place
        return (self.nested(self.tied(self.again(self.first(x)))) * self.scale + self.seen).square().mean()


class Recurrent(nn.Module):
    """nn.LSTM keeps its weights in a list as well as in attributes."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 3, num_layers=2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[:, None])[0].square().mean()


class Parametrized(nn.Module):
    """Weights that are computed from others."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.utils.parametrizations.weight_norm(nn.Linear(4, 4))
        self.norm = nn.BatchNorm1d(4)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.layer(x)).square().sum(1).mean()


@pytest.mark.parametrize("kind", [LoopExecutor, VmapExecutor])
@pytest.mark.parametrize("make_model", [Shared, Recurrent, Parametrized], ids=lambda m: m.__name__)
def test_tensors_take_the_places_that_functional_call_finds(make_model: type[nn.Module], kind: type[Executor]) -> None:
    torch.manual_seed(0)
    executor = make(kind, make_model())
    r = executor.replicas
    before = {name: (t, t.clone()) for name, t in r.module.state_dict(keep_vars=True).items()}
    batch = torch.randn(3, 6, 4)
    own = [
        {n: w[node].clone().requires_grad_() for n, w in r.views(r.weights).items()}
        | {n: b[node].clone() for n, b in r.buffers.items()}
        for node in range(3)
    ]
    losses = executor.losses_and_grads(batch)
    for node, tensors in enumerate(own):
        loss = functional_call(make_model().train(), tensors, (batch[node],))
        torch.testing.assert_close(losses[node], loss.detach())
        weights = {n: t for n, t in tensors.items() if n in r.views(r.weights)}
        grads = torch.autograd.grad(loss, list(weights.values()))
        for name, grad in zip(weights, grads, strict=True):
            torch.testing.assert_close(r.views(r.grads)[name][node], grad, rtol=1e-4, atol=1e-5)
        for name, b in r.buffers.items():
            torch.testing.assert_close(b[node], tensors[name].detach())
    for name, tensor in r.module.state_dict(keep_vars=True).items():
        assert tensor is before[name][0] and torch.equal(tensor, before[name][1])


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
    with pytest.raises(VmapError) as caught:
        fit(Selecting(), "vmap")
    message = str(caught.value)
    assert re.search(r"at .*test_executor\.py:\d+, `return loss\[loss > 0\]\.sum\(\)`", message)
    assert "executor='loop' runs it node by node" in message
    assert isinstance(caught.value.__cause__, RuntimeError)


@pytest.mark.parametrize("in_evaluation_only", [False, True])
@pytest.mark.parametrize("val_interval", [1, None])
def test_auto_goes_on_with_the_loop(in_evaluation_only: bool, val_interval: int | None) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        auto = fit(Selecting(in_evaluation_only), "auto", val_interval=val_interval)
    if in_evaluation_only:  # which does not concern training
        assert not caught and auto.history.executor == "vmap"
        assert "went to the loop; the first: the model cannot be vectorised" in auto.history.executor_reason
    else:
        (warning,) = caught
        assert re.search(r"executor='auto' continues with 'loop': .*loss > 0", str(warning.message))
        assert auto.history.executor == "loop"
    loop = fit(Selecting(in_evaluation_only), "loop", val_interval=val_interval)
    assert auto.strategy is not None and loop.strategy is not None
    rounding: dict[str, float] = {} if in_evaluation_only else {"rtol": 0, "atol": 0}
    for ours, theirs in zip(
        (auto.strategy.cluster.weights, *auto.strategy.cluster.replicas.buffers.values()),
        (loop.strategy.cluster.weights, *loop.strategy.cluster.replicas.buffers.values()),
        strict=True,
    ):
        torch.testing.assert_close(ours, theirs, **rounding)


def test_a_failed_attempt_leaves_no_trace() -> None:
    # Vmapped, the dropout draws and BatchNorm updates come before the branch: the loop must not see them.
    auto, loop = make(AutoExecutor, Selecting()), make(LoopExecutor, Selecting())
    with pytest.warns(UserWarning, match="continues with 'loop'"):
        losses = auto.losses_and_grads(batch_of(TASKS[0]))
    assert torch.equal(losses, loop.losses_and_grads(batch_of(TASKS[0])))
    assert torch.equal(auto.replicas.grads, loop.replicas.grads)
    for name, buffer in auto.replicas.buffers.items():
        assert torch.equal(buffer, loop.replicas.buffers[name])
    for ours, theirs in zip(auto.generators, loop.generators, strict=True):
        assert torch.equal(ours.get_state(), theirs.get_state())
    assert auto.name == "loop"


def test_a_failed_attempt_at_evaluation_leaves_no_trace() -> None:
    class Restless(Selecting):
        def forward(self, batch: list[Tensor]) -> Tensor:
            return super().forward([F.dropout(batch[0], 0.5, training=True), batch[1]])

    batch = [t[0] for t in batch_of(TASKS[0])]
    auto, loop = make(AutoExecutor, Restless()), make(LoopExecutor, Restless())
    losses, _ = evaluated(auto, batch)
    assert "went to the loop" in auto.reason
    assert torch.equal(losses, evaluated(loop, batch)[0])


@every_kind
def test_a_models_own_error_stays_its_own(kind: type[Executor]) -> None:
    class Wrong(Partly):
        def forward(self, batch: list[Tensor]) -> Tensor:
            return batch[0] @ self.used[:3]

    with pytest.raises(RuntimeError, match="size") as caught:
        make(kind, Wrong()).losses_and_grads(batch_of(TASKS[0]))
    assert not isinstance(caught.value, VmapError)


def test_auto_is_vmap_where_that_works() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert fit(small_mlp(0.1), "auto").history.executor == "vmap"


# Precision


@pytest.mark.parametrize("kind", ["vmap", "loop"])
def test_autocast_computes_in_bfloat16(kind: str) -> None:
    seen: set[torch.dtype] = set()

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(12, 5, bias=False)  # vmapped, a bias in float32 would be added afterwards

        def forward(self, batch: list[Tensor]) -> Tensor:
            outputs = self.linear(batch[0])
            seen.add(outputs.dtype)
            return F.cross_entropy(outputs.float(), batch[1])

    model = Watched()
    full, half = (fit(model, kind, autocast=autocast) for autocast in (False, True))
    assert seen == {torch.float32, torch.bfloat16}
    assert full.strategy is not None and half.strategy is not None
    ours, theirs = full.strategy.cluster.weights, half.strategy.cluster.weights
    assert theirs.dtype == torch.float32 and not torch.equal(ours, theirs)
    torch.testing.assert_close(ours, theirs, rtol=0.02, atol=0.02)  # bfloat16 has 8 bits


def test_any_one_dtype_trains() -> None:
    class Double(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlp = small_mlp().double()

        def forward(self, batch: list[Tensor]) -> Tensor:
            return self.mlp([batch[0].double(), batch[1]])

    trained = fit(Double(), "vmap")
    assert trained.strategy is not None
    assert trained.strategy.cluster.weights.dtype == torch.float64
    close = fit(small_mlp(), "vmap")
    assert close.strategy is not None
    torch.testing.assert_close(
        trained.strategy.cluster.weights.float(), close.strategy.cluster.weights, rtol=1e-4, atol=1e-5
    )


def test_the_base_strategy_needs_no_executor_of_its_own() -> None:
    # Training alone is what the executor gives, stepped: θ ← θ − lr·g.
    trainer = Trainer(small_mlp(), vectors())
    trainer.fit(
        strategy=Strategy(inner_optim="sgd", lr=0.5),
        num_nodes=3,
        max_steps=1,
        batch_size=6,
        shuffle=False,
        progress=False,
    )
    own = Replicas.of(small_mlp(), 3, CPU)
    ours = VmapExecutor(own, Objective(own.module), [generator(0, NODE, k) for k in range(3)])
    x, y = vectors().tensors
    ours.losses_and_grads([torch.stack([t[k:18:3] for k in range(3)]) for t in (x, y)])
    assert trainer.strategy is not None
    torch.testing.assert_close(trainer.strategy.cluster.weights, own.weights - 0.5 * own.grads)
