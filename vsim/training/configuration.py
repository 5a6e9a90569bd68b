"""The configuration of a run as JSON: every argument of `fit`, and model, data, versions, machine and date."""

from __future__ import annotations

import hashlib
import inspect
import os
import platform
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from vsim.arguments import is_factory
from vsim.cluster.replicas import kept_in_evaluation
from vsim.data.batches import digest_of
from vsim.records.provenance import describe, versions
from vsim.strategy.configured import arguments_of

# Most elements of a tensor that enter a model's digest.
_SAMPLED = 2**16


def describe_problem(model: nn.Module, train_dataset: Any, val_dataset: Any, loss_fn: Any) -> dict[str, Any]:
    """Describe the problem that runs share: model and data, with digests of their contents, and loss function."""
    return {
        "model": _described_model(model),
        "train_dataset": _described_data(train_dataset),
        "val_dataset": _described_data(val_dataset),
        "loss_fn": describe(loss_fn),
    }


def describe_run(
    arguments: Mapping[str, Any],
    problem: Mapping[str, Any],
    device: torch.device | None = None,
    given: Iterable[str] = (),
    started: datetime | None = None,
) -> dict[str, Any]:
    """Return a run's configuration: every argument by its name, and problem, versions, machine and date.

    A strategy is described by the call that makes it, the arguments of that call, its class and its attributes.

    Args:
        arguments: the arguments of `Trainer.fit`. problem: see `describe_problem`. device: the run's device.
        given: the arguments that differ from their defaults. started: when the run began; default: now.
    """
    described = {name: describe(value) for name, value in arguments.items()}
    if not isinstance(arguments.get("resume"), bool | str | Path | None):
        described["resume"] = type(arguments["resume"]).__qualname__  # a Checkpoint: leave out its state
    if "strategy" in arguments:
        strategy = arguments["strategy"]
        made = {"call": repr(strategy), "arguments": describe(arguments_of(strategy))}
        described["strategy"] = {**made, **described["strategy"]}
    return {
        **described,
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


def _described_model(model: nn.Module) -> dict[str, Any]:
    parameters = dict(model.named_parameters())
    text = hashlib.sha256()
    for name, tensor in [*parameters.items(), *model.named_buffers()]:
        text.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode() + _sample(tensor))
    return {
        "class": type(model).__qualname__,
        "parameters": sum(p.numel() for p in parameters.values()),
        "trainable_parameters": sum(p.numel() for p in parameters.values() if p.requires_grad),
        "parameter_bytes": sum(p.nbytes for p in parameters.values()),
        "shapes": {name: list(p.shape) for name, p in parameters.items()},
        "digest": text.hexdigest()[:16],
        **({"in_evaluation_mode": kept} if (kept := kept_in_evaluation(model)) else {}),
    }


def _sample(tensor: Tensor) -> bytes:
    """Return the bytes of evenly spaced elements of a tensor; b"" if it has no values, or is sparse or quantized."""
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type == "meta":
        return b""
    flat = tensor.detach().reshape(-1).resolve_conj().resolve_neg()
    few = flat[:: max(1, -(-len(flat) // _SAMPLED))].cpu().clone(memory_format=torch.contiguous_format)
    return few.view(torch.uint8).numpy().tobytes()


def _described_data(dataset: Any) -> Any:
    """Describe a dataset by its size and a digest of some examples (None if they differ when read twice).

    A function that makes datasets is not called again: it is described by its name, and by the numbers, texts and
    partitions that it uses.
    """
    if dataset is None:
        return None
    dealt = getattr(dataset, "dataset", None)
    if is_factory(dataset) and dealt is not None:  # a Partition
        return {"partition": repr(dataset), **_described_data(dealt)}
    if is_factory(dataset):
        return {"function": describe(dataset), **_used_by(dataset)}
    digest = digest_of(dataset)
    known = {"class": type(dataset).__qualname__, "examples": len(dataset)}
    return {**known, "digest": f"{digest:x}" if digest else None}


def _used_by(function: Any) -> dict[str, Any]:
    """Return name → number, text or partition among the variables that a function takes from where it was defined."""
    try:
        used = inspect.getclosurevars(function)
    except (TypeError, ValueError):  # no function of Python, or one whose variables are not bound yet
        return {}
    return {
        name: repr(value) if is_factory(value) else value
        for name, value in sorted({**used.globals, **used.nonlocals}.items())
        if isinstance(value, bool | int | float | str) or (is_factory(value) and hasattr(value, "dataset"))
    }
