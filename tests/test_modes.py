"""Modules that are given in evaluation mode stay in it while the rest trains, in every executor and process."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from cut_runs import assert_same_model
from errors import refused, warned
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import vsim
from vsim import CheckpointError, Sample, Trainer
from vsim.strategy import AsyncDiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, Strategy

pytestmark = pytest.mark.filterwarnings("ignore:.*will train in evaluation mode")
STREAM = torch.Generator().manual_seed(0)
X = 1 + torch.randn(48, 6, generator=STREAM)
DATA = TensorDataset(X, (X[:, 0] > 1).long())
OPTIONS: dict[str, Any] = {"num_nodes": 3, "max_steps": 4, "batch_size": 4, "val_interval": 2, "progress": False}


class Net(nn.Sequential):
    """0: linear, 1: BatchNorm, 2: dropout, 3: a part of two such layers, 4: the head."""

    def __init__(self, dropout: float = 0.5) -> None:
        torch.manual_seed(0)
        part = nn.Sequential(nn.BatchNorm1d(8), nn.Dropout(dropout))
        super().__init__(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(dropout), part, nn.Linear(8, 2))


class Freezing(Net):
    """The usual way to keep a part in evaluation mode in a loop that calls train()."""

    def train(self, mode: bool = True) -> Freezing:
        super().train(mode)
        self[1].eval()
        return self


def in_evaluation(*paths: str, model: nn.Module | None = None) -> nn.Module:
    """A model whose modules of these paths are in evaluation mode, without those in them."""
    model = model or Net()
    for path in paths:
        model.get_submodule(path).training = False
    return model


def modes(model: nn.Module) -> dict[str, bool]:
    return {path: module.training for path, module in model.named_modules()}


def moved(model: nn.Module) -> list[str]:
    """The paths of the BatchNorms that have statistics of batches, as their counts, means and variances agree."""
    found = []
    for path, module in model.named_modules():
        if isinstance(module, nn.BatchNorm1d):
            fresh = not module.running_mean.any() and bool((module.running_var == 1).all())
            assert fresh == (int(module.num_batches_tracked) == 0)
            found += [] if fresh else [path]
    return found


def fit(model: nn.Module, strategy: Strategy | None = None, **options: Any) -> nn.Module:
    trainer = Trainer(model, DATA, options.pop("val", DATA), loss_fn=F.cross_entropy)
    return trainer.fit(strategy=strategy or FedAvgStrategy(H=2, lr=0.05), **{**OPTIONS, **options})


PROCESSES = {"backend": "process", "threads_per_process": 1}
WAYS = [
    {"executor": "vmap"},
    {"executor": "loop"},
    {"deterministic": True},
    {"strategy": SimpleReduceStrategy(lr=0.05)},
    {"strategy": AsyncDiLoCoStrategy(H=2, lr=0.05), "compute": 1.0},
    {"participation": Sample(3, of=5)},
    *(pytest.param({**PROCESSES, **more}, marks=pytest.mark.slow) for more in ({}, {"num_processes": 2})),
    pytest.param(
        {"compile": True},
        marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")],
    ),
]


@pytest.mark.parametrize("options", WAYS, ids=str)
def test_statistics_move_where_they_may(options: dict[str, Any]) -> None:
    given = in_evaluation("1", "3", "3.1")  # "3.0" trains, within a part that does not
    before = modes(given)
    model = fit(given, **options)
    assert moved(model) == ["3.0"]
    assert modes(model) == modes(given) == before


@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_dropout_acts_where_it_may(executor: str) -> None:
    def last(model: nn.Module) -> Tensor:
        return nn.utils.parameters_to_vector(fit(model, executor=executor).parameters())

    without = last(Net(dropout=0.0))
    assert torch.equal(last(in_evaluation("2", "3.1")), without)
    assert not torch.equal(last(in_evaluation("2")), without) and not torch.equal(last(Net()), without)


def test_a_node_is_that_of_plain_pytorch() -> None:
    given = in_evaluation("1", "2", "3.1")
    own = copy.deepcopy(given)  # nothing of its modules is changed
    optim = torch.optim.SGD(own.parameters(), lr=0.1)
    for _ in range(3):
        optim.zero_grad()
        F.cross_entropy(own(DATA.tensors[0]), DATA.tensors[1]).backward()
        optim.step()
    options = {"num_nodes": 1, "max_steps": 3, "batch_size": 48, "shuffle": False, "deterministic": True}
    model = fit(given, SimpleReduceStrategy(inner_optim="sgd", lr=0.1), **options)
    for (name, expected), found in zip(own.state_dict().items(), model.state_dict().values(), strict=True):
        torch.testing.assert_close(found, expected, msg=name)


def test_a_model_that_is_in_evaluation_mode_as_a_whole_trains() -> None:
    fresh, model = fit(Net()), fit(Net().eval())
    assert moved(model) == ["1", "3.0"] and not any(modes(model).values()) and all(modes(fresh).values())
    assert_same_model(model, fresh)


@pytest.mark.parametrize("whole", [True, False])
def test_a_model_that_freezes_a_part_in_train(whole: bool) -> None:
    assert moved(fit(Freezing().eval() if whole else Freezing())) == ["3.0"]
    assert moved(fit(in_evaluation("3.0", model=Freezing()))) == []


def test_validation_leaves_the_modes() -> None:
    seen = []
    often = fit(in_evaluation("1", "3"), val_interval=1, callbacks=[lambda run: seen.append(modes(run.model))])
    assert seen == 4 * [modes(in_evaluation("1", "3"))]
    assert_same_model(often, fit(in_evaluation("1", "3"), val=None, val_interval=None))


def test_runs_of_a_comparison_keep_their_own() -> None:
    def make(seed: int) -> nn.Module:
        return in_evaluation("1") if seed else Net()

    strategies = {"A": FedAvgStrategy(H=2, lr=0.05), "B": SimpleReduceStrategy(lr=0.05)}
    options = {**OPTIONS, "strategies": strategies, "loss_fn": F.cross_entropy, "seeds": [0, 1]}
    comparison = vsim.compare(make, DATA, DATA, **options)
    for run in (run for name in strategies for run in comparison.runs(name)):
        assert moved(run.model) == (["3.0"] if run.seed else ["1", "3.0"])


def test_a_run_resumes_with_the_modes_that_it_had(tmp_path: Path) -> None:
    fit(in_evaluation("1"), save_dir=tmp_path, max_steps=2)
    with refused(CheckpointError, "mode of 1 was evaluation"):
        fit(Net(), save_dir=tmp_path, resume=True)
    assert_same_model(fit(in_evaluation("1"), save_dir=tmp_path, resume=True), fit(in_evaluation("1")))


@pytest.mark.filterwarnings("default:.*will train in evaluation mode")
def test_a_part_that_trains_without_its_dropout_is_named() -> None:
    named, frozen, plain, layer = Net(), Net(), Net(dropout=0.0), Net()
    for part in (named[3], frozen[3].requires_grad_(False), plain[3], layer[2]):
        part.eval()
    with warned("3 will train in evaluation mode", "dropout"):
        Trainer(named, DATA, loss_fn=F.cross_entropy)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for model in (frozen, plain, layer, Net().eval()):
            Trainer(model, DATA, loss_fn=F.cross_entropy)
