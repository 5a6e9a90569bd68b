"""Starting a process a node on this machine, listening to them, and leaving none behind."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import IO, Any, NoReturn

import cloudpickle
import torch

from vsim.assembly import RunConfig
from vsim.distributed.node import Outcome
from vsim.loop import Reporter

# After the first failure the others' own words are waited for so long: a node that only lost its peers may be heard
# before the one that failed.
_GRACE_SECONDS = 2.0


class NodeFailure(RuntimeError):
    """A node's process ended before its run did.

    Attributes:
        rank: the node.
    """

    def __init__(self, message: str, rank: int) -> None:
        super().__init__(message)
        self.rank = rank


@dataclass(frozen=True)
class ProcessOptions:
    """How processes are started.

    Attributes:
        devices: node k computes on devices[k mod len(devices)].
        threads: CPU threads of every process.
        timeout_seconds: how long a collective waits for the other nodes.
    """

    devices: Sequence[torch.device]
    threads: int
    timeout_seconds: float


@dataclass
class _Node:
    """One child process as its parent sees it."""

    rank: int
    process: subprocess.Popen[bytes]
    messages: Connection
    outcome: Outcome | None = None
    failure: tuple[bytes | None, str] | None = None
    step: int = 0
    closed: bool = False


def train_in_processes(config: RunConfig, options: ProcessOptions, report: Reporter) -> Outcome:
    """Train every node in a process of its own on this machine; return what node 0 has at the end.

    The processes are fresh interpreters: nothing of the caller's main module runs again in them, and what it defines
    (models, datasets, strategies) is shipped by value.

    Raises:
        TypeError: something in `config` cannot be shipped; it is named.
        Exception: what a node raised, caused by a `NodeFailure` with its rank and traceback.
        NodeFailure: a process was killed, or ended without a word.
    """
    shipped = _ship(config)
    nodes: list[_Node] = []
    with tempfile.TemporaryDirectory(prefix="vsim-") as folder:
        try:
            for rank in range(config.num_nodes):
                nodes.append(_start(rank, Path(folder) / "rendezvous", shipped, config, options))
            return _listen(nodes, report)
        finally:
            _end(nodes)


def _ship(config: RunConfig) -> bytes:
    for name in ("model", "train_dataset", "val_dataset", "loss_fn", "strategy", "dataloader_kwargs"):
        try:
            cloudpickle.dumps(getattr(config, name))
        except Exception as error:
            raise TypeError(f"backend='process' cannot ship {name} to the nodes' processes: {error}") from error
    return cloudpickle.dumps(config)


def _start(rank: int, rendezvous: Path, shipped: bytes, config: RunConfig, options: ProcessOptions) -> _Node:
    receive, send = Pipe(duplex=False)
    device = options.devices[rank % len(options.devices)]
    environment = {**os.environ, "OMP_NUM_THREADS": str(options.threads)}
    # The nodes of one machine talk over its loopback interface only.
    environment.setdefault("GLOO_SOCKET_IFNAME", "lo0" if sys.platform == "darwin" else "lo")
    process = subprocess.Popen(
        [sys.executable, "-m", "vsim.distributed.child", str(send.fileno())],
        stdin=subprocess.PIPE,
        pass_fds=[send.fileno()],
        env={**environment, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        start_new_session=True,  # a Ctrl-C reaches the parent, which then ends its children
    )
    send.close()
    assert process.stdin is not None
    setup = {
        "config": shipped,
        "rank": rank,
        "num_nodes": config.num_nodes,
        "rendezvous": str(rendezvous),
        "device": str(device),
        "threads": options.threads,
        "timeout_seconds": options.timeout_seconds,
    }
    with suppress(BrokenPipeError):  # a child that has died already is heard of through its silence
        pickle.dump(setup, process.stdin)
        process.stdin.flush()
    return _Node(rank, process, receive)


def _listen(nodes: list[_Node], report: Reporter) -> Outcome:
    """Pass node 0's reports on until all nodes are done, or one has failed."""
    deadline: float | None = None
    while any(not node.closed for node in nodes):
        patience = None if deadline is None else max(0.0, deadline - time.monotonic())
        ready = wait([node.messages for node in nodes if not node.closed], patience)
        if not ready and deadline is not None:
            break
        for node in nodes:
            if node.messages in ready:
                _hear(node, report)
        if deadline is None and any(_failed(node) for node in nodes):
            deadline = time.monotonic() + _GRACE_SECONDS
    failed = [node for node in nodes if _failed(node)]
    if failed:
        _raise(failed, nodes[0].step)
    assert nodes[0].outcome is not None
    return nodes[0].outcome


def _hear(node: _Node, report: Reporter) -> None:
    try:
        kind, content = pickle.loads(node.messages.recv_bytes())
    except (EOFError, ConnectionResetError):
        node.closed = True
        return
    if kind == "report":
        node.step = int(content.row["step"])
        report(content)
    elif kind == "done":
        node.outcome = content
    else:
        node.failure = content


def _failed(node: _Node) -> bool:
    return node.failure is not None or (node.closed and node.outcome is None)


def _raise(failed: list[_Node], last_step: int) -> NoReturn:
    """Raise the failure that the others follow from: one of a node's own, or else a death, or else a lost peer."""
    own = [n for n in failed if n.failure is not None and "CollectiveFailure" not in n.failure[1].splitlines()[-1]]
    dead = [n for n in failed if n.failure is None]
    node = (own or dead or failed)[0]
    if node.failure is None:
        status = node.process.wait()
        how = (
            f"was ended by signal {-status} ({signal.Signals(-status).name})" if status < 0 else f"exited with {status}"
        )
        raise NodeFailure(f"node {node.rank}'s process {how}, after step {last_step} of the run", node.rank)
    pickled, text = node.failure
    failure = NodeFailure(f"node {node.rank} failed after step {last_step} of the run:\n\n{text}", node.rank)
    error = None
    if pickled is not None:
        with suppress(Exception):
            error = cloudpickle.loads(pickled)
    if not isinstance(error, BaseException):
        raise failure
    raise error from failure


def _end(nodes: list[_Node]) -> None:
    for node in nodes:
        with suppress(ProcessLookupError):
            os.killpg(node.process.pid, signal.SIGKILL)
    for node in nodes:
        node.process.wait()
        node.messages.close()
        if node.process.stdin is not None:
            _close(node.process.stdin)


def _close(stream: IO[Any]) -> None:
    with suppress(BrokenPipeError):
        stream.close()
