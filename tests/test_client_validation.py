"""The global model on every client's own data: after the last step, for every backend, kept in every record."""

from __future__ import annotations

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
from vsim import Sample
from vsim.data import partition
from vsim.history.history import History
from vsim.models import MLP
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, FedPerStrategy

OPTIONS: dict[str, Any] = {"num_nodes": 2, "max_steps": 4, "batch_size": 4, "progress": False, "val_interval": None}
COHORT: dict[str, Any] = {**OPTIONS, "participation": Sample(2, of=5)}
CLIENTS = [f"client accuracy{of}" for of in ("", ", 10th percentile", ", worst tenth", ", worst")]


def data(rank: int, num_nodes: int, train: bool) -> TensorDataset:
    """12 examples to train on; 2, 5, 8, … others to validate."""
    stream = torch.Generator().manual_seed(2 * rank + train)
    size = 12 if train else 2 + 3 * rank
    return TensorDataset(torch.randn(size, 4, generator=stream), torch.randint(2, (size,), generator=stream))


def small() -> MLP:
    return MLP(4, (8,), 2, seed=0)


def fitted(model: nn.Module | None = None, val: Any = None, **options: Any) -> vsim.Trainer:
    trainer = vsim.Trainer(model or small(), data, val, loss_fn=options.pop("loss_fn", None))
    trainer.fit(**{"strategy": FedAvgStrategy(H=2, lr=1e-2), "client_val_dataset": data, **COHORT, **options})
    return trainer


