"""Strategies step by step against histories that were made from the papers' formulas, without vsim."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from reproductions import golden
from test_strategies_common import EACH, TABLE
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
import vsim.strategy
from vsim.strategy import Algorithm


class Given(nn.Module):
    """Three weights whose gradients are the batch."""

    def __init__(self, norm: bool) -> None:
        super().__init__()
        body, head = torch.tensor(golden.START).split([2, 1])
        self.body = nn.Parameter(body)
        if norm:  # a norm that has the last weight, for strategies which leave norms alone
            self.norm = nn.RMSNorm(1)
            self.norm.weight = nn.Parameter(head)
        else:
            self.head = nn.Parameter(head)

    def forward(self, batch: list[Tensor]) -> Tensor:
        return (batch[0] * torch.cat([*self.parameters()])).sum()


@pytest.mark.parametrize("name", golden.HISTORIES)
@pytest.mark.filterwarnings("ignore:DCTTopK:UserWarning", "ignore:TileTopK:UserWarning")  # on tiles so small
def test_every_weight_and_byte_of_six_steps(name: str) -> None:
    history = json.loads((golden.FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    made = golden.history(golden.HISTORIES[name])
    assert made["weights"] == [[pytest.approx(row, abs=1e-12) for row in rows] for rows in history["weights"]]
    assert made | {"weights": 0} == history | {"weights": 0}, "run python -m tests.reproductions.golden"
    expected = torch.tensor(history["weights"], dtype=torch.float64)  # (7, K, 3)
    for dtype, executor, error in ((torch.float64, "vmap", 1e-12), (torch.float32, "loop", 2e-6)):
        weights, sent = run(history, dtype, executor)
        assert (weights - expected).abs().max() <= error
    assert sent == history["bytes"]


def run(history: dict[str, Any], dtype: torch.dtype, executor: str) -> tuple[Tensor, list[float]]:
    """Return the weights (7, K, 3) before step 1 and after each, and the bytes of each step."""
    gradients = torch.tensor(history["gradients"], dtype=dtype)  # (6, K, 3)
    steps, num_nodes, size = gradients.shape
    model = Given("FedBN" in history["call"]).to(dtype)
    weights = [torch.tensor(golden.START, dtype=dtype).expand(num_nodes, size)]
    strategy = eval(history["call"], dict(vars(vsim.strategy)))
    trainer = vsim.Trainer(model, lambda rank, num_nodes, train: TensorDataset(gradients[:, rank]))
    options: Any = {"executor": executor, "batch_size": 1, "shuffle": False, "val_interval": None, "progress": False}
    look = [lambda run: weights.append(run.cluster.weights.expand(num_nodes, size).clone())]
    trainer.fit(strategy=strategy, num_nodes=num_nodes, max_steps=steps, callbacks=look, **options)
    sent = [0.0] * steps
    for event in trainer.ledger:
        sent[event.step - 1] += event.payload_bytes
    return torch.stack(weights).double(), sent


@pytest.mark.parametrize("cls", [row.cls for row in EACH if hasattr(row.cls, "family")])
def test_every_strategy_has_a_history_or_a_reason(cls: type[Algorithm]) -> None:
    made = [name for name, one in golden.HISTORIES.items() if one.call.startswith(f"{cls.__name__}(")]
    reasons = [row.no_history for row in TABLE if row.cls is cls and row.no_history]
    where = f"add the formula of {cls.__name__} to HISTORIES in tests/reproductions/golden.py"
    assert made or reasons, f"{where}, or say why there is none in its row of TABLE: no_history="
    assert not (made and reasons), f"remove no_history={reasons} from TABLE: there is {made}"


def test_there_is_a_history_for_every_name() -> None:
    assert {path.stem for path in golden.FOLDER.glob("*.json")} == set(golden.HISTORIES)
    gone = [name for name, one in golden.HISTORIES.items() if one.call.partition("(")[0] not in vsim.strategy.__all__]
    assert not gone, f"tests/reproductions/golden.py, HISTORIES: remove {gone}, whose classes are gone"
