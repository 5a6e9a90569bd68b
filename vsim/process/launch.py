"""Starting a process a node on this machine, listening to them, and leaving none behind."""

from __future__ import annotations

import builtins
import os
import pickle
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, fields
from functools import partial
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import cloudpickle
import torch

from vsim.checkpoint.folder import Saving
from vsim.engine.memory import check_room
from vsim.process import settings
from vsim.process.collectives import CollectiveFailure
from vsim.process.forkserver import ForkServer, Process
from vsim.process.node import Outcome, ProcessOptions, backend_for
from vsim.records.report import Reporter
from vsim.training.interrupt import Interrupt, Interrupted
from vsim.training.setup import plan_of
from vsim.training.spec import RunSpec

# How long a run outlives a failure: the other nodes notice it and end by themselves, with their own messages.
_GRACE_SECONDS = 2.0
# How long a node that is done may take to exit (a user's exit handlers).
_EXIT_SECONDS = 10.0
# The memory that an interpreter with torch takes for itself.
_LEAST_BYTES = 2**26
# How often processes are polled: a pipe does not close while worker processes of a DataLoader hold it too.
_POLL_SECONDS = 0.5

# What ends the nodes of a parent that was killed, even those within C code, which notice nothing themselves: a shell
# that reads their process groups until the parent's end of the pipe closes, then kills them and removes the folder, $0.
_REAPER = """
groups=
while read -r group; do groups="$groups -$group"; done
kill -9 $groups
rm -rf -- "$0" || { sleep 1; rm -rf -- "$0"; }
"""


