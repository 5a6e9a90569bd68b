"""compare(): identical conditions; what is refused, what fails, and what an interrupt leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compared import STEPS, K, compared, three_strategies
from errors import refused
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
from vsim.data import digits
from vsim.models import MLP
from vsim.strategy import FedAvgStrategy, SimpleReduceStrategy, Strategy


@pytest.fixture(scope="module")
def comparison() -> vsim.Comparison:
    return three_strategies()


def test_every_run_is_what_fit_gives_alone(comparison: vsim.Comparison) -> None:
    train, val = digits()
    trainer = vsim.Trainer(MLP(hidden=(16,), seed=0), train, val)
    alone = trainer.fit(
        strategy=FedAvgStrategy(H=5, lr=1e-2), num_nodes=K, max_steps=STEPS, val_interval=5, progress=False
    )
    run = comparison["FedAvg"]
    assert run.model is not None
    for ours, theirs in zip(run.model.parameters(), alone.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert np.array_equal(run.history.node_losses, trainer.history.node_losses)
    assert list(run.ledger) == list(trainer.ledger)
    first = [own.history.node_losses[0] for own in comparison.values()]  # all start alike, with the same batch
    assert np.array_equal(first[0], first[1]) and np.array_equal(first[0], first[2])


class Explodes(nn.Module):
    """A model of one weight, whose loss is infinite once it has moved far enough."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(1))

    def forward(self, batch: list[Tensor]) -> Tensor:
        return torch.where(self.w.sum() < -2.5, torch.inf, self.w.sum() + 0 * batch[0].mean())


@pytest.mark.filterwarnings("ignore:bad. non-finite loss:UserWarning")
def test_a_diverging_strategy_is_kept_and_the_others_go_on() -> None:
    data = TensorDataset(torch.zeros(64, 1))
    strategies = {"bad": Strategy(inner_optim="sgd", lr=1.0), "good": Strategy(inner_optim="sgd", lr=0.1)}
    result = vsim.compare(
        Explodes(), data, strategies=strategies, num_nodes=2, max_steps=10, batch_size=2, progress=False
    )
    # w = −step, so that the loss of step 4 (w = −3) is the first that is infinite.
    assert result["bad"].failure == "non-finite loss at step 4 on nodes [0, 1]"
    assert result["bad"].model is None and len(result["bad"].history) == 4
    assert result["good"].model is not None and len(result["good"].history) == 11
    assert "non-finite loss at step 4" in result.table()


def test_an_interrupt_keeps_what_was_done() -> None:
    train, val = digits()
    calls: list[int] = []

    def interrupt(step: int, loss: float) -> None:
        calls.append(step)
        if len(calls) == 13:
            raise KeyboardInterrupt

    with pytest.warns(UserWarning, match="interrupted after step 5") as warned:
        result = vsim.compare(
            MLP(seed=0),
            train,
            val,
            strategies={"first": Strategy(), "second": Strategy(), "third": Strategy()},
            num_nodes=2,
            max_steps=10,
            progress=False,
            train_loss_hook=interrupt,
        )
    assert [str(w.message).partition(":")[0] for w in warned] == ["first", "second", "third"]
    assert all(run.model is None and run.history["step"].tolist() == [0, 1, 2, 3, 4, 5] for run in result.values())
    assert "interrupted after step 5" in result.table()


def test_without_validation_the_training_loss_is_shown() -> None:
    train, _ = digits()
    result = vsim.compare(
        MLP(seed=0), train, strategies={"one": SimpleReduceStrategy()}, num_nodes=2, max_steps=20, progress=False
    )
    (row,) = result.rows()
    assert row["training loss"] == pytest.approx(result["one"].history["train_loss"][-2:].mean())
    assert "validation loss" not in row and "accuracy" not in row
    assert result.figure().axes[0].get_ylabel() == "training loss"


class FailsAt(Strategy):
    """Raises in a step."""

    def __init__(self, step: int = 4) -> None:
        super().__init__()
        self.at = step

    def step(self) -> None:
        if self.local_step == self.at - 1:
            raise RuntimeError("out of ideas\nat length")
        super().step()


