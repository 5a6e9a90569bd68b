"""Choose the device and the number of threads of a run, and prepare the vector functions of libraries.

One thread computes small steps, because an operation that two threads share is as slow as the slower thread. If another
program keeps a core busy, one of two threads waits for a time slice, and a step of four small MLPs takes seven times as
long as with one thread. On an idle machine, two threads are no faster for such a step.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._pytree import tree_map

from vsim.arguments import a_list, naming, retold
from vsim.engine.executor import Executor

# One thread computes the steps if all nodes together have fewer weights than this bound. Four MLPs of 26,000 weights
# (104,000) are below the bound, 16 MLPs (416,000) above.
SMALL = 200_000


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the given device or, by default, the best one available: cuda, else mps, else cpu.

    Raises:
        ValueError: the name is unknown, or this machine has no such device.
    """
    available = {
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
        "cpu": 1,
    }
    here = [name for name, count in available.items() if count]
    if device is None or (isinstance(device, str) and not device):  # scripts for EXO Gym default to ""
        return torch.device(here[0])
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError) as error:
        raise ValueError(f"unknown device {device!r:.100}; this machine has {', '.join(here)}") from error
    if (chosen.index or 0) >= available.get(chosen.type, 0):
        raise ValueError(f"device {str(device)!r} is not available; this machine has {', '.join(here)}")
    return chosen


def devices_of_nodes(
    devices: Sequence[str | torch.device] | None, device: str | torch.device | None, nodes_here: int
) -> list[torch.device]:
    """Return the devices to assign to the nodes' processes in turn."""
    if devices is not None:
        listed = a_list("devices", devices)
        with naming("devices"):
            return [_numbered(pick_device(d)) for d in listed]
    if device is not None:
        return [_numbered(pick_device(device))]
    gpus = torch.cuda.device_count()
    if 0 < gpus < nodes_here:
        warnings.warn(
            f"{nodes_here} processes train on the CPU, as there are {gpus} GPUs and each takes one of its own; "
            f"devices={[f'cuda:{i}' for i in range(gpus)]} shares them",
            UserWarning,
            stacklevel=4,
        )
    return [torch.device("cuda", i) for i in range(nodes_here)] if gpus >= nodes_here else [torch.device("cpu")]


def _numbered(device: torch.device) -> torch.device:
    """Return "cuda" as "cuda:n", where n is the current GPU, so that two names of one GPU compare equal."""
    is_current = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else device


def check_repeats(device: torch.device) -> None:
    """Raise a ValueError if `fit(deterministic=True)` cannot make runs on a device repeatable.

    On MPS, backward passes of embeddings and indexing sum in varying order, even with use_deterministic_algorithms
    [github.com/pytorch/pytorch/issues/161029, 195404].
    """
    if device.type == "mps":
        raise ValueError(
            "deterministic=True is for device='cpu' and 'cuda', got 'mps', where PyTorch has no deterministic form of "
            "some operations, and does not say so: give device='cpu', or leave out deterministic"
        )


@contextmanager
def repeating(device: torch.device) -> Iterator[None]:
    """Make computations on CUDA bitwise repeatable within a block. A no-op on the CPU, whose results always repeat.

    Follows PyTorch's notes on reproducibility: use deterministic algorithms, and do not let cuDNN choose kernels by
    timing them. cuBLAS needs no setting, because PyTorch gives each stream a workspace. The caller's setting of TF32
    stays, because TF32 is repeatable.

    Raises:
        RuntimeError: an operation has no deterministic form. If the caller has chosen `warn_only`, PyTorch warns.
    """
    if device.type != "cuda":
        yield
        return
    cudnn, was_on = torch.backends.cudnn, torch.are_deterministic_algorithms_enabled()
    before = cudnn.deterministic, cudnn.benchmark
    cudnn.deterministic, cudnn.benchmark = True, False
    if not was_on:
        torch.use_deterministic_algorithms(True)
    try:
        yield
    except RuntimeError as error:
        if "deterministic implementation" not in str(error):
            raise
        advice = "deterministic=True allows only operations that repeat: replace this one, or leave out deterministic"
        raise retold(error, f"{error} — {advice}") from error
    finally:
        cudnn.deterministic, cudnn.benchmark = before
        if not was_on:
            torch.use_deterministic_algorithms(False)


def moved(batch: Any, device: torch.device) -> Any:
    """Return a batch with its tensors on a device.

    Copies to CUDA go through pinned memory and are asynchronous; PyTorch keeps pinned memory until the copy is done.
    From unpinned memory, the host would wait for all earlier steps, or the memory might be reused too early
    [github.com/pytorch/pytorch/issues/139550, 189690].
    """
    if device.type != "cuda":
        return tree_map(lambda t: t.to(device), batch)
    pinned = tree_map(lambda t: t.pin_memory() if t.device.type == "cpu" and not t.is_pinned() else t, batch)
    return tree_map(lambda t: t.to(device, non_blocking=True), pinned)


def synchronize(device: torch.device) -> None:
    """Wait until a device has computed all operations started on it, for instance before reading a clock."""
    if device.type == "mps":
        torch.mps.synchronize()
    elif device.type not in ("cpu", "meta"):
        torch.get_device_module(device).synchronize(device)


@contextmanager
def using_threads(number: int) -> Iterator[None]:
    """Use this many threads for PyTorch's operations on the CPU within a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def takes_one_thread(executor: Executor) -> bool:
    """Return whether one thread computes an executor's steps, because its nodes have few weights.

    Returns False in three cases:

    - the model has convolutions, whose work is large although they have few weights;
    - `settings.deterministic` is set, because the last bits may depend on the number of threads;
    - the number of threads was given, for instance to the processes of a run.
    """
    replicas = executor.replicas
    if executor.settings.deterministic or executor.has_given_threads or replicas.weights.device.type != "cpu":
        return False
    weights = [*replicas.module.parameters()]
    return replicas.num_held * sum(w.numel() for w in weights) < SMALL and all(w.dim() <= 2 for w in weights)


# Workaround: MKL chooses the kernel of a vector function at the function's first call in a process. If several threads
# of a parallel operation make the first call together, one thread may get a kernel of low accuracy for this call. In
# about one of ten processes that start on a busy machine, half of the entries of AdamW's first √v were off by up to
# 1e-3 [github.com/pytorch/pytorch/issues/188792].
_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p"),
    *("sin", "sinh", "sqrt", "tan", "tanh"),
)


@functools.cache
def settle_vector_functions() -> None:
    """Call each vector function that torch takes from MKL once in this thread, before any parallel operation does."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in _FUNCTIONS:
            getattr(torch, name)(one)
