"""The launches of a step do not grow with the number of nodes, on a pretended accelerator; test_device.py runs this."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import pytest
from pretend import DEVICE, Device, accelerator, reads
from separate import images, small_cnn, small_gpt, small_mlp, tokens, vectors
from test_strategies_common import STEPS, Row, every_row
from torch import Tensor, nn

from vsim import Callback, Trainer
from vsim.strategy import DiLoCoStrategy, HierarchicalStrategy, Strategy

pytestmark = pytest.mark.filterwarnings("ignore:(DCT|Tile)TopK:UserWarning")

# The CNN has BatchNorm.
TASKS = {"MLP": (small_mlp, vectors), "CNN": (small_cnn, images), "GPT": (small_gpt, tokens)}
every_task = pytest.mark.parametrize("task", TASKS)


@pytest.fixture(autouse=True)
def _unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count without the guard of `run.model`, which reads the parameters after steps 1, 2, 4, … for a callback."""
    monkeypatch.setattr("vsim.training.callbacks._values", lambda run: {})


class Noting(Callback):
    """Notes how often the device had launched each operation after each step, and the host had waited for it."""

    def __init__(self) -> None:
        self.noted: list[Counter[str]] = []
        self.reads: list[int] = []

    def on_step(self, run: Any) -> None:
        self.noted.append(Device.launches.copy())
        self.reads.append(reads())


def launches(strategy: Strategy, num_nodes: int, task: str, dropout: float = 0.0, **options: Any) -> list[Counter[str]]:
    """Count the launches of each step but the first and the last, which do more."""
    model, data = TASKS[task]
    noting = Noting()
    options["callbacks"] = [noting, *options.get("callbacks", [])]
    options = {"max_steps": STEPS, "batch_size": 4, "val_interval": None, "executor": "vmap", **options}
    with accelerator():
        trainer = Trainer(model(dropout), data(8 * num_nodes), device=DEVICE)
        trainer.fit(strategy=strategy, num_nodes=num_nodes, progress=False, **options)
        assert "went to the loop" not in trainer.history.executor_reason
    return [after - before for before, after in zip(noting.noted[:-2], noting.noted[1:-1], strict=True)]


def growth(few: list[Counter[str]], many: list[Counter[str]]) -> set[str]:
    """Return the operations that are launched more often for more nodes."""
    return {name for one, other in zip(few, many, strict=True) for name in other - one}


def total(steps: list[Counter[str]]) -> list[int]:
    return [step.total() for step in steps]


# More nodes are more islands, each of which reduces by itself.
OF_ISLANDS = {"copy_", "index", "mean", "_index_put_impl_", "index_put_"}
OF_MEDIANS = {"cat", "ne", "sum", "eq", "abs", "mul", "_local_scalar_dense", "sort"}
GROW = {
    "FedAvg, median": OF_ISLANDS | OF_MEDIANS,
    "FedAvg in islands": OF_ISLANDS,
    "hierarchical": OF_ISLANDS,
    "modules in order": OF_ISLANDS,
    "sparse, islands, outer": OF_ISLANDS,
    "QSGD": {"uniform_"},  # every node rounds by its own stream
}


def made(row: Row, num_nodes: int) -> Strategy:
    if row.name == "hierarchical":  # the largest level is all nodes
        return HierarchicalStrategy(levels={2: 1, num_nodes: 3})
    strategy: Strategy = row.make()
    return strategy


@every_task
@every_row
def test_launches_do_not_grow_with_the_nodes(row: Row, task: str) -> None:
    few, many = (launches(made(row, num_nodes), num_nodes, task) for num_nodes in (4, 16))
    if row.name in GROW:
        assert growth(few, many) and growth(few, many) <= GROW[row.name]
    else:
        assert not growth(few, many) and min(total(few)) > 0


@every_task
def test_autocast_does_not_add_launches_for_each_node(task: str) -> None:
    few, many = (launches(DiLoCoStrategy(H=3, lr=1e-2), k, task, autocast=True) for k in (4, 16))
    assert few == many


@pytest.mark.parametrize(
    ("task", "most"), [("MLP", 37), ("CNN", 71), ("GPT", 193)]
)  # measured, so that none is added unseen
def test_a_step_takes_so_many_launches(task: str, most: int) -> None:
    steps = launches(DiLoCoStrategy(H=10, lr=1e-2), 16, task)
    assert max(total(steps)) <= most


class Reading(nn.Module):
    """A model whose Python reads values of its tensors, equal on all nodes."""

    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)

    def forward(self, batch: list[Tensor]) -> Tensor:
        out = self.layer(batch[0])
        if out.isfinite().all() and int((batch[1] >= 0).sum()) == len(batch[1]):
            return nn.functional.cross_entropy(out, batch[1])
        return out.sum()


def test_values_of_all_nodes_are_read_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(TASKS, "reading", (Reading, vectors))
    for num_nodes in (4, 16):
        noting = Noting()
        launches(DiLoCoStrategy(H=3, lr=1e-2), num_nodes, "reading", callbacks=[noting])
        assert {b - a for a, b in pairwise(noting.reads[:-1])} == {3}  # two values, and the losses


def test_masks_are_drawn_node_by_node() -> None:
    few, many = (launches(DiLoCoStrategy(H=3, lr=1e-2), k, "GPT", dropout=0.2) for k in (4, 16))
    assert growth(few, many) == {"native_dropout"}
