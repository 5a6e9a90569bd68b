"""Validation: on which examples, with which error, and without any effect on training."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vsim
from vsim import Trainer
from vsim.models import MLP
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy


def vectors(count: int, seed: int = 0) -> TensorDataset:
    stream = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 4, generator=stream)
    return TensorDataset(x, (x[:, 0] + torch.randn(count, generator=stream) > 0).long())


def fitted(val: TensorDataset, model: nn.Module | None = None, **options) -> Trainer:  # type: ignore[no-untyped-def]
    options = {"strategy": DiLoCoStrategy(H=4, lr=0.01), "num_nodes": 2, "max_steps": 6, "val_interval": 2} | options
    trainer = Trainer(model or MLP(4, (8,), 2, seed=0), vectors(64), val, loss_fn=options.pop("loss_fn", None))
    trainer.fit(progress=False, batch_size=4, **options)
    return trainer


def losses_by_hand(trainer: Trainer, val: TensorDataset) -> Tensor:
    assert trainer.strategy is not None
    weights = trainer.strategy.global_weights()
    model = trainer.strategy.cluster.replicas.as_module(weights, {}, MLP(4, (8,), 2))
    x, y = val.tensors
    return F.cross_entropy(model(x), y, reduction="none").detach().double()


def test_the_final_loss_is_of_all_examples_and_has_a_standard_error() -> None:
    val = vectors(700, seed=1)
    trainer = fitted(val)
    history, losses = trainer.history, losses_by_hand(trainer, val)
    assert history.last("global_loss") == pytest.approx(float(losses.mean()), rel=1e-5)
    assert history.last("global_loss_se") == pytest.approx(float(losses.std()) / math.sqrt(700), rel=1e-4)
    steps, used, total = history.measured("step", "val_examples", "val_total")
    assert steps.tolist() == [0, 2, 4, 6]
    assert used.tolist() == [700] * 4 and set(total) == {700}
    assert history.measured("step", "global_loss_se")[0].tolist() == [6]
    assert history.validated_on == "700"


def test_a_part_of_the_examples_is_named() -> None:
    given = fitted(vectors(700, seed=1), val_size=100).history
    assert given.validated_on == "100 of 700" and given.measured("val_examples")[0].tolist() == [100] * 4
    assert fitted(vectors(3000, seed=1)).history.validated_on == "2,048 of 3,000"
    assert fitted(vectors(300), val_interval=None).history["val_examples"][[0, -1]].tolist() == [300, 300]


def test_a_run_that_is_stopped_is_measured_on_all_examples_too() -> None:
    val, seen = vectors(700, seed=1), []

    def stop(run: Any) -> None:
        seen.append(run.row.get("val_examples"))
        if run.done == 3:
            run.stop()

    trainer = fitted(val, callbacks=[stop])
    assert len(trainer.history) == 4 and seen == [None, 700, None]
    assert trainer.history.validated_on == "700" and trainer.history["global_loss_se"][-1] > 0
    expected = float(losses_by_hand(trainer, val).mean())
    assert trainer.history.last("global_loss") == pytest.approx(expected, rel=1e-5)


def test_table_and_title_name_the_part() -> None:
    strategies = {"DiLoCo": DiLoCoStrategy(H=4, lr=0.01)}
    options = {"strategies": strategies, "num_nodes": 2, "max_steps": 1, "progress": False}
    part, whole = (vsim.compare(MLP(4, (8,), 2, seed=0), vectors(64), vectors(n), **options) for n in (3000, 300))  # type: ignore[arg-type]
    assert "2,048 of 3,000" in part.table() and "2,048 of 3,000" in part._title()
    assert "validated on" not in whole.table() + whole._title()


def test_runs_with_other_seeds_are_measured_on_the_same_examples() -> None:
    val = vectors(3000, seed=1)
    strategies = {"DiLoCo": DiLoCoStrategy(H=4, lr=0.01), "AllReduce": SimpleReduceStrategy(lr=0.01)}
    options = {"num_nodes": 2, "max_steps": 2, "batch_size": 4, "progress": False}
    model = MLP(4, (8,), 2, seed=0)
    comparison = vsim.compare(model, vectors(64), val, strategies=strategies, seeds=[0, 1], **options)
    first = {history["global_loss"][0] for own in comparison.histories.values() for history in own}
    assert len(first) == 1  # all start from one model
    alone = Trainer(model, vectors(64), val)
    alone.fit(strategy=strategies["DiLoCo"], seed=1, **options)
    expected = comparison.histories["DiLoCo"][1]["global_loss"]
    assert alone.history["global_loss"][[0, -1]] == pytest.approx(expected[[0, -1]], rel=1e-5)


def test_results_do_not_depend_on_the_size_of_the_batches_of_evaluation() -> None:
    columns = ("global_loss", "global_accuracy", "local_loss", "global_loss_se")
    one, other = (fitted(vectors(91, seed=1), minibatch_size=size).history for size in (1, 4))
    for name in columns:
        assert one.measured(name)[0] == pytest.approx(other.measured(name)[0], rel=1e-4)


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
    often, never = (fitted(val, model, val_interval=interval, **options) for interval in (1, None))  # type: ignore[arg-type]
    assert often.strategy is not None and never.strategy is not None
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


def test_batches_without_a_label_are_named() -> None:
    data = TensorDataset(torch.randn(16, 4), torch.full((16,), -100))
    trainer = Trainer(nn.Linear(4, 2), data, loss_fn=F.cross_entropy)
    with pytest.raises(FloatingPointError, match=r"non-finite loss at step 1.* batch\[1\] is -100 throughout"):
        trainer.fit(strategy=FedAvgStrategy(H=2), num_nodes=2, max_steps=1, batch_size=4, progress=False)
