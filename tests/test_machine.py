"""Devices and threads of a run, and what `deterministic=True` sets where runs do not repeat by themselves."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
from errors import refused, warned
from reference_cluster import small_mlp, vectors
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import vsim
from vsim import Trainer
from vsim.cluster.optim import OptimSpec
from vsim.cluster.replicas import Replicas, matrix
from vsim.engine import LoopExecutor, Settings, VmapExecutor, batched
from vsim.engine.machine import devices_of_nodes, moved, repeating, takes_one_thread
from vsim.engine.objective import Objective
from vsim.models import CNN, GPT, MLP
from vsim.processes.options import backend_for
from vsim.runs import fit as training
from vsim.strategy import DiLoCoStrategy, FedAvgStrategy, SimpleReduceStrategy

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OPTIONS: dict[str, Any] = {"num_nodes": 2, "max_steps": 2, "progress": False}


# What repeats ---------------------------------------------------------------------------------------------------------


def settings() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark


@pytest.fixture
def before() -> Iterator[tuple[bool, ...]]:
    """The settings before a test, in which cuDNN chooses its kernels by the clock, and which the test must keep."""
    torch.backends.cudnn.benchmark = True
    before = settings()
    yield before
    assert settings() == before
    torch.backends.cudnn.benchmark = False


def test_what_is_set_on_cuda_and_set_back(before: tuple[bool, ...]) -> None:
    assert before == (False, False, True)
    for device, within in [(CUDA, (True, True, False)), (CPU, before)]:
        with pytest.raises(RuntimeError, match="diverged"), repeating(device):  # noqa: PT012
            assert settings() == within
            raise RuntimeError("diverged")
        assert settings() == before


@pytest.mark.usefixtures("before")
def test_an_operation_that_does_not_repeat_is_an_error_or_a_warning_if_the_caller_wants_that() -> None:
    def put() -> None:
        with repeating(CUDA):
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))

    with refused(RuntimeError, "put_ does not have a deterministic", "deterministic=True"):
        put()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with warned("put_ does not have a deterministic"):
            put()
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


class Noting(MLP):
    """Notes whether PyTorch takes deterministic algorithms only."""

    def forward(self, batch: Tensor | list[Tensor]) -> Tensor:
        SEEN.add(torch.are_deterministic_algorithms_enabled())
        return super().forward(batch)


SEEN: set[bool] = set()


@pytest.mark.usefixtures("before")
@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", ["fit", "compare", "explain"])
def test_all_that_trains_is_made_to_repeat(way: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "repeating", lambda device: repeating(CUDA))
    options, model = {**OPTIONS, "deterministic": deterministic}, Noting(12, (8,), 5, seed=0)
    SEEN.clear()
    if way == "compare":
        vsim.compare(model, vectors(), strategies={"A": DiLoCoStrategy(), "B": SimpleReduceStrategy()}, **options)
    else:
        getattr(Trainer(model, vectors()), way)(strategy=DiLoCoStrategy(H=2), **options)
    assert deterministic in SEEN  # a first look at the model is taken before
    assert deterministic or True not in SEEN


def test_on_an_accelerator_nodes_are_not_cut_by_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings_of(**options: Any) -> Settings:
        group = Trainer(small_mlp(), vectors()).prepare(strategy=DiLoCoStrategy(), **{**OPTIONS, **options})
        return group.executor.settings

    assert settings_of(deterministic=True) == Settings(deterministic=True)
    monkeypatch.setattr(batched, "is_cache_bound", lambda device: False)
    assert settings_of() == Settings()
    assert settings_of(deterministic=True) == Settings(deterministic=True, chunk_size=2)
    monkeypatch.setattr(vsim.runs.spec, "pick_device", lambda *_: CUDA)
    assert settings_of(deterministic=True, chunk_size=1) == Settings(deterministic=True, chunk_size=1)


def test_on_mps_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    trainer, strategy = Trainer(small_mlp(), vectors()), DiLoCoStrategy(H=2)
    options = {**OPTIONS, "deterministic": True}
    for where in ({"device": "mps"}, {}, {"backend": "process", "devices": ["cpu", "mps"]}):  # {}: MPS is the default
        with refused(ValueError, "deterministic=True", "'cpu' and 'cuda'", "'mps'"):
            trainer.fit(strategy=strategy, **options, **where)
    with refused(ValueError, "deterministic=True", "'mps'"):
        vsim.compare(trainer.model, vectors(), strategies={"DiLoCo": strategy}, **options)
    trainer.fit(strategy=strategy, device="cpu", **options)


# Devices --------------------------------------------------------------------------------------------------------------


def test_processes_take_a_gpu_each_where_there_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    gpus = [torch.device("cuda", 0), torch.device("cuda", 1)]
    assert devices_of_nodes(None, None, 2) == gpus and backend_for(gpus, 2) == "nccl"
    with warned("3 processes", "CPU", "2 GPUs"):
        assert devices_of_nodes(None, None, 3) == [CPU]
    assert backend_for(gpus, 3) == backend_for([CPU], 1) == "gloo"


@pytest.mark.parametrize("is_pinned", [False, True])
@pytest.mark.parametrize("device", ["cuda", "mps"])
def test_only_copies_of_pinned_memory_to_cuda_are_asynchronous(
    device: str, is_pinned: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(Tensor, "is_pinned", lambda self: is_pinned)
    monkeypatch.setattr(Tensor, "pin_memory", lambda self: calls.append("pin") or self)
    monkeypatch.setattr(Tensor, "to", lambda self, *to, **how: calls.append((*to, how)) or self)
    moved({"x": torch.ones(2)}, torch.device(device))
    pins, how = ["pin"] * (device == "cuda" and not is_pinned), {"non_blocking": True} if device == "cuda" else {}
    assert calls == [*pins, (torch.device(device), how)]


def test_tables_that_mps_cannot_look_up_in() -> None:
    def at_once(rows: int, width: int, chunk_size: int | None = None, device: str = "mps", num_nodes: int = 64) -> int:
        module = nn.ModuleDict({"table": nn.Embedding(rows, width, device="meta"), "head": nn.Linear(2, 2)})
        replicas = Replicas.of(module.to("meta"), num_nodes, torch.device("meta"))
        replicas.weights = mock.Mock(device=torch.device(device), shape=replicas.weights.shape)
        return VmapExecutor.nodes_at_once(replicas, Settings(chunk_size=chunk_size))

    assert at_once(2**20, 2**6, chunk_size=31) == 31
    for too_many in (32, 64):
        with refused(ValueError, f"chunk_size={too_many}", "at most chunk_size=31"):
            at_once(2**20, 2**6, chunk_size=too_many)
    assert at_once(2**20, 2**6, chunk_size=64, device="cuda") == 64
    assert at_once(2**20, 2**11 - 1, num_nodes=2) == 1
    with refused(ValueError, "table.weight", 2147483648, "device='cpu'"):
        at_once(2**20, 2**11)


# Threads: small steps are computed by one -----------------------------------------------------------------------------


@pytest.fixture
def _three_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    assert torch.get_num_threads() == 3
    torch.set_num_threads(before)


THREADS: list[int] = []  # that compute each call of a model


class Watched(nn.Module):
    """A model that notes how many threads compute it, and draws random numbers."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(8, width)

    def forward(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        THREADS.append(torch.get_num_threads())
        return nn.functional.dropout(self.layer(batch[0]), 0.5).square().mean()


@pytest.mark.usefixtures("_three_threads")
@pytest.mark.parametrize(
    ("width", "options", "threads"),
    [
        *((4, {"executor": executor}, 1) for executor in ("vmap", "loop")),
        (100_000, {"executor": "vmap"}, 3),
        (4, {"deterministic": True}, 3),  # as the processes have
    ],
)
def test_a_small_step_has_one_thread_and_callbacks_have_the_users(
    width: int, options: dict[str, Any], threads: int
) -> None:
    def note(run: Any) -> None:
        seen.append(torch.get_num_threads())
        calls.append({*THREADS[-2:]})
        THREADS.clear()

    seen: list[int] = []
    calls: list[set[int]] = []
    data = TensorDataset(torch.randn(64, 8), torch.zeros(64))
    options = {**OPTIONS, "batch_size": 8, "callbacks": [note], **options}
    Trainer(Watched(width), data).fit(strategy=FedAvgStrategy(), **options)
    assert calls == 2 * [{threads}] and seen == [3, 3]


@pytest.mark.parametrize(
    ("model", "num_nodes", "one"), [(MLP(), 4, True), (MLP(), 16, False), (CNN(), 4, False), (GPT(97), 4, False)]
)
def test_few_weights_without_convolutions_have_one_thread(model: nn.Module, num_nodes: int, one: bool) -> None:
    replicas = Replicas.of(model, num_nodes, CPU)
    assert takes_one_thread(LoopExecutor(replicas, Objective(replicas.module), [])) == one


@pytest.mark.slow
@pytest.mark.parametrize(("threads", "optimizer"), [(1, "adamw"), (2, "sgd"), (3, "adamw")])
def test_equal_nodes_stay_equal_under_one_fused_call(threads: int, optimizer: str) -> None:
    """A fused kernel rounds the rest of a chunk, which is no whole vector, in another way: rows are whole vectors."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    num_nodes, columns = 5, 26_123  # more than one thread's chunk, and no multiple of a vector
    weights, grads = (matrix(num_nodes, columns, torch.float32, CPU) for _ in range(2))
    stream = torch.Generator().manual_seed(threads)
    weights[:] = torch.randn(columns, generator=stream)
    options = {"momentum": 0.9} if optimizer == "sgd" else {}
    built = OptimSpec(optimizer, lr=1e-3, **options).build_over(weights, grads, deterministic=False)
    assert built.param_groups[0]["fused"] and len(built.param_groups[0]["params"]) == 1
    for step in range(1, 201):
        grads[:] = torch.randn(columns, generator=stream)
        built.step()
        assert torch.equal(weights, weights[:1].expand_as(weights)), f"step {step}"
    torch.set_num_threads(before)
