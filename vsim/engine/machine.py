"""The parts of the machine that a run uses: device, threads, and the allocator and vector functions of libraries.

Small steps are computed by one thread, because an operation that two threads share is as slow as the slower thread. If
another program keeps a core busy, one thread waits for a time slice: a step of four small MLPs then takes seven times
as long with two threads as with one. On an idle machine, two threads are no faster for such a step.
"""

from __future__ import annotations

import ctypes
import functools
import warnings
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch.utils._pytree import tree_leaves, tree_map
from torch.utils.flop_counter import FlopCounterMode

from vsim.arguments import retold
from vsim.engine.executor import Executor

# One thread computes a step with fewer multiplications and additions than this: 4 MLPs of 26,000 weights with 16
# examples have 10 million, 16 such MLPs have 40 million.
SMALL = 20_000_000


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
    if device is None or device == "":  # scripts for EXO Gym default to "" on the command line
        return torch.device(here[0])
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {device!r}; this machine has {', '.join(here)}") from error
    if (chosen.index or 0) >= available.get(chosen.type, 0):
        raise ValueError(f"device {str(device)!r} is not available; this machine has {', '.join(here)}")
    return chosen


def devices_of_nodes(
    devices: Sequence[str | torch.device] | None, device: str | torch.device | None, nodes_here: int
) -> list[torch.device]:
    """Return the devices that are assigned to the nodes' processes in turn."""
    if devices is not None:
        if isinstance(devices, str) or not len(devices):
            raise TypeError(f"devices must be a list of devices with at least one, got {devices!r}")
        return [_numbered(pick_device(d)) for d in devices]
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
    """Return "cuda" as the current GPU, so that the same GPU under two names is seen to be one."""
    is_current = device.type == "cuda" and device.index is None
    return torch.device("cuda", torch.cuda.current_device()) if is_current else device


def check_repeats(device: torch.device) -> None:
    """Raise a ValueError if runs on a device cannot be made to repeat, as `fit(deterministic=True)` asks.

    On MPS, backward passes of embeddings and indexing add in any order, even with torch.use_deterministic_algorithms
    [github.com/pytorch/pytorch/issues/161029, 195404].
    """
    if device.type == "mps":
        raise ValueError(
            "deterministic=True is for device='cpu' and 'cuda', got 'mps', where PyTorch has no deterministic form of "
            "some operations, and does not say so: give device='cpu', or leave out deterministic"
        )


@contextmanager
def repeating(device: torch.device) -> Iterator[None]:
    """Make computations on CUDA repeat bit by bit within a block; a no-op on the CPU, where they always do.

    Follows PyTorch's notes on reproducibility: deterministic algorithms, and kernels of cuDNN that are not chosen by
    the clock. cuBLAS repeats by itself, because PyTorch gives each of its streams a workspace. TF32 repeats, too, and
    stays as the caller has set it.

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

    Copies to CUDA go through pinned memory and are asynchronous: PyTorch keeps that memory until the copy is done.
    Other memory might be reused too early, and the host would wait for all earlier steps
    [github.com/pytorch/pytorch/issues/139550, 189690].
    """
    if device.type != "cuda":
        return tree_map(lambda t: t.to(device), batch)
    pinned = tree_map(lambda t: t.pin_memory() if t.device.type == "cpu" and not t.is_pinned() else t, batch)
    return tree_map(lambda t: t.to(device, non_blocking=True), pinned)


def synchronize(device: torch.device) -> None:
    """Wait until a device has computed everything that was started on it, as before reading a clock."""
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


class Threads:
    """Chooses the number of threads for an executor's steps, by shapes alone.

    Args:
        executor: takes the steps. With `settings.deterministic` the number is not changed, because the last bits may
            depend on it; nor is a number that was given, as to the processes of a run.
    """

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._small: dict[Any, bool] = {}  # by the shapes of a batch

    def of(self, batch: Any) -> AbstractContextManager[None]:
        """Return the context for a step with this stacked batch (R, B, …); it uses one thread if the step is small."""
        alone = torch.get_num_threads() > 1 and self._is_small(batch)
        return using_threads(1) if alone else nullcontext()

    def _is_small(self, batch: Any) -> bool:
        replicas = self.executor.replicas
        settled = self.executor.settings.deterministic or self.executor.has_given_threads
        if settled or replicas.weights.device.type != "cpu":
            return False
        shapes = tuple(t.shape for t in tree_leaves(batch))
        if shapes not in self._small:
            # Optimizers and communication read all weights, even if a batch uses few of them.
            self._small[shapes] = replicas.num_held * replicas.num_parameters < SMALL / 50 and (
                replicas.num_held * self._flops_of_node(tree_map(lambda t: t[0], batch)) < SMALL
            )
        return self._small[shapes]

    def _flops_of_node(self, batch: Any) -> int:
        """Return the multiplications and additions of one node's step; the backward pass has twice the forward's."""
        with self.executor.first_node(batch) as (objective, _, own), FlopCounterMode(display=False) as counter:
            try:
                objective(own, False)
            except Exception:  # the step itself will raise it again, with more details
                return SMALL
        return 3 * counter.get_total_flops()


# Every step allocates and frees the same tensors. glibc returns large blocks to the system as soon as they are free,
# and each block then causes page faults at its next use: 20,000 in a step of four small GPTs, a seventh of its time.
# While a run trains, blocks of up to 256 MB stay with the process; afterwards they are returned.
# Below: the names of mallopt's settings (malloc.h), their values during a run, and afterwards (glibc's own limits).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_WHILE_TRAINING = {_MMAP_THRESHOLD: 2**28, _TRIM_THRESHOLD: 2**30}
_AFTERWARDS = {_MMAP_THRESHOLD: 2**25, _TRIM_THRESHOLD: 2**26}

_runs = 0  # runs that train now in this process


@contextmanager
def keeping_freed_memory() -> Iterator[None]:
    """Keep freed memory in the process within a block. A no-op if the C library is not glibc."""
    global _runs
    library = _glibc()
    if library is not None and _runs == 0:
        _set(library, _WHILE_TRAINING)
    _runs += 1
    try:
        yield
    finally:
        _runs -= 1
        if library is not None and _runs == 0:
            _set(library, _AFTERWARDS)
            library.malloc_trim(0)


def _set(library: Any, settings: dict[int, int]) -> None:
    for name, value in settings.items():
        library.mallopt(name, value)


@functools.lru_cache(maxsize=1)
def _glibc() -> Any:
    try:
        library = ctypes.CDLL(None)
        library.gnu_get_libc_version  # noqa: B018
        return library
    except (OSError, AttributeError, TypeError):
        return None


# A workaround: MKL chooses the kernel of a vector function at the function's first call in a process. If several
# threads of a parallel operation make that call together, one thread may get a kernel of low accuracy for that call.
# AdamW's first √v is then off by up to 1e-3 in half of its entries, in about one of ten processes that start on a busy
# machine [github.com/pytorch/pytorch/issues/188792].
_FUNCTIONS = (
    *("acos", "asin", "atan", "cos", "cosh", "erf", "erfc", "erfinv", "exp", "expm1", "log", "log10", "log1p"),
    *("sin", "sinh", "sqrt", "tan", "tanh"),
)


@functools.cache
def settle_vector_functions() -> None:
    """Call every vector function that torch takes from MKL once, in this thread, before any run makes a first call."""
    for dtype in (torch.float32, torch.float64):
        one = torch.full((1,), 0.5, dtype=dtype)
        for name in _FUNCTIONS:
            getattr(torch, name)(one)
