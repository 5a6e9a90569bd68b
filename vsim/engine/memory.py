"""Memory: what a device has, what this process holds of it, and what a step of training takes."""

from __future__ import annotations

import functools
import inspect
import math
import os
import time
import weakref
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map
from vsim_kernels.alignment import rows_apart

from vsim.cluster.optimizers import StackedOptimizer, torch_optimizers
from vsim.engine.executor import Executor, cloned, undone
from vsim.private_torch import TorchDispatchMode, storage_key

# Bytes besides tensors: workspaces inside of kernels, and an allocator's loss to fragmentation. On the
# CPU that is the C library's, whose heap was measured to take 1.25 to 1.6 times as much.
_ALLOWANCE, _ALLOWANCE_CPU = 1.1, 1.5
_KERNELS = ("fused", "foreach", "capturable", "differentiable")  # of an optimizer: how it computes, not what it keeps
# Where a container's limit stands, in cgroups of version 2 and 1.
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def total_bytes(device: torch.device) -> int:
    """Return the memory of a device: a GPU's, or the machine's (within a container, the container's limit)."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    limits = [psutil.virtual_memory().total]
    for path in _CONTAINER_LIMITS:
        text = path.read_text().strip() if path.is_file() else "max"
        limits += [int(text)] if text.isdigit() else []
    return int(min(limits))


def check_room(num_nodes: int, bytes_each: int, device: torch.device) -> None:
    """Raise a ValueError for more nodes than a device has room for, given the least number of bytes that each takes."""
    if num_nodes * bytes_each > total_bytes(device):
        raise ValueError(
            f"num_nodes={num_nodes} nodes take {num_nodes * bytes_each / 1e9:.3g} GB at the least, and {device.type} "
            f"has {total_bytes(device) / 1e9:.3g} GB; at most {total_bytes(device) // bytes_each} fit"
        )


def available_bytes(device: torch.device, share: float | None = None) -> int:
    """Return the bytes of a device that this process may still take: the free ones, or up to a share of all."""
    if share is not None:
        return int(share * total_bytes(device) - occupied_bytes(device))
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    if device.type == "mps":
        return total_bytes(device) - held_bytes(device)
    return int(min(psutil.virtual_memory().available, total_bytes(device) - held_bytes(device)))


def held_bytes(device: torch.device) -> int:
    """Return the bytes of a device that this process holds: a GPU allocator's pool, or the resident set."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return int(_this_process(os.getpid()).memory_info().rss)


class Held:
    """`held_bytes`, read again when the number is a twentieth of a second old: reading it takes as long as all else
    that a step of a small model does besides its arithmetic.
    """

    def __init__(self) -> None:
        self.bytes, self.read_at = 0, -math.inf

    def __call__(self, device: torch.device) -> int:
        now = time.monotonic()
        if now - self.read_at > 0.05:
            self.bytes, self.read_at = held_bytes(device), now
        return self.bytes


def occupied_bytes(device: torch.device) -> int:
    """Return the bytes in use by tensors; on the CPU, where that is unknown, the resident set."""
    return torch.cuda.memory_allocated(device) if device.type == "cuda" else held_bytes(device)


@functools.lru_cache(maxsize=1)
def _this_process(pid: int) -> psutil.Process:
    return psutil.Process(pid)


def optimizer_bytes(optimizer: StackedOptimizer) -> int:
    """Return the size of the state that an optimizer has, or, before its first step, will have after it."""
    return sum(map(_state_bytes, torch_optimizers(optimizer)))


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    known = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    if known:
        return sum(t.nbytes for t in known)
    # Most make their state at the first step. Another of the same kind, on one small matrix, shows how many numbers it
    # keeps for every weight.
    sample = torch.zeros(16, 16).requires_grad_()
    sample.grad = torch.zeros_like(sample)
    accepted = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted and name not in _KERNELS}
    try:
        other = type(optimizer)([sample], **options)
        other.step()
    except Exception:  # a user's own class, which wants to be built in another way
        kept = 2 * sample.numel()  # as Adam
    else:
        kept = sum(t.numel() for t in tree_leaves(other.state[sample]) if isinstance(t, Tensor) and t.dim())
    weights = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
    return math.ceil(weights * kept / sample.numel())


def activation_bytes(executor: Executor, batch: Any) -> int:
    """Return the bytes that autograd keeps of one node's batch between the forward and the backward pass.

    Every storage counts once. Parameters, buffers and the batch itself do not count: they are there anyway.

    Args:
        executor: whose first node computes, on its own: an executor that takes n nodes at once keeps about n times as
            much. Nothing in it changes.
        batch: one node's batch (B, …), on the device of the replicas.
    """
    addresses: set[int] = set()
    kept: dict[int, int] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in addresses:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    keeping = torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor)
    with executor.first_node(batch) as (objective, tensors, own):
        there = [*tensors.values(), *objective.parameters(), *tree_leaves(own)]
        addresses.update(t.untyped_storage().data_ptr() for t in there)
        with keeping:
            outcome = objective(own, False)
        del outcome  # not before: a storage that is freed leaves its address to another
    return sum(kept.values())


