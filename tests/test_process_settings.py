"""What the caller has set in torch holds in the nodes' processes too."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import forked_processes
import pytest
import torch
from torch import Tensor

from vsim import Trainer
from vsim.data import digits
from vsim.models import MLP
from vsim.processes.child import apply_torch_settings, torch_settings
from vsim.strategy import SimpleReduceStrategy


@pytest.fixture
def unusual_settings() -> Iterator[None]:
    before = torch_settings()
    apply_torch_settings(
        {
            **before,
            "default_dtype": torch.float64,
            "float32_matmul_precision": "medium",
            "fp32_precision": {**before["fp32_precision"], "cuda.matmul": "tf32", "mkldnn.matmul": "bf16"},
            "mkldnn_enabled": not before["mkldnn_enabled"],
            "deterministic_algorithms": True,
            "warn_only": True,
        }
    )
    yield
    apply_torch_settings(before)


def write_kernels(file: Path) -> None:
    file.write_text(f"{torch.backends.cpu.get_cpu_capability()} {torch.get_num_threads()}")


def test_processes_compute_with_the_kernels_of_the_one_that_starts_them(tmp_path: Path) -> None:
    """Which a user, and `.ci/cpus`, chooses by environment variables."""
    assert forked_processes.ended(forked_processes.started(write_kernels, tmp_path / "there")) == 0
    write_kernels(tmp_path / "here")
    assert (tmp_path / "there").read_text() == (tmp_path / "here").read_text()


class Reports(MLP):
    """Adds to its loss a number that says what the settings are where it is computed."""

    def forward(self, batch: Tensor | list[Tensor]) -> Tensor:
        now = torch_settings()
        code = [
            now["default_dtype"] == torch.float64,
            now["float32_matmul_precision"] == "medium",
            bool(now["mkldnn_enabled"]),
            bool(now["deterministic_algorithms"]),
            bool(now["warn_only"]),
            now["fp32_precision"]["mkldnn.matmul"] == "bf16",
        ]
        return super().forward(batch) + sum(2.0**i * on for i, on in enumerate(code))


@pytest.mark.slow
def test_settings_reach_the_processes(unusual_settings: None) -> None:
    losses = []
    train, _ = digits()
    for backend in ("stacked", "process"):
        trainer = Trainer(Reports(hidden=(8,), seed=0).float(), train)
        run: dict[str, Any] = {"num_nodes": 2, "max_steps": 3, "deterministic": True, "progress": False}
        threads = 1 if backend == "process" else None
        trainer.fit(strategy=SimpleReduceStrategy(), **run, backend=backend, threads_per_process=threads)
        losses.append(trainer.history.node_losses.tolist())
    assert losses[0] == losses[1]
    settings_code = 1 + 2 + 4 * torch.backends.mkldnn.enabled + 8 + 16 + 32
    assert settings_code < losses[0][0][0] < settings_code + 4  # ln 10 and a little: the cross-entropy at the start


@pytest.fixture(params=["all", "cudnn", "cuda.matmul", "cudnn.conv", "cudnn.rnn", "mkldnn.matmul", "mkldnn.conv"])
def precision(request: pytest.FixtureRequest) -> Iterator[tuple[Any, str]]:
    """A place where torch's newer interface has the precision of float32, and its name."""
    place = functools.reduce(getattr, [] if request.param == "all" else request.param.split("."), torch.backends)
    before = place.fp32_precision
    yield place, request.param
    place.fp32_precision = before


def test_precision_set_by_the_newer_interface_is_passed_on(precision: tuple[Any, str]) -> None:
    place, name = precision
    for wanted in ("ieee", "tf32"):
        before = place.fp32_precision
        place.fp32_precision = wanted
        settings = torch_settings()
        assert settings["fp32_precision"][name] == wanted
        place.fp32_precision = before
        apply_torch_settings(settings)
        assert torch_settings() == settings
