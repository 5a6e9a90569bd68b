"""A network that is real but for its cables: namespaces around a switch, on links whose rate the kernel limits."""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest

CABLE = "cable"  # the interface of every node; at the switch: cable0, cable1, …


def address(node: int) -> str:
    return f"10.213.7.{node + 1}"


@contextmanager
def linked(num_nodes: int) -> Iterator[list[str]]:
    """Namespaces of `num_nodes` nodes, each with a cable to one switch; a test skips where there are none to be had."""
    if os.geteuid() != 0 or shutil.which("ip") is None or shutil.which("tc") is None:
        pytest.skip("network namespaces need root, and ip and tc of iproute2")
    network = f"vsim-{uuid.uuid4().hex[:8]}"
    switch, nodes = f"{network}-switch", [f"{network}-{node}" for node in range(num_nodes)]
    try:
        for name in (switch, *nodes):
            if subprocess.run(["ip", "netns", "add", name], check=False).returncode:
                pytest.skip("this machine makes no network namespaces")
        if subprocess.run(
            ["ip", "-n", switch, "link", "add", "switch", "up", "type", "bridge"], check=False
        ).returncode:
            pytest.skip("this machine's kernel has no bridge")
        for node, name in enumerate(nodes):
            _do(f"ip -n {name} link add {CABLE} type veth peer name {CABLE}{node} netns {switch}")
            _do(f"ip -n {switch} link set {CABLE}{node} master switch up")
            _do(f"ip -n {name} address add {address(node)}/24 dev {CABLE}")
            _do(f"ip -n {name} link set {CABLE} up")
            _do(f"ip -n {name} link set lo up")
        yield nodes
    finally:
        for name in (switch, *nodes):
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def shape(nodes: Sequence[str], megabits: float | None) -> None:
    """Limit every cable to this rate, in Mbit/s, in either direction; None lifts the limit.

    The kernel hands on segments of at most 1 ms at once, as to a network card that takes them apart, which costs less
    than frame by frame; the limit is kept within 1.5 ms.
    """
    switch = f"{nodes[0].rpartition('-')[0]}-switch"
    for node, name in enumerate(nodes):
        segments = 16 if megabits is None else max(1, int(megabits * 125 / 1514))
        _do(f"ip -n {name} link set {CABLE} gso_max_segs {segments}")
        for place, interface in ((name, CABLE), (switch, f"{CABLE}{node}")):
            queue = ["tc", "-n", place, "qdisc", "{}", "dev", interface, "root"]
            subprocess.run([part.format("del") for part in queue], stderr=subprocess.DEVNULL, check=False)
            if megabits is not None:
                limit = f"tbf rate {megabits}mbit burst {max(3000, round(megabits * 190))} limit 10mb"
                subprocess.run([*(part.format("add") for part in queue), *limit.split()], check=True)


def _do(command: str) -> None:
    subprocess.run(command.split(), check=True)
