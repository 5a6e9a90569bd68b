"""Which devices a run computes on."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pick_device(device: str | torch.device | None) -> torch.device:
    """Return the device asked for, or the best there is: cuda, else mps, else cpu.

    Raises:
        ValueError: the name is unknown, or this machine has no such device.
    """
    available = {
        "cuda": torch.cuda.device_count() if torch.cuda.is_available() else 0,
        "mps": int(torch.backends.mps.is_available()),
        "cpu": 1,
    }
    here = [name for name, count in available.items() if count]
    if device is None or device == "":  # "" is what command lines of scripts for EXO Gym have as their default
        return torch.device(here[0])
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(f"unknown device {device!r}; this machine has {', '.join(here)}") from error
    if (chosen.index or 0) >= available.get(chosen.type, 0):
        raise ValueError(f"device {str(device)!r} is not available; this machine has {', '.join(here)}")
    return chosen


def devices_of_nodes(
    devices: Sequence[str | torch.device] | None, device: str | torch.device | None, nodes_here: int
) -> list[torch.device]:
    """Return the devices that the nodes' processes take in turn."""
    if devices is not None:
        if isinstance(devices, str) or not len(devices):
            raise TypeError(f"devices must be a list of devices with at least one, got {devices!r}")
        return [pick_device(d) for d in devices]
    if device is not None:
        return [pick_device(device)]
    gpus = torch.cuda.device_count()
    return [torch.device("cuda", i) for i in range(nodes_here)] if gpus >= nodes_here else [torch.device("cpu")]
