"""Describe a run as data that JSON can hold.

A record describes a run briefly. Two runs can be compared if their descriptions are equal except for the strategy, the
seed, and settings that do not affect the losses, such as loggers and executors. A checkpoint describes everything that
determines the run: only a run with the same description can resume from it. Functions are compared by name; tensors and
data are compared by digests of some of their elements and examples.
"""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import math
import os
import platform
import re
import types
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from datetime import datetime
from enum import Enum
from pathlib import Path, PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils._pytree import keystr, tree_flatten_with_path

from vsim.arguments import is_factory
from vsim.cluster.optim import OptimSpec
from vsim.cluster.randomness import GENERATORS, isolated
from vsim.cluster.replicas import kept_in_evaluation
from vsim.cluster.schedule import LRSchedule
from vsim.network import Compute, Network
from vsim.version import __version__

# Types whose values are described by their name, or by their text.
_FIXED = (
    *(type, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType, Enum, PurePath),
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, range, slice),
)
# In a record, objects nested deeper than this are described only by their class.
_DEPTH = 4
# In a checkpoint, texts and containers longer than this are described by a digest.
_LONG = 256
# A digest covers at most this many elements of a tensor, and examples of a dataset.
_ELEMENTS, _EXAMPLES = 2**16, 8
# The most characters of a value that are shown.
WIDTH = 80


def describe(value: Any, depth: int = _DEPTH, seen: set[int] | None = None) -> Any:
    """Describe `value` in a form that JSON can hold.

    >>> describe(OptimSpec("sgd", lr=0.1))
    {'class': 'SGD', 'lr': 0.1}
    >>> describe((1, math.inf, torch.float32, math.sqrt))
    [1, 'inf', 'torch.float32', 'math.sqrt']

    Args:
        depth: objects nested deeper than this are described only by their class.
        seen: None: describe briefly, for a record. A set: describe everything that determines a run, at any depth:
            private attributes, modules by their parts, tensors by a digest. An object whose id is in the set is
            described only by its class; ids of described objects are added to the set.
    """
    brief = seen is None
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, bytes) or (not brief and isinstance(value, str) and len(value) > _LONG):
        return [len(value), _hash(value)]
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, _FIXED) or (callable(value) and hasattr(value, "__qualname__")):
        return _name(value)
    if isinstance(value, Mapping | list | tuple | set | frozenset):
        if isinstance(value, Mapping):
            found: Any = {_plain(str(key)): describe(item, depth, seen) for key, item in value.items()}
        else:
            found = [describe(item, depth, seen) for item in value]
        if isinstance(value, set | frozenset):
            found.sort(key=repr)
        return found if brief or len(found) <= _LONG else [len(found), _hash(json.dumps(found))]
    if isinstance(value, Tensor | np.ndarray) and seen is not None and id(value) not in seen:
        return [list(value.shape), str(value.dtype), digest({"": value})]
    if isinstance(value, Tensor | np.ndarray) or (brief and isinstance(value, nn.Module)):
        return type(value).__qualname__
    if brief and not hasattr(value, "__dict__"):
        return _plain(str(value))
    cls = value.cls if isinstance(value, OptimSpec) else type(value)
    known = {"class": vars(cls).get("made_by", cls.__qualname__) if brief else _name(cls)}
    if cls is LRSchedule:  # its values determine it
        known = {}
    if isinstance(value, OptimSpec | Network | Compute):
        own = value.arguments if isinstance(value, OptimSpec) else value.as_plain()
        return known | {name: describe(item, depth, seen) for name, item in own.items()}
    if isinstance(value, nn.Module):
        known["class"] += f"({_plain(value.extra_repr())})"
    if id(value) in seen if seen is not None else depth == 0:
        return known
    if seen is not None:
        seen.add(id(value))
    return known | {name: describe(part, depth - 1, seen) for name, part in _parts(value, brief).items()}


