"""Runs on a device that is not the CPU have its numbers, and the host hardly ever waits; test_device.py runs this."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from pretend import DEVICE, accelerator, is_there, on_cpu, reads
from test_strategies_common import STEPS, Row, every_row, examples, model, uneven
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from vsim_kernels import alignment

from vsim import Callback, Compute, Network, Sample, Schedule, Trainer, load_checkpoint
from vsim.engine import batched
from vsim.engine.machine import devices_of_nodes, moved
from vsim.process.options import backend_for
from vsim.records.history import OF_THE_MACHINE
from vsim.strategy import (
    AsyncDiLoCoStrategy,
    Average,
    DecoupledDiLoCoStrategy,
    DiLoCoStrategy,
    FedAvgStrategy,
    ScaffoldStrategy,
    Strategy,
    edit,
)

profiles = pytest.mark.parametrize("profile", ["cuda", "mps"])
pytestmark = pytest.mark.filterwarnings("ignore:(DCT|Tile)TopK:UserWarning")


class Noting(Callback):
    """Notes how often the host had waited for the device after each step."""

    def __init__(self) -> None:
        self.counts: list[int] = []

    def on_step(self, run: Any) -> None:
        self.counts.append(reads())


def run(strategy: Strategy, device: Any = None, num_nodes: int = 4, module: Any = None, **options: Any) -> Trainer:
    trainer = Trainer(model() if module is None else module, uneven, examples(40, seed=9), device=device)
    options = {"max_steps": STEPS, "batch_size": 8, "val_interval": None, "executor": "vmap", **options}
    trainer.fit(strategy=strategy, num_nodes=num_nodes, progress=False, **options)
    return trainer


def bits(trainer: Trainer) -> tuple[Any, ...]:
    assert trainer.strategy is not None
    weights = trainer.strategy.cluster.weights
    values = on_cpu(weights) if is_there(weights) else weights
    history = trainer.history
    rows = [history[name].tobytes() for name in history.columns if name not in OF_THE_MACHINE]
    return values.numpy().tobytes(), rows, history.node_losses.tobytes(), list(trainer.ledger)


def diloco() -> Strategy:
    return DiLoCoStrategy(H=3, lr=1e-2)


@contextmanager
def forms_of_accelerators() -> Iterator[None]:
    """Compute on the CPU by the forms that an accelerator has; `test_lowering.py` compares them with the loop."""
    with (
        mock.patch.object(batched, "favors_loops", return_value=False),
        mock.patch.object(alignment, "matters", return_value=False),
    ):
        yield


def on_both(make: Any, profile: str = "cuda", **options: Any) -> list[int]:
    """Count the reads from the device in each step but the first and last, of a run bitwise equal to the CPU's."""
    with forms_of_accelerators():
        here = bits(run(make(), "cpu", **options))
    noting = Noting()
    with accelerator(profile):
        trainer = run(make(), DEVICE, callbacks=[noting], **options)
        assert trainer.strategy is not None and is_there(trainer.strategy.cluster.weights)
    assert bits(trainer) == here
    return np.diff(noting.counts)[:-1].tolist()  # type: ignore[no-any-return]


def reads_vectors(strategy: Strategy) -> bool:
    """Whether an average of it looks which vectors are finite, as robust rules and clip("median") do."""
    averages = [vars(part).get("average") for part in (strategy, *strategy.communication_modules)]
    own = [average for average in averages if isinstance(average, Average)]
    by_rule = any(average.rule.needs_rows and not isinstance(average.rule, edit) for average in own)
    return by_rule or any(average.limit is not None and average.limit.norm == "median" for average in own)


@profiles
@every_row
def test_every_strategy_reads_losses_once_a_step(row: Row, profile: str) -> None:
    reads = set(on_both(row.make, profile))
    matrices = {"Dion": 1, "PowerSGD": 2}  # of these sizes, which are orthogonalized on the CPU if the device cannot
    if profile == "mps" and row.name in matrices:
        assert reads == {1 + matrices[row.name]}
    else:
        assert reads == {1} or (reads_vectors(row.make()) and min(reads) >= 1 and max(reads) <= 3), reads


@pytest.mark.parametrize(
    "options",
    [{"executor": "loop"}, {"executor": "auto"}, {"deterministic": True}, {"minibatch_size": 4}],
    ids=str,
)
def test_executors(options: dict[str, Any]) -> None:
    assert set(on_both(diloco, **options)) == {1}


def test_validation() -> None:
    on_both(diloco, val_interval=2, correlation_interval=3)


def test_autocast() -> None:
    with accelerator():
        trainer = run(diloco(), DEVICE, autocast=True)
    theirs = run(diloco(), "cpu", autocast=True).history["train_loss"]
    assert trainer.history["train_loss"] == pytest.approx(theirs, rel=0.05, nan_ok=True)


@pytest.mark.parametrize(
    "plan", [Schedule({0: [0, 1], 3: [1, 2, 3]}), Sample(4, of=9, rounds=3)], ids=lambda plan: type(plan).__name__
)
def test_participation(plan: Any) -> None:
    assert set(on_both(diloco, participation=plan)) == {1}


