"""Trainer: what a fit returns, measures, calls back and leaves behind."""

from __future__ import annotations

import copy
import sys
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from errors import refused
from hypothesis import given, settings
from hypothesis import strategies as st
from reference_cluster import (
    TASKS,
    AverageWeights,
    Task,
    images,
    small_cnn,
    small_gpt,
    small_mlp,
    train_separately,
    vectors,
)
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import TensorDataset

import vsim
from vsim import Trainer
from vsim.data.batches import validation_examples
from vsim.engine import VmapExecutor
from vsim.engine.compiled import CompiledExecutor
from vsim.engine.machine import pick_device
from vsim.runs import spread
from vsim.runs.spread import replica_spread
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, Strategy

both_executors = pytest.mark.parametrize("executor", ["vmap", "loop"])


def fit(trainer: Trainer, strategy: Strategy | None = None, **options: Any) -> nn.Module:
    options = {"num_nodes": 3, "max_steps": 5, "batch_size": 4, "progress": False, **options}
    return trainer.fit(strategy=strategy or DiLoCoStrategy(H=2, lr=0.01), **options)


@pytest.mark.parametrize("task", TASKS, ids=lambda task: task.name)
def test_the_final_model_is_the_mean_of_the_nodes(task: Task) -> None:
    model = task.model().eval()
    before = copy.deepcopy(model.state_dict())
    trainer = Trainer(model, task.data(), task.data())
    final = fit(trainer)
    assert type(final) is type(model) and final is not model and not final.training
    cluster = trainer.strategy.cluster
    assert torch.equal(parameters_to_vector(final.parameters()), cluster.weights.mean(0))
    for name, buffer in final.named_buffers():
        rows = cluster.replicas.buffers[name]
        assert torch.equal(buffer, rows.mean(0) if buffer.is_floating_point() else rows[0])
    for name, value in model.state_dict().items():  # the user's own is as it was
        assert torch.equal(value, before[name])
    assert all(p.grad is None for p in model.parameters())


def test_frozen_and_tied_parameters() -> None:
    model = small_gpt()
    model.positions.weight.requires_grad_(False)
    final = fit(Trainer(model, TASKS[2].data()))
    assert torch.equal(final.positions.weight, model.positions.weight)
    assert not final.positions.weight.requires_grad
    assert final.lm_head.weight is final.tokens.weight
    assert not torch.equal(final.tokens.weight, model.tokens.weight)


@pytest.mark.parametrize("processes", [{}, {"backend": "process", "num_processes": 2, "threads_per_process": 1}])
def test_without_a_step_the_untouched_model_is_measured(processes: dict[str, Any], tmp_path: Any) -> None:
    model, data = small_mlp(), vectors()
    trainer = Trainer(model, data, vectors(6))
    options: dict[str, Any] = {"num_nodes": 2, "batch_size": 4, "progress": False, **processes}
    options |= {"strategy": DiLoCoStrategy(H=3, lr=0.1, cosine_anneal=True, max_steps=4), "test_dataset": vectors(7)}
    made = trainer.fit(**options, max_steps=0, save_dir=tmp_path)
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(made.parameters(), model.parameters(), strict=True))
    first = trainer.history.to_pandas()
    assert len(first) == 1 and len(trainer.ledger) == 0
    longer = trainer.fit(**options, max_steps=4, save_dir=tmp_path, resume=True)
    resumed = trainer.history.to_pandas()
    whole = trainer.fit(**options, max_steps=4)
    expected = trainer.history.to_pandas()
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(longer.parameters(), whole.parameters(), strict=True))
    columns = ["step", "examples", "train_loss", "lr", "global_loss", "payload_bytes"]
    np.testing.assert_array_equal(resumed[columns], expected[columns])
    assert first["global_loss"][0] == expected["global_loss"][0] and first["test_loss"].notna().all()
    with refused(ValueError, "max_steps must be a whole number >= 1, got 0"):
        vsim.compare(model, data, strategies={"a": options["strategy"]}, num_nodes=2, max_steps=0)
    with refused(ValueError, "max_steps of 'a' must be a whole number >= 1, got 0"):
        vsim.compare(model, data, strategies={"a": options["strategy"]}, num_nodes=2, max_steps={"a": 0})


