"""Validation: on which examples, with which error, and without any effect on training."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vsim
from vsim import Trainer
from vsim.models import MLP
from vsim.strategy import (
    Algorithm,
    AsyncDiLoCoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    GossipStrategy,
    SimpleReduceStrategy,
)


def vectors(count: int, seed: int = 0) -> TensorDataset:
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=stream)
    return TensorDataset(x, (x[:, 0] + torch.randn(count, generator=stream) > 0).long())


def small() -> nn.Module:
    return MLP(4, (8,), 2, seed=0)


QUICK: dict[str, Any] = {"num_nodes": 2, "max_steps": 4, "batch_size": 4, "progress": False}


def fitted(val: TensorDataset, model: nn.Module | None = None, **options) -> Trainer:
    options = {"strategy": DiLoCoStrategy(H=4, lr=0.01), "num_nodes": 2, "max_steps": 6, "val_interval": 2} | options
    trainer = Trainer(model or small(), vectors(64), val, loss_fn=options.pop("loss_fn", None))
    trainer.fit(progress=False, batch_size=4, **options)
    return trainer


def losses_by_hand(trainer: Trainer, val: TensorDataset) -> Tensor:
    weights = trainer.strategy.model_weights()
    model = trainer.strategy.cluster.replicas.as_module(weights, {}, small())
    x, y = val.tensors
    return F.cross_entropy(model(x), y, reduction="none").detach().double()


@pytest.mark.parametrize("minibatch_size", [1, 4])
def test_the_final_loss_is_of_all_examples_and_has_a_standard_error(minibatch_size: int) -> None:
    val = vectors(91, seed=1)
    trainer = fitted(val, minibatch_size=minibatch_size)
    history, losses = trainer.history, losses_by_hand(trainer, val)
    assert history.last("global_loss") == pytest.approx(float(losses.mean()), rel=1e-5)
    assert history.last("global_loss_se") == pytest.approx(float(losses.std()) / math.sqrt(91), rel=1e-4)
    steps, used, total = history.measured("step", "val_examples", "val_total")
    assert steps.tolist() == [0, 2, 4, 6]
    assert used.tolist() == [91] * 4 and set(total) == {91}
    assert history.measured("step", "global_loss_se")[0].tolist() == [6]
    assert history.validated_on == "91"


def test_a_part_of_the_examples_is_named() -> None:
    given = fitted(vectors(700, seed=1), val_size=100).history
    assert given.validated_on == "100 of 700" and given.measured("val_examples")[0].tolist() == [100] * 4
    assert fitted(vectors(300), val_interval=None).history["val_examples"][[0, -1]].tolist() == [300, 300]
    options = {"strategies": {"DiLoCo": DiLoCoStrategy(H=4, lr=0.01)}, **QUICK, "max_steps": 1, "batch_size": 32}
    part, whole = (vsim.compare(small(), vectors(64), vectors(n), **options) for n in (3000, 300))
    assert "2,048 of 3,000" in part.table() and "2,048 of 3,000" in part.title
    assert "validated on" not in whole.table() + whole.title


@pytest.mark.parametrize("strategy", [FedAvgStrategy(H=2), GossipStrategy(H=2)])
def test_the_global_model_alone_is_measured_alike(strategy: Algorithm) -> None:
    options: dict[str, Any] = {"strategy": strategy, "num_nodes": 3, "max_steps": 5, "batch_size": 4, "val_interval": 2}
    measured = []
    for val_nodes in (True, False):
        trainer = Trainer(small(), vectors(40), vectors(20, seed=1))
        trainer.fit(**options, val_nodes=val_nodes, progress=False)
        measured.append(trainer.history)
    every, alone = measured
    of_nodes = {"local_loss", "local_accuracy", "node_loss_min", "node_loss_max", "node_loss_std"}
    for column in set(every.columns) - of_nodes - {"seconds", "validation_seconds", "memory_bytes"}:
        np.testing.assert_allclose(alone[column], every[column], rtol=1e-6, err_msg=column)
    for column in of_nodes:
        assert np.isfinite(every.column(column)[-1]) and np.isnan(alone.column(column)).all(), column


def test_runs_with_other_seeds_are_measured_on_the_same_examples() -> None:
    val, strategy, options = vectors(300, seed=1), DiLoCoStrategy(H=4, lr=0.01), {**QUICK, "val_size": 50}
    comparison = vsim.compare(small(), vectors(64), val, strategies={"DiLoCo": strategy}, seeds=[0, 1], **options)
    one, other = (history["global_loss"] for history in comparison.histories["DiLoCo"])
    assert one[0] == other[0]  # both start from one model
    alone = Trainer(small(), vectors(64), val)
    alone.fit(strategy=strategy, seed=1, **options)
    assert alone.history["global_loss"][[0, -1]] == pytest.approx(other[[0, -1]], rel=1e-5)


class Clamped(nn.Module):
    """Writes its weights in every forward pass, in evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(20, 4, max_norm=0.5)
        self.out = nn.Linear(4, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.table((x[:, :3].abs() * 5).long().clamp(max=19)).mean(1))


