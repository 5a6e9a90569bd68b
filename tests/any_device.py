"""What must hold on every device: on_real_device.py runs these tests on one, named by VSIM_DEVICE.

The CPU's runs are the reference, and the other tests compare these with plain PyTorch. A device rounds differently, so
losses are compared up to RTOL, with an optimizer in which no step is the sign of a rounding error.
"""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_strategies_common import TABLE, Row, examples, uneven
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

import vsim
from vsim import Compute, Network, Sample, Schedule, Trainer
from vsim.engine.machine import pick_device
from vsim.models import CNN, GPT, MLP
from vsim.strategy import AsyncDiLoCoStrategy, DiLoCoStrategy, OptimSpec, SimpleReduceStrategy, Strategy

DEVICE = pick_device(os.environ.get("VSIM_DEVICE", "cpu"))
QUICK = bool(os.environ.get("VSIM_QUICK"))
STEPS, NODES, RTOL = 6, 4, 2e-3
OPTIMIZER = OptimSpec("adamw", lr=1e-2, eps=1e-3)

pytestmark = [
    pytest.mark.filterwarnings("ignore:(DCT|Tile|RandomBasis)TopK:UserWarning"),
    pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning"),  # torch itself, while compiling
]


@pytest.fixture(autouse=True)
def _float32() -> Iterator[None]:
    """Compute convolutions in float32: by default PyTorch takes TF32 for them on CUDA."""
    conv: Any = torch.backends.cudnn.conv  # type: ignore[attr-defined]
    before, conv.fp32_precision = conv.fp32_precision, "ieee"
    yield
    conv.fp32_precision = before


def images() -> TensorDataset:
    x, y = examples().tensors
    return TensorDataset(x.view(-1, 1, 8, 8), y)


def tokens() -> TensorDataset:
    ids = torch.randint(0, 31, (96, 13), generator=torch.Generator().manual_seed(0))
    return TensorDataset(ids[:, :-1], ids[:, 1:])


# From a probability of dropout.
MODELS: dict[str, tuple[Callable[..., nn.Module], Callable[[], TensorDataset]]] = {
    "mlp": (lambda p=0.0: MLP(hidden=(16,), dropout=p, seed=3), examples),
    "cnn": (lambda p=0.0: CNN(batch_norm=True, dropout=p, seed=3), images),
    "gpt": (lambda p=0.0: GPT(31, block_size=12, layers=2, width=16, heads=2, dropout=p, seed=3), tokens),
}
every_model = pytest.mark.parametrize("model", MODELS)
OF_RUN: dict[str, Any] = {"max_steps": STEPS, "batch_size": 8, "num_nodes": NODES, "progress": False}


def diloco() -> Strategy:
    return DiLoCoStrategy(H=3, inner_optim=OPTIMIZER)


def allreduce() -> Strategy:
    return SimpleReduceStrategy(inner_optim=OPTIMIZER)


def run(
    strategy: Strategy, device: Any = DEVICE, model: str = "mlp", data: Any = None, dropout: float = 0.0, **options: Any
) -> Trainer:
    make, of_model = MODELS[model]
    trainer = Trainer(make(dropout), of_model() if data is None else data, of_model(), device=device)
    trainer.fit(strategy=strategy, **{**OF_RUN, **options})
    return trainer


def assert_same_losses(one: Trainer, other: Trainer, rtol: float = RTOL) -> None:
    np.testing.assert_allclose(one.history.node_losses, other.history.node_losses, rtol=rtol, atol=rtol)


def assert_same_course(one: Trainer, other: Trainer, rtol: float = RTOL) -> None:
    assert_same_losses(one, other, rtol)
    for column in ("global_loss", "local_loss"):
        np.testing.assert_allclose(one.history[column], other.history[column], rtol=rtol, atol=rtol)
    assert list(one.ledger) == list(other.ledger)


@pytest.mark.parametrize("row", TABLE[::8] if QUICK else TABLE, ids=lambda row: row.name)
def test_strategies(row: Row) -> None:
    has_own = "inner_optim" in row.arguments or row.refuses
    more: dict[str, Any] = {} if has_own else {"inner_optim": OptimSpec("adamw", eps=1e-3)}
    rtol = 0.05 if row.name == "QSGD" else RTOL  # QSGD rounds by numbers that the device draws
    assert_same_course(run(row.make(**more), data=uneven), run(row.make(**more), "cpu", data=uneven), rtol)


