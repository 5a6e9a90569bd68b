"""compare(): identical conditions; what is refused, what fails, and what an interrupt leaves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from compared import STEPS, K, compared, three_strategies
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
from vsim.data import digits
from vsim.models import MLP
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, Strategy


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


def test_all_start_alike_and_see_the_same_first_batch(comparison: vsim.Comparison) -> None:
    first = [run.history.node_losses[0] for run in comparison.values()]
    assert np.array_equal(first[0], first[1]) and np.array_equal(first[0], first[2])
    assert len({run.history["global_loss"][0] for run in comparison.values()}) == 1


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


def test_what_is_refused_is_refused_before_the_first_run() -> None:
    steps: list[int] = []
    with pytest.raises(ValueError, match="island_size must be a whole number from 1 to 2, got 3"):
        compared(
            {"good": Strategy(), "bad": FedAvgStrategy(island_size=3)},
            train_loss_hook=lambda step, loss: steps.append(step),
        )
    assert steps == []


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


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seeds": []}, ValueError, r"seeds must have at least one value, got \[\]"),
        ({"seeds": [1, 1]}, ValueError, "seeds must be different numbers"),
        ({"seeds": [1, -1]}, ValueError, "every one of seeds must be a whole number >= 0, got -1"),
        ({"seeds": [1], "seed": 2}, TypeError, "seed and seeds say the same thing"),
        ({"model": 3}, TypeError, r"model must be a torch.nn.Module, or a function f\(seed\)"),
        ({"model": MLP}, TypeError, r"or a function f\(seed\) that makes one, got <class"),
        ({"model": lambda seed: seed}, TypeError, r"model\(42\) must return a torch.nn.Module, got int"),
        ({"progress": "bar"}, ValueError, "progress must be True, False, 'plot' or 'table', got 'bar'"),
        ({"progress": "plot"}, ValueError, "progress='plot' draws in a notebook, and this is none"),
    ],
)
def test_bad_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        compared({"a": Strategy()}, **options)


@pytest.mark.parametrize(
    ("strategies", "error", "message"),
    [
        ([SimpleReduceStrategy()], TypeError, "strategies must be a dict of name → strategy, got list"),
        ({}, ValueError, "strategies is empty"),
        ({"a": "diloco"}, TypeError, "must be Strategy objects, got a: 'diloco'"),
        ({1: Strategy(), "b": Strategy()}, TypeError, "names of strategies must be strings, got 1$"),
    ],
)
def test_bad_strategies(strategies: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        vsim.compare(MLP(), TensorDataset(torch.zeros(4, 64)), strategies=strategies, num_nodes=2)


def test_unknown_names(comparison: vsim.Comparison) -> None:
    with pytest.raises(KeyError, match="no run 'DiLoCo'; there are AllReduce, FedAvg, alone"):
        comparison["DiLoCo"]
    with pytest.raises(TypeError, match="unknown argument 'max_step'; did you mean 'max_steps'"):
        vsim.compare(
            MLP(), TensorDataset(torch.zeros(4, 64)), strategies={"a": DiLoCoStrategy()}, num_nodes=2, max_step=3
        )
