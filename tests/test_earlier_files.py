"""Files that vsim 0.2.0 wrote are shown, joined, extended and priced; what cannot be read is refused by version.

`tests/earlier` has a comparison and a checkpoint of the release, a ladder and a search of its last development version,
and the calls of all strategies in their tests.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch.utils.data import TensorDataset

import vsim
from vsim.analysis.comparison import Comparison
from vsim.models import MLP
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy, clip, mean
from vsim.strategy.remade import remade

EARLIER = Path(__file__).parent / "earlier"
CALLS = (EARLIER / "calls.txt").read_text().splitlines()
OPTIONS: dict[str, Any] = {"num_nodes": 2, "batch_size": 4, "loss_fn": F.cross_entropy, "progress": False}


def problem() -> tuple[MLP, TensorDataset, TensorDataset]:
    """The problem of the files. It is stored, since PyTorch draws other numbers on a CPU with other kernels."""
    with np.load(EARLIER / "problem.npz") as stored:
        x, *weights = (torch.from_numpy(stored[name]) for name in stored)  # (64, 6)
    train, val = (TensorDataset(x[:n], x[:n, :3].argmax(1)) for n in (64, 16))
    model = MLP(6, (4,), 3, seed=0)
    model.load_state_dict(dict(zip(model.state_dict(), weights, strict=True)))
    return model, train, val


@pytest.fixture(scope="module")
def comparison() -> Comparison:
    return Comparison.from_json(EARLIER / "comparison.json")


@pytest.mark.parametrize("call", CALLS)
def test_every_call_is_made_again(call: str) -> None:
    assert remade(call) is not None


def test_a_comparison_is_shown_and_priced(comparison: Comparison) -> None:
    assert [*comparison] == ["AllReduce", "DiLoCo", "FedAvg", "SPARTA", "streaming", "both"]
    table = str(comparison.table(network="100 Mbit/s, 20 ms", compute=0.1))
    assert all(name in table for name in comparison) and "seconds" in table
    composed = comparison["both"].strategy
    assert repr(composed).startswith(
        "CommunicateOptimizeStrategy(communication_modules=[SPARTAStrategy(p_sparta=0.2), Fed"
    )
    larger = comparison.at(parameters=1e9)  # priced by the strategies themselves
    assert "DiLoCo" in str(larger.table(network="100 Mbit/s, 20 ms", compute=0.1))


def test_a_comparison_is_joined_and_extended(comparison: Comparison) -> None:
    model, train, val = problem()
    same = {
        "AllReduce": SimpleReduceStrategy(lr=0.01),
        "DiLoCo": DiLoCoStrategy(H=2, lr=0.01, average=mean("examples") | clip(1.0)),
        "FedAvg": FedAvgStrategy(inner_optim="sgd", island_size=2, H=3, lr=0.1),
    }
    given: dict[str, Any] = {**OPTIONS, "max_steps": 6, "val_interval": 3}
    new = vsim.compare(model, train, val, strategies=same, seeds=[3], **given)
    joined = comparison | new
    assert [run.seed for run in joined.runs("DiLoCo")] == [1, 2, 3]
    more = vsim.compare(model, train, val, strategies=same, seeds=[1, 2, 3], extend=joined, **given)
    assert [run.seed for run in more.runs("FedAvg")] == [1, 2, 3]
    again = vsim.compare(model, train, val, strategies=same, seeds=[1], **given)
    for name in same:  # and the losses are those of then
        ours, theirs = (one[name].history["train_loss"][1:] for one in (again, comparison))
        torch.testing.assert_close(torch.tensor(ours), torch.tensor(theirs), rtol=1e-5, atol=0)


def test_another_strategy_of_the_same_name_is_refused(comparison: Comparison) -> None:
    model, train, val = problem()
    other = {"DiLoCo": DiLoCoStrategy(H=3, lr=0.01)}
    new = vsim.compare(model, train, val, strategies=other, seeds=[3], max_steps=6, val_interval=3, **OPTIONS)
    with pytest.raises(ValueError, match="two different strategies are called 'DiLoCo'"):
        comparison | new


def test_a_ladder_and_a_search() -> None:
    ladder = vsim.load_ladder(EARLIER / "ladder.json")
    assert [*ladder.comparisons] == [3, 5] and "DiLoCo" in str(ladder.table())
    assert "DiLoCo" in str(ladder.order(to=1e6))
    search = Comparison.from_json(EARLIER / "search.json")
    assert len([*search]) == 3 and "trial" in str(search.table())


def test_a_checkpoint_is_refused_by_version() -> None:
    model, train, val = problem()
    with pytest.raises(vsim.CheckpointError, match=r"this version of vsim reads .*: resume with the version that"):
        vsim.Trainer(model, train, val, loss_fn=F.cross_entropy).fit(
            strategy=DiLoCoStrategy(H=2, lr=0.01),
            num_nodes=2,
            max_steps=6,
            batch_size=4,
            progress=False,
            resume=EARLIER / "run-step-00000004.safetensors",
        )
