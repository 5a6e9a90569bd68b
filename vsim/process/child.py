"""The process of one node. `vsim.process.forkserver` starts it, and calls `main`."""

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

from vsim.engine.machine import settle_vector_functions
from vsim.process import settings
from vsim.process.collectives import CollectiveFailure
from vsim.process.node import run_node
from vsim.process.segments import Meeting, joined
from vsim.records.report import StepReport
from vsim.training.interrupt import Interrupt, Interrupted
from vsim.training.spec import RunSpec

_speaking = threading.Lock()  # one message at a time


def main(setup: dict[str, Any], parent: Connection) -> None:
    """Train as the setup says, and answer to the parent.

    The connection stays open as long as the parent lives; what comes after its end is the parent's reaper.
    """
    interrupt = Interrupt()
    _obey(parent, interrupt)
    sys.argv = setup["argv"]
    _forward_warnings(parent)
    try:
        _train(setup, parent, interrupt)
    except BaseException as error:
        with suppress(OSError):  # the parent is gone
            _say(parent, "lost" if _follows_from_a_loss(error) else "failed", (_pickled(error), traceback.format_exc()))
        for stream in (sys.stdout, sys.stderr):
            with suppress(Exception):
                stream.flush()
        os._exit(1)  # at once, so that the others notice: without waiting for threads, worker processes or peers


def _train(setup: dict[str, Any], parent: Connection, interrupt: Interrupt) -> None:
    folder, device = Path(setup["folder"]), torch.device(setup["device"])
    torch.set_num_threads(setup["threads"])
    settings.apply(setup["torch"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    settle_vector_functions()  # before any code of the user's computes
    config = _load(folder / "config")
    store, patience = dist.FileStore(str(folder / "rendezvous")), timedelta(seconds=setup["timeout_seconds"])
    nodes, step, copying = setup["nodes"], setup["step"], setup["copying"]

    def send(report: StepReport) -> None:
        if dist.get_rank() == 0:
            _say(parent, "report", report)

    meeting = Meeting(store, setup["backend"], setup["node"], patience, lambda *those: _say(parent, "joining", those))
    minibatch_size = None
    if copying:
        config, minibatch_size = joined(config, meeting, copying, step)
    meeting.meet(nodes, f"step {step}")
    try:
        outcome = run_node(config, device, send, interrupt, meeting, minibatch_size, joins=bool(copying))
        _say(parent, "done", None if outcome is None or dist.get_rank() else outcome)
    except Interrupted:
        _say(parent, "interrupted", None)
    dist.destroy_process_group()


def _load(path: Path) -> RunSpec:
    with path.open("rb") as file:
        try:
            config: RunSpec = cloudpickle.load(file)
        except (ImportError, AttributeError) as error:
            raise type(error)(
                f"a node's process cannot load the model, data or strategy: {error}. What is defined in the main "
                "script or a notebook is shipped; everything else must be importable by its name from sys.path"
            ) from error
    return config


def _say(parent: Connection, kind: str, content: Any) -> None:
    # As bytes: multiprocessing's own pickler would pass tensors as handles, which die with this process.
    message = pickle.dumps((kind, content))
    with _speaking:
        parent.send_bytes(message)


def _forward_warnings(parent: Connection) -> None:
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
        _say(parent, "warning", (str(message), known.__name__, filename, lineno))

    warnings.showwarning = show


def _obey(parent: Connection, interrupt: Interrupt) -> None:
    """Interrupt the run when the parent says so."""

    def listen() -> None:
        with suppress(EOFError, OSError):
            while parent.recv_bytes():
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
