"""Processes that stay: many runs in processes, without the start of each."""

from __future__ import annotations

import pickle
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from typing import Any

import cloudpickle
import forked_processes
import torch
import torch.distributed as dist

from vsim.processes import ProcessOptions, run_node, run_ranges
from vsim.runs.spec import RunSpec


class Ranks:
    """Processes that train one run after another: what `train_in_processes` does, without the start of each."""

    def __init__(self, number: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="vsim-test-")
        context = forked_processes.context()
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(number):
            here, there = context.Pipe()
            arguments = (rank, number, f"{self.folder.name}/store", there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def train(self, spec: RunSpec, options: ProcessOptions, report: Callable[[int, Any], None]) -> None:
        assert (options.num_processes, options.threads) == (len(self.processes), 1)
        shipped = cloudpickle.dumps(spec)
        for connection in self.connections:
            connection.send_bytes(shipped)
        answers = [pickle.loads(connection.recv_bytes()) for connection in self.connections]
        for error, _ in answers:
            assert not error, error
        for number, message in answers[0][1]:
            report(number, message)

    def end(self) -> None:
        for process in self.processes:
            process.kill()
            process.join()
            process.close()
        for connection in self.connections:
            connection.close()
        self.folder.cleanup()


def _serve(rank: int, num_nodes: int, store: str, connection: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        store=dist.FileStore(store, num_nodes),
        rank=rank,
        world_size=num_nodes,
        timeout=timedelta(seconds=60),
    )
    while True:
        messages: list[tuple[int, Any]] = []
        error = None
        try:
            spec = cloudpickle.loads(connection.recv_bytes())
            if spec.num_processes is None:
                run_node(spec, torch.device("cpu"), messages.extend)
            else:
                run_ranges(spec, torch.device("cpu"), messages.extend)
        except EOFError:
            return
        except Exception:
            error = traceback.format_exc()
        connection.send_bytes(pickle.dumps((error, messages)))
