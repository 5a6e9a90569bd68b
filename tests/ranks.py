"""Processes that stay: many runs with a process a node, without the start of each."""

from __future__ import annotations

import pickle
import tempfile
import traceback
from datetime import timedelta
from multiprocessing.connection import Connection

import cloudpickle
import forked
import torch
import torch.distributed as dist

from vsim.process import ProcessOptions
from vsim.process.node import Outcome, run_node
from vsim.records.progress import Reporter, StepReport
from vsim.training.spec import RunSpec


class Ranks:
    """K processes that train one run after another: what `train_in_processes` does, without the start of each."""

    def __init__(self, num_nodes: int) -> None:
        self.folder = tempfile.TemporaryDirectory(prefix="vsim-test-")
        context = forked.context()
        self.connections: list[Connection] = []
        self.processes = []
        for rank in range(num_nodes):
            here, there = context.Pipe()
            arguments = (rank, num_nodes, f"{self.folder.name}/store", there)
            process = context.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            there.close()
            self.connections.append(here)
            self.processes.append(process)

    def train(self, spec: RunSpec, options: ProcessOptions, report: Reporter) -> Outcome:
        assert options.threads == 1
        shipped = cloudpickle.dumps(spec)
        for connection in self.connections:
            connection.send_bytes(shipped)
        answers = [pickle.loads(connection.recv_bytes()) for connection in self.connections]
        for error, _, _ in answers:
            assert not error, error
        _, reports, outcome = answers[0]
        for each in reports:
            report(each)
        return outcome

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
        reports: list[StepReport] = []
        outcome = error = None
        try:
            outcome = run_node(cloudpickle.loads(connection.recv_bytes()), torch.device("cpu"), reports.append)
        except EOFError:
            return
        except Exception:
            error = traceback.format_exc()
        connection.send_bytes(pickle.dumps((error, reports, outcome)))