def test_the_number_of_steps() -> None:
    # 29 examples on 3 nodes are shards of 10: 3 batches of at most 4.
    dropping = {"num_epochs": 2, "dataloader_kwargs": {"drop_last": True}}
    for options, steps in (({"num_epochs": 2}, 6), ({"num_epochs": None}, 3), (dropping, 4)):
        trainer = Trainer(small_mlp(), vectors())
        fit(trainer, **{"max_steps": None, **options})
        assert trainer.history["step"][-1] == steps and len(trainer.history) == steps + 1


@pytest.mark.parametrize("strategy", [DiLoCoStrategy(H=3, lr=0.01), FedAvgStrategy(H=3, lr=0.01)])
@pytest.mark.parametrize(("task", "executor"), [*zip(TASKS, ["vmap", "loop", "vmap"], strict=True)])
def test_validation_by_hand(task: Task, executor: str, strategy: Strategy) -> None:
    trainer = Trainer(task.model(), task.data(), task.data())
    # After 5 steps the replicas have drifted apart again; 11 examples are pieces of 4, 4 and 3.
    final = fit(trainer, strategy, executor=executor, val_size=11).eval()
    batch, cluster = validation_examples(task.data(), 11, None).batch, trainer.strategy.cluster

    def measure(weights: Tensor, buffers: dict[str, Tensor]) -> tuple[float, float]:
        with torch.no_grad():
            loss, accuracy = cluster.replicas.as_module(weights, buffers, final).loss_and_accuracy(batch)
        return float(loss), float(accuracy)

    nodes = [measure(cluster.weights[k], {n: b[k] for n, b in cluster.replicas.buffers.items()}) for k in range(3)]
    average, _ = measure(parameters_to_vector(final.parameters()), dict(final.named_buffers()))
    overall = measure(trainer.strategy.model_weights(), dict(final.named_buffers()))
    losses = [loss for loss, _ in nodes]
    expected = {
        "local_loss": losses[0],
        "local_accuracy": nodes[0][1],
        "global_loss": overall[0],
        "global_accuracy": overall[1],
        "average_loss": average,
        "node_loss_min": min(losses),
        "node_loss_max": max(losses),
        "node_loss_std": np.std(losses),
    }
    assert {name: trainer.history[name][-1] for name in expected} == pytest.approx(expected, rel=1e-4)
    assert len(set(losses)) == 3
    assert (overall[0] != average) == isinstance(strategy, DiLoCoStrategy)


def test_measurements_that_cannot_be_made_are_nan() -> None:
    data = TensorDataset(torch.ones(9, 12), torch.ones(9, 1))
    trainer, without = Trainer(nn.Linear(12, 1), data, data, loss_fn=F.mse_loss), Trainer(small_mlp(), vectors())
    fit(trainer)
    assert not np.isnan(trainer.history["global_loss"][-1]) and np.isnan(trainer.history["global_accuracy"]).all()
    fit(without)
    assert np.isnan(without.history["global_loss"]).all()