@pytest.mark.parametrize("strategy", [FedAvgStrategy(H=4, lr=0.01), DiLoCoStrategy(H=4, lr=0.01)])
def test_a_model_that_writes_its_weights_in_evaluation_trains_alike(strategy: FedAvgStrategy) -> None:
    torch.manual_seed(0)
    model, val = Clamped(), vectors(40, seed=2)
    options = {"strategy": strategy, "loss_fn": F.cross_entropy, "executor": "loop"}
    often, never = (fitted(val, model, val_interval=interval, **options) for interval in (1, None))
    assert torch.equal(often.strategy.cluster.weights, never.strategy.cluster.weights)


def branching(outputs: Tensor, y: Tensor) -> Tensor:
    """A loss that reads a number, which vmap cannot."""
    loss = F.cross_entropy(outputs, y)
    return loss if loss.item() > 0 else loss * 2


def contrastive(outputs: Tensor, y: Tensor) -> Tensor:
    """A loss that compares the examples of a batch with each other: zero for a single one."""
    return F.cross_entropy(outputs @ outputs.T, torch.arange(len(outputs)))


def test_a_loss_that_cannot_be_vectorized_over_examples_has_a_standard_error_too() -> None:
    by_example, plain = (
        fitted(vectors(50, seed=1), loss_fn=loss, executor="loop").history.last("global_loss_se")
        for loss in (branching, F.cross_entropy)
    )
    assert by_example == pytest.approx(plain, rel=1e-5)
    assert math.isnan(fitted(vectors(50, seed=1), loss_fn=contrastive, executor="loop").history.last("global_loss_se"))


class Differentiating(nn.Module):
    """Computes its loss from gradients in forward, and has statistics and dropout."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2))
        self.head = nn.Linear(8, 1)
        self.register_buffer("calls", torch.zeros(()))

    def energy(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.head(self.body(x))[:, 0]


class Equation(Differentiating):
    """A physics-informed network: the residual of a differential equation."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].requires_grad_()
        u = self.energy(x)
        (slope,) = torch.autograd.grad(u.sum(), x, create_graph=True)
        return (slope.sum(1) + u - batch[1]).square().mean()


class Forces(Differentiating):
    """A force field, which keeps no graph of its forces in evaluation, and has an error of its own."""

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        x = batch[0].clone().requires_grad_()
        energy = self.energy(x)
        if not energy.requires_grad:
            raise AssertionError("forces are derivatives: enable gradients")
        (minus,) = torch.autograd.grad(energy.sum(), x, create_graph=self.training, retain_graph=True)
        return (energy - batch[1]).square().mean() + minus.square().mean()


