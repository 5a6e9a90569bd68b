"""On a device the host hardly ever waits, launches do not grow with the nodes, and tensors are where they belong.

test_device.py runs this on the pretended one. What runs compute there is in any_device.py, on real ones.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from pretend_device import DEVICE, LAUNCHES, READS, accelerator
from reference_cluster import images, small_cnn, small_gpt, small_mlp, tokens, vectors
from test_strategies_common import STEPS, Row, every_row, model, uneven
from torch import Tensor, nn

from vsim import Callback, Sample, Schedule, Trainer
from vsim.cluster.optim import OPTIMIZERS
from vsim.strategy import Average, DiLoCoStrategy, HierarchicalStrategy, ScaffoldStrategy, Strategy
from vsim.strategy.average import Edit

pytestmark = pytest.mark.filterwarnings("ignore:(DCT|Tile|RandomBasis)TopK:UserWarning")


@pytest.fixture(autouse=True)
def _unwatched(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count without the guard of `run.model`, which reads the parameters after steps 1, 2, 4, … for a callback."""
    monkeypatch.setattr("vsim.runs.callbacks._values", lambda run: {})


class Counted(Callback):
    """Notes after each step what the host had read from the device, and what was launched."""

    def __init__(self) -> None:
        self.noted: list[tuple[int, Counter[str]]] = []

    def on_step(self, run: Any) -> None:
        self.noted.append((READS.total(), LAUNCHES.copy()))

    @property
    def reads(self) -> list[int]:
        """Of each step but the first and the last, which do more."""
        return [after[0] - before[0] for before, after in pairwise(self.noted)][:-1]

    @property
    def launches(self) -> list[Counter[str]]:
        return [after[1] - before[1] for before, after in pairwise(self.noted)][:-1]


def counted(strategy: Strategy, num_nodes: int = 4, module: Any = None, data: Any = uneven, **options: Any) -> Counted:
    counts = Counted()
    defaults = {"max_steps": STEPS, "batch_size": 8, "val_interval": None, "executor": "vmap", "progress": False}
    options = {**defaults, "callbacks": [counts], **options}
    val = data(9, 1, False) if callable(data) else data
    with accelerator():
        trainer = Trainer(model() if module is None else module, data, val, device=DEVICE)
        trainer.fit(strategy=strategy, num_nodes=num_nodes, **options)
        assert trainer.strategy is not None and trainer.strategy.cluster.weights.device == DEVICE
        assert "went to the loop" not in trainer.history.executor_reason
    return counts


def growth(few: Counted, many: Counted) -> set[str]:
    """Return the operations that are launched more often for more nodes."""
    assert min(step.total() for step in few.launches) > 0
    return {name for one, other in zip(few.launches, many.launches, strict=True) for name in other - one}


def diloco(**options: Any) -> Strategy:
    return DiLoCoStrategy(H=3, lr=1e-2, **options)


def reads_vectors(strategy: Strategy) -> bool:
    """Whether an average of it looks which vectors are finite, as robust rules and clip("median") do."""
    averages = [vars(part).get("average") for part in (strategy, *strategy.parts)]
    own = [average for average in averages if isinstance(average, Average)]
    by_rule = any(average.rule.needs_rows and not isinstance(average.rule, Edit) for average in own)
    return by_rule or any(average.limit is not None and average.limit.norm == "median" for average in own)


MATRICES = {"Dion": 1, "PowerSGD": 2, "DeMo, version 2": 4}  # of these sizes, which are orthogonalized on the CPU
AT_A_SYNC = {"AFL"}  # reads the losses of a round there, for the projection of the clients' shares
# More nodes are more islands, each of which reduces by itself.
OF_ISLANDS = {"copy_", "index", "mean", "_index_put_impl_", "index_put_", "upload"}
OF_MEDIANS = {"cat", "ne", "sum", "eq", "abs", "mul", "_local_scalar_dense", "sort"}
GROW = {
    "FedAvg, median": OF_ISLANDS | OF_MEDIANS,
    **dict.fromkeys(["FedAvg in islands", "hierarchical", "modules in order", "sparse, islands, outer"], OF_ISLANDS),
    "QSGD": {"uniform_"},  # every node rounds by its own stream
}


@every_row
def test_a_strategy_reads_losses_once_a_step_and_launches_do_not_grow_with_the_nodes(row: Row) -> None:
    def of(num_nodes: int) -> Counted:
        # The largest level is all nodes.
        levels = HierarchicalStrategy(levels={2: 1, num_nodes: 3}) if row.name == "hierarchical" else None
        return counted(levels or row.make(), num_nodes)

    few, many, more = of(4), of(16), MATRICES.get(row.name, 0)
    is_few = {*few.reads, *many.reads} == {1 + more}
    reads_more = reads_vectors(row.make()) or row.name in AT_A_SYNC
    assert is_few or (reads_more and min(few.reads) >= 1 and max(few.reads) <= 3), few.reads
    found = growth(few, many)
    assert found and found <= GROW[row.name] if row.name in GROW else not found, found


