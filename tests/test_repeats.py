"""What `deterministic=True` sets where runs do not repeat by themselves, and where it is refused."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import vsim
from vsim import Trainer
from vsim.data import digits
from vsim.engine import Settings, batched
from vsim.engine.machine import repeating
from vsim.models import MLP
from vsim.strategy import DiLoCoStrategy, SimpleReduceStrategy
from vsim.training import loop

CUDA = torch.device("cuda")


def settings() -> tuple[bool, ...]:
    cudnn = torch.backends.cudnn
    return torch.are_deterministic_algorithms_enabled(), cudnn.deterministic, cudnn.benchmark


@pytest.fixture(autouse=True)
def before() -> Iterator[tuple[bool, ...]]:
    """The settings before a test, in which cuDNN chooses its kernels by the clock, and which the test must keep."""
    torch.backends.cudnn.benchmark = True
    before = settings()
    yield before
    assert settings() == before
    torch.backends.cudnn.benchmark = False


def test_what_is_set_on_cuda_and_set_back(before: tuple[bool, ...]) -> None:
    assert before == (False, False, True)
    for device, within in [(CUDA, (True, True, False)), (torch.device("cpu"), before)]:
        with repeating(device):
            assert settings() == within
        assert settings() == before
        with pytest.raises(RuntimeError, match="diverged"), repeating(device):
            raise RuntimeError("diverged")
        assert settings() == before


def test_an_operation_that_does_not_repeat_is_an_error_that_says_who_asked() -> None:
    message = r"put_ does not have a deterministic.*deterministic=True allows only"
    with pytest.raises(RuntimeError, match=message), repeating(CUDA):
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))


def test_a_caller_may_ask_for_warnings_only() -> None:
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        with repeating(CUDA), pytest.warns(UserWarning, match="put_ does not have a deterministic"):
            torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
        assert torch.is_deterministic_algorithms_warn_only_enabled()
    finally:
        torch.use_deterministic_algorithms(False)


class Noting(MLP):
    """Notes whether PyTorch takes deterministic algorithms only."""

    def forward(self, batch: Tensor | list[Tensor]) -> Tensor:
        SEEN.add(torch.are_deterministic_algorithms_enabled())
        return super().forward(batch)


SEEN: set[bool] = set()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("way", ["fit", "compare", "explain"])
def test_all_that_trains_is_made_to_repeat(way: str, deterministic: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "repeating", lambda device: repeating(CUDA))
    train, val = digits()
    options: dict[str, Any] = {"num_nodes": 2, "max_steps": 2, "progress": False, "deterministic": deterministic}
    SEEN.clear()
    model = Noting(hidden=(8,), seed=0)
    if way == "compare":
        strategies = {"DiLoCo": DiLoCoStrategy(H=2), "AllReduce": SimpleReduceStrategy()}
        vsim.compare(model, train, val, strategies=strategies, **options)
    else:
        getattr(Trainer(model, train, val), way)(strategy=DiLoCoStrategy(H=2), **options)
    assert deterministic in SEEN  # a first look at the model is taken before
    assert deterministic or True not in SEEN


def test_on_an_accelerator_nodes_are_not_cut_by_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def settings_of(**options: Any) -> Settings:
        trainer = Trainer(MLP(hidden=(8,), seed=0), digits()[0])
        return (
            trainer.prepare(strategy=DiLoCoStrategy(H=2), num_nodes=4, max_steps=2, **options).only[1].executor.settings
        )

    assert settings_of(deterministic=True) == Settings(deterministic=True)
    monkeypatch.setattr(batched, "favors_loops", lambda device: False)
    assert settings_of() == Settings()
    assert settings_of(deterministic=True) == Settings(deterministic=True, chunk_size=4)
    monkeypatch.setattr(vsim.training.spec, "pick_device", lambda *_: CUDA)
    assert settings_of(deterministic=True, chunk_size=2) == Settings(deterministic=True, chunk_size=2)


def test_on_mps_it_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    train, _ = digits()
    trainer, options = Trainer(MLP(seed=0), train), {"num_nodes": 2, "max_steps": 2, "progress": False}
    message = "deterministic=True is for device='cpu' and 'cuda', got 'mps'"
    strategy = DiLoCoStrategy(H=2)
    for where in ({"device": "mps"}, {}, {"backend": "process", "devices": ["cpu", "mps"]}):  # {}: MPS is the default
        with pytest.raises(ValueError, match=message):
            trainer.fit(strategy=strategy, deterministic=True, **options, **where)
    with pytest.raises(ValueError, match=message):
        vsim.compare(trainer.model, train, strategies={"DiLoCo": strategy}, deterministic=True, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        trainer.fit(strategy=strategy, deterministic=True, device="cpu", **options)
