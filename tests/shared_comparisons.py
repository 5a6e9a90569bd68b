"""Comparisons that several tests look at."""

from __future__ import annotations

import functools
from typing import Any

import vsim
from vsim.data import digits
from vsim.models import MLP
from vsim.strategy import AloneStrategy, FedAvgStrategy, SimpleReduceStrategy, Strategy

K, STEPS = 3, 20


@functools.cache
def three_strategies() -> vsim.Comparison:
    train, val = digits()
    return vsim.compare(
        MLP(hidden=(16,), seed=0),
        train,
        val,
        strategies={
            "AllReduce": SimpleReduceStrategy(lr=1e-2),
            "FedAvg": FedAvgStrategy(H=5, lr=1e-2),
            "alone": AloneStrategy(lr=1e-2),
        },
        num_nodes=K,
        max_steps=STEPS,
        val_interval=5,
        progress=False,
    )


def compared(strategies: dict[str, Strategy], **options: Any) -> vsim.Comparison:
    train, val = digits()
    defaults = {"num_nodes": 2, "max_steps": 5, "progress": False}
    return vsim.compare(options.pop("model", MLP(seed=0)), train, val, strategies=strategies, **{**defaults, **options})
