"""What the caller has set in torch holds in the nodes' processes too."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from vsim import Trainer
from vsim.data import digits
from vsim.models import MLP
from vsim.process.child import apply_torch_settings, torch_settings
from vsim.strategy import SimpleReduceStrategy


@pytest.fixture
def unusual_settings() -> Iterator[None]:
    before = torch_settings()
    apply_torch_settings(
        {
            "default_dtype": torch.float64,
            "float32_matmul_precision": "medium",
            "mkldnn_enabled": not before["mkldnn_enabled"],
            "deterministic_algorithms": True,
            "warn_only": True,
        }
    )
    yield
    apply_torch_settings(before)


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
        ]
        return super().forward(batch) + sum(2.0**i * on for i, on in enumerate(code))


@pytest.mark.slow
def test_settings_reach_the_processes(unusual_settings: None) -> None:
    losses = []
    train, _ = digits()
    for backend in ("stacked", "process"):
        trainer = Trainer(Reports(hidden=(8,), seed=0).float(), train)
        trainer.fit(
            strategy=SimpleReduceStrategy(),
            num_nodes=2,
            max_steps=3,
            deterministic=True,
            backend=backend,
            progress=False,
            threads_per_process=1 if backend == "process" else None,
        )
        losses.append(trainer.history.node_losses.tolist())
    assert losses[0] == losses[1]
    settings_code = 1 + 2 + 4 * torch.backends.mkldnn.enabled + 8 + 16
    assert settings_code < losses[0][0][0] < settings_code + 4  # ln 10 and a little: the cross-entropy at the start
