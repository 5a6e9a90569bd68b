"""Accuracy: counted where a prediction is a class, of labels that count, or as the user's function says."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from errors import refused
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, TensorDataset

import vsim
from vsim import EarlyStopping, KeepBest, Trainer
from vsim.engine.objective import right_predictions
from vsim.models import MLP
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy

QUICK: dict[str, Any] = {"num_nodes": 2, "max_steps": 4, "batch_size": 4, "val_interval": 2, "progress": False}
STREAM = torch.Generator().manual_seed(0)
X = torch.randn(90, 6, generator=STREAM)
Y = (X[:, 0] + 0.5 * torch.randn(90, generator=STREAM) > 0).long()
SOME = torch.where(torch.rand(90, generator=STREAM) < 0.3, -100, Y)  # unevenly over the pieces of a validation
EXECUTORS = ("vmap", "loop")


def seeded(make: Callable[[], nn.Module]) -> nn.Module:
    torch.manual_seed(1)
    return make()


def fitted(
    outputs: int, targets: Tensor, loss_fn: Any = F.cross_entropy, **options: Any
) -> tuple[vsim.History, Tensor]:
    """The record of a linear model, and the outputs of the final one."""
    train, val = TensorDataset(X, targets), options.pop("val", TensorDataset(X, targets))
    trainer = Trainer(seeded(lambda: nn.Linear(6, outputs)), train, val, loss_fn=loss_fn)
    interval = {"val_interval": None} if val is None else {}
    model = trainer.fit(**{"strategy": SimpleReduceStrategy(lr=0.1), **QUICK, **interval, **options})
    with torch.no_grad():
        return trainer.history, model(X)


def by_hand(predicted: Tensor, labels: Tensor, counts: Tensor) -> list[int]:
    """The right predictions, and those that count, one by one."""
    triples = list(zip(predicted.flatten().tolist(), labels.flatten().tolist(), counts.flatten().tolist(), strict=True))
    return [sum(p == y for p, y, counted in triples if counted), sum(counted for *_, counted in triples)]


# The rule


@pytest.mark.parametrize("shape", [(7, 4), (7, 4, 5), (7, 4, 4), (7, 4, 3, 2), (7, 4, 4, 4)], ids=str)
@pytest.mark.parametrize(
    ("loss_fn", "ignored"),
    [
        (F.cross_entropy, {-100}),
        (F.nll_loss, {-100}),
        (nn.CrossEntropyLoss(ignore_index=2), {-100, 2}),
        (functools.partial(F.cross_entropy, ignore_index=1), {-100, 1}),
        (nn.NLLLoss(ignore_index=255), {-100, 255}),
        (lambda outputs, y: F.cross_entropy(outputs, y, ignore_index=255), {-100, 255}),
    ],
)
def test_the_argmax_over_classes(shape: tuple[int, ...], loss_fn: Any, ignored: set[int]) -> None:
    outputs = torch.randn(shape, generator=STREAM)
    labels = torch.randint(4, (7, *shape[2:]), generator=STREAM)
    labels[0], labels[1].flatten()[0] = -100, 255
    counts = torch.tensor([y in {0, 1, 2, 3} - ignored for y in labels.flatten().tolist()])
    found = right_predictions(outputs, labels, loss_fn)
    by_index = torch.tensor(
        [max(range(4), key=own.tolist().__getitem__) for own in outputs.movedim(1, -1).reshape(-1, 4)]
    )
    ambiguous = len(shape) > 2 and shape[1:-1] == shape[2:] and getattr(loss_fn, "__name__", "") == "<lambda>"
    assert found is None if ambiguous else found is not None and found.tolist() == by_hand(by_index, labels, counts)


@pytest.mark.parametrize("shape", [(40,), (40, 1), (8, 1, 5)], ids=str)
@pytest.mark.parametrize(
    ("loss_fn", "above"),
    [
        (F.binary_cross_entropy_with_logits, 0.0),
        (nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0)), 0.0),
        (functools.partial(F.binary_cross_entropy_with_logits, reduction="mean"), 0.0),
        (F.binary_cross_entropy, 0.5),
        (nn.BCELoss(), 0.5),
    ],
)
def test_one_column_of_binary_cross_entropy(shape: tuple[int, ...], loss_fn: Any, above: float) -> None:
    outputs = torch.rand(shape, generator=STREAM) if above else torch.randn(shape, generator=STREAM)
    labels = torch.randint(2, shape, generator=STREAM).float()
    labels.flatten()[:3] = torch.tensor([0.5, 0.9, -1.0])  # belong to no class
    counts = torch.tensor([y in (0, 1) for y in labels.flatten().tolist()])
    found = right_predictions(outputs, labels, loss_fn)
    assert found is not None
    assert found.tolist() == by_hand(outputs > above, labels, counts) and found[1] == 37


@pytest.mark.parametrize(
    ("outputs", "targets", "loss_fn"),
    [
        ((9, 1), (9,), F.mse_loss),  # whole numbers
        ((9, 1), (9, 1), F.mse_loss),
        ((9,), (9,), F.l1_loss),
        ((9, 1), (9,), lambda outputs, y: F.binary_cross_entropy_with_logits(outputs[:, 0], y.float())),
        ((9, 3), (9, 3), F.binary_cross_entropy_with_logits),  # three questions
        ((9, 5, 4), (9, 5), F.cross_entropy),  # does not fit
        ((9, 5, 4), (9, 5), lambda outputs, y: F.cross_entropy(outputs.flatten(0, 1), y.flatten())),  # classes last
        ((9, 5, 5), (9, 5), lambda outputs, y: F.cross_entropy(outputs.flatten(0, 1), y.flatten())),
    ],
)
def test_none_where_a_prediction_is_not_known(outputs: Any, targets: Any, loss_fn: Any) -> None:
    labels = torch.randint(2, targets, generator=STREAM)
    assert right_predictions(torch.randn(outputs, generator=STREAM), labels, loss_fn) is None
    assert right_predictions(torch.randn(9, 2), torch.rand(9), F.cross_entropy) is None
    assert right_predictions({"logits": torch.randn(9, 2)}, torch.ones(9).long(), F.cross_entropy) is None


# In a run


@pytest.mark.parametrize("executor", EXECUTORS)
def test_ignored_labels_count_in_neither(executor: str) -> None:
    options = {"val": TensorDataset(X, SOME), "executor": executor, "minibatch_size": 2}  # in pieces of eight examples
    history, outputs = fitted(2, Y, **options)
    right, counted = by_hand(outputs.argmax(1), SOME, SOME >= 0)
    assert history.last("global_accuracy") == history.last("local_accuracy") == pytest.approx(right / counted, rel=1e-6)
    assert right / counted > 0.5 and counted < 75
    own = MLP(6, (), 2, seed=0)
    share = float((own(X).argmax(1) == SOME)[SOME >= 0].float().mean())
    assert own.loss_and_accuracy((X, SOME))[1].item() == pytest.approx(share) and share > 0.1
    trainer = Trainer(own, TensorDataset(X, SOME), TensorDataset(X, SOME))
    trainer.fit(strategy=SimpleReduceStrategy(inner_optim="sgd", lr=1e-30), **{**QUICK, "batch_size": 90})
    assert trainer.history.last("global_accuracy") == pytest.approx(share, rel=1e-6)


@pytest.mark.parametrize("executor", EXECUTORS)
def test_binary_logits(executor: str) -> None:
    column = Y[:, None].float()
    history, outputs = fitted(1, column, F.binary_cross_entropy_with_logits, executor=executor)
    assert history.last("global_accuracy") == pytest.approx(float(((outputs > 0) == column).float().mean()), rel=1e-6)
    assert history.last("global_accuracy") > 0.6
    unknown, _ = fitted(1, Y, lambda outputs, y: F.binary_cross_entropy_with_logits(outputs[:, 0], y.float()))
    assert np.isnan(unknown["global_accuracy"]).all() and not np.isnan(unknown.last("global_loss"))
    squares, _ = fitted(1, Y, lambda outputs, y: F.mse_loss(outputs[:, 0], y.float()))
    assert np.isnan(squares["global_accuracy"]).all()


def test_without_a_label_that_counts_it_is_not_a_number() -> None:
    nothing = TensorDataset(X[:8], torch.full((8,), 7))
    loss = functools.partial(F.cross_entropy, ignore_index=7)
    with pytest.warns(UserWarning, match="non-finite validation loss"):
        history, _ = fitted(2, Y, loss, val=nothing, max_steps=1)
    assert np.isnan(history["global_accuracy"]).all()


FUNCTIONS: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "booleans": lambda outputs, y: (outputs[:, 0] > 0.1) == (y == 1),
    "a share": lambda outputs, y: ((outputs[:, 0] > 0.1) == (y == 1)).float().mean(),
    "a number": lambda outputs, y: sum(((outputs[:, 0] > 0.1) == (y == 1)).tolist()) / len(y),  # not under vmap
}


@pytest.mark.parametrize("of", FUNCTIONS)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_a_function_of_outputs_and_targets(of: str, executor: str) -> None:
    def loss(outputs: Tensor, y: Tensor) -> Tensor:
        return F.binary_cross_entropy_with_logits(outputs[:, 0], y.float())

    options = {"accuracy": FUNCTIONS[of], "executor": executor, "minibatch_size": 2}
    history, outputs = fitted(1, Y, loss, **options)
    expected = float(((outputs[:, 0] > 0.1) == Y).float().mean())
    assert history.measured("global_accuracy")[0][-1] == pytest.approx(expected, rel=1e-6) and expected > 0.5
    assert len(history.measured("global_accuracy")[0]) == 3
    plain, same = fitted(1, Y, loss, executor=executor, minibatch_size=2)
    assert torch.equal(outputs, same)
    np.testing.assert_array_equal(plain["global_loss"], history["global_loss"])


def test_booleans_are_weighted_by_their_number_and_shares_by_examples() -> None:
    def of_counted(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs.argmax(1) == y)[y >= 0]

    def share(outputs: Tensor, y: Tensor) -> Tensor:
        return of_counted(outputs, y).float().mean()

    options = {"val": TensorDataset(X, SOME), "minibatch_size": 2, "val_interval": None}
    (flags, outputs), (shares, _) = (fitted(2, Y, accuracy=f, **options) for f in (of_counted, share))
    right = outputs.argmax(1) == SOME
    assert flags.last("global_accuracy") == pytest.approx(float(right[SOME >= 0].float().mean()), rel=1e-6)
    pieces = [right[a : a + 8][SOME[a : a + 8] >= 0].float().mean().item() for a in range(0, 90, 8)]
    expected = (8 * sum(pieces[:-1]) + 2 * pieces[-1]) / 90
    assert shares.last("global_accuracy") == pytest.approx(expected, rel=1e-6)
    assert abs(expected - flags.last("global_accuracy")) > 1e-4


class Tokens(nn.Module):
    """A model that returns its loss with its outputs, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, 7)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.table(input_ids)  # (B, T, V)
        return {"loss": F.cross_entropy(logits.flatten(0, 1), labels.flatten()), "logits": logits}


