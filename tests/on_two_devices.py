"""A rank of runs on a pretended device of its own; test_device.py starts two of them.

python on_two_devices.py RANK FOLDER: it leaves the numbers of the devices that its tensors were on in FOLDER/RANK.txt,
and fails if a run does not have the weights of the simulator's on the CPU.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import pretend
import torch
import torch.distributed as dist
from separate import images, small_cnn
from torch import Tensor

from vsim import Trainer
from vsim.process import run_ranges
from vsim.strategy import FedAvgStrategy, SimpleReduceStrategy, SPARTAStrategy, Strategy

STRATEGIES: list[Strategy] = [
    SimpleReduceStrategy(inner_optim="sgd", lr=1e-2),
    SPARTAStrategy(p_sparta=0.3, async_delay=1, inner_optim="sgd", lr=1e-2),
    FedAvgStrategy(H=2, island_size=2, inner_optim="sgd", lr=1e-2),
]


def trainer() -> Trainer:
    """Of a CNN with BatchNorm."""
    return Trainer(small_cnn(dropout=0.0), images(), images(13, seed=9))


def options(strategy: Strategy) -> dict[str, Any]:
    counts = {"num_nodes": 5, "max_steps": 6, "batch_size": 4, "val_interval": 3, "correlation_interval": 2}
    return {"strategy": strategy, "progress": False, **counts}


def main(rank: int, folder: Path) -> None:
    places: set[int] = set()
    make = pretend._on_device

    def noting(t: Tensor, index: int) -> Tensor:
        places.add(index)
        return make(t, index)

    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), 2)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
    in_two = {"backend": "process", "num_processes": 2, "devices": ["cpu"]}
    expected = [trainer().fit(**options(strategy)) for strategy in STRATEGIES]
    with pretend.accelerator(), mock.patch.object(pretend, "_on_device", noting):
        device = torch.device("pretend", rank)
        for strategy, model in zip(STRATEGIES, expected, strict=True):
            spec = trainer().spec(**options(strategy), **in_two)
            (outcome,) = run_ranges(spec, device, lambda *_: None)
            assert outcome is not None
            weights = torch.cat([p.detach().flatten() for p in model.parameters()])
            torch.testing.assert_close(outcome.weights, weights, rtol=1e-3, atol=1e-4)
    (folder / f"{rank}.txt").write_text(str(sorted(places)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
