"""Measure the memory of a device, of this process on the device, and of a training step."""

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

# Factors by which kernels' workspaces and the allocator's fragmentation enlarge the bytes of tensors. On the CPU, the
# heap of the C library was measured to take 1.25 to 1.6 times the tensors' bytes.
_ALLOWANCE, _ALLOWANCE_CPU = 1.1, 1.5
# Bytes for the workspaces of an accelerator's libraries: cuBLAS takes up to 32 MB, cuDNN may take more.
_WORKSPACES = 2**28
_KERNELS = ("fused", "foreach", "capturable", "differentiable")  # options of optimizers that do not change their state
# Files with a container's memory limit, in cgroups of version 2 and 1.
_CONTAINER_LIMITS = (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"))


def total_bytes(device: torch.device) -> int:
    """Return the memory of a GPU or, for the CPU, of the machine; within a container, the container's limit."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    if device.type == "mps":
        return int(torch.mps.recommended_max_memory())
    limits = [psutil.virtual_memory().total]
    for path in _CONTAINER_LIMITS:
        text = path.read_text().strip() if path.is_file() else "max"
        limits += [int(text)] if text.isdigit() else []
    return int(min(limits))


def check_room(number: int, bytes_each: int, device: torch.device, of: str = "nodes", advice: str = "") -> None:
    """Raise a ValueError if a device has no room for `number` nodes, or processes, of at least `bytes_each` bytes."""
    total = total_bytes(device)
    if number * bytes_each > total:
        most = total // bytes_each
        fitting = f"at most {most} fit" if most else "not even one fits"
        raise ValueError(
            f"num_{of}={number} {of} take {number * bytes_each / 1e9:.3g} GB at the least, and {device.type} has "
            f"{total / 1e9:.3g} GB; {fitting}{advice}"
        )


def available_bytes(device: torch.device, share: float | None = None) -> int:
    """Return the bytes that this process may still take: all free bytes; with `share`, up to this share in total.

    Blocks that PyTorch's allocator has cached count as free.
    """
    if share is not None:
        return int(share * total_bytes(device) - occupied_bytes(device))
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0]) + held_bytes(device) - occupied_bytes(device)
    if device.type == "mps":
        return total_bytes(device) - occupied_bytes(device)
    return int(min(psutil.virtual_memory().available, total_bytes(device) - held_bytes(device)))


def held_bytes(device: torch.device) -> int:
    """Return the bytes that this process holds: on a GPU, the allocator's pool; on the CPU, the resident set."""
    if device.type == "cuda":
        return torch.cuda.memory_reserved(device)
    if device.type == "mps":
        return int(torch.mps.driver_allocated_memory())
    return int(_this_process(os.getpid()).memory_info().rss)


class Held:
    """`held_bytes`, cached for a twentieth of a second.

    An uncached reading takes as long as all other overhead of a small model's step.
    """

    def __init__(self) -> None:
        self.bytes, self.read_at = 0, -math.inf

    def __call__(self, device: torch.device) -> int:
        now = time.monotonic()
        if now - self.read_at > 0.05:
            self.bytes, self.read_at = held_bytes(device), now
        return self.bytes


def occupied_bytes(device: torch.device) -> int:
    """Return the bytes that tensors use or, on the CPU, where this is unknown, the resident set."""
    if device.type == "cuda":
        return torch.cuda.memory_allocated(device)
    return int(torch.mps.current_allocated_memory()) if device.type == "mps" else held_bytes(device)


@functools.lru_cache(maxsize=1)
def _this_process(pid: int) -> psutil.Process:
    return psutil.Process(pid)


def optimizer_bytes(optimizer: StackedOptimizer) -> int:
    """Return the bytes of an optimizer's state or, before its first step, the bytes that it will have."""
    return sum(map(_state_bytes, torch_optimizers(optimizer)))


def _state_bytes(optimizer: torch.optim.Optimizer) -> int:
    known = [t for state in optimizer.state.values() for t in state.values() if isinstance(t, Tensor)]
    if known:
        return sum(t.nbytes for t in known)
    # Most optimizers create their state in the first step. Step an optimizer of this class on a small matrix, to count
    # how many numbers it keeps per weight.
    sample = torch.zeros(16, 16).requires_grad_()
    sample.grad = torch.zeros_like(sample)
    accepted = inspect.signature(type(optimizer)).parameters
    options = {name: value for name, value in optimizer.defaults.items() if name in accepted and name not in _KERNELS}
    try:
        other = type(optimizer)([sample], **options)
        other.step()
    except Exception:  # a user's own class may have another constructor
        kept = 2 * sample.numel()  # as Adam keeps
    else:
        kept = sum(t.numel() for t in tree_leaves(other.state[sample]) if isinstance(t, Tensor) and t.dim())
    weights = sum(p.nbytes for group in optimizer.param_groups for p in group["params"])
    return math.ceil(weights * kept / sample.numel())


def activation_bytes(executor: Executor, batch: Any) -> int:
    """Return the bytes that autograd keeps for one node's batch between the forward and the backward pass.

    Every storage counts once. Parameters, buffers and the batch itself do not count, because they exist anyway.

    Args:
        executor: computes its first node, without a change of state. With n nodes at once, an executor keeps about n
            times the returned bytes.
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
        leaves = [*tensors.values(), *objective.parameters(), *tree_leaves(own)]
        addresses.update(t.untyped_storage().data_ptr() for t in leaves)
        with keeping:
            outcome = objective(own, False)
        del outcome  # only now, because the address of a freed storage may be reused
    return sum(kept.values())


class _Moments(TorchDispatchMode):
    """Context that records in `moments`, after every operation, the bytes of all live tensors made in the context."""

    def __init__(self) -> None:
        super().__init__()
        self.alive: dict[int, int] = {}
        self.bytes_alive = 0
        self.moments: list[int] = []
        self._watched: dict[int, weakref.ref[Any]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self._note((args, kwargs), new=False)  # an argument never seen as an output existed before the block
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


def node_bytes(executor: Executor, batch: Any, evaluating: bool = False) -> int:
    """Return the peak bytes of computing one node's loss and gradients, without the node's weights and buffers.

    Measures the executor's first node, as `activation_bytes` does.

    Args:
        batch: one node's batch (B, …), on the device of the replicas.
        evaluating: whether only the loss is computed, in evaluation mode.
    """
    with executor.first_node(batch) as (objective, _, own), _Moments() as watch:
        if evaluating:
            objective.eval()
        with torch.set_grad_enabled(not evaluating):
            loss, _ = objective(own, evaluating)
        if loss.requires_grad:
            loss.backward()
    return max(watch.moments, default=0)


def nodes_that_fit(free_bytes: float, of_node: float, weights: float) -> int:
    """Return the number of nodes that can be computed together in free memory, at least 1.

    Args:
        free_bytes: the device's free memory. of_node: the `node_bytes` of one node.
        weights: bytes of a node's weights, which batched operations such as convolutions may copy.
    """
    room = free_bytes - _WORKSPACES
    return max(1, int(room / (_ALLOWANCE * (of_node + weights))))


def step_moments(executor: Executor, batch: Any) -> list[int]:
    """Compute the gradients of a stacked batch (K, B, …); return the bytes of new tensors after every operation.

    The executor computes the gradients as in training, and writes them to `replicas.grads`. Buffers and random
    generators are restored afterwards.
    """
    executor.prepare(batch)
    batch = tree_map(rows_apart, cloned(batch))  # as in a step
    with undone(executor), executor.objective.untouched(), _Moments() as watch:
        executor._backward(batch, 1.0, True)
    return watch.moments


def step_bytes(executor: Executor, batch: Any) -> Callable[[int], int]:
    """Return f: examples per node → peak bytes of computing the gradients, without the replicas.

    Runs small probes on the first examples of a stacked batch (K, B, …). The bytes alive after an operation grow
    linearly with the examples, each operation at its own rate, and the peak is the maximum of these lines. Up to the
    largest probe, f is at least the linear interpolation of the measured peaks.
    """
    num_examples = next((t.shape[1] for t in tree_leaves(batch) if t.dim() > 1), 1)
    few = min(2, num_examples)  # BatchNorm rejects a single example
    step_moments(executor, _first(batch, few))  # the first call has additional work, such as choosing an executor
    low = step_moments(executor, _first(batch, few))
    if few == num_examples:
        return lambda examples: math.ceil(max(low) * max(1.0, examples / few))
    more = min(2 * few, num_examples)
    high = step_moments(executor, _first(batch, more))
    peaks = {few: max(low), more: max(high)}
    while len(low) != len(high) and more < num_examples:  # other sizes may run other operations
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
    """Return the largest divisor of `batch_size` that fits into the memory budget; 0 if none fits.

    Args:
        executor: computes the gradients. optimizers: the optimizers, whose state needs memory, too.
        batch: a stacked batch (K, B, …). budget_bytes: bytes that the process may hold on the device in total.
    """
    grads = executor.replicas.grads
    needed = step_bytes(executor, batch)
    grads.zero_()
    occupied = occupied_bytes(grads.device)  # after the probes, which load libraries and kernels
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
