"""Start the processes of a run on this machine, receive their messages, and leave no process behind."""

from __future__ import annotations

import builtins
import copyreg
import io
import itertools
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import tempfile
import threading
import time
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, fields
from multiprocessing import forkserver, resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import IO, Any, NamedTuple, NoReturn

import cloudpickle
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from vsim.engine.memory import check_room
from vsim.history.progress import StepReport
from vsim.private_torch import NAMES_OF_OPERATORS
from vsim.process.child import Descriptor, Setup, main, torch_settings
from vsim.process.distributed import CollectiveFailure, even_ranges
from vsim.process.options import ProcessOptions, backend_for
from vsim.training.interrupt import Interrupt, Interrupted
from vsim.training.outcome import Outcome
from vsim.training.race import Race
from vsim.training.spec import RunSpec

# "spawn" on macOS, because its frameworks do not survive a fork.
START_METHOD = "spawn" if sys.platform == "darwin" else "forkserver"
PRELOAD = ["vsim.process.preload"]
# Time limit for starting processes; the first start also imports torch.
_START_SECONDS = 120.0
# Time for the other nodes to notice a failure and end with their own messages.
_GRACE_SECONDS = 2.0
# Time limit for a finished node to exit, including a user's exit handlers.
_EXIT_SECONDS = 10.0
# Least memory of an interpreter with torch.
_LEAST_BYTES = 2**26
# Interval of checks for Ctrl-C.
_POLL_SECONDS = 0.5


