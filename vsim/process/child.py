"""The process of one node. `vsim.process.launch` starts it in a fresh interpreter, which calls `main`."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import traceback
import warnings
from contextlib import suppress
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TextIO

import cloudpickle
import torch
import torch.distributed as dist

from vsim.engine import first_calls
from vsim.process import settings
from vsim.process.collectives import CollectiveFailure, completing
from vsim.process.node import run_node
from vsim.records.report import StepReport
from vsim.training.config import RunConfig
from vsim.training.interrupt import Interrupt, Interrupted

# How long a node waits for the others' interpreters to start and to read the shipped data. The parent notices one that
# dies meanwhile, so that the limit may be generous.
_START_SECONDS = 600.0

_speaking = threading.Lock()  # one message at a time


def main(answer_fd: int) -> None:
    """Take the setup from standard input, train, and answer through the inherited pipe `answer_fd`.

    Standard input stays open as long as the parent lives. Without a setup from there this process ends by itself, later
    by the parent's reaper.
    """
    os.set_inheritable(answer_fd, False)
    answer = Connection(answer_fd, readable=False)
    try:
        setup = pickle.load(sys.stdin.buffer)
    except EOFError:
        os._exit(1)
    interrupt = Interrupt()
    _obey_parent(interrupt)
    sys.argv = setup["argv"]
    _forward_warnings(answer)
    try:
        _train(setup, answer, interrupt)
    except BaseException as error:
        with suppress(OSError):  # the parent is gone
            _say(answer, "lost" if _follows_from_a_loss(error) else "failed", (_pickled(error), traceback.format_exc()))
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)  # at once, so that the others notice: without waiting for threads, worker processes or peers


def _train(setup: dict[str, Any], answer: Connection, interrupt: Interrupt) -> None:
    rank, num_nodes, device = setup["rank"], setup["num_nodes"], torch.device(setup["device"])
    folder, patience = Path(setup["folder"]), timedelta(seconds=setup["timeout_seconds"])
    torch.set_num_threads(setup["threads"])
    settings.apply(setup["torch"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    first_calls.settle()  # before any code of the user's computes
    config = _load(folder / "config")
    # Nodes that start slowly are waited for first, so that timeout_seconds limits collectives alone.
    store = dist.FileStore(str(folder / "rendezvous"), num_nodes)
    store.set(f"started {rank}", "")
    with completing(f"meeting the other nodes on node {rank}"):
        store.wait([f"started {node}" for node in range(num_nodes)], timedelta(seconds=_START_SECONDS) + patience)
        dist.init_process_group(setup["backend"], store=store, rank=rank, world_size=num_nodes, timeout=patience)

    def send(report: StepReport) -> None:
        if rank == 0:
            _say(answer, "report", report)

    try:
        outcome = run_node(config, device, send, interrupt)
        _say(answer, "done", outcome if rank == 0 else None)
    except Interrupted:
        _say(answer, "interrupted", None)
    dist.destroy_process_group()


def _load(path: Path) -> RunConfig:
    with path.open("rb") as file:
        try:
            config: RunConfig = cloudpickle.load(file)
        except (ImportError, AttributeError) as error:
            raise type(error)(
                f"a node's process cannot load the model, data or strategy: {error}. What is defined in the main "
                "script or a notebook is shipped; everything else must be importable by its name from sys.path"
            ) from error
    return config


def _say(answer: Connection, kind: str, content: Any) -> None:
    # As bytes: multiprocessing's own pickler would pass tensors as handles, which die with this process.
    message = pickle.dumps((kind, content))
    with _speaking:
        answer.send_bytes(message)


def _forward_warnings(answer: Connection) -> None:
    """Let the parent issue this process's warnings: by its filters, and where its user looks."""
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
        known = next(c for c in category.__mro__ if c.__module__ == "builtins")  # the parent may not have other classes
        _say(answer, "warning", (str(message), known.__name__, filename, lineno))

    warnings.showwarning = show


def _obey_parent(interrupt: Interrupt) -> None:
    """Interrupt the run when the parent writes to standard input."""
    lifeline = os.dup(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)  # user code that reads standard input gets an empty one
    os.close(nothing)

    def listen() -> None:
        while os.read(lifeline, 1):
            interrupt.request()

    threading.Thread(target=listen, daemon=True).start()


def _follows_from_a_loss(error: BaseException | None) -> bool:
    """Whether an error comes from a collective that other nodes did not complete."""
    while error is not None and not isinstance(error, CollectiveFailure):
        error = error.__cause__ or error.__context__
    return error is not None


def _pickled(error: BaseException) -> bytes | None:
    try:
        dumped: bytes = cloudpickle.dumps(error)
    except Exception:
        return None
    return dumped
