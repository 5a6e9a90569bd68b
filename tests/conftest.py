"""What holds for all tests: one thread, no figure windows, no deadlines."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any

os.environ.setdefault("MPLBACKEND", "Agg")

import hypothesis
import pytest
import torch
from ranks import Ranks

from vsim.process.forkserver import ForkServer

# They make a device for the whole process, so that test_device.py gives them one of their own.
collect_ignore = ["pretend.py", "on_device.py"]

# How long an example takes is the machine's affair.
hypothesis.settings.register_profile("vsim", deadline=None)
hypothesis.settings.load_profile("vsim")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Small models gain nothing from a second thread, and wait for each other's when tests share the machine.
    torch.set_num_threads(1)


class _Kept(ForkServer):
    """A fork server that outlives the run, and so imports torch once for many."""

    def end(self) -> None: ...


@pytest.fixture(scope="session")
def _fork_servers() -> Iterator[Callable[[Mapping[str, str]], ForkServer]]:
    """From an environment to a server, the same as long as all that its processes take from it stays the same."""
    kept: dict[Any, ForkServer] = {}

    def of(environment: Mapping[str, str]) -> ForkServer:
        lasting = {name: value for name, value in environment.items() if name != "PYTEST_CURRENT_TEST"}
        key = tuple(sorted(lasting.items())), tuple(sys.path), os.getcwd()
        if key not in kept:
            while len(kept) > 1:
                ForkServer.end(kept.pop(next(iter(kept))))
            kept[key] = _Kept(environment, ["vsim.process.child", "pytest", "hypothesis"])  # as modules of tests do
        return kept[key]

    yield of
    for server in kept.values():
        ForkServer.end(server)


@pytest.fixture(autouse=True)
def _keep_fork_servers(
    request: pytest.FixtureRequest,
    monkeypatch: pytest.MonkeyPatch,
    _fork_servers: Callable[[Mapping[str, str]], ForkServer],
) -> None:
    """Fork the processes of nodes from a server that is kept, but in tests that start them as users do."""
    if "starts_processes" not in request.keywords:
        monkeypatch.setattr("vsim.process.launch.ForkServer", _fork_servers)


@pytest.fixture(scope="session")
def ranks_of() -> Iterator[Callable[[int], Ranks]]:
    """From K to that many ranks, the same as long as the same K is asked for."""
    started: dict[int, Ranks] = {}

    def of(num_nodes: int) -> Ranks:
        if num_nodes not in started:
            while started:
                started.popitem()[1].end()
            started[num_nodes] = Ranks(num_nodes)
        return started[num_nodes]

    yield of
    for ranks in started.values():
        ranks.end()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest, or one worker would wait for it at the end."""
    items.sort(key=lambda item: "thirty_random_moments" not in item.name)
