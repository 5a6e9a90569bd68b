"""Real processes on shaped links: seconds a step and bytes on the interfaces, against a simulated run's prediction.

Each node is a process of `fit(backend="process")` in a network namespace of its own, with a cable to a switch, which
`tc tbf` limits in both directions. A plain transfer, in which every node sends to the next, gives the bandwidth and
latency of the links and the bytes that protocols add; the same run without a limit, just before, gives the compute
seconds, those outside of what the ledger counts. Seconds are medians over rounds of H steps. Needs root, and iproute2.

    python tests/benchmarks/bench_network.py [--nodes 2 4] [--megabits 20 50 200]
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
import torch.distributed as dist
from links import CABLE, address, linked, shape
from tabulate import tabulate
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import TensorDataset

from vsim import Trainer
from vsim.network import Network, timeline
from vsim.processes.distributed import ProcessCollectives
from vsim.strategy import DeMoStrategy, DiLoCoStrategy, SimpleReduceStrategy, SPARTAStrategy, Strategy

H = 4
# Communication takes much longer than computation, which other work on this machine disturbs.
STRATEGIES: dict[str, Callable[[], Strategy]] = {
    "AllReduce": lambda: SimpleReduceStrategy(inner_optim="sgd", lr=1e-3),
    "DiLoCo": lambda: DiLoCoStrategy(inner_optim="sgd", H=H, lr=1e-3),
    "SPARTA": lambda: SPARTAStrategy(inner_optim="sgd", p_sparta=0.5, lr=1e-3),
    "DeMo": lambda: DeMoStrategy(compression_topk=512, lr=1e-3),
}
ROUNDS = 10  # of H steps, after one to warm up
TRANSFERS, PINGS = 5, 20


def model() -> nn.Module:
    """Weights in whole tiles of DeMo's, 1.3 MB."""
    torch.manual_seed(0)
    sizes = (64, 512, 512, 64)
    return nn.Sequential(*(nn.Linear(a, b, bias=False) for a, b in pairwise(sizes)))


def train(strategy: Strategy, num_nodes: int, **options: Any) -> Trainer:
    """The run: in the simulator, or as a rank of the real one."""
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(512, 64, generator=generator), torch.randint(0, 64, (512,), generator=generator)
    trainer = Trainer(model(), TensorDataset(x, y), loss_fn=functional.cross_entropy)
    trainer.fit(
        strategy=strategy, num_nodes=num_nodes, max_steps=(1 + ROUNDS) * H, batch_size=4, progress=False, **options
    )
    return trainer


class Measured(NamedTuple):
    """A strategy on links of one rate: what a step took and sent, and what was foretold."""

    num_nodes: int
    megabits: float
    strategy: str
    seconds: float
    predicted_seconds: float
    wire_bytes: float  # of the busiest node, without protocol overhead
    ledger_bytes: float
    compute_seconds: float
    goodput: float  # of the plain transfer, bit/s
    latency: float

    @property
    def errors(self) -> tuple[float, float]:
        """Of seconds and bytes: what was foretold, relative to what was measured, less 1."""
        return self.predicted_seconds / self.seconds - 1, self.ledger_bytes / self.wire_bytes - 1


def measure(num_nodes: int, rates: Sequence[float]) -> list[Measured]:
    """Train every strategy on links of each rate in Mbit/s."""
    with linked(num_nodes) as nodes, tempfile.TemporaryDirectory(prefix="vsim-") as folder:
        command = [sys.executable, __file__, "--rank", folder, "--namespaces", *nodes, "--megabits", *map(str, rates)]
        world = {"WORLD_SIZE": str(num_nodes), "MASTER_ADDR": address(0), "MASTER_PORT": "29500"}
        environment = {**os.environ, **world, "GLOO_SOCKET_IFNAME": CABLE, "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(["ip", "netns", "exec", node, *command], env={**environment, "RANK": str(rank)})
            for rank, node in enumerate(nodes)
        ]
        try:
            for process in ranks:
                assert process.wait(timeout=600) == 0
        finally:
            for process in ranks:
                process.kill()
                process.wait()
        files = [Path(folder) / f"{rank}.json" for rank in range(num_nodes)]
        limited = zip(*(json.loads(file.read_text()) for file in files), strict=True)
    return [
        _measured(num_nodes, megabits, name, at_rate)
        for megabits, at_rate in zip(rates, limited, strict=True)
        for name in STRATEGIES
    ]


def _measured(num_nodes: int, megabits: float, name: str, at_rate: Any) -> Measured:
    seconds, _, sent = _steps(at_rate, "runs", name)
    own, communicating, _ = _steps(at_rate, "unlimited", name)
    compute = _median((own - communicating).amax(0))  # of the node for which the others wait
    plain = {
        key: statistics.fmean(node[key] for node in at_rate) for key in ("seconds", "bytes", "sent", "ping", "small")
    }
    network = Network(8 * plain["bytes"] / plain["seconds"], plain["ping"])
    simulated = train(STRATEGIES[name](), num_nodes)
    ends = torch.from_numpy(timeline(simulated, network, compute).seconds)
    events = [event for event in simulated.ledger if event.step > H]
    return Measured(
        num_nodes,
        megabits,
        name,
        _median(seconds.mean(0)),
        _median(ends.diff()[H:]),
        (sent.mean(1).amax().item() - plain["small"]) * plain["bytes"] / plain["sent"],
        sum(event.wire_bytes for event in events) / (ROUNDS * H),
        compute,
        8 * plain["bytes"] / plain["seconds"],
        plain["ping"],
    )