class _Moments(TorchDispatchMode):
    """Notes the bytes of all tensors that were made within the block and are alive, after every operation."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.bytes_alive = 0
        self.moments: list[int] = []
        self._watched: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), new=False)  # was there before the block: not seen as an output
        out = func(*args, **(kwargs or {}))
        self._note(out, new=True)
        self.moments.append(self.bytes_alive)
        return out

    def _note(self, values: Any, new: bool) -> None:
        for tensor in tree_leaves(values):
            if not isinstance(tensor, Tensor):
                continue
            storage = tensor.untyped_storage()
            key = storage_key(tensor)
            if key not in self.alive:
                self.alive[key] = storage.nbytes() if new else 0
                self.bytes_alive += self.alive[key]
                self._watched[key] = weakref.ref(storage, functools.partial(self._forget, key))

    def _forget(self, key: int, _: Any) -> None:
        self._watched.pop(key, None)
        self.bytes_alive -= self.alive.pop(key, 0)


def step_moments(executor: Executor, batch: Any) -> list[int]:
    """Return the bytes after every operation that gradients of a stacked batch (K, B, …) take besides the replicas.

    The gradients are computed as in training, in the executor's own way, and left in `replicas.grads`; buffers and
    random streams are restored afterwards.
    """
    executor.prepare(batch)
    batch = tree_map(rows_apart, cloned(batch))  # as a step's are
    with undone(executor), _Moments() as watch:
        executor._backward(batch, 1.0, True)
    return watch.moments


def step_bytes(executor: Executor, batch: Any) -> Callable[[int], int]:
    """Return f(examples a node) → the most bytes that computing their gradients takes besides the replicas.

    Run small probes on the first examples of a stacked batch (K, B, …). Bytes alive after an operation grow linearly
    with the examples, at a rate of its own for each operation. The peak is the maximum of these lines; up to the
    largest probe it is never below the line between the probes' own peaks.
    """
    num_examples = next((t.shape[1] for t in tree_leaves(batch) if t.dim() > 1), 1)
    few = min(2, num_examples)  # not one: BatchNorm would refuse it
    step_moments(executor, _first(batch, few))  # what happens the first time only, such as a choice
    low = step_moments(executor, _first(batch, few))
    if few == num_examples:
        return lambda examples: math.ceil(max(low) * max(1.0, examples / few))
    more = min(2 * few, num_examples)
    high = step_moments(executor, _first(batch, more))
    peaks = {few: max(low), more: max(high)}
    while len(low) != len(high) and more < num_examples:  # other operations for other sizes: a moment has no partner
        few, more, low = more, min(2 * more, num_examples), high
        high = step_moments(executor, _first(batch, more))
        peaks[more] = max(high)
    if len(low) != len(high):
        low, high = [max(low)], [max(high)]
    lines = {((b - a) / (more - few), b) for a, b in zip(low, high, strict=True)}

    def most(examples: int) -> int:
        on_lines = max(top + slope * (examples - more) for slope, top in lines)
        between_probes = np.interp(examples, [*peaks], [*peaks.values()]) if examples <= more else 0.0
        return math.ceil(max(on_lines, between_probes))

    return most


def _first(batch: Any, count: int) -> Any:
    return tree_map(lambda t: t[:, :count] if t.dim() > 1 else t, batch)


def fitting_minibatch(
    executor: Executor, optimizers: Sequence[StackedOptimizer], batch: Any, batch_size: int, budget_bytes: float
) -> int:
    """Return the largest divisor of `batch_size` whose gradients fit in what this process may hold, 0 if none does.

    Args:
        executor: computes them. optimizers: whose state is still to come. batch: a stacked batch (K, B, …).
        budget_bytes: of the device's memory, that the process may hold in total.
    """
    grads = executor.replicas.grads
    needed = step_bytes(executor, batch)
    grads.zero_()
    occupied = occupied_bytes(grads.device)  # now, with all that a first computation loads
    allowance = _ALLOWANCE_CPU if grads.device.type == "cpu" else _ALLOWANCE
    stepped = any(o.state for optimizer in optimizers for o in torch_optimizers(optimizer))
    room = budget_bytes - occupied - (0 if stepped else sum(map(optimizer_bytes, optimizers)))
    return max((size for size in divisors(batch_size) if allowance * needed(size) <= room), default=0)


def divisors(number: int) -> Sequence[int]:
    """Return the divisors of a number, ascending.

    >>> divisors(12)
    [1, 2, 3, 4, 6, 12]
    """
    return [d for d in range(1, number + 1) if number % d == 0]
