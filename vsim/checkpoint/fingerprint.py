"""Everything that the course of a run depends on: runs with equal fingerprints can resume from each other."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from vsim.checkpoint.savable import Savable
from vsim.cluster.replicas import Replicas
from vsim.cluster.state import described
from vsim.strategy.base import Strategy

# An entry that may differ in a run that resumes, by a rule of its own.
HORIZON = "steps of the learning-rate schedule"
_LONG = 256  # entries of a list above which it is compared as a whole


def fingerprint(run: Savable, lengths: list[int]) -> dict[str, Any]:
    """Return argument → value for everything that the course of a run depends on, except its number of steps.

    Args:
        lengths: the number of examples of the shared training dataset, or of every node's.
    """
    config, replicas = run.config, run.cluster.replicas
    loss, drop_last = config.loss_fn, bool(config.dataloader_kwargs.get("drop_last", False))
    found = {
        "num_nodes": config.num_nodes,
        "batch_size": config.batch_size,
        "minibatch_size": config.minibatch_size,
        "seed": config.seed,
        "shuffle": config.shuffle,
        "examples of the training data": lengths,
        "drop_last": drop_last,
        "autocast": config.autocast,
        "deterministic": config.deterministic,
        "compile": config.compile,
        "device": replicas.weights.device.type,
        "loss_fn": None if loss is None else _plain(repr(loss) if isinstance(loss, nn.Module) else described(loss)),
        HORIZON: run.strategy.schedule.horizon(run.max_steps),
        **layout_of(replicas),
        **{f"module {name}".strip(): _module(module) for name, module in config.model.named_modules()},
        **{f"frozen {name}": [list(p.shape), str(p.dtype), _sum(p)] for name, p in replicas.frozen.items()},
        **run.strategy.settings,
    }
    kept: dict[str, Any] = json.loads(json.dumps(found))  # as it will be read: lists for tuples
    return kept


def layout_of(replicas: Replicas) -> dict[str, Any]:
    """Return shapes and dtypes of a model's weights and buffers: the part of the fingerprint that a fork must share."""
    return {
        **{f"parameter {c.name}": [list(c.shape), str(replicas.weights.dtype)] for c in replicas.layout},
        **{f"buffer {name}": [list(b.shape[1:]), str(b.dtype)] for name, b in replicas.buffers.items()},
        "parameters": [c.name for c in replicas.layout],
        "buffers": list(replicas.buffers),
    }


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences between two fingerprints, in words."""
    for name in dict.fromkeys([*saved, *given]):
        before, now = (side.get(name) for side in (saved, given))
        if before != now:
            yield f"{name} was {_shown(before)} and is {_shown(now)}"


def _shown(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _module(module: nn.Module) -> str:
    return _plain(f"{described(type(module))}({module.extra_repr()})")


def _plain(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _sum(tensor: Tensor) -> str:
    return str(tensor.detach().to("cpu", torch.complex128 if tensor.is_complex() else torch.float64).sum().item())


def settings_of(strategy: Strategy) -> dict[str, Any]:
    """Return how a strategy was made: path → number or name. A run's own copy knows it from before its setup."""
    return vars(strategy).get("settings") or dict(_settings(strategy, "strategy", set()))


def _settings(value: Any, path: str, above: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield (path, value) of how a strategy was made, down to numbers and names."""
    if value is None or isinstance(value, bool | int | float | str):
        yield path, value if value == value else "nan"
    elif isinstance(value, Tensor):
        yield path, [list(value.shape), str(value.dtype), _sum(value)]
    elif isinstance(value, list | tuple | Mapping) and len(value) > _LONG:
        yield path, [len(value), hashlib.sha256(_plain(repr(value)).encode()).hexdigest()]
    elif isinstance(value, list | tuple):
        yield f"len({path})", len(value)
        for i, item in enumerate(value):
            yield from _settings(item, f"{path}[{i}]", above)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if not (path.endswith("schedule.kwargs") and key == "max_steps"):  # that is in the schedule's length
                yield from _settings(item, f"{path}[{key!r}]", above)
    elif isinstance(value, type) or not hasattr(value, "__dict__") or callable(value):
        yield path, _plain(described(value))
    elif id(value) not in above:
        yield path, described(type(value))
        for name, item in vars(value).items():
            if not (isinstance(value, Strategy) and name == "settings"):
                yield from _settings(item, f"{path}.{name}", above | {id(value)})