def test_a_factory_makes_the_validation_data_of_the_first_node() -> None:
    asked: list[tuple[int, bool]] = []

    def factory(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        asked.append((rank, train))
        return vectors(seed=rank if train else 9)

    trainer, other = Trainer(small_mlp(), factory, factory), Trainer(small_mlp(), factory, vectors(seed=9))
    fit(trainer)
    assert asked == [(0, True), (1, True), (2, True), (0, False)]
    fit(other)
    assert trainer.history.last("global_loss") == other.history.last("global_loss")


@settings(max_examples=40)
@given(num_nodes=st.integers(1, 5), columns=st.integers(2, 60), at_once=st.integers(1, 70), seed=st.integers(0, 999))
def test_divergence_and_correlation_are_numpys(num_nodes: int, columns: int, at_once: int, seed: int) -> None:
    weights = torch.randn(num_nodes, columns, generator=torch.Generator().manual_seed(seed)) + 0.3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(spread, "_COLUMNS_AT_ONCE", at_once)
        found = replica_spread(weights)
    rows = weights.double().numpy()
    mean = rows.mean(0)
    distance = np.sqrt(((rows - mean) ** 2).sum(1).mean())
    assert found["divergence"] == pytest.approx(distance / np.linalg.norm(mean), rel=1e-4, abs=1e-6)
    pairs = np.corrcoef(rows)[np.triu_indices(num_nodes, 1)] if num_nodes > 1 else np.array([np.nan])
    assert found["correlation"] == pytest.approx(pairs.mean(), rel=1e-3, abs=1e-4, nan_ok=True)


def test_spread_is_measured_when_asked_for() -> None:
    trainer = Trainer(small_mlp(), vectors())
    fit(trainer, Strategy(lr=0.01), correlation_interval=2, max_steps=4)
    steps, divergence = trainer.history.measured("step", "divergence")
    assert steps.tolist() == [0, 2, 4] and divergence[0] == 0 and (np.diff(divergence) > 0).all()
    assert divergence[-1] == replica_spread(trainer.strategy.cluster.weights)["divergence"]
    assert np.isnan(replica_spread(torch.zeros(2, 3))["divergence"])


@both_executors
def test_a_loss_that_is_not_finite_names_step_and_nodes(executor: str) -> None:
    def data(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        x, y = vectors(12).tensors
        if rank in (1, 3):
            x[-1] = torch.inf if rank == 1 else torch.nan  # the third batch of 4, unshuffled
        return TensorDataset(x, y)

    trainer = Trainer(small_mlp(), data)
    with refused(FloatingPointError, "step 3 … nodes [1, 3] … node 1: nan, node 3: nan … not finite: batch[0]"):
        fit(trainer, FedAvgStrategy(H=2, lr=0.01), num_nodes=4, shuffle=False, executor=executor)
    assert trainer.history["step"].tolist() == [0, 1, 2] and len(trainer.ledger) == 1


def test_the_progress_bar(capsys, monkeypatch) -> None:
    trainer = Trainer(small_mlp(), vectors(), vectors())
    for progress in (False, True):  # nor into a file or a pipe
        fit(trainer, progress=progress)
    assert capsys.readouterr() == ("", "")
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    fit(trainer, progress=True)
    out, err = capsys.readouterr()
    assert out == "" and "DiLoCo × 3" in err and "5/5" in err
    assert f"loss {trainer.history.last('train_loss'):.3f}, 0.00 MB sent" in err
    assert "compiling" not in err
    monkeypatch.setattr(VmapExecutor, "preparing", CompiledExecutor.preparing)
    monkeypatch.setattr(VmapExecutor, "compile_seconds", None, raising=False)
    fit(trainer, progress=True)
    assert "compiling: some 10 to 60 s" in capsys.readouterr().err
    vsim.compare(small_mlp(), vectors(), strategies={"a": Strategy(), "b": Strategy(lr=0.1)}, num_nodes=2, max_steps=3)
    assert "compiling: some 10 to 60 s" in capsys.readouterr().err


def test_devices(monkeypatch) -> None:
    trainer = Trainer(small_mlp(), vectors(), device="cpu")
    fit(trainer, device=torch.device("cpu"))
    assert trainer.strategy.cluster.weights.device.type == "cpu"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert pick_device(None) == torch.device("cuda") and pick_device("cuda:1") == torch.device("cuda:1")
    for beyond in ("cuda:2", "mps:1", "cpu:7"):
        with refused(ValueError, beyond):
            pick_device(beyond)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert pick_device(None) == torch.device("mps")
    with refused(ValueError, "cuda … mps, cpu"):
        pick_device("cuda")


def texts(length: int | None = None) -> Any:
    """Words of one to eight tokens; padded to `length`, or as they are."""
    stream = torch.Generator().manual_seed(0)
    sizes = torch.randint(1, 9, (29,), generator=stream).tolist()
    words = [torch.randint(1, 11, (size,), generator=stream) for size in sizes]
    wide = [F.pad(word, (0, length - len(word))) if length else word for word in words]
    return [[word, torch.tensor(i % 5)] for i, word in enumerate(wide)]


def padded(samples: list[list[Tensor]]) -> list[Tensor]:
    """Pad to the longest text of a node's batch."""
    texts, labels = zip(*samples, strict=True)
    return [nn.utils.rnn.pad_sequence(list(texts), batch_first=True), torch.stack(labels)]


class Bag(nn.Module):
    """Reads no padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, 5)

    def forward(self, batch: list[Tensor]) -> Tensor:
        known = (batch[0] > 0).float()[..., None]
        return F.cross_entropy(self.head((self.words(batch[0]) * known).sum(1) / known.sum(1)), batch[1])


class Choosing(Bag):
    """Takes words out of the texts, which cannot be vectorized."""

    def forward(self, batch: list[Tensor]) -> Tensor:
        return super().forward(batch) + self.words(batch[0][batch[0] > 0]).square().mean()


@pytest.mark.filterwarnings("ignore:executor='auto' continues with 'loop'")
@pytest.mark.parametrize(("kind", "executor"), [(Bag, "vmap"), (Bag, "loop"), (Choosing, "auto")])
def test_batches_of_different_lengths_train_as_separate_models(kind: type[Bag], executor: str) -> None:
    options: dict[str, Any] = {"num_nodes": 3, "max_steps": 6, "batch_size": 4, "minibatch_size": 2}
    expected = train_separately(
        kind(), texts(8), AverageWeights(2), lambda parameters: torch.optim.SGD(parameters, lr=0.5), **options
    )
    trainer = Trainer(kind(), texts())
    strategy = FedAvgStrategy(inner_optim="sgd", H=2, lr=0.5)
    fit(trainer, strategy, executor=executor, dataloader_kwargs={"collate_fn": padded}, **options)
    torch.testing.assert_close(trainer.strategy.cluster.weights, expected.weights)
    torch.testing.assert_close(torch.as_tensor(trainer.history.node_losses).float(), torch.tensor(expected.losses))
    assert trainer.history.executor == ("loop" if kind is Choosing else executor)


def test_runs_in_threads_draw_what_each_draws_alone() -> None:
    def trained(seed: int) -> tuple[Tensor, Any]:
        trainer = Trainer(vsim.models.MLP(12, (16,), 5, dropout=0.5, seed=seed), vectors())
        fit(trainer, Strategy(lr=0.1), seed=seed, max_steps=3, deterministic=True)
        return parameters_to_vector(trainer.model.parameters()), trainer.history.node_losses

    alone = [trained(seed) for seed in range(4)]
    before = torch.get_rng_state()
    with ThreadPoolExecutor(4) as pool:
        in_threads = list(pool.map(trained, range(4)))
    assert torch.equal(torch.get_rng_state(), before)
    for (weights, losses), (own_weights, own_losses) in zip(in_threads, alone, strict=True):
        assert torch.equal(weights, own_weights)
        np.testing.assert_array_equal(losses, own_losses)


@pytest.mark.parametrize(("mode", "executor"), [(torch.no_grad, "loop"), (torch.inference_mode, "vmap")])
def test_a_run_trains_in_any_mode_of_its_caller(mode: Any, executor: str) -> None:
    def trained() -> list[Tensor]:
        model, seen = small_cnn(), list[nn.Module]()
        model.head.bias.requires_grad_(False)
        options: dict[str, Any] = {"executor": executor, "max_steps": 1, "num_nodes": 2}
        trainer = Trainer(model, images(), images())
        nested = Trainer(model, images())
        final = fit(trainer, callbacks=[lambda run: seen.append(fit(nested, **options))], **options)
        metrics = {"nested": lambda model, batch: seen.append(fit(nested, **options)) or 0.0}
        fit(trainer, metrics=metrics, **options)
        assert all(p.requires_grad and not p.is_inference() for p in final.features.parameters())
        every = [t for own in (final, *seen) for t in (*own.parameters(), *own.buffers())]
        return [*every, torch.as_tensor(trainer.history.measured("global_loss")[0])]

    expected = trained()
    with mode():
        found = trained()
        assert torch.is_inference_mode_enabled() == (mode is torch.inference_mode) and not torch.is_grad_enabled()
    assert all(map(torch.equal, found, expected)) and len(found) == len(expected)


@pytest.mark.slow
def test_processes_train_in_inference_mode() -> None:
    options = {"batch_size": 4, "dataloader_kwargs": {"collate_fn": padded}, "progress": False}
    with torch.inference_mode():
        report = vsim.verify(Choosing(), texts(), FedAvgStrategy(H=2, lr=0.01), 3, 6, num_processes=2, **options)
    assert report.identical, report


class Layer(nn.Linear):
    """Takes a tuple, as models of EXO Gym do, and returns the loss."""

    def __init__(self) -> None:
        super().__init__(12, 5)
        with torch.no_grad():
            self.weight.copy_(torch.linspace(-1, 1, 60).view(5, 12))
            self.bias.zero_()

    def forward(self, batch: Any) -> Any:
        assert isinstance(batch, tuple)
        return F.cross_entropy(super().forward(batch[0]), batch[1])


class NanoGPTs(Layer):
    def forward(self, idx: Tensor, targets: Tensor | None = None) -> Any:
        return nn.Linear.forward(self, idx), None if targets is None else Layer.forward(self, (idx, targets))


class HuggingFaces(Layer):
    def forward(self, input_ids: Tensor, attention_mask: Tensor | None = None, labels: Any = None) -> Any:
        return {"loss": Layer.forward(self, (input_ids, labels)), "logits": nn.Linear.forward(self, input_ids)}


class Output(NamedTuple):
    loss: Tensor


class OfDict(Layer):
    def forward(self, batch: dict[str, Tensor]) -> Any:
        return Output(Layer.forward(self, (batch["input_ids"], batch["labels"])))


class Outputs(Layer):
    def forward(self, x: Tensor) -> Any:
        return nn.Linear.forward(self, x)


NAMED: Any = [{"input_ids": x, "labels": y} for x, y in vectors()]


@both_executors
def test_every_form_of_a_model_and_its_batches_trains_alike(executor: str) -> None:
    def losses(model: nn.Module, data: Any, loss_fn: Any = None) -> Any:
        trainer = Trainer(model, data, data, loss_fn=loss_fn)
        is_dict = {"is a dict": lambda m, batch: float(isinstance(batch, dict))}
        fit(trainer, Strategy(lr=0.1), max_steps=2, metrics=is_dict, executor=executor)
        assert trainer.history["is a dict"][-1] == (data is NAMED)
        return trainer.history.node_losses

    expected = losses(Layer(), vectors())
    for model, data in ((NanoGPTs(), vectors()), (HuggingFaces(), NAMED), (OfDict(), NAMED)):
        np.testing.assert_allclose(losses(model, data), expected, rtol=1e-5, err_msg=type(model).__name__)
    np.testing.assert_allclose(losses(Outputs(), vectors(), F.cross_entropy), expected, rtol=1e-5)
    weighted = losses(Outputs(), vectors(), nn.CrossEntropyLoss(weight=torch.ones(5)))
    np.testing.assert_allclose(weighted, expected, rtol=1e-5)