# The CNN has BatchNorm. A step takes at most so many launches: measured, so that none is added unseen.
TASKS: dict[str, tuple[Callable[..., nn.Module], Any, int]] = {
    "MLP": (small_mlp, vectors, 37),
    "CNN": (small_cnn, images, 71),
    "GPT": (small_gpt, tokens, 193),
}
every_task = pytest.mark.parametrize("task", TASKS)
WAYS = [
    *({"executor": "vmap"}, {"executor": "loop"}, {"deterministic": True, "executor": "auto"}),
    *({"minibatch_size": 4}, {"chunk_size": 2}),
]


@pytest.mark.parametrize("options", WAYS, ids=str)
@every_task
def test_a_model_reads_losses_once_a_step(task: str, options: dict[str, Any]) -> None:
    make, data, _ = TASKS[task]
    assert set(counted(diloco(), module=make(0.2), data=data(96), **options).reads) == {1}


@every_task
def test_launches_of_a_model_are_few_and_do_not_grow_with_the_nodes(task: str) -> None:
    make, data, most = TASKS[task]

    def of(num_nodes: int, dropout: float) -> Counted:
        options = {"module": make(dropout), "data": data(8 * num_nodes), "batch_size": 4}
        return counted(DiLoCoStrategy(H=10, lr=1e-2), num_nodes, **options)

    few, many = of(4, 0.0), of(16, 0.0)
    assert not growth(few, many) and set(many.reads) == {1}
    assert max(step.total() - step["upload"] for step in many.launches) <= most
    assert growth(of(4, 0.2), of(16, 0.2)) == {"native_dropout"}  # masks are drawn node by node


@pytest.mark.parametrize("name", sorted(OPTIMIZERS.keys() - {"adafactor", "lbfgs", "muon", "sparseadam"}))
def test_optimizers_read_nothing(name: str) -> None:
    # torch's own ASGD reads the number of its step, and its Rprop writes to what three masks select.
    more = {"asgd": 1, "rprop": 3}.get(name, 0)
    assert set(counted(DiLoCoStrategy(inner_optim=name, H=3)).reads) == {1 + more}


def test_validation_and_clients_read_few_numbers() -> None:
    metric = {"two": lambda module, batch: 2 * module(batch)}
    more = counted(diloco(), val_interval=2, correlation_interval=3, metrics=metric)
    assert max(more.reads) <= 16  # a number for each, not for each batch or parameter
    for plan in (Schedule({0: [0, 1], 3: [1, 2, 3]}), Sample(4, of=9, rounds=3)):
        assert set(counted(diloco(), participation=plan).reads) == {1}
    own = counted(ScaffoldStrategy(H=2, lr=0.1), participation=Sample(4, of=9, rounds=2))
    assert own.reads == [1, 1 + 2, 1, 1 + 2]  # of two tensors each client has its own


class Reading(nn.Module):
    """A model whose Python reads values of its tensors, equal on all nodes."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(12, 5)

    def forward(self, batch: list[Tensor]) -> Tensor:
        out = self.layer(batch[0])
        equal = out.isfinite().all() and int((batch[1] >= 0).sum()) == len(batch[1])
        return F.cross_entropy(out, batch[1]) if equal else out.sum()


def test_values_of_all_nodes_are_read_at_once() -> None:
    for num_nodes in (4, 16):
        counts = counted(diloco(), num_nodes=num_nodes, module=Reading(), data=vectors(8 * num_nodes), batch_size=4)
        assert set(counts.reads) == {3}  # two values, and the losses


# The device itself ----------------------------------------------------------------------------------------------------


def test_what_is_refused() -> None:
    with accelerator() as device:
        there, here = torch.ones(2, device=device), torch.ones(2)
        for one, two in ((there, here), (here, there)):
            with pytest.raises(RuntimeError, match="to be on the same device, but found at least two"):
                one + two
        assert (there * torch.tensor(2.0)).tolist() == [2, 2]  # a number from the host
        with pytest.raises(RuntimeError, match="for generator but found 'cpu'"):
            there.uniform_(generator=torch.Generator().manual_seed(1))
        there.uniform_(generator=torch.Generator(device).manual_seed(1))
        assert there.tolist() == torch.rand(2, generator=torch.Generator().manual_seed(1)).tolist()
        for refuse in (torch.ones(2).double().to, lambda to: torch.ones(2, device=to).double()):
            with pytest.raises(TypeError, match="the MPS framework doesn't support float64"):
                refuse(device)
        with pytest.raises(NotImplementedError, match="PYTORCH_ENABLE_MPS_FALLBACK=1"):
            torch.linalg.qr(torch.eye(2, device=device))


def test_what_is_counted() -> None:
    with accelerator() as device:
        x = torch.arange(6.0, device=device).view(2, 3)
        y = x[0] * 2
        assert (LAUNCHES.total(), READS.total()) == (2, 0)
        for number, read in enumerate(
            (y.tolist, y.sum().item, y.cpu, y.nonzero, lambda: bool(y[1]), lambda: y[y > 0], lambda: y.equal(y)), 1
        ):
            read()
            assert READS.total() == number
        torch.ones(2).to(device)
        x[torch.tensor([0, 0])]
        assert LAUNCHES["upload"] == 2
