"""The settings of the caller's process that change torch's results, so that the nodes' processes share them."""

from __future__ import annotations

from typing import Any

import torch


def current() -> dict[str, Any]:
    """Return the settings of this process."""
    return {
        "default_dtype": torch.get_default_dtype(),
        "float32_matmul_precision": torch.get_float32_matmul_precision(),
        "mkldnn_enabled": torch.backends.mkldnn.enabled,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
    }


def apply(settings: dict[str, Any]) -> None:
    """Set in this process the settings that `current` returned in another."""
    torch.set_default_dtype(settings["default_dtype"])
    torch.set_float32_matmul_precision(settings["float32_matmul_precision"])
    torch.backends.mkldnn.enabled = settings["mkldnn_enabled"]
    torch.use_deterministic_algorithms(settings["deterministic_algorithms"], warn_only=settings["warn_only"])