class Constant(nn.Module):
    """Takes one of two classes for likelier by the sign of the input; a weight that training leaves at 1."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * torch.stack([x[:, 0], -x[:, 0]], 1)


def test_losses_and_accuracies_by_hand() -> None:
    # Client k is right on k of its 4 examples. Loss where right: log(1 + e⁻²); where wrong 2 more.
    signs = torch.tensor([[1.0 if i < k else -1.0 for i in range(4)] for k in range(5)])

    def own(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        assert num_nodes == 5
        return TensorDataset(signs[rank][:, None], torch.zeros(4, dtype=torch.long))

    strategies = {"FedAvg": FedAvgStrategy(H=2, inner_optim="sgd", lr=1e-30)}
    options = {"strategies": strategies, "client_val_dataset": own, "loss_fn": F.cross_entropy, **COHORT}
    comparison = vsim.compare(Constant(), own, **options)
    history, right = comparison["FedAvg"].history, np.log1p(np.exp(-2))
    assert history.client_val_accuracies.tolist() == [0, 0.25, 0.5, 0.75, 1]
    assert history.client_val_losses == pytest.approx([right + 2 * (4 - k) / 4 for k in range(5)], rel=1e-6)
    (row,) = comparison.rows().to_dict("records")
    assert [row[name] for name in CLIENTS] == pytest.approx([0.5, 0.1, 0.0, 0.0])  # 0 + 0.4 · (0.25 − 0)
    frame = comparison.to_pandas()
    assert frame[CLIENTS[0]].notna().tolist() == [False] * 4 + [True]
    assert frame[CLIENTS].iloc[-1].tolist() == pytest.approx([0.5, 0.1, 0.0, 0.0])
    spread = [f"client accuracy, {of}" for of in ("deviation", "Gini")]
    # Σ_ij |a_i − a_j| / (2 · 25 · .5) = .4
    assert [row[name] for name in spread] == pytest.approx([0.125**0.5, 0.4]) and "client accuracy, honest" not in row
    assert "client" not in comparison.table().replace("/client", "")  # only when it is asked for
    assert "50.0 %" in comparison.table(columns=CLIENTS) and "10.0 %" in comparison.table(columns=CLIENTS)


def test_attackers_and_honest_clients_apart(tmp_path: Path) -> None:
    signs = torch.tensor([[1.0 if i < k else -1.0 for i in range(4)] for k in range(5)])

    def own(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        return TensorDataset(signs[rank][:, None], torch.zeros(4, dtype=torch.long))

    attack = vsim.Attack("sign_flip", nodes=[3, 4])
    strategies = {
        "attacked": FedAvgStrategy(H=2, inner_optim="sgd", lr=1e-30, attack=attack),
        "clean": FedAvgStrategy(H=2, inner_optim="sgd", lr=1e-30),
    }
    options = {"strategies": strategies, "client_val_dataset": own, "loss_fn": F.cross_entropy, **COHORT}
    comparison = vsim.compare(Constant(), own, **options)
    comparison.to_json(tmp_path / "saved.json")
    for found in (comparison, vsim.Comparison.from_json(tmp_path / "saved.json")):
        rows = {row["strategy"]: row for row in found.rows().to_dict("records")}
        apart = [[rows[name][f"client accuracy, {of}"] for of in ("honest", "attackers")] for name in strategies]
        assert apart == [pytest.approx([0.25, 0.875]), pytest.approx([0.5, np.nan], nan_ok=True)]
        assert "87.5 %" in found.table(columns=["client accuracy, honest", "client accuracy, attackers"])
        assert found["attacked"].history.attacked_clients.tolist() == [False, False, False, True, True]


def test_without_accuracies_a_table_has_losses() -> None:
    def numbers(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        x, y = data(rank, num_nodes, train).tensors
        return TensorDataset(x, y[:, None].float())

    options = {"strategies": {"FedAvg": FedAvgStrategy(H=2, lr=1e-2)}, "client_val_dataset": numbers, **COHORT}
    comparison = vsim.compare(nn.Linear(4, 1), numbers, loss_fn=F.mse_loss, **options)
    losses = comparison["FedAvg"].history.client_val_losses
    assert comparison["FedAvg"].history.client_val_accuracies.size == 0
    (row,) = comparison.rows().to_dict("records")
    assert [row[f"client loss{own}"] for own in ("", ", 90th percentile", ", worst")] == pytest.approx(
        [losses.mean(), np.quantile(losses, 0.9), losses.max()]
    )


def test_it_is_the_final_global_model_on_each_clients_data() -> None:
    trainer = fitted(val_size=6)  # of clients 2 to 4 a sample, so that theirs are near
    assert trainer.strategy is not None
    model = trainer.strategy.cluster.replicas.as_module(trainer.strategy.model_weights(), {}, small())
    for client in range(2):
        x, y = data(client, 5, False).tensors
        assert trainer.history.client_val_losses[client] == pytest.approx(F.cross_entropy(model(x), y).item(), rel=1e-5)
    assert trainer.history.client_val_losses.shape == trainer.history.client_val_accuracies.shape == (5,)
    whole, pieces = fitted(), fitted(minibatch_size=1)  # four examples at a time
    assert pieces.history.client_val_losses == pytest.approx(whole.history.client_val_losses, rel=1e-5)


def test_the_training_data_of_a_partition() -> None:
    every = TensorDataset(*data(0, 1, True).tensors)
    clients = partition(every, 3, "iid")
    trainer = vsim.Trainer(small(), clients)
    trainer.fit(strategy=DiLoCoStrategy(H=2), client_val_dataset=clients, **{**OPTIONS, "num_nodes": 3})
    assert trainer.strategy is not None
    model = trainer.strategy.cluster.replicas.as_module(trainer.strategy.model_weights(), {}, small())
    expected = [F.cross_entropy(model(x), y).item() for x, y in (every[clients.indices(k)] for k in range(3))]
    assert trainer.history.client_val_losses == pytest.approx(expected, rel=1e-5)


def test_training_is_bitwise_the_same_and_validated_as_before() -> None:
    val = data(9, 0, False)
    with_clients, without = fitted(val=val), fitted(val=val, client_val_dataset=None)
    assert without.history.client_val_losses.size == 0
    np.testing.assert_array_equal(with_clients.history.node_losses, without.history.node_losses)
    for column in ("global_loss", "local_loss", "wire_bytes"):
        np.testing.assert_array_equal(with_clients.history[column], without.history[column])


def test_records_keep_them(tmp_path: Path) -> None:
    trainer = fitted(save_dir=tmp_path)
    expected = trainer.history.client_val_losses
    trainer.history.to_json(tmp_path / "history.json")
    kept = History.from_json(tmp_path / "history.json"), vsim.load_checkpoint(tmp_path).history
    for history in kept:
        np.testing.assert_array_equal(history.client_val_losses, expected)
        np.testing.assert_array_equal(history.client_val_accuracies, trainer.history.client_val_accuracies)
    longer = fitted(save_dir=tmp_path, resume=True, max_steps=6)
    np.testing.assert_array_equal(longer.history.client_val_losses, fitted(max_steps=6).history.client_val_losses)
    without = fitted(save_dir=tmp_path, resume=True, max_steps=8, client_val_dataset=None)
    assert without.history.client_val_losses.size == 0  # losses of step 6 are not losses of the last step
    plain = trainer.history.as_plain()
    plain["client_val"]["losses"].pop()
    with refused(ValueError, "client_val … 4 losses … 5"):
        History.from_plain(plain)


@pytest.mark.usefixtures("processes_stay")
def test_processes_measure_the_same() -> None:
    ours = fitted(deterministic=True).history
    theirs = fitted(deterministic=True, backend="process", threads_per_process=1).history
    np.testing.assert_array_equal(ours.client_val_losses, theirs.client_val_losses)
    np.testing.assert_array_equal(ours.client_val_accuracies, theirs.client_val_accuracies)


def test_runs_of_a_comparison_are_measured_as_if_alone() -> None:
    strategies = {"FedAvg": FedAvgStrategy(H=2, lr=1e-2), "DiLoCo": DiLoCoStrategy(H=2, lr=1e-2)}
    comparison = vsim.compare(small(), data, strategies=strategies, client_val_dataset=data, **COHORT)
    for name, run in comparison.items():
        alone = fitted(strategy=strategies[name]).history
        assert run.history.client_val_losses == pytest.approx(alone.client_val_losses, rel=1e-5)
        assert run.history.client_val_accuracies == pytest.approx(alone.client_val_accuracies)


def test_a_run_that_a_callback_stops_is_measured_where_it_ends() -> None:
    stopped = fitted(callbacks=[lambda run: run.stop() if run.done == 2 else None])
    np.testing.assert_array_equal(stopped.history.client_val_losses, fitted(max_steps=2).history.client_val_losses)


def test_refused() -> None:
    """Before training, and by name."""
    seen: list[int] = []

    def wrong(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        return TensorDataset(torch.zeros(3, 7), torch.zeros(3, dtype=torch.long))

    def empty(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        return TensorDataset(torch.zeros(int(rank != 1), 4))

    away = {"strategy": FedPerStrategy(H=2), "participation": vsim.Dropout(0.5)}
    for options, error, said in (
        ({"client_val_dataset": data(0, 1, False)}, TypeError, "client_val_dataset … function … TensorDataset"),
        ({"client_val_dataset": empty}, ValueError, "client_val_dataset(1, 5, False) … empty"),
        ({"client_val_dataset": wrong}, ValueError, "client 0 after step 0"),
        (away, ValueError, "client_val_dataset … FedPerStrategy … participation=Dropout"),
        ({"client_val_steps": 2, "client_val_dataset": None}, ValueError, "client_val_steps"),
        ({"client_val_steps": 0}, ValueError, "client_val_steps … 0"),
    ):
        with refused(error, said):
            fitted(train_loss_hook=lambda step, loss: seen.append(step), **options)
    trainer = vsim.Trainer(MLP(4, (8,), 2), data(0, 1, True))
    with refused(ValueError, "train_dataset … Partition"):
        trainer.fit(strategy=FedAvgStrategy(), client_val_dataset=data, client_val_steps=2, **OPTIONS)
    assert not seen


def test_the_worst_tenth_and_differences_of_clients() -> None:
    strategies = {"slow": FedAvgStrategy(H=2, lr=1e-4), "fast": FedAvgStrategy(H=2, lr=1e-2)}
    many = {**OPTIONS, "participation": Sample(2, of=12), "client_val_dataset": data, "seeds": [0, 1, 2]}
    comparison = vsim.compare(small(), data, strategies=strategies, **many)
    tail, expected = "client accuracy, worst tenth", {}
    for name in strategies:
        found = [np.sort(run.history.client_val_accuracies)[:2].mean() for run in comparison.runs(name)]
        assert [row[tail] for row in comparison.rows().to_dict("records") if row["strategy"] == name] == pytest.approx(
            [np.mean(found)]
        )
        expected[name] = np.mean(found)
    (row,) = comparison.differences("slow", of=tail).to_dict("records")
    assert row["difference"] == pytest.approx(expected["fast"] - expected["slow"])
    with pytest.raises(ValueError, match="of must be"):
        comparison.differences("slow", of="client accuracies")


def test_steps_and_rounds_to_an_accuracy() -> None:
    strategies = {"FedAvg": FedAvgStrategy(H=2, lr=0.05)}
    options = {**COHORT, "max_steps": 20, "val_interval": 1, "strategies": strategies}
    comparison = vsim.compare(small(), data, data(0, 1, True), **options)
    history = comparison["FedAvg"].history
    steps, accuracies = history.measured("step", "global_accuracy")
    target = float(accuracies.max())
    first = float(steps[np.argmax(accuracies >= target)])
    assert comparison.steps_to(accuracy=target)["FedAvg"] == [first]
    assert comparison.steps_to(accuracy=target, of="round")["FedAvg"] == [first / 2]
    assert np.isnan(comparison.steps_to(loss=1e-9, of="round")["FedAvg"]).all()
    for wrong in ({}, {"loss": 1.0, "accuracy": 0.5}):
        with pytest.raises(TypeError, match="accuracy="):
            comparison.steps_to(**wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="accuracy must be"):
        comparison.steps_to(accuracy=1.5)


@pytest.mark.parametrize("personal", [False, True])
def test_local_steps_before_a_client_is_measured(personal: bool) -> None:
    strategy = (FedPerStrategy if personal else FedAvgStrategy)(inner_optim="sgd", H=2, lr=0.1)
    options = {"strategy": strategy, "batch_size": 12}  # all examples of a client
    tuned, again = (fitted(client_val_steps=3, **options) for _ in range(2))
    np.testing.assert_array_equal(tuned.history.client_val_losses, again.history.client_val_losses)
    plain = fitted(**options)
    np.testing.assert_array_equal(tuned.history.node_losses, plain.history.node_losses)
    for client in range(5):
        model = plain.client_model(client)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for _ in range(3):
            optimizer.zero_grad()
            model(data(client, 5, True)[:]).backward()
            optimizer.step()
        expected = model(data(client, 5, False)[:]).item()
        assert tuned.history.client_val_losses[client] == pytest.approx(expected, rel=1e-4)
