"""Find runs with equal batch shapes or equal model code."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from vsim.data.batches import BatchSource, one_in_memory
from vsim.runs.spec import RunSpec


def batch_shapes(batches: BatchSource, spec: RunSpec, num_steps: int) -> tuple[Any, ...]:
    """Return a key of the shapes of a run's batches; the runs of a group have equal keys."""
    drop_last = bool((spec.dataloader_kwargs or {}).get("drop_last", False))
    # If nodes reach their smaller last batches at different steps, batches of different sizes are computed separately.
    uneven = len(set(batches.lengths)) > 1 or spec.participation is not None
    last = int(batches.shard_sizes.max()) % spec.batch_size
    own_collation = (spec.dataloader_kwargs or {}).get("collate_fn") is not None
    single = spec.batch_size == spec.num_nodes == 1 and one_in_memory(batches) is None  # examples may differ in length
    if own_collation or single:  # a collate_fn may pad to a node's longest example, so only equal data agree in shape
        return spec.batch_size, spec.num_nodes, spec.seed, spec.shuffle, id(spec.participation)
    if drop_last or uneven or not last or num_steps < batches.steps_per_epoch:
        return (spec.batch_size,)
    return spec.batch_size, batches.steps_per_epoch, last


def same_model(first: nn.Module, other: nn.Module) -> bool:
    """Return whether two models differ at most in trainable weights and buffers: their code and constants are equal."""
    if first is other:
        return True
    modules, others = dict(first.named_modules()), dict(other.named_modules())
    if list(modules) != list(others):
        return False
    return all(_same_module(modules[name], others[name]) for name in modules) and _same_tensors(first, other)


def _same_module(first: nn.Module, other: nn.Module) -> bool:
    if type(first) is not type(other) or vars(first).keys() != vars(other).keys():
        return False
    tables = ("_parameters", "_buffers", "_modules")
    return all(_equal(value, vars(other)[name]) for name, value in vars(first).items() if name not in tables)


def _same_tensors(first: nn.Module, other: nn.Module) -> bool:
    """Return whether all tensors agree in shape, dtype and trainability, and all frozen parameters agree in value."""
    for of in (nn.Module.named_parameters, nn.Module.named_buffers):
        own, theirs = (dict(of(model)) for model in (first, other))
        if list(own) != list(theirs):
            return False
        for name, tensor in own.items():
            twin = theirs[name]
            if (tensor.shape, tensor.dtype, tensor.requires_grad) != (twin.shape, twin.dtype, twin.requires_grad):
                return False
            if isinstance(tensor, nn.Parameter) and not tensor.requires_grad and not torch.equal(tensor, twin):
                return False
    return True


def _equal(first: Any, other: Any) -> bool:
    """Return whether two attributes are known to be equal; objects that cannot be compared count as different."""
    if first is other:
        return True
    if type(first) is not type(other):
        return False
    if isinstance(first, Tensor):
        return torch.equal(first, other)
    if isinstance(first, list | tuple):
        return len(first) == len(other) and all(map(_equal, first, other))
    if isinstance(first, dict):
        return first.keys() == other.keys() and all(_equal(value, other[key]) for key, value in first.items())
    if isinstance(first, nn.Module):
        return same_model(first, other)
    try:
        return bool(first == other)
    except Exception:  # arrays, for instance
        return False


def is_vsims(cls: type) -> bool:
    """Return whether a class is defined in vsim."""
    return cls.__module__.partition(".")[0] == "vsim"
