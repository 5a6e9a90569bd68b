"""A fork server: one fresh interpreter that imports what the nodes' processes need, and then forks each of them.

An interpreter takes seconds to import torch, a fork of it milliseconds, and they share memory until one writes to it.
The server runs nothing of the user's and computes next to nothing: when it forks, no thread of OpenMP and no device has
been started, which would not survive.

On macOS, whose frameworks do not survive a fork, it starts a fresh interpreter for each process instead.
"""

from __future__ import annotations

import gc
import importlib
import os
import pickle
import signal
import socket
import subprocess
import sys
import warnings
from collections.abc import Mapping, Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

FORKS = sys.platform != "darwin"

_NODE = "vsim.process.child"  # what a node's process runs
_BEGUN, _ENDED = "begun", "ended"  # what is told of a process, with its number or its exit code


class ForkServerFailure(RuntimeError):
    """The fork server has ended."""


class ForkServer:
    """The parent's side of a fork server, in whose environment all its processes are.

    Args:
        environment: the variables of the environment.
        modules: what it imports before it forks; nothing in them may compute.
    """

    def __init__(self, environment: Mapping[str, str], modules: Sequence[str] = (_NODE,)) -> None:
        self._socket, its_socket = socket.socketpair()
        with its_socket:
            self.process = subprocess.Popen(
                _interpreter("serve", its_socket.fileno(), modules if FORKS else ()),
                stdin=subprocess.DEVNULL,  # code of the user's that reads it finds it empty
                pass_fds=[its_socket.fileno()],
                env=environment,
                start_new_session=True,  # a Ctrl-C reaches the parent, which then ends its children
            )

    def start(self) -> Process:
        """Start a process that is going to train a node, as soon as it gets the setup.

        Raises:
            ForkServerFailure: the server has ended.
        """
        connection, its_end = Pipe()
        status, its_status = Pipe(duplex=False)
        with its_end, its_status, suppress(OSError):  # in which case nobody holds the other end of `status`
            socket.send_fds(self._socket, [b"+"], [its_end.fileno(), its_status.fileno()])
        return Process(connection, status)

    def end(self) -> None:
        """End the server; the processes that it has started go on."""
        self._socket.close()
        self.process.kill()
        self.process.wait()


class Process:
    """A process that a fork server has started, with a session of its own.

    Attributes:
        pid: its number.
        connection: to and from it.
    """

    def __init__(self, connection: Connection, status: Connection) -> None:
        self.connection, self._status = connection, status
        self._exit_code: int | None = None
        what, self.pid = self._heard()
        if what != _BEGUN:
            raise ForkServerFailure("a process has ended before it began")

    def exit_code(self, seconds: float = 0.0) -> int | None:
        """Return how it ended, −n: by signal n; None if it has not within so many seconds."""
        if self._exit_code is None and self._status.poll(seconds):
            _, self._exit_code = self._heard()
        return self._exit_code

    def tell(self, order: bytes) -> None:
        """Send it an order; if it does not hear that any more, it is noticed elsewhere."""
        with suppress(OSError):
            self.connection.send_bytes(order)

    def kill(self) -> None:
        """Let it end, and all processes of its session."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def close(self) -> None:
        """Wait for its end, and forget it."""
        with suppress(ForkServerFailure):
            while self.exit_code(1.0) is None:
                pass
        self.connection.close()
        self._status.close()

    def _heard(self) -> tuple[str, int]:
        try:
            message: tuple[str, int] = self._status.recv()
        except EOFError:
            raise ForkServerFailure(
                "the interpreter that starts the nodes' processes has ended; if it could not start them, its standard "
                "error says why"
            ) from None
        return message


def _interpreter(function: str, *arguments: Any) -> list[str]:
    """Return the command of a fresh interpreter that calls a function here; it finds modules as this one does."""
    paths = [path for path in sys.path if isinstance(path, str)]
    # By path, so that it imports no more of vsim than it needs.
    code = f"import sys; here, *sys.path[:] = sys.argv[1:]; import runpy; runpy.run_path(here)['{function}']{arguments}"
    return [sys.executable, "-c", code, __file__, *paths]


# In the server and in the processes that it starts -------------------------------------------------------------------


def serve(fd: int, modules: Sequence[str]) -> None:
    """Start a process for every message on an inherited socket, and say how each ended, until the socket closes.

    Args:
        modules: what the processes need; if empty, they are fresh interpreters.
    """
    if modules:
        prepare(modules)
    server = socket.socket(fileno=fd)
    server.set_inheritable(False)
    ended, wakeup = os.pipe()
    os.set_blocking(wakeup, False)
    signal.set_wakeup_fd(wakeup, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    of_caller = signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGCHLD})
    running: dict[int, Connection] = {}  # by pid: where its end is told
    while True:
        ready = wait([server, ended])
        if ended in ready:
            os.read(ended, 4096)
            for pid in [*running]:
                if (exit_code := _exit_code(pid)) is not None:
                    with suppress(OSError), running.pop(pid) as status:  # the parent may be gone
                        status.send((_ENDED, exit_code))
        if server not in ready:
            continue
        message, fds, *_ = socket.recv_fds(server, 1, 2)
        if not message:
            return
        for fd in fds:
            os.set_inheritable(fd, False)
        connection, status = Connection(fds[0]), Connection(fds[1])
        pid = _fork() if modules else _spawn(fds, of_caller)
        if not pid:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.pthread_sigmask(signal.SIG_SETMASK, of_caller)
            server.close()
            for other in (ended, wakeup):
                os.close(other)
            for of_another in running.values():
                of_another.close()
            _become_node(connection, status)
            return
        connection.close()
        running[pid] = status


def prepare(modules: Sequence[str]) -> None:
    """Import what the forks of this process need."""
    for module in modules:
        importlib.import_module(module)
    import torch

    from vsim.engine.machine import settle_vector_functions

    torch.compiler.disable(_fork)  # imports what optimizers do in their first step, which takes as long as torch itself
    settle_vector_functions()  # by one thread, and for all
    gc.collect()
    gc.freeze()  # so that a collection in a fork does not write to what all share


def _fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of threads: numpy's libraries end theirs before a fork
        return os.fork()


def _spawn(fds: list[int], blocked: set[Any]) -> int:
    command = _interpreter("_begin", *fds)
    for fd in fds:
        os.set_inheritable(fd, True)
    pid = os.posix_spawn(command[0], command, os.environ, setsigmask=blocked, setsigdef=[signal.SIGCHLD])
    for fd in fds:
        os.set_inheritable(fd, False)
    return pid


def _exit_code(pid: int) -> int | None:
    """Return how a process ended, None if it has not.

    It stays a zombie as long as the server lives: its number, by which all of its session are killed at the end of the
    run, is nobody else's until then. Before Python 3.13 that cannot be had on macOS.
    """
    if not hasattr(os, "waitid"):
        found, status = os.waitpid(pid, os.WNOHANG)
        return os.waitstatus_to_exitcode(status) if found else None
    end = os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    if end is None:
        return None
    return end.si_status if end.si_code == os.CLD_EXITED else -end.si_status


def _begin(connection: int, status: int) -> None:
    _become_node(Connection(connection), Connection(status))


def _become_node(connection: Connection, status: Connection) -> None:
    """Train a node in this process, once the parent knows it and has sent a setup."""
    os.setsid()
    os.set_inheritable(connection.fileno(), False)
    with status:
        status.send((_BEGUN, os.getpid()))
    child = importlib.import_module(_NODE)
    try:
        setup = pickle.loads(connection.recv_bytes())
    except EOFError:  # the parent is gone
        os._exit(1)
    child.main(setup, connection)