@pytest.mark.parametrize("executor", ["auto", "vmap", "loop"])
@every_model
def test_executors(model: str, executor: str) -> None:
    trainer = run(diloco(), model=model, executor=executor)
    assert_same_course(trainer, run(diloco(), "cpu", model=model, executor="loop"))
    assert trainer.history.executor == ("vmap" if executor == "auto" else executor)


@pytest.mark.skipif(QUICK, reason="compiling takes minutes")
@every_model
def test_compiled(model: str) -> None:
    trainer = run(diloco(), model=model, compile=True)
    assert_same_course(trainer, run(diloco(), "cpu", model=model))
    assert trainer.history.executor == "compiled"


class Slow(Dataset[Any]):
    """A dataset that is not in memory."""

    @functools.cached_property
    def whole(self) -> TensorDataset:
        return examples()

    def __len__(self) -> int:
        return 96

    def __getitem__(self, index: int) -> Any:
        return self.whole[index]


PINNED = {"pin_memory": True} if DEVICE.type == "cuda" else {}
OPTIONS: dict[str, dict[str, Any]] = {
    "minibatches": {"minibatch_size": 4},
    "chunks": {"chunk_size": 3},
    "correlations": {"correlation_interval": 2},
    "schedule": {"participation": Schedule({0: [0, 1], 3: [1, 2, 3]}), "data": uneven},
    "clients": {"participation": Sample(NODES, of=9, rounds=3), "data": uneven},
    "workers": {"data": Slow(), "dataloader_kwargs": {"num_workers": 1, **PINNED}},
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options(name: str) -> None:
    assert_same_course(run(diloco(), **OPTIONS[name]), run(diloco(), "cpu", **OPTIONS[name]))


def test_tensors_of_the_device_may_be_the_data() -> None:
    there = TensorDataset(*(t.to(DEVICE) for t in examples().tensors))
    assert_same_course(run(diloco(), data=there), run(diloco(), "cpu"))


@every_model
def test_autocast(model: str) -> None:
    assert_same_losses(*(run(diloco(), device, model=model, autocast=True) for device in (DEVICE, "cpu")), rtol=0.05)


@every_model
def test_dropout_of_all_nodes_is_that_of_each(model: str) -> None:
    ours, theirs = (run(diloco(), model=model, dropout=0.5, executor=executor) for executor in ("auto", "loop"))
    assert_same_course(ours, theirs)
    assert ours.history.executor == "vmap"


@pytest.mark.parametrize("executor", ["vmap", "loop"])
def test_every_node_draws_its_own_dropout(executor: str) -> None:
    same = examples(8)
    frozen = SimpleReduceStrategy(lr=0.0)
    trainer = run(frozen, data=lambda rank, num_nodes, train: same, dropout=0.5, executor=executor)
    assert len(np.unique(trainer.history.node_losses)) == NODES * STEPS


class Recurrent(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.rnn, self.out = getattr(nn, kind)(4, 6, batch_first=True), nn.Linear(6, 10)

    def forward(self, batch: list[Tensor]) -> Tensor:
        outputs = self.out(self.rnn(batch[0].unflatten(1, (-1, 4)))[0].mean(1))
        return nn.functional.cross_entropy(outputs, batch[1])


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
@pytest.mark.parametrize("make", [diloco, allreduce], ids=["DiLoCo", "AllReduce"])
def test_recurrent_models(make: Callable[[], Strategy], kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(MODELS, "rnn", (lambda p: Recurrent(kind), examples))
    assert_same_course(*(run(make(), model="rnn", executor=executor) for executor in ("vmap", "loop")))


def test_asynchronous() -> None:
    options = {"compute": Compute(0.8, speeds=[1, 2, 1, 4], jitter=0.3), "network": Network("1 Mbit/s", "20 ms")}
    strategy = AsyncDiLoCoStrategy(H=4, inner_optim=OPTIMIZER)
    assert_same_losses(*(run(strategy, device, **options) for device in (DEVICE, "cpu")))


def test_resume_and_fork(tmp_path: Path) -> None:
    run(diloco(), max_steps=4, save_dir=tmp_path / "there")
    run(diloco(), "cpu", max_steps=4, save_dir=tmp_path / "here")
    resumed, whole = run(diloco(), max_steps=9, resume=tmp_path / "there"), run(diloco(), max_steps=9)
    assert_same_losses(resumed, whole)
    assert resumed.history.last("global_loss") == pytest.approx(whole.history.last("global_loss"), rel=RTOL)
    there, here = (
        run(diloco(), device, max_steps=8, resume=vsim.load_checkpoint(tmp_path / folder, step=4).fork())
        for device, folder in ((DEVICE, "there"), ("cpu", "here"))
    )
    assert_same_course(there, here)


def test_a_comparison_has_the_runs_that_fit_has() -> None:
    strategies = {"DiLoCo": diloco(), "AllReduce": allreduce()}
    comparison = vsim.compare(
        MODELS["mlp"][0](), examples(), examples(), strategies=strategies, device=str(DEVICE), **OF_RUN
    )
    np.testing.assert_allclose(
        comparison["DiLoCo"].history["train_loss"], run(diloco()).history["train_loss"], rtol=RTOL
    )


def bits(trainer: Trainer) -> tuple[bytes, bytes]:
    assert trainer.strategy is not None
    return trainer.strategy.cluster.weights.cpu().numpy().tobytes(), trainer.history.node_losses.tobytes()


@every_model
def test_deterministic(model: str) -> None:
    if DEVICE.type == "mps":
        with pytest.raises(ValueError, match="deterministic=True is for device='cpu' and 'cuda'"):
            run(diloco(), model=model, deterministic=True)
        return
    once, again = (run(diloco(), model=model, deterministic=True) for _ in range(2))
    assert bits(once) == bits(again)
    assert once.history.executor == ("loop" if DEVICE.type == "cpu" else "vmap")
    assert_same_course(once, run(diloco(), "cpu", model=model, deterministic=True))
    assert not torch.are_deterministic_algorithms_enabled()


def test_a_loss_that_is_not_finite_is_named() -> None:
    class Diverging(MLP):
        def forward(self, batch: Tensor | list[Tensor]) -> Tensor:
            return super().forward(batch) * math.inf

    with pytest.raises(FloatingPointError, match="step 1"):
        Trainer(Diverging(seed=0), examples(), device=DEVICE).fit(strategy=diloco(), num_nodes=2, max_steps=3)


def test_memory_is_estimated() -> None:
    trainer = run(diloco(), max_memory_usage=0.9)
    assert trainer.history.minibatch_size in (None, 1, 2, 4)  # None: the whole batch of 8
    explanation = trainer.explain(strategy=diloco(), num_nodes=NODES, max_steps=STEPS)
    assert explanation.memory["weights"] == 4 * 1210 and explanation.peak_flops > 0


GPUS = torch.cuda.device_count() if DEVICE.type == "cuda" else 0


@pytest.mark.parametrize("shares", [{"num_nodes": 2}, {"num_nodes": NODES, "num_processes": 2}], ids=str)
@pytest.mark.parametrize("devices", [[str(DEVICE)], *([["cuda:0", "cuda:1"]] if GPUS > 1 else [])], ids=str)
@pytest.mark.parametrize("make", [diloco, allreduce], ids=["H = 3", "H = 1"])
def test_processes(make: Callable[[], Strategy], devices: list[str], shares: dict[str, int]) -> None:
    """One device for both processes, which gloo connects; and where there are two GPUs, nccl."""
    here, there = run(make(), num_nodes=shares["num_nodes"]), Trainer(MODELS["mlp"][0](), examples(), examples())
    there.fit(strategy=make(), backend="process", devices=devices, **{**OF_RUN, **shares})
    assert_same_losses(there, here)


# The last test: if the error is the device's own, nothing works in this process afterwards.
def test_an_index_out_of_range_leaves_the_device_usable() -> None:
    ids = torch.full((32, 12), 31)
    with pytest.raises(IndexError, match="out of range"):
        run(diloco(), model="gpt", data=TensorDataset(ids, ids), executor="vmap")
    assert_same_course(run(diloco()), run(diloco(), "cpu"))