def test_state_of_clients_is_read_once_a_round() -> None:
    reads = on_both(lambda: ScaffoldStrategy(H=2, lr=0.1), participation=Sample(4, of=9, rounds=2))
    assert reads == [1, 1 + 2, 1, 1 + 2]  # of two tensors each client has its own


@pytest.mark.parametrize("cls", [AsyncDiLoCoStrategy, DecoupledDiLoCoStrategy])
def test_asynchronous(cls: Any) -> None:
    apart = Compute(0.8, speeds=[1, 2, 1, 4], jitter=0.3), Network("1 Mbit/s", "20 ms")
    on_both(lambda: cls(H=4, lr=1e-2), compute=apart[0], network=apart[1])


def test_resume_and_fork(tmp_path: Path) -> None:
    with forms_of_accelerators():
        whole = run(diloco(), "cpu", max_steps=8)
    with accelerator():
        run(diloco(), DEVICE, max_steps=5, save_dir=tmp_path)
        (saved,) = tmp_path.glob("**/*.safetensors")
        resumed = run(diloco(), DEVICE, max_steps=8, resume=saved)
    weights, _, losses, events = bits(resumed)  # the columns have the validation at step 5, too
    assert (weights, losses, events) == (bits(whole)[0], *bits(whole)[2:])
    with accelerator():
        forked = run(FedAvgStrategy(H=2), DEVICE, num_nodes=3, max_steps=8, resume=load_checkpoint(saved).fork())
    with forms_of_accelerators():
        theirs = run(FedAvgStrategy(H=2), "cpu", num_nodes=3, max_steps=8, resume=load_checkpoint(saved).fork())
    assert bits(forked) == bits(theirs)


def test_processes_take_a_gpu_each_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert devices_of_nodes(None, None, 2) == gpus and backend_for(gpus, 2) == "nccl"
    with pytest.warns(UserWarning, match=r"3 nodes train on the CPU, as there are 2 GPUs.*cuda:1"):
        assert devices_of_nodes(None, None, 3) == [torch.device("cpu")]
    assert backend_for(gpus, 3) == backend_for([torch.device("cpu")], 1) == "gloo"


@pytest.mark.parametrize(
    ("device", "pinned", "waits"), [("cuda", True, False), ("cuda", False, True), ("mps", True, True)]
)
def test_the_host_waits_for_copies_of_memory_that_others_may_get(
    device: str, pinned: bool, waits: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    copies = []
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: pinned)
    monkeypatch.setattr(torch.Tensor, "to", lambda self, *to, non_blocking: copies.append((*to, non_blocking)) or self)
    moved({"x": torch.ones(2), "y": [torch.zeros(1)]}, torch.device(device))
    assert copies == 2 * [(torch.device(device), not waits)]


class Lookup(nn.Module):
    """The mean of a row for each of three indices, classified."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(7, 8), nn.Linear(8, 5)

    def forward(self, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(self.head(self.table(x).mean(1)), y)


def lookups(odd: str = "") -> TensorDataset:
    """Examples, one of which has an index, or a label, that there is not."""
    stream = torch.Generator().manual_seed(0)
    x, y = torch.randint(0, 7, (64, 3), generator=stream), torch.randint(0, 5, (64,), generator=stream)
    if odd:
        (x[41] if odd == "index" else y[41:42])[:] = 9
    y[5] = -100
    return TensorDataset(x, y)


@profiles
@pytest.mark.parametrize("odd", ["index", "label"])
@pytest.mark.parametrize("options", [{"executor": "vmap"}, {"executor": "loop"}, {"deterministic": True}], ids=str)
def test_an_index_out_of_range_is_the_error_of_the_cpu(profile: str, odd: str, options: dict[str, Any]) -> None:
    def fit(device: Any, data: Any, val: Any = None) -> None:
        trainer = Trainer(Lookup(), data, val, device=device)
        more = {"val_interval": None, "num_nodes": 4, "max_steps": 6, "batch_size": 4, "progress": False}
        trainer.fit(strategy=diloco(), **more, **options)

    for data in ([lookups(odd)], [lookups(), lookups(odd)]):
        with pytest.raises(IndexError) as here:
            fit("cpu", *data)
        with accelerator(profile), pytest.raises(IndexError) as there:
            fit(DEVICE, *data)
        assert (
            re.sub(r" on node \d", "", str(there.value)).partition(" given")[0]
            == str(here.value).partition(" given")[0]
        )
    with accelerator(profile) as device:  # which still works
        assert torch.ones(2, device=device).sum().item() == 2
        fit(DEVICE, lookups(), lookups())


def test_what_is_mixed_is_refused() -> None:
    with accelerator() as device:
        there, here = torch.ones(2, device=device), torch.ones(2)
        with pytest.raises(RuntimeError, match="on the same device"):
            there + here
        with pytest.raises(TypeError, match="to numpy"):
            there.numpy()
        assert there.sum().item() == 2 and reads() == 1
