"""A process of a run, started by `vsim.processes.launch`: it trains, and reports to its parent."""

from __future__ import annotations

import atexit
import fcntl
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import DupFd
from typing import Any, TextIO

import cloudpickle
import torch
import torch.distributed as dist

from vsim.arguments import brief
from vsim.engine.machine import settle_vector_functions
from vsim.private_torch import register_recorders
from vsim.processes.distributed import CollectiveFailure, completing, open_group
from vsim.processes.node import run_node
from vsim.processes.ranges import run_ranges
from vsim.runs.interrupt import Interrupt, Interrupted
from vsim.runs.spec import RunSpec

# Time limit for the other interpreters to start and to read the shipped data. The limit is generous, because the parent
# notices an interpreter that dies.
_START = timedelta(seconds=600)
_speaking = threading.Lock()  # one message at a time


class Descriptor:
    """The number of an open file. multiprocessing passes the file itself to the process that it starts."""

    def __init__(self, number: int) -> None:
        self.number = number

    def __reduce__(self) -> tuple[Any, ...]:
        return _received, (DupFd(self.number),)


def _received(descriptor: Any) -> Descriptor:
    return Descriptor(descriptor.detach())


@dataclass(frozen=True)
class Setup:
    """The arguments of a process, besides the run.

    Attributes:
        rank: the process's number; with a process for every node, the node's number. size: the number of processes.
        port: the port of the run's store on this machine. backend: the backend of torch.distributed.
        timeout_seconds: time limit of a collective. device: where the process computes. threads: its CPU threads.
        settings: see `torch_settings`.
        environment, signals, start_method: the caller's environment variables, blocked signals, and start method of
            multiprocessing.
    """

    rank: int
    size: int
    port: int
    backend: str
    timeout_seconds: float
    device: torch.device
    threads: int
    settings: Mapping[str, Any]
    environment: Mapping[str, str]
    signals: set[int]
    start_method: str


def torch_settings() -> dict[str, Any]:
    """Return the settings of this process that change torch's results.

    The precision of float32 has an older and a newer interface. The older interface cannot be read (here None) if the
    newer interface was set to a value that the older one lacks.
    """
    return {
        "default_dtype": torch.get_default_dtype(),
        "float32_matmul_precision": _if_readable(torch.get_float32_matmul_precision),
        "cudnn_allow_tf32": _if_readable(lambda: torch.backends.cudnn.allow_tf32),
        "fp32_precision": {name: place.fp32_precision for name, place in _places_of_precision().items()},
        "mkldnn_enabled": torch.backends.mkldnn.enabled,
        "cudnn_benchmark": torch.backends.cudnn.benchmark,
        "cudnn_deterministic": torch.backends.cudnn.deterministic,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled(),
        "warn_only": torch.is_deterministic_algorithms_warn_only_enabled(),
    }


def apply_torch_settings(settings: Mapping[str, Any]) -> None:
    """Apply the settings that `torch_settings` returned in another process to this process."""
    torch.set_default_dtype(settings["default_dtype"])
    # Set only settings that differ: once the precision of an operation is set, it no longer follows its library's.
    own = torch_settings()
    if settings["float32_matmul_precision"] not in (None, own["float32_matmul_precision"]):
        torch.set_float32_matmul_precision(settings["float32_matmul_precision"])
    if settings["cudnn_allow_tf32"] not in (None, own["cudnn_allow_tf32"]):
        torch.backends.cudnn.allow_tf32 = settings["cudnn_allow_tf32"]
    for name, place in _places_of_precision().items():
        if place.fp32_precision != settings["fp32_precision"][name]:
            place.fp32_precision = settings["fp32_precision"][name]
    torch.backends.mkldnn.enabled = settings["mkldnn_enabled"]
    torch.backends.cudnn.benchmark = settings["cudnn_benchmark"]
    torch.backends.cudnn.deterministic = settings["cudnn_deterministic"]
    torch.use_deterministic_algorithms(settings["deterministic_algorithms"], warn_only=settings["warn_only"])


def _places_of_precision() -> dict[str, Any]:
    """Return the objects with a settable `fp32_precision`; a value set for a library applies to its operations."""
    cudnn: Any = torch.backends.cudnn
    mkldnn: Any = torch.backends.mkldnn
    own = {"cuda.matmul": torch.backends.cuda.matmul, "cudnn.conv": cudnn.conv, "cudnn.rnn": cudnn.rnn}
    of_cpu = {"mkldnn.matmul": mkldnn.matmul, "mkldnn.conv": mkldnn.conv, "mkldnn.rnn": mkldnn.rnn}
    return {"all": torch.backends, "cudnn": cudnn, **own, **of_cpu}


def _if_readable(read: Callable[[], Any]) -> Any:
    try:
        return read()
    except RuntimeError:
        return None


