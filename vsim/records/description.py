"""A run's configuration in words and numbers: what JSON can hold."""

from __future__ import annotations

import math
import platform
from collections.abc import Mapping
from datetime import datetime
from typing import Any

import numpy as np
import torch
from torch import nn

from vsim.arguments import is_factory
from vsim.cluster.optim import OptimSpec
from vsim.version import __version__

# Deeper objects are described by their class alone.
_DEPTH = 4


def describe_run(
    arguments: Mapping[str, Any], model: nn.Module, train_dataset: Any, val_dataset: Any, loss_fn: Any
) -> dict[str, Any]:
    """Return a run's configuration: every argument by its name, and model, data, versions and date.

    A strategy is described by its class and attributes: optimizer, schedule, communication modules.
    """
    parameters = list(model.parameters())
    return {
        **{name: describe(value) for name, value in arguments.items()},
        "model": {
            "class": type(model).__qualname__,
            "parameters": sum(p.numel() for p in parameters),
            "trainable_parameters": sum(p.numel() for p in parameters if p.requires_grad),
            "parameter_bytes": sum(p.nbytes for p in parameters),
        },
        "train_dataset": _described_data(train_dataset),
        "val_dataset": _described_data(val_dataset),
        "loss_fn": describe(loss_fn),
        "versions": versions(),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def versions() -> dict[str, str]:
    """Return name → version of what a run's numbers depend on."""
    return {
        "vsim": __version__,
        "torch": torch.__version__,
        "numpy": np.__version__,
        "python": platform.python_version(),
    }


def describe(value: Any, depth: int = _DEPTH) -> Any:
    """Return `value` as JSON can hold it.

    >>> describe(OptimSpec("sgd", lr=0.1))
    {'class': 'SGD', 'lr': 0.1}
    >>> describe((1, math.inf, torch.float32, math.sqrt))
    [1, 'inf', 'torch.float32', 'math.sqrt']
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, np.generic):
        return describe(value.item())
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, OptimSpec):
        return {"class": value.cls.__name__, **describe(value.arguments, depth)}
    if isinstance(value, Mapping):
        return {str(key): describe(item, depth) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [describe(item, depth) for item in value]
    if callable(value) and hasattr(value, "__qualname__"):
        return f"{value.__module__}.{value.__qualname__}"
    if isinstance(value, (torch.Tensor, np.ndarray, nn.Module)):
        return type(value).__qualname__
    if not hasattr(value, "__dict__"):
        return str(value)
    known: dict[str, Any] = {"class": type(value).__qualname__}
    if depth:
        known |= {name: describe(own, depth - 1) for name, own in vars(value).items() if not name.startswith("_")}
    return known


def _described_data(dataset: Any) -> Any:
    if dataset is None or is_factory(dataset):
        return describe(dataset)
    return {"class": type(dataset).__qualname__, "examples": len(dataset)}