class NodeFailure(RuntimeError):
    """A node's process ended before its run did.

    Attributes:
        rank: the node's number.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message, rank)
        self.rank = rank

    def __str__(self) -> str:
        return str(self.args[0])


@dataclass
class _Child:
    """One child process as its parent sees it."""

    rank: int
    process: Process
    interrupted: bool = False  # it has been told to stop after its step
    done: bool = False
    ended: bool = False  # no more messages will come
    failure: _Failure | None = None

    @property
    def failed(self) -> bool:
        return self.failure is not None or (self.ended and not self.done)


class _Failure(NamedTuple):
    """What a node said when it failed."""

    pickled: bytes | None  # the exception, if it can be pickled
    text: str  # its traceback
    lost: bool  # it follows from the failure of another node


def train_in_processes(config: RunSpec, options: ProcessOptions, report: Reporter, folder: Path) -> Outcome:
    """Train every node in a process of its own on this machine; return what the first has at the end.

    With a plan (`fit(participation=…)`) a node has a process while it takes part.

    The processes are forks of a fresh interpreter: the caller's main module does not run again in them, and its
    definitions (models, datasets, strategies) are shipped by value. Their warnings are issued here. However this call
    ends, the processes and their children are gone afterwards, also if this process is killed, and then `folder` with
    them.

    Args:
        config: the run.
        options: devices, threads and patience.
        report: gets the report of every step, of the first node that takes part.
        folder: temporary and of this run alone; its processes meet in it.

    Raises:
        TypeError: something in `config` cannot be shipped; it is named.
        Exception: what a node raised, caused by a `NodeFailure` with its rank and traceback.
        NodeFailure: a process was killed, or exited without a message.
        ForkServerFailure: the interpreter that starts the processes was killed, or cannot import vsim.
        Interrupted: after a Ctrl-C, when the nodes have completed their step. A second Ctrl-C ends them at once.
    """
    if os.name != "posix":
        raise RuntimeError(f"backend='process' runs on Linux and macOS; this is {sys.platform}")
    check_room(config.num_nodes, _LEAST_BYTES, torch.device("cpu"))
    _ship(config, folder / "config")
    plan, first = plan_of(config, None), config.first_step
    with ExitStack() as ending:
        reaper = subprocess.Popen(
            ["/bin/sh", "-c", _REAPER, str(folder)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        ending.callback(reaper.communicate)
        ending.callback(reaper.kill)
        server = ForkServer(_environment(options))
        ending.callback(server.end)
        _tell_reaper(reaper, server.process.pid)
        run = _Listener(config.saving, report, partial(_start, folder, config, options, reaper, server))
        ending.callback(run.end)
        with run.interrupt:
            nodes = range(config.num_nodes) if plan is None else plan.machines(first)
            run.start(nodes, nodes, first)
            return run.listen()


def _environment(options: ProcessOptions) -> dict[str, str]:
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    # The nodes of one machine talk over its loopback interface only.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    return environment


def _tell_reaper(reaper: subprocess.Popen[bytes], group: int) -> None:
    assert reaper.stdin is not None
    reaper.stdin.write(f"{group}\n".encode())
    reaper.stdin.flush()


def _ship(config: RunSpec, path: Path) -> None:
    try:
        with path.open("wb") as file:
            cloudpickle.dump(config, file)
    except OSError:
        raise
    except Exception as whole:
        for field in fields(config):
            try:
                cloudpickle.dumps(getattr(config, field.name))
            except Exception as error:
                raise TypeError(
                    f"backend='process' cannot ship {field.name} to the nodes' processes: {error}"
                ) from error
        raise TypeError(f"backend='process' cannot ship the run to the nodes' processes: {whole}") from whole


def _start(
    folder: Path,
    config: RunSpec,
    options: ProcessOptions,
    reaper: subprocess.Popen[bytes],
    server: ForkServer,
    node: int,
    segment: dict[str, Any],
) -> _Child:
    setup = {
        "argv": sys.argv,
        "folder": str(folder),
        "node": node,
        **segment,
        "device": str(options.devices[node % len(options.devices)]),
        "backend": backend_for(options.devices, config.num_nodes),
        "threads": options.threads,
        "torch": settings.current(),
        "timeout_seconds": options.timeout_seconds,
    }
    process = server.start()
    try:
        _tell_reaper(reaper, process.pid)  # before the setup, without which the process ends by itself
        process.tell(pickle.dumps(setup))
        return _Child(node, process)
    except BaseException:
        process.kill()
        raise


class _Listener:
    """The parent of K nodes: receives their messages, and ends them."""

    def __init__(self, saving: Saving | None, report: Reporter, begin: Callable[[int, dict[str, Any]], _Child]) -> None:
        self.saving = saving
        self.report = report
        self.begin = begin
        self.nodes: list[_Child] = []
        self.failures: list[_Child] = []  # in the order in which they were noticed
        self.outcome: Outcome | None = None
        self.last_step = 0
        self.warned: set[Any] = set()
        self.interrupt = Interrupt()

    def start(self, joining: Sequence[int], nodes: Sequence[int], step: int, copying: Sequence[int] = ()) -> None:
        """Start the processes of those who join the nodes that take part from a step on, copying a peer's state."""
        for node in joining:
            self.nodes.append(self.begin(node, {"nodes": nodes, "step": step, "copying": copying}))

    def listen(self) -> Outcome:
        """Pass the first node's reports on until all nodes are done, or a while after one has failed."""
        deadline: float | None = None
        while running := [node for node in self.nodes if not node.ended]:
            ready = wait([node.process.connection for node in running], _POLL_SECONDS)
            if self.interrupt.requested:
                self._tell_interrupt()
            for node in running:
                connection = node.process.connection
                if connection in ready:
                    self._receive(node)
                elif node.process.exit_code() is not None and not connection.poll():
                    node.ended = True
                if node.failed and node not in self.failures:
                    self.failures.append(node)
            if self.failures and deadline is None:
                deadline = time.monotonic() + _GRACE_SECONDS
            if deadline is not None and time.monotonic() > deadline and not ready:
                break
        if self.failures:
            self._raise()
        self._wait_for_exits()
        if self.interrupt.requested or self.outcome is None:  # Ctrl-C, here or in a node's process
            raise Interrupted(self.last_step, self.saving)
        return self.outcome

    def end(self) -> None:
        """Leave no process behind, whatever happened."""
        for node in self.nodes:
            node.process.kill()
        for node in self.nodes:  # all are killed already: another Ctrl-C may end this
            node.process.close()

    def _tell_interrupt(self) -> None:
        """Stop the nodes after their step. Once, as one that reads nothing may not keep this process waiting."""
        for node in [node for node in self.nodes if not (node.ended or node.interrupted)]:
            node.interrupted = True
            node.process.tell(b"!")

    def _receive(self, node: _Child) -> None:
        try:
            kind, content = pickle.loads(node.process.connection.recv_bytes())
        except (EOFError, OSError):
            node.ended = True
            return
        if kind == "report":
            self.last_step = int(content.row["step"])
            self.report(content)
        elif kind == "warning":
            self._warn(*content)
        elif kind == "joining":
            copying, nodes, step = content
            self.start(copying[1:], nodes, step, copying)
        elif kind == "interrupted":
            node.done = node.ended = True
        elif kind == "done":
            node.done = node.ended = True
            self.outcome = content or self.outcome  # of the first of those that are there at the end
        else:
            pickled, text = content
            node.failure = _Failure(pickled, text, lost=kind == "lost")

    def _warn(self, message: str, category: str, filename: str, lineno: int) -> None:
        """Issue a node's warning, once for all nodes."""
        if (message, category, filename, lineno) not in self.warned:
            self.warned.add((message, category, filename, lineno))
            warnings.warn_explicit(message, getattr(builtins, category), filename, lineno)

    def _wait_for_exits(self) -> None:
        deadline = time.monotonic() + _EXIT_SECONDS
        for node in self.nodes:
            node.process.exit_code(max(0.0, deadline - time.monotonic()))

    def _raise(self) -> NoReturn:
        """Raise the first failure that does not follow from another's, if there is one."""
        causes = [node for node in self.failures if node.failure is None or not node.failure.lost]
        node = (causes or self.failures)[0]
        where = f"after step {self.last_step} of the run"
        if node.failure is None:
            raise NodeFailure(f"node {node.rank}'s process {_how_it_ended(node.process)}, {where}", node.rank)
        failure = NodeFailure(f"node {node.rank} failed {where}:\n\n{node.failure.text}", node.rank)
        error = None
        if node.failure.pickled is not None:
            with suppress(Exception):
                error = cloudpickle.loads(node.failure.pickled)
        if not isinstance(error, Exception):  # a child's SystemExit or KeyboardInterrupt must not be raised here
            raise failure
        late = [n.rank for n in self.nodes if not n.ended and not n.failed]
        if isinstance(error, CollectiveFailure) and late:
            error = CollectiveFailure(f"{error}; nodes {late} did not get there")
        raise error from failure


def _how_it_ended(process: Process) -> str:
    status = process.exit_code(_EXIT_SECONDS)
    if status is None:
        return "closed its connection"
    if status >= 0:
        return f"exited with {status}"
    name = next((f" ({s.name})" for s in signal.Signals if s == -status), "")
    hint = ": by hand, or for lack of memory" if -status == signal.SIGKILL else ""
    return f"was ended by signal {-status}{name}{hint}"