class NodeFailure(RuntimeError):
    """A process ended before its run was complete.

    Attributes:
        rank: the number of the process; with a process for every node, the node's number.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


class ForkServerFailure(RuntimeError):
    """The fork server, which forks the processes, has ended or does not answer."""


class _Failure(NamedTuple):
    """The report of a failed process."""

    pickled: bytes | None  # the exception, if it can be pickled
    text: str  # its traceback
    lost: bool  # whether another process's failure caused it


@dataclass(eq=False)
class _Child:
    """What the parent knows of a process of the run."""

    rank: int
    process: BaseProcess
    connection: Connection
    lifeline: Connection  # closes when this process ends, and thereby ends the child
    interrupted: bool = False  # whether the process was asked to stop after the current step
    done: bool = False
    ended: bool = False  # no more messages will come
    failure: _Failure | None = None

    @property
    def failed(self) -> bool:
        return self.failure is not None or (self.ended and not self.done)

    def kill(self) -> None:
        """Kill the process and all processes of its session."""
        try:
            os.killpg(self.process.pid or 0, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):  # the process has no session yet, or has ended
            self.process.kill()


def train_in_processes(content: RunSpec | Race, options: ProcessOptions, report: Callable[[int, Any], None]) -> None:
    """Train in processes on this machine.

    With `num_processes`, each process trains a range of the nodes; else each process trains one node.

    multiprocessing's fork server starts the processes, and stays for later runs until the caller's program ends. The
    processes do not run the caller's main module again; its definitions (models, datasets, strategies) are pickled by
    value. Warnings of the processes are issued in this process. The processes and their children end when this call
    ends, even if this process is killed.

    Args:
        content: the run, or the runs of a comparison.
        options: number of processes, devices, threads and timeout.
        report: called for the first process's messages as report(number of a run, its `StepReport` or `Outcome`).

    Raises:
        TypeError: an option of the run, which the message names, cannot be pickled.
        Exception: the error that a process raised; its cause is a `NodeFailure` with the rank and traceback.
        NodeFailure: a process was killed, or exited without a message.
        ForkServerFailure: the fork server was killed, is stopped, or cannot import vsim.
        Interrupted: after a Ctrl-C, once the step is completed. A second Ctrl-C ends the processes at once.
    """
    if os.name != "posix":
        raise RuntimeError(f"backend='process' runs on Linux and macOS; this is {sys.platform}")
    spec, *_ = _specs(content)
    of = "nodes" if spec.num_processes is None else "processes"
    check_room(options.num_processes, _LEAST_BYTES, torch.device("cpu"), of)
    with tempfile.TemporaryFile(prefix="vsim-") as file, ExitStack() as ending:
        _ship(content, file)
        # The store through which the processes find each other; accepts connections only from this machine.
        listening = socket.create_server(("127.0.0.1", 0))
        port = listening.getsockname()[1]
        store = dist.TCPStore(  # noqa: F841 (serves as long as it is referenced)
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listening.detach()
        )
        run = _Run(_specs(content), options, report, Descriptor(file.fileno()), port)
        if isinstance(content, Race):
            run.interrupt = content.interrupt  # installed by the caller
        ending.callback(run.end)
        with run.interrupt:
            run.start()
            run.listen()


class _Pickler(cloudpickle.Pickler):
    """Cloudpickle that also pickles parametrized modules; their classes, which torch makes at run time, refuse it."""

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, nn.Module) and is_parametrized(obj) and type(obj).__reduce__ is object.__reduce__:
            return copyreg.__newobj__, (type(obj),), vars(obj)  # type: ignore[attr-defined]
        return super().reducer_override(obj)


def _ship(content: RunSpec | Race, file: IO[bytes]) -> None:
    try:
        _Pickler(file).dump(content)
        file.flush()
    except OSError:
        raise
    except Exception as whole:
        for spec, field in itertools.product(_specs(content), fields(RunSpec)):
            try:
                _Pickler(io.BytesIO()).dump(getattr(spec, field.name))
            except Exception as error:
                raise TypeError(
                    f"backend='process' cannot ship {field.name} to the processes: {error}{_advice(error)}"
                ) from error
        raise TypeError(f"backend='process' cannot ship the run to the processes: {whole}") from whole


def _specs(content: RunSpec | Race) -> list[RunSpec]:
    return [content] if isinstance(content, RunSpec) else [run.spec for run in content.runs]


def _advice(error: Exception) -> str:
    if any(name in str(error) for name in NAMES_OF_OPERATORS):
        return ". Define custom operators, and the functions that call them, in a module that the script imports"
    return ""


@contextmanager
def _starting(threads: int) -> Iterator[None]:
    """Within a block, make multiprocessing start interpreters with this module path and without a main module.

    By default, multiprocessing would run the caller's script again, and search the working folder for modules first.
    """
    path = os.pathsep.join(entry for entry in sys.path if isinstance(entry, str))
    changed = {"OMP_NUM_THREADS": str(threads), "PYTHONSAFEPATH": "1", "PYTHONPATH": path}
    before, main_module = {name: os.environ.get(name) for name in changed}, sys.modules["__main__"]
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, [])
    try:
        os.environ.update(changed)
        sys.modules["__main__"] = types.ModuleType("__main__")
        resource_tracker.ensure_running()  # before signals are blocked, because this call unblocks them
        # A Ctrl-C in a terminal reaches all processes started there. Block it until each new process has its session.
        signal.pthread_sigmask(signal.SIG_SETMASK, {signal.SIGINT})
        yield
    finally:
        sys.modules["__main__"] = main_module
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class _Run:
    """The parent of a run's processes: starts them, receives their messages, and ends them."""

    def __init__(
        self,
        specs: Sequence[RunSpec],
        options: ProcessOptions,
        report: Callable[[int, Any], None],
        shipped: Descriptor,
        port: int,
    ) -> None:
        self.spec, self.options, self.report, self.shipped, self.port = specs[0], options, report, shipped, port
        self.num_nodes = {spec.num_nodes for spec in specs}
        self.context: Any = multiprocessing.get_context(START_METHOD)
        self.children: list[_Child] = []
        self.failures: list[_Child] = []  # in the order of discovery
        self.last_step = 0 if self.spec.start is None else self.spec.start.step
        self.warned: set[Any] = set()
        self.interrupt = Interrupt()

    def start(self) -> None:
        """Start all processes."""
        environment = {**os.environ, "OMP_NUM_THREADS": str(self.options.threads)}
        # The processes of one machine communicate only over its loopback interface.
        environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
        setups = [
            Setup(
                rank,
                self.options.num_processes,
                self.port,
                backend_for(self.options.devices, self.options.num_processes),
                self.options.timeout_seconds,
                self.options.devices[rank % len(self.options.devices)],
                self.options.threads,
                torch_settings(),
                environment,
                signal.pthread_sigmask(signal.SIG_BLOCK, []),
                multiprocessing.get_start_method(),
            )
            for rank in range(self.options.num_processes)
        ]
        if START_METHOD == "forkserver":
            self.context.set_forkserver_preload(PRELOAD)
        with _starting(self.options.threads):
            within(_START_SECONDS, lambda: self._start(setups))

    def _start(self, setups: Sequence[Setup]) -> None:
        outputs = {number: Descriptor(number) for number in (1, 2) if _is_open(number)}
        for setup in setups:
            connection, its_end = self.context.Pipe()
            # A pipe without data. Each process needs one, because the kernel signals one process group per open file.
            alive, lifeline = self.context.Pipe(duplex=False)
            process = self.context.Process(target=main, args=(setup, self.shipped, outputs, its_end, alive))
            with its_end, alive:
                process.start()
            self.children.append(_Child(setup.rank, process, connection, lifeline))

    def listen(self) -> None:
        """Forward the first process's reports until all processes are done, or until the grace time after a failure."""
        deadline: float | None = None
        while running := [child for child in self.children if not child.ended]:
            ready = wait([f for child in running for f in (child.connection, child.process.sentinel)], _POLL_SECONDS)
            if self.interrupt.requested:
                self._send_interrupt()
            for child in running:
                if child.connection in ready:
                    self._receive(child)
                elif child.process.sentinel in ready and not child.connection.poll():
                    child.ended = True  # worker processes of a DataLoader may keep the pipe open
                if child.failed and child not in self.failures:
                    self.failures.append(child)
            if self.failures and deadline is None:
                deadline = time.monotonic() + _GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline and not ready:
                break
        if self.failures:
            self._raise()
        for child in self.children:
            child.process.join(_EXIT_SECONDS)
        if self.interrupt.requested:  # here or in a process of the run
            raise Interrupted(self.last_step, self.spec.saving)

    def end(self) -> None:
        """Kill all remaining processes."""
        for child in self.children:
            child.kill()
        for child in self.children:  # a Ctrl-C may end this loop, because all processes are killed by now
            child.process.join(_EXIT_SECONDS)
            if child.process.exitcode is None:  # the fork server does not report the end of the process
                _kill_fork_server()
                child.process.join()
            child.process.close()
            child.connection.close()
            child.lifeline.close()

    def _send_interrupt(self) -> None:
        """Ask the processes to stop after their current step, but only once, so that no send can block this process."""
        for child in [child for child in self.children if not (child.ended or child.interrupted)]:
            child.interrupted = True
            with suppress(OSError):  # the process has ended, which `listen` notices
                child.connection.send_bytes(b"!")

    def _receive(self, child: _Child) -> None:
        try:
            kind, content = pickle.loads(child.connection.recv_bytes())
        except (EOFError, OSError):
            child.ended = True
            return
        if kind == "report":
            for number, message in content:
                if isinstance(message, StepReport):
                    self.last_step = int(message.row["step"])
                elif isinstance(message, Outcome) and message.record is not None:
                    self.last_step = max(self.last_step, message.record[1])
                with self.interrupt.requested_inside():
                    self.report(number, message)
        elif kind == "warning":
            self._warn(*content)
        elif kind == "interrupted":
            child.done = child.ended = True
            self.interrupt.request()
        elif kind == "done":
            child.done = child.ended = True
        else:
            pickled, text, requested = content
            child.failure = _Failure(pickled, text, lost=kind == "lost")
            if requested:  # by a callback there
                self.interrupt.request()

    def _warn(self, message: str, category: str, filename: str, lineno: int) -> None:
        """Issue a process's warning, unless another process has sent the same warning."""
        if (message, category, filename, lineno) not in self.warned:
            self.warned.add((message, category, filename, lineno))
            warnings.warn_explicit(message, getattr(builtins, category), filename, lineno)

    def _raise(self) -> NoReturn:
        """Raise the first failure that no other failure caused; if there is none, the first failure.

        After a request to stop, in any process, raise Interrupted instead.
        """
        causes = [child for child in self.failures if child.failure is None or not child.failure.lost]
        child = (causes or self.failures)[0]
        where, rank = f"after step {self.last_step} of the run", child.rank
        name, process = self._names(rank)
        if child.failure is None:
            failure = NodeFailure(f"{process} {_how_it_ended(child.process)}, {where}", rank)
        else:
            failure = NodeFailure(f"{name} failed {where}:\n\n{child.failure.text}", rank)
        error = None
        if child.failure is not None and child.failure.pickled is not None:
            with suppress(Exception):
                error = cloudpickle.loads(child.failure.pickled)
        if self.interrupt.explains(error if isinstance(error, Exception) else failure):
            raise Interrupted(self.last_step, self.spec.saving) from failure
        if not isinstance(error, Exception):  # a child's SystemExit or KeyboardInterrupt must not be raised here
            raise failure
        late = [one.rank for one in self.children if not one.ended and not one.failed]
        if isinstance(error, CollectiveFailure) and late:
            ranks = "nodes" if self.spec.num_processes is None else "ranks"
            error = CollectiveFailure(f"{error}; {ranks} {late} did not get there")
        raise error from failure

    def _names(self, rank: int) -> tuple[str, str]:
        """Return what messages call a rank, and what they call its process."""
        if self.spec.num_processes is None:
            return f"node {rank}", f"node {rank}'s process"
        if len(self.num_nodes) > 1:  # the runs of a sweep
            return f"rank {rank}", f"the process of rank {rank}"
        nodes = even_ranges(self.spec.num_nodes, self.options.num_processes)[rank]
        held = f"nodes {nodes[0]} to {nodes[-1]}" if len(nodes) > 1 else f"node {nodes[0]}"
        return f"rank {rank} ({held})", f"the process of rank {rank} ({held})"


