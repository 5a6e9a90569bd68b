"""What holds for all tests: one thread, no figure windows, no deadlines."""

from __future__ import annotations

import os
import signal
import sys
import uuid
from collections.abc import Callable, Iterator
from typing import Any

os.environ.setdefault("MPLBACKEND", "Agg")
if "VSIM_DEVICE" not in os.environ:  # any_device.py is for GPUs; all other tests are about the CPU's bits
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
os.environ.pop("COLUMNS", None)  # pytest-xdist's processes inherit one, and tables would fit into it
os.environ["VSIM_TEST_SESSION"] = uuid.uuid4().hex  # tells the processes that this one starts from all others
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:  # as under nohup, or in the background of a script
    signal.signal(signal.SIGINT, signal.default_int_handler)

import hypothesis
import pytest
import torch
from standing_ranks import Ranks

from vsim.processes.launch import PRELOAD

PRELOAD.extend(["pytest", "hypothesis", "cut_runs"])  # modules of tests import them in the nodes' processes

# They make a device for the whole process, so that test_device.py gives them one of their own.
collect_ignore = ["pretend_device.py", "on_device.py"]

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("vsim", deadline=None)
hypothesis.settings.load_profile("vsim")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Small models gain nothing from a second thread, and wait for each other's when tests share the machine.
    torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _no_figures_of_other_tests() -> Iterator[None]:
    yield
    if "matplotlib.pyplot" in sys.modules:  # which warns of more than twenty
        sys.modules["matplotlib.pyplot"].close("all")


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """From K to that many ranks, which stay; at most six."""
    started: dict[int, Ranks] = {}

    def of(num_nodes: int) -> Ranks:
        if num_nodes not in started:
            while sum(started) + num_nodes > 6 and started:
                started.pop(next(iter(started))).end()
            started[num_nodes] = Ranks(num_nodes)
        return started[num_nodes]

    yield of
    for ranks in started.values():
        ranks.end()


@pytest.fixture
def processes_stay(ranks_of: Callable[[int], Ranks], monkeypatch: pytest.MonkeyPatch) -> None:
    """What fits in processes takes those that stay, without the start of new ones."""

    def train(spec: Any, options: Any, report: Any) -> Any:
        return ranks_of(options.num_processes).train(spec, options, report)

    monkeypatch.setattr("vsim.trainer.train_in_processes", train)
