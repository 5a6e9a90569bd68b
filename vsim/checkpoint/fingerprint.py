"""Everything that the course of a run depends on: runs with equal fingerprints can resume from each other.

Values are compared by their contents, down to numbers, texts and code, so that they are equal in every process. What
has no contents that can be told (an iterator, a lock) is compared by its class.
"""

from __future__ import annotations

import dis
import functools
import hashlib
import json
import re
import sys
import sysconfig
import types
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from vsim.checkpoint.snapshot import FIXED, attributes_of
from vsim.cluster.randomness import GENERATORS
from vsim.cluster.replicas import Replicas
from vsim.cluster.state import described
from vsim.strategy.base import Strategy

_ARGUMENTS = (
    *("num_nodes", "batch_size", "minibatch_size", "seed", "shuffle"),
    *("autocast", "deterministic", "compile"),
)
# An entry that may differ in a run that resumes, by a rule of its own.
HORIZON = "steps of the learning-rate schedule"
_LONG = 256  # of a list or text: above, it is compared as a whole
_MANY = 2**16  # elements of a tensor: above, so many are compared
_LIBRARIES = tuple(sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
_VERSION = ".".join(map(str, sys.version_info[:2]))


def fingerprint(run: Any) -> dict[str, Any]:
    """Return argument → value for everything that the course of a run depends on, except its number of steps.

    Args:
        run: a `vsim.training.run.Run`.

    A value that is a dict is compared where both sides have its keys: {Python's version: bytecode}, {} for nothing.
    """
    config, replicas, kwargs = run.spec, run.cluster.replicas, run.spec.dataloader_kwargs
    of_model = {id(tensor) for tensor in (*config.model.parameters(), *config.model.buffers())}  # which are trained
    found = {
        **{name: getattr(config, name) for name in _ARGUMENTS},
        **{name: one.as_plain() for name in ("compute", "network") if (one := getattr(config, name)) is not None},
        "examples of the training data": run.part.batches.lengths,
        "contents of the training data": [f"{digest:x}" if digest else {} for digest in run.part.batches.digests],
        "drop_last": bool(kwargs.get("drop_last", False)),
        "device": replicas.weights.device.type,
        HORIZON: run.strategy.schedule.horizon(run.max_steps),
        **layout_of(replicas),
        **dict(_contents(kwargs.get("collate_fn"), "collate_fn", set())),
        **dict(_contents(config.loss_fn, "loss_fn", set())),
        **{k: v for k, v in _contents(config.participation, "participation", set()) if k != "participation.store"},
        **{f"frozen {name}": _digest(p) for name, p in replicas.frozen.items()},
        **run.strategy.settings,
        **dict(_contents(config.model, "module", of_model)),
    }
    return json.loads(json.dumps(found))  # as it will be read: lists for tuples


def steady(run: Any) -> dict[str, Any]:
    """Return the fingerprint of a run, with {} for what has changed since it began: its state, not its settings."""
    now = fingerprint(run)
    return {name: value if now.get(name, value) == value else {} for name, value in run.fingerprint.items()}


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
    growing = tuple(f"{name[4:-1]}[" for name, value in saved.items() if value == {} and name.startswith("len("))
    for name in dict.fromkeys([*saved, *given]):
        before, now = (side.get(name) for side in (saved, given))
        if not _same(before, now) and not name.removeprefix("len(").startswith(growing):
            yield f"{name} was {_shown(before)} and is {_shown(now)}"


def _same(before: Any, now: Any) -> bool:
    if isinstance(before, dict) or isinstance(now, dict):
        pair = [side if isinstance(side, dict) else {} for side in (before, now)]
        return all(pair[0][key] == pair[1][key] for key in pair[0].keys() & pair[1].keys())
    if isinstance(before, list) and isinstance(now, list) and len(before) == len(now):
        return all(map(_same, before, now))
    return bool(before == now)


def _shown(value: Any) -> str:
    text = "absent" if value is None else str(value)
    return text if len(text) <= 80 else f"{text[:77]}…"


def settings_of(strategy: Strategy) -> dict[str, Any]:
    """Return how a strategy was made: path → number or name. A run's own copy knows it from before its setup."""
    return vars(strategy).get("settings") or dict(_contents(strategy, "strategy", set()))


def _contents(value: Any, path: str, seen: set[int]) -> Iterator[tuple[str, Any]]:
    """Yield (path, number, text or digest) of what a value consists of; every object once."""
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
    elif isinstance(value, types.CodeType):
        yield path, {_VERSION: _hash(repr(_bytecode(value)))}
    elif isinstance(value, set | frozenset):
        yield path, sorted(_plain(repr(item)) for item in value)
    elif isinstance(value, list | tuple | Mapping):
        items = dict(value if isinstance(value, Mapping) else enumerate(value))
        if path.endswith("schedule.kwargs"):
            items.pop("max_steps", None)  # which is in the schedule's length
        yield f"len({path})", len(items)
        for key, item in items.items():
            yield from _contents(item, _plain(f"{path}[{key!r}]"), seen)
    elif isinstance(value, FIXED) and not isinstance(value, types.FunctionType | types.MethodType):
        yield path, _plain(described(value))
    else:
        seen.add(id(value))
        yield path, _class(value)
        for name, item in _parts(value).items():
            yield from _contents(item, f"{path}.{name}", seen)


def _class(value: Any) -> str:
    if isinstance(value, nn.Module):
        return _plain(f"{described(type(value))}({value.extra_repr()})")
    return described(value if isinstance(value, types.FunctionType) else type(value))


def _parts(value: Any) -> dict[str, Any]:
    """Return name → part of a function, module or other object."""
    if isinstance(value, types.MethodType):
        return {"__self__": value.__self__, "__func__": value.__func__}
    if isinstance(value, functools.partial):
        return {"func": value.func, "args": value.args, "keywords": value.keywords}
    if isinstance(value, nn.Module):
        tensors = [*value.named_parameters(recurse=False), *value.named_buffers(recurse=False)]
        return {**dict(tensors), **dict(value.named_children()), **attributes_of(value)}
    if isinstance(value, types.FunctionType):
        return _parts_of_function(value)
    if isinstance(value, tuple(GENERATORS)):  # whose state is the run's
        return {}
    own = dict(getattr(value, "__dict__", {}))
    if isinstance(value, Strategy):
        del own["settings"]
    return own


def _parts_of_function(function: types.FunctionType) -> dict[str, Any]:
    """Return the code of a function, its defaults, and the values that it takes from around it."""
    code = function.__code__
    parts: dict[str, Any] = {"defaults": function.__defaults__, **(function.__kwdefaults__ or {})}
    cells = zip(code.co_freevars, function.__closure__ or (), strict=True)
    parts |= {name: cell.cell_contents for name, cell in cells if cell != types.CellType()}
    if not code.co_filename.startswith(_LIBRARIES):  # whose code changes with their versions, and is told by its name
        parts["code"] = code
        outside = {name: function.__globals__[name] for name in _globals_of(code) if name in function.__globals__}
        kinds = (type(None), bool, int, float, str, tuple, Tensor, types.FunctionType)
        parts |= {name: value for name, value in outside.items() if isinstance(value, kinds)}
    return parts


def _globals_of(code: types.CodeType) -> set[str]:
    own = {step.argval for step in dis.get_instructions(code) if step.opname == "LOAD_GLOBAL"}
    return own.union(*(_globals_of(part) for part in code.co_consts if isinstance(part, types.CodeType)))


def _bytecode(code: types.CodeType) -> list[Any]:
    """Return what a piece of code does, without where it stands."""
    values = []
    for value in code.co_consts:
        flat = sorted(map(repr, value)) if isinstance(value, frozenset) else repr(value)  # of another order elsewhere
        values.append(_bytecode(value) if isinstance(value, types.CodeType) else _plain(str(flat)))
    return [code.co_code.hex(), code.co_names, code.co_freevars, values]


def _plain(text: str) -> str:
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _hash(text: str | bytes) -> str:
    return hashlib.sha256(text if isinstance(text, bytes) else text.encode(errors="replace")).hexdigest()[:16]


def flat_bytes(tensor: Tensor) -> Tensor:
    """Return the elements of a tensor as bytes (n,), not copied where they lie together already."""
    flat = tensor.reshape(-1)  # an expanded scalar has a stride of 0
    return (flat if flat.stride() == (1,) else flat.clone(memory_format=torch.contiguous_format)).view(torch.uint8)


def _digest(tensor: Tensor) -> list[Any]:
    kind = [list(tensor.shape), str(tensor.dtype)]
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return kind
    flat = tensor.detach().reshape(-1).resolve_conj().resolve_neg()
    few = flat[:: max(1, -(-len(flat) // _MANY))].cpu()
    return [*kind, _hash(flat_bytes(few).numpy().tobytes())]