def _is_open(descriptor: int) -> bool:
    try:
        os.fstat(descriptor)
    except OSError:
        return False
    return True


def within(seconds: float, start: Callable[[], Any]) -> None:
    """Call `start`, which starts processes, and wait for it.

    Raises:
        ForkServerFailure: the fork server has ended, or is killed because `start` does not return in time. The next
            run starts another fork server.
    """
    errors: list[BaseException] = []

    def call() -> None:
        try:
            start()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        _kill_fork_server()
        raise ForkServerFailure(
            f"the interpreter that starts the processes has not answered for {seconds:g} seconds: it is "
            "stopped, or the machine is too busy"
        )
    if errors and isinstance(errors[0], EOFError | ConnectionError):
        raise ForkServerFailure(
            "the interpreter that starts the processes has ended; if it could not start them, its standard "
            "error says why"
        ) from errors[0]
    if errors:
        raise errors[0]


def _kill_fork_server() -> None:
    """Kill multiprocessing's fork server; the next start of a process starts another server."""
    pid = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    if pid is not None:
        os.kill(pid, signal.SIGKILL)
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)  # multiprocessing still reads the exit code


def _how_it_ended(process: BaseProcess) -> str:
    process.join(_EXIT_SECONDS)
    status = process.exitcode
    if status is None:
        return "closed its connection"
    if status == 255 and _is_alive(process):  # multiprocessing returns 255 if the fork server does not answer
        raise ForkServerFailure("the interpreter that starts the processes has ended")
    if status >= 0:
        return f"exited with {status}"
    name = next((f" ({s.name})" for s in signal.Signals if s == -status), "")
    hint = ": by hand, or for lack of memory" if -status == signal.SIGKILL else ""
    return f"was ended by signal {-status}{name}{hint}"


def _is_alive(process: BaseProcess) -> bool:
    try:
        os.kill(process.pid or 0, 0)
    except ProcessLookupError:
        return False
    return True
