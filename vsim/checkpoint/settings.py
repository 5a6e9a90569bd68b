"""The declared settings of a run: a run resumes if they equal the saved ones.

Functions are compared by their names, models and data by a few quick facts, all other values by their contents.
"""

from __future__ import annotations

import functools
import hashlib
import json
import re
import types
from collections.abc import Iterator, Mapping
from enum import Enum
from importlib.metadata import version
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vsim.checkpoint.tree import flat_bytes
from vsim.cluster.randomness import GENERATORS
from vsim.cluster.replicas import Replicas, kept_in_evaluation
from vsim.cluster.state import described
from vsim.strategy.base import Strategy

_FUNCTIONS = (type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
FIXED = (*_FUNCTIONS, torch.dtype, torch.device, torch.layout, torch.memory_format, Enum, PurePath, range, slice)
_ARGUMENTS = (
    *("num_nodes", "batch_size", "minibatch_size", "seed", "shuffle"),
    *("autocast", "deterministic", "compile"),
)
# Entries with their own rules for a resumed run.
HORIZON = "steps of the learning-rate schedule"
VERSIONS = "versions"
_LONG = 256  # a longer list or text is compared by one digest
_MANY = 2**16  # most elements of a tensor that are compared


def settings_of_run(run: Any) -> dict[str, Any]:
    """Return argument → value for everything that determines a run, except its number of steps.

    Args:
        run: a `vsim.training.run.Run`.
    """
    spec, replicas, kwargs = run.spec, run.cluster.replicas, run.spec.dataloader_kwargs
    participation = dict(_contents(spec.participation, "participation"))
    participation.pop("participation.store", None)
    found = {
        **{name: getattr(spec, name) for name in _ARGUMENTS},
        **{name: one.as_plain() for name in ("compute", "network") if (one := getattr(spec, name)) is not None},
        "examples of the training data": run.batches.lengths,
        "contents of the training data": [f"{digest:x}" if digest else None for digest in run.batches.digests],
        "drop_last": bool(kwargs.get("drop_last", False)),
        "device": replicas.weights.device.type,
        HORIZON: run.strategy.schedule.horizon(run.max_steps),
        VERSIONS: {name: version(name) for name in ("torch", "numpy")},
        **layout_of(replicas),
        **dict(_contents(kwargs.get("collate_fn"), "collate_fn")),
        **dict(_contents(spec.loss_fn, "loss_fn")),
        **participation,
        **{f"frozen {name}": _digest(p) for name, p in replicas.frozen.items()},
        **{f"mode of {path}": "evaluation" for path in kept_in_evaluation(spec.model)},
        **run.strategy.settings,
        **dict(_contents(spec.model, "module", set(map(id, (*spec.model.parameters(), *spec.model.buffers()))))),
    }
    return dict(json.loads(json.dumps(found)))  # as it will be read: tuples become lists


def settings_of(strategy: Strategy) -> dict[str, Any]:
    """Return how a strategy was made: path → number or name. A run's own copy has kept this from before its setup."""
    return vars(strategy).get("settings") or dict(_contents(strategy, "strategy"))


def layout_of(replicas: Replicas) -> dict[str, Any]:
    """Return the shapes and dtypes of a model's weights and buffers, which a fork must share."""
    return {
        **{f"parameter {c.name}": [list(c.shape), str(replicas.weights.dtype)] for c in replicas.layout},
        **{f"buffer {name}": [list(b.shape[1:]), str(b.dtype)] for name, b in replicas.buffers.items()},
        "parameters": [c.name for c in replicas.layout],
        "buffers": list(replicas.buffers),
    }


def differences(saved: Mapping[str, Any], given: Mapping[str, Any]) -> Iterator[str]:
    """Yield the differences between two dicts of settings, in words."""
    for name in dict.fromkeys([*saved, *given]):
        before, now = (side.get(name) for side in (saved, given))
        if not _same(before, now):
            yield f"{name} was {_shown(before)} and is {_shown(now)}"


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return all(a == b or None in (a, b) for a, b in zip(before, now, strict=True))  # None means unknown
    return bool(before == now)


def _shown(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def _contents(value: Any, path: str, seen: set[int] | None = None) -> Iterator[tuple[str, Any]]:
    """Yield (path, number, text or digest) for all parts of a value; every object once."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    if isinstance(value, bytes) or (isinstance(value, str | list | tuple | Mapping) and len(value) > _LONG):
        yield path, [len(value), _hash(_plain(repr(value)))]
    elif value is None or isinstance(value, bool | int | float | str):
        yield path, value if value == value else "nan"
    elif isinstance(value, Tensor):
        yield path, _digest(value)
    elif isinstance(value, np.ndarray | np.generic):
        numbers = value.dtype.kind in "biufc"
        yield path, [list(value.shape), value.dtype.str, _hash(value.tobytes()) if numbers else ""]
    elif isinstance(value, set | frozenset):
        yield path, sorted(_plain(repr(item)) for item in value)
    elif isinstance(value, FIXED):
        yield path, _plain(described(value))
    elif isinstance(value, list | tuple | Mapping):
        items = dict(value if isinstance(value, Mapping) else enumerate(value))
        if path.endswith("schedule.kwargs"):
            items.pop("max_steps", None)  # compared as HORIZON
        yield f"len({path})", len(items)
        for key, item in items.items():
            yield from _contents(item, _plain(f"{path}[{key!r}]"), seen)
    else:
        seen.add(id(value))
        name = described(type(value))
        yield path, _plain(f"{name}({value.extra_repr()})" if isinstance(value, nn.Module) else name)
        for key, item in _parts(value).items():
            yield from _contents(item, f"{path}.{key}", seen)


def _parts(value: Any) -> dict[str, Any]:
    """Return name → part of an object that is not a container; of a module, tensors, children and plain attributes."""
    if isinstance(value, tuple(GENERATORS)):  # the state of a generator is not a setting
        return {}
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    own = {name: part for name, part in getattr(value, "__dict__", {}).items() if name != "settings"}
    if not isinstance(value, nn.Module):
        return own
    plain = {n: v for n, v in own.items() if type(v) in (bool, int, float, str) and n[0] != "_" and n != "training"}
    tensors = [*value.named_parameters(recurse=False), *value.named_buffers(recurse=False)]
    return {**plain, **dict(tensors), **dict(value.named_children())}


def _plain(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _hash(text: str | bytes) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode(errors="replace")).hexdigest()[:16]


def _digest(tensor: Tensor) -> list[Any]:
    kind = [list(tensor.shape), str(tensor.dtype)]
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return kind
    flat = tensor.detach().reshape(-1).resolve_conj().resolve_neg()
    few = flat[:: max(1, -(-len(flat) // _MANY))].cpu()
    return [*kind, _hash(flat_bytes(few).numpy().tobytes())]