def main(
    setup: Setup, shipped: Descriptor, outputs: Mapping[int, Descriptor], parent: Connection, alive: Connection
) -> None:
    """Train in this process, which becomes the leader of a new session.

    Args:
        shipped: a file with the `RunSpec` or `Race`, pickled by cloudpickle.
        outputs: the caller's standard output and error, by file number; the fork server's may be other files.
        parent: receives messages (kind, content); any message from the parent interrupts the run after the step.
        alive: closes when the parent ends the run or dies; all processes of the session are then killed.
    """
    os.setsid()
    _die_with(alive)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # drop a Ctrl-C that came before the session
    signal.pthread_sigmask(signal.SIG_SETMASK, setup.signals)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # even if the caller ignores SIGINT, as under nohup
    for number, output in outputs.items():
        os.dup2(output.number, number)
    os.environ.clear()
    os.environ.update(setup.environment)
    multiprocessing.set_start_method(setup.start_method, force=True)
    interrupt = Interrupt()
    threading.Thread(target=_listen, args=(parent, alive, interrupt), daemon=True).start()
    _forward_warnings(parent)
    try:
        _train(setup, shipped, parent, interrupt)
        atexit._run_exitfuncs()  # multiprocessing would skip the user's exit handlers
    except BaseException as error:
        with suppress(OSError):  # the parent is gone
            content = _pickled(error), _traceback(error), interrupt.requested
            _say(parent, "lost" if _follows_from_a_loss(error) else "failed", content)
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)  # do not wait for threads, worker processes or peers, so that other nodes notice at once


def _die_with(alive: Connection) -> None:
    """Make the kernel kill this session when `alive` closes; a thread could not do so while code holds the GIL."""
    if hasattr(fcntl, "F_SETSIG"):  # on Linux; on other systems only `_listen` kills the session
        fcntl.fcntl(alive, fcntl.F_SETOWN, -os.getpgrp())
        fcntl.fcntl(alive, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(alive, fcntl.F_SETFL, fcntl.fcntl(alive, fcntl.F_GETFL) | os.O_ASYNC)


def _listen(parent: Connection, alive: Connection, interrupt: Interrupt) -> None:
    with suppress(EOFError, OSError):
        while alive not in wait([parent, alive]):
            parent.recv_bytes()
            interrupt.request()
    os.killpg(0, signal.SIGKILL)


def _train(setup: Setup, shipped: Descriptor, parent: Connection, interrupt: Interrupt) -> None:
    torch.set_num_threads(setup.threads)
    apply_torch_settings(setup.settings)
    if setup.device.type == "cuda":
        torch.cuda.set_device(setup.device)
    settle_vector_functions()  # before the user's code computes anything
    content = _load(shipped)
    timeout = timedelta(seconds=setup.timeout_seconds)
    store = dist.TCPStore("127.0.0.1", setup.port, is_master=False, wait_for_workers=False, timeout=timeout)

    def send(messages: Sequence[tuple[int, Any]]) -> None:
        if dist.get_rank() == 0:
            _say(parent, "report", messages)

    store.set(f"started {setup.rank}", "")
    with completing(f"meeting the other processes on rank {setup.rank}"):
        # First wait for processes that start slowly, so that the timeout limits only collectives.
        store.wait([f"started {rank}" for rank in range(setup.size)], _START + timeout)
        open_group(setup.backend, store, setup.rank, setup.size, timeout)
    try:
        if isinstance(content, RunSpec) and content.num_processes is None:
            run_node(content, setup.device, send, interrupt)
        else:
            run_ranges(content, setup.device, send, interrupt)
        _say(parent, "done", None)
    except Interrupted:
        _say(parent, "interrupted", None)
    dist.destroy_process_group()


def _load(shipped: Descriptor) -> Any:
    try:
        # Map the file, because processes that share an open file also share its position.
        with mmap.mmap(shipped.number, 0, access=mmap.ACCESS_READ) as content:
            loaded = cloudpickle.loads(content)
    except (ImportError, AttributeError) as error:
        raise type(error)(
            f"a process of the run cannot load the model, data or strategy: {error}. What is defined in the main "
            "script or a notebook is shipped; everything else must be importable by its name from sys.path. Custom "
            "operators and other registrations with torch must be made when the module that defines the model is "
            "imported"
        ) from error
    for spec in [loaded] if isinstance(loaded, RunSpec) else [run.spec for run in loaded.runs]:
        register_recorders(spec.model)
    return loaded


def _say(parent: Connection, kind: str, content: Any) -> None:
    # Send bytes: multiprocessing's pickler would send tensors as handles, which end with this process.
    message = pickle.dumps((kind, content))
    with _speaking:
        parent.send_bytes(message)


def _forward_warnings(parent: Connection) -> None:
    """Send this process's warnings to the parent, which applies its filters."""
    own_pid, print_here = os.getpid(), warnings.showwarning

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        if os.getpid() != own_pid:  # a worker process of a DataLoader, forked from this one
            print_here(message, category, filename, lineno, file, line)
            return
        known = next(c for c in category.__mro__ if c.__module__ == "builtins")  # the parent may not know other classes
        _say(parent, "warning", (str(message), known.__name__, filename, lineno))

    warnings.showwarning = show


def _follows_from_a_loss(error: BaseException | None) -> bool:
    """Return whether an error was caused by a collective that other nodes did not complete."""
    while error is not None and not isinstance(error, CollectiveFailure):
        error = error.__cause__ or error.__context__
    return error is not None


def _traceback(error: BaseException) -> str:
    """Return the traceback of an error; without its causes if formatting a long message would take seconds."""
    with suppress(Exception):  # in a user's __str__
        if (short := brief(text := str(error))) != text:
            return f"{''.join(traceback.format_tb(error.__traceback__))}{type(error).__qualname__}: {short}"
    return traceback.format_exc()


def _pickled(error: BaseException) -> bytes | None:
    try:
        dumped: bytes = cloudpickle.dumps(error)
    except Exception:
        return None
    return dumped