class Dicts(Dataset[Any]):
    """Token ids (T,) and the next ones, some of them ignored."""

    def __init__(self) -> None:
        ids = torch.randint(7, (21, 6), generator=torch.Generator().manual_seed(3))
        self.ids, self.labels = ids[:, :-1], torch.where(ids[:, 1:] == 4, -100, ids[:, 1:])

    def __len__(self) -> int:
        return len(self.ids)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"input_ids": self.ids[i], "labels": self.labels[i]}


def test_a_model_that_returns_its_loss() -> None:
    def right(outputs: Any, batch: Any) -> Tensor:
        return (outputs["logits"].argmax(-1) == batch["labels"])[batch["labels"] >= 0]

    data = Dicts()
    trainer = Trainer(seeded(Tokens), data, data)
    trainer.fit(strategy=FedAvgStrategy(H=2, lr=0.3), **QUICK)
    assert np.isnan(trainer.history["global_accuracy"]).all()
    model = trainer.fit(strategy=FedAvgStrategy(H=2, lr=0.3), **QUICK, accuracy=right)
    expected = right(model(data.ids, data.labels), {"labels": data.labels}).float().mean().item()
    assert trainer.history.last("global_accuracy") == pytest.approx(expected, rel=1e-6) and expected > 0.1
    own = Trainer(MLP(6, (), 2, seed=0), TensorDataset(X, Y), TensorDataset(X, Y))  # has a loss_and_accuracy
    own.fit(strategy=SimpleReduceStrategy(), **QUICK, accuracy=False)
    assert np.isnan(own.history["global_accuracy"]).all()
    own.fit(strategy=SimpleReduceStrategy(), **QUICK, accuracy=lambda loss, batch: 0.25 if len(batch) == 2 else 0.0)
    assert own.history.last("global_accuracy") == 0.25