def test_prepare_raises_what_fit_would_and_trains_nothing() -> None:
    trainer = vsim.Trainer(MLP(seed=0), digits()[0])
    trainer.prepare(strategy=FedAvgStrategy(island_size=2), num_nodes=2)
    assert len(trainer.history) == 0 and len(trainer.ledger) == 0
    with pytest.raises(ValueError, match="island_size"):
        trainer.prepare(strategy=FedAvgStrategy(island_size=3), num_nodes=2)
    with pytest.raises(TypeError, match="did you mean 'num_nodes'"):
        trainer.prepare(strategy=Strategy(), num_node=2)
    with pytest.raises(ValueError, match="only the simulator"):
        trainer.prepare(strategy=Strategy(), num_nodes=2, backend="process", progress=False)
    with pytest.raises(ValueError, match="executor='loop' has no effect"):
        trainer.prepare(strategy=Strategy(), num_nodes=2, backend="process", executor="loop")
    trainer.fit(strategy=Strategy(), num_nodes=2, max_steps=2, progress=False)
    assert len(trainer.history) == 3


def test_a_run_that_fails_later_is_kept_and_loses_no_other() -> None:
    with pytest.warns(UserWarning, match="bad: out of ideas"):
        result = compared({"good": Strategy(), "bad": FailsAt(), "also good": SimpleReduceStrategy()})
    bad = result["bad"]
    assert bad.failure == "RuntimeError: out of ideas" and isinstance(bad.error, RuntimeError)
    assert bad.model is None and len(bad.history) == 4
    assert result["good"].model is not None and result["also good"].model is not None
    assert "RuntimeError: out of ideas" in result.table()
    with pytest.raises(RuntimeError, match="out of ideas"):  # nothing is lost in the first step
        compared({"good": Strategy(), "bad": FailsAt(1)})


def test_mistakes_are_named_before_the_first_run(comparison: vsim.Comparison) -> None:
    def fail(step: int, loss: float) -> None:
        raise AssertionError("it has trained")

    one: Any = {"a": Strategy()}
    cases: list[tuple[Any, dict[str, Any], type[Exception], list[str]]] = [
        (one, {"seeds": []}, ValueError, ["seeds", "at least one value", "[]"]),
        (one, {"seeds": [1, 1]}, ValueError, ["seeds", "different", "[1, 1]"]),
        (one, {"seeds": [1, -1]}, ValueError, ["seeds", ">= 0", "-1"]),
        (one, {"seeds": [1], "seed": 2}, TypeError, ["seed and seeds"]),
        (one, {"model": 3}, TypeError, ["model", "f(seed)", "3"]),
        (one, {"model": MLP}, TypeError, ["model", "f(seed)", "<class"]),
        (one, {"model": lambda seed: seed}, TypeError, ["model(42)", "torch.nn.Module", "int"]),
        (one, {"progress": "bar"}, ValueError, ["progress", "'plot' or 'table'", "'bar'"]),
        (one, {"progress": "plot"}, ValueError, ["progress='plot'", "notebook"]),
        (one, {"max_step": 3}, TypeError, ["'max_step'", "did you mean 'max_steps'"]),
        ([Strategy()], {}, TypeError, ["strategies", "dict", "list"]),
        ({}, {}, ValueError, ["strategies is empty"]),
        ({"a": "diloco"}, {}, TypeError, ["Strategy objects", "a: 'diloco'"]),
        ({1: Strategy(), "b": Strategy()}, {}, TypeError, ["names of strategies", "strings", "1"]),
        ({"good": Strategy(), "bad": FedAvgStrategy(island_size=3)}, {}, ValueError, ["bad", "island_size", "3"]),
    ]
    for strategies, options, kind, words in cases:
        with refused(kind, *words):
            compared(strategies, train_loss_hook=fail, **options)
    with refused(KeyError, "'DiLoCo'", "AllReduce, FedAvg, alone"):
        comparison["DiLoCo"]