def _parts(value: Any, brief: bool) -> dict[str, Any]:
    """Return name → part of an object; a module's parts are its tensors, children and plain attributes."""
    if isinstance(value, tuple(GENERATORS)):  # the state of a generator is not a setting
        return {}
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    own: dict[str, Any] = getattr(value, "__dict__", {})
    if isinstance(value, nn.Module):
        plain = {n: v for n, v in own.items() if type(v) in (bool, int, float, str) and n[0] != "_" and n != "training"}
        tensors = [*value.named_parameters(recurse=False), *value.named_buffers(recurse=False)]
        return {**plain, **dict(tensors), **dict(value.named_children())}
    if isinstance(value, LRSchedule) and not brief:
        return {**own, "kwargs": {**value.kwargs, "max_steps": None}}  # compared as the setting HORIZON
    resolved = getattr(type(value), "resolved", ())  # arguments whose values other attributes hold
    return {name: part for name, part in own.items() if name not in resolved and not (brief and name.startswith("_"))}


def _name(value: Any) -> str:
    """Return the name of a function or class, or the text of another constant; the same in every process."""
    name = getattr(value, "__qualname__", None) or getattr(value, "__name__", None)
    return _plain(f"{getattr(value, '__module__', None) or ''}.{name}".lstrip(".") if name else str(value))


def _plain(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


# Digests --------------------------------------------------------------------------------------------------------------


def _hash(text: str | bytes) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode(errors="replace")).hexdigest()[:16]


def digest(tensors: Mapping[str, Tensor | np.ndarray]) -> str:
    """Return a digest of names, shapes, dtypes and evenly spaced elements."""
    text = hashlib.sha256()
    for name, tensor in tensors.items():
        text.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + _content(tensor, _ELEMENTS))
    return text.hexdigest()[:16]