def test_false_is_none_and_no_columns_of_tables() -> None:
    strategies = {"A": FedAvgStrategy(H=2, lr=0.1), "B": DiLoCoStrategy(H=2, lr=0.1)}
    data = TensorDataset(X, Y)
    model = seeded(lambda: nn.Linear(6, 2))
    options = {"strategies": strategies, "loss_fn": F.cross_entropy, "client_val_dataset": lambda *_: data, **QUICK}
    rows = {}
    for accuracy in (None, False, lambda outputs, y: outputs.argmax(1) != y):
        comparison = vsim.compare(model, data, data, **options, accuracy=accuracy)
        rows[accuracy], histories = (
            comparison.rows().to_dict("records"),
            [comparison[name].history for name in strategies],
        )
        known = accuracy is not False
        assert ["accuracy" in row and "client accuracy" in row for row in rows[accuracy]] == [known, known]
        assert [len(history.client_val_accuracies) for history in histories] == [2 * known, 2 * known]
    plain, wrong = rows[None], list(rows.values())[-1]
    for name in ("accuracy", "client accuracy"):
        assert [row[name] + other[name] for row, other in zip(plain, wrong, strict=True)] == pytest.approx([1, 1])
    with pytest.raises(ValueError, match="accuracy"):
        _ = vsim.compare(model, data, data, **options) | comparison


