"""The number of a run's processes, and this process's place among them under torchrun."""

from __future__ import annotations

import itertools
import os
import pickle
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from vsim.engine.machine import check_repeats, devices_of_nodes, pick_device, using_threads
from vsim.engine.memory import check_room
from vsim.processes.distributed import completing, open_group
from vsim.processes.options import ProcessOptions, backend_for, default_threads, num_cores
from vsim.runs.setup import WAYS_OUT, bytes_of_node
from vsim.runs.spec import RunSpec

# Least number of weights for which num_processes="auto" uses several processes on a CPU.
LARGE_MODEL = 200_000

# The store through which the ranks meet, and a counter of runs. A run's number prefixes its keys in the store, because
# torch.distributed gives all process groups one name: a second group would find the keys of the first.
_meeting: list[dist.Store] = []
_runs, _values = itertools.count(), itertools.count()
_LONGEST = timedelta(hours=24)  # that the first rank may take to decide something


def under_torchrun() -> bool:
    """Return whether torchrun, or another launcher that sets the same variables, started this process as a rank."""
    return all(name in os.environ for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"))


def world_rank() -> int:
    """Return this process's number among all ranks; 0 if it was not started as a rank."""
    return int(os.environ["RANK"]) if under_torchrun() else 0


def world_size() -> int:
    """Return the number of ranks on all machines."""
    return dist.get_world_size() if dist.is_initialized() else int(os.environ["WORLD_SIZE"])


def local_ranks() -> tuple[int, int]:
    """Return this process's number on its machine, and the number of ranks on that machine, as set by torchrun."""
    rank = os.environ.get("LOCAL_RANK", os.environ["RANK"])
    return int(rank), int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))


def from_first_rank(value: Any = None) -> Any:
    """Return the first rank's value on all ranks; every rank has to call this, in the same order.

    The value passes through the store where the ranks meet, so that no process group is needed.
    """
    key = f"vsim value {next(_values)}"
    store = _meeting_store()
    if world_rank() == 0:
        store.set(key, pickle.dumps(value).hex())
    else:
        store.wait([key], _LONGEST)
    return pickle.loads(bytes.fromhex(store.get(key).decode()))


def number_of_processes(spec: RunSpec, device: str | torch.device | None) -> int:
    """Return the number of processes of a run on all machines; "auto" gives 1 if a single process is better.

    Args:
        device: the device that the user chose for the run; None: any device.

    Raises:
        ValueError: torchrun has started another number of processes.
    """
    given = spec.num_processes
    if not under_torchrun() and given == "auto":
        first = first_device(spec, device)
        on_one_gpu = first.type == "cuda" and device is not None and spec.devices is None
        return 1 if on_one_gpu else auto_processes(spec, first)
    if not under_torchrun():
        return int(given or spec.num_nodes)
    ranks, wanted = world_size(), spec.num_nodes if given is None else given
    if wanted not in ("auto", ranks) and given is None:
        raise ValueError(
            f"num_nodes is {wanted}, but torchrun has started {ranks} processes, a node each: give num_nodes={ranks}, "
            f"a torchrun --nnodes and --nproc_per_node that make {wanted} together, or num_processes={ranks}, so that "
            "each process holds several nodes"
        )
    if wanted not in ("auto", ranks):
        raise ValueError(
            f"num_processes is {wanted}, but torchrun has started {ranks}: give num_processes={ranks} or 'auto'"
        )
    if given is not None and ranks > spec.num_nodes:
        raise ValueError(f"torchrun has started {ranks} processes for num_nodes={spec.num_nodes} nodes: start fewer")
    return ranks


def first_device(spec: RunSpec, device: str | torch.device | None) -> torch.device:
    """Return the device of the first or only process: the first of `devices`, or `device` if a run has no `devices`."""
    first = pick_device(device) if spec.devices is None else devices_of_nodes(spec.devices, None, 1)[0]
    if spec.deterministic:
        check_repeats(first)
    return first


def auto_processes(spec: RunSpec, device: torch.device) -> int:
    """Return the number of processes for num_processes="auto".

    Each GPU, or on the CPU each core, gets a process, but there are no more processes than nodes. On the CPU, only
    large models gain from several processes, which, unlike threads, need not wait for each other in every operation.
    """
    if device.type == "cuda":
        return min(spec.num_nodes, len(spec.devices or ()) or torch.cuda.device_count())
    weights = sum(p.numel() for p in spec.model.parameters() if p.requires_grad)
    return min(spec.num_nodes, num_cores()) if device.type == "cpu" and weights >= LARGE_MODEL else 1


def options_of(spec: RunSpec, device: str | torch.device | None, num_processes: int) -> ProcessOptions:
    """Return the options of the run's processes on this machine.

    Args:
        device: the run's device; None: a GPU for every process if there are enough GPUs, else the CPU.
    """
    here = local_ranks()[1] if under_torchrun() else num_processes
    devices = devices_of_nodes(spec.devices, device, here)
    for each in devices if spec.deterministic else ():
        check_repeats(each)
    threads = spec.threads_per_process or default_threads(here)
    options = ProcessOptions(here, devices, threads, spec.timeout_seconds or 600.0)
    if spec.num_processes is not None:
        nodes_on_device = options.most_on_a_device * -(-spec.num_nodes // num_processes)
        check_room(nodes_on_device, bytes_of_node(spec), devices[0], advice=WAYS_OUT)
    return options


@contextmanager
def joined_group(options: ProcessOptions) -> Iterator[torch.device]:
    """Make the default process group for a block, or use the existing group; yield the device of this rank."""
    device = options.devices[local_ranks()[0] % len(options.devices)]
    if device.type == "cuda":
        torch.cuda.set_device(device)
    made = not dist.is_initialized()
    if made:
        backend = backend_for(options.devices, options.num_processes)
        _init_process_group(backend, timedelta(seconds=options.timeout_seconds))
    try:
        with using_threads(options.threads):
            yield device
    finally:
        if made:
            dist.destroy_process_group()


def _meeting_store() -> dist.Store:
    if not _meeting:
        store, _, _ = next(rendezvous("env://"))
        _meeting.append(store)
    return _meeting[0]


def _init_process_group(backend: str, timeout: timedelta) -> None:
    store = dist.PrefixStore(f"vsim run {next(_runs)}", _meeting_store())
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    # Ranks with different backends, chosen on machines with different GPUs, would wait for each other forever.
    store.set(f"backend {rank}", backend)
    with completing(f"meeting the other ranks on rank {rank}"):
        store.wait([f"backend {other}" for other in range(size)], timeout)
    ranks_by = {store.get(f"backend {other}").decode(): other for other in range(size)}
    if len(ranks_by) > 1:
        chosen = ", ".join(f"rank {other} by {name}" for name, other in sorted(ranks_by.items()))
        raise ValueError(
            f"the ranks must communicate by one backend, got {chosen}; nccl needs a GPU for each rank of a machine: "
            "start as many ranks on each machine as it has GPUs, or give device='cpu'"
        )
    open_group(backend, store, rank, size, timeout)