def digest_of(dataset: Any) -> int:
    """Return a number below 2⁶³ for the contents of a dataset, the same in every process.

    The number covers a few evenly spaced examples, which are fetched twice; 0 if the two fetches differ or fail. The
    global random generators do not change.
    """
    last, found = len(dataset) - 1, set()
    positions = sorted({i * last // (_EXAMPLES - 1) for i in range(_EXAMPLES)})
    for _ in range(2):
        with isolated(0, torch.device("cpu")), suppress(Exception):  # training will raise the error
            fetch_many = getattr(dataset, "__getitems__", None)
            examples = list(fetch_many(positions)) if fetch_many else [dataset[i] for i in positions]
            text = hashlib.sha256()
            for path, leaf in tree_flatten_with_path(examples)[0]:
                text.update(f"{keystr(path)} {type(leaf).__name__} {tuple(getattr(leaf, 'shape', ()))}".encode())
                text.update(_content(leaf))
            found.add(int.from_bytes(text.digest()[:8], "little") >> 1)
    return found.pop() if len(found) == 1 else 0


def _content(leaf: Any, most: float = math.inf) -> bytes:
    """Return the bytes of a number, text, array or tensor (at most `most` evenly spaced elements); else b""."""
    if isinstance(leaf, bool | int | float | str | bytes):
        return repr(leaf).encode(errors="replace")
    if isinstance(leaf, Tensor):
        if leaf.layout is not torch.strided or leaf.is_quantized or leaf.device.type == "meta":
            return b""
        flat = leaf.detach().reshape(-1).resolve_conj().resolve_neg()
        few = flat[:: max(1, math.ceil(len(flat) / most))].cpu()
        return flat_bytes(few).numpy().tobytes()
    holds_objects = getattr(getattr(leaf, "dtype", None), "hasobject", False)
    return leaf.tobytes() if hasattr(leaf, "tobytes") and not holds_objects else b""  # arrays, images


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as bytes (n,); copy them only if they are not contiguous."""
    flat = tensor.reshape(-1)  # an expanded scalar has a stride of 0
    return (flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


# Differences ----------------------------------------------------------------------------------------------------------


# What a run that resumes must have in common with the saved one -------------------------------------------------------


# What a record holds --------------------------------------------------------------------------------------------------


def versions() -> dict[str, str]:
    """Return name → version of the software that a run's numbers depend on."""
    own = {"vsim": __version__, "torch": torch.__version__, "numpy": np.__version__}
    return own | {"python": platform.python_version()}


def describe_problem(model: nn.Module, train_dataset: Any, val_dataset: Any, loss_fn: Any) -> dict[str, Any]:
    """Describe the problem that runs share: model and data, with digests of their contents, and loss function."""
    parameters = dict(model.named_parameters())
    about = {
        "class": type(model).__qualname__,
        "parameters": sum(p.numel() for p in parameters.values()),
        "trainable_parameters": sum(p.numel() for p in parameters.values() if p.requires_grad),
        "parameter_bytes": sum(p.nbytes for p in parameters.values()),
        "shapes": {name: list(p.shape) for name, p in parameters.items()},
        "digest": digest({**parameters, **dict(model.named_buffers())}),
        **({"in_evaluation_mode": kept} if (kept := kept_in_evaluation(model)) else {}),
    }
    data = {"train_dataset": _described_data(train_dataset), "val_dataset": _described_data(val_dataset)}
    return {"model": about, **data, "loss_fn": describe(loss_fn)}


def _described_data(dataset: Any) -> Any:
    """Describe a dataset by its size and digest, and by its attribute `name` if that is text.

    A function that makes datasets is not called again: it is described by its name, and by the numbers, texts and
    partitions that it uses.
    """
    if dataset is None:
        return None
    if not is_factory(dataset):
        known = {"class": type(dataset).__qualname__, **sized(len(dataset), digest_of(dataset))}
        name = getattr(dataset, "name", None)
        return known | ({"name": _plain(name)} if isinstance(name, str) else {})
    dealt = getattr(dataset, "dataset", None)
    if dealt is not None:  # a Partition
        return {"partition": repr(dataset), **_described_data(dealt)}
    return {"function": describe(dataset), **_used_by(dataset)}


def sized(examples: int, contents: int) -> dict[str, Any]:
    return {"examples": examples, "digest": f"{contents:x}" if contents else None}


def _used_by(function: Callable[..., Any]) -> dict[str, Any]:
    """Return name → number, text or partition among the global and enclosing variables that a function uses."""
    try:
        used = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # not a Python function, or its variables are not bound yet
        return {}
    return {
        name: repr(value) if is_factory(value) else value
        for name, value in sorted({**used.globals, **used.nonlocals}.items())
        if isinstance(value, bool | int | float | str) or (is_factory(value) and hasattr(value, "dataset"))
    }


def describe_run(
    arguments: Mapping[str, Any],
    made_with: Mapping[str, Any],
    problem: Mapping[str, Any],
    device: torch.device | None = None,
    given: Iterable[str] = (),
    started: datetime | None = None,
) -> dict[str, Any]:
    """Return a run's configuration: every argument by its name, and problem, versions, machine and date.

    A strategy is described by the call that makes it, the arguments of that call, its class and its attributes.

    Args:
        arguments: the arguments of `Trainer.fit`. made_with: the strategy's arguments. problem: see `describe_problem`.
        device: the run's device. given: the arguments that differ from their defaults.
        started: when the run began; default: now.
    """
    described = {name: describe(value) for name, value in arguments.items() if name != "test_dataset"}
    described["test_dataset"] = _described_data(arguments.get("test_dataset"))
    if not isinstance(arguments.get("resume"), bool | str | Path | None):
        described["resume"] = type(arguments["resume"]).__qualname__  # a Checkpoint: leave out its state
    return {
        **described,
        "strategy": {"call": repr(arguments["strategy"]), "arguments": describe(made_with), **described["strategy"]},
        **problem,
        "given": sorted(given),
        "versions": versions(),
        "machine": {
            "system": platform.platform(terse=True),
            "cores": os.cpu_count(),
            "threads": torch.get_num_threads(),
            "device": None if device is None else str(device),
        },
        "started": (started or datetime.now()).astimezone().isoformat(timespec="seconds"),
    }


# What compared runs must have in common -------------------------------------------------------------------------------