def norm_of_gradient(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    return torch.autograd.grad(model(batch), model.head.bias, create_graph=True)[0].norm()


@pytest.mark.filterwarnings("ignore:executor='auto' continues with 'loop'")
@pytest.mark.parametrize(("kind", "executor"), [(Equation, "auto"), (Forces, "loop")])
def test_models_that_differentiate_are_validated_as_plain_pytorch_does(kind: Any, executor: str) -> None:
    val, clients = vectors(12, seed=1), [vectors(10, seed=2), vectors(10, seed=3)]  # each in one batch
    metrics = {"norm": norm_of_gradient, "weights": lambda model, batch: model.head.weight.sum()}
    options: dict[str, Any] = {"executor": executor, "strategy": FedAvgStrategy(inner_optim="sgd", H=4, lr=0.05)}
    measured = fitted(
        val, kind(), metrics=metrics, client_val_dataset=lambda rank, *_: clients[rank], val_interval=1, **options
    )
    history, cluster = measured.history, measured.strategy.cluster
    assert history.executor == "loop"
    model = cluster.replicas.as_module(measured.strategy.model_weights(), cluster.mean_buffers(), like=kind()).eval()

    def loss(data: TensorDataset) -> Tensor:
        model.zero_grad()
        return model([t.clone() for t in data.tensors]).detach()

    assert history.last("global_loss") == pytest.approx(float(loss(val)), rel=1e-5)
    assert history.client_val_losses == pytest.approx([float(loss(data)) for data in clients], rel=1e-5)
    assert history.last("norm") == pytest.approx(float(norm_of_gradient(model, val.tensors).detach()), rel=1e-4)
    assert history.last("weights") == pytest.approx(float(model.head.weight.sum().detach()), rel=1e-4)
    examples = torch.stack([loss(TensorDataset(*(t[i : i + 1] for t in val.tensors))) for i in range(12)])
    assert history.last("global_loss_se") == pytest.approx(float(examples.std()) / math.sqrt(12), rel=1e-4)
    alone = fitted(val, kind(), val_interval=None, **options).strategy.cluster
    assert torch.equal(alone.weights, cluster.weights)
    for name, buffer in alone.replicas.buffers.items():
        assert torch.equal(buffer, cluster.replicas.buffers[name])
    assert not any(t.requires_grad or t.grad_fn for t in (cluster.weights, *cluster.replicas.buffers.values()))


@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_other_models_are_validated_without_gradients(executor: str) -> None:
    class Ordinary(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            assert torch.is_grad_enabled() == self.training
            return super().forward(x)

    def norm(model: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
        model.train(torch.is_grad_enabled())
        loss = F.cross_entropy(model(batch[0]), batch[1])
        return torch.autograd.grad(loss, model.bias)[0].norm()

    options: dict[str, Any] = {"loss_fn": F.cross_entropy, "executor": executor, "val_interval": 1}
    history = fitted(vectors(20, seed=1), Ordinary(4, 2), metrics={"norm": norm}, **options).history
    assert history.measured("norm")[0].min() > 0


def test_a_metric_that_fails_is_named() -> None:
    for error in (ZeroDivisionError("no examples"), ValueError("no gradient")):

        def failing(model: nn.Module, batch: Any, error: Exception = error) -> float:
            raise error

        with refused(type(error), "metrics['ratio']", str(error)):
            fitted(vectors(20), metrics={"ratio": failing})


def test_batches_without_a_label_are_named() -> None:
    data = TensorDataset(torch.randn(16, 4), torch.full((16,), -100))
    trainer = Trainer(nn.Linear(4, 2), data, loss_fn=F.cross_entropy)
    with refused(FloatingPointError, "step 1 … batch[1] … -100"):
        trainer.fit(strategy=FedAvgStrategy(H=2), num_nodes=2, max_steps=1, batch_size=4, progress=False)


def test_test_data_are_measured_once_on_the_final_global_model(tmp_path: Path) -> None:
    train, val, test = (vectors(40, seed) for seed in (0, 1, 2))
    seen: list[int] = []

    class Watched(TensorDataset):
        def __getitem__(self, index: int) -> tuple[Tensor, ...]:
            seen.append(index)
            return super().__getitem__(index)

    options = {**QUICK, "batch_size": 8, "val_interval": 1}
    strategies = {"AllReduce": SimpleReduceStrategy(lr=0.1), "DiLoCo": DiLoCoStrategy(H=3, lr=0.1)}
    watched = Watched(*test.tensors)
    runs = vsim.compare(small(), train, val, strategies=strategies, test_dataset=watched, **options)
    assert set(seen) == set(range(len(test))) and len(seen) <= 4 * len(test)  # briefly before training, then once
    for name, strategy in strategies.items():
        trainer, without = (vsim.Trainer(small(), train, val) for _ in range(2))
        trainer.fit(strategy=strategy, test_dataset=lambda rank, nodes, train: test, **options)
        loss = float(losses_by_hand(trainer, test).mean())
        for history in (trainer.history, runs[name].history):
            assert history["test_loss"][-1] == pytest.approx(loss, rel=1e-5) and 0 < history["test_accuracy"][-1] < 1
            assert np.isnan(history["test_loss"][:-1]).all()
        without.fit(strategy=strategy, **options)
        np.testing.assert_array_equal(without.history["global_loss"], trainer.history["global_loss"])
    assert [row["test loss"] for row in runs.rows().to_dict("records")] == [
        run.history["test_loss"][-1] for run in runs.values()
    ]
    assert "test loss" in runs.table().splitlines()[0]
    assert runs["DiLoCo"].history.config["test_dataset"]["examples"] == 40
    runs.to_json(tmp_path / "runs.json")
    assert vsim.Comparison.from_json(tmp_path / "runs.json").table() == runs.table()
    with refused(TypeError, "test_dataset"):
        trainer.fit(strategy=strategy, test_dataset=7, **options)


def test_a_longer_run_has_its_own_test_loss(tmp_path: Path) -> None:
    trainer, options = vsim.Trainer(small(), vectors(40)), {**QUICK, "test_dataset": vectors(40, 2)}
    options |= {"strategy": DiLoCoStrategy(H=2), "save_dir": tmp_path}
    trainer.fit(**{**options, "max_steps": 2})
    early = trainer.history.last("test_loss")
    trainer.fit(resume=True, **options)
    losses = trainer.history["test_loss"]
    assert np.isnan(losses[:-1]).all() and losses[-1] not in (early, np.nan)


@pytest.mark.parametrize(
    "options",
    [
        {"callbacks": [lambda run: run.stop() if run.done == 2 else None]},
        {"strategy": FedAvgStrategy(H=2), "participation": vsim.Sample(2, of=4)},
        {"strategy": AsyncDiLoCoStrategy(H=2), "compute": 0.1},
        {"loss_fn": lambda outputs, y: F.cross_entropy(outputs, y), "accuracy": False},
        pytest.param({"backend": "process"}, marks=pytest.mark.slow),
        pytest.param({"backend": "process", "num_processes": 2}, marks=pytest.mark.slow),
    ],
)
def test_every_kind_of_run_ends_with_a_test_loss(options: dict[str, Any]) -> None:
    test = vectors(40, 2)
    history = fitted(test, **options, test_dataset=test).history  # the test data are the validation data
    assert np.isfinite(history["test_loss"]).nonzero()[0].tolist() == [len(history) - 1]
    assert history["test_loss"][-1] == pytest.approx(history["global_loss"][-1], rel=1e-6)
    assert np.isnan(history["test_accuracy"][-1]) == ("accuracy" in options)