def _steps(nodes: Any, runs: str, name: str) -> tuple[Tensor, ...]:
    """Return seconds, seconds in collectives, and bytes sent, by node and step, (K, T) each."""
    return torch.tensor([node[runs][name] for node in nodes], dtype=torch.float64).diff(dim=1).unbind(-1)


def _median(steps: Tensor) -> float:
    """What a step takes in the median round."""
    return statistics.median(steps.view(ROUNDS, H).mean(1).tolist())


# One node, in its namespace ------------------------------------------------------------------------------------------


class Rank:
    def __init__(self, nodes: Sequence[str]) -> None:
        dist.init_process_group("gloo")
        self.nodes, self.rank = nodes, dist.get_rank()
        self.communicating = 0.0
        ProcessCollectives._issue = self._timed_issue(ProcessCollectives._issue)  # type: ignore[method-assign]

    def _timed_issue(self, issue: Callable[..., Callable[[], None]]) -> Callable[..., Callable[[], None]]:
        def timed(collectives: ProcessCollectives, *arguments: Any) -> Callable[[], None]:
            if not collectives._billed:  # the losses, which all wait for in every step whatever the strategy
                return issue(collectives, *arguments)
            return self._timed(self._timed(issue)(collectives, *arguments))

        return timed

    def _timed(self, collective: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(collective)
        def timed(*arguments: Any, **options: Any) -> Any:
            started = time.perf_counter()
            try:
                return collective(*arguments, **options)
            finally:
                self.communicating += time.perf_counter() - started

        return timed

    def sent(self) -> int:
        return int(Path(f"/sys/class/net/{CABLE}/statistics/tx_bytes").read_text())

    def limit(self, megabits: float | None) -> None:
        dist.barrier()
        if self.rank == 0:
            shape(self.nodes, megabits)
        dist.barrier()

    def measure(self, megabits: float) -> dict[str, Any]:
        """The plain transfer on links of this rate, and all runs, each without a limit and with."""
        self.limit(megabits)
        num_bytes = int(megabits * 1e6 / 16)  # half a second's
        before = self.sent()
        seconds = statistics.median(self.exchange(num_bytes) for _ in range(TRANSFERS))
        dist.barrier()  # until all has arrived
        sent = (self.sent() - before) / TRANSFERS
        ping = statistics.median(self.exchange(1) for _ in range(PINGS))
        before, losses = self.sent(), torch.zeros(2, dtype=torch.float64)
        for _ in range(PINGS):  # the losses, of which no ledger tells
            dist.all_gather([torch.empty_like(losses) for _ in self.nodes], losses)
        small = (self.sent() - before) / PINGS
        measured = {"bytes": num_bytes, "sent": sent, "seconds": seconds, "ping": ping, "small": small}
        runs: dict[str, Any] = {"unlimited": {}, "runs": {}}
        for name, make in STRATEGIES.items():
            for kind, rate in ("unlimited", None), ("runs", megabits):  # at a time, as the machine's speed drifts
                self.limit(rate)
                runs[kind][name] = self.run(make())
        return {**measured, **runs}

    def exchange(self, num_bytes: int) -> float:
        """Send to the next node around the ring, receive from the one before; return the seconds."""
        ahead, behind = ((self.rank + by) % len(self.nodes) for by in (1, -1))
        receiving = dist.irecv(torch.empty(num_bytes, dtype=torch.uint8), behind)
        dist.barrier()
        started = time.perf_counter()
        sending = dist.isend(torch.zeros(num_bytes, dtype=torch.uint8), ahead)
        for work in (receiving, sending):
            assert work is not None
            work.wait()
        return time.perf_counter() - started

    def run(self, strategy: Strategy) -> list[list[float]]:
        """Train; return the time, the seconds in collectives and the bytes sent so far after each step that counts."""
        marks = []

        def mark(step: int, loss: float) -> None:
            if step >= H:
                marks.append([time.perf_counter(), self.communicating, self.sent()])

        train(strategy, len(self.nodes), backend="process", threads_per_process=1, train_loss_hook=mark)
        return marks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--megabits", type=float, nargs="+", default=[20, 50, 200])
    parser.add_argument("--rank", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--namespaces", nargs="+", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.rank is not None:
        rank = Rank(options.namespaces)
        measured = [rank.measure(megabits) for megabits in options.megabits]
        (options.rank / f"{rank.rank}.json").write_text(json.dumps(measured))
        return dist.destroy_process_group()
    rows = [
        [
            *(m.num_nodes, m.megabits, m.strategy),
            *(1e3 * m.seconds, 1e3 * m.predicted_seconds, 100 * m.errors[0]),
            *(m.wire_bytes / 1e3, m.ledger_bytes / 1e3, 100 * m.errors[1]),
            *(1e3 * m.compute_seconds, m.goodput / 1e6, 1e3 * m.latency),
        ]
        for num_nodes in options.nodes
        for m in measure(num_nodes, options.megabits)
    ]
    header = ["K", "Mbit/s", "strategy", "ms/step", "predicted", "off by %", "kB/step", "ledger", "off by %"]
    print(tabulate(rows, [*header, "compute ms", "goodput", "latency ms"], floatfmt=".1f", intfmt=""))
    return None


if __name__ == "__main__":
    main()
