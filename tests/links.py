"""A network that is real but for its cables: namespaces around a switch, on links whose rate the kernel limits."""

from __future__ import annotations

import ctypes
import fcntl
import heapq
import itertools
import os
import random
import select
import shutil
import struct
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

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


@contextmanager
def relayed(num_nodes: int, megabits: float, latency: float, jitter: float = 0.0) -> Iterator[list[str]]:
    """Namespaces of `num_nodes` nodes, whose packets a process hands on: at a rate in either direction of a node's
    cable, in Mbit/s, and after a latency and up to `jitter` more, in seconds. Not every kernel can delay packets."""
    if os.geteuid() != 0 or shutil.which("ip") is None or not os.path.exists("/dev/net/tun"):
        pytest.skip("namespaces whose packets are delayed need root, ip of iproute2, and /dev/net/tun")
    network = f"vsim-{uuid.uuid4().hex[:8]}"
    nodes = [f"{network}-{node}" for node in range(num_nodes)]
    relay = None
    try:
        for name in nodes:
            if subprocess.run(["ip", "netns", "add", name], check=False).returncode:
                pytest.skip("this machine makes no network namespaces")
        call = [sys.executable, __file__, f"{megabits}", f"{latency}", f"{jitter}", *nodes]
        relay = subprocess.Popen(call, stdout=subprocess.PIPE)
        assert relay.stdout is not None and relay.stdout.readline()  # it has the cables
        for node, name in enumerate(nodes):
            _do(f"ip -n {name} address add {address(node)}/24 dev {CABLE}")
            _do(f"ip -n {name} link set {CABLE} mtu {RELAYED_MTU} up")
            _do(f"ip -n {name} link set lo up")
        yield nodes
    finally:
        if relay is not None:
            relay.kill()
            relay.communicate()
        for name in nodes:
            subprocess.run(["ip", "netns", "delete", name], stderr=subprocess.DEVNULL, check=False)


def under_torchrun(nodes: Sequence[str], arguments: Sequence[str], folder: Path, seconds: float = 240) -> str:
    """Run `python -m ARGUMENTS` with a rank in each namespace; return what the first prints, or assert that all end."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": CABLE, "TP_SOCKET_IFNAME": CABLE}
    agent = [sys.executable, "-m", "torch.distributed.run", f"--nnodes={len(nodes)}", "--nproc_per_node=1"]
    agent += [f"--master_addr={address(0)}", "--master_port=29511"]
    options: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": folder}
    ranks = [
        subprocess.Popen(
            ["ip", "netns", "exec", name, *agent, f"--node_rank={rank}", "-m", *arguments], env=environment, **options
        )
        for rank, name in enumerate(nodes)
    ]
    try:
        said = [rank.communicate(timeout=seconds) for rank in ranks]
        assert not [rank.returncode for rank in ranks if rank.returncode], said
        return str(said[0][0])
    finally:
        for rank in ranks:
            rank.kill()


RELAYED_MTU = 9000  # bytes of a packet, few of which a process can hand on at a high rate


def relay(megabits: float, latency: float, jitter: float, nodes: Sequence[str]) -> None:
    """Hand on packets between the cables of these namespaces, until killed."""
    libc, cables = ctypes.CDLL(None, use_errno=True), []
    for name in nodes:
        with open(f"/var/run/netns/{name}") as namespace:
            assert libc.setns(namespace.fileno(), 0) == 0, os.strerror(ctypes.get_errno())
        cables.append(os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK))
        fcntl.ioctl(
            cables[-1], 0x400454CA, struct.pack("16sH", CABLE.encode(), 0x1001)
        )  # TUNSETIFF: IFF_TUN, IFF_NO_PI
    print("ready", flush=True)
    random_seconds, seconds_a_byte = random.Random(0), 8 / (megabits * 1e6)
    busy = [[0.0, 0.0] for _ in nodes]  # until when every cable is, out and in
    arrived = [[0.0] * len(nodes) for _ in nodes]  # when the last packet of a pair did, as packets keep their order
    coming: list[tuple[float, int, int, bytes]] = []
    for number in itertools.count():
        wait = max(0.0, coming[0][0] - time.monotonic()) if coming else None
        for cable in select.select(cables, [], [], wait)[0]:
            source, packet = cables.index(cable), os.read(cable, 65536)
            to = packet[19] - 1 if packet[0] >> 4 == 4 else -1  # the last byte of the address in an IPv4 packet
            if not 0 <= to < len(nodes):
                continue
            now, long = time.monotonic(), len(packet) * seconds_a_byte
            busy[source][0] = max(now, busy[source][0]) + long
            there = busy[source][0] + latency + jitter * random_seconds.random()
            # Cut through: an idle cable into a node delays no packet, a busy one hands on one after the other.
            busy[to][1] = arrived[source][to] = max(there, arrived[source][to], busy[to][1] + long)
            heapq.heappush(coming, (busy[to][1], number, to, packet))
        while coming and coming[0][0] <= time.monotonic():
            _, _, to, packet = heapq.heappop(coming)
            with suppress(BlockingIOError, OSError):
                os.write(cables[to], packet)


if __name__ == "__main__":
    relay(*map(float, sys.argv[1:4]), sys.argv[4:])
