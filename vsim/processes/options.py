"""The number of a run's processes, their devices, threads and timeout."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class ProcessOptions:
    """Options of a run's processes.

    Attributes:
        num_processes: the number of processes on this machine.
        devices: process k of this machine computes on devices[k mod len(devices)].
        threads: CPU threads of every process.
        timeout_seconds: how long a collective waits for other processes.
    """

    num_processes: int
    devices: Sequence[torch.device]
    threads: int
    timeout_seconds: float

    @property
    def most_on_a_device(self) -> int:
        """The largest number of processes of this machine that share one device's memory."""
        places = [self.devices[rank % len(self.devices)] for rank in range(self.num_processes)]
        return max(Counter(str(place) if place.type == "cuda" else place.type for place in places).values())


def num_cores() -> int:
    """Return the number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def default_threads(num_processes: int) -> int:
    """Return the number of CPU threads of a process: this machine's cores divided by its processes, at least 1."""
    return max(1, num_cores() // num_processes)


def backend_for(devices: Sequence[torch.device], num_processes: int) -> str:
    """Return the backend of torch.distributed: "nccl" if each process here has its own GPU, else "gloo"."""
    own_gpus = {device for device in devices[:num_processes] if device.type == "cuda"}
    return "nccl" if len(own_gpus) == num_processes else "gloo"