def test_clients_without_a_label_that_counts_are_left_out_of_the_table() -> None:
    def own(rank: int, num_nodes: int, train: bool) -> TensorDataset:
        return TensorDataset(X[:30], torch.where(torch.tensor(rank == 1), torch.full((30,), 9), Y[:30]))

    loss = functools.partial(F.cross_entropy, ignore_index=9)
    options = {**QUICK, "num_nodes": 3, "client_val_dataset": own, "loss_fn": loss, "val_interval": None}
    options["strategies"] = {"A": SimpleReduceStrategy(lr=0.1)}
    comparison = vsim.compare(seeded(lambda: nn.Linear(6, 2)), TensorDataset(X, Y), **options)
    accuracies = comparison["A"].history.client_val_accuracies
    assert np.isnan(accuracies).tolist() == [False, True, False]
    (row,) = comparison.rows().to_dict("records")
    assert row["client accuracy"] == row["client accuracy, worst"] == accuracies[0] == accuracies[2] > 0.4


def test_processes_count_alike() -> None:
    def right(outputs: Tensor, y: Tensor) -> Tensor:
        return (outputs.argmax(1) == y)[y >= 0]

    own: Any = {"deterministic": True, "accuracy": right, "strategy": DiLoCoStrategy(H=2, lr=0.1)}
    apart = {"backend": "process", "threads_per_process": 1, "num_processes": 2}
    (here, _), (there, _) = (fitted(2, SOME, **own, **more) for more in ({}, apart))
    for column in ("local_accuracy", "global_accuracy"):
        np.testing.assert_array_equal(here[column], there[column])
    assert not math.isnan(there.last("global_accuracy"))


# What follows it


def test_callbacks_follow_the_accuracy_that_is_given() -> None:
    values = itertools.chain([0.5, 0.9, 0.7], itertools.repeat(0.6))  # of one model at every step from 0 on
    best, stopping = KeepBest("global_accuracy", mode="max"), EarlyStopping("global_accuracy", 2, mode="max")
    options = {"num_nodes": 1, "max_steps": 9, "val_interval": 1, "val_size": 8, "executor": "loop"}
    history, _ = fitted(2, Y, accuracy=lambda outputs, y: next(values), callbacks=[best, stopping], **options)
    assert history.measured("global_accuracy")[0] == pytest.approx([0.5, 0.9, 0.7, 0.6])
    assert (best.best_step, stopping.waited, len(history)) == (1, 2, 4) and best.best == pytest.approx(0.9)


def test_a_callback_that_would_follow_no_accuracy_is_refused() -> None:
    for callback in (KeepBest("global_accuracy", mode="max"), EarlyStopping("local_accuracy")):
        with refused(ValueError, callback.monitor, "accuracy="):
            fitted(1, Y, lambda outputs, y: F.mse_loss(outputs[:, 0], y.float()), callbacks=[callback])
        with refused(ValueError, callback.monitor):
            fitted(2, Y, callbacks=[callback], accuracy=False)


@pytest.mark.parametrize(
    ("accuracy", "error", "said"),
    [
        (True, TypeError, "(outputs, targets) … True"),
        ("top5", TypeError, "(outputs, targets) … top5"),
        (lambda outputs, y: "all", TypeError, "booleans … all"),
        (lambda outputs, y: None, TypeError, "booleans … None"),
        (lambda outputs, y: outputs.argmax(1), TypeError, "booleans … torch.int64 … [16]"),
        (lambda outputs, y: (outputs.argmax(1) == y).sum(), ValueError, "from 0 to 1"),
        (lambda outputs: 0.5, TypeError, "(outputs, targets) … too many positional arguments"),
        (lambda outputs, y: outputs.logits, AttributeError, "logits"),
    ],
)
@pytest.mark.parametrize("executor", EXECUTORS)
def test_refused(accuracy: Any, error: type[Exception], said: str, executor: str) -> None:
    with refused(error, "accuracy", said):
        fitted(2, Y, accuracy=accuracy, executor=executor)


@pytest.mark.parametrize("accuracy", [False, lambda outputs, y: 1.0])
def test_no_effect_without_validation(accuracy: Any) -> None:
    with refused(ValueError, "accuracy … val_dataset, client_val_dataset … test_dataset"):
        fitted(2, Y, val=None, accuracy=accuracy)
    history, _ = fitted(2, Y, val=None, accuracy=accuracy, client_val_dataset=lambda *_: TensorDataset(X, Y))
    assert history.client_val_accuracies.tolist() == ([1.0, 1.0] if accuracy else [])
